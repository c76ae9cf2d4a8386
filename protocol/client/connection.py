"""A blocking connection to one broker, with TLS and SASL if the cluster needs them.

Rules: one request at a time; a response counts only if all of it arrives in time; a response larger
than FRAME_BYTES_MAX is refused before memory is allocated. An untrusted certificate and refused
credentials are errors that no second attempt repairs (SecurityRefusedError). A connection whose
SASL session ends soon authenticates again before the next request (KIP-368).
"""

import itertools
import socket
import ssl
import struct
import time
from contextlib import suppress
from typing import Final, NoReturn, TypeVar

from config.address import Address
from config.security.clients import (
    PLAINTEXT,
    ClientSasl,
    ClientSecurity,
    ClientSecurityError,
    ClientTls,
    untrusted_text,
)
from protocol.api import ApiKey
from protocol.client.sasl import ANSWER_BYTES_MAX, SaslError, begin_exchange
from protocol.codec import decode_response, encode_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    Message,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

FRAME_BYTES_MAX: Final = 256 << 20  # a first batch above the fetch limit is sent whole
CONNECT_SECONDS: Final = 10.0
_HTTP: Final = int.from_bytes(b"HTTP")  # the "size" of the response of an HTTP server
# Kafka's clients use a random part of 0.85 to 0.95; the broker closes the connection at 1.
SESSION_SHARE: Final = 0.85

# The connection ended: another attempt may succeed.
_LOST: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)

_TLS_HINTS: Final = {
    "WRONG_VERSION_NUMBER": "; is it a port with TLS?",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "; the client needs a certificate (ssl.keystore.location)",
}

M = TypeVar("M", bound=Message)


class WireError(Exception):
    """Base class of errors between the client and the brokers."""


class NotKafkaError(WireError):
    """The server at the address speaks another protocol."""


class BrokerRefusedError(WireError):
    """A broker answered with an error; `code` is the Kafka error code."""

    def __init__(self, subject: str, code: int) -> None:
        self.code = _code(code)
        name = self.code.name if isinstance(self.code, ErrorCode) else f"error {code}"
        super().__init__(f"{subject}: {name}")


class SecurityRefusedError(WireError):
    """The broker's certificate is not trusted, or the broker refuses the client's credentials."""


def _code(code: int) -> ErrorCode | int:
    try:
        return ErrorCode(code)
    except ValueError:
        return code


class BlockingConnection:
    """A socket to one broker, and the API versions that the broker supports."""

    def __init__(
        self,
        address: Address,
        client_id: str,
        security: ClientSecurity = PLAINTEXT,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        """Connect, with TLS if `security` says so. Raises OSError, SecurityRefusedError."""
        self.address = address
        self._client_id = client_id
        self._sasl = security.kafka_sasl
        self._session_ends: float | None = None  # time.monotonic() of the next authentication
        self._correlation_ids = itertools.count(1)
        self._ranges: dict[int, tuple[int, int]] = {}
        self._waiting: tuple[int, int, int] | None = None
        self._socket = socket.create_connection((address.host, address.port), connect_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if security.kafka_tls is not None:
            self._begin_tls(security.kafka_tls)

    def handshake(self, timeout_seconds: float) -> None:
        """Fetch the API versions that the broker supports, and authenticate."""
        self.send(ApiKey.API_VERSIONS, 0, ApiVersionsRequest())
        answer = self.receive(ApiVersionsResponse, timeout_seconds)
        if answer.error_code:
            raise BrokerRefusedError(f"ApiVersions at {self.address}", answer.error_code)
        self._ranges = {r.api_key: (r.min_version, r.max_version) for r in answer.api_keys}
        if self._sasl is not None:
            self._authenticate(self._sasl, timeout_seconds)

    def negotiated_version(self, key: ApiKey, first: int, last: int) -> int:
        """Return the newest version from `first` to `last` that the broker supports.

        Raises WireError.
        """
        remote = self._ranges.get(key, (0, -1))
        version = min(last, remote[1])
        if version < max(first, remote[0]):
            raise WireError(
                f"{self.address} supports {key.name} versions {remote}, this client {first, last}"
            )
        return version

    @property
    def is_waiting(self) -> bool:
        """Return whether a response is outstanding."""
        return self._waiting is not None

    def send(self, key: ApiKey, version: int, body: Message) -> None:
        """Send a request; `receive` returns its response."""
        assert self._waiting is None
        if self._session_ends is not None and time.monotonic() >= self._session_ends:
            assert self._sasl is not None
            self._session_ends = None
            self._authenticate(self._sasl, CONNECT_SECONDS)
        correlation_id = next(self._correlation_ids)
        self._socket.sendall(encode_request(key, version, correlation_id, self._client_id, body))
        self._waiting = (key, version, correlation_id)

    def receive(self, kind: type[M], timeout_seconds: float) -> M:
        """Return the response to the last request. Raises OSError, WireError, ProtocolError."""
        assert self._waiting is not None
        key, version, correlation_id = self._waiting
        deadline = time.monotonic() + timeout_seconds
        (size,) = struct.unpack(">i", self._read_exactly(4, deadline))
        if size == _HTTP:
            raise NotKafkaError(f"{self.address} answers with HTTP, not with the Kafka protocol")
        if not 0 < size <= FRAME_BYTES_MAX:
            raise WireError(f"{self.address} announces a response of {size} bytes")
        answered, body = decode_response(key, version, self._read_exactly(size, deadline))
        if answered != correlation_id:
            raise ProtocolError("response to another request", key, version)
        assert isinstance(body, kind)
        self._waiting = None
        return body

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _begin_tls(self, tls: ClientTls) -> None:
        try:
            context = tls.context()
            self._socket = context.wrap_socket(self._socket, server_hostname=self.address.host)
        except ClientSecurityError as error:
            self._socket.close()
            raise SecurityRefusedError(str(error)) from None
        except ssl.SSLError as error:
            self._socket.close()
            self._raise_tls_error(error)

    def _raise_tls_error(self, error: ssl.SSLError) -> NoReturn:
        if isinstance(error, ssl.SSLCertVerificationError):
            raise SecurityRefusedError(untrusted_text(self.address, error)) from None
        if isinstance(error, _LOST):
            raise error
        hint = _TLS_HINTS.get(error.reason, "")
        raise SecurityRefusedError(f"TLS to {self.address} failed: {error.reason}{hint}") from None

    def _authenticate(self, sasl: ClientSasl, timeout_seconds: float) -> None:
        """Raises SecurityRefusedError, OSError, WireError, ProtocolError."""
        self.send(ApiKey.SASL_HANDSHAKE, 1, SaslHandshakeRequest(mechanism=sasl.mechanism))
        answer = self.receive(SaslHandshakeResponse, timeout_seconds)
        if answer.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM:
            offered = ", ".join(answer.mechanisms)
            raise SecurityRefusedError(
                f"{self.address} does not support {sasl.mechanism}, but {offered}"
            )
        if answer.error_code:
            subject = BrokerRefusedError(f"SASL at {self.address}", answer.error_code)
            raise SecurityRefusedError(str(subject))
        try:
            exchange = begin_exchange(sasl)
            data = next(exchange)
            while True:
                data = exchange.send(self._exchange(data, timeout_seconds))
        except StopIteration:
            return
        except (SaslError, ClientSecurityError) as error:
            if isinstance(error, SaslError) and error.last_message:
                with suppress(SecurityRefusedError, WireError, ProtocolError, OSError):
                    self._exchange(error.last_message, timeout_seconds)
            raise SecurityRefusedError(f"authentication at {self.address}: {error}") from None

    def _exchange(self, data: bytes, timeout_seconds: float) -> bytes:
        """Send the bytes of a mechanism and return the broker's."""
        version = self.negotiated_version(ApiKey.SASL_AUTHENTICATE, 0, 2)
        self.send(ApiKey.SASL_AUTHENTICATE, version, SaslAuthenticateRequest(auth_bytes=data))
        answer = self.receive(SaslAuthenticateResponse, timeout_seconds)
        if answer.error_code:
            reason = answer.error_message or str(_code(answer.error_code))
            raise SecurityRefusedError(f"authentication at {self.address}: {reason[:300]}")
        if len(answer.auth_bytes) > ANSWER_BYTES_MAX:
            raise WireError(f"{self.address} answers {len(answer.auth_bytes)} bytes of SASL")
        if answer.session_lifetime_ms > 0:
            lifetime_seconds = answer.session_lifetime_ms / 1000 * SESSION_SHARE
            self._session_ends = time.monotonic() + lifetime_seconds
        return bytes(answer.auth_bytes)

    def _read_exactly(self, count: int, deadline: float) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                actual = self._socket.recv_into(view)
            except ssl.SSLError as error:  # TLS 1.3 refuses the client's certificate here
                self._raise_tls_error(error)
            if actual == 0:
                raise ConnectionError("the broker closed the connection")
            view = view[actual:]
        return data
