"""Views that are being opened: a thread reads the versions on disk of all that wait.

Rules
- Nobody reads on the event loop. Until a thread has read the version on disk, the view is unknown
  and not served, and limits the cleaner as an unreadable one does.
- After a start, a view first serves the version on disk; maintenance.py compacts it if it is due.
- One task for each data directory reads its views, up to `BATCH_MAX` at a time.
- A version that was read is dropped if another one was published meanwhile (`is_opening` is False
  then), and read again if the files changed (`is_outdated`).
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from functools import partial
from itertools import islice
from typing import Final

import structlog

from broker.event_loop.directory_threads import DirectoryThreads
from broker.topics.partition import Partition
from broker.views.view_partition import ViewPartition
from storage.errors import InvalidViewError
from storage.view.ledger import Ledger

# Partitions that one call of the thread reads: a few small files each.
BATCH_MAX: Final = 64

logger = structlog.get_logger("broker.views")

Load = Callable[[Partition], Ledger | None]


class ViewOpener:
    """Reads the version on disk of each view that is opened."""

    def __init__(
        self, load: Load, threads: DirectoryThreads, failed: Callable[[ViewPartition], None]
    ) -> None:
        """`load` returns the ledger on disk, or raises InvalidViewError or OSError.

        `failed` gets the views whose version on disk cannot be read.
        """
        self._load, self._failed = load, failed
        self._threads = threads
        # By data directory; at most the partitions of the broker.
        self._waiting: defaultdict[str, deque[ViewPartition]] = defaultdict(deque)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def open_nowait(self, view: ViewPartition) -> None:
        """Begin to read the version on disk of a view."""
        view.begin_opening()
        directory = view.base.log.log_directory.path
        self._waiting[directory].append(view)
        if directory not in self._tasks:
            task = asyncio.create_task(self._read_waiting(directory), name="view-open")
            self._tasks[directory] = task

    async def wait_opened(self, directories: Collection[str]) -> None:
        """Wait until no view in these data directories is being opened."""
        while tasks := [self._tasks[path] for path in directories if path in self._tasks]:
            await asyncio.wait(tasks)

    async def _read_waiting(self, directory: str) -> None:
        waiting = self._waiting[directory]
        try:
            while waiting:
                batch = list(islice(waiting, BATCH_MAX))
                results = await self._threads.run(directory, partial(self._read_all, batch))
                for view, result in zip(batch, results, strict=True):
                    waiting.popleft()
                    if view.is_outdated:
                        view.is_outdated = False
                        waiting.append(view)
                    elif view.is_opening:
                        self._settle(view, result)
        finally:
            del self._tasks[directory]

    def _read_all(self, views: list[ViewPartition]) -> list[Ledger | Exception | None]:
        return [self._read(view) for view in views]

    def _read(self, view: ViewPartition) -> Ledger | Exception | None:
        try:
            return self._load(view.base)
        except (InvalidViewError, OSError) as error:
            return error

    def _settle(self, view: ViewPartition, result: Ledger | Exception | None) -> None:
        where = str(view.base.partition)
        if isinstance(result, Exception):
            self._failed(view)
        if isinstance(result, InvalidViewError):
            view.change_over(None, result)
            logger.error("view cannot be used", partition=where, reason=str(result))
        elif isinstance(result, Exception):
            failure = InvalidViewError(view.log.directory, str(result))
            view.change_over(None, failure, is_known=False)
            logger.error("view cannot be read", partition=where, reason=str(result))
        else:
            view.change_over(result)
