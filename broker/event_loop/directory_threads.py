"""Threads for the files of data directories: a disk that hangs keeps no thread of another.

A system call on a disk that hangs never returns and keeps its thread for ever. So each data
directory has threads of its own.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, TypeVar

from broker.event_loop.loop_turns import run_to_end

T = TypeVar("T")

THREADS_MAX: Final = 16  # of a directory: the journal of a file system combines concurrent syncs
# After this time a sync hangs. CockroachDB ends its process after a sync of 20 s.
HANG_SECONDS: Final = 30.0


class DirectoryThreads:
    """Runs calls in the threads of a data directory, and knows the directories that hang."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        new_executor: Callable[[], Executor | None] = lambda: None,
    ) -> None:
        """`new_executor` makes the threads of a directory; None: those of the event loop."""
        self._monotonic = monotonic
        self._executors: defaultdict[str, Executor | None] = defaultdict(new_executor)
        # Of the syncs that run, by directory. Those that wait for a thread do not count: there may
        # be thousands.
        self._begun: defaultdict[str, list[float]] = defaultdict(list)

    async def run(self, directory: str, call: Callable[[], T]) -> T:
        """Run `call` in a thread of a data directory. Raises what it raises.

        It continues if the caller is cancelled.
        """
        executor = self._executors[directory]
        return await run_to_end(asyncio.get_running_loop().run_in_executor(executor, call))

    async def sync(self, directory: str, call: Callable[[], T]) -> T:
        """Like `run`, for a call that syncs and should not take long once it runs."""
        begun = self._begun[directory]

        def timed() -> T:
            began = self._monotonic()
            begun.append(began)
            try:
                return call()
            finally:
                begun.remove(began)

        return await self.run(directory, timed)

    def longest_seconds(self, directory: str) -> float:
        """Return for how long the oldest sync of a directory has been running; 0 without one."""
        begun = tuple(self._begun[directory])  # threads change it
        return self._monotonic() - min(begun) if begun else 0.0

    def hangs(self, directory: str) -> bool:
        """Return whether a sync of a directory hangs."""
        return self.longest_seconds(directory) >= HANG_SECONDS
