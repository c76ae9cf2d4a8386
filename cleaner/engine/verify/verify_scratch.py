"""The scratch file of a verification whose keys do not fit into the map.

Rules
- The file only grows. It has sorted pieces of rows (passes/shards.py), then runs of ascending
  offsets. Their positions are in memory only: 8 bytes for each piece and shard, 16 for each run.
  The file is never synced.
- Its name (filenames.py) makes it part of the job's files, which are removed together.
- Memory: two pieces of rows, and one of a run.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from cleaner.engine.kernels.compile import Bytes, Ints, Words
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.kernels.passes.bitmap import set_bits
from cleaner.engine.kernels.passes.shards import count_by_shard, sort_by_shard
from cleaner.engine.offset_map import SLOT_BYTES
from cleaner.job import CleanAbortedError, CleanJob, JobControl
from storage.env import Env, File
from storage.format import filenames

WINDOW_OFFSETS: Final = 1 << 27  # of the bitmap at a time: 16 MiB
ROWS_PIECE: Final = 1 << 18  # rows sorted at a time: 6 MiB, and as much for the sorted ones
OFFSETS_PIECE: Final = 1 << 18  # offsets or slots read at a time: 2 MiB
_WORD: Final = 8


class Scratch:
    """The file; created with the first byte, removed by `close`."""

    def __init__(self, env: Env, job: CleanJob, control: JobControl) -> None:
        base_offset = job.groups[0][0].base_offset
        name = filenames.scratch_name(base_offset, job.job_id)
        self._env = env
        self._path = f"{job.outputs}/{name}"
        self._control = control
        self._file: File | None = None
        self.size_bytes = 0

    def append(self, words: Words | Ints) -> None:
        """Append words. Raises CleanAbortedError, OSError."""
        if self._control.aborted():
            raise CleanAbortedError
        data = words.view(np.uint8).data
        self._control.write_bytes(len(data))
        if self._file is None:
            self._file = self._env.open(self._path, create=True, write=True, truncate=True)
        self._file.pwrite(data, self.size_bytes)
        self.size_bytes += len(data)

    def read(self, words: Words | Ints, position: int) -> None:
        """Read words at a position. Raises CleanAbortedError, OSError."""
        if self._control.aborted():
            raise CleanAbortedError
        assert self._file is not None
        data = words.view(np.uint8).data
        self._control.read_bytes(len(data))
        actual = self._file.pread_into(data, position)
        assert actual == len(data)

    def close(self) -> None:
        """Remove the file. Raises OSError."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
            self._env.unlink(self._path)


class Rows:
    """Rows by shard, in the order in which they were added."""

    def __init__(self, scratch: Scratch, shards: int) -> None:
        self._scratch = scratch
        self._pieces: list[tuple[int, Ints]] = []  # position, first row of each shard and the end
        self._counts: Ints = np.zeros(shards, dtype=np.int64)
        self._sorted: Words = np.empty(0, dtype=np.uint64)

    def add(self, rows: Words, count: int) -> None:
        """Add the first `count` rows, except free slots. Raises CleanAbortedError, OSError."""
        if len(self._sorted) == 0 and count:
            self._sorted = np.empty(ROWS_PIECE * SLOT_WORDS, dtype=np.uint64)
        for begin in range(0, count, ROWS_PIECE):
            end = min(begin + ROWS_PIECE, count)
            self._counts.fill(0)
            count_by_shard(rows, begin, end, self._counts)
            places = np.concatenate(([0], np.cumsum(self._counts)))
            sort_by_shard(rows, begin, end, places[:-1].copy(), self._sorted)
            self._pieces.append((self._scratch.size_bytes, places))
            self._scratch.append(self._sorted[: int(places[-1]) * SLOT_WORDS])

    def count(self, shard: int) -> int:
        """Return the number of rows of a shard."""
        return sum(int(places[shard + 1] - places[shard]) for _, places in self._pieces)

    def of(self, shard: int) -> Iterator[tuple[Words, int]]:
        """Yield a shard's rows by piece as (rows, count), each valid until the next one.

        Raises CleanAbortedError, OSError.
        """
        for position, places in self._pieces:
            first, count = int(places[shard]), int(places[shard + 1] - places[shard])
            if count:
                rows = self._sorted[: count * SLOT_WORDS]
                self._scratch.read(rows, position + first * SLOT_BYTES)
                yield rows, count


class LiveOffsets:
    """Offsets of surviving records, each in one run. A SurvivorSource (context.py)."""

    def __init__(self, scratch: Scratch) -> None:
        self.keyless_met = False
        self._scratch = scratch
        self._runs: list[tuple[int, int]] = []  # position, offsets
        self._last = -1  # of the last run
        self._piece: Ints = np.empty(OFFSETS_PIECE, dtype=np.int64)

    def add(self, offsets: Ints) -> None:
        """Add ascending offsets, as a new run or as part of the last one.

        Raises CleanAbortedError, OSError.
        """
        if len(offsets) == 0:
            return
        position, count = self._scratch.size_bytes, 0
        if self._runs and self._last < offsets[0]:
            position, count = self._runs.pop()
            assert position + count * _WORD == self._scratch.size_bytes
        self._scratch.append(offsets)
        self._runs.append((position, count + len(offsets)))
        self._last = int(offsets[-1])

    def add_map(self, table: Words, slots: int) -> None:
        """Add the offsets in the first `slots` slots. Raises CleanAbortedError, OSError."""
        for slot in range(0, slots, OFFSETS_PIECE):
            end = min(slot + OFFSETS_PIECE, slots)
            values = table[slot * SLOT_WORDS + 2 : end * SLOT_WORDS : SLOT_WORDS]
            living = values[values != 0].view(np.int64) - 1
            living.sort()
            self.add(living)

    def window(self, first: int, last: int) -> tuple[int, int]:
        """See SurvivorSource."""
        return first, max(first + WINDOW_OFFSETS, last + 1)

    def mark(self, bits: Bytes, first: int, end: int) -> None:
        """See SurvivorSource. Raises CleanAbortedError, OSError."""
        for position, total in self._runs:
            at = self._place(position, total, first)
            while at < total:
                count = min(total - at, len(self._piece))
                self._scratch.read(self._piece[:count], position + at * _WORD)
                inside = int(np.searchsorted(self._piece[:count], end))
                set_bits(bits, self._piece, inside, first)
                if inside < count:
                    break
                at += count

    def _place(self, position: int, total: int, offset: int) -> int:
        """Return the index in a run of the first offset that is at least `offset`."""
        begin, end = 0, total
        while end - begin > len(self._piece):
            middle = (begin + end) // 2
            self._scratch.read(self._piece[:1], position + middle * _WORD)
            if self._piece[0] < offset:
                begin = middle
            else:
                end = middle
        piece = self._piece[: end - begin]
        self._scratch.read(piece, position + begin * _WORD)
        return begin + int(np.searchsorted(piece, offset))
