"""Reads of records that are not in the page cache: who waits for whom."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from broker.event_loop.directory_threads import THREADS_MAX, DirectoryThreads
from broker.topics.cold_reads import READS_AT_ONCE, ColdReads
from storage.segments.fetch_slice import FetchSlice

DIRECTORY = "/data"


class ColdFile:
    """A file on a disk that answers when the test lets it."""

    path = f"{DIRECTORY}/orders-0/00000000000000000000.log"

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.read_positions = list[int]()

    def is_cached(self, position: int, _length: int) -> bool:
        return position < 0

    def warm(self, position: int, _length: int) -> None:
        self.read_positions.append(position)
        assert self.may_end.wait(30)


@pytest.fixture
def file() -> ColdFile:
    return ColdFile()


@pytest.fixture
def threads(file: ColdFile) -> Iterator[DirectoryThreads]:
    executor = ThreadPoolExecutor(THREADS_MAX)
    yield DirectoryThreads(lambda: 0.0, lambda: executor, directories=[DIRECTORY])
    file.may_end.set()
    executor.shutdown()


def read(reads: ColdReads, client: str, file: Any, position: int) -> asyncio.Task[None]:
    return asyncio.create_task(reads.warm(client, [FetchSlice(file, position, 1)]))


async def wait_begun(file: ColdFile, count: int) -> None:
    async with asyncio.timeout(20):
        while len(file.read_positions) < count:  # noqa: ASYNC110 - a thread says so
            await asyncio.sleep(0.001)


async def test_reads_of_one_client_leave_threads_to_others(
    file: ColdFile, threads: DirectoryThreads
) -> None:
    reads = ColdReads(threads)
    of_eve = [read(reads, "eve", file, number) for number in range(100)]
    await wait_begun(file, READS_AT_ONCE // 2)
    of_others = [read(reads, client, file, 1_000) for client in ("ann", "bob")]
    await wait_begun(file, READS_AT_ONCE // 2 + 2)
    async with asyncio.timeout(20):
        assert await threads.run(DIRECTORY, lambda: "changed") == "changed"
    assert file.read_positions.count(1_000) == 2
    assert len(file.read_positions) == READS_AT_ONCE // 2 + 2
    file.may_end.set()
    await asyncio.gather(*of_eve, *of_others)
    assert sorted(file.read_positions) == [*range(100), 1_000, 1_000]


async def test_a_client_that_has_left_gives_up_its_place_in_the_queue(
    file: ColdFile, threads: DirectoryThreads
) -> None:
    reads = ColdReads(threads)
    abandoned = [read(reads, "eve", file, number) for number in range(100)]
    await wait_begun(file, READS_AT_ONCE // 2)
    for task in abandoned:
        task.cancel()
    await asyncio.gather(*abandoned, return_exceptions=True)
    last = read(reads, "eve", file, 1_000)
    await asyncio.sleep(0)
    assert 1_000 not in file.read_positions, "the reads that have begun occupy their slots"
    file.may_end.set()
    await last
    assert sorted(file.read_positions) == [*range(READS_AT_ONCE // 2), 1_000]


async def test_cached_ranges_wait_for_no_thread(file: ColdFile, threads: DirectoryThreads) -> None:
    await ColdReads(threads).warm("ann", [FetchSlice(file, -5, 1), FetchSlice(None, 0, 1)])  # type: ignore[arg-type]
    assert not file.read_positions
