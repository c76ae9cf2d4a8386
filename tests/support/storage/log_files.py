"""A log file of small batches, all of the same size, without a segment."""

from storage.env import File
from storage.format.batch import Record, build_batch
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put

PATH = "/0.log"
BASE = 100  # base offset of the segment


def batch_at(offset: int, value: bytes = b"value") -> bytearray:
    """A batch of one record with this offset."""
    batch = build_batch([Record(0, 1, b"key", value)])
    batch[:8] = offset.to_bytes(8, "big")
    return batch


SIZE = len(batch_at(0))


def log_of(*offsets: int) -> bytearray:
    return bytearray(b"".join(batch_at(offset) for offset in offsets))


def opened(data: bytes | bytearray) -> File:
    env = MemoryEnv()
    put(env, PATH, bytes(data))
    return env.open(PATH)
