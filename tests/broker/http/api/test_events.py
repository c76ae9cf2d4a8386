"""Streams of events: what is sent, who may listen, and how many."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientResponse, ClientSession

from broker.app import Broker
from broker.http.api import events, user_quotas
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.format.batch import read_header
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory, client_of, kafka_request
from tests.support.broker.http_client import ask, basic
from tests.support.broker.http_users import OWNERS, RuleAuthorizer, broker_with_users, owner_rule
from tests.support.storage.logs import NOW_MS, batch_of
from tests.support.storage.memory_env import MemoryEnv

TOPICS = {"orders": {"keys": {"cleanup.policy": "compact"}}}
CLEANER = events.CLEANER
ORDERS = events.PARTITION.format(topic="orders", partition=0)
TOPIC = events.TOPIC.format(topic="orders")
OVERVIEW, LIST, GROUPS = (
    events.LISTS.format(resource=name) for name in ("overview", "topics", "groups")
)


@pytest.fixture
async def broker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    monkeypatch.setattr(events, "TICK_SECONDS", 0.01)
    async with broker_in_memory(MemoryEnv(seed=51), topics=TOPICS) as broker:
        yield broker


@asynccontextmanager
async def stream(broker: Broker, path: str, **headers: str) -> AsyncIterator[ClientResponse]:
    async with (
        ClientSession(f"http://{broker.http.address}", headers=headers) as session,
        session.get(path) as response,
    ):
        yield response


async def next_event(response: ClientResponse) -> bytes:
    """Return the next event; skip comments."""
    while True:
        block = await response.content.readuntil(b"\n\n")
        if not block.startswith(b":"):
            return block


def append(broker: Broker, at_ms: int = NOW_MS) -> None:
    partition = broker.topics.partition(TopicPartition("orders", 0))
    assert partition is not None
    data = memoryview(batch_of(b"1", timestamp=at_ms))
    partition.append(data, read_header(data), 1000)


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        (CLEANER, b'"cleaner"'),
        (OVERVIEW, b'"overview"'),
        (LIST, b'"topics"'),
        (TOPIC, b'"orders"'),
        (ORDERS, b'"orders-0"'),
    ],
)
async def test_a_change_is_sent(broker: Broker, path: str, resource: bytes) -> None:
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


async def test_the_places_are_bounded_and_become_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "STREAMS_MAX", 1)
    monkeypatch.setattr(events, "TICK_SECONDS", 0.01)
    async with broker_in_memory(MemoryEnv(seed=51), topics=TOPICS) as broker:
        async with stream(broker, CLEANER) as first:
            await first.content.readuntil(b"\n\n")
            async with stream(broker, ORDERS) as second:
                assert (second.status, second.headers["Retry-After"]) == (503, "60")
        while True:  # until the broker notices that the reader has gone
            async with stream(broker, ORDERS) as third:
                if third.status == 200:
                    break


async def test_one_user_gets_half_of_the_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "STREAMS_MAX", 4)
    monkeypatch.setattr(events, "TICK_SECONDS", 0.01)
    users = broker_with_users(tmp_path, OWNERS, owner_rule, seed=52, topics=TOPICS)
    async with users as broker, AsyncExitStack() as stack:

        async def status(user: str) -> int:
            opened = stream(broker, ORDERS, Authorization=basic(user))
            return (await stack.enter_async_context(opened)).status

        assert [await status("owner") for _ in range(4)] == [200, 200, 503, 503]
        assert await status("viewer") == 200


@pytest.mark.parametrize("path", [ORDERS, TOPIC, GROUPS])
async def test_a_stream_of_something_unknown_is_refused(broker: Broker, path: str) -> None:
    unknown = path.replace("orders", "none").replace("groups", "none")
    async with stream(broker, unknown) as response:
        assert response.status == 404


@pytest.mark.parametrize("path", [GROUPS, OVERVIEW, LIST, TOPIC])
async def test_changes_of_clients_are_sent_to_the_lists(broker: Broker, path: str) -> None:
    act = commit if path == GROUPS else produce
    await act(broker)  # the first commit creates __consumer_offsets
    async with stream(broker, path) as response:
        await response.content.readuntil(b"\n\n")  # the stream has begun
        await act(broker)
        assert b"event: changed" in await next_event(response)


@pytest.mark.parametrize("path", [OVERVIEW, LIST, TOPIC])
async def test_a_change_of_settings_over_http_is_sent(broker: Broker, path: str) -> None:
    async with stream(broker, path) as response:
        await response.content.readuntil(b"\n\n")
        change = b'{"set": {"min.cleanable.dirty.ratio": "0.7"}}'
        assert (await ask(broker, "PATCH", "/api/v1/topics/orders", change)).status == 200
        assert b"event: changed" in await next_event(response)


@pytest.mark.parametrize("path", [OVERVIEW, LIST, TOPIC])
async def test_a_record_that_is_produced_over_http_is_sent(broker: Broker, path: str) -> None:
    async with stream(broker, path) as response:
        await response.content.readuntil(b"\n\n")
        records = "/api/v1/topics/orders/partitions/0/records"
        answer = await ask(broker, "POST", records, b'{"key": "k", "value": "v"}')
        assert answer.status == 201
        async with asyncio.timeout(20):
            assert b"event: changed" in await next_event(response)


async def test_a_rebalance_is_sent_before_the_group_is_stored(broker: Broker) -> None:
    await commit(broker)
    async with stream(broker, GROUPS) as response:
        await response.content.readuntil(b"\n\n")
        protocol = m.JoinGroupRequestProtocol(name="range", metadata=b"")
        body = m.JoinGroupRequest(
            group_id="g", session_timeout_ms=10_000, protocol_type="consumer", protocols=[protocol]
        )
        answer = await kafka_request(broker, ApiKey.JOIN_GROUP, body, 0)
        assert answer.error_code == ErrorCode.NONE
        assert b"event: changed" in await next_event(response)


async def test_retention_is_sent_to_the_list_of_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "TICK_SECONDS", 0.01)
    keys = {"cleanup.policy": "delete", "retention.ms": 1}
    topics = {"orders": {"keys": keys}}
    async with (
        broker_in_memory(
            MemoryEnv(seed=53), topics=topics, retention_check_interval_ms=10
        ) as broker,
        stream(broker, LIST) as response,
    ):
        await response.content.readuntil(b"\n\n")
        append(broker, at_ms=1)
        assert b"event: changed" in await next_event(response)


async def commit(broker: Broker) -> None:
    row = m.OffsetCommitRequestPartition(
        partition_index=0, committed_offset=0, committed_metadata=None
    )
    topic = m.OffsetCommitRequestTopic(name="orders", partitions=[row])
    coordinator = m.FindCoordinatorRequest(key="g")
    body = m.OffsetCommitRequest(group_id="g", topics=[topic])
    for _ in range(1000):
        await kafka_request(broker, ApiKey.FIND_COORDINATOR, coordinator, 0)
        answer = await kafka_request(broker, ApiKey.OFFSET_COMMIT, body, 2)
        if answer.topics[0].partitions[0].error_code == ErrorCode.NONE:
            return
    raise AssertionError(answer)


async def produce(broker: Broker) -> None:
    def exchange() -> int:
        with client_of(broker) as client:
            return client.produce("orders", bytes(batch_of(b"1"))).error_code

    assert await asyncio.to_thread(exchange) == ErrorCode.NONE


async def test_a_stop_ends_the_streams(broker: Broker) -> None:
    async with stream(broker, ORDERS) as response:
        await response.content.readuntil(b"\n\n")
        await broker.http.stop()
        assert await response.content.read() is not None  # it ends, instead of being cut


async def test_a_stream_of_a_topic_tells_nothing_of_others(broker: Broker) -> None:
    """Its reader may be the owner of this topic only."""
    async with stream(broker, TOPIC) as response:
        await response.content.readuntil(b"\n\n")  # the stream has begun
        await broker.metadata_service.create("other", 1, {"cleanup.policy": "compact"})
        broker.pool.operator.pause(TopicPartition("other", 0))
        broker.pool.stats.cleans += 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10 * events.TICK_SECONDS):
                await next_event(response)
        append(broker)
        assert b'"orders"' in await next_event(response)


@pytest.mark.parametrize(("path", "user"), [(TOPIC, "owner"), (LIST, "viewer")])
async def test_a_stream_ends_when_its_reader_loses_the_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, user: str
) -> None:
    monkeypatch.setattr(events, "TICK_SECONDS", 0.01)
    users = broker_with_users(tmp_path, OWNERS, owner_rule, seed=54, topics=TOPICS)
    async with users as broker, stream(broker, path, Authorization=basic(user)) as response:
        await response.content.readuntil(b"\n\n")  # the stream has begun
        broker._services.authorizer = RuleAuthorizer(lambda *_: False)
        append(broker)
        async with asyncio.timeout(60):
            assert b"changed" not in await response.content.read()


async def test_a_user_has_a_limited_number_of_requests_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request goes on without its connection, so the limit of these is not enough."""
    monkeypatch.setattr(user_quotas, "REQUESTS_MAX", 2)
    users = broker_with_users(tmp_path, OWNERS, owner_rule, seed=55, topics=TOPICS)
    async with users as broker, AsyncExitStack() as stack:

        async def status(user: str) -> int:
            opened = stream(broker, ORDERS, Authorization=basic(user))
            return (await stack.enter_async_context(opened)).status

        assert [await status("owner") for _ in range(3)] == [200, 200, 429]
        assert await status("viewer") == 200
