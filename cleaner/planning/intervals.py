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
    """What is left of `whole`, in order."""
    first, end = whole
    gone = merged(used)
    if not gone:
        return Merged((whole,)) if first < end else Merged()
    remaining: list[Interval] = []
    for at in range(_first_after(gone, first), len(gone)):
        gone_first, gone_end = gone[at]
        if gone_first >= end:
            break
        if gone_first > first:
            remaining.append((first, gone_first))
        first = gone_end
    if first < end:
        remaining.append((first, end))
    return Merged(remaining)


def reach(offset: int, intervals: Iterable[Interval]) -> int:
    """How far one comes from `offset` without leaving the intervals."""
    for first, end in merged(intervals):
        if first <= offset < end:
            return end
    return offset


def meets(intervals: Iterable[Interval], first: int, end: int) -> bool:
    """Whether any of them has an offset in [first, end)."""
    results = merged(intervals)
    at = _first_after(results, first)
    return at < len(results) and results[at][0] < end


def _first_after(value: tuple[Interval, ...], offset: int) -> int:
    """The first stretch that ends behind `offset`."""
    return bisect_right(value, offset, key=itemgetter(1))
