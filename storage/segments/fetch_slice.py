"""Find the range of a log file that answers a fetch: whole batches below the end offset.

A range starts with the batch that contains the offset, or with the next batch if there is none. It
stays in one segment and ends in front of damage; a range that would begin in damage is an error.
Nothing is copied: the caller sends the range from the file.
"""

from typing import NamedTuple

from storage.env import File
from storage.segments.segment_list import SegmentList


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
        position = segment.locate(offset, in_place=in_place)
        is_whole = end_offset >= log_end_offset if index == last else end_offset >= bases[index + 1]
        end = segment.size_bytes
        if not is_whole:
            end = segment.locate_end(end_offset, in_place=in_place)
        if position < end:
            break
        index += 1
        if index > last or bases[index] >= end_offset:
            return NOTHING
    if segment.damages:
        end = segment.clear_end(position, end)
    if end - position <= max_bytes:
        if index == last and is_whole:
            # A consumer that catches up reads from here next.
            segment.add_position_hint(log_end_offset, end)
    else:
        limit = position + max_bytes
        end = segment.boundary(position, limit, end, at_least_one=at_least_one, in_place=in_place)
    return FetchSlice(segment.file, position, end - position)
