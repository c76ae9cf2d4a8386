"""Health checks, and connections that have not sent their first request.

An orchestrator restarts a broker whose health check fails, so other clients must not be able to
cause a restart. Each new connection begins here. If its first request is a health check, it gets a
response without aiohttp, before the requests of other connections, and is closed. Otherwise the
HTTP server takes it over. If that has no room, each request but a health check is refused.

The HTTP server takes over one connection in each iteration of the event loop, by turns of the
addresses: that and the first request take a millisecond. Those above the rate of their address are
closed, and those above that of all wait (broker/quotas/connection_rates.py).

`Readiness` (broker/lifecycle/readiness.py) decides the answers.

Rules: the number of connections and their time are small. A new connection replaces the oldest one,
so a client that sends its request at once always gets a response.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, cast

from broker.http.access import OPEN_PATHS, SAFE_METHODS, Refusal, RequestFacts
from broker.http.transport import SLICE_BYTES, HttpTransport
from broker.quotas.connection_rates import ConnectionRates

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
    words = _request_line(head)
    if words is None:
        return None
    lines = head.decode("latin-1").split("\r\n")
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


def _request_line(head: bytes) -> list[str] | None:
    """Return method, target and version; None if it is not HTTP/1.x. Fast for any size."""
    words = head.partition(b"\r\n")[0].decode("latin-1").split(" ", 3)
    return words if len(words) == 3 and words[2].startswith("HTTP/1.") else None


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
    """Return the response to a request for which there is no room; its head may be incomplete."""
    if head and _request_line(head) is None:
        return _response(HealthStatus(400, "malformed HTTP request\n"))
    return _response(
        HealthStatus(503, "too many HTTP connections; only health checks are served\n")
    )


def refuse_for_rate() -> bytes:
    """Return the response on a connection above the rate of its address."""
    return _response(HealthStatus(429, "too many new connections a second from this address\n"))


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
        rates: ConnectionRates,
    ) -> None:
        """`answer_check`: see `answer`.

        `serve` makes the protocol that takes over a connection; None if there is no room.
        """
        self.answer_check = answer_check
        self.serve = serve
        self.rates = rates
        self.open: dict[asyncio.Transport, None] = {}
        # Connections that the HTTP server is to take over, by address: the next one first.
        self._queue: dict[str, deque[_HealthConnection]] = {}

    def protocol(self) -> asyncio.Protocol:
        """Return the protocol for a new connection."""
        return _HealthConnection(self)

    def queue(self, connection: "_HealthConnection") -> None:
        """Let the HTTP server take over a connection when it is its turn."""
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._serve_next)
        self._queue.setdefault(connection.host, deque()).append(connection)

    def _serve_next(self) -> None:
        host, connections = next(iter(self._queue.items()))
        del self._queue[host]
        connection = connections.popleft()
        if connections:
            self._queue[host] = connections
        if self._queue:
            asyncio.get_running_loop().call_soon(self._serve_next)
        connection.hand_over()

    def close(self) -> None:
        """Close all connections."""
        for transport in tuple(self.open):
            transport.abort()


class _HealthConnection(asyncio.Protocol):
    def __init__(self, connections: HealthConnections) -> None:
        self._connections = connections
        self._received = b""
        self._transport: HttpTransport
        self._timer: asyncio.TimerHandle
        self.host = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(HttpTransport, transport)
        self.host = str((transport.get_extra_info("peername") or ("",))[0])
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
        # Anything else is not parsed here, where no rate applies yet.
        is_check = len(head) <= HEAD_BYTES_MAX and may_be_check(head)
        if is_check and not end:
            return
        response = self._connections.answer_check(head) if is_check else None
        if response is not None:
            self._end(response)
            return
        self._transport.pause_reading()
        admission = self._connections.rates.admit(self.host)
        loop = asyncio.get_running_loop()
        if admission.is_refused:
            loop.call_later(admission.delay_seconds, self._end, refuse_for_rate())
        elif admission.delay_seconds:
            loop.call_later(admission.delay_seconds, self._connections.queue, self)
        else:
            self._connections.queue(self)

    def hand_over(self) -> None:
        """Let the HTTP server take over, or refuse the request."""
        if self._transport.is_closing():
            return
        following = self._connections.serve()
        if following is None:
            head, end, _ = self._received.partition(END_OF_HEAD)
            is_whole = bool(end) or len(head) > HEAD_BYTES_MAX
            self._end(refuse(head if is_whole else b""))
            return
        self._leave()
        self._transport.set_protocol(following)
        self._transport.unread(self._received[SLICE_BYTES:])
        self._transport.resume_reading()  # first: the server may pause it again
        following.connection_made(self._transport)
        following.data_received(self._received[:SLICE_BYTES])

    def _end(self, response: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(response)
            self._transport.close()

    def _leave(self) -> None:
        self._timer.cancel()
        self._connections.open.pop(self._transport, None)
