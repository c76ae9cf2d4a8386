"""Publish a DataFrame as a table: write it next to its target, then move it there in one step.

Rules
- Spark writes Parquet into a hidden directory next to the table, so no reader sees a partial table.
  A failed job removes its directory, or the next job with this target does
  (pipeline/tables/staging.py).
- Only a table that existed when the job began is replaced, and only with `overwrite`. Delta and
  Iceberg replace it in a commit and keep their history. A Parquet directory is swapped by two
  renames; between them the table is missing for a moment. If the job is killed there, the next job
  with this target puts the old table back.
- This process and the executors share the target directory. The row count is read from the files.
"""

import errno
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipeline.errors import JobError
from pipeline.tables.delta import publish_delta
from pipeline.tables.iceberg import publish_iceberg
from pipeline.tables.staging import DATA, OLD, check_intact, staging_folder
from pipeline.tables.target import NOTES, Target, created_meanwhile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MICROS: Final = "spark.sql.parquet.outputTimestampType"


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A published table."""

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
) -> PublishedTable:
    """Write the frame and make it the table at `place`.

    `notes` are stored with the table. `versions` are Delta application transactions by id. `before`
    is called after the data is written and before it is visible; if it raises, the target does not
    change. Raises JobError, OSError, PySparkException.
    """
    with write_beside(frame, place.path) as data:
        files = sorted(data.glob("*.parquet"))
        rows = _count_rows(files)
        if not files:
            raise JobError(
                f"the executors wrote no files to {place.path.parent}; use a directory that they"
                " share with this process"
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
            swap_in(data, place, data.parent)
    return PublishedTable(str(place.path), place.format, rows, len(files), size_bytes)


def swap_in(folder: Path, place: Target, staging: Path) -> None:
    """Replace the table at `place` by `folder`. Raises JobError, OSError."""
    path = place.path
    if not place.exists:
        try:
            folder.rename(path)  # replaces an empty directory, but nothing else
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise created_meanwhile(path) from error
            raise
    elif path.exists():
        old = staging / OLD
        path.rename(old)
        try:
            folder.rename(path)
        except OSError as error:
            if path.exists():
                raise created_meanwhile(path) from error
            old.rename(path)
            raise
    else:
        folder.rename(path)


@contextmanager
def write_beside(frame: "DataFrame", path: Path) -> Iterator[Path]:
    """Write the rows as Parquet to a directory next to a table, for the duration of a block.

    Raises JobError, OSError, PySparkException.
    """
    with staging_folder(path) as staging:
        data = staging / DATA
        with _micros(frame):
            frame.write.parquet(str(data))
        check_intact(staging)
        yield data


def _count_rows(files: list[Path]) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for path in files)


@contextmanager
def _micros(frame: "DataFrame") -> Iterator[None]:
    """Write timestamps in microseconds, which all readers know, within the block."""
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
