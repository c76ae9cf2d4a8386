"""Stretches [first, end) of offsets: put together, taken away, followed. Pure.

A log has thousands of segments, each of which is looked up: what is merged once is not merged
again, and is searched by halves.
"""

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]


class Merged(tuple[Interval, ...]):
    """Stretches in order, none empty, none overlapping or touching another. Made by `merged`."""

    __slots__ = ()


def merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same offsets in order, without empty, overlapping or touching stretches."""
    if isinstance(intervals, Merged):
        return intervals
    found: list[Interval] = []
    for first, end in sorted(intervals):
        if first >= end:
            continue
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return Merged(found)


def without(whole: Interval, taken: Iterable[Interval]) -> tuple[Interval, ...]:
    """What is left of `whole`, in order."""
    first, end = whole
    gone = merged(taken)
    if not gone:
        return Merged((whole,)) if first < end else Merged()
    left: list[Interval] = []
    for at in range(_first_behind(gone, first), len(gone)):
        gone_first, gone_end = gone[at]
        if gone_first >= end:
            break
        if gone_first > first:
            left.append((first, gone_first))
        first = gone_end
    if first < end:
        left.append((first, end))
    return Merged(left)


def reach(offset: int, intervals: Iterable[Interval]) -> int:
    """How far one comes from `offset` without leaving the intervals."""
    for first, end in merged(intervals):
        if first <= offset < end:
            return end
    return offset


def meets(intervals: Iterable[Interval], first: int, end: int) -> bool:
    """Whether any of them has an offset in [first, end)."""
    found = merged(intervals)
    at = _first_behind(found, first)
    return at < len(found) and found[at][0] < end


def _first_behind(found: tuple[Interval, ...], offset: int) -> int:
    """The first stretch that ends behind `offset`."""
    return bisect_right(found, offset, key=itemgetter(1))
