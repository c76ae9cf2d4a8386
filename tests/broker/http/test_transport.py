"""How a connection to the HTTP server passes its bytes on: whole, in order, in turns."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from broker.event_loop.loop_turns import ConnectionTurns, TurnQueue
from broker.http import transport
from broker.http.transport import SLICE_BYTES, HttpTransport

SENT = bytes(range(251)) * 4000  # a megabyte, in which no position is like another one nearby


class Receiver(asyncio.Protocol):
    """A protocol that keeps what it gets, and pauses after each `pause_after` slices."""

    def __init__(self, pause_after: int = 0) -> None:
        self.received = bytearray()
        self.slices: list[int] = []
        self.pause_after = pause_after
        self.transport: asyncio.Transport
        self.is_lost = False
        self.error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, HttpTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        assert self.transport.is_reading()
        self.received += data
        self.slices.append(len(data))
        if self.pause_after and len(self.slices) % self.pause_after == 0:
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(0.001, self.transport.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


class Server:
    """One connection, and its other end."""

    def __init__(self) -> None:
        self.turns = ConnectionTurns()
        self.queue: TurnQueue | None = self.turns.clients
        self.peer, self._accepted = socket.socketpair()
        self.peer.setblocking(False)

    async def connect(self, receiver: Receiver) -> None:
        loop = asyncio.get_running_loop()
        connection = HttpTransport(receiver, self.turns, lambda _: self.queue)
        await loop.connect_accepted_socket(lambda: connection, self._accepted)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.peer, data)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    yield server
    server.peer.close()


async def until_received(receiver: Receiver, count: int) -> None:
    async with asyncio.timeout(30):
        while len(receiver.received) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("pause_after", [0, 1, 7])
@pytest.mark.parametrize("is_unauthenticated", [False, True])
async def test_bytes_arrive_whole_and_in_order_in_slices(
    server: Server, is_unauthenticated: bool, pause_after: int
) -> None:
    if is_unauthenticated:
        server.queue = server.turns.unauthenticated
    receiver = Receiver(pause_after)
    await server.connect(receiver)
    sending = asyncio.create_task(server.send(SENT))
    await until_received(receiver, len(SENT))
    await sending
    assert receiver.received == SENT
    assert max(receiver.slices) <= SLICE_BYTES


async def test_a_connection_passes_on_no_more_than_a_turn_at_a_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def later() -> float:
        nonlocal now
        now += 0.001  # half a turn
        return now

    monkeypatch.setattr(transport, "perf_counter", later)
    receiver = Receiver()
    await server.connect(receiver)
    sending = asyncio.create_task(server.send(SENT[:100_000]))
    seen, rounds = 0, []
    async with asyncio.timeout(30):
        while len(receiver.received) < 100_000:
            await asyncio.sleep(0)
            rounds.append(len(receiver.slices) - seen)
            seen = len(receiver.slices)
    await sending
    assert max(rounds) <= 4


async def test_others_wait_for_one_turn_of_a_protocol_that_resumes_reading_in_its_turns(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Resuming(Receiver):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.transport.resume_reading()  # as aiohttp at the end of each body

    now, waits = 0.0, []

    def later() -> float:
        nonlocal now
        now += 0.001  # half a turn
        return now

    def wait_for_turn() -> None:
        before = len(receiver.slices)

        def take_turn() -> None:
            waits.append(len(receiver.slices) - before)
            wait_for_turn()

        server.turns.unauthenticated.add(take_turn)

    monkeypatch.setattr(transport, "perf_counter", later)
    server.queue = server.turns.unauthenticated
    receiver = Resuming()
    await server.connect(receiver)
    sending = asyncio.create_task(server.send(SENT[:100_000]))
    wait_for_turn()
    await until_received(receiver, 100_000)
    await sending
    assert receiver.received == SENT[:100_000]
    assert max(waits) <= 2


async def test_what_a_protocol_gives_back_comes_before_later_bytes(server: Server) -> None:
    server.queue = None
    first, second = Receiver(), Receiver()
    await server.connect(first)
    await server.send(SENT[:1000])
    await until_received(first, 1000)
    connection = first.transport
    assert isinstance(connection, HttpTransport)
    connection.pause_reading()
    server.queue = server.turns.unauthenticated
    await server.send(SENT[1000:3000])
    connection.set_protocol(second)
    connection.unread(SENT[:1000])
    second.transport = connection
    connection.resume_reading()
    await until_received(second, 3000)
    assert second.received == SENT[:3000]


async def test_a_protocol_that_fails_in_its_turn_loses_its_connection(server: Server) -> None:
    server.queue = server.turns.unauthenticated
    receiver = Receiver()
    receiver.error = ValueError("a mistake")
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    await server.connect(receiver)
    await server.send(b"x")
    async with asyncio.timeout(30):
        while not receiver.is_lost:  # noqa: ASYNC110
            await asyncio.sleep(0)
    with suppress(ConnectionError):
        assert await asyncio.get_running_loop().sock_recv(server.peer, 1) == b""
