"""Threads for decompression: one client leaves room for the others."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from broker.event_loop import unpack_threads
from broker.event_loop.unpack_threads import UnpackThreads
from storage.format.batch import Record, build_batch
from storage.format.compression import ZSTD
from tests.support.broker.broker_in_memory import broker_in_memory, client_of
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.storage.memory_env import MemoryEnv

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
    await until(lambda: not threads._slots._used)


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
    await until(lambda: not threads._slots._used)


async def test_errors_and_processor_time_reach_the_client(threads: UnpackThreads) -> None:
    spent: list[int] = []

    def fail() -> None:
        sum(range(100_000))
        raise ValueError("corrupt")

    with pytest.raises(ValueError, match="corrupt"):
        await threads.run("a", fail, spent.append)
    await settle()
    assert spent[0] > 0


async def test_one_large_batch_is_unpacked_at_a_time(threads: UnpackThreads) -> None:
    """Each may take a gigabyte, which a request of 30 KB can ask for."""
    bomb = Bomb()
    attack = [
        asyncio.create_task(threads.run(client, bomb, CPU.append, is_large=True))
        for client in "abcabc"
    ]
    await settle()
    assert bomb.running == 1
    async with asyncio.timeout(20):
        assert await threads.run("a", lambda: "small", CPU.append) == "small"
    attack[-1].cancel()
    bomb.may_end.set()
    results = await asyncio.gather(*attack, return_exceptions=True)
    assert results[:-1] == ["unpacked"] * 5
    await until(lambda: not threads._slots._used)
    assert not threads._large._used


async def test_a_batch_is_large_if_its_topic_permits_it_and_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[bool] = []
    run = UnpackThreads.run

    def note(self: UnpackThreads, *arguments: Any, is_large: bool = False) -> Any:
        noted.append(is_large)
        return run(self, *arguments, is_large=is_large)

    monkeypatch.setattr(UnpackThreads, "run", note)
    monkeypatch.setattr(unpack_threads, "LARGE_BYTES", 2 << 20)
    large, small = "3000000", "2097152"
    topics = {
        name: {"keys": {"cleanup.policy": "compact", "varve.decompressed.batch.bytes": size}}
        for name, size in (("large", large), ("small", small))
    }
    async with broker_in_memory(MemoryEnv(seed=1), topics=topics) as broker:
        now_ms = broker._services.env.wall_ms()
        for topic in topics:
            for size_bytes in (1 << 20, (2 << 20) + 1000):
                record = Record(0, now_ms, b"k", bytes(size_bytes), ())
                batch = bytes(build_batch([record], codec=ZSTD))
                with client_of(broker) as client:
                    await asyncio.to_thread(client.produce, topic, batch)
    assert noted == [False, True, False, False]


async def test_refused_work_leaves_nothing_in_memory_for_the_garbage_collector(
    threads: UnpackThreads,
) -> None:
    class Content:
        """Stands for the bytes of a batch, as received and as decompressed."""

    held: list[weakref.ref[Content]] = []

    def refuse() -> None:
        unpacked = Content()
        held.append(weakref.ref(unpacked))
        try:
            raise EOFError
        except EOFError:
            raise ValueError("too large") from None

    async def handle() -> None:
        received = Content()
        held.append(weakref.ref(received))
        await threads.run("alice", refuse, lambda _: None)

    gc.disable()
    try:
        with suppress(ValueError):
            await handle()
        await asyncio.sleep(0)
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()
