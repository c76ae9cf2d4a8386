"""The decisions and counters of one group, for both ways of cleaning.

Rules
- After a damaged segment no tombstone or marker is removed or gets a delete horizon: the damaged
  segment may have records that it deletes. The same holds after a segment that was unreadable when
  the following ones were cleaned (`CleanJob.clean_below`), even if it is readable now.
- While the clock is not trusted, nothing gets a delete horizon. Nor does it if the horizon is
  larger than any timestamp: then tombstones stay for ever.
- A single segment without a change is not replaced; in an expiry job, no group without a change is.
"""

from collections.abc import Collection

from cleaner.engine.batch_blocks import BatchBlocks
from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.outcome import RewriteTotals
from cleaner.engine.output import CleanedOutput, OutputBuffers, Write, write_now
from cleaner.job import (
    LARGEST_TIMESTAMP_MS,
    NO_HORIZON,
    UNKNOWN_HORIZON,
    UNKNOWN_RECORDS,
    CleanedGroup,
    SegmentHorizon,
    SourceSegment,
)
from storage.swap.swap_journal import CleanedSegment


class GroupAccounting:
    """For each group: `begin`, `close_segment` for each segment, then `leave` or `finish`."""

    def __init__(self, context: CleanContext, damaged: Collection[int]) -> None:
        """`damaged`: base offsets of damaged segments; it may grow."""
        self._context = context
        self._damaged = damaged
        self._horizons: list[int] = []  # of the group's segments so far
        self.totals = RewriteTotals()

    def begin(self, group: tuple[SourceSegment, ...]) -> None:
        """Reset the counters and set the rules for the group."""
        job, state = self._context.job, self._context.state
        state[fields.FIRST_COUNT : fields.END_COUNT] = 0
        self._context.space.aborted_kept.fill(0)
        self._horizons.clear()
        sound = self._is_sound(group)
        timed = job.drop_expired_tombstones and job.view is None
        is_reached = job.delete_horizon_ms <= LARGEST_TIMESTAMP_MS
        stamps = sound and timed and not job.expired_only and is_reached
        state[fields.SOUND] = sound
        state[fields.DROP_EXPIRED] = sound and job.drop_expired_tombstones
        state[fields.HORIZON_MS] = job.delete_horizon_ms if stamps else -1

    def _is_sound(self, group: tuple[SourceSegment, ...]) -> bool:
        """Return whether tombstones of the group have superseded all older records."""
        job = self._context.job
        if any(base < group[0].base_offset for base in self._damaged):
            return False
        clean_below = job.first_dirty_offset if job.clean_below is None else job.clean_below
        return clean_below >= job.first_dirty_offset or group[-1].next_base_offset <= clean_below

    def open_output(
        self,
        group: tuple[SourceSegment, ...],
        buffers: OutputBuffers,
        write: Write = write_now,
        blocks: BatchBlocks | None = None,
    ) -> CleanedOutput:
        """Return the output of the group; `blocks` get its batches."""
        context = self._context
        return CleanedOutput(
            context.outputs,
            context.job.outputs,
            base_offset=group[0].base_offset,
            job_id=context.job.job_id,
            index_interval_bytes=context.job.index_interval_bytes,
            buffers=buffers,
            state=context.state,
            charge=context.charge_write,
            write=write,
            blocks=blocks,
        )

    def close_segment(self) -> None:
        """Record the horizon of a processed segment."""
        # After damage nothing is removed, so the horizons are not known to be complete.
        state = self._context.state
        sound = state[fields.SOUND]
        self._horizons.append(int(state[fields.EARLIEST_MS]) if sound else UNKNOWN_HORIZON)

    def is_unchanged(self, group: tuple[SourceSegment, ...], output_bytes: int) -> bool:
        """Return whether the group needs no replacement; `output_bytes`: size of the survivors."""
        changed = (
            self._context.state[fields.BATCHES_REBUILT]
            or self._context.state[fields.BATCHES_DROPPED]
        )
        alone = len(group) == 1 or self._context.job.expired_only
        size_bytes = sum(source.size_bytes for source in group)
        return alone and not changed and output_bytes == size_bytes

    def leave(self, group: tuple[SourceSegment, ...]) -> None:
        """Count an unchanged group."""
        self._count(group, None, sum(source.size_bytes for source in group))
        records = int(self._context.state[fields.RECORDS_OUT])
        if len(group) > 1:  # in an expiry job; the counter is that of the group
            records = UNKNOWN_RECORDS
        for source, horizon_ms in zip(group, self._horizons, strict=True):
            self.record_horizon(source.base_offset, source.size_bytes, horizon_ms, records)

    def finish(
        self, group: tuple[SourceSegment, ...], cleaned: CleanedSegment | None
    ) -> CleanedGroup:
        """Count and return a group that is to be replaced."""
        state = self._context.state
        size_bytes = cleaned.files[0].size_bytes if cleaned else 0
        result = CleanedGroup(
            source_base_offsets=tuple(source.base_offset for source in group),
            output=cleaned,
            bytes_before=sum(source.size_bytes for source in group),
            bytes_after=size_bytes,
            records_before=int(state[fields.RECORDS_IN]),
            records_after=int(state[fields.RECORDS_OUT]),
        )
        self._count(group, result, size_bytes)
        if cleaned is not None:
            earliest_ms = min(
                (horizon for horizon in self._horizons if horizon >= 0), default=NO_HORIZON
            )
            if UNKNOWN_HORIZON in self._horizons:
                earliest_ms = UNKNOWN_HORIZON
            base_offset, records = group[0].base_offset, result.records_after
            self.record_horizon(base_offset, size_bytes, earliest_ms, records)
        return result

    def record_horizon(
        self,
        base_offset: int,
        size_bytes: int,
        horizon_ms: int,
        records: int = UNKNOWN_RECORDS,
    ) -> None:
        """Add the horizon of a segment, and how many records it has, to the report."""
        horizon = SegmentHorizon(base_offset, size_bytes, horizon_ms, records)
        self.totals.horizons.append(horizon)

    def _count(
        self, group: tuple[SourceSegment, ...], result: CleanedGroup | None, bytes_after: int
    ) -> None:
        state, totals = self._context.state, self.totals
        totals.groups += result is not None
        totals.bytes_before += sum(source.size_bytes for source in group)
        totals.bytes_after += bytes_after
        if result is not None:
            totals.bytes_written += bytes_after
            totals.bytes_replaced += result.bytes_before
        totals.records_before += int(state[fields.RECORDS_IN])
        totals.records_after += int(state[fields.RECORDS_OUT])
        totals.tombstones_kept += int(state[fields.TOMBSTONES_KEPT])
        totals.tombstones_removed += int(state[fields.TOMBSTONES_REMOVED])
        totals.keyless += int(state[fields.KEYLESS])
        totals.aborted += int(state[fields.RECORDS_ABORTED])
        totals.markers_removed += int(state[fields.MARKERS_REMOVED])
