"""Find the records of one key in the decompressed records of a batch.

Rules
- A search says whether a key is erased, so this pass shares no code with those that clean: it reads
  the records by itself, and checks all that `iterate_records` checks.
- It trusts no length, and raises nothing.
- Whatever the records are, a batch costs one walk and no memory.
"""

from typing import Final, NamedTuple

from cleaner.engine.kernels.compile import Bytes, kernel
from storage.kernels.primitives import int64, read_varint, read_varlong
from storage.kernels.records import skip_headers

VERSION_BYTES: Final = 8
_BODY_BYTES_MIN: Final = 6  # attributes, two deltas, two lengths, a count: one byte each
_SMALLEST_INT64: Final = -(1 << 63)


class KeyTarget(NamedTuple):
    """Which records to find in a batch."""

    base_timestamp: int  # of the batch header
    has_one_timestamp: bool  # LogAppendTime: the base timestamp, whatever the deltas
    last_delta: int  # of the batch header
    end_delta: int  # records from this offset delta on do not count


class KeyMatches(NamedTuple):
    """The records of the key in a batch. A delta is an offset delta, -1 without such a record."""

    is_valid: bool  # False: a record is malformed, and nothing else is set
    values: int  # records with a value
    first_value_delta: int
    last_value_delta: int
    tombstones: int
    latest_ms: int  # the largest timestamp
    latest_delta: int  # of the last record that has it
    version: int  # the largest version
    version_delta: int  # of the last record that has it


@kernel
def _is_at(buf: Bytes, position: int, count: int, text: Bytes) -> bool:
    """Return whether the `count` bytes at a position are those of the text."""
    if count != text.shape[0]:
        return False
    for i in range(count):  # noqa: SIM110  a kernel has no generators
        if buf[position + i] != text[i]:
            return False
    return True


@kernel
def _read_version(buf: Bytes, position: int, end: int, name: Bytes) -> tuple[bool, int]:
    """Return whether the last header of the name has 8 bytes, and the number that they are.

    `skip_headers` has checked the headers.
    """
    is_version, version = False, 0
    count, at = read_varint(buf, position, end)
    for _ in range(count):
        name_bytes, at = read_varint(buf, at, end)
        name_at = at
        value_bytes, at = read_varint(buf, at + name_bytes, end)
        if _is_at(buf, name_at, name_bytes, name):
            is_version, version = value_bytes == VERSION_BYTES, 0
            if is_version:
                for i in range(VERSION_BYTES):
                    version = (version << 8) | int64(buf[at + i])
        at += max(value_bytes, 0)
    return is_version, version


@kernel
def find_key(
    buf: Bytes, record_count: int, target: KeyTarget, key: Bytes, version_header: Bytes
) -> KeyMatches:
    """Find the records of the key among `record_count` records that must fill `buf`.

    Without a name of the version header, no record has a version.
    """
    bad = KeyMatches(False, 0, -1, -1, 0, 0, -1, 0, -1)
    values, first_value, last_value, tombstones = 0, -1, -1, 0
    latest_ms, latest_delta = _SMALLEST_INT64, -1
    version, version_delta = _SMALLEST_INT64, -1
    last_delta = -1
    after = 0
    end = buf.shape[0]
    for _ in range(record_count):
        length, at = read_varint(buf, after, end)
        if at < 0 or length < _BODY_BYTES_MIN or length > end - at:
            return bad
        after = at + length
        time_delta, at = read_varlong(buf, at + 1, after)
        if at < 0:
            return bad
        delta, at = read_varint(buf, at, after)
        if at < 0 or delta <= last_delta or delta > target.last_delta:
            return bad
        last_delta = delta
        key_bytes, key_at = read_varint(buf, at, after)
        if key_at < 0 or key_bytes < -1 or key_bytes > after - key_at:
            return bad
        value_bytes, at = read_varint(buf, key_at + max(key_bytes, 0), after)
        if at < 0 or value_bytes < -1 or value_bytes > after - at:
            return bad
        headers_at = at + max(value_bytes, 0)
        if skip_headers(buf, headers_at, after) != after:
            return bad
        if delta >= target.end_delta or not _is_at(buf, key_at, key_bytes, key):
            continue
        if value_bytes < 0:
            tombstones += 1
        else:
            values += 1
            first_value = delta if first_value < 0 else first_value
            last_value = delta
        timestamp = target.base_timestamp  # the sum wraps, as in Java
        if not target.has_one_timestamp:
            timestamp += time_delta
        if timestamp >= latest_ms:
            latest_ms, latest_delta = timestamp, delta
        if version_header.shape[0] > 0:
            is_version, number = _read_version(buf, headers_at, after, version_header)
            if is_version and number >= version:
                version, version_delta = number, delta
    if after != end:
        return bad
    return KeyMatches(
        True, values, first_value, last_value, tombstones,
        latest_ms, latest_delta, version, version_delta,
    )  # fmt: skip
