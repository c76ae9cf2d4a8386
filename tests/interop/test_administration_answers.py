"""Random requests of administrators have the same answers and effects as in Kafka.

A history is a list of requests from a seed: topics are created, deleted and get partitions and
settings, rightly and wrongly; records are produced, looked up and deleted. It runs against Kafka
4.3.0 and against this broker, and both describe all topics of the history after each request.
Sources: KIP-4, KIP-195, KIP-339, KIP-464, KIP-516, KIP-525, KIP-966.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest

from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.format.batch import Record, build_batch, walk_headers
from tests.support.draws import seeds_of_tests
from tests.support.peers.kafka import KafkaBroker
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

SEEDS = seeds_of_tests("VARVE_ADMINISTRATION_SEEDS", few=3, many=20)
STEPS: Final = 40
pytestmark = pytest.mark.xdist_group("kafka beside")
NO_ID: Final = bytes(16)
UNKNOWN_ID: Final = bytes(range(16))
NOW_MS: Final = (int(time.time()) - 60_000) * 1000  # not yet deleted after a week

TOPIC, BROKER = 2, 4  # types of resources
DYNAMIC_TOPIC_CONFIG: Final = 1
SET, DELETE, APPEND, SUBTRACT = range(4)
NAMES: Final = ["a", "b", "c.d", "e_f", "long"]
BAD_NAMES: Final = ["", ".", "..", "a b", "ä", "x" * 250]
SETTINGS: Final = {
    "cleanup.policy": ["compact", "delete", "compact,delete", "", "none", " compact , delete"],
    "retention.ms": [
        "1000000000000",
        "-1",
        "-2",
        "",
        "x",
        "9223372036854775808",
        " 5000000000000 ",
    ],
    "retention.bytes": ["-1", "10000000", "-2"],
    "segment.bytes": ["1048576", "1048575", "2147483648", "0"],
    "segment.ms": ["1", "0", "60000"],
    "min.cleanable.dirty.ratio": ["0.5", "0", "1", "1.1", "-0.1", "5e-1", "0.25"],
    "compression.type": ["producer", "zstd", "ZSTD", "uncompressed", "none", "brotli"],
    "compression.zstd.level": ["3", "23", "-131073", "22"],
    "compression.gzip.level": ["-1", "0", "10", "9"],
    "compression.lz4.level": ["1", "0", "17", "18"],
    "message.timestamp.type": ["CreateTime", "LogAppendTime", "createtime"],
    "max.message.bytes": ["1000", "0", "-1", "1048588"],
    "min.insync.replicas": ["1", "0", "2"],
    "unclean.leader.election.enable": ["true", "False", "yes", "TRUE"],
    "preallocate": ["false", "true", "1"],
    "min.compaction.lag.ms": ["0", "100", "-1"],
    "max.compaction.lag.ms": ["1", "0", "100", "9223372036854775807"],
    "delete.retention.ms": ["0", "86400000", "-1"],
    "file.delete.delay.ms": ["0", "60000", "-1"],
    "flush.messages": ["1", "0", "9223372036854775807"],
    "flush.ms": ["0", "1000", "-1"],
    "index.interval.bytes": ["0", "4096", "-1"],
    "segment.index.bytes": ["1024", "3", "10485760"],
    "segment.jitter.ms": ["0", "100", "-1"],
    "message.timestamp.before.max.ms": ["0", "9223372036854775807", "-1"],
    "message.timestamp.after.max.ms": ["0", "3600000", "-1"],
    "leader.replication.throttled.replicas": ["*", "none", "0:0", "x", "", "0:0,1:0"],
    "follower.replication.throttled.replicas": ["*", "", "0:1"],
    "remote.storage.enable": ["true", "false"],
    "local.retention.ms": ["-2", "5", "-3"],
    "message.format.version": ["3.0"],
    "message.downconversion.enable": ["true"],
    "no.such.key": ["1"],
    "": ["1"],
}


@dataclass(frozen=True)
class Request:
    """One request: its API and version, and its body, in terms of this broker's topic ids."""

    api: ApiKey
    version: int
    build: Callable[["Side"], m.Message]
    rows: Callable[["Side", Any], Any]
    text: str


class Side:
    """One broker, asked by one connection. Names of topics get a prefix."""

    def __init__(self, client: RawClient, prefix: str) -> None:
        self._client = client
        self.prefix = prefix
        self.ids: dict[str, bytes] = {}  # of topics by name, deleted ones too
        answer: Any = self._client.request(
            ApiKey.METADATA, 12, m.MetadataRequest(topics=[], allow_auto_topic_creation=False)
        )
        self.node: int = answer.brokers[0].node_id

    def ask(self, request: Request) -> Any:
        answer = self._client.request(request.api, request.version, request.build(self))
        return request.rows(self, answer)

    def ask_served(self, request: Request) -> Any:
        """Ask until the partitions have leaders: Kafka lists new ones before that."""
        answers: list[Any] = []

        def is_served() -> bool:
            answers.append(self.ask(request))
            return "NOT_LEADER_OR_FOLLOWER" not in str(answers[-1])

        wait_until(is_served, f"{request.text} without NOT_LEADER_OR_FOLLOWER")
        return answers[-1]

    def full(self, name: str) -> str:
        """Return the name in the broker; names that are bad stay as they are."""
        return name if name in BAD_NAMES else self.prefix + name

    def short(self, name: str | None) -> str | None:
        return name.removeprefix(self.prefix) if name is not None else None

    def name_of(self, topic_id: bytes) -> str:
        """Return which topic an id names: that of ours, of none, or unknown."""
        if topic_id == NO_ID:
            return "no id"
        names = [name for name, known in self.ids.items() if known == topic_id]
        return names[0] if names else "another id"

    def nodes(self, nodes: list[int]) -> list[int]:
        """Replace 0, this node, in a list of nodes."""
        return [self.node if node == 0 else node for node in nodes]

    def topics(self) -> dict[str, Any]:
        """Return partitions and dynamic settings of all topics with the prefix."""
        answer: Any = self._client.request(
            ApiKey.METADATA, 12, m.MetadataRequest(topics=None, allow_auto_topic_creation=False)
        )
        rows = {row.name: row for row in answer.topics if row.name.startswith(self.prefix)}
        body = m.DescribeConfigsRequest(
            resources=[
                m.DescribeConfigsRequestResource(
                    resource_type=TOPIC, resource_name=name, configuration_keys=None
                )
                for name in rows
            ]
        )
        configs: Any = self._client.request(ApiKey.DESCRIBE_CONFIGS, 4, body)
        state = {}
        for row, result in zip(rows.values(), configs.results, strict=True):
            partitions = sorted(
                (p.error_code, p.partition_index, p.leader_id == self.node) for p in row.partitions
            )
            dynamic = {
                entry.name: entry.value
                for entry in result.configs
                if entry.config_source == DYNAMIC_TOPIC_CONFIG
            }
            state[self.short(row.name)] = (row.error_code, partitions, sorted(dynamic.items()))
            self.ids[f"{self.short(row.name)}"] = row.topic_id
        return state


def code(value: int) -> str:
    return ErrorCode(value).name


class Requests:
    """The requests of one history."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def next(self, existing: list[str]) -> Request:
        makers: list[tuple[Callable[[list[str]], Request], int]] = [
            (self.create_topics, 6),
            (self.delete_topics, 2),
            (self.create_partitions, 3),
            (self.incremental_alter, 6),
            (self.alter, 2),
            (self.describe_configs, 1),
            (self.metadata, 2),
            (self.describe_partitions, 2),
            (self.produce, 4),
            (self.delete_records, 2),
            (self.list_offsets, 3),
            (self.leader_epoch, 1),
            (self.elect, 1),
            (self.fetch, 2),
        ]
        maker = self._rng.choices([maker for maker, _ in makers], [w for _, w in makers])[0]
        return maker(existing)

    def name(self, existing: list[str], *, new: float = 0.2) -> str:
        rng = self._rng
        if existing and rng.random() > new:
            return rng.choice(existing)
        return rng.choice(NAMES)

    def names(self, existing: list[str], *, new: float = 0.2, twice: float = 0) -> list[str]:
        """Return names, none of them twice but for that chance."""
        count = self._rng.choice([1, 1, 1, 2, 3])
        names = [self.name(existing, new=new) for _ in range(count)]
        return names if self._rng.random() < twice else list(dict.fromkeys(names))

    def settings(self, counts: list[int]) -> list[tuple[str, str | None]]:
        """Return as many settings as one of the numbers, some wrong; or one without a value."""
        rng = self._rng
        keys = rng.sample(list(SETTINGS), rng.choice(counts))
        if len(keys) == 1 and rng.random() < 0.05:
            return [(keys[0], None)]
        return [(key, rng.choice(SETTINGS[key])) for key in keys]

    def create_topics(self, existing: list[str]) -> Request:
        rng = self._rng
        rows = []
        bad = [rng.choice(BAD_NAMES)] if rng.random() < 0.1 else []
        for name in [*self.names(existing, new=0.8, twice=0.1), *bad]:
            assignments: list[tuple[int, list[int]]] = []
            partitions, factor = rng.choice([-1, 1, 2, 3]), rng.choice([-1, 1])
            settings = self.settings([0, 0, 0, 1, 2])
            if not settings and rng.random() < 0.1:
                partitions, factor = rng.choice([(0, 1), (-2, 1), (1, 0), (1, 2), (1, -2)])
            elif not settings and rng.random() < 0.3:
                if rng.random() < 0.8:
                    partitions = factor = -1
                nodes = rng.choice([[0], [0], [0], [77], [0, 0], []])
                indexes = rng.choice([[0], [0, 1], [1], [0, 0], [0, 2]])
                assignments = [(index, nodes) for index in indexes]
            rows.append((name, partitions, factor, assignments, settings))
        validate, version = rng.random() < 0.15, rng.choice([2, 4, 5, 6, 7])

        def build(side: Side) -> m.Message:
            return m.CreateTopicsRequest(
                topics=[
                    m.CreateTopicsRequestTopic(
                        name=side.full(name),
                        num_partitions=partitions,
                        replication_factor=factor,
                        assignments=[
                            m.CreateTopicsRequestAssignment(
                                partition_index=index, broker_ids=side.nodes(nodes)
                            )
                            for index, nodes in assignments
                        ],
                        configs=[
                            m.CreateTopicsRequestConfig(name=key, value=value)
                            for key, value in settings
                        ],
                    )
                    for name, partitions, factor, assignments, settings in rows
                ],
                timeout_ms=10_000,
                validate_only=validate,
            )

        def answers(side: Side, answer: Any) -> Any:
            return sorted(
                (
                    side.short(row.name),
                    code(row.error_code),
                    row.num_partitions,
                    row.replication_factor,
                    sorted(
                        entry.name  # Kafka repeats the value as it was sent
                        for entry in row.configs or []
                        if entry.config_source == DYNAMIC_TOPIC_CONFIG
                    ),
                )
                for row in answer.topics
            )

        return Request(
            ApiKey.CREATE_TOPICS, version, build, answers, f"create {rows} {validate=} v{version}"
        )

    def delete_topics(self, existing: list[str]) -> Request:
        rng = self._rng
        version = rng.choice([1, 4, 5, 6, 6])
        rows = [
            (
                name,
                rng.choice(["name", "name", "id", "both", "unknown id", "neither"])
                if version == 6
                else "name",
            )
            for name in self.names(existing, twice=0.2)
        ]

        def build(side: Side) -> m.Message:
            topics = []
            for name, kind in rows:
                topic_id = side.ids.get(name, UNKNOWN_ID) if kind in ("id", "both") else NO_ID
                topic_id = UNKNOWN_ID if kind == "unknown id" else topic_id
                topics.append(
                    m.DeleteTopicsRequestTopic(
                        name=side.full(name) if kind in ("name", "both") else None,
                        topic_id=topic_id,
                    )
                )
            return m.DeleteTopicsRequest(
                topics=topics, topic_names=[side.full(name) for name, _ in rows], timeout_ms=10_000
            )

        def answers(side: Side, answer: Any) -> Any:
            return {
                (
                    str(side.short(row.name)),
                    code(row.error_code),
                    side.name_of(row.topic_id) if version == 6 else "",
                )
                for row in answer.responses
            }

        return Request(ApiKey.DELETE_TOPICS, version, build, answers, f"delete {rows} v{version}")

    def create_partitions(self, existing: list[str]) -> Request:
        rng = self._rng
        rows = []
        for name in self.names(existing, twice=0.2):
            assignments = None
            if rng.random() < 0.2:
                nodes = rng.choice([[0], [0], [77], [0, 0], []])
                assignments = [nodes] * rng.randint(0, 2)
            rows.append((name, rng.choice([-1, 0, 1, 2, 3, 4, 5]), assignments))
        validate, version = rng.random() < 0.2, rng.choice([0, 1, 2, 3])

        def build(side: Side) -> m.Message:
            return m.CreatePartitionsRequest(
                topics=[
                    m.CreatePartitionsRequestTopic(
                        name=side.full(name),
                        count=count,
                        assignments=None
                        if assignments is None
                        else [
                            m.CreatePartitionsRequestAssignment(broker_ids=side.nodes(nodes))
                            for nodes in assignments
                        ],
                    )
                    for name, count, assignments in rows
                ],
                timeout_ms=10_000,
                validate_only=validate,
            )

        def answers(side: Side, answer: Any) -> Any:
            return sorted((side.short(row.name), code(row.error_code)) for row in answer.results)

        return Request(
            ApiKey.CREATE_PARTITIONS,
            version,
            build,
            answers,
            f"partitions {rows} {validate=} v{version}",
        )

    def incremental_alter(self, existing: list[str]) -> Request:
        rng = self._rng
        rows = []
        for name in self.names(existing, new=0.1):
            operations = [SET, SET, SET, SET, DELETE, APPEND, SUBTRACT]
            changes = [
                (key, rng.choice(operations) if value else SET, value)
                for key, value in self.settings([1, 1, 2, 3, 0] if name in existing else [0])
            ]
            rows.append((name, changes))
        validate = rng.random() < 0.15

        def build(side: Side) -> m.Message:
            return m.IncrementalAlterConfigsRequest(
                resources=[
                    m.IncrementalAlterConfigsRequestResource(
                        resource_type=TOPIC,
                        resource_name=side.full(name),
                        configs=[
                            m.IncrementalAlterConfigsRequestConfig(
                                name=key, config_operation=operation, value=value
                            )
                            for key, operation, value in changes
                        ],
                    )
                    for name, changes in rows
                ],
                validate_only=validate,
            )

        return Request(
            ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, build, altered, f"incremental {rows} {validate=}"
        )

    def alter(self, existing: list[str]) -> Request:
        rows = [
            (name, self.settings([0, 1, 2] if name in existing else [0]))
            for name in self.names(existing, new=0.1)
        ]
        validate = self._rng.random() < 0.15

        def build(side: Side) -> m.Message:
            return m.AlterConfigsRequest(
                resources=[
                    m.AlterConfigsRequestResource(
                        resource_type=TOPIC,
                        resource_name=side.full(name),
                        configs=[
                            m.AlterConfigsRequestConfig(name=key, value=value)
                            for key, value in changes
                        ],
                    )
                    for name, changes in rows
                ],
                validate_only=validate,
            )

        return Request(ApiKey.ALTER_CONFIGS, 2, build, altered, f"alter {rows} {validate=}")

    def describe_configs(self, existing: list[str]) -> Request:
        rng = self._rng
        keys = rng.choice(
            [None, [], ["cleanup.policy", "no.such.key"], ["retention.ms", "retention.ms"]]
        )
        names = self.names(existing)

        def build(side: Side) -> m.Message:
            return m.DescribeConfigsRequest(
                resources=[
                    m.DescribeConfigsRequestResource(
                        resource_type=TOPIC, resource_name=side.full(name), configuration_keys=keys
                    )
                    for name in names
                ],
                include_synonyms=True,
            )

        def answers(side: Side, answer: Any) -> Any:
            return sorted(
                (
                    side.short(row.resource_name),
                    code(row.error_code),
                    sorted(
                        (
                            entry.name,
                            entry.value,
                            entry.read_only,
                            entry.config_type,
                            [(s.name, s.value, s.source) for s in entry.synonyms if s.source == 1],
                        )
                        for entry in row.configs
                        if entry.config_source == DYNAMIC_TOPIC_CONFIG
                    ),
                    len(row.configs) if keys else 0,
                )
                for row in answer.results
            )

        return Request(ApiKey.DESCRIBE_CONFIGS, 4, build, answers, f"describe {names} {keys}")

    def metadata(self, existing: list[str]) -> Request:
        rng = self._rng
        version = rng.choice([4, 9, 10, 12, 13])
        by_id = version >= 12 and rng.random() < 0.5
        rows = [
            (
                name,
                rng.choice(["id", "id", "both", "unknown id", "empty name"]) if by_id else "name",
            )
            for name in self.names(existing)
        ]

        def build(side: Side) -> m.Message:
            topics = []
            for name, kind in rows:
                topic_id = NO_ID if kind == "name" else side.ids.get(name, UNKNOWN_ID)
                topic_id = UNKNOWN_ID if kind == "unknown id" else topic_id
                sent = (
                    side.full(name)
                    if kind in ("name", "both")
                    else ""
                    if kind == "empty name"
                    else None
                )
                topics.append(m.MetadataRequestTopic(topic_id=topic_id, name=sent))
            return m.MetadataRequest(
                topics=topics,
                allow_auto_topic_creation=False,
                include_topic_authorized_operations=version >= 8,
            )

        def answers(side: Side, answer: Any) -> Any:
            return sorted(
                (
                    str(side.short(row.name)),
                    code(row.error_code),
                    row.is_internal,
                    side.name_of(row.topic_id) if version >= 10 else "",
                    row.topic_authorized_operations if row.error_code == ErrorCode.NONE else 0,
                    sorted(
                        (
                            p.partition_index,
                            p.error_code,
                            p.leader_id == side.node,
                            len(p.replica_nodes),
                            len(p.isr_nodes),
                            p.offline_replicas,
                        )
                        for p in row.partitions
                    ),
                )
                for row in answer.topics
            )

        return Request(ApiKey.METADATA, version, build, answers, f"metadata {rows} v{version}")

    def describe_partitions(self, existing: list[str]) -> Request:
        rng = self._rng
        names = self.names(existing)
        limit = rng.choice([1, 2, 3, 2000, 2000, 0, -1])
        cursor = (
            (rng.choice([*names, "a"]), rng.choice([0, 1, 5, -1])) if rng.random() < 0.4 else None
        )

        def build(side: Side) -> m.Message:
            return m.DescribeTopicPartitionsRequest(
                topics=[
                    m.DescribeTopicPartitionsRequestTopic(name=side.full(name)) for name in names
                ],
                response_partition_limit=limit,
                cursor=None
                if cursor is None
                else m.DescribeTopicPartitionsRequestCursor(
                    topic_name=side.full(cursor[0]), partition_index=cursor[1]
                ),
            )

        def answers(side: Side, answer: Any) -> Any:
            following = answer.next_cursor
            return (
                [
                    (
                        side.short(row.name),
                        code(row.error_code),
                        side.name_of(row.topic_id),
                        row.is_internal,
                        row.topic_authorized_operations,
                        [
                            (p.partition_index, p.error_code, p.leader_id == side.node)
                            for p in row.partitions
                        ],
                    )
                    for row in answer.topics
                ],
                None
                if following is None
                else (side.short(following.topic_name), following.partition_index),
            )

        return Request(
            ApiKey.DESCRIBE_TOPIC_PARTITIONS,
            0,
            build,
            answers,
            f"describe partitions {names} {limit=} {cursor=}",
        )

    def partition(self) -> int:
        return self._rng.choice([0, 0, 0, 0, 1, 2, 7, -1])

    def partitions(self) -> list[int]:
        return sorted({self.partition(), self.partition()})

    def produce(self, existing: list[str]) -> Request:
        rng = self._rng
        name, partition = self.name(existing, new=0.05), self.partition()
        count, acks = rng.randint(1, 3), rng.choice([-1, 1])
        first = NOW_MS + rng.randrange(10) * 1000
        keyless = rng.random() < 0.2
        records = bytes(
            build_batch(
                [
                    Record(
                        number,
                        first + rng.randrange(3) * 1000,
                        None if keyless else b"key",
                        b"value",
                        (),
                    )
                    for number in range(count)
                ]
            )
        )

        def build(side: Side) -> m.Message:
            row = m.ProduceRequestPartition(index=partition, records=records)
            return m.ProduceRequest(
                acks=acks,
                timeout_ms=10_000,
                topic_data=[m.ProduceRequestTopic(name=side.full(name), partition_data=[row])],
            )

        def answers(side: Side, answer: Any) -> Any:
            return [
                (
                    side.short(topic.name),
                    row.index,
                    code(row.error_code),
                    row.base_offset,
                    row.log_append_time_ms >= 0,
                    row.log_start_offset,
                )
                for topic in answer.responses
                for row in topic.partition_responses
            ]

        return Request(
            ApiKey.PRODUCE,
            9,
            build,
            answers,
            f"produce {name} {partition} {count=} {acks=} {first=} {keyless=}",
        )

    def delete_records(self, existing: list[str]) -> Request:
        rng = self._rng
        name = self.name(existing, new=0.05)
        rows = [(index, rng.choice([-1, 0, 1, 2, 5, 50, -2])) for index in self.partitions()]

        def build(side: Side) -> m.Message:
            topic = m.DeleteRecordsRequestTopic(
                name=side.full(name),
                partitions=[
                    m.DeleteRecordsRequestPartition(partition_index=index, offset=offset)
                    for index, offset in rows
                ],
            )
            return m.DeleteRecordsRequest(topics=[topic], timeout_ms=10_000)

        def answers(side: Side, answer: Any) -> Any:
            return sorted(
                (
                    side.short(topic.name),
                    row.partition_index,
                    code(row.error_code),
                    row.low_watermark,
                )
                for topic in answer.topics
                for row in topic.partitions
            )

        return Request(ApiKey.DELETE_RECORDS, 2, build, answers, f"delete records {name} {rows}")

    def list_offsets(self, existing: list[str]) -> Request:
        rng = self._rng
        name, version = self.name(existing, new=0.05), rng.choice([1, 2, 4, 5, 6, 7, 8, 9, 10, 11])
        stamps = [-1, -2, -3, -4, -5, -6, -7, 0, NOW_MS, NOW_MS + 5000, NOW_MS + 60_000]
        rows = [
            (index, rng.choice(stamps), rng.choice([-1, -1, -1, 0, 1]))
            for index in self.partitions()
        ]
        isolation = rng.choice([0, 1])

        def build(side: Side) -> m.Message:
            topic = m.ListOffsetsRequestTopic(
                name=side.full(name),
                partitions=[
                    m.ListOffsetsRequestPartition(
                        partition_index=index, timestamp=stamp, current_leader_epoch=epoch
                    )
                    for index, stamp, epoch in rows
                ],
            )
            return m.ListOffsetsRequest(
                replica_id=-1, isolation_level=isolation, topics=[topic], timeout_ms=1000
            )

        def answers(side: Side, answer: Any) -> Any:
            return sorted(
                (
                    side.short(topic.name),
                    row.partition_index,
                    code(row.error_code),
                    row.offset,
                    row.timestamp,
                    row.leader_epoch,
                )
                for topic in answer.topics
                for row in topic.partitions
            )

        return Request(
            ApiKey.LIST_OFFSETS,
            version,
            build,
            answers,
            f"list offsets {name} {rows} {isolation=} v{version}",
        )

    def leader_epoch(self, existing: list[str]) -> Request:
        rng = self._rng
        name = self.name(existing, new=0.05)
        index, current, asked = self.partition(), rng.choice([-1, 0, 1]), rng.choice([-1, 0, 1, 5])

        def build(side: Side) -> m.Message:
            row = m.OffsetForLeaderEpochRequestPartition(
                partition=index, current_leader_epoch=current, leader_epoch=asked
            )
            topic = m.OffsetForLeaderEpochRequestTopic(topic=side.full(name), partitions=[row])
            return m.OffsetForLeaderEpochRequest(replica_id=-1, topics=[topic])

        def answers(side: Side, answer: Any) -> Any:
            return [
                (
                    side.short(topic.topic),
                    row.partition,
                    code(row.error_code),
                    row.leader_epoch,
                    row.end_offset,
                )
                for topic in answer.topics
                for row in topic.partitions
            ]

        return Request(
            ApiKey.OFFSET_FOR_LEADER_EPOCH,
            4,
            build,
            answers,
            f"leader epoch {name} {index} {current} {asked}",
        )

    def elect(self, existing: list[str]) -> Request:
        rng = self._rng
        kind, version = rng.choice([0, 1]), rng.choice([1, 2])
        rows = [(name, self.partitions()) for name in self.names(existing)]

        def build(side: Side) -> m.Message:
            return m.ElectLeadersRequest(
                election_type=kind,
                topic_partitions=[
                    m.ElectLeadersRequestTopicPartitions(
                        topic=side.full(name), partitions=partitions
                    )
                    for name, partitions in rows
                ],
                timeout_ms=5000,
            )

        def answers(side: Side, answer: Any) -> Any:
            return (
                code(answer.error_code),
                sorted(
                    (side.short(row.topic), part.partition_id, code(part.error_code))
                    for row in answer.replica_election_results
                    for part in row.partition_result
                ),
            )

        return Request(
            ApiKey.ELECT_LEADERS, version, build, answers, f"elect {kind} {rows} v{version}"
        )

    def fetch(self, existing: list[str]) -> Request:
        rng = self._rng
        name, version = self.name(existing, new=0.05), rng.choice([4, 9, 12, 12, 13, 16, 17])
        index, offset, epoch = (
            self.partition(),
            rng.choice([-1, 0, 1, 2, 4, 8, 100]),
            rng.choice([-1, -1, 0, 1]),
        )
        size, most = rng.choice([0, 1, 100, 1 << 20]), rng.choice([0, 1, 1 << 20])

        def build(side: Side) -> m.Message:
            row = m.FetchRequestPartition(
                partition=index,
                fetch_offset=offset,
                current_leader_epoch=epoch,
                partition_max_bytes=size,
                last_fetched_epoch=-1,
                log_start_offset=-1,
            )
            topic = m.FetchRequestTopic(
                topic=side.full(name), topic_id=side.ids.get(name, UNKNOWN_ID), partitions=[row]
            )
            return m.FetchRequest(
                replica_id=-1,
                max_wait_ms=0,
                min_bytes=0,
                max_bytes=most,
                isolation_level=0,
                session_id=0,
                session_epoch=-1,
                topics=[topic],
                forgotten_topics_data=[],
                rack_id="",
            )

        def answers(side: Side, answer: Any) -> Any:
            return code(answer.error_code), [
                (
                    side.short(topic.topic) if version < 13 else side.name_of(topic.topic_id),
                    row.partition_index,
                    code(row.error_code),
                    row.high_watermark,
                    row.last_stable_offset,
                    row.log_start_offset,
                    batches(row.records or b""),
                )
                for topic in answer.responses
                for row in topic.partitions
            ]

        return Request(
            ApiKey.FETCH,
            version,
            build,
            answers,
            f"fetch {name} {index} {offset=} {epoch=} {size=} {most=} v{version}",
        )


def batches(records: bytes) -> list[tuple[int, ...]]:
    """Return what the headers of batches say; compressed sizes differ between libraries."""
    return [
        (
            header.base_offset,
            header.last_offset_delta,
            header.record_count,
            header.attributes,
            -1 if header.is_log_append_time else header.max_timestamp,
        )
        for _, header in walk_headers(records)
    ]


def altered(side: Side, answer: Any) -> Any:
    return sorted(
        (row.resource_type, side.short(row.resource_name), code(row.error_code))
        for row in answer.responses
    )


def run_history(seed: int, kafka: Side, ours: Side) -> set[str]:
    """Run a history on both. Returns the errors that Kafka answered."""
    rng = random.Random(seed)
    requests = Requests(rng)
    trace: list[str] = []
    errors: set[str] = set()
    existing: list[str] = []
    for _ in range(STEPS):
        request = requests.next(existing)
        expected, result = kafka.ask_served(request), ours.ask(request)
        trace.append(f"{request.text}: {expected}")
        errors.update(name for name in ErrorCode.__members__ if f"'{name}'" in str(expected))
        story = "\n".join([f"seed {seed}", *trace])
        assert result == expected, f"{story}\nbut we: {result}"
        state = ours.topics()
        # Kafka applies a change soon after it has answered.
        wait_until(lambda state=state: kafka.topics() == state, f"{story}\nbut we: {state}")
        existing = list(state)
    return errors


@pytest.mark.timeout(300)  # many histories in CI
def test_requests_of_administrators_have_the_answers_and_effects_of_kafka(
    kafka_and_varve: tuple[KafkaBroker, VarveBroker],
) -> None:
    print(f"VARVE_ADMINISTRATION_SEEDS={SEEDS.start}:{SEEDS.stop}")
    errors = set[str]()
    for seed in SEEDS:
        with (
            RawClient(kafka_and_varve[0].port) as kafka,
            RawClient(kafka_and_varve[1].port) as ours,
        ):
            errors.update(run_history(seed, Side(kafka, f"s{seed}-"), Side(ours, f"s{seed}-")))
    assert errors >= {
        "NONE",
        "TOPIC_ALREADY_EXISTS",
        "INVALID_CONFIG",
        "INVALID_PARTITIONS",
        "INVALID_REPLICA_ASSIGNMENT",
        "INVALID_REQUEST",
        "INVALID_TOPIC_EXCEPTION",
        "OFFSET_OUT_OF_RANGE",
        "UNKNOWN_LEADER_EPOCH",
        "UNKNOWN_TOPIC_ID",
        "UNKNOWN_TOPIC_OR_PARTITION",
    }
