"""A clock that stands still until a test moves it, and lets the event loop run meanwhile."""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

TURNS = 20  # of the event loop until everything that can run without time has run


class VirtualTimer:
    """A call to come."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Timers and wall time, moved by `advance` alone."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self._start_ms = wall_ms
        self.elapsed_ms = 0.0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._order = count()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> VirtualTimer:
        timer = VirtualTimer(callback)
        due_ms = self.elapsed_ms + delay_s * 1000
        heapq.heappush(self._timers, (due_ms, next(self._order), timer))
        return timer

    def monotonic_ms(self) -> float:
        return self.elapsed_ms

    def wall_ms(self) -> int:
        return self._start_ms + int(self.elapsed_ms)

    def set_wall_back(self, ms: int) -> None:
        """Set the wall clock back; timers go on as before."""
        self._start_ms -= ms

    @property
    def running(self) -> int:
        """How many timers have neither fired nor been cancelled."""
        return sum(timer.callback is not None for _, _, timer in self._timers)

    async def advance(self, ms: float) -> None:
        """Move time on; what is due fires in its order, each seeing its own time."""
        end_ms = self.elapsed_ms + ms
        await settle()
        while self._timers and self._timers[0][0] <= end_ms:
            due_ms, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                self.elapsed_ms = max(self.elapsed_ms, due_ms)
                callback, timer.callback = timer.callback, None
                callback()
                await settle()
        self.elapsed_ms = end_ms


async def settle() -> None:
    """Let everything run that can run without time passing."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
