"""Health checks, and connections that have not sent their first request.

An orchestrator restarts a broker whose health check fails, so other clients must not be able to
cause a restart. Each new connection begins here. If its first request is a health check, it gets a
response without aiohttp, before the requests of other connections, and is closed. Otherwise the
HTTP server takes it over. If that has no room, each request but a health check is refused.

`Readiness` (broker/lifecycle/readiness.py) decides the answers.

Rules: the number of connections and their time are small. A new connection replaces the oldest one,
so a client that sends its request at once always gets a response.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, cast

from broker.http.access import OPEN_PATHS, SAFE_METHODS, Refusal, RequestFacts

CONNECTIONS_MAX: Final = 128  # the acceptor takes four iterations of the loop to replace them
HEAD_BYTES_MAX: Final = 4096
SECONDS: Final = 10.0  # from the connection to the first request: the whole head of a health check
END_OF_HEAD: Final = b"\r\n\r\n"
CHECKS: Final = tuple(f"{method} {path}".encode() for method in SAFE_METHODS for path in OPEN_PATHS)


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """The answer to a health check."""

    status: int
    text: str


def parse_head(head: bytes) -> RequestFacts | None:
    """Parse the head of a request; return None if it is not HTTP/1.x."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            return None
        headers[name.strip().lower()] = value.strip()
    return RequestFacts(
        method=words[0],
        path=words[1].partition("?")[0],
        host=headers.get("host", ""),
        origin=headers.get("origin"),
        is_from_browser="accept-language" in headers,
    )


def may_be_check(received: bytes) -> bool:
    """Return whether a request that begins with these bytes may be a health check."""
    return any(check.startswith(received[: len(check)]) for check in CHECKS)


def answer(
    head: bytes,
    refusal: Callable[[RequestFacts], Refusal | None],
    status_of: Callable[[str], HealthStatus],
) -> bytes | None:
    """Return the whole response to a health check, None to another request.

    Pure apart from the callables.
    """
    request = parse_head(head)
    if request is None or request.path not in OPEN_PATHS or request.method not in SAFE_METHODS:
        return None
    refused = refusal(request)
    if refused is not None:
        return _response(HealthStatus(refused.status, f"{refused.reason}\n"))
    return _response(status_of(request.path), has_body=request.method != "HEAD")


def refuse(head: bytes) -> bytes:
    """Return the response to a request for which there is no room."""
    if parse_head(head) is None:
        return _response(HealthStatus(400, "malformed HTTP request\n"))
    return _response(
        HealthStatus(503, "too many HTTP connections; only health checks are served\n")
    )


def _response(status: HealthStatus, *, has_body: bool = True) -> bytes:
    body = status.text.encode()
    head = (
        f"HTTP/1.1 {status.status} {HTTPStatus(status.status).phrase}\r\n"
        "Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if has_body else b"")


class HealthConnections:
    """The connections that have not sent their first request, oldest first."""

    def __init__(
        self,
        answer_check: Callable[[bytes], bytes | None],
        serve: Callable[[], asyncio.Protocol | None],
    ) -> None:
        """`answer_check`: see `answer`.

        `serve` makes the protocol that takes over a connection; None if there is no room.
        """
        self.answer_check = answer_check
        self.serve = serve
        self.open: dict[asyncio.Transport, None] = {}

    def protocol(self) -> asyncio.Protocol:
        """Return the protocol for a new connection."""
        return _HealthConnection(self)

    def close(self) -> None:
        """Close all connections."""
        for transport in tuple(self.open):
            transport.abort()


class _HealthConnection(asyncio.Protocol):
    def __init__(self, connections: HealthConnections) -> None:
        self._connections = connections
        self._received = b""
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Cast, because uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        others = self._connections.open
        if len(others) >= CONNECTIONS_MAX:
            oldest = next(iter(others))
            del others[oldest]
            oldest.abort()
        others[self._transport] = None
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._received += data
        head, end, _ = self._received.partition(END_OF_HEAD)
        is_incomplete = not end and len(self._received) <= HEAD_BYTES_MAX
        if is_incomplete and may_be_check(self._received):
            return
        response = self._connections.answer_check(head) if end else None
        if response is None:
            following = self._connections.serve()
            if following is not None:
                self._hand_over(following)
                return
            if is_incomplete:
                return
            response = refuse(head if end else b"")
        self._transport.write(response)
        self._transport.close()

    def _hand_over(self, following: asyncio.Protocol) -> None:
        self._leave()
        self._transport.set_protocol(following)
        following.connection_made(self._transport)
        following.data_received(self._received)

    def _leave(self) -> None:
        self._timer.cancel()
        self._connections.open.pop(self._transport, None)
