"""Clients of HTTP that are many, slow or silent take nothing from the others."""

import asyncio
import gzip
import io
import json
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import structlog
import uvloop
from aiohttp.compression_utils import ZLibDecompressor

from broker.app import Broker
from broker.http import health, server
from broker.logging import RateLimitedLogger, configure
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import get
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.storage.memory_env import MemoryEnv

LONGEST_HEADER = 8_000  # bytes; aiohttp accepts 8,190
LINES_PER_TURN_MAX = 30_000
LINES_OF_CHUNKS_MAX = 80_000  # 4 ms: aiohttp joins what it has, and parses what follows
CLOCK_RATE = 10
HEAD = (
    b"POST /api/v1/cleaner/hold HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


@pytest.fixture
async def broker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(server, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 3)
    async with broker_in_memory(MemoryEnv(seed=2)) as broker:
        yield broker


async def connect(broker: Broker) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(broker.http.address.host, broker.http.address.port)


async def ask(broker: Broker, path: str) -> bytes:
    reader, writer = await connect(broker)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: loc",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
    ],
)
async def test_who_does_not_finish_the_head_of_a_request_loses_the_connection(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, output: bytes
) -> None:
    monkeypatch.setattr(health, "SECONDS", 0.2)
    reader, writer = await connect(broker)
    writer.write(output)
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.startswith(b"HTTP/1.1 200") == (b"\r\n\r\n" in output)
    writer.close()


async def test_a_body_that_does_not_come_is_not_waited_for(broker: Broker) -> None:
    reader, writer = await connect(broker)
    writer.write(HEAD + b"Content-Length: 10\r\n\r\n{")
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 408")
    writer.close()


@pytest.mark.parametrize("is_gzip", [True, False])
async def test_a_body_with_a_content_encoding_is_refused_and_not_unpacked(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, is_gzip: bool
) -> None:
    unpacked = []
    monkeypatch.setattr(ZLibDecompressor, "decompress_sync", unpacked.append)
    coding, body = ("gzip", gzip.compress(b"{}")) if is_gzip else ("deflate", zlib.compress(b"{}"))
    reader, writer = await connect(broker)
    writer.write(
        HEAD + f"Content-Encoding: {coding}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 415")
    assert not unpacked
    writer.close()


async def fill(broker: Broker, stack: AsyncExitStack) -> list[asyncio.StreamWriter]:
    """Use all connections for requests in progress, whose bodies of one byte are missing."""
    writers = []
    for _ in range(server.CONNECTIONS_MAX):
        reader, writer = await connect(broker)
        stack.callback(writer.close)
        writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: 1\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 100 ")
        writers.append(writer)
    return writers


async def test_requests_in_progress_keep_a_new_connection_out_until_one_of_them_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 3)
    async with broker_in_memory(MemoryEnv(seed=2)) as broker, AsyncExitStack() as stack:
        writers = await fill(broker, stack)
        assert (await ask(broker, "/metrics")).startswith(b"HTTP/1.1 503 ")
        writers[1].write(b"x")
        answer = b""
        async with asyncio.timeout(20):
            while not answer.startswith(b"HTTP/1.1 200"):
                answer = await ask(broker, "/metrics")


@pytest.mark.parametrize("output", [b"", b"GET /me", b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n"])
async def test_unauthenticated_connections_give_way_to_new_ones_before_authorized_ones(
    monkeypatch: pytest.MonkeyPatch, output: bytes
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 3)
    async with broker_in_memory(MemoryEnv(seed=2)) as broker, AsyncExitStack() as stack:
        scraper, writer = await connect(broker)
        stack.callback(writer.close)

        async def scrape() -> bytes:
            writer.write(b"GET /api/v1/cleaner HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await asyncio.wait_for(scraper.readuntil(b"\r\n\r\n"), 20)
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await scraper.readexactly(length)
            return head

        assert (await scrape()).startswith(b"HTTP/1.1 200")
        for _ in range(10):
            _, other = await connect(broker)
            stack.callback(other.close)
            other.write(output)
        assert (await ask(broker, "/metrics")).startswith(b"HTTP/1.1 200")
        assert (await scrape()).startswith(b"HTTP/1.1 200")


async def test_an_idle_connection_gives_way_if_no_other_is_unauthenticated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 2)
    async with broker_in_memory(MemoryEnv(seed=2)) as broker, AsyncExitStack() as stack:
        for _ in range(5):
            reader, writer = await connect(broker)
            stack.callback(writer.close)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 20)
            assert answer.startswith(b"HTTP/1.1 200")


@pytest.fixture
def log_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What the HTTP side logs, from loggers that no other test has used."""
    stream = io.StringIO()
    configure("info", "json", stream)
    monkeypatch.setattr(server, "logger", RateLimitedLogger(structlog.get_logger("broker.http")))
    yield stream
    structlog.reset_defaults()


def log_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_http_connections_above_the_limit_get_nothing_but_health_checks_and_no_log_line(
    monkeypatch: pytest.MonkeyPatch, log_stream: io.StringIO
) -> None:
    """On the loop that the daemon uses: its transports are classes of their own."""
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 1)

    async def check() -> None:
        async with broker_in_memory(MemoryEnv(seed=2)) as broker, AsyncExitStack() as stack:
            await fill(broker, stack)
            log_stream.truncate(0)
            for _ in range(20):
                assert (await ask(broker, "/metrics")).startswith(b"HTTP/1.1 503 ")
                assert (await ask(broker, "/healthz")).endswith(b"\r\n\r\nok\n")
            assert [line["event"] for line in log_lines(log_stream)] == []

    uvloop.run(check())


async def test_idle_connections_do_not_keep_health_checks_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 3)
    async with broker_in_memory(MemoryEnv(seed=2)) as broker, AsyncExitStack() as stack:
        await fill(broker, stack)
        for _ in range(100):
            _, writer = await connect(broker)
            stack.callback(writer.close)
        for path in ("/healthz", "/readyz"):
            assert (await ask(broker, path)).endswith(b"\r\n\r\nok\n")
        foreign = b"GET /readyz HTTP/1.1\r\nHost: elsewhere\r\n\r\n"
        for request, status in ((foreign, b"403"), (b"x" * 5000, b"400"), (b"no\r\n\r\n", b"400")):
            reader, writer = await connect(broker)
            writer.write(request)
            response = await asyncio.wait_for(reader.read(), 20)
            assert response.startswith(b"HTTP/1.1 " + status)
            writer.close()


@pytest.mark.parametrize("output", [b"", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_other_connections_do_not_close_that_of_a_health_check(
    broker: Broker, output: bytes
) -> None:
    async with AsyncExitStack() as stack:
        reader, writer = await connect(broker)
        stack.callback(writer.close)
        writer.write(b"GET /healthz HTTP/1.1\r\n")
        for _ in range(3 * server.CONNECTIONS_MAX):
            other, other_writer = await connect(broker)
            stack.callback(other_writer.close)
            other_writer.write(output)
            if output:
                assert (await asyncio.wait_for(other.readline(), 20)).startswith(b"HTTP/1.1 200")
        writer.write(b"Host: localhost\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 20)).endswith(b"\r\n\r\nok\n")


MALFORMED = {
    "a version that does not exist": b"GET / HTTP/9.9\r\n\r\n",
    "a request of Kafka": b"\0\0\0\x10\0\3\0\1\0\0\0\1\0\0\r\n\r\n",
    "a line that is too long": b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
    "a length that is no number": HEAD + b"Content-Length: abc\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a chunk without a size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzzz\r\n",
    "a URL that does not end": b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a header with a zero": b"GET / HTTP/1.1\r\nHost: localhost\r\nA\0b: c\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "a chunk that ends early": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{xx\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_http_is_a_client_error_and_never_a_traceback(
    log_stream: io.StringIO, broker: Broker, name: str
) -> None:
    reader, writer = await connect(broker)
    writer.write(MALFORMED[name])
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert answer[:13] in (b"HTTP/1.0 400 ", b"HTTP/1.1 400 ")
    reported = log_lines(log_stream)
    assert [line for line in reported if line["level"] == "error" or "exception" in line] == []


@pytest.mark.parametrize("path", [b"/metrics", b"/nothing"])
@pytest.mark.parametrize("expected", [b"\xff", b"200-ok"])
async def test_an_unknown_expectation_is_a_client_error_and_never_a_traceback(
    log_stream: io.StringIO, broker: Broker, path: bytes, expected: bytes
) -> None:
    reader, writer = await connect(broker)
    writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nExpect: " + expected)
    writer.write(b"\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 417 ")
    writer.close()
    reported = log_lines(log_stream)
    assert [line for line in reported if line["level"] == "error" or "exception" in line] == []


async def test_a_client_that_goes_away_within_a_body_causes_no_traceback(
    log_stream: io.StringIO, broker: Broker
) -> None:
    reader, writer = await connect(broker)
    writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n{")
    await asyncio.wait_for(reader.readline(), 20)  # the handler has begun to wait for the body
    writer.transport.abort()
    assert (await ask(broker, "/healthz")).startswith(b"HTTP/1.1 200")
    reported = log_lines(log_stream)
    assert [line for line in reported if line["level"] == "error" or "exception" in line] == []


async def test_a_flood_of_malformed_http_is_written_at_a_limited_rate(
    log_stream: io.StringIO, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.logging.LINES_PER_BURST", 5)
    monkeypatch.setattr("broker.logging.LINES_PER_SECOND", 0.0)
    for _ in range(20):
        reader, writer = await connect(broker)
        writer.write(MALFORMED["no host"])
        assert await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert [line["event"] for line in log_lines(log_stream)].count("request malformed") == 5


@pytest.mark.parametrize("path", ["/", "/x", "/metrics", "/api/v1/topics"])
@pytest.mark.parametrize("text", [";", '"', ";*", "(", "a ", ",", ';a="b"'])
async def test_no_header_without_credentials_takes_long_to_parse(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, path: str, text: str
) -> None:
    """A Content-Type of 8,000 semicolons held the loop for a second."""
    value = "a/b" + text * (LONGEST_HEADER // len(text))
    await get(broker, path)
    turns: dict[str, int] = {}
    for name in (
        *("Accept", "Accept-Encoding", "Authorization", "Content-Encoding", "Content-Type"),
        *("Cookie", "Expect", "Forwarded", "If-Modified-Since", "If-None-Match", "Origin", "Range"),
    ):
        meter = LoopMeter(CLOCK_RATE)
        with meter.measuring(monkeypatch):
            await get(broker, path, **{name: value})
        turns[name] = meter.longest_turn
    assert {name: lines for name, lines in turns.items() if lines > LINES_PER_TURN_MAX} == {}


async def test_a_body_in_chunks_of_one_byte_takes_short_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with broker_in_memory(MemoryEnv(seed=2)) as broker:
        meter = LoopMeter(CLOCK_RATE)
        monkeypatch.setattr("broker.http.transport.perf_counter", meter.seconds)
        with meter.measuring(monkeypatch):
            peers = [await connect(broker) for _ in range(10)]
            for _, writer in peers:
                writer.write(head + b"1\r\nx\r\n" * 20_000)
            for reader, writer in peers:
                assert (await reader.readline()).startswith(b"HTTP/1.1 415 ")
                await writer.drain()
            for _, writer in peers:
                writer.close()
        assert meter.longest_turn <= LINES_OF_CHUNKS_MAX


@pytest.mark.parametrize("version", ["x", "", "1.0.0.", "2.x"])
@pytest.mark.parametrize("media_type", ["application/openmetrics-text", "text/plain"])
async def test_a_version_of_metrics_that_is_none_gets_the_plain_format(
    broker: Broker, media_type: str, version: str
) -> None:
    status, text = await get(broker, "/metrics", Accept=f"{media_type};version={version}")
    assert (status, "# HELP" in text) == (200, True)
