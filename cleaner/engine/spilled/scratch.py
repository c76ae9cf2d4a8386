"""The scratch files of a job: keys that do not fit into the map, or that workers exchange.

Rules
- A file only grows. It has sorted pieces of rows (passes/shards.py), then runs of ascending
  offsets. Their positions are in memory only: 8 bytes for each piece and shard, 16 for each run,
  as are checksums: 4 bytes for each 32 KiB.
  A file is never synced.
- Its name has a number instead of a base offset (filenames.py), which makes it part of the job's
  files: they are removed together, also at the next start after a crash.
- Every byte is charged to the job's budgets.
- Every byte that is read is compared with what was written (checksums.py): a wrong one would lose
  records, or bring old ones back.
- With a limit, the file takes at most `bytes_max` and at most half of the space that was free at
  first. It leaves the space that the largest group of the job may need for its output.
- Memory: two pieces of rows, and one of a run.
"""

import errno
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np

from cleaner.engine.kernels.compile import Bytes, Ints, Words
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.kernels.passes.bitmap import set_bits
from cleaner.engine.kernels.passes.shards import count_by_shard, sort_by_shard
from cleaner.engine.key_map.map_size import SLOT_BYTES
from cleaner.engine.spilled.checksums import BLOCK_BYTES, ChecksumList, Checksums
from cleaner.job import CleanAbortedError, CleanJob, JobControl
from storage.env import Env, File
from storage.errors import StorageError
from storage.format import filenames

WINDOW_OFFSETS: Final = 1 << 27  # of the bitmap at a time: 16 MiB
ROWS_PIECE: Final = 1 << 18  # rows sorted at a time: 6 MiB, and as much for the sorted ones
OFFSETS_PIECE: Final = 1 << 18  # offsets or slots read at a time: 2 MiB
_WORD: Final = 8


class NoScratchSpaceError(StorageError):
    """The keys need more scratch space than the limit or the disk allows."""


class DamagedScratchError(StorageError):
    """A scratch file does not contain what was written to it."""

    def __init__(self, path: str, position: int) -> None:
        super().__init__(f"{path} is damaged at byte {position}: its disk may be failing")
        self.path = path
        self.position = position


class Scratch:
    """A file; created with the first byte, removed by `close` unless `keep` comes first."""

    def __init__(
        self,
        env: Env,
        job: CleanJob,
        control: JobControl,
        *,
        number: int = 0,
        name: str | None = None,
        bytes_max: int | None = None,
        existing: Checksums | None = None,
    ) -> None:
        """Without `bytes_max`, only the disk limits the file. `existing`: of a complete file.

        `name` replaces the name of scratch file `number`.
        """
        if name is None:
            name = filenames.scratch_name(number, job.job_id)
        self._env = env
        self._path = f"{job.outputs}/{name}"
        self._folder = job.outputs
        self._control = control
        self._file: File | None = None
        self._checksums = ChecksumList(existing)
        self._bytes_max = bytes_max
        self._reserved_bytes = max(sum(source.size_bytes for source in g) for g in job.groups)

    @property
    def size_bytes(self) -> int:
        """Return the length of the file."""
        return self._checksums.size_bytes

    @property
    def checksums(self) -> Checksums:
        """Return the checksums of the file, for its readers."""
        return self._checksums.checksums

    def append(self, words: Words | Ints) -> None:
        """Append words. Raises CleanAbortedError, OSError; with a limit, NoScratchSpaceError."""
        if self._control.aborted():
            raise CleanAbortedError
        data = words.view(np.uint8).data
        if self._bytes_max is not None:
            self._check_space(len(data), self._bytes_max)
        self._control.write_bytes(len(data))
        try:
            if self._file is None:
                self._file = self._env.open(self._path, create=True, write=True, truncate=True)
            self._file.pwrite(data, self.size_bytes)
        except OSError as error:
            if self._bytes_max is None or error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            raise NoScratchSpaceError(f"the disk of {self._folder} is full") from error
        self._checksums.add(data)

    def _check_space(self, count: int, bytes_max: int) -> None:
        """Raise NoScratchSpaceError if `count` more bytes exceed the limits."""
        if self.size_bytes + count > bytes_max:
            raise NoScratchSpaceError(f"the keys take more than {bytes_max} bytes")
        free_bytes = self._env.free_bytes(self._folder)
        # As much as the file has already stays free: it takes at most half of the free space.
        if free_bytes - count < max(self._reserved_bytes, self.size_bytes + count):
            raise NoScratchSpaceError(
                f"{free_bytes} bytes are free on the disk of {self._folder},"
                f" after {self.size_bytes} bytes of keys"
            )

    def read(self, words: Words | Ints, position: int) -> None:
        """Read words at a position. Raises CleanAbortedError, OSError, DamagedScratchError."""
        if self._control.aborted():
            raise CleanAbortedError
        data = words.view(np.uint8).data
        done = 0
        while done < len(data):
            block, inside = divmod(position + done, BLOCK_BYTES)
            size = min(BLOCK_BYTES, self.size_bytes - block * BLOCK_BYTES)
            target = data[done : done + size - inside]
            if len(target) == size:
                self._read_block(block, target)
            else:
                whole = memoryview(bytearray(size))
                self._read_block(block, whole)
                target[:] = whole[inside : inside + len(target)]
            done += len(target)

    def _read_block(self, block: int, buffer: memoryview) -> None:
        """Fill the buffer with a whole block."""
        assert self._file is not None
        position = block * BLOCK_BYTES
        self._control.read_bytes(len(buffer))
        actual = self._file.pread_into(buffer, position)
        if actual < len(buffer) or not self._checksums.is_intact(block, buffer):
            raise DamagedScratchError(self._path, position)

    def open(self) -> None:
        """Open an existing file to read it. Raises OSError."""
        assert self._file is None
        self._file = self._env.open(self._path)

    def keep(self, name: str | None = None) -> None:
        """Close the file for those who read it later, under another name. Raises OSError."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
        if name is not None:
            renamed = f"{self._folder}/{name}"
            self._env.rename(self._path, renamed)
            self._path = renamed

    def close(self) -> None:
        """Remove the file. Raises OSError."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
            self._env.unlink(self._path)


Piece: TypeAlias = tuple[int, tuple[int, ...]]


class SpilledRows:
    """Rows by shard, in the order in which they were added."""

    def __init__(self, scratch: Scratch, shards: int, pieces: Sequence[Piece] = ()) -> None:
        """`pieces` are those of an existing file."""
        self._scratch = scratch
        # Position, first row of each shard and the end.
        self._pieces = [(position, np.array(places)) for position, places in pieces]
        self._counts: Ints = np.zeros(shards, dtype=np.int64)
        self._sorted: Words = np.empty(0, dtype=np.uint64)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Return where the rows are, for a reader of the file."""
        return tuple((position, tuple(places.tolist())) for position, places in self._pieces)

    def add(self, rows: Words, count: int) -> None:
        """Add the first `count` rows, except free slots. Raises what `Scratch.append` does."""
        if count:
            self._make_buffer()
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

        Raises CleanAbortedError, OSError, DamagedScratchError.
        """
        for position, places in self._pieces:
            first, count = int(places[shard]), int(places[shard + 1] - places[shard])
            if count:
                yield self._read(position + first * SLOT_BYTES, count), count

    def all(self) -> Iterator[tuple[Words, int]]:
        """Yield the rows of all shards by piece, as `of` does."""
        for position, places in self._pieces:
            if count := int(places[-1]):
                yield self._read(position, count), count

    def free_buffer(self) -> None:
        """Free the memory; the next use takes it again."""
        self._sorted = np.empty(0, dtype=np.uint64)

    def _make_buffer(self) -> None:
        if len(self._sorted) == 0:
            self._sorted = np.empty(ROWS_PIECE * SLOT_WORDS, dtype=np.uint64)

    def _read(self, position: int, count: int) -> Words:
        self._make_buffer()
        rows = self._sorted[: count * SLOT_WORDS]
        self._scratch.read(rows, position)
        return rows


class LiveOffsets:
    """Offsets of surviving records, each in one run. A SurvivorSource (context.py)."""

    def __init__(self, scratch: Scratch, runs: Sequence[tuple[int, int]] = ()) -> None:
        """`runs` are those of an existing file."""
        self.keyless_seen = False
        self._scratch = scratch
        self._runs = list(runs)  # position, offsets
        self._last = -1  # of the last run
        self._piece: Ints = np.empty(OFFSETS_PIECE, dtype=np.int64)
        self._first_piece = min(OFFSETS_PIECE, BLOCK_BYTES // _WORD)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return where the offsets are, for a reader of the file."""
        return tuple(self._runs)

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
            piece = self._first_piece  # more with each read: a small window needs few
            while at < total:
                count = min(total - at, piece)
                self._scratch.read(self._piece[:count], position + at * _WORD)
                inside = int(np.searchsorted(self._piece[:count], end))
                set_bits(bits, self._piece, inside, first)
                if inside < count:
                    break
                at += count
                piece = min(2 * piece, len(self._piece))

    def _place(self, position: int, total: int, offset: int) -> int:
        """Return the index in a run of the first offset that is at least `offset`."""
        begin, end = 0, total
        while end - begin > self._first_piece:
            middle = (begin + end) // 2
            self._scratch.read(self._piece[:1], position + middle * _WORD)
            if self._piece[0] < offset:
                begin = middle
            else:
                end = middle
        piece = self._piece[: end - begin]
        self._scratch.read(piece, position + begin * _WORD)
        return begin + int(np.searchsorted(piece, offset))


class AllOffsets:
    """The offsets of several files, below `end`. A SurvivorSource (context.py)."""

    def __init__(self, files: Sequence[LiveOffsets], *, end: int, keyless_seen: bool) -> None:
        self.keyless_seen = keyless_seen
        self._files = files
        self._end = end

    def window(self, first: int, last: int) -> tuple[int, int]:
        """See SurvivorSource."""
        return first, max(min(first + WINDOW_OFFSETS, self._end), last + 1)

    def mark(self, bits: Bytes, first: int, end: int) -> None:
        """See SurvivorSource. Raises CleanAbortedError, OSError."""
        for offsets in self._files:
            offsets.mark(bits, first, end)
