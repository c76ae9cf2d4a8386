"""Sparse indexes: what they find, what they hold in bytes, what of a file is not believed."""

import pytest

from storage.format.index import CorruptIndexError, OffsetIndex, TimeIndex

LOG_BYTES = 10_000


def offsets_of(*entries: tuple[int, int]) -> OffsetIndex:
    index = OffsetIndex()
    for relative, position in entries:
        index.append(relative, position)
    return index


def times_of(*entries: tuple[int, int]) -> TimeIndex:
    index = TimeIndex()
    for timestamp, relative in entries:
        index.maybe_append(timestamp, relative)
    return index


def test_an_offset_entry_is_two_big_endian_ints() -> None:
    raw = OffsetIndex().append(258, 4096)
    assert raw == bytes.fromhex("00000102 00001000")


def test_a_time_entry_is_a_long_and_an_int() -> None:
    raw = TimeIndex().maybe_append(1_700_000_000_000, 258)
    assert raw == bytes.fromhex("0000018bcfe56800 00000102")


def test_offset_entries_survive_the_file() -> None:
    index = offsets_of((3, 100), (7, 250), (2**31 - 1, 9_999))
    again = OffsetIndex.from_bytes(index.to_bytes(), "x", LOG_BYTES)
    assert list(again.offsets) == [3, 7, 2**31 - 1]
    assert list(again.positions) == [100, 250, 9_999]
    assert again.size_bytes == 24


def test_time_entries_survive_the_file() -> None:
    index = times_of((10, 1), (2**62, 5))
    again = TimeIndex.from_bytes(index.to_bytes(), "x")
    assert list(again.timestamps) == [10, 2**62]
    assert list(again.offsets) == [1, 5]


@pytest.mark.parametrize(
    ("relative", "value"),
    [(0, (-1, 0)), (2, (-1, 0)), (3, (3, 100)), (6, (3, 100)), (7, (7, 250)), (99, (7, 250))],
)
def test_lookup_gives_the_last_entry_at_or_below(relative: int, value: tuple[int, int]) -> None:
    assert offsets_of((3, 100), (7, 250)).lookup(relative) == value


@pytest.mark.parametrize(("limit", "value"), [(0, 0), (99, 0), (100, 100), (249, 100), (500, 250)])
def test_a_position_is_found_by_a_limit(limit: int, value: int) -> None:
    assert offsets_of((3, 100), (7, 250)).last_position_within(limit) == value


def test_truncation_forgets_batches_that_begin_at_the_position() -> None:
    index = offsets_of((3, 100), (7, 250))
    index.truncate(250)
    assert index.last == (3, 100)
    index.truncate(0)
    assert index.last == (-1, 0)


def test_a_timestamp_that_is_no_new_maximum_adds_no_entry() -> None:
    index = times_of((10, 1))
    assert index.maybe_append(10, 2) == b""
    assert index.maybe_append(9, 3) == b""
    assert index.last == (10, 1)


def test_no_timestamp_adds_no_entry() -> None:
    assert TimeIndex().maybe_append(-1, 0) == b""


@pytest.mark.parametrize(
    ("timestamp", "existing"),
    [(5, (-1, -1)), (10, (-1, -1)), (11, (10, 1)), (20, (10, 1)), (21, (20, 4))],
)
def test_all_below_a_timestamp_lies_up_to_the_entry_before_it(
    timestamp: int, existing: tuple[int, int]
) -> None:
    assert times_of((10, 1), (20, 4)).last_before(timestamp) == existing


@pytest.mark.parametrize(
    "raw",
    [
        offsets_of((3, 100), (7, 250)).to_bytes()[:-1],
        offsets_of((3, 100)).to_bytes() * 2,
        offsets_of((3, 100), (7, 250)).to_bytes() + bytes(64),
        bytes(16),
        offsets_of((7, 250)).to_bytes() + offsets_of((3, 300)).to_bytes(),
        offsets_of((3, 100)).to_bytes() + offsets_of((7, 100)).to_bytes(),
        offsets_of((3, LOG_BYTES)).to_bytes(),
        bytes.fromhex("ffffffff 00000010"),
        bytes.fromhex("00000001 ffffffff"),
    ],
    ids=["torn", "twice", "preallocated", "zeros", "offset goes back", "position stays",
         "outside the log", "negative offset", "negative position"],
)  # fmt: skip
def test_an_offset_index_that_cannot_be_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptIndexError):
        OffsetIndex.from_bytes(raw, "x", LOG_BYTES)


@pytest.mark.parametrize(
    "raw",
    [
        times_of((10, 1)).to_bytes()[:-1],
        times_of((10, 1)).to_bytes() + bytes(24),
        times_of((10, 1)).to_bytes() + times_of((9, 2)).to_bytes(),
        times_of((10, 3)).to_bytes() + times_of((11, 3)).to_bytes(),
        bytes.fromhex("ffffffffffffffff 00000001"),
    ],
    ids=["torn", "preallocated", "time goes back", "offset stays", "no timestamp"],
)
def test_a_time_index_that_cannot_be_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptIndexError):
        TimeIndex.from_bytes(raw, "x")


def test_empty_files_are_empty_indexes() -> None:
    assert len(OffsetIndex.from_bytes(b"", "x", 0)) == 0
    assert len(TimeIndex.from_bytes(b"", "x")) == 0
