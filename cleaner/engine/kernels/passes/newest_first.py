"""One pass over a window of batches, from the newest to the oldest: decided and written at once.

Rules
- A record lives exactly when no newer one of its key was met: its key is not in the map yet. Then
  it is put there, if it is of the dirty section; older ones are only looked up.
- Batches are met newest first, in chunks of some thousand records. A chunk's keys are fingerprinted
  into the arrays of the workspace from their ends on, so that they stand there in the order of the
  log; then they are probed from the last to the first; then the batches are written in order, and
  put before what was held already.
- What is packed is unpacked, and packed again, for a whole chunk at a time: what is called from
  Python for it costs less than one call of a kernel.
- What stays of a batch is decided by the same code as in the second of two passes
  (passes/rewrite.py, rebuilt_batch.py), and a batch is indexed only when its CRC matched and all of
  its records were walked.
- Whatever is not as it should be is only told. Nobody has seen anything of this pass by then, and
  two passes tell what it was.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

from typing import Final, NamedTuple

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.hashing import siphash128
from cleaner.engine.kernels.codecs.lz4 import frame_bytes_max, pack_frame, unpack_frame
from cleaner.engine.kernels.codecs.memory import (
    SLACK_BYTES,
    copy_bytes,
    load_be16,
    load_be32,
    load_be64,
    load_u64,
    prefetch,
)
from cleaner.engine.kernels.codecs.zstd import frame_bound
from cleaner.engine.kernels.compile import Bytes, Ints, inlined, kernel
from cleaner.engine.kernels.layout import (
    ATTR_CODEC,
    ATTR_OF_TRANSACTION,
    GROWN_BYTES_PER_RECORD,
    HEADER_BYTES,
    RECORD_BYTES_MIN,
    SLOT_WORDS,
    Workspace,
)
from cleaner.engine.kernels.passes.fingerprint_table import AHEAD, FREE, entries_max, home, probe
from cleaner.engine.kernels.passes.rebuilt_batch import (
    copy_whole,
    restamp,
    settle_empty,
    write_header,
)
from cleaner.engine.kernels.passes.rewrite import filter_records, finish_batch
from cleaner.engine.kernels.passes.walk import (
    BAD_COUNT,
    BAD_RECORD,
    COMPRESSED,
    DONE,
    check_content,
    check_header,
    read_record,
)

LZ4: Final = 3  # codecs by their ids
ZSTD: Final = 4

# Why `clean_window` stopped, beside DONE, COMPRESSED and the codes of damage.
CHUNK_FULL: Final = -1  # never seen outside
MORE_RECORDS: Final = -2  # the batch has more records than the workspace holds
MORE_ROOM: Final = -3  # the batch may need more room than the output has
MORE_SLOTS: Final = -4  # the map has to grow
PACK: Final = -5  # the surviving records of batch NEXT are to be compressed
BUFFER_FULL: Final = -6  # no room to hold the output of the chunk
TRANSACTION: Final = -7  # a batch of a transaction, or a marker: not for one pass
PACK_CHUNK: Final = -8  # the surviving records of some batches of the chunk are to be compressed

# One row per batch of a window.
ROW_WORDS: Final = 13
POSITION: Final = 0  # in the window
SIZE: Final = 1
RECORDS_AT: Final = 2  # in the window, or where it was unpacked
RECORDS_END: Final = 3  # 0: not looked at, or not unpacked
FLAGS_AT: Final = 4  # of its first record, in `keep`; -1: none is looked at
# Of a batch that is to be unpacked, when its CRC is known to be right: what its one zstd frame
# unpacks to at most; 0: it may be anything else. Before: -1.
BOUND: Final = 5
# What `filter_records` left of a batch that was unpacked.
SURVIVORS: Final = 6
LATEST: Final = 7
STAMPED: Final = 8
KEPT_AT: Final = 9  # in `kept`
KEPT_END: Final = 10
PACKED_AT: Final = 11  # in `packed`
PACKED_END: Final = 12  # 0: not packed there; WANTED: to be
WANTED: Final = -1

# `walk`: where the pass over a window is.
GATHERED: Final = 0  # the oldest batch whose keys are fingerprinted
CHUNK_END: Final = 1  # the batch behind the chunk
TOP: Final = 2  # the first fingerprint
CHUNK_BYTES: Final = 3  # the chunk's output at most
ARENA: Final = 4  # bytes of the arena that are taken
WRITING: Final = 5  # 1: the chunk is decided, and written from batch NEXT on
NEXT: Final = 6
BUFFERED_FROM: Final = 7  # what is held stands in `hold[BUFFERED_FROM:]`
FLUSH: Final = 8  # 1: write the chunk before another batch is looked at
UNPACK_LIMIT: Final = 9  # bytes that a batch may unpack to
LZ4_UNPACKER: Final = 10  # addresses (lz4.py); 0: lz4 is unpacked, packed, elsewhere
LZ4_PACKER: Final = 11
LISTED: Final = 12  # with COMPRESSED: the oldest batch that may be unpacked
FIRST_BASE: Final = 13  # base offset of the window's first batch
WALK_WORDS: Final = 14


class Window(NamedTuple):
    """Neighbouring batches, and the memory to clean them in."""

    buf: Bytes
    rows: Ints  # one per batch, ROW_WORDS each
    walk: Ints
    arena: Bytes  # unpacked records of the chunk
    kept: Bytes  # surviving records of the chunk's unpacked batches: three times the arena
    packed: Bytes  # the same, compressed
    scratch: Bytes  # one batch
    out: Bytes  # output of the chunk
    hold: Bytes  # output of what is newer, filled from its end


@inlined
def _list_batches(window: Window, end: int, state: Ints) -> int:
    """Find the batches that fill `buf[:end]` exactly -> DONE, or why they do not.

    NEXT_OFFSET and SOURCE_END in `state` bound their offsets.
    """
    buf, rows, walk = window.buf, window.rows, window.walk
    at = 0
    count = 0
    while at < end:
        code, size = check_header(buf, at, end, state)
        if code != DONE:
            return code
        if load_be16(buf, at + 21) & ATTR_OF_TRANSACTION != 0:
            return TRANSACTION
        row = count * ROW_WORDS
        rows[row + POSITION] = at
        rows[row + SIZE] = size
        rows[row + RECORDS_END] = 0
        rows[row + BOUND] = -1
        state[fields.NEXT_OFFSET] = load_be64(buf, at) + load_be32(buf, at + 23) + 1
        count += 1
        at += size
    walk[GATHERED] = count
    walk[CHUNK_END] = count
    walk[WRITING] = 0
    return DONE


@inlined
def _fingerprint(
    source: Bytes, at: int, end: int, batch: tuple[int, int, int], slot: int, space: Workspace
) -> int:
    """Fingerprint the records of a batch, (base, count, last delta) -> DONE or BAD_RECORD.

    A record that cannot live gets the offset -1.
    """
    base, count, last_delta = batch
    state = space.state
    k0 = np.uint64(state[fields.KEY_0])
    k1 = np.uint64(state[fields.KEY_1])
    first = state[fields.LOG_START] - base
    previous = -1
    for i in range(slot, slot + count):
        at, _, delta, key_at, key_bytes, _ = read_record(source, at, end)
        if at < 0 or delta <= previous or delta > last_delta:
            return BAD_RECORD
        previous = delta
        if key_bytes < 0 or delta < first:
            space.offsets[i] = -1
            space.ones[i] = 0
        else:
            item, two = siphash128(source, key_at, key_bytes, k0, k1)
            space.ones[i] = item
            space.twos[i] = two
            space.offsets[i] = base + delta
    return DONE if at == end else BAD_RECORD


@inlined
def _unpack_lz4(window: Window, row: int) -> bool:
    """Unpack a batch into the arena, if it can be done here and now."""
    rows, walk = window.rows, window.walk
    at = rows[row + POSITION]
    if load_be16(window.buf, at + 21) & ATTR_CODEC != LZ4:
        return False
    room = min(window.arena.shape[0] - walk[ARENA] - SLACK_BYTES, walk[UNPACK_LIMIT])
    if room <= 0:
        return False
    begin = at + HEADER_BYTES
    end = at + rows[row + SIZE]
    count = unpack_frame(
        walk[LZ4_UNPACKER], window.buf, begin, end, window.arena, walk[ARENA], room
    )
    if count <= 0:
        return False
    rows[row + RECORDS_AT] = walk[ARENA]
    rows[row + RECORDS_END] = walk[ARENA] + count
    walk[ARENA] += count + SLACK_BYTES
    return True


@inlined
def _finish_packed(buf: Bytes, at: int, out: Bytes, end: int, state: Ints) -> None:
    written = state[fields.WRITTEN]
    write_header(buf, at, out, written, end - written, state)
    state[fields.WRITTEN] = end
    state[fields.RECORDS_OUT] += state[fields.KEPT]
    state[fields.BATCHES_REBUILT] += 1


@kernel
def end_batch(buf: Bytes, at: int, out: Bytes, end: int, state: Ints) -> None:
    """Finish the batch whose packed survivors stand in `out` behind room for a header."""
    _finish_packed(buf, at, out, end, state)
    state[fields.RECORDS_IN] += load_be32(buf, at + 57)


@inlined
def _pack_lz4(window: Window, row: int, state: Ints) -> int:
    """Pack the survivors of a batch and finish it -> DONE, or PACK: it is done elsewhere."""
    at = window.rows[row + POSITION]
    kept_at = window.rows[row + KEPT_AT]
    kept_end = window.rows[row + KEPT_END]
    out = window.out
    written = state[fields.WRITTEN]
    if out.shape[0] - written - HEADER_BYTES < frame_bytes_max(kept_end - kept_at):
        return PACK
    address = window.walk[LZ4_PACKER]
    end = pack_frame(address, window.kept, kept_at, kept_end, out, written + HEADER_BYTES)
    _finish_packed(window.buf, at, out, end, state)
    return DONE


@inlined
def _room_for(size: int, count: int) -> int:
    """Output that may become of a batch, unless it is packed anew: then room is looked for."""
    return size + count * GROWN_BYTES_PER_RECORD + SLACK_BYTES


@inlined
def _list_packed(window: Window, space: Workspace) -> None:
    """Find the batches that are to be unpacked together with the one that is gathered next.

    All of them will be gathered into this chunk, so that the arena is free behind it.
    """
    buf, rows, walk, state = window.buf, window.rows, window.walk, space.state
    index = walk[GATHERED] - 1
    top = walk[TOP]
    chunk_bytes = walk[CHUNK_BYTES]
    while index >= 0:
        row = index * ROW_WORDS
        at = rows[row + POSITION]
        size = rows[row + SIZE]
        count = load_be32(buf, at + 57)
        chunk_bytes += _room_for(size, count)
        if chunk_bytes > window.out.shape[0]:
            break
        if load_be64(buf, at) + load_be32(buf, at + 23) >= state[fields.LOG_START]:
            if count > top:
                break
            top -= count
            codec = load_be16(buf, at + 21) & ATTR_CODEC
            if codec != 0 and count > 0 and rows[row + BOUND] < 0:
                # The kernel takes its own room of the arena for LZ4.
                if codec == LZ4 and index < walk[GATHERED] - 1:
                    break
                if check_content(buf, at, size) != DONE:
                    break
                rows[row + BOUND] = 0
                if codec == ZSTD:
                    limit = walk[UNPACK_LIMIT]
                    rows[row + BOUND] = frame_bound(buf, at + HEADER_BYTES, at + size, limit)
        index -= 1
    walk[LISTED] = index + 1


@inlined
def _gather(window: Window, row: int, space: Workspace) -> int:
    """Take a batch into the chunk -> DONE, or what has to be done before."""
    buf, rows, walk, state = window.buf, window.rows, window.walk, space.state
    at = rows[row + POSITION]
    size = rows[row + SIZE]
    base = load_be64(buf, at)
    last_delta = load_be32(buf, at + 23)
    count = load_be32(buf, at + 57)
    is_first = walk[TOP] == space.ones.shape[0] and walk[CHUNK_BYTES] == 0
    if walk[FLUSH] != 0:
        walk[FLUSH] = 0
        if not is_first:
            return CHUNK_FULL
    room = _room_for(size, count)
    if walk[CHUNK_BYTES] + room > window.out.shape[0]:
        return MORE_ROOM if is_first else CHUNK_FULL
    rows[row + FLAGS_AT] = -1
    if base + last_delta < state[fields.LOG_START]:
        walk[CHUNK_BYTES] += room
        return DONE
    if count > walk[TOP]:
        return MORE_RECORDS if is_first else CHUNK_FULL
    is_packed = load_be16(buf, at + 21) & ATTR_CODEC != 0
    if rows[row + RECORDS_END] == 0:
        if rows[row + BOUND] >= 0:
            _list_packed(window, space)
            return COMPRESSED
        code = check_content(buf, at, size)
        if code != DONE:
            return code
        rows[row + RECORDS_AT] = at + HEADER_BYTES
        rows[row + RECORDS_END] = at + size
        if is_packed and count > 0 and not _unpack_lz4(window, row):
            rows[row + RECORDS_END] = 0
            if load_be16(buf, at + 21) & ATTR_CODEC == LZ4 and walk[ARENA] > 0:
                return CHUNK_FULL  # it may only be that the arena is full
            _list_packed(window, space)
            return COMPRESSED
    if count > 0:
        source = window.arena if is_packed else buf
        records_at = rows[row + RECORDS_AT]
        end = rows[row + RECORDS_END]
        if count * RECORD_BYTES_MIN > end - records_at:
            return BAD_COUNT
        top = walk[TOP] - count
        code = _fingerprint(source, records_at, end, (base, count, last_delta), top, space)
        if code != DONE:
            return code
        walk[TOP] = top
        rows[row + FLAGS_AT] = top
    walk[CHUNK_BYTES] += room
    return DONE


@inlined
def _decide(top: int, space: Workspace) -> None:
    """Set `keep` of the gathered records, the newest first, and put their keys into the map."""
    table, state = space.table, space.state
    items, twos, offsets, keep = space.ones, space.twos, space.offsets, space.keep
    slots = state[fields.SLOTS]
    entries = state[fields.ENTRIES]
    first_dirty = state[fields.FIRST_DIRTY]
    for i in range(items.shape[0] - 1, top - 1, -1):
        if i >= top + AHEAD:
            prefetch(table, home(items[i - AHEAD], slots) * SLOT_WORDS)
        keep[i] = 0
        offset = offsets[i]
        if offset < 0:
            continue
        item = items[i]
        two = twos[i]
        at = probe(table, slots, item, two)
        if table[at + 2] == FREE:
            keep[i] = 1
            if offset >= first_dirty:
                table[at] = item
                table[at + 1] = two
                table[at + 2] = np.uint64(offset + 1)
                entries += 1
    state[fields.ENTRIES] = entries


@inlined
def _any_kept(keep: Bytes, at: int, end: int) -> bool:
    while at + 8 <= end:
        if load_u64(keep, at) != 0:
            return True
        at += 8
    while at < end:
        if keep[at] != 0:
            return True
        at += 1
    return False


@inlined
def _filter_chunk(window: Window, space: Workspace) -> int:
    """Filter the unpacked batches of a decided chunk into `retained` -> DONE, or what is wrong.

    PACK_CHUNK: those of some are to be compressed before they can be written.
    """
    buf, rows, walk, retained, state = (
        window.buf,
        window.rows,
        window.walk,
        window.kept,
        space.state,
    )
    begin = 0
    result = DONE
    for index in range(walk[NEXT], walk[CHUNK_END]):
        row = index * ROW_WORDS
        at = rows[row + POSITION]
        flags_at = rows[row + FLAGS_AT]
        count = load_be32(buf, at + 57)
        codec = load_be16(buf, at + 21) & ATTR_CODEC
        if codec == 0 or flags_at < 0 or not _any_kept(space.keep, flags_at, flags_at + count):
            continue
        records_at = rows[row + RECORDS_AT]
        end = rows[row + RECORDS_END]
        code = filter_records(
            window.arena, records_at, end, buf, at, retained, begin, False, flags_at, space
        )
        if code != DONE:
            return code
        size = state[fields.RECORD_BYTES]
        survivors = state[fields.KEPT]
        stamped = state[fields.STAMP]
        if survivors > 0 and stamped != 0:
            copy_bytes(window.scratch, 0, retained, begin, size)
            base_ms = load_be64(buf, at + 27)
            horizon_ms = state[fields.HORIZON_MS]
            size = restamp(window.scratch, size, survivors, base_ms, horizon_ms, retained, begin)
            size -= begin
        rows[row + SURVIVORS] = survivors
        rows[row + LATEST] = state[fields.LATEST_MS]
        rows[row + STAMPED] = stamped
        rows[row + KEPT_AT] = begin
        rows[row + KEPT_END] = begin + size
        rows[row + PACKED_END] = 0
        if survivors > 0 and (survivors < count or stamped != 0):
            begin += size
            if codec != LZ4 or walk[LZ4_PACKER] == 0:
                rows[row + PACKED_END] = WANTED
                result = PACK_CHUNK
    return result


@inlined
def _write_packed(window: Window, row: int, space: Workspace) -> int:
    """Write a batch of which `_filter_chunk` told what survives -> DONE, PACK, or what is wrong."""
    buf, rows, out, state = window.buf, window.rows, window.out, space.state
    at = rows[row + POSITION]
    size = rows[row + SIZE]
    state[fields.KEPT] = rows[row + SURVIVORS]
    state[fields.LATEST_MS] = rows[row + LATEST]
    state[fields.STAMP] = rows[row + STAMPED]
    if state[fields.KEPT] == 0:
        return settle_empty(buf, at, size, out, space)
    if state[fields.KEPT] == load_be32(buf, at + 57) and state[fields.STAMP] == 0:
        copy_whole(buf, at, size, out, state)
        return DONE
    packed_at = rows[row + PACKED_AT]
    packed_end = rows[row + PACKED_END]
    if packed_end == 0:
        return _pack_lz4(window, row, state)
    records_at = state[fields.WRITTEN] + HEADER_BYTES
    copy_bytes(out, records_at, window.packed, packed_at, packed_end - packed_at)
    _finish_packed(buf, at, out, records_at + packed_end - packed_at, state)
    return DONE


@inlined
def _write(window: Window, row: int, space: Workspace) -> int:
    """Write what stays of a decided batch -> DONE, PACK, or what is wrong."""
    buf, rows, out, state = window.buf, window.rows, window.out, space.state
    at = rows[row + POSITION]
    size = rows[row + SIZE]
    flags_at = rows[row + FLAGS_AT]
    count = load_be32(buf, at + 57)
    if flags_at < 0 or not _any_kept(space.keep, flags_at, flags_at + count):
        return settle_empty(buf, at, size, out, space)
    if load_be16(buf, at + 21) & ATTR_CODEC != 0:
        return _write_packed(window, row, space)
    records_at = rows[row + RECORDS_AT]
    end = rows[row + RECORDS_END]
    written = state[fields.WRITTEN]
    code = filter_records(
        buf, records_at, end, buf, at, out, written + HEADER_BYTES, False, flags_at, space
    )
    if code == DONE and state[fields.KEPT] == 0:
        code = settle_empty(buf, at, size, out, space)
    elif code == DONE:
        state[fields.WRITTEN] = finish_batch(buf, at, size, out, window.scratch, state)
        state[fields.RECORDS_OUT] += state[fields.KEPT]
    return code


@inlined
def _gather_chunk(window: Window, space: Workspace) -> int:
    walk = window.walk
    while walk[GATHERED] > 0:
        code = _gather(window, (walk[GATHERED] - 1) * ROW_WORDS, space)
        if code == CHUNK_FULL:
            break
        if code != DONE:
            return code
        walk[GATHERED] -= 1
    return DONE


@inlined
def _write_chunk(window: Window, space: Workspace) -> int:
    walk = window.walk
    while walk[NEXT] < walk[CHUNK_END]:
        row = walk[NEXT] * ROW_WORDS
        code = _write(window, row, space)
        if code != DONE:
            return code
        space.state[fields.RECORDS_IN] += load_be32(window.buf, window.rows[row + POSITION] + 57)
        walk[NEXT] += 1
    return DONE


@kernel
def clean_window(window: Window, end: int, space: Workspace) -> int:
    """Clean the batches that fill `buf[:end]` exactly -> DONE, or what it stopped for.

    `end` is 0 where it goes on. NEXT_OFFSET and SOURCE_END in `state` bound the batches' offsets.
    FIRST_BASE tells the first one's base offset.

    COMPRESSED: from the batch before GATHERED down to LISTED, those with a BOUND have a right CRC;
    at least the first of them is to be unpacked into the arena, its row told where. PACK_CHUNK: of
    the batches from NEXT to CHUNK_END, those WANTED are to be compressed into `packed`. PACK: the
    survivors of batch NEXT are to be compressed and written, and NEXT counted on. To be called
    again then.
    """
    walk, state = window.walk, space.state
    chunk = space.ones.shape[0]
    if end > 0:
        code = _list_batches(window, end, state)
        if code != DONE:
            return code
        walk[FIRST_BASE] = load_be64(window.buf, 0)
        begin_chunk(walk, chunk)
    while True:
        if walk[WRITING] == 0:
            code = _gather_chunk(window, space)
            if code != DONE:
                return code
            if walk[GATHERED] == walk[CHUNK_END]:
                return DONE
            waiting = chunk - walk[TOP]
            slots = state[fields.SLOTS]
            slots_max = state[fields.SLOTS_MAX]
            if slots < slots_max and state[fields.ENTRIES] + waiting > entries_max(
                slots, slots_max
            ):
                return MORE_SLOTS
            _decide(walk[TOP], space)
            state[fields.WRITTEN] = 0
            walk[NEXT] = walk[GATHERED]
            walk[WRITING] = 1
            if walk[ARENA] > 0:
                code = _filter_chunk(window, space)
                if code != DONE:
                    return code
        code = _write_chunk(window, space)
        if code != DONE:
            return code
        written = state[fields.WRITTEN]
        if written > walk[BUFFERED_FROM]:
            return BUFFER_FULL
        walk[BUFFERED_FROM] -= written
        copy_bytes(window.hold, walk[BUFFERED_FROM], window.out, 0, written)
        state[fields.WRITTEN] = 0
        begin_chunk(walk, chunk)


@inlined
def begin_chunk(walk: Ints, chunk: int) -> None:
    """Be ready to gather: a workspace of `chunk` records is free, and the arena."""
    walk[CHUNK_END] = walk[GATHERED]
    walk[TOP] = chunk
    walk[CHUNK_BYTES] = 0
    walk[ARENA] = 0
    walk[WRITING] = 0
