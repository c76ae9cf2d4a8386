"""A job over what has expired reads the records of a segment only if a horizon in it has passed."""

import pytest

from cleaner.engine.header_scan import HeaderScanner, SegmentScan
from cleaner.job import NO_HORIZON
from storage.format import filenames
from storage.format.compression import ZSTD
from tests.support.cleaner.compacted_log import CompactedLog
from tests.support.storage.logs import FOLDER

BATCHES = 40


def filled(batches: int = BATCHES, *, tombstones: bool = False) -> CompactedLog:
    """A clean log of one segment; each batch holds a large value."""
    log = CompactedLog()
    for number in range(batches):
        log.put((f"key-{number}", f"{number}" * 9000))
    if tombstones:
        log.put(("gone", "value"))
        log.put(("gone", None), codec=ZSTD)
    log.roll()
    log.clean()
    return log


def scan(log: CompactedLog, now_ms: int) -> tuple[SegmentScan | None, int]:
    """What the scan of the first segment says, and the bytes that it charged."""
    charged: list[int] = []
    scanner = HeaderScanner(log.env, FOLDER, charged.append)
    segment_scan = scanner.scan(log.sources()[0], now_ms)
    assert sum(charged) == scanner.bytes_read
    return segment_scan, scanner.bytes_read


def horizon_of(log: CompactedLog) -> int:
    """The one delete horizon in the log."""
    headers = [header for header, _ in log.batches()]
    (horizon_ms,) = {header.base_timestamp for header in headers if header.has_delete_horizon}
    return horizon_ms


def overwrite(log: CompactedLog, position: int, data: bytes) -> None:
    path = f"{FOLDER}/{filenames.file_name(log.sources()[0].base_offset, filenames.LOG)}"
    log.log.flush()
    file = log.env.open(path, write=True)
    file.pwrite(data, position)
    file.close()


def test_a_segment_without_tombstones_is_not_read_to_find_that_out() -> None:
    log = filled()
    size = log.sources()[0].size_bytes
    report = log.clean_expired()
    assert log.groups_replaced == 0
    assert [horizon.horizon_ms for horizon in report.horizons] == [NO_HORIZON]
    assert (report.records_before, report.records_after) == (BATCHES, BATCHES)
    assert report.bytes_before == report.bytes_after == size
    assert report.bytes_read <= BATCHES * 4096 < size // 2


def test_a_horizon_that_lies_ahead_is_learned_from_the_headers() -> None:
    log = filled(tombstones=True)
    (horizon_ms,) = {
        header.base_timestamp for header, _ in log.batches() if header.has_delete_horizon
    }
    report = log.clean_expired()
    assert log.groups_replaced == 0
    assert [horizon.horizon_ms for horizon in report.horizons] == [horizon_ms]
    assert report.bytes_read < log.sources()[0].size_bytes // 2


def test_a_tombstone_whose_horizon_has_passed_still_goes() -> None:
    log = filled(tombstones=True)
    log.pass_retention()
    report = log.clean_expired()
    assert report.tombstones_removed == 1
    assert [horizon.horizon_ms for horizon in report.horizons] == [NO_HORIZON]


def test_a_horizon_counts_as_passed_at_its_own_millisecond() -> None:
    log = filled(tombstones=True)
    (horizon_ms,) = {
        header.base_timestamp for header, _ in log.batches() if header.has_delete_horizon
    }
    ahead, _ = scan(log, horizon_ms - 1)
    assert ahead is not None
    assert ahead.horizon_ms == horizon_ms
    assert scan(log, horizon_ms)[0] is None


def test_small_batches_are_read_in_few_large_pieces() -> None:
    log = CompactedLog()
    for number in range(4000):
        log.put((f"{number}", "v"))
    log.roll()
    log.clean()
    size = log.sources()[0].size_bytes
    reads: list[int] = []
    segment_scan = HeaderScanner(log.env, FOLDER, reads.append).scan(log.sources()[0], log.now_ms)
    assert segment_scan == SegmentScan(NO_HORIZON, 4000)
    assert len(reads) < 10
    assert sum(reads) <= size + len(reads) * 61  # at most a header is read again


@pytest.mark.parametrize(
    ("position", "data"),
    [
        (8, b"\x00\x00\x00\x00"),  # the length of a batch
        (8, b"\x7f\xff\xff\xff"),
        (8, b"\xff\xff\xff\xff"),
        (16, b"\x01"),  # the magic
        (0, b"\x7f" + b"\xff" * 7),  # the base offset
        (23, b"\xff\xff\xff\xff"),  # the last offset delta
        (57, b"\x00\x00\x00\x09"),  # the number of records
    ],
)
def test_headers_that_cannot_be_right_leave_the_decision_to_the_whole_read(
    position: int, data: bytes
) -> None:
    log = filled(3)
    overwrite(log, position, data)
    assert scan(log, 0)[0] is None
    report = log.clean_expired()
    assert len(report.damaged) == 1
    assert log.groups_replaced == 0


def test_a_chain_that_does_not_end_at_the_end_of_the_file_is_not_believed() -> None:
    log = filled(3)
    source = log.sources()[0]
    log.log.flush()
    path = f"{FOLDER}/{filenames.file_name(source.base_offset, filenames.LOG)}"
    file = log.env.open(path, write=True)
    file.truncate(source.size_bytes - 1)
    file.close()
    assert scan(log, 0)[0] is None
