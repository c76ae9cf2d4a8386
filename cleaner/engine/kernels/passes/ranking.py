"""Find the latest record of each key by timestamp, or by a version in a header.

Rules
- Of two records of a key, the one with the larger rank is later; at equal ranks, the one with the
  larger offset. So the result does not depend on the order of insertion or the number of rounds.
- The table is that of fingerprint_table.py with two more arrays, one element per slot: the rank,
  and whether the record is a tombstone. It does not grow.
- A version is the last header of that name: 8 bytes, big-endian, signed. Records without a version
  of this form rank below all others.
- Records below the dirty section are only compared with keys in the table: a key without a dirty
  record is unchanged.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

from typing import Final, NamedTuple

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.hashing import siphash128
from cleaner.engine.kernels.codecs.memory import (
    load_be16,
    load_be32,
    load_be64,
    prefetch,
    read_varint,
)
from cleaner.engine.kernels.compile import Bytes, Ints, Words, inlined, int64, kernel
from cleaner.engine.kernels.layout import (
    ATTR_CODEC,
    ATTR_CONTROL,
    ATTR_LOG_APPEND_TIME,
    ATTR_OF_TRANSACTION,
    ATTRIBUTES_POSITION,
    BASE_TIMESTAMP_POSITION,
    HEADER_BYTES,
    LARGEST_BASE_OFFSET,
    LAST_OFFSET_DELTA_POSITION,
    MAX_TIMESTAMP_POSITION,
    RECORD_BYTES_MIN,
    RECORD_COUNT_POSITION,
    SLOT_WORDS,
    Workspace,
)
from cleaner.engine.kernels.passes.fingerprint_table import AHEAD, FREE, entries_max, home, probe
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
from storage.view.deleted_keys import ROW_WORDS

LOWEST: Final = -(1 << 63)
VERSION_BYTES: Final = 8
RANK_BYTES: Final = 9  # per slot, beside the table

# Words of a row, after its fingerprint.
_RANK = 2
_OFFSET = 3
_SEEN_MS = 4


class Ranking(NamedTuple):
    """The arrays of ranked keys, used with a workspace."""

    ranks: Ints  # per slot of the table
    deleted: Bytes  # per slot: 1 if the record is a tombstone
    pending_ranks: Ints  # of the fingerprints in the workspace
    pending_marks: Bytes  # bit 0: a tombstone; bit 1: no version
    header: Bytes  # name of the header with the version; empty: rank by timestamp


@inlined
def _is_named(buf: Bytes, at: int, name: Bytes) -> bool:
    for i in range(name.shape[0]):  # noqa: SIM110  kernels know no generators
        if buf[at + i] != name[i]:
            return False
    return True


@inlined
def read_version(buf: Bytes, at: int, end: int, name: Bytes) -> tuple[int, bool]:
    """Read a record's version -> (version, whether it has one). `at`: its value's length."""
    value_bytes, at = read_varint(buf, at)
    at += max(value_bytes, 0)
    count, at = read_varint(buf, at)
    version = int64(LOWEST)
    result = False
    for _ in range(count):
        if at < 0 or at >= end:
            return int64(LOWEST), False
        key_bytes, key_at = read_varint(buf, at)
        if key_at < 0 or key_bytes < 0 or key_bytes > end - key_at:
            return int64(LOWEST), False
        size, at = read_varint(buf, key_at + key_bytes)
        if at < 0 or size < -1 or max(size, 0) > end - at:
            return int64(LOWEST), False
        if key_bytes == name.shape[0] and _is_named(buf, key_at, name):
            result = size == VERSION_BYTES
            version = load_be64(buf, at) if result else int64(LOWEST)
        at += max(size, 0)
    return version, result


@inlined
def _is_later(rank: int, offset: int, slot: int, value: np.uint64, ranking: Ranking) -> bool:
    """Return whether a record is later than the record of its key in `slot`."""
    if rank != ranking.ranks[slot]:
        return bool(rank > ranking.ranks[slot])
    return bool(offset > int64(value) - 1)


@inlined
def _put(space: Workspace, ranking: Ranking, count: int) -> int:
    """Put the first `count` fingerprints of the workspace if they are later -> how many are done.

    Fewer than `count`: the table is full and the next one is not in it; see `put_keys`.
    """
    table, state = space.table, space.state
    slots = state[fields.SLOTS]
    entries = state[fields.ENTRIES]
    limit = entries_max(slots, state[fields.SLOTS_MAX])
    known_only = state[fields.KNOWN_ONLY] != 0
    done = 0
    while done < count:
        if done + AHEAD < count:
            prefetch(table, home(space.lows[done + AHEAD], slots) * SLOT_WORDS)
        low = space.lows[done]
        high = space.highs[done]
        rank = ranking.pending_ranks[done]
        offset = space.offsets[done]
        at = probe(table, slots, low, high)
        slot = at // SLOT_WORDS
        is_new = table[at + 2] == FREE
        if is_new and not known_only:
            if entries >= limit:
                break
            table[at] = low
            table[at + 1] = high
            entries += 1
        if (is_new and not known_only) or (
            not is_new and _is_later(rank, offset, slot, table[at + 2], ranking)
        ):
            table[at + 2] = np.uint64(offset + 1)
            ranking.ranks[slot] = rank
            ranking.deleted[slot] = ranking.pending_marks[done] & 1
        state[fields.VERSIONLESS] += ranking.pending_marks[done] >> 1
        done += 1
    state[fields.ENTRIES] = entries
    return done


@inlined
def _flush(space: Workspace, ranking: Ranking, pending: int) -> bool:
    done = _put(space, ranking, pending)
    if done == pending:
        return True
    space.state[fields.MAP_END] = space.offsets[done]
    return False


@inlined
def _rank_records(
    source: Bytes,
    at: int,
    end: int,
    buf: Bytes,
    header_at: int,
    space: Workspace,
    ranking: Ranking,
    pending: int,
) -> tuple[int, int]:
    """Fingerprint and rank the records `source[at:end]` of a batch -> (code, pending ones)."""
    state = space.state
    base = load_be64(buf, header_at)
    count = load_be32(buf, header_at + RECORD_COUNT_POSITION)
    last_delta = load_be32(buf, header_at + LAST_OFFSET_DELTA_POSITION)
    chunk = space.lows.shape[0]
    if pending + count > chunk:
        if not _flush(space, ranking, pending):
            return MAP_FULL, 0
        pending = 0
        if count > chunk and not check_records(source, at, end, count, last_delta):
            return BAD_RECORD, 0
    by_append_time = load_be16(buf, header_at + ATTRIBUTES_POSITION) & ATTR_LOG_APPEND_TIME != 0
    base_ms = load_be64(buf, header_at + BASE_TIMESTAMP_POSITION)
    append_ms = load_be64(buf, header_at + MAX_TIMESTAMP_POSITION)
    by_header = ranking.header.shape[0] > 0
    k0 = np.uint64(state[fields.KEY_0])
    k1 = np.uint64(state[fields.KEY_1])
    first = state[fields.LOG_START] - base
    until = int64(LARGEST_BASE_OFFSET)
    known_only = state[fields.KNOWN_ONLY] != 0
    if known_only:
        until = state[fields.FIRST_DIRTY] - base
    else:
        first = max(first, state[fields.FIRST_DIRTY] - base)
    before = pending
    previous = -1
    for _ in range(count):
        at, time_delta, delta, key_at, key_bytes, value_bytes = read_record(source, at, end)
        if at < 0 or delta <= previous or delta > last_delta:
            return BAD_RECORD, before
        previous = delta
        if key_bytes < 0:
            state[fields.KEYLESS_SEEN] = 1
            continue
        if delta < first or delta >= until:
            continue
        rank = append_ms if by_append_time else base_ms + time_delta
        mark = 1 if value_bytes < 0 else 0
        if by_header:
            rank, result = read_version(source, key_at + key_bytes, at, ranking.header)
            mark += 0 if result or known_only else 2
        if pending == chunk:
            if not _flush(space, ranking, pending):
                return MAP_FULL, 0
            pending = 0
        low, high = siphash128(source, key_at, key_bytes, k0, k1)
        space.lows[pending] = low
        space.highs[pending] = high
        space.offsets[pending] = base + delta
        ranking.pending_ranks[pending] = rank
        ranking.pending_marks[pending] = mark
        pending += 1
    return (DONE if at == end else BAD_RECORD), (pending if at == end else before)


@inlined
def _has_keys(buf: Bytes, at: int, size: int, space: Workspace) -> tuple[int, bool]:
    attributes = load_be16(buf, at + ATTRIBUTES_POSITION)
    if attributes & ATTR_OF_TRANSACTION == 0:
        return DONE, True
    if space.state[fields.KNOWN_ONLY] != 0:
        return DONE, attributes & ATTR_CONTROL == 0
    return check_transaction(buf, at, size, space)


@kernel
def rank_batches(
    buf: Bytes, at: int, end: int, space: Workspace, ranking: Ranking
) -> tuple[int, int]:
    """Like `index_batches`, with ranks. With KNOWN_ONLY in `state`: below the dirty section."""
    state = space.state
    known_only = state[fields.KNOWN_ONLY] != 0
    pending = 0
    while True:
        code, size = check_header(buf, at, end, state)
        if code != DONE:
            break
        base = load_be64(buf, at)
        last = base + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
        first_dirty = state[fields.FIRST_DIRTY]
        if base < first_dirty if known_only else last >= first_dirty:
            code = check_content(buf, at, size)
            if code != DONE:
                break
            code, has_keys = _has_keys(buf, at, size, space)
            if code != DONE:
                break
            if has_keys:
                if (
                    load_be32(buf, at + RECORD_COUNT_POSITION) > 0
                    and load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_CODEC != 0
                ):
                    code = COMPRESSED
                    break
                code, pending = _rank_records(
                    buf, at + HEADER_BYTES, at + size, buf, at, space, ranking, pending
                )
                if code != DONE:
                    break
        state[fields.NEXT_OFFSET] = last + 1
        at += size
    if code != MAP_FULL and not _flush(space, ranking, pending):
        return MAP_FULL, at
    return code, at


@kernel
def rank_unpacked(
    source: Bytes, end: int, buf: Bytes, at: int, space: Workspace, ranking: Ranking
) -> int:
    """Like `index_unpacked`, with ranks; the batch's header is `buf[at:]` -> DONE or the fault."""
    if load_be32(buf, at + RECORD_COUNT_POSITION) * RECORD_BYTES_MIN > end:
        return BAD_COUNT
    code, pending = _rank_records(source, 0, end, buf, at, space, ranking, 0)
    if code != MAP_FULL and not _flush(space, ranking, pending):
        return MAP_FULL
    if code == DONE:
        space.state[fields.NEXT_OFFSET] = (
            load_be64(buf, at) + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION) + 1
        )
    return code


@kernel
def restore_deletes(
    rows: Ints, count: int, forget_before: int, space: Workspace, ranking: Ranking
) -> None:
    """Put `count` stored deletes into the map if they are later than their key's record.

    Deletes first seen before `forget_before` are skipped.
    """
    table = space.table
    slots = space.state[fields.SLOTS]
    for i in range(count):
        row = i * ROW_WORDS
        if rows[row + _SEEN_MS] < forget_before:
            continue
        at = probe(table, slots, np.uint64(rows[row]), np.uint64(rows[row + 1]))
        if table[at + 2] == FREE:
            continue
        slot = at // SLOT_WORDS
        if _is_later(rows[row + _RANK], rows[row + _OFFSET], slot, table[at + 2], ranking):
            table[at + 2] = np.uint64(rows[row + _OFFSET] + 1)
            ranking.ranks[slot] = rows[row + _RANK]
            ranking.deleted[slot] = 1


@kernel
def keep_current_deletes(
    rows: Ints, count: int, forget_before: int, table: Words, state: Ints
) -> int:
    """Move those of `count` stored deletes that are still current to the front -> their number."""
    slots = state[fields.SLOTS]
    retained = 0
    for i in range(count):
        row = i * ROW_WORDS
        if rows[row + _SEEN_MS] < forget_before:
            continue
        at = probe(table, slots, np.uint64(rows[row]), np.uint64(rows[row + 1]))
        if table[at + 2] != FREE and int64(table[at + 2]) - 1 != rows[row + _OFFSET]:
            continue
        for word in range(ROW_WORDS):
            rows[retained * ROW_WORDS + word] = rows[row + word]
        retained += 1
    return retained


@kernel
def list_new_deletes(
    slot: int, rows: Ints, now_ms: int, space: Workspace, ranking: Ranking
) -> tuple[int, int]:
    """Fill `rows` with the dirty section's deletes from `slot` on -> (next slot, rows filled)."""
    table = space.table
    count = 0
    while slot < space.state[fields.SLOTS] and (count + 1) * ROW_WORDS <= rows.shape[0]:
        at = slot * SLOT_WORDS
        offset = int64(table[at + 2]) - 1
        if ranking.deleted[slot] != 0 and offset >= space.state[fields.FIRST_DIRTY]:
            row = count * ROW_WORDS
            rows[row] = int64(table[at])
            rows[row + 1] = int64(table[at + 1])
            rows[row + _RANK] = ranking.ranks[slot]
            rows[row + _OFFSET] = offset
            rows[row + _SEEN_MS] = now_ms
            count += 1
        slot += 1
    return slot, count


@kernel
def fingerprint(buf: Bytes, count: int, state: Ints) -> tuple[int, int]:
    """Return the fingerprint of `buf[:count]` as two int64. Reads up to 8 bytes more."""
    k0 = np.uint64(state[fields.KEY_0])
    k1 = np.uint64(state[fields.KEY_1])
    low, high = siphash128(buf, 0, count, k0, k1)
    return int64(low), int64(high)
