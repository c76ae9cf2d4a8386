"""Estimate what the next clean of a partition costs and frees. Pure.

Rules
- The figures come from what cleans have learned: the live bytes of each segment that a clean has
  read, and for the others the share of new data that survived earlier cleans. Nothing is read.
- The last clean that decided the keys of a segment counted its live bytes. Later records may have
  superseded more of it, so a clean frees at least the known garbage.
- `RatioCost` is about the clean after the next one. With a dirty ratio r, it starts when the share
  r of the log is new; with selective cleans, a smaller share (plan.py:unread_ratio). Only the cost
  of a clean of the whole log is estimated: that of a selective one depends on which keys follow.
- If nothing is dirty or expired, no clean starts: it costs and frees nothing.
- Key indexes, scratch files and index files are not counted: about 24 bytes for each record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from cleaner.engine.selective.victims import (
    GroupLiveness,
    choose_victims,
    liveness_of,
    split_groups,
)
from cleaner.host import LogFacts
from cleaner.planning.cleaner_state import PartitionCleanerState
from cleaner.planning.dirty_section import live_segments, segment_base
from cleaner.planning.grouping import WORKER_BYTES_PER_SECOND, group_all
from cleaner.planning.plan import Verdict, slack_of, unread_ratio
from cleaner.planning.survival_curve import SurvivalRow, survival_curve
from config.topics.keys import TopicConfig
from storage.model import SegmentFacts

# What another slack or dirty ratio would cost is shown for these.
SLACKS: Final = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0)
RATIOS: Final = (0.05, 0.1, 0.2, 0.33, 0.5, 0.7)


@dataclass(frozen=True, slots=True)
class GroupEstimate:
    """Neighbouring segments that a clean rewrites together, or leaves. Sizes in bytes."""

    base_offset: int
    next_offset: int
    segments: int
    size_bytes: int
    live_bytes: int
    is_measured: bool  # whether a clean has counted the live bytes of all its segments
    is_rewritten: bool


@dataclass(frozen=True, slots=True)
class CleanCost:
    """What a clean reads, writes and frees, in bytes."""

    read_bytes: int
    written_bytes: int
    freed_bytes: int

    def seconds(self, read_rate: float, write_rate: float) -> float:
        """Return the duration at these bytes per second."""
        return self.read_bytes / read_rate + self.written_bytes / write_rate


@dataclass(frozen=True, slots=True)
class RatioCost:
    """What a dirty ratio costs at the clean after the next one."""

    ratio: float
    log_bytes: int  # before each clean, without the active segment
    new_bytes: int  # written by clients between two cleans
    read_bytes: int | None  # of each clean; None for selective ones
    written_bytes: int | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The next clean of a partition."""

    is_selective: bool
    slack: float
    cost: CleanCost
    groups: tuple[GroupEstimate, ...]
    by_slack: tuple[tuple[float, CleanCost], ...]  # of selective cleans; empty for other strategies
    ratio: float  # min.cleanable.dirty.ratio
    by_ratio: tuple[RatioCost, ...]  # empty before the first clean
    survival: tuple[SurvivalRow, ...]


def estimate(
    facts: LogFacts, verdict: Verdict, state: PartitionCleanerState, *, slack: float | None = None
) -> Estimate | None:
    """Return an estimate; None if nothing of the log can be cleaned.

    `slack` replaces that of the topic (plan.py:slack_of).
    """
    section = verdict.section
    if section is None or not facts.segments:
        return None
    # After a truncation the first dirty offset may be inside a segment, which is not cleaned then.
    end = max(section.end_offset, section.first_dirty_offset)
    end = segment_base(live_segments(facts), end)
    grouped: Sequence[Sequence[SegmentFacts]] = group_all(facts, end)
    if not grouped:
        return None
    live_bytes_of = partial(_live_bytes, section.first_dirty_offset, state)
    if verdict.is_selective:
        grouped = split_groups(grouped, live_bytes_of, end)
    liveness = [liveness_of(group, map(live_bytes_of, group), end) for group in grouped]
    slack = slack_of(facts.config) if slack is None else slack
    by_slack: tuple[tuple[float, CleanCost], ...] = ()
    if verdict.is_selective:
        victims = set(choose_victims(liveness, slack))
        cost = _selective_cost(grouped, liveness, victims, state)
        slacks = sorted({*SLACKS, slack})
        by_slack = tuple(
            (s, _selective_cost(grouped, liveness, set(choose_victims(liveness, s)), state))
            for s in slacks
        )
    else:
        garbage = sum(group.size_bytes - group.live_bytes for group in liveness)
        written = sum(group.live_bytes for group in liveness)
        victims = set(range(len(grouped)))
        cost = CleanCost(verdict.input_bytes, written, garbage)
    left_bytes = sum(live.size_bytes for live in liveness) - cost.freed_bytes
    if section.dirty_bytes == 0 and not verdict.to_clean:
        victims, cost = set(), CleanCost(0, 0, 0)
    groups = tuple(
        GroupEstimate(
            base_offset=group[0].base_offset,
            next_offset=group[-1].next_base_offset,
            segments=len(group),
            size_bytes=live.size_bytes,
            live_bytes=live.live_bytes,
            is_measured=all(state.live_bytes_of(segment) is not None for segment in group),
            is_rewritten=at in victims,
        )
        for at, (group, live) in enumerate(zip(grouped, liveness, strict=True))
    )
    return Estimate(
        is_selective=verdict.is_selective,
        slack=slack,
        cost=cost,
        groups=groups,
        by_slack=by_slack,
        ratio=facts.config.min_cleanable_dirty_ratio,
        by_ratio=_by_ratio(facts, verdict, state, left_bytes),
        survival=survival_curve(facts, state),
    )


def _by_ratio(
    facts: LogFacts, verdict: Verdict, state: PartitionCleanerState, left_bytes: int
) -> tuple[RatioCost, ...]:
    """Return the cost by dirty ratio if the next clean leaves `left_bytes`."""
    if state.observations == 0 or left_bytes == 0:
        return ()
    ratios = sorted({*RATIOS, facts.config.min_cleanable_dirty_ratio})
    return tuple(
        _selective_ratio_cost(facts.config, ratio, left_bytes)
        if verdict.is_selective
        else _ratio_cost(ratio, left_bytes, state.survivorship)
        for ratio in ratios
        if 0 < ratio < 1
    )


def _selective_ratio_cost(config: TopicConfig, ratio: float, left_bytes: int) -> RatioCost:
    """Return what is known of the cost of selective cleans if one leaves `left_bytes`."""
    limit = unread_ratio(replace(config, min_cleanable_dirty_ratio=ratio))
    new_bytes = int(left_bytes * limit / (1 - limit))
    return RatioCost(ratio, left_bytes + new_bytes, new_bytes, None, None)


def _ratio_cost(ratio: float, left_bytes: int, survivorship: float) -> RatioCost:
    """Return the cost if a clean leaves `left_bytes`, and this share of new data survives one."""
    new_bytes = int(left_bytes * ratio / (1 - ratio))
    log_bytes = left_bytes + new_bytes
    read_bytes, written_bytes = left_bytes + 2 * new_bytes, left_bytes + survivorship * new_bytes
    return RatioCost(ratio, log_bytes, new_bytes, read_bytes, int(written_bytes))


def _live_bytes(
    first_dirty_offset: int, state: PartitionCleanerState, segment: SegmentFacts
) -> int:
    """Return how much of a segment is alive: as counted, or as earlier cleans lead to expect."""
    counted = state.live_bytes_of(segment)
    if counted is not None:
        return counted
    if segment.next_base_offset <= first_dirty_offset or state.observations == 0:
        return segment.size_bytes
    return int(segment.size_bytes * state.survivorship)


def _selective_cost(
    groups: Sequence[Sequence[SegmentFacts]],
    liveness: Sequence[GroupLiveness],
    victims: set[int],
    state: PartitionCleanerState,
) -> CleanCost:
    """Return the cost: it reads each segment without a key index, and the groups it rewrites.

    It removes a group without a live record unread.
    """
    unknown = sum(
        segment.size_bytes
        for group in groups
        for segment in group
        if state.live_bytes_of(segment) is None
    )
    rewritten = sum(liveness[at].size_bytes for at in victims if liveness[at].live_bytes)
    before = sum(liveness[at].size_bytes for at in victims)
    after = sum(liveness[at].live_bytes for at in victims)
    return CleanCost(unknown + rewritten, after, before - after)


def rates(
    read_limit: int | None, write_limit: int | None, bytes_moved: int, seconds: float
) -> tuple[float, float]:
    """Return the bytes per second that a worker reads and writes at present.

    They are the limits of the cleaner, or the rate of the last job where that is lower. Without
    both it is that of a worker with small compressed records.
    """
    measured = bytes_moved / seconds if seconds > 0 and bytes_moved > 0 else None
    rate = measured or WORKER_BYTES_PER_SECOND
    return min(rate, read_limit or rate), min(rate, write_limit or rate)
