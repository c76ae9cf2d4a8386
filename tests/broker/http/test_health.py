"""How new connections come to the HTTP server."""

import asyncio
from typing import Any

import pytest

from broker.http.health import HealthConnections
from broker.http.transport import SLICE_BYTES
from broker.quotas.connection_rates import ConnectionRates

REQUEST = b"GET /metrics HTTP/1.1\r\n\r\n"


class Transport:
    """A transport as far as connections use it before the HTTP server takes over."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.is_open = self.is_reading = True
        self.output = b""
        self.not_parsed = b""
        self.closed = asyncio.Event()

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return self.host, 1

    def is_closing(self) -> bool:
        return not self.is_open

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def set_protocol(self, _protocol: asyncio.BaseProtocol) -> None:
        pass

    def unread(self, data: bytes) -> None:
        self.not_parsed = data

    def write(self, data: bytes) -> None:
        self.output += data

    def close(self) -> None:
        self.is_open = False
        self.closed.set()

    abort = close


class Scene:
    """New connections, and those that the server has taken over."""

    def __init__(self, rates: ConnectionRates | None = None, *, has_room: bool = True) -> None:
        self.served: list[str] = []
        self.has_served = asyncio.Event()
        scene = self

        class Server(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                scene.served.append(transport.host)
                scene.has_served.set()

        self.parsed: list[bytes] = []

        def answer_check(head: bytes) -> bytes | None:
            self.parsed.append(head)
            return b"ok" if b"/healthz" in head else None

        self._connections = HealthConnections(
            answer_check,
            Server if has_room else lambda: None,
            rates or ConnectionRates(lambda: 0.0),
        )

    def connect(self, host: str, output: bytes = REQUEST) -> Transport:
        transport: Any = Transport(host)
        protocol: Any = self._connections.protocol()
        protocol.connection_made(transport)
        protocol.data_received(output)
        return transport


async def test_the_server_takes_over_one_connection_a_round_by_turns_of_addresses() -> None:
    scene = Scene()
    transports = [scene.connect(host) for host in ("a", "a", "a", "b")]
    transports[1].abort()
    served = []
    for _ in range(4):
        await asyncio.sleep(0)
        served.append(list(scene.served))
    assert served == [["a"], ["a", "b"], ["a", "b"], ["a", "b", "a"]]
    assert all(transport.is_reading for transport in transports if transport.is_open)


async def test_health_checks_pass_where_the_rate_of_an_address_refuses_other_connections() -> None:
    rates = ConnectionRates(lambda: 0.0)
    rates.update({(("ip", "127.0.0.1"),): {"connection_creation_rate": 100.0}})
    for _ in range(1000):
        rates.admit("127.0.0.1")
    scene = Scene(rates)
    refused, other = scene.connect("127.0.0.1"), scene.connect("127.0.0.2")
    check = scene.connect("127.0.0.1", b"GET /healthz HTTP/1.1\r\n\r\n")
    assert (check.output, check.is_open) == (b"ok", False)
    async with asyncio.timeout(20):
        await refused.closed.wait()
    assert refused.output.startswith(b"HTTP/1.1 429 ")
    assert (scene.served, other.is_open) == (["127.0.0.2"], True)


async def test_the_server_gets_the_first_bytes_at_once_and_the_others_in_turns() -> None:
    scene, rest = Scene(), bytes(range(256)) * 100
    transport = scene.connect("a", REQUEST.ljust(SLICE_BYTES) + rest)
    async with asyncio.timeout(20):
        await scene.has_served.wait()
    assert transport.not_parsed == rest


async def test_a_connection_above_the_rate_of_all_waits() -> None:
    rates = ConnectionRates(lambda: 0.0)
    rates.limit = 100.0
    for _ in range(1000):
        rates.admit("127.0.0.1")
    scene = Scene(rates)
    transport = scene.connect("127.0.0.1")
    for _ in range(3):
        await asyncio.sleep(0)
    assert (scene.served, transport.is_reading) == ([], False)
    async with asyncio.timeout(20):
        await scene.has_served.wait()
    assert (rates.delayed, transport.is_reading) == (1, True)


@pytest.mark.parametrize("target", ["/x", "/healthz"])
async def test_a_head_that_is_long_or_of_another_request_is_not_parsed(target: str) -> None:
    """Parsing 15,000 header lines takes 4 ms, and no rate applies to connections before it."""
    scene, end = Scene(), b"a:\r\n" * 15_000 + b"\r\n"
    scene.connect("127.0.0.1", f"GET {target} HTTP/1.1\r\n".encode() + end)
    scene.connect("127.0.0.2", b"GET /x HTTP/1.1\r\na:\r\n\r\n")
    for _ in range(2):
        await asyncio.sleep(0)
    assert scene.served == ["127.0.0.1", "127.0.0.2"]
    assert scene.parsed == []


async def test_a_refused_request_with_a_long_head_is_not_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("broker.http.health.parse_head", None)
    scene, many_lines = Scene(has_room=False), b"a:\r\n" * 15_000
    refused = {
        scene.connect("127.0.0.1", b"GET /x HTTP/1.1\r\n" + many_lines + b"\r\n"): b"503",
        scene.connect("127.0.0.1", b"GET /x HTTP/1.1\r\n" + many_lines): b"503",
        scene.connect("127.0.0.1", b"\x16\x03\x01" * 2_000): b"400",
    }
    for transport, status in refused.items():
        async with asyncio.timeout(20):
            await transport.closed.wait()
        assert transport.output.startswith(b"HTTP/1.1 " + status)
