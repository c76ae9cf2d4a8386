"""Walk untrusted batches and records of format v2, and index their keys.

Rules
- `buf[:end]` is the input; SLACK_BYTES after it are readable.
- Every length is compared with the end of its container before it is used.
- A batch is indexed only if its CRC matches and all of its records are valid: keys of a damaged
  batch never enter the map.
- Source of the layout: record batch and record of the Kafka protocol guide.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.crc import crc32c
from cleaner.engine.kernels.codecs.hashing import siphash128
from cleaner.engine.kernels.codecs.memory import load_be16, load_be32, load_be64, read_varint
from cleaner.engine.kernels.compile import Bytes, Ints, inlined, kernel
from cleaner.engine.kernels.layout import (
    ABORTED_WORDS,
    ATTR_CODEC,
    ATTR_CONTROL,
    ATTR_OF_TRANSACTION,
    ATTR_TRANSACTIONAL,
    ATTRIBUTES_POSITION,
    CODEC_POSITION,
    CRC_POSITION,
    HEADER_BYTES,
    LARGEST_BASE_OFFSET,
    LARGEST_INT32,
    LAST_OFFSET_DELTA_POSITION,
    LENGTH_BYTES,
    LENGTH_POSITION,
    MAGIC_POSITION,
    PRODUCER_ID_POSITION,
    RECORD_BYTES_MIN,
    RECORD_COUNT_POSITION,
    Code,
    Workspace,
)
from cleaner.engine.kernels.passes.fingerprint_table import put_keys
from cleaner.engine.kernels.passes.producer_set import add_producer, remove_producer

# Plain numbers: kernels compare them thousands of times a call.
MORE = int(Code.MORE)
DONE = int(Code.DONE)
COMPRESSED = int(Code.COMPRESSED)
MAP_FULL = int(Code.MAP_FULL)
BAD_LENGTH = int(Code.BAD_LENGTH)
OLD_FORMAT = int(Code.OLD_FORMAT)
BAD_MAGIC = int(Code.BAD_MAGIC)
BAD_CRC = int(Code.BAD_CRC)
BAD_OFFSETS = int(Code.BAD_OFFSETS)
BAD_COUNT = int(Code.BAD_COUNT)
BAD_CODEC = int(Code.BAD_CODEC)
BAD_RECORD = int(Code.BAD_RECORD)

PRODUCERS_FULL = int(Code.PRODUCERS_FULL)
MISINDEXED = int(Code.MISINDEXED)

ABORT = 0
COMMIT = 1
NO_MARKER = -1
_CONTROL_KEY_BYTES = 4  # version, type: int16 each

_BATCH_LENGTH_MIN = HEADER_BYTES - LENGTH_BYTES
_CODECS = 5


@inlined
def check_header(buf: Bytes, at: int, end: int, state: Ints) -> tuple[int, int]:
    """Check the header of the batch at `at` -> (DONE, size in bytes) or (fault, 0).

    MORE comes with the size in the header, 0 if the header is incomplete.
    """
    if end - at < HEADER_BYTES:
        return MORE, 0
    length = load_be32(buf, at + LENGTH_POSITION)
    magic = buf[at + MAGIC_POSITION]
    if magic != 2:
        return (OLD_FORMAT if magic < 2 else BAD_MAGIC), 0
    if length < _BATCH_LENGTH_MIN or length > LARGEST_INT32:
        return BAD_LENGTH, 0
    base = load_be64(buf, at)
    delta = load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
    if base < state[fields.NEXT_OFFSET] or base > LARGEST_BASE_OFFSET or delta > LARGEST_INT32:
        return BAD_OFFSETS, 0
    if base + delta >= state[fields.SOURCE_END]:
        return BAD_OFFSETS, 0
    if load_be32(buf, at + RECORD_COUNT_POSITION) > delta + 1:
        return BAD_COUNT, 0
    size = length + LENGTH_BYTES
    return (DONE if at + size <= end else MORE), size


@kernel
def count_records(buf: Bytes, at: int, end: int) -> int:
    """Return the maximum number of records in the uncompressed batches of `buf[at:end]`."""
    total = 0
    while end - at >= HEADER_BYTES:
        length = load_be32(buf, at + LENGTH_POSITION)
        if length < _BATCH_LENGTH_MIN:
            break
        if buf[at + CODEC_POSITION] & ATTR_CODEC == 0:
            total += load_be32(buf, at + RECORD_COUNT_POSITION)
        at += length + LENGTH_BYTES
    return total


@inlined
def check_content(buf: Bytes, at: int, size: int) -> int:
    """Check the CRC of a whole batch, then its codec and record count -> DONE or the fault."""
    if crc32c(buf, at + ATTRIBUTES_POSITION, at + size) != load_be32(buf, at + CRC_POSITION):
        return BAD_CRC
    attributes = load_be16(buf, at + ATTRIBUTES_POSITION)
    count = load_be32(buf, at + RECORD_COUNT_POSITION)
    codec = attributes & ATTR_CODEC
    if codec >= _CODECS:
        return BAD_CODEC
    if codec == 0 and count * RECORD_BYTES_MIN > size - HEADER_BYTES:
        return BAD_COUNT
    if codec == 0 and count == 0 and size != HEADER_BYTES:
        return BAD_RECORD
    return DONE


@inlined
def read_record(buf: Bytes, at: int, end: int) -> tuple[int, int, int, int, int, int]:
    """Read a record -> (its end, time delta, offset delta, key position, key bytes, value bytes).

    A null key or value has -1 bytes. The end is -1 if the record is malformed or exceeds `end`.
    """
    bad = (-1, 0, 0, 0, 0, 0)
    length, start = read_varint(buf, at)
    if start < 0 or length < RECORD_BYTES_MIN - 1 or length > end - start:
        return bad
    after = start + length
    time_delta, at = read_varint(buf, start + 1)
    if at < 0 or at > after:
        return bad
    offset_delta, at = read_varint(buf, at)
    if at < 0 or at > after:
        return bad
    key_bytes, key_at = read_varint(buf, at)
    if key_at < 0 or key_bytes < -1 or key_bytes > after - key_at:
        return bad
    value_bytes, at = read_varint(buf, key_at + max(key_bytes, 0))
    # At least one byte, the number of headers, follows the value.
    if at < 0 or value_bytes < -1 or max(value_bytes, 0) >= after - at:
        return bad
    return after, time_delta, offset_delta, key_at, key_bytes, value_bytes


@kernel
def check_records(buf: Bytes, at: int, end: int, count: int, last_delta: int) -> bool:
    """Return whether `count` records with ascending offsets fill `buf[at:end]`."""
    previous = -1
    for _ in range(count):
        at, _, delta, _, _, _ = read_record(buf, at, end)
        if at < 0 or delta <= previous or delta > last_delta:
            return False
        previous = delta
    return at == end


@kernel
def aborted_row(aborted: Ints, producer: int, first: int, last: int) -> int:
    """Return the row of the aborted transaction of a batch [first, last], or -1."""
    low = 0
    high = aborted.shape[0] // ABORTED_WORDS
    while low < high:
        middle = (low + high) >> 1
        row = middle * ABORTED_WORDS
        if aborted[row] < producer or (aborted[row] == producer and aborted[row + 1] <= last):
            low = middle + 1
        else:
            high = middle
    row = (low - 1) * ABORTED_WORDS
    if low > 0 and aborted[row] == producer and aborted[row + 2] >= first:
        return low - 1
    return -1


@inlined
def marker_type(buf: Bytes, at: int, end: int) -> int:
    """Return ABORT, COMMIT or NO_MARKER, from the first record of `buf[at:end]`."""
    after, _, _, key_at, key_bytes, _ = read_record(buf, at, end)
    if after < 0 or key_bytes < _CONTROL_KEY_BYTES or buf[key_at] & 0x80 != 0:
        return NO_MARKER
    kind = load_be16(buf, key_at + 2)
    return kind if kind <= COMMIT else NO_MARKER


@inlined
def _check_marker(buf: Bytes, at: int, size: int, space: Workspace) -> int:
    """Compare a marker with the transaction indexes -> DONE, or MISINDEXED if they contradict it.

    They do if an ABORT marker ends data that no entry covers, or if an entry extends past a marker
    of its producer: the cleaner would then confuse two transactions.
    """
    kind = NO_MARKER
    if (
        load_be32(buf, at + RECORD_COUNT_POSITION) > 0
        and load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_CODEC == 0
    ):
        kind = marker_type(buf, at + HEADER_BYTES, at + size)
    producer = load_be64(buf, at + PRODUCER_ID_POSITION)
    if kind == NO_MARKER or producer < 0:
        return DONE
    base = load_be64(buf, at)
    has_data = remove_producer(space.open_producers, space.state, producer)
    row = aborted_row(space.aborted, producer, base, base)
    if kind == COMMIT:
        return DONE if row < 0 else MISINDEXED
    if has_data:
        return MISINDEXED
    if row >= 0:
        if space.aborted[row * ABORTED_WORDS + 2] != base:
            return MISINDEXED
        space.aborted_kept[row] = 1
    return DONE


@kernel
def check_transaction(buf: Bytes, at: int, size: int, space: Workspace) -> tuple[int, bool]:
    """Compare a control or transactional batch with the transaction indexes.

    -> (DONE, MISINDEXED or PRODUCERS_FULL, whether its keys supersede others). Those of control
    batches and aborted data do not. Sets `aborted_kept` for entries whose marker is found.
    PRODUCERS_FULL: `open_producers` must grow; nothing was done.
    """
    attributes = load_be16(buf, at + ATTRIBUTES_POSITION)
    space.state[fields.TRANSACTIONS_SEEN] = 1
    if attributes & ATTR_CONTROL != 0:
        return _check_marker(buf, at, size, space), False
    producer = load_be64(buf, at + PRODUCER_ID_POSITION)
    if attributes & ATTR_TRANSACTIONAL == 0 or producer < 0:
        return DONE, True
    base = load_be64(buf, at)
    last = base + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
    if aborted_row(space.aborted, producer, base, last) >= 0:
        return DONE, False
    if load_be32(buf, at + RECORD_COUNT_POSITION) > 0 and not add_producer(
        space.open_producers, space.state, producer
    ):
        return PRODUCERS_FULL, False
    return DONE, True


@inlined
def _flush(space: Workspace, pending: int) -> bool:
    done = put_keys(space.table, space.state, space.lows, space.highs, space.offsets, pending)
    if done == pending:
        return True
    space.state[fields.MAP_END] = space.offsets[done]
    return False


@inlined
def _index_records(
    buf: Bytes,
    at: int,
    end: int,
    header: tuple[int, int, int],
    space: Workspace,
    pending: int,
) -> tuple[int, int]:
    """Fingerprint the records of one batch -> (code, pending fingerprints)."""
    base, count, last_delta = header
    state = space.state
    chunk = space.lows.shape[0]
    if pending + count > chunk:
        if not _flush(space, pending):
            return MAP_FULL, 0
        pending = 0
        # Some keys enter the map before the last record is read: check all records first.
        if count > chunk and not check_records(buf, at, end, count, last_delta):
            return BAD_RECORD, 0
    before = pending
    previous = -1
    k0 = np.uint64(state[fields.KEY_0])
    k1 = np.uint64(state[fields.KEY_1])
    first = max(state[fields.FIRST_DIRTY], state[fields.LOG_START]) - base
    for _ in range(count):
        at, _, delta, key_at, key_bytes, _ = read_record(buf, at, end)
        if at < 0 or delta <= previous or delta > last_delta:
            return BAD_RECORD, before
        previous = delta
        if key_bytes < 0:
            state[fields.KEYLESS_SEEN] = 1
            continue
        if delta < first:
            continue
        if pending == chunk:
            if not _flush(space, pending):
                return MAP_FULL, 0
            pending = 0
        low, high = siphash128(buf, key_at, key_bytes, k0, k1)
        space.lows[pending] = low
        space.highs[pending] = high
        space.offsets[pending] = base + delta
        pending += 1
    return (DONE if at == end else BAD_RECORD), (pending if at == end else before)


@kernel
def index_batches(
    buf: Bytes,
    at: int,
    end: int,
    space: Workspace,
) -> tuple[int, int]:
    """Put the keys of the uncompressed batches from `at` on into the map -> (code, position).

    All batches before the position are indexed. COMPRESSED: the caller must unpack the batch at
    the position and call `index_unpacked`. MAP_FULL: MAP_END in `state` is the first offset that
    is not indexed. PRODUCERS_FULL: see `check_transaction`.
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
        if base + last_delta >= state[fields.FIRST_DIRTY]:
            code = check_content(buf, at, size)
            if code != DONE:
                break
            attributes = load_be16(buf, at + ATTRIBUTES_POSITION)
            has_keys = True
            if attributes & ATTR_OF_TRANSACTION != 0:
                code, has_keys = check_transaction(buf, at, size, space)
                if code != DONE:
                    break
            if has_keys:
                if count > 0 and attributes & ATTR_CODEC != 0:
                    code = COMPRESSED
                    break
                header = (base, count, last_delta)
                code, pending = _index_records(
                    buf, at + HEADER_BYTES, at + size, header, space, pending
                )
                if code != DONE:
                    break
        state[fields.NEXT_OFFSET] = base + last_delta + 1
        at += size
    if code != MAP_FULL and not _flush(space, pending):
        return MAP_FULL, at
    return code, at


@kernel
def index_unpacked(
    buf: Bytes,
    end: int,
    base: int,
    count: int,
    last_delta: int,
    space: Workspace,
) -> int:
    """Put the keys of one unpacked batch, `buf[:end]`, into the map -> DONE or the fault."""
    if count * RECORD_BYTES_MIN > end:
        return BAD_COUNT
    header = (base, count, last_delta)
    code, pending = _index_records(buf, 0, end, header, space, 0)
    if code != MAP_FULL and not _flush(space, pending):
        return MAP_FULL
    if code == DONE:
        space.state[fields.NEXT_OFFSET] = base + last_delta + 1
    return code
