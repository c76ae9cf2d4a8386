"""Threads for the files of data directories: a disk that hangs blocks only its own.

A system call on a disk that hangs never returns and keeps its thread for ever. So each data
directory has threads of its own. If there are several directories, the event loop itself writes to
none of them: it waits, not too long, for a thread that does (directory_writer.py).
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from functools import partial
from typing import Any, Final, TypeVar

from broker.event_loop.directory_writer import ChangePendingError, DirectoryWriter
from broker.event_loop.loop_turns import run_to_end
from storage.errors import LogDirectoryError

T = TypeVar("T")

THREADS_MAX: Final = 16  # of a directory: the journal of a file system combines concurrent syncs
# After this time a sync hangs. CockroachDB ends its process after a sync of 20 s.
HANG_SECONDS: Final = 30.0
ALL: Final = ""  # the "directory" of work on all of them, which waits for none that hangs


class DirectoryThreads:
    """Runs calls in the threads of a data directory, and knows the directories that hang."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        new_executor: Callable[[], Executor | None] = lambda: None,
        *,
        directories: Sequence[str] = (),
        has_writers: bool = False,
    ) -> None:
        """`new_executor` makes the threads of a directory; None: those of the event loop.

        `directories` are the absolute paths of the data directories. `has_writers`: logs are
        changed by `change`, not on the event loop.
        """
        self._monotonic = monotonic
        self._directories = tuple(sorted(directories, key=len, reverse=True))
        self.has_writers = has_writers
        self._writers: dict[str, DirectoryWriter] = {}
        # Syncs have threads of their own: they do not wait for long reads, and thousands of flushes
        # may wait there.
        self._executors: defaultdict[str, Executor | None] = defaultdict(new_executor)
        self._sync_executors: defaultdict[str, Executor | None] = defaultdict(new_executor)
        # When the syncs that run have begun, by directory. Those that wait for a thread do not
        # count: there may be thousands.
        self._begun: defaultdict[str, list[float]] = defaultdict(list)

    # Calls in threads

    async def run(self, path: str, call: Callable[[], T]) -> T:
        """Run `call` in a thread of the data directory that `path` is in. Raises what it raises.

        It continues if the caller is cancelled.
        """
        executor = self._executors[self.directory_of(path)]
        return await run_to_end(asyncio.get_running_loop().run_in_executor(executor, call))

    def directory_of(self, path: str) -> str:
        """Return the data directory that a file or folder is in."""
        for directory in self._directories:
            if path.startswith(directory) and path[len(directory) :][:1] in ("", "/"):
                return directory
        return path

    async def sync(self, directory: str, call: Callable[[], T]) -> T:
        """Like `run`, for a call that syncs and should not take long once it runs."""
        executor = self._sync_executors[directory]
        timed = partial(self._timed, directory, call)
        return await run_to_end(asyncio.get_running_loop().run_in_executor(executor, timed))

    async def probe(self, directory: str, call: Callable[[], T]) -> T:
        """Like `sync`, but ahead of the syncs that wait for a thread."""
        return await self.run(directory, partial(self._timed, directory, call))

    def _timed(self, directory: str, call: Callable[[], T]) -> T:
        """Run a call that syncs; in a thread."""
        note_end = self._note_begin(directory)
        try:
            return call()
        finally:
            note_end(None)

    def run_each(
        self,
        calls: Mapping[str, Callable[[], None]],
        *,
        probe: Callable[[str], None] | None = None,
        seconds: float | None = None,
    ) -> frozenset[str]:
        """Run a call for each data directory in its threads; return the directories that hang.

        A directory hangs if its call ends `seconds` (HANG_SECONDS) after that of another, or never;
        with a `probe`, if it does not answer that either. The call of such a directory continues.

        This blocks: call it in a thread. Raises what the calls raise.
        """
        running = self._begin_each(calls)
        limit = HANG_SECONDS if seconds is None else seconds
        left = wait(running, return_when=FIRST_COMPLETED).not_done
        hanging: frozenset[str] = frozenset()
        while left:
            left = wait(left, timeout=limit).not_done
            silent = frozenset(running[call] for call in left)
            if probe is not None and left:
                asked = self._begin_each({path: partial(probe, path) for path in silent})
                silent = frozenset(asked[call] for call in wait(asked, timeout=limit).not_done)
            hanging |= silent
            left = {call for call in left if running[call] not in hanging}
        for call, directory in running.items():
            if directory not in hanging:
                call.result()
        return hanging

    def _begin_each(self, calls: Mapping[str, Callable[[], None]]) -> dict[Future[None], str]:
        running: dict[Future[None], str] = {}
        for directory, call in calls.items():
            executor = self._executors[directory]
            if executor is None:
                call()
            else:
                running[executor.submit(self._timed, directory, call)] = directory
        return running

    # Changes of logs

    def change(self, directory: str, call: Callable[[], T]) -> T:
        """Run a change of a log in a thread; the event loop waits, but not for ever.

        Raises what it raises, and the errors of DirectoryWriter.run.
        """
        writer = self._writers.get(directory)
        if writer is None:
            writer = self._writers[directory] = DirectoryWriter(directory, self._monotonic)
        try:
            return writer.run(call)
        except ChangePendingError as error:
            error.pending.add_done_callback(self._note_begin(directory))
            raise

    def is_stalled(self, directory: str) -> bool:
        """Return whether a change of a log in the directory has not ended yet."""
        writer = self._writers.get(directory)
        return writer is not None and writer.pending is not None

    async def wait_unstalled(self, directory: str) -> None:
        """Wait until no change of a log in the directory is pending."""
        if self.is_stalled(directory):
            await self._writers[directory].wait_settled()

    def abandon(self, directory: str, error: LogDirectoryError) -> None:
        """Let nobody wait any more for a pending change in a directory: the broker stops."""
        if directory in self._writers:
            self._writers[directory].abandon(error)

    def close(self) -> None:
        """End the threads of changes, because the logs are closed."""
        for writer in self._writers.values():
            writer.close()

    # Hanging

    def _note_begin(self, directory: str) -> Callable[[Any], None]:
        """Note that a sync begins; return what notes its end."""
        began = self._monotonic()
        self._begun[directory].append(began)
        return partial(self._note_end, directory, began)

    def _note_end(self, directory: str, began: float, _: object) -> None:
        self._begun[directory].remove(began)

    def longest_seconds(self, directory: str) -> float:
        """Return for how long the oldest sync of a directory has been running; 0 without one."""
        begun = tuple(self._begun[directory])  # threads change it
        return self._monotonic() - min(begun) if begun else 0.0

    def hangs(self, directory: str) -> bool:
        """Return whether a sync of a directory hangs."""
        return self.longest_seconds(directory) >= HANG_SECONDS
