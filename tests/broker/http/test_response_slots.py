"""Responses that clients do not read: their memory is bounded, and others are served meanwhile."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from broker.app import Broker
from broker.http import response_slots
from broker.http.response_slots import ResponseSlots
from broker.inspection.record_reader import RecordReader
from storage.format.batch import Record, build_batch, read_header
from storage.model import TopicPartition
from tests.support.broker.http_client import ask, basic
from tests.support.broker.http_users import broker_with_users, send
from tests.support.cleaner.scheduler.cleaner_fakes import until

USERS = ("first", "second")
RECORDS = "/api/v1/topics/orders/partitions/0/records"
PAGE = f"{RECORDS}?limit=500"
SLOTS = 4


@pytest.fixture
async def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    """A broker with few slots, whose page of records is larger than what a socket takes at once."""
    monkeypatch.setattr(response_slots, "RESPONSES_AT_ONCE", SLOTS)
    async with broker_with_users(
        tmp_path, USERS, lambda *_: True, seed=3, topics={"orders": {}}
    ) as broker:
        partition = broker.topics.partition(TopicPartition("orders", 0))
        assert partition is not None
        rows = [Record(number, 1000, b"k", b"\x01" * 4096) for number in range(200)]
        for _ in range(2):
            data = memoryview(build_batch(rows))
            partition.append(data, read_header(data), 0)
        yield broker


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One item for each page of records that a handler began to make."""
    result = list[None]()
    read_page = RecordReader.read_page

    async def noted(self: RecordReader, *arguments: Any) -> Any:
        result.append(None)
        return await read_page(self, *arguments)

    monkeypatch.setattr(RecordReader, "read_page", noted)
    return result


async def request_page(broker: Broker, user: str) -> socket.socket:
    """Request a page of records, and read nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop, address = asyncio.get_running_loop(), broker.http.address
    await loop.sock_connect(client, (address.host, address.port))
    head = f"GET {PAGE} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {basic(user)}\r\n"
    await loop.sock_sendall(client, f"{head}Connection: close\r\n\r\n".encode())
    return client


async def read_to_end(client: socket.socket) -> int:
    """Return the number of bytes until the connection ends."""
    count = 0
    with suppress(ConnectionResetError):
        while data := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
            count += len(data)
    return count


async def test_clients_that_read_nothing_have_few_responses_in_memory_and_delay_nobody_else(
    broker: Broker, pages: list[None]
) -> None:
    with ExitStack() as stack:
        for _ in range(3 * SLOTS):
            stack.enter_context(await request_page(broker, "first"))
        for _ in range(3 * SLOTS):
            status, answer = await send(broker, "GET", f"{RECORDS}?limit=1", "second")
            assert (status, len(answer["records"])) == (200, 1)
        assert len(pages) == 3 * SLOTS + SLOTS // 2


async def test_a_request_has_no_slot_before_it_is_authorized(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of leased files are authorized by their handlers, by the token of the lease."""
    paths = []
    respond = ResponseSlots.respond

    async def noted(self: ResponseSlots, request: web.Request, handler: Any) -> web.StreamResponse:
        paths.append(request.path)
        return await respond(self, request, handler)

    monkeypatch.setattr(ResponseSlots, "respond", noted)
    leased = "/api/v1/remote-compactions/none/partitions/0/inputs/x"
    for path, headers in (
        (leased, {}),
        (RECORDS, {}),
        (RECORDS, {"Authorization": basic("second")}),
    ):
        await ask(broker, "GET", path, **headers)
    assert paths == [RECORDS]


async def test_who_does_not_read_a_response_in_time_loses_the_connection(
    broker: Broker, pages: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_slots, "SEND_SECONDS", 0.2)
    whole = len((await ask(broker, "GET", PAGE, Authorization=basic("first"))).body)
    pages.clear()
    with ExitStack() as stack:
        clients = [stack.enter_context(await request_page(broker, "first")) for _ in range(SLOTS)]
        await until(lambda: len(pages) == len(clients))
        received = [await read_to_end(client) for client in clients]
    cut_off = [count for count in received if 0 < count < whole]
    assert len(cut_off) >= SLOTS // 2
    status, _ = await send(broker, "GET", f"{RECORDS}?limit=1", "first")
    assert status == 200
