"""Find records by timestamp.

Indexes and batch headers only narrow the search; the result is the timestamp and offset of an
existing record. A header with wrong timestamps, or a segment that compaction emptied, makes the
search longer, but not wrong.

A search is a generator: it reads indexes and headers, and yields each batch that has to be decoded
and each index that has to be loaded. Both take long (some kilobytes may decompress to millions of
records) and do not change the log, so they may run in a thread.
"""

from collections.abc import Generator, Iterator
from typing import NamedTuple

from storage.env import File
from storage.errors import DecompressionLimitError
from storage.format.batch import Record, iterate_records
from storage.model import TimestampOffset
from storage.segments.batch_scan import ScannedBatch, read_batch
from storage.segments.index_load import IndexLoad
from storage.segments.segment import IndexNotReadyError, Segment
from storage.segments.segment_list import SegmentList


class TimestampScan(NamedTuple):
    """A batch to decode: for its first record of at least a timestamp, or for its largest one."""

    file: File
    position: int
    at_least_ms: int | None  # None: find the largest
    log_start_offset: int
    limit_bytes: int  # the maximum decompressed size

    def run(self) -> TimestampOffset | None:
        """Read and decode the batch; may run in a thread.

        For a batch above the limit, return its first offset and largest timestamp. Raises
        CorruptBatchError and OSError.
        """
        best: Record | None = None
        whole = read_batch(self.file, self.position)
        header = whole.header
        try:
            for record in iterate_records(whole.buffer, header, limit_bytes=self.limit_bytes):
                if record.offset < self.log_start_offset:
                    continue
                if self.at_least_ms is not None:
                    if record.timestamp >= self.at_least_ms:
                        best = record
                        break
                elif record.timestamp > (-1 if best is None else best.timestamp):
                    best = record
        except DecompressionLimitError:
            # Consumers can read the batch. Its first offset may be too early, but skips no record.
            first_offset = max(header.base_offset, self.log_start_offset)
            best = Record(first_offset, header.max_timestamp, None, None)
        if best is None:
            return None
        return TimestampOffset(best.timestamp, best.offset, header.partition_leader_epoch)


Search = Generator[TimestampScan | IndexLoad, TimestampOffset | None, TimestampOffset | None]


def first_at_or_after(
    segments: SegmentList, timestamp_ms: int, log_start_offset: int, limit_bytes: int
) -> Search:
    """Yield the first record, by offset, whose timestamp is at least `timestamp_ms`.

    `limit_bytes` is the maximum decompressed size of a batch. Raises OSError.
    """
    for segment in segments.since(log_start_offset):
        if segment.max_timestamp_ms < timestamp_ms:
            continue
        yield from _loaded(segment)
        existing = segment.indexes.times.last_before(timestamp_ms)
        start = max(segment.base_offset + existing + 1, log_start_offset)
        yield from _checked(segment, start)
        for batch in _batches_from(segment, start):
            if batch.header.max_timestamp < timestamp_ms:
                continue
            offset_found = yield TimestampScan(
                segment.file, batch.position, timestamp_ms, log_start_offset, limit_bytes
            )
            if offset_found is not None:
                return offset_found
    return None


def first_of_largest(segments: SegmentList, log_start_offset: int, limit_bytes: int) -> Search:
    """Yield the first record, by offset, of those with the largest timestamp; None in an empty log.

    Raises OSError.
    """
    best: TimestampOffset | None = None
    candidates = sorted(
        segments.since(log_start_offset),
        key=lambda segment: (-segment.max_timestamp_ms, segment.base_offset),
    )
    for segment in candidates:
        if segment.max_timestamp_ms < 0:
            break
        if best is not None and segment.max_timestamp_ms < best.timestamp_ms:
            break
        offset_found = yield from _largest_of(segment, log_start_offset, limit_bytes)
        if offset_found is not None and (best is None or _is_better(offset_found, best)):
            best = offset_found
    return best


def _is_better(offset_found: TimestampOffset, best: TimestampOffset) -> bool:
    return (-offset_found.timestamp_ms, offset_found.offset) < (-best.timestamp_ms, best.offset)


def _loaded(segment: Segment) -> Generator[IndexLoad, object, None]:
    """Load the indexes of the segment."""
    if not segment.has_indexes:
        load = IndexLoad(segment)
        yield load
        load.finish()


def _checked(segment: Segment, offset: int) -> Generator[IndexLoad, object, None]:
    """Repair an index that does not lead to the offset."""
    try:
        segment.locate_readable(offset, in_place=False)
    except IndexNotReadyError as error:
        load = IndexLoad(segment, error.repair)
        yield load
        load.finish()


def _largest_of(segment: Segment, log_start_offset: int, limit_bytes: int) -> Search:
    """Yield the first record with the segment's largest timestamp."""
    target_ms = segment.max_timestamp_ms
    best: TimestampOffset | None = None
    # Records before the last smaller index entry cannot have the maximum.
    yield from _loaded(segment)
    existing = segment.indexes.times.last_before(target_ms)
    start = max(segment.base_offset + existing + 1, log_start_offset)
    if start <= segment.max_timestamp_offset:
        yield from _checked(segment, start)
        for batch in _batches_from(segment, start):
            if batch.header.max_timestamp >= target_ms:
                best = yield TimestampScan(
                    segment.file, batch.position, None, log_start_offset, limit_bytes
                )
                break
    if best is not None and best.timestamp_ms >= target_ms:
        return best
    # The header is wrong, or the record is below the log start: decode every batch.
    for batch in _batches_from(segment, max(segment.base_offset, log_start_offset)):
        if best is None or batch.header.max_timestamp > best.timestamp_ms:
            offset_found = yield TimestampScan(
                segment.file, batch.position, None, log_start_offset, limit_bytes
            )
            if offset_found is not None and (best is None or _is_better(offset_found, best)):
                best = offset_found
    return best


def _batches_from(segment: Segment, offset: int) -> Iterator[ScannedBatch]:
    position = segment.locate_readable(offset) if offset > segment.base_offset else 0
    for batch in segment.readable_batches(position):
        if not batch.header.is_control and batch.header.record_count:
            yield batch
