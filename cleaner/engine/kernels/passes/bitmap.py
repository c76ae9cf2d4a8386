"""Set the offsets of survivors in the bitmap of the second pass."""

import numpy as np

from cleaner.engine.kernels.compile import Bytes, Ints, kernel


@kernel
def set_bits(bits: Bytes, offsets: Ints, count: int, first: int) -> None:
    """Set the bit of each of `offsets[:count]`, counted from `first`."""
    for i in range(count):
        bit = offsets[i] - first
        bits[bit >> 3] |= np.uint8(1 << (bit & 7))
