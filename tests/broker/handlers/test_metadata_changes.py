"""Requests that change the metadata: who pauses holds nothing, and topics share the saves."""

import asyncio
import json
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import pytest

from broker.app import Broker
from broker.handlers.dispatch import TOPIC_CHANGES, Dispatcher
from broker.handlers.routes import make_dispatcher
from broker.network.connection import CloseConnectionError
from broker.security.principal import Principal, client_of
from broker.topics.change_pauses import BURST_SECONDS, CHANGE_SECONDS_MAX, METADATA_CHANGES
from broker.topics.metadata_service import PARTITIONS_PER_GROUP, TopicAlteration
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import ask
from tests.support.broker.principals import PrincipalClient
from tests.support.storage.memory_env import MemoryEnv

TOPIC = 2
SET = 0
TIMEOUT_SECONDS = 60
MANY = [f"missing-{number:06d}" for number in range(200)]  # more than 4 KiB


class Client(PrincipalClient):
    """A connection of a user, who may leave; all share one dispatcher, as in a broker."""

    def __init__(self, broker: Broker, dispatcher: Dispatcher, user: str) -> None:
        super().__init__(broker, user, dispatcher=dispatcher)
        self.has_left = False
        self.context.has_left = lambda: self.has_left

    async def alter(self, names: Sequence[str], *, validate_only: bool = False) -> list[int]:
        answer = await self.request(
            ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, alteration(names, validate_only=validate_only)
        )
        return [row.error_code for row in answer.responses]


def alteration(
    names: Sequence[str], *, validate_only: bool = False
) -> m.IncrementalAlterConfigsRequest:
    config = m.IncrementalAlterConfigsRequestConfig(
        name="retention.ms", config_operation=SET, value="1000000"
    )
    return m.IncrementalAlterConfigsRequest(
        resources=[
            m.IncrementalAlterConfigsRequestResource(
                resource_type=TOPIC, resource_name=name, configs=[config]
            )
            for name in names
        ],
        validate_only=validate_only,
    )


def use_up_burst(broker: Broker, user: str) -> None:
    client = client_of(Principal(user), "127.0.0.1")
    for _ in range(round(BURST_SECONDS / CHANGE_SECONDS_MAX) + 1):
        broker.metadata_writer.pauses.count(client, CHANGE_SECONDS_MAX, 0)
    assert broker.metadata_writer.pauses.pause_of(client) > 0


@pytest.mark.parametrize("names", [["t1"], ["t1", *MANY]], ids=["small", "large"])
async def test_who_pauses_holds_nothing_that_others_need(names: list[str]) -> None:
    topics: dict[str, Any] = {f"t{number}": {} for number in range(3)}
    async with broker_in_memory(MemoryEnv(seed=1), topics=topics) as broker:
        dispatcher = make_dispatcher(broker._services)
        eve, ann = (Client(broker, dispatcher, user) for user in ("eve", "ann"))
        use_up_burst(broker, "eve")
        async with asyncio.timeout(TIMEOUT_SECONDS):
            pausing = [asyncio.create_task(eve.alter(names)) for _ in range(20)]
            await asyncio.sleep(0)
            assert broker.stats.large_requests == 0
            assert (await ann.alter(["t2", *MANY]))[0] == ErrorCode.NONE
            assert not any(task.done() for task in pausing)
            broker.metadata_writer.begin_stopping()
            for codes in await asyncio.gather(*pausing):
                assert codes[0] == ErrorCode.NONE


async def test_a_request_whose_client_has_left_while_it_waited_changes_nothing() -> None:
    async with broker_in_memory(MemoryEnv(seed=1), topics={"t": {}}) as broker:
        eve = Client(broker, make_dispatcher(broker._services), "eve")
        use_up_burst(broker, "eve")
        saves = count_saves(broker)
        pausing = [asyncio.create_task(eve.alter(["t"])) for _ in range(3)]
        await asyncio.sleep(0)
        eve.has_left = True
        broker.metadata_writer.begin_stopping()
        for result in await asyncio.gather(*pausing, return_exceptions=True):
            assert isinstance(result, CloseConnectionError)
        assert saves == []


async def test_over_http_a_change_is_refused_while_its_user_would_pause() -> None:
    async with broker_in_memory(MemoryEnv(seed=1), topics={"t": {}}) as broker:
        for _ in range(round(BURST_SECONDS / CHANGE_SECONDS_MAX) + 1):
            broker.metadata_writer.pauses.count("127.0.0.1", CHANGE_SECONDS_MAX, 0)
        saves = count_saves(broker)
        path, body = "/api/v1/topics/t", json.dumps({"set": {"retention.ms": "1"}}).encode()
        answer = await ask(broker, "PATCH", path, body)
        assert (answer.status, saves) == (429, [])
        assert int(answer.headers["Retry-After"]) >= 1
        assert (await ask(broker, "GET", path)).status == 200
        for no_change in ("cleaner/pause", "cleaner/resume"):
            assert (await ask(broker, "POST", f"/api/v1/{no_change}", b"{}")).status == 200
        broker.metadata_writer.begin_stopping()
        assert (await ask(broker, "PATCH", path, body)).status == 200
        assert saves == [1]


async def test_over_http_half_a_request_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with broker_in_memory(MemoryEnv(seed=1), topics={"t": {"partitions": 1}}) as broker:
        pauses = chain((0.0,), repeat(60.0))  # the first change uses up the burst
        monkeypatch.setattr(broker.metadata_writer.pauses, "pause_of", lambda _: next(pauses))
        path = "/api/v1/topics/t"
        for partitions, status in ((2, 200), (3, 429)):
            changes = {"set": {"retention.ms": "1"}, "partitions": partitions}
            answer = await ask(broker, "PATCH", path, json.dumps(changes).encode())
            assert answer.status == status
        assert broker.topics.existing("t").partition_count == 2


async def test_a_topic_is_not_created_for_metadata_while_its_client_pauses() -> None:
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        dispatcher = make_dispatcher(broker._services)
        eve, ann = (Client(broker, dispatcher, user) for user in ("eve", "ann"))
        use_up_burst(broker, "eve")
        codes = []
        for client in (eve, ann):
            row = m.MetadataRequestTopic(name="new")
            answer = await client.request(ApiKey.METADATA, 12, m.MetadataRequest(topics=[row]))
            codes.append(answer.topics[0].error_code)
        assert codes == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.NONE]


def count_saves(broker: Broker) -> list[int]:
    """A list that gets a one for each save of the metadata from now on."""
    saves: list[int] = []
    save = broker.manager.save_metadata

    def counted(*args: Any, **options: Any) -> None:
        saves.append(1)
        save(*args, **options)

    broker.manager.save_metadata = counted  # type: ignore[method-assign]
    return saves


async def test_topics_of_one_request_share_the_saves() -> None:
    names = [f"t{number}" for number in range(2 * PARTITIONS_PER_GROUP + 1)]
    topics: dict[str, Any] = {name: {"partitions": 1} for name in names}
    async with broker_in_memory(MemoryEnv(seed=1), topics=topics) as broker:
        client = Client(broker, make_dispatcher(broker._services), "ann")
        saves = count_saves(broker)
        asked = ["missing", *names[:60], "", *names[60:]]
        codes = await client.alter(asked)
        assert len(saves) == 3
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert [name for name, code in zip(asked, codes, strict=True) if code] == ["missing", ""]
        assert {code for code in codes if code} <= {unknown, ErrorCode.INVALID_TOPIC_EXCEPTION}
        assert {broker.topics.existing(name).config.retention_ms for name in names} == {1_000_000}


async def test_large_requests_of_two_clients_take_turns_by_groups_of_topics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        service, order = broker.metadata_service, list[str]()
        alter_group = service._alter_group

        async def noted(group: Sequence[TopicAlteration], **options: bool) -> Any:
            order.append(group[0].name[:3])
            return await alter_group(group, **options)

        monkeypatch.setattr(service, "_alter_group", noted)
        dispatcher = make_dispatcher(broker._services)
        names = {user: [f"{user}-{name}" for name in MANY] for user in ("eve", "ann")}
        await asyncio.gather(*(Client(broker, dispatcher, u).alter(names[u]) for u in names))
        assert len(order) == 2 * len(MANY) // PARTITIONS_PER_GROUP
        assert order not in (sorted(order), sorted(order, reverse=True)), "not one after the other"


async def test_what_writes_nothing_is_not_counted() -> None:
    async with broker_in_memory(MemoryEnv(seed=1), topics={"t": {}}) as broker:
        ann = Client(broker, make_dispatcher(broker._services), "ann")
        saves = count_saves(broker)
        for _ in range(30):
            assert await ann.alter(["t"], validate_only=True) == [ErrorCode.NONE]
            assert set(await ann.alter(MANY)) == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
        assert saves == []
        pauses = broker.metadata_writer.pauses
        entry = pauses._client(client_of(Principal("ann"), "127.0.0.1"))
        assert entry.cost.is_idle(0.1, asyncio.get_running_loop().time())


def test_every_request_that_changes_topics_pauses() -> None:
    assert TOPIC_CHANGES < METADATA_CHANGES
