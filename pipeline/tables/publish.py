"""Publishing a DataFrame as a table: written beside its place, then put there in one step.

Rules
- Spark writes Parquet into a hidden folder beside the table. Nobody sees a table half made; what a
  job that failed has left is removed by it, or by the next one to this place.
- What is there is refused, or replaced where that was asked for, and only what is a table. Delta
  and Iceberg replace in a commit of their own, and keep their history; a folder of Parquet is
  renamed away and the new one into its place, with a moment between the two.
- The place is a folder that this process and the executors share. That all rows arrived is seen in
  the files.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from config import exit_codes
from pipeline.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Format = Literal["parquet", "delta", "iceberg"]
FORMATS: Final[tuple[Format, ...]] = ("parquet", "delta", "iceberg")
NOTES: Final = "_varve.json"  # beside Parquet's files: what the table is of; hidden from readers
_MICROS: Final = "spark.sql.parquet.outputTimestampType"


@dataclass(frozen=True, slots=True)
class Published:
    """A table that is there."""

    path: str
    format: str
    rows: int
    files: int
    size_bytes: int


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
    there = format_of(path)
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


def format_of(path: Path) -> Format | None:
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


def publish(
    frame: "DataFrame",
    place: Target,
    notes: Mapping[str, Any],
    *,
    versions: Mapping[str, int] | None = None,
    before: Callable[[], None] | None = None,
) -> Published:
    """Write the frame and make it the table at `place`.

    `notes` are kept with the table. `versions`: Delta's application transactions, by id. `before`
    is called when all is written and nothing is seen yet; what it raises leaves the place as it
    was. Raises JobError, OSError, PySparkException.
    """
    with _beside(place.path) as staging:
        data = staging / "data"
        with _micros(frame):
            frame.write.parquet(str(data))
        files = sorted(data.glob("*.parquet"))
        rows = _rows_in(files)
        if not files:
            raise JobError(
                f"the executors wrote nothing into {place.path.parent}: it has to be a folder that"
                " they share with this process"
            )
        if before is not None:
            before()
        size_bytes = sum(one.stat().st_size for one in files)
        if place.format == "delta":
            from pipeline.tables.delta import publish_delta

            publish_delta(data, place, notes, versions or {})
        elif place.format == "iceberg":
            from pipeline.tables.iceberg import publish_iceberg

            publish_iceberg(data, place, notes)
        else:
            (data / NOTES).write_text(json.dumps(dict(notes), indent=2) + "\n")
            swap_in(data, place.path, staging)
    return Published(str(place.path), place.format, rows, len(files), size_bytes)


def swap_in(folder: Path, path: Path, staging: Path) -> None:
    """Make `folder` what stands at `path`; what stood there goes."""
    if path.exists():
        old = staging / "old"
        path.rename(old)
        try:
            folder.rename(path)
        except OSError:
            old.rename(path)
            raise
    else:
        folder.rename(path)


@contextmanager
def write_beside(frame: "DataFrame", path: Path) -> Iterator[Path]:
    """A folder of Parquet with the frame's rows, beside a table, for the length of a block."""
    with _beside(path) as staging:
        with _micros(frame):
            frame.write.parquet(str(staging / "data"))
        yield staging / "data"


def _rows_in(files: list[Path]) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(one).num_rows for one in files)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A hidden folder beside a table, on the same file system; gone at the end."""
    for left in path.parent.glob(f".{path.name}.varve-*"):
        if not _is_alive(left):
            shutil.rmtree(left, ignore_errors=True)
    staging = path.parent / f".{path.name}.varve-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_alive(staging: Path) -> bool:
    """Whether the process that made a folder may still be at work on this machine."""
    number = staging.name.rpartition(".varve-")[2].partition("-")[0]
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _micros(frame: "DataFrame") -> Iterator[None]:
    """Times as other readers than Spark know them, for the length of a block."""
    conf = frame.sparkSession.conf
    before = conf.get(_MICROS, None)
    conf.set(_MICROS, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        if before is None:
            conf.unset(_MICROS)
        else:
            conf.set(_MICROS, before)
