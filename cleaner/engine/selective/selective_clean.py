"""Clean a log by key indexes, and rewrite only the groups that need it.

Rules
- All keys of the log are decided first (resolve.py). Then groups are rewritten; the others keep
  their files, unread.
- A group without a live record is removed unread, unless one of its batches must stay: it has the
  last sequence of a producer, or is the end of the log.
- A log with transactions, damage or records without a key, and one whose keys do not fit on the
  disk, is cleaned without indexes instead. Nothing was written until then.

With `CleanJob.slack`, the clean is selective
- It rewrites groups with much garbage (victims.py) until the rest of the garbage is at most `slack`
  times the live data. If the job names victims, it rewrites their groups and no others.
- A rewritten group loses exactly the records that have a later record with their key below the end
  of the job. That record stays. So each group can be published alone and in any order.
- The first dirty offset does not move: garbage is left below the end of the job. No tombstone is
  removed and none gets a delete horizon: an older value may be left in another group. A clean of
  the whole log does both later (cleaner/planning/plan.py).

Without it, the whole log is cleaned, with the result of every other clean of it
- It rewrites every group with garbage, with a tombstone or with a batch without records, and merges
  those of several segments. Other groups have nothing to remove, and nothing to which a delete
  horizon belongs.
- An output that lost a tombstone has fewer records than the indexes of its sources say. It gets no
  index: the next clean reads it.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby

from cleaner.engine.batch_blocks import BatchBlocks
from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.outcome import CleanOutcome
from cleaner.engine.output_files import OutputFiles
from cleaner.engine.report import Indexed, make_report
from cleaner.engine.selective.key_index import (
    read_blocks,
    remove_indexes,
    write_derived_index,
)
from cleaner.engine.selective.live_parts import live_parts
from cleaner.engine.selective.resolve import NotResolvedError, Resolution
from cleaner.engine.selective.victims import choose_victims, liveness_of, split_groups
from cleaner.engine.spilled.scratch import DamagedScratchError, NoScratchSpaceError, Scratch
from cleaner.engine.two_pass.rewrite_pass import LiveParts, RewritePass
from cleaner.job import (
    NO_HORIZON,
    CleanedGroup,
    CleanJob,
    CleanReport,
    JobControl,
    SegmentLiveness,
    SourceSegment,
)
from storage.env import Env
from storage.errors import DamagedSegmentError
from storage.swap.swap_journal import cleaned_content_id


class SelectiveClean:
    """One clean by key indexes."""

    def __init__(
        self, env: Env, job: CleanJob, control: JobControl, outputs: OutputFiles | None
    ) -> None:
        assert job.slack is not None or job.by_index
        assert job.view is None
        assert not job.expired_only
        self.bytes_read = 0
        self.refusal = ""  # why there is no room for key indexes or live offsets
        self._env = env
        self._job = job
        self._control = control
        self._outputs = outputs
        self._liveness: list[SegmentLiveness] = []

    def run(self) -> CleanReport | None:
        """Run the job; None if the log has to be cleaned without indexes.

        Raises CleanAbortedError, OSError.
        """
        if self._job.aborted:
            return None
        scratch = Scratch(self._env, self._job, self._control, bytes_max=self._job.spill_bytes_max)
        resolution = Resolution(self._env, self._job, self._control, scratch)
        started = self._env.monotonic()
        try:
            try:
                resolution.run()
            except NoScratchSpaceError as error:
                remove_indexes(self._env, self._job)  # the clean of the whole log needs the space
                self.refusal = str(error)
                return None
            except (NotResolvedError, DamagedSegmentError):
                return None
            finally:
                self.bytes_read = resolution.bytes_read
            mapped = self._env.monotonic()
            report = self._rewrite(resolution, mapped - started)
        finally:
            scratch.close()
        return replace(report, spilled_bytes=scratch.size_bytes)

    def _rewrite(self, resolution: Resolution, map_seconds: float) -> CleanReport:
        job, started = self._job, self._env.monotonic()
        groups = self._groups(resolution)
        victims = self._choose(resolution, groups)
        # A selective clean removes and stamps no tombstone.
        is_timed = job.drop_expired_tombstones and job.slack is None
        rewrite_job = replace(job, drop_expired_tombstones=is_timed, dedupe_buffer_bytes=0)
        context = CleanContext(
            self._env, rewrite_job, self._control, self._outputs, survivors=resolution.live
        )
        context.reader.bytes_read = self.bytes_read
        # Ask the bits of every record, so that the checksum of every batch is verified: damage may
        # be younger than the key index, and could make a batch look as if it had no live record.
        context.state[fields.KEYLESS_SEEN] = 1
        blocks = BatchBlocks()
        rewrite = RewritePass(
            context,
            {},
            partial(self._deliver, context, resolution, blocks),
            partial(self._parts_of, context),
            blocks,
        )
        try:
            self._rewrite_groups(rewrite, resolution, [groups[i] for i in victims])
        finally:
            context.reader.close()
        for i in set(range(len(groups))) - set(victims):
            self._keep(rewrite, resolution, groups[i])
        outcome = CleanOutcome(
            totals=rewrite.totals,
            damaged=rewrite.damaged,
            map_seconds=map_seconds,
            rewrite_seconds=self._env.monotonic() - started,
        )
        live_bytes = sum(resolution.live_bytes(source) for group in groups for source in group)
        return self._report(resolution, outcome, live_bytes, context.reader.bytes_read)

    def _groups(self, resolution: Resolution) -> Sequence[tuple[SourceSegment, ...]]:
        """Return the groups of the job, split if it chooses its victims among them."""
        job = self._job
        if job.slack is None or job.victims:
            return job.groups
        parts = split_groups(job.groups, resolution.live_bytes, job.end_offset)
        return [tuple(part) for part in parts]

    def _choose(
        self, resolution: Resolution, groups: Sequence[tuple[SourceSegment, ...]]
    ) -> list[int]:
        """Return the indexes of the groups to rewrite, ascending."""
        slack, named = self._job.slack, frozenset(self._job.victims)
        if slack is not None and not named:
            end = self._job.end_offset
            liveness = [liveness_of(g, map(resolution.live_bytes, g), end) for g in groups]
            return choose_victims(liveness, slack)
        if slack is not None:
            return [
                i
                for i, group in enumerate(groups)
                if not named.isdisjoint(source.base_offset for source in group)
            ]
        return [
            i
            for i, group in enumerate(groups)
            if len(group) > 1 or self._has_something_to_change(resolution, group[0])
        ]

    def _has_something_to_change(self, resolution: Resolution, source: SourceSegment) -> bool:
        """Return whether a segment may lose something, or get a delete horizon."""
        index = resolution.index_of(source.base_offset)
        if resolution.live_bytes(source) < source.size_bytes:
            return True
        starts_below = index.source.base_offset < self._job.log_start_offset
        return index.has_tombstones or index.has_empty_batches or starts_below

    def _rewrite_groups(
        self,
        rewrite: RewritePass,
        resolution: Resolution,
        victims: Sequence[tuple[SourceSegment, ...]],
    ) -> None:
        for is_dead, run in groupby(victims, partial(self._is_dead, resolution)):
            if not is_dead:
                rewrite.run(list(run))
                continue
            for group in run:
                rewrite.remove(group, _records(resolution, group))

    def _keep(
        self, rewrite: RewritePass, resolution: Resolution, group: tuple[SourceSegment, ...]
    ) -> None:
        """Count a group that keeps its files."""
        totals, records = rewrite.totals, _records(resolution, group)
        totals.records_before += records
        totals.records_after += records
        for source in group:
            base_offset, size_bytes = source.base_offset, source.size_bytes
            totals.bytes_before += size_bytes
            totals.bytes_after += size_bytes
            live_bytes, live_records = resolution.live_bytes(source), resolution.live.count(source)
            self._liveness.append(
                SegmentLiveness(base_offset, size_bytes, live_bytes, live_records)
            )
            if self._job.slack is None:
                rewrite.accounting.record_horizon(
                    base_offset, size_bytes, NO_HORIZON, resolution.records(source)
                )

    def _report(
        self, resolution: Resolution, outcome: CleanOutcome, live_bytes: int, bytes_read: int
    ) -> CleanReport:
        job = self._job
        is_selective = job.slack is not None
        end = job.first_dirty_offset if is_selective else job.end_offset
        report = make_report(
            job, outcome, Indexed(end, resolution.keys, 0.0), bytes_read=bytes_read
        )
        if not is_selective:
            return report
        return replace(
            report,
            map_full=False,
            resolved_end=job.end_offset,
            live_bytes=live_bytes,
            has_tombstones=resolution.has_tombstones,
            liveness=tuple(sorted(self._liveness)),
        )

    def _parts_of(self, context: CleanContext, source: SourceSegment) -> LiveParts | None:
        return live_parts(context, source, read_blocks(self._env, self._job, self._control, source))

    def _deliver(
        self,
        context: CleanContext,
        resolution: Resolution,
        blocks: BatchBlocks,
        group: CleanedGroup,
    ) -> None:
        """Write the key index of a group's output, which has these blocks, then deliver it."""
        job = self._job
        if group.output is not None:
            output = SourceSegment(
                base_offset=group.output.base_offset,
                next_base_offset=job.end_offset,
                size_bytes=group.bytes_after,
                last_modified_ms=0,
                largest_timestamp_ms=0,
                content_id=cleaned_content_id(job.job_id, group.output.base_offset),
            )
            self._liveness.append(
                SegmentLiveness(
                    output.base_offset, output.size_bytes, output.size_bytes, group.records_after
                )
            )
            if context.state[fields.TOMBSTONES_REMOVED] == 0:
                indexes = [resolution.rows_of(base) for base in group.source_base_offsets]
                # The next clean reads the output if there is no space, or if retention removed a
                # source with its index.
                with suppress(NoScratchSpaceError, DamagedScratchError, FileNotFoundError):
                    write_derived_index(context, indexes, output, blocks.blocks)
        self._control.groups_cleaned((group,))

    def _is_dead(self, resolution: Resolution, group: tuple[SourceSegment, ...]) -> bool:
        """Return whether no batch of a group survives, not even an empty one.

        A segment without records has batches that stay for their headers, or none.
        """
        if any(
            resolution.records(source) == 0 or resolution.live.count(source) for source in group
        ):
            return False
        job, first, end = self._job, group[0].base_offset, group[-1].next_base_offset
        if job.log_end_offset_is_end and end == job.end_offset:
            return False
        return not any(first <= last_offset < end for _, _, last_offset in job.last_records)


def _records(resolution: Resolution, group: tuple[SourceSegment, ...]) -> int:
    return sum(resolution.records(source) for source in group)
