"""Call each kernel once with the cleaner's types, so that Numba compiles and caches it."""

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.crc import crc32c_extended
from cleaner.engine.kernels.codecs.index_entries import add_time_entry, index_output
from cleaner.engine.kernels.codecs.memory import load_be32, load_be64
from cleaner.engine.kernels.compile import Bytes
from cleaner.engine.kernels.layout import SLOT_WORDS, Workspace, new_state
from cleaner.engine.kernels.passes.bitmap import find_intervals, set_bits
from cleaner.engine.kernels.passes.blocks import BLOCK_WORDS, add_blocks
from cleaner.engine.kernels.passes.contents import (
    CONTENT_WORDS,
    list_contents,
    list_unpacked_contents,
)
from cleaner.engine.kernels.passes.contents import COUNTS as CONTENT_COUNTS
from cleaner.engine.kernels.passes.counting import COUNTS, count_and_index, count_and_index_unpacked
from cleaner.engine.kernels.passes.fingerprint_table import (
    entries_max,
    find_keys,
    grow,
    mark_survivors,
    put_keys,
)
from cleaner.engine.kernels.passes.key_search import KeyTarget, find_key
from cleaner.engine.kernels.passes.newest_first import (
    BUFFERED_FROM,
    WALK_WORDS,
    Window,
    clean_window,
)
from cleaner.engine.kernels.passes.producer_set import add_producer
from cleaner.engine.kernels.passes.ranking import (
    Ranking,
    fingerprint,
    keep_current_deletes,
    list_new_deletes,
    rank_batches,
    rank_unpacked,
    restore_deletes,
)
from cleaner.engine.kernels.passes.rebuilt_batch import copy_whole, finish_empty, write_header
from cleaner.engine.kernels.passes.rewrite import count_batch, filter_unpacked, rewrite_batches
from cleaner.engine.kernels.passes.shards import (
    check_markers,
    count_by_shard,
    list_batches,
    list_entries,
    list_missing,
    list_unpacked,
    merge_rows,
    sort_by_shard,
)
from cleaner.engine.kernels.passes.walk import count_records, index_batches, index_unpacked
from storage.format.batch import HEADER_BYTES, Record, build_batch

_ROOM_BYTES = 4096


def run_all() -> None:
    """Compile all kernels that Python calls."""
    batch = bytes(build_batch([Record(n, 1, b"k", b"v") for n in range(3)]))
    buf: Bytes = np.zeros(_ROOM_BYTES, dtype=np.uint8)
    buf[: len(batch)] = np.frombuffer(batch, dtype=np.uint8)
    records = buf[HEADER_BYTES:].copy()
    record_bytes = len(batch) - HEADER_BYTES
    out = np.zeros_like(buf)
    scratch = np.zeros_like(buf)
    space = _workspace()
    state = space.state

    count_records(buf, 0, len(batch))
    grow(space.table, 8, 16)
    entries_max(8, 16)
    index_batches(buf, 0, len(batch), space)
    index_unpacked(records, record_bytes, 0, 3, 2, space)
    put_keys(space.table, state, space.lows, space.highs, space.offsets, 0)
    find_keys(space.table, state, space.lows, space.highs, space.last_offsets, 0)
    mark_survivors(space.table, state, space.bits)
    state[fields.NEXT_OFFSET] = 0
    rewrite_batches(buf, 0, len(batch), out, scratch, space)
    filter_unpacked(records, record_bytes, buf, 0, scratch, space)
    add_producer(space.open_producers, state, 1)
    write_header(buf, 0, out, 0, len(batch), state)
    copy_whole(buf, 0, len(batch), out, state)
    finish_empty(buf, 0, len(batch), out, space)
    count_batch(buf, 0, state)
    index_output(out, 0, scratch, scratch, state)
    add_time_entry(scratch, state)
    crc32c_extended(0, buf, 0, len(batch))
    load_be32(buf, 0)
    load_be64(buf, 0)
    _clean_a_window(buf, len(batch), space)
    _rank_some_records(buf, len(batch), space)
    _count_some_records(buf, len(batch), space)
    _exchange_some_rows(buf, len(batch), space)
    _list_some_contents(buf, len(batch), space)
    _find_a_key(batch[HEADER_BYTES:])


def _find_a_key(records: bytes) -> None:
    key = np.frombuffer(b"k", dtype=np.uint8)
    target = KeyTarget(0, has_one_timestamp=False, last_delta=2, end_delta=3)
    matches = find_key(np.frombuffer(records, dtype=np.uint8), 3, target, key, key)
    assert matches.values == 3


def _exchange_some_rows(buf: Bytes, end: int, space: Workspace) -> None:
    state = space.state
    rows = np.zeros(16 * SLOT_WORDS, dtype=np.uint64)
    places = np.zeros(2, dtype=np.int64)
    state[fields.NEXT_OFFSET] = 0
    state[fields.FIRST_DIRTY] = 3
    list_batches(buf, 0, end, rows, 0, space)
    list_unpacked(buf[HEADER_BYTES:].copy(), end - HEADER_BYTES, buf, 0, rows, 0, space)
    count_by_shard(rows, 0, 0, places)
    sort_by_shard(rows, 0, 0, places, rows.copy())
    merge_rows(rows, 0, 0, 1, space.table, state)
    list_missing(rows, 0, 0, 1, space.table, state, space.offsets)
    set_bits(space.bits, space.offsets, 0, 0)
    find_intervals(space.bits, state, places, places, 0, np.zeros(2, dtype=np.bool_))
    add_blocks(buf, 0, end, 0, np.zeros(2 * BLOCK_WORDS, dtype=np.int64), 0, 1024)
    state[fields.FIRST_DIRTY] = 0


def _count_some_records(buf: Bytes, end: int, space: Workspace) -> None:
    state = space.state
    counts = np.zeros(COUNTS, dtype=np.int64)
    state[fields.NEXT_OFFSET] = 0
    count_and_index(buf, 0, end, counts, space)
    count_and_index_unpacked(buf[HEADER_BYTES:].copy(), end - HEADER_BYTES, buf, 0, counts, space)
    list_entries(space.table, state, np.zeros(16, dtype=np.int64), np.zeros(16, dtype=np.int64))
    state[fields.NEXT_OFFSET] = 0
    check_markers(buf, 0, end, space)


def _list_some_contents(buf: Bytes, end: int, space: Workspace) -> None:
    rows = np.zeros(16 * SLOT_WORDS, dtype=np.uint64)
    contents = np.zeros(16 * CONTENT_WORDS, dtype=np.uint64)
    counts = np.zeros(CONTENT_COUNTS, dtype=np.int64)
    space.state[fields.NEXT_OFFSET] = 0
    list_contents(buf, 0, end, rows, contents, 0, counts, space)
    unpacked = buf[HEADER_BYTES:].copy()
    list_unpacked_contents(unpacked, end - HEADER_BYTES, buf, 0, rows, contents, 0, counts, space)
    space.state[fields.NEXT_OFFSET] = 0


def _clean_a_window(buf: Bytes, end: int, space: Workspace) -> None:
    room = np.zeros(_ROOM_BYTES, dtype=np.uint8)
    window = Window(
        buf=buf,
        rows=np.zeros(_ROOM_BYTES, dtype=np.int64),
        walk=np.zeros(WALK_WORDS, dtype=np.int64),
        arena=room,
        kept=room.copy(),
        packed=room.copy(),
        scratch=room.copy(),
        out=room.copy(),
        buffered=room.copy(),
    )
    space.state[fields.NEXT_OFFSET] = 0
    window.walk[BUFFERED_FROM] = len(window.buffered)
    clean_window(window, end, space)


def _rank_some_records(buf: Bytes, end: int, space: Workspace) -> None:
    state = space.state
    ranking = Ranking(
        ranks=np.zeros(16, dtype=np.int64),
        deleted=np.zeros(16, dtype=np.uint8),
        pending_ranks=np.zeros(16, dtype=np.int64),
        pending_marks=np.zeros(16, dtype=np.uint8),
        header=np.frombuffer(b"version", dtype=np.uint8),
    )
    rows = np.zeros(5, dtype=np.int64)
    state[fields.NEXT_OFFSET] = 0
    rank_batches(buf, 0, end, space, ranking)
    rank_unpacked(buf[HEADER_BYTES:].copy(), end - HEADER_BYTES, buf, 0, space, ranking)
    restore_deletes(rows, 1, 0, space, ranking)
    keep_current_deletes(rows, 1, 0, space.table, state)
    list_new_deletes(0, rows, 0, space, ranking)
    fingerprint(buf, 8, state)


def _workspace() -> Workspace:
    state = new_state()
    state[fields.SLOTS] = state[fields.SLOTS_MAX] = 16
    state[fields.SOURCE_END] = state[fields.MAP_END] = 3
    return Workspace(
        table=np.zeros(16 * 3, dtype=np.uint64),
        state=state,
        lows=np.zeros(16, dtype=np.uint64),
        highs=np.zeros(16, dtype=np.uint64),
        offsets=np.zeros(16, dtype=np.int64),
        last_offsets=np.zeros(16, dtype=np.int64),
        keep=np.zeros(16, dtype=np.uint8),
        bits=np.zeros(16, dtype=np.uint8),
        producers=np.zeros(0, dtype=np.int64),
        aborted=np.zeros(0, dtype=np.int64),
        aborted_kept=np.zeros(0, dtype=np.uint8),
        open_producers=np.zeros(8, dtype=np.int64),
    )
