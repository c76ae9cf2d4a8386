"""The walk over the records of a produced batch, compiled.

Rules: sees one batch's records, decompressed; trusts none of their lengths; answers a code and the
indexes of the records it is about, and raises nothing. Everything that the cleaner will rely on
later is checked here: offsets 0, 1, 2, ..., all fields within their record, nothing left over.

Layout: "Record" of the Kafka protocol guide.
"""

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from storage.kernels.primitives import Bytes, Ints, kernel, read_varint, read_varlong


class RecordCode(IntEnum):
    """What the walk found."""

    VALID = 0
    MALFORMED = 1  # a length, a count or a number that cannot be
    OFFSETS = 2  # offset deltas other than 0, 1, 2, ...
    LEFT_OVER = 3  # bytes behind the last record
    NULL_KEY = 4
    TIMESTAMP = 5


class RecordRules(NamedTuple):
    """What the records of a batch are held against; times in ms, both ends allowed."""

    base_timestamp: int  # of the batch header
    first_ms: int
    last_ms: int
    needs_keys: bool


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
    """The position behind the headers of a record, -1 if they do not fit before `end`."""
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
    """One record -> (next position, timestamp delta, offset delta, key bytes).

    The next position is -1 for a record that does not fit or contradicts itself; -1 key bytes
    are a null key.
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
    """Whether the time `base + delta` lies outside `[first_ms, last_ms]`, or in no int64."""
    if delta > 0 and base > LARGEST_INT64 - delta:
        return True
    if delta < 0 and base < SMALLEST_INT64 - delta:
        return True
    timestamp = base + delta
    return timestamp != NO_TIMESTAMP and (timestamp < first_ms or timestamp > last_ms)


@kernel
def check_records_kernel(
    buf: Bytes,
    record_count: int,
    rules: RecordRules,
    failed: Ints,
) -> tuple[int, int]:
    """Walk the `record_count` records that have to fill `buf` -> (code, failures).

    A malformed record ends the walk, and `failed[0]` is its index. Null keys and times outside
    the window are counted, and the first ones written to `failed`; a time among them decides the
    code, as in Kafka.
    """
    code = VALID
    failures = 0
    at = 0
    end = buf.shape[0]
    for index in range(record_count):
        at, time_delta, offset_delta, key_bytes = read_record(buf, at, end)
        if at < 0 or offset_delta != index:
            failed[0] = index
            return (MALFORMED if at < 0 else OFFSETS), 1
        keyless = rules.needs_keys and key_bytes < 0
        untimely = is_outside(rules.base_timestamp, time_delta, rules.first_ms, rules.last_ms)
        if keyless or untimely:
            if failures < failed.shape[0]:
                failed[failures] = index
            failures += 1
            code = TIMESTAMP if untimely or code == TIMESTAMP else NULL_KEY
    if at != end:
        return LEFT_OVER, 0
    return code, failures


def warm_up_records() -> None:
    """Compile the walk, or load it from the cache, for the one type it is called with."""
    buf = np.frombuffer(b"\x0c" + bytes(6), dtype=np.uint8)
    failed = np.zeros(1, dtype=np.int64)
    rules = RecordRules(0, SMALLEST_INT64, LARGEST_INT64, needs_keys=True)
    code, _ = check_records_kernel(buf, 1, rules, failed)
    assert code == VALID
