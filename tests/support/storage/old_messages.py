"""Messages of formats 0 and 1, as clients of Kafka before version 0.11 made them."""

import struct
import zlib
from collections.abc import Sequence

import lz4.frame
from kafka.record.legacy_records import LegacyRecordBatchBuilder

from storage.format.batch import LOG_APPEND_TIME, Record
from storage.format.compression import LZ4, NONE

ATTRIBUTES_POSITION = 17


def old_messages(
    records: Sequence[Record], magic: int, codec: int = NONE, append_time: int | None = None
) -> bytes:
    """One message for each record, or a compressed one that contains them.

    `append_time`: the log append time that a broker wrote.
    """
    if codec == LZ4 and magic == 0:
        inner = old_messages(records, magic)
        data = bytearray(_built([Record(0, -1, None, _old_lz4(inner))], magic))
        data[ATTRIBUTES_POSITION] = LZ4
    else:
        base_offset = records[0].offset if codec and magic == 1 else 0
        relative = [record._replace(offset=record.offset - base_offset) for record in records]
        data = bytearray(_built(relative, magic, codec))
    if codec:
        struct.pack_into(">q", data, 0, records[-1].offset)
    if append_time is not None:
        assert magic == 1
        for at in _positions(data):
            data[at + ATTRIBUTES_POSITION] |= LOG_APPEND_TIME
            struct.pack_into(">q", data, at + ATTRIBUTES_POSITION + 1, append_time)
    for at in _positions(data):
        end = at + 12 + struct.unpack_from(">i", data, at + 8)[0]
        struct.pack_into(">I", data, at + 12, zlib.crc32(data[at + 16 : end]))
    return bytes(data)


def _positions(data: bytearray) -> list[int]:
    at, positions = 0, []
    while at < len(data):
        positions.append(at)
        at += 12 + struct.unpack_from(">i", data, at + 8)[0]
    return positions


def _built(records: Sequence[Record], magic: int, codec: int = NONE) -> bytes:
    builder = LegacyRecordBatchBuilder(magic, codec, 1 << 30)
    for record in records:
        builder.append(record.offset, record.timestamp, record.key, record.value)
    return bytes(builder.build())


def _old_lz4(data: bytes) -> bytes:
    """A frame whose header checksum is wrong, as KAFKA-3160 made it."""
    frame = bytearray(lz4.frame.compress(data, store_size=False))
    frame[6] ^= 0x5A
    return bytes(frame)
