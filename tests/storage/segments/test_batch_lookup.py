"""Lookup of a batch by offset: gaps, sparse indexes, damage, and indexes that are wrong."""

from itertools import combinations
from typing import Any

import pytest

from storage.env import File
from storage.errors import CorruptBatchError, DamagedSegmentError
from storage.format.batch import BatchHeader, read_header
from storage.format.index import CorruptIndexError, IndexLimits
from storage.segments.batch_lookup import BatchLookup, undamaged_batches
from storage.segments.damage import DamagedSegment
from storage.segments.segment import Segment
from storage.segments.segment_indexes import SegmentIndexes
from tests.support.storage.log_files import BASE, PATH, SIZE, batch_at, log_of, opened
from tests.support.storage.memory_env import MemoryEnv

OFFSETS = (100, 101, 105, 106, 110)  # compaction left gaps


def indexed(*entries: tuple[int, int]) -> SegmentIndexes:
    """Indexes with entries (last offset, number of the batch)."""
    indexes = SegmentIndexes(_NoEnv(), "/d", BASE, IndexLimits(4096, 1 << 20))  # type: ignore[arg-type]
    indexes.start()
    for offset, number in entries:
        indexes.offsets.append(offset - BASE, number * SIZE)
    return indexes


class _NoEnv:
    """Lookups open no files."""


def damage_of(begin: int, end: int) -> DamagedSegment:
    return DamagedSegment(PATH, BASE, begin * SIZE, end * SIZE, "bad CRC")


def found(file: File, offset: int, indexes: SegmentIndexes, *damages: DamagedSegment) -> int:
    end = len(OFFSETS) * SIZE
    return BatchLookup(file, end, indexes=indexes, damages=damages).position_of(offset) // SIZE


@pytest.mark.parametrize("entries", [(), ((101, 1),), ((101, 1), (106, 3)), ((110, 4),)])
def test_an_offset_leads_to_its_batch_or_to_the_next_one(
    entries: tuple[tuple[int, int], ...],
) -> None:
    file, indexes = opened(log_of(*OFFSETS)), indexed(*entries)
    for offset in range(BASE, 115):
        expected = next((i for i, first in enumerate(OFFSETS) if first >= offset), len(OFFSETS))
        assert found(file, offset, indexes) == expected, offset


def test_an_offset_that_damage_may_have_had_is_refused() -> None:
    data = log_of(*OFFSETS)
    data[2 * SIZE : 3 * SIZE] = bytes(SIZE)
    for indexes in (indexed(), indexed((101, 1), (105, 2))):  # an entry in the damage
        for offset in (102, 103, 104, 105):
            with pytest.raises(DamagedSegmentError) as caught:
                found(opened(data), offset, indexes, damage_of(2, 3))
            assert caught.value.position == 2 * SIZE
        for offset, number in [(100, 0), (101, 1), (106, 3), (107, 4), (111, 5)]:
            assert found(opened(data), offset, indexes, damage_of(2, 3)) == number


def test_an_offset_behind_the_last_batch_is_refused_if_damage_ends_the_file() -> None:
    data = log_of(*OFFSETS)
    data[4 * SIZE :] = bytes(SIZE)
    with pytest.raises(DamagedSegmentError):
        found(opened(data), 107, indexed(), damage_of(4, 5))


def test_an_entry_with_an_offset_that_is_not_at_its_position_is_an_error() -> None:
    with pytest.raises(CorruptIndexError, match=r"/d/0+100\.index"):
        found(opened(log_of(*OFFSETS)), 104, indexed((102, 3)))


def test_an_entry_that_points_into_a_batch_is_an_error() -> None:
    indexes = indexed()
    indexes.offsets.append(1, SIZE + 3)
    with pytest.raises(CorruptBatchError):
        found(opened(log_of(*OFFSETS)), 104, indexes)


def test_batches_are_read_around_damage_from_each_of_them_on() -> None:
    data = log_of(*OFFSETS)
    for begin, end in combinations(range(len(OFFSETS) + 1), 2):
        broken = data[: begin * SIZE] + bytes((end - begin) * SIZE) + data[end * SIZE :]
        for start in range(len(OFFSETS) + 1):
            batches = undamaged_batches(
                opened(broken), start * SIZE, len(broken), (damage_of(begin, end),)
            )
            expected = [i for i in range(start, len(OFFSETS)) if not begin <= i < end]
            assert [batch.position // SIZE for batch in batches] == expected, (begin, end, start)


@pytest.mark.parametrize("interval_bytes", [0, 5 * SIZE, 1 << 30])
def test_a_search_for_ascending_offsets_reads_each_batch_about_once(
    interval_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start looked up both ends of millions of transactions, with dozens of batches for each."""
    env = MemoryEnv()
    env.mkdir("/d")
    segment = Segment.begin(env, "/d", BASE, IndexLimits(interval_bytes, 1 << 20))
    offsets = range(BASE, BASE + 400, 2)  # there is no batch at odd offsets
    for offset in offsets:
        segment.append(batch_at(offset), SIZE, offset, 1)
    wanted = [*range(BASE, BASE + 402), BASE + 7, BASE, BASE + 398]
    expected = [segment.lookup.batch_at(offset) for offset in wanted]
    reads = list[object]()

    def counted(*args: Any) -> BatchHeader:
        reads.append(args)
        return read_header(*args)

    monkeypatch.setattr("storage.segments.batch_scan.read_header", counted)
    search = segment.lookup.ascending()
    results = [search(offset) for offset in wanted]
    assert [each and each.header for each in results] == [each and each.header for each in expected]
    assert len(reads) < 6 * len(wanted)
