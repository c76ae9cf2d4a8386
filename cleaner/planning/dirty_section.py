"""Compute the dirty section of a log and the expired part of its clean section. Pure.

plan.py decides whether the section is dirty enough. LogFacts has the offsets that bound the
section; the one of a compacted view comes from `Views.limit_of` (broker/views/views.py).

The arithmetic is Kafka's (LogCleanerManager, LogToClean; KIP-58 for the minimum lag, KIP-354 for
the maximum): the dirty section ends at a segment's base, sizes are bytes of log files, lags apply
to segments. Unlike Kafka, it ignores damaged segments and those below the log start offset, counts
known intervals beyond the checkpoint as clean, and finds segments with expired tombstones even
without new data. It counts a segment with clean and dirty offsets once, as dirty: a selective clean
merges segments across the first dirty offset.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from cleaner.host import LogFacts, Undecided
from cleaner.job import UNKNOWN_HORIZON
from cleaner.planning.cleaner_state import PartitionCleanerState
from cleaner.planning.findings import ClockReading, Reason
from cleaner.planning.intervals import Interval, merged, reach, without
from storage.model import SegmentFacts

# Expired tombstones may wait this long (or a tenth of delete.retention.ms if that is longer); then
# they are as urgent as a missed maximum lag.
EXPIRY_GRACE_MS: Final = 3_600_000
# 1 / share of delete.retention.ms; also the pause between two such jobs.
EXPIRY_GRACE_SHARE: Final = 10

_UNDECIDED: Final = {
    Undecided.HIGH_WATERMARK: Reason.HIGH_WATERMARK,
    Undecided.OPEN_TRANSACTION: Reason.OPEN_TRANSACTION,
    Undecided.VIEW: Reason.VIEW,
    Undecided.VIEW_UNKNOWN: Reason.VIEW_UNKNOWN,
}


class DirtySection(NamedTuple):
    """[first_dirty_offset, end_offset) can be cleaned; sizes in bytes of log files."""

    first_dirty_offset: int
    end_offset: int  # a segment's base; not above the first dirty offset if nothing is dirty
    bound: Reason  # why it ends there
    clean_bytes: int
    dirty_bytes: int
    deadline_ms: int | None  # wall time by which the oldest dirty batch has to be cleaned
    clean_below: int  # the correct checkpoint: no dirty byte and no damage below it
    ripe_ms: int | None = None  # if the minimum lag is the bound: when it ends
    waiting_bytes: int = 0  # not cleanable yet, from the end offset on
    active_bytes: int = 0  # of these, in the active segment
    oldest_ms: int | None = None  # first timestamp of all dirty batches

    @property
    def ratio(self) -> float:
        """Return the dirty share of the bytes that a clean would touch."""
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0


class ExpiredSection(NamedTuple):
    """Clean segments with expired tombstones or markers."""

    base_offsets: tuple[int, ...]
    size_bytes: int
    since_ms: int  # wall time of the earliest horizon
    deadline_ms: int | None  # None if no horizon is known


def live_segments(facts: LogFacts) -> list[SegmentFacts]:
    """Return the segments that are not wholly below the log start offset, and the active one."""
    *closed, active = facts.segments
    return [*(s for s in closed if s.next_base_offset > facts.log_start_offset), active]


def segment_base(segments: Sequence[SegmentFacts], offset: int) -> int:
    """Return the base of the segment that has an offset; of the first one if that is below all."""
    bases = (s.base_offset for s in segments if s.base_offset <= offset)
    return max(bases, default=segments[0].base_offset)


def dirty_section(
    facts: LogFacts, now: ClockReading, cleaner_state: PartitionCleanerState
) -> DirtySection:
    """Return the bounds and sizes of the dirty section."""
    checkpoint = facts.first_dirty_offset
    live = live_segments(facts)
    active = live[-1]
    damaged = {damage.base_offset for damage in facts.damaged}
    later = [s for s in live[:-1] if s.next_base_offset > checkpoint]
    known_clean = cleaner_state.clean_ranges(later)
    broken = [(s.base_offset, s.next_base_offset) for s in later if s.base_offset in damaged]
    used = merged([*known_clean, *broken])

    def is_dirty(segment: SegmentFacts) -> bool:
        span = max(segment.base_offset, checkpoint), segment.next_base_offset
        return bool(without(span, used))

    dirty = [s for s in later if is_dirty(s)]
    end, bound, ripe_ms = _bound(facts, active, dirty, now)
    end = segment_base(live, end)  # the segment with the bound is excluded as a whole
    pieces = without((checkpoint, end), used)
    first_dirty = pieces[0][0] if pieces else checkpoint
    dirty_bytes = sum(s.size_bytes for s in dirty if s.base_offset < end)
    clean_bytes = sum(
        s.size_bytes
        for s in live
        if s.base_offset not in damaged
        and s.base_offset < max(first_dirty, end)
        and not is_dirty(s)
    )
    waiting = [s for s in dirty if s.base_offset >= end]
    active_bytes = active.size_bytes if active.next_base_offset > checkpoint else 0
    aged = [
        (before, s)
        for before, s in zip((None, *live), live[:-1], strict=False)
        if s.next_base_offset > checkpoint and s.first_batch_timestamp_ms > 0 and is_dirty(s)
    ]
    lag_starts = [_lag_start_ms(s, before, now.wall_ms, cleaner_state) for before, s in aged]
    stamps = [s.first_batch_timestamp_ms for _, s in aged]
    oldest = [*stamps, active.first_batch_timestamp_ms] if active_bytes else stamps
    max_lag_ms = facts.config.max_compaction_lag_ms
    return DirtySection(
        first_dirty_offset=first_dirty,
        end_offset=end,
        bound=bound,
        clean_bytes=clean_bytes,
        dirty_bytes=dirty_bytes,
        deadline_ms=min(lag_starts) + max_lag_ms if lag_starts else None,
        clean_below=_clean_below(checkpoint, known_clean, later, end),
        ripe_ms=ripe_ms,
        waiting_bytes=sum(s.size_bytes for s in waiting) + active_bytes,
        active_bytes=active_bytes,
        oldest_ms=min((stamp for stamp in oldest if stamp > 0), default=None),
    )


def _clean_below(
    checkpoint: int, known_clean: Sequence[Interval], later: Sequence[SegmentFacts], end: int
) -> int:
    """Return the first dirty offset, past clean intervals, gaps and empty segments."""
    empty = [
        (s.base_offset, s.next_base_offset)
        for s in later
        if s.size_bytes == 0 and s.base_offset < end
    ]
    offset = reach(checkpoint, [*known_clean, *empty])
    return max(checkpoint, min(offset, max(end, checkpoint)))


def _bound(
    facts: LogFacts, active: SegmentFacts, dirty_closed: Sequence[SegmentFacts], now: ClockReading
) -> tuple[int, Reason, int | None]:
    """Return the first uncleanable offset before rounding, the reason, and when that ends."""
    bounds = [
        (active.base_offset, Reason.ACTIVE_SEGMENT),
        (facts.undecided_offset, _UNDECIDED[facts.undecided_by]),
    ]
    lag_ms = facts.config.min_compaction_lag_ms
    ripe_ms = None
    if lag_ms > 0:
        young = next((s for s in dirty_closed if newest_ms(s) > now.wall_ms - lag_ms), None)
        if young is not None:
            bounds.append((young.base_offset, Reason.MIN_LAG))
            ripe_ms = newest_ms(young) + lag_ms
    end, reason = min(bounds, key=lambda bound: bound[0])
    return end, reason, ripe_ms if reason is Reason.MIN_LAG else None


def _lag_start_ms(
    segment: SegmentFacts,
    before: SegmentFacts | None,
    wall_ms: int,
    cleaner_state: PartitionCleanerState,
) -> int:
    """Return the time from which the maximum lag of a dirty segment counts.

    It is the timestamp of the first batch, as in Kafka, but not before the segment was created:
    a backfill with old timestamps is not late when it arrives. The last write to the segment
    before bounds the creation; a time in the future is ignored.
    """
    start_ms = max(segment.first_batch_timestamp_ms, cleaner_state.first_seen_ms)
    if before is not None and before.last_modified_ms <= wall_ms:
        start_ms = max(start_ms, before.last_modified_ms)
    return start_ms


def newest_ms(segment: SegmentFacts) -> int:
    """Return the time of the newest record, or of the file if records have no time."""
    stamp = segment.largest_timestamp_ms
    return stamp if stamp >= 0 else segment.last_modified_ms


# Expired tombstones --------------------------------------------------------------------------


def expired_section(
    facts: LogFacts, clean_below: int, now: ClockReading, cleaner_state: PartitionCleanerState
) -> tuple[ExpiredSection | None, int | None]:
    """Return the clean segments that can lose tombstones now, and the time of the next expiry.

    Only segments wholly below `clean_below`, `undecided_offset` and all damage count. Elsewhere
    an older value of the key may remain: in an unreadable segment, in one that was stamped before
    all older records were searched, or in a compacted view.

    A segment with an unknown horizon (the state was lost, or the folder taken over) is read once,
    delete.retention.ms after the partition was first seen: by then every earlier stamp has
    expired. This has no deadline, as it may find nothing. With an untrusted clock nothing expires.
    """
    if not facts.clock_trusted:
        return None, None
    retention_ms = facts.config.delete_retention_ms
    damaged = (damage.base_offset for damage in facts.damaged)
    limit = min([clean_below, facts.undecided_offset, *damaged])
    scan_ms = cleaner_state.first_seen_ms + retention_ms
    due: list[tuple[SegmentFacts, int]] = []
    next_ms: int | None = None
    known_ms: list[int] = []
    rest_until_ms = 0
    if cleaner_state.expired_at_ms is not None:
        rest_until_ms = cleaner_state.expired_at_ms + retention_ms // EXPIRY_GRACE_SHARE
    for segment in live_segments(facts)[:-1]:
        horizon = cleaner_state.horizon(segment)
        if segment.next_base_offset > limit:
            break
        is_known = horizon != UNKNOWN_HORIZON
        if not is_known:
            horizon = scan_ms
        if horizon < 0 or segment.size_bytes == 0:
            continue
        if max(horizon, rest_until_ms) <= now.wall_ms:
            due.append((segment, horizon))
            known_ms += [horizon] if is_known else []
        elif next_ms is None or horizon < next_ms:
            next_ms = horizon
    if not due:
        return None, None if next_ms is None else max(next_ms, rest_until_ms)
    since_ms = min(horizon for _, horizon in due)
    grace_ms = max(EXPIRY_GRACE_MS, retention_ms // EXPIRY_GRACE_SHARE)
    section = ExpiredSection(
        tuple(segment.base_offset for segment, _ in due),
        sum(segment.size_bytes for segment, _ in due),
        since_ms,
        min(known_ms) + grace_ms if known_ms else None,
    )
    return section, next_ms
