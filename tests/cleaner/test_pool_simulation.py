"""The whole pool under random workers, clients with short patience, failures and cancellations.

Time is virtual and the order of ready callbacks is drawn from the seed, so that each seed is one
history and can be had again: VARVE_SIMULATION_SEEDS=17:18.
"""

import asyncio
import os
import random
from collections import Counter
from dataclasses import replace

from structlog.testing import capture_logs

from cleaner import states as s
from cleaner.crew import CrewLimits
from cleaner.host import PublishOutcome
from cleaner.job import CleanedGroup, CleanJob
from cleaner.pool import CleanerPool
from cleaner.run import PoolLimits
from config.settings import CleanerSettings
from storage.model import TopicPartition
from tests.support.cleaner_fakes import FakeCrew, FakeHost, FakeLink
from tests.support.log_facts import COMPACTED, even, facts
from tests.support.memory_env import MemoryEnv
from tests.support.virtual_loop import run_virtually

PARTITIONS = [TopicPartition("t", number) for number in range(3)]
SETTINGS = CleanerSettings(
    workers=2, backoff_ms=300, retry_backoff_ms=500, retry_backoff_max_ms=2000
)
LIMITS = PoolLimits(
    abort=1.5, stall=6.0, crew=CrewLimits(start=2, kill=0.5, stop=2, respawn=0.05, respawn_max=1)
)


def seeds() -> range:
    first, _, end = os.environ.get("VARVE_SIMULATION_SEEDS", "0:150").partition(":")
    return range(int(first), int(end))


class Simulation:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.host = RandomHost(self)
        self.crew = FakeCrew(prepare=self.live)
        self.env = MemoryEnv(seed)
        self.working: Counter[TopicPartition] = Counter()
        self.held: Counter[TopicPartition] = Counter()
        self.seen: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()

    def live(self, link: FakeLink) -> None:
        task = asyncio.ensure_future(self.worker(link))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def worker(self, link: FakeLink) -> None:
        """Works, notices aborts now and then, and now and then fails, dies or hangs."""
        await asyncio.sleep(self.rng.random() * 0.5)
        if self.rng.random() < 0.05:
            link.die()
            return
        link.ready()
        while not link.is_gone():
            job = await link.job()
            self.working[job.partition] += 1
            try:
                if not await self.work(link, job):
                    return
            finally:
                self.working[job.partition] -= 1

    async def work(self, link: FakeLink, job: CleanJob) -> bool:
        """One job; False if the worker is no more."""
        heeds = self.rng.random() > 0.05
        for index in range(len(job.groups)):
            await asyncio.sleep(self.rng.random() * 0.8)
            if link.is_gone():
                return False
            assert not self.held[job.partition], "a worker has files that were granted to a pause"
            if heeds and link.aborted():
                link.stopped()
                return True
            fate = self.rng.random()
            if fate < 0.02:
                link.die()
                return False
            if fate < 0.05:
                link.failed("OSError: disk")
                return True
            if fate < 0.06:
                await asyncio.sleep(20)  # hangs
                return not link.is_gone()
            link.group(index)
        if link.is_gone():
            return False
        link.done()
        return True

    async def client(self, pool: CleanerPool, number: int) -> None:
        """Pauses partitions with little patience, sometimes nested; truncates meanwhile."""
        for _ in range(6):
            await asyncio.sleep(self.rng.random() * 3)
            partition = self.rng.choice(PARTITIONS)
            if self.rng.random() < 0.2:
                pool.abort(partition)
            try:
                async with asyncio.timeout(self.rng.random() * 2), pool.paused(partition):
                    await self.truncate(partition)
                    if self.rng.random() < 0.3:
                        async with pool.paused(partition):
                            await self.truncate(partition)
                self.seen["paused"] += 1
            except TimeoutError:
                self.seen["gave up"] += 1

    async def truncate(self, partition: TopicPartition) -> None:
        self.held[partition] += 1
        try:
            for _ in range(3):
                assert partition not in self.host.publishing, "a journal under a granted pause"
                await asyncio.sleep(self.rng.random() * 0.2)
            log = self.host.logs[partition]
            self.host.add(replace(log, checkpoint_offset=None, generation=f"{log.generation}'"))
        finally:
            self.held[partition] -= 1

    async def run(self) -> None:
        for partition in PARTITIONS:
            config = replace(COMPACTED, segment_bytes=100)
            self.host.add(facts(even(4), partition=partition, config=config))
            self.env.mkdir(f"/data/{partition}")
        pool = CleanerPool(self.host, SETTINGS, self.env, spawn=self.crew, limits=LIMITS)
        await pool.start()
        watcher = asyncio.ensure_future(self.watch(pool))
        await asyncio.gather(*(self.client(pool, number) for number in range(4)))
        self.host.outcomes = [PublishOutcome.PUBLISHED]
        for partition in PARTITIONS:
            async with asyncio.timeout(120):
                await pool.await_cleaned(partition, 40)
        assert not pool._control.is_waited_for
        watcher.cancel()
        async with asyncio.timeout(30):
            await pool.stop()
        pool.registry.validate()
        assert not any(s.held(state) for state in pool.registry.in_progress().values())
        assert not any(isinstance(x, s.Paused) for x in pool.registry.in_progress().values())
        self.seen.update(
            cleans=pool.stats.cleans, aborted=pool.stats.aborted, failures=pool.stats.failures
        )
        for task in self.tasks:
            task.cancel()

    async def watch(self, pool: CleanerPool) -> None:
        while True:
            pool.registry.validate()
            for partition in PARTITIONS:
                if self.held[partition]:
                    assert isinstance(pool.registry.state(partition), s.Paused)
            await asyncio.sleep(0.05)


class RandomHost(FakeHost):
    """Publishes slowly, and not always."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation
        self.outcomes: list[PublishOutcome | Exception] = [
            *[PublishOutcome.PUBLISHED] * 30,
            PublishOutcome.SOURCES_GONE,
            OSError(5, "Input/output error"),
        ]

    async def publish(self, job: CleanJob, group: CleanedGroup) -> PublishOutcome:
        rng = self.simulation.rng
        if self.logs[job.partition].generation != job.generation:
            return PublishOutcome.STALE
        self.publishing.add(job.partition)
        try:
            await asyncio.sleep(rng.random() * 0.4)
        finally:
            self.publishing.discard(job.partition)
        self.outcome = rng.choice(self.outcomes)
        return await super().publish(job, group)

    def checkpoint(self, partition: TopicPartition, generation: str, offset: int) -> None:
        assert not self.simulation.held[partition], "a checkpoint under a granted pause"
        super().checkpoint(partition, generation, offset)


def test_pauses_hold_and_end_and_every_partition_gets_clean_whatever_happens() -> None:
    seen: Counter[str] = Counter()
    for seed in seeds():
        simulation: list[Simulation] = []

        async def main(seed: int = seed, made: list[Simulation] = simulation) -> None:
            made.append(Simulation(seed))
            await made[0].run()

        try:
            with capture_logs() as logs:
                run_virtually(main(), seed)
            mistakes = [line for line in logs if line.get("exc_info")]
            assert not mistakes, mistakes
        except BaseException:
            print(f"seed {seed}")
            raise
        seen.update(simulation[0].seen)
    print(dict(seen))
    for kind in ("paused", "gave up", "cleans", "aborted", "failures"):
        assert seen[kind] > len(seeds()) / 4, (kind, seen)
