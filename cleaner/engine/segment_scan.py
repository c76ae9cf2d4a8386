"""Read a segment batch by batch for a consumer other than the map.

Rules
- Reading, damage and unpacking are as in the first pass (index_pass.py).
- The consumer gets the maximum number of records before the records, to make room.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.memory import load_be32
from cleaner.engine.kernels.compile import Bytes
from cleaner.engine.kernels.layout import (
    HEADER_BYTES,
    LENGTH_BYTES,
    LENGTH_POSITION,
    RECORD_BYTES_MIN,
    Code,
)
from cleaner.engine.kernels.passes.walk import count_records
from cleaner.engine.source import SourceReader, offsets_end
from cleaner.job import SourceSegment
from storage.errors import CorruptBatchError, DecompressionLimitError, TransactionIndexError
from storage.format.batch import unpack_header


class BatchConsumer(Protocol):
    """Consumes the batches of a segment."""

    def make_room(self, records: int) -> None:
        """Make room for this many records until the next call."""

    def batches(self) -> tuple[int, int]:
        """Consume the batches of the reader's buffer -> (code, position)."""

    def unpacked(self, count: int) -> int:
        """Consume the batch at the reader's position, unpacked to `count` bytes -> code."""


NoteBatches: TypeAlias = Callable[[Bytes, int, int, int], None]
"""Gets checked batches in `buffer[begin:end]`, the first of them at a position of the file."""


class PositionedConsumer:
    """A BatchConsumer that passes everything to another one, and notes where batches are."""

    def __init__(self, context: CleanContext, consumer: BatchConsumer, note: NoteBatches) -> None:
        self._reader = context.reader
        self._consumer = consumer
        self._note = note
        self.make_room = consumer.make_room

    def batches(self) -> tuple[int, int]:
        """See BatchConsumer."""
        code, at = self._consumer.batches()
        self._add(at)
        return code, at

    def unpacked(self, count: int) -> int:
        """See BatchConsumer."""
        reader = self._reader
        code = self._consumer.unpacked(count)
        if code == Code.DONE:
            length = int(load_be32(reader.buffer, reader.at + LENGTH_POSITION))
            self._add(reader.at + length + LENGTH_BYTES)
        return code

    def _add(self, end: int) -> None:
        """Note the checked batches from the reader's position up to `end` of the buffer."""
        reader = self._reader
        self._note(reader.buffer, reader.at, end, reader.position)


def scan_segment(context: CleanContext, source: SourceSegment, consumer: BatchConsumer) -> None:
    """Pass the batches of a segment to the consumer until its end, or until it returns DONE.

    Raises DamagedSegmentError, TransactionIndexError, CleanAbortedError, OSError.
    """
    reader, state = context.reader, context.state
    state[fields.NEXT_OFFSET] = source.base_offset
    state[fields.SOURCE_END] = offsets_end(source)
    reader.open(source)
    while not reader.exhausted:
        reader.refill(context.charge_read)
        records_max = uncompressed_records_max(reader)
        consumer.make_room(records_max)
        code = int(Code.COMPRESSED)
        while code in {Code.COMPRESSED, Code.PRODUCERS_FULL}:
            code, reader.at = consumer.batches()
            if code == Code.COMPRESSED:
                _consume_compressed(context, consumer, records_max)
            elif code == Code.PRODUCERS_FULL:
                context.make_room_for_producers()
        if code == Code.DONE:
            break
        if code == Code.MISINDEXED:
            header = unpack_header(reader.buffer.data, reader.at)
            raise TransactionIndexError(header.producer_id, header.base_offset)
        if code != Code.MORE:
            raise reader.stopped(code)
    context.release()


def uncompressed_records_max(reader: SourceReader) -> int:
    """Return an upper bound of the records in the uncompressed batches of the buffer."""
    claimed = int(count_records(reader.buffer, reader.at, reader.end))
    return min(claimed, (reader.end - reader.at) // RECORD_BYTES_MIN)


def _consume_compressed(context: CleanContext, consumer: BatchConsumer, records_max: int) -> None:
    """Consume the batch at the reader's position.

    `records_max`: the uncompressed batches after it have at most as many records.
    """
    reader = context.reader
    header = unpack_header(reader.buffer.data, reader.at)
    packed_at, packed_bytes = reader.at + HEADER_BYTES, header.size_bytes - HEADER_BYTES
    try:
        count = context.unpack(header.codec, packed_at, packed_bytes, 0)
    except (CorruptBatchError, DecompressionLimitError) as error:
        raise reader.damaged(str(error)) from error
    consumer.make_room(records_max + min(header.record_count, count // RECORD_BYTES_MIN))
    code = consumer.unpacked(count)
    if code != Code.DONE:
        raise reader.stopped(code)
    reader.at += header.size_bytes
