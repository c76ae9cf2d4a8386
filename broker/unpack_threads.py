"""Threads that decompress produced batches, and compress them again.

Rules. A request of 60 KB can become 60 MB, so decompression has threads of its own: no other work
waits for it. Clients share them (fair_slots.py). A thread stays occupied until its work is done,
even if the client has closed its connection.
"""

import asyncio
import os
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from broker.fair_slots import FairSlots
from broker.loop_turns import run_to_end

_Result = TypeVar("_Result")

THREADS_MAX: Final = 32  # as in asyncio's own executor


class UnpackThreads:
    """The threads for decompression."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(THREADS_MAX, (os.cpu_count() or 1) + 4)
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="unpack")
        self._slots = FairSlots(self.threads)

    async def run(
        self, client: Hashable, work: Callable[[], _Result], note_cpu: Callable[[int], None]
    ) -> _Result:
        """Run work for a client in a thread; `note_cpu` receives its processor time in ns."""
        await self._slots.acquire(client)
        spent: list[int] = []
        task = asyncio.get_running_loop().run_in_executor(
            self._pool, partial(_measured, work, spent)
        )

        def release(_: object) -> None:
            self._slots.release(client)
            note_cpu(sum(spent))

        task.add_done_callback(release)
        return await run_to_end(task)

    async def stop(self) -> None:
        """Drop work that has not begun, and end the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _measured(work: Callable[[], _Result], spent: list[int]) -> _Result:
    began = time.thread_time_ns()
    try:
        return work()
    finally:
        spent.append(time.thread_time_ns() - began)
