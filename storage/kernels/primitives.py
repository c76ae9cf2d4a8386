"""The kernel decorator, and reading of varints from untrusted bytes.

Rules: nothing checks bounds, so every index is compared with the end of its container before it is
used. A function that can fail returns -1 as the next position. Positions are int64.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

import storage.kernels  # sets Numba's cache directory, and has to come before numba  # noqa: F401

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]

F = TypeVar("F", bound=Callable[..., Any])

# np.int64 for Numba, int for mypy. Numba makes floats of mixed signed and unsigned words, so bytes
# are converted at once.
int64 = cast(Callable[[Any], int], np.int64)


def kernel(function: F) -> F:
    """Compile the function at its first call, without the GIL, or load it from the cache."""
    import numba

    return cast(F, numba.njit(cache=True, nogil=True)(function))


@kernel
def read_varint(buf: Bytes, position: int, end: int) -> tuple[int, int]:
    """Read a zigzag varint of 32 bits (record format v2) from `buf[position:end]`.

    -> (value, next position). The position is -1 if the number exceeds `end`, 5 bytes or 32 bits.
    """
    if position >= end:
        return 0, -1
    byte = int64(buf[position])
    if byte < 128:
        return (byte >> 1) ^ -(byte & 1), position + 1
    raw = byte & 127
    for i in range(1, 5):
        if position + i >= end:
            return 0, -1
        byte = int64(buf[position + i])
        raw |= (byte & 127) << (7 * i)
        if byte < 128:
            if raw >> 32 != 0:
                return 0, -1
            return (raw >> 1) ^ -(raw & 1), position + i + 1
    return 0, -1


@kernel
def read_varlong(buf: Bytes, position: int, end: int) -> tuple[int, int]:
    """Read a zigzag varint of 64 bits from `buf[position:end]` -> (value, next position).

    The position is -1 if the number exceeds `end`, 10 bytes or 64 bits.
    """
    raw = 0
    for i in range(10):
        if position + i >= end:
            return 0, -1
        byte = int64(buf[position + i])
        if i == 9 and byte > 1:  # only bit 63 is left
            return 0, -1
        raw |= (byte & 127) << (7 * i)
        if byte < 128:
            return ((raw >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(raw & 1), position + i + 1
    return 0, -1
