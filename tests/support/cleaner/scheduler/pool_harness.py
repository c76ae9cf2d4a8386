"""A started pool in virtual time, with workers and a broker that do as the test says."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from cleaner import states as s
from cleaner.job import CleanJob
from cleaner.scheduler.clean_attempt import PoolLimits
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.workers.worker_pool import WorkerPoolLimits
from config.settings import CleanerSettings
from storage.model import TopicPartition
from tests.support.cleaner.log_facts import even, facts
from tests.support.cleaner.scheduler.cleaner_fakes import FakeHost, FakeLink, FakeWorkerPool, until
from tests.support.clocks.virtual_loop import run_virtually
from tests.support.storage.memory_env import MemoryEnv

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
SETTINGS = CleanerSettings(
    workers=1,
    backoff_ms=1000,
    retry_backoff_ms=10_000,
    retry_backoff_max_ms=60_000,
    read_bytes_per_second=None,
)
LIMITS = PoolLimits(
    abort=5.0,
    stall=30.0,
    workers=WorkerPoolLimits(start=20, kill=1, stop=4, respawn=0.5, respawn_max=8),
)


@dataclass
class PoolHarness:
    pool: CleanerPool
    host: FakeHost
    fake_workers: FakeWorkerPool
    env: MemoryEnv

    @property
    def link(self) -> FakeLink:
        return self.fake_workers.links[-1]

    def state(self, partition: TopicPartition = T0) -> s.State:
        return self.pool.in_progress.state(partition)

    def dirty(self, partition: TopicPartition = T0, count: int = 4, **changes: Any) -> None:
        log = facts(even(count), partition=partition, data_directory="/data", **changes)
        self.host.add(log)
        self.env.mkdir(log.directory)

    def change(self, partition: TopicPartition = T0, **changes: Any) -> None:
        self.host.add(replace(self.host.logs[partition], **changes))

    def leave_file(self, partition: TopicPartition, job_id: str) -> str:
        path = f"/data/{partition}/{0:020}.log.{job_id}.cleaned"
        self.env.open(path, create=True, write=True).close()
        return path


def run_scenario(
    scenario: Callable[[PoolHarness], Coroutine[Any, Any, None]],
    settings: CleanerSettings = SETTINGS,
    fake_pool: FakeWorkerPool | None = None,
    before: PoolHarness | None = None,
) -> PoolHarness:
    """Run a scenario against a started pool; afterwards it stops and nothing is left over.

    `before`: the same broker, started again.
    """
    used = fake_pool or FakeWorkerPool()
    host, env = (FakeHost(), MemoryEnv(1)) if before is None else (before.host, before.env)

    async def main() -> PoolHarness:
        pool = CleanerPool(host, settings, env, spawn=used, limits=LIMITS)
        harness = PoolHarness(pool, host, used, env)
        await pool.start()
        try:
            await asyncio.wait_for(scenario(harness), 5000)
            pool.in_progress.validate()
        finally:
            await asyncio.wait_for(pool.stop(), 60)
        assert not pool.control._waiting
        assert all(link.closed for link in used.links)
        return harness

    return run_virtually(main())


async def until_job(b: PoolHarness) -> CleanJob:
    """The job that the youngest worker has or gets."""
    await until(lambda: b.fake_workers.links)
    return await b.link.job()


async def pause_and_check(b: PoolHarness, partition: TopicPartition) -> None:
    async with b.pool.control.paused(partition):
        assert isinstance(b.state(partition), s.Paused)
        assert partition not in b.host.publishing
