"""Index each key's last record and count records, for readers of a log as a table.

Rules
- All records from the log start offset on are indexed, also below the first dirty offset.
- The map marks tombstones (shards.DELETES), so that deleted keys are known without reading the
  records again.
- Control records, aborted records and records without a key are only counted.
- A damaged batch is not counted, and none of its keys enters the map.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

from typing import Final

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.hashing import siphash128
from cleaner.engine.kernels.codecs.memory import load_be16, load_be32, load_be64
from cleaner.engine.kernels.compile import Bytes, Ints, inlined, int64, kernel
from cleaner.engine.kernels.layout import (
    ATTR_CODEC,
    ATTR_CONTROL,
    ATTR_LOG_APPEND_TIME,
    ATTR_OF_TRANSACTION,
    ATTRIBUTES_POSITION,
    BASE_TIMESTAMP_POSITION,
    HEADER_BYTES,
    LAST_OFFSET_DELTA_POSITION,
    MAX_TIMESTAMP_POSITION,
    RECORD_BYTES_MIN,
    RECORD_COUNT_POSITION,
    Workspace,
)
from cleaner.engine.kernels.passes.fingerprint_table import put_keys
from cleaner.engine.kernels.passes.walk import (
    BAD_COUNT,
    BAD_RECORD,
    COMPRESSED,
    DONE,
    MAP_FULL,
    check_content,
    check_header,
    check_records,
    check_transaction,
    read_record,
)

# Indexes into `counts`.
BATCHES: Final = 0
RECORDS: Final = 1  # without control records
CONTROL: Final = 2  # control records
ABORTED: Final = 3  # of RECORDS
KEYLESS: Final = 4  # of RECORDS
NULL_VALUES: Final = 5  # of RECORDS: tombstones
KEY_BYTES: Final = 6
VALUE_BYTES: Final = 7
FIRST_MS: Final = 8  # smallest and largest timestamp of committed records
LAST_MS: Final = 9
COUNTS: Final = 10

NO_FIRST_MS: Final = (1 << 63) - 1
NO_LAST_MS: Final = -1
_DELETES: Final = -(1 << 63)  # shards.DELETES, as an int64


@inlined
def _flush(space: Workspace, pending: int) -> bool:
    done = put_keys(space.table, space.state, space.lows, space.highs, space.offsets, pending)
    return bool(done == pending)


@inlined
def _count_and_index_records(
    source: Bytes, at: int, end: int, buf: Bytes, header_at: int, counts: Ints, space: Workspace,
    pending: int,
) -> tuple[int, int]:  # fmt: skip
    """Index the records of one committed batch -> (code, pending fingerprints)."""
    state = space.state
    base = load_be64(buf, header_at)
    last_delta = load_be32(buf, header_at + LAST_OFFSET_DELTA_POSITION)
    count = load_be32(buf, header_at + RECORD_COUNT_POSITION)
    base_ms = load_be64(buf, header_at + BASE_TIMESTAMP_POSITION)
    has_append_time = load_be16(buf, header_at + ATTRIBUTES_POSITION) & ATTR_LOG_APPEND_TIME != 0
    append_ms = load_be64(buf, header_at + MAX_TIMESTAMP_POSITION)
    chunk = space.lows.shape[0]
    if pending + count > chunk:
        if not _flush(space, pending):
            return MAP_FULL, 0
        pending = 0
        if count > chunk and not check_records(source, at, end, count, last_delta):
            return BAD_RECORD, 0
    before = pending
    k0 = np.uint64(state[fields.KEY_0])
    k1 = np.uint64(state[fields.KEY_1])
    first = state[fields.LOG_START] - base
    first_ms = counts[FIRST_MS]
    last_ms = counts[LAST_MS]
    records = keyless = deletes = keys_bytes = values_bytes = 0
    previous = -1
    for _ in range(count):
        at, time_delta, delta, key_at, key_bytes, value_bytes = read_record(source, at, end)
        if at < 0 or delta <= previous or delta > last_delta:
            return BAD_RECORD, before
        previous = delta
        if delta < first:
            continue
        records += 1
        timestamp_ms = append_ms if has_append_time else base_ms + time_delta
        first_ms = min(first_ms, timestamp_ms)
        last_ms = max(last_ms, timestamp_ms)
        values_bytes += max(value_bytes, 0)
        if key_bytes < 0:
            keyless += 1
            continue
        keys_bytes += key_bytes
        if pending == chunk:
            if not _flush(space, pending):
                return MAP_FULL, 0
            pending = 0
        low, high = siphash128(source, key_at, key_bytes, k0, k1)
        offset = int64(base + delta)
        if value_bytes < 0:
            deletes += 1
            offset += _DELETES
        space.lows[pending] = low
        space.highs[pending] = high
        space.offsets[pending] = offset
        pending += 1
    if at != end:
        return BAD_RECORD, before
    counts[RECORDS] += records
    counts[KEYLESS] += keyless
    counts[NULL_VALUES] += deletes
    counts[KEY_BYTES] += keys_bytes
    counts[VALUE_BYTES] += values_bytes
    counts[FIRST_MS] = first_ms
    counts[LAST_MS] = last_ms
    return DONE, pending


@kernel
def count_and_index(
    buf: Bytes, at: int, end: int, counts: Ints, space: Workspace
) -> tuple[int, int]:
    """Count the batches from `at` on and put their keys into the map -> (code, position).

    All batches before the position are indexed. COMPRESSED: the caller must unpack the batch at
    the position and call `count_and_index_unpacked`. PRODUCERS_FULL: see `check_transaction`.
    MAP_FULL: some keys are missing.
    """
    state = space.state
    pending = 0
    while True:
        code, size = check_header(buf, at, end, state)
        if code != DONE:
            break
        base = load_be64(buf, at)
        last_delta = load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
        count = load_be32(buf, at + RECORD_COUNT_POSITION)
        code = check_content(buf, at, size)
        if code != DONE:
            break
        attributes = load_be16(buf, at + ATTRIBUTES_POSITION)
        has_keys = True
        if attributes & ATTR_OF_TRANSACTION != 0:
            code, has_keys = check_transaction(buf, at, size, space)
            if code != DONE:
                break
        if base + last_delta < state[fields.LOG_START]:
            count = 0
        elif not has_keys and attributes & ATTR_CONTROL != 0:
            counts[CONTROL] += count
        elif not has_keys:
            counts[RECORDS] += count
            counts[ABORTED] += count
        elif count > 0 and attributes & ATTR_CODEC != 0:
            code = COMPRESSED
            break
        elif count > 0:
            code, pending = _count_and_index_records(
                buf, at + HEADER_BYTES, at + size, buf, at, counts, space, pending
            )
            if code != DONE:
                break
        counts[BATCHES] += 1
        state[fields.NEXT_OFFSET] = base + last_delta + 1
        at += size
    if code != MAP_FULL and not _flush(space, pending):
        return MAP_FULL, at
    return code, at


@kernel
def count_and_index_unpacked(
    source: Bytes, end: int, buf: Bytes, at: int, counts: Ints, space: Workspace
) -> int:
    """Count and index the unpacked records `source[:end]` of the batch at `buf[at:]` -> code."""
    if load_be32(buf, at + RECORD_COUNT_POSITION) * RECORD_BYTES_MIN > end:
        return BAD_COUNT
    code, pending = _count_and_index_records(source, 0, end, buf, at, counts, space, 0)
    if code != MAP_FULL and not _flush(space, pending):
        return MAP_FULL
    if code == DONE:
        counts[BATCHES] += 1
        last = load_be64(buf, at) + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
        space.state[fields.NEXT_OFFSET] = last + 1
    return code
