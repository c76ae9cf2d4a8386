"""How much of the machine cleaning may take: all that is idle, a floor beside pressed clients.

Rule 1. While clients ask for nothing, there is no limit.
Rule 2. While they do and are not kept waiting, there is none either: a busy machine is not a
        pressed one. What tells is the loop's own timer. It is late exactly when the loop was held
        up or got no core, and then a request that came at that moment was late as well.
Rule 3. A late tick halves what is allowed; time without one doubles it, in DOUBLING_SECONDS. At
        rest there are then as many late ticks as doublings: one in DOUBLING_SECONDS / tick, which
        is one of a hundred. So what is held at LATE_SECONDS is the 99th percentile of lateness.
Rule 4. Never below the floor, and the floor is above what clients write: else a log under steady
        load would outgrow its cleaner for as long as the load lasts.

Rule 4 in numbers. At dirty ratio r, cleaning one dirty byte reads 1/r + 1 bytes (the dirty section
twice, the clean one once) and writes at most 1/r. With KEEP_UP times the inbound rate granted each
way, cleaning keeps up wherever 1/r + 1 <= KEEP_UP. A log that falls behind becomes dirtier, which
makes cleaning cheaper by the byte, until r = 1 / (KEEP_UP - 1): there it stays.

Pure: seconds and counters come in, bytes per second come out. Knows no worker and no clock.
"""

import math
from dataclasses import dataclass, field
from typing import Final

from cleaner.host import Foreground

# With TOP_UP_SECONDS of 0.05 one doubling is a hundred ticks: see rule 3.
DOUBLING_SECONDS: Final = 5.0
# Of the loop's timer. Its resolution is 1 ms; the whole of a request is to stay below 5 ms.
LATE_SECONDS: Final = 0.004
# Dirty ratio 1/3 at the worst; at the default threshold of one half, cleaning may rest a quarter.
KEEP_UP: Final = 4.0
INBOUND_SECONDS: Final = 30.0  # what clients write is averaged over so long: a floor must not leap
# Less than this is nobody's work: consumers that wait at the end of a log, a heartbeat of a metric.
BUSY_REQUESTS_PER_SECOND: Final = 50.0
BUSY_BYTES_PER_SECOND: Final = float(1 << 20)
QUIET_SECONDS: Final = 1.0  # without such work, until clients count as quiet
UNLIMITED_ABOVE: Final = float(8 << 30)  # bytes/s that no worker reaches


@dataclass(slots=True)
class Borrowing:
    """What is allowed each way, in bytes per second; math.inf is no limit."""

    floor_bytes_per_second: float
    now: float
    allowed: float = field(init=False, default=math.inf)
    inbound_bytes_per_second: float = field(init=False, default=0.0)
    _seen: Foreground | None = field(init=False, default=None)
    _seen_at: float = field(init=False)
    _busy_at: float = field(init=False, default=-math.inf)

    def __post_init__(self) -> None:
        assert self.floor_bytes_per_second > 0
        self._seen_at = self.now

    @property
    def floor(self) -> float:
        """The least that is allowed now."""
        return max(self.floor_bytes_per_second, KEEP_UP * self.inbound_bytes_per_second)

    def set_floor(self, bytes_per_second: float) -> None:
        """Change the setting; takes effect at the next tick."""
        assert bytes_per_second > 0
        self.floor_bytes_per_second = bytes_per_second

    def observe(self, foreground: Foreground, now: float) -> None:
        """Take what clients have been served so far: what they do, and what they write."""
        assert now >= self._seen_at
        seen, passed = self._seen, now - self._seen_at
        self._seen, self._seen_at = foreground, now
        if seen is None or passed <= 0:
            return
        share = 1 - math.exp(-passed / INBOUND_SECONDS)
        written = (foreground.bytes_in - seen.bytes_in) / passed
        self.inbound_bytes_per_second += share * (written - self.inbound_bytes_per_second)
        if (
            foreground.requests - seen.requests > BUSY_REQUESTS_PER_SECOND * passed
            or foreground.bytes - seen.bytes > BUSY_BYTES_PER_SECOND * passed
        ):
            self._busy_at = now

    def tick(self, now: float, late_seconds: float, moved_bytes_per_second: float) -> float:
        """What is allowed from now on.

        `late_seconds` is how late this tick comes, `moved_bytes_per_second` what cleaning did
        lately, in the direction in which it did more.
        """
        assert now >= self.now
        passed, self.now = now - self.now, now
        if now - self._busy_at >= QUIET_SECONDS:
            self.allowed = math.inf
        elif late_seconds >= LATE_SECONDS:
            # From what it does, not from what it might: else the first halvings would do nothing.
            self.allowed = max(self.floor, min(self.allowed, moved_bytes_per_second) / 2)
        elif self.allowed < math.inf:
            doublings = min(64.0, passed / DOUBLING_SECONDS)
            self.allowed = max(self.floor, self.allowed * 2.0**doublings)
            if self.allowed > UNLIMITED_ABOVE:
                self.allowed = math.inf
        return self.allowed
