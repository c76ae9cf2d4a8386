"""Small pieces of a clean: records, batches, damage, what is left behind."""

from storage.format.batch import Record, build_batch
from storage.format.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD
from tests.support.cleaner.cleaning import DIRECTORY, NOW_MS, Segment, records_of, segment
from tests.support.storage.memory_env import MemoryEnv

CODECS = [NONE, GZIP, SNAPPY, LZ4, ZSTD]


def record(offset: int, key: str | None, value: str | None = "v") -> Record:
    return Record(
        offset,
        NOW_MS - 1000 + offset,
        None if key is None else key.encode(),
        None if value is None else value.encode(),
    )


def batch(*records: Record, **fields: int) -> bytes:
    return bytes(build_batch(records, **fields))  # type: ignore[arg-type]


def offsets(log: bytes) -> list[int]:
    return [record.offset for record in records_of(log)]


def damaged(data: bytes, place: int = -1) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 0x10
    return bytes(changed)


def leftovers(env: MemoryEnv) -> list[str]:
    return [name for name in env.listdir(DIRECTORY) if name.endswith(".cleaned")]


def three_segments(middle: bytes) -> list[Segment]:
    return [
        segment(0, [batch(record(0, "a"), record(1, "b"))], 2),
        segment(2, [batch(record(2, "a")), middle], 4),
        segment(4, [batch(record(4, "a"), record(5, "a")), batch(record(6, "b", None))], 7),
    ]
