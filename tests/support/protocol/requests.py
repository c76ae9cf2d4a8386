"""Requests in tests: the versions to send, and what a frame contains."""

from protocol.api import ApiRange, advertised
from protocol.codec import RequestHeader, decode_body, read_header
from protocol.errors import ProtocolError
from protocol.messages import Message


def advertised_range(api_key: int) -> ApiRange:
    """Return what ApiVersions answers for an API."""
    (api_range,) = advertised((api_key,))
    return api_range


def decode_request(
    api_key: int, version: int, frame: bytes | bytearray | memoryview
) -> tuple[RequestHeader, Message]:
    """Decode a frame as the broker does, if it has the given API and version."""
    header = read_header(frame)
    if (header.api_key, header.api_version) != (api_key, version):
        raise ProtocolError("not the expected request", header.api_key, header.api_version)
    return header, decode_body(header, frame)
