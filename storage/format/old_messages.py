"""Messages of formats 0 and 1, which Kafka wrote before version 0.11: reading them as records.

Kafka 4 still serves such messages, and its cleaner copies them; a compacted topic may have them for
ever. Varve serves batches of format v2 only, and converts these messages when it takes a folder
over (storage/recovery/old_segments.py).

A message is an offset, a size, a CRC-32, the format (magic), attributes, in format 1 a timestamp,
a key and a value. If the attributes name a codec, the value is a compressed sequence of messages.
The offset of the message around them is that of the last one; in format 1 the offsets inside are
relative, in format 0 they are absolute (Kafka's AbstractLegacyRecordBatch). In format 0, the header
checksum of an LZ4 frame also covers the magic number of the frame, against its specification
(KAFKA-3160).
"""

import zlib
from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

from storage.errors import CorruptBatchError
from storage.format.batch import (
    CODEC_MASK,
    LENGTH_END,
    LOG_APPEND_TIME,
    MAGIC_POSITION,
    NO_TIMESTAMP,
    Buffer,
    Record,
)
from storage.format.compression import LZ4, NONE, ZSTD, decompress

OLD_HEAD_BYTES: Final = MAGIC_POSITION + 1  # to see that a message is of an old format
OLD_BYTES_MIN: Final = 14  # of a message of format 0 after its size field

_HEAD: Final = Struct(">qiIbb")  # offset, size, CRC-32, magic, attributes
_INT32: Final = Struct(">i")
_INT64: Final = Struct(">q")
_LZ4_FLAGS_POSITION: Final = 4
_LZ4_HAS_SIZE: Final = 0x08


class OldMessages(NamedTuple):
    """The records of one message, or of those that it contains, with absolute offsets."""

    records: tuple[Record, ...]
    codec: int
    is_log_append_time: bool


def is_old(buffer: Buffer, at: int = 0) -> bool:
    """Return whether these bytes are the first ones of a message of format 0 or 1."""
    if len(buffer) - at < OLD_HEAD_BYTES or buffer[at + MAGIC_POSITION] not in (0, 1):
        return False
    return old_size(buffer, at) >= LENGTH_END + OLD_BYTES_MIN


def old_size(buffer: Buffer, at: int = 0) -> int:
    """Return the size in bytes that a message gives itself."""
    size_bytes: int = _INT32.unpack_from(buffer, at + 8)[0]
    return LENGTH_END + size_bytes


def read_old_messages(message: Buffer, limit_bytes: int) -> OldMessages:
    """Return the records of a whole message; `limit_bytes` bounds what it decompresses to.

    Raises CorruptBatchError, also for a wrong CRC, and DecompressionLimitError.
    """
    data = memoryview(message)
    outer, attributes = _read(data)
    codec, magic = attributes & CODEC_MASK, data[MAGIC_POSITION]
    is_log_append_time = magic == 1 and bool(attributes & LOG_APPEND_TIME)
    if codec == NONE:
        return OldMessages((outer,), codec, is_log_append_time)
    if codec >= ZSTD or outer.value is None:
        raise CorruptBatchError(f"codec {codec} in a message of format {magic}")
    value = _corrected_lz4(outer.value) if codec == LZ4 and magic == 0 else outer.value
    records = list(_inner(memoryview(decompress(codec, value, limit_bytes)), magic))
    if not records:
        raise CorruptBatchError("a compressed message without messages in it")
    base_offset = outer.offset - records[-1].offset if magic == 1 else 0
    if base_offset + records[-1].offset != outer.offset:
        raise CorruptBatchError("the last message inside has another offset")
    return OldMessages(
        tuple(
            record._replace(
                offset=base_offset + record.offset,
                timestamp=outer.timestamp if is_log_append_time else record.timestamp,
            )
            for record in records
        ),
        codec,
        is_log_append_time,
    )


def _inner(data: memoryview, magic: int) -> Iterator[Record]:
    position = 0
    while position < len(data):
        part = data[position:]
        if not is_old(part) or part[MAGIC_POSITION] != magic or old_size(part) > len(part):
            raise CorruptBatchError("a message inside of a compressed one is malformed")
        record, attributes = _read(part[: old_size(part)])
        if attributes & CODEC_MASK:
            raise CorruptBatchError("a compressed message inside of another")
        yield record
        position += old_size(part)


def _read(data: memoryview) -> tuple[Record, int]:
    """Return a message as it is, and its attributes."""
    offset, _, crc, magic, attributes = _HEAD.unpack_from(data)
    if zlib.crc32(data[MAGIC_POSITION:]) != crc:
        raise CorruptBatchError("CRC does not match")
    position, timestamp = _HEAD.size, NO_TIMESTAMP
    if magic == 1 and len(data) >= position + _INT64.size:
        timestamp = _INT64.unpack_from(data, position)[0]
        position += _INT64.size
    key, position = _read_bytes(data, position)
    value, position = _read_bytes(data, position)
    if position != len(data) or offset < 0:
        raise CorruptBatchError(f"a message of format {magic} is malformed")
    return Record(offset, timestamp, key, value), attributes


def _read_bytes(data: memoryview, position: int) -> tuple[bytes | None, int]:
    begin = position + _INT32.size
    length = _INT32.unpack_from(data, position)[0] if begin <= len(data) else -2
    if length < -1 or begin + length > len(data):
        raise CorruptBatchError("a length in a message of an old format is wrong")
    if length == -1:
        return None, begin
    return bytes(data[begin : begin + length]), begin + length


def _corrected_lz4(frame: bytes) -> bytes:
    """Return an LZ4 frame with the right checksum of its header."""
    if len(frame) <= _LZ4_FLAGS_POSITION:
        return frame
    end = _LZ4_FLAGS_POSITION + (10 if frame[_LZ4_FLAGS_POSITION] & _LZ4_HAS_SIZE else 2)
    checksum = _xxh32_of_few(frame[_LZ4_FLAGS_POSITION:end]) >> 8 & 0xFF
    return frame[:end] + bytes([checksum]) + frame[end + 1 :]


def _xxh32_of_few(data: bytes) -> int:
    """Return XXH32 with seed 0 of less than 16 bytes (the xxHash specification)."""
    assert len(data) < 16
    mask = 0xFFFFFFFF
    result = 374761393 + len(data)
    words = len(data) // 4 * 4
    for at in range(0, words, 4):
        result = result + int.from_bytes(data[at : at + 4], "little") * 3266489917 & mask
        result = (result << 17 | result >> 15) * 668265263 & mask
    for byte in data[words:]:
        result = result + byte * 374761393 & mask
        result = (result << 11 | result >> 21) * 2654435761 & mask
    result = (result ^ result >> 15) * 2246822519 & mask
    result = (result ^ result >> 13) * 3266489917 & mask
    return result ^ result >> 16
