"""Find the batch of an offset in a log file, outside its damaged ranges.

Rules
- The index only narrows the search: a batch counts if the log file has its header.
- An offset that no batch has leads to the next batch. If damage may have had the offset, the search
  raises an error instead: a reader must not skip records that exist.
- Nothing is changed: `offset_lookup.py` has the index repaired, and the damage recorded that a
  search meets.
"""

from collections.abc import Callable, Iterator

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


class BatchLookup:
    """Lookups in a log file as it is now.

    `end` is the size of the log file, `indexes` are loaded. The lookups raise DamagedSegmentError
    if the batch may be in a damaged range, CorruptIndexError, CorruptBatchError.
    """

    __slots__ = ("_damages", "_end", "_file", "_indexes")

    def __init__(
        self, file: File, end: int, *, indexes: SegmentIndexes, damages: DamagedRanges
    ) -> None:
        self._file = file
        self._end = end
        self._indexes = indexes
        self._damages = damages

    def position_of(self, offset: int) -> int:
        """Return the position of the first batch whose last offset is `offset` or above.

        Return `end` if there is none.
        """
        relative, indexed = self._indexes.offsets.lookup(offset - self._indexes.base_offset)
        # An index may have entries in damaged ranges: begin before the range.
        last_end = min(
            (damage.position for damage in self._damages if damage.holds(indexed)),
            default=indexed,
        )
        for batch in self._batches(indexed):
            header = batch.header
            if batch.position == indexed and indexed:
                self._indexes.check_entry(header, relative)
            if header.next_offset > offset:
                if header.base_offset > offset:
                    self._refuse_damage(last_end, batch.position)
                return batch.position
            last_end = batch.end_position
        self._refuse_damage(last_end, self._end)
        return self._end

    def batch_at(self, offset: int) -> ScannedBatch | None:
        """Return the batch with `offset`, or the next one; None after the last."""
        position = self.position_of(offset) if offset > self._indexes.base_offset else 0
        return next(self._batches(position), None)

    def ascending(self) -> Callable[[int], ScannedBatch | None]:
        """Return a function like `batch_at`, which is faster for offsets in ascending order.

        It continues after the batch that it found last, unless the index has a closer entry: an
        interval of the index may have dozens of batches, and a log millions of transactions.
        """
        last: ScannedBatch | None = None
        last_offset, last_entry = -1, (-1, -1)

        def batch_at(offset: int) -> ScannedBatch | None:
            nonlocal last, last_offset, last_entry
            entry = self._indexes.offsets.lookup(offset - self._indexes.base_offset)
            is_near = last_offset <= offset and entry == last_entry and not self._damages
            if last is None or not is_near:
                last = self.batch_at(offset)
            elif last.header.next_offset <= offset:
                following = self._batches(last.end_position)
                last = next((each for each in following if each.header.next_offset > offset), None)
            last_offset, last_entry = offset, entry
            return last

        return batch_at

    def _batches(self, position: int) -> Iterator[ScannedBatch]:
        return undamaged_batches(self._file, position, self._end, self._damages)

    def _refuse_damage(self, start: int, end: int) -> None:
        """Raise DamagedSegmentError if the offset is in damage between the batches around it."""
        for damage in self._damages:
            if start <= damage.position and damage.end_position <= end:
                raise DamagedSegmentError(damage.path, damage.position, damage.reason)
