"""The rows of a key index on disk and in the broker's memory: 16 bytes for each.

A row in memory has three words (kernels/passes/shards.py): 128 bits of fingerprint, and the offset.
A packed row has two: the first word of the fingerprint, then the lower half of its second word and
the offset relative to the base of the segment.

So keys are told apart by 96 bits of a keyed hash. Among n keys, the probability that any two have
the same ones is n * n / 2**97: 6e-12 for 10**9 keys.
"""

from typing import Final

import numpy as np

from cleaner.engine.kernels.compile import Words
from cleaner.engine.kernels.layout import SLOT_WORDS

PACKED_WORDS: Final = 2
PACKED_BYTES: Final = 16
SUM_VALUES: Final = 1 << 64  # of a checksum
_HALF: Final = np.uint64(32)
_LOW: Final = np.uint64((1 << 32) - 1)
# The map takes the home slot of a row from the upper half of the second word, and the round from
# the lower half. An odd factor makes one of the other, so that the keys of a round are spread.
_SPREAD: Final = np.uint64(0x9E3779B1)
# The finalizer of SplitMix64 (Steele, Lea, Flood, 2014).
_MIX_1: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_2: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_3: Final = np.uint64(0x94D049BB133111EB)


def pack_rows(rows: Words, base_offset: int) -> Words:
    """Return the packed form of rows of a segment with this base offset."""
    by_row = rows.reshape(-1, SLOT_WORDS)
    packed: Words = np.empty((len(by_row), PACKED_WORDS), dtype=np.uint64)
    packed[:, 0] = by_row[:, 0]
    packed[:, 1] = by_row[:, 1] << _HALF | by_row[:, 2] - np.uint64(base_offset + 1)
    return packed.reshape(-1)


def unpack_rows(packed: Words, base_offset: int) -> Words:
    """Return the rows of a segment with this base offset."""
    by_row = packed.reshape(-1, PACKED_WORDS)
    rows: Words = np.empty((len(by_row), SLOT_WORDS), dtype=np.uint64)
    low = by_row[:, 1] >> _HALF
    rows[:, 0] = by_row[:, 0]
    rows[:, 1] = (low * _SPREAD) << _HALF | low
    rows[:, 2] = (by_row[:, 1] & _LOW) + np.uint64(base_offset + 1)
    return rows.reshape(-1)


def last_of_each_key(packed: Words) -> Words:
    """Return the last row of each key, sorted by the first word of the fingerprint.

    The rows of a key are in ascending order of offsets.
    """
    by_row = packed.reshape(-1, PACKED_WORDS)
    by_row = by_row[np.argsort(by_row[:, 0], kind="stable")]
    before, after = by_row[:-1], by_row[1:]
    is_last = np.ones(len(by_row), dtype=np.bool_)
    is_last[:-1] = (before[:, 0] != after[:, 0]) | (before[:, 1] >> _HALF != after[:, 1] >> _HALF)
    last: Words = by_row[is_last].reshape(-1)
    return last


def sum_of_rows(packed: Words) -> int:
    """Return a checksum of rows that does not depend on their order.

    Sums of several arrays add up, modulo SUM_VALUES. Two sets of rows that differ have the same sum
    with a probability of 2**-64.
    """
    by_row = packed.reshape(-1, PACKED_WORDS)
    mixed = by_row[:, 0] ^ by_row[:, 1] * _MIX_1
    mixed = (mixed ^ mixed >> np.uint64(30)) * _MIX_2
    mixed = (mixed ^ mixed >> np.uint64(27)) * _MIX_3
    mixed ^= mixed >> np.uint64(31)
    return int(mixed.sum(dtype=np.uint64))
