"""Check the decompressed records of a produced batch, or find one of them by its timestamp.

Rules: trusts no length; returns a code and the indexes of invalid records, and raises nothing.
The check covers all that the cleaner relies on later: the offset deltas are 0, 1, 2, ..., all
fields are inside their record, and the records fill the batch.

Layout: "Record" of the Kafka protocol guide.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np

from storage.kernels.primitives import Bytes, Ints, kernel, read_varint, read_varlong


class RecordCode(IntEnum):
    """The result of a check."""

    VALID = 0
    MALFORMED = 1  # an impossible length, count or number
    OFFSETS = 2  # offset deltas other than 0, 1, 2, ...
    LEFT_OVER = 3  # bytes after the last record
    NULL_KEY = 4
    TIMESTAMP = 5


class TimestampTarget(NamedTuple):
    """The record to find in a batch: the first one of those at or after a time in ms."""

    base_timestamp: int  # of the batch header
    has_one_timestamp: bool  # LogAppendTime: the base timestamp, whatever the deltas
    first_delta: int  # the offset delta from which on records count
    last_delta: int  # of the batch header
    at_least_ms: int
    is_largest: bool  # of these, the first one with the largest timestamp


VALID: Final = int(RecordCode.VALID)
MALFORMED: Final = int(RecordCode.MALFORMED)
OFFSETS: Final = int(RecordCode.OFFSETS)
LEFT_OVER: Final = int(RecordCode.LEFT_OVER)
NULL_KEY: Final = int(RecordCode.NULL_KEY)
TIMESTAMP: Final = int(RecordCode.TIMESTAMP)

NO_TIMESTAMP: Final = -1
LARGEST_INT64: Final = (1 << 63) - 1
SMALLEST_INT64: Final = -(1 << 63)
_BODY_BYTES_MIN: Final = 6  # attributes, two deltas, two lengths, a count: one byte each


@kernel
def skip_headers(buf: Bytes, position: int, end: int) -> int:
    """Return the position after the headers of a record, -1 if they exceed `end`."""
    count, at = read_varint(buf, position, end)
    if at < 0 or count < 0:
        return -1
    for _ in range(count):
        key_bytes, at = read_varint(buf, at, end)
        if at < 0 or key_bytes < 0 or key_bytes > end - at:
            return -1
        value_bytes, at = read_varint(buf, at + key_bytes, end)
        if at < 0 or value_bytes < -1 or value_bytes > end - at:
            return -1
        at += max(value_bytes, 0)
    return at


@kernel
def read_record(buf: Bytes, position: int, end: int) -> tuple[int, int, int, int]:
    """Read a record -> (next position, timestamp delta, offset delta, key bytes).

    The next position is -1 if the record is malformed or exceeds `end`. A null key has -1 bytes.
    """
    bad = (-1, 0, 0, 0)
    length, at = read_varint(buf, position, end)
    if at < 0 or length < _BODY_BYTES_MIN or length > end - at:
        return bad
    after = at + length
    time_delta, at = read_varlong(buf, at + 1, after)
    if at < 0:
        return bad
    offset_delta, at = read_varint(buf, at, after)
    if at < 0:
        return bad
    key_bytes, at = read_varint(buf, at, after)
    if at < 0 or key_bytes < -1 or key_bytes > after - at:
        return bad
    value_bytes, at = read_varint(buf, at + max(key_bytes, 0), after)
    if at < 0 or value_bytes < -1 or value_bytes > after - at:
        return bad
    if skip_headers(buf, at + max(value_bytes, 0), after) != after:
        return bad
    return after, time_delta, offset_delta, key_bytes


@kernel
def is_outside(base: int, delta: int, first_ms: int, last_ms: int) -> bool:
    """Return whether `base + delta` is outside `[first_ms, last_ms]` or exceeds an int64."""
    if delta > 0 and base > LARGEST_INT64 - delta:
        return True
    if delta < 0 and base < SMALLEST_INT64 - delta:
        return True
    timestamp = base + delta
    return timestamp != NO_TIMESTAMP and (timestamp < first_ms or timestamp > last_ms)


@kernel
def check_records_kernel(
    buf: Bytes,
    position: int,
    record_count: int,
    base_timestamp: int,
    first_ms: int,
    last_ms: int,
    needs_keys: bool,
    failed: Ints,
) -> tuple[int, int, int]:
    """Check the `record_count` records that must fill `buf[position:]`.

    -> (code, failures, the largest timestamp, if the code is VALID). Timestamps must be in
    `[first_ms, last_ms]`; `base_timestamp` is that of the header. A malformed record ends the
    check; its index is the first of `failed`. Records with a null key or a time outside the window
    are counted, and `failed` gets the indexes of the first ones, as many as it holds. If both occur
    the code is TIMESTAMP, as in Kafka.

    `buf` is a read-only memoryview in fact, and the rules are plain numbers: an array and a tuple
    take 2 us more, for each produced batch.
    """
    code = VALID
    failures = 0
    largest_ms = SMALLEST_INT64
    at = position
    end = buf.shape[0]
    for index in range(record_count):
        at, time_delta, offset_delta, key_bytes = read_record(buf, at, end)
        if at < 0 or offset_delta != index:
            if failed.shape[0] > 0:
                failed[0] = index
            return (MALFORMED if at < 0 else OFFSETS), 1, 0
        keyless = needs_keys and key_bytes < 0
        untimely = is_outside(base_timestamp, time_delta, first_ms, last_ms)
        if keyless or untimely:
            if failures < failed.shape[0]:
                failed[failures] = index
            failures += 1
            code = TIMESTAMP if untimely or code == TIMESTAMP else NULL_KEY
        largest_ms = max(largest_ms, base_timestamp + time_delta)
    if at != end:
        return LEFT_OVER, 0, 0
    return code, failures, largest_ms


@kernel
def find_timestamp_kernel(
    buf: Bytes, record_count: int, target: TimestampTarget
) -> tuple[int, int, int]:
    """Find the target among `record_count` records -> (code, offset delta, timestamp).

    The delta is -1 if there is no such record. Records after a first match are not checked;
    without `is_largest` the walk ends there.
    """
    best_delta, best_ms = -1, 0
    last_delta = -1
    at = 0
    end = buf.shape[0]
    for _ in range(record_count):
        at, time_delta, offset_delta, _ = read_record(buf, at, end)
        if at < 0:
            return MALFORMED, -1, 0
        if offset_delta <= last_delta or offset_delta > target.last_delta:
            return OFFSETS, -1, 0
        last_delta = offset_delta
        if target.has_one_timestamp:
            time_delta = 0
        timestamp = target.base_timestamp + time_delta  # wraps, as in Java
        if offset_delta < target.first_delta or timestamp < target.at_least_ms:
            continue
        if best_delta < 0 or timestamp > best_ms:
            best_delta, best_ms = offset_delta, timestamp
            if not target.is_largest:
                return VALID, best_delta, best_ms
    if at != end:
        return LEFT_OVER, -1, 0
    return VALID, best_delta, best_ms


def warm_up_records() -> None:
    """Compile the kernels of this module, or load them from the cache."""
    body = b"\x0c" + bytes(6)
    produced: Any = memoryview(body)
    failed = np.zeros(1, dtype=np.int64)
    code, _, _ = check_records_kernel(
        produced, 0, 1, 0, SMALLEST_INT64, LARGEST_INT64, True, failed
    )
    assert code == VALID
    target = TimestampTarget(
        0, has_one_timestamp=False, first_delta=0, last_delta=0, at_least_ms=0, is_largest=False
    )
    buf = np.frombuffer(body, dtype=np.uint8)
    assert find_timestamp_kernel(buf, 1, target) == (VALID, 0, 0)
