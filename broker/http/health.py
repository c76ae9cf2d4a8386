"""Health checks while all HTTP connections are in use.

An orchestrator restarts a broker whose health check fails, so clients that only hold connections
open must not be able to cause a restart. Connections above the limit of the HTTP server are handled
here: each may send one request, gets a response without aiohttp, and is closed.

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

CONNECTIONS_MAX: Final = 16  # probes of one orchestrator and of a few load balancers at once
HEAD_BYTES_MAX: Final = 4096
SECONDS: Final = 5.0  # from the connection to the whole head of its request
END_OF_HEAD: Final = b"\r\n\r\n"


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
    path = words[1].partition("?")[0]
    return RequestFacts(words[0], path, headers.get("host", ""), headers.get("origin"))


def answer(
    head: bytes,
    refusal: Callable[[RequestFacts], Refusal | None],
    status_of: Callable[[str], HealthStatus],
) -> bytes:
    """Return the whole response to a request; pure apart from the callables."""
    request = parse_head(head)
    if request is None:
        return _response(HealthStatus(400, "malformed HTTP request\n"))
    if request.path not in OPEN_PATHS or request.method not in SAFE_METHODS:
        return _response(
            HealthStatus(503, "too many HTTP connections; only health checks are served\n")
        )
    refused = refusal(request)
    if refused is not None:
        return _response(HealthStatus(refused.status, f"{refused.reason}\n"))
    return _response(status_of(request.path), has_body=request.method != "HEAD")


def _response(status: HealthStatus, *, has_body: bool = True) -> bytes:
    body = status.text.encode()
    head = (
        f"HTTP/1.1 {status.status} {HTTPStatus(status.status).phrase}\r\n"
        "Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if has_body else b"")


class HealthConnections:
    """The open connections above the limit, oldest first."""

    def __init__(self, answer_head: Callable[[bytes], bytes]) -> None:
        self._answer_head = answer_head
        self._open: dict[asyncio.Transport, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def protocol(self) -> asyncio.Protocol:
        """Return the protocol for a new connection."""
        return _HealthConnection(self._open, self._answer_head)

    def close(self) -> None:
        """Close all connections."""
        for transport in tuple(self._open):
            transport.abort()


class _HealthConnection(asyncio.Protocol):
    def __init__(
        self, places: dict[asyncio.Transport, None], answer_head: Callable[[bytes], bytes]
    ) -> None:
        self._connections = places
        self._answer_head = answer_head
        self._received = b""
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Cast, because uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        if len(self._connections) >= CONNECTIONS_MAX:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.abort()
        self._connections[self._transport] = None
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._connections.pop(self._transport, None)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._received += data
        head, end, _ = self._received.partition(END_OF_HEAD)
        if not end and len(self._received) <= HEAD_BYTES_MAX:
            return
        self._transport.write(self._answer_head(head if end else b""))
        self._transport.close()
