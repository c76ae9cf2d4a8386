"""List the committed records of a log with a hash of what each contains.

Rules
- A record has a row: the fingerprint of its key and its offset (shards.py). Beside it are its
  contents: CONTENT_WORDS words.
- The hash covers key, value, headers and offset, under the secret of the data directory. It does
  not cover what a clean may change: timestamps, batches, compression.
- Control records, records of aborted transactions and records without a key are only counted.
- Records below the log start offset are skipped.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

from typing import Final

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.hashing import siphash128
from cleaner.engine.kernels.codecs.memory import load_be16, load_be32, load_be64
from cleaner.engine.kernels.compile import Bytes, Ints, Words, inlined, kernel
from cleaner.engine.kernels.layout import (
    ATTR_CODEC,
    ATTR_CONTROL,
    ATTR_DELETE_HORIZON,
    ATTR_TRANSACTIONAL,
    ATTRIBUTES_POSITION,
    BASE_TIMESTAMP_POSITION,
    HEADER_BYTES,
    LAST_OFFSET_DELTA_POSITION,
    PRODUCER_ID_POSITION,
    RECORD_BYTES_MIN,
    RECORD_COUNT_POSITION,
    SLOT_WORDS,
    Workspace,
)
from cleaner.engine.kernels.passes.walk import (
    BAD_COUNT,
    BAD_RECORD,
    COMPRESSED,
    DONE,
    aborted_row,
    check_content,
    check_header,
    read_record,
)

# The contents of a record: two words of hash, its size in bytes, and KIND_...
CONTENT_WORDS: Final = 4
VALUE: Final = 0
TOMBSTONE: Final = 1
EXPIRED_TOMBSTONE: Final = 2  # its delete horizon has passed

# Indexes into `counts`.
KEYLESS: Final = 0
ABORTED: Final = 1  # in whole batches, also those that begin below the log start offset
COUNTS: Final = 2


@inlined
def _list_records(
    source: Bytes, at: int, end: int, buf: Bytes, header_at: int, rows: Words, contents: Words,
    listed: int, counts: Ints, state: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Append the records of one batch -> (DONE or BAD_RECORD, records listed)."""
    base = load_be64(buf, header_at)
    last_delta = load_be32(buf, header_at + LAST_OFFSET_DELTA_POSITION)
    count = load_be32(buf, header_at + RECORD_COUNT_POSITION)
    has_horizon = load_be16(buf, header_at + ATTRIBUTES_POSITION) & ATTR_DELETE_HORIZON != 0
    is_expired = (
        has_horizon and load_be64(buf, header_at + BASE_TIMESTAMP_POSITION) <= state[fields.NOW_MS]
    )
    k0 = np.uint64(state[fields.KEY_0])
    k1 = np.uint64(state[fields.KEY_1])
    first = state[fields.LOG_START] - base
    before = listed
    keyless = 0
    previous = -1
    for _ in range(count):
        begin = at
        at, _, delta, key_at, key_bytes, value_bytes = read_record(source, at, end)
        if at < 0 or delta <= previous or delta > last_delta:
            return BAD_RECORD, before
        previous = delta
        if delta < first:
            continue
        if key_bytes < 0:
            keyless += 1
            continue
        low, high = siphash128(source, key_at, key_bytes, k0, k1)
        to = listed * SLOT_WORDS
        rows[to] = low
        rows[to + 1] = high
        rows[to + 2] = np.uint64(base + delta + 1)
        # The offset and the length of the key are part of the hash's key: two records of one
        # content have different hashes.
        low, high = siphash128(
            source, key_at, at - key_at, k0 ^ np.uint64(base + delta), k1 ^ np.uint64(key_bytes)
        )
        to = listed * CONTENT_WORDS
        contents[to] = low
        contents[to + 1] = high
        contents[to + 2] = np.uint64(at - begin)
        kind = VALUE
        if value_bytes < 0:
            kind = EXPIRED_TOMBSTONE if is_expired else TOMBSTONE
        contents[to + 3] = np.uint64(kind)
        listed += 1
    if at != end:
        return BAD_RECORD, before
    counts[KEYLESS] += keyless
    return DONE, listed


@kernel
def list_contents(
    buf: Bytes, at: int, end: int, rows: Words, contents: Words, listed: int, counts: Ints,
    space: Workspace,
) -> tuple[int, int, int]:  # fmt: skip
    """Append the records of the batches from `at` on -> (code, position, records listed).

    `rows` and `contents` have room for all records of the buffer. COMPRESSED: the caller must
    unpack the batch at the position and call `list_unpacked_contents`.
    """
    state = space.state
    while True:
        code, size = check_header(buf, at, end, state)
        if code != DONE:
            return code, at, listed
        base = load_be64(buf, at)
        last = base + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
        count = load_be32(buf, at + RECORD_COUNT_POSITION)
        code = check_content(buf, at, size)
        if code != DONE:
            return code, at, listed
        attributes = load_be16(buf, at + ATTRIBUTES_POSITION)
        producer = load_be64(buf, at + PRODUCER_ID_POSITION)
        is_aborted = (
            attributes & ATTR_TRANSACTIONAL != 0
            and attributes & ATTR_CONTROL == 0
            and producer >= 0
            and aborted_row(space.aborted, producer, base, last) >= 0
        )
        if count == 0 or last < state[fields.LOG_START] or attributes & ATTR_CONTROL != 0:
            pass
        elif is_aborted:
            counts[ABORTED] += count
        elif attributes & ATTR_CODEC != 0:
            return COMPRESSED, at, listed
        else:
            code, listed = _list_records(
                buf, at + HEADER_BYTES, at + size, buf, at, rows, contents, listed, counts, state
            )
            if code != DONE:
                return code, at, listed
        state[fields.NEXT_OFFSET] = last + 1
        at += size


@kernel
def list_unpacked_contents(
    source: Bytes, end: int, buf: Bytes, at: int, rows: Words, contents: Words, listed: int,
    counts: Ints, space: Workspace,
) -> tuple[int, int]:  # fmt: skip
    """Append the records of the unpacked batch `source[:end]`, with its header at `buf[at:]`.

    -> (code, records listed).
    """
    state = space.state
    if load_be32(buf, at + RECORD_COUNT_POSITION) * RECORD_BYTES_MIN > end:
        return BAD_COUNT, listed
    code, listed = _list_records(source, 0, end, buf, at, rows, contents, listed, counts, state)
    if code == DONE:
        last = load_be64(buf, at) + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
        state[fields.NEXT_OFFSET] = last + 1
    return code, listed
