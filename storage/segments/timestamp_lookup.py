"""Find records by timestamp.

Indexes and batch headers only narrow the search; the result is the timestamp and offset of an
existing record. A header with wrong timestamps, or a segment that compaction emptied, makes the
search longer, but not wrong.

A search is a generator: it yields each batch that has to be decoded, each long run of headers, and
each index that has to be loaded. All of these take long and do not change the log, so they may run
in a thread: some kilobytes may decompress to millions of records, and the time index leads to the
first of millions of headers if an early record has a later timestamp than all of them. A compiled
kernel, which does not occupy the interpreter, walks over the records.
"""

from collections.abc import Generator
from itertools import islice
from typing import Final, NamedTuple

from storage.env import File
from storage.errors import CorruptBatchError, DamagedSegmentError, DecompressionLimitError
from storage.format.batch import unpack_records
from storage.format.index import CorruptIndexError
from storage.model import TimestampOffset
from storage.segments.batch_scan import HEADER_BLOCK_BYTES, ScannedBatch, read_batch
from storage.segments.index_load import IndexLoad
from storage.segments.offset_lookup import locate_readable
from storage.segments.segment import IndexNotReadyError, Segment
from storage.segments.segment_list import SegmentList

# Headers that a search reads without a thread. The index usually leads it this close to its result:
# there are at most 68 headers between two entries.
HEADERS_AT_ONCE: Final = 128
HEADERS_PER_SCAN: Final = 50_000  # a fifth of a second, after which others have their turn
SMALLEST_TIMESTAMP: Final = -(1 << 63)


class TimestampScan(NamedTuple):
    """A batch to decode: for its first record at or after a timestamp, or for its largest one."""

    file: File
    position: int
    at_least_ms: int | None  # None: find the largest
    log_start_offset: int
    limit_bytes: int  # the maximum decompressed size

    def read(self) -> ScannedBatch:
        """Read the batch; may run in a thread. Raises CorruptBatchError and OSError."""
        return read_batch(self.file, self.position)

    def find(self, batch: ScannedBatch) -> TimestampOffset | None:
        """Find the record in the batch; may run in a thread.

        For a batch above the limit, return its first offset and largest timestamp. Raises
        CorruptBatchError and UnsupportedCompressionError.
        """
        import numpy as np  # not loaded by commands that only import this module

        from storage.kernels.records import RecordCode, TimestampTarget, find_timestamp_kernel

        header = batch.header
        epoch = header.partition_leader_epoch
        try:
            data = unpack_records(batch.buffer, header, batch.at, self.limit_bytes)
        except DecompressionLimitError:
            # Consumers can read the batch. Its first offset may be too early, but skips no record.
            first_offset = max(header.base_offset, self.log_start_offset)
            return TimestampOffset(header.max_timestamp, first_offset, epoch)
        is_append_time = header.is_log_append_time
        target = TimestampTarget(
            header.max_timestamp if is_append_time else header.base_timestamp,
            has_one_timestamp=is_append_time,
            first_delta=self.log_start_offset - header.base_offset,
            last_delta=header.last_offset_delta,
            at_least_ms=0 if self.at_least_ms is None else self.at_least_ms,
            is_largest=self.at_least_ms is None,
        )
        buf = np.frombuffer(data, dtype=np.uint8)
        code, delta, timestamp_ms = find_timestamp_kernel(buf, header.record_count, target)
        if code != RecordCode.VALID:
            raise CorruptBatchError("a record is malformed", batch.position, self.file.path)
        if delta < 0:
            return None
        return TimestampOffset(timestamp_ms, header.base_offset + delta, epoch)


class HeaderScan:
    """Read headers from a position on, to the first batch that may have a record at a timestamp.

    The maximum timestamp in the header decides.
    """

    def __init__(self, segment: Segment, position: int, at_least_ms: int) -> None:
        self.position = position  # after `run`: the end of what it has read
        self.match: ScannedBatch | None = None  # after `run`: the batch, if it is among them
        self._at_least_ms = at_least_ms
        self._task = IndexLoad(segment, self._read)

    def run(self) -> None:
        """Read at most HEADERS_PER_SCAN, and skip damage; may run in a thread. Raises OSError."""
        self._task.run()

    def finish(self) -> None:
        """Note the damage in the segment."""
        self._task.finish()

    def _read(self, clone: Segment) -> None:
        batches = clone.readable_batches(self.position)
        self.position = clone.size_bytes  # unless there are more headers
        for number, batch in enumerate(batches, 1):
            if _may_match(batch, self._at_least_ms):
                self.match = batch
                return
            if number == HEADERS_PER_SCAN:
                self.position = batch.end_position
                return


def _may_match(batch: ScannedBatch, at_least_ms: int) -> bool:
    header = batch.header
    has_records = not header.is_control and header.record_count > 0
    return has_records and header.max_timestamp >= at_least_ms


Step = TimestampScan | HeaderScan | IndexLoad
Search = Generator[Step, TimestampOffset | None, TimestampOffset | None]


def first_at_or_after(
    segments: SegmentList, timestamp_ms: int, log_start_offset: int, limit_bytes: int
) -> Search:
    """Search for the first record, by offset, whose timestamp is at least `timestamp_ms`.

    Yields the steps to run, and returns the record. `limit_bytes` is the maximum decompressed size
    of a batch. Raises OSError.
    """
    for segment in segments.since(log_start_offset):
        if segment.max_timestamp_ms < timestamp_ms:
            continue
        start = max((yield from _end_of_earlier(segment, timestamp_ms)), log_start_offset)
        yield from _checked(segment, start)
        position = _position_of(segment, start)
        while batch := (yield from _next_batch(segment, position, timestamp_ms)):
            result = yield TimestampScan(
                segment.file, batch.position, timestamp_ms, log_start_offset, limit_bytes
            )
            if result is not None:
                return result
            position = batch.end_position
    return None


def first_of_largest(segments: SegmentList, log_start_offset: int, limit_bytes: int) -> Search:
    """Search for the first record, by offset, of those with the largest timestamp.

    Yields the steps to run, and returns the record; None in an empty log. Raises OSError.
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
        result = yield from _largest_of(segment, log_start_offset, limit_bytes)
        if result is not None and (best is None or _is_better(result, best)):
            best = result
    return best


def _is_better(result: TimestampOffset, best: TimestampOffset) -> bool:
    return (-result.timestamp_ms, result.offset) < (-best.timestamp_ms, best.offset)


def _loaded(segment: Segment) -> Generator[IndexLoad, object, None]:
    """Load the indexes of the segment."""
    if not segment.has_indexes:
        load = IndexLoad(segment)
        yield load
        load.finish()


def _end_of_earlier(segment: Segment, timestamp_ms: int) -> Generator[IndexLoad, object, int]:
    """Return an offset below which no record of the segment has the timestamp, or a later one.

    An index whose entry is not that of its batch is rebuilt.
    """
    yield from _loaded(segment)
    entry_ms, relative_offset = segment.indexes.times.last_before(timestamp_ms)
    if relative_offset >= 0:
        offset = segment.base_offset + relative_offset
        yield from _checked(segment, offset)
        if not _has_batch(segment, offset, entry_ms):
            load = IndexLoad(segment, Segment.rebuild)
            yield load
            load.finish()
            _, relative_offset = segment.indexes.times.last_before(timestamp_ms)
    return segment.base_offset + relative_offset + 1


def _has_batch(segment: Segment, offset: int, timestamp_ms: int) -> bool:
    """Return whether the batch of an offset has this largest timestamp; True if damage hides it."""
    try:
        batch = segment.lookup.batch_at(offset)
    except (DamagedSegmentError, CorruptBatchError, CorruptIndexError):
        return True
    return batch is not None and batch.header.max_timestamp == timestamp_ms


def _checked(segment: Segment, offset: int) -> Generator[IndexLoad, object, None]:
    """Repair an index that does not lead to the offset."""
    try:
        locate_readable(segment, offset, in_place=False)
    except IndexNotReadyError as error:
        load = IndexLoad(segment, error.repair)
        yield load
        load.finish()


def _largest_of(segment: Segment, log_start_offset: int, limit_bytes: int) -> Search:
    """Search for the first record with the segment's largest timestamp."""
    target_ms = segment.max_timestamp_ms
    best: TimestampOffset | None = None
    # Records before the last smaller index entry cannot have the maximum.
    start = max((yield from _end_of_earlier(segment, target_ms)), log_start_offset)
    if start <= segment.max_timestamp_offset:
        yield from _checked(segment, start)
        batch = yield from _next_batch(segment, _position_of(segment, start), target_ms)
        if batch is not None:
            best = yield TimestampScan(
                segment.file, batch.position, None, log_start_offset, limit_bytes
            )
    if best is not None and best.timestamp_ms >= target_ms:
        return best
    # The header is wrong, or the record is below the log start: decode every batch.
    position = _position_of(segment, max(segment.base_offset, log_start_offset))
    while batch := (yield from _next_batch(segment, position, _above(best))):
        result = yield TimestampScan(
            segment.file, batch.position, None, log_start_offset, limit_bytes
        )
        if result is not None and (best is None or _is_better(result, best)):
            best = result
        position = batch.end_position
    return best


def _above(best: TimestampOffset | None) -> int:
    """Return the smallest timestamp above the best one; all batches are above None."""
    return SMALLEST_TIMESTAMP if best is None else best.timestamp_ms + 1


def _position_of(segment: Segment, offset: int) -> int:
    return locate_readable(segment, offset) if offset > segment.base_offset else 0


def _next_batch(
    segment: Segment, position: int, at_least_ms: int
) -> Generator[Step, object, ScannedBatch | None]:
    """Search for the next batch that may have a record at or after a timestamp."""
    at_once = HEADERS_AT_ONCE if segment.is_cached(position, HEADER_BLOCK_BYTES) else 0
    try:
        for batch in islice(segment.batches(position), at_once):
            if _may_match(batch, at_least_ms):
                return batch
            position = batch.end_position
    except CorruptBatchError:
        pass  # a thread searches for the end of the damage
    while position < segment.size_bytes:
        headers = HeaderScan(segment, position, at_least_ms)
        yield headers
        headers.finish()
        if headers.match is not None:
            return headers.match
        position = headers.position
    return None
