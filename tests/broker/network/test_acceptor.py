"""New connections are accepted although others keep the event loop busy."""

import asyncio
import errno
import socket
from collections.abc import Coroutine
from contextlib import ExitStack, closing
from typing import Any

import pytest
import uvloop

from broker.network.acceptor import ACCEPTED_AT_ONCE, Acceptor
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.storage.memory_env import MemoryEnv


def run_in_uvloop(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test)


def test_many_connections_are_accepted_in_one_iteration_of_the_loop() -> None:
    async def accept_all() -> None:
        async with broker_in_memory(MemoryEnv(seed=1)) as broker:
            address = broker.addresses[0]
            with ExitStack() as stack:
                for _ in range(ACCEPTED_AT_ONCE):
                    new = socket.create_connection((address.host, address.port))
                    stack.enter_context(closing(new))
                iterations = 0
                while len(broker.listener.connections) < ACCEPTED_AT_ONCE:
                    await asyncio.sleep(0)
                    iterations += 1
        assert iterations < ACCEPTED_AT_ONCE / 2

    run_in_uvloop(accept_all())


def test_accepting_continues_when_there_are_descriptors_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[bool] = []
    accept_one = socket.socket.accept

    def refuse_once(listening: socket.socket) -> tuple[socket.socket, Any]:
        if not refused:
            refused.append(True)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept_one(listening)

    async def accept() -> None:
        accepted = asyncio.Event()

        async def serve(connection: socket.socket, _peer: str) -> None:
            connection.close()
            accepted.set()

        acceptor = Acceptor(serve)
        host, port = await acceptor.listen("127.0.0.1", 0, backlog=8)
        monkeypatch.setattr(socket.socket, "accept", refuse_once)
        with closing(socket.create_connection((host, port))):
            async with asyncio.timeout(20):
                await accepted.wait()
        acceptor.close()
        assert refused == [True]

    run_in_uvloop(accept())


def test_a_closed_acceptor_refuses_connections() -> None:
    async def close() -> None:
        async def serve(connection: socket.socket, _peer: str) -> None:
            connection.close()

        acceptor = Acceptor(serve)
        host, port = await acceptor.listen("127.0.0.1", 0, backlog=8)
        acceptor.close()
        with socket.socket() as client:
            assert client.connect_ex((host, port)) == errno.ECONNREFUSED

    run_in_uvloop(close())


@pytest.mark.parametrize("missing", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_a_host_is_served_at_the_addresses_that_this_machine_has(
    monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """`localhost` may name ::1 first, on a system without IPv6."""
    create_server = socket.create_server

    def without_ipv6(address: Any, *, family: int, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(missing, "no IPv6")
        return create_server(address, family=family, **options)

    async def listen() -> None:
        async def serve(connection: socket.socket, _peer: str) -> None:
            connection.close()

        loop, stream = asyncio.get_running_loop(), (socket.SOCK_STREAM, 6, "")
        rows = [
            (socket.AF_INET6, *stream, ("::1", 0, 0, 0)),
            (socket.AF_INET, *stream, ("127.0.0.1", 0)),
        ]

        async def resolve(*_: Any, **__: Any) -> list[Any]:
            return rows

        monkeypatch.setattr(socket, "create_server", without_ipv6)
        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        acceptor = Acceptor(serve)
        host, port = await acceptor.listen("localhost", 0, backlog=8)
        assert (host, port > 0) == ("127.0.0.1", True)
        acceptor.close()
        del rows[1]
        with pytest.raises(OSError, match="cannot listen on localhost:0: "):
            await acceptor.listen("localhost", 0, backlog=8)

    with asyncio.Runner() as runner:
        runner.run(listen())
