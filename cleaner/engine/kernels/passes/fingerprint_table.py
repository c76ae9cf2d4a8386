"""The table of fingerprints: open addressing over one array that is handed in whole.

Rules
- A slot is three words: 128 bits of fingerprint, and offset + 1 (0: free). Nothing is ever deleted.
- Home of a fingerprint: its upper 32 bits scaled to the slots in use, so order by home is order by
  fingerprint whatever the number of slots; from there linear probing with wrap-around.
- Only the first `SLOTS` slots are in use. The rest of the array has not been touched, so its pages
  do not exist. Growing moves the entries within the array, from the last slot down.
- At most nine tenths of the slots get filled (Kafka's io.buffer.load.factor), so that a probe
  always ends at a free one.
- Offsets are put in ascending order, by whoever walks the log: the last one put stands.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.memory import prefetch
from cleaner.engine.kernels.compile import Bytes, Ints, Words, allocating, inlined, int64, kernel
from cleaner.engine.kernels.layout import SLOT_WORDS

AHEAD = 12  # fingerprints between a prefetch and the probe that wants it
_HALF = np.uint64(32)
FREE = np.uint64(0)


@inlined
def home(fingerprint: np.uint64, slots: int) -> int:
    """The slot where the search for a fingerprint begins."""
    slot: int = int64(((fingerprint >> _HALF) * np.uint64(slots)) >> _HALF)
    return slot


@inlined
def entries_max(slots: int, slots_max: int) -> int:
    """How many entries `slots` may hold while the table can grow, and when it cannot."""
    if slots < slots_max:
        return slots * 7 // 10  # half of it after doubling: few probes, and few cache misses
    return slots * 9 // 10


@allocating
def _place(
    table: Words, slots: int, slot: int, low: np.uint64, high: np.uint64, value: np.uint64
) -> bool:
    """Put an entry into the first free slot from `slot` on; False at the end of the table."""
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

    Going down from the last slot, everything from the present slot up is in its new order
    already. An entry whose new home lies there is placed at once. The few others (near the start of
    the table, where a probe led further than the home moves; at the end, where it would wrap
    around) wait until all slots are in the new order.
    """
    aside = np.empty(256 * SLOT_WORDS, dtype=np.uint64)
    waiting = 0
    for slot in range(slots - 1, -1, -1):
        at = slot * SLOT_WORDS
        value = table[at + 2]
        if value == FREE:
            continue
        item = table[at]
        two = table[at + 1]
        table[at + 2] = FREE
        place = home(item, new_slots)
        if place < slot or not _place(table, new_slots, place, item, two, value):
            aside = _pushed(aside, waiting, item, two, value)
            waiting += 1
    for i in range(waiting):
        at = i * SLOT_WORDS
        item, two, value = aside[at], aside[at + 1], aside[at + 2]
        if not _place(table, new_slots, home(item, new_slots), item, two, value):
            _place(table, new_slots, 0, item, two, value)


@inlined
def probe(table: Words, slots: int, low: np.uint64, high: np.uint64) -> int:
    """Where in the table a fingerprint stands, or the free slot at which it would be put."""
    slot = home(low, slots)
    at = slot * SLOT_WORDS
    while table[at + 2] != FREE and not (table[at] == low and table[at + 1] == high):
        slot = slot + 1 if slot + 1 < slots else 0
        at = slot * SLOT_WORDS
    return at


@inlined
def put_keys(
    table: Words, state: Ints, items: Words, twos: Words, offsets: Ints, count: int
) -> int:
    """Make `offsets[i]` the last offset of each fingerprint -> how many were put.

    Fewer than `count`: the table is full and the next fingerprint is a new one. Known ones are
    updated however full it is, and the first one always fits. The caller has grown the table.
    """
    slots = state[fields.SLOTS]
    entries = state[fields.ENTRIES]
    limit = entries_max(slots, state[fields.SLOTS_MAX])
    done = 0
    while done < count:
        if done + AHEAD < count:
            prefetch(table, home(items[done + AHEAD], slots) * SLOT_WORDS)
        item = items[done]
        two = twos[done]
        at = probe(table, slots, item, two)
        if table[at + 2] == FREE:
            if entries >= limit:
                break
            table[at] = item
            table[at + 1] = two
            entries += 1
        table[at + 2] = np.uint64(offsets[done] + 1)
        done += 1
    state[fields.ENTRIES] = entries
    return done


@inlined
def find_keys(
    table: Words, state: Ints, items: Words, twos: Words, offsets: Ints, count: int
) -> None:
    """Set `offsets[i]` to the last offset of each fingerprint, -1 where it is not known."""
    slots = state[fields.SLOTS]
    for i in range(count):
        if i + AHEAD < count:
            prefetch(table, home(items[i + AHEAD], slots) * SLOT_WORDS)
        item = items[i]
        two = twos[i]
        at = probe(table, slots, item, two)
        offsets[i] = int64(table[at + 2]) - 1


@kernel
def mark_survivors(table: Words, state: Ints, bits: Bytes) -> None:
    """Set the bit of each last offset in [BITS_FIRST, BITS_END); `bits` comes in cleared."""
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
