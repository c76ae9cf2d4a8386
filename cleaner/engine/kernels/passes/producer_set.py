"""A hash set of producers with an open transaction, as an array."""

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Ints, inlined, kernel

_MIX = -7046029254386353131  # 2^64 / golden ratio, odd


@inlined
def _home(producer: int, slots: int) -> int:
    return int((producer * _MIX) >> 32) & (slots - 1)


@kernel
def add_producer(table: Ints, state: Ints, producer: int) -> bool:
    """Add a producer; `table` has a power of two slots. Return False if it is full."""
    slots = table.shape[0]
    slot = _home(producer, slots)
    while table[slot] != 0:
        if table[slot] == ~producer:
            return True
        slot = (slot + 1) & (slots - 1)
    if (state[fields.OPEN_COUNT] + 1) * 4 > slots * 3:
        return False
    table[slot] = ~producer
    state[fields.OPEN_COUNT] += 1
    return True


@kernel
def remove_producer(table: Ints, state: Ints, producer: int) -> bool:
    """Remove a producer; return whether it was in the set."""
    slots = table.shape[0]
    slot = _home(producer, slots)
    while table[slot] != ~producer:
        if table[slot] == 0:
            return False
        slot = (slot + 1) & (slots - 1)
    state[fields.OPEN_COUNT] -= 1
    # Move displaced entries into the hole, so that no search ends there too early.
    hole = slot
    while True:
        slot = (slot + 1) & (slots - 1)
        if table[slot] == 0:
            break
        home = _home(~table[slot], slots)
        if (slot - home) & (slots - 1) >= (slot - hole) & (slots - 1):
            table[hole] = table[slot]
            hole = slot
    table[hole] = 0
    return True
