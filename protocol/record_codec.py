"""Keys and values of the records in Kafka's internal topics: a version (int16), then the body.

The version of a key names the kind of record. Input is not trusted: bytes that do not match
the table raise ProtocolError.
"""

import struct
from collections.abc import Generator
from functools import cache
from typing import TypeVar

from protocol.errors import ProtocolError
from protocol.messages import Message
from protocol.schema import RecordSchema
from protocol.table_compiler import (
    SHORT_READ_ERRORS,
    Decoder,
    Encoder,
    SlicedEncoder,
    compile_decoder,
    compile_encoder,
    compile_sliced_encoder,
)
from protocol.tables.internal_records import INTERNAL_RECORDS

_VERSION = struct.Struct(">h")
_RECORDS = {record.name: record for record in INTERNAL_RECORDS}

M = TypeVar("M", bound=Message)


def read_version(data: bytes) -> int:
    """Return the version in front of a key or value. Raises ProtocolError."""
    if len(data) < _VERSION.size:
        raise ProtocolError(f"a record of {len(data)} bytes has no version")
    version: int = _VERSION.unpack_from(data)[0]
    return version


def encode(message: Message, version: int) -> bytes:
    """Return the bytes of a key or value in this version.

    Values that their type cannot hold raise struct.error, TypeError or AttributeError.
    """
    parts = [_VERSION.pack(version)]
    _encoder(type(message).__name__, version)(parts.append, message)
    return b"".join(parts)


def encode_sliced(message: Message, version: int) -> Generator[None, None, bytes]:
    """Like `encode`, with pauses."""
    parts = [_VERSION.pack(version)]
    yield from _sliced_encoder(type(message).__name__, version)(parts.append, message)
    return b"".join(parts)


def decode(kind: type[M], data: bytes) -> M | None:
    """Return the key or value, None if its version has no table. Raises ProtocolError."""
    version = read_version(data)
    if version not in _RECORDS[kind.__name__].versions:
        return None
    try:
        message = _decoder(kind.__name__, version)(data, _VERSION.size)
    except SHORT_READ_ERRORS as error:
        raise ProtocolError(f"{kind.__name__} version {version}: {error}") from error
    assert isinstance(message, kind)
    return message


@cache
def _decoder(name: str, version: int) -> Decoder:
    record: RecordSchema = _RECORDS[name]
    return compile_decoder(record.body, version, version in record.flexible)


@cache
def _sliced_encoder(name: str, version: int) -> SlicedEncoder:
    record: RecordSchema = _RECORDS[name]
    assert version in record.versions
    return compile_sliced_encoder(record.body, version, version in record.flexible)


@cache
def _encoder(name: str, version: int) -> Encoder:
    record: RecordSchema = _RECORDS[name]
    assert version in record.versions
    return compile_encoder(record.body, version, version in record.flexible)
