"""The pool in virtual time: what operators ask of it, and what it remembers."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from cleaner import states as s
from cleaner.host import NotServedError, PublishOutcome
from cleaner.job import SegmentHorizon
from cleaner.planning.findings import Reason
from cleaner.scheduler.cleaner_state_store import SAVE_SECONDS, STATE_NAME
from cleaner.scheduler.history import HISTORY_NAME
from storage.model import TopicPartition
from tests.support.cleaner.log_facts import COMPACTED, even, segment
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.cleaner.scheduler.pool_harness import (
    LIMITS,
    SETTINGS,
    T0,
    T1,
    PoolHarness,
    pause_and_check,
    run_scenario,
    until_job,
)

ALL_UNIQUE = replace(COMPACTED, varve_cleaner_strategy="survivorship")
UNKNOWN = TopicPartition("unknown", 0)
BAD = ("/data/t-0/20.log", 61, "bad CRC")


def reported_horizons(b: PoolHarness, partition: TopicPartition = T0, horizon_ms: int = -1):
    log = b.host.logs[partition]
    return tuple(
        SegmentHorizon(facts.base_offset, facts.size_bytes, horizon_ms)
        for facts in log.segments[:-1]
    )


async def finish(b: PoolHarness, **changes: object) -> None:
    count = len(b.host.done)
    b.link.done(**changes)
    await until(lambda: len(b.host.done) > count)


# --- holds


def test_a_paused_partition_is_not_cleaned_until_it_is_resumed_once() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        assert b.pool.operator.pause(T0)
        assert not b.pool.operator.pause(T0)
        assert b.state() == s.Paused(1)
        await asyncio.sleep(20)
        assert b.link.sent == []
        assert b.pool.status().paused == {T0}
        await pause_and_check(b, T0)
        assert b.state() == s.Paused(1)
        assert b.pool.operator.resume(T0)
        assert not b.pool.operator.resume(T0)
        await until_job(b)

    run_scenario(scenario)


def test_an_operators_pause_aborts_the_running_job_without_waiting() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        assert b.pool.operator.pause(T0)
        assert b.link.aborted()
        assert b.state() == s.Aborting(1)
        b.link.stopped()
        await until(lambda: b.state() == s.Paused(1))
        await asyncio.sleep(LIMITS.abort * 3)
        assert not b.link.killed
        assert b.pool.history.newest(T0)[0].outcome == "aborted"

    run_scenario(scenario)


def test_a_pause_resumed_during_the_abort_leaves_no_state() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.pool.operator.pause(T0)
        b.pool.operator.resume(T0)
        assert b.state() == s.Aborting(0)
        b.link.stopped()
        await until(lambda: len(b.link.sent) == 2)

    run_scenario(scenario)


def test_a_pause_survives_a_restart_and_applies_before_the_first_clean() -> None:
    async def first(b: PoolHarness) -> None:
        b.dirty()
        b.pool.operator.pause(T0)

    async def second(b: PoolHarness) -> None:
        assert b.state() == s.Paused(1)
        await asyncio.sleep(20)
        assert b.link.sent == []
        b.pool.operator.resume(T0)
        await until_job(b)

    async def third(b: PoolHarness) -> None:
        await until_job(b)

    once = run_scenario(first)
    again = run_scenario(second, before=once)
    run_scenario(third, before=again)


def test_a_pause_ends_with_its_partition_and_does_not_apply_to_a_new_one() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(topic_id=b"1" * 16)
        b.dirty(T1, topic_id=b"1" * 16)
        b.pool.operator.pause(T0)
        b.pool.operator.pause(T1)
        del b.host.logs[T1]
        b.change(topic_id=b"2" * 16)
        await until_job(b)
        assert b.pool.in_progress.states() == {T0: s.Cleaning()}
        assert b.pool.status().paused == frozenset()

    run_scenario(scenario)


def test_an_unknown_partition_is_a_key_error() -> None:
    async def scenario(b: PoolHarness) -> None:
        operator = b.pool.operator
        for command in (operator.pause, operator.resume, operator.request_clean, b.pool.explain):
            with pytest.raises(NotServedError):
                command(UNKNOWN)

    run_scenario(scenario)


# --- run now


def test_a_requested_clean_ignores_the_ratio_starts_first_and_runs_once() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(checkpoint=30)
        await asyncio.sleep(5)
        assert b.link.sent == []
        b.dirty(T1)
        b.pool.operator.request_clean(T0)
        job = await until_job(b)
        assert (job.partition, job.first_dirty_offset) == (T0, 30)
        await finish(b)
        b.change(checkpoint_offset=30)  # as dirty as before
        await until(lambda: b.link.sent[-1].job.partition == T1)
        await finish(b)
        await asyncio.sleep(10)
        assert len(b.link.sent) == 2

    run_scenario(scenario)


def test_a_requested_clean_clears_earlier_failures() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.failed()
        await until(lambda: isinstance(b.state(), s.Quarantined))
        b.pool.operator.request_clean(T0)
        await asyncio.wait_for(until_job(b), 0.5)

    run_scenario(scenario)


def test_a_requested_clean_respects_lags_and_ends_if_nothing_is_dirty() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(undecided=5)
        b.pool.operator.request_clean(T0)
        await asyncio.sleep(5)
        assert b.link.sent == []
        b.change(checkpoint_offset=30, undecided_offset=45)
        await asyncio.sleep(10)
        assert b.link.sent == [], "the request ended with its log"

    run_scenario(scenario)


def test_a_clean_requested_during_a_pause_waits_for_its_end() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(checkpoint=30)
        b.pool.operator.pause(T0)
        b.pool.operator.request_clean(T0)
        await asyncio.sleep(10)
        b.pool.operator.resume(T0)
        await until_job(b)

    run_scenario(scenario)


def test_a_request_lasts_over_jobs_failures_and_pauses_until_its_range_is_clean() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(checkpoint=20, config=replace(COMPACTED, min_cleanable_dirty_ratio=0.9))
        await asyncio.sleep(2)
        assert b.pool.operator.request_clean(T0) == 40
        await until_job(b)
        await finish(b, next_dirty_offset=30)  # its map was full
        await until_job(b)
        b.link.failed("OSError: disk")
        await until(lambda: isinstance(b.state(), s.Quarantined))
        assert b.pool.explain(T0).requested_offset == 40
        await until_job(b)  # after the back-off
        changing = asyncio.create_task(pause_and_check(b, T0))
        await until(b.link.aborted)
        b.link.stopped()
        await changing
        assert b.pool.history.newest()[0].reason == "its log was changed"
        await until_job(b)
        b.pool.operator.pause(T0)
        b.link.stopped()
        await asyncio.sleep(10)
        assert b.pool.history.newest()[0].reason == "an operator paused it"
        b.pool.operator.resume(T0)
        job = await until_job(b)
        assert (job.first_dirty_offset, job.end_offset) == (30, 40)
        await finish(b)
        assert b.pool.explain(T0).requested_offset is None
        b.change(checkpoint_offset=20)
        await asyncio.sleep(60)
        assert len(b.link.sent) == 5

    run_scenario(scenario)


def test_an_erasure_runs_one_job_that_names_its_victims() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(checkpoint=30)
        assert b.pool.operator.request_erasure(T0, 35, (10, 20))
        job = await until_job(b)
        assert (job.victims, job.slack is None) == ((10, 20), False)
        await finish(b, next_dirty_offset=30, resolved_end=40)
        assert not b.pool.operator.is_erasing(T0)
        await asyncio.sleep(60)
        assert len(b.link.sent) == 1

    run_scenario(scenario)


def test_an_erasure_waits_for_what_cannot_be_cleaned_yet() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(checkpoint=0, undecided=20)
        assert not b.pool.operator.request_erasure(T0, 35, (10,))
        assert not b.pool.operator.is_erasing(T0)

    run_scenario(scenario)


def test_an_erasure_survives_failed_jobs_and_ends_with_a_clean_of_the_whole_log() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(checkpoint=30)
        assert b.pool.operator.request_erasure(T0, 40, (10,))
        await until_job(b)
        b.link.failed("OSError: disk")
        await until(lambda: isinstance(b.state(), s.Quarantined))
        assert b.pool.operator.is_erasing(T0)
        b.pool.operator.request_clean(T0)
        job = await until_job(b)
        assert job.victims == (), "an operator's request comes first"
        await finish(b)
        assert not b.pool.operator.is_erasing(T0)

    run_scenario(scenario)


def test_an_operators_abort_cancels_a_requested_clean() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(checkpoint=30)
        await asyncio.sleep(2)
        b.pool.operator.pause(T0)
        b.pool.operator.request_clean(T0)
        assert b.pool.operator.abort(T0)
        assert not b.pool.operator.abort(T0)
        b.pool.operator.resume(T0)
        await asyncio.sleep(60)
        assert b.link.sent == []

    run_scenario(scenario)


@pytest.mark.parametrize(
    "change",
    [
        {"topic_id": b"another id......"},
        {"config": replace(COMPACTED, cleanup_policy=("delete",))},
        {"segments": tuple(even(2)), "log_end_offset": 25, "undecided_offset": 25},
    ],
    ids=["replaced", "not compacted", "cut back"],
)
def test_a_request_applies_only_to_the_log_it_was_made_for(change: dict[str, object]) -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(checkpoint=30)
        await asyncio.sleep(2)
        b.pool.operator.pause(T0)
        b.pool.operator.request_clean(T0)
        before = b.host.logs[T0]
        b.change(**change)
        await asyncio.sleep(5)
        b.host.add(before)
        b.pool.operator.resume(T0)
        await asyncio.sleep(60)
        assert b.link.sent == []

    run_scenario(scenario)


def test_a_request_without_cleanable_data_is_dropped() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(undecided=5)
        assert b.pool.operator.request_clean(T0) is None
        assert b.pool.explain(T0).requested_offset is None

    run_scenario(scenario)


# --- history


def test_every_end_of_a_job_is_recorded_with_its_reason() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.failed("OSError: disk")
        await until(lambda: len(b.pool.history.newest()) == 1)
        b.pool.operator.retry(T0)
        await until_job(b)
        b.pool.operator.abort(T0)
        b.link.stopped()
        await until(lambda: len(b.pool.history.newest()) == 2)
        b.host.outcome = PublishOutcome.STALE
        await until_job(b)
        b.link.group(0)
        await until(b.link.aborted)
        b.link.stopped()
        await until(lambda: len(b.pool.history.newest()) == 3)
        b.host.outcome = PublishOutcome.PUBLISHED
        await until_job(b)
        b.link.charge(7)
        b.link.group(0)
        await finish(b, tombstones_removed=3, passes=1)
        done, stale, aborted, failed = b.pool.history.newest(T0)
        assert [record.outcome for record in (failed, aborted, stale, done)] == [
            "failed", "aborted", "stale", "finished",
        ]  # fmt: skip
        assert (failed.reason, stale.reason) == (
            "OSError: disk",
            "the log was truncated or replaced",
        )
        assert aborted.reason == "an operator aborted it"
        assert (stale.groups_published, stale.groups_dropped) == (0, 1)
        assert (done.groups_published, done.bytes_read, done.next_dirty_offset) == (1, 7, 40)
        assert (done.tombstones_removed, done.passes, done.segments) == (3, 1, 4)
        assert (done.dirty_bytes, done.bytes_before, done.bytes_after) == (400, 400, 200)
        assert b.pool.history.newest(T1) == []
        assert len(b.pool.history.newest(limit=2)) == 2

    harness = run_scenario(scenario)
    assert len(harness.env.read_file(f"/data/{HISTORY_NAME}").splitlines()) == 4

    async def later(b: PoolHarness) -> None:
        assert b.pool.history.newest() == harness.pool.history.newest()

    run_scenario(later, before=harness)


def test_a_worker_killed_in_the_middle_is_a_failed_job_in_the_history() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.die()
        await until(lambda: b.pool.history.newest())
        assert b.pool.history.newest()[0].outcome == "failed"
        assert "signal 9" in b.pool.history.newest()[0].reason

    run_scenario(scenario)


# --- damage


def test_known_damage_is_not_retried_and_stays_visible() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(count=5)
        await until_job(b)
        b.link.done(
            next_dirty_offset=20, damaged=(BAD,), cleaned=((30, 50),), horizons=reported_horizons(b)
        )
        await until(lambda: b.host.damages)
        await asyncio.sleep(600)
        assert len(b.link.sent) == 1
        assert b.host.checkpoints == [(T0, 20)]
        assert b.pool.stats.damaged_partitions == 1
        assert b.pool.stats.cleanable_bytes == 0
        assert T0 in b.pool.status().quarantines
        record = b.pool.history.newest()[0]
        assert (record.outcome, record.damaged) == ("damaged", (BAD,))
        assert "damaged at byte 61" in record.reason

        b.change(segments=tuple(even(12)), log_end_offset=125, undecided_offset=125)
        job = await until_job(b)
        assert (job.first_dirty_offset, job.end_offset) == (50, 120)
        await finish(b, damaged=(BAD,), horizons=reported_horizons(b))
        assert b.pool.in_progress.quarantines() == {}, "the rest is clean: that is a success"
        assert b.pool.stats.failures == 1
        await asyncio.sleep(60)
        assert len(b.link.sent) == 2

    harness = run_scenario(scenario)

    async def later(b: PoolHarness) -> None:
        await asyncio.sleep(60)
        assert len(b.fake_workers.links[0].sent) == 0, "what was cleaned is known after a restart"
        b.change(damaged=(), segments=tuple(even(12)[3:]), log_start_offset=30)
        await until(lambda: b.host.checkpoints[-1] == (T0, 120))

    run_scenario(later, before=harness)


def test_a_truncation_invalidates_clean_ranges_beyond_the_checkpoint() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(count=5, config=replace(COMPACTED, min_cleanable_dirty_ratio=0.3))
        await until_job(b)
        b.link.done(
            next_dirty_offset=20, damaged=(BAD,), cleaned=((30, 50),), horizons=reported_horizons(b)
        )
        await until(lambda: b.host.damages)
        async with b.pool.control.paused(T0):
            b.change(generation="boot-2")
        b.pool.operator.retry(T0)
        job = await until_job(b)
        assert job.first_dirty_offset == 30

    run_scenario(scenario)


def test_damage_is_logged_once_also_across_restarts() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(count=5)
        await until_job(b)
        b.link.done(
            next_dirty_offset=20, damaged=(BAD,), cleaned=((30, 50),), horizons=reported_horizons(b)
        )
        await until(lambda: b.host.damages)

    harness = run_scenario(scenario)
    assert len(harness.host.damages) == 1

    async def later(b: PoolHarness) -> None:
        # A new process knows of no damage, and of a new segment.
        b.change(damaged=(), segments=tuple(even(12)), log_end_offset=125, undecided_offset=125)
        await until_job(b)
        b.link.done(
            next_dirty_offset=20,
            damaged=(BAD,),
            cleaned=((30, 120),),
            horizons=reported_horizons(b),
        )
        await until(lambda: len(b.host.done) == 2)
        assert len(b.host.damages) == 1
        assert b.pool.in_progress.quarantines() == {}
        assert b.pool.history.newest()[0].outcome == "damaged"
        mended = [x._replace(size_bytes=99) if x.base_offset == 20 else x for x in even(40)]
        b.change(damaged=(), segments=tuple(mended), log_end_offset=405, undecided_offset=405)
        await until_job(b)
        b.link.done(
            next_dirty_offset=20,
            damaged=(BAD,),
            cleaned=((30, 400),),
            horizons=reported_horizons(b),
        )
        await until(lambda: len(b.host.damages) == 2)  # it is another file: that is news

    run_scenario(later, before=harness)


# --- what expires


def test_tombstones_of_an_idle_topic_leave_by_a_timer_and_an_idle_pool_starts_no_jobs() -> None:
    async def scenario(b: PoolHarness) -> None:
        config = replace(COMPACTED, delete_retention_ms=50_000)
        b.dirty(config=config)
        await until_job(b)
        begun_ms = b.env.wall_ms()
        horizon = SegmentHorizon(20, 100, begun_ms + 50_000)
        await finish(b, horizons=(*reported_horizons(b)[:2], horizon, reported_horizons(b)[3]))
        await asyncio.sleep(20)
        assert len(b.link.sent) == 1
        b.env.advance_ms(60_000)
        job = await until_job(b)
        assert job.expired_only
        assert [x.base_offset for group in job.groups for x in group] == [20]
        saved = list(b.host.checkpoints)
        await finish(b, horizons=(SegmentHorizon(20, 100, -1),))
        assert b.host.checkpoints == saved
        assert b.pool.stats.expiries == 1
        b.env.advance_ms(10**9)
        await asyncio.sleep(100)
        assert len(b.link.sent) == 2

    run_scenario(scenario)


# --- survivorship


def test_a_topic_whose_keys_were_all_new_is_cleaned_again_and_waits_behind_others() -> None:
    settings = SETTINGS.model_copy(update={"survivorship_alpha": 1.0})

    async def scenario(b: PoolHarness) -> None:
        b.dirty(config=ALL_UNIQUE)
        await until_job(b)
        await finish(b, bytes_after=400, horizons=reported_horizons(b))
        b.dirty(T1)
        await until(lambda: len(b.link.sent) == 2)
        grown = [*even(12)[:-1], segment(120, 125)]
        b.change(segments=tuple(grown), log_end_offset=125, undecided_offset=125)
        b.dirty(TopicPartition("t", 2), checkpoint=15)
        await asyncio.sleep(5)
        ratio = next(f for f in b.pool.explain(T0).verdict.findings if f.reason is Reason.RATIO)
        assert not ratio.blocks
        assert b.pool.explain(T0).verdict.live_bytes == 1200
        places = [b.pool.explain(TopicPartition("t", number)).queue_position for number in (2, 0)]
        assert places == [1, 2]
        await finish(b)
        await until(lambda: len(b.link.sent) == 3)
        await finish(b)
        await until(lambda: len(b.link.sent) == 4)
        assert (await b.link.job()).partition == T0

    run_scenario(scenario, settings)


# --- explain


def test_the_explanation_shows_queue_position_and_next_attempt() -> None:
    async def scenario(b: PoolHarness) -> None:
        for number in range(4):
            b.dirty(TopicPartition("t", number), checkpoint=10 * number)
        await until_job(b)
        assert b.pool.explain(T0).queue_position is None
        explanation = b.pool.explain(T1)
        assert (explanation.queue_position, explanation.next_attempt.at_ms) == (
            1,
            explanation.at_ms,
        )
        assert b.pool.explain(TopicPartition("t", 2)).queue_position is None
        b.link.failed("OSError: disk")
        await until(lambda: isinstance(b.state(), s.Quarantined))
        explanation = b.pool.explain(T0)
        assert explanation.quarantine is not None
        assert explanation.next_attempt is not None
        assert 9_000 <= explanation.next_attempt.at_ms - explanation.at_ms <= 10_000
        assert explanation.last_job is not None
        assert explanation.last_job.outcome == "failed"
        assert [type(entry.event) for entry in explanation.transitions] == [s.JobStarted, s.Failed]

    run_scenario(scenario)


# --- files


def test_an_unreadable_state_file_costs_work_and_one_log_line() -> None:
    async def first(b: PoolHarness) -> None:
        b.dirty()
        b.pool.operator.pause(T0)
        await asyncio.sleep(SAVE_SECONDS + 1)

    harness = run_scenario(first)
    file = harness.env.open(f"/data/{STATE_NAME}", write=True)
    file.pwrite(b"?", 30)

    async def second(b: PoolHarness) -> None:
        await until_job(b)
        await finish(b)

    with capture_logs() as logs:
        run_scenario(second, before=harness)
    assert [x["event"] for x in logs if x["log_level"] == "warning"] == ["cleaner state not read"]
