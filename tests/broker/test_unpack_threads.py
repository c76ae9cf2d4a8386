"""Threads for decompression: one client leaves room for the others."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from broker.unpack_threads import UnpackThreads

CPU: list[int] = []


class Bomb:
    """Work that takes as long as the test wants."""

    def __init__(self) -> None:
        self.running = 0
        self.may_end = threading.Event()
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            self.running += 1
        assert self.may_end.wait(20)
        return "unpacked"


@pytest.fixture
async def threads() -> AsyncIterator[UnpackThreads]:
    threads = UnpackThreads(4)
    yield threads
    await threads.stop()


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0.001)


async def test_a_client_occupies_half_of_the_threads(threads: UnpackThreads) -> None:
    bomb = Bomb()
    attack = [asyncio.create_task(threads.run("a", bomb, CPU.append)) for _ in range(20)]
    await settle()
    assert bomb.running == 2
    async with asyncio.timeout(20):
        assert await threads.run("b", lambda: "small", CPU.append) == "small"
    bomb.may_end.set()
    assert await asyncio.gather(*attack) == ["unpacked"] * 20
    await settle()
    assert not threads._slots._clients


async def test_a_client_that_closes_its_connections_does_not_get_more_threads(
    threads: UnpackThreads,
) -> None:
    bomb = Bomb()
    for _ in range(10):
        tasks = [asyncio.create_task(threads.run("a", bomb, CPU.append)) for _ in range(3)]
        await settle()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
    assert bomb.running == 2
    bomb.may_end.set()
    await settle()
    assert not threads._slots._clients


async def test_errors_and_processor_time_reach_the_client(threads: UnpackThreads) -> None:
    spent: list[int] = []

    def fail() -> None:
        sum(range(100_000))
        raise ValueError("corrupt")

    with pytest.raises(ValueError, match="corrupt"):
        await threads.run("a", fail, spent.append)
    await settle()
    assert spent[0] > 0
