"""Clean a log by rewriting only the groups with the most garbage.

Rules
- All keys of the log are decided first (resolve.py). Then the groups with the least live data are
  rewritten until the rest of the garbage is at most `CleanJob.slack` times the live data. The other
  groups keep their files.
- A rewritten group loses exactly the records that have a later record with their key below the end
  of the job. That record stays. So each group can be published alone and in any order.
- A group without a live record is removed unread, unless a batch of it stays for what its header
  says: the last sequence of a producer, or the end of the log.
- The first dirty offset does not move: garbage is left below the end of the job. No tombstone is
  removed and none gets a delete horizon: an older value may be left in another group. A clean of
  the whole log does both later (cleaner/planning/plan.py).
- A log with transactions, damage or records without a key, and one whose keys do not fit on the
  disk, is cleaned as a whole instead. Nothing was written until then.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby

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
from cleaner.engine.selective.victims import GroupLiveness, choose_victims
from cleaner.engine.spilled.scratch import DamagedScratchError, NoScratchSpaceError, Scratch
from cleaner.engine.two_pass.rewrite_pass import LiveParts, RewritePass
from cleaner.job import (
    CleanedGroup,
    CleanJob,
    CleanReport,
    JobControl,
    SegmentLiveness,
    SourceSegment,
)
from storage.env import Env
from storage.errors import DamagedSegmentError
from storage.segments.swap import cleaned_content_id


class SelectiveClean:
    """One selective clean."""

    def __init__(
        self, env: Env, job: CleanJob, control: JobControl, outputs: OutputFiles | None
    ) -> None:
        assert job.slack is not None
        assert job.order is None
        assert not job.expired_only
        assert not job.latest_only
        self.bytes_read = 0
        self.refusal = ""  # why there is no room for key indexes or live offsets
        self._env = env
        self._job = job
        self._slack = job.slack
        self._control = control
        self._outputs = outputs
        self._liveness: list[SegmentLiveness] = []

    def run(self) -> CleanReport | None:
        """Run the job; None if the log has to be cleaned as a whole.

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
        groups = [
            GroupLiveness(
                segments=len(group),
                size_bytes=sum(source.size_bytes for source in group),
                live_bytes=sum(resolution.live_bytes(source) for source in group),
            )
            for group in job.groups
        ]
        victims = choose_victims(groups, self._slack)
        # No record is removed or stamped by time.
        untimed = replace(job, drop_expired_tombstones=False, dedupe_buffer_bytes=0)
        context = CleanContext(
            self._env, untimed, self._control, self._outputs, survivors=resolution.live
        )
        context.reader.bytes_read = self.bytes_read
        # Ask the bits of every record, so that the checksum of every batch is verified: damage may
        # be younger than the key index, and could make a batch look as if it had no live record.
        context.state[fields.KEYLESS_SEEN] = 1
        deliver = partial(self._deliver, context, resolution)
        rewrite = RewritePass(context, {}, deliver, partial(self._parts_of, context))
        try:
            for is_dead, run in groupby(
                victims, lambda i: self._is_dead(resolution, job.groups[i])
            ):
                if not is_dead:
                    rewrite.run([job.groups[i] for i in run])
                    continue
                for i in run:
                    rewrite.remove(job.groups[i], _records(resolution, job.groups[i]))
        finally:
            context.reader.close()
        totals = rewrite.totals
        for i in set(range(len(groups))) - set(victims):
            records = _records(resolution, job.groups[i])
            totals.bytes_before += groups[i].size_bytes
            totals.bytes_after += groups[i].size_bytes
            self._liveness += [
                SegmentLiveness(
                    source.base_offset, source.size_bytes, resolution.live_bytes(source)
                )
                for source in job.groups[i]
            ]
            totals.records_before += records
            totals.records_after += records
        outcome = CleanOutcome(
            totals=totals,
            damaged=rewrite.damaged,
            map_seconds=map_seconds,
            rewrite_seconds=self._env.monotonic() - started,
        )
        indexed = Indexed(job.first_dirty_offset, resolution.keys, 0.0)
        report = make_report(job, outcome, indexed, bytes_read=context.reader.bytes_read)
        live_bytes = sum(group.live_bytes for group in groups)
        return replace(
            report,
            map_full=False,
            resolved_end=job.end_offset,
            live_bytes=live_bytes,
            liveness=tuple(sorted(self._liveness)),
        )

    def _parts_of(self, context: CleanContext, source: SourceSegment) -> LiveParts | None:
        return live_parts(context, source, read_blocks(self._env, self._job, self._control, source))

    def _deliver(self, context: CleanContext, resolution: Resolution, group: CleanedGroup) -> None:
        """Write the key index of a group's output, then deliver it."""
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
                SegmentLiveness(output.base_offset, output.size_bytes, output.size_bytes)
            )
            indexes = [resolution.index_of(base) for base in group.source_base_offsets]
            with suppress(NoScratchSpaceError, DamagedScratchError):  # the next clean reads it
                write_derived_index(context, indexes, output)
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
