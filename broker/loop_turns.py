"""Long work on the loop, in turns."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from time import perf_counter, perf_counter_ns
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

    async def over(self, rows: Iterable[_T]) -> AsyncIterator[_T]:
        """Yield rows; before each of them others may have the loop."""
        for row in rows:
            await self.take()
            yield row


async def run_in_turns(slices: Generator[None, None, _T]) -> _T:
    """Do work that comes in slices; after each of them others have the loop."""
    while True:
        try:
            next(slices)
        except StopIteration as stop:
            result: _T = stop.value
            return result
        await asyncio.sleep(0)


class MeasuredTurns(Awaitable[_T]):
    """Awaits something, and tells of each turn how long it held the loop."""

    def __init__(self, work: Awaitable[_T], note_ns: Callable[[int], None]) -> None:
        self._work = work
        self._note_ns = note_ns

    def __await__(self) -> Generator[object, None, _T]:
        """Run the work up to its next wait, again and again."""
        steps = self._work.__await__()
        error: BaseException | None = None
        while True:
            began = perf_counter_ns()
            try:
                waits_for = next(steps) if error is None else steps.throw(error)
            except StopIteration as stop:
                result: _T = stop.value
                return result
            finally:
                self._note_ns(perf_counter_ns() - began)
            error = None
            try:
                yield waits_for
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as thrown:  # noqa: BLE001 - handed on to the work
                error = thrown
