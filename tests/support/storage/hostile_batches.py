"""Batches that lie: in a field of the header, in a length, in what they unpack to."""

import gzip
import struct
import time
from collections.abc import Callable

import cramjam
import lz4.frame
import zstandard
from crc32c import crc32c

from storage.format.batch import Record, build_batch
from storage.format.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD

MIB = 1 << 20
CODECS = {"none": NONE, "gzip": GZIP, "snappy": SNAPPY, "lz4": LZ4, "zstd": ZSTD}
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes,
    "gzip": gzip.compress,
    "snappy": lambda data: bytes(cramjam.snappy.compress_raw(data)),
    "lz4": lz4.frame.compress,
    "zstd": lambda data: zstandard.ZstdCompressor(19).compress(data),
}


def batch(*, key: bytes | None = b"k", codec: int = NONE, count: int = 3) -> bytearray:
    """A good one, as a producer sends it."""
    now_ms = int(time.time() * 1000)
    records = [Record(number, now_ms, key, b"v-%d" % number, ()) for number in range(count)]
    return build_batch(records, base_offset=0, codec=codec)


def sealed(data: bytearray) -> bytes:
    """With a CRC that is right for what the bytes are now."""
    struct.pack_into(">I", data, 17, crc32c(memoryview(data)[21:]))
    return bytes(data)


def patched(position: int, layout: str, value: int, *, seal: bool = True) -> bytes:
    """A good batch with one field of its header replaced (byte positions: the batch format)."""
    data = batch()
    struct.pack_into(layout, data, position, value)
    return sealed(data) if seal else bytes(data)


def with_body(
    body: bytes, *, codec: int = NONE, count: int = 1, now_ms: int | None = None
) -> bytes:
    """A batch header, right in every field, in front of any bytes."""
    data = batch(count=1)[:61] + body
    if now_ms is not None:
        struct.pack_into(">qq", data, 27, now_ms, now_ms)
    struct.pack_into(">i", data, 8, len(data) - 12)
    struct.pack_into(">h", data, 21, codec)
    struct.pack_into(">i", data, 23, count - 1)
    struct.pack_into(">i", data, 57, count)
    return sealed(data)


def record_bytes(*varints: int, tail: bytes = b"") -> bytes:
    """Zig-zag varints one after another, then bytes."""
    out = bytearray()
    for value in varints:
        rest = value << 1 ^ value >> 63
        while rest > 127:
            out.append(rest & 127 | 128)
            rest >>= 7
        out.append(rest)
    return bytes(out) + tail


def bomb(codec: str) -> bytes:
    """As much as fits a batch below max.message.bytes, in as few blocks as producers write."""
    if codec == "zstd":
        packer = zstandard.ZstdCompressor(3).compressobj()
        zeros = bytes(16 * MIB)
        return b"".join(packer.compress(zeros) for _ in range(60)) + packer.flush()
    size = {"gzip": 200 * MIB, "snappy": 20 * MIB, "lz4": 240 * MIB}[codec]
    return PACKERS[codec](bytes(size))
