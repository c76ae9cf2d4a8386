"""SaslHandshake and SaslAuthenticate: the gate that a connection of a SASL listener passes.

Rules (KIP-43, KIP-152, KIP-368), as in Kafka
- Before authentication only ApiVersions, SaslHandshake and SaslAuthenticate have an answer, and
  only a few of them. Any other request closes the connection.
- After SaslHandshake 0, tokens follow as frames of their own, without request headers.
- A failure has an answer, which waits for some time (failed_attempts.py). Then the connection is
  closed, with one log line that names the address and the user. A refused token of OAUTHBEARER is
  logged at once: the connection is closed at the next message, which the client may never send.
- If `sasl.max_reauth_ms` or the client's credentials limit the session, the client repeats the
  exchange on the same connection, with the same mechanism and as the same principal. Any other
  request after the end of the session closes the connection.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from broker.counters import AuthenticationCounts, AuthenticationStats
from broker.event_loop.client_presence import ClientLeftError
from broker.logging import RateLimitedLogger
from broker.network.connection import CloseConnectionError, Connection
from broker.network.listener import address_of
from broker.network.request_context import RequestContext
from broker.security.errors import AuthenticationError
from broker.security.failed_attempts import Attempt
from broker.security.principal import Principal
from broker.security.sasl import Authentication, Exchange
from protocol.api import ApiKey
from protocol.codec import RequestHeader, decode_body, encode_response, read_header
from protocol.errors import ErrorCode
from protocol.messages import (
    Message,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

logger = RateLimitedLogger(structlog.get_logger("broker.sasl"))

REAUTHENTICATION_SECONDS_MIN: Final = 1.0  # between two starts on one connection
LOGGED_NAME_LENGTH: Final = 200
_FAILED: Final = "authentication failed: {}"
# Before the first authentication. Clients need three to six: ApiVersions once or twice (a version
# that the broker does not know), SaslHandshake, and one to three tokens.
UNAUTHENTICATED_REQUESTS_MAX: Final = 10
OTHER_MECHANISM: Final = "other"  # in metrics, for a mechanism that is not enabled


def sasl_handshake(
    _context: RequestContext, _header: RequestHeader, _body: SaslHandshakeRequest
) -> SaslHandshakeResponse:
    """Refuse a handshake without SASL, or on an authenticated connection."""
    return SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE)


def sasl_authenticate(
    _context: RequestContext, _header: RequestHeader, _body: SaslAuthenticateRequest
) -> SaslAuthenticateResponse:
    """Refuse a token without SASL, or on an authenticated connection."""
    return SaslAuthenticateResponse(
        error_code=ErrorCode.ILLEGAL_SASL_STATE,
        error_message="SaslAuthenticate request received after successful authentication",
    )


@dataclass(frozen=True, slots=True)
class Session:
    """A complete authentication."""

    principal: Principal
    mechanism: str
    ends_at: float  # seconds of the clock


class SaslGate:
    """The authentication of one connection."""

    def __init__(self, authentication: Authentication, stats: AuthenticationStats) -> None:
        self._authentication = authentication
        self._stats = stats
        self._exchange: Exchange | None = None  # in progress
        self._has_headers = True  # whether tokens come in SaslAuthenticate requests
        self._session: Session | None = None  # whose end is known
        self._unauthenticated_requests = 0
        self._reauthentication_began = float("-inf")

    @property
    def expects_bare_token(self) -> bool:
        """See AuthenticationGate."""
        return self._exchange is not None and not self._has_headers

    def admit(self, connection: Connection, frame: memoryview) -> Awaitable[bytes] | None:
        """See AuthenticationGate."""
        if connection.is_unauthenticated:
            self._unauthenticated_requests += 1
            if self._unauthenticated_requests > UNAUTHENTICATED_REQUESTS_MAX:
                raise CloseConnectionError(
                    f"more than {UNAUTHENTICATED_REQUESTS_MAX} requests before the authentication"
                )
        if self._exchange is not None and not self._has_headers:
            return self._take_bare_token(connection, self._exchange, bytes(frame))
        key = int.from_bytes(frame[:2]) if len(frame) > 1 else -1
        if self._exchange is not None:
            if key != ApiKey.SASL_AUTHENTICATE:
                raise CloseConnectionError(f"API {key} in the middle of an authentication")
            return self._authenticate(connection, self._exchange, frame)
        if self._session is not None:
            return self._admit_session(connection, self._session, key, frame)
        if key == ApiKey.SASL_HANDSHAKE:
            return self._shake_hands(connection, frame)
        if key == ApiKey.API_VERSIONS:
            return None
        raise CloseConnectionError(f"API {key} before the authentication")

    def _admit_session(
        self, connection: Connection, session: Session, key: int, frame: memoryview
    ) -> Awaitable[bytes] | None:
        now = self._authentication.clock()
        if key == ApiKey.SASL_HANDSHAKE:
            if now - self._reauthentication_began < REAUTHENTICATION_SECONDS_MIN:
                return None
            self._reauthentication_began = now
            return self._shake_hands(connection, frame)
        if now > session.ends_at:
            self._stats.expired_connections += 1
            raise CloseConnectionError(
                "the session has expired and the client did not authenticate again"
            )
        return None

    async def _shake_hands(self, connection: Connection, frame: memoryview) -> bytes:
        header = read_header(frame)
        body = decode_body(header, frame)
        assert isinstance(body, SaslHandshakeRequest)
        address = address_of(connection.peer_host)
        exchange = self._authentication.new_exchange(body.mechanism, address)
        answer = SaslHandshakeResponse(mechanisms=list(self._authentication.settings.mechanisms))
        if exchange is None:
            answer.error_code = ErrorCode.UNSUPPORTED_SASL_MECHANISM
            response = _encode(header, answer)
            async with self._authentication.failed_attempts.attempt(address, None) as attempt:
                raise await self._refuse(
                    attempt, connection, None, "the mechanism is not enabled", response
                )
        if self._session is not None and self._session.mechanism != exchange.mechanism:
            raise CloseConnectionError(
                f"the client changed the mechanism from {self._session.mechanism} to "
                f"{exchange.mechanism} to authenticate again"
            )
        self._exchange = exchange
        self._has_headers = header.api_version > 0
        return _encode(header, answer)

    async def _authenticate(
        self, connection: Connection, exchange: Exchange, frame: memoryview
    ) -> bytes:
        header = read_header(frame)
        body = decode_body(header, frame)
        assert isinstance(body, SaslAuthenticateRequest)

        def refusal(error: AuthenticationError) -> bytes:
            answer = SaslAuthenticateResponse(
                error_code=ErrorCode.SASL_AUTHENTICATION_FAILED,
                error_message=error.answer or self._general_answer(exchange),
            )
            return _encode(header, answer)

        token, lifetime_ms = await self._attempt(connection, exchange, body.auth_bytes, refusal)
        return _encode(
            header, SaslAuthenticateResponse(auth_bytes=token, session_lifetime_ms=lifetime_ms)
        )

    async def _take_bare_token(
        self, connection: Connection, exchange: Exchange, token: bytes
    ) -> bytes:
        answer, _ = await self._attempt(connection, exchange, token, lambda _: b"")
        return len(answer).to_bytes(4) + answer

    async def _attempt(
        self,
        connection: Connection,
        exchange: Exchange,
        token: bytes,
        refusal: Callable[[AuthenticationError], bytes],
    ) -> tuple[bytes, int]:
        """Evaluate a token when it is its turn; return what `_evaluate` returns.

        `refusal` returns the response to an error.
        """
        address, attempts = address_of(connection.peer_host), self._authentication.failed_attempts
        turn = attempts.attempt(
            address,
            exchange.login(token),
            is_guess=exchange.is_guess,
            has_left=connection.client_has_left,
        )
        was_refused = exchange.refusal is not None
        try:
            async with turn as attempt:
                try:
                    result = await self._evaluate(connection, exchange, token)
                except AuthenticationError as error:
                    if was_refused:
                        reason = "the broker has refused the token of the client"
                        raise CloseConnectionError(reason, refusal(error)) from None
                    raise await self._refuse(
                        attempt, connection, exchange, error.reason, refusal(error)
                    ) from None
                if exchange.refusal is not None:
                    await self._note_refused_token(attempt, connection, exchange, exchange.refusal)
                elif exchange.principal is not None:
                    attempt.succeeded()
        except ClientLeftError as error:
            raise CloseConnectionError(str(error)) from error
        return result

    async def _evaluate(
        self, connection: Connection, exchange: Exchange, token: bytes
    ) -> tuple[bytes, int]:
        """Return the answer and the lifetime of the session; 0 if it has no end."""
        answer = await exchange.evaluate(token)
        principal = exchange.principal
        if principal is None:
            return answer, 0
        old, lifetime_ms = self._session, self._lifetime_ms(exchange)
        if old is not None and old.principal != principal:
            message = (
                "Cannot change principals during re-authentication from "
                f"{old.principal.kind}.{old.principal.name}: {principal.kind}.{principal.name}"
            )
            raise AuthenticationError(
                f"the client changed its principal from {old.principal}", message
            )
        counts = self._counts(connection, exchange)
        if old is None:
            counts.successes += 1
        else:
            counts.reauthentications += 1
        self._exchange, self._session = None, None
        if lifetime_ms:
            ends_at = self._authentication.clock() + lifetime_ms / 1000
            self._session = Session(principal, exchange.mechanism, ends_at)
        assert connection.context is not None
        connection.context.principal = principal
        connection.admitted(keeps_gate=self._session is not None)
        return answer, lifetime_ms

    def _lifetime_ms(self, exchange: Exchange) -> int:
        lifetime_ms = self._authentication.settings.max_reauth_ms
        if exchange.ends_ms is None:
            return lifetime_ms
        left_ms = max(1, exchange.ends_ms - self._authentication.wall_ms())  # 0 means without end
        return min(left_ms, lifetime_ms) if lifetime_ms else left_ms

    def _general_answer(self, exchange: Exchange) -> str:
        kind = "authentication" if self._session is None else "re-authentication"
        return (
            f"Authentication failed during {kind} due to invalid credentials with SASL mechanism "
            f"{exchange.mechanism}"
        )

    async def _refuse(
        self,
        attempt: Attempt,
        connection: Connection,
        exchange: Exchange | None,
        reason: str,
        response: bytes,
    ) -> CloseConnectionError:
        """Count a failure and wait; return the error that sends the response and closes."""
        await self._note_failure(attempt, connection, exchange)
        return CloseConnectionError(
            _FAILED.format(reason), response, **_described(connection, exchange)
        )

    async def _note_refused_token(
        self,
        attempt: Attempt,
        connection: Connection,
        exchange: Exchange,
        refusal: AuthenticationError,
    ) -> None:
        """Log and count a failure of which the client gets the error at its next message; wait."""
        logger.info(
            "token refused",
            subject=connection.peer_host,
            peer=f"{connection.peer_host}:{connection.peer_port}",
            reason=_FAILED.format(refusal.reason),
            **_described(connection, exchange),
        )
        await self._note_failure(attempt, connection, exchange)

    async def _note_failure(
        self, attempt: Attempt, connection: Connection, exchange: Exchange | None
    ) -> None:
        """Count a failure and wait."""
        counts = self._counts(connection, exchange)
        if self._session is None:
            counts.failures += 1
        else:
            counts.reauthentication_failures += 1
        await attempt.failed(self._authentication.settings.failure_delay_ms / 1000)

    def _counts(self, connection: Connection, exchange: Exchange | None) -> AuthenticationCounts:
        mechanism = OTHER_MECHANISM if exchange is None else exchange.mechanism
        return self._stats.by_mechanism[connection.listener.name, mechanism]


def _described(connection: Connection, exchange: Exchange | None) -> dict[str, str | None]:
    """Return the fields of the log line of a failure."""
    return {
        "listener": connection.listener.name,
        "mechanism": None if exchange is None else exchange.mechanism,
        "user": "" if exchange is None else exchange.user[:LOGGED_NAME_LENGTH],
    }


def _encode(header: RequestHeader, body: Message) -> bytes:
    return encode_response(header.api_key, header.api_version, header.correlation_id, body)
