"""Traces of requests and jobs: what a span says, and that they cost nothing while they are off."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import broker.app
import broker.tracing
from broker.tracing import RequestFacts, Tracing, TracingError, _bounded_session, open_tracing
from cleaner.scheduler.history import History, JobRecord
from config.settings import TracingSettings
from protocol.api import ApiKey
from protocol.messages import ApiVersionsRequest
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory, client_of, kafka_request
from tests.support.broker.http_client import get
from tests.support.broker.sasl_client import SaslClient
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv

TOPICS = {"orders": {"keys": {"cleanup.policy": "compact"}}}
JOB = JobRecord(
    partition=TopicPartition("orders", 3),
    job_id="7",
    started_ms=1_000,
    finished_ms=3_500,
    outcome="failed",
    reason="the disk is full",
    bytes_read=42,
)


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def tracing_into(spans: InMemorySpanExporter, ratio: float = 1.0) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return Tracing(provider, ratio, draw=lambda: 0.5)


async def test_a_request_has_a_span(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker.app, "open_tracing", lambda _: tracing_into(spans))
    async with broker_in_memory(MemoryEnv(seed=1), topics=TOPICS) as running:
        with_key = bytes(batch_of(b"1"))

        def produce() -> None:
            with client_of(running) as client:
                client.produce("orders", with_key)

        await asyncio.to_thread(produce)
        await kafka_request(running, ApiKey.API_VERSIONS, ApiVersionsRequest(), 0)
    by_name = {span.name: span for span in spans.get_finished_spans()}
    assert {"Produce", "ApiVersions"} <= by_name.keys()
    produced = by_name["Produce"]
    assert produced.attributes["messaging.system"] == "kafka"
    assert produced.attributes["kafka.request.bytes"] > len(with_key)
    assert produced.start_time <= produced.end_time
    assert produced.status.is_unset


async def test_an_http_request_has_a_span_in_the_trace_of_its_sender(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker.app, "open_tracing", lambda _: tracing_into(spans))
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with broker_in_memory(MemoryEnv(seed=1), topics=TOPICS) as running:
        await get(running, "/api/v1/topics/orders", traceparent=f"00-{trace}-b7ad6b7169203331-01")
        await get(running, "/api/v1/topics/nothing")
        await get(running, "/no/such/page")
    listed, missing, unknown = spans.get_finished_spans()
    assert listed.name == "GET /api/v1/topics/{topic}"
    assert f"{listed.context.trace_id:032x}" == trace
    assert listed.attributes["http.response.status_code"] == 200
    assert missing.attributes["http.response.status_code"] == 404
    assert missing.status.is_unset  # the fault of the client
    assert missing.context.trace_id != listed.context.trace_id
    assert unknown.name == "unknown unknown"  # no names that any client can invent


async def test_an_http_request_that_fails_has_a_span_with_an_error(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker.app, "open_tracing", lambda _: tracing_into(spans))
    async with broker_in_memory(MemoryEnv(seed=1), topics=TOPICS) as running:
        monkeypatch.setattr(running.pool, "status", lambda: 1 // 0)
        await get(running, "/api/v1/cleaner")
    (span,) = spans.get_finished_spans()
    assert span.attributes["http.response.status_code"] == 500
    assert span.status.description == "Internal Server Error"


async def test_a_token_without_a_header_is_not_in_its_span(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(broker.app, "open_tracing", lambda _: tracing_into(spans))
    password = tmp_path / "password"
    password.write_text("open sesame")
    async with broker_in_memory(
        MemoryEnv(seed=1),
        listeners=["SASL_PLAINTEXT://127.0.0.1:0"],
        sasl={"mechanisms": ["PLAIN"], "users": {"alice": {"file": str(password)}}},
    ) as running:
        client = await SaslClient.connect(running)
        await client.shake_hands("PLAIN", version=0)
        assert await client.send_frame(b"\0alice\0open sesame") == b""
        client.close()
    handshake, token = spans.get_finished_spans()
    assert (handshake.name, token.name) == ("SaslHandshake", "SaslAuthenticate")
    assert token.attributes["messaging.client.id"] == ""
    assert "sesame" not in token.to_json()


def test_a_request_that_is_not_sampled_has_none(spans: InMemorySpanExporter) -> None:
    assert tracing_into(spans, ratio=0.6).is_sampled()
    assert not tracing_into(spans, ratio=0.5).is_sampled()
    assert not tracing_into(spans, ratio=0.0).is_sampled()


def test_a_header_is_read_whatever_follows() -> None:
    head = bytes.fromhex("0003000c0000002a0005") + b"shop!" + b"rest"
    facts = RequestFacts.of(memoryview(head), "10.0.0.1")
    assert (facts.api_key, facts.version, facts.correlation_id) == (3, 12, 42)
    assert (facts.client_id, facts.peer, facts.size_bytes) == ("shop!", "10.0.0.1", len(head))
    for length in range(len(head)):
        assert RequestFacts.of(memoryview(head[:length]), "").size_bytes == length
    no_client = RequestFacts.of(memoryview(bytes.fromhex("0003000c0000002affff00")), "")
    assert no_client.client_id == ""


async def test_headers_of_a_client_cause_no_lines_of_the_log(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broker.app, "open_tracing", lambda _: tracing_into(spans))
    trace = f"00-{'1' * 32}-{'2' * 16}-01"
    members = ",".join(f"a{number}=b" for number in range(40))
    async with broker_in_memory(MemoryEnv(seed=1), topics=TOPICS) as running:
        await get(running, "/healthz", traceparent="0" * 4000)
        await get(running, "/healthz", traceparent=trace, tracestate=members)
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_each_job_has_a_span_with_its_times_and_figures(
    spans: InMemorySpanExporter,
) -> None:
    history = History()
    history.observe(tracing_into(spans, ratio=0.0).job_ended)
    history.load([JOB])  # of an earlier process, which has sent its span
    assert spans.get_finished_spans() == ()
    history.add(JOB)
    (span,) = spans.get_finished_spans()
    assert (span.start_time, span.end_time) == (1_000_000_000, 3_500_000_000)
    assert span.attributes["varve.topic"] == "orders"
    assert span.attributes["varve.job.bytes_read"] == 42
    assert span.status.description == "the disk is full"


def test_nothing_of_it_is_imported_without_an_endpoint() -> None:
    assert open_tracing(TracingSettings()) is None
    code = "import sys, broker.daemon; print(any('opentelemetry' in name for name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingError, match=r"pip install -e '\.\[otel\]'"):
        open_tracing(TracingSettings(endpoint="http://127.0.0.1:4318/v1/traces"))


@pytest.fixture
def collector() -> Iterator[HTTPServer]:
    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self.server.received.append((self.path, self.rfile.read(length)))  # type: ignore[attr-defined]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.received = []  # type: ignore[attr-defined]
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_what_is_queued_is_sent_before_the_broker_stops(collector: HTTPServer) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    tracing = open_tracing(TracingSettings(endpoint=endpoint, service_name="shop"))
    assert tracing is not None
    tracing.job_ended(JOB)
    await tracing.stop()
    ((path, body),) = collector.received  # type: ignore[attr-defined]
    assert path == "/v1/traces"
    assert b"shop" in body
    assert b"orders" in body


async def test_a_collector_that_hangs_does_not_hold_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker.tracing, "EXPORT_SECONDS", 0.01)
    provider, answered = TracerProvider(), Event()
    monkeypatch.setattr(provider, "shutdown", answered.wait)
    try:
        await Tracing(provider, 1.0).stop()
        async with asyncio.timeout(20):  # as the end of the process does
            await asyncio.get_running_loop().shutdown_default_executor()
    finally:
        answered.set()


def test_a_large_answer_of_a_collector_is_not_read() -> None:
    unsent = []

    def answer() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 64000000\r\n\r\n")
            unsent.append("the rest")
            for _ in range(64):
                connection.sendall(bytes(1_000_000))
            unsent.clear()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=answer)
        thread.start()
        port = server.getsockname()[1]
        response = _bounded_session().post(f"http://127.0.0.1:{port}/v1/traces", data=b"spans")
        thread.join()
    assert response.status_code == 200
    assert unsent, "the client has closed the connection"
