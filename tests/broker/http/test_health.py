"""How new connections come to the HTTP server."""

import asyncio
from typing import Any

from broker.http.health import HealthConnections
from broker.quotas.connection_rates import ConnectionRates

REQUEST = b"GET /metrics HTTP/1.1\r\n\r\n"


class Transport:
    """A transport as far as connections use it before the HTTP server takes over."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.is_open = self.is_reading = True
        self.output = b""
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

    def write(self, data: bytes) -> None:
        self.output += data

    def close(self) -> None:
        self.is_open = False
        self.closed.set()

    abort = close


class Scene:
    """New connections, and those that the server has taken over."""

    def __init__(self, rates: ConnectionRates | None = None) -> None:
        self.served: list[str] = []
        self.has_served = asyncio.Event()
        scene = self

        class Server(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                scene.served.append(transport.host)
                scene.has_served.set()

        self._connections = HealthConnections(
            lambda head: b"ok" if b"/healthz" in head else None,
            Server,
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
