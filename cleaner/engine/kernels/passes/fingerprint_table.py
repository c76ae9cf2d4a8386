"""The key map: a hash table of fingerprints with open addressing, in one array.

Rules
- A slot is three words: 128 bits of fingerprint, and offset + 1 (0: free). Entries are not deleted.
- The home slot of a fingerprint is its upper 32 bits, scaled to the slots in use. So the order by
  home slot is the order by fingerprint for any number of slots. Probing is linear and wraps around.
- Only the first `SLOTS` slots are in use. The rest of the array is untouched, so it takes no
  memory. Growing moves the entries within the array, from the last slot down.
- At most nine tenths of the slots are filled (Kafka's io.buffer.load.factor), so that a probe
  always ends at a free slot.
- Callers put offsets in ascending order: the last offset put for a fingerprint is its latest.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.memory import prefetch
from cleaner.engine.kernels.compile import Bytes, Ints, Words, allocating, inlined, int64, kernel
from cleaner.engine.kernels.layout import SLOT_WORDS

AHEAD = 12  # fingerprints between a prefetch and its probe
_HALF = np.uint64(32)
FREE = np.uint64(0)


@inlined
def home(fingerprint: np.uint64, slots: int) -> int:
    """Return the slot where the search for a fingerprint begins."""
    slot: int = int64(((fingerprint >> _HALF) * np.uint64(slots)) >> _HALF)
    return slot


@inlined
def entries_max(slots: int, slots_max: int) -> int:
    """Return the maximum number of entries in `slots` slots: fewer if the table can still grow."""
    if slots < slots_max:
        return slots * 7 // 10  # 35% after doubling: few probes and cache misses
    return slots * 9 // 10


@allocating
def _place(
    table: Words, slots: int, slot: int, low: np.uint64, high: np.uint64, value: np.uint64
) -> bool:
    """Put an entry into the first free slot from `slot` on; return False if there is none."""
    while slot < slots:
        at = slot * SLOT_WORDS
        if table[at + 2] == FREE:
            table[at] = low
            table[at + 1] = high
            table[at + 2] = value
            return True
        slot += 1
    return False


@allocating
def _pushed(aside: Words, count: int, low: np.uint64, high: np.uint64, value: np.uint64) -> Words:
    at = count * SLOT_WORDS
    if at == aside.shape[0]:
        longer = np.empty(aside.shape[0] * 2, dtype=np.uint64)
        longer[:at] = aside
        aside = longer
    aside[at] = low
    aside[at + 1] = high
    aside[at + 2] = value
    return aside


@allocating
def grow(table: Words, slots: int, new_slots: int) -> None:
    """Spread the entries of the first `slots` slots over `new_slots`, in place.

    The loop goes down from the last slot; all slots above the present one are in their new order.
    An entry whose new home slot is among them is placed at once. The few others are put aside and
    placed at the end: near the start of the table, entries that were probed further than the home
    slot moves; near the end, entries that would wrap around.
    """
    aside = np.empty(256 * SLOT_WORDS, dtype=np.uint64)
    waiting = 0
    for slot in range(slots - 1, -1, -1):
        at = slot * SLOT_WORDS
        value = table[at + 2]
        if value == FREE:
            continue
        low = table[at]
        high = table[at + 1]
        table[at + 2] = FREE
        place = home(low, new_slots)
        if place < slot or not _place(table, new_slots, place, low, high, value):
            aside = _pushed(aside, waiting, low, high, value)
            waiting += 1
    for i in range(waiting):
        at = i * SLOT_WORDS
        low, high, value = aside[at], aside[at + 1], aside[at + 2]
        if not _place(table, new_slots, home(low, new_slots), low, high, value):
            _place(table, new_slots, 0, low, high, value)


@inlined
def probe(table: Words, slots: int, low: np.uint64, high: np.uint64) -> int:
    """Return the index in `table` of a fingerprint's slot, or of the free slot for it."""
    slot = home(low, slots)
    at = slot * SLOT_WORDS
    while table[at + 2] != FREE and not (table[at] == low and table[at + 1] == high):
        slot = slot + 1 if slot + 1 < slots else 0
        at = slot * SLOT_WORDS
    return at


@inlined
def put_keys(
    table: Words, state: Ints, lows: Words, highs: Words, offsets: Ints, count: int
) -> int:
    """Make `offsets[i]` the last offset of each fingerprint -> the number of fingerprints put.

    Fewer than `count`: the table is full and the next fingerprint is not in it. Fingerprints in
    the table are always updated, and the first one always fits. The caller has grown the table.
    """
    slots = state[fields.SLOTS]
    entries = state[fields.ENTRIES]
    limit = entries_max(slots, state[fields.SLOTS_MAX])
    done = 0
    while done < count:
        if done + AHEAD < count:
            prefetch(table, home(lows[done + AHEAD], slots) * SLOT_WORDS)
        low = lows[done]
        high = highs[done]
        at = probe(table, slots, low, high)
        if table[at + 2] == FREE:
            if entries >= limit:
                break
            table[at] = low
            table[at + 1] = high
            entries += 1
        table[at + 2] = np.uint64(offsets[done] + 1)
        done += 1
    state[fields.ENTRIES] = entries
    return done


@inlined
def find_keys(
    table: Words, state: Ints, lows: Words, highs: Words, offsets: Ints, count: int
) -> None:
    """Set `offsets[i]` to the last offset of each fingerprint, -1 if it is not in the table."""
    slots = state[fields.SLOTS]
    for i in range(count):
        if i + AHEAD < count:
            prefetch(table, home(lows[i + AHEAD], slots) * SLOT_WORDS)
        low = lows[i]
        high = highs[i]
        at = probe(table, slots, low, high)
        offsets[i] = int64(table[at + 2]) - 1


@kernel
def mark_survivors(table: Words, state: Ints, bits: Bytes) -> None:
    """Set the bit of each last offset in [BITS_FIRST, BITS_END); all bits are 0 before."""
    first = state[fields.BITS_FIRST]
    end = state[fields.BITS_END]
    for slot in range(state[fields.SLOTS]):
        value = int64(table[slot * SLOT_WORDS + 2])
        if value == 0:
            continue
        offset = value - 1
        if first <= offset < end:
            bit = offset - first
            bits[bit >> 3] |= np.uint8(1 << (bit & 7))
