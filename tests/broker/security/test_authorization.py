"""Authorisation through the APIs: what a principal may do, and what it learns otherwise."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from broker.app import Broker
from broker.handlers.security.acl_changes import AclChanges
from broker.security.acls import Operation, PatternType, Permission, ResourceType
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.directory.security_entries import AclEntry
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.principals import PrincipalClient
from tests.support.protocol.raw_client import fetch_request, produce_request
from tests.support.protocol.requests import advertised_range
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv

AUTHORIZATION = {"enabled": True, "super_users": ["User:root"]}
DENIED = ErrorCode.TOPIC_AUTHORIZATION_FAILED


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with broker_in_memory(MemoryEnv(seed=5), authorization=AUTHORIZATION) as broker:
        await broker.metadata_service.create("orders", 2, {"varve.view": "compacted"})
        await broker.metadata_service.create("secret", 1, {})
        yield broker


async def allow(broker: Broker, operation: Operation, topic: str, principal: str = "ann") -> None:
    acl = AclEntry(
        ResourceType.TOPIC,
        PatternType.LITERAL,
        topic,
        f"User:{principal}",
        "*",
        operation,
        Permission.ALLOW,
    )
    changes = AclChanges(broker.metadata_writer, broker._services.authorizer)
    assert await changes.add([acl]) == [None]


async def newest(client: PrincipalClient, key: ApiKey, body: m.Message) -> Any:
    return await client.request(key, advertised_range(key).max_version, body)


async def test_a_client_sees_only_the_topics_that_it_may_describe(broker: Broker) -> None:
    ann = PrincipalClient(broker, "ann")
    await allow(broker, Operation.READ, "orders")
    everything = await newest(ann, ApiKey.METADATA, m.MetadataRequest(topics=None))
    assert [topic.name for topic in everything.topics] == ["orders", "orders.compacted"]
    for name in ("secret", "secret.compacted", "missing"):
        rows = [m.MetadataRequestTopic(name=name)]
        named = await newest(ann, ApiKey.METADATA, m.MetadataRequest(topics=rows))
        assert [(t.name, t.error_code, t.partitions) for t in named.topics] == [(name, DENIED, [])]
    listed = await newest(
        ann,
        ApiKey.DESCRIBE_TOPIC_PARTITIONS,
        m.DescribeTopicPartitionsRequest(response_partition_limit=2),
    )
    assert [topic.name for topic in listed.topics] == ["orders"]
    assert listed.next_cursor.topic_name == "orders.compacted"  # and not a topic of others


@pytest.mark.parametrize("is_permitted", [False, True])
async def test_a_cursor_at_a_topic_that_is_not_described_skips_no_partition_of_the_next_one(
    broker: Broker, is_permitted: bool
) -> None:
    ann = PrincipalClient(broker, "ann")
    await allow(broker, Operation.DESCRIBE, "orders")
    if is_permitted:
        await allow(broker, Operation.DESCRIBE, "deleted")
    body = m.DescribeTopicPartitionsRequest(
        topics=[m.DescribeTopicPartitionsRequestTopic(name=name) for name in ("deleted", "orders")],
        response_partition_limit=10,
        cursor=m.DescribeTopicPartitionsRequestCursor(topic_name="deleted", partition_index=1),
    )
    answer = await newest(ann, ApiKey.DESCRIBE_TOPIC_PARTITIONS, body)
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if is_permitted else DENIED
    assert [(t.name, t.error_code) for t in answer.topics] == [("deleted", unknown), ("orders", 0)]
    assert [row.partition_index for row in answer.topics[1].partitions] == [0, 1]


@pytest.mark.parametrize(
    ("requested", "cursor"),
    [(("orders",), ("orders", -1)), (("orders", "secret"), ("deleted", 0)), ((), ("orders", -5))],
)
async def test_a_cursor_that_no_response_has_named_is_refused(
    broker: Broker, requested: tuple[str, ...], cursor: tuple[str, int]
) -> None:
    """As in Kafka: each requested topic gets the error."""
    ann = PrincipalClient(broker, "ann")
    await allow(broker, Operation.DESCRIBE, "orders")
    name, index = cursor
    body = m.DescribeTopicPartitionsRequest(
        topics=[m.DescribeTopicPartitionsRequestTopic(name=topic) for topic in requested],
        response_partition_limit=10,
        cursor=m.DescribeTopicPartitionsRequestCursor(topic_name=name, partition_index=index),
    )
    answer = await newest(ann, ApiKey.DESCRIBE_TOPIC_PARTITIONS, body)
    assert [(t.name, t.error_code) for t in answer.topics] == [
        (topic, ErrorCode.INVALID_REQUEST) for topic in requested
    ]


async def test_a_topic_is_created_on_first_use_by_those_who_may_create_it(broker: Broker) -> None:
    ann = PrincipalClient(broker, "ann")
    body = m.MetadataRequest(topics=[m.MetadataRequestTopic(name="new")])
    await allow(broker, Operation.DESCRIBE, "new")
    assert (await newest(ann, ApiKey.METADATA, body)).topics[0].error_code == DENIED
    assert broker.topics.get("new") is None
    await allow(broker, Operation.CREATE, "new")
    assert (await newest(ann, ApiKey.METADATA, body)).topics[0].error_code == ErrorCode.NONE


def produced(topic: str, transactional_id: str | None = None) -> m.ProduceRequest:
    body = produce_request(topic, bytes(batch_of(b"v")))
    body.transactional_id = transactional_id
    return body


def error_of(response: m.ProduceResponse | m.FetchResponse) -> int:
    topic = response.responses[0]
    rows = topic.partitions if isinstance(response, m.FetchResponse) else topic.partition_responses
    return int(rows[0].error_code)


async def test_a_view_is_read_with_the_permission_of_its_topic(broker: Broker) -> None:
    ann = PrincipalClient(broker, "ann")
    body = fetch_request("orders.compacted")
    denied = await ann.request(ApiKey.FETCH, 12, body)
    assert error_of(denied) == DENIED
    await allow(broker, Operation.READ, "orders")
    answer = await ann.request(ApiKey.FETCH, 12, body)
    assert error_of(answer) == ErrorCode.NONE


async def test_producing_needs_the_topic_and_the_transactional_id(broker: Broker) -> None:
    ann = PrincipalClient(broker, "ann")
    for topic in ("orders", "missing"):
        answer = await ann.request(ApiKey.PRODUCE, 9, produced(topic))
        assert error_of(answer) == DENIED
    await allow(broker, Operation.WRITE, "orders")
    answer = await ann.request(ApiKey.PRODUCE, 9, produced("orders"))
    assert error_of(answer) == ErrorCode.NONE
    answer = await ann.request(ApiKey.PRODUCE, 9, produced("orders", "tx"))
    code = error_of(answer)
    assert code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


async def test_a_topic_id_tells_nothing_about_partitions(broker: Broker) -> None:
    ann, topic = PrincipalClient(broker, "ann"), broker.topics.get("secret")
    assert topic is not None
    for index in (0, 7):
        body = fetch_request("", partition=index)
        body.topics[0].topic_id = topic.topic_id
        answer = await ann.request(ApiKey.FETCH, 17, body)
        assert error_of(answer) == DENIED


async def test_acls_are_managed_by_those_who_may_alter_the_cluster(broker: Broker) -> None:
    ann, root = PrincipalClient(broker, "ann"), PrincipalClient(broker, "root")
    creations = [
        m.CreateAclsRequestCreation(
            resource_type=ResourceType.TOPIC,
            resource_name=name,
            principal="User:ann",
            host="*",
            operation=Operation.READ,
            permission_type=Permission.ALLOW,
        )
        for name in ("orders", "", "orders")
    ]
    everything = m.DescribeAclsRequest(
        resource_type_filter=ResourceType.ANY,
        pattern_type_filter=PatternType.ANY,
        resource_name_filter=None,
        principal_filter=None,
        host_filter=None,
        operation=Operation.ANY,
        permission_type=Permission.ANY,
    )
    create = m.CreateAclsRequest(creations=creations)
    refused = await newest(ann, ApiKey.CREATE_ACLS, create)
    assert {r.error_code for r in refused.results} == {ErrorCode.CLUSTER_AUTHORIZATION_FAILED}
    created = await newest(root, ApiKey.CREATE_ACLS, create)
    assert [r.error_code for r in created.results] == [0, ErrorCode.INVALID_REQUEST, 0]
    refused = await newest(ann, ApiKey.DESCRIBE_ACLS, everything)
    assert refused.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    described = await newest(root, ApiKey.DESCRIBE_ACLS, everything)
    assert [(r.resource_name, len(r.acls)) for r in described.resources] == [("orders", 1)]
    rows = [
        m.DeleteAclsRequestFilter(
            resource_type_filter=kind,
            pattern_type_filter=PatternType.MATCH,
            resource_name_filter="orders",
            principal_filter=None,
            host_filter=None,
            operation=Operation.ANY,
            permission_type=Permission.ANY,
        )
        for kind in (ResourceType.TOPIC, 0)
    ]
    deletion = m.DeleteAclsRequest(filters=rows)
    refused = await newest(ann, ApiKey.DELETE_ACLS, deletion)
    assert {r.error_code for r in refused.filter_results} == {
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    }
    deleted = await newest(root, ApiKey.DELETE_ACLS, deletion)
    assert [(r.error_code, len(r.matching_acls)) for r in deleted.filter_results] == [
        (0, 1),
        (ErrorCode.INVALID_REQUEST, 0),
    ]
    assert broker.manager.metadata.acls == ()


async def test_acls_are_in_force_after_a_restart() -> None:
    env = MemoryEnv(seed=6)
    for is_allowed in (False, True):
        async with broker_in_memory(env, authorization=AUTHORIZATION) as broker:
            if not is_allowed:
                await broker.metadata_service.create("orders", 1, {})
            ann = PrincipalClient(broker, "ann")
            answer = await ann.request(ApiKey.PRODUCE, 9, produced("orders"))
            error = error_of(answer)
            assert error == (ErrorCode.NONE if is_allowed else DENIED)
            await allow(broker, Operation.WRITE, "orders")


async def test_without_an_authorizer_the_acl_apis_are_disabled() -> None:
    async with broker_in_memory(MemoryEnv(seed=7)) as broker:
        ann = PrincipalClient(broker, "ann")
        body = m.DescribeAclsRequest(operation=Operation.ANY, permission_type=Permission.ANY)
        answer = await newest(ann, ApiKey.DESCRIBE_ACLS, body)
        assert answer.error_code == ErrorCode.SECURITY_DISABLED
        body = m.CreateAclsRequest(creations=[m.CreateAclsRequestCreation()])
        answer = await newest(ann, ApiKey.CREATE_ACLS, body)
        assert [r.error_code for r in answer.results] == [ErrorCode.SECURITY_DISABLED]
        body = m.DeleteAclsRequest(filters=[m.DeleteAclsRequestFilter()])
        answer = await newest(ann, ApiKey.DELETE_ACLS, body)
        assert [r.error_code for r in answer.filter_results] == [ErrorCode.SECURITY_DISABLED]
