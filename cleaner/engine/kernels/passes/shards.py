"""Divide the keys of a partition into shards, and merge the rows of a shard from all tasks.

Rules
- A row has the layout of a slot of the key map: two words of fingerprint, then the record's
  offset + 1 (0: no row), with the bit DELETES if the record is a tombstone. So a key map is an
  array of rows.
- The shard of a row depends on the upper 32 bits of its first word, so the rows of a shard are
  almost contiguous in a key map. A table that merges one shard takes home slots and rounds from the
  second word instead: the first words of its rows are too similar.
- Callers put the rows of a key in ascending order of offsets: the last row is the latest record.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

from typing import Final

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.hashing import siphash128
from cleaner.engine.kernels.codecs.memory import load_be16, load_be32, load_be64, prefetch
from cleaner.engine.kernels.compile import Bytes, Ints, Words, inlined, int64, kernel
from cleaner.engine.kernels.layout import (
    ATTR_CODEC,
    ATTR_CONTROL,
    ATTR_OF_TRANSACTION,
    ATTRIBUTES_POSITION,
    HEADER_BYTES,
    LAST_OFFSET_DELTA_POSITION,
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
    check_content,
    check_header,
    check_transaction,
    read_record,
)

DELETES: Final = np.uint64(1 << 63)
_OFFSET: Final = np.uint64((1 << 63) - 1)
_HALF: Final = np.uint64(32)
_LOW: Final = np.uint64((1 << 32) - 1)


@inlined
def _shard(word: np.uint64, shards: int) -> int:
    """Return the shard of a word: its upper 32 bits, scaled to `shards`."""
    shard: int = int64(((word >> _HALF) * np.uint64(shards)) >> _HALF)
    return shard


@kernel
def count_by_shard(rows: Words, begin: int, end: int, counts: Ints) -> None:
    """Count the rows [begin, end) of each shard; `counts` has an element per shard, all 0."""
    shards = counts.shape[0]
    for row in range(begin, end):
        at = row * SLOT_WORDS
        if rows[at + 2] != FREE:
            counts[_shard(rows[at], shards)] += 1


@kernel
def sort_by_shard(rows: Words, begin: int, end: int, places: Ints, out: Words) -> None:
    """Copy the rows [begin, end) to `out`, those of shard i from row `places[i]` on.

    The order within a shard stays; afterwards `places[i]` is the end of the rows of shard i.
    """
    shards = places.shape[0]
    for row in range(begin, end):
        at = row * SLOT_WORDS
        if rows[at + 2] == FREE:
            continue
        shard = _shard(rows[at], shards)
        to = places[shard] * SLOT_WORDS
        places[shard] += 1
        out[to] = rows[at]
        out[to + 1] = rows[at + 1]
        out[to + 2] = rows[at + 2]


@inlined
def _in_round(high: np.uint64, number: int, rounds: int) -> bool:
    """Return whether round `number` handles a key: by the lower half of its second word."""
    return rounds == 1 or int64(((high & _LOW) * np.uint64(rounds)) >> _HALF) == number


@kernel
def merge_rows(
    rows: Words, count: int, number: int, rounds: int, table: Words, state: Ints
) -> bool:
    """Put the rows into `table`, a later row over an earlier one -> False if the table is full.

    Handles only the keys of round `number` of `rounds`. The caller has grown the table.
    """
    slots = state[fields.SLOTS]
    entries = state[fields.ENTRIES]
    limit = entries_max(slots, state[fields.SLOTS_MAX])
    fits = True
    for row in range(count):
        at = row * SLOT_WORDS
        if row + AHEAD < count:
            ahead = rows[at + AHEAD * SLOT_WORDS + 1]
            prefetch(table, home(ahead, slots) * SLOT_WORDS)
        if not _in_round(rows[at + 1], number, rounds):
            continue
        place = probe(table, slots, rows[at + 1], rows[at])
        if table[place + 2] == FREE:
            if entries >= limit:
                fits = False
                break
            table[place] = rows[at + 1]
            table[place + 1] = rows[at]
            entries += 1
        table[place + 2] = rows[at + 2]
    state[fields.ENTRIES] = entries
    return fits


@kernel
def list_entries(table: Words, state: Ints, values: Ints, deletes: Ints) -> int:
    """Write the offsets of the table's tombstones to `deletes`, all others to `values`.

    -> the number of offsets in `values`. Both arrays have room for all entries.
    """
    count = 0
    deleted = 0
    for slot in range(state[fields.SLOTS]):
        value = table[slot * SLOT_WORDS + 2]
        if value == FREE:
            continue
        offset = int64(value & _OFFSET) - 1
        if value & DELETES != FREE:
            deletes[deleted] = offset
            deleted += 1
        else:
            values[count] = offset
            count += 1
    return count


@kernel
def list_missing(
    rows: Words, count: int, number: int, rounds: int, table: Words, state: Ints, offsets: Ints
) -> int:
    """Write the offsets of rows whose keys are not in the table to `offsets` -> their number.

    Handles only the keys of round `number` of `rounds`; `offsets` has room for `count`.
    """
    slots = state[fields.SLOTS]
    result = 0
    for row in range(count):
        at = row * SLOT_WORDS
        if row + AHEAD < count:
            ahead = rows[at + AHEAD * SLOT_WORDS + 1]
            prefetch(table, home(ahead, slots) * SLOT_WORDS)
        if not _in_round(rows[at + 1], number, rounds):
            continue
        place = probe(table, slots, rows[at + 1], rows[at])
        if table[place + 2] == FREE:
            offsets[result] = int64(rows[at + 2] & _OFFSET) - 1
            result += 1
    return result


@inlined
def _list_records(
    buf: Bytes, at: int, end: int, header: tuple[int, int, int], rows: Words, listed: int,
    state: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Append the rows of one batch to `rows[:listed]` -> (DONE or BAD_RECORD, rows)."""
    base, count, last_delta = header
    k0 = np.uint64(state[fields.KEY_0])
    k1 = np.uint64(state[fields.KEY_1])
    first = state[fields.LOG_START] - base
    end_delta = state[fields.FIRST_DIRTY] - base
    before = listed
    previous = -1
    for _ in range(count):
        at, _, delta, key_at, key_bytes, value_bytes = read_record(buf, at, end)
        if at < 0 or delta <= previous or delta > last_delta:
            return BAD_RECORD, before
        previous = delta
        if key_bytes < 0:
            state[fields.KEYLESS_SEEN] = 1
            continue
        if delta < first or delta >= end_delta:
            continue
        if value_bytes < 0:
            state[fields.TOMBSTONES_SEEN] = 1
        low, high = siphash128(buf, key_at, key_bytes, k0, k1)
        to = listed * SLOT_WORDS
        rows[to] = low
        rows[to + 1] = high
        rows[to + 2] = np.uint64(base + delta + 1)
        listed += 1
    return (DONE, listed) if at == end else (BAD_RECORD, before)


@kernel
def list_batches(
    buf: Bytes, at: int, end: int, rows: Words, listed: int, space: Workspace
) -> tuple[int, int, int]:
    """Append a row for each record below the dirty section -> (code, position, rows).

    Skips the records of batches without a record at or above the log start. `rows` has room for all
    records of the buffer. COMPRESSED: the caller must unpack the batch at the position and call
    `list_unpacked`. DONE: the dirty section begins at the position.
    """
    state = space.state
    while True:
        code, size = check_header(buf, at, end, state)
        if code != DONE:
            return code, at, listed
        base = load_be64(buf, at)
        last_delta = load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
        count = load_be32(buf, at + RECORD_COUNT_POSITION)
        attributes = load_be16(buf, at + ATTRIBUTES_POSITION)
        if base >= state[fields.FIRST_DIRTY]:
            return DONE, at, listed
        of_transaction = attributes & ATTR_OF_TRANSACTION != 0
        code = check_content(buf, at, size)
        is_empty = count == 0 or base + last_delta < state[fields.LOG_START]
        if code == DONE and not is_empty and attributes & ATTR_CONTROL == 0:
            if attributes & ATTR_CODEC != 0:
                return COMPRESSED, at, listed
            code, listed = _list_records(
                buf, at + HEADER_BYTES, at + size, (base, count, last_delta), rows, listed, state
            )
        if code != DONE:
            return code, at, listed
        if of_transaction:
            state[fields.TRANSACTIONS_SEEN] = 1
        state[fields.NEXT_OFFSET] = base + last_delta + 1
        at += size


@kernel
def list_unpacked(
    source: Bytes, end: int, buf: Bytes, at: int, rows: Words, listed: int, space: Workspace
) -> tuple[int, int]:
    """Append the rows of the unpacked batch `source[:end]`, with its header at `buf[at:]`.

    -> (code, rows).
    """
    state = space.state
    base = load_be64(buf, at)
    last_delta = load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
    count = load_be32(buf, at + RECORD_COUNT_POSITION)
    if count * RECORD_BYTES_MIN > end:
        return BAD_COUNT, listed
    header = (base, count, last_delta)
    code, listed = _list_records(source, 0, end, header, rows, listed, state)
    if code == DONE:
        if load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_OF_TRANSACTION != 0:
            state[fields.TRANSACTIONS_SEEN] = 1
        state[fields.NEXT_OFFSET] = base + last_delta + 1
    return code, listed


@kernel
def check_markers(buf: Bytes, at: int, end: int, space: Workspace) -> tuple[int, int]:
    """Compare the markers of verified batches with the transaction indexes -> (code, position).

    Codes are those of `index_batches`; keys are not read.
    """
    state = space.state
    while True:
        code, size = check_header(buf, at, end, state)
        if code != DONE:
            return code, at
        last = load_be64(buf, at) + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
        of_transaction = load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_OF_TRANSACTION != 0
        if of_transaction and last >= state[fields.FIRST_DIRTY]:
            code, _ = check_transaction(buf, at, size, space)
            if code != DONE:
                return code, at
        state[fields.NEXT_OFFSET] = last + 1
        at += size
