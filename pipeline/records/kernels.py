"""Read untrusted record batches into rows, and copy the rows' bytes into Arrow columns.

Rules
- `buf[:end]` is the input; SLACK_BYTES after it are readable.
- Every length is compared with the end of its container before it is used.
- A batch has rows only if its CRC matches. If it fits into the table, it adds all of its rows, or
  none if a record is malformed; if it does not fit, all of its records are checked first.
- Control batches, and batches of the given aborted transactions, have no rows.
- A row has the positions of its key and value; their bytes are copied only when a column needs
  them.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.memory import (
    copy_bytes,
    load_be16,
    load_be32,
    load_be64,
    read_varint,
    store_be64,
)
from cleaner.engine.kernels.compile import Bytes, Ints, inlined, int64, kernel
from cleaner.engine.kernels.layout import (
    ATTR_CODEC,
    ATTR_CONTROL,
    ATTR_LOG_APPEND_TIME,
    ATTR_TRANSACTIONAL,
    ATTRIBUTES_POSITION,
    BASE_TIMESTAMP_POSITION,
    HEADER_BYTES,
    LAST_OFFSET_DELTA_POSITION,
    LENGTH_BYTES,
    LENGTH_POSITION,
    MAX_TIMESTAMP_POSITION,
    PRODUCER_ID_POSITION,
    RECORD_COUNT_POSITION,
    Code,
)
from cleaner.engine.kernels.passes.walk import aborted_row, check_content, check_header, read_record

Ints32 = npt.NDArray[np.int32]

# Indexes into the state, after those of the cleaner, whose header checks are used here.
FIRST: Final = fields.SIZE  # the first offset to read
END: Final = fields.SIZE + 1  # the end of the offsets to read
COUNT: Final = fields.SIZE + 2  # rows in the table
PREVIOUS: Final = fields.SIZE + 3  # offset delta of the previous record of the batch
STATE_SIZE: Final = fields.SIZE + 4


class Stop(IntEnum):
    """Why a kernel returned, beside the cleaner's codes."""

    ROWS_FULL = 100  # the batch at the position does not fit into the rest of the table
    OVERSIZE = 101  # it does not fit into an empty table, either


ROWS_FULL = int(Stop.ROWS_FULL)
OVERSIZE = int(Stop.OVERSIZE)
DONE = int(Code.DONE)
MORE = int(Code.MORE)
COMPRESSED = int(Code.COMPRESSED)
BAD_RECORD = int(Code.BAD_RECORD)

_WORD_BYTES = 8
_SHORT_BYTES = 32  # copied as words, which is faster than a call


class Rows(NamedTuple):
    """Up to `len(offsets)` records; positions are those in the input."""

    offsets: Ints
    times_ms: Ints
    kinds: Ints32  # timestampType: 0 CreateTime, 1 LogAppendTime
    key_at: Ints
    key_bytes: Ints  # -1: null
    value_at: Ints
    value_bytes: Ints
    headers_at: Ints
    record_end: Ints


def new_rows(count: int) -> Rows:
    """Return room for `count` rows."""
    words = [np.empty(count, dtype=np.int64) for _ in range(8)]
    return Rows(words[0], words[1], np.empty(count, dtype=np.int32), *words[2:])


@inlined
def _fill(
    head: Bytes, head_at: int, buf: Bytes, at: int, end: int, index: int, rows: Rows, state: Ints
) -> tuple[int, int, int]:
    """Append records from `index` on to the table -> (DONE, ROWS_FULL or BAD_RECORD, at, index)."""
    base = load_be64(head, head_at)
    last_delta = load_be32(head, head_at + LAST_OFFSET_DELTA_POSITION)
    base_ms = load_be64(head, head_at + BASE_TIMESTAMP_POSITION)
    count = load_be32(head, head_at + RECORD_COUNT_POSITION)
    kind = 0
    if load_be16(head, head_at + ATTRIBUTES_POSITION) & ATTR_LOG_APPEND_TIME != 0:
        kind = 1
    max_ms = load_be64(head, head_at + MAX_TIMESTAMP_POSITION)
    first = state[FIRST]
    limit = state[END]
    row = state[COUNT]
    previous = state[PREVIOUS]
    while index < count:
        if row == rows.offsets.shape[0]:
            state[COUNT] = row
            state[PREVIOUS] = previous
            return ROWS_FULL, at, index
        after, time_delta, delta, key_at, key_bytes, value_bytes = read_record(buf, at, end)
        if after < 0 or delta <= previous or delta > last_delta:
            return BAD_RECORD, at, index
        time_ms = base_ms + time_delta  # wraps, as in Java
        previous = delta
        index += 1
        at = after
        offset = base + delta
        if offset < first or offset >= limit:
            continue
        _, value_at = read_varint(buf, key_at + max(key_bytes, 0))
        rows.offsets[row] = offset
        rows.times_ms[row] = max_ms if kind == 1 else time_ms
        rows.kinds[row] = kind
        rows.key_at[row] = key_at
        rows.key_bytes[row] = key_bytes
        rows.value_at[row] = value_at
        rows.value_bytes[row] = value_bytes
        rows.headers_at[row] = value_at + max(value_bytes, 0)
        rows.record_end[row] = after
        row += 1
    if at != end:
        return BAD_RECORD, at, index
    state[COUNT] = row
    state[PREVIOUS] = -1
    return DONE, at, index


@kernel
def fill_rows(
    head: Bytes, head_at: int, buf: Bytes, at: int, end: int, index: int, rows: Rows, state: Ints
) -> tuple[int, int, int]:
    """Append the records of the batch with its header in `head` to the table.

    -> (code, position, index of the next record). ROWS_FULL: the caller takes the rows, sets COUNT
    to 0 and calls again with the returned position and index. BAD_RECORD does not change COUNT.
    """
    return _fill(head, head_at, buf, at, end, index, rows, state)


@kernel
def scan_batches(
    buf: Bytes, at: int, end: int, rows: Rows, aborted: Ints, state: Ints
) -> tuple[int, int]:
    """Append the rows of the uncompressed batches in `buf[at:end]` to the table.

    -> (code, position). MORE: no further whole batch. DONE: the batch at the position is past the
    offsets to read. COMPRESSED, OVERSIZE: the header and CRC of the batch at the position are
    valid; the caller reads its records. ROWS_FULL: the caller takes the rows first.
    """
    while True:
        code, size = check_header(buf, at, end, state)
        if code != DONE:
            return code, at
        base = load_be64(buf, at)
        if base >= state[END]:
            return DONE, at
        next_offset = base + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION) + 1
        if next_offset > state[FIRST]:
            code = check_content(buf, at, size)
            if code != DONE:
                return code, at
            if _has_rows(buf, at, aborted):
                if load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_CODEC != 0:
                    return COMPRESSED, at
                count = load_be32(buf, at + RECORD_COUNT_POSITION)
                if state[COUNT] + count > rows.offsets.shape[0]:
                    return (ROWS_FULL if state[COUNT] > 0 else OVERSIZE), at
                state[PREVIOUS] = -1
                code, _, _ = _fill(buf, at, buf, at + HEADER_BYTES, at + size, 0, rows, state)
                if code != DONE:
                    return code, at
        state[fields.NEXT_OFFSET] = next_offset
        at += size


@inlined
def _has_rows(buf: Bytes, at: int, aborted: Ints) -> bool:
    attributes = load_be16(buf, at + ATTRIBUTES_POSITION)
    if attributes & ATTR_CONTROL != 0 or load_be32(buf, at + RECORD_COUNT_POSITION) == 0:
        return False
    if attributes & ATTR_TRANSACTIONAL == 0 or aborted.shape[0] == 0:
        return True
    base = load_be64(buf, at)
    last = base + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
    return aborted_row(aborted, load_be64(buf, at + PRODUCER_ID_POSITION), base, last) < 0


@kernel
def keep_rows(rows: Rows, retained: npt.NDArray[np.bool_], count: int) -> int:
    """Remove the rows that are not `retained` -> the number of rows left."""
    row = 0
    for i in range(count):
        if retained[i]:
            rows.offsets[row] = rows.offsets[i]
            rows.times_ms[row] = rows.times_ms[i]
            rows.kinds[row] = rows.kinds[i]
            rows.key_at[row] = rows.key_at[i]
            rows.key_bytes[row] = rows.key_bytes[i]
            rows.value_at[row] = rows.value_at[i]
            rows.value_bytes[row] = rows.value_bytes[i]
            rows.headers_at[row] = rows.headers_at[i]
            rows.record_end[row] = rows.record_end[i]
            row += 1
    return row


@kernel
def rows_end_within(first: int, end: int, sizes: Ints, room_bytes: int) -> int:
    """Return the end of the rows from `first` on that fit into `room_bytes`; a null has size -1."""
    for row in range(first, end):
        room_bytes -= max(sizes[row], 0)
        if room_bytes < 0:
            return row
    return end


@inlined
def _copy_short(target: Bytes, at: int, source: Bytes, start: int, count: int) -> None:
    """Copy up to `_SHORT_BYTES` as words; both buffers have slack after them."""
    for done in range(0, count, _WORD_BYTES):
        store_be64(target, at + done, load_be64(source, start + done))


@kernel
def gather(
    buf: Bytes,
    starts: Ints,
    sizes: Ints,
    first: int,
    end: int,
    data: Bytes,
    ends: Ints32,
    validity: Bytes,
    row: int,
) -> int:
    """Append the bytes of rows [first, end) to an Arrow binary column -> the number of nulls.

    The column has `row` rows before. `ends` are Arrow's offsets, `data` needs room for the bytes
    and SLACK_BYTES more, and the bits of `validity` from `row` on are zero.
    """
    position = int64(ends[row])
    nulls = 0
    for i in range(first, end):
        count = sizes[i]
        if count < 0:
            nulls += 1
        else:
            validity[row >> 3] |= np.uint8(1 << (row & 7))
            if count <= _SHORT_BYTES:
                _copy_short(data, position, buf, starts[i], count)
            else:
                copy_bytes(data, position, buf, starts[i], count)
            position += count
        row += 1
        ends[row] = position
    return nulls


@kernel
def measure_headers(buf: Bytes, rows: Rows, first: int, end: int, counts: Ints) -> int:
    """Write the number of headers of each row -> -1, or the first row with malformed headers."""
    for row in range(first, end):
        after = rows.record_end[row]
        count, at = read_varint(buf, rows.headers_at[row])
        # A header has at least two bytes, which bounds the count.
        if at < 0 or at > after or count < 0 or count > (after - at) >> 1:
            return row
        for _ in range(count):
            key_bytes, at = read_varint(buf, at)
            if at < 0 or key_bytes < 0 or key_bytes > after - at:
                return row
            value_bytes, at = read_varint(buf, at + key_bytes)
            if at < 0 or value_bytes < -1 or max(value_bytes, 0) > after - at:
                return row
            at += max(value_bytes, 0)
        if at != after:
            return row
        counts[row] = count
    return -1


@kernel
def locate_headers(buf: Bytes, rows: Rows, first: int, end: int, starts: Ints, sizes: Ints) -> None:
    """Write positions and sizes of the keys and values of measured headers: two per header."""
    entry = 0
    for row in range(first, end):
        count, at = read_varint(buf, rows.headers_at[row])
        for _ in range(2 * count):
            size, at = read_varint(buf, at)
            starts[entry] = at
            sizes[entry] = size
            at += max(size, 0)
            entry += 1


@kernel
def offset_after(buf: Bytes, end: int) -> int:
    """Return the offset after the last whole batch of `buf[:end]`, by lengths alone; -1: none."""
    at = 0
    offset = -1
    while end - at >= HEADER_BYTES:
        size = load_be32(buf, at + LENGTH_POSITION) + LENGTH_BYTES
        if size < HEADER_BYTES or size > end - at:
            break
        offset = load_be64(buf, at) + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION) + 1
        at += size
    return offset
