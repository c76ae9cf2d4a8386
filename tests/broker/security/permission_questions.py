"""Questions about permissions: every API, asked by users with one permission, or all but one.

The same questions go to Kafka (record_permissions.py) and to a broker in memory. An answer is the
part of a response that depends on permissions: error codes, names and permitted operations.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from broker.security.acls import Operation, PatternType, Permission, ResourceType
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.messages import Message
from storage.directory.security_entries import AclEntry
from storage.format.batch import TRANSACTIONAL
from tests.support.requests import advertised_range
from tests.support.storage.logs import batch_of

# Entries of these operations are possible for a resource; Kafka's tools offer the same.
PERMISSIONS: Final[Mapping[ResourceType, tuple[Operation, ...]]] = {
    ResourceType.TOPIC: (
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.ALL,
    ),
    ResourceType.GROUP: (
        Operation.READ,
        Operation.DELETE,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.ALL,
    ),
    ResourceType.CLUSTER: (
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.CLUSTER_ACTION,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.IDEMPOTENT_WRITE,
        Operation.ALL,
    ),
    ResourceType.TRANSACTIONAL_ID: (
        Operation.WRITE,
        Operation.DESCRIBE,
        Operation.TWO_PHASE_COMMIT,
        Operation.ALL,
    ),
}
SUPER_USER: Final = "root"
EVERY_RESOURCE: Final = dict.fromkeys(PERMISSIONS, "*") | {ResourceType.CLUSTER: "kafka-cluster"}
PREFIXES: Final = {
    ResourceType.TOPIC: "ord",
    ResourceType.GROUP: "billing",
    ResourceType.TRANSACTIONAL_ID: "tx-",
}
OTHER_PREFIXES: Final = dict.fromkeys(PREFIXES, "orders-of-others")  # longer than the names
TOPIC: Final = "orders"
CREATED: Final = ("victim", "other-victim")  # topics of each user, which it tries to delete
GROUP: Final = "billing"  # a classic group with committed offsets of both partitions
MODERN_GROUP: Final = "modern"  # a group of the consumer protocol with a member
MODERN_MEMBER: Final = "member-of-modern-00000"
NO_SESSION: Final = -1


def users() -> Iterator[tuple[str, list[AclEntry]]]:
    """Yield each user with its entries."""
    everything = [(kind, Operation.ALL) for kind in PERMISSIONS]
    yield "none", []
    yield "all", [_entry("all", kind, operation) for kind, operation in everything]
    for kind, operations in PERMISSIONS.items():
        for operation in operations:
            name = f"only-{kind.name}-{operation.name}"
            yield name, [_entry(name, kind, operation)]
            name = f"not-{kind.name}-{operation.name}"
            yield (
                name,
                [
                    *(_entry(name, *permission) for permission in everything),
                    _entry(name, kind, operation, Permission.DENY),
                ],
            )

    yield from _users_of_prefixes()
    yield from _users_of_hosts()


def _users_of_prefixes() -> Iterator[tuple[str, list[AclEntry]]]:
    """Yield users with entries for prefixes of the names in questions, or of other names."""
    everything = [(kind, Operation.ALL) for kind in PERMISSIONS]
    asked = [kind for kind in PERMISSIONS if kind is not ResourceType.CLUSTER]
    for name, prefixes in (("prefixes", PREFIXES), ("other-prefixes", OTHER_PREFIXES)):
        yield name, [_entry(name, kind, Operation.ALL, prefix=prefixes[kind]) for kind in asked]
        name = f"not-{name}"
        denials = [
            _entry(name, kind, Operation.ALL, Permission.DENY, prefix=prefixes[kind])
            for kind in asked
        ]
        yield name, [*(_entry(name, *permission) for permission in everything), *denials]


def _users_of_hosts() -> Iterator[tuple[str, list[AclEntry]]]:
    """Yield users whose entries are for the address that they ask from, or for another one."""
    everything = [(kind, Operation.ALL) for kind in PERMISSIONS]
    for name, host in (("host", "127.0.0.1"), ("other-host", "10.9.9.9")):
        yield name, [_entry(name, *permission, host=host) for permission in everything]
        name = f"not-{name}"
        denials = [_entry(name, *p, Permission.DENY, host=host) for p in everything]
        yield name, [*(_entry(name, *permission) for permission in everything), *denials]


def _entry(
    user: str,
    kind: ResourceType,
    operation: Operation,
    permission: Permission = Permission.ALLOW,
    *,
    prefix: str | None = None,
    host: str = "*",
) -> AclEntry:
    return AclEntry(
        resource_type=kind,
        pattern_type=PatternType.LITERAL if prefix is None else PatternType.PREFIXED,
        resource_name=EVERY_RESOURCE[kind] if prefix is None else prefix,
        principal=f"User:{user}",
        host=host,
        operation=operation,
        permission=permission,
    )


def victims(user: str) -> list[str]:
    """Return the names of the topics of a user."""
    return [f"{name}-{user}" for name in CREATED]


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks, and the ids of topics, which differ between brokers."""

    user: str
    topic_ids: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Question:
    """One request, which `make` builds."""

    name: str
    key: ApiKey
    version: int
    make: Callable[[Asked], Message]


_QUESTIONS: list[Question] = []


def _question(
    key: ApiKey, version: int | None = None
) -> Callable[[Callable[[Asked], Message]], Callable[[Asked], Message]]:
    newest = advertised_range(key).max_version if version is None else version

    def register(make: Callable[[Asked], Message]) -> Callable[[Asked], Message]:
        label = make.__name__.replace("_", " ")
        _QUESTIONS.append(Question(f"{label} (version {newest})", key, newest, make))
        return make

    return register


def questions() -> tuple[Question, ...]:
    """Return all questions in the order in which each user asks them."""
    return tuple(_QUESTIONS)


# Rows that depend on the broker, not on permissions.
NOT_COMPARED: Final = frozenset(
    {"brokers", "nodes", "node_endpoints", "configs", "api_keys", "credential_infos", "voters"}
)
NAMES: Final = frozenset(
    {"name", "topic_name", "topic", "group_id", "transactional_id", "resource_name", "key"}
)


def digest(message: Message) -> dict[str, Any]:
    """Return what depends on permissions, as JSON values."""
    result: dict[str, Any] = {}
    for field in type(message).__slots__:
        value = getattr(message, field)
        if field.endswith(("error_code", "authorized_operations")):
            result[field] = int(value)
        elif field in NAMES and isinstance(value, str) and value:
            result[field] = value
        elif isinstance(value, list) and field not in NOT_COMPARED:
            rows = [digest(row) for row in value if isinstance(row, Message)]
            if rows:
                result[field] = sorted(rows, key=repr)
    return result


class Broker(Protocol):
    """A broker that answers requests of users."""

    async def ask(self, user: str, key: ApiKey, version: int, body: Message) -> Any:
        """Return the response."""
        ...


async def record(broker: Broker) -> dict[str, list[list[Any]]]:
    """Ask all questions; return for each question its answers with the users that got them."""
    topic_ids = await _set_up(broker)
    answers: dict[str, list[list[Any]]] = {}
    for user, _ in users():
        await _join_modern_group(broker)
        for question in questions():
            body = question.make(Asked(user, topic_ids))
            response = await broker.ask(user, question.key, question.version, body)
            answer = _without_user(digest(response), user)
            rows = answers.setdefault(question.name, [])
            same = next((row for row in rows if row[0] == answer), None)
            if same is None:
                rows.append([answer, [user]])
            else:
                same[1].append(user)
    return answers


def _without_user(answer: dict[str, Any], user: str) -> dict[str, Any]:
    """Replace the user's name inside the names of its topics and groups."""
    text = json.dumps(answer).replace(f"-{user}", "-USER")
    result: dict[str, Any] = json.loads(text)
    return result


async def _set_up(broker: Broker) -> dict[str, bytes]:
    """Create entries, topics and groups; return the ids of the topics."""
    creations = [
        m.CreateAclsRequestCreation(
            resource_type=acl.resource_type,
            resource_name=acl.resource_name,
            resource_pattern_type=acl.pattern_type,
            principal=acl.principal,
            host=acl.host,
            operation=acl.operation,
            permission_type=acl.permission,
        )
        for _, acls in users()
        for acl in acls
    ]
    root = partial(broker.ask, SUPER_USER)
    created = await root(ApiKey.CREATE_ACLS, 3, m.CreateAclsRequest(creations=creations))
    assert {row.error_code for row in created.results} == {0}
    names = [TOPIC, *(name for user, _ in users() for name in victims(user))]
    rows = [
        m.CreateTopicsRequestTopic(
            name=name, num_partitions=2 if name == TOPIC else 1, replication_factor=1
        )
        for name in names
    ]
    topics = await root(
        ApiKey.CREATE_TOPICS, 7, m.CreateTopicsRequest(topics=rows, timeout_ms=30_000)
    )
    assert {row.error_code for row in topics.topics} == {0}
    for key_type, name in ((0, GROUP), (0, MODERN_GROUP), (1, "tx")):
        find = m.FindCoordinatorRequest(key_type=key_type, coordinator_keys=[name])
        await _until_done(lambda: root(ApiKey.FIND_COORDINATOR, 4, find), "coordinators")  # noqa: B023
    init = m.InitProducerIdRequest(
        transactional_id="tx", transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
    )
    await _until_done(lambda: root(ApiKey.INIT_PRODUCER_ID, 4, init))
    for partition in (0, 1):
        commit = m.OffsetCommitRequest(
            group_id=GROUP,
            generation_id_or_member_epoch=-1,
            topics=[commit_of(TOPIC, partition)],
        )
        await _until_done(lambda: root(ApiKey.OFFSET_COMMIT, 9, commit), "topics", "partitions")  # noqa: B023
    return {row.name: row.topic_id for row in topics.topics}


async def _join_modern_group(broker: Broker) -> None:
    body = modern_heartbeat(MODERN_GROUP, MODERN_MEMBER, topics=[TOPIC])
    await _until_done(lambda: broker.ask(SUPER_USER, ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, body))


async def _until_done(ask: Callable[[], Awaitable[Any]], *rows: str) -> None:
    """Repeat a request until its first row has no error: coordinators load for a while."""
    for _ in range(100):
        row = await ask()
        for name in rows:
            row = getattr(row, name)[0]
        if row.error_code == ErrorCode.NONE:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"still {ErrorCode(row.error_code).name}")


def _records(*, transactional: bool) -> bytes:
    if transactional:
        return bytes(
            batch_of(
                b"v",
                producer_id=1,
                producer_epoch=0,
                base_sequence=0,
                attributes=TRANSACTIONAL,
            )
        )
    return bytes(batch_of(b"v"))


def _produce(topic: dict[str, Any], *, transactional_id: str | None = None) -> Message:
    records = _records(transactional=transactional_id is not None)
    row = m.ProduceRequestTopic(
        partition_data=[m.ProduceRequestPartition(index=0, records=records)], **topic
    )
    return m.ProduceRequest(
        acks=-1, timeout_ms=5_000, topic_data=[row], transactional_id=transactional_id
    )


@_question(ApiKey.PRODUCE, 12)
def produce(_: Asked) -> Message:
    return _produce({"name": TOPIC})


@_question(ApiKey.PRODUCE, 12)
def produce_to_a_missing_topic(_: Asked) -> Message:
    return _produce({"name": "missing"})


@_question(ApiKey.PRODUCE)
def produce_by_id(asked: Asked) -> Message:
    return _produce({"topic_id": asked.topic_ids[TOPIC]})


@_question(ApiKey.PRODUCE, 11)
def produce_in_a_transaction(_: Asked) -> Message:
    return _produce({"name": TOPIC}, transactional_id="tx")


def _fetch(partition: int, **topic: Any) -> Message:
    row = m.FetchRequestTopic(
        partitions=[m.FetchRequestPartition(partition=partition, partition_max_bytes=1)], **topic
    )
    return m.FetchRequest(max_wait_ms=0, max_bytes=1, session_epoch=NO_SESSION, topics=[row])


@_question(ApiKey.FETCH, 12)
def fetch(_: Asked) -> Message:
    return _fetch(0, topic=TOPIC)


@_question(ApiKey.FETCH, 12)
def fetch_a_missing_topic(_: Asked) -> Message:
    return _fetch(0, topic="missing")


@_question(ApiKey.FETCH)
def fetch_by_id(asked: Asked) -> Message:
    return _fetch(0, topic_id=asked.topic_ids[TOPIC])


@_question(ApiKey.FETCH)
def fetch_a_missing_partition_by_id(asked: Asked) -> Message:
    return _fetch(9, topic_id=asked.topic_ids[TOPIC])


@_question(ApiKey.FETCH, 12)
def fetch_as_another_broker(_: Asked) -> Message:
    rows = [
        m.FetchRequestTopic(
            topic=name, partitions=[m.FetchRequestPartition(partition=0, partition_max_bytes=1)]
        )
        for name in (TOPIC, "missing")
    ]
    return m.FetchRequest(
        replica_id=7, max_wait_ms=0, max_bytes=1, session_epoch=NO_SESSION, topics=rows
    )


@_question(ApiKey.FETCH)
def fetch_by_id_as_another_broker(asked: Asked) -> Message:
    rows = [
        m.FetchRequestTopic(
            topic_id=topic_id,
            partitions=[m.FetchRequestPartition(partition=0, partition_max_bytes=1)],
        )
        for topic_id in (asked.topic_ids[TOPIC], bytes(range(16)))
    ]
    return m.FetchRequest(
        replica_state=m.FetchRequestReplicaState(replica_id=7, replica_epoch=-1),
        max_wait_ms=0,
        max_bytes=1,
        session_epoch=NO_SESSION,
        topics=rows,
    )


@_question(ApiKey.LIST_OFFSETS, 9)
def list_offsets(_: Asked) -> Message:
    rows = [
        m.ListOffsetsRequestTopic(
            name=name, partitions=[m.ListOffsetsRequestPartition(partition_index=0, timestamp=-2)]
        )
        for name in (TOPIC, "missing")
    ]
    return m.ListOffsetsRequest(replica_id=-1, topics=rows)


@_question(ApiKey.OFFSET_FOR_LEADER_EPOCH)
def offset_for_leader_epoch(_: Asked) -> Message:
    rows = [
        m.OffsetForLeaderEpochRequestTopic(
            topic=name,
            partitions=[
                m.OffsetForLeaderEpochRequestPartition(
                    partition=0, current_leader_epoch=-1, leader_epoch=0
                )
            ],
        )
        for name in (TOPIC, "missing")
    ]
    return m.OffsetForLeaderEpochRequest(replica_id=-1, topics=rows)


@_question(ApiKey.DESCRIBE_PRODUCERS)
def describe_producers(_: Asked) -> Message:
    rows = [
        m.DescribeProducersRequestTopic(name=name, partition_indexes=[0])
        for name in (TOPIC, "missing")
    ]
    return m.DescribeProducersRequest(topics=rows)


def _metadata(*topics: m.MetadataRequestTopic, create: bool = False) -> Message:
    return m.MetadataRequest(
        topics=list(topics),
        allow_auto_topic_creation=create,
        include_topic_authorized_operations=True,
    )


@_question(ApiKey.METADATA)
def metadata(_: Asked) -> Message:
    names = (TOPIC, "missing")
    return _metadata(*(m.MetadataRequestTopic(name=name) for name in names))


@_question(ApiKey.METADATA)
def metadata_that_creates(asked: Asked) -> Message:
    return _metadata(m.MetadataRequestTopic(name=f"new-{asked.user}"), create=True)


@_question(ApiKey.METADATA)
def metadata_by_id(asked: Asked) -> Message:
    return _metadata(m.MetadataRequestTopic(topic_id=asked.topic_ids[TOPIC], name=None))


@_question(ApiKey.METADATA)
def metadata_by_an_unknown_id(_: Asked) -> Message:
    return _metadata(m.MetadataRequestTopic(topic_id=bytes(range(16)), name=None))


@_question(ApiKey.METADATA, 10)
def metadata_with_operations_on_the_cluster(_: Asked) -> Message:
    return m.MetadataRequest(topics=[], include_cluster_authorized_operations=True)


@_question(ApiKey.DESCRIBE_CLUSTER)
def describe_cluster(_: Asked) -> Message:
    return m.DescribeClusterRequest(include_cluster_authorized_operations=True)


@_question(ApiKey.DESCRIBE_TOPIC_PARTITIONS)
def describe_topic_partitions(_: Asked) -> Message:
    rows = [m.DescribeTopicPartitionsRequestTopic(name=name) for name in (TOPIC, "missing")]
    return m.DescribeTopicPartitionsRequest(topics=rows, response_partition_limit=100)


@_question(ApiKey.DESCRIBE_LOG_DIRS)
def describe_log_dirs(_: Asked) -> Message:
    row = m.DescribeLogDirsRequestTopic(topic=TOPIC, partitions=[0])
    return m.DescribeLogDirsRequest(topics=[row])


@_question(ApiKey.DESCRIBE_QUORUM)
def describe_quorum(_: Asked) -> Message:
    partition = m.DescribeQuorumRequestPartition(partition_index=0)
    row = m.DescribeQuorumRequestTopic(topic_name="__cluster_metadata", partitions=[partition])
    return m.DescribeQuorumRequest(topics=[row])


@_question(ApiKey.ELECT_LEADERS)
def elect_leaders(_: Asked) -> Message:
    row = m.ElectLeadersRequestTopicPartitions(topic=TOPIC, partitions=[0])
    return m.ElectLeadersRequest(topic_partitions=[row], timeout_ms=5_000)


@_question(ApiKey.ALTER_PARTITION_REASSIGNMENTS)
def cancel_a_reassignment(_: Asked) -> Message:
    partition = m.AlterPartitionReassignmentsRequestPartition(partition_index=0, replicas=None)
    row = m.AlterPartitionReassignmentsRequestTopic(name=TOPIC, partitions=[partition])
    return m.AlterPartitionReassignmentsRequest(topics=[row], timeout_ms=5_000)


@_question(ApiKey.LIST_PARTITION_REASSIGNMENTS)
def list_partition_reassignments(_: Asked) -> Message:
    return m.ListPartitionReassignmentsRequest(topics=None, timeout_ms=5_000)


@_question(ApiKey.CREATE_TOPICS)
def create_topics(_: Asked) -> Message:
    rows = [
        m.CreateTopicsRequestTopic(name=name, num_partitions=1, replication_factor=1)
        for name in (TOPIC, "brand-new")
    ]
    return m.CreateTopicsRequest(topics=rows, timeout_ms=5_000, validate_only=True)


@_question(ApiKey.DELETE_TOPICS, 5)
def delete_topics(asked: Asked) -> Message:
    names = [victims(asked.user)[0], "missing"]
    return m.DeleteTopicsRequest(topic_names=names, timeout_ms=5_000)


@_question(ApiKey.DELETE_TOPICS)
def delete_topics_by_id(asked: Asked) -> Message:
    ids = [asked.topic_ids[victims(asked.user)[1]], bytes(range(16))]
    rows = [m.DeleteTopicsRequestTopic(name=None, topic_id=topic_id) for topic_id in ids]
    return m.DeleteTopicsRequest(topics=rows, timeout_ms=5_000)


@_question(ApiKey.CREATE_PARTITIONS)
def create_partitions(_: Asked) -> Message:
    rows = [
        m.CreatePartitionsRequestTopic(name=name, count=3, assignments=None)
        for name in (TOPIC, "missing")
    ]
    return m.CreatePartitionsRequest(topics=rows, timeout_ms=5_000, validate_only=True)


@_question(ApiKey.DELETE_RECORDS)
def delete_records(_: Asked) -> Message:
    rows = [
        m.DeleteRecordsRequestTopic(
            name=name, partitions=[m.DeleteRecordsRequestPartition(partition_index=0, offset=0)]
        )
        for name in (TOPIC, "missing")
    ]
    return m.DeleteRecordsRequest(topics=rows, timeout_ms=5_000)


RESOURCES: Final = ((2, TOPIC), (2, "missing"), (4, "1"))
# A group, the loggers of a broker, client metrics, and a type that does not exist.
OTHER_RESOURCES: Final = ((32, GROUP), (8, "1"), (16, "metrics"), (64, "x"))


@_question(ApiKey.DESCRIBE_CONFIGS)
def describe_configs(_: Asked) -> Message:
    rows = [
        m.DescribeConfigsRequestResource(
            resource_type=kind, resource_name=name, configuration_keys=None
        )
        for kind, name in RESOURCES
    ]
    return m.DescribeConfigsRequest(resources=rows)


@_question(ApiKey.ALTER_CONFIGS)
def alter_configs(_: Asked) -> Message:
    rows = [
        m.AlterConfigsRequestResource(resource_type=kind, resource_name=name, configs=[])
        for kind, name in RESOURCES
    ]
    return m.AlterConfigsRequest(resources=rows, validate_only=True)


@_question(ApiKey.INCREMENTAL_ALTER_CONFIGS)
def incremental_alter_configs(_: Asked) -> Message:
    rows = [
        m.IncrementalAlterConfigsRequestResource(
            resource_type=kind,
            resource_name=name,
            configs=[
                m.IncrementalAlterConfigsRequestConfig(
                    name="retention.ms" if kind == 2 else "log.cleaner.threads",
                    config_operation=0,
                    value="1",
                )
            ],
        )
        for kind, name in RESOURCES
    ]
    return m.IncrementalAlterConfigsRequest(resources=rows, validate_only=True)


@_question(ApiKey.DESCRIBE_CONFIGS)
def describe_configs_of_groups_loggers_and_client_metrics(_: Asked) -> Message:
    rows = [
        m.DescribeConfigsRequestResource(
            resource_type=kind, resource_name=name, configuration_keys=None
        )
        for kind, name in OTHER_RESOURCES[:3]  # Kafka refuses all if the type of one is unknown
    ]
    return m.DescribeConfigsRequest(resources=rows)


@_question(ApiKey.ALTER_CONFIGS)
def alter_configs_of_groups_loggers_and_client_metrics(_: Asked) -> Message:
    rows = [
        m.AlterConfigsRequestResource(
            resource_type=kind,
            resource_name=name,
            configs=[m.AlterConfigsRequestConfig(name="nonsense", value="1")],
        )
        for kind, name in OTHER_RESOURCES
    ]
    return m.AlterConfigsRequest(resources=rows, validate_only=True)


@_question(ApiKey.INCREMENTAL_ALTER_CONFIGS)
def incremental_alter_configs_of_groups_loggers_and_client_metrics(_: Asked) -> Message:
    rows = [
        m.IncrementalAlterConfigsRequestResource(
            resource_type=kind,
            resource_name=name,
            configs=[
                m.IncrementalAlterConfigsRequestConfig(
                    name="nonsense", config_operation=0, value="INFO"
                )
            ],
        )
        for kind, name in OTHER_RESOURCES
    ]
    return m.IncrementalAlterConfigsRequest(resources=rows, validate_only=True)


@_question(ApiKey.LIST_CONFIG_RESOURCES)
def list_config_resources(_: Asked) -> Message:
    return m.ListConfigResourcesRequest(resource_types=[4])


@_question(ApiKey.FIND_COORDINATOR)
def find_the_coordinator_of_a_group(_: Asked) -> Message:
    return m.FindCoordinatorRequest(key_type=0, coordinator_keys=[GROUP])


@_question(ApiKey.FIND_COORDINATOR)
def find_the_coordinator_of_a_transaction(_: Asked) -> Message:
    return m.FindCoordinatorRequest(key_type=1, coordinator_keys=["tx"])


@_question(ApiKey.JOIN_GROUP)
def join_group(_: Asked) -> Message:
    protocol = m.JoinGroupRequestProtocol(name="range", metadata=b"")
    return m.JoinGroupRequest(
        group_id=GROUP,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=[protocol],
    )


@_question(ApiKey.SYNC_GROUP)
def sync_group(_: Asked) -> Message:
    return m.SyncGroupRequest(
        group_id=GROUP, member_id="x", protocol_type="consumer", protocol_name="range"
    )


@_question(ApiKey.HEARTBEAT)
def heartbeat(_: Asked) -> Message:
    return m.HeartbeatRequest(group_id=GROUP, member_id="x")


@_question(ApiKey.LEAVE_GROUP)
def leave_group(_: Asked) -> Message:
    member = m.LeaveGroupRequestMember(member_id="x", group_instance_id=None)
    return m.LeaveGroupRequest(group_id=GROUP, members=[member])


def commit_of(topic: str, partition: int = 0) -> m.OffsetCommitRequestTopic:
    row = m.OffsetCommitRequestPartition(partition_index=partition, committed_offset=0)
    return m.OffsetCommitRequestTopic(name=topic, partitions=[row])


@_question(ApiKey.OFFSET_COMMIT, 9)
def offset_commit(_: Asked) -> Message:
    return m.OffsetCommitRequest(
        group_id=GROUP,
        generation_id_or_member_epoch=-1,
        topics=[commit_of(TOPIC), commit_of("missing")],
    )


@_question(ApiKey.OFFSET_COMMIT)
def offset_commit_by_id(asked: Asked) -> Message:
    row = commit_of("")
    row.topic_id = asked.topic_ids[TOPIC]
    return m.OffsetCommitRequest(group_id=GROUP, generation_id_or_member_epoch=-1, topics=[row])


@_question(ApiKey.OFFSET_FETCH, 7)
def offset_fetch_of_one_group(_: Asked) -> Message:
    rows = [
        m.OffsetFetchRequestTopic(name=name, partition_indexes=[0]) for name in (TOPIC, "missing")
    ]
    return m.OffsetFetchRequest(group_id=GROUP, topics=rows)


@_question(ApiKey.OFFSET_FETCH, 9)
def offset_fetch(_: Asked) -> Message:
    rows = [
        m.OffsetFetchRequestGroupTopic(name=name, partition_indexes=[0])
        for name in (TOPIC, "missing")
    ]
    return m.OffsetFetchRequest(
        groups=[m.OffsetFetchRequestGroup(group_id=GROUP, member_id=None, topics=rows)]
    )


@_question(ApiKey.OFFSET_FETCH, 9)
def offset_fetch_of_all_topics(_: Asked) -> Message:
    return m.OffsetFetchRequest(
        groups=[m.OffsetFetchRequestGroup(group_id=GROUP, member_id=None, topics=None)]
    )


@_question(ApiKey.OFFSET_FETCH)
def offset_fetch_by_id(asked: Asked) -> Message:
    row = m.OffsetFetchRequestGroupTopic(topic_id=asked.topic_ids[TOPIC], partition_indexes=[0])
    return m.OffsetFetchRequest(
        groups=[m.OffsetFetchRequestGroup(group_id=GROUP, member_id=None, topics=[row])]
    )


@_question(ApiKey.OFFSET_DELETE)
def offset_delete(_: Asked) -> Message:
    rows = [
        m.OffsetDeleteRequestTopic(
            name=name, partitions=[m.OffsetDeleteRequestPartition(partition_index=0)]
        )
        for name in (TOPIC, "missing")
    ]
    return m.OffsetDeleteRequest(group_id=GROUP, topics=rows)


@_question(ApiKey.DESCRIBE_GROUPS)
def describe_groups(_: Asked) -> Message:
    return m.DescribeGroupsRequest(groups=[GROUP], include_authorized_operations=True)


@_question(ApiKey.LIST_GROUPS)
def list_groups(_: Asked) -> Message:
    return m.ListGroupsRequest(types_filter=["classic"])


@_question(ApiKey.DELETE_GROUPS)
def delete_groups(_: Asked) -> Message:
    return m.DeleteGroupsRequest(groups_names=["missing"])


def modern_heartbeat(
    group: str, member: str, epoch: int = 0, topics: list[str] | None = None
) -> Message:
    return m.ConsumerGroupHeartbeatRequest(
        group_id=group,
        member_id=member,
        member_epoch=epoch,
        instance_id=None,
        rack_id=None,
        rebalance_timeout_ms=10_000,
        subscribed_topic_names=topics,
        subscribed_topic_regex=None,
        server_assignor=None,
        topic_partitions=[] if epoch == 0 else None,
    )


@_question(ApiKey.CONSUMER_GROUP_HEARTBEAT)
def join_a_consumer_group(asked: Asked) -> Message:
    return modern_heartbeat(f"of-{asked.user}", "member-0", topics=[TOPIC])


@_question(ApiKey.CONSUMER_GROUP_HEARTBEAT)
def leave_a_consumer_group(asked: Asked) -> Message:
    return modern_heartbeat(f"of-{asked.user}", "member-0", epoch=-1)


@_question(ApiKey.CONSUMER_GROUP_DESCRIBE)
def describe_a_consumer_group(_: Asked) -> Message:
    return m.ConsumerGroupDescribeRequest(
        group_ids=[MODERN_GROUP], include_authorized_operations=True
    )


@_question(ApiKey.INIT_PRODUCER_ID)
def init_an_idempotent_producer(_: Asked) -> Message:
    return m.InitProducerIdRequest(
        transactional_id=None, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
    )


@_question(ApiKey.INIT_PRODUCER_ID)
def init_a_transactional_producer(asked: Asked) -> Message:
    return m.InitProducerIdRequest(
        transactional_id=f"tx-{asked.user}",
        transaction_timeout_ms=60_000,
        producer_id=-1,
        producer_epoch=-1,
    )


@_question(ApiKey.ADD_PARTITIONS_TO_TXN, 3)
def add_partitions_to_a_transaction(_: Asked) -> Message:
    rows = [
        m.AddPartitionsToTxnRequestTopicV3(name=name, partitions=[0]) for name in (TOPIC, "missing")
    ]
    return m.AddPartitionsToTxnRequest(
        v3_and_below_transactional_id="tx-missing",
        v3_and_below_producer_id=1,
        v3_and_below_producer_epoch=0,
        v3_and_below_topics=rows,
    )


@_question(ApiKey.ADD_PARTITIONS_TO_TXN)
def add_partitions_as_a_broker(_: Asked) -> Message:
    topic = m.AddPartitionsToTxnRequestTopic(name=TOPIC, partitions=[0])
    row = m.AddPartitionsToTxnRequestTransaction(
        transactional_id="tx-missing", producer_id=1, producer_epoch=0, topics=[topic]
    )
    return m.AddPartitionsToTxnRequest(transactions=[row])


@_question(ApiKey.ADD_OFFSETS_TO_TXN, 3)
def add_offsets_to_a_transaction(_: Asked) -> Message:
    return m.AddOffsetsToTxnRequest(
        transactional_id="tx-missing", producer_id=1, producer_epoch=0, group_id=GROUP
    )


@_question(ApiKey.END_TXN, 4)
def end_a_transaction(_: Asked) -> Message:
    return m.EndTxnRequest(transactional_id="tx-missing", producer_id=1, producer_epoch=0)


@_question(ApiKey.TXN_OFFSET_COMMIT, 3)
def commit_offsets_in_a_transaction(_: Asked) -> Message:
    rows = [
        m.TxnOffsetCommitRequestTopic(
            name=name,
            partitions=[m.TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=0)],
        )
        for name in (TOPIC, "missing")
    ]
    return m.TxnOffsetCommitRequest(
        transactional_id="tx-missing",
        group_id=GROUP,
        producer_id=1,
        producer_epoch=0,
        generation_id=-1,
        group_instance_id=None,
        topics=rows,
    )


@_question(ApiKey.WRITE_TXN_MARKERS, 1)
def write_markers(_: Asked) -> Message:
    row = m.WriteTxnMarkersRequestTopic(name="missing", partition_indexes=[0])
    marker = m.WriteTxnMarkersRequestMarker(
        producer_id=1, producer_epoch=0, transaction_result=False, topics=[row]
    )
    return m.WriteTxnMarkersRequest(markers=[marker])


@_question(ApiKey.DESCRIBE_TRANSACTIONS)
def describe_transactions(_: Asked) -> Message:
    return m.DescribeTransactionsRequest(transactional_ids=["tx", "tx-missing"])


@_question(ApiKey.LIST_TRANSACTIONS)
def list_transactions(_: Asked) -> Message:
    return m.ListTransactionsRequest(duration_filter=-1, transactional_id_pattern="tx|tx-missing")


@_question(ApiKey.DESCRIBE_ACLS)
def describe_acls(_: Asked) -> Message:
    return m.DescribeAclsRequest(
        resource_type_filter=ResourceType.GROUP,
        resource_name_filter="nothing",
        pattern_type_filter=PatternType.LITERAL,
        principal_filter=None,
        host_filter=None,
        operation=Operation.ANY,
        permission_type=Permission.ANY,
    )


@_question(ApiKey.CREATE_ACLS)
def create_acls(_: Asked) -> Message:
    row = m.CreateAclsRequestCreation(
        resource_type=ResourceType.GROUP,
        resource_name="nothing",
        principal="no-colon",
        host="*",
        operation=Operation.READ,
        permission_type=Permission.ALLOW,
    )
    return m.CreateAclsRequest(creations=[row])


@_question(ApiKey.DELETE_ACLS)
def delete_acls(_: Asked) -> Message:
    row = m.DeleteAclsRequestFilter(
        resource_type_filter=ResourceType.GROUP,
        resource_name_filter="nothing",
        pattern_type_filter=PatternType.LITERAL,
        principal_filter=None,
        host_filter=None,
        operation=Operation.ANY,
        permission_type=Permission.ANY,
    )
    return m.DeleteAclsRequest(filters=[row])


@_question(ApiKey.DESCRIBE_CLIENT_QUOTAS)
def describe_client_quotas(_: Asked) -> Message:
    return m.DescribeClientQuotasRequest(components=[], strict=False)


@_question(ApiKey.ALTER_CLIENT_QUOTAS)
def alter_client_quotas(_: Asked) -> Message:
    entity = m.AlterClientQuotasRequestEntity(entity_type="user", entity_name="somebody")
    op = m.AlterClientQuotasRequestOp(key="producer_byte_rate", value=1e9)
    entry = m.AlterClientQuotasRequestEntry(entity=[entity], ops=[op])
    return m.AlterClientQuotasRequest(entries=[entry], validate_only=True)


@_question(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS)
def describe_scram_credentials(_: Asked) -> Message:
    # Kafka does not answer a denied request for all users.
    user = m.DescribeUserScramCredentialsRequestUser(name="somebody")
    return m.DescribeUserScramCredentialsRequest(users=[user])


@_question(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS)
def describe_all_scram_credentials(_: Asked) -> Message:
    return m.DescribeUserScramCredentialsRequest(users=[])


@_question(ApiKey.CREATE_DELEGATION_TOKEN)
def create_a_delegation_token(_: Asked) -> Message:
    return m.CreateDelegationTokenRequest(
        owner_principal_type=None, owner_principal_name=None, renewers=[], max_lifetime_ms=-1
    )


@_question(ApiKey.RENEW_DELEGATION_TOKEN)
def renew_a_delegation_token(_: Asked) -> Message:
    return m.RenewDelegationTokenRequest(hmac=b"x", renew_period_ms=-1)


@_question(ApiKey.EXPIRE_DELEGATION_TOKEN)
def expire_a_delegation_token(_: Asked) -> Message:
    return m.ExpireDelegationTokenRequest(hmac=b"x", expiry_time_period_ms=-1)


@_question(ApiKey.DESCRIBE_DELEGATION_TOKEN)
def describe_delegation_tokens(_: Asked) -> Message:
    return m.DescribeDelegationTokenRequest(owners=None)


@_question(ApiKey.ALTER_USER_SCRAM_CREDENTIALS)
def delete_scram_credentials(_: Asked) -> Message:
    row = m.AlterUserScramCredentialsRequestDeletion(name="somebody", mechanism=1)
    return m.AlterUserScramCredentialsRequest(deletions=[row])


@_question(ApiKey.UPDATE_FEATURES)
def update_features(_: Asked) -> Message:
    return m.UpdateFeaturesRequest(timeout_ms=5_000, feature_updates=[], validate_only=True)


@_question(ApiKey.ALTER_REPLICA_LOG_DIRS)
def alter_replica_log_dirs(_: Asked) -> Message:
    topic = m.AlterReplicaLogDirsRequestTopic(name="missing", partitions=[0])
    row = m.AlterReplicaLogDirsRequestDir(path="/nowhere", topics=[topic])
    return m.AlterReplicaLogDirsRequest(dirs=[row])
