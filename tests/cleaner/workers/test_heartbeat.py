"""A worker that hangs is noticed, one that is slow or waits is not."""

import asyncio
import os
import signal
import sys

from cleaner import states as s
from cleaner.stats import PoolStats
from cleaner.workers.channel import Message, WorkerReady
from cleaner.workers.heartbeat import CHECK_SECONDS, MISSED_MAX, HeartbeatMonitor
from cleaner.workers.process import WorkerLink, spawn_command
from cleaner.workers.throttle import Direction
from cleaner.workers.worker_pool import PoolWorker, WorkerPool, WorkerPoolLimits
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.cleaner.scheduler.pool_harness import (
    LIMITS,
    SETTINGS,
    PoolHarness,
    run_scenario,
    until_job,
)

ODD = [sys.executable, "-P", "-m", "tests.support.cleaner.scheduler.odd_worker"]


def test_checks_without_a_beat_are_counted_and_a_beat_begins_anew() -> None:
    heartbeat = HeartbeatMonitor(3)
    assert not any(heartbeat.is_lost(0) for _ in range(10)), "it is being started"
    assert not any(heartbeat.is_lost(beats) for beats in (1, 1, 1, 2, 2, 2, 3, 3, 3))
    assert heartbeat.is_lost(3)


def test_a_worker_that_hangs_is_killed_and_its_partition_quarantined_as_for_a_dead_one() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        b.link.is_stopped = True
        began = asyncio.get_running_loop().time()
        await until(lambda: b.host.failures)
        assert asyncio.get_running_loop().time() - began <= (MISSED_MAX + 2) * CHECK_SECONDS
        assert b.fake_workers.links[0].killed
        assert isinstance(b.state(), s.Quarantined)
        assert "no heartbeat" in b.host.failures[0][1]
        await until(lambda: len(b.fake_workers.links) == 2 and b.fake_workers.links[1].sent)

    run_scenario(scenario)


def test_an_idle_worker_that_hangs_is_replaced_before_it_is_given_a_job() -> None:
    async def scenario(b: PoolHarness) -> None:
        await asyncio.sleep(2 * CHECK_SECONDS)
        b.link.is_stopped = True
        await until(lambda: len(b.fake_workers.links) == 2)
        b.dirty()
        await until_job(b)
        assert b.fake_workers.links[0].sent == []

    run_scenario(scenario)


def test_a_worker_that_waits_for_its_budget_is_neither_hung_nor_silent() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_job(b)
        for _ in range(int(10 * LIMITS.stall)):
            b.link.memory.slots[10 + Direction.READ] += 10_000  # a nap without a grant
            await asyncio.sleep(1)
        assert not b.link.aborted()
        assert b.host.failures == []

    run_scenario(scenario, SETTINGS.model_copy(update={"read_bytes_per_second": 64 * 1024}))


class Listener:
    """Hears of the end of a worker."""

    def __init__(self) -> None:
        self.gone: list[str] = []

    def worker_free(self, worker: PoolWorker) -> None:
        worker.busy = True  # with nothing

    async def worker_sent(self, worker: PoolWorker, message: Message) -> None:
        assert isinstance(message, WorkerReady)

    async def worker_exited(self, worker: PoolWorker, how: str) -> None:
        self.gone.append(how)


async def test_a_process_stopped_by_a_signal_is_killed_and_replaced() -> None:
    async def spawn(nice: int) -> WorkerLink:
        return await spawn_command([*ODD, "--nice", "0"])

    listener = Listener()
    worker_pool = WorkerPool(spawn, listener, PoolStats(), WorkerPoolLimits(check=0.1, missed=20))
    worker_pool.resize(1, 0)
    await until(lambda: 0 in worker_pool.workers and worker_pool.workers[0].busy)
    pid = worker_pool.workers[0].link.pid
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: listener.gone)
    assert "no heartbeat" in listener.gone[0]
    await until(lambda: 0 in worker_pool.workers and worker_pool.workers[0].link.pid != pid)
    worker_pool.workers[0].busy = False
    await worker_pool.stop()
