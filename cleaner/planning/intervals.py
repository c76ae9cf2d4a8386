"""Stretches [first, end) of offsets: put together, taken away, followed. Pure."""

from collections.abc import Iterable
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]


def merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same offsets in order, without empty, overlapping or touching stretches."""
    found: list[Interval] = []
    for first, end in sorted(intervals):
        if first >= end:
            continue
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return tuple(found)


def without(whole: Interval, taken: Iterable[Interval]) -> tuple[Interval, ...]:
    """What is left of `whole`, in order."""
    first, end = whole
    left: list[Interval] = []
    for gone_first, gone_end in merged(taken):
        if gone_end <= first or gone_first >= end:
            continue
        if gone_first > first:
            left.append((first, gone_first))
        first = gone_end
    if first < end:
        left.append((first, end))
    return tuple(left)


def reach(offset: int, intervals: Iterable[Interval]) -> int:
    """How far one comes from `offset` without leaving the intervals."""
    for first, end in merged(intervals):
        if first <= offset < end:
            return end
    return offset


def meets(intervals: Iterable[Interval], first: int, end: int) -> bool:
    """Whether any of them has an offset in [first, end)."""
    return any(low < end and first < high for low, high in intervals)
