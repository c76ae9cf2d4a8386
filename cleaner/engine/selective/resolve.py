"""Find the live records of every segment of a job, and count them.

Rules
- A record is alive if it is the last one with its key in [log start, end of the job). Whether it is
  a tombstone does not matter.
- Records of transactions and records without a key are not resolved: NotResolvedError.
- A segment is read once, to write its key index (key_index.py); after that the index is read.
- If most of a log that is cleaned as a whole has no key index: NotResolvedError. It takes less time
  to clean it without indexes than to read it for them first.
- A segment that retention removes meanwhile counts as empty, as in every other clean.
- Memory: the dedupe buffer of the job, for any number of keys. Keys are merged by shards.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels.compile import Bytes, Ints, Words
from cleaner.engine.kernels.passes.bitmap import set_bits
from cleaner.engine.key_map.map_size import SLOT_BYTES, shards_of, slots_for
from cleaner.engine.selective.key_index import (
    BUCKETS_MAX,
    IndexRows,
    KeyIndex,
    UnusableIndexError,
    read_index,
    remove_index,
    remove_indexes,
    write_index,
)
from cleaner.engine.selective.packed_rows import PACKED_BYTES
from cleaner.engine.spilled.merge import merge_shard
from cleaner.engine.spilled.scratch import DamagedScratchError, LiveOffsets, Scratch
from cleaner.job import CleanJob, JobControl, SourceSegment
from storage.env import Env
from storage.format import filenames

MEMORY_OFFSETS: Final = 1 << 20  # 8 MiB
UNINDEXED_SHARE_MAX: Final = 0.5  # of the bytes of a log that is cleaned as a whole


class NotResolvedError(Exception):
    """The log has records that a selective clean does not handle."""


class CountedOffsets(LiveOffsets):
    """The offsets of live records, with their number in each segment.

    Up to MEMORY_OFFSETS are kept in memory, more of them in the scratch file.
    """

    def __init__(self, scratch: Scratch, sources: Sequence[SourceSegment]) -> None:
        super().__init__(scratch)
        self._in_memory: list[Ints] = []
        self._memory_offsets = 0
        self._bases: Ints = np.array([source.base_offset for source in sources], dtype=np.int64)
        self._counts: Ints = np.zeros(len(sources), dtype=np.int64)

    def add(self, offsets: Ints) -> None:
        """See LiveOffsets."""
        self._memory_offsets += len(offsets)
        if self._memory_offsets <= MEMORY_OFFSETS:
            self._in_memory.append(offsets.copy())
        else:
            for earlier in self._in_memory:
                super().add(earlier)
            self._in_memory.clear()
            super().add(offsets)
        places = np.searchsorted(offsets, self._bases)
        self._counts += np.diff(places, append=len(offsets))

    def mark(self, bits: Bytes, first: int, end: int) -> None:
        """See SurvivorSource. Raises CleanAbortedError, OSError."""
        super().mark(bits, first, end)
        for offsets in self._in_memory:
            begin, stop = np.searchsorted(offsets, (first, end))
            set_bits(bits, offsets[begin:stop], int(stop - begin), first)

    def count(self, source: SourceSegment) -> int:
        """Return the number of live records in a segment."""
        return int(self._counts[bisect_left(self._bases, source.base_offset)])


class _RowsOfPresent:
    """The rows of a key index as a RowSource; none once retention has removed its segment.

    Retention removes the oldest segments, so what these rows supersede is gone as well.
    """

    def __init__(self, env: Env, job: CleanJob, rows: IndexRows) -> None:
        name = filenames.file_name(rows.index.source.base_offset, filenames.LOG)
        self._env = env
        self._rows = rows
        self._log_path = f"{job.directory}/{name}"

    def count(self, shard: int) -> int:
        """See RowSource."""
        return self._rows.count(shard)

    def of(self, shard: int) -> Iterator[tuple[Words, int]]:
        """See RowSource."""
        try:
            yield from self._rows.of(shard)
        except FileNotFoundError:
            if self._env.exists(self._log_path):
                raise

    def free_buffer(self) -> None:
        """Do nothing: no buffer is kept."""


class Resolution:
    """The liveness of a job's records. `run` comes first."""

    def __init__(self, env: Env, job: CleanJob, control: JobControl, scratch: Scratch) -> None:
        self._env = env
        self._job = job
        self._control = control
        self._sources = [source for group in job.groups for source in group]
        self._indexes: list[KeyIndex] = []
        self._kept: list[IndexRows] = []  # of `_indexes`, if they are kept
        self.live = CountedOffsets(scratch, self._sources)
        self.keys = 0
        self.bytes_read = 0  # of segments

    def run(self) -> None:
        """Read or write all key indexes, and decide all keys.

        Raises NotResolvedError, DamagedSegmentError, NoScratchSpaceError, CleanAbortedError,
        OSError.
        """
        remove_indexes(self._env, self._job, but=self._sources)
        self._load_indexes()
        shards = self._shards()
        keeps = shards == 1 and self._fit_beside_map()
        rows = [
            IndexRows(self._env, self._job, self._control, index, shards, keeps=keeps)
            for index in self._indexes
        ]
        if keeps:
            self._kept = rows
        present = [_RowsOfPresent(self._env, self._job, rows_of_one) for rows_of_one in rows]
        for shard in range(shards):
            try:
                keys, _ = merge_shard(self._job, shard, present, [], self.live)
            except DamagedScratchError as error:
                remove_index(self._env, error)
                raise NotResolvedError(str(error)) from error
            self.keys += keys
            self._control.progress("map", shard + 1, shards)

    def _load_indexes(self) -> None:
        read = [self._read_index(source) for source in self._sources]
        self._check_share([s for s, index in zip(self._sources, read, strict=True) if not index])
        # Nothing is indexed in a map: every record counts as one below the dirty section.
        job = replace(self._job, first_dirty_offset=self._job.end_offset)
        context: CleanContext | None = None
        try:
            for source, known in zip(self._sources, read, strict=True):
                index = known
                if index is None:
                    context = context or CleanContext(self._env, job, self._control)
                    index = write_index(context, source)
                if index.has_transactions:
                    raise NotResolvedError("transactions")
                if index.has_keyless:
                    raise NotResolvedError("records without a key")
                self._indexes.append(index)
        finally:
            if context is not None:
                context.reader.close()
                self.bytes_read = context.reader.bytes_read

    def _read_index(self, source: SourceSegment) -> KeyIndex | None:
        try:
            return read_index(self._env, self._job, self._control, source)
        except UnusableIndexError:
            return None

    def _check_share(self, unindexed: Sequence[SourceSegment]) -> None:
        """Raise NotResolvedError if too much of a log that is cleaned as a whole has no index."""
        unindexed_bytes = sum(source.size_bytes for source in unindexed)
        total_bytes = sum(source.size_bytes for source in self._sources)
        if self._job.slack is None and unindexed_bytes > UNINDEXED_SHARE_MAX * total_bytes:
            raise NotResolvedError(f"{unindexed_bytes} of {total_bytes} bytes have no key index")

    def _shards(self) -> int:
        """Return a number of shards of which the indexes can read each alone."""
        wanted = 1 << (shards_of(self._records(), self._job) - 1).bit_length()
        return min(wanted, BUCKETS_MAX)

    def _fit_beside_map(self) -> bool:
        """Return whether the dedupe buffer has room for all rows beside the map."""
        records, limit = self._records(), self._job.dedupe_buffer_bytes
        return records * PACKED_BYTES + slots_for(limit, records) * SLOT_BYTES <= limit

    def _records(self) -> int:
        return sum(index.records for index in self._indexes)

    @property
    def has_tombstones(self) -> bool:
        """Return whether a segment has a tombstone."""
        return any(index.has_tombstones for index in self._indexes)

    def index_of(self, base_offset: int) -> KeyIndex:
        """Return the key index of a segment."""
        return self._indexes[bisect_left(self._indexes, base_offset, key=_base_of)]

    def rows_of(self, base_offset: int) -> IndexRows:
        """Return the rows of the key index of a segment, as one shard."""
        place = bisect_left(self._indexes, base_offset, key=_base_of)
        if self._kept:
            return self._kept[place]
        return IndexRows(self._env, self._job, self._control, self._indexes[place], shards=1)

    def records(self, source: SourceSegment) -> int:
        """Return the number of records in a segment."""
        return self.index_of(source.base_offset).records

    def live_bytes(self, source: SourceSegment) -> int:
        """Return how many bytes of a segment are alive, as if all its records had one size."""
        records = self.records(source)
        if records == 0:
            return source.size_bytes
        return source.size_bytes * self.live.count(source) // records


def _base_of(index: KeyIndex) -> int:
    return index.source.base_offset
