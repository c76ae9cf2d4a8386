"""One worker for one task: what it says, what it fails to say, and how it is ended."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from cleaner.job import CleanAbortedError, CleanJob, SourceSegment
from cleaner.workers.dedicated_worker import DedicatedWorker, JobFailedError, open_dedicated_worker
from cleaner.workers.throttle import BrokerSide, Direction
from cleaner.workers.worker_pool import ABORT_SECONDS, STALL_SECONDS
from tests.support.cleaner.cleaning import NOW_MS, clean_job
from tests.support.cleaner.scheduler.cleaner_fakes import FakeLink, FakeWorkerPool, until
from tests.support.clocks.virtual_loop import run_virtually


class Budgets:
    """Grants without end; knows who spends of them."""

    def __init__(self) -> None:
        self.members: list[int] = []

    def join(self, index: int, side: BrokerSide, now: float) -> None:
        self.members.append(index)

    def leave(self, index: int, now: float) -> None:
        self.members.remove(index)


Scenario = Callable[[DedicatedWorker, FakeLink, Budgets], Coroutine[None, None, None]]


def alone(scenario: Scenario, fake_pool: FakeWorkerPool | None = None) -> FakeLink:
    """Run a scenario with a worker; everything is given back whatever it does."""
    fake_pool = fake_pool or FakeWorkerPool()

    async def main() -> None:
        budgets = Budgets()
        try:
            async with open_dedicated_worker(
                fake_pool, 5, index=7, budgets=budgets, top_up=lambda now: None
            ) as worker:
                await scenario(worker, fake_pool.links[0], budgets)
        finally:
            assert budgets.members == []
            assert fake_pool.links[0].closed
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.sleep(0)  # what was cancelled ends
            assert not {task for task in tasks if not task.done()}

    run_virtually(main())
    return fake_pool.links[0]


def job() -> CleanJob:
    return clean_job([[SourceSegment(0, 10, 100, NOW_MS, NOW_MS)]])


def test_a_job_runs_under_the_budgets_and_its_groups_come_with_its_report() -> None:
    async def scenario(worker: DedicatedWorker, link: FakeLink, budgets: Budgets) -> None:
        running = asyncio.create_task(worker.run(job()))
        await link.job()
        assert budgets.members == [7]
        link.done(bytes_read=9)
        assert (await running).report.bytes_read == 9

    assert not alone(scenario).killed


def test_a_worker_that_ends_in_the_midst_of_its_job_fails_it() -> None:
    async def scenario(worker: DedicatedWorker, link: FakeLink, budgets: Budgets) -> None:
        running = asyncio.create_task(worker.run(job()))
        await link.job()
        link.die()
        with pytest.raises(JobFailedError, match="ended in the middle"):
            await running

    alone(scenario)


def test_a_worker_that_neither_speaks_nor_moves_a_byte_is_killed() -> None:
    async def scenario(worker: DedicatedWorker, link: FakeLink, budgets: Budgets) -> None:
        running = asyncio.create_task(worker.run(job()))
        await link.job()
        started = asyncio.get_running_loop().time()
        with pytest.raises(JobFailedError, match="no progress"):
            await running
        assert asyncio.get_running_loop().time() - started <= 2 * STALL_SECONDS + 1

    assert alone(scenario).killed


def test_a_worker_that_is_silent_and_moves_bytes_is_left_alone() -> None:
    async def scenario(worker: DedicatedWorker, link: FakeLink, budgets: Budgets) -> None:
        running = asyncio.create_task(worker.run(job()))
        await link.job()
        for _ in range(5):
            worker.side.grant(Direction.READ, 1 << 20)
            link.charge(10)
            await asyncio.sleep(STALL_SECONDS * 0.9)
        link.done()
        await running

    assert not alone(scenario).killed


def test_a_worker_that_does_not_heed_an_abort_is_killed() -> None:
    async def scenario(worker: DedicatedWorker, link: FakeLink, budgets: Budgets) -> None:
        running = asyncio.create_task(worker.run(job()))
        await link.job()
        worker.abort()
        assert link.aborted()
        await asyncio.sleep(ABORT_SECONDS - 1)
        assert not link.killed
        with pytest.raises(CleanAbortedError):
            await running

    assert alone(scenario).killed


def test_nothing_runs_behind_an_abort() -> None:
    async def scenario(worker: DedicatedWorker, link: FakeLink, budgets: Budgets) -> None:
        worker.abort()
        with pytest.raises(CleanAbortedError):
            await worker.run(job())
        assert not link.sent

    alone(scenario)


def test_an_abort_after_the_end_of_the_worker_does_nothing() -> None:
    workers: list[DedicatedWorker] = []

    async def scenario(worker: DedicatedWorker, link: FakeLink, budgets: Budgets) -> None:
        workers.append(worker)
        running = asyncio.create_task(worker.run(job()))
        await link.job()
        link.done()
        await running

    link = alone(scenario)
    link.slots.release()  # as a real link does when it closes

    async def abort() -> None:
        workers[0].abort()

    run_virtually(abort())


def test_who_is_cancelled_in_the_midst_of_a_job_leaves_nothing_that_waits() -> None:
    async def scenario(worker: DedicatedWorker, link: FakeLink, budgets: Budgets) -> None:
        running = asyncio.create_task(worker.run(job()))
        await link.job()
        await until(lambda: len(asyncio.all_tasks()) > 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    alone(scenario)


def test_a_worker_that_does_not_start_fails_its_job_and_is_ended() -> None:
    async def scenario(worker: DedicatedWorker, link: FakeLink, budgets: Budgets) -> None:
        with pytest.raises(JobFailedError, match="did not start"):
            await worker.run(job())

    alone(scenario, FakeWorkerPool(prepare=FakeLink.die))


def test_an_abort_does_not_wait_for_a_worker_that_starts() -> None:
    """Its kernels may compile for minutes."""

    async def scenario(worker: DedicatedWorker, link: FakeLink, budgets: Budgets) -> None:
        running = asyncio.create_task(worker.run(job()))
        await asyncio.sleep(1)
        worker.abort()
        with pytest.raises(CleanAbortedError):
            await asyncio.wait_for(running, 1)

    assert alone(scenario, FakeWorkerPool(prepare=lambda link: None)).killed
