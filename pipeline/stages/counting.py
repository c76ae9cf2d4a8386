"""Index a segment for a table: every key from the log start offset on, with counts.

One walk puts the keys into a map and counts records, tombstones, bytes and times, up to the first
damage of the segment.
"""

import numpy as np

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels.compile import Ints
from cleaner.engine.kernels.layout import Code
from cleaner.engine.kernels.passes import counting as kernel
from cleaner.engine.segment_scan import scan_segment
from cleaner.job import Damage, SourceSegment
from pipeline.stages.tasks import SegmentCounts
from storage.errors import DamagedSegmentError


class SegmentCounter:
    """A BatchConsumer that counts records and indexes their keys."""

    def __init__(self, context: CleanContext) -> None:
        self._context = context
        self.counts: Ints = np.zeros(kernel.COUNTS, dtype=np.int64)
        self.counts[kernel.FIRST_MS] = kernel.NO_FIRST_MS
        self.counts[kernel.LAST_MS] = kernel.NO_LAST_MS

    def make_room(self, records: int) -> None:
        """See BatchConsumer."""
        self._context.map.reserve(records)

    def batches(self) -> tuple[int, int]:
        """See BatchConsumer. Raises KeysDoNotFitError."""
        reader = self._context.reader
        code, at = kernel.count_and_index(
            reader.buffer, reader.at, reader.end, self.counts, self._context.space
        )
        _check_room(code)
        return code, at

    def unpacked(self, count: int) -> int:
        """See BatchConsumer. Raises KeysDoNotFitError."""
        context, reader = self._context, self._context.reader
        code = kernel.count_and_index_unpacked(
            context.unpacked, count, reader.buffer, reader.at, self.counts, context.space
        )
        _check_room(code)
        return int(code)


class KeysDoNotFitError(Exception):
    """The key map is full; in `combine`, one batch alone has more keys than fit."""

    def __init__(self) -> None:
        super().__init__("the keys do not fit into the memory of a task; raise --task-memory")


def _check_room(code: int) -> None:
    if code == Code.MAP_FULL:
        raise KeysDoNotFitError


def count_segment(
    context: CleanContext, source: SourceSegment, damaged: dict[int, Damage]
) -> SegmentCounts:
    """Index and count a segment up to its first damage, which is added to `damaged`.

    Raises KeysDoNotFitError, TransactionIndexError, OSError.
    """
    taker = SegmentCounter(context)
    try:
        scan_segment(context, source, taker)
    except DamagedSegmentError as error:
        damaged[source.base_offset] = Damage.of(error)
        context.transactions.forget_open(context.state)
    counts = [int(count) for count in taker.counts]
    has_times = counts[kernel.LAST_MS] >= counts[kernel.FIRST_MS]
    return SegmentCounts(
        base_offset=source.base_offset,
        next_base_offset=source.next_base_offset,
        size_bytes=source.size_bytes,
        batches=counts[kernel.BATCHES],
        records=counts[kernel.RECORDS],
        control=counts[kernel.CONTROL],
        aborted=counts[kernel.ABORTED],
        keyless=counts[kernel.KEYLESS],
        null_values=counts[kernel.NULL_VALUES],
        key_bytes=counts[kernel.KEY_BYTES],
        value_bytes=counts[kernel.VALUE_BYTES],
        first_ms=counts[kernel.FIRST_MS] if has_times else -1,
        last_ms=counts[kernel.LAST_MS] if has_times else -1,
    )
