"""The time of groups: timers, monotonic time for them, and wall time for stored records."""

import asyncio
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A scheduled callback."""

    def cancel(self) -> None:
        """Do not call back."""
        ...


class Clock(Protocol):
    """Timers in monotonic time, and wall time for stored records."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call back on the event loop in `delay_s` seconds."""
        ...

    def monotonic_ms(self) -> float:
        """Return the time of the timers in milliseconds."""
        ...

    def wall_ms(self) -> int:
        """Return milliseconds since 1970."""
        ...


class LoopClock:
    """The timers of the running event loop, and a wall clock."""

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        self.wall_ms = wall_ms

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call back on the event loop in `delay_s` seconds."""
        return asyncio.get_running_loop().call_later(delay_s, callback)

    def monotonic_ms(self) -> float:
        """Return the time of the event loop in milliseconds."""
        return asyncio.get_running_loop().time() * 1000
