"""What is chosen, and what is not and why."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleaner import states as s
from cleaner.host import JobInputs, LogFacts, OpenTransaction, Undecided
from cleaner.job import CleanJob
from cleaner.planning.cleaner_state import FRESH, PartitionCleanerState
from cleaner.planning.dirty_section import live_segments
from cleaner.planning.findings import ClockReading, Reason
from cleaner.planning.grouping import (
    group_all,
    plan_job,
)
from cleaner.planning.plan import (
    UNREAD_SHARE_MIN,
    Verdict,
    assess,
    default_strategy,
    slack_of,
    unread_ratio,
)
from cleaner.planning.scheduling_order import start_key
from cleaner.planning.survivorship import observed, updated
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from config.topics.table import CLEANER_STRATEGIES
from storage.model import SegmentFacts, TopicPartition
from storage.segments.damage import DamagedSegment
from tests.support.cleaner.log_facts import COMPACTED, even, facts, segment

NOW = ClockReading(wall_ms=100_000, monotonic_ms=5_000)
SETTINGS = CleanerSettings()
HOLE = DamagedSegment("/data/t-0/10.log", 10, 17, 40, "bad CRC")
INPUTS = JobInputs(hash_key=bytes(16), last_records=((7, 0, 3),))


def assess_partition(log: LogFacts, state: s.State = s.IDLE) -> Verdict:
    return assess(log, state, NOW)


def reasons(verdict: Verdict) -> list[Reason]:
    return [finding.reason for finding in verdict.findings]


def blockers(verdict: Verdict) -> list[Reason]:
    return [finding.reason for finding in verdict.findings if finding.blocks]


def end_of(log: LogFacts) -> int:
    section = assess_partition(log).section
    assert section is not None
    return section.end_offset


# --- candidates


def test_a_never_cleaned_compacted_log_is_cleaned_up_to_its_active_segment() -> None:
    verdict = assess_partition(facts(even(4)))
    assert verdict.to_clean
    assert verdict.section is not None
    assert (verdict.section.first_dirty_offset, verdict.section.end_offset) == (0, 40)
    assert verdict.section.ratio == 1.0
    assert reasons(verdict) == [Reason.POLICY, Reason.ACTIVE_SEGMENT, Reason.RATIO]


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (facts(even(4), config=TopicConfig(cleanup_policy=("delete",))), Reason.POLICY),
        (facts(even(4), config=TopicConfig(cleanup_policy=())), Reason.POLICY),
        (facts(even(4), config=replace(COMPACTED, policy_known=False)), Reason.POLICY_UNKNOWN),
        (facts([], offline="EIO on /data"), Reason.OFFLINE),
        (facts([]), Reason.OFFLINE),
    ],
    ids=lambda value: value.value if isinstance(value, Reason) else "",
)
def test_what_stands_in_the_way_is_named_and_no_checkpoint_is_touched(
    log: LogFacts, reason: Reason
) -> None:
    verdict = assess_partition(replace(log, checkpoint_offset=999))
    assert not verdict.to_clean
    assert blockers(verdict) == [reason]
    assert verdict.checkpoint_offset is None


def test_compact_and_delete_together_is_compacted() -> None:
    assert assess_partition(
        facts(even(2), config=TopicConfig(cleanup_policy=("compact", "delete")))
    ).to_clean


def test_all_obstacles_are_named_not_only_the_first() -> None:
    log = facts(even(4), damaged=(HOLE,), config=TopicConfig(cleanup_policy=("delete",)))
    verdict = assess_partition(log, s.Paused(1))
    assert blockers(verdict) == [Reason.POLICY, Reason.PAUSED_BY_BROKER]
    assert Reason.DAMAGED in reasons(verdict)


def test_damage_is_named_and_the_rest_is_cleaned_around_it() -> None:
    verdict = assess_partition(facts(even(4), damaged=(HOLE,)))
    assert verdict.to_clean
    assert Reason.DAMAGED in reasons(verdict)


@pytest.mark.parametrize("state", [s.Cleaning(), s.Publishing(), s.Aborting(0), s.Aborting(2)])
def test_a_partition_in_progress_is_no_candidate_and_its_checkpoint_is_left_alone(
    state: s.State,
) -> None:
    verdict = assess_partition(facts(even(4), checkpoint=999), state)
    assert blockers(verdict) == [Reason.IN_PROGRESS]
    assert verdict.checkpoint_offset is None


def test_a_paused_partition_is_no_candidate_and_its_checkpoint_is_left_alone() -> None:
    verdict = assess_partition(
        facts(even(4), checkpoint=999), s.Paused(2, s.Quarantined(0, "disk", 1))
    )
    assert blockers(verdict) == [Reason.PAUSED_BY_BROKER]
    assert verdict.checkpoint_offset is None


def test_a_quarantine_blocks_until_its_time_and_is_told_after_it() -> None:
    later = s.Quarantined(NOW.monotonic_ms + 1, "disk", 3)
    verdict = assess_partition(facts(even(4)), later)
    assert blockers(verdict) == [Reason.QUARANTINED]
    finding = next(f for f in verdict.findings if f.reason is Reason.QUARANTINED)
    assert dict(finding.values) == {"reason": "disk", "failures": 3, "wait_ms": 1}
    due = assess_partition(facts(even(4)), replace(later, until_ms=NOW.monotonic_ms))
    assert due.to_clean
    assert Reason.QUARANTINED in reasons(due)


# --- first dirty offset


@pytest.mark.parametrize(
    ("checkpoint", "first_dirty", "saved"),
    [
        (None, 10, None),
        (10, 10, None),
        (20, 20, None),
        (9, 10, 10),  # below the log start
        (45, 45, None),  # in the active segment, up to the log end
        (46, 10, 10),  # beyond the log end: all is dirty again
    ],
)
def test_the_first_dirty_offset_is_the_checkpoint_where_that_lies_in_the_log(
    checkpoint: int | None, first_dirty: int, saved: int | None
) -> None:
    log = facts(even(4)[1:], checkpoint=checkpoint)
    verdict = assess_partition(log)
    assert verdict.section is not None
    assert verdict.section.first_dirty_offset == first_dirty
    assert verdict.checkpoint_offset == saved
    assert log.usable_checkpoint == (None if saved or checkpoint is None else checkpoint)


def test_an_invalid_checkpoint_is_corrected_though_nothing_can_be_cleaned() -> None:
    verdict = assess_partition(facts([segment(30, 35)], checkpoint=99))
    assert not verdict.to_clean
    assert verdict.checkpoint_offset == 30


def test_an_invalid_checkpoint_is_corrected_though_the_ratio_is_too_low() -> None:
    config = replace(COMPACTED, min_cleanable_dirty_ratio=1.0)
    verdict = assess_partition(facts(even(4)[1:], checkpoint=3, config=config))
    assert blockers(verdict) == [Reason.RATIO]
    assert verdict.checkpoint_offset == 10


def test_a_dirty_part_without_bytes_moves_the_checkpoint_without_a_clean() -> None:
    log = [segment(0, 10), segment(10, 20, 0), segment(20, 30, 0), segment(30, 31)]
    verdict = assess_partition(facts(log, checkpoint=10))
    assert not verdict.to_clean
    assert verdict.checkpoint_offset == 30


def test_a_checkpoint_inside_the_active_segment_leaves_nothing_to_clean() -> None:
    verdict = assess_partition(facts(even(4), checkpoint=43))
    assert blockers(verdict) == [Reason.ACTIVE_SEGMENT]
    assert verdict.checkpoint_offset is None


def test_a_log_start_inside_the_only_segment_leaves_nothing_to_clean() -> None:
    verdict = assess_partition(facts([segment(0, 20)], log_start=7))
    assert blockers(verdict) == [Reason.ACTIVE_SEGMENT]


def test_a_log_that_is_all_clean_says_so() -> None:
    log = [segment(0, 10), segment(10, 10, 0)]
    assert blockers(assess_partition(facts(log, checkpoint=10))) == [Reason.NOTHING_DIRTY]


# --- first uncleanable offset


@pytest.mark.parametrize(
    ("undecided", "end"), [(45, 40), (40, 40), (39, 30), (30, 30), (29, 20), (0, 0)]
)
def test_the_segment_that_holds_an_undecided_offset_is_excluded_as_a_whole(
    undecided: int, end: int
) -> None:
    assert end_of(facts(even(4), undecided=undecided)) == end


def test_an_undecided_offset_in_the_first_dirty_segment_is_named() -> None:
    assert blockers(assess_partition(facts(even(4), undecided=5))) == [Reason.HIGH_WATERMARK]


def test_an_open_transaction_is_named_with_its_producer_and_since_when_it_is_silent() -> None:
    pending = OpenTransaction(producer_id=77, first_offset=25, since_ms=90_000)
    by = {"open_transaction": pending, "undecided_by": Undecided.OPEN_TRANSACTION}
    verdict = assess_partition(facts(even(4), undecided=25, checkpoint=20, **by))
    assert blockers(verdict) == [Reason.OPEN_TRANSACTION]
    values = dict(verdict.findings[-1].values)
    assert (values["producer_id"], values["transaction_first_offset"]) == (77, 25)
    assert values["since_ms"] == 90_000
    waiting = assess_partition(facts(even(4), undecided=25, checkpoint=20))
    assert dict(waiting.findings[-1].values)["undecided_offset"] == 25


def test_undecided_data_is_not_cleaned_in_spite_of_the_lag_and_decided_data_is_after_it() -> None:
    lag = replace(COMPACTED, min_compaction_lag_ms=1000)
    young = NOW.wall_ms - 10
    log = [segment(0, 3), segment(3, 4, first_ms=young), segment(4, 5, first_ms=young)]
    by = {"open_transaction": OpenTransaction(1, 0, 0), "undecided_by": Undecided.OPEN_TRANSACTION}
    assert blockers(assess_partition(facts(log, undecided=0, config=lag, **by))) == [
        Reason.OPEN_TRANSACTION
    ]
    assert end_of(facts(log, config=lag)) == 3
    later = NOW._replace(wall_ms=young + 1001)
    section = assess(facts(log, config=lag), s.IDLE, later).section
    assert section is not None
    assert section.end_offset == 4


def test_a_segment_that_is_too_young_says_when_it_will_not_be() -> None:
    lag = replace(COMPACTED, min_compaction_lag_ms=1000)
    log = [segment(0, 10, first_ms=NOW.wall_ms - 400), segment(10, 11)]
    verdict = assess_partition(facts(log, config=lag))
    assert dict(verdict.findings[-1].values)["until_ms"] == NOW.wall_ms + 600
    assert verdict.next_ms == NOW.wall_ms + 600


def test_the_minimum_lag_excludes_from_the_first_young_dirty_segment_on() -> None:
    lag = replace(COMPACTED, min_compaction_lag_ms=1000)
    old, young = NOW.wall_ms - 1000, NOW.wall_ms - 999
    log = [
        segment(0, 10, first_ms=young),  # clean already: its age does not matter
        segment(10, 20, first_ms=old),
        segment(20, 30, first_ms=old, largest_ms=young),
        segment(30, 40, first_ms=old),
        segment(40, 41, first_ms=old),
    ]
    verdict = assess_partition(facts(log, checkpoint=10, config=lag))
    assert verdict.section is not None
    assert (verdict.section.end_offset, verdict.section.bound) == (20, Reason.MIN_LAG)


def test_a_segment_without_timestamps_is_as_old_as_its_file() -> None:
    lag = replace(COMPACTED, min_compaction_lag_ms=1000)
    log = [
        segment(0, 10, first_ms=-1, largest_ms=-1, modified_ms=NOW.wall_ms),
        segment(10, 11),
    ]
    assert blockers(assess_partition(facts(log, config=lag))) == [Reason.MIN_LAG]


def test_without_a_minimum_lag_records_from_the_future_are_cleaned() -> None:
    log = [segment(0, 10, first_ms=NOW.wall_ms * 2), segment(10, 11)]
    assert end_of(facts(log)) == 10


def in_order(verdicts: Iterable[Verdict]) -> list[int]:
    """Partitions of the candidates in the order of their starts; all wait equally long."""
    candidates = [verdict for verdict in verdicts if verdict.to_clean]
    candidates.sort(key=lambda verdict: start_key(verdict, 0, NOW.wall_ms))
    return [verdict.partition.partition for verdict in candidates]


# --- worth it


def test_the_ratio_has_to_be_exceeded() -> None:
    log = facts(even(4), checkpoint=20)
    verdict = assess_partition(log)
    assert verdict.section is not None
    assert (verdict.section.clean_bytes, verdict.section.dirty_bytes) == (200, 200)
    assert verdict.section.ratio == 0.5
    assert blockers(verdict) == [Reason.RATIO]
    eager = replace(COMPACTED, min_cleanable_dirty_ratio=0.49)
    assert assess_partition(replace(log, config=eager)).to_clean


@pytest.mark.parametrize(
    ("first_dirty", "clean_bytes", "waiting_bytes"),
    [
        (0, 0, 50),
        (9, 0, 50),
        (10, 100, 50),
        (15, 100, 50),
        (20, 200, 50),
        (23, 200, 50),
        (25, 250, 0),
    ],
)
def test_a_segment_with_the_first_dirty_offset_counts_once_and_as_dirty(
    first_dirty: int, clean_bytes: int, waiting_bytes: int
) -> None:
    log = facts(even(2), checkpoint=first_dirty)
    section = assess_partition(log).section
    assert section is not None
    assert section.clean_bytes == clean_bytes
    assert section.waiting_bytes == waiting_bytes
    all_bytes = sum(s.size_bytes for s in log.segments)
    assert section.clean_bytes + section.dirty_bytes + section.waiting_bytes == all_bytes


def test_segments_below_the_log_start_belong_to_retention() -> None:
    log = facts(even(4), log_start=23, checkpoint=0)
    verdict = assess_partition(log)
    assert verdict.section is not None
    assert (verdict.section.clean_bytes, verdict.section.dirty_bytes) == (0, 200)
    job = plan_job(log, verdict, INPUTS, SETTINGS, job_id="r", now_ms=1)
    assert job is not None
    assert job.groups[0][0].base_offset == 20
    assert (job.log_start_offset, job.first_dirty_offset) == (23, 23)


@pytest.mark.parametrize(("first_ms", "cleaned"), [(90_000, False), (89_999, True)])
def test_over_the_maximum_lag_the_ratio_does_not_matter(first_ms: int, cleaned: bool) -> None:
    config = replace(COMPACTED, max_compaction_lag_ms=10_000, min_cleanable_dirty_ratio=1.0)
    log = [segment(0, 10), segment(10, 20, first_ms=first_ms), segment(20, 21)]
    verdict = assess_partition(facts(log, checkpoint=10, config=config))
    assert verdict.to_clean == cleaned
    assert verdict.over_lag_ms == int(cleaned)
    assert (Reason.MAX_LAG in reasons(verdict)) == cleaned


HOUR_MS = 3_600_000


def hourly(count: int) -> list[SegmentFacts]:
    return [
        segment(n, n + 1, first_ms=n * HOUR_MS + 1, largest_ms=(n + 1) * HOUR_MS)
        for n in range(count)
    ]


def sizes_of(log: LogFacts) -> list[int]:
    return [len(group) for group in group_all(log, log.segments[-1].base_offset)]


def test_a_merged_segment_spans_no_more_than_a_tenth_of_the_time_after_which_records_go() -> None:
    both = replace(COMPACTED, cleanup_policy=("compact", "delete"), retention_ms=30 * HOUR_MS)
    assert sizes_of(facts(hourly(8), config=both)) == [3, 3, 1]
    assert sizes_of(facts(hourly(8), config=replace(both, retention_ms=HOUR_MS))) == [1] * 7
    assert sizes_of(facts(hourly(8), config=replace(both, retention_ms=-1))) == [7]
    assert sizes_of(facts(hourly(8), config=replace(both, cleanup_policy=("compact",)))) == [7]


def test_a_merged_segment_does_not_grow_in_time_with_every_clean() -> None:
    both = replace(COMPACTED, cleanup_policy=("compact", "delete"), retention_ms=30 * HOUR_MS)
    log = hourly(12)
    for _ in range(5):
        groups = group_all(facts(log, config=both), log[-1].base_offset)
        merged = [
            segment(
                group[0].base_offset,
                group[-1].next_base_offset,
                first_ms=group[0].first_batch_timestamp_ms,
                largest_ms=group[-1].largest_timestamp_ms,
            )
            for group in groups
        ]
        log = [*merged, log[-1]]
    spans = [
        segment_facts.largest_timestamp_ms - segment_facts.first_batch_timestamp_ms
        for segment_facts in log
    ]
    assert max(spans) <= 3 * HOUR_MS


def late_by(log: LogFacts, cleaner_state: PartitionCleanerState = FRESH) -> int:
    return assess(log, s.IDLE, NOW, cleaner_state).over_lag_ms


def test_a_backfill_with_old_timestamps_is_not_late_before_it_was_in_the_log_for_the_lag() -> None:
    config = replace(COMPACTED, max_compaction_lag_ms=10_000)
    arrived = NOW.wall_ms - 9_000
    log = [
        segment(0, 10, first_ms=5, modified_ms=arrived),
        segment(10, 20, first_ms=6, modified_ms=arrived + 1000),
        segment(20, 21),
    ]
    backfill = facts(log, checkpoint=10, config=config)
    assert late_by(backfill) == 0
    late = assess(backfill, s.IDLE, NOW._replace(wall_ms=arrived + 10_007))
    assert late.over_lag_ms == 7


def test_a_deadline_counts_from_when_the_partition_was_first_seen() -> None:
    config = replace(COMPACTED, max_compaction_lag_ms=10_000)
    log = facts([segment(0, 10, first_ms=5), segment(10, 11)], config=config)
    assert late_by(log, PartitionCleanerState(first_seen_ms=NOW.wall_ms - 9_000)) == 0
    assert late_by(log, PartitionCleanerState(first_seen_ms=NOW.wall_ms - 10_003)) == 3


def test_a_file_time_that_lies_ahead_puts_no_deadline_off() -> None:
    config = replace(COMPACTED, max_compaction_lag_ms=10_000)
    ahead = segment(0, 10, first_ms=5, modified_ms=NOW.wall_ms + 1)
    log = facts(
        [ahead, segment(10, 20, first_ms=80_000), segment(20, 21)], config=config, checkpoint=10
    )
    assert late_by(log) == NOW.wall_ms - 90_000


def test_the_maximum_lag_ignores_segments_without_a_timestamp() -> None:
    config = replace(COMPACTED, max_compaction_lag_ms=1)
    log = [segment(0, 10, first_ms=-1), segment(10, 20, first_ms=0), segment(20, 21)]
    section = assess_partition(facts(log, config=config)).section
    assert section is not None
    assert section.deadline_ms is None


def test_over_lag_goes_first_by_deadline_then_ratio_then_name() -> None:
    late = replace(COMPACTED, max_compaction_lag_ms=1)

    def dirty(
        number: int, checkpoint: int, config: TopicConfig = COMPACTED, at: int = 1000
    ) -> LogFacts:
        log = [*even(4)[:3], segment(30, 40, first_ms=at), segment(40, 41)]
        return facts(
            log, partition=TopicPartition("t", number), checkpoint=checkpoint, config=config
        )

    logs = [
        dirty(0, 10),
        dirty(1, 0),
        dirty(2, 30, late, 2000),
        dirty(3, 30, late, 1500),
        dirty(4, 0),
        dirty(5, 30),
    ]
    assert in_order(assess_partition(log) for log in logs) == [3, 2, 1, 4, 0]


def test_a_requested_clean_goes_before_missed_deadlines_and_before_the_dirtiest() -> None:
    late = replace(COMPACTED, max_compaction_lag_ms=1)
    logs = [
        facts(even(4), partition=TopicPartition("t", 0)),
        facts(even(4), partition=TopicPartition("t", 1), checkpoint=30),
        facts(even(4), partition=TopicPartition("t", 2), checkpoint=30, config=late),
    ]
    verdict = assess(logs[1], s.IDLE, NOW, run_now=True)
    assert in_order([assess_partition(logs[0]), verdict, assess_partition(logs[2])]) == [1, 2, 0]


def test_the_dirtiest_is_busy_or_failed_then_the_next_and_at_last_none() -> None:
    logs = [
        facts(even(4), partition=TopicPartition("t", number), checkpoint=5 * number)
        for number in range(3)
    ]

    def chosen(*states: s.State) -> list[int]:
        verdicts = [assess(log, state, NOW) for log, state in zip(logs, states, strict=True)]
        return in_order(verdicts)

    failed = s.Quarantined(NOW.monotonic_ms + 1, "disk", 1)
    assert chosen(s.IDLE, s.IDLE, s.IDLE) == [0, 1, 2]
    assert chosen(failed, s.IDLE, s.IDLE) == [1, 2]
    assert chosen(s.Cleaning(), failed, s.IDLE) == [2]
    assert chosen(s.Cleaning(), failed, s.Paused(1)) == []


# --- what a clean is expected to gain


def test_kafkas_example_of_six_segments_is_half_dirty_and_not_eligible_at_one_half() -> None:
    verdict = assess_partition(facts(even(6), checkpoint=20, undecided=40))
    assert verdict.section is not None
    assert (verdict.section.clean_bytes, verdict.section.dirty_bytes) == (200, 200)
    assert (verdict.section.ratio, verdict.to_clean) == (0.5, False)


@pytest.mark.parametrize(("limit", "cleaned"), [(0.0, True), (0.99, True), (1.0, False)])
def test_a_log_that_was_never_cleaned_passes_every_ratio_below_one(
    limit: float, cleaned: bool
) -> None:
    config = replace(COMPACTED, min_cleanable_dirty_ratio=limit)
    assert assess_partition(facts(even(2), config=config)).to_clean == cleaned


@pytest.mark.parametrize("survivorship", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("checkpoint", [0, 10, 30])
def test_the_survivorship_strategy_counts_what_is_expected_to_go_per_byte_of_io(
    survivorship: float, checkpoint: int
) -> None:
    cleaner_state = PartitionCleanerState(survivorship=survivorship, observations=1)
    config = replace(COMPACTED, varve_cleaner_strategy="survivorship")
    verdict = assess(
        facts(even(4), checkpoint=checkpoint, config=config), s.IDLE, NOW, cleaner_state
    )
    clean, dirty = 10 * checkpoint, 400 - 10 * checkpoint
    gone = dirty * (1 - survivorship)
    assert verdict.score == pytest.approx(gone / (clean + 2 * dirty + clean + dirty - gone))
    assert verdict.to_clean == (dirty / 400 > 0.5), "the dirty ratio decides, survivorship ranks"
    assert verdict.live_bytes == clean + dirty * survivorship
    plain = assess(facts(even(4), checkpoint=checkpoint), s.IDLE, NOW, cleaner_state)
    assert plain.score == pytest.approx(dirty / 400 / 2), "half the dirty ratio: they compare"
    assert plain.live_bytes == verdict.live_bytes


GENERATIONAL = replace(
    COMPACTED, varve_cleaner_strategy="generational", varve_compaction_slack=0.25
)


def large(count: int) -> list[SegmentFacts]:
    """Segments of ten offsets with records of 400 bytes, and an active one."""
    return even(count, size_bytes=4_000, active_bytes=2_000)


def generational(cleaner_state: PartitionCleanerState, **log: Any) -> tuple[Verdict, CleanJob]:
    log_facts = facts(large(8), config=GENERATIONAL, **log)
    verdict = assess(log_facts, s.IDLE, NOW, cleaner_state)
    job = plan_job(log_facts, verdict, INPUTS, SETTINGS, job_id="r", now_ms=1)
    assert job is not None
    return verdict, job


def test_the_generational_strategy_cleans_selectively_with_the_topics_slack() -> None:
    _, job = generational(PartitionCleanerState(records=25), checkpoint=31)
    assert job.slack == 0.25
    assert (job.first_dirty_offset, job.end_offset) == (31, 80)


@pytest.mark.parametrize(
    ("cleaner_state", "log"),
    [
        (FRESH, {}),  # nothing is known of the last clean of the whole log
        (PartitionCleanerState(records=39), {}),  # 80 records since 39 were left
        (PartitionCleanerState(records=24), {"checkpoint": 31}),
        (PartitionCleanerState(records=100, cleaned=((60, 80),)), {}),
    ],
)
def test_the_generational_strategy_cleans_the_whole_log_now_and_then(
    cleaner_state: PartitionCleanerState, log: dict[str, int]
) -> None:
    assert generational(cleaner_state, **log)[1].slack is None


@pytest.mark.parametrize("slack", [0.0, 0.2, 0.5, 100.0])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1 / 3, 0.5, 0.9, 1.0])
def test_a_log_grows_as_far_with_selective_cleans_as_with_others(
    slack: float, ratio: float
) -> None:
    config = replace(GENERATIONAL, varve_compaction_slack=slack, min_cleanable_dirty_ratio=ratio)
    left, unread = slack_of(config), unread_ratio(config)
    assert left <= slack
    assert unread >= UNREAD_SHARE_MIN * ratio - 1e-9
    largest = (1 + left) * (1 - ratio)  # of what it may be
    assert largest == pytest.approx(1 - unread)
    if slack == 0:
        assert unread == ratio


@pytest.mark.parametrize("strategy", CLEANER_STRATEGIES)
def test_a_dirty_ratio_of_one_starts_no_clean(strategy: str) -> None:
    config = replace(COMPACTED, varve_cleaner_strategy=strategy, min_cleanable_dirty_ratio=1.0)
    assert not assess(facts(large(8), config=config), s.IDLE, NOW, FRESH).to_clean


def test_a_log_without_tombstones_needs_no_clean_of_the_whole_log() -> None:
    cleaner_state = PartitionCleanerState(records=12, has_tombstones=False)
    assert generational(cleaner_state, checkpoint=31)[1].slack == 0.25


def test_the_generational_strategy_decides_by_key_indexes() -> None:
    assert generational(FRESH)[1].by_index
    log_facts = facts(large(8))
    verdict = assess(log_facts, s.IDLE, NOW, FRESH)
    job = plan_job(log_facts, verdict, INPUTS, SETTINGS, job_id="r", now_ms=1)
    assert job is not None
    assert not job.by_index


@pytest.mark.parametrize(("size_bytes", "by_index"), [(3_199, False), (3_200, True)])
def test_a_log_of_small_records_is_cleaned_as_with_dirty_ratio(
    size_bytes: int, by_index: bool
) -> None:
    cleaner_state = PartitionCleanerState(records=100)
    verdicts = {
        strategy: assess(
            facts(
                even(8, size_bytes=size_bytes),
                config=replace(GENERATIONAL, varve_cleaner_strategy=strategy),
            ),
            s.IDLE,
            NOW,
            cleaner_state,
        )
        for strategy in ("generational", "dirty-ratio")
    }
    verdict, plain = verdicts["generational"], verdicts["dirty-ratio"]
    assert verdict.is_selective == by_index
    if not by_index:
        ratio = next(f for f in verdict.findings if f.reason is Reason.RATIO)
        assert dict(ratio.values)["not_indexed"] == "small records"
        values = tuple(value for value in ratio.values if value[0] != "not_indexed")
        findings = tuple(f._replace(values=values) if f is ratio else f for f in verdict.findings)
        assert replace(verdict, findings=findings) == plain


def test_without_space_for_scratch_files_no_log_is_cleaned_by_key_indexes_by_default() -> None:
    settings = CleanerSettings(strategy="generational")
    assert default_strategy(settings) == "generational"
    assert default_strategy(settings.model_copy(update={"spill_bytes_max": 0})) == "dirty-ratio"


def test_the_size_of_records_counts_those_that_a_clean_left() -> None:
    log = facts(even(8, size_bytes=400), config=GENERATIONAL)
    left = {(segment.base_offset, 400): 1 for segment in log.segments[:-1]}
    cleaner_state = PartitionCleanerState(records=100, live_records=left)
    assert assess(log, s.IDLE, NOW, cleaner_state).is_selective
    unknown = replace(cleaner_state, live_records={})
    assert not assess(log, s.IDLE, NOW, unknown).is_selective


def test_a_log_with_transactions_is_not_read_for_key_indexes() -> None:
    segments = large(8)
    segments[2] = segments[2]._replace(has_transactions=True)
    log_facts = facts(segments, config=GENERATIONAL)
    verdict = assess(log_facts, s.IDLE, NOW, PartitionCleanerState(records=100))
    job = plan_job(log_facts, verdict, INPUTS, SETTINGS, job_id="r", now_ms=1)
    assert job is not None
    assert (job.slack, job.by_index) == (None, False)


def test_a_late_or_requested_clean_is_one_of_the_whole_log() -> None:
    cleaner_state = PartitionCleanerState(records=100)
    assert assess(facts(large(8), config=GENERATIONAL), s.IDLE, NOW, cleaner_state).is_selective
    requested = assess(
        facts(large(8), config=GENERATIONAL), s.IDLE, NOW, cleaner_state, run_now=True
    )
    late = replace(GENERATIONAL, max_compaction_lag_ms=1)
    overdue = assess(facts(large(8), config=late), s.IDLE, NOW, cleaner_state)
    assert overdue.over_lag_ms > 0
    assert not requested.is_selective
    assert not overdue.is_selective


@pytest.mark.parametrize(("resolved_end", "cleaned"), [(0, True), (40, True), (60, False)])
def test_bytes_that_a_selective_clean_has_read_do_not_count_as_dirty(
    resolved_end: int, cleaned: bool
) -> None:
    cleaner_state = PartitionCleanerState(records=100, resolved_end=resolved_end)
    log = facts(large(8), config=GENERATIONAL, checkpoint=1)
    verdict = assess(log, s.IDLE, NOW, cleaner_state)
    assert verdict.to_clean == cleaned
    assert (verdict.dirty_ratio > unread_ratio(GENERATIONAL)) == cleaned
    other = facts(large(8), checkpoint=1)
    assert assess(other, s.IDLE, NOW, cleaner_state).to_clean, "with another strategy they do"


def test_the_expected_size_after_a_clean_counts_what_a_selective_clean_found_alive() -> None:
    log = facts(large(8), config=GENERATIONAL, checkpoint=1)
    sizes = [segment.size_bytes for segment in log.segments[:-1]]
    known = PartitionCleanerState(survivorship=0.25, observations=1)
    before = assess(log, s.IDLE, NOW, known).live_bytes
    resolved = replace(known, resolved_end=log.segments[6].base_offset, live_bytes=11)
    after = assess(log, s.IDLE, NOW, resolved).live_bytes
    assert before == int(0.25 * sum(sizes))  # the first one is partly dirty
    assert after == 11 + int(0.25 * sum(sizes[6:]))


def test_a_topic_of_its_own_strategy_wins_over_the_cleaners() -> None:
    cleaner_state = PartitionCleanerState(survivorship=1.0, observations=1)
    own = replace(COMPACTED, varve_cleaner_strategy="dirty-ratio")
    for config, score in ((COMPACTED, 0.0), (own, 0.5)):
        verdict = assess(
            facts(even(4), config=config), s.IDLE, NOW, cleaner_state, strategy="survivorship"
        )
        assert (verdict.to_clean, verdict.score) == (True, score)


@given(
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
    st.integers(1, 1 << 40),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_the_ratio_of_what_survives_stays_between_0_and_1(
    before: int, after: int, dirty: int, ratio: float, alpha: float
) -> None:
    seen = observed(before, after, dirty)
    assert 0 <= seen <= 1
    assert updated(ratio, 0, seen, alpha) == seen
    assert min(ratio, seen) - 1e-9 <= updated(ratio, 1, seen, alpha) <= max(ratio, seen) + 1e-9


# --- all together


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=8),
    st.integers(0, 90),
    st.integers(0, 90),
    st.integers(0, 90),
)
def test_every_verdict_is_consistent_and_every_candidate_gives_a_job(
    all_bytes: list[int], checkpoint: int, log_start: int, undecided: int
) -> None:
    log = [segment(10 * i, 10 * i + 10, size) for i, size in enumerate(all_bytes)]
    end = 10 * len(log)
    start = min(log_start, end)
    log_facts = facts(
        log, checkpoint=checkpoint, log_start=start, undecided=max(start, min(undecided, end))
    )
    verdict = assess_partition(log_facts)
    section = verdict.section
    assert section is not None
    assert start <= section.first_dirty_offset <= end
    assert 0 <= section.ratio <= 1
    assert section.end_offset <= log_facts.undecided_offset or section.dirty_bytes == 0
    counted = section.clean_bytes + section.dirty_bytes + section.waiting_bytes
    assert counted <= sum(s.size_bytes for s in live_segments(log_facts))
    job = plan_job(log_facts, verdict, INPUTS, SETTINGS, job_id="r", now_ms=1)
    assert (job is not None) == verdict.to_clean
    if job is not None:
        assert job.log_start_offset <= job.first_dirty_offset < job.end_offset
        assert job.groups[-1][-1].next_base_offset == job.end_offset
        assert job.groups[0][0].next_base_offset > job.log_start_offset


# --- victims of an erasure


def test_victims_are_rewritten_regardless_of_the_ratio_and_the_strategy() -> None:
    log = facts(even(4), checkpoint=30)
    verdict = assess(log, s.IDLE, NOW, run_now=True, victims=(10, 20))
    assert (verdict.to_clean, verdict.victims) == (True, (10, 20))
    job = plan_job(log, verdict, INPUTS, SETTINGS, job_id="1", now_ms=0)
    assert job is not None
    assert (job.victims, job.slack) == ((10, 20), COMPACTED.varve_compaction_slack)


def test_a_log_that_key_indexes_cannot_decide_is_cleaned_as_a_whole_for_an_erasure() -> None:
    segments = [one._replace(has_transactions=True) for one in even(4)]
    verdict = assess(facts(segments, checkpoint=30), s.IDLE, NOW, run_now=True, victims=(10,))
    assert (verdict.to_clean, verdict.victims) == (True, ())


def test_a_victim_that_is_gone_or_not_cleanable_is_left_out() -> None:
    verdict = assess(facts(even(4), undecided=25), s.IDLE, NOW, run_now=True, victims=(5, 10, 30))
    assert verdict.victims == (10,)
