"""Finding what a fetch gets: a range of one log file, whole batches, none at or above the end.

Rules: a read starts with the batch that contains the offset, in a hole with the next one. It never
leaves one segment and never crosses damage: it ends in front of it, and one that would begin in it
is an error. Nothing is copied: the caller sends the range.
"""

from typing import NamedTuple

from storage.env import File
from storage.segments.segment_list import SegmentList


class FetchSlice(NamedTuple):
    """Bytes `[position, position + length)` of a file; nothing if `length` is 0.

    The file stays open while the slice is referred to, whatever becomes of its name.
    """

    file: File | None
    position: int
    length: int

    def read(self) -> bytes:
        """Return the bytes; may wait for the disk."""
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
) -> FetchSlice:
    """Where the batches from `offset` on are, up to `end_offset` (exclusive) and `max_bytes`.

    The first batch is given whole even above `max_bytes` if `at_least_one`. Raises
    DamagedSegmentError when the offset lies in what cannot be read, OSError as it comes.
    """
    bases = segments.bases
    index = segments.index_of(offset)
    last = len(bases) - 1
    while True:
        segment = segments[index]
        position = segment.locate(offset)
        is_whole = end_offset >= log_end_offset if index == last else end_offset >= bases[index + 1]
        end = segment.size_bytes if is_whole else segment.locate_end(end_offset)
        if position < end:
            break
        index += 1
        if index > last or bases[index] >= end_offset:
            return NOTHING
    if segment.damages:
        end = segment.clear_end(position, end)
    if end - position <= max_bytes:
        if index == last and is_whole:
            # The next read of whoever catches up begins here.
            segment.add_position_hint(log_end_offset, end)
    else:
        end = segment.boundary(position, position + max_bytes, end, at_least_one=at_least_one)
    return FetchSlice(segment.file, position, end - position)
