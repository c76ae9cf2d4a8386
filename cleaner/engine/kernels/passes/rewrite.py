"""The second pass: select the surviving records and write their batches.

Rules (Kafka's log cleaner; KIP-534 for tombstones)
- Transactions are handled first (passes/transactions.py); the other rules are for committed data.
- Records below the log start offset are removed. Batches at or above the end of the map are copied.
- Records without a key, and records older than the last offset of their key, are removed.
- A tombstone is removed once its batch has a delete horizon that has passed. A batch that keeps a
  tombstone and has no horizon gets one if the whole batch was indexed: the horizon replaces the
  base timestamp, and all time deltas are relative to it. The time is CleanJob.delete_horizon_ms,
  and two_pass/group_accounting.py decides whether a group may set it.
- A batch without a change is copied byte for byte. A batch that loses records keeps its base and
  last offset, sequences, producer, epoch and flags; count, length, maxTimestamp (CreateTime) and
  CRC are new. The bytes of its records are copied.
- In a compacted view tombstones are removed at once, and records without a key may stay.
- A batch without a survivor is removed, or stays as a bare header if it has a producer's last
  sequence or the last offset of the log.
- In the indexed section a bitmap of surviving offsets decides: one bit instead of a fingerprint,
  and a batch without a set bit is not even unpacked. Elsewhere the map decides.
- The CRC of a batch is verified before any of it is written, and before its header alone decides
  that it has no record to keep. A batch that the first pass verified is dropped unread.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.hashing import siphash128
from cleaner.engine.kernels.codecs.memory import (
    SLACK_BYTES,
    copy_bytes,
    load_be16,
    load_be32,
    load_be64,
    load_u64,
)
from cleaner.engine.kernels.compile import Bytes, Ints, inlined, kernel
from cleaner.engine.kernels.layout import (
    ATTR_CODEC,
    ATTR_CONTROL,
    ATTR_DELETE_HORIZON,
    ATTR_OF_TRANSACTION,
    ATTRIBUTES_POSITION,
    BASE_TIMESTAMP_POSITION,
    GROWN_BYTES_PER_RECORD,
    HEADER_BYTES,
    LAST_OFFSET_DELTA_POSITION,
    RECORD_BYTES_MIN,
    RECORD_COUNT_POSITION,
    Code,
    Workspace,
)
from cleaner.engine.kernels.passes.fingerprint_table import find_keys
from cleaner.engine.kernels.passes.rebuilt_batch import (
    copy_whole,
    finish_empty,
    note_horizon,
    restamp,
    write_header,
)
from cleaner.engine.kernels.passes.transactions import finish_transactional
from cleaner.engine.kernels.passes.walk import (
    BAD_COUNT,
    BAD_RECORD,
    COMPRESSED,
    DONE,
    check_content,
    check_header,
    read_record,
)

OUTPUT_FULL = int(Code.OUTPUT_FULL)
NEXT_WINDOW = int(Code.NEXT_WINDOW)

_DROP = 0
_COPY = 1
_ASK_BITS = 2
_ASK_MAP = 3
_WINDOW = 4


@inlined
def any_bit(bits: Bytes, first: int, last: int) -> bool:
    """Return whether a bit of [first, last] is set."""
    byte = first >> 3
    last_byte = last >> 3
    tail = 0xFF >> (7 - (last & 7))
    head = 0xFF << (first & 7)
    if byte == last_byte:
        return bool(bits[byte] & head & tail != 0)
    if bits[byte] & head & 0xFF != 0 or bits[last_byte] & tail != 0:
        return True
    byte += 1
    while byte + 8 <= last_byte:
        if load_u64(bits, byte) != 0:
            return True
        byte += 8
    while byte < last_byte:
        if bits[byte] != 0:
            return True
        byte += 1
    return False


@inlined
def is_expired(buf: Bytes, at: int, state: Ints) -> bool:
    """Return whether the batch has a delete horizon that has passed and may be applied."""
    return bool(
        load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_DELETE_HORIZON != 0
        and state[fields.DROP_EXPIRED] != 0
        and state[fields.NOW_MS] >= load_be64(buf, at + BASE_TIMESTAMP_POSITION)
    )


@inlined
def _choose_action(buf: Bytes, at: int, last: int, count: int, bits: Bytes, state: Ints) -> int:
    """Decide from the header alone how to handle a batch."""
    base = load_be64(buf, at)
    if state[fields.EXPIRED_ONLY] != 0:
        return _ASK_MAP if is_expired(buf, at, state) else _COPY
    if base >= state[fields.MAP_END]:
        return _COPY  # the log start is below the end of the map
    if last < state[fields.LOG_START] or count == 0:
        return _DROP
    indexed = base >= state[fields.BITS_FROM] and last < state[fields.MAP_END]
    if not indexed or last - base >= state[fields.BITS_MAX]:
        return _ASK_MAP
    if base < state[fields.BITS_FIRST] or last >= state[fields.BITS_END]:
        return _WINDOW
    if state[fields.KEYLESS_SEEN] != 0:
        return _ASK_BITS  # the bits do not cover records without a key
    first = state[fields.BITS_FIRST]
    return _ASK_BITS if any_bit(bits, base - first, last - first) else _DROP


@inlined
def _note_kept(
    tombstones: int, has_horizon: bool, is_fully_indexed: bool, base_ms: int, state: Ints
) -> None:
    """Record the delete horizon that the tombstones of a batch have or get.

    A batch that is not indexed whole may have tombstones at or above MAP_END, which nobody counts.
    """
    if has_horizon and (tombstones > 0 or not is_fully_indexed):
        note_horizon(base_ms, state)
    elif not has_horizon and tombstones > 0 and is_fully_indexed and state[fields.HORIZON_MS] >= 0:
        note_horizon(state[fields.HORIZON_MS], state)


@inlined
def filter_records(
    source: Bytes,
    at: int,
    end: int,
    buf: Bytes,
    header_at: int,
    out: Bytes,
    written: int,
    ask_bits: bool,
    keep_at: int,
    space: Workspace,
) -> int:
    """Copy the surviving records of `source[at:end]` to `out` -> DONE or BAD_RECORD.

    The batch's header is `buf[header_at:]`. Leaves KEPT, MAX_TIMESTAMP_MS, SET_HORIZON and
    RECORD_BYTES in `state`. Without `ask_bits`, `keep[keep_at + i]` is 0 if record i is superseded.
    """
    state, bits, keep = space.state, space.bits, space.keep
    base = load_be64(buf, header_at)
    count = load_be32(buf, header_at + RECORD_COUNT_POSITION)
    base_ms = load_be64(buf, header_at + BASE_TIMESTAMP_POSITION)
    last_delta = load_be32(buf, header_at + LAST_OFFSET_DELTA_POSITION)
    has_horizon = load_be16(buf, header_at + ATTRIBUTES_POSITION) & ATTR_DELETE_HORIZON != 0
    drops_tombstones = is_expired(buf, header_at, state) or state[fields.LATEST_ONLY] != 0
    is_fully_indexed = base + last_delta < state[fields.MAP_END]
    may_set_horizon = not has_horizon and state[fields.HORIZON_MS] >= 0 and is_fully_indexed
    log_start = state[fields.LOG_START] - base
    map_end = state[fields.MAP_END] - base
    bit_0 = base - state[fields.BITS_FIRST]
    first_byte, run = written, at
    previous = latest = -1
    retained = tombstones = removed = keyless = 0
    for i in range(count):
        start = at
        at, time_delta, delta, _, key_bytes, value_bytes = read_record(source, start, end)
        if at < 0 or delta <= previous or delta > last_delta:
            return BAD_RECORD
        previous = delta
        alive = delta >= log_start
        if alive and delta < map_end:
            if key_bytes < 0:
                alive = state[fields.KEEP_KEYLESS] != 0
                keyless += not alive
            elif ask_bits:
                bit = bit_0 + delta
                alive = bits[bit >> 3] >> (bit & 7) & 1 != 0
            else:
                alive = keep[keep_at + i] != 0
            if alive and value_bytes < 0 and key_bytes >= 0:
                if drops_tombstones:
                    alive = False
                    removed += 1
                else:
                    tombstones += 1
        if alive:
            retained += 1
            latest = max(latest, base_ms + time_delta)
        else:
            if run < start:
                copy_bytes(out, written, source, run, start - run)
                written += start - run
            run = at
    if at != end:
        return BAD_RECORD
    copy_bytes(out, written, source, run, end - run)
    written += end - run
    state[fields.KEPT] = retained
    state[fields.MAX_TIMESTAMP_MS] = latest
    state[fields.SET_HORIZON] = 1 if may_set_horizon and tombstones > 0 else 0
    state[fields.RECORD_BYTES] = written - first_byte
    _note_kept(tombstones, has_horizon, is_fully_indexed, base_ms, state)
    state[fields.TOMBSTONES_KEPT] += tombstones
    state[fields.TOMBSTONES_REMOVED] += removed
    state[fields.KEYLESS] += keyless
    return DONE


@inlined
def _decide_pending(space: Workspace, done: int, waiting: int) -> None:
    """Set `keep` of the last `waiting` of `done` records from their fingerprints."""
    find_keys(space.table, space.state, space.lows, space.highs, space.last_offsets, waiting)
    ranked = space.state[fields.RANKED] != 0
    for i in range(waiting):
        offset = space.offsets[i]
        result = space.last_offsets[i]
        alive = offset == result or result < 0 or (offset > result and not ranked)
        space.keep[done - waiting + i] = 1 if alive else 0


@inlined
def _fingerprint_records(
    source: Bytes,
    at: int,
    end: int,
    base: int,
    count: int,
    space: Workspace,
    pending: tuple[int, int],
) -> tuple[int, int]:
    """Add the fingerprints of `count` records to the workspace -> the new (done, waiting).

    `pending` is (done, waiting): the records so far, and how many of them have no `keep` flag yet.
    `done` becomes -1 if a record is malformed.
    """
    done, waiting = pending
    k0 = np.uint64(space.state[fields.KEY_0])
    k1 = np.uint64(space.state[fields.KEY_1])
    for _ in range(count):
        if waiting == space.lows.shape[0]:
            _decide_pending(space, done, waiting)
            waiting = 0
        at, _, delta, key_at, key_bytes, _ = read_record(source, at, end)
        if at < 0:
            return -1, 0
        # A null key is hashed as an empty one; the filter handles it before it reads `keep`.
        low, high = siphash128(source, key_at, max(key_bytes, 0), k0, k1)
        space.lows[waiting] = low
        space.highs[waiting] = high
        space.offsets[waiting] = base + delta
        waiting += 1
        done += 1
    return done, waiting


@kernel
def _look_up_unpacked(source: Bytes, end: int, base: int, count: int, space: Workspace) -> int:
    """Set `keep` for one unpacked batch, `source[:end]`, from the map -> DONE or BAD_RECORD.

    `keep` needs room for `count` flags.
    """
    done, waiting = _fingerprint_records(source, 0, end, base, count, space, (0, 0))
    if done < 0:
        return BAD_RECORD
    _decide_pending(space, done, waiting)
    return DONE


@inlined
def _look_up_batches(buf: Bytes, at: int, end: int, space: Workspace) -> tuple[int, int]:
    """Set `keep` for the uncompressed batches from `at` on that need the map.

    -> (DONE or the fault of the first batch, the end of the last decided batch). Fingerprints of
    many small batches are looked up together, so that their cache misses overlap.
    """
    state = space.state
    chunk = space.lows.shape[0]
    next_offset = state[fields.NEXT_OFFSET]
    done = 0
    waiting = 0
    position = at
    result = DONE
    while done < chunk:
        code, size = check_header(buf, position, end, state)
        if code != DONE:
            break
        base = load_be64(buf, position)
        last = base + load_be32(buf, position + LAST_OFFSET_DELTA_POSITION)
        count = load_be32(buf, position + RECORD_COUNT_POSITION)
        if position > at and (
            load_be16(buf, position + ATTRIBUTES_POSITION) & (ATTR_CODEC | ATTR_CONTROL) != 0
            or done + count > chunk
            or _choose_action(buf, position, last, count, space.bits, state) != _ASK_MAP
        ):
            break
        after = (-1, 0)
        code = check_content(buf, position, size)
        if code == DONE:
            records_at = position + HEADER_BYTES
            after = _fingerprint_records(
                buf, records_at, position + size, base, count, space, (done, waiting)
            )
            if after[0] < 0:
                code = BAD_RECORD
        if code != DONE:
            # Report only a fault of the first batch: a later one is checked again as the first.
            if position == at:
                result = code
            break
        done, waiting = after
        state[fields.NEXT_OFFSET] = last + 1
        position += size
    _decide_pending(space, done, waiting)
    state[fields.NEXT_OFFSET] = next_offset
    return result, position


@inlined
def finish_batch(buf: Bytes, at: int, size: int, out: Bytes, scratch: Bytes, state: Ints) -> int:
    """Write the header in front of the surviving records in `out` -> the end of the batch."""
    written: int = state[fields.WRITTEN]
    count = load_be32(buf, at + RECORD_COUNT_POSITION)
    if state[fields.KEPT] == count and state[fields.SET_HORIZON] == 0:
        copy_bytes(out, written, buf, at, HEADER_BYTES)
        return written + size  # all records are in place already
    record_bytes: int = state[fields.RECORD_BYTES]
    records_at = written + HEADER_BYTES
    end = records_at + record_bytes
    if state[fields.SET_HORIZON] != 0:
        copy_bytes(scratch, 0, out, records_at, record_bytes)
        base_ms = load_be64(buf, at + BASE_TIMESTAMP_POSITION)
        end = restamp(
            scratch,
            record_bytes,
            state[fields.KEPT],
            base_ms,
            state[fields.HORIZON_MS],
            out,
            records_at,
        )
    write_header(buf, at, out, written, end - written, state)
    state[fields.BATCHES_REBUILT] += 1
    return end


@kernel
def rewrite_batches(
    buf: Bytes, at: int, end: int, out: Bytes, scratch: Bytes, space: Workspace
) -> tuple[int, int]:
    """Write the surviving records of the batches from `at` on to `out` -> (code, position).

    COMPRESSED: the batch at the position may have survivors and its CRC matches; the caller must
    unpack, filter and finish it. OUTPUT_FULL: `out` needs NEEDED free bytes. NEXT_WINDOW: the
    bitmap must begin at this batch's base offset. PRODUCERS_FULL: see `finish_transactional`.
    WRITTEN in `state` is the end of the output; `scratch` needs room for one batch.
    """
    state = space.state
    decided = at  # the records of [at, decided) have been looked up; their flags begin at keep_at
    keep_at = 0
    while True:
        code, size = check_header(buf, at, end, state)
        if code != DONE:
            return code, at
        last = load_be64(buf, at) + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
        count = load_be32(buf, at + RECORD_COUNT_POSITION)
        attributes = load_be16(buf, at + ATTRIBUTES_POSITION)
        action = _choose_action(buf, at, last, count, space.bits, state)
        if action == _WINDOW:
            return NEXT_WINDOW, at
        state[fields.NEEDED] = size + count * GROWN_BYTES_PER_RECORD + SLACK_BYTES
        room = out.shape[0] - state[fields.WRITTEN]
        of_transaction = attributes & ATTR_OF_TRANSACTION != 0
        if room < state[fields.NEEDED] and (
            action != _DROP or of_transaction or room < HEADER_BYTES
        ):
            return OUTPUT_FULL, at
        finished = False
        if of_transaction:
            code, finished = finish_transactional(buf, at, size, at < decided, out, scratch, space)
        if code != DONE or finished:
            if at < decided:
                keep_at += count
        elif action == _DROP:
            if (count == 0 or last < state[fields.LOG_START]) and not of_transaction:
                code = check_content(buf, at, size)
            if code == DONE:
                code = finish_empty(buf, at, size, out, space)
        elif action == _COPY:
            if not of_transaction:
                code = check_content(buf, at, size)
            if code == DONE:
                copy_whole(buf, at, size, out, state)
                if attributes & ATTR_DELETE_HORIZON != 0:
                    note_horizon(load_be64(buf, at + BASE_TIMESTAMP_POSITION), state)
        elif attributes & ATTR_CODEC != 0:
            if not of_transaction:
                code = check_content(buf, at, size)
            if code == DONE:
                return COMPRESSED, at
        else:
            if action == _ASK_BITS:
                if not of_transaction:
                    code = check_content(buf, at, size)
            elif at >= decided:
                keep_at = 0
                code, decided = _look_up_batches(buf, at, end, space)
            if code == DONE:
                code = filter_records(
                    buf, at + HEADER_BYTES, at + size, buf, at, out,
                    state[fields.WRITTEN] + HEADER_BYTES, action == _ASK_BITS, keep_at, space,
                )  # fmt: skip
            if code == DONE and state[fields.KEPT] == 0:
                code = finish_empty(buf, at, size, out, space)
            elif code == DONE:
                state[fields.WRITTEN] = finish_batch(buf, at, size, out, scratch, state)
                state[fields.RECORDS_OUT] += state[fields.KEPT]
            if action == _ASK_MAP:
                keep_at += count
        if code != DONE:
            return code, at
        state[fields.RECORDS_IN] += count
        state[fields.NEXT_OFFSET] = last + 1
        at += size


@kernel
def filter_unpacked(
    source: Bytes, end: int, buf: Bytes, at: int, retained: Bytes, space: Workspace
) -> int:
    """Filter the unpacked records `source[:end]` of the batch at `at` -> DONE or the fault.

    Sets KEPT, RECORD_BYTES and SET_HORIZON in `state`. The surviving records, RECORD_BYTES long,
    are in `source` if SET_HORIZON is set, otherwise in `retained`. `source` needs room for a new
    horizon, `retained` for `end` bytes, `keep` for one flag per record.
    """
    state = space.state
    base = load_be64(buf, at)
    last = base + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
    count = load_be32(buf, at + RECORD_COUNT_POSITION)
    if count * RECORD_BYTES_MIN > end:
        return BAD_COUNT
    ask_bits = _choose_action(buf, at, last, count, space.bits, state) == _ASK_BITS
    code = DONE
    if not ask_bits:
        code = _look_up_unpacked(source, end, base, count, space)
    if code == DONE:
        code = filter_records(source, 0, end, buf, at, retained, 0, ask_bits, 0, space)
    if code == DONE and state[fields.KEPT] > 0 and state[fields.SET_HORIZON] != 0:
        base_ms = load_be64(buf, at + BASE_TIMESTAMP_POSITION)
        state[fields.RECORD_BYTES] = restamp(
            retained,
            state[fields.RECORD_BYTES],
            state[fields.KEPT],
            base_ms,
            state[fields.HORIZON_MS],
            source,
            0,
        )
    return code


@kernel
def count_batch(buf: Bytes, at: int, state: Ints) -> None:
    """Count a batch that was finished outside of `rewrite_batches`."""
    state[fields.RECORDS_IN] += load_be32(buf, at + RECORD_COUNT_POSITION)
    state[fields.NEXT_OFFSET] = (
        load_be64(buf, at) + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION) + 1
    )
