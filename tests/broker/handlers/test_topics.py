"""CreateTopics: one result for each row of the request."""

import errno
from typing import Any

import pytest

from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from tests.support.broker.broker_in_memory import broker_in_memory, kafka_request
from tests.support.storage.memory_env import MemoryEnv


def row(name: str, **configs: str) -> m.CreateTopicsRequestTopic:
    return m.CreateTopicsRequestTopic(
        name=name,
        num_partitions=1,
        replication_factor=1,
        configs=[
            m.CreateTopicsRequestConfig(name=key.replace("_", "."), value=value)
            for key, value in configs.items()
        ],
    )


async def test_results_of_created_and_refused_topics_are_in_the_order_of_the_request() -> None:
    env = MemoryEnv(seed=1)
    async with broker_in_memory(env, limits={"partitions": 4}) as broker:
        await broker.metadata_service.create("present", 1, {})
        env.fail_on(lambda op, path: op == "mkdir" and "no-room-0" in path, errno.ENOSPC)
        rows = [
            row("no-room"),
            row("orders.compacted"),
            row("orders", cleanup_policy="compact", varve_view="compacted"),
            row("twice"),
            row("audit", retention_ms="1000"),
            row("wrong", retention_ms="soon"),
            row("present"),
            row("twice"),
            row("payments"),
            row("one-too-many"),
        ]
        answer: Any = await kafka_request(
            broker, ApiKey.CREATE_TOPICS, m.CreateTopicsRequest(topics=rows)
        )
        assert [(topic.name, topic.error_code) for topic in answer.topics] == [
            ("no-room", ErrorCode.KAFKA_STORAGE_ERROR),
            ("orders.compacted", ErrorCode.INVALID_TOPIC_EXCEPTION),
            ("orders", ErrorCode.NONE),
            ("twice", ErrorCode.INVALID_REQUEST),
            ("audit", ErrorCode.NONE),
            ("wrong", ErrorCode.INVALID_CONFIG),
            ("present", ErrorCode.TOPIC_ALREADY_EXISTS),
            ("payments", ErrorCode.NONE),
            ("one-too-many", ErrorCode.INVALID_PARTITIONS),
        ]
        audit = answer.topics[4]
        assert audit.topic_id == broker.topics.existing("audit").topic_id
        assert (audit.num_partitions, audit.replication_factor) == (1, 1)
        assert {config.name: config.value for config in audit.configs}["retention.ms"] == "1000"
        assert broker.views.get("orders.compacted") is not None


async def test_a_topic_that_a_request_names_twice_is_not_deleted() -> None:
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        topics = {name: await broker.metadata_service.create(name, 1, {}) for name in ("a", "b")}
        ids = {name: topic.topic_id for name, topic in topics.items()}
        both = [
            m.DeleteTopicsRequestTopic(name="a"),
            m.DeleteTopicsRequestTopic(name=None, topic_id=ids["a"]),
            m.DeleteTopicsRequestTopic(name="b"),
        ]
        for version, body in (
            (6, m.DeleteTopicsRequest(topics=both)),
            (5, m.DeleteTopicsRequest(topic_names=["a", "b", "a"])),
        ):
            answer: Any = await kafka_request(broker, ApiKey.DELETE_TOPICS, body, version)
            codes = [(row.name, row.error_code) for row in answer.responses]
            b_code = ErrorCode.NONE if version == 6 else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            assert sorted(set(codes)) == [("a", ErrorCode.INVALID_REQUEST), ("b", b_code)]
            assert "a" in broker.topics


async def test_a_topic_that_exists_is_reported_before_any_other_error() -> None:
    """Programs that create their topics at each start ignore this error only."""
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        await broker.metadata_service.create("a", 1, {})
        no_partitions = m.CreateTopicsRequestTopic(name="a", num_partitions=0)
        for wrong in (row("a", retention_ms="soon"), no_partitions):
            answer: Any = await kafka_request(
                broker, ApiKey.CREATE_TOPICS, m.CreateTopicsRequest(topics=[wrong])
            )
            assert answer.topics[0].error_code == ErrorCode.TOPIC_ALREADY_EXISTS


async def test_a_topic_that_a_request_names_twice_gets_no_partitions() -> None:
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        await broker.metadata_service.create("a", 1, {})
        topics = [m.CreatePartitionsRequestTopic(name="a", count=count) for count in (2, 3)]
        answer: Any = await kafka_request(
            broker, ApiKey.CREATE_PARTITIONS, m.CreatePartitionsRequest(topics=topics)
        )
        assert [row.error_code for row in answer.results] == [ErrorCode.INVALID_REQUEST]
        assert broker.topics.existing("a").partition_count == 1


async def test_validate_only_checks_each_topic_alone() -> None:
    async with broker_in_memory(MemoryEnv(seed=2), limits={"partitions": 1}) as broker:
        before = broker.manager.metadata
        request = m.CreateTopicsRequest(topics=[row("a"), row("b")], validate_only=True)
        answer: Any = await kafka_request(broker, ApiKey.CREATE_TOPICS, request)
        assert [(topic.error_code, topic.num_partitions) for topic in answer.topics] == [(0, 1)] * 2
        assert broker.manager.metadata is before


@pytest.mark.parametrize(
    ("assigned", "expected"),
    [
        ([(0, [1]), (1, [1])], ErrorCode.NONE),
        ([(1, [1]), (0, [1])], ErrorCode.NONE),
        ([(0, [1]), (0, [1])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([(0, [1]), (2, [1])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([(-1, [1]), (0, [1])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([(0, [1]), (1, [1, 2])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    ],
)
async def test_an_assignment_names_each_partition_of_a_new_topic_once(
    assigned: list[tuple[int, list[int]]], expected: ErrorCode
) -> None:
    rows = [
        m.CreateTopicsRequestAssignment(partition_index=index, broker_ids=nodes)
        for index, nodes in assigned
    ]
    topic = m.CreateTopicsRequestTopic(
        name="a", num_partitions=-1, replication_factor=-1, assignments=rows
    )
    async with broker_in_memory(MemoryEnv(seed=2)) as broker:
        request = m.CreateTopicsRequest(topics=[topic], validate_only=True)
        answer: Any = await kafka_request(broker, ApiKey.CREATE_TOPICS, request)
        assert answer.topics[0].error_code == expected


async def test_an_assignment_names_each_added_partition() -> None:
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        await broker.metadata_service.create("orders", 1, {})

        async def grow(total: int, assigned: int) -> int:
            assignment = m.CreatePartitionsRequestAssignment(broker_ids=[1])
            topic = m.CreatePartitionsRequestTopic(
                name="orders", count=total, assignments=[assignment] * assigned
            )
            answer: Any = await kafka_request(
                broker, ApiKey.CREATE_PARTITIONS, m.CreatePartitionsRequest(topics=[topic])
            )
            return int(answer.results[0].error_code)

        refused = ErrorCode.INVALID_REPLICA_ASSIGNMENT
        assert [await grow(3, 1), await grow(3, 3)] == [refused, refused]
        assert broker.topics.existing("orders").partition_count == 1
        assert await grow(3, 2) == ErrorCode.NONE
