"""The pool in virtual time, with workers and a broker that do as the test says."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cleaner import states as s
from cleaner.crew import CrewLimits
from cleaner.host import PublishOutcome
from cleaner.lookout import LOOK_CHUNK
from cleaner.plan import Reason
from cleaner.pool import CleanerPool
from cleaner.run import PoolLimits, retry_delay_ms
from cleaner.throttle import Direction
from config.settings import CleanerSettings
from storage.errors import SwapRefusedError
from storage.model import TopicPartition
from tests.support.cleaner_fakes import FakeCrew, FakeHost, FakeLink, until
from tests.support.log_facts import COMPACTED, even, facts
from tests.support.memory_env import MemoryEnv
from tests.support.virtual_loop import run_virtually

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
SETTINGS = CleanerSettings(
    workers=1,
    backoff_ms=1000,
    retry_backoff_ms=10_000,
    retry_backoff_max_ms=60_000,
    read_bytes_per_second=None,
)
LIMITS = PoolLimits(
    abort=5.0, stall=30.0, crew=CrewLimits(start=20, kill=1, stop=4, respawn=0.5, respawn_max=8)
)


@dataclass
class Bench:
    pool: CleanerPool
    host: FakeHost
    crew: FakeCrew
    env: MemoryEnv

    @property
    def link(self) -> FakeLink:
        return self.crew.links[-1]

    def state(self, partition: TopicPartition = T0) -> s.State:
        return self.pool.registry.state(partition)

    def dirty(self, partition: TopicPartition = T0, count: int = 4, **changes: Any) -> None:
        log = facts(even(count), partition=partition, **changes)
        self.host.add(log)
        self.env.mkdir(log.directory)

    def leave_file(self, partition: TopicPartition, run_id: str) -> str:
        path = f"/data/{partition}/{0:020}.log.{run_id}.cleaned"
        self.env.open(path, create=True, write=True).close()
        return path


def on_the_bench(
    scenario: Callable[[Bench], Coroutine[Any, Any, None]],
    settings: CleanerSettings = SETTINGS,
    crew: FakeCrew | None = None,
) -> Bench:
    """Run a scenario against a started pool; afterwards it stops and nothing is left over."""
    used = crew or FakeCrew()
    host, env = FakeHost(), MemoryEnv(1)

    async def main() -> Bench:
        pool = CleanerPool(host, settings, env, spawn=used, limits=LIMITS)
        bench = Bench(pool, host, used, env)
        await pool.start()
        try:
            await asyncio.wait_for(scenario(bench), 5000)
            pool.registry.validate()
        finally:
            await asyncio.wait_for(pool.stop(), 60)
        assert not pool._waiting
        assert all(link.closed for link in used.links)
        return bench

    return run_virtually(main())


# --- a job's course


def test_a_dirty_partition_is_cleaned_published_and_checkpointed() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty(config=replace(COMPACTED, segment_bytes=200))
        job = await until_job(b)
        assert b.state() == s.Cleaning()
        b.link.group(0)
        b.link.group(1)
        await until(lambda: len(b.host.published) == 2)
        b.link.done()
        await until(lambda: b.host.done)
        assert b.host.published == [(T0, (0, 10)), (T0, (20, 30))]
        assert b.host.checkpoints == [(T0, 40)]
        assert b.host.done[0][0] is job
        assert b.state() == s.IDLE
        await asyncio.sleep(60)
        assert len(b.link.sent) == 1

    stats = on_the_bench(scenario).pool.stats
    assert (stats.cleans, stats.groups_published, stats.failures) == (1, 2, 0)
    assert stats.last[0].partition == T0


async def until_job(b: Bench):
    await until(lambda: b.crew.links)
    return await b.link.job()


def test_groups_are_published_in_order_while_the_worker_goes_on() -> None:
    async def scenario(b: Bench) -> None:
        b.host.journal = asyncio.Event()
        b.dirty(config=replace(COMPACTED, segment_bytes=100))
        await until_job(b)
        for index in range(4):
            b.link.group(index)
        b.link.done()
        await until(lambda: b.state() == s.Publishing())
        await asyncio.sleep(10)
        assert b.host.published == []
        b.host.journal.set()
        await until(lambda: b.host.done)
        assert [bases for _, bases in b.host.published] == [(0,), (10,), (20,), (30,)]

    on_the_bench(scenario)


def test_each_free_worker_gets_the_next_most_urgent_partition() -> None:
    async def scenario(b: Bench) -> None:
        for number in range(3):
            b.dirty(TopicPartition("t", number), checkpoint=10 * (2 - number))
        await until(lambda: len(b.crew.links) == 2)
        jobs = [await link.job() for link in b.crew.links]
        assert {job.partition.partition for job in jobs} == {2, 1}
        b.crew.links[0].done()
        await until(lambda: len(b.crew.links[0].sent) == 2)

    on_the_bench(scenario, SETTINGS.model_copy(update={"workers": 2}))


def test_nothing_is_started_where_the_cleaner_is_switched_off_and_pauses_still_work() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await asyncio.sleep(60)
        async with b.pool.paused(T0):
            assert b.state() == s.Paused(1)

    bench = on_the_bench(scenario, SETTINGS.model_copy(update={"enabled": False}))
    assert bench.crew.links == []


def test_a_checkpoint_outside_the_log_is_corrected_without_a_clean() -> None:
    async def scenario(b: Bench) -> None:
        b.host.add(facts(even(0), checkpoint=99))
        await until(lambda: b.host.checkpoints)
        assert b.host.checkpoints == [(T0, 0)]
        await asyncio.sleep(10)
        assert len(b.host.checkpoints) == 1

    on_the_bench(scenario)


def test_new_data_is_found_at_once_when_the_pool_is_woken_and_by_itself_after_a_while() -> None:
    async def scenario(b: Bench) -> None:
        await asyncio.sleep(30.5)
        b.dirty()
        b.pool.wake()
        began = asyncio.get_running_loop().time()
        await until_job(b)
        assert asyncio.get_running_loop().time() - began < 0.1
        b.link.done()
        await until(lambda: b.state() == s.IDLE)
        await asyncio.sleep(5)
        b.dirty()
        await until_job(b)

    on_the_bench(scenario)


def test_waiting_for_a_partition_to_be_clean_ends_with_the_job_or_at_once() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        waiting = asyncio.ensure_future(b.pool.await_cleaned(T0, 40))
        await until_job(b)
        assert not waiting.done()
        b.link.done()
        await waiting
        await asyncio.wait_for(b.pool.await_cleaned(T0, 40), 5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await b.pool.await_cleaned(T0, 41)

    on_the_bench(scenario)


def test_the_status_names_what_each_worker_does_and_what_stands_in_the_way() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        b.dirty(T1, damaged="somewhere")
        await until_job(b)
        b.link.progress("map", 100, 400)
        await until(lambda: b.pool.status().workers[0].stage)
        (worker,) = b.pool.status().workers
        assert (worker.partition, worker.done_bytes, worker.total_bytes) == (T0, 100, 400)
        assert b.pool.status().in_progress == {T0: s.Cleaning()}
        findings = b.pool.verdicts[T1].findings
        assert [f.reason for f in findings if f.blocks] == [Reason.DAMAGED]

    on_the_bench(scenario)


def test_a_partition_paused_while_others_are_judged_is_not_taken() -> None:
    async def scenario(b: Bench) -> None:
        pauses: list[asyncio.Future[None]] = []

        async def pause_for_good() -> None:
            async with b.pool.paused(T0):
                await asyncio.Event().wait()

        class Slow(dict[TopicPartition, Any]):
            def __getitem__(self, partition: TopicPartition) -> Any:
                if partition == TopicPartition("t", 20) and not pauses:
                    pauses.append(asyncio.ensure_future(pause_for_good()))
                return super().__getitem__(partition)

        b.host.logs = Slow()
        for number in range(2 * LOOK_CHUNK):
            b.dirty(TopicPartition("t", number), checkpoint=None if number == 0 else 10)
        job = await until_job(b)
        assert len(pauses) == 1
        assert job.partition == T1
        pauses[0].cancel()

    assert on_the_bench(scenario).pool.stats.scan_failures == 0


# --- pauses and aborts


def test_a_pause_waits_for_the_worker_and_nothing_is_published_or_checkpointed_after_it() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        job = await until_job(b)
        left = b.leave_file(T0, job.run_id)
        other = b.leave_file(T0, "another")
        pause = asyncio.ensure_future(hold(b, T0))
        await until(b.link.aborted)
        b.link.group(0)
        await asyncio.sleep(1)
        assert not pause.done()
        b.link.stopped()
        await pause
        assert not b.env.exists(left), "a pause finds no file of the run"
        assert b.env.exists(other)
        assert b.host.published == b.host.checkpoints == []
        await until(lambda: len(b.link.sent) == 2)  # and then it is cleaned again

    stats = on_the_bench(scenario).pool.stats
    assert (stats.aborted, stats.cleans, stats.failures, stats.groups_dropped) == (2, 0, 0, 1)


async def hold(b: Bench, partition: TopicPartition) -> None:
    async with b.pool.paused(partition):
        assert isinstance(b.state(partition), s.Paused)
        assert partition not in b.host.publishing


def test_a_job_that_finishes_under_an_abort_is_not_checkpointed() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await until_job(b)
        pause = asyncio.ensure_future(hold(b, T0))
        await until(b.link.aborted)
        b.link.done()
        await pause
        assert b.host.checkpoints == []
        assert b.host.done == []

    on_the_bench(scenario)


def test_a_pause_waits_for_the_journal_and_the_rest_of_the_job_is_dropped() -> None:
    async def scenario(b: Bench) -> None:
        b.host.journal = asyncio.Event()
        b.dirty(config=replace(COMPACTED, segment_bytes=100))
        await until_job(b)
        b.link.group(0)
        b.link.group(1)
        b.link.stopped()
        await until(lambda: b.host.publishing)
        pause = asyncio.ensure_future(hold(b, T0))
        await asyncio.sleep(20)  # longer than a worker has: it is not to blame for the journal
        assert not pause.done()
        assert not b.link.killed
        b.host.journal.set()
        await pause
        assert b.host.published == [(T0, (0,))]

    on_the_bench(scenario)


def test_nested_pauses_hold_until_the_last_is_over() -> None:
    async def scenario(b: Bench) -> None:
        b.host.add(facts(even(0)))
        async with b.pool.paused(T0), b.pool.paused(T0):
            b.dirty()
            assert b.state() == s.Paused(2)
            await asyncio.sleep(10)
            assert b.link.sent == []
        await until_job(b)

    on_the_bench(scenario)


def test_a_pause_given_up_during_the_abort_leaves_nothing_behind() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await until_job(b)
        pause = asyncio.ensure_future(hold(b, T0))
        await until(b.link.aborted)
        pause.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pause
        assert b.state() == s.Aborting(0)
        second = asyncio.ensure_future(hold(b, T0))
        await asyncio.sleep(0.01)
        assert b.state() == s.Aborting(1)
        b.link.stopped()
        await second
        await until(lambda: len(b.link.sent) == 2)

    on_the_bench(scenario)


def test_an_abort_stops_the_job_and_leaves_the_partition_free() -> None:
    async def scenario(b: Bench) -> None:
        assert not b.pool.abort(T0)
        b.dirty()
        await until_job(b)
        assert b.pool.abort(T0)
        assert b.pool.abort(T0)
        assert b.link.aborted()
        b.link.stopped()
        await until(lambda: len(b.link.sent) == 2)
        assert not b.link.aborted(), "the flag concerns the old run alone"

    on_the_bench(scenario)


def test_a_worker_that_does_not_heed_an_abort_is_killed_and_replaced() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await until_job(b)
        first = b.link
        began = asyncio.get_running_loop().time()
        await hold(b, T0)
        waited = asyncio.get_running_loop().time() - began
        assert LIMITS.abort - 0.01 <= waited < LIMITS.abort + 1
        assert first.killed
        await until(lambda: len(b.crew.links) == 2)
        assert b.pool.registry.quarantines() == {}
        assert b.pool.stats.worker_kills == 1

    on_the_bench(scenario)


def test_a_worker_that_hangs_in_the_kernel_is_given_up_and_the_pause_granted() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await until_job(b)
        first = b.link
        await asyncio.wait_for(hold(b, T0), LIMITS.abort + LIMITS.crew.kill + 1)
        assert first.abandoned
        assert not first.is_gone()
        b.crew.heeds_kill = True
        await until(lambda: len(b.crew.links) == 2)

    on_the_bench(scenario, crew=FakeCrew(heeds_kill=False))


# --- failures


def test_a_failure_is_named_retried_later_and_later_and_forgotten_by_success() -> None:
    async def scenario(b: Bench) -> None:
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

    stats = on_the_bench(scenario).pool.stats
    assert (stats.failures, stats.cleans) == (5, 1)


def test_the_waits_between_attempts_double_up_to_the_longest() -> None:
    waits = [retry_delay_ms(failures, SETTINGS) for failures in (1, 2, 3, 4, 5, 1000)]
    assert waits == [10_000, 20_000, 40_000, 60_000, 60_000, 60_000]


def test_a_quarantined_partition_can_be_paused_and_stays_quarantined() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await until_job(b)
        b.link.failed()
        await until(lambda: isinstance(b.state(), s.Quarantined))
        mark = b.state()
        await hold(b, T0)
        assert b.state() == mark
        b.pool.forgive(T0)
        assert b.state() == s.IDLE
        await until_job(b)

    on_the_bench(scenario)


def test_a_partition_that_is_gone_is_forgotten() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await until_job(b)
        b.link.failed()
        await until(lambda: isinstance(b.state(), s.Quarantined))
        b.host.logs.clear()
        await until(lambda: b.state() == s.IDLE)

    on_the_bench(scenario)


def test_a_dead_worker_costs_its_job_and_is_replaced() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        job = await until_job(b)
        left = b.leave_file(T0, job.run_id)
        b.link.die()
        await until(lambda: b.host.failures)
        assert "signal 9" in b.host.failures[0][1]
        assert not b.env.exists(left), "its files go before the next attempt"
        await until(lambda: len(b.crew.links) == 2)
        again = await until_job(b)
        assert again.run_id != job.run_id

    stats = on_the_bench(scenario).pool.stats
    assert (stats.worker_deaths, stats.worker_starts, stats.failures) == (1, 2, 1)


def test_workers_that_die_at_once_are_replaced_more_and_more_slowly() -> None:
    async def scenario(b: Bench) -> None:
        await asyncio.sleep(100)
        assert 14 <= len(b.crew.links) <= 17

    on_the_bench(scenario, crew=FakeCrew(prepare=FakeLink.die))


def test_a_worker_that_cannot_be_started_is_tried_again() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await until_job(b)

    bench = on_the_bench(scenario, crew=FakeCrew(refusals=3))
    assert bench.pool.stats.worker_deaths == 3


def test_a_worker_that_never_becomes_ready_is_replaced() -> None:
    async def scenario(b: Bench) -> None:
        await asyncio.sleep(LIMITS.crew.start + 2)
        assert b.crew.links[0].killed
        assert len(b.crew.links) == 2

    on_the_bench(scenario, crew=FakeCrew(prepare=lambda link: None))


@pytest.mark.parametrize("junk", ["old run", "second greeting", "other report"])
def test_a_worker_that_talks_nonsense_is_killed_and_its_job_counts_as_failed(junk: str) -> None:
    async def scenario(b: Bench) -> None:
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
                first.done(run_id="another")
        await until(lambda: b.host.failures)
        assert first.killed
        assert b.host.checkpoints == []

    on_the_bench(scenario)


def test_a_worker_that_falls_silent_is_aborted_and_the_partition_quarantined() -> None:
    async def scenario(b: Bench) -> None:
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

    on_the_bench(scenario)


def test_damage_is_told_as_a_failure_and_keeps_what_was_reached() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await until_job(b)
        b.link.group(0)
        b.link.done(next_dirty_offset=20, damaged=(("/data/t-0/20.log", 61, "bad CRC"),))
        await until(lambda: b.host.failures)
        assert b.host.checkpoints == [(T0, 20)]
        assert "/data/t-0/20.log is damaged at byte 61: bad CRC" in b.host.failures[0][1]
        assert len(b.host.done) == 1

    on_the_bench(scenario)


def test_a_job_without_progress_is_not_repeated_at_once() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await until_job(b)
        b.link.done(next_dirty_offset=0)
        await until(lambda: isinstance(b.state(), s.Quarantined))

    on_the_bench(scenario)


def test_a_job_that_cannot_be_planned_is_a_named_failure() -> None:
    async def scenario(b: Bench) -> None:
        b.host.job_inputs = lambda partition: 1 / 0  # type: ignore[method-assign]
        b.dirty()
        await until(lambda: b.host.failures)
        assert "ZeroDivisionError" in b.host.failures[0][1]

    on_the_bench(scenario)


def test_a_look_that_fails_is_counted_and_repeated() -> None:
    async def scenario(b: Bench) -> None:
        b.host.broken = RuntimeError("changed size during iteration")
        await asyncio.sleep(5)
        b.host.broken = None
        b.dirty()
        await until_job(b)

    assert on_the_bench(scenario).pool.stats.scan_failures >= 2


def test_impossible_numbers_of_one_log_do_not_keep_others_from_being_cleaned() -> None:
    async def scenario(b: Bench) -> None:
        b.host.add(replace(facts(even(2), partition=T1), segments=(None, None)))
        b.dirty()
        job = await until_job(b)
        assert job.partition == T0

    assert on_the_bench(scenario).pool.stats.scan_failures >= 1


# --- publication


def test_a_stale_group_makes_the_whole_job_void_without_a_failure() -> None:
    async def scenario(b: Bench) -> None:
        b.host.outcome = PublishOutcome.STALE
        b.dirty(config=replace(COMPACTED, segment_bytes=100))
        job = await until_job(b)
        left = b.leave_file(T0, job.run_id)
        b.link.group(0)
        await until(b.link.aborted)
        b.link.group(1)
        b.link.done()
        await until(lambda: len(b.link.sent) == 2)
        assert not b.env.exists(left)
        assert b.host.published == b.host.checkpoints == b.host.failures == []

    assert on_the_bench(scenario).pool.stats.stale == 1


def test_a_job_goes_on_after_a_group_all_of_whose_sources_have_gone() -> None:
    async def scenario(b: Bench) -> None:
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

    on_the_bench(scenario)


def test_nothing_is_published_after_a_group_that_lost_only_some_of_its_sources() -> None:
    async def scenario(b: Bench) -> None:
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

    on_the_bench(scenario)


@pytest.mark.parametrize(
    ("error", "kept"),
    [(OSError(5, "Input/output error"), True), (SwapRefusedError("/data", "taken"), False)],
)
def test_a_failed_publication_stops_the_job_and_keeps_files_a_journal_may_need(
    error: Exception, kept: bool
) -> None:
    async def scenario(b: Bench) -> None:
        b.host.outcome = error
        b.dirty(config=replace(COMPACTED, segment_bytes=100))
        job = await until_job(b)
        left = b.leave_file(T0, job.run_id)
        b.link.group(0)
        await until(b.link.aborted)
        assert b.state() == s.Aborting(0)
        b.link.group(1)
        b.link.stopped()
        await until(lambda: b.host.failures)
        assert b.host.failures[0][1].startswith("publication ")
        assert b.env.exists(left) == kept
        assert b.host.checkpoints == []

    on_the_bench(scenario)


def test_a_source_that_retention_took_is_no_failure() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await until_job(b)
        b.host.add(replace(b.host.logs[T0], segments=tuple(even(4)[1:]), log_start_offset=10))
        b.link.failed("FileNotFoundError: 0.log", file_missing=True)
        again = await until_job(b)
        assert again.groups[0][0].base_offset == 10
        assert b.host.failures == []
        b.link.failed("FileNotFoundError: 10.log", file_missing=True)
        await until(lambda: b.host.failures)

    on_the_bench(scenario)


# --- budgets and settings


def test_grants_are_topped_up_while_a_job_runs_and_returned_when_its_worker_dies() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await until_job(b)
        first = b.link
        start = asyncio.get_running_loop().time()
        spent = 0
        while (now := asyncio.get_running_loop().time()) < start + 10:
            granted = first.memory.slots[1] - first.memory.slots[8]
            first.charge(granted)
            spent += granted
            assert spent <= 64 * 1024 * (now - start + 1) + 1
            await asyncio.sleep(0.03)
        assert spent >= 64 * 1024 * 9.5
        budget = b.pool._throttle.budgets[Direction.READ]
        first.die()
        await until(lambda: b.host.failures)
        assert budget._accounts == {}
        assert b.pool.stats.read_bytes == spent

    settings = SETTINGS.model_copy(update={"read_bytes_per_second": 64 * 1024})
    on_the_bench(scenario, settings)


def test_settings_change_without_discarding_running_work() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        await until_job(b)
        first = b.link
        more = {"workers": 3, "write_bytes_per_second": 1 << 20, "backoff_ms": 50}
        b.pool.configure(SETTINGS.model_copy(update=more))
        await until(lambda: len(b.crew.links) == 3)
        assert b.pool._throttle.budgets[Direction.WRITE].rate == 1 << 20
        b.pool.configure(SETTINGS.model_copy(update={"workers": 1}))
        await until(lambda: sum(link.shut for link in b.crew.links) == 2)
        assert not first.shut
        first.done()
        await until(lambda: b.host.done)
        b.pool.configure(SETTINGS.model_copy(update={"workers": 2}))
        await until(lambda: len(b.crew.links) == 4)

    assert on_the_bench(scenario).pool.stats.worker_deaths == 0


def test_stopping_gives_partitions_back_and_ends_workers_within_its_limits() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty()
        b.dirty(T1)
        await until(lambda: len(b.pool.registry.in_progress()) == 2)
        heeding, deaf = [link for link in b.crew.links if link.sent]
        began = asyncio.get_running_loop().time()
        stopping = asyncio.ensure_future(b.pool.stop())
        await until(heeding.aborted)
        heeding.stopped()
        await stopping
        assert asyncio.get_running_loop().time() - began < 6
        assert heeding.shut
        assert not heeding.killed
        assert deaf.killed
        assert b.state(T0) == b.state(T1) == s.IDLE
        assert b.host.checkpoints == b.host.failures == []
        await hold(b, T0)

    on_the_bench(scenario, SETTINGS.model_copy(update={"workers": 3}))


def test_stopping_is_bounded_where_a_disk_hangs_under_a_journal_and_a_worker() -> None:
    async def scenario(b: Bench) -> None:
        b.host.journal = asyncio.Event()
        b.dirty()
        await until_job(b)
        b.link.group(0)
        await until(lambda: b.host.publishing)
        began = asyncio.get_running_loop().time()
        await b.pool.stop()
        assert asyncio.get_running_loop().time() - began < 20
        assert b.host.publishing, "the journal itself is never interrupted"

    on_the_bench(scenario, crew=FakeCrew(heeds_kill=False))
