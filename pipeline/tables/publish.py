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
from typing import TYPE_CHECKING, Any, Final

from pipeline.errors import JobError
from pipeline.tables.delta import publish_delta
from pipeline.tables.iceberg import publish_iceberg
from pipeline.tables.target import NOTES, Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MICROS: Final = "spark.sql.parquet.outputTimestampType"


@dataclass(frozen=True, slots=True)
class Published:
    """A table that is there."""

    path: str
    format: str
    rows: int
    files: int
    size_bytes: int


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
        size_bytes = sum(path.stat().st_size for path in files)
        if place.format == "delta":
            publish_delta(data, place, notes, versions or {})
        elif place.format == "iceberg":
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

    return sum(pq.read_metadata(path).num_rows for path in files)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A hidden folder beside a table, on the same file system; gone at the end."""
    for file_path in path.parent.glob(f".{path.name}.varve-*"):
        if not _is_alive(file_path):
            shutil.rmtree(file_path, ignore_errors=True)
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
