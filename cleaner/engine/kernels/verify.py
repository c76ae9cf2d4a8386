"""Which records below the dirty section live, as offsets, and offsets back into a bitmap.

Rules
- The map holds the keys of one share, with their last offsets in the dirty section. A record below
  lives if its key has none that is larger. Keys of other shares are passed over.
- A damaged batch ends the walk, as in the passes: its segment is left as it is, whatever is found.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Bytes, Ints, inlined, kernel
from cleaner.engine.kernels.hashing import siphash128
from cleaner.engine.kernels.layout import (
    ATTR_CODEC,
    ATTR_CONTROL,
    HEADER_BYTES,
    RECORD_BYTES_MIN,
    Workspace,
)
from cleaner.engine.kernels.memory import load_be16, load_be32, load_be64
from cleaner.engine.kernels.table import find_keys
from cleaner.engine.kernels.walk import (
    BAD_COUNT,
    BAD_RECORD,
    COMPRESSED,
    DONE,
    check_content,
    check_header,
    in_share,
    read_record,
)


@inlined
def _settle(live: Ints, found: int, waiting: int, space: Workspace) -> int:
    """Note the living ones of `waiting` gathered records behind `found` others -> their number."""
    find_keys(space.table, space.state, space.ones, space.twos, space.found, waiting)
    for i in range(waiting):
        if space.offsets[i] >= space.found[i]:
            live[found] = space.offsets[i]
            found += 1
    return found


@inlined
def _gather(
    source: Bytes,
    at: int,
    end: int,
    base: int,
    count: int,
    live: Ints,
    space: Workspace,
    pending: tuple[int, int],
) -> tuple[int, int]:
    """Fingerprint the records of one batch -> (living ones noted, records not yet decided).

    The latter is -1 at a record that does not fit its batch.
    """
    state = space.state
    found, waiting = pending
    k0 = np.uint64(state[fields.KEY_0])
    k1 = np.uint64(state[fields.KEY_1])
    for _ in range(count):
        at, _, delta, key_at, key_bytes, _ = read_record(source, at, end)
        if at < 0:
            return found, -1
        if key_bytes < 0:
            state[fields.KEYLESS_MET] = 1
            continue
        one, two = siphash128(source, key_at, key_bytes, k0, k1)
        if not in_share(two, state):
            continue
        if waiting == space.ones.shape[0]:
            found = _settle(live, found, waiting, space)
            waiting = 0
        space.ones[waiting] = one
        space.twos[waiting] = two
        space.offsets[waiting] = base + delta
        waiting += 1
    return found, waiting


@kernel
def gather_living(
    buf: Bytes, at: int, end: int, live: Ints, space: Workspace
) -> tuple[int, int, int]:
    """Offsets of the living records of the uncompressed batches from `at` on.

    -> (code, position, number of offsets put into `live`, which has room for one per record).
    COMPRESSED: the batch at the position is to be unpacked and given to `gather_unpacked`. DONE:
    the dirty section begins here.
    """
    state = space.state
    found = waiting = 0
    while True:
        code, size = check_header(buf, at, end, state)
        if code != DONE:
            break
        base = load_be64(buf, at)
        if base >= state[fields.FIRST_DIRTY]:
            break
        last = base + load_be32(buf, at + 23)
        count = load_be32(buf, at + 57)
        attributes = load_be16(buf, at + 21)
        if last >= state[fields.LOG_START] and count > 0 and attributes & ATTR_CONTROL == 0:
            code = check_content(buf, at, size)
            if code == DONE and attributes & ATTR_CODEC != 0:
                code = COMPRESSED
            if code != DONE:
                break
            found, waiting = _gather(
                buf, at + HEADER_BYTES, at + size, base, count, live, space, (found, waiting)
            )
            if waiting < 0:
                return BAD_RECORD, at, found
        state[fields.NEXT_OFFSET] = last + 1
        at += size
    return code, at, _settle(live, found, waiting, space)


@kernel
def gather_unpacked(
    source: Bytes, end: int, base: int, count: int, live: Ints, space: Workspace
) -> tuple[int, int]:
    """The same for one unpacked batch, `source[:end]` -> (DONE or why not, number of offsets)."""
    if count * RECORD_BYTES_MIN > end:
        return BAD_COUNT, 0
    found, waiting = _gather(source, 0, end, base, count, live, space, (0, 0))
    if waiting < 0:
        return BAD_RECORD, found
    return DONE, _settle(live, found, waiting, space)


@kernel
def set_bits(bits: Bytes, offsets: Ints, count: int, first: int) -> None:
    """Set the bit of each of `offsets[:count]`, counted from `first`."""
    for i in range(count):
        bit = offsets[i] - first
        bits[bit >> 3] |= np.uint8(1 << (bit & 7))
