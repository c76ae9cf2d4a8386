"""Rates over a sliding window, and token buckets, as Kafka measures quotas. Time is an argument."""

from collections import deque
from typing import Final

SAMPLES: Final = 11  # Kafka's quota.window.num
SAMPLE_SECONDS: Final = 1.0  # Kafka's quota.window.size.seconds


class WindowedRate:
    """A rate per second over the last ten full samples and the one that has begun."""

    __slots__ = ("_samples", "_total")

    def __init__(self) -> None:
        self._samples: deque[list[float]] = deque()  # [begin in seconds, sum], oldest first
        self._total = 0.0

    def record(self, value: float, now: float) -> None:
        """Add a value at time `now`."""
        self._purge(now)
        samples = self._samples
        if not samples or now - samples[-1][0] >= SAMPLE_SECONDS:
            samples.append([now, 0.0])
        samples[-1][1] += value
        self._total += value

    def window_seconds(self, now: float) -> float:
        """Return the length of the window: at least ten samples, although fewer may exist."""
        self._purge(now)
        elapsed = now - self._samples[0][0] if self._samples else 0.0
        missing = SAMPLES - 1 - int(elapsed / SAMPLE_SECONDS)
        return max(elapsed + max(missing, 0) * SAMPLE_SECONDS, 0.001)

    def throttle_seconds(self, limit: float, now: float) -> float:
        """Return the pause after which the rate is back at the limit; 0 if it is not above it."""
        window = self.window_seconds(now)
        return max(0.0, self._total / limit - window)

    def is_idle(self, now: float) -> bool:
        """Return whether nothing was recorded within the window."""
        self._purge(now)
        return not self._samples

    def _purge(self, now: float) -> None:
        samples = self._samples
        while samples and now - samples[0][0] >= SAMPLES * SAMPLE_SECONDS:
            self._total -= samples.popleft()[1]
        if not samples:
            self._total = 0.0  # without the rounding errors of the differences


class TokenBucket:
    """Tokens that refill at a rate, for bursts of the whole window (KIP-599).

    A request is admitted as long as the bucket is not overdrawn; it may overdraw it itself.
    """

    __slots__ = ("_filled_at", "_tokens", "_window_seconds")

    def __init__(self, window_seconds: float = SAMPLES * SAMPLE_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._tokens: float | None = None  # None: full
        self._filled_at = 0.0

    def record(self, value: float, limit: float, now: float) -> None:
        """Take tokens at time `now`."""
        self._fill(limit, now)
        assert self._tokens is not None
        self._tokens = min(limit * self._window_seconds, self._tokens - value)

    def throttle_seconds(self, limit: float, now: float) -> float:
        """Return the time until the bucket is not overdrawn any more; 0 if it is not."""
        self._fill(limit, now)
        assert self._tokens is not None
        return max(0.0, -self._tokens / limit)

    def is_idle(self, limit: float, now: float) -> bool:
        """Return whether the bucket is full."""
        self._fill(limit, now)
        return self._tokens == limit * self._window_seconds

    def _fill(self, limit: float, now: float) -> None:
        burst = limit * self._window_seconds
        if self._tokens is None:
            self._tokens = burst
        else:
            self._tokens = min(burst, self._tokens + (now - self._filled_at) * limit)
        self._filled_at = now
