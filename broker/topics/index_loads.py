"""Loads and rebuilds indexes of segments in threads, so that the event loop does not wait.

Rules. One thread at a time works on an index, however many clients wait for it; it ends its work if
they disconnect. Two threads at most work on the indexes of a data directory. Reads of pages do not
wait for them, nor for reads of other pages.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Final, TypeVar

from broker.event_loop.directory_threads import DirectoryThreads
from broker.event_loop.loop_turns import run_to_end
from storage.segments.index_load import IndexLoad
from storage.segments.segment import IndexNotReadyError, Segment

THREADS: Final = 2
LOADS_MAX: Final = 5  # attempts to read that find an index to load, before one loads it on the loop
_T = TypeVar("_T")


class IndexLoads:
    """The loads that run or wait."""

    def __init__(self, threads: DirectoryThreads) -> None:
        self._threads = threads
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, THREADS)
        )
        # By segment and, if pages are read, by their position.
        self._running: dict[tuple[Segment, int | None], asyncio.Task[bool]] = {}

    async def load(self, needed: Iterable[IndexNotReadyError]) -> bool:
        """Make indexes usable; return False if one cannot be read, which a read in place reports.

        Afterwards read again.
        """
        loads = [self.begin(error) for error in needed]
        results: list[bool] = []
        for load in loads:
            results.append(await run_to_end(load))  # noqa: PERF401 - mypy infers Future[object]
        return all(results)

    async def read(self, read: Callable[[bool], _T]) -> _T:
        """Return the result of a read, after the indexes that it needs have been loaded.

        `read` gets whether it may load an index in place. Raises the other errors of `read`.
        """
        loads = 0
        while True:
            try:
                return read(loads >= LOADS_MAX)
            except IndexNotReadyError as error:
                loads = loads + 1 if await self.load([error]) else LOADS_MAX

    def begin(self, error: IndexNotReadyError) -> asyncio.Task[bool]:
        """Begin a load unless it runs already; the result is that of `load`."""
        key = error.segment, error.position
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._load(error))
            self._running[key] = task
        return task

    async def _load(self, error: IndexNotReadyError) -> bool:
        try:
            directory = self._threads.directory_of(error.segment.directory)
            is_page = error.position is not None
            async with nullcontext() if is_page else self._slots[directory]:
                load = IndexLoad(error.segment, error.repair)
                await self._threads.run(directory, load.run)
                return load.finish()
        except OSError:
            return False
        finally:
            del self._running[error.segment, error.position]
