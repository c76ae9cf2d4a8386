"""Find the batch of an offset in a log file, outside its damaged ranges.

Rules
- The index only narrows the search: a batch counts if the log file has its header.
- An offset that no batch has leads to the next batch. If damage may have had the offset, the search
  raises an error instead: a reader must not skip records that exist.
- Nothing is changed: the segment repairs the index and records the damage that a search meets.
"""

from collections.abc import Iterator

from storage.env import File
from storage.errors import DamagedSegmentError
from storage.segments.batch_scan import ScannedBatch, scan
from storage.segments.damage import DamagedRanges
from storage.segments.segment_indexes import SegmentIndexes


def undamaged_batches(
    file: File, position: int, end: int, damages: DamagedRanges
) -> Iterator[ScannedBatch]:
    """Yield the batches in `[position, end)`, without damaged ranges. Raises CorruptBatchError."""
    for damage in damages:
        if damage.end_position <= position:
            continue
        if position < damage.position:
            yield from scan(file, position, damage.position, whole=False)
        position = damage.end_position
    yield from scan(file, position, end, whole=False)


def position_of(
    offset: int, file: File, end: int, *, indexes: SegmentIndexes, damages: DamagedRanges
) -> int:
    """Return the position of the first batch that ends behind `offset`, else `end`.

    `end` is the size of the log file, `indexes` are loaded. Raises DamagedSegmentError if that
    batch may be in a damaged range, CorruptIndexError, CorruptBatchError.
    """
    relative, indexed = indexes.offsets.lookup(offset - indexes.base_offset)
    # An index may have entries in damaged ranges: begin before the range.
    last_end = min(
        (damage.position for damage in damages if damage.holds(indexed)), default=indexed
    )
    for batch in undamaged_batches(file, indexed, end, damages):
        header = batch.header
        if batch.position == indexed and indexed:
            indexes.check_entry(header, relative)
        if header.next_offset > offset:
            if header.base_offset > offset:
                _refuse_damage(last_end, batch.position, damages)
            return batch.position
        last_end = batch.end_position
    _refuse_damage(last_end, end, damages)
    return end


def _refuse_damage(start: int, end: int, damages: DamagedRanges) -> None:
    """Raise DamagedSegmentError if the offset is in damage between the batches around it."""
    for damage in damages:
        if start <= damage.position and damage.end_position <= end:
            raise DamagedSegmentError(damage.path, damage.position, damage.reason)
