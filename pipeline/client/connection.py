"""A connection to one broker, and the errors of the client.

Rules: one request at a time; a response counts only if all of it arrives in time; a response larger
than FRAME_BYTES_MAX is refused before memory is allocated; connections are plaintext, because the
broker supports nothing else.
"""

import itertools
import socket
import struct
import time
from collections.abc import Iterable
from typing import Final, TypeVar

from config.address import Address
from protocol.api import ApiKey
from protocol.codec import decode_response, encode_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import ApiVersionsRequest, ApiVersionsResponse, Message
from storage.model import TopicPartition

FRAME_BYTES_MAX: Final = 256 << 20  # a first batch above the fetch limit is sent whole
CONNECT_SECONDS: Final = 10.0

# The oldest and newest version in use of each API. Fetch up to 12 has topic names, not ids.
_VERSIONS: Final = {
    ApiKey.FETCH: (4, 12),
    ApiKey.LIST_OFFSETS: (2, 9),
    ApiKey.METADATA: (4, 12),
}

M = TypeVar("M", bound=Message)


class WireError(Exception):
    """Base class of errors between the client and the brokers."""


class UnreachableBrokerError(WireError):
    """No broker answered in time; the message lists the attempts."""


class BrokerRefusedError(WireError):
    """A broker answered with an error; `code` is the Kafka error code."""

    def __init__(self, subject: str, code: int) -> None:
        self.code = _code(code)
        name = self.code.name if isinstance(self.code, ErrorCode) else f"error {code}"
        super().__init__(f"{subject}: {name}")


class UnknownTopicError(WireError):
    """Topics or partitions that do not exist."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(sorted(names))
        super().__init__(f"does not exist: {', '.join(self.names)}")


class OffsetsGoneError(WireError):
    """An offset before the log start offset or after the log end offset."""

    def __init__(self, partition: TopicPartition, offset: int, first: int, end: int) -> None:
        super().__init__(f"{partition}: offset {offset} is not in the log [{first}, {end})")
        self.partition = partition
        self.offset = offset
        self.log_start_offset = first
        self.end_offset = end


class RetriableError(Exception):
    """A transient error; `cause` is raised if it persists."""

    def __init__(self, cause: WireError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Connection:
    """A socket to one broker, and the API versions that the broker supports."""

    def __init__(
        self, address: Address, client_id: str, connect_seconds: float = CONNECT_SECONDS
    ) -> None:
        self.address = address
        self._client_id = client_id
        self._correlation_ids = itertools.count(1)
        self._socket = socket.create_connection((address.host, address.port), connect_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ranges: dict[int, tuple[int, int]] = {}
        self._waiting: tuple[int, int, int] | None = None

    def handshake(self, timeout_seconds: float) -> None:
        """Fetch the API versions that the broker supports."""
        self.send(ApiKey.API_VERSIONS, 0, ApiVersionsRequest())
        answer = self.receive(ApiVersionsResponse, timeout_seconds)
        if answer.error_code:
            raise BrokerRefusedError(f"ApiVersions at {self.address}", answer.error_code)
        self._ranges = {r.api_key: (r.min_version, r.max_version) for r in answer.api_keys}

    def negotiated_version(self, key: ApiKey) -> int:
        """Return the newest version of `key` that both sides support. Raises WireError."""
        local = _VERSIONS[key]
        remote = self._ranges.get(key, (0, -1))
        version = min(local[1], remote[1])
        if version < max(local[0], remote[0]):
            raise WireError(
                f"{self.address} supports {key.name} versions {remote}, this client {local}"
            )
        return version

    @property
    def is_waiting(self) -> bool:
        """Return whether a response is outstanding."""
        return self._waiting is not None

    def send(self, key: ApiKey, version: int, body: Message) -> None:
        """Send a request; `receive` returns its response."""
        assert self._waiting is None
        correlation_id = next(self._correlation_ids)
        self._socket.sendall(encode_request(key, version, correlation_id, self._client_id, body))
        self._waiting = (key, version, correlation_id)

    def receive(self, kind: type[M], timeout_seconds: float) -> M:
        """Return the response to the last request. Raises OSError, WireError, ProtocolError."""
        assert self._waiting is not None
        key, version, correlation_id = self._waiting
        deadline = time.monotonic() + timeout_seconds
        (size,) = struct.unpack(">i", self._read_exactly(4, deadline))
        if not 0 < size <= FRAME_BYTES_MAX:
            raise WireError(f"{self.address} announces a response of {size} bytes")
        answered, body = decode_response(key, version, self._read_exactly(size, deadline))
        if answered != correlation_id:
            raise ProtocolError("response to another request", key, version)
        assert isinstance(body, kind)
        self._waiting = None
        return body

    def _read_exactly(self, count: int, deadline: float) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            actual = self._socket.recv_into(view)
            if actual == 0:
                raise ConnectionError("the broker closed the connection")
            view = view[actual:]
        return data

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _code(code: int) -> ErrorCode | int:
    try:
        return ErrorCode(code)
    except ValueError:
        return code


def check(subject: str, code: int) -> None:
    """Raise the error of an error code; do nothing for NONE."""
    if code == ErrorCode.NONE:
        return
    error = BrokerRefusedError(subject, code)
    if isinstance(error.code, ErrorCode) and error.code.retriable:
        raise RetriableError(error)
    raise error


def brief(error: Exception) -> str:
    """Return the message of an error, or its type name if the message is empty."""
    return str(error) or type(error).__name__
