"""Find the range of a log file that answers a fetch: whole batches below the end offset.

A range starts with the batch that contains the offset, or with the next batch if there is none. It
stays in one segment and ends in front of damage; a range that would begin in damage is an error.
Nothing is copied: the caller sends the range from the file.
"""

from functools import partial
from typing import Final, NamedTuple

from storage.env import File
from storage.errors import CorruptBatchError, DamagedSegmentError
from storage.format.batch import HEADER_BYTES, read_header
from storage.segments.batch_scan import scan
from storage.segments.offset_lookup import add_hint, locate, locate_end
from storage.segments.segment import IndexNotReadyError, Segment
from storage.segments.segment_list import SegmentList

# Maximum bytes of headers that a search for a batch boundary reads without an index.
BOUNDARY_SCAN_BYTES: Final = 64 << 10


class FetchSlice(NamedTuple):
    """Bytes `[position, position + length)` of a file; none if `length` is 0.

    The file stays open as long as the slice exists, even if the file is renamed or deleted.
    """

    file: File | None
    position: int
    length: int

    def read(self) -> bytes:
        """Return the bytes; this may wait for the disk."""
        if self.file is None or self.length == 0:
            return b""
        return self.file.pread(self.length, self.position)


NOTHING = FetchSlice(None, 0, 0)


def find_slice(
    segments: SegmentList,
    offset: int,
    max_bytes: int,
    end_offset: int,
    log_end_offset: int,
    *,
    at_least_one: bool,
    in_place: bool = True,
) -> FetchSlice:
    """Return the range of batches from `offset` on, up to `end_offset` (exclusive) and `max_bytes`.

    With `at_least_one`, the first batch is returned even if it exceeds `max_bytes`. Raises
    DamagedSegmentError if the offset is in a damaged range, OSError; without `in_place`,
    IndexNotReadyError if an index has to be loaded or rebuilt first.
    """
    bases = segments.bases
    index = segments.index_of(offset)
    last = len(bases) - 1
    while True:
        segment = segments[index]
        position = locate(segment, offset, in_place=in_place)
        is_whole = end_offset >= log_end_offset if index == last else end_offset >= bases[index + 1]
        end = segment.size_bytes
        if not is_whole:
            end = locate_end(segment, end_offset, in_place=in_place)
        if position < end:
            break
        index += 1
        if index > last or bases[index] >= end_offset:
            return NOTHING
    if segment.damages:
        end = _clear_end(segment, position, end)
    if end - position <= max_bytes:
        if index == last and is_whole:
            # A consumer that catches up reads from here next.
            add_hint(segment, log_end_offset, end)
    else:
        limit = position + max_bytes
        end = _boundary(segment, position, limit, end, at_least_one=at_least_one, in_place=in_place)
    return FetchSlice(segment.file, position, end - position)


def _clear_end(segment: Segment, position: int, end: int) -> int:
    """Return the end of the undamaged bytes from `position` on, at most `end`.

    Raises DamagedSegmentError if damage begins at `position`.
    """
    for damage in segment.damages:
        if damage.holds(position):
            raise DamagedSegmentError(damage.path, damage.position, damage.reason)
        if position < damage.position < end:
            return damage.position
    return end


def _boundary(
    segment: Segment, position: int, limit: int, end: int, *, at_least_one: bool, in_place: bool
) -> int:
    """Return the last known end of a batch in `[position, limit]`, at most `end`.

    With `at_least_one`, a first batch above the limit is included. If the index is too sparse,
    return the limit itself: a partial batch at the end is allowed in a fetch response.
    """
    stop = segment.indexes_for(in_place=in_place).offsets.last_position_within(limit)
    if not in_place:
        if stop > position:
            # With the records before it: they are read next.
            segment.check_cached(position, stop + HEADER_BYTES - position)
        else:
            segment.check_cached(position, BOUNDARY_SCAN_BYTES)
    if stop > position:
        try:
            header = read_header(segment.file.pread(HEADER_BYTES, stop))
            add_hint(segment, header.base_offset, stop)
            return stop
        except CorruptBatchError:
            if not in_place:
                raise IndexNotReadyError(segment, Segment.rebuild) from None
            segment.rebuild()  # the index does not point at a batch
    try:
        return _scanned_boundary(segment, position, limit, end, at_least_one=at_least_one)
    except CorruptBatchError as error:
        note = partial(Segment.note_damage, position=error.position, reason=error.reason)
        if not in_place:
            raise IndexNotReadyError(segment, note) from None
        note(segment)
        return _clear_end(segment, position, end)


def _scanned_boundary(
    segment: Segment, position: int, limit: int, end: int, *, at_least_one: bool
) -> int:
    """Like `_boundary`, from the headers after `position`. Raises CorruptBatchError."""
    stop = position
    for batch in scan(segment.file, position, end, whole=False):
        if batch.end_position > limit:
            if stop > position or not at_least_one:
                return stop
            limit = batch.end_position
        stop = batch.end_position
        add_hint(segment, batch.header.next_offset, stop)
        if stop - position > BOUNDARY_SCAN_BYTES:
            return max(limit, stop)
    return stop
