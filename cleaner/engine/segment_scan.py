"""Going through a segment batch by batch with a kernel that takes something else than a map does.

Rules
- Reading, damage and unpacking are as in the first pass (index_pass.py).
- A taker is told how many records may come before they do, so that it has room for them.
"""

from typing import Protocol

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.layout import HEADER_BYTES, RECORD_BYTES_MIN, Code
from cleaner.engine.kernels.passes.walk import count_records
from cleaner.engine.source import offsets_end
from cleaner.job import SourceSegment
from storage.errors import CorruptBatchError, DecompressionLimitError, TransactionIndexError
from storage.format.batch import unpack_header


class BatchConsumer(Protocol):
    """What is done with batches."""

    def make_room(self, records: int) -> None:
        """So many records may come before this is called again."""

    def batches(self) -> tuple[int, int]:
        """Take the batches of the reader's buffer -> (code, position)."""

    def unpacked(self, count: int) -> int:
        """Take the batch the reader stands at, whose `count` bytes are unpacked -> code."""


def scan_segment(context: CleanContext, source: SourceSegment, taker: BatchConsumer) -> None:
    """Hand over the batches of a segment until its end, or until the taker says DONE.

    Raises DamagedSegmentError, TransactionIndexError, CleanAbortedError, OSError.
    """
    reader, state = context.reader, context.state
    state[fields.NEXT_OFFSET] = source.base_offset
    state[fields.SOURCE_END] = offsets_end(source)
    reader.open(source)
    while not reader.exhausted:
        reader.refill(context.charge_read)
        reported = int(count_records(reader.buffer, reader.at, reader.end))
        taker.make_room(min(reported, (reader.end - reader.at) // RECORD_BYTES_MIN))
        code = int(Code.COMPRESSED)
        while code in {Code.COMPRESSED, Code.PRODUCERS_FULL}:
            code, reader.at = taker.batches()
            if code == Code.COMPRESSED:
                _take_compressed(context, taker)
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


def _take_compressed(context: CleanContext, taker: BatchConsumer) -> None:
    reader = context.reader
    header = unpack_header(reader.buffer.data, reader.at)
    packed_at, packed_bytes = reader.at + HEADER_BYTES, header.size_bytes - HEADER_BYTES
    try:
        count = context.unpack(header.codec, packed_at, packed_bytes, 0)
    except (CorruptBatchError, DecompressionLimitError) as error:
        raise reader.damaged(str(error)) from error
    taker.make_room(min(header.record_count, count // RECORD_BYTES_MIN))
    code = taker.unpacked(count)
    if code != Code.DONE:
        raise reader.stopped(code)
    reader.at += header.size_bytes
