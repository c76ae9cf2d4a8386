"""OpenTelemetry traces of requests by Kafka's protocol and HTTP, and of cleaner jobs.

They are off unless `tracing.endpoint` is set.

Rules
- Without an endpoint, no package of OpenTelemetry is imported, and the listener calls the
  dispatcher itself: tracing costs nothing.
- A span is made after its request has been answered, or its job has ended, from the times of both.
  A request that is not sampled costs one random number.
- A thread of the SDK sends the spans in batches. QUEUE_SPANS wait for it; further ones are lost.
- The end of the broker waits EXPORT_SECONDS for a collector that does not answer, after everything
  else. The SDK logs nothing of what clients send.
- Kafka's protocol has no trace context, so every span of a request is the root of a trace. It says
  how long the request took and whether it ended its connection; error codes in an answer are not
  decoded. The span of an HTTP request belongs to the trace that its header `traceparent` names.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from broker.http.observation import HttpRequestFacts
from broker.network.connection import (
    RESPONSE_TYPES,
    CloseConnectionError,
    Connection,
    RequestHandler,
    Response,
)
from broker.version import installed_version
from cleaner.scheduler.history import JobRecord
from config.extras import install_command
from config.settings import TracingSettings
from protocol.api import ApiKey
from protocol.errors import ProtocolError

if TYPE_CHECKING:
    import requests
    from opentelemetry.sdk.trace import TracerProvider

QUEUE_SPANS: Final = 2048
EXPORT_SECONDS: Final = 10.0  # for one batch
ANSWER_BYTES_MAX: Final = 64 << 10  # of a collector: the exporter needs status and headers only
CLIENT_ID_BYTES_MAX: Final = 200  # of a span
FAILED_OUTCOMES: Final = ("failed", "damaged")
_NAMES: Final = {int(key): key.name.title().replace("_", "") for key in ApiKey}


class TracingError(Exception):
    """Tracing is configured, but its packages are not installed."""


def open_tracing(settings: TracingSettings) -> "Tracing | None":
    """Return what records spans; None without an endpoint. Raises TracingError."""
    if settings.endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    except ImportError as error:
        raise TracingError(
            f"tracing.endpoint is set, but OpenTelemetry is not installed ({error}); "
            f"run {install_command('otel')}, or remove tracing.endpoint"
        ) from error
    names = {"service.name": settings.service_name, "service.version": installed_version()}
    provider = TracerProvider(
        resource=Resource.create(names), sampler=ALWAYS_ON, shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(
        endpoint=settings.endpoint, timeout=EXPORT_SECONDS, session=_bounded_session()
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS))
    return Tracing(provider, settings.sample_ratio)


def _bounded_session() -> "requests.Session":
    """Return a session that reads no more than ANSWER_BYTES_MAX of an answer, and unpacks none."""
    import requests

    class BoundedSession(requests.Session):
        def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
            response = super().send(request, **{**options, "stream": True})
            response.raw.read(ANSWER_BYTES_MAX, decode_content=False)
            response.close()
            return response

    return BoundedSession()


class Tracing:
    """Records spans of requests and jobs."""

    def __init__(
        self,
        provider: "TracerProvider",
        sample_ratio: float,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw` returns a number from 0 up to 1: a request is sampled if it is below the ratio."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # It warns of each malformed header of a client, who could fill the disk with lines.
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
        self._provider = provider
        self._tracer = provider.get_tracer("varve", installed_version())
        self._ratio = sample_ratio
        self._draw = draw
        self._server, self._internal = SpanKind.SERVER, SpanKind.INTERNAL
        self._trace_of = TraceContextTextMapPropagator().extract
        self._error: Callable[[str], Any] = partial(Status, StatusCode.ERROR)

    def is_sampled(self) -> bool:
        """Return whether the next request gets a span."""
        return self._draw() < self._ratio

    def traced(self, handler: RequestHandler) -> "TracedRequests":
        """Return a handler of requests that records a share of them."""
        return TracedRequests(handler, self)

    def request_ended(self, facts: "RequestFacts", error: BaseException | None) -> None:
        """Record a request that has been answered, or has ended its connection."""
        span = self._tracer.start_span(
            _NAMES.get(facts.api_key, "unknown API"),
            kind=self._server,
            start_time=facts.began_ns,
            attributes={
                "messaging.system": "kafka",
                "messaging.client.id": facts.client_id,
                "network.peer.address": facts.peer,
                "kafka.api.version": facts.version,
                "kafka.correlation_id": facts.correlation_id,
                "kafka.request.bytes": facts.size_bytes,
            },
        )
        if error is not None:
            span.set_status(self._error(str(error) or type(error).__name__))
        span.end(time.time_ns())

    def http_request_ended(self, facts: HttpRequestFacts, error: BaseException | None) -> None:
        """Record an HTTP request that has been answered, or has failed."""
        attributes: dict[str, Any] = {
            "http.request.method": facts.method,
            "http.route": facts.route,
            "network.peer.address": facts.peer,
        }
        if facts.status is not None:
            attributes["http.response.status_code"] = facts.status
        span = self._tracer.start_span(
            f"{facts.method} {facts.route}",
            context=self._trace_of(facts.headers),
            kind=self._server,
            start_time=facts.began_ns,
            attributes=attributes,
        )
        if error is not None:
            span.set_status(self._error(str(error) or type(error).__name__))
        elif facts.status is not None and facts.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            span.set_status(self._error(HTTPStatus(facts.status).phrase))
        span.end(time.time_ns())

    def job_ended(self, record: JobRecord) -> None:
        """Record a job of the cleaner."""
        topic, partition = record.partition
        figures: dict[str, Any] = {
            name: getattr(record, name)
            for name in (
                "job_id",
                "outcome",
                "reason",
                "engine",
                "segments",
                "groups_published",
                "bytes_before",
                "bytes_after",
                "records_before",
                "records_after",
                "bytes_read",
                "bytes_written",
                "read_wait_seconds",
                "write_wait_seconds",
            )
        }
        span = self._tracer.start_span(
            "clean",
            kind=self._internal,
            start_time=record.started_ms * 1_000_000,
            attributes={
                "varve.topic": topic,
                "varve.partition": partition,
                **{f"varve.job.{name}": value for name, value in figures.items()},
            },
        )
        if record.outcome in FAILED_OUTCOMES:
            span.set_status(self._error(record.reason))
        span.end(record.finished_ms * 1_000_000)

    async def stop(self) -> None:
        """Send what is queued; give up after EXPORT_SECONDS."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed: this took too long
                loop.call_soon_threadsafe(ended.set)

        # No thread of the loop: the process would wait for its end.
        threading.Thread(target=shut_down, name="tracing", daemon=True).start()
        with suppress(TimeoutError):  # what has not been sent is lost
            async with asyncio.timeout(EXPORT_SECONDS):
                await ended.wait()


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The attributes of a request that a span has."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str
    peer: str
    size_bytes: int
    began_ns: int

    @classmethod
    def of(cls, frame: memoryview, peer: str) -> "RequestFacts":
        """Read the header, which an unauthenticated client may have cut short."""
        head = bytes(frame[: 10 + CLIENT_ID_BYTES_MAX])
        length = int.from_bytes(head[8:10], signed=True)
        return cls(
            api_key=int.from_bytes(head[0:2], signed=True),
            version=int.from_bytes(head[2:4], signed=True),
            correlation_id=int.from_bytes(head[4:8], signed=True),
            client_id=head[10 : 10 + max(0, length)].decode(errors="replace"),
            peer=peer,
            size_bytes=len(frame),
            began_ns=time.time_ns(),
        )

    @classmethod
    def of_bare_token(cls, frame: memoryview, peer: str) -> "RequestFacts":
        """Return what may be said of a token of SASL without a request header."""
        return cls(ApiKey.SASL_AUTHENTICATE, 0, -1, "", peer, len(frame), time.time_ns())


class TracedRequests:
    """Passes requests on, and records a share of them."""

    def __init__(self, handler: RequestHandler, tracing: Tracing) -> None:
        self._handler = handler
        self._tracing = tracing

    def handle(self, connection: Connection, frame: memoryview) -> Response | Awaitable[Response]:
        """Answer one request."""
        if not self._tracing.is_sampled():
            return self._handler.handle(connection, frame)
        gate = connection.gate
        is_token = gate is not None and gate.expects_bare_token
        read = RequestFacts.of_bare_token if is_token else RequestFacts.of
        facts = read(frame, connection.peer_host)
        try:
            answer = self._handler.handle(connection, frame)
        except (CloseConnectionError, ProtocolError) as error:
            self._tracing.request_ended(facts, error)
            raise
        if not isinstance(answer, RESPONSE_TYPES):
            return self._later(facts, answer)
        self._tracing.request_ended(facts, None)
        return answer

    async def _later(self, facts: RequestFacts, answer: Awaitable[Response]) -> Response:
        try:
            response = await answer
        except BaseException as error:
            self._tracing.request_ended(facts, error)
            raise
        self._tracing.request_ended(facts, None)
        return response
