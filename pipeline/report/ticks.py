"""Ticks of a time axis at round spans, each in whole units: "30 s", "60 s", "90 s". Pure.

matplotlib's own ticks are multiples of ten seconds, which are not whole minutes or hours.
"""

from collections.abc import Sequence
from typing import Final

TICKS_MAX: Final = 8
_MS: Final = (("ms", 1, (1, 2, 5, 10, 20, 50, 100, 200, 500)), ("s", 1000, (1, 2, 5, 10, 15, 30)),
              ("min", 60_000, (1, 2, 5, 10, 15, 30)), ("h", 3_600_000, (1, 2, 3, 6, 12)),
              ("d", 86_400_000, (1, 2, 7, 14, 30, 90, 180, 365, 730, 1825, 3650)))  # fmt: skip
_SPANS: Final = tuple(
    (count * unit_ms, unit_ms, unit) for unit, unit_ms, counts in _MS for count in counts
)
_FAR: Final = frozenset((1000, 60_000, 3_600_000, 86_400_000, 604_800_000, 30 * 86_400_000,
                         365 * 86_400_000))  # fmt: skip

Ticks = Sequence[tuple[float, str]]  # place in seconds, label


def even_ticks(high_seconds: float) -> Ticks:
    """Return ticks from 0 to a place, at equal distances."""
    high_ms = max(high_seconds, 0.001) * 1000
    fitting = (span for span in _SPANS if high_ms / span[0] <= TICKS_MAX)
    step_ms, unit_ms, unit = next(fitting, _SPANS[-1])
    while high_ms / step_ms > TICKS_MAX:
        step_ms *= 2
    places = range(0, int(high_ms) + 1, step_ms)
    return [(place / 1000, f"{place // unit_ms} {unit}" if place else "0") for place in places]


def log_ticks(low_seconds: float, high_seconds: float) -> Ticks:
    """Return ticks of a logarithmic axis: a second, a minute, an hour.

    If fewer than two of them are visible, return the visible round spans.
    """
    low_ms, high_ms = low_seconds * 1000, high_seconds * 1000
    seen = [span for span in _SPANS if low_ms <= span[0] <= high_ms]
    far = [span for span in seen if span[0] in _FAR]
    if len(far) < 2:
        far = seen[:: -(-len(seen) // TICKS_MAX) or 1]
    return [(ms / 1000, f"{ms // unit_ms} {unit}") for ms, unit_ms, unit in far]
