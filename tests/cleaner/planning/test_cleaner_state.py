"""The cleaner state of a partition: when it applies, and its effect on the dirty section."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleaner import states as s
from cleaner.host import JobInputs, LogFacts
from cleaner.job import CleanJob, CleanReport, RangeDigest, SegmentHorizon, SegmentLiveness
from cleaner.planning.cleaner_state import (
    FRESH,
    NO_HORIZON,
    STUBBORN_MS,
    UNKNOWN_HORIZON,
    PartitionCleanerState,
    state_after_job,
    state_at_start,
    state_of_log,
)
from cleaner.planning.dirty_section import EXPIRY_GRACE_MS
from cleaner.planning.findings import ClockReading, Reason
from cleaner.planning.grouping import plan_job
from cleaner.planning.intervals import merged, reach, without
from cleaner.planning.plan import Verdict, assess
from cleaner.planning.scheduling_order import head_start_ms, start_key
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.model import TopicPartition
from storage.segments.damage import DamagedSegment
from tests.support.cleaner.cleaner_jobs import report_of
from tests.support.cleaner.log_facts import COMPACTED, even, facts, segment

NOW = ClockReading(wall_ms=1_000_000_000, monotonic_ms=5_000)
HOUR = 3_600_000
ACTIVE = COMPACTED.delete_retention_ms


def assess_partition(
    log: LogFacts, cleaner_state: PartitionCleanerState = FRESH, now_ms: int = NOW.wall_ms
) -> Verdict:
    return assess(log, s.IDLE, ClockReading(now_ms, NOW.monotonic_ms), cleaner_state)


def job_for(
    log: LogFacts, cleaner_state: PartitionCleanerState = FRESH, now_ms: int = NOW.wall_ms
) -> CleanJob:
    verdict = assess_partition(log, cleaner_state, now_ms)
    inputs, settings = JobInputs(bytes(16)), CleanerSettings()
    job = plan_job(log, verdict, inputs, settings, job_id="r", now_ms=now_ms)
    assert job is not None
    return job


def damaged(*bases: int) -> tuple[DamagedSegment, ...]:
    return tuple(DamagedSegment(f"/data/t-0/{b}.log", b, 17, 100, "bad CRC") for b in bases)


def reported_horizons(log: LogFacts, horizon_ms: int = NO_HORIZON) -> tuple[SegmentHorizon, ...]:
    return tuple(
        SegmentHorizon(segment_facts.base_offset, segment_facts.size_bytes, horizon_ms)
        for segment_facts in log.segments[:-1]
    )


def learned(
    cleaner_state: PartitionCleanerState,
    job: CleanJob,
    report: CleanReport,
    log: LogFacts,
    dirty_bytes: int = 100,
) -> PartitionCleanerState:
    return state_after_job(cleaner_state, job, report, log, dirty_bytes=dirty_bytes, alpha=0.3)[0]


def blockers(verdict: Verdict) -> list[Reason]:
    return [finding.reason for finding in verdict.findings if finding.blocks]


# --- ranges of offsets


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)))


@given(spans, st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_intervals_are_sets_of_offsets(
    parts: list[tuple[int, int]], whole: tuple[int, int]
) -> None:
    offsets = {x for first, end in parts for x in range(first, end)}
    results = merged(parts)
    assert {x for first, end in results for x in range(first, end)} == offsets
    assert all(a[1] < b[0] for a, b in pairwise(results))
    remaining = without(whole, parts)
    assert {x for first, end in remaining for x in range(first, end)} == set(
        range(*whole)
    ) - offsets
    far = reach(whole[0], parts)
    assert set(range(whole[0], far)) <= offsets
    assert far not in offsets


# --- belief


def test_state_of_another_topic_with_the_same_name_does_not_apply() -> None:
    cleaner_state = PartitionCleanerState(
        b"a" * 16, "boot-1", 5, cleaned=((3, 4),), paused_since_ms=9
    )
    log = facts(even(2), topic_id=b"b" * 16)
    assert state_of_log(cleaner_state, log, 77) == PartitionCleanerState(b"b" * 16, "boot-1", 77)


def test_a_new_generation_invalidates_only_facts_about_the_content() -> None:
    cleaner_state = PartitionCleanerState(
        b"", "boot-1", 5, ((20, 30),), {(0, 100): 7}, 6, 0.4, 3, paused_since_ms=9
    )
    after = state_of_log(cleaner_state, facts(even(4), generation="boot-2"), 77)
    assert (after.cleaned, after.horizons, after.expired_at_ms) == ((), {}, None)
    assert (after.survivorship, after.observations, after.paused_since_ms) == (0.4, 3, 9)
    assert after.first_seen_ms == 77


def test_after_a_restart_facts_beyond_the_log_are_dropped() -> None:
    cleaner_state = PartitionCleanerState(b"", "", 5, ((20, 40),), {(30, 100): 7})
    assert state_of_log(cleaner_state, facts(even(4)), 77) == replace(
        cleaner_state, generation="boot-1"
    )
    assert state_of_log(cleaner_state, facts(even(3)), 77).cleaned == ()


def test_the_end_of_all_cleans_outlives_a_change_of_policy_and_a_lost_checkpoint() -> None:
    cleaner_state = PartitionCleanerState(b"", "boot-1", 5, cleaned_end=20)
    uncompacted = facts(even(4), generation="boot-2", config=TopicConfig())
    assert state_of_log(cleaner_state, uncompacted, 77).cleaned_end == 20
    for config in (COMPACTED, TopicConfig()):
        log = facts(even(4), generation="boot-2", checkpoint=None, config=config)
        assert state_at_start(cleaner_state, log, 77).cleaned_end == 20
    assert PartitionCleanerState.from_json(cleaner_state.to_json()).cleaned_end == 20


def test_where_the_state_was_lost_a_clean_may_have_come_to_the_end_of_the_log() -> None:
    other = PartitionCleanerState(b"o" * 16, "", 5, cleaned_end=20)
    earlier = replace(other, topic_id=b"", cleaned_end=None)  # written by an earlier release
    for before in (None, other, earlier):
        assert state_at_start(before, facts(even(4)), 77).cleaned_end == 45
    assert state_of_log(None, facts(even(4)), 77).cleaned_end == 0, "the topic is new"
    fields = other.to_json()
    del fields["cleaned_end"]
    assert PartitionCleanerState.from_json(fields).cleaned_end is None


def test_a_topic_that_is_not_compacted_was_cleaned_if_it_has_a_cleaner_checkpoint() -> None:
    config = TopicConfig()
    assert state_at_start(None, facts(even(4), config=config), 77).cleaned_end == 0
    assert state_at_start(None, facts(even(4), checkpoint=9, config=config), 77).cleaned_end == 45


def test_the_end_of_all_cleans_includes_another_brokers_and_stays_in_the_log() -> None:
    cleaner_state = PartitionCleanerState(b"", "", 5, cleaned_end=20)
    assert state_at_start(cleaner_state, facts(even(4), checkpoint=30), 77).cleaned_end == 30
    flipped = facts(even(4), checkpoint=1 << 40)
    assert state_at_start(cleaner_state, flipped, 77).cleaned_end == 45
    assert state_of_log(cleaner_state, facts(even(1)), 77).cleaned_end == 15, "truncated"


def test_an_interval_is_clean_only_if_its_segments_have_the_same_size() -> None:
    log = even(4)
    cleaner_state = PartitionCleanerState(
        cleaned=((15, 40),), horizons={(10, 100): -1, (20, 99): -1, (30, 100): -1}
    )
    assert cleaner_state.clean_ranges(log) == ((15, 20), (30, 40))
    assert FRESH.clean_ranges(log) == ()


@given(st.integers(0, 1 << 32))
def test_state_round_trips_through_json(seed: int) -> None:
    rng = random.Random(seed)
    cleaner_state = PartitionCleanerState(
        topic_id=rng.randbytes(16),
        first_seen_ms=rng.randrange(1 << 40),
        cleaned=merged((rng.randrange(100), rng.randrange(100)) for _ in range(3)),
        horizons={(rng.randrange(99), rng.randrange(99)): rng.randrange(-2, 99) for _ in range(3)},
        expired_at_ms=rng.choice([None, 4]),
        survivorship=rng.random(),
        observations=rng.randrange(9),
        paused_since_ms=rng.choice([None, 7]),
    )
    assert PartitionCleanerState.from_json(cleaner_state.to_json()) == cleaner_state


@pytest.mark.parametrize(
    "change",
    [
        {"survivorship": 1.5},
        {"survivorship": float("nan")},
        {"topic_id": "xx"},
        {"cleaned": [[1]]},
        {"horizons": 7},
    ],
)
def test_impossible_values_are_refused(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        PartitionCleanerState.from_json(FRESH.to_json() | change)


# --- progress that is no prefix


def test_after_damage_only_new_data_is_dirty() -> None:
    log = facts(even(5), checkpoint=0)
    job = job_for(log)
    report = report_of(
        job,
        next_dirty_offset=20,
        cleaned=((30, 50),),
        damaged=(("/data/t-0/20.log", 17, "bad CRC"),),
        horizons=tuple(horizon for horizon in reported_horizons(log) if horizon.base_offset != 20),
    )
    hurt = replace(log, damaged=damaged(20))
    cleaner_state, clean_below = state_after_job(
        FRESH, job, report, hurt, dirty_bytes=500, alpha=0.3
    )
    assert (clean_below, cleaner_state.cleaned, cleaner_state.observations) == (20, ((30, 50),), 0)

    again = assess_partition(replace(hurt, checkpoint_offset=20), cleaner_state)
    assert blockers(again) == [Reason.ACTIVE_SEGMENT]
    assert again.is_damaged
    assert again.section is not None
    assert (again.section.dirty_bytes, again.section.clean_bytes) == (0, 400)

    more = replace(facts(even(7), checkpoint=20), damaged=damaged(20))
    section = assess_partition(more, cleaner_state).section
    assert section is not None
    assert (section.first_dirty_offset, section.end_offset) == (50, 70)
    assert (section.dirty_bytes, section.clean_bytes, section.clean_below) == (200, 400, 20)
    eager = replace(more, config=replace(COMPACTED, min_cleanable_dirty_ratio=0.3))
    next_job = job_for(eager, cleaner_state)
    assert (next_job.first_dirty_offset, next_job.end_offset) == (50, 70)
    assert next_job.groups[0][0].base_offset == 0, "all of the log, the damage included"
    cleaner_state, clean_below = state_after_job(
        cleaner_state,
        next_job,
        report_of(next_job, horizons=reported_horizons(more)),
        eager,
        dirty_bytes=200,
        alpha=0.3,
    )
    assert (clean_below, cleaner_state.cleaned) == (20, ((30, 70),))


def test_the_checkpoint_advances_over_clean_ranges_once_the_damaged_segment_is_deleted() -> None:
    cleaner_state = PartitionCleanerState(
        cleaned=((30, 50),), horizons={(30, 100): -1, (40, 100): -1}
    )
    log = facts(even(5)[3:], checkpoint=20)
    verdict = assess_partition(log, cleaner_state)
    assert verdict.checkpoint_offset == 50
    assert verdict.section is not None
    assert verdict.section.dirty_bytes == 0


def test_an_incomplete_clean_invalidates_intervals_it_did_not_reach() -> None:
    log = facts(even(5), checkpoint=10)
    cleaner_state = PartitionCleanerState(
        cleaned=((30, 50),), horizons={(30, 100): -1, (40, 100): -1}
    )
    section = assess_partition(log, cleaner_state).section
    assert section is not None
    assert (section.first_dirty_offset, section.dirty_bytes, section.clean_bytes) == (10, 200, 300)
    config = replace(COMPACTED, min_cleanable_dirty_ratio=0.3)
    job = job_for(replace(log, config=config), cleaner_state)
    report = report_of(job, next_dirty_offset=30, map_full=True, horizons=reported_horizons(log))
    after, clean_below = state_after_job(
        cleaner_state, job, report, log, dirty_bytes=200, alpha=0.3
    )
    assert (clean_below, after.cleaned) == (30, ())
    report = report_of(job, next_dirty_offset=50, horizons=reported_horizons(log))
    after, clean_below = state_after_job(
        cleaner_state, job, report, log, dirty_bytes=200, alpha=0.3
    )
    assert (clean_below, after.cleaned) == (50, ())


def test_a_full_map_after_damage_still_makes_progress() -> None:
    log = replace(facts(even(6), checkpoint=20), damaged=damaged(20))
    cleaner_state = PartitionCleanerState(cleaned=((30, 40),), horizons={(30, 100): -1})
    job = job_for(
        replace(log, config=replace(COMPACTED, min_cleanable_dirty_ratio=0)), cleaner_state
    )
    assert job.first_dirty_offset == 40
    report = report_of(job, next_dirty_offset=45, map_full=True, horizons=reported_horizons(log))
    after = learned(cleaner_state, job, report, log)
    section = assess_partition(log, after).section
    assert section is not None
    assert section.first_dirty_offset == 45


def test_damage_does_not_count_as_cleanable_nor_for_the_lag() -> None:
    config = replace(COMPACTED, max_compaction_lag_ms=1000)
    log = replace(facts(even(1), config=config), damaged=damaged(0))
    verdict = assess_partition(log)
    assert blockers(verdict) == [Reason.ACTIVE_SEGMENT]
    assert (verdict.over_lag_ms, verdict.deadline_ms) == (0, None)
    finding = next(f for f in verdict.findings if f.reason is Reason.DAMAGED)
    assert dict(finding.values) == {
        "file": "/data/t-0/0.log",
        "position": 17,
        "reason": "bad CRC",
        "first_offset": -1,
        "next_offset": -1,
    }


@given(st.data())
def test_the_dirty_section_is_consistent_for_any_state(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    log = facts(
        even(count),
        checkpoint=data.draw(st.integers(0, 10 * count)),
        damaged=damaged(*data.draw(st.sets(st.integers(0, count - 1).map(lambda i: 10 * i)))),
        undecided=data.draw(st.integers(0, 10 * count)),
        config=replace(COMPACTED, min_cleanable_dirty_ratio=0, delete_retention_ms=0),
    )
    cleaner_state = PartitionCleanerState(
        cleaned=merged(data.draw(spans)),
        horizons={
            (10 * i, data.draw(st.sampled_from([100, 99]))): data.draw(st.integers(-2, 2))
            for i in data.draw(st.sets(st.integers(0, count)))
        },
    )
    verdict = assess_partition(log, cleaner_state)
    section = verdict.section
    assert section is not None
    assert log.checkpoint_offset is not None
    assert log.checkpoint_offset <= section.clean_below <= log.log_end_offset
    assert section.clean_below <= section.first_dirty_offset or section.dirty_bytes == 0
    assert section.clean_bytes + section.dirty_bytes <= 200 * (count + 1)
    assert all(b not in {d.base_offset for d in log.damaged} for b in _expired(verdict))
    if not verdict.to_clean:
        return
    job = job_for(log, cleaner_state)
    covered = [source for group in job.groups for source in group]
    if not job.expired_only:
        assert covered[0].base_offset == 0
        assert job.first_dirty_offset < job.end_offset == covered[-1].next_base_offset
    else:
        assert job.first_dirty_offset == job.end_offset
        assert [source.base_offset for source in covered] == list(_expired(verdict))


def _expired(verdict: Verdict) -> tuple[int, ...]:
    return () if verdict.expired is None else verdict.expired.base_offsets


# --- what expires


def stamped(log: LogFacts, **at: int) -> PartitionCleanerState:
    horizons = {
        (segment_facts.base_offset, segment_facts.size_bytes): NO_HORIZON
        for segment_facts in log.segments[:-1]
    }
    for name, horizon in at.items():
        horizons[int(name[1:]), 100] = horizon
    return PartitionCleanerState(first_seen_ms=NOW.wall_ms, horizons=horizons)


def test_an_idle_partition_gets_a_job_over_just_the_segments_whose_horizon_has_passed() -> None:
    log = facts(even(5), checkpoint=50)
    cleaner_state = stamped(
        log, b0=NOW.wall_ms, b10=NOW.wall_ms, b30=NOW.wall_ms - 5, b40=NOW.wall_ms + 1
    )
    verdict = assess_partition(log, cleaner_state)
    assert verdict.to_clean
    assert verdict.expired is not None
    assert verdict.expired.since_ms == NOW.wall_ms - 5
    assert verdict.deadline_ms == NOW.wall_ms - 5 + max(EXPIRY_GRACE_MS, ACTIVE // 10)
    job = job_for(log, cleaner_state)
    assert job.expired_only
    assert [[x.base_offset for x in group] for group in job.groups] == [[0, 10], [30]]
    assert job.first_dirty_offset == job.end_offset == 40


@pytest.mark.parametrize("trusted", [False, True])
def test_a_clock_that_cannot_be_trusted_expires_nothing(trusted: bool) -> None:
    log = facts(even(2), checkpoint=20, clock_trusted=trusted)
    assert assess_partition(log, stamped(log, b0=5)).to_clean == trusted


def test_before_its_horizon_a_tombstone_is_kept_and_the_next_time_is_known() -> None:
    log = facts(even(2), checkpoint=20)
    verdict = assess_partition(log, stamped(log, b0=NOW.wall_ms + 9))
    assert not verdict.to_clean
    assert verdict.next_ms == NOW.wall_ms + 9


def test_a_horizon_of_a_segment_with_another_size_is_ignored() -> None:
    log = facts(even(1), checkpoint=10)
    cleaner_state = PartitionCleanerState(first_seen_ms=NOW.wall_ms, horizons={(0, 99): 5})
    assert not assess_partition(log, cleaner_state).to_clean


def test_a_due_clean_removes_expired_tombstones_as_well() -> None:
    log = facts(even(4), checkpoint=10)
    verdict = assess_partition(log, stamped(log, b0=5))
    assert verdict.to_clean
    assert verdict.expired is None
    assert not job_for(log, stamped(log, b0=5)).expired_only


def test_segments_with_an_unknown_horizon_are_read_once_after_the_retention() -> None:
    log = facts(even(2), checkpoint=20)
    cleaner_state = PartitionCleanerState(first_seen_ms=NOW.wall_ms)
    later = NOW.wall_ms + ACTIVE
    assert not assess_partition(log, cleaner_state, later - 1).to_clean
    assert assess_partition(log, cleaner_state, later - 1).next_ms == later
    job = job_for(log, cleaner_state, later)
    assert [x.base_offset for group in job.groups for x in group] == [0, 10]
    after = learned(cleaner_state, job, report_of(job), log)
    assert set(after.horizons.values()) == {NO_HORIZON}
    assert not assess_partition(log, after, later + 10 * ACTIVE).to_clean


def test_reading_segments_with_an_unknown_horizon_has_no_deadline() -> None:
    log = facts(even(3), checkpoint=30)
    unknown = PartitionCleanerState(first_seen_ms=NOW.wall_ms)
    later = NOW.wall_ms + ACTIVE + 10 * EXPIRY_GRACE_MS
    verdict = assess_partition(log, unknown, later)
    assert verdict.to_clean
    assert verdict.deadline_ms is None
    assert head_start_ms(verdict, later) == 0
    horizon_ms = NOW.wall_ms + 5
    cleaner_state = replace(unknown, horizons={(10, 100): horizon_ms})
    verdict = assess_partition(log, cleaner_state, later)
    assert verdict.deadline_ms == horizon_ms + max(EXPIRY_GRACE_MS, ACTIVE // 10)
    assert head_start_ms(verdict, later) > 0


def test_what_could_not_be_removed_is_not_retried_at_once() -> None:
    log = facts(even(1), checkpoint=10, config=replace(COMPACTED, delete_retention_ms=0))
    cleaner_state = stamped(log, b0=5)
    job = job_for(log, cleaner_state)
    report = report_of(job, horizons=(SegmentHorizon(0, 100, 5),))
    after = learned(cleaner_state, job, report, log)
    assert after.horizons == {(0, 100): NOW.wall_ms + STUBBORN_MS}
    assert not assess_partition(log, after, NOW.wall_ms + STUBBORN_MS - 1).to_clean
    assert assess_partition(log, after, NOW.wall_ms + STUBBORN_MS).to_clean


def test_a_tombstone_with_a_retention_of_zero_is_removed_at_once() -> None:
    log = facts(even(1), config=replace(COMPACTED, delete_retention_ms=0))
    job = job_for(log)
    report = report_of(job, horizons=(SegmentHorizon(0, 100, NOW.wall_ms),))
    cleaned = replace(log, checkpoint_offset=10)
    after = learned(FRESH, job, report, cleaned)
    assert job_for(cleaned, after).expired_only


def test_two_such_jobs_are_a_tenth_of_the_retention_apart() -> None:
    log = facts(even(2), checkpoint=20)
    cleaner_state = replace(stamped(log, b10=NOW.wall_ms), expired_at_ms=NOW.wall_ms - 5)
    assert not assess_partition(log, cleaner_state).to_clean
    assert assess_partition(log, cleaner_state).next_ms == NOW.wall_ms - 5 + ACTIVE // 10
    assert assess_partition(log, cleaner_state, NOW.wall_ms - 5 + ACTIVE // 10).to_clean


def test_an_expiry_job_moves_no_checkpoint_and_no_survivorship() -> None:
    log = facts(even(3), checkpoint=20)
    cleaner_state = stamped(log, b0=5)
    job = job_for(log, cleaner_state)
    after, clean_below = state_after_job(
        cleaner_state, job, report_of(job), log, dirty_bytes=0, alpha=0.3
    )
    assert (clean_below, after.observations, after.cleaned) == (20, 0, ())
    assert after.expired_at_ms == NOW.wall_ms


def test_the_count_of_tombstones_is_that_of_the_last_clean_less_expired_ones() -> None:
    dirty = facts(even(4), checkpoint=10)
    job = job_for(dirty)
    cleaned = learned(FRESH, job, report_of(job, tombstones_kept=7), dirty)
    assert cleaned.tombstones == 7
    log = facts(even(3), checkpoint=20)
    expiry = job_for(log, stamped(log, b0=5))
    assert expiry.expired_only
    report = report_of(expiry, tombstones_kept=1, tombstones_removed=3)
    assert learned(replace(cleaned, topic_id=b""), expiry, report, log).tombstones == 4
    assert learned(FRESH, expiry, report, log).tombstones is None, "nobody counted the others"
    assert PartitionCleanerState.from_json(cleaned.to_json()).tombstones == 7
    old = {key: value for key, value in cleaned.to_json().items() if key != "tombstones"}
    assert PartitionCleanerState.from_json(old).tombstones is None


@pytest.mark.parametrize(
    ("stamps", "checkpoint", "oldest_ms"),
    [
        ((100, 300, 200, 900), 0, 100),
        ((100, 300, 200, 900), 10, 200),
        ((100, 300, 200, 900), 30, 900),  # the active segment alone
        ((100, 300, 200, 900), 40, None),
        ((-1, 300, 200, 900), 0, 200),  # no timestamp in the first
    ],
)
def test_the_oldest_dirty_record_is_that_of_all_dirty_segments(
    stamps: tuple[int, ...], checkpoint: int, oldest_ms: int | None
) -> None:
    segments = [
        segment(10 * index, 10 * index + 10, first_ms=stamp) for index, stamp in enumerate(stamps)
    ]
    verdict = assess_partition(facts(segments, checkpoint=checkpoint))
    assert verdict.section is not None
    assert verdict.section.oldest_ms == oldest_ms


def test_segments_that_were_never_cleaned_have_no_horizon() -> None:
    log = facts(even(4), checkpoint=10, config=replace(COMPACTED, min_cleanable_dirty_ratio=1))
    job = job_for(log, PartitionCleanerState(first_seen_ms=0))
    assert [x.base_offset for group in job.groups for x in group] == [0]


def test_expired_tombstones_come_after_dirty_data_until_their_deadline() -> None:
    dirty = replace(facts(even(4), checkpoint=15), partition=TopicPartition("t", 1))
    idle = facts(even(1), checkpoint=10)
    for age, first in ((0, 1), (max(EXPIRY_GRACE_MS, ACTIVE // 10) + 1, 0)):
        cleaner_state = stamped(idle, b0=NOW.wall_ms - age)
        order = [assess_partition(idle, cleaner_state), assess_partition(dirty)]
        order.sort(key=lambda verdict: start_key(verdict, 0, NOW.wall_ms))
        assert order[0].partition.partition == first


# --- survivorship


def test_survivorship_is_observed_in_complete_cleans_only() -> None:
    log = facts(even(4), checkpoint=20)
    job = job_for(replace(log, config=replace(COMPACTED, min_cleanable_dirty_ratio=0)))
    whole = report_of(job, bytes_before=400, bytes_after=250)
    once = learned(FRESH, job, whole, log, dirty_bytes=200)
    assert (once.survivorship, once.observations) == (0.25, 1)
    twice = learned(once, job, replace(whole, bytes_after=400), log, dirty_bytes=200)
    assert twice.survivorship == pytest.approx(0.3 * 1 + 0.7 * 0.25)
    part = learned(once, job, replace(whole, next_dirty_offset=30), log, dirty_bytes=200)
    assert part.survivorship == 0.25


def test_records_removed_by_retention_do_not_count_as_garbage() -> None:
    log = facts(even(4), checkpoint=20, config=replace(COMPACTED, min_cleanable_dirty_ratio=0))
    job = job_for(log)
    report = report_of(job, bytes_before=400, bytes_after=150)
    cut = replace(log, log_start_offset=10)
    assert learned(FRESH, job, report, cut, dirty_bytes=200).observations == 0
    deleted = replace(log, log_start_offset=15)
    job = job_for(deleted)
    report = report_of(job, bytes_before=300, bytes_after=200)
    once = learned(FRESH, job, report, deleted, dirty_bytes=200)
    assert once.observations == 0
    assert learned(once, job, report, deleted, dirty_bytes=200).observations == 1


def test_unknown_horizons_stay_unknown_after_a_clean_that_did_not_read_them() -> None:
    log = facts(even(2), checkpoint=20)
    job = job_for(facts(even(2)))
    assert set(learned(FRESH, job, report_of(job), log).horizons.values()) == {UNKNOWN_HORIZON}


# Selective cleans --------------------------------------------------------------------------------


def test_a_selective_clean_moves_no_checkpoint_and_ends_with_the_next_whole_one() -> None:
    log = facts(even(4), checkpoint=10)
    job = job_for(log)
    whole = learned(FRESH, job, report_of(job, records_after=7), log)
    assert (whole.records, whole.resolved_end) == (7, 0)
    selective = report_of(
        job,
        next_dirty_offset=10,
        resolved_end=40,
        live_bytes=700,
        records_after=9,
        tombstones_kept=3,
    )
    after, clean_below = state_after_job(
        replace(whole, tombstones=5), job, selective, log, dirty_bytes=100, alpha=0.3
    )
    assert clean_below == 10
    assert (after.records, after.resolved_end, after.tombstones) == (7, 40, 5)
    assert after.live_bytes == 700
    assert after.observations == whole.observations
    assert PartitionCleanerState.from_json(after.to_json()) == replace(after, generation="")
    again = learned(after, job, report_of(job, records_after=8), log)
    assert (again.records, again.resolved_end, again.live_bytes) == (8, 0, None)


def test_live_bytes_are_known_of_segments_as_a_clean_left_them() -> None:
    log = facts(even(4))
    job = job_for(log)
    liveness = (SegmentLiveness(0, 100, 40, 4), SegmentLiveness(10, 100, 100))
    selective = report_of(job, resolved_end=40, liveness=liveness)
    state = learned(FRESH, job, selective, log)
    assert [state.live_bytes_of(s) for s in log.segments[:-1]] == [40, 100, None, None]
    assert [state.live_records_of(s) for s in log.segments[:-1]] == [4, None, None, None]
    stored = PartitionCleanerState.from_json(state.to_json())
    assert (stored.live, stored.live_records) == (state.live, state.live_records)
    rewritten = facts([segment(0, 10, 60), *log.segments[1:]])
    state = learned(state, job, report_of(job, resolved_end=40), rewritten)
    assert [state.live_bytes_of(s) for s in rewritten.segments[:-1]] == [None, 100, None, None]
    counted = tuple(replace(horizon, records=3) for horizon in reported_horizons(log))
    whole = report_of(job, horizons=counted)
    state = learned(state, job, whole, log)
    assert [state.live_bytes_of(s) for s in log.segments[:-1]] == [100, 100, 100, 100]
    assert [state.live_records_of(s) for s in log.segments[:-1]] == [3, 3, 3, 3]
    truncated = state_of_log(replace(state, generation="before"), log, NOW.wall_ms)
    assert not truncated.live
    assert not truncated.live_records


def test_after_a_selective_clean_that_was_not_possible_the_next_one_is_of_the_whole_log() -> None:
    log = facts(even(4))
    job = replace(job_for(log), slack=0.5)
    fallen_back = learned(FRESH, job, report_of(job, records_after=7), log)
    assert fallen_back.records is None
    whole = learned(fallen_back, job_for(log), report_of(job, records_after=7), log)
    assert whole.records == 7


def test_another_generation_forgets_what_selective_cleans_have_read() -> None:
    log = facts(even(4))
    cleaner_state = PartitionCleanerState(
        topic_id=log.topic_id, generation="before", records=7, resolved_end=40
    )
    after = state_of_log(cleaner_state, log, NOW.wall_ms)
    assert (after.records, after.resolved_end) == (None, 0)
    saved = replace(cleaner_state, generation="", resolved_end=log.log_end_offset + 1)
    assert state_of_log(saved, log, NOW.wall_ms).resolved_end == 0, "the log was cut"


# Digests ------------------------------------------------------------------------------------------

DIGESTS = (RangeDigest(0, 10, 4, "0f" * 16), RangeDigest(10, 40, 9, "f0" * 16))
DIGESTED = PartitionCleanerState(topic_id=b"t" * 16, digest_end=40, digests=DIGESTS)


def test_a_verified_clean_leaves_its_digests() -> None:
    log = facts(even(5))
    job = job_for(log)
    after = learned(FRESH, job, report_of(job, digests=DIGESTS, groups=1), log)
    assert (after.digest_end, after.digests) == (job.end_offset, DIGESTS)


def test_a_clean_that_is_not_verified_drops_the_digests_unless_it_changed_nothing() -> None:
    log = facts(even(5))
    job = job_for(log)
    assert learned(DIGESTED, job, report_of(job, groups=1), log).digests == ()
    assert learned(DIGESTED, job, report_of(job, groups=0), log).digests == DIGESTS


def test_digests_survive_a_restart_but_not_a_truncation_or_another_generation() -> None:
    log = facts(even(5))
    stored = replace(DIGESTED, topic_id=log.topic_id, first_seen_ms=1)
    assert PartitionCleanerState.from_json(stored.to_json()) == replace(stored, generation="")
    assert state_of_log(stored, log, NOW.wall_ms).digests == DIGESTS
    shorter = replace(stored, digest_end=log.log_end_offset + 1)
    assert state_of_log(shorter, log, NOW.wall_ms).digests == ()
    other = replace(stored, generation="another")
    assert state_of_log(other, log, NOW.wall_ms).digests == ()
