"""Files of rows between two stages: key fingerprints with the offsets of their records.

A file has the rows of one shard, 24 bytes each, in insertion order: from the log start offset on,
spill after spill. See passes/shards.py.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from cleaner.engine.kernels.codecs.crc import crc32c_extended
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.compile import Bytes, Ints, Words
from cleaner.engine.kernels.passes.shards import count_by_shard, sort_by_shard
from cleaner.engine.key_map.map_size import SLOT_BYTES
from pipeline.stages.tasks import RowFile
from storage.env import Env, File

ROW_BYTES: Final = SLOT_BYTES
# Rows that are sorted by shard at a time: 6 MiB, and as much for the sorted copy.
CHUNK_ROWS: Final = 1 << 18


class CorruptRowsError(Exception):
    """A file of rows is damaged."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: the checksum of the rows does not match")


class RowWriter:
    """Writes rows to files in one folder, one file for each shard that has rows."""

    def __init__(self, env: Env, directory: str, label: str, shards: int) -> None:
        self._env = env
        self._directory = directory
        self._label = label
        self._counts: Ints = np.zeros(shards, dtype=np.int64)
        self._out: Bytes = np.empty(CHUNK_ROWS * ROW_BYTES + SLACK_BYTES, dtype=np.uint8)
        self._files: dict[int, File] = {}
        self._written: dict[int, RowFile] = {}

    def add(self, rows: Words, count: int) -> None:
        """Append the first `count` rows without free slots. Raises OSError."""
        for begin in range(0, count, CHUNK_ROWS):
            self._add_chunk(rows, begin, min(begin + CHUNK_ROWS, count))

    def _add_chunk(self, rows: Words, begin: int, end: int) -> None:
        counts = self._counts
        counts.fill(0)
        count_by_shard(rows, begin, end, counts)
        places = np.cumsum(counts) - counts
        out: Words = self._out[: CHUNK_ROWS * ROW_BYTES].view(np.uint64)
        sort_by_shard(rows, begin, end, places.copy(), out)
        for shard in np.flatnonzero(counts).tolist():
            self._append(shard, int(places[shard]) * ROW_BYTES, int(counts[shard]))

    def _append(self, shard: int, at: int, count: int) -> None:
        before = self._written.get(shard)
        if before is None:
            name = f"{self._label}-{shard}.rows"
            path = f"{self._directory}/{name}"
            self._files[shard] = self._env.open(path, create=True, write=True, truncate=True)
            before = RowFile(name, 0, 0)
        size = count * ROW_BYTES
        self._files[shard].pwrite(self._out.data[at : at + size], before.rows * ROW_BYTES)
        crc = int(crc32c_extended(before.crc, self._out, at, at + size))
        self._written[shard] = RowFile(before.name, before.rows + count, crc)

    def close(self) -> dict[str, RowFile]:
        """Close the files; return them by shard."""
        while self._files:
            self._files.popitem()[1].close()
        return {str(shard): row_file for shard, row_file in sorted(self._written.items())}


def read_rows(env: Env, path: str, row_file: RowFile) -> Iterator[tuple[Words, int]]:
    """Yield (rows, count) of a file in pieces; each piece is valid until the next.

    Raises CorruptRowsError, at the latest after the last piece, and OSError.
    """
    buffer: Bytes = np.empty(CHUNK_ROWS * ROW_BYTES + SLACK_BYTES, dtype=np.uint8)
    file = env.open(path)
    crc = 0
    try:
        if file.size() != row_file.rows * ROW_BYTES:
            raise CorruptRowsError(path)
        for begin in range(0, row_file.rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, row_file.rows - begin)
            size = count * ROW_BYTES
            if file.pread_into(buffer.data[:size], begin * ROW_BYTES) != size:
                raise CorruptRowsError(path)
            crc = int(crc32c_extended(crc, buffer, 0, size))
            yield buffer[: CHUNK_ROWS * ROW_BYTES].view(np.uint64), count
    finally:
        file.close()
    if crc != row_file.crc:
        raise CorruptRowsError(path)
