"""The default partitioner of Kafka's Java client: murmur2 of the key.

Records without a key have no fixed partition.
"""

import numpy as np
import pyarrow as pa

from cleaner.engine.kernels.compile import Bytes, kernel
from pipeline.records.kernels import Ints32

_SEED = np.uint32(0x9747B28C)
_MULTIPLIER = np.uint32(0x5BD1E995)
NO_PARTITION = -1


@kernel
def _murmur2(data: Bytes, at: int, end: int) -> np.uint32:
    """Return the hash of org.apache.kafka.common.utils.Utils.murmur2."""
    h = np.uint32(_SEED ^ np.uint32(end - at))
    while end - at >= 4:
        k = np.uint32(
            np.uint32(data[at])
            | np.uint32(data[at + 1]) << np.uint32(8)
            | np.uint32(data[at + 2]) << np.uint32(16)
            | np.uint32(data[at + 3]) << np.uint32(24)
        )
        k = np.uint32(k * _MULTIPLIER)
        k = np.uint32(k ^ (k >> np.uint32(24)))
        k = np.uint32(k * _MULTIPLIER)
        h = np.uint32(np.uint32(h * _MULTIPLIER) ^ k)
        at += 4
    rest = end - at
    if rest == 3:
        h = np.uint32(h ^ (np.uint32(data[at + 2]) << np.uint32(16)))
    if rest >= 2:
        h = np.uint32(h ^ (np.uint32(data[at + 1]) << np.uint32(8)))
    if rest >= 1:
        h = np.uint32(np.uint32(h ^ np.uint32(data[at])) * _MULTIPLIER)
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * _MULTIPLIER)
    return np.uint32(h ^ (h >> np.uint32(15)))


@kernel
def _partitions(data: Bytes, ends: Ints32, count: int, partitions: Ints32) -> None:
    for row in range(partitions.shape[0]):
        h = _murmur2(data, ends[row], ends[row + 1])
        partitions[row] = (np.int64(h) & 0x7FFFFFFF) % count


def partitions_of(keys: pa.Array, count: int) -> Ints32:
    """Return the partition, of `count`, of each key of a binary array; NO_PARTITION for null."""
    if not pa.types.is_binary(keys.type):
        raise ValueError(f"keys have to be binary, not {keys.type}")
    _, ends, data = keys.buffers()
    partitions: Ints32 = np.empty(len(keys), dtype=np.int32)
    bounds = np.frombuffer(ends, dtype=np.int32)[keys.offset : keys.offset + len(keys) + 1]
    raw = np.frombuffer(data, dtype=np.uint8) if data else np.zeros(0, dtype=np.uint8)
    if len(keys):
        _partitions(raw, bounds, count, partitions)
    if keys.null_count:
        partitions[np.asarray(keys.is_null())] = NO_PARTITION
    return partitions


def partition_of(key: bytes, count: int) -> int:
    """The partition of one key among `count`."""
    return int(partitions_of(pa.array([key], pa.binary()), count)[0])
