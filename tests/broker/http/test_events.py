"""Streams of events: what is told, who may listen, and how many."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientResponse, ClientSession

from broker.app import Broker
from broker.http.api import events
from storage.format.batch import read_header
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv

TOPICS = {"orders": {"keys": {"cleanup.policy": "compact"}}}
CLEANER = events.CLEANER
ORDERS = events.PARTITION.format(topic="orders", partition=0)


@pytest.fixture
async def broker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    monkeypatch.setattr(events, "TICK_SECONDS", 0.01)
    async with broker_in_memory(MemoryEnv(seed=51), topics=TOPICS) as broker:
        yield broker


@asynccontextmanager
async def stream(broker: Broker, path: str) -> AsyncIterator[ClientResponse]:
    async with (
        ClientSession(f"http://{broker.http.address}") as session,
        session.get(path) as response,
    ):
        yield response


async def next_event(response: ClientResponse) -> bytes:
    """Return the next event; skip comments."""
    while True:
        block = await response.content.readuntil(b"\n\n")
        if not block.startswith(b":"):
            return block


def append(broker: Broker) -> None:
    partition = broker.topics.partition(TopicPartition("orders", 0))
    assert partition is not None
    data = memoryview(batch_of(b"1"))
    partition.append(data, read_header(data), 1000)


@pytest.mark.parametrize(("path", "resource"), [(CLEANER, b'"cleaner"'), (ORDERS, b'"orders-0"')])
async def test_a_change_is_told(broker: Broker, path: str, resource: bytes) -> None:
    async with stream(broker, path) as response:
        assert response.content_type == "text/event-stream"
        await response.content.readuntil(b"\n\n")  # the stream has begun
        append(broker)
        broker.pool.operator.pause(TopicPartition("orders", 0))
        assert await next_event(response) == (
            b'event: changed\ndata: {"resource": %s}\n\n' % resource
        )


async def test_a_silent_stream_has_a_comment_from_time_to_time(broker: Broker) -> None:
    async with stream(broker, ORDERS) as response:
        blocks = [await response.content.readuntil(b"\n\n") for _ in range(3)]
    assert all(block.startswith(b":") for block in blocks)


async def test_the_places_are_bounded_and_become_free(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "STREAMS_MAX", 1)
    async with stream(broker, CLEANER) as first:
        await first.content.readuntil(b"\n\n")
        async with stream(broker, ORDERS) as second:
            assert (second.status, second.headers["Retry-After"]) == (503, "60")
    while True:  # until the broker notices that the reader has gone
        async with stream(broker, ORDERS) as third:
            if third.status == 200:
                break


async def test_a_stream_of_an_unknown_partition_is_refused(broker: Broker) -> None:
    async with stream(broker, ORDERS.replace("orders", "none")) as response:
        assert response.status == 404


async def test_a_stop_ends_the_streams(broker: Broker) -> None:
    async with stream(broker, ORDERS) as response:
        await response.content.readuntil(b"\n\n")
        await broker.http.stop()
        assert await response.content.read() is not None  # it ends, instead of being cut
