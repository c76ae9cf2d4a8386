"""Offset and time index entries of a segment that is being written, and its checksum.

Rules (Kafka's index files)
- An offset entry, 8 bytes: last offset of a batch - base of the segment, position of the batch. One
  whenever more than `index.interval.bytes` stand between the batch and the one indexed before.
- A time entry, 12 bytes: largest timestamp of the segment up to and including this batch, and the
  last offset of the batch that carries it - base. Beside an offset entry, if the timestamp has
  grown since the entry before; and one at the end of the segment.
"""

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.crc import crc32c_extended
from cleaner.engine.kernels.codecs.memory import load_be32, load_be64, store_be32, store_be64
from cleaner.engine.kernels.compile import Bytes, Ints, kernel
from cleaner.engine.kernels.layout import LARGEST_INT32, LENGTH_BYTES

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
    """Index the batches of `out[:end]`, which come next in the file, and extend FILE_CRC.

    Entries go to `entries[:INDEX_BYTES]` and `time_entries[:TIME_INDEX_BYTES]`; either has to have
    room for one per batch, and the latter for one more. False when an offset is too far from the
    base of the segment for 32 bits.
    """
    at = 0
    while at < end:
        last = load_be64(out, at) + load_be32(out, at + 23)
        if last - state[fields.FILE_BASE] > LARGEST_INT32:
            return False
        largest_ms = load_be64(out, at + 35)
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
        at += load_be32(out, at + 8) + LENGTH_BYTES
    state[fields.FILE_CRC] = crc32c_extended(state[fields.FILE_CRC], out, 0, end)
    state[fields.FILE_POSITION] += end
    return True
