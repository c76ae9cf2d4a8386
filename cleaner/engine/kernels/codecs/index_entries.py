"""Write offset and time index entries of a new segment, and compute its checksum.

Rules (Kafka's index files)
- An offset entry has 8 bytes: the last offset of a batch relative to the segment's base offset, and
  the position of the batch. A batch gets one if it starts more than `index.interval.bytes` after
  the previous indexed batch.
- A time entry has 12 bytes: the largest timestamp of the segment up to this batch, and the last
  offset of the batch with that timestamp, relative to the base offset. An offset entry is followed
  by one if the timestamp has grown since the previous entry; so is the end of the segment.
"""

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.crc import crc32c_extended
from cleaner.engine.kernels.codecs.memory import load_be32, load_be64, store_be32, store_be64
from cleaner.engine.kernels.compile import Bytes, Ints, kernel
from cleaner.engine.kernels.layout import (
    LARGEST_INT32,
    LAST_OFFSET_DELTA_POSITION,
    LENGTH_BYTES,
    LENGTH_POSITION,
    MAX_TIMESTAMP_POSITION,
)

OFFSET_ENTRY_BYTES = 8
TIME_ENTRY_BYTES = 12


@kernel
def add_time_entry(entries: Bytes, state: Ints) -> None:
    """Append the time entry that is due, if any, to `entries[:TIME_INDEX_BYTES]`."""
    if state[fields.TIME_MAX_MS] <= state[fields.TIME_INDEXED_MS]:
        return
    at = state[fields.TIME_INDEX_BYTES]
    store_be64(entries, at, state[fields.TIME_MAX_MS])
    store_be32(entries, at + 8, state[fields.TIME_MAX_OFFSET] - state[fields.FILE_BASE])
    state[fields.TIME_INDEX_BYTES] = at + TIME_ENTRY_BYTES
    state[fields.TIME_INDEXED_MS] = state[fields.TIME_MAX_MS]


@kernel
def index_output(out: Bytes, end: int, entries: Bytes, time_entries: Bytes, state: Ints) -> bool:
    """Index the batches `out[:end]`, the next ones of the file, and extend FILE_CRC.

    Appends to `entries[:INDEX_BYTES]` and `time_entries[:TIME_INDEX_BYTES]`: both need room for one
    entry per batch, the latter for one more. Returns False if an offset is too large for the 31
    bits of a relative offset.
    """
    at = 0
    while at < end:
        last = load_be64(out, at) + load_be32(out, at + LAST_OFFSET_DELTA_POSITION)
        if last - state[fields.FILE_BASE] > LARGEST_INT32:
            return False
        largest_ms = load_be64(out, at + MAX_TIMESTAMP_POSITION)
        if largest_ms > state[fields.TIME_MAX_MS]:
            state[fields.TIME_MAX_MS] = largest_ms
            state[fields.TIME_MAX_OFFSET] = last
        position = state[fields.FILE_POSITION] + at
        if position - state[fields.INDEXED_POSITION] > state[fields.INDEX_INTERVAL]:
            entry = state[fields.INDEX_BYTES]
            store_be32(entries, entry, last - state[fields.FILE_BASE])
            store_be32(entries, entry + 4, position)
            state[fields.INDEX_BYTES] = entry + OFFSET_ENTRY_BYTES
            state[fields.INDEXED_POSITION] = position
            add_time_entry(time_entries, state)
        at += load_be32(out, at + LENGTH_POSITION) + LENGTH_BYTES
    state[fields.FILE_CRC] = crc32c_extended(state[fields.FILE_CRC], out, 0, end)
    state[fields.FILE_POSITION] += end
    return True
