"""The pool in virtual time: a job's course, pauses and aborts, budgets, settings, stopping."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from cleaner import states as s
from cleaner.job import RangeDigest
from cleaner.planning.findings import Reason
from cleaner.scheduler import partition_scanner
from cleaner.scheduler.cleaner_state_store import decode_cleaner_state
from cleaner.scheduler.partition_scanner import SCAN_CHUNK
from cleaner.workers.throttle import Direction
from storage.model import TopicPartition
from tests.support.cleaner.log_facts import COMPACTED, even, facts
from tests.support.cleaner.scheduler.cleaner_fakes import FakeWorkerPool, until
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
from tests.support.clocks.loop_meter import LoopMeter

# --- a job's course


def test_a_dirty_partition_is_cleaned_published_and_checkpointed() -> None:
    async def scenario(b: PoolHarness) -> None:
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

    stats = run_scenario(scenario).pool.stats
    assert (stats.cleans, stats.groups_published, stats.failures) == (1, 2, 0)
    assert stats.last[0].partition == T0


def test_groups_that_come_together_are_published_together() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(config=replace(COMPACTED, segment_bytes=200))
        b.host.journal = asyncio.Event()
        await until_job(b)
        b.link.groups(0, 1)
        await until(lambda: b.state() == s.Publishing())
        b.host.journal.set()
        await until(lambda: b.state() == s.Cleaning())
        assert b.host.published == [(T0, (0, 10)), (T0, (20, 30))]
        b.link.done()
        await until(lambda: b.host.done)

    stats = run_scenario(scenario).pool.stats
    assert (stats.groups_published, stats.groups_dropped) == (2, 0)


def test_groups_are_published_in_order_while_the_worker_goes_on() -> None:
    async def scenario(b: PoolHarness) -> None:
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

    run_scenario(scenario)


def test_each_free_worker_gets_the_next_most_urgent_partition() -> None:
    async def scenario(b: PoolHarness) -> None:
        for number in range(3):
            b.dirty(TopicPartition("t", number), checkpoint=10 * (2 - number))
        await until(lambda: len(b.fake_workers.links) == 2)
        jobs = [await link.job() for link in b.fake_workers.links]
        assert {job.partition.partition for job in jobs} == {2, 1}
        b.fake_workers.links[0].done()
        await until(lambda: len(b.fake_workers.links[0].sent) == 2)

    run_scenario(scenario, SETTINGS.model_copy(update={"workers": 2}))


def test_a_disabled_cleaner_starts_no_job_and_grants_pauses() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await asyncio.sleep(60)
        async with b.pool.control.paused(T0):
            assert b.state() == s.Paused(1)

    harness = run_scenario(scenario, SETTINGS.model_copy(update={"enabled": False}))
    assert harness.fake_workers.links == []


def test_a_checkpoint_outside_the_log_is_corrected_without_a_clean() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.add(facts(even(0), checkpoint=99))
        await until(lambda: b.host.checkpoints)
        assert b.host.checkpoints == [(T0, 0)]
        await asyncio.sleep(10)
        assert len(b.host.checkpoints) == 1

    run_scenario(scenario)


def test_a_checkpoint_that_rose_while_the_broker_was_stopped_is_not_believed() -> None:
    """Tombstones in what it calls clean would expire before their keys' older values are gone."""

    async def clean(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.done()
        await until(lambda: b.host.done)
        assert b.host.checkpoints == [(T0, 40)]

    before = run_scenario(clean)
    before.change(segments=tuple(even(12)), log_end_offset=125, undecided_offset=125)
    before.change(checkpoint_offset=120)  # one flipped bit of a file without a checksum

    async def again(b: PoolHarness) -> None:
        job = await until_job(b)
        assert (job.first_dirty_offset, job.end_offset) == (40, 120)

    run_scenario(again, before=before)


def test_a_checkpoint_that_was_not_yet_lowered_is_no_sign_of_another_broker() -> None:
    """A clean that finds damage lowers the first dirty offset; a full disk or a kill comes then."""

    async def clean(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.done()
        await until(lambda: b.host.done)
        b.pool.scanner.save_checkpoint(T0, "g", 10)

    before = run_scenario(clean)
    before.change(checkpoint_offset=40)
    with capture_logs() as lines:

        async def again(b: PoolHarness) -> None:
            assert b.pool.state_of(T0).first_dirty_offset == 10
            assert b.pool.state_of(T0).cleaned_elsewhere_end == 0
            assert b.host.checkpoints[-1] == (T0, 10)

        run_scenario(again, before=before)
    assert "cleaner checkpoint lowered" not in [line["event"] for line in lines]


def test_a_lower_checkpoint_lowers_the_offset_with_which_later_ones_are_compared() -> None:
    """Or a clean by another broker between the two would not be noticed."""

    async def clean(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.done()
        await until(lambda: b.host.done)
        assert b.pool.state_of(T0).first_dirty_offset == 40

    before = run_scenario(clean)
    before.change(checkpoint_offset=10)  # the log was truncated, or the file is older

    async def again(b: PoolHarness) -> None:
        assert b.pool.state_of(T0).first_dirty_offset == 10

    run_scenario(again, before=before)


def test_new_data_is_scanned_after_a_wake_up_and_after_the_backoff() -> None:
    async def scenario(b: PoolHarness) -> None:
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

    run_scenario(scenario)


def test_waiting_for_a_partition_to_be_clean_ends_with_the_job_or_at_once() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        waiting = asyncio.ensure_future(b.pool.wait_cleaned(T0, 40))
        await until_job(b)
        assert not waiting.done()
        b.link.done()
        await waiting
        await asyncio.wait_for(b.pool.wait_cleaned(T0, 40), 5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await b.pool.wait_cleaned(T0, 41)

    run_scenario(scenario)


def test_the_status_shows_jobs_and_obstacles() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        b.dirty(T1, offline="somewhere")
        await until_job(b)
        b.link.progress("map", 100, 400)
        await until(lambda: b.pool.status().workers[0].stage)
        (worker,) = b.pool.status().workers
        assert (worker.partition, worker.done_bytes, worker.total_bytes) == (T0, 100, 400)
        assert b.pool.status().in_progress == {T0: s.Cleaning()}
        findings = b.pool.scanner.verdicts[T1].findings
        assert [f.reason for f in findings if f.blocks] == [Reason.OFFLINE]

    run_scenario(scenario)


def test_a_partition_paused_during_a_scan_is_not_chosen() -> None:
    async def scenario(b: PoolHarness) -> None:
        pauses: list[asyncio.Future[None]] = []

        async def pause_for_good() -> None:
            async with b.pool.control.paused(T0):
                await asyncio.Event().wait()

        class Slow(dict[TopicPartition, Any]):
            def __getitem__(self, partition: TopicPartition) -> Any:
                if partition == TopicPartition("t", 20) and not pauses:
                    pauses.append(asyncio.ensure_future(pause_for_good()))
                return super().__getitem__(partition)

        b.host.logs = Slow()
        for number in range(2 * SCAN_CHUNK):
            b.dirty(TopicPartition("t", number), checkpoint=None if number == 0 else 10)
        job = await until_job(b)
        assert len(pauses) == 1
        assert job.partition == T1
        pauses[0].cancel()

    assert run_scenario(scenario).pool.stats.scan_failures == 0


def test_no_turn_of_a_scan_has_a_line_of_code_for_each_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, meter = 2_000, LoopMeter()
    monkeypatch.setattr(partition_scanner, "SCAN_CHUNK", 1)

    async def scenario(b: PoolHarness) -> None:
        await asyncio.sleep(0.5)  # the worker is ready, and the pool does not scan again by itself
        for number in range(count):
            b.dirty(TopicPartition(f"t{number}", 0), checkpoint=40)
        for _ in range(2):  # the second scan frees the verdicts of the first
            with meter.measuring(monkeypatch):
                await b.pool.scanner.scan()
            assert meter.longest_turn < count
        assert len(b.pool.scanner.verdicts) == count

    run_scenario(scenario)


# --- pauses and aborts


def test_a_pause_waits_for_the_worker_and_nothing_is_published_or_checkpointed_after_it() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        job = await until_job(b)
        remaining = b.leave_file(T0, job.job_id)
        other = b.leave_file(T0, "another")
        pause = asyncio.ensure_future(pause_and_check(b, T0))
        await until(b.link.aborted)
        b.link.group(0)
        await asyncio.sleep(1)
        assert not pause.done()
        b.link.stopped()
        await pause
        assert not b.env.exists(remaining), "a pause finds no file of the run"
        assert b.env.exists(other)
        assert b.host.published == b.host.checkpoints == []
        await until(lambda: len(b.link.sent) == 2)  # and then it is cleaned again

    stats = run_scenario(scenario).pool.stats
    assert (stats.aborted, stats.cleans, stats.failures, stats.groups_dropped) == (2, 0, 0, 1)


def test_a_job_that_finishes_under_an_abort_is_not_checkpointed() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        pause = asyncio.ensure_future(pause_and_check(b, T0))
        await until(b.link.aborted)
        b.link.done()
        await pause
        assert b.host.checkpoints == []
        assert b.host.done == []

    run_scenario(scenario)


def test_digests_are_dropped_durably_before_a_clean_removes_what_they_include() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.journal = asyncio.Event()
        b.dirty(config=replace(COMPACTED, segment_bytes=100))
        await until_job(b)
        b.pool.store_digests(T0, 10, (RangeDigest(0, 10, 10, "0" * 32),))
        await asyncio.sleep(10)
        b.link.group(0)
        await until(lambda: b.host.publishing)
        path = "/data/varve.cleaner"
        assert decode_cleaner_state(b.env.read_file(path), path)[T0].digests == ()
        b.host.journal.set()
        await until(lambda: b.host.published)
        pause = asyncio.ensure_future(pause_and_check(b, T0))
        await until(b.link.aborted)
        b.link.stopped()
        await pause
        assert b.pool.state_of(T0).digests == ()

    run_scenario(scenario)


def test_the_end_of_all_cleans_is_durable_before_a_clean_changes_the_log() -> None:
    """A clean that is aborted, or ended by a kill, has removed records as well."""

    async def scenario(b: PoolHarness) -> None:
        b.host.journal = asyncio.Event()
        b.dirty(config=replace(COMPACTED, segment_bytes=100))
        await until_job(b)
        assert b.pool.state_of(T0).cleaned_end == 0
        b.link.group(0)
        await until(lambda: b.host.publishing)
        path = "/data/varve.cleaner"
        assert decode_cleaner_state(b.env.read_file(path), path)[T0].cleaned_end == 40
        b.host.journal.set()
        await until(lambda: b.host.published)
        pause = asyncio.ensure_future(pause_and_check(b, T0))
        await until(b.link.aborted)
        b.link.stopped()
        await pause
        assert b.host.checkpoints == []
        assert b.pool.state_of(T0).cleaned_end == 40

    run_scenario(scenario)


def test_a_clean_that_found_nothing_to_remove_counts_among_all_cleans() -> None:
    async def clean(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.done()
        await until(lambda: b.host.done)
        assert b.pool.state_of(T0).cleaned_end == 40

    before = run_scenario(clean)
    before.change(checkpoint_offset=None)  # the file was lost

    async def again(b: PoolHarness) -> None:
        await until_job(b)
        assert b.pool.state_of(T0).cleaned_end == 40

    run_scenario(again, before=before)


def test_a_pause_waits_for_the_journal_and_the_rest_of_the_job_is_dropped() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.journal = asyncio.Event()
        b.dirty(config=replace(COMPACTED, segment_bytes=100))
        await until_job(b)
        b.link.group(0)
        b.link.group(1)
        b.link.stopped()
        await until(lambda: b.host.publishing)
        pause = asyncio.ensure_future(pause_and_check(b, T0))
        await asyncio.sleep(20)  # longer than a worker has: it is not to blame for the journal
        assert not pause.done()
        assert not b.link.killed
        b.host.journal.set()
        await pause
        assert b.host.published == [(T0, (0,))]

    run_scenario(scenario)


def test_nested_pauses_last_until_the_last_one_ends() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.add(facts(even(0)))
        async with b.pool.control.paused(T0), b.pool.control.paused(T0):
            b.dirty()
            assert b.state() == s.Paused(2)
            await asyncio.sleep(10)
            assert b.link.sent == []
        await until_job(b)

    run_scenario(scenario)


def test_a_pause_cancelled_during_the_abort_leaves_no_state() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        pause = asyncio.ensure_future(pause_and_check(b, T0))
        await until(b.link.aborted)
        pause.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pause
        assert b.state() == s.Aborting(0)
        second = asyncio.ensure_future(pause_and_check(b, T0))
        await asyncio.sleep(0.01)
        assert b.state() == s.Aborting(1)
        b.link.stopped()
        await second
        await until(lambda: len(b.link.sent) == 2)

    run_scenario(scenario)


def test_an_abort_stops_the_job_and_leaves_the_partition_free() -> None:
    async def scenario(b: PoolHarness) -> None:
        assert not b.pool.operator.abort(T0)
        b.dirty()
        await until_job(b)
        assert b.pool.operator.abort(T0)
        assert b.pool.operator.abort(T0)
        assert b.link.aborted()
        b.link.stopped()
        await until(lambda: len(b.link.sent) == 2)
        assert not b.link.aborted(), "the flag concerns the old run alone"

    run_scenario(scenario)


def test_a_worker_that_ignores_an_abort_is_killed_and_replaced() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        first = b.link
        began = asyncio.get_running_loop().time()
        await pause_and_check(b, T0)
        waited = asyncio.get_running_loop().time() - began
        assert LIMITS.abort - 0.01 <= waited < LIMITS.abort + 1
        assert first.killed
        await until(lambda: len(b.fake_workers.links) == 2)
        assert b.pool.in_progress.quarantines() == {}
        assert b.pool.stats.worker_kills == 1

    run_scenario(scenario)


def test_a_worker_that_cannot_be_killed_is_abandoned_and_the_pause_granted() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        first = b.link
        await asyncio.wait_for(pause_and_check(b, T0), LIMITS.abort + LIMITS.workers.kill + 1)
        assert first.abandoned
        assert not first.is_gone()
        b.fake_workers.heeds_kill = True
        await until(lambda: len(b.fake_workers.links) == 2)

    run_scenario(scenario, fake_pool=FakeWorkerPool(heeds_kill=False))


# --- budgets and settings


def test_grants_are_topped_up_while_a_job_runs_and_returned_when_its_worker_dies() -> None:
    async def scenario(b: PoolHarness) -> None:
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
        budget = b.pool.dispatcher.throttle.budgets[Direction.READ]
        first.die()
        await until(lambda: b.host.failures)
        assert budget._accounts == {}
        assert b.pool.stats.read_bytes == spent

    settings = SETTINGS.model_copy(update={"read_bytes_per_second": 64 * 1024})
    run_scenario(scenario, settings)


def test_settings_change_without_discarding_running_work() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        first = b.link
        more = {"workers": 3, "write_bytes_per_second": 1 << 20, "backoff_ms": 50}
        b.pool.configure(SETTINGS.model_copy(update=more))
        await until(lambda: len(b.fake_workers.links) == 3)
        assert b.pool.dispatcher.throttle.budgets[Direction.WRITE].rate == 1 << 20
        b.pool.configure(SETTINGS.model_copy(update={"workers": 1}))
        await until(lambda: sum(link.shut for link in b.fake_workers.links) == 2)
        assert not first.shut
        first.done()
        await until(lambda: b.host.done)
        b.pool.configure(SETTINGS.model_copy(update={"workers": 2}))
        await until(lambda: len(b.fake_workers.links) == 4)

    assert run_scenario(scenario).pool.stats.worker_deaths == 0


def test_stopping_gives_partitions_back_and_ends_workers_within_its_limits() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        b.dirty(T1)
        await until(lambda: len(b.pool.in_progress.states()) == 2)
        heeding, deaf = [link for link in b.fake_workers.links if link.sent]
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
        await pause_and_check(b, T0)

    run_scenario(scenario, SETTINGS.model_copy(update={"workers": 3}))


def test_stopping_is_bounded_where_a_disk_hangs_under_a_journal_and_a_worker() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.journal = asyncio.Event()
        b.dirty()
        await until_job(b)
        b.link.group(0)
        await until(lambda: b.host.publishing)
        began = asyncio.get_running_loop().time()
        await b.pool.stop()
        assert asyncio.get_running_loop().time() - began < 20
        assert b.host.publishing, "the journal itself is never interrupted"

    run_scenario(scenario, fake_pool=FakeWorkerPool(heeds_kill=False))


def test_no_tombstone_expires_by_a_clock_that_was_set_since_the_scan() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.trusts_clock = False
        b.dirty(T0)
        job = await b.link.job()
        assert not job.drop_expired_tombstones

    run_scenario(scenario)
