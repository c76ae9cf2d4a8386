"""A topic's own rate limit: what its jobs may move, and what it costs nobody else."""

import asyncio
import random
from dataclasses import replace

import pytest

from cleaner.planning.scheduling_order import LIMITED_JOB_SECONDS, Lane
from cleaner.scheduler.clean_attempt import LANE_INDEX
from cleaner.workers.throttle import (
    TOP_UP_SECONDS,
    BrokerSide,
    Direction,
    SharedMemory,
    Throttle,
    TopicLimit,
)
from config.topics.keys import InvalidTopicConfigError, TopicLayers, resolve
from storage.model import TopicPartition
from tests.support.cleaner.log_facts import COMPACTED
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.cleaner.scheduler.pool_harness import (
    T0,
    T1,
    PoolHarness,
    run_scenario,
    until_job,
)

READ, WRITE = Direction.READ, Direction.WRITE
KEY = "varve.cleaner.io.max.bytes.per.second"


class Job:
    """Reads and writes pieces by turns, as soon as it is granted them."""

    def __init__(self, seed: int) -> None:
        self.memory = SharedMemory()
        self.side = BrokerSide(self.memory.slots)
        self.moved = 0
        self._random = random.Random(seed)
        self._direction, self._left = READ, 0

    def step(self) -> None:
        while True:
            spare = self.side.granted(self._direction) - self.side.spent(self._direction)
            if spare <= 0:
                return
            if self._left == 0:
                self._left = self._random.randrange(1, 400_000)
                self._direction = self._random.choice([READ, WRITE])
                continue
            part = min(spare, self._left)
            self.memory.slots[8 + self._direction] += part
            self._left -= part
            self.moved += part


def moved_by(jobs: list[Job], limit: TopicLimit | None, throttle: Throttle, seconds: int) -> int:
    for index, job in enumerate(jobs):
        throttle.join(index, job.side, 0.0, limit)
    for tick in range(1, int(seconds / TOP_UP_SECONDS) + 1):
        for budget in throttle.budgets:
            budget.top_up(tick * TOP_UP_SECONDS)
        for job in jobs:
            job.step()
    return sum(job.moved for job in jobs)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("rate", [None, 10_000_000])
def test_the_jobs_of_a_topic_move_its_rate_together_and_no_more(
    count: int, rate: int | None
) -> None:
    jobs = [Job(seed) for seed in range(count)]
    moved = moved_by(jobs, TopicLimit(1_000_000, 0.0), Throttle(rate, rate, 0.0), 60)
    assert 0.95 * 60_000_000 <= moved <= 61_000_000
    assert all(job.moved > 0.4 * moved / count for job in jobs)


def test_the_jobs_of_other_topics_have_what_a_limited_one_does_not_take() -> None:
    throttle = Throttle(10_000_000, 10_000_000, 0.0)
    limited, free = Job(1), Job(2)
    throttle.join(7, limited.side, 0.0, TopicLimit(1_000_000, 0.0))
    for tick in range(1, 1201):
        for budget in throttle.budgets:
            budget.top_up(tick * TOP_UP_SECONDS)
        if tick == 1:
            throttle.join(8, free.side, TOP_UP_SECONDS)
        limited.step()
        free.step()
    assert limited.moved <= 61_000_000
    assert free.moved >= 0.9 * 60 * 10_000_000


def test_a_limit_that_is_set_changed_and_taken_away_holds_for_a_job_under_way() -> None:
    async def scenario(b: PoolHarness) -> None:
        async def moved_in_a_second() -> int:
            before = b.link.memory.slots[8]
            for _ in range(50):
                b.link.charge(min(10**6, b.link.memory.slots[1] - b.link.memory.slots[8]))
                await asyncio.sleep(0.02)
            return b.link.memory.slots[8] - before

        b.dirty()
        await until_job(b)
        assert await moved_in_a_second() > 40_000_000
        for rate in (100_000, 300_000):
            b.change(config=replace(COMPACTED, varve_cleaner_io_max_bytes_per_second=rate))
            await asyncio.sleep(2)
            await moved_in_a_second()
            assert 0.9 * rate <= await moved_in_a_second() <= 1.1 * rate
        b.change(config=COMPACTED)
        await asyncio.sleep(2)
        assert await moved_in_a_second() > 40_000_000

    run_scenario(scenario)


def test_a_job_that_its_topics_limit_makes_long_leaves_the_regular_worker_to_others() -> None:
    async def scenario(b: PoolHarness) -> None:
        slow = replace(COMPACTED, varve_cleaner_io_max_bytes_per_second=1)
        b.dirty(config=slow, count=LIMITED_JOB_SECONDS)
        await until(lambda: len(b.fake_workers.links) == 2)
        await until(lambda: b.fake_workers.links[1].sent)
        workers = {worker.index: worker for worker in b.pool.status().workers}
        assert workers[LANE_INDEX[Lane.LIMITED]].partition == T0
        b.dirty(T1)
        await until(lambda: b.fake_workers.links[0].sent)
        assert (await b.fake_workers.links[0].job()).partition == T1
        b.fake_workers.links[1].done()
        await until(lambda: b.fake_workers.links[1].shut, seconds=120)
        assert [worker.index for worker in b.pool.status().workers] == [0]

    run_scenario(scenario)


@pytest.mark.parametrize(("value", "rate"), [("-1", None), ("65536", 65536)])
def test_no_limit_is_minus_one(value: str, rate: int | None) -> None:
    assert resolve(TopicLayers(dynamic={KEY: value})).cleaner_bytes_per_second_max == rate


@pytest.mark.parametrize("value", ["0", "1", "65535"])
def test_a_limit_below_what_can_be_kept_evenly_is_refused(value: str) -> None:
    with pytest.raises(InvalidTopicConfigError):
        resolve(TopicLayers(dynamic={KEY: value}))


def test_partitions_of_one_topic_share_its_limit_also_one_after_the_other() -> None:
    rate = 100_000

    async def scenario(b: PoolHarness) -> None:
        config = replace(COMPACTED, varve_cleaner_io_max_bytes_per_second=rate)
        began = asyncio.get_running_loop().time()
        moved = 0
        for number in range(20):
            b.dirty(TopicPartition("t", number), config=config)
            b.pool.wake()
            await until(lambda n=number: len(b.link.sent) == n + 1)
            for _ in range(10):
                part = b.link.memory.slots[1] - b.link.memory.slots[8]
                b.link.charge(part)
                moved += part
                await asyncio.sleep(0.02)
            b.link.done()
            await until(lambda n=number: len(b.host.done) == n + 1)
        seconds = asyncio.get_running_loop().time() - began
        assert moved <= rate * (seconds + 1)

    run_scenario(scenario)
