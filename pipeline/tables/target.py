"""The directory of a table, checked before the work starts."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from config import exit_codes
from config.extras import install_command
from pipeline.errors import JobError
from pipeline.tables.staging import remove_abandoned

Format = Literal["parquet", "delta", "iceberg"]
FORMATS: Final[tuple[Format, ...]] = ("parquet", "delta", "iceberg")
NOTES: Final = "_varve.json"  # metadata of a Parquet table; readers skip names with "_"


@dataclass(frozen=True, slots=True)
class Target:
    """A checked target directory: see `target`."""

    path: Path
    format: Format
    exists: bool


def target(out: str, table_format: Format, *, overwrite: bool) -> Target:
    """Check the directory of a table. Raises JobError (USAGE) if no table can be written there."""
    if "://" in out:
        raise JobError(
            f"{out} is a URL; write to a local directory and copy it from there", exit_codes.USAGE
        )
    # A swap would replace a symbolic link, and leave the table that it names.
    path = Path(os.path.realpath(os.path.expanduser(out)))
    if not path.parent.is_dir():
        raise JobError(f"{path.parent} is not a directory", exit_codes.USAGE)
    remove_abandoned(path)
    if table_format == "iceberg":
        _need_iceberg()
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return Target(path, table_format, exists=False)
    there = detect_format(path)
    if not overwrite:
        raise JobError(f"{path} already exists; use --overwrite to replace it", exit_codes.USAGE)
    if there is None:
        raise JobError(f"{path} exists and is not a table; it was not changed", exit_codes.USAGE)
    if there != table_format:
        raise JobError(
            f"{path} is a {there} table; --overwrite does not replace it with {table_format}",
            exit_codes.USAGE,
        )
    return Target(path, table_format, exists=True)


def created_meanwhile(path: Path) -> JobError:
    """Return the error of a job that finds something at its target that was not there before."""
    return JobError(
        f"{path} was created while this job ran, perhaps by another run of it; it was not changed."
        " To replace it, run the job again with --overwrite"
    )


def detect_format(path: Path) -> Format | None:
    """Return the format of the table in a directory, or None if it is not a table."""
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
        import pyiceberg.catalog.sql  # noqa: F401  fail before the work
    except ImportError as error:
        raise JobError(
            f"--format iceberg needs more packages: run {install_command('iceberg')}",
            exit_codes.USAGE,
        ) from error
