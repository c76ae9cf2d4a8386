"""An event loop whose time jumps to the next timer, with ready callbacks in a seeded order.

Nothing waits for real, and what would run in a thread runs at once: the same seed gives the same
run. A loop that has neither something ready nor a timer is a deadlock and says so.
"""

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(Exception):
    """Nothing can ever happen any more."""


class _JumpingSelector(selectors.DefaultSelector):
    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise DeadlockError(f"seed {self.loop.seed}: nothing scheduled, nothing ready")
        self.loop.now += timeout
        self.loop.time_passed(timeout)
        return []


class InlineExecutor(ThreadPoolExecutor):
    """Carries out at once what it is given."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.seed = seed
        self._random = random.Random(seed)
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)
        self.set_default_executor(InlineExecutor(1))

    def time(self) -> float:
        return self.now

    def time_passed(self, seconds: float) -> None:
        """The loop jumped; for clocks that go with it."""

    def _run_once(self) -> None:
        ready = list(self._ready)  # type: ignore[attr-defined]
        self._random.shuffle(ready)
        self._ready.clear()  # type: ignore[attr-defined]
        self._ready.extend(ready)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_virtually(main: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """asyncio.run in virtual time."""
    loop = VirtualLoop(seed)
    try:
        return loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
