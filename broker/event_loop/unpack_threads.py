"""Threads that check large produced batches, decompress batches, search them, and compress them.

Rules. A request of 60 KB can become 60 MB, so decompression has threads of its own: no other work
waits for it. Clients share them (fair_slots.py). A thread stays occupied until its work is done,
even if the client has closed its connection. A topic may permit batches of a gigabyte: so only one
batch that may unpack to more than LARGE_BYTES is unpacked at a time. All threads together take the
memory of this batch, and LARGE_BYTES in each other thread. A window of zstd adds up to 8 MiB in
each thread, and one of them at a time may have up to 128 MiB (compression.py).
"""

import asyncio
import os
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from broker.event_loop.fair_slots import FairSlots
from broker.event_loop.loop_turns import run_to_end
from storage.format.batch import HEADER_BYTES, BatchHeader
from storage.format.compression import may_exceed

_Result = TypeVar("_Result")

THREADS_MAX: Final = 32  # as in asyncio's own executor
LARGE_BYTES: Final = 64 << 20  # the default of varve.decompressed.batch.bytes


def may_be_large(batch: bytes | memoryview, header: BatchHeader, limit_bytes: int) -> bool:
    """Return whether a batch may unpack to more than LARGE_BYTES, and its topic permits that."""
    return limit_bytes > LARGE_BYTES and may_exceed(
        header.codec, memoryview(batch)[HEADER_BYTES:], LARGE_BYTES
    )


class UnpackThreads:
    """The threads for decompression."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(THREADS_MAX, (os.cpu_count() or 1) + 4)
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="unpack")
        self._slots = FairSlots(self.threads)
        self._large = FairSlots(1)

    async def run(
        self,
        client: Hashable,
        work: Callable[[], _Result],
        note_cpu: Callable[[int], None],
        *,
        is_large: bool = False,
    ) -> _Result:
        """Run work for a client in a thread; `note_cpu` receives its processor time in ns.

        `is_large`: it may take more memory than LARGE_BYTES.
        """
        slots = (self._large, self._slots) if is_large else (self._slots,)
        await _acquire_all(slots, client)
        return await run_to_end(self._begin(client, work, note_cpu, slots))

    def _begin(
        self,
        client: Hashable,
        work: Callable[[], _Result],
        note_cpu: Callable[[int], None],
        slots: tuple[FairSlots, ...],
    ) -> asyncio.Future[_Result]:
        """Begin the work in a thread, and release the slots at its end."""
        spent: list[int] = []

        def release(_: object) -> None:
            for item in slots:
                item.release(client)
            note_cpu(sum(spent))

        loop = asyncio.get_running_loop()
        task = loop.run_in_executor(self._pool, partial(measured, work, spent))
        task.add_done_callback(release)
        return task

    async def stop(self) -> None:
        """Drop work that has not begun, and end the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def _acquire_all(slots: tuple[FairSlots, ...], client: Hashable) -> None:
    acquired: list[FairSlots] = []
    try:
        for item in slots:
            await item.acquire(client)
            acquired.append(item)
    except asyncio.CancelledError:
        for item in acquired:
            item.release(client)
        raise


def measured(work: Callable[[], _Result], spent: list[int]) -> _Result:
    """Run work, and append the processor time of this thread in ns."""
    began = time.thread_time_ns()
    try:
        return work()
    finally:
        spent.append(time.thread_time_ns() - began)
