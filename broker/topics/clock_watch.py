"""Finds out whether the wall clock can be trusted: whether it agrees with monotonic time."""

from dataclasses import dataclass
from typing import Final

JUMP_MS: Final = 60_000  # wall time may deviate from monotonic time by this much between two checks
CONFIRM_MS: Final = 600_000  # a jumped clock is trusted after it has been steady for this long


@dataclass(slots=True)
class ClockWatch:
    """Whether wall time is trusted. Pure: callers pass both times."""

    last_wall_ms: int
    last_monotonic_ms: float
    distrusted_until_ms: float = 0.0  # monotonic

    def check(self, wall_ms: int, monotonic_ms: float) -> int:
        """Compare the two clocks; return the jump in ms, 0 if there was none."""
        drift = (wall_ms - self.last_wall_ms) - (monotonic_ms - self.last_monotonic_ms)
        self.last_wall_ms, self.last_monotonic_ms = wall_ms, monotonic_ms
        if abs(drift) <= JUMP_MS:
            return 0
        self.distrust(monotonic_ms)
        return int(drift)

    def distrust(self, monotonic_ms: float) -> None:
        """Suspend trust until wall time has been steady for CONFIRM_MS."""
        self.distrusted_until_ms = monotonic_ms + CONFIRM_MS

    def trusted(self, monotonic_ms: float) -> bool:
        """Return whether data may be deleted by its age."""
        return monotonic_ms >= self.distrusted_until_ms
