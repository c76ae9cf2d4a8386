"""Which data directories count as hanging."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from broker.event_loop.directory_threads import HANG_SECONDS, DirectoryThreads


async def test_a_sync_that_waits_for_a_thread_does_not_hang() -> None:
    seconds, released, running = [0.0], threading.Event(), threading.Event()
    executor = ThreadPoolExecutor(1)
    threads = DirectoryThreads(lambda: seconds[0], lambda: executor)

    def wait() -> None:
        running.set()
        released.wait()
        released.clear()

    other = asyncio.create_task(threads.run("/disk1", wait))
    sync = asyncio.create_task(threads.sync("/disk1", wait))
    await asyncio.to_thread(running.wait)
    seconds[0] = HANG_SECONDS
    assert not threads.hangs("/disk1")
    running.clear()
    released.set()
    await other
    await asyncio.to_thread(running.wait)
    assert not threads.hangs("/disk1")
    seconds[0] += HANG_SECONDS
    assert threads.hangs("/disk1")
    released.set()
    await sync
    assert not threads.hangs("/disk1")
