"""A share of the workers' budgets for a thread of the broker that copies files."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from cleaner.job import CleanAbortedError
from cleaner.workers.dedicated_worker import Budgets, tick
from cleaner.workers.throttle import BrokerSide, Direction, SharedMemory, WorkerSide

_RUN: Final = 1  # the only run of a share


class BudgetShare:
    """The share of one thread, charged as a worker's; made by `open_budget_share`."""

    def __init__(self, memory: SharedMemory) -> None:
        self._side = WorkerSide(memory.slots, _RUN, time.sleep)
        self._broker_side = BrokerSide(memory.slots)

    def charge(self, count: int) -> None:
        """Charge bytes to be copied; wait for the budget. Raises CleanAbortedError."""
        if self._side.aborted():
            raise CleanAbortedError
        self._side.charge(Direction.READ, count)
        self._side.charge(Direction.WRITE, count)

    def abort(self) -> None:
        """Make `charge` raise from now on."""
        self._broker_side.abort(_RUN)


@asynccontextmanager
async def open_budget_share(
    *, index: int, budgets: Budgets, top_up: Callable[[float], None]
) -> AsyncIterator[BudgetShare]:
    """Provide a share for the block, under the worker index `index`."""
    loop = asyncio.get_running_loop()
    memory = SharedMemory()
    budgets.join(index, BrokerSide(memory.slots), loop.time())
    ticker = asyncio.create_task(tick(top_up), name="share-of-budget")
    try:
        yield BudgetShare(memory)
    finally:
        ticker.cancel()
        budgets.leave(index, loop.time())
        memory.close()
