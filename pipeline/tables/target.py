"""Where a table is published: a folder, checked before the work begins."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from config import exit_codes
from pipeline.errors import JobError

Format = Literal["parquet", "delta", "iceberg"]
FORMATS: Final[tuple[Format, ...]] = ("parquet", "delta", "iceberg")
NOTES: Final = "_varve.json"  # beside Parquet's files: what the table is of; hidden from readers


@dataclass(frozen=True, slots=True)
class Target:
    """Where a table goes, checked: see `target`."""

    path: Path
    format: Format
    exists: bool


def target(out: str, table_format: Format, *, overwrite: bool) -> Target:
    """The place of a table. Raises JobError (USAGE) where nothing can be put there."""
    if "://" in out:
        raise JobError(
            f"{out}: tables are published into a folder; copy it from there", exit_codes.USAGE
        )
    path = Path(os.path.abspath(os.path.expanduser(out)))
    if not path.parent.is_dir():
        raise JobError(f"{path.parent} is no folder", exit_codes.USAGE)
    if table_format == "iceberg":
        _need_iceberg()
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return Target(path, table_format, exists=False)
    there = detect_format(path)
    if not overwrite:
        raise JobError(f"{path} is there already; --overwrite replaces it", exit_codes.USAGE)
    if there is None:
        raise JobError(f"{path} is there, and is no table: it is left alone", exit_codes.USAGE)
    if there != table_format:
        raise JobError(
            f"{path} is a table in {there}; it is not replaced by one in {table_format}",
            exit_codes.USAGE,
        )
    return Target(path, table_format, exists=True)


def detect_format(path: Path) -> Format | None:
    """The format of the table in a folder; None: it is none of ours."""
    if not path.is_dir():
        return None
    if (path / "_delta_log").is_dir():
        return "delta"
    if (path / "catalog.db").is_file():
        return "iceberg"
    if (path / NOTES).is_file() or (path / "_SUCCESS").is_file():
        return "parquet"
    return None


def _need_iceberg() -> None:
    try:
        import pyiceberg.catalog.sql  # noqa: F401  asked for before the work, not behind it
    except ImportError as error:
        raise JobError(
            "--format iceberg needs more packages: pip install 'varve[iceberg]'", exit_codes.USAGE
        ) from error
