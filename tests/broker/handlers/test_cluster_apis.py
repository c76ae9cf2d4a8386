"""Cluster-wide APIs, through a socket: what tools of administrators are answered by one node."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from broker.app import Broker
from broker.handlers.configs import (
    APPEND,
    BROKER,
    BROKER_LOGGER,
    CLIENT_METRICS,
    DELETE,
    GROUP,
    SET,
    SUBTRACT,
    TOPIC,
    alter_configs,
    incremental_alter_configs,
)
from broker.handlers.replication import METADATA_TOPIC
from config.topics.keys import TopicConfig
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.limits import SETTINGS_PER_RESOURCE_MAX
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory, kafka_request
from tests.support.protocol.raw_client import RawClient
from tests.support.protocol.requests import advertised_range
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv
from tests.support.waiting import wait_until

NODE = 1


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with broker_in_memory(MemoryEnv(seed=11)) as broker:
        await broker.metadata_service.create("orders", 2, {})
        yield broker


async def test_the_only_replica_needs_no_election(broker: Broker) -> None:
    rows = [
        m.ElectLeadersRequestTopicPartitions(topic="orders", partitions=[0, 2]),
        m.ElectLeadersRequestTopicPartitions(topic="nope", partitions=[0]),
    ]
    answer = await kafka_request(
        broker, ApiKey.ELECT_LEADERS, m.ElectLeadersRequest(topic_partitions=rows)
    )
    assert [
        (t.topic, p.partition_id, p.error_code)
        for t in answer.replica_election_results
        for p in t.partition_result
    ] == [
        ("orders", 0, ErrorCode.ELECTION_NOT_NEEDED),
        ("orders", 2, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("nope", 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    everything = await kafka_request(
        broker, ApiKey.ELECT_LEADERS, m.ElectLeadersRequest(topic_partitions=None)
    )
    assert (everything.error_code, everything.replica_election_results) == (0, [])


async def test_a_partition_can_be_assigned_to_the_only_broker_alone(broker: Broker) -> None:
    partitions = [
        m.AlterPartitionReassignmentsRequestPartition(partition_index=index, replicas=replicas)
        for index, replicas in [(0, [NODE]), (1, [NODE, NODE + 1]), (0, None), (7, [NODE])]
    ]
    topic = m.AlterPartitionReassignmentsRequestTopic(name="orders", partitions=partitions)
    answer = await kafka_request(
        broker,
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        m.AlterPartitionReassignmentsRequest(topics=[topic]),
    )
    assert [p.error_code for p in answer.responses[0].partitions] == [
        ErrorCode.NONE,
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        ErrorCode.NO_REASSIGNMENT_IN_PROGRESS,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    listed = await kafka_request(
        broker,
        ApiKey.LIST_PARTITION_REASSIGNMENTS,
        m.ListPartitionReassignmentsRequest(topics=None),
    )
    assert (listed.error_code, listed.topics) == (0, [])


async def test_this_node_is_the_only_voter_of_the_metadata_quorum(broker: Broker) -> None:
    rows = [
        m.DescribeQuorumRequestTopic(
            topic_name=name, partitions=[m.DescribeQuorumRequestPartition(partition_index=0)]
        )
        for name in (METADATA_TOPIC, "orders")
    ]
    answer = await kafka_request(
        broker, ApiKey.DESCRIBE_QUORUM, m.DescribeQuorumRequest(topics=rows)
    )
    quorum, other = (topic.partitions[0] for topic in answer.topics)
    assert quorum.error_code == ErrorCode.NONE
    assert (quorum.leader_id, [v.replica_id for v in quorum.current_voters]) == (NODE, [NODE])
    assert quorum.high_watermark == quorum.current_voters[0].log_end_offset > 0
    assert other.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert [n.node_id for n in answer.nodes] == [NODE]


@pytest.mark.parametrize(
    ("version", "types", "listed"),
    [
        (0, [], []),
        (1, [], [(TOPIC, "orders"), (BROKER, None)]),
        (1, [TOPIC], [(TOPIC, "orders")]),
        (1, [GROUP, CLIENT_METRICS], []),
        (1, [BROKER], [(BROKER, None)]),
    ],
)
async def test_resources_with_settings_are_listed_by_type(
    broker: Broker, version: int, types: list[int], listed: list[tuple[int, str | None]]
) -> None:
    body = m.ListConfigResourcesRequest(resource_types=types)
    answer = await kafka_request(broker, ApiKey.LIST_CONFIG_RESOURCES, body, version)
    node = str(NODE)
    assert [(r.resource_type, r.resource_name) for r in answer.config_resources] == [
        (kind, node if name is None else name) for kind, name in listed
    ]
    assert answer.error_code == ErrorCode.NONE


async def test_an_unknown_type_of_resource_is_unsupported(broker: Broker) -> None:
    body = m.ListConfigResourcesRequest(resource_types=[TOPIC, 99])
    answer = await kafka_request(broker, ApiKey.LIST_CONFIG_RESOURCES, body)
    assert answer.error_code == ErrorCode.UNSUPPORTED_VERSION


async def test_producers_of_a_partition_are_described(broker: Broker) -> None:
    batch = batch_of(b"v", producer_id=77, producer_epoch=3, base_sequence=0)

    def produce() -> Any:
        with RawClient(broker.addresses[0].port) as client:
            return client.produce("orders", bytes(batch))

    assert (await asyncio.to_thread(produce)).error_code == ErrorCode.NONE
    rows = [
        m.DescribeProducersRequestTopic(name="orders", partition_indexes=[0, 1, 5]),
    ]
    answer = await kafka_request(
        broker, ApiKey.DESCRIBE_PRODUCERS, m.DescribeProducersRequest(topics=rows)
    )
    first, second, missing = answer.topics[0].partitions
    assert [(p.producer_id, p.producer_epoch, p.last_sequence) for p in first.active_producers] == [
        (77, 3, 0)
    ]
    assert first.active_producers[0].current_txn_start_offset == -1
    assert second.active_producers == []
    assert missing.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_producers_of_a_partition_are_described_once_however_often_it_is_named(
    broker: Broker,
) -> None:
    """25,000 rows of a partition with a thousand producers would be gigabytes."""
    row = m.DescribeProducersRequestTopic(name="orders", partition_indexes=[1, 0, 1])
    body = m.DescribeProducersRequest(topics=[row, row])
    answer = await kafka_request(broker, ApiKey.DESCRIBE_PRODUCERS, body)
    assert [[p.partition_index for p in t.partitions] for t in answer.topics] == [[1, 0]]


async def test_metadata_follows_every_change_of_a_topic_in_every_version(broker: Broker) -> None:
    topic = broker.topics.get("orders")
    assert topic is not None
    low, high = advertised_range(ApiKey.METADATA)[1:]

    async def described() -> list[list[tuple[int, int, int]]]:
        body = m.MetadataRequest(topics=[m.MetadataRequestTopic(name="orders")])
        answers = [
            await kafka_request(broker, ApiKey.METADATA, body, version) for version in (low, high)
        ]
        return [
            [(p.partition_index, p.leader_id, p.error_code) for p in answer.topics[0].partitions]
            for answer in answers
        ]

    for _ in range(2):  # the second time from the rows of the first
        assert await described() == [[(0, NODE, 0), (1, NODE, 0)]] * 2
    await broker.metadata_service.add_partitions("orders", 3)
    assert await described() == [[(0, NODE, 0), (1, NODE, 0), (2, NODE, 0)]] * 2
    partition = topic.partitions.pop(1)
    topic.offline[1] = "damaged"
    offline = (1, -1, ErrorCode.LEADER_NOT_AVAILABLE)
    assert await described() == [[(0, NODE, 0), offline, (2, NODE, 0)]] * 2
    topic.partitions[1] = partition
    del topic.offline[1]
    assert await described() == [[(0, NODE, 0), (1, NODE, 0), (2, NODE, 0)]] * 2


async def test_a_topic_is_described_once_whatever_names_stand_beside_its_id(broker: Broker) -> None:
    topic = broker.topics.get("orders")
    assert topic is not None
    rows = [m.MetadataRequestTopic(topic_id=topic.topic_id, name=f"n{n}") for n in range(3)]
    answer = await kafka_request(broker, ApiKey.METADATA, m.MetadataRequest(topics=rows))
    assert [t.name for t in answer.topics] == ["orders"]


@pytest.mark.parametrize("name", ["", None, "another name"])
async def test_a_topic_is_described_by_its_id_whatever_name_stands_beside_it(
    broker: Broker, name: str | None
) -> None:
    topic = broker.topics.get("orders")
    assert topic is not None
    metadata_request_topic = m.MetadataRequestTopic(topic_id=topic.topic_id, name=name)
    answer = await kafka_request(
        broker, ApiKey.METADATA, m.MetadataRequest(topics=[metadata_request_topic])
    )
    assert [(t.error_code, t.name) for t in answer.topics] == [(ErrorCode.NONE, "orders")]
    metadata_request_topic.topic_id = bytes(range(16))
    answer = await kafka_request(
        broker, ApiKey.METADATA, m.MetadataRequest(topics=[metadata_request_topic])
    )
    assert [(t.error_code, t.topic_id) for t in answer.topics] == [
        (ErrorCode.UNKNOWN_TOPIC_ID, bytes(range(16)))
    ]


@pytest.mark.parametrize("version", [10, 11])
@pytest.mark.parametrize(("has_id", "name"), [(False, None), (True, "orders"), (True, None)])
async def test_versions_10_and_11_describe_topics_by_name_only(
    broker: Broker, version: int, has_id: bool, name: str | None
) -> None:
    """As in Kafka: their requests have a field for the id, and their answers need a name."""
    topic = broker.topics.get("orders")
    assert topic is not None
    odd = m.MetadataRequestTopic(topic_id=topic.topic_id if has_id else bytes(16), name=name)
    request = m.MetadataRequest(topics=[m.MetadataRequestTopic(name="orders"), odd])
    answer = await kafka_request(broker, ApiKey.METADATA, request, version)
    assert {row.error_code for row in answer.topics} == {ErrorCode.INVALID_REQUEST}
    assert [row.name for row in answer.topics] == ["orders", name or ""]


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("num.io.threads", "9", ErrorCode.NONE),
        ("log.cleaner.threads", "abc", ErrorCode.INVALID_REQUEST),
        ("log.segment.bytes", "-1", ErrorCode.INVALID_REQUEST),
        ("log.dirs", "/x", ErrorCode.INVALID_REQUEST),
        ("log.cleanup.policy", "foo", ErrorCode.INVALID_REQUEST),
        ("no.such.key", "1", ErrorCode.INVALID_REQUEST),
    ],
)
async def test_broker_settings_are_altered_or_refused_with_kafkas_codes(
    broker: Broker, key: str, value: str, code: ErrorCode
) -> None:
    assert await alter_broker(broker, key, value) == code


async def alter_broker(broker: Broker, key: str, value: str | None) -> int:
    """Set a key of the broker, or delete it if `value` is None. -> the error code"""
    config = m.IncrementalAlterConfigsRequestConfig(
        name=key, config_operation=DELETE if value is None else SET, value=value
    )
    resource = m.IncrementalAlterConfigsRequestResource(
        resource_type=BROKER, resource_name=str(NODE), configs=[config]
    )
    body = m.IncrementalAlterConfigsRequest(resources=[resource])
    answer = await kafka_request(broker, ApiKey.INCREMENTAL_ALTER_CONFIGS, body)
    return int(answer.responses[0].error_code)


@pytest.mark.parametrize("key", ["max.connections", "max.connections.per.ip"])
async def test_an_altered_limit_of_connections_holds_for_the_next_one_and_after_a_restart(
    key: str,
) -> None:
    env = MemoryEnv(seed=11)
    async with broker_in_memory(env) as broker:
        with await connected(broker) as first, await connected(broker) as second:
            assert await alter_broker(broker, key, "2") == ErrorCode.NONE
            with pytest.raises(ConnectionError):
                await connected(broker)
            for client in (first, second):  # those that are open stay open
                await asyncio.to_thread(
                    client.request, ApiKey.METADATA, 12, m.MetadataRequest(topics=[])
                )
    async with broker_in_memory(env) as broker:
        with await connected(broker):
            with await connected(broker), pytest.raises(ConnectionError):
                await connected(broker)
            await asyncio.to_thread(
                wait_until, lambda: len(broker.listener.connections) < 2, "gone"
            )
            assert await alter_broker(broker, key, None) == ErrorCode.NONE
            with await connected(broker), await connected(broker):
                pass


async def connected(broker: Broker) -> RawClient:
    """A client that has been answered once. ConnectionError if the broker closes the connection."""

    def connect() -> RawClient:
        client = RawClient(broker.addresses[0].port)
        try:
            client.request(ApiKey.METADATA, 12, m.MetadataRequest(topics=[]))
        except ConnectionError:
            client.socket.close()
            raise
        return client

    return await asyncio.to_thread(connect)


async def test_nobody_can_set_the_limit_of_connections_to_none(broker: Broker) -> None:
    for key in ("max.connections", "max.connections.per.ip"):
        assert await alter_broker(broker, key, "0") == ErrorCode.INVALID_REQUEST


async def test_an_altered_expiration_of_producers_holds_at_the_next_round() -> None:
    env = MemoryEnv(seed=11)
    key = "producer.id.expiration.ms"
    async with broker_in_memory(env, topics={"orders": {}}) as broker:
        partition = broker.topics.partition(TopicPartition("orders", 0))
        assert partition is not None

        async def append_and_expire(producer_id: int) -> list[int]:
            batch = bytes(
                batch_of(b"v", producer_id=producer_id, producer_epoch=0, base_sequence=0)
            )
            with RawClient(broker.addresses[0].port) as client:
                await asyncio.to_thread(client.produce, "orders", batch)
            env.advance_ms(60_000)
            await broker.log_maintenance.expire_producers()
            return [entry.producer_id for entry in partition.log.producers.states.producers]

        assert await append_and_expire(1) == [1]
        assert await alter_broker(broker, key, "90000") == ErrorCode.NONE
        assert await append_and_expire(2) == [2]
        assert await alter_broker(broker, key, None) == ErrorCode.NONE
        assert await append_and_expire(3) == [2, 3]


THROTTLED = "follower.replication.throttled.replicas"


async def alter(broker: Broker, operation: int, *values: str) -> int:
    """Change the list of throttled replicas, and settings that do not exist."""
    names = [THROTTLED, *(f"unknown{number}" for number in range(1, len(values)))]
    changes = [
        m.IncrementalAlterConfigsRequestConfig(name=name, config_operation=operation, value=value)
        for name, value in zip(names, values, strict=True)
    ]
    resource = m.IncrementalAlterConfigsRequestResource(
        resource_type=TOPIC, resource_name="orders", configs=changes
    )
    body = m.IncrementalAlterConfigsRequest(resources=[resource])
    answer = await kafka_request(broker, ApiKey.INCREMENTAL_ALTER_CONFIGS, body)
    return int(answer.responses[0].error_code)


def pairs(first: int, count: int) -> str:
    return ",".join(f"{number}:1" for number in range(first, first + count))


class Unread(list[Any]):
    """Rows that nobody may look at."""

    def __iter__(self) -> Iterator[Any]:
        pytest.fail("a row is read")
        yield


async def test_rows_above_the_limit_of_settings_are_counted_but_not_read() -> None:
    services = SimpleNamespace(metadata_service=None)
    context: Any = SimpleNamespace(may_topic=lambda *_: True, services=services)
    header: Any = None
    rows = Unread([None] * (SETTINGS_PER_RESOURCE_MAX + 1))
    altered = m.AlterConfigsRequestResource(resource_type=TOPIC, resource_name="t", configs=rows)
    changed = m.IncrementalAlterConfigsRequestResource(
        resource_type=TOPIC, resource_name="t", configs=rows
    )
    answers: list[m.AlterConfigsResponse | m.IncrementalAlterConfigsResponse] = [
        await alter_configs(context, header, m.AlterConfigsRequest(resources=[altered])),
        await incremental_alter_configs(
            context, header, m.IncrementalAlterConfigsRequest(resources=[changed])
        ),
    ]
    assert [answer.responses[0].error_code for answer in answers] == [ErrorCode.INVALID_REQUEST] * 2


async def test_more_settings_than_a_resource_can_have_are_refused_before_any_is_looked_at(
    broker: Broker,
) -> None:
    assert await alter(broker, SET, *["0:1"] * 1_000) == ErrorCode.INVALID_CONFIG
    assert await alter(broker, SET, *["0:1"] * 1_001) == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("api", [ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS])
async def test_an_ambiguous_change_of_settings_is_refused(broker: Broker, api: ApiKey) -> None:
    """As in Kafka: a setting or a resource that is named twice, a setting without a value."""
    name = api.name.title().replace("_", "")
    request, resource, config = (
        getattr(m, f"{name}Request{part}") for part in ("", "Resource", "Config")
    )

    async def alter_orders(*resources: list[tuple[str, str | None]]) -> list[int]:
        rows = [
            resource(
                resource_type=TOPIC,
                resource_name="orders",
                configs=[config(name=key, value=value) for key, value in changes],
            )
            for changes in resources
        ]
        answer = await kafka_request(broker, api, request(resources=rows))
        return [row.error_code for row in answer.responses]

    first, second, empty = ("retention.ms", "1"), ("retention.ms", "2"), ("segment.ms", None)
    refused = ErrorCode.INVALID_REQUEST
    assert await alter_orders([first, second]) == [refused]
    assert await alter_orders([first], [second]) == [refused] * 2
    assert await alter_orders([first, empty]) == [refused]
    assert broker.topics.existing("orders").config == TopicConfig()
    assert await alter_orders([first]) == [ErrorCode.NONE]


def throttled(broker: Broker) -> str | None:
    return broker.topics.existing("orders").layers.dynamic.get(THROTTLED)


async def test_a_list_grows_by_appending_to_the_bytes_that_a_topic_may_have(broker: Broker) -> None:
    assert await alter(broker, SET, pairs(0, 600)) == ErrorCode.NONE
    assert await alter(broker, APPEND, pairs(500, 180)) == ErrorCode.NONE
    assert await alter(broker, APPEND, pairs(10_000, 20)) == ErrorCode.INVALID_CONFIG
    assert throttled(broker) == pairs(0, 680)
    assert await alter(broker, SUBTRACT, pairs(1, 679)) == ErrorCode.NONE
    assert throttled(broker) == "0:1"


@pytest.mark.parametrize("api", [ApiKey.CREATE_TOPICS, ApiKey.ALTER_CONFIGS])
async def test_settings_that_take_more_bytes_than_a_topic_may_have_are_refused(
    broker: Broker, api: ApiKey
) -> None:
    body: m.Message
    if api == ApiKey.CREATE_TOPICS:
        created = m.CreateTopicsRequestConfig(name=THROTTLED, value=pairs(0, 1_000))
        topic = m.CreateTopicsRequestTopic(name="new", num_partitions=1, replication_factor=1)
        topic.configs = [created]
        body = m.CreateTopicsRequest(topics=[topic])
    else:
        altered = m.AlterConfigsRequestConfig(name=THROTTLED, value=pairs(0, 1_000))
        resource = m.AlterConfigsRequestResource(
            resource_type=TOPIC, resource_name="orders", configs=[altered]
        )
        body = m.AlterConfigsRequest(resources=[resource])
    answer = await kafka_request(broker, api, body)
    (row,) = answer.topics if api == ApiKey.CREATE_TOPICS else answer.responses
    size_bytes = len(json.dumps({THROTTLED: pairs(0, 1_000)}))
    assert (row.error_code, row.error_message) == (
        ErrorCode.INVALID_CONFIG,
        f"the settings of the topic would take {size_bytes} bytes, at most 4096 are allowed: "
        f"shorten {THROTTLED}",
    )


async def test_longer_settings_of_an_older_version_stay_and_may_become_shorter() -> None:
    env, longest = MemoryEnv(seed=11), pairs(0, 3_000)
    async with broker_in_memory(env) as broker:
        await broker.metadata_service.create("orders", 1, {THROTTLED: longest})
    async with broker_in_memory(env) as broker:
        assert throttled(broker) == longest
        assert await alter(broker, APPEND, "9999:1") == ErrorCode.INVALID_CONFIG
        assert await alter(broker, SUBTRACT, pairs(0, 1_000)) == ErrorCode.NONE
        assert throttled(broker) == pairs(1_000, 2_000)


async def test_more_of_settings_than_a_turn_may_parse_is_refused(broker: Broker) -> None:
    longest = pairs(10_000, 4_000)
    assert await alter(broker, SET, *[longest] * 4) == ErrorCode.INVALID_CONFIG  # parsed
    assert await alter(broker, SET, *[longest] * 5) == ErrorCode.INVALID_REQUEST


async def describe(broker: Broker, kind: int, name: str) -> tuple[int, dict[str, str | None]]:
    row = m.DescribeConfigsRequestResource(
        resource_type=kind, resource_name=name, configuration_keys=None
    )
    body = m.DescribeConfigsRequest(resources=[row], include_synonyms=True)
    (result,) = (await kafka_request(broker, ApiKey.DESCRIBE_CONFIGS, body, version=4)).results
    assert all(config.read_only for config in result.configs)
    return result.error_code, {config.name: config.value for config in result.configs}


async def test_groups_have_the_settings_of_the_broker_and_loggers_its_level() -> None:
    groups = {"consumer_session_timeout_ms": 50_000, "consumer_heartbeat_interval_ms": 6_000}
    env = MemoryEnv(seed=12)
    async with broker_in_memory(env, groups=groups, logging={"level": "warning"}) as broker:
        assert await describe(broker, GROUP, "billing") == (
            ErrorCode.NONE,
            {"consumer.session.timeout.ms": "50000", "consumer.heartbeat.interval.ms": "6000"},
        )
        levels = {"root": "WARN"}
        assert await describe(broker, BROKER_LOGGER, str(NODE)) == (ErrorCode.NONE, levels)
        code, metrics = await describe(broker, CLIENT_METRICS, "mine")
        assert (code, metrics["metrics"]) == (ErrorCode.NONE, "")
        for kind, name in ((GROUP, ""), (BROKER_LOGGER, "7"), (CLIENT_METRICS, ""), (64, "x")):
            assert (await describe(broker, kind, name))[0] == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("version", [12, 17])
async def test_a_fetch_of_another_broker_gets_no_records(broker: Broker, version: int) -> None:
    """It may read beyond the high watermark in Kafka; here is no other broker."""
    topic = broker.topics.get("orders")
    assert topic is not None
    names = {"topic": topic.name} if version == 12 else {"topic_id": topic.topic_id}
    row = m.FetchRequestTopic(
        partitions=[m.FetchRequestPartition(partition=0, partition_max_bytes=1_000)], **names
    )
    body = m.FetchRequest(max_wait_ms=0, max_bytes=1_000, session_epoch=-1, topics=[row])
    if version == 12:
        body.replica_id = 7
    else:
        body.replica_state = m.FetchRequestReplicaState(replica_id=7, replica_epoch=-1)
    response = await kafka_request(broker, ApiKey.FETCH, body, version)
    (fetched,) = response.responses[0].partitions
    assert fetched.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
