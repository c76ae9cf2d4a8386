"""Decide from the data which records of a log are the last ones of their keys.

Rules
- The keys are indexed as in a clean of the whole log: records of aborted transactions supersede
  nothing, and the keys before a damaged batch count. No key index is used.
- The log is listed in sections, so that the last records below several offsets can be decided from
  one reading.
- Memory is that of the dedupe buffer, for any number of keys: all keys go to the scratch file.
"""

from bisect import bisect_right
from collections.abc import Sequence

from cleaner.engine.context import CleanContext
from cleaner.engine.key_map.map_size import shards_for
from cleaner.engine.spilled.merge import merge_shard
from cleaner.engine.spilled.scratch import LiveOffsets, NoScratchSpaceError, Scratch, SpilledRows
from cleaner.engine.spilled.spilling_map import SpillingMap
from cleaner.engine.two_pass.index_pass import index_segment
from cleaner.job import CleanJob, Damage, JobControl, job_over_all_records
from storage.env import Env
from storage.errors import DamagedSegmentError


class KeySections:
    """The keys of a log, in sections. `read` comes first."""

    def __init__(
        self, env: Env, job: CleanJob, control: JobControl, scratch: Scratch, ends: Sequence[int]
    ) -> None:
        """`ends`: offsets at which a section ends; those that are no segment's base are ignored."""
        self.damaged: dict[int, Damage] = {}  # by base offset
        self.bytes_read = 0
        self._env = env
        self._job = job_over_all_records(job)
        self._control = control
        self._scratch = scratch
        self._sources = [source for group in job.groups for source in group]
        bases = {source.base_offset for source in self._sources}
        inner = {end for end in ends if end in bases and end > self._sources[0].base_offset}
        self.ends = sorted(inner | {job.end_offset})
        self._shards = shards_for(self._job)
        self._rows = [SpilledRows(scratch, self._shards) for _ in self.ends]

    def read(self) -> None:
        """List the keys of all segments.

        Raises NoScratchSpaceError, TransactionIndexError, CleanAbortedError, OSError.
        """
        job = self._job
        section = job.end_offset - job.first_dirty_offset
        keys = SpillingMap(job, job.dedupe_buffer_bytes, section, self._rows[0].add)
        context = CleanContext(self._env, job, self._control, key_map=keys)
        try:
            self._read(context, keys)
        finally:
            context.reader.close()
            self.bytes_read = context.reader.bytes_read
        for rows in self._rows:
            rows.free_buffer()

    def _read(self, context: CleanContext, keys: SpillingMap) -> None:
        transactions = context.transactions
        total, begun = sum(source.size_bytes for source in self._sources), 0
        read = []
        place = 0
        for source in self._sources:
            if source.base_offset >= self.ends[place]:
                keys.spill()
                place = bisect_right(self.ends, source.base_offset)
                keys.pass_on_to(self._rows[place].add)
            try:
                if index_segment(context, source, "map", begun, total):
                    raise NoScratchSpaceError("a batch has more keys than the buffers allow for")
            except DamagedSegmentError as error:
                self.damaged[source.base_offset] = Damage.of(error)
                transactions.forget_open(context.state)
            else:
                if not context.reader.is_gone:
                    read.append(source)
            context.release()
            begun += source.size_bytes
        keys.spill()
        transactions.check_markers(read, self._job.end_offset)

    def live_below(self, end: int) -> tuple[LiveOffsets, int]:
        """Return the offsets of the last records below `end`, one of `ends`, and their number.

        Raises CleanAbortedError, OSError, DamagedScratchError.
        """
        rows = self._rows[: self.ends.index(end) + 1]
        live_offsets, keys = LiveOffsets(self._scratch), 0
        for shard in range(self._shards):
            in_shard, _ = merge_shard(self._job, shard, rows, [], live_offsets)
            keys += in_shard
        return live_offsets, keys
