"""The single pass of a clean over a window of batches, from the newest to the oldest.

Rules
- A record survives if its key is not in the map yet: no newer record has the key. The key is then
  added if the record is in the dirty section; keys of older records are only looked up.
- Batches are read newest first, in chunks of some thousand records. The fingerprints of a chunk
  fill the arrays of the workspace from the end, so they are in the order of the log; they are
  looked up from the last to the first. Then the chunk's batches are written in order, in front of
  the output of newer chunks.
- Compressed batches are unpacked and packed one chunk at a time, because each return to Python and
  call of a kernel is expensive.
- The second pass of a two-pass clean shares the code that writes batches (passes/rewrite.py,
  rebuilt_batch.py). A batch is indexed only if its CRC matches and all of its records are valid.
- Faults are only returned: no output of this pass has been published, and the two-pass clean that
  follows reports them.
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
    ATTRIBUTES_POSITION,
    BASE_TIMESTAMP_POSITION,
    GROWN_BYTES_PER_RECORD,
    HEADER_BYTES,
    LAST_OFFSET_DELTA_POSITION,
    RECORD_BYTES_MIN,
    RECORD_COUNT_POSITION,
    SLOT_WORDS,
    Workspace,
)
from cleaner.engine.kernels.passes.fingerprint_table import AHEAD, FREE, entries_max, home, probe
from cleaner.engine.kernels.passes.rebuilt_batch import (
    copy_whole,
    finish_empty,
    restamp,
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

# Why `clean_window` returned, beside DONE, COMPRESSED and the faults of batches.
CHUNK_FULL: Final = -1  # internal: never returned
MORE_RECORDS: Final = -2  # the batch has more records than the workspace holds
MORE_ROOM: Final = -3  # the batch may need more room than the output has
MORE_SLOTS: Final = -4  # the map must grow
BUFFER_FULL: Final = -5  # no room for the output of the chunk
TRANSACTION: Final = -6  # a transactional or control batch, which needs two passes
PACK_CHUNK: Final = -7  # the caller must compress survivors of the chunk, or enlarge the output

# One row per batch of a window.
ROW_WORDS: Final = 13
POSITION: Final = 0  # in the window
SIZE: Final = 1
RECORDS_AT: Final = 2  # in the window; in the arena if the batch was unpacked
RECORDS_END: Final = 3  # 0: not read, or not unpacked
FLAGS_AT: Final = 4  # index of its first record in `keep`; -1: no record is read
# Of a compressed batch whose CRC matches: the maximum size of its zstd frame when unpacked, 0 if
# that is not known. -1: the CRC was not checked.
BOUND: Final = 5
# The result of `filter_records` for an unpacked batch.
SURVIVORS: Final = 6
LATEST: Final = 7
STAMPED: Final = 8
KEPT_AT: Final = 9  # in `kept`
KEPT_END: Final = 10
PACKED_AT: Final = 11  # in `packed`
PACKED_END: Final = 12  # 0: not packed there; PACK_PENDING: the caller must pack it
PACK_PENDING: Final = -1

# Indexes into `walk`: the position of the pass.
GATHERED: Final = 0  # the oldest batch whose keys are fingerprinted
CHUNK_END: Final = 1  # the batch after the chunk
TOP: Final = 2  # the first fingerprint
CHUNK_BYTES: Final = 3  # the maximum size of the chunk's output
ARENA: Final = 4  # bytes of the arena in use
WRITING: Final = 5  # 1: `keep` is set, and batches from NEXT on are being written
NEXT: Final = 6
BUFFERED_FROM: Final = 7  # the output of newer chunks is `buffered[BUFFERED_FROM:]`
FLUSH: Final = 8  # 1: write the chunk before the next batch is read
UNPACK_LIMIT: Final = 9  # bytes that a batch may unpack to
LZ4_UNPACKER: Final = 10  # addresses (lz4.py); 0: the caller unpacks and packs lz4
LZ4_PACKER: Final = 11
LISTED: Final = 12  # with COMPRESSED: the oldest batch that may be unpacked
FIRST_BASE: Final = 13  # base offset of the window's first batch
FRAME_BYTES_MAX: Final = 14  # the maximum size of the chunk's frames that the kernel packs
WALK_WORDS: Final = 15


class Window(NamedTuple):
    """Adjacent batches, and the memory to clean them in."""

    buf: Bytes
    rows: Ints  # one per batch, ROW_WORDS each
    walk: Ints
    arena: Bytes  # unpacked records of the chunk
    kept: Bytes  # surviving records of the chunk's unpacked batches: three times the arena
    packed: Bytes  # the same, compressed
    scratch: Bytes  # one batch
    out: Bytes  # output of the chunk
    buffered: Bytes  # output of newer chunks, filled from its end


@inlined
def _list_batches(window: Window, end: int, state: Ints) -> int:
    """List the batches that fill `buf[:end]` exactly -> DONE or the fault.

    NEXT_OFFSET and SOURCE_END in `state` bound their offsets.
    """
    buf, rows, walk = window.buf, window.rows, window.walk
    at = 0
    count = 0
    while at < end:
        code, size = check_header(buf, at, end, state)
        if code != DONE:
            return code
        if load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_OF_TRANSACTION != 0:
            return TRANSACTION
        row = count * ROW_WORDS
        rows[row + POSITION] = at
        rows[row + SIZE] = size
        rows[row + RECORDS_END] = 0
        rows[row + BOUND] = -1
        state[fields.NEXT_OFFSET] = (
            load_be64(buf, at) + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION) + 1
        )
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

    A record that is certain to be removed gets the offset -1.
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
        if key_bytes < 0:
            state[fields.KEYLESS_SEEN] = 1
        if key_bytes < 0 or delta < first:
            space.offsets[i] = -1
            space.lows[i] = 0
        else:
            low, high = siphash128(source, key_at, key_bytes, k0, k1)
            space.lows[i] = low
            space.highs[i] = high
            space.offsets[i] = base + delta
    return DONE if at == end else BAD_RECORD


@inlined
def _unpack_lz4(window: Window, row: int) -> bool:
    """Unpack an LZ4 batch into the arena; return False if the caller must do it."""
    rows, walk = window.rows, window.walk
    at = rows[row + POSITION]
    if load_be16(window.buf, at + ATTRIBUTES_POSITION) & ATTR_CODEC != LZ4:
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
def _room_for(size: int, count: int) -> int:
    """Return the maximum output of a batch, without the frame if it is packed again."""
    return size + count * GROWN_BYTES_PER_RECORD + SLACK_BYTES


@inlined
def _list_packed(window: Window, space: Workspace) -> None:
    """List the batches that the caller unpacks together with the next batch of the chunk.

    All of them will be part of this chunk, so that the arena is free after it.
    """
    buf, rows, walk, state = window.buf, window.rows, window.walk, space.state
    index = walk[GATHERED] - 1
    top = walk[TOP]
    chunk_bytes = walk[CHUNK_BYTES]
    while index >= 0:
        row = index * ROW_WORDS
        at = rows[row + POSITION]
        size = rows[row + SIZE]
        count = load_be32(buf, at + RECORD_COUNT_POSITION)
        chunk_bytes += _room_for(size, count)
        if chunk_bytes > window.out.shape[0]:
            break
        if (
            load_be64(buf, at) + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
            >= state[fields.LOG_START]
        ):
            if count > top:
                break
            top -= count
            codec = load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_CODEC
            if codec != 0 and count > 0 and rows[row + BOUND] < 0:
                # This kernel unpacks LZ4 itself and takes room of the arena for it.
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
def _add_to_chunk(window: Window, row: int, space: Workspace) -> int:
    """Add a batch to the chunk -> DONE, or the code of what must be done first."""
    buf, rows, walk, state = window.buf, window.rows, window.walk, space.state
    at = rows[row + POSITION]
    size = rows[row + SIZE]
    base = load_be64(buf, at)
    last_delta = load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
    count = load_be32(buf, at + RECORD_COUNT_POSITION)
    is_first = walk[TOP] == space.lows.shape[0] and walk[CHUNK_BYTES] == 0
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
    is_packed = load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_CODEC != 0
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
            if load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_CODEC == LZ4 and walk[ARENA] > 0:
                return CHUNK_FULL  # perhaps only the arena is full
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
    """Set `keep` of the chunk's records, the newest first, and put their keys into the map."""
    table, state = space.table, space.state
    lows, highs, offsets, keep = (
        space.lows,
        space.highs,
        space.offsets,
        space.keep,
    )
    slots = state[fields.SLOTS]
    entries = state[fields.ENTRIES]
    first_dirty = state[fields.FIRST_DIRTY]
    for i in range(lows.shape[0] - 1, top - 1, -1):
        if i >= top + AHEAD:
            prefetch(table, home(lows[i - AHEAD], slots) * SLOT_WORDS)
        keep[i] = 0
        offset = offsets[i]
        if offset < 0:
            continue
        low = lows[i]
        high = highs[i]
        at = probe(table, slots, low, high)
        if table[at + 2] == FREE:
            keep[i] = 1
            if offset >= first_dirty:
                table[at] = low
                table[at + 1] = high
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
def _is_dropped(buf: Bytes, at: int, flags_at: int, space: Workspace) -> bool:
    """Return whether no record of a batch is kept, without a look at its records."""
    if flags_at < 0:
        return True
    if space.state[fields.KEYLESS_SEEN] != 0:
        return False  # records without a key are counted
    count = load_be32(buf, at + RECORD_COUNT_POSITION)
    return not _any_kept(space.keep, flags_at, flags_at + count)


@inlined
def _filter_chunk(window: Window, space: Workspace) -> int:
    """Copy the survivors of the chunk's unpacked batches to `kept` -> DONE or the fault.

    PACK_CHUNK: the caller must compress those of some batches before they can be written, or `out`
    is too small for what this kernel compresses.
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
    walk[FRAME_BYTES_MAX] = 0
    for index in range(walk[NEXT], walk[CHUNK_END]):
        row = index * ROW_WORDS
        at = rows[row + POSITION]
        flags_at = rows[row + FLAGS_AT]
        count = load_be32(buf, at + RECORD_COUNT_POSITION)
        codec = load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_CODEC
        if codec == 0 or _is_dropped(buf, at, flags_at, space):
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
        stamped = state[fields.SET_HORIZON]
        if survivors > 0 and stamped != 0:
            copy_bytes(window.scratch, 0, retained, begin, size)
            base_ms = load_be64(buf, at + BASE_TIMESTAMP_POSITION)
            horizon_ms = state[fields.HORIZON_MS]
            size = restamp(window.scratch, size, survivors, base_ms, horizon_ms, retained, begin)
            size -= begin
        rows[row + SURVIVORS] = survivors
        rows[row + LATEST] = state[fields.MAX_TIMESTAMP_MS]
        rows[row + STAMPED] = stamped
        rows[row + KEPT_AT] = begin
        rows[row + KEPT_END] = begin + size
        rows[row + PACKED_END] = 0
        if survivors > 0 and (survivors < count or stamped != 0):
            begin += size
            if codec != LZ4 or walk[LZ4_PACKER] == 0:
                rows[row + PACKED_END] = PACK_PENDING
                result = PACK_CHUNK
            else:
                walk[FRAME_BYTES_MAX] += frame_bytes_max(size)
    if walk[CHUNK_BYTES] + walk[FRAME_BYTES_MAX] > window.out.shape[0]:
        result = PACK_CHUNK
    return result


@inlined
def _write_packed(window: Window, row: int, space: Workspace) -> int:
    """Write a batch that `_filter_chunk` has filtered -> DONE or the fault."""
    buf, rows, walk, out, state = window.buf, window.rows, window.walk, window.out, space.state
    at = rows[row + POSITION]
    size = rows[row + SIZE]
    state[fields.KEPT] = rows[row + SURVIVORS]
    state[fields.MAX_TIMESTAMP_MS] = rows[row + LATEST]
    state[fields.SET_HORIZON] = rows[row + STAMPED]
    if state[fields.KEPT] == 0:
        return finish_empty(buf, at, size, out, space)
    if (
        state[fields.KEPT] == load_be32(buf, at + RECORD_COUNT_POSITION)
        and state[fields.SET_HORIZON] == 0
    ):
        copy_whole(buf, at, size, out, state)
        return DONE
    written = state[fields.WRITTEN]
    end = written + HEADER_BYTES
    packed_at = rows[row + PACKED_AT]
    packed_end = rows[row + PACKED_END]
    if packed_end == 0:
        kept_at = rows[row + KEPT_AT]
        end = pack_frame(walk[LZ4_PACKER], window.kept, kept_at, rows[row + KEPT_END], out, end)
    else:
        copy_bytes(out, end, window.packed, packed_at, packed_end - packed_at)
        end += packed_end - packed_at
    write_header(buf, at, out, written, end - written, state)
    state[fields.WRITTEN] = end
    state[fields.RECORDS_OUT] += state[fields.KEPT]
    state[fields.BATCHES_REBUILT] += 1
    return DONE


@inlined
def _write(window: Window, row: int, space: Workspace) -> int:
    """Write the survivors of a batch -> DONE or the fault."""
    buf, rows, out, state = window.buf, window.rows, window.out, space.state
    at = rows[row + POSITION]
    size = rows[row + SIZE]
    flags_at = rows[row + FLAGS_AT]
    if _is_dropped(buf, at, flags_at, space):
        return finish_empty(buf, at, size, out, space)
    if load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_CODEC != 0:
        return _write_packed(window, row, space)
    records_at = rows[row + RECORDS_AT]
    end = rows[row + RECORDS_END]
    written = state[fields.WRITTEN]
    code = filter_records(
        buf, records_at, end, buf, at, out, written + HEADER_BYTES, False, flags_at, space
    )
    if code == DONE and state[fields.KEPT] == 0:
        code = finish_empty(buf, at, size, out, space)
    elif code == DONE:
        state[fields.WRITTEN] = finish_batch(buf, at, size, out, window.scratch, state)
        state[fields.RECORDS_OUT] += state[fields.KEPT]
    return code


@inlined
def _fill_chunk(window: Window, space: Workspace) -> int:
    walk = window.walk
    while walk[GATHERED] > 0:
        code = _add_to_chunk(window, (walk[GATHERED] - 1) * ROW_WORDS, space)
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
        space.state[fields.RECORDS_IN] += load_be32(
            window.buf, window.rows[row + POSITION] + RECORD_COUNT_POSITION
        )
        walk[NEXT] += 1
    return DONE


@kernel
def clean_window(window: Window, end: int, space: Workspace) -> int:
    """Clean the batches that fill `buf[:end]` exactly -> DONE, or why it returned.

    After any code but DONE and faults the caller does what is missing and calls again with an
    `end` of 0. NEXT_OFFSET and SOURCE_END in `state` bound the batches' offsets. FIRST_BASE becomes
    the first batch's base offset.

    COMPRESSED: of the batches from GATHERED - 1 down to LISTED, those with a BOUND have a matching
    CRC. The caller unpacks at least the first of them into the arena and sets RECORDS_AT and
    RECORDS_END. PACK_CHUNK: the caller compresses those of the batches from NEXT to CHUNK_END that
    are PACK_PENDING into `packed`. Then it enlarges `out` to CHUNK_BYTES, FRAME_BYTES_MAX and what
    it has compressed.
    """
    walk, state = window.walk, space.state
    chunk = space.lows.shape[0]
    if end > 0:
        code = _list_batches(window, end, state)
        if code != DONE:
            return code
        walk[FIRST_BASE] = load_be64(window.buf, 0)
        begin_chunk(walk, chunk)
    while True:
        if walk[WRITING] == 0:
            code = _fill_chunk(window, space)
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
        copy_bytes(window.buffered, walk[BUFFERED_FROM], window.out, 0, written)
        state[fields.WRITTEN] = 0
        begin_chunk(walk, chunk)


@inlined
def begin_chunk(walk: Ints, chunk: int) -> None:
    """Begin a chunk: all `chunk` places of the workspace and the arena are free."""
    walk[CHUNK_END] = walk[GATHERED]
    walk[TOP] = chunk
    walk[CHUNK_BYTES] = 0
    walk[ARENA] = 0
    walk[WRITING] = 0
