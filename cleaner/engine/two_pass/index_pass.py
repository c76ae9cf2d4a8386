"""The first pass: index the last offset of each key of the dirty section.

Rules
- Segments are read in offset order from the one with the first dirty offset. Each batch's checksum
  is verified. Batches below the first dirty offset are skipped.
- A damaged batch ends the pass over its segment. The keys before it stay in the map, since the
  segment will not be changed.
- The transaction indexes are compared with the markers: the log's checksums do not cover them, and
  one flipped bit would remove committed data. A contradiction fails the job before any output.
- A full map ends the pass at the record that does not fit (MAP_END).
"""

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.layout import HEADER_BYTES, RECORD_BYTES_MIN, Code
from cleaner.engine.segment_scan import uncompressed_records_max
from cleaner.engine.source import offsets_end
from cleaner.job import Damage, SourceSegment
from storage.errors import (
    CorruptBatchError,
    DamagedSegmentError,
    DecompressionLimitError,
    TransactionIndexError,
)
from storage.format.batch import unpack_header


def index_section(context: CleanContext) -> dict[int, Damage]:
    """Fill the map from the dirty section; return the damaged segments by base offset.

    Raises CleanAbortedError, TransactionIndexError, OSError.
    """
    job = context.job
    segments = [
        source
        for group in job.groups
        for source in group
        if source.next_base_offset > job.first_dirty_offset and source.base_offset < job.end_offset
    ]
    total = sum(source.size_bytes for source in segments)
    damaged: dict[int, Damage] = {}
    begun = 0
    read: list[SourceSegment] = []
    transactions = context.transactions
    for source in segments:
        try:
            full = index_segment(context, source, "map", begun, total)
        except DamagedSegmentError as error:
            damaged[source.base_offset] = Damage.of(error)
            transactions.forget_open(context.state)  # their markers may be in the damaged segment
        else:
            context.release()
            if not context.reader.is_gone:
                read.append(source)
            if full:
                break
        begun += source.size_bytes
    context.reader.close()
    checked = [source for source in read if source.base_offset >= job.first_dirty_offset]
    transactions.check_markers(checked, context.map_end)
    transactions.forget_open(context.state)
    return damaged


def index_segment(
    context: CleanContext, source: SourceSegment, stage: str, begun: int, total: int
) -> bool:
    """Index one segment; return True if the map is full. Raises DamagedSegmentError."""
    reader = context.reader
    state = context.state
    state[fields.NEXT_OFFSET] = source.base_offset
    state[fields.SOURCE_END] = offsets_end(source)
    reader.open(source)
    while not reader.exhausted:
        reader.refill(context.charge_read)
        records_max = uncompressed_records_max(reader)
        context.map.reserve(records_max)
        while True:
            code, reader.at = context.map.index_batches(
                reader.buffer, reader.at, reader.end, context.space
            )
            if code == Code.COMPRESSED:
                code = _index_compressed(context, records_max)
            if code == Code.PRODUCERS_FULL:
                context.make_room_for_producers()
            elif code != Code.DONE:
                break
        if code == Code.MAP_FULL:
            return True
        if code == Code.MISINDEXED:
            header = unpack_header(reader.buffer.data, reader.at)
            raise TransactionIndexError(header.producer_id, header.base_offset)
        if code != Code.MORE:
            raise reader.stopped(code)
        context.control.progress(stage, begun + reader.position, total)
    return False


def _index_compressed(context: CleanContext, records_max: int) -> int:
    """Unpack and index the batch at the reader's position; return DONE or the fault.

    `records_max`: the uncompressed batches after it have at most as many records.
    """
    reader = context.reader
    header = unpack_header(reader.buffer.data, reader.at)
    try:
        count = context.unpack(
            header.codec, reader.at + HEADER_BYTES, header.size_bytes - HEADER_BYTES, 0
        )
    except (CorruptBatchError, DecompressionLimitError) as error:
        raise reader.damaged(str(error)) from error
    context.map.reserve(records_max + min(header.record_count, count // RECORD_BYTES_MIN))
    code = context.map.index_unpacked(
        context.unpacked, count, reader.buffer, reader.at, context.space
    )
    if code == Code.DONE:
        reader.at += header.size_bytes
    return int(code)
