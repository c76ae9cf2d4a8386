"""The last entries of a segment's indexes beside its log: which contradictions a start notices."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from storage.env import File
from storage.errors import CorruptBatchError
from storage.format.batch import BatchHeader, Record, build_batch
from storage.format.index import CorruptIndexError, IndexLimits
from storage.segments import sanity_check
from storage.segments.batch_scan import ScannedBatch
from storage.segments.sanity_check import SanityCheck
from storage.segments.segment_indexes import SegmentIndexes
from tests.support.storage.log_files import BASE, opened
from tests.support.storage.memory_env import MemoryEnv

# Offset and timestamp of each batch. The largest timestamp is not the last one.
BATCHES = ((100, 10), (101, 20), (105, 50), (106, 30))


def batch(offset: int, timestamp_ms: int) -> bytearray:
    data = build_batch([Record(0, timestamp_ms, b"key", b"value")])
    data[:8] = offset.to_bytes(8, "big")
    return data


SIZE = len(batch(0, 1))


def log_of(batches: Sequence[tuple[int, int]] = BATCHES) -> bytearray:
    return bytearray(b"".join(batch(*each) for each in batches))


def indexed(
    *offsets: tuple[int, int], times: Sequence[tuple[int, int]] = ((50, 105),)
) -> SegmentIndexes:
    """Indexes with entries (last offset, number of the batch) and (timestamp ms, offset)."""
    env = MemoryEnv()
    env.mkdir("/d")
    indexes = SegmentIndexes(env, "/d", BASE, IndexLimits(4096, 1 << 20))
    indexes.start()
    for offset, number in offsets:
        indexes.offsets.append(offset - BASE, number * SIZE)
    for timestamp_ms, offset in times:
        indexes.times.maybe_append(timestamp_ms, offset - BASE)
    indexes.write()
    return indexes


def checked(file: File, indexes: SegmentIndexes) -> tuple[SanityCheck, list[BatchHeader]]:
    check = SanityCheck(file, file.size(), indexes)
    headers = list(check.tail())
    check.check_entries()
    return check, headers


@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize(
    ("entries", "first"),
    [((), 0), (((101, 1),), 1), (((101, 1), (105, 2)), 2), (((106, 3),), 3)],
)
def test_only_the_headers_behind_the_last_offset_entry_are_read(
    entries: Sequence[tuple[int, int]], first: int, is_loaded: bool
) -> None:
    indexes = indexed(*entries)
    if not is_loaded:
        indexes.drop()
    check, headers = checked(opened(log_of()), indexes)
    assert [header.base_offset for header in headers] == [each for each, _ in BATCHES[first:]]
    assert check.next_offset == 107
    assert check.tail_bytes == (len(BATCHES) - first) * SIZE
    assert (check.timestamp_ms, check.timestamp_offset) == (50, 105)


def test_an_empty_log_agrees_with_empty_indexes() -> None:
    check, headers = checked(opened(b""), indexed(times=()))
    assert (check.next_offset, check.timestamp_ms, headers) == (BASE, -1, [])


@pytest.mark.parametrize(
    ("entries", "times"),
    [(((107, 3),), ((50, 105),)), ((), ((50, 107),)), (((101, 1),), ((50, 107),))],
)
def test_an_entry_of_an_offset_that_the_log_does_not_have_is_an_error(
    entries: Sequence[tuple[int, int]], times: Sequence[tuple[int, int]]
) -> None:
    with pytest.raises(CorruptIndexError, match=r"\.index: an entry is after .* offset, 106"):
        checked(opened(log_of()), indexed(*entries, times=times))


@pytest.mark.parametrize("times", [(), ((10, 100),), ((20, 101),)])
def test_a_time_index_without_the_largest_timestamp_of_the_tail_is_an_error(
    times: Sequence[tuple[int, int]],
) -> None:
    with pytest.raises(CorruptIndexError, match=r"\.timeindex: the last entry is missing"):
        checked(opened(log_of()), indexed((101, 1), times=times))


LATE = ((100, 10), (101, 50), (105, 5), (106, 7))  # all after the second one are late


@pytest.mark.parametrize("times", [(), ((10, 100),)])
def test_a_time_index_that_lost_an_entry_before_late_records_is_an_error(
    times: Sequence[tuple[int, int]],
) -> None:
    """Lookups would pass over the segment, and retention delete it too early."""
    checked(opened(log_of(LATE)), indexed((106, 3), times=((10, 100), (50, 101))))
    with pytest.raises(CorruptIndexError, match=r"\.timeindex: the last entry is missing"):
        checked(opened(log_of(LATE)), indexed((106, 3), times=times))


@pytest.mark.parametrize("entries", [(), ((101, 1),), ((101, 1), (106, 3))])
@pytest.mark.parametrize("entry", [(60, 105), (50, 104), (51, 100)])
def test_a_time_entry_has_the_timestamp_of_its_batch_wherever_the_batch_is(
    entries: Sequence[tuple[int, int]], entry: tuple[int, int]
) -> None:
    """Retention deletes by this timestamp."""
    indexes = indexed(*entries, times=(entry,))
    indexes.drop()
    if entry == (50, 104):  # the next batch counts, if the one of the offset was removed
        checked(opened(log_of()), indexes)
        return
    with pytest.raises(CorruptIndexError, match=r"\.timeindex: the batch of offset 10"):
        checked(opened(log_of()), indexes)


def test_damage_between_an_offset_entry_and_the_batch_of_the_time_entry_is_no_error() -> None:
    """A read finds the damage; the index is not to blame."""
    data = log_of()
    data[SIZE : 2 * SIZE] = bytes(SIZE)
    checked(opened(data), indexed((106, 3), times=((60, 105),)))


def test_the_batch_of_the_time_entry_is_searched_within_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    indexes = indexed((106, 3), times=((60, 105),))
    monkeypatch.setattr(sanity_check, "NAMED_BATCH_BYTES_MAX", 2 * SIZE)
    checked(opened(log_of()), indexes)
    monkeypatch.setattr(sanity_check, "NAMED_BATCH_BYTES_MAX", 3 * SIZE)
    with pytest.raises(CorruptIndexError):
        checked(opened(log_of()), indexes)


def test_only_some_headers_after_the_batch_of_the_time_entry_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each start reads them, of each segment."""
    monkeypatch.setattr(sanity_check, "AFTER_NAMED_BYTES", 3 * SIZE)
    count = 1_000
    log = opened(log_of([(BASE, 50), *((BASE + n, 30) for n in range(1, count))]))
    read: list[int] = []
    scan = sanity_check.scan

    def counted(*args: Any, **kwargs: Any) -> Iterator[ScannedBatch]:
        for each in scan(*args, **kwargs):
            read.append(each.position)
            yield each

    monkeypatch.setattr(sanity_check, "scan", counted)
    last = (BASE + count - 1, count - 1)
    checked(log, indexed((BASE, 0), last, times=((50, BASE),)))
    assert len(read) < 10


def test_an_offset_entry_that_points_to_another_batch_is_an_error() -> None:
    with pytest.raises(CorruptIndexError, match="entry 1 points to offset 105"):
        checked(opened(log_of()), indexed((101, 2)))


@pytest.mark.parametrize(
    "log",
    [
        pytest.param(log_of()[:-1], id="a torn batch"),
        pytest.param(log_of() + bytes(100), id="zeros"),
        pytest.param(log_of([*BATCHES, (105, 1)]), id="offsets go back"),
    ],
)
@pytest.mark.parametrize("entries", [(), ((105, 2),)])
def test_a_log_that_does_not_end_with_a_whole_batch_is_an_error(log: bytes, entries: Any) -> None:
    with pytest.raises(CorruptBatchError):
        checked(opened(log), indexed(*entries))


def test_headers_are_handed_out_up_to_the_first_that_cannot_be_used() -> None:
    file = opened(log_of([*BATCHES, (105, 1)]))
    check = SanityCheck(file, file.size(), indexed())
    headers = check.tail()
    assert [next(headers).base_offset for _ in BATCHES] == [offset for offset, _ in BATCHES]
    with pytest.raises(CorruptBatchError, match="offsets go back"):
        next(headers)
