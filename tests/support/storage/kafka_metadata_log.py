"""Records of Kafka's metadata log, as a controller writes them."""

from storage.directory.kafka_metadata import (
    CONFIG_RECORD,
    PARTITION_RECORD,
    REMOVE_TOPIC_RECORD,
    TOPIC_RECORD,
)
from storage.format.batch import CONTROL, ControlType, Record, build_batch

ID = bytes(range(16))


def uvarint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def text(value: str | None) -> bytes:
    if value is None:
        return b"\0"
    data = value.encode()
    return uvarint(len(data) + 1) + data


def frame(kind: int, body: bytes = b"", version: int = 0) -> bytes:
    return uvarint(1) + uvarint(kind) + uvarint(version) + body + b"\0"  # no tagged fields


def topic(name: str, topic_id: bytes = ID) -> bytes:
    return frame(TOPIC_RECORD, text(name) + topic_id)


def partition(index: int, topic_id: bytes) -> bytes:
    return frame(PARTITION_RECORD, index.to_bytes(4, "big") + topic_id + bytes(20), version=1)


def removal(topic_id: bytes = ID) -> bytes:
    return frame(REMOVE_TOPIC_RECORD, topic_id)


def config(name: str, key: str, value: str | None, kind: int = 2) -> bytes:
    return frame(CONFIG_RECORD, bytes((kind,)) + text(name) + text(key) + text(value))


def batches(base_offset: int, *values: bytes) -> bytes:
    """Three records to a batch, as a controller that is asked now and then writes them."""
    result = bytearray()
    for first in range(0, len(values), 3):
        records = [
            Record(base_offset + first + index, 1000, None, value, ())
            for index, value in enumerate(values[first : first + 3])
        ]
        result += build_batch(records)
    return bytes(result)


def snapshot(*values: bytes) -> bytes:
    """A snapshot with its footer."""
    footer = Record(len(values), 1000, b"\0\0\0%c" % ControlType.SNAPSHOT_FOOTER, b"\0\0\0", ())
    return batches(0, *values) + bytes(build_batch([footer], attributes=CONTROL))
