"""Write a batch after filtering: copied whole, rebuilt, as a bare header, or not at all.

Rules
- A rebuilt batch keeps its base and last offset, its sequences, producer, epoch and flags; count,
  length, maxTimestamp (CreateTime) and CRC are new.
- A delete horizon replaces the base timestamp, and all time deltas are relative to it.
- EARLIEST_MS in `state` is the earliest horizon of the batches that may still contain a tombstone
  or marker.
- A bare header stays if it has a producer's last sequence or the last offset of the log.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.crc import crc32c
from cleaner.engine.kernels.codecs.memory import (
    copy_bytes,
    load_be16,
    load_be32,
    load_be64,
    read_varint,
    store_be16,
    store_be32,
    store_be64,
    varint_bytes,
    write_varint,
)
from cleaner.engine.kernels.compile import Bytes, Ints, inlined, kernel
from cleaner.engine.kernels.layout import (
    ATTR_CODEC,
    ATTR_CONTROL,
    ATTR_DELETE_HORIZON,
    ATTR_LOG_APPEND_TIME,
    ATTRIBUTES_POSITION,
    BASE_TIMESTAMP_POSITION,
    CRC_POSITION,
    HEADER_BYTES,
    LAST_OFFSET_DELTA_POSITION,
    LAST_RECORD_WORDS,
    LENGTH_BYTES,
    LENGTH_POSITION,
    MAX_TIMESTAMP_POSITION,
    PRODUCER_EPOCH_POSITION,
    PRODUCER_ID_POSITION,
    RECORD_COUNT_POSITION,
    Workspace,
)
from cleaner.engine.kernels.passes.walk import DONE, check_content, read_record


@inlined
def stays_empty(buf: Bytes, at: int, last: int, producers: Ints, state: Ints) -> bool:
    """Return whether a batch without records must stay.

    It must if it is the end of the log or has its producer's last sequence; if that sequence is
    not known, the producer's last marker stays, because it has the epoch. See `producers` in the
    workspace.
    """
    if last == state[fields.LAST_OF_LOG]:
        return True
    producer = load_be64(buf, at + PRODUCER_ID_POSITION)
    low = 0
    high = producers.shape[0] // LAST_RECORD_WORDS
    while low < high:
        middle = (low + high) >> 1
        if producers[middle * LAST_RECORD_WORDS] < producer:
            low = middle + 1
        else:
            high = middle
    row = low * LAST_RECORD_WORDS
    if row >= producers.shape[0] or producers[row] != producer:
        return False
    if producers[row + 2] >= 0:
        return bool(producers[row + 2] == last)
    is_control = load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_CONTROL != 0
    return bool(is_control and producers[row + 1] == load_be16(buf, at + PRODUCER_EPOCH_POSITION))


@inlined
def write_empty(buf: Bytes, at: int, out: Bytes, written: int) -> int:
    """Write the bare header of a batch without survivors -> bytes written so far."""
    copy_bytes(out, written, buf, at, HEADER_BYTES)
    store_be32(out, written + LENGTH_POSITION, HEADER_BYTES - LENGTH_BYTES)
    attributes = load_be16(buf, at + ATTRIBUTES_POSITION) & ~(ATTR_CODEC | ATTR_DELETE_HORIZON)
    store_be16(out, written + ATTRIBUTES_POSITION, attributes)
    store_be64(out, written + BASE_TIMESTAMP_POSITION, -1)
    store_be32(out, written + RECORD_COUNT_POSITION, 0)
    store_be32(
        out,
        written + CRC_POSITION,
        crc32c(out, written + ATTRIBUTES_POSITION, written + HEADER_BYTES),
    )
    return written + HEADER_BYTES


@inlined
def note_horizon(horizon_ms: int, state: Ints) -> None:
    """Lower EARLIEST_MS to `horizon_ms`."""
    horizon_ms = max(horizon_ms, 0)
    if state[fields.EARLIEST_MS] < 0 or horizon_ms < state[fields.EARLIEST_MS]:
        state[fields.EARLIEST_MS] = horizon_ms


@inlined
def write_header(buf: Bytes, at: int, out: Bytes, written: int, size: int, state: Ints) -> None:
    """Write the header of a rebuilt batch, whose records are in `out` already.

    `filter_records` has set KEPT, MAX_TIMESTAMP_MS and SET_HORIZON in `state`.
    """
    copy_bytes(out, written, buf, at, HEADER_BYTES)
    store_be32(out, written + LENGTH_POSITION, size - LENGTH_BYTES)
    attributes = load_be16(buf, at + ATTRIBUTES_POSITION)
    if state[fields.SET_HORIZON] != 0:
        attributes |= ATTR_DELETE_HORIZON
        store_be64(out, written + BASE_TIMESTAMP_POSITION, state[fields.HORIZON_MS])
    store_be16(out, written + ATTRIBUTES_POSITION, attributes)
    if attributes & ATTR_LOG_APPEND_TIME == 0:
        store_be64(out, written + MAX_TIMESTAMP_POSITION, state[fields.MAX_TIMESTAMP_MS])
    store_be32(out, written + RECORD_COUNT_POSITION, state[fields.KEPT])
    store_be32(
        out, written + CRC_POSITION, crc32c(out, written + ATTRIBUTES_POSITION, written + size)
    )


@kernel
def restamp(
    source: Bytes, end: int, count: int, base_ms: int, horizon_ms: int, out: Bytes, written: int
) -> int:
    """Copy `count` records with time deltas relative to `horizon_ms` -> bytes written.

    `out` needs room for GROWN_BYTES_PER_RECORD more bytes per record.
    """
    at = 0
    for _ in range(count):
        _, start = read_varint(source, at)
        after, time_delta, _, _, _, _ = read_record(source, at, end)
        _, rest = read_varint(source, start + 1)
        new_delta = time_delta + base_ms - horizon_ms
        write_varint_length = 1 + varint_bytes(new_delta) + (after - rest)
        written = write_varint(out, written, write_varint_length)
        out[written] = source[start]
        written = write_varint(out, written + 1, new_delta)
        copy_bytes(out, written, source, rest, after - rest)
        written += after - rest
        at = after
    return written


@inlined
def finish_empty(buf: Bytes, at: int, size: int, out: Bytes, space: Workspace) -> int:
    """Drop a batch without survivors, or write its bare header -> DONE or the fault."""
    state = space.state
    last = load_be64(buf, at) + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
    if not stays_empty(buf, at, last, space.producers, state):
        state[fields.BATCHES_DROPPED] += 1
        return DONE
    code = check_content(buf, at, size)
    if code != DONE:
        return code
    if size == HEADER_BYTES:
        copy_bytes(out, state[fields.WRITTEN], buf, at, HEADER_BYTES)
        state[fields.WRITTEN] += HEADER_BYTES
    else:
        state[fields.WRITTEN] = write_empty(buf, at, out, state[fields.WRITTEN])
        state[fields.BATCHES_REBUILT] += 1
    return DONE


@inlined
def copy_whole(buf: Bytes, at: int, size: int, out: Bytes, state: Ints) -> None:
    """Append a batch, whose CRC was verified, to the output byte for byte."""
    copy_bytes(out, state[fields.WRITTEN], buf, at, size)
    state[fields.WRITTEN] += size
    state[fields.RECORDS_OUT] += load_be32(buf, at + RECORD_COUNT_POSITION)
