"""Part of the workers' budgets for a thread of the broker itself, which copies without a worker."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from cleaner.job import CleanAbortedError
from cleaner.workers.dedicated_worker import Budgets, tick
from cleaner.workers.throttle import BrokerSide, Direction, SharedMemory, WorkerSide

_RUN: Final = 1  # of a share: it has one


class Share:
    """What the thread spends, as a worker does; made by `own_share`."""

    def __init__(self, memory: SharedMemory) -> None:
        self._side = WorkerSide(memory.slots, _RUN, time.sleep)
        self._broker_side = BrokerSide(memory.slots)

    def charge(self, count: int) -> None:
        """Bytes are about to be copied: read and written. Waits. Raises CleanAbortedError."""
        if self._side.aborted():
            raise CleanAbortedError
        self._side.charge(Direction.READ, count)
        self._side.charge(Direction.WRITE, count)

    def abort(self) -> None:
        """Have `charge` raise from now on."""
        self._broker_side.abort(_RUN)


@asynccontextmanager
async def own_share(
    *, index: int, budgets: Budgets, top_up: Callable[[float], None]
) -> AsyncIterator[Share]:
    """A share for the length of a block, at the place of worker `index`."""
    loop = asyncio.get_running_loop()
    memory = SharedMemory()
    budgets.join(index, BrokerSide(memory.slots), loop.time())
    ticker = asyncio.create_task(tick(top_up), name="share-of-budget")
    try:
        yield Share(memory)
    finally:
        ticker.cancel()
        budgets.leave(index, loop.time())
        memory.close()
