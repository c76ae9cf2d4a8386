"""Ends long work for a client that has closed its connection.

While a request is handled, nothing is read from its connection, so the transport does not notice
that the client closes it. So work that a client can make long checks from time to time whether the
connection is closed.
"""

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Final, TypeVar

_T = TypeVar("_T")

# Between two looks: of work that goes on, and of a request that waits. Thousands may wait.
WORK_SECONDS: Final = 0.1
WAIT_SECONDS: Final = 1.0


class ClientLeftError(Exception):
    """The client has closed the connection: nobody needs the answer."""


class ClientPresence:
    """Whether the client of one request still waits for the answer."""

    def __init__(self, has_left: Callable[[], bool]) -> None:
        self._has_left = has_left
        self._next_look = 0.0

    def check(self) -> None:
        """Look if it is time to; call this in each step of the work. Raises ClientLeftError."""
        now = perf_counter()
        if now >= self._next_look:
            self._next_look = now + WORK_SECONDS
            self._look()

    async def wait(self, task: asyncio.Task[_T]) -> _T:
        """Wait for a task, which goes on if the client leaves. Raises ClientLeftError."""
        while not task.done():
            self._look()
            await asyncio.wait((task,), timeout=WAIT_SECONDS)
        return task.result()

    def _look(self) -> None:
        if self._has_left():
            raise ClientLeftError("the client has closed the connection")
