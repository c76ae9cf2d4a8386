"""Long work on the loop, in turns."""

import asyncio
from collections.abc import Generator
from time import perf_counter
from typing import Final, TypeVar

_T = TypeVar("_T")

# A fifth of what the loop may be held for: the piece of work that ends a turn is not known to be
# short.
TURN_SECONDS: Final = 0.002


class Turns:
    """Lets others have the loop whenever one piece of work has had it for a while."""

    def __init__(self, seconds: float = TURN_SECONDS) -> None:
        self._seconds = seconds
        self._began = perf_counter()

    async def take(self) -> None:
        """To be called between two small pieces of the work."""
        if perf_counter() - self._began >= self._seconds:
            await asyncio.sleep(0)
            self._began = perf_counter()


async def run_in_turns(slices: Generator[None, None, _T]) -> _T:
    """Do work that comes in slices; after each of them others have the loop."""
    while True:
        try:
            next(slices)
        except StopIteration as stop:
            result: _T = stop.value
            return result
        await asyncio.sleep(0)
