"""Find the live records of every segment of a job, and count them.

Rules
- A record is alive if it is the last one with its key in [log start, end of the job). Whether it is
  a tombstone does not matter.
- Records of transactions and records without a key are not resolved: NotResolvedError.
- Memory: the dedupe buffer of the job, for any number of keys. Keys are written to the scratch
  file, 24 bytes each, and merged by shards.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Ints, Words
from cleaner.engine.key_rows import Listing
from cleaner.engine.map_size import shards_for
from cleaner.engine.segment_scan import scan_segment
from cleaner.engine.spilled.merge import merge_shard
from cleaner.engine.spilled.scratch import LiveOffsets, Rows, Scratch
from cleaner.job import CleanJob, JobControl, SourceSegment
from storage.env import Env


class NotResolvedError(Exception):
    """The log has records that a selective clean does not handle."""


class CountedOffsets(LiveOffsets):
    """The offsets of live records, with their number in each segment."""

    def __init__(self, scratch: Scratch, sources: Sequence[SourceSegment]) -> None:
        super().__init__(scratch)
        self._bases: Ints = np.array([source.base_offset for source in sources], dtype=np.int64)
        self._counts: Ints = np.zeros(len(sources), dtype=np.int64)

    def add(self, offsets: Ints) -> None:
        """See LiveOffsets."""
        super().add(offsets)
        places = np.searchsorted(offsets, self._bases)
        self._counts += np.diff(places, append=len(offsets))

    def count(self, source: SourceSegment) -> int:
        """Return the number of live records in a segment."""
        return int(self._counts[bisect_left(self._bases, source.base_offset)])


class Resolution:
    """The liveness of a job's records. `run` comes first."""

    def __init__(self, env: Env, job: CleanJob, control: JobControl, scratch: Scratch) -> None:
        self._env = env
        self._job = job
        self._control = control
        self._sources = [source for group in job.groups for source in group]
        whole = replace(job, first_dirty_offset=job.groups[0][0].base_offset)
        self._shards = shards_for(whole)
        self._rows = Rows(scratch, self._shards)
        self._listed = 0
        self.live = CountedOffsets(scratch, self._sources)
        self.records: dict[int, int] = {}  # with a key, by base offset of the segment
        self.keys = 0
        self.bytes_read = 0

    def run(self) -> None:
        """Read all segments and decide all keys.

        Raises NotResolvedError, DamagedSegmentError, NoScratchSpaceError, CleanAbortedError,
        OSError.
        """
        # Nothing is indexed in a map: every record counts as one below the dirty section.
        job = replace(self._job, first_dirty_offset=self._job.end_offset)
        context = CleanContext(self._env, job, self._control)
        try:
            self._list(context)
        finally:
            context.reader.close()
            self.bytes_read = context.reader.bytes_read
        del context
        for shard in range(self._shards):
            keys, _ = merge_shard(self._job, shard, [self._rows], [], self.live)
            self.keys += keys
            self._control.progress("map", shard + 1, self._shards)

    def _list(self, context: CleanContext) -> None:
        listing = Listing(context, self._take)
        for source in self._sources:
            self._listed = 0
            scan_segment(context, source, listing)
            listing.flush()
            context.release()
            self.records[source.base_offset] = self._listed
            if context.state[fields.TRANSACTIONS_SEEN]:
                raise NotResolvedError("transactions")
            if context.state[fields.KEYLESS_SEEN]:
                raise NotResolvedError("records without a key")

    def _take(self, rows: Words, count: int) -> None:
        self._rows.add(rows, count)
        self._listed += count

    def live_bytes(self, source: SourceSegment) -> int:
        """Return how many bytes of a segment are alive, as if all its records had one size."""
        records = self.records[source.base_offset]
        if records == 0:
            return source.size_bytes
        return source.size_bytes * self.live.count(source) // records
