"""Scan the files of a topic on this machine for records of some keys.

The scan covers every file with batches below a partition's directory: segments, replaced segments
that wait for deletion, ledgers of views, and the inputs and outputs of remote compactions.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from config import exit_codes
from pipeline.errors import JobError
from storage.errors import CorruptBatchError
from storage.format.batch import walk_headers

CHUNK_BYTES: Final = 64 << 20  # read at a time; a larger batch is read whole
OFFSET_BYTES: Final = 8
# Another process may be writing a file that ends in an incomplete batch; it takes less than this
# for the next bytes.
WRITE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class FileFinding:
    """A file with records of the keys that have a value and lie below the limit."""

    path: str
    partition: int
    records: int


def scan_files(
    data: str, topic: str, below: Mapping[int, int], keys: Sequence[bytes]
) -> tuple[int, list[FileFinding]]:
    """Scan the files of some partitions; return the number of files and the findings.

    `below` is the exclusive end offset of the search in each partition. Raises JobError.
    """
    count, result = 0, []
    for partition in sorted(below):
        for path in _log_files(partition_folder(data, topic, partition)):
            try:
                records = _count_records(path, below[partition], keys)
            except FileNotFoundError:
                continue  # deleted meanwhile
            except (CorruptBatchError, OSError) as error:
                raise JobError(f"cannot read {path}: {error}") from error
            count += 1
            if records:
                result.append(FileFinding(str(path), partition, records))
    return count, result


def partition_folder(data: str, topic: str, partition: int) -> Path:
    """Return the folder of a partition. Raises JobError (USAGE) if it is not in `data`."""
    folder = Path(data) / f"{topic}-{partition}"
    if not folder.is_dir():
        raise JobError(
            f"{folder} does not exist; --data must name the broker's data directory, not {data}",
            exit_codes.USAGE,
        )
    return folder


def has_partition(data: str, topic: str, partition: int) -> bool:
    """Return whether the folder of a partition is in `data`."""
    return (Path(data) / f"{topic}-{partition}").is_dir()


def _log_files(folder: Path) -> Iterator[Path]:
    for home, _, names in os.walk(folder):
        for name in sorted(names):
            if ".log" in name:
                yield Path(home) / name


def _count_records(path: Path, below: int, keys: Sequence[bytes]) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    from pipeline.records.decode import Selection, decode_batches

    requested = pa.array(keys, pa.binary())
    selection = Selection(topic="", partition=0, columns=("key", "value", "offset"))
    count = 0
    with path.open("rb") as file:
        for data in _whole_batches(file, below):
            for rows in decode_batches(data, selection):
                owned = pc.and_(
                    pc.is_in(rows.column("key"), value_set=requested),
                    pc.and_(rows.column("value").is_valid(), pc.less(rows.column("offset"), below)),
                )
                count += pc.sum(owned.fill_null(False)).as_py() or 0
    return count


def _whole_batches(file: BinaryIO, below: int) -> Iterator[bytes]:
    """Yield the batches of a file. Raises CorruptBatchError."""
    rest = b""
    while True:
        chunk = file.read(CHUNK_BYTES)
        if not chunk and _may_start_below(rest, below):
            time.sleep(WRITE_SECONDS)
            chunk = file.read(CHUNK_BYTES)
            if not chunk:
                reason = f"the last {len(rest)} bytes are not a whole batch"
                raise CorruptBatchError(reason, file.tell() - len(rest))
        if not chunk:
            return
        data = rest + chunk
        end = 0
        for at, header in walk_headers(data):
            end = at + header.size_bytes
        if end:
            yield data[:end]
        rest = data[end:]


def _may_start_below(rest: bytes, below: int) -> bool:
    """Return whether an incomplete batch may begin below an offset: its first field says so."""
    return len(rest) >= OFFSET_BYTES and int.from_bytes(rest[:OFFSET_BYTES], "big") < below
