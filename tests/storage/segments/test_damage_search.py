"""The search for damage: where a range begins and ends, in a file without a segment."""

import pytest

from storage.format.batch import read_header
from storage.format.index import OffsetIndex
from storage.segments.damage import (
    CHECKSUM_BYTES_MAX,
    DamagedSegment,
    DamageSearch,
    damage_checksum,
    why_contradicted,
    with_damage,
)
from tests.support.storage.log_files import BASE, PATH, SIZE, batch_at, log_of, opened


def searched(
    data: bytes | bytearray,
    *,
    index: OffsetIndex | None = None,
    damages: tuple[DamagedSegment, ...] = (),
) -> DamageSearch:
    return DamageSearch(
        opened(data),
        path=PATH,
        base_offset=BASE,
        size_bytes=len(data),
        offsets=index,
        damages=damages,
    )


def six() -> bytearray:
    return log_of(*range(BASE, BASE + 6))


def ranges(search: DamageSearch) -> list[tuple[int, int, int, int]]:
    return [
        (
            damage.position // SIZE,
            damage.end_position // SIZE,
            damage.first_offset,
            damage.next_offset,
        )
        for damage in search.damages
    ]


def test_a_range_ends_at_the_next_whole_batch() -> None:
    data = six()
    data[2 * SIZE + 70] ^= 1
    search = searched(data)
    damage = search.find(2 * SIZE, "bad CRC")
    assert (damage.path, damage.base_offset, damage.reason) == (PATH, BASE, "bad CRC")
    assert ranges(search) == [(2, 3, BASE + 2, BASE + 3)]
    assert search.damages == (damage,)


def test_a_range_at_the_end_of_the_file_has_no_next_offset() -> None:
    data = six()
    data[5 * SIZE + 70] ^= 1
    search = searched(data)
    search.find(5 * SIZE, "bad CRC")
    assert ranges(search) == [(5, 6, BASE + 5, -1)]


def test_damage_begins_with_the_batch_before_it_if_the_length_of_that_batch_is_wrong() -> None:
    data = six()
    data[2 * SIZE + 8 : 2 * SIZE + 12] = (2 * SIZE).to_bytes(4, "big")
    search = searched(data)
    damage = search.find(4 * SIZE + 12, "no batch")  # where that length leads to
    assert damage.position == 2 * SIZE
    assert damage.reason == "CRC does not match; no batch after it"
    assert ranges(search) == [(2, 3, BASE + 2, BASE + 3)]


def test_damage_on_the_way_to_the_position_becomes_a_range_of_its_own() -> None:
    data = six()
    for index in (1, 4):
        data[index * SIZE + 16] = 9  # the format
    search = searched(data)
    search.find(4 * SIZE, "no batch")
    assert ranges(search) == [(1, 2, BASE + 1, BASE + 2), (4, 5, BASE + 4, BASE + 5)]


def test_a_known_range_is_passed_over_and_kept() -> None:
    data = six()
    data[SIZE : 2 * SIZE] = bytes(SIZE)
    data[4 * SIZE + 70] ^= 1
    known = DamagedSegment(PATH, BASE, SIZE, 2 * SIZE, "known", BASE + 1, BASE + 2)
    search = searched(data, damages=(known,))
    search.find(4 * SIZE, "bad CRC")
    assert ranges(search) == [(1, 2, BASE + 1, BASE + 2), (4, 5, BASE + 4, BASE + 5)]
    assert search.damages[0] is known


def test_an_index_entry_that_leads_to_no_batch_is_ignored() -> None:
    data = six()
    data[4 * SIZE + 70] ^= 1
    index = OffsetIndex()
    for relative, position in [(1, SIZE), (3, 3 * SIZE + 7), (5, 5 * SIZE - 3)]:
        index.append(relative, position)
    search = searched(data, index=index)
    search.find(4 * SIZE, "bad CRC")
    assert ranges(search) == [(4, 5, BASE + 4, BASE + 5)]


@pytest.mark.parametrize("is_indexed", [True, False])
def test_the_index_tells_a_batch_from_bytes_in_a_record(is_indexed: bool) -> None:
    hidden = b"".join(batch_at(BASE + at) for at in (3, 50))
    data = log_of(BASE, BASE + 1) + batch_at(BASE + 2, hidden)
    border = len(data)
    data += log_of(BASE + 3, BASE + 4)
    data[2 * SIZE + 8] ^= 0x40  # the length of the batch with the hidden ones
    index = OffsetIndex()
    index.append(3, border)
    search = searched(data, index=index if is_indexed else None)
    damage = search.find(2 * SIZE, "no batch")
    assert (damage.end_position == border) is is_indexed


def test_an_intact_batch_is_uncleanable_and_no_damage() -> None:
    search = searched(six())
    damage = search.examine(2 * SIZE, "too large", BASE + 6)
    assert damage.is_served
    assert (damage.position, damage.end_position) == (2 * SIZE, 3 * SIZE)
    assert (damage.first_offset, damage.next_offset) == (BASE + 2, BASE + 3)
    assert search.damages == ()


@pytest.mark.parametrize(
    ("position", "end_offset"), [(2 * SIZE + 5, BASE + 6), (2 * SIZE, BASE + 2)]
)
def test_what_begins_inside_a_batch_or_ends_behind_the_segment_is_damage(
    position: int, end_offset: int
) -> None:
    search = searched(six())
    damage = search.examine(position, "no batch", end_offset)
    assert not damage.is_served
    assert search.damages == (damage,)


def test_borders_are_the_ends_of_batches_and_of_damaged_ranges() -> None:
    data = six()
    data[4 * SIZE : 5 * SIZE] = bytes(SIZE)
    search = searched(data)
    search.find(4 * SIZE, "no batch")
    borders = [at for at in range(len(data)) if search.is_border(at)]
    assert borders == [index * SIZE for index in range(6)]


def test_a_range_replaces_those_that_begin_in_it_and_ranges_stay_in_order() -> None:
    first, later, longer, around = (
        DamagedSegment(PATH, BASE, position, end, "")
        for position, end in [(10, 20), (40, 50), (10, 30), (5, 50)]
    )
    assert with_damage((later,), first) == (first, later)
    assert with_damage((first, later), longer) == (longer, later)
    assert with_damage((first, later), around) == (around,)


def test_a_checksum_covers_the_first_bytes_of_a_long_range() -> None:
    data = bytearray(CHECKSUM_BYTES_MAX + 10)
    whole = damage_checksum(opened(data), range(5, len(data)))
    data[-1] = data[0] = 1  # outside
    assert damage_checksum(opened(data), range(5, len(data))) == whole
    data[5] = 1
    assert damage_checksum(opened(data), range(5, len(data))) != whole


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ((100, 101, 102, 103), ""),
        ((100, 150, 102, 103), "offset 150 in front of 102"),
        ((100, 103, 101, 105), ""),  # 101 is wrong: 103 fits in front of 105
        ((100, 103, 101, 104), "offset 103 in front of 101"),
    ],
)
def test_a_batch_is_contradicted_by_an_intact_one_that_begins_before_its_end(
    offsets: tuple[int, ...], reason: str
) -> None:
    data = log_of(*offsets)
    header = read_header(data, SIZE)
    why = why_contradicted(opened(data), header, SIZE, next_offset=101, end=len(data))
    assert why == reason
