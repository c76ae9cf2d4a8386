"""The HTTP server (aiohttp): /metrics, /healthz, /readyz, the console, and the API below /api.

It listens on loopback by default. Every request passes the guard (access.py) first. An error below
/api is a problem document (RFC 9457), elsewhere a line of text.
"""

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Final, Protocol

import structlog
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware
from aiohttp.web_protocol import RequestHandler, RequestPayloadError
from multidict import CIMultiDict
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from broker.event_loop.client_presence import ClientLeftError
from broker.event_loop.loop_turns import ConnectionTurns, FreedLater, TurnQueue
from broker.http.access import (
    HEALTH_PATH,
    OPEN_PATHS,
    READY_PATH,
    SAFE_METHODS,
    Guard,
    Refusal,
    RequestFacts,
)
from broker.http.audited import audit, note_change, note_sender, sender_of
from broker.http.authentication import HttpAuthentication
from broker.http.connections import HttpConnections, mark_authorized
from broker.http.exposition import Encode, encoded
from broker.http.health import HealthConnections, HealthStatus, answer
from broker.http.observation import Handler, HttpObserver
from broker.http.response_slots import ResponseSlots
from broker.http.tls_listener import BACKLOG, TlsListener
from broker.http.transport import HttpTransport
from broker.logging import RateLimitedLogger
from broker.network.acceptor import Acceptor
from broker.quotas.connection_rates import ConnectionRates

MAX_BODY_BYTES: Final = 64 << 10  # no request needs more
# Scrapers and health checks use one connection each, people a few. A connection that is idle, or
# slow to send the head or body of a request, is closed. At the limit, a new connection replaces
# another one (connections.py), or gets health checks only (health.py), which count apart.
CONNECTIONS_MAX: Final = 128
# aiohttp reads on while it has less than this of a body, or fewer chunks than a sixteenth of it: to
# join these takes less than a millisecond.
READ_BUFFER_BYTES: Final = 16 << 10
IDLE_SECONDS: Final = 75.0  # for the head of a request, and between two requests
BODY_SECONDS: Final = 10.0
API_PREFIX: Final = "/api/"
METRICS_PATH: Final = "/metrics"
EXPECT_CONTINUE: Final = "100-continue"
PROBLEM_TYPE: Final = "application/problem+json"

# Errors of aiohttp for bytes of a client that are not valid HTTP.
CLIENT_ERRORS: Final = (HttpProcessingError, RequestPayloadError)

logger = RateLimitedLogger(structlog.get_logger("broker.http"))


class Health(Protocol):
    """The health of the daemon."""

    def not_ready_because(self, *, with_names: bool = True) -> str | None:
        """Return None if clients are served, otherwise the reason.

        Without names, the reason tells no topic and no path.
        """
        ...

    def unhealthy_because(self) -> str | None:
        """Return None if the process works, otherwise the reason."""
        ...


class MetricsSource(Protocol):
    """A source of metrics."""

    async def snapshot(self) -> Sequence[Metric]:
        """Return every metric family, built in turns of the loop."""
        ...


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a server beside those of metrics and health checks.

    The sets name routes that are authorized in another way than the rest, by their paths.
    """

    definitions: Sequence[web.AbstractRouteDef]
    middlewares: Sequence[Middleware] = ()
    transfers: frozenset[str] = frozenset()  # handlers check their own token and stream the body
    streams: frozenset[str] = frozenset()  # responses that go on for minutes, a little at a time
    # Routes that name a topic, but need the permission on the cluster.
    of_cluster: frozenset[str] = frozenset()
    # Routes that answer about one topic if the query names it.
    of_query_topic: frozenset[str] = frozenset()
    # Methods and paths of routes that authorize the sender themselves, as Kafka's handlers do.
    administrative: frozenset[tuple[str, str]] = frozenset()
    open: frozenset[str] = frozenset()  # need no credentials and are served before `open`
    # Called before the server waits for requests in progress to end.
    at_stop: Sequence[Callable[[web.Application], Awaitable[None]]] = ()


class HttpServer:
    """Serves metrics, health checks and the given routes."""

    def __init__(
        self,
        health: Health,
        guard: Guard,
        authentication: HttpAuthentication,
        routes: Routes,
        *,
        observer: HttpObserver,
        rates: ConnectionRates,
        turns: ConnectionTurns,
        early_metrics: MetricsSource,
    ) -> None:
        """The connections of Kafka clients share `rates` and `turns`.

        The server answers with `early_metrics` until `open`.
        """
        self._metrics_source: MetricsSource = early_metrics
        self._is_open = False
        self._freed_later = FreedLater()
        self._health = health
        self._routes = routes
        self.guard = guard
        self.authentication = authentication
        self.application = web.Application(
            client_max_size=MAX_BODY_BYTES,
            middlewares=[
                observer.observe(self._find_turns),
                self._translate_errors,
                self._check,
                *routes.middlewares,
            ],
        )
        self.application.add_routes(
            [
                web.get(METRICS_PATH, self._metrics),
                web.get(HEALTH_PATH, self._health_check),
                web.get(READY_PATH, self._health_check),
                *routes.definitions,
            ]
        )
        self.application.on_shutdown.extend(routes.at_stop)
        self._runner = web.AppRunner(
            self.application,
            handle_signals=False,
            access_log=None,
            shutdown_timeout=2.0,
            keepalive_timeout=IDLE_SECONDS,
            logger=_server_logger(),
            auto_decompress=False,  # it runs before any check: 400 KB can unpack to 400 MB
            read_bufsize=READ_BUFFER_BYTES,
        )
        self._acceptor = Acceptor(self._serve)
        self._connections = HttpConnections()
        self._response_slots = ResponseSlots()
        self._health_connections = HealthConnections(
            self._answer_check, self._serve_requests, rates
        )
        self._turns = turns
        self._tls: TlsListener | None = None

    def open(self, metrics: MetricsSource) -> None:
        """Serve everything; before, only health checks and `early_metrics` are served."""
        self._metrics_source = metrics
        self._is_open = True

    async def start(
        self, host: str, port: int, tls_context: ssl.SSLContext | None = None
    ) -> tuple[str, int]:
        """Listen, with a context for https; return the bound address. Raises OSError."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        handle = server.request_handler
        server.request_handler = partial(_refuse_expectations, handle)
        if tls_context is not None:
            self._tls = TlsListener(
                self._health_connections.protocol, tls_context, self._turns, self._turns_of
            )
            return await self._tls.start(host, port)
        return await self._acceptor.listen(host, port, backlog=BACKLOG)

    async def _serve(self, accepted: socket.socket, _peer: str) -> None:
        protocol = self._health_connections.protocol()
        transport = HttpTransport(protocol, self._turns, self._turns_of)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: transport, accepted)

    def _turns_of(self, protocol: asyncio.Protocol) -> TurnQueue | None:
        if not isinstance(protocol, RequestHandler):
            return None  # a health check waits for nobody
        is_authorized = self._connections.is_authorized(protocol)
        return self._turns.clients if is_authorized else self._turns.unauthenticated

    def _serve_requests(self) -> asyncio.Protocol | None:
        server = self._runner.server
        assert server is not None
        has_room = self._connections.make_room(server.connections, CONNECTIONS_MAX)
        return server() if has_room else None

    def _answer_check(self, head: bytes) -> bytes | None:
        return answer(head, self._refusal, self._health_status)

    def _refusal(self, facts: RequestFacts) -> Refusal | None:
        needs_credentials = self.authentication.needs_credentials
        return self.guard.refusal(facts, needs_credentials=needs_credentials)

    def _health_status(self, path: str) -> HealthStatus:
        if path != READY_PATH:
            return health_status(self._health.unhealthy_because())
        # Anyone may ask: names of topics are for those who need no credentials for them.
        with_names = not self.authentication.needs_credentials
        return health_status(self._health.not_ready_because(with_names=with_names))

    @property
    def tls_failures(self) -> int:
        """Return the number of connections whose handshake failed."""
        return 0 if self._tls is None else self._tls.failures

    def use_certificate(self, context: ssl.SSLContext) -> None:
        """Use this context for new connections; nothing changes without https."""
        if self._tls is not None:
            self._tls.context = context

    async def stop(self) -> None:
        """Close the listener and its connections."""
        self._acceptor.close()
        if self._tls is not None:
            await self._tls.close()
        self._health_connections.close()
        await self._runner.cleanup()

    @web.middleware
    async def _translate_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            if request.path.startswith(API_PREFIX):
                reason = f"{error.reason}: {request.method} {request.path[:200]}"
                allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
                return error_response(error.status, reason, allow)
            raise
        except CLIENT_ERRORS as error:
            return error_response(400, f"the body cannot be read: {_first_line(error)}")
        except (ConnectionError, ClientLeftError):
            return _closed()
        except Exception as error:
            # aiohttp's error if the client has left before its request is handled.
            if isinstance(error, RuntimeError) and _has_left(request):
                return _closed()
            logger.error(
                "request failed", method=request.method, path=request.path[:200], exc_info=error
            )
            return error_response(500, "internal error: see the broker's log")

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response: web.StreamResponse = error_response(500, "failed")  # unless there is another
        with self._connections.handling(request):
            try:
                response = await self._check_and_handle(request, handler)
            except web.HTTPException as error:
                response = error
                raise
            finally:
                await audit(request, response)
        return response

    def _find_turns(self, request: web.Request) -> TurnQueue:
        is_authorized = self._connections.is_authorized(request.protocol)
        return self._turns.client_tasks if is_authorized else self._turns.unauthenticated_tasks

    async def _check_and_handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_transfer = self._is_transfer(request)
        refusal = self._refusal(
            RequestFacts(
                method=request.method,
                path=request.path,
                host=request.host,
                origin=request.headers.get("Origin"),
                content_type=request.headers.get("Content-Type", ""),
                is_from_browser="Accept-Language" in request.headers,
                is_transfer=is_transfer,
            )
        )
        needs_no_credentials = (
            request.path in OPEN_PATHS or _route_path(request) in self._routes.open
        )
        is_early = needs_no_credentials or request.path == METRICS_PATH
        if refusal is None and not (self._is_open or is_early):
            refusal = self._starting()
        if refusal is None and not is_transfer and not needs_no_credentials:
            refusal = await self._authorize(request)
            if refusal is None:
                mark_authorized(request, sender_of(request))
                if request.method not in SAFE_METHODS:
                    refusal = await _read_body(request)
                    if refusal is None:
                        note_change(request)
        if refusal is not None:
            return self._refused(request, refusal)
        is_authorized = not (is_transfer or needs_no_credentials)
        is_small = request.method not in SAFE_METHODS
        if not is_authorized or is_small or _route_path(request) in self._routes.streams:
            return await handler(request)
        return await self._response_slots.respond(request, handler)

    async def _authorize(self, request: web.Request) -> Refusal | None:
        host, authentication = request.remote or "", self.authentication
        authorization = request.headers.get("Authorization", "")
        if not self._is_open and authentication.is_of_user(authorization):
            return self._starting()  # users, keys of signed tokens and permissions are not loaded
        last = self._connections.last_sender(request)
        sender = await authentication.authenticate(
            authorization, host, last, partial(_has_left, request)
        )
        if isinstance(sender, Refusal):
            return sender
        note_sender(request, sender)
        if self._is_administrative(request):
            return None
        return authentication.authorize(sender, host, request.method, self._topic_of(request))

    def _topic_of(self, request: web.Request) -> str | None:
        """Return the only topic that a request concerns; None for requests about more."""
        path = _route_path(request)
        if path in self._routes.of_cluster:
            return None
        if path in self._routes.of_query_topic:
            topics = request.query.getall("topic", [])
            return topics[0] if len(topics) == 1 else None
        return request.match_info.get("topic")

    def _starting(self) -> Refusal:
        return Refusal(503, self._health.not_ready_because() or "starting")

    def _refused(self, request: web.Request, refusal: Refusal) -> web.Response:
        headers = CIMultiDict[str]()
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            # The console asks for a password itself: without this, browsers show a dialog.
            is_console = request.headers.get("X-Requested-With") == "console"
            for challenge in self.authentication.challenges:
                if not (is_console and challenge.startswith("Basic")):
                    headers.add("WWW-Authenticate", challenge)
        if request.path.startswith(API_PREFIX):
            return error_response(refusal.status, refusal.reason, headers)
        return web.Response(status=refusal.status, text=f"{refusal.reason}\n", headers=headers)

    def _is_administrative(self, request: web.Request) -> bool:
        method = "GET" if request.method == "HEAD" else request.method
        return (method, _route_path(request)) in self._routes.administrative

    def _is_transfer(self, request: web.Request) -> bool:
        """Return whether the route of the request is a transfer."""
        return _route_path(request) in self._routes.transfers

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = _choose_encoder(request.headers.get("Accept", ""))
        body = await encoded(await self._metrics_source.snapshot(), encode, self._freed_later)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _health_check(self, request: web.Request) -> web.Response:
        status = self._health_status(request.path)
        return web.Response(status=status.status, text=status.text)


def _choose_encoder(accept: str) -> tuple[Encode, str]:
    """Return what writes metrics, and its content type; the plain one for a wrong version."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):
        return choose_encoder("")


async def _refuse_expectations(
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], request: web.BaseRequest
) -> web.StreamResponse:
    """Refuse an Expect header that nobody knows; aiohttp would quote it, and fail if it cannot."""
    expected = request.headers.get("Expect", EXPECT_CONTINUE).lower()
    if expected != EXPECT_CONTINUE and request.version >= HttpVersion11:
        return error_response(417, f"Expect: only {EXPECT_CONTINUE} is known")
    return await handle(request)


class _ServerErrors(logging.Handler):
    """Handles the log records of aiohttp about connections: client errors and internal errors."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, CLIENT_ERRORS):
            logger.info("request malformed", reason=_first_line(error))
        else:
            logger.error("request failed", reason=record.getMessage()[:200], exc_info=error)


def _server_logger() -> logging.Logger:
    logger = logging.getLogger("broker.http.server")
    logger.handlers = [_ServerErrors(logging.WARNING)]
    logger.propagate = False
    return logger


def _first_line(error: BaseException) -> str:
    """Return the text of an aiohttp error without the client's bytes after it."""
    text = error.message if isinstance(error, HttpProcessingError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


def error_response(
    status: int, reason: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an error response of the API: a problem document (RFC 9457)."""
    document = {
        "type": "about:blank",  # the status says what kind of problem it is
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": reason,
    }
    body = json.dumps(document).encode()
    return web.Response(body=body, status=status, content_type=PROBLEM_TYPE, headers=headers)


async def _read_body(request: web.Request) -> Refusal | None:
    """Read the body within the time limit; handlers then read it from memory."""
    if "Content-Encoding" in request.headers:
        return Refusal(415, "expected a body without Content-Encoding")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            await request.read()
    except TimeoutError:
        return Refusal(408, f"the body did not arrive within {BODY_SECONDS:g} s")
    return None


def _closed() -> web.Response:
    """Return the response to a client that has left, which nobody reads."""
    return error_response(400, "the connection was closed")


def _has_left(request: web.Request) -> bool:
    """Return whether the client has closed the connection."""
    return request.transport is None or request.transport.is_closing()


def _route_path(request: web.Request) -> str | None:
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical


def health_status(reason: str | None) -> HealthStatus:
    """Return the response to a health check: 200, or 503 with the reason."""
    return HealthStatus(200, "ok\n") if reason is None else HealthStatus(503, f"{reason}\n")
