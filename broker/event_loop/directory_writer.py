"""Changes the logs of one data directory in a thread, while the event loop waits.

A write that the disk does not finish keeps its thread. So the event loop lends the logs of a
directory to this thread for each change, such as an append or a roll, and waits until it ends.

Rules
- While the loop waits, nothing else runs: a change is as if it were made on the loop.
- After WAIT_SECONDS the loop goes on, and the directory is stalled: it accepts no other change
  until this one has ended. Reads go on, because a change writes before it publishes.
- A change is never given up: whoever asked for it can wait for its result.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from storage.errors import DirectoryStalledError, LogDirectoryError

_T = TypeVar("_T")

# The longest that a disk holds the event loop. A write to the page cache takes some microseconds, a
# roll on a busy disk some ten milliseconds. On a machine without an idle core, the thread may have
# to wait for one: up to 0.4 s were seen.
WAIT_SECONDS: Final = 0.5
# After a change that took longer than SLOW_SECONDS, the loop waits no longer than that for a while:
# a disk that is always slow takes little of the loop's time.
SLOW_SECONDS: Final = 0.1
SLOW_FOR_SECONDS: Final = 10.0
# Who waits for a change that has ended continues before the next change.
SETTLE_SECONDS: Final = 0.01


class ChangePendingError(DirectoryStalledError):
    """The disk has not finished this change yet.

    `pending` ends when it has: with the result, or with the error that the change raised.
    """

    def __init__(self, directory: str, pending: "asyncio.Future[Any]") -> None:
        super().__init__(directory)
        self.pending = pending


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The end of a change."""

    result: Any
    error: BaseException | None


class DirectoryWriter:
    """The thread that changes the logs of one data directory, one change at a time."""

    def __init__(self, directory: str, monotonic: Callable[[], float]) -> None:
        self._directory = directory
        self._monotonic = monotonic
        self._slow_until = float("-inf")
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        # To the thread; None ends it.
        self._changes: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._messages: SimpleQueue[_Outcome | Callable[[], None]] = SimpleQueue()  # to the loop
        self._answers: SimpleQueue[BaseException | None] = SimpleQueue()  # of calls on the loop
        self._lock = threading.Lock()  # of `_loop_waits`
        self._loop_waits = False
        self.pending: asyncio.Future[Any] | None = None  # of a change that stalls
        self._settled = asyncio.Event()

    def run(self, change: Callable[[], _T]) -> _T:
        """Return what `change` returns. Raises what it raises.

        Raises ChangePendingError if it takes too long, and DirectoryStalledError while an earlier
        change does: this one was not begun then.
        """
        if self.pending is not None:
            raise DirectoryStalledError(self._directory)
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            # A daemon: the process can end while the disk hangs.
            self._thread = threading.Thread(target=self._work, name="disk-writer", daemon=True)
            self._thread.start()
        began = self._monotonic()
        self._loop_waits = True
        self._changes.put(change)
        outcome = self._wait(SLOW_SECONDS if began < self._slow_until else WAIT_SECONDS)
        ended = self._monotonic()
        if ended - began >= SLOW_SECONDS:
            self._slow_until = ended + SLOW_FOR_SECONDS
        if outcome is None:
            self.pending = self._loop.create_future()
            self._settled.clear()
            raise ChangePendingError(self._directory, self.pending)
        if outcome.error is not None:
            try:
                raise outcome.error
            finally:
                del outcome  # a cycle with the traceback would keep the records of the request
        result: _T = outcome.result
        return result

    async def wait_settled(self) -> None:
        """Wait until no change is pending."""
        while self.pending is not None:
            await self._settled.wait()

    def abandon(self, error: LogDirectoryError) -> None:
        """Let nobody wait any more for a change that stalls, because the broker stops."""
        if self.pending is not None and not self.pending.done():
            self.pending.set_exception(error)

    def close(self) -> None:
        """End the thread when it has finished its change. Nobody calls `run` any more."""
        self._changes.put(None)

    # On the event loop

    def _wait(self, seconds: float) -> _Outcome | None:
        """Return the outcome of the change; None if it does not end in time."""
        while True:
            try:
                message = self._messages.get(timeout=seconds)
            except Empty:
                with self._lock:
                    self._loop_waits = not self._messages.empty()  # it arrived just now
                if not self._loop_waits:
                    return None
                continue
            if isinstance(message, _Outcome):
                self._loop_waits = False
                return message
            self._answer(message)

    def _receive(self, message: _Outcome | Callable[[], None]) -> None:
        """Handle a message of a change that stalled."""
        if not isinstance(message, _Outcome):
            self._answer(message)
            return
        pending = self.pending
        assert pending is not None
        if not pending.done():
            if message.error is None:
                pending.set_result(message.result)
            else:
                pending.set_exception(message.error)
        self._loop.call_later(SETTLE_SECONDS, self._settle)

    def _settle(self) -> None:
        self.pending = None
        self._settled.set()

    def _answer(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised in the change, as on the loop
            self._answers.put(error)
        else:
            self._answers.put(None)

    # In the thread

    def _work(self) -> None:
        _of_thread.writer = self
        while (change := self._changes.get()) is not None:
            self._send(_run(change))

    def _send(self, message: _Outcome | Callable[[], None]) -> None:
        with self._lock:
            if self._loop_waits:
                self._messages.put(message)
                return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._receive, message)

    def call_on_loop(self, call: Callable[[], None]) -> None:
        """Run `call` on the event loop from within a change. Raises what it raises."""
        self._send(call)
        error = self._answers.get()
        if error is not None:
            raise error


_of_thread = threading.local()


def _run(change: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(change(), None)
    except BaseException as error:  # noqa: BLE001 - raised on the event loop
        return _Outcome(None, error)


def run_on_loop(call: Callable[[], None]) -> None:
    """Run `call` on the event loop: here, or from within a change of a DirectoryWriter."""
    writer: DirectoryWriter | None = getattr(_of_thread, "writer", None)
    if writer is None:
        call()
    else:
        writer.call_on_loop(call)
