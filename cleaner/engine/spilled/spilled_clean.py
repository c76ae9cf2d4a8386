"""Clean as if the map held every key, for any size of the map.

Rules
- The dirty section is indexed as usual. A full map is emptied into rows, sharded by key, as are the
  keys of records below the dirty section. Then each shard is put into a map: its entries survive,
  and records below survive if their key is not in it. A shard that does not fit is processed in 2,
  4, ... rounds, each with a part of its keys.
- So the fate of every record with a key is decided, and the rewriting pass gives the result of a
  map for all keys.
- If the map holds all keys, nothing is spilled and the job runs as with two passes.
- No output is written before all keys are decided: until then the caller can start again without
  spilling.
- Cost: the log is read, unpacked and hashed twice. The scratch file takes at most 24 bytes for each
  record and 8 for each survivor.
"""

from dataclasses import replace

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.key_map.map_size import shards_for
from cleaner.engine.key_rows import Listing
from cleaner.engine.outcome import CleanOutcome
from cleaner.engine.output_files import OutputFiles
from cleaner.engine.report import Indexed, make_report
from cleaner.engine.segment_scan import scan_segment
from cleaner.engine.spilled.merge import merge_shard
from cleaner.engine.spilled.scratch import LiveOffsets, NoScratchSpaceError, Scratch, SpilledRows
from cleaner.engine.spilled.spilling_map import SpillingMap
from cleaner.engine.two_pass.index_pass import index_section
from cleaner.engine.two_pass.rewrite_pass import RewritePass
from cleaner.job import CleanJob, CleanReport, Damage, JobControl
from storage.env import Env
from storage.errors import DamagedSegmentError


class SpilledClean:
    """One job: its keys, shard by shard, and its rewriting pass."""

    def __init__(
        self,
        env: Env,
        job: CleanJob,
        control: JobControl,
        outputs: OutputFiles | None,
        *,
        scratch: Scratch,
        bytes_read: int = 0,
    ) -> None:
        """`scratch` is for keys that do not fit; `bytes_read` counts earlier reads of the job."""
        assert job.order is None
        self.rounds = 0
        self.bytes_read = bytes_read
        self._env = env
        self._job = job
        self._control = control
        self._outputs = outputs
        section = job.end_offset - job.first_dirty_offset
        self._shards = shards_for(job)
        self._dirty = SpilledRows(scratch, self._shards)
        self._below = SpilledRows(scratch, self._shards)
        self._scratch = scratch
        self._map = SpillingMap(job, job.dedupe_buffer_bytes, section, self._dirty.add)
        self._keys = 0
        self._started = env.monotonic()

    def run(self) -> CleanReport:
        """Run the job; see run_clean. Raises NoScratchSpaceError before any output."""
        context = CleanContext(
            self._env, self._job, self._control, self._outputs, key_map=self._map
        )
        context.reader.bytes_read = self.bytes_read
        try:
            damaged = index_section(context)
            if context.map_end < self._job.end_offset:
                raise NoScratchSpaceError("a batch has more keys than the buffers allow for")
            if not self._map.spilled:
                self.rounds = 1
                outcome = self._rewrite(context, damaged)
                bytes_read = context.reader.bytes_read
                return make_report(self._job, outcome, context.indexed, bytes_read=bytes_read)
            self._map.spill()
            self._list_below(context, damaged)
        finally:
            context.reader.close()
            self.bytes_read = context.reader.bytes_read
        live_offsets = LiveOffsets(self._scratch)
        live_offsets.keyless_seen = bool(context.state[fields.KEYLESS_SEEN])
        del context, self._map  # before there is another map
        for shard in range(self._shards):
            keys, rounds = merge_shard(self._job, shard, [self._dirty], [self._below], live_offsets)
            self._keys += keys
            self.rounds += rounds
            self._control.progress("map", shard + 1, self._shards)
        job = replace(self._job, dedupe_buffer_bytes=0)
        context = CleanContext(self._env, job, self._control, self._outputs, survivors=live_offsets)
        context.reader.bytes_read = self.bytes_read
        outcome = self._rewrite(context, damaged)
        indexed = Indexed(self._job.end_offset, self._keys, 1.0)
        report = make_report(self._job, outcome, indexed, bytes_read=context.reader.bytes_read)
        return replace(report, spilled_bytes=self._scratch.size_bytes)

    def _rewrite(self, context: CleanContext, damaged: dict[int, Damage]) -> CleanOutcome:
        mapped = self._env.monotonic()
        rewrite = RewritePass(context, damaged)
        try:
            rewrite.run(self._job.groups)
        finally:
            context.reader.close()
        return CleanOutcome(
            totals=rewrite.totals,
            damaged=damaged,
            map_seconds=mapped - self._started,
            rewrite_seconds=self._env.monotonic() - mapped,
        )

    # Below the dirty section

    def _list_below(self, context: CleanContext, damaged: dict[int, Damage]) -> None:
        """List the records below the dirty section; add damage to `damaged`.

        The rewriting pass drops batches without survivors unread, so it would not find the damage.
        """
        listing = Listing(context, self._below.add)
        for group in self._job.groups:
            for source in group:
                if source.base_offset < self._job.first_dirty_offset:
                    try:
                        scan_segment(context, source, listing)
                    except DamagedSegmentError as error:
                        damaged.setdefault(source.base_offset, Damage.of(error))
                    context.release()
        listing.flush()
