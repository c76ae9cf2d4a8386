"""The cleaning rate if none is configured: all spare capacity of the machine, at least a floor.

Rule 1. Without client requests there is no limit.
Rule 2. With client requests there is no limit while no request is delayed. A timer of the event
        loop detects delays: it ticks late if the loop was blocked or had no core, and then requests
        are late as well.
Rule 3. A late tick halves the rate. DOUBLING_SECONDS without a late tick double it. At equilibrium
        both happen equally often, so one tick in a hundred is late (DOUBLING_SECONDS / tick): the
        99th percentile of lateness is LATE_SECONDS.
Rule 4. The rate is never below the floor, which is KEEP_UP times the rate of client writes:
        otherwise a log under steady load would grow faster than it is cleaned.

Rule 4 in numbers: at dirty ratio r, the cleaner reads 1/r + 1 bytes per dirty byte (the dirty
section twice, the clean section once) and writes at most 1/r. So it keeps up if 1/r + 1 <= KEEP_UP.
A log that is not cleaned fast enough becomes dirtier, which makes each byte cheaper, until
r = 1 / (KEEP_UP - 1).

Pure: seconds and counters come in, bytes per second come out.
"""

import math
from dataclasses import dataclass, field
from typing import Final

from cleaner.host import Foreground

# With TOP_UP_SECONDS of 0.05, one doubling takes a hundred ticks: see rule 3.
DOUBLING_SECONDS: Final = 5.0
# Of the loop's timer, whose resolution is 1 ms; a request should take less than 5 ms.
LATE_SECONDS: Final = 0.004
# Allows a dirty ratio down to 1/3. At the default of 1/2 cleaning needs 3/4 of the rate.
KEEP_UP: Final = 4.0
INBOUND_SECONDS: Final = 30.0  # averaging period of client writes, so that the floor changes slowly
# Less load than this is ignored: consumers waiting at the end of a log, scrapes of metrics.
BUSY_REQUESTS_PER_SECOND: Final = 50.0
BUSY_BYTES_PER_SECOND: Final = float(1 << 20)
QUIET_SECONDS: Final = 1.0  # without such load, until clients count as idle
UNLIMITED_ABOVE: Final = float(8 << 30)  # bytes/s that no worker reaches


@dataclass(slots=True)
class SpareCapacity:
    """The allowed rate in each direction, in bytes per second; math.inf means no limit."""

    floor_bytes_per_second: float
    now: float
    allowed: float = field(init=False, default=math.inf)
    inbound_bytes_per_second: float = field(init=False, default=0.0)
    _last_foreground: Foreground | None = field(init=False, default=None)
    _observed_at: float = field(init=False)
    _busy_at: float = field(init=False, default=-math.inf)

    def __post_init__(self) -> None:
        assert self.floor_bytes_per_second > 0
        self._observed_at = self.now

    @property
    def floor(self) -> float:
        """Return the least allowed rate."""
        return max(self.floor_bytes_per_second, KEEP_UP * self.inbound_bytes_per_second)

    def set_floor(self, bytes_per_second: float) -> None:
        """Change the setting; takes effect at the next tick."""
        assert bytes_per_second > 0
        self.floor_bytes_per_second = bytes_per_second

    def observe(self, foreground: Foreground, now: float) -> None:
        """Read the counters of client work, and update the load and the rate of writes."""
        assert now >= self._observed_at
        before, passed = self._last_foreground, now - self._observed_at
        self._last_foreground, self._observed_at = foreground, now
        if before is None or passed <= 0:
            return
        share = 1 - math.exp(-passed / INBOUND_SECONDS)
        written = (foreground.bytes_in - before.bytes_in) / passed
        self.inbound_bytes_per_second += share * (written - self.inbound_bytes_per_second)
        if (
            foreground.requests - before.requests > BUSY_REQUESTS_PER_SECOND * passed
            or foreground.bytes - before.bytes > BUSY_BYTES_PER_SECOND * passed
        ):
            self._busy_at = now

    def tick(self, now: float, late_seconds: float, moved_bytes_per_second: float) -> float:
        """Update and return the allowed rate.

        `late_seconds` is the lateness of this tick, `moved_bytes_per_second` the recent speed of
        cleaning in the faster direction.
        """
        assert now >= self.now
        passed, self.now = now - self.now, now
        if now - self._busy_at >= QUIET_SECONDS:
            self.allowed = math.inf
        elif late_seconds >= LATE_SECONDS:
            # From the actual speed: otherwise the first halvings would have no effect.
            self.allowed = max(self.floor, min(self.allowed, moved_bytes_per_second) / 2)
        elif self.allowed < math.inf:
            doublings = min(64.0, passed / DOUBLING_SECONDS)
            self.allowed = max(self.floor, self.allowed * 2.0**doublings)
            if self.allowed > UNLIMITED_ABOVE:
                self.allowed = math.inf
        return self.allowed
