"""Sets of offsets as intervals [first, end): union, difference, search. Pure.

A log has thousands of segments, and each is searched for in the intervals. So merged intervals have
a type of their own, `Merged`, and are searched by bisection.
"""

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]


class Merged(tuple[Interval, ...]):
    """Sorted, non-empty intervals with gaps between them. `merged` creates them."""

    __slots__ = ()


def merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the union of the intervals."""
    if isinstance(intervals, Merged):
        return intervals
    results: list[Interval] = []
    for first, end in sorted(intervals):
        if first >= end:
            continue
        if results and first <= results[-1][1]:
            results[-1] = (results[-1][0], max(end, results[-1][1]))
        else:
            results.append((first, end))
    return Merged(results)


def without(whole: Interval, used: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return `whole` minus the used intervals."""
    first, end = whole
    taken = merged(used)
    if not taken:
        return Merged((whole,)) if first < end else Merged()
    remaining: list[Interval] = []
    for at in range(_first_after(taken, first), len(taken)):
        used_first, used_end = taken[at]
        if used_first >= end:
            break
        if used_first > first:
            remaining.append((first, used_first))
        first = used_end
    if first < end:
        remaining.append((first, end))
    return Merged(remaining)


def reach(offset: int, intervals: Iterable[Interval]) -> int:
    """Return the end of the interval that contains `offset`, or `offset` itself."""
    for first, end in merged(intervals):
        if first <= offset < end:
            return end
    return offset


def meets(intervals: Iterable[Interval], first: int, end: int) -> bool:
    """Return whether the intervals overlap [first, end)."""
    ordered = merged(intervals)
    at = _first_after(ordered, first)
    return at < len(ordered) and ordered[at][0] < end


def _first_after(ordered: tuple[Interval, ...], offset: int) -> int:
    """Return the index of the first interval that ends after `offset`."""
    return bisect_right(ordered, offset, key=itemgetter(1))
