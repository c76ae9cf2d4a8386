"""What is decided and counted once per group, whichever way its batches are gone through.

Rules
- Behind a damaged segment no tombstone or marker goes and none gets a delete horizon. What it
  deleted, or decided, may still stand in there. The same holds behind one that could not be read
  when what follows it was cleaned (`CleanJob.clean_below`), even if it can be read now.
- While the clock is not trusted nothing gets a delete horizon: it would be one by that clock.
- A single segment that would come out as it went in is not replaced. Where only what has expired
  is looked for, no group is.
"""

from collections.abc import Collection

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.outcome import RewriteTotals
from cleaner.engine.output import CleanedOutput, OutputBuffers, Write, write_now
from cleaner.job import NO_HORIZON, UNKNOWN_HORIZON, CleanedGroup, SegmentHorizon, SourceSegment
from storage.segments.swap import CleanedSegment


class GroupAccounting:
    """One group after the other: `begin`, a `close_segment` for each, then `leave` or `finish`."""

    def __init__(self, context: CleanContext, damaged: Collection[int]) -> None:
        """`damaged`: base offsets of segments that are left as they are; it may grow."""
        self._context = context
        self._damaged = damaged
        self._horizons: list[int] = []  # of the group's segments, as far as it is
        self.totals = RewriteTotals()

    def begin(self, group: tuple[SourceSegment, ...]) -> None:
        """Say what may go from the group, and forget what was counted in the one before."""
        job, state = self._context.job, self._context.state
        state[fields.FIRST_COUNT : fields.END_COUNT] = 0
        self._context.space.aborted_kept.fill(0)
        self._horizons.clear()
        sound = self._is_sound(group)
        timed = job.drop_expired_tombstones and not job.latest_only
        stamps = sound and timed and not job.expired_only
        state[fields.SOUND] = sound
        state[fields.DROP_EXPIRED] = sound and job.drop_expired_tombstones
        state[fields.HORIZON_MS] = job.horizon_ms if stamps else -1

    def _is_sound(self, group: tuple[SourceSegment, ...]) -> bool:
        """Whether all that is older was searched for the keys of what is clean in the group."""
        job = self._context.job
        if any(base < group[0].base_offset for base in self._damaged):
            return False
        clean_below = job.first_dirty_offset if job.clean_below is None else job.clean_below
        return clean_below >= job.first_dirty_offset or group[-1].base_offset <= clean_below

    def open_output(
        self, group: tuple[SourceSegment, ...], buffers: OutputBuffers, write: Write = write_now
    ) -> CleanedOutput:
        """Where the group's survivors go, by `write`."""
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
        )

    def close_segment(self) -> None:
        """Note the horizon that is left in a segment of the group."""
        # Behind damage nothing can go, whatever horizons there are: later they matter again.
        state = self._context.state
        sound = state[fields.SOUND]
        self._horizons.append(int(state[fields.EARLIEST_MS]) if sound else UNKNOWN_HORIZON)

    def is_unchanged(self, group: tuple[SourceSegment, ...], output_bytes: int) -> bool:
        """Whether the group needs no replacing; `output_bytes` is the size of what survived."""
        changed = (
            self._context.state[fields.BATCHES_REBUILT]
            or self._context.state[fields.BATCHES_DROPPED]
        )
        alone = len(group) == 1 or self._context.job.expired_only
        size_bytes = sum(source.size_bytes for source in group)
        return alone and not changed and output_bytes == size_bytes

    def leave(self, group: tuple[SourceSegment, ...]) -> None:
        """Count a group that stays as it is."""
        self._count(group, None, sum(source.size_bytes for source in group))
        for source, horizon_ms in zip(group, self._horizons, strict=True):
            self.record_horizon(source.base_offset, source.size_bytes, horizon_ms)

    def finish(
        self, group: tuple[SourceSegment, ...], cleaned: CleanedSegment | None
    ) -> CleanedGroup:
        """Count a group that is to be replaced."""
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
            self.record_horizon(group[0].base_offset, size_bytes, earliest_ms)
        return result

    def record_horizon(self, base_offset: int, size_bytes: int, horizon_ms: int) -> None:
        """Say how a segment stands after the clean."""
        self.totals.horizons.append(SegmentHorizon(base_offset, size_bytes, horizon_ms))

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
