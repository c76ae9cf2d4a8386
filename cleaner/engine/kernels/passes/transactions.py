"""The second pass over transactional batches and markers.

Rules (Kafka's log cleaner)
- In the indexed section the records of aborted transactions are removed: the first pass has
  compared the transaction indexes with the markers there. Below it, earlier cleans have removed
  them; above it, the next clean does. A batch is aborted if it lies between the first offset and
  the marker of an entry of the transaction indexes.
- A marker stays while its transaction has a batch, even an empty one: recovery of the log's
  producer state needs to read how the transaction ended. The index entry of an abort marker stays
  as long.
- A marker without batches gets a delete horizon and is removed once that has passed. Its batch is
  then handled like any other batch without records (rebuilt_batch.py).
- After a damaged segment no marker is removed or gets a horizon: its batches may be in that
  segment.
- Control records other than markers are never removed, and never looked up by key.
- In a compacted view all control records are removed: it contains committed data only.
- A clean that removes only expired records relies on the horizon alone: the marker got it when its
  transaction had no batch left, and a transaction that has ended gets no new ones.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.memory import copy_bytes, load_be16, load_be32, load_be64
from cleaner.engine.kernels.compile import Bytes, Ints, inlined, kernel
from cleaner.engine.kernels.layout import (
    ATTR_CODEC,
    ATTR_CONTROL,
    ATTR_DELETE_HORIZON,
    ATTRIBUTES_POSITION,
    BASE_TIMESTAMP_POSITION,
    HEADER_BYTES,
    LAST_OFFSET_DELTA_POSITION,
    MAX_TIMESTAMP_POSITION,
    PRODUCER_ID_POSITION,
    RECORD_COUNT_POSITION,
    Workspace,
)
from cleaner.engine.kernels.passes.producer_set import add_producer, remove_producer
from cleaner.engine.kernels.passes.rebuilt_batch import (
    copy_whole,
    finish_empty,
    note_horizon,
    restamp,
    write_header,
)
from cleaner.engine.kernels.passes.walk import (
    ABORT,
    BAD_RECORD,
    DONE,
    NO_MARKER,
    PRODUCERS_FULL,
    aborted_row,
    check_content,
    check_records,
    marker_type,
)


@inlined
def _stamp(buf: Bytes, at: int, size: int, out: Bytes, scratch: Bytes, state: Ints) -> None:
    """Write the batch of a marker, with a delete horizon."""
    count = load_be32(buf, at + RECORD_COUNT_POSITION)
    horizon_ms = state[fields.HORIZON_MS]
    record_bytes = size - HEADER_BYTES
    copy_bytes(scratch, 0, buf, at + HEADER_BYTES, record_bytes)
    written: int = state[fields.WRITTEN]
    base_ms = load_be64(buf, at + BASE_TIMESTAMP_POSITION)
    end = restamp(scratch, record_bytes, count, base_ms, horizon_ms, out, written + HEADER_BYTES)
    state[fields.KEPT] = count
    state[fields.MAX_TIMESTAMP_MS] = load_be64(buf, at + MAX_TIMESTAMP_POSITION)
    state[fields.SET_HORIZON] = 1
    write_header(buf, at, out, written, end - written, state)
    state[fields.WRITTEN] = end
    state[fields.RECORDS_OUT] += count
    state[fields.BATCHES_REBUILT] += 1
    note_horizon(horizon_ms, state)


@inlined
def _finish_marker(
    buf: Bytes, at: int, size: int, is_abort: bool, out: Bytes, scratch: Bytes, space: Workspace
) -> int:
    state = space.state
    base = load_be64(buf, at)
    producer = load_be64(buf, at + PRODUCER_ID_POSITION)
    stamped = load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_DELETE_HORIZON != 0
    met = remove_producer(space.open_producers, state, producer)
    is_bare = not met and state[fields.SOUND] != 0
    if state[fields.EXPIRED_ONLY] != 0:
        is_bare = stamped
    if not is_bare:
        row = aborted_row(space.aborted, producer, base, base) if is_abort else -1
        if row >= 0:
            space.aborted_kept[row] = 1
    elif stamped:
        horizon_ms = load_be64(buf, at + BASE_TIMESTAMP_POSITION)
        if state[fields.DROP_EXPIRED] != 0 and state[fields.NOW_MS] >= horizon_ms:
            state[fields.MARKERS_REMOVED] += 1
            return finish_empty(buf, at, size, out, space)
        note_horizon(horizon_ms, state)
    elif state[fields.HORIZON_MS] >= 0:
        _stamp(buf, at, size, out, scratch, state)
        return DONE
    copy_whole(buf, at, size, out, state)
    return DONE


@inlined
def _finish_control(
    buf: Bytes, at: int, size: int, out: Bytes, scratch: Bytes, space: Workspace
) -> int:
    count = load_be32(buf, at + RECORD_COUNT_POSITION)
    if space.state[fields.LATEST_ONLY] != 0:
        space.state[fields.BATCHES_DROPPED] += 1
        space.state[fields.MARKERS_REMOVED] += count
        return DONE
    if count == 0 and space.state[fields.EXPIRED_ONLY] == 0:
        return finish_empty(buf, at, size, out, space)
    kind = NO_MARKER
    if count > 0 and load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_CODEC == 0:
        records_at = at + HEADER_BYTES
        if not check_records(
            buf, records_at, at + size, count, load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
        ):
            return BAD_RECORD
        kind = marker_type(buf, records_at, at + size)
    if kind == NO_MARKER or load_be64(buf, at + PRODUCER_ID_POSITION) < 0:
        copy_whole(buf, at, size, out, space.state)
        return DONE
    return _finish_marker(buf, at, size, kind == ABORT, out, scratch, space)


@kernel
def finish_transactional(
    buf: Bytes,
    at: int,
    size: int,
    is_checked: bool,
    out: Bytes,
    scratch: Bytes,
    space: Workspace,
) -> tuple[int, bool]:
    """Handle a transactional or control batch -> (DONE or the fault, whether it is finished).

    An unfinished batch is committed data with a matching CRC, to be handled as any other batch.
    `is_checked`: the content was checked before. `out` has room for the result. PRODUCERS_FULL:
    `open_producers` must grow; nothing was done.
    """
    state = space.state
    state[fields.TRANSACTIONS_SEEN] = 1
    code = DONE if is_checked else check_content(buf, at, size)
    if code != DONE:
        return code, False
    if load_be16(buf, at + ATTRIBUTES_POSITION) & ATTR_CONTROL != 0:
        return _finish_control(buf, at, size, out, scratch, space), True
    producer = load_be64(buf, at + PRODUCER_ID_POSITION)
    if producer < 0 or state[fields.EXPIRED_ONLY] != 0:
        return DONE, False
    if not add_producer(space.open_producers, state, producer):
        return PRODUCERS_FULL, False
    base = load_be64(buf, at)
    last = base + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
    # Only where the first pass has compared the transaction index with the markers.
    if last < state[fields.FIRST_DIRTY] or base >= state[fields.MAP_END]:
        return DONE, False
    if aborted_row(space.aborted, producer, base, last) < 0:
        return DONE, False
    state[fields.RECORDS_ABORTED] += load_be32(buf, at + RECORD_COUNT_POSITION)
    return finish_empty(buf, at, size, out, space), True
