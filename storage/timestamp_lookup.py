"""Records by time, answered from the records themselves.

Rules: indexes and batch headers only say where it is worth looking; what is answered is the
timestamp and the offset of a record that is there. A header that lies about its timestamps, or a
segment that compaction emptied, costs time and does not end the search.
"""

from collections.abc import Callable, Iterator

from storage.batch import Record, decode_records
from storage.log_scan import ScannedBatch, read_batch
from storage.log_segments import SegmentList
from storage.model import TimestampOffset
from storage.segment import Segment


def first_at_or_after(
    segments: SegmentList, timestamp_ms: int, log_start_offset: int, limit_bytes: int
) -> TimestampOffset | None:
    """The first record, by offset, whose timestamp is at least `timestamp_ms`.

    `limit_bytes` bounds what a batch unpacks to. Raises CorruptBatchError, DecompressionLimitError
    and OSError.
    """
    for segment in segments.since(log_start_offset):
        if segment.max_timestamp_ms < timestamp_ms:
            continue
        known = segment.indexes.times.last_before(timestamp_ms)
        start = max(segment.base_offset + known + 1, log_start_offset)
        for batch in _batches_from(segment, start):
            if batch.header.max_timestamp < timestamp_ms:
                continue
            found = _pick(
                segment, batch, log_start_offset, limit_bytes, lambda one: one >= timestamp_ms
            )
            if found is not None:
                return found
    return None


def first_of_largest(
    segments: SegmentList, log_start_offset: int, limit_bytes: int
) -> TimestampOffset | None:
    """The first record, by offset, of those with the largest timestamp; None in an empty log.

    Raises as `first_at_or_after`.
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
        found = _largest_of(segment, log_start_offset, limit_bytes)
        if found is not None and (best is None or _is_better(found, best)):
            best = found
    return best


def _is_better(found: TimestampOffset, best: TimestampOffset) -> bool:
    return (-found.timestamp_ms, found.offset) < (-best.timestamp_ms, best.offset)


def _largest_of(
    segment: Segment, log_start_offset: int, limit_bytes: int
) -> TimestampOffset | None:
    """The first record with the segment's largest timestamp."""
    target_ms = segment.max_timestamp_ms
    best: TimestampOffset | None = None
    # What precedes the last smaller entry of the index cannot carry the maximum.
    known = segment.indexes.times.last_before(target_ms)
    start = max(segment.base_offset + known + 1, log_start_offset)
    if start <= segment.max_timestamp_offset:
        for batch in _batches_from(segment, start):
            if batch.header.max_timestamp >= target_ms:
                best = _largest_in(segment, batch, log_start_offset, limit_bytes)
                break
    if best is not None and best.timestamp_ms >= target_ms:
        return best
    # The header lied, or the record went below the log start: every batch has to be looked at.
    for batch in _batches_from(segment, max(segment.base_offset, log_start_offset)):
        if best is None or batch.header.max_timestamp > best.timestamp_ms:
            found = _largest_in(segment, batch, log_start_offset, limit_bytes)
            if found is not None and (best is None or _is_better(found, best)):
                best = found
    return best


def _largest_in(
    segment: Segment, batch: ScannedBatch, log_start_offset: int, limit_bytes: int
) -> TimestampOffset | None:
    records = _records(segment, batch, log_start_offset, limit_bytes)
    largest_ms = max((record.timestamp for record in records), default=-1)
    if largest_ms < 0:
        return None
    return _pick(segment, batch, log_start_offset, limit_bytes, lambda one: one == largest_ms)


def _batches_from(segment: Segment, offset: int) -> Iterator[ScannedBatch]:
    position = segment.locate(offset) if offset > segment.base_offset else 0
    for batch in segment.readable_batches(position):
        if not batch.header.is_control and batch.header.record_count:
            yield batch


def _pick(
    segment: Segment,
    batch: ScannedBatch,
    log_start_offset: int,
    limit_bytes: int,
    wanted: Callable[[int], bool],
) -> TimestampOffset | None:
    for record in _records(segment, batch, log_start_offset, limit_bytes):
        if wanted(record.timestamp):
            epoch = batch.header.partition_leader_epoch
            return TimestampOffset(record.timestamp, record.offset, epoch)
    return None


def _records(
    segment: Segment, batch: ScannedBatch, log_start_offset: int, limit_bytes: int
) -> list[Record]:
    whole = read_batch(segment.file, batch.position)
    records = decode_records(whole.buffer, whole.header, limit_bytes=limit_bytes)
    return [record for record in records if record.offset >= log_start_offset]
