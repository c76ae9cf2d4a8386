"""The pool's lanes in virtual time: who does not wait for whom."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cleaner.host import LogFacts
from cleaner.planning.scheduling_order import SMALL_JOB_BYTES, Lane
from cleaner.scheduler.clean_attempt import LANE_INDEX
from cleaner.scheduler.cleaner_pool import LANE_IDLE_SECONDS
from storage.model import TopicPartition
from tests.support.cleaner.log_facts import COMPACTED, even
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.cleaner.scheduler.pool_harness import (
    SETTINGS,
    T0,
    T1,
    PoolHarness,
    run_scenario,
    until_job,
)
from tests.support.clocks.virtual_loop import VirtualLoop

T2 = TopicPartition("t", 2)
LARGE = replace(COMPACTED, segment_bytes=1 << 30)


def dirty_large(b: PoolHarness, partition: TopicPartition) -> None:
    b.dirty(partition, config=LARGE)
    b.change(partition, segments=tuple(even(4, size_bytes=SMALL_JOB_BYTES)))


async def works(b: PoolHarness, seconds: float) -> None:
    """Let time pass in which the regular worker goes on with its job."""
    for _ in range(int(seconds)):
        await asyncio.sleep(1)
        b.fake_workers.links[0].progress("rewrite", 1, 2)


def indexes(b: PoolHarness) -> list[int]:
    return [worker.index for worker in b.pool.status().workers]


def test_a_small_partition_does_not_wait_for_a_large_one_that_is_being_cleaned() -> None:
    async def scenario(b: PoolHarness) -> None:
        dirty_large(b, T0)
        await until_job(b)
        dirty_large(b, T1)
        await asyncio.sleep(5)
        assert indexes(b) == [0], "a large job waits for the regular worker"
        b.dirty(T2)
        await until(
            lambda: len(b.fake_workers.links) == 2 and b.fake_workers.links[1].sent, seconds=5
        )
        assert (await b.fake_workers.links[1].job()).partition == T2
        assert indexes(b) == [0, LANE_INDEX[Lane.SMALL]]
        b.fake_workers.links[1].done()
        await until(lambda: b.host.done)
        await works(b, LANE_IDLE_SECONDS / 2)
        assert indexes(b) == [0, LANE_INDEX[Lane.SMALL]], "the next small job needs no new worker"
        await works(b, LANE_IDLE_SECONDS)
        assert indexes(b) == [0]
        assert len(b.fake_workers.links[0].sent) == 1

    run_scenario(scenario)


def test_a_topic_does_not_wait_for_all_partitions_of_another() -> None:
    async def scenario(b: PoolHarness) -> None:
        for number in range(100):
            b.dirty(TopicPartition("t", number))
        await until_job(b)
        other = TopicPartition("other", 0)
        b.dirty(other)
        for number in range(4):  # two at most begin before the next scan
            job = await b.link.job()
            if job.partition == other:
                return
            b.link.done()
            await until(lambda number=number: len(b.link.sent) == number + 2)
        raise AssertionError("it still waits")

    run_scenario(scenario)


def test_a_requested_clean_does_not_wait_for_a_large_partition_that_is_being_cleaned() -> None:
    async def scenario(b: PoolHarness) -> None:
        dirty_large(b, T0)
        await until_job(b)
        dirty_large(b, T1)
        assert b.pool.operator.request_clean(T1) == 40
        await until(
            lambda: len(b.fake_workers.links) == 2 and b.fake_workers.links[1].sent, seconds=5
        )
        assert (await b.fake_workers.links[1].job()).partition == T1
        b.dirty(T2)
        await until(
            lambda: len(b.fake_workers.links) == 3 and b.fake_workers.links[2].sent, seconds=5
        )
        assert indexes(b) == [0, LANE_INDEX[Lane.REQUESTED], LANE_INDEX[Lane.SMALL]]

    run_scenario(scenario)


def test_other_settings_leave_the_workers_of_lanes_alone() -> None:
    async def scenario(b: PoolHarness) -> None:
        dirty_large(b, T0)
        await until_job(b)
        b.dirty(T2)
        await until(
            lambda: len(b.fake_workers.links) == 2 and b.fake_workers.links[1].sent, seconds=5
        )
        b.pool.configure(SETTINGS.model_copy(update={"workers": 2}))
        await until(lambda: len(b.fake_workers.links) == 3, seconds=5)
        b.pool.configure(SETTINGS)
        await asyncio.sleep(5)
        assert indexes(b) == [0, LANE_INDEX[Lane.SMALL]]
        assert not b.fake_workers.links[1].shut

    run_scenario(scenario)


def test_a_partition_that_is_paused_by_the_broker_again_and_again_keeps_its_place() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0)
        await until_job(b)
        b.dirty(T1, checkpoint=15)
        await asyncio.sleep(5)
        for _ in range(100):
            async with b.pool.control.paused(T1):
                await asyncio.sleep(20)
            await asyncio.sleep(2)
        b.dirty(T2)
        await asyncio.sleep(5)
        assert b.pool.waiting() == [T2]

    run_scenario(scenario)


def test_an_attempt_that_was_given_up_has_had_its_turn() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0)
        await until_job(b)
        b.dirty(T1)
        await asyncio.sleep(5)
        b.pool.operator.abort(T0)
        b.link.stopped()
        await until(lambda: len(b.link.sent) == 2)
        assert (await b.link.job()).partition == T1

    run_scenario(scenario)


def test_workers_take_the_next_candidates_without_another_scan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(b: PoolHarness) -> None:
        loop, facts = asyncio.get_running_loop(), b.host.facts
        assert isinstance(loop, VirtualLoop)

        def slow_facts() -> Iterator[LogFacts]:
            for log in facts():
                loop.now += 1  # so a pause of many seconds follows the scan
                yield log

        monkeypatch.setattr(b.host, "facts", slow_facts)
        partitions = [TopicPartition("t", number) for number in range(5)]
        for partition in partitions:
            b.dirty(partition)
        b.pool.wake()
        jobs = [await until_job(b)]
        b.host.logs.pop(partitions[2])  # deleted since the scan
        scans = b.pool.stats.scans
        while len(jobs) < 4:
            b.link.done()
            await until(lambda: len(b.link.sent) > len(jobs))
            jobs.append(await b.link.job())
        assert b.pool.stats.scans == scans
        assert {job.partition for job in jobs} == set(partitions) - {partitions[2]}

    run_scenario(scenario)
