"""The bitmap of survivors of the second pass."""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Bools, Bytes, Ints, kernel


@kernel
def set_bits(bits: Bytes, offsets: Ints, count: int, first: int) -> None:
    """Set the bit of each of `offsets[:count]`, counted from `first`."""
    for i in range(count):
        bit = offsets[i] - first
        bits[bit >> 3] |= np.uint8(1 << (bit & 7))


@kernel
def find_intervals(
    bits: Bytes, state: Ints, firsts: Ints, lasts: Ints, begin: int, found: Bools
) -> int:
    """Set `found[i]` if there is a bit in [firsts[i], lasts[i]], for i from `begin` on.

    The bitmap covers [BITS_FIRST, BITS_END) -> the first interval that exceeds it, or their number.
    """
    from_offset = state[fields.BITS_FIRST]
    end_offset = state[fields.BITS_END]
    for i in range(begin, firsts.shape[0]):
        if firsts[i] < from_offset or lasts[i] >= end_offset:
            return i
        bit = firsts[i] - from_offset
        last = lasts[i] - from_offset
        while bit <= last and not found[i]:
            byte = bits[bit >> 3] >> np.uint8(bit & 7)
            left = min(8 - (bit & 7), last - bit + 1)
            found[i] = byte & ((1 << left) - 1) != 0
            bit += left
    count: int = firsts.shape[0]
    return count
