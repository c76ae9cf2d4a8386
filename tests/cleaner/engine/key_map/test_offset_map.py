"""The map of last offsets, beside a dictionary."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.key_map.map_size import SLOT_BYTES, SLOTS_MIN, slots_for
from cleaner.engine.key_map.offset_map import SLOTS_AT_FIRST, OffsetMap
from tests.support.draws import cases

KEY = bytes(16)
PROPERTY = settings(max_examples=cases(few=25, many=150), deadline=None)


def words(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def put_all(offset_map: OffsetMap, pairs: list[tuple[int, int]], first: int = 0) -> int:
    lows = words([item for item, _ in pairs])
    highs = words([two for _, two in pairs])
    return offset_map.put(lows, highs, np.arange(first, first + len(pairs), dtype=np.int64))


def find_all(offset_map: OffsetMap, pairs: list[tuple[int, int]]) -> list[int]:
    index = offset_map.find(words([a for a, _ in pairs]), words([b for _, b in pairs]))
    return [int(offset) for offset in index]


def random_pairs(count: int, seed: int) -> list[tuple[int, int]]:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 1 << 64, size=(count, 2), dtype=np.uint64)
    return [(int(a), int(b)) for a, b in numbers]


@pytest.mark.parametrize("count", [10, 100, 1000, 5000, 40_000])
def test_every_key_is_found_at_its_offset(count: int) -> None:
    offset_map = OffsetMap(count * 48, count, KEY)
    pairs = random_pairs(count, count)
    assert put_all(offset_map, pairs) == count
    assert find_all(offset_map, pairs) == list(range(count))
    assert find_all(offset_map, random_pairs(100, 7)) == [-1] * 100
    assert offset_map.entries == count


def test_the_last_offset_put_is_the_one_found() -> None:
    offset_map = OffsetMap(1 << 16, 100, KEY)
    assert put_all(offset_map, [(1, 1), (2, 2), (1, 1)]) == 3
    assert find_all(offset_map, [(1, 1), (2, 2)]) == [2, 1]
    assert offset_map.entries == 2


def test_keys_that_share_one_word_are_two_keys() -> None:
    offset_map = OffsetMap(1 << 16, 100, KEY)
    put_all(offset_map, [(5, 1), (5, 2), (6, 1)])
    assert find_all(offset_map, [(5, 1), (5, 2), (6, 1), (6, 2)]) == [0, 1, 2, -1]


def test_offset_zero_and_a_fingerprint_of_zeros_are_an_entry() -> None:
    offset_map = OffsetMap(1 << 10, 10, KEY)
    assert find_all(offset_map, [(0, 0)]) == [-1]
    put_all(offset_map, [(0, 0)])
    assert find_all(offset_map, [(0, 0)]) == [0]


@pytest.mark.parametrize("limit_bytes", [0, 1, 24, 47, 48])
def test_the_smallest_map_holds_one_key(limit_bytes: int) -> None:
    offset_map = OffsetMap(limit_bytes, 1000, KEY)
    assert offset_map.entries_max == 1
    assert put_all(offset_map, [(9, 9), (9, 9), (8, 8)]) == 2
    assert find_all(offset_map, [(9, 9), (8, 8)]) == [1, -1]


def test_a_full_map_still_updates_the_keys_it_knows() -> None:
    offset_map = OffsetMap(20 * SLOT_BYTES, 1000, KEY)
    pairs = random_pairs(18, 3)
    assert put_all(offset_map, pairs) == offset_map.entries_max == 18
    new = [(1, 1)]
    assert put_all(offset_map, pairs[:5] + new + pairs[5:], first=100) == 5
    assert find_all(offset_map, pairs[:6]) == [100, 101, 102, 103, 104, 5]
    assert find_all(offset_map, new) == [-1]


def test_the_share_in_use_goes_from_nothing_to_all_key_by_key() -> None:
    offset_map = OffsetMap(20 * SLOT_BYTES, 1000, KEY)
    assert offset_map.utilization == 0.0
    for count, pair in enumerate(random_pairs(18, 4), 1):
        put_all(offset_map, [pair], first=count)
        assert offset_map.utilization == count / 18


def test_nine_tenths_of_the_slots_are_filled() -> None:
    assert slots_for(128 << 20, 1 << 40) == (128 << 20) // 24
    assert OffsetMap(1000 * SLOT_BYTES, 10**6, KEY).entries_max == 900


def test_no_more_is_reserved_than_the_section_has_offsets() -> None:
    assert slots_for(128 << 20, 1) == SLOTS_MIN + 1
    few = OffsetMap(128 << 20, 90, KEY)
    assert few.entries_max >= 90
    assert few.table.nbytes < 128 * SLOT_BYTES


def test_few_keys_touch_few_pages_of_a_large_map() -> None:
    offset_map = OffsetMap(1 << 30, 1 << 40, KEY)
    put_all(offset_map, random_pairs(1000, 5))
    used = int(offset_map.state[fields.SLOTS])
    assert used == SLOTS_AT_FIRST
    assert not offset_map.table[used * SLOT_WORDS : used * SLOT_WORDS + 10_000].any()


# Fingerprints that gather: at the start of the table, at its end (where probes wrap around), and
# in between.
GATHERED = st.sampled_from(
    [0, 1, 1 << 32, (1 << 64) - 1, ((1 << 32) - 1) << 32, 1 << 63, 3 << 62]
) | st.integers(0, 12).map(lambda step: step << 57)


@PROPERTY
@given(
    st.lists(st.tuples(GATHERED, st.integers(0, 40)), max_size=300),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
)
def test_growing_loses_no_key_however_they_gather(
    pairs: list[tuple[int, int]], chunks: list[int]
) -> None:
    offset_map = OffsetMap(1 << 16, 1 << 20, KEY)
    offset_map.state[fields.SLOTS] = 4
    expected: dict[tuple[int, int], int] = {}
    done = 0
    for number in range(len(pairs)):
        chunk = pairs[done : done + chunks[number % len(chunks)]]
        if not chunk:
            break
        assert put_all(offset_map, chunk, first=done) == len(chunk)
        expected |= {pair: done + i for i, pair in enumerate(chunk)}
        done += len(chunk)
    assert offset_map.entries == len(expected)
    assert find_all(offset_map, list(expected)) == list(expected.values())
    # Each key stands in the table once.
    assert np.count_nonzero(offset_map.table[2::SLOT_WORDS]) == len(expected)


@pytest.mark.parametrize("seed", range(cases(few=6, many=20)))
def test_growing_a_table_that_is_crowded_at_one_end_loses_none(seed: int) -> None:
    rng = np.random.default_rng(seed)
    offset_map = OffsetMap(1 << 18, 1 << 20, KEY)
    offset_map.state[fields.SLOTS] = 4
    # Homes in the first 32nd of the table, or in the last.
    edge = 0 if seed % 2 else 31 << 59
    pairs = [
        (edge + int(integer), two) for two, integer in enumerate(rng.integers(0, 1 << 59, 600))
    ]
    for count, pair in enumerate(pairs, 1):
        assert put_all(offset_map, [pair], first=count - 1) == 1
        if count % 50 == 0:
            assert find_all(offset_map, pairs[:count]) == list(range(count))


def test_growing_with_every_key_at_one_home_loses_none() -> None:
    offset_map = OffsetMap(1 << 20, 1 << 20, KEY)
    offset_map.state[fields.SLOTS] = 4
    for home in (0, (1 << 64) - 1):
        pairs = [(home, two) for two in range(2000)]
        for first in range(0, 2000, 40):
            assert put_all(offset_map, pairs[first : first + 40], first=first) == 40
        assert find_all(offset_map, pairs) == list(range(2000))


def test_survivors_are_marked_within_the_window_only() -> None:
    offset_map = OffsetMap(1 << 16, 1000, KEY)
    put_all(offset_map, [(1, 1), (2, 2), (1, 1), (3, 3)], first=10)
    offset_map.state[fields.BITS_FIRST] = 11
    offset_map.state[fields.BITS_END] = 13
    bits = np.zeros(1, dtype=np.uint8)
    offset_map.mark(bits)
    assert bits[0] == 0b11
