"""A thread of the broker under the workers' budgets, and what a view's worker spends of them."""

import asyncio
from dataclasses import dataclass, field

import pytest

from cleaner.job import CleanAbortedError, CleanJob, ViewRules
from cleaner.workers.budget_share import open_budget_share
from cleaner.workers.dedicated_worker import open_dedicated_worker
from cleaner.workers.process import spawn_process
from cleaner.workers.throttle import BrokerSide, Budget, Direction
from storage.env import RealEnv
from storage.format.batch import Record, build_batch
from tests.support.cleaner.cleaning import NOW_MS, clean_job, segment, write_segments

RATE = float(1 << 20)


@dataclass
class Budgets:
    """Both budgets under explicit rates, on a clock of its own: a look at it is a while."""

    now: float = 0.0
    peak: list[int] = field(default_factory=lambda: [0, 0])
    spent: list[int] = field(default_factory=lambda: [0, 0])
    side: BrokerSide | None = None

    def __post_init__(self) -> None:
        self._budgets = [Budget(direction, RATE, self.now) for direction in Direction]

    def join(self, index: int, side: BrokerSide, now: float) -> None:
        self.side = side
        for budget in self._budgets:
            budget.join(index, side)

    def leave(self, index: int, now: float) -> None:
        assert self.side is not None
        for direction in Direction:
            self.spent[direction] += self.side.spent(direction)
        for budget in self._budgets:
            budget.leave(index, self.now)

    def top_up(self, now: float) -> None:
        """A tenth of a second has passed, says this clock."""
        assert self.side is not None
        self.now += 0.1
        for direction, budget in zip(Direction, self._budgets, strict=True):
            budget.top_up(self.now)
            within = RATE * self.now + RATE  # the rate, and a second of it at once
            assert self.side.granted(direction) <= within


async def test_a_thread_copies_no_faster_than_the_budgets_allow() -> None:
    budgets = Budgets()
    async with open_budget_share(index=9, budgets=budgets, top_up=budgets.top_up) as share:
        for _ in range(4):
            await asyncio.to_thread(share.charge, 1 << 19)
    assert budgets.spent == [2 << 20, 2 << 20]
    assert budgets.now >= 1.0, "one second's worth was there from the start"


async def test_a_thread_that_waits_for_the_budgets_can_be_stopped() -> None:
    budgets = Budgets()
    async with open_budget_share(index=9, budgets=budgets, top_up=lambda now: None) as share:
        copying = asyncio.create_task(asyncio.to_thread(share.charge, 1 << 20))
        await asyncio.sleep(0)
        share.abort()
        with pytest.raises(CleanAbortedError):
            await copying


def view_job(directory: str) -> CleanJob:
    env = RealEnv()
    batches = [
        build_batch([Record(n, NOW_MS, b"%d" % (n % 1000), b"x" * 1000)]) for n in range(2000)
    ]
    sources = write_segments(env, [segment(0, batches, 2000)])
    return clean_job([sources], view=ViewRules(), directory=directory)


@pytest.mark.usefixtures("forked_workers")
async def test_a_views_worker_spends_what_it_reads_and_writes_of_explicit_rates(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.cleaner.cleaning.DIRECTORY", f"{tmp_path}/orders-0")
    job = view_job(f"{tmp_path}/orders-0")
    budgets = Budgets()
    on_progress = []
    async with open_dedicated_worker(
        spawn_process, 0, index=9, budgets=budgets, top_up=budgets.top_up
    ) as worker:
        done = await worker.run(job, lambda *progress: on_progress.append(progress))
    assert budgets.spent[Direction.READ] == done.report.bytes_read > 4 * RATE / 1.1
    assert budgets.spent[Direction.WRITE] == done.report.bytes_written > 0.9 * RATE
    assert budgets.now >= 2.5, "twice two megabytes, less the first second's worth"
    assert on_progress
