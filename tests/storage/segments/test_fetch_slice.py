"""The end of a fetched range: a border of batches, at most the limit, with and without an index."""

import pytest

from storage.format.index import IndexLimits
from storage.segments import offset_lookup
from storage.segments.fetch_slice import BOUNDARY_SCAN_BYTES, FetchSlice, find_slice
from storage.segments.segment import IndexNotReadyError, Segment
from storage.segments.segment_list import SegmentList
from tests.support.storage.log_files import BASE, SIZE, batch_at
from tests.support.storage.memory_env import MemoryEnv

EVERY, NEVER = 0, 1 << 30  # bytes between two index entries


def segment_with(batches: int, interval_bytes: int = EVERY) -> Segment:
    env = MemoryEnv()
    env.mkdir("/d")
    segment = Segment.begin(env, "/d", BASE, IndexLimits(interval_bytes, 1 << 20))
    for offset in range(BASE, BASE + batches):
        segment.append(batch_at(offset), SIZE, offset, 1)
    return segment


def fetched(
    segment: Segment,
    offset: int,
    max_bytes: int,
    *,
    at_least_one: bool = True,
    in_place: bool = True,
) -> tuple[int, int]:
    """Return position and length of the range."""
    end_offset = BASE + segment.size_bytes // SIZE
    result: FetchSlice = find_slice(
        SegmentList([segment]),
        offset,
        max_bytes,
        end_offset,
        end_offset,
        at_least_one=at_least_one,
        in_place=in_place,
    )
    return result.position, result.length


@pytest.mark.parametrize("interval_bytes", [EVERY, 3 * SIZE, NEVER])
@pytest.mark.parametrize("max_bytes", [2 * SIZE, 2 * SIZE + 1, 3 * SIZE - 1])
def test_a_range_ends_with_a_whole_batch(interval_bytes: int, max_bytes: int) -> None:
    segment = segment_with(12, interval_bytes)
    for number in range(10):
        position, length = fetched(segment, BASE + number, max_bytes)
        assert position == number * SIZE
        assert length in (SIZE, 2 * SIZE)  # SIZE: up to an index entry


@pytest.mark.parametrize("interval_bytes", [EVERY, NEVER])
def test_the_first_batch_may_exceed_the_limit_if_there_must_be_one(interval_bytes: int) -> None:
    segment = segment_with(4, interval_bytes)
    assert fetched(segment, BASE + 1, SIZE - 1) == (SIZE, SIZE)
    assert fetched(segment, BASE + 1, SIZE - 1, at_least_one=False) == (SIZE, 0)


def test_the_next_range_begins_where_the_last_one_ended_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segment = segment_with(12)
    _, length = fetched(segment, BASE, 5 * SIZE)
    monkeypatch.setattr(offset_lookup, "_search", lambda *_, **__: pytest.fail("a search"))
    assert fetched(segment, BASE + length // SIZE, 2 * SIZE) == (length, 2 * SIZE)


def test_without_an_index_a_long_range_ends_at_the_limit_after_a_bounded_search() -> None:
    segment = segment_with(BOUNDARY_SCAN_BYTES // SIZE + 50, NEVER)
    limit = BOUNDARY_SCAN_BYTES + 10 * SIZE + 1
    assert fetched(segment, BASE, limit) == (0, limit)


def test_an_index_that_points_at_no_batch_is_repaired_by_the_caller_or_in_place() -> None:
    segment = segment_with(12)
    segment.indexes.offsets.positions[5] += 3
    with pytest.raises(IndexNotReadyError) as caught:
        fetched(segment, BASE, 7 * SIZE - 1, in_place=False)
    assert caught.value.repair is Segment.rebuild
    assert fetched(segment, BASE, 7 * SIZE - 1) == (0, 6 * SIZE)


def test_a_range_ends_in_front_of_damage_that_it_meets() -> None:
    segment = segment_with(12, NEVER)
    segment.file.pwrite(bytes(SIZE), 3 * SIZE)
    assert fetched(segment, BASE, 6 * SIZE) == (0, 3 * SIZE)
    assert [damage.position for damage in segment.damages] == [3 * SIZE]
