"""Fingerprints of keys in Arrow columns: 64 bits of the keyed hash that the cleaner's map uses."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cleaner.engine.kernels.codecs.hashing import siphash128
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.compile import Bytes, Ints, kernel

Words = npt.NDArray[np.uint64]


@kernel
def _hash_all(data: Bytes, ends: Ints, words: Words, key_low: int, key_high: int) -> None:
    k0 = np.uint64(key_low)
    k1 = np.uint64(key_high)
    for row in range(words.shape[0]):
        begin = ends[row]
        words[row], _ = siphash128(data, begin, ends[row + 1] - begin, k0, k1)


def fingerprints(keys: pa.Array, hash_key: bytes) -> Words:
    """Return a 64-bit word for each of `keys`; no key may be null. `hash_key` has 16 bytes."""
    words: Words = np.empty(len(keys), dtype=np.uint64)
    ends = np.frombuffer(keys.buffers()[1], dtype=np.int32)[keys.offset :][: len(keys) + 1]
    places: Ints = ends.astype(np.int64)
    data: Bytes = np.zeros(int(ends[-1]) + SLACK_BYTES, dtype=np.uint8)
    if ends[-1]:
        data[: ends[-1]] = np.frombuffer(keys.buffers()[2], dtype=np.uint8)[: ends[-1]]
    key_low, key_high = (
        int.from_bytes(hash_key[at : at + 8], "little", signed=True) for at in (0, 8)
    )
    _hash_all(data, places, words, key_low, key_high)
    return words
