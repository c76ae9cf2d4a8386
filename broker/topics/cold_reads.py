"""Reads ranges of logs into the page cache before the event loop sends them.

Rules. Clients share the threads of a data directory (fair_slots.py): a read of a fetch may take a
second, and a client can send one on each of its connections. Half of the threads are left for
others: changes of the metadata wait for them, and so does the search for disks that hang. A client
that has left gives up its place in the queue; a read that has begun occupies its slot to its end.
"""

import asyncio
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Final

from broker.event_loop.directory_threads import THREADS_MAX, DirectoryThreads
from broker.event_loop.fair_slots import FairSlots
from broker.event_loop.loop_turns import Turns, run_to_end
from storage.segments.fetch_slice import FetchSlice

READS_AT_ONCE: Final = THREADS_MAX // 2  # of a data directory; one client has at most half of them


class ColdReads:
    """The reads that run or wait."""

    def __init__(self, threads: DirectoryThreads) -> None:
        self._threads = threads
        self._slots: defaultdict[str, FairSlots] = defaultdict(partial(FairSlots, READS_AT_ONCE))

    async def warm(self, client: Hashable, slices: Iterable[FetchSlice]) -> None:
        """Read the ranges that are not in the page cache."""
        turns = Turns()
        cold: defaultdict[str, list[FetchSlice]] = defaultdict(list)  # by data directory
        for fetch_slice in slices:
            await turns.take()
            if fetch_slice.file is not None and not is_cached(fetch_slice):
                cold[self._threads.directory_of(fetch_slice.file.path)].append(fetch_slice)
        if cold:
            await asyncio.gather(*(self._read(client, *each) for each in cold.items()))

    async def _read(self, client: Hashable, directory: str, cold: Sequence[FetchSlice]) -> None:
        slots = self._slots[directory]
        await slots.acquire(client)

        async def read() -> None:
            try:
                await self._threads.run(directory, partial(_read_all, cold))
            finally:
                slots.release(client)

        await run_to_end(asyncio.create_task(read(), name="read cold records"))


def is_cached(fetch_slice: FetchSlice) -> bool:
    """Return whether a range is in memory or in the page cache."""
    return fetch_slice.file is None or fetch_slice.file.is_cached(
        fetch_slice.position, fetch_slice.length
    )


def _read_all(slices: Iterable[FetchSlice]) -> None:
    """Read the ranges into the page cache; runs in a thread."""
    for fetch_slice in slices:
        assert fetch_slice.file is not None
        fetch_slice.file.warm(fetch_slice.position, fetch_slice.length)
