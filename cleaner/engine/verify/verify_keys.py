"""Clean as if the map held every key, for any size of the map.

Rules
- The dirty section is indexed as usual. A full map is emptied into rows, sharded by key, as are the
  keys of records below the dirty section. Then each shard is put into a map: its entries survive,
  and records below survive if their key is not in it. A shard that does not fit is processed in 2,
  4, ... rounds, each with a part of its keys.
- So the fate of every record with a key is decided, and the rewriting pass gives the result of a
  map for all keys.
- If the map holds all keys, the job runs without shards.
- Cost: the log is read, unpacked and hashed twice, as in any clean with two passes. The scratch
  file takes at most 24 bytes for each record and 8 for each survivor.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np

from cleaner.engine.clean import check_job, report_of, run_clean
from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Ints
from cleaner.engine.kernels.layout import RECORD_BYTES_MIN
from cleaner.engine.kernels.passes.shards import list_unknown, merge_rows
from cleaner.engine.key_rows import Listing
from cleaner.engine.offset_map import OffsetMap, slots_for
from cleaner.engine.outcome import CleanOutcome
from cleaner.engine.output_files import OutputFiles
from cleaner.engine.segment_scan import scan_segment
from cleaner.engine.spilling_map import SpillingMap
from cleaner.engine.two_pass.index_pass import index_section
from cleaner.engine.two_pass.rewrite_pass import RewritePass
from cleaner.engine.verify.verify_scratch import LiveOffsets, Rows, Scratch
from cleaner.job import CleanJob, CleanReport, Damage, JobControl
from cleaner.verification import InvalidOutputError
from storage.env import Env
from storage.errors import DamagedSegmentError

SHARDS_MAX: Final = 1 << 12
_ROUNDS_MAX: Final = 1 << 20  # a map of one key gets through a million keys of a shard in these


def clean_with_all_keys(
    env: Env, job: CleanJob, control: JobControl, outputs: OutputFiles, scratch: Scratch
) -> tuple[CleanReport, int]:
    """Run the job with `outputs`; return its report and the number of rounds.

    `scratch` is for keys that do not fit into the map.

    Raises InvalidOutputError if the buffers are too small for a batch of the log,
    CleanAbortedError, OSError, and what `outputs` and `control` raise.
    """
    check_job(job)
    assert job.order is None
    section = job.end_offset - job.first_dirty_offset
    if job.expired_only or section <= _keys_max(job, section):
        return run_clean(env, job, control, one_pass=False, outputs=outputs), 1
    work = _KeyVerification(env, job, control, outputs, scratch=scratch)
    return work.run(), work.rounds


def _keys_max(job: CleanJob, section: int) -> int:
    """Return how many of `section` keys the job's map holds."""
    return slots_for(job.dedupe_buffer_bytes, section) * 9 // 10


def _shards(job: CleanJob, section: int) -> int:
    """Return a number of shards with which one fits into the map if keys are spread evenly."""
    size_bytes = sum(
        source.size_bytes
        for group in job.groups
        for source in group
        if source.next_base_offset > job.first_dirty_offset
    )
    records = min(section, size_bytes // RECORD_BYTES_MIN)
    return max(1, min(SHARDS_MAX, -(-records * 5 // (4 * _keys_max(job, section)))))


class _KeyVerification:
    """One job: its keys, shard by shard, and its rewriting pass."""

    def __init__(
        self,
        env: Env,
        job: CleanJob,
        control: JobControl,
        outputs: OutputFiles,
        *,
        scratch: Scratch,
    ) -> None:
        self.rounds = 0
        self._env = env
        self._job = job
        self._control = control
        self._outputs = outputs
        section = job.end_offset - job.first_dirty_offset
        self._shards = _shards(job, section)
        self._dirty = Rows(scratch, self._shards)
        self._below = Rows(scratch, self._shards)
        self._scratch = scratch
        self._map = SpillingMap(job, job.dedupe_buffer_bytes, section, self._dirty.add)
        self._keys = 0
        self._started = env.monotonic()

    def run(self) -> CleanReport:
        """See clean_with_all_keys."""
        context = CleanContext(
            self._env, self._job, self._control, self._outputs, key_map=self._map
        )
        try:
            damaged = index_section(context)
            if context.map_end < self._job.end_offset:
                reason = "a batch of the log has more keys than the buffers allow for"
                raise InvalidOutputError(context.reader.path, -1, reason)
            if not self._map.spilled:
                self.rounds = 1
                return self._rewrite(context, damaged)
            self._map.spill()
            self._list_below(context)
        finally:
            context.reader.close()
        live_offsets = LiveOffsets(self._scratch)
        live_offsets.keyless_met = bool(context.state[fields.KEYLESS_MET])
        bytes_read = context.reader.bytes_read
        del context, self._map  # before there is another map
        for shard in range(self._shards):
            self._merge(shard, live_offsets)
        context = CleanContext(
            self._env,
            replace(self._job, dedupe_buffer_bytes=0),
            self._control,
            self._outputs,
            survivors=live_offsets,
        )
        context.reader.bytes_read = bytes_read
        return self._rewrite(context, damaged)

    def _rewrite(self, context: CleanContext, damaged: dict[int, Damage]) -> CleanReport:
        mapped = self._env.monotonic()
        rewrite = RewritePass(context, damaged)
        try:
            rewrite.run(self._job.groups)
        finally:
            context.reader.close()
        outcome = CleanOutcome(
            totals=rewrite.totals,
            damaged=damaged,
            map_seconds=mapped - self._started,
            rewrite_seconds=self._env.monotonic() - mapped,
        )
        report = report_of(context, outcome)
        return replace(report, keys_indexed=self._keys or context.map.entries)

    # Below the dirty section

    def _list_below(self, context: CleanContext) -> None:
        listing = Listing(context, self._below.add)
        for group in self._job.groups:
            for source in group:
                if source.base_offset < self._job.first_dirty_offset:
                    with suppress(DamagedSegmentError):  # the rewriting pass reports it
                        scan_segment(context, source, listing)
                    context.release()
        listing.flush()

    # Shards

    def _merge(self, shard: int, live_offsets: LiveOffsets) -> None:
        """Record the survivors of one shard, in as many rounds as necessary."""
        total = self._dirty.count(shard)
        rounds, number = 1, 0
        result: Ints = np.empty(0, dtype=np.int64)
        while number < rounds:
            table = OffsetMap(self._job.dedupe_buffer_bytes, total, self._job.hash_key)
            if not self._fill(table, shard, number, rounds):
                # Results of earlier rounds stay valid: each covers the keys of two new rounds.
                rounds, number = rounds * 2, number * 2
                assert rounds <= _ROUNDS_MAX
                continue
            self._keys += table.entries
            self.rounds += 1
            live_offsets.add_map(table.table, int(table.state[fields.SLOTS]))
            for rows, count in self._below.of(shard):
                if len(result) < count:
                    result = np.empty(count, dtype=np.int64)
                unknown = int(
                    list_unknown(rows, count, number, rounds, table.table, table.state, result)
                )
                live_offsets.add(result[:unknown])
            number += 1
            self._control.progress("map", shard + 1, self._shards)

    def _fill(self, table: OffsetMap, shard: int, number: int, rounds: int) -> bool:
        """Put one round's keys of a shard into a map; return False if they do not fit."""
        for rows, count in self._dirty.of(shard):
            table.reserve(count)
            if not merge_rows(rows, count, number, rounds, table.table, table.state):
                return False
        return True
