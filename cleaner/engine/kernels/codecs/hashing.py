"""SipHash-2-4 with a 128-bit result: the fingerprint of a key.

Source: J.-P. Aumasson, D. J. Bernstein, "SipHash: a fast short-input PRF" (2012), and the
128-bit variant of its reference code. Choice of this hash: docs/decisions/0005-key-hash.md.
"""

from typing import TypeAlias

import numpy as np

from cleaner.engine.kernels.codecs.memory import load_u64
from cleaner.engine.kernels.compile import Bytes, inlined

_V0 = np.uint64(0x736F6D6570736575)
_V1 = np.uint64(0x646F72616E646F6D)
_V2 = np.uint64(0x6C7967656E657261)
_V3 = np.uint64(0x7465646279746573)
_LONG = np.uint64(0xEE)
_SECOND = np.uint64(0xDD)
_ONE = np.uint64(1)

_State: TypeAlias = tuple[np.uint64, np.uint64, np.uint64, np.uint64]


@inlined
def _rotate(word: np.uint64, count: int) -> np.uint64:
    return (word << np.uint64(count)) | (word >> np.uint64(64 - count))


@inlined
def _round(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64) -> _State:
    v0 += v1
    v2 += v3
    v1 = _rotate(v1, 13) ^ v0
    v3 = _rotate(v3, 16) ^ v2
    v0 = _rotate(v0, 32)
    v2 += v1
    v0 += v3
    v1 = _rotate(v1, 17) ^ v2
    v3 = _rotate(v3, 21) ^ v0
    v2 = _rotate(v2, 32)
    return v0, v1, v2, v3


@inlined
def _four_rounds(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64) -> _State:
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return _round(v0, v1, v2, v3)


@inlined
def siphash128(
    buf: Bytes, at: int, count: int, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Return the 128-bit hash of `buf[at:at + count]` under the key (k0, k1) as two uint64.

    Reads up to 8 bytes after the data, which must be part of the buffer.
    """
    v0 = k0 ^ _V0
    v1 = k1 ^ _V1 ^ _LONG
    v2 = k0 ^ _V2
    v3 = k1 ^ _V3
    end = at + (count & ~7)
    while at < end:
        word = load_u64(buf, at)
        v3 ^= word
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0 ^= word
        at += 8
    tail = np.uint64(count & 7) << np.uint64(3)
    word = load_u64(buf, at) & ((_ONE << tail) - _ONE)
    word |= np.uint64(count & 255) << np.uint64(56)
    v3 ^= word
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0 ^= word
    v2 ^= _LONG
    v0, v1, v2, v3 = _four_rounds(v0, v1, v2, v3)
    first = v0 ^ v1 ^ v2 ^ v3
    v1 ^= _SECOND
    v0, v1, v2, v3 = _four_rounds(v0, v1, v2, v3)
    return first, v0 ^ v1 ^ v2 ^ v3
