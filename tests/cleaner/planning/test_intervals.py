"""Stretches of offsets, against sets of offsets."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cleaner.planning.intervals import Interval, meets, merged, reach, without

STRETCHES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)
ONE = st.tuples(st.integers(0, 30), st.integers(0, 30))


def offsets_of(intervals: list[Interval] | tuple[Interval, ...]) -> set[int]:
    return {offset for first, end in intervals for offset in range(first, end)}


@given(STRETCHES)
def test_merged_has_the_same_offsets_in_order_and_apart(stretches: list[Interval]) -> None:
    results = merged(stretches)
    assert offsets_of(results) == offsets_of(stretches)
    assert all(first < end for first, end in results)
    assert all(item[1] < next_[0] for item, next_ in pairwise(results))


@given(STRETCHES)
def test_what_is_merged_is_not_merged_again(stretches: list[Interval]) -> None:
    """Each of thousands of segments is looked up in it."""
    results = merged(stretches)
    assert merged(results) is results
    remaining = without((0, 30), results)
    assert merged(remaining) is remaining


@given(ONE, STRETCHES)
def test_without_leaves_what_was_not_taken(whole: Interval, taken: list[Interval]) -> None:
    assert offsets_of(without(whole, taken)) == offsets_of((whole,)) - offsets_of(taken)


@given(ONE, STRETCHES)
def test_meets_says_whether_an_offset_is_in_any(span: Interval, stretches: list[Interval]) -> None:
    if span[0] < span[1]:
        assert meets(stretches, *span) == bool(offsets_of((span,)) & offsets_of(stretches))


@given(st.integers(0, 30), STRETCHES)
def test_reach_goes_as_far_as_the_stretches_do(offset: int, stretches: list[Interval]) -> None:
    inside = offsets_of(stretches)
    end = offset
    while end in inside:
        end += 1
    assert reach(offset, stretches) == end
