"""Find the position of an offset in a segment, for reads and truncations.

Rules
- The segment keeps the positions that were found last, and forgets them when they may be wrong: a
  sequential reader needs no search.
- A search that meets an index that contradicts the log has it rebuilt, and one that meets damage
  has it recorded. `batch_lookup.py` searches, the segment changes.
- With `in_place=False` nothing is read from the disk, loaded, rebuilt or recorded: the search
  raises IndexNotReadyError, and a thread does it (index_load.py).
"""

from functools import partial
from typing import Final

from storage.errors import CorruptBatchError, DamagedSegmentError
from storage.format.index import CorruptIndexError
from storage.segments.batch_scan import HEADER_BLOCK_BYTES, intact_batch
from storage.segments.segment import IndexNotReadyError, Segment

# Positions kept for sequential readers: one per active reader is enough. The whole table is dropped
# when it is full.
HINTS_MAX: Final = 256
DAMAGED_MET_MAX: Final = 100  # damaged ranges found by one search for an offset


def locate(segment: Segment, offset: int, *, in_place: bool = True) -> int:
    """Return the position of the first batch whose last offset is `offset` or above.

    Return `size_bytes` if there is none. Raises DamagedSegmentError if that batch is in a damaged
    range. Without `in_place`, raises IndexNotReadyError instead of reading from disk, loading or
    rebuilding an index.
    """
    position = segment.position_hints.get(offset)
    if position is None:
        position = 0
        if offset > segment.base_offset:
            position = _search(segment, offset, in_place=in_place)
        add_hint(segment, offset, position)
    return position


def add_hint(segment: Segment, offset: int, position: int) -> None:
    """Keep the position of the first batch whose last offset is `offset` or above."""
    hints = segment.position_hints
    if len(hints) >= HINTS_MAX:
        hints.clear()
    hints[offset] = position


def locate_intact(segment: Segment, offset: int) -> int:
    """Like `locate`, but verify the batch: its header alone may claim to have the offset.

    A batch that is damaged becomes a damaged range, and the search continues after it. Nothing is
    read for an offset that is not above the base offset: all batches are at or after it.
    """
    if offset <= segment.base_offset:
        return 0
    damaged = -1
    while True:
        position = locate(segment, offset)
        end = segment.size_bytes
        if position == end or intact_batch(segment.file, position, end) is not None:
            return position
        reason = "CRC does not match"
        if position <= damaged:
            raise DamagedSegmentError(segment.path, position, reason)
        damaged = segment.note_damage(position, reason).position


def locate_end(segment: Segment, end_offset: int, *, in_place: bool = True) -> int:
    """Return the end of the batches below `end_offset`, or of those in front of damage."""
    try:
        return locate(segment, end_offset, in_place=in_place)
    except DamagedSegmentError as error:
        return error.position


def locate_readable(segment: Segment, offset: int, *, in_place: bool = True) -> int:
    """Like `locate`; return the position after the damage for an offset in a damaged range."""
    try:
        return locate(segment, offset, in_place=in_place)
    except DamagedSegmentError as error:
        return max(
            (
                damage.end_position
                for damage in segment.damages
                if damage.position == error.position
            ),
            default=segment.size_bytes,
        )


def _search(segment: Segment, offset: int, *, in_place: bool) -> int:
    if not in_place:
        indexes = segment.indexes_for(in_place=False)
        _, indexed = indexes.offsets.lookup(offset - segment.base_offset)
        segment.check_cached(indexed, HEADER_BLOCK_BYTES)
        try:
            return segment.lookup.position_of(offset)
        except (CorruptIndexError, CorruptBatchError):
            raise IndexNotReadyError(segment, partial(locate, offset=offset)) from None
    for _ in range(DAMAGED_MET_MAX):
        try:
            return segment.lookup.position_of(offset)
        except CorruptIndexError:
            break
        except CorruptBatchError as error:
            if not segment.note_damage_met(error):
                break
    segment.rebuild()  # the index is wrong
    return segment.lookup.position_of(offset)
