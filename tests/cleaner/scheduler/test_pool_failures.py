"""The pool in virtual time: what fails, and publications that do not take place."""

import asyncio
from dataclasses import replace

import pytest

from cleaner import states as s
from cleaner.host import JobInputs, PublishOutcome
from cleaner.scheduler.clean_attempt import retry_delay_ms
from storage.errors import StorageError, SwapRefusedError
from storage.model import TopicPartition
from tests.support.cleaner.log_facts import COMPACTED, even, facts
from tests.support.cleaner.scheduler.cleaner_fakes import FakeLink, FakeWorkerPool, until
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

# --- failures


def test_a_failure_has_a_reason_and_is_retried_with_backoff_until_success() -> None:
    async def scenario(b: PoolHarness) -> None:
        loop = asyncio.get_running_loop()
        b.dirty()
        await until_job(b)
        for failures, pause in enumerate([10, 20, 40, 60, 60], 1):
            b.link.failed("OSError: no space left")
            await until(lambda: isinstance(b.state(), s.Quarantined))
            mark = s.past_of(b.state())
            assert mark is not None
            assert (mark.reason, mark.failures) == ("OSError: no space left", failures)
            began = loop.time()
            await until_job(b)
            assert pause - 1 <= loop.time() - began <= pause + 1.5
        b.link.done()
        await until(lambda: b.host.done)
        assert b.state() == s.IDLE
        assert {reason for _, reason, _ in b.host.failures} == {"OSError: no space left"}
        retry_at = [at - b.env.wall_ms() for _, _, at in b.host.failures]
        assert [round(ms / 1000) for ms in retry_at] == [10, 20, 40, 60, 60]

    stats = run_scenario(scenario).pool.stats
    assert (stats.failures, stats.cleans) == (5, 1)


def test_the_waits_between_attempts_double_up_to_the_longest() -> None:
    waits = [retry_delay_ms(failures, SETTINGS) for failures in (1, 2, 3, 4, 5, 1000)]
    assert waits == [10_000, 20_000, 40_000, 60_000, 60_000, 60_000]


def test_a_quarantined_partition_can_be_paused_and_stays_quarantined() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.failed()
        await until(lambda: isinstance(b.state(), s.Quarantined))
        mark = b.state()
        await pause_and_check(b, T0)
        assert b.state() == mark
        b.pool.operator.retry(T0)
        assert b.state() == s.IDLE
        await until_job(b)

    run_scenario(scenario)


def test_a_deleted_partition_leaves_no_state() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.failed()
        await until(lambda: isinstance(b.state(), s.Quarantined))
        b.host.logs.clear()
        await until(lambda: b.state() == s.IDLE)

    run_scenario(scenario)


def test_a_dead_worker_costs_its_job_and_is_replaced() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        job = await until_job(b)
        remaining = b.leave_file(T0, job.job_id)
        b.link.die()
        await until(lambda: b.host.failures)
        assert "signal 9" in b.host.failures[0][1]
        assert not b.env.exists(remaining), "its files go before the next attempt"
        await until(lambda: len(b.fake_workers.links) == 2)
        again = await until_job(b)
        assert again.job_id != job.job_id

    stats = run_scenario(scenario).pool.stats
    assert (stats.worker_deaths, stats.worker_starts, stats.failures) == (1, 2, 1)


def test_workers_that_die_at_once_are_replaced_more_and_more_slowly() -> None:
    async def scenario(b: PoolHarness) -> None:
        await asyncio.sleep(100)
        assert 14 <= len(b.fake_workers.links) <= 17

    run_scenario(scenario, fake_pool=FakeWorkerPool(prepare=FakeLink.die))


def test_a_worker_that_cannot_be_started_is_tried_again() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)

    harness = run_scenario(scenario, fake_pool=FakeWorkerPool(refusals=3))
    assert harness.pool.stats.worker_deaths == 3


def test_a_worker_that_never_becomes_ready_is_replaced() -> None:
    async def scenario(b: PoolHarness) -> None:
        await asyncio.sleep(LIMITS.workers.start + 2)
        assert b.fake_workers.links[0].killed
        assert len(b.fake_workers.links) == 2

    run_scenario(scenario, fake_pool=FakeWorkerPool(prepare=lambda link: None))


@pytest.mark.parametrize("junk", ["old run", "second greeting", "other report"])
def test_a_worker_with_malformed_messages_is_killed_and_its_job_fails(junk: str) -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        first = b.link
        match junk:
            case "old run":
                first.sent.append(replace(first.sent[-1], run=first.run + 1))
                first.group()
            case "second greeting":
                first.ready()
            case "other report":
                first.done(job_id="another")
        await until(lambda: b.host.failures)
        assert first.killed
        assert b.host.checkpoints == []

    run_scenario(scenario)


def test_a_stalled_job_is_aborted_and_the_partition_quarantined() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        for _ in range(3):  # charged bytes and words count as signs of life
            await asyncio.sleep(LIMITS.stall - 2)
            b.link.charge(5)
            await asyncio.sleep(LIMITS.stall - 2)
            b.link.progress("map", 1, 2)
        assert not b.link.aborted()
        await asyncio.sleep(LIMITS.stall + 1)
        assert b.link.aborted()
        await until(lambda: b.host.failures)
        assert "no progress for 30 s" in b.host.failures[0][1]
        assert isinstance(b.state(), s.Quarantined)

    run_scenario(scenario)


def test_damage_is_logged_once_and_progress_is_kept() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.group(0)
        b.link.done(next_dirty_offset=20, damaged=(("/data/t-0/20.log", 61, "bad CRC"),))
        await until(lambda: b.host.done)
        assert b.host.checkpoints == [(T0, 20)]
        assert b.host.damages == [(T0, "/data/t-0/20.log is damaged at byte 61: bad CRC")]
        assert isinstance(b.state(), s.Quarantined)
        assert b.host.failures == [], "it stands in the job's line"

    run_scenario(scenario)


def test_a_job_without_progress_is_not_repeated_at_once() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.done(next_dirty_offset=0)
        await until(lambda: isinstance(b.state(), s.Quarantined))

    run_scenario(scenario)


def test_a_job_that_cannot_be_planned_is_a_named_failure() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.job_inputs = lambda *_: 1 / 0  # type: ignore[method-assign]
        b.dirty()
        await until(lambda: b.host.failures)
        assert "ZeroDivisionError" in b.host.failures[0][1]

    run_scenario(scenario)


def test_the_inputs_of_a_job_are_read_before_it_is_planned() -> None:
    """Or the event loop would read the transaction indexes of the whole log."""

    async def scenario(b: PoolHarness) -> None:
        loaded: list[TopicPartition] = []
        job_inputs = b.host.job_inputs

        async def load_job_inputs(partition: TopicPartition) -> bool:
            await asyncio.sleep(1)
            loaded.append(partition)
            return len(loaded) == 1

        def checked(partition: TopicPartition, first: int, end: int) -> JobInputs:
            assert partition in loaded
            return job_inputs(partition, first, end)

        b.host.load_job_inputs = load_job_inputs  # type: ignore[method-assign]
        b.host.job_inputs = checked  # type: ignore[method-assign]
        b.dirty()
        await until_job(b)
        assert not b.host.failures

    run_scenario(scenario)


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_a_disk_whose_inputs_cannot_be_read_stops_the_cleans_of_no_other(fault: str) -> None:
    async def scenario(b: PoolHarness) -> None:
        async def load_job_inputs(partition: TopicPartition) -> bool:
            if partition == T0:
                if fault == "fails":
                    raise StorageError("no index")
                await asyncio.sleep(1e9)
            return False

        b.host.load_job_inputs = load_job_inputs  # type: ignore[method-assign]
        b.dirty(T0)
        b.dirty(T1)
        job = await until_job(b)
        assert job.partition == T1
        b.link.done()
        await until(lambda: b.host.done)
        assert b.state(T0) == s.IDLE
        b.host.load_job_inputs = lambda _: asyncio.sleep(0, False)  # type: ignore[method-assign]
        again = await until_job(b)
        assert again.partition == T0

    run_scenario(scenario)


def test_a_failed_scan_is_counted_and_repeated() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.broken = RuntimeError("changed size during iteration")
        await asyncio.sleep(5)
        b.host.broken = None
        b.dirty()
        await until_job(b)

    assert run_scenario(scenario).pool.stats.scan_failures >= 2


def test_impossible_numbers_of_one_log_do_not_keep_others_from_being_cleaned() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.add(replace(facts(even(2), partition=T1), segments=(None, None)))
        b.dirty()
        job = await until_job(b)
        assert job.partition == T0

    assert run_scenario(scenario).pool.stats.scan_failures >= 1


# --- publication


def test_a_stale_group_discards_the_job_without_a_failure() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.outcome = PublishOutcome.STALE
        b.dirty(config=replace(COMPACTED, segment_bytes=100))
        job = await until_job(b)
        remaining = b.leave_file(T0, job.job_id)
        b.link.group(0)
        await until(b.link.aborted)
        b.link.group(1)
        b.link.done()
        await until(lambda: len(b.link.sent) == 2)
        assert not b.env.exists(remaining)
        assert b.host.published == b.host.checkpoints == b.host.failures == []

    assert run_scenario(scenario).pool.stats.stale == 1


def test_a_job_that_took_too_long_is_planned_again_with_twice_its_time() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.outcome = PublishOutcome.LATE
        b.dirty(config=replace(COMPACTED, segment_bytes=100))
        first = await until_job(b)
        await asyncio.sleep(10)
        b.link.group(0)
        await until(b.link.aborted)
        b.link.stopped()
        await until(lambda: len(b.link.sent) == 2)
        second = b.link.sent[1].job
        assert b.host.published == b.host.failures == []
        assert first.published_by_ms is None
        assert second.published_by_ms is not None
        assert 19_900 <= second.published_by_ms - second.now_ms <= 21_000

    run_scenario(scenario)


def test_a_job_continues_after_a_group_without_sources() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(config=replace(COMPACTED, segment_bytes=100))
        await until_job(b)
        b.host.add(replace(b.host.logs[T0], segments=tuple(even(4)[1:]), log_start_offset=10))
        b.host.outcome = PublishOutcome.SOURCES_GONE
        b.link.group(0)
        await until(lambda: b.pool.stats.groups_dropped == 1)
        b.host.outcome = PublishOutcome.PUBLISHED
        b.link.group(1)
        b.link.done()
        await until(lambda: b.host.done)
        assert b.host.published == [(T0, (10,))]
        assert b.host.checkpoints == [(T0, 40)]

    run_scenario(scenario)


def test_nothing_is_published_after_a_group_that_lost_only_some_of_its_sources() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(config=replace(COMPACTED, segment_bytes=200))
        await until_job(b)
        b.host.add(replace(b.host.logs[T0], segments=tuple(even(4)[1:]), log_start_offset=10))
        b.host.outcome = PublishOutcome.SOURCES_GONE
        b.link.group(0)
        await until(b.link.aborted)
        b.host.outcome = PublishOutcome.PUBLISHED
        b.link.group(1)
        b.link.done()
        await until(lambda: len(b.link.sent) == 2)
        assert b.host.published == b.host.checkpoints == b.host.failures == []

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("error", "retained"),
    [(OSError(5, "Input/output error"), True), (SwapRefusedError("/data", "taken"), False)],
)
def test_a_failed_publication_stops_the_job_and_keeps_files_a_journal_may_need(
    error: Exception, retained: bool
) -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.outcome = error
        b.dirty(config=replace(COMPACTED, segment_bytes=100))
        job = await until_job(b)
        remaining = b.leave_file(T0, job.job_id)
        b.link.group(0)
        await until(b.link.aborted)
        assert b.state() == s.Aborting(0)
        b.link.group(1)
        b.link.stopped()
        await until(lambda: b.host.failures)
        assert b.host.failures[0][1].startswith("publication ")
        assert b.env.exists(remaining) == retained
        assert b.host.checkpoints == []

    run_scenario(scenario)


def test_an_index_that_contradicts_the_log_is_repaired_once_the_clean_failed() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.failed("TransactionIndexError: ...", index_wrong=True)
        await until(lambda: b.host.repaired)
        assert b.host.repaired == [T0]
        assert len(b.host.failures) == 1

    run_scenario(scenario)


def test_a_source_deleted_by_retention_is_no_failure() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.host.add(replace(b.host.logs[T0], segments=tuple(even(4)[1:]), log_start_offset=10))
        b.link.failed("FileNotFoundError: 0.log", file_missing=True)
        again = await until_job(b)
        assert again.groups[0][0].base_offset == 10
        assert b.host.failures == []
        b.link.failed("FileNotFoundError: 10.log", file_missing=True)
        await until(lambda: b.host.failures)

    run_scenario(scenario)
