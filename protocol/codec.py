"""Encode and decode requests and responses of every API and version that has a table.

A frame is a header and a body, without the 4-byte size in front. Encoders return frames with their
size. Invalid bytes of a peer always raise ProtocolError (a subclass for versions without a table).
Decoded bodies share no memory with the frame: control messages are small, and their fields outlive
the receive buffer. Each codec is compiled on first use (a few milliseconds). Source of the headers:
the Kafka protocol guide, and KIP-482 for the flexible ones.
"""

import struct
import sys
from collections.abc import Generator
from functools import cache
from typing import Any, Final, NamedTuple

from protocol.api import APIS, ApiKey
from protocol.errors import ErrorCode, ProtocolError, UnsupportedVersionError
from protocol.messages import CLASSES, ApiVersionsResponse, ApiVersionsResponseRange, Message
from protocol.schema import NEVER, Direction, walk
from protocol.table_compiler import (
    ELEMENTS_PER_SLICE,
    SHORT_READ_ERRORS,
    Decoder,
    Encoder,
    SharedRows,
    SlicedDecoder,
    SlicedEncoder,
    compile_decoder,
    compile_encoder,
    compile_row_encoder,
    compile_sliced_decoder,
    compile_sliced_encoder,
    skip_tags,
)

Buffer = bytes | bytearray | memoryview

_HEADER: Final = struct.Struct(">hhih")  # api key, version, correlation id, length of client id
_ADDRESSED: Final = struct.Struct(">hhi")
_SIZE: Final = struct.Struct(">i")
_CORRELATION: Final = struct.Struct(">i")

# api key -> (first version, last version, first flexible version)
_VERSIONS: Final = {
    key: (*api.versions, api.versions.last + 1 if api.flexible == NEVER else api.flexible.first)
    for key, api in APIS.items()
}


class RequestHeader(NamedTuple):
    """A request header, v1 or v2. `body_position` is the position of the body in the frame."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body_position: int


def read_header(frame: Buffer) -> RequestHeader:
    """Read the header of a request.

    Raises UnsupportedVersionError (with the correlation id) if the API and version have no table,
    ProtocolError if the bytes are not a header. The client id is a plain string even in a flexible
    header.
    """
    try:
        key, version, correlation_id, length = _HEADER.unpack_from(frame)
    except struct.error:
        return _short_header(frame)
    versions = _VERSIONS.get(key)
    if versions is None or not versions[0] <= version <= versions[1]:
        raise UnsupportedVersionError(key, version, correlation_id)
    position = 10
    client_id = None
    if length >= 0:
        position += length
        if position > len(frame):
            raise ProtocolError("client id beyond the end", key, version, 10)
        try:
            client_id = str(frame[10:position], "utf-8")
        except UnicodeDecodeError:
            raise ProtocolError("client id is not UTF-8", key, version, 10) from None
    elif length != -1:
        raise ProtocolError("client id of negative length", key, version, 8)
    if version >= versions[2]:
        position = _behind_tags(frame, position, key, version)
    # Not RequestHeader(...): this costs half the time, and every request comes here.
    return tuple.__new__(RequestHeader, (key, version, correlation_id, client_id, position))


def _behind_tags(frame: Buffer, position: int, key: int, version: int) -> int:
    try:
        count = frame[position]
        if count == 0:
            return position + 1
        return skip_tags(memoryview(frame), position + 1, count)
    except IndexError:
        raise ProtocolError("header is cut short", key, version, position) from None
    except ProtocolError as error:
        raise ProtocolError(error.reason, key, version, position) from None


def _short_header(frame: Buffer) -> RequestHeader:
    """Raise the error of a frame that is too short for a header."""
    if len(frame) >= _ADDRESSED.size:
        key, version, correlation_id = _ADDRESSED.unpack_from(frame)
        versions = _VERSIONS.get(key)
        if versions is None or not versions[0] <= version <= versions[1]:
            raise UnsupportedVersionError(key, version, correlation_id)
    raise ProtocolError("frame is too short for a request header")


def decode_body(header: RequestHeader, frame: Buffer) -> Message:
    """Decode the body of a request with this header. Raises ProtocolError."""
    decoder = _decoder(header.api_key, header.api_version, "request")
    data = bytes(frame[header.body_position :])
    return _decode(decoder, data, 0, header.api_key, header.api_version)


def decode_body_sliced(
    header: RequestHeader, frame: Buffer, max_rows: int
) -> Generator[None, None, Message]:
    """Like `decode_body`, with pauses, during which the frame must not change.

    Raises RowLimitError for more than `max_rows` rows. Fields of type `records` are views of the
    frame, all others are copies.
    """
    return _decode_sliced(header, memoryview(frame), max_rows)


def encode_response(api_key: int, version: int, correlation_id: int, body: Message) -> bytes:
    """Encode a whole response frame, size included."""
    encoder = _encoder(api_key, version, "response")
    pieces = [_response_header(api_key, version, correlation_id)]
    encoder(pieces.append, body)
    frame = b"".join(pieces)
    return _SIZE.pack(len(frame)) + frame


def encode_response_sliced(
    api_key: int, version: int, correlation_id: int, body: Message
) -> Generator[int, None, list[bytes]]:
    """Like `encode_response`, with pauses; return parts in wire order, without a long join.

    Each pause yields the number of bytes that are encoded so far.
    """
    encoder = _sliced_encoder(api_key, version)
    pieces = [_response_header(api_key, version, correlation_id)]
    parts: list[bytes] = []
    encoded_bytes = 0
    for _ in encoder(pieces.append, body):
        parts.append(b"".join(pieces))
        pieces.clear()
        encoded_bytes += len(parts[-1])
        yield encoded_bytes
    parts.append(b"".join(pieces))
    parts[0] = _SIZE.pack(sum(map(len, parts))) + parts[0]
    return parts


def encode_rows(
    api_key: int, version: int, path: tuple[str, ...], rows: SharedRows[Any]
) -> Generator[None, None, None]:
    """Encode rows of the response's array at `path` for a version, with pauses."""
    encoder = _row_encoder(api_key, version, path)
    pieces: list[bytes] = []
    for number, row in enumerate(rows, 1):
        encoder(pieces.append, row)
        if number % ELEMENTS_PER_SLICE == 0:
            yield
    rows.encoded[version] = b"".join(pieces)


# Shorter arrays are freed together with their message.
RELEASED_ROWS_MIN: Final = 64


def release_rows(message: Message) -> Generator[None, None, None]:
    """Free the rows of a message that is not used any more, one row at a time.

    An array with another reference to it, such as the state of a group, is not changed.
    """
    for name in _ARRAYS[type(message)]:
        rows = getattr(message, name)
        if type(rows) is not list or sys.getrefcount(rows) > _OWN_REFERENCES or not rows:
            continue
        have_arrays = bool(_ARRAYS.get(type(rows[0])))
        if len(rows) < RELEASED_ROWS_MIN:
            for row in rows if have_arrays else ():
                yield from release_rows(row)
                yield
            continue
        while rows:
            row = rows.pop()
            if have_arrays:
                yield from release_rows(row)
            del row
            yield


# The names of the arrays of each structure.
_ARRAYS: Final[dict[type, tuple[str, ...]]] = {
    CLASSES[part.name]: tuple(field.name for field in part.fields if field.is_array)
    for api in APIS.values()
    for root in (api.request, api.response)
    for part in walk(root)
}


def _count_references(message: ApiVersionsResponse) -> int:
    rows = message.api_keys
    return sys.getrefcount(rows)


# References of an array that only its message refers to, as `release_rows` counts them.
_OWN_REFERENCES: Final = _count_references(ApiVersionsResponse())


def _response_header(api_key: int, version: int, correlation_id: int) -> bytes:
    """Return the header: v0, or v1 for flexible versions, but always v0 for ApiVersions."""
    header = _CORRELATION.pack(correlation_id)
    if version >= _VERSIONS[api_key][2] and api_key != ApiKey.API_VERSIONS:
        return header + b"\0"
    return header


def encode_unsupported_version(correlation_id: int) -> bytes:
    """Answer an ApiVersions request of an unknown version.

    The body always has version 0 and names the versions of ApiVersions only, so that the client can
    try again with one of them (KIP-511).
    """
    first, last, _ = _VERSIONS[ApiKey.API_VERSIONS]
    own = ApiVersionsResponseRange(api_key=ApiKey.API_VERSIONS, min_version=first, max_version=last)
    body = ApiVersionsResponse(error_code=ErrorCode.UNSUPPORTED_VERSION, api_keys=[own])
    return encode_response(ApiKey.API_VERSIONS, 0, correlation_id, body)


def encode_error(api_key: int, version: int, correlation_id: int, code: int) -> bytes | None:
    """Encode a response with a top-level error; None if the response has no field for it."""
    fields = APIS[api_key].response.fields
    places = [field for field in fields if field.name == "error_code" and version in field.versions]
    if not places:
        return None
    body: Any = CLASSES[APIS[api_key].response.name]()
    body.error_code = code
    return encode_response(api_key, version, correlation_id, body)


def encode_request(
    api_key: int, version: int, correlation_id: int, client_id: str | None, body: Message
) -> bytes:
    """Encode a whole request frame, size included."""
    encoder = _encoder(api_key, version, "request")
    name = b"" if client_id is None else client_id.encode()
    length = -1 if client_id is None else len(name)
    pieces = [_HEADER.pack(api_key, version, correlation_id, length), name]
    if version >= _VERSIONS[api_key][2]:
        pieces.append(b"\0")
    encoder(pieces.append, body)
    frame = b"".join(pieces)
    return _SIZE.pack(len(frame)) + frame


def decode_response(api_key: int, version: int, buffer: Buffer) -> tuple[int, Message]:
    """Decode a response frame (without its size). -> (correlation id, body)"""
    data = bytes(buffer)
    if len(data) < _CORRELATION.size:
        raise ProtocolError("frame is too short for a response header", api_key, version)
    (correlation_id,) = _CORRELATION.unpack_from(data)
    position = _CORRELATION.size
    if version >= _VERSIONS[api_key][2] and api_key != ApiKey.API_VERSIONS:
        position = _behind_tags(data, position, api_key, version)
    decoder = _decoder(api_key, version, "response")
    return correlation_id, _decode(decoder, data, position, api_key, version)


def _decode(decoder: Decoder, data: bytes, position: int, key: int, version: int) -> Message:
    try:
        return decoder(data, position)
    except (ProtocolError, *SHORT_READ_ERRORS) as error:
        raise _named(error, key, version) from None


def _decode_sliced(
    header: RequestHeader, frame: memoryview, max_rows: int
) -> Generator[None, None, Message]:
    key, version = header.api_key, header.api_version
    try:
        return (yield from _sliced_decoder(key, version)(frame, header.body_position, max_rows))
    except (ProtocolError, *SHORT_READ_ERRORS) as error:
        raise _named(error, key, version) from None


def _named(error: Exception, key: int, version: int) -> ProtocolError:
    """Return the error with the API and version of its message."""
    if isinstance(error, ProtocolError):
        return type(error)(error.reason, key, version, error.position)
    reason = "string is not UTF-8" if isinstance(error, UnicodeDecodeError) else "cut short"
    return ProtocolError(reason, key, version)


@cache
def _decoder(api_key: int, version: int, direction: Direction) -> Decoder:
    api = APIS[api_key]
    assert version in api.versions, (api.name, version)
    return compile_decoder(api.body(direction), version, api.is_flexible(version))


@cache
def _encoder(api_key: int, version: int, direction: Direction) -> Encoder:
    api = APIS[api_key]
    assert version in api.versions, (api.name, version)
    return compile_encoder(api.body(direction), version, api.is_flexible(version))


@cache
def _row_encoder(api_key: int, version: int, path: tuple[str, ...]) -> Encoder:
    api = APIS[api_key]
    return compile_row_encoder(api.body("response"), path, version, api.is_flexible(version))


@cache
def _sliced_decoder(api_key: int, version: int) -> SlicedDecoder:
    api = APIS[api_key]
    return compile_sliced_decoder(api.body("request"), version, api.is_flexible(version))


@cache
def _sliced_encoder(api_key: int, version: int) -> SlicedEncoder:
    api = APIS[api_key]
    return compile_sliced_encoder(api.body("response"), version, api.is_flexible(version))
