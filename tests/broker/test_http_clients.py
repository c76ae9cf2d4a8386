"""Clients of HTTP that are many, slow or silent take nothing from the others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from broker import http
from broker.app import Broker
from tests.support.broker_in_memory import broker_in_memory
from tests.support.memory_env import MemoryEnv

HEAD = (
    b"POST /api/v1/cleaner/hold HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


@pytest.fixture
async def broker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(http, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 3)
    async with broker_in_memory(MemoryEnv(seed=2)) as broker:
        yield broker


async def connect(broker: Broker) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(broker.http_address.host, broker.http_address.port)


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
    "said",
    [
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: loc",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
    ],
)
async def test_who_does_not_finish_the_head_of_a_request_loses_the_connection(
    broker: Broker, said: bytes
) -> None:
    reader, writer = await connect(broker)
    writer.write(said)
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.startswith(b"HTTP/1.1 200") == (b"\r\n\r\n" in said)
    writer.close()


async def test_a_body_that_does_not_come_is_not_waited_for(broker: Broker) -> None:
    reader, writer = await connect(broker)
    writer.write(HEAD + b"Content-Length: 10\r\n\r\n{")
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 408")
    writer.close()


async def test_one_connection_too_many_is_closed_and_room_is_made_in_time(broker: Broker) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(3):
            _, writer = await connect(broker)
            stack.callback(writer.close)
        assert await ask(broker, "/healthz") == b""
        answer = b""
        async with asyncio.timeout(20):
            while not answer.startswith(b"HTTP/1.1 200"):
                answer = await ask(broker, "/healthz")
