"""The second pass over batches of transactions, and markers.

Rules (Kafka's log cleaner)
- The records of an aborted transaction go, in the section that was indexed: there the first pass
  has held the transaction indexes against the markers. Below it they went in earlier cleans, above
  it they wait for the next one. A batch belongs to one if it lies between the first offset and the
  marker of an entry of the transaction indexes.
- A marker stays while a batch of its producer was met since the one before, be it an empty batch:
  whoever rebuilds the log's state from the log needs to be told how the transaction ended. The
  index entry of an abort marker stays as long.
- A marker that has lost its batches is stamped with a delete horizon first, and goes when that has
  passed. Its batch then goes as any emptied one does (rebuilt_batch.py).
- Behind a damaged segment no marker goes and none is stamped: its batches may stand in there.
- Control records that are no markers stay for good. No control record is looked up by its key.
- In a compacted view no control record stays: what is in it is decided.
- Where only what has expired is looked for, the stamp is enough: it was given when no batch of the
  transaction was left, and none can have come since.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.memory import copy_bytes, load_be16, load_be32, load_be64
from cleaner.engine.kernels.compile import Bytes, Ints, inlined, kernel
from cleaner.engine.kernels.layout import (
    ATTR_CODEC,
    ATTR_CONTROL,
    ATTR_DELETE_HORIZON,
    HEADER_BYTES,
    Workspace,
)
from cleaner.engine.kernels.passes.producer_set import add_producer, remove_producer
from cleaner.engine.kernels.passes.rebuilt_batch import (
    copy_whole,
    note_horizon,
    restamp,
    settle_empty,
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
    """Write a marker's batch with a delete horizon."""
    count = load_be32(buf, at + 57)
    horizon_ms = state[fields.HORIZON_MS]
    record_bytes = size - HEADER_BYTES
    copy_bytes(scratch, 0, buf, at + HEADER_BYTES, record_bytes)
    written: int = state[fields.WRITTEN]
    base_ms = load_be64(buf, at + 27)
    end = restamp(scratch, record_bytes, count, base_ms, horizon_ms, out, written + HEADER_BYTES)
    state[fields.KEPT] = count
    state[fields.LATEST_MS] = load_be64(buf, at + 35)
    state[fields.STAMP] = 1
    write_header(buf, at, out, written, end - written, state)
    state[fields.WRITTEN] = end
    state[fields.RECORDS_OUT] += count
    state[fields.BATCHES_REBUILT] += 1
    note_horizon(horizon_ms, state)


@inlined
def _settle_marker(
    buf: Bytes, at: int, size: int, is_abort: bool, out: Bytes, scratch: Bytes, space: Workspace
) -> int:
    state = space.state
    base = load_be64(buf, at)
    producer = load_be64(buf, at + 43)
    stamped = load_be16(buf, at + 21) & ATTR_DELETE_HORIZON != 0
    met = remove_producer(space.open_producers, state, producer)
    is_bare = not met and state[fields.SOUND] != 0
    if state[fields.EXPIRED_ONLY] != 0:
        is_bare = stamped
    if not is_bare:
        row = aborted_row(space.aborted, producer, base, base) if is_abort else -1
        if row >= 0:
            space.aborted_kept[row] = 1
    elif stamped:
        horizon_ms = load_be64(buf, at + 27)
        if state[fields.DROP_EXPIRED] != 0 and state[fields.NOW_MS] >= horizon_ms:
            state[fields.MARKERS_REMOVED] += 1
            return settle_empty(buf, at, size, out, space)
        note_horizon(horizon_ms, state)
    elif state[fields.HORIZON_MS] >= 0:
        _stamp(buf, at, size, out, scratch, state)
        return DONE
    copy_whole(buf, at, size, out, state)
    return DONE


@inlined
def _settle_control(
    buf: Bytes, at: int, size: int, out: Bytes, scratch: Bytes, space: Workspace
) -> int:
    count = load_be32(buf, at + 57)
    if space.state[fields.LATEST_ONLY] != 0:
        space.state[fields.BATCHES_DROPPED] += 1
        space.state[fields.MARKERS_REMOVED] += count
        return DONE
    if count == 0 and space.state[fields.EXPIRED_ONLY] == 0:
        return settle_empty(buf, at, size, out, space)
    kind = NO_MARKER
    if count > 0 and load_be16(buf, at + 21) & ATTR_CODEC == 0:
        records_at = at + HEADER_BYTES
        if not check_records(buf, records_at, at + size, count, load_be32(buf, at + 23)):
            return BAD_RECORD
        kind = marker_type(buf, records_at, at + size)
    if kind == NO_MARKER or load_be64(buf, at + 43) < 0:
        copy_whole(buf, at, size, out, space.state)
        return DONE
    return _settle_marker(buf, at, size, kind == ABORT, out, scratch, space)


@kernel
def settle_transactional(
    buf: Bytes,
    at: int,
    size: int,
    is_checked: bool,
    out: Bytes,
    scratch: Bytes,
    space: Workspace,
) -> tuple[int, bool]:
    """Look at a transactional or control batch -> (DONE or what is wrong, whether it is finished).

    Not finished: it is data that was not aborted, its checksum is right, and it goes the way of any
    other batch. `is_checked`: it was before. `out` has room for whatever becomes of the batch.
    PRODUCERS_FULL: `open_producers` is to be made larger; nothing was done.
    """
    state = space.state
    code = DONE if is_checked else check_content(buf, at, size)
    if code != DONE:
        return code, False
    if load_be16(buf, at + 21) & ATTR_CONTROL != 0:
        return _settle_control(buf, at, size, out, scratch, space), True
    producer = load_be64(buf, at + 43)
    if producer < 0 or state[fields.EXPIRED_ONLY] != 0:
        return DONE, False
    if not add_producer(space.open_producers, state, producer):
        return PRODUCERS_FULL, False
    base = load_be64(buf, at)
    last = base + load_be32(buf, at + 23)
    # Only where the first pass has held the transaction index against the markers.
    if last < state[fields.FIRST_DIRTY] or base >= state[fields.MAP_END]:
        return DONE, False
    if aborted_row(space.aborted, producer, base, last) < 0:
        return DONE, False
    state[fields.RECORDS_ABORTED] += load_be32(buf, at + 57)
    return settle_empty(buf, at, size, out, space), True
