"""The files of a topic on this machine, and whether records of some keys are still in them.

Everything below a partition's folder is looked at that holds batches: segments, those that were
replaced and wait to be removed, ledgers of views, inputs and outputs of runs.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from pipeline.errors import JobError
from storage.errors import CorruptBatchError
from storage.format.batch import walk_headers

CHUNK_BYTES: Final = 64 << 20  # read at a time; one larger batch is read whole


@dataclass(frozen=True, slots=True)
class FileFinding:
    """Records of the keys, with a value, below the given offset."""

    path: str
    partition: int
    records: int


def scan_files(
    data: str, topic: str, below: Mapping[int, int], keys: Sequence[bytes]
) -> tuple[int, list[FileFinding]]:
    """Look through the files of some partitions -> how many there were, and what was found.

    `below`: of each partition, the offset from which on nothing is looked for. Raises JobError.
    """
    count, result = 0, []
    for partition in sorted(below):
        folder = Path(data) / f"{topic}-{partition}"
        if not folder.is_dir():
            raise JobError(f"{folder} is not there: is {data} the broker's data directory?")
        for path in _log_files(folder):
            try:
                records = _records_in(path, below[partition], keys)
            except FileNotFoundError:
                continue  # it went away meanwhile
            except (CorruptBatchError, OSError) as error:
                raise JobError(f"{path} cannot be looked through: {error}") from error
            count += 1
            if records:
                result.append(FileFinding(str(path), partition, records))
    return count, result


def _log_files(folder: Path) -> Iterator[Path]:
    for home, _, names in os.walk(folder):
        for name in sorted(names):
            if ".log" in name:
                yield Path(home) / name


def _records_in(path: Path, below: int, keys: Sequence[bytes]) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    from pipeline.records.decode import Selection, decode_batches

    requested = pa.array(keys, pa.binary())
    selection = Selection(topic="", partition=0, columns=("key", "value", "offset"))
    count = 0
    with path.open("rb") as file:
        for data in _whole_batches(file):
            for rows in decode_batches(data, selection):
                owned = pc.and_(
                    pc.is_in(rows.column("key"), value_set=requested),
                    pc.and_(rows.column("value").is_valid(), pc.less(rows.column("offset"), below)),
                )
                count += pc.sum(owned.fill_null(False)).as_py() or 0
    return count


def _whole_batches(file: BinaryIO) -> Iterator[bytes]:
    rest = b""
    while chunk := file.read(CHUNK_BYTES):
        data = rest + chunk
        end = 0
        for at, header in walk_headers(data):
            end = at + header.size_bytes
        if end:
            yield data[:end]
        rest = data[end:]
