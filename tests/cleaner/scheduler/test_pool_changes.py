"""The pool in virtual time: what changes under a job, and what order jobs come in."""

import asyncio
from dataclasses import replace

import pytest

from cleaner import states as s
from cleaner.host import NotServedError
from cleaner.planning.findings import Reason
from config.topics.keys import TopicConfig
from storage.model import TopicPartition
from tests.support.cleaner.log_facts import COMPACTED, segment
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.cleaner.scheduler.pool_harness import (
    LIMITS,
    SETTINGS,
    T0,
    T1,
    PoolHarness,
    run_scenario,
    until_job,
)

DELETED = TopicConfig(cleanup_policy=("delete",))


def test_a_policy_that_flips_under_a_job_waits_for_it_and_flips_back_to_a_clean() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)

        async def becomes(config: TopicConfig, generation: str) -> None:
            async with b.pool.control.paused(T0):
                assert b.state() == s.Paused(1)
                b.change(config=config, generation=generation)

        change = asyncio.ensure_future(becomes(DELETED, "boot-2"))
        await until(b.link.aborted)
        assert not change.done()
        b.link.stopped()
        await change
        await asyncio.sleep(20)
        assert len(b.link.sent) == 1
        assert b.pool.scanner.verdicts[T0].findings[0].reason is Reason.POLICY
        await becomes(COMPACTED, "boot-3")
        job = await until_job(b)
        assert job.generation == "boot-3"

    run_scenario(scenario)


@pytest.mark.parametrize("heeds", [True, False])
def test_a_partition_deleted_under_a_job_is_gone_in_bounded_time_and_leaves_nothing(
    heeds: bool,
) -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        began = asyncio.get_running_loop().time()

        async def delete() -> None:
            async with b.pool.control.paused(T0):
                del b.host.logs[T0]

        deletion = asyncio.ensure_future(delete())
        await until(b.link.aborted)
        if heeds:
            b.link.stopped()
        await deletion
        waited = asyncio.get_running_loop().time() - began
        assert waited < 1 if heeds else LIMITS.abort - 0.01 <= waited < LIMITS.abort + 1
        await asyncio.sleep(20)
        assert b.pool.in_progress.states() == {}
        assert T0 not in b.pool.scanner.verdicts
        with pytest.raises(NotServedError):
            b.pool.explain(T0)

    run_scenario(scenario)


def test_a_directory_that_fails_under_a_job_costs_that_job_and_no_other_partition() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(config=replace(COMPACTED, segment_bytes=100))
        await until_job(b)
        b.dirty(T1)
        b.host.outcome = OSError(5, "Input/output error")
        b.link.group(0)
        await until(b.link.aborted)
        del b.host.logs[T0]  # its directory is offline
        b.link.stopped()
        job = await until_job(b)
        assert job.partition == T1
        b.link.done()
        await until(lambda: b.host.done)
        assert set(b.pool.in_progress.states()) == set()

    run_scenario(scenario)


def test_other_buffers_and_levels_are_those_of_the_next_job() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        first = await until_job(b)
        changes = {"dedupe_buffer_bytes": 7 << 20, "read_buffer_bytes": 1 << 20}
        b.pool.configure(SETTINGS.model_copy(update=changes))
        assert not b.link.aborted()
        b.link.done()
        await until(lambda: b.host.done)
        b.dirty(T1)
        job = await until_job(b)
        assert (job.dedupe_buffer_bytes, job.read_buffer_bytes) == (7 << 20, 1 << 20)
        assert first.dedupe_buffer_bytes == SETTINGS.dedupe_buffer_bytes

    run_scenario(scenario)


def test_a_setting_that_changes_after_the_scan_applies_to_the_clean_that_begins() -> None:
    async def scenario(b: PoolHarness) -> None:
        longer = replace(COMPACTED, delete_retention_ms=COMPACTED.delete_retention_ms + 1)
        b.host.config_of = lambda _partition: longer  # type: ignore[method-assign]
        b.dirty()
        job = await until_job(b)
        assert job.delete_retention_ms == longer.delete_retention_ms

    run_scenario(scenario)


def test_an_invalid_checkpoint_of_one_log_is_corrected_while_another_is_cleaned() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        b.dirty(T1, checkpoint=99, config=replace(COMPACTED, min_cleanable_dirty_ratio=1))
        job = await until_job(b)
        assert job.partition == T0
        assert b.host.checkpoints == [(T1, 0)]

    run_scenario(scenario)


def test_with_a_ratio_of_one_each_block_is_cleaned_after_its_own_maximum_lag() -> None:
    async def scenario(b: PoolHarness) -> None:
        now_ms = b.env.wall_ms()
        config = replace(COMPACTED, min_cleanable_dirty_ratio=1, max_compaction_lag_ms=10_000)
        old, active = segment(0, 10, first_ms=now_ms), segment(10, 11, first_ms=now_ms)
        b.dirty(config=config)
        b.change(segments=(old, active), log_end_offset=11, undecided_offset=11)
        await asyncio.sleep(5)
        b.env.advance_ms(10_000)
        await asyncio.sleep(5)
        assert b.link.sent == []
        b.env.advance_ms(1)
        job = await until_job(b)
        assert job.end_offset == 10
        b.link.done()
        await until(lambda: b.host.done)
        late = now_ms + 8_000
        more = (old, segment(10, 20, first_ms=late), segment(20, 21, first_ms=late))
        b.change(segments=more, log_end_offset=21, undecided_offset=21)
        await asyncio.sleep(5)
        assert len(b.link.sent) == 1
        b.env.advance_ms(8_000)
        job = await until_job(b)
        assert (job.first_dirty_offset, job.end_offset) == (10, 20)

    run_scenario(scenario)


def test_an_idle_segment_that_was_closed_by_the_timer_is_cleaned_when_the_pool_is_woken() -> None:
    async def scenario(b: PoolHarness) -> None:
        now_ms = b.env.wall_ms()
        config = replace(COMPACTED, max_compaction_lag_ms=10_000, min_cleanable_dirty_ratio=1)
        b.dirty(config=config)
        active = segment(0, 10, first_ms=now_ms)
        b.change(segments=(active,), log_end_offset=10, undecided_offset=10)
        await asyncio.sleep(5)
        b.env.advance_ms(10_001)
        await asyncio.sleep(5.5)
        assert b.link.sent == []
        b.change(segments=(active, segment(10, 10, 0)))
        b.pool.wake()
        job = await asyncio.wait_for(until_job(b), 0.1)
        assert job.log_end_offset_is_end

    run_scenario(scenario)


def test_requests_come_first_then_deadlines_then_the_dirtiest_and_the_queue_says_so() -> None:
    late = replace(COMPACTED, max_compaction_lag_ms=1)

    async def scenario(b: PoolHarness) -> None:
        parts = [TopicPartition("t", number) for number in range(5)]
        b.dirty(parts[0])
        await until_job(b)
        b.dirty(parts[1], checkpoint=10)
        b.dirty(parts[2], checkpoint=30)
        b.dirty(parts[3], checkpoint=30, config=late)
        b.dirty(parts[4])
        b.pool.operator.request_clean(parts[2])
        await asyncio.sleep(2)
        b.env.advance_ms(2)
        await asyncio.sleep(2)
        places = {part: b.pool.explain(part).queue_position for part in parts}
        assert places == {parts[0]: None, parts[2]: 1, parts[3]: 2, parts[4]: 3, parts[1]: 4}
        order = []
        for _ in parts:
            b.link.done()
            await until(lambda: len(b.host.done) > len(order))
            order.append(b.host.done[-1][0].partition)
            if len(order) < len(parts):
                await until_job(b)
        assert order == [parts[0], parts[2], parts[3], parts[4], parts[1]]

    run_scenario(scenario)


def test_a_stopping_worker_gets_no_job_and_is_replaced() -> None:
    two = SETTINGS.model_copy(update={"workers": 2})

    async def scenario(b: PoolHarness) -> None:
        worker_pool = b.pool._workers
        await until(lambda: len(worker_pool.idle()) == 2)
        b.pool.configure(SETTINGS.model_copy(update={"workers": 1}))
        b.pool.configure(two)
        assert [worker.index for worker in worker_pool.idle()] == [0]
        b.dirty()
        b.dirty(T1)
        await until(lambda: len(b.pool.in_progress.states()) == 2)
        assert len(b.fake_workers.links) == 3

    harness = run_scenario(scenario, two)
    assert harness.pool.stats.worker_deaths == 0


def test_numbers_of_a_worker_that_was_removed_disappear() -> None:
    two = SETTINGS.model_copy(update={"workers": 2})

    async def scenario(b: PoolHarness) -> None:
        await until(lambda: len(b.pool._workers.idle()) == 2)
        b.dirty()
        b.dirty(T1)
        await until(lambda: len(b.pool.in_progress.states()) == 2)
        for link in b.fake_workers.links:
            link.done()
        await until(lambda: len(b.host.done) == 2)
        assert set(b.pool.stats.last) == {0, 1}
        b.pool.configure(SETTINGS)
        await until(lambda: set(b.pool.stats.last) == {0})

    run_scenario(scenario, two)


def test_the_largest_dirty_ratio_is_that_of_logs_that_could_be_chosen_as_with_kafka() -> None:
    async def scenario(b: PoolHarness) -> None:
        await until(lambda: b.pool._workers.idle())
        idle = replace(COMPACTED, min_cleanable_dirty_ratio=0.9)
        b.dirty(T1, checkpoint=30, config=idle)
        await until(lambda: b.pool.stats.dirty_ratio_max > 0)
        low = b.pool.stats.dirty_ratio_max
        assert low < 0.5
        b.dirty(T0, checkpoint=10, config=idle)
        await until(lambda: b.pool.stats.dirty_ratio_max > low)
        for enter in (b.pool.operator.pause, b.pool.operator.resume):
            assert enter(T0)
            await until(
                lambda: (b.pool.stats.dirty_ratio_max == low) == b.pool.operator.is_paused(T0)
            )
        b.change(T0, config=COMPACTED)  # it is chosen
        await until_job(b)
        await until(lambda: b.pool.stats.dirty_ratio_max == low)

    run_scenario(scenario)
