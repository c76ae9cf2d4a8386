"""Random requests about the offsets of groups have the answers and effects of Kafka.

A history is a list of requests from a seed: offsets are committed, with and without a transaction,
fetched and deleted; groups are listed, described and deleted. One group has no members, one has a
classic member, one a member with the consumer protocol, one does not exist; members leave and
return. It runs against Kafka 4.3.0 and against this broker. After each request both list the
groups and their offsets alike. Sources: KIP-211, KIP-447, KIP-496, KIP-518, KIP-709, KIP-848.
"""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from tests.interop.both_brokers import GROUP, TRANSACTION, create_topics, find_coordinator
from tests.support.draws import seeds_of_tests
from tests.support.peers.kafka import KafkaBroker
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

SEEDS = seeds_of_tests("VARVE_OFFSET_SEEDS", few=10, many=40)
STEPS: Final = 60
KEPT_TOPIC: Final = "offsets-kept"
TOPICS: Final = {"offsets-a": 2, "offsets-b": 1, KEPT_TOPIC: 1}
NO_TOPIC: Final = "offsets-missing"
NAMES: Final = ["offsets-a", "offsets-b", NO_TOPIC]  # of requests
UNKNOWN_ID: Final = bytes(range(16))
# If a commit without a transaction follows one in it, Kafka answers UNSTABLE_OFFSET_COMMIT until
# the transaction ends, though its end changes nothing.
ONLY_IN_TRANSACTIONS: Final = 1  # a partition
METADATA_BYTES: Final = 4096  # offset.metadata.max.bytes
LONG_AGO_MS: Final = 1  # a retention that only the sweep applies, which comes after minutes
MEMBER: Final = "the member"
REPEATED: Final = (
    ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
)
# Not equal, or not of the group: throttling is of the quotas, hosts and error texts of the broker.
OMITTED: Final = {"throttle_time_ms", "error_message", "client_host", "producer_id"}
EPOCHS: Final = {"group_epoch", "assignment_epoch", "member_epoch"}
pytestmark = pytest.mark.xdist_group("kafka beside")


@dataclass
class Side:
    """One broker, asked by one connection."""

    client: RawClient
    suffix: str
    ids: dict[str, bytes]
    first_epoch: int  # of a group with the consumer protocol
    member_id: str = ""  # the classic member's, which the broker chose
    generation: int = -1
    epoch: int = 0
    producer: tuple[int, int] = (-1, -1)
    names: dict[bytes, str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = {topic_id: name for name, topic_id in self.ids.items()}

    def ask(self, api: ApiKey, version: int, body: m.Message) -> Any:
        """Send a request until its answer has no error that clients repeat."""
        answers: list[Any] = []

        def is_answered() -> bool:
            answers.append(self.client.request(api, version, body))
            return not any(code in REPEATED for code in _codes(answers[-1]))

        try:
            wait_until(is_answered, f"an answer to {api.name}", 3)
        except AssertionError:  # the last answer is compared
            assert answers
        return answers[-1]

    def full(self, group: str) -> str:
        return f"{group}-{self.suffix}" if group else ""

    def member_of(self, group: str) -> tuple[str, int]:
        """Return the member's id and generation or epoch, as its client knows them."""
        if group == "classic":
            return self.member_id, self.generation
        return (f"{MEMBER}-{self.suffix}", self.epoch) if group == "consumer" else ("", -1)

    def plain(self, value: Any) -> Any:
        """Return an answer without what differs by chance: ids, order, a row named twice."""
        if isinstance(value, m.Message):
            return tuple(
                (name, self._field(name, getattr(value, name)))
                for name in value.__slots__
                if name not in OMITTED
            )
        if isinstance(value, list):
            return tuple(sorted({self.plain(row) for row in value}, key=repr))
        if isinstance(value, bytes) and value in self.names:
            return self.names[value]
        if isinstance(value, str):
            value = value.removesuffix(f"-{self.suffix}")
            return MEMBER if self.member_id and value == self.member_id else value
        return value

    def _field(self, name: str, value: Any) -> Any:
        if name in EPOCHS and value > 0:
            return value - self.first_epoch + 1
        return self.plain(value)

    def groups(self) -> Any:
        """Return all groups of this history, and their offsets."""
        names = [self.full(name) for name in GROUPS]
        body = m.OffsetFetchRequest(
            groups=[m.OffsetFetchRequestGroup(group_id=name, topics=None) for name in names]
        )
        offsets = self.ask(ApiKey.OFFSET_FETCH, 9, body)
        return self.list_groups([], [], 5), self.plain(offsets)

    def list_groups(self, states: list[str], types: list[str], version: int) -> Any:
        body = m.ListGroupsRequest(states_filter=states, types_filter=types)
        answer = self.ask(ApiKey.LIST_GROUPS, version, body)
        names = {self.full(name) for name in GROUPS}
        answer.groups = [group for group in answer.groups if group.group_id in names]
        return self.plain(answer)


GROUPS: Final = ["simple", "classic", "consumer", "missing"]
Step = tuple[str, Callable[[Side], Any]]
# By topic: partitions, offsets, and their metadata as a text and how often it is repeated.
Offsets = dict[str, list[tuple[int, int, tuple[str, int | None]]]]


def _codes(answer: Any) -> set[int]:
    """Return all error codes of an answer."""
    if isinstance(answer, list):
        return {code for row in answer for code in _codes(row)}
    if not isinstance(answer, m.Message):
        return set()
    codes = {code for name in answer.__slots__ for code in _codes(getattr(answer, name))}
    return codes | ({answer.error_code} if hasattr(answer, "error_code") else set())


def commit(rng: random.Random) -> Step:
    wanted = rng.choice([*GROUPS, *GROUPS, ""])
    version = rng.randint(2, 10)
    who = rng.choices(["itself", "nobody", "another"], [6, 3, 1])[0]
    shift = rng.choices([0, 1, -1, -100], [8, 1, 1, 1])[0]
    instance = rng.choices([None, "fixed"], [9, 1])[0]
    retention_ms = rng.choice([-1, -1, 1 << 40, LONG_AGO_MS, -2])
    in_transaction = rng.random() < 0.3
    rows, is_too_large = some_offsets(rng, ONLY_IN_TRANSACTIONS if in_transaction else 0)
    if in_transaction:
        version = rng.randint(3, 5)
    if is_too_large:
        shift = 0  # Kafka compares epochs, unlike member ids, partition by partition

    def send(side: Side) -> Any:
        group = wanted
        if (in_transaction or is_too_large) and side.member_of(group)[1] <= 0:
            # Else Kafka may list a group without offsets, until minutes later.
            group = "simple"
        member_id, generation = side.member_of(group)
        if who == "nobody":
            member_id, generation = "", -1
        elif who == "another":
            member_id = "another"
        generation = max(generation + shift, -1) if generation >= 0 else generation
        kind: Any = (
            m.TxnOffsetCommitRequestPartition
            if in_transaction
            else (m.OffsetCommitRequestPartition)
        )
        topics: list[Any] = []
        for name, partitions in rows.items():
            offsets = [
                kind(
                    partition_index=index,
                    committed_offset=offset,
                    committed_leader_epoch=offset % 3,
                    committed_metadata=None if count is None else text * count,
                )
                for index, offset, (text, count) in partitions
            ]
            if in_transaction:
                topics.append(m.TxnOffsetCommitRequestTopic(name=name, partitions=offsets))
            else:
                topics.append(
                    m.OffsetCommitRequestTopic(
                        name=name, topic_id=side.ids.get(name, UNKNOWN_ID), partitions=offsets
                    )
                )
        common: Any = {
            "group_id": side.full(group), "member_id": member_id, "group_instance_id": instance,
            "topics": topics,
        }  # fmt: skip
        if not in_transaction:
            body = m.OffsetCommitRequest(
                generation_id_or_member_epoch=generation, retention_time_ms=retention_ms, **common
            )
            return side.plain(side.ask(ApiKey.OFFSET_COMMIT, version, body))
        transaction: Any = {
            "transactional_id": side.full("transaction"),
            "producer_id": side.producer[0],
            "producer_epoch": side.producer[1],
        }
        added = None
        if version < 5:  # of clients before KIP-890
            adding = m.AddOffsetsToTxnRequest(group_id=side.full(group), **transaction)
            added = side.plain(side.ask(ApiKey.ADD_OFFSETS_TO_TXN, 3, adding))
        txn = m.TxnOffsetCommitRequest(generation_id=generation, **common, **transaction)
        return added, side.plain(side.ask(ApiKey.TXN_OFFSET_COMMIT, version, txn))

    name = "commit in a transaction" if in_transaction else "commit"
    return f"{name} {version} {wanted!r} {who} {shift} {instance} {retention_ms} {rows}", send


def some_offsets(rng: random.Random, index: int) -> tuple[Offsets, bool]:
    """Return offsets, most of them of one partition, and whether their metadata is too large."""
    topics: Offsets = {}
    # All have the same metadata: Kafka answers twice if only one of two rows is refused.
    metadata = rng.choices(
        [("", 0), ("", None), ("m", 1), ("m", METADATA_BYTES), ("m", METADATA_BYTES + 1),
         ("ä", METADATA_BYTES)],
        [5, 1, 2, 1, 1, 1],
    )[0]  # fmt: skip
    for _ in range(rng.randint(1, 3)):
        name = rng.choices(NAMES, [5, 3, 1])[0]
        row = rng.choice([index, index, 2]), rng.choice([*range(100), -1, -2]), metadata
        topics.setdefault(name, []).append(row)
    return topics, (metadata[1] or 0) > METADATA_BYTES


def some_partitions(rng: random.Random) -> list[tuple[str, list[int]]]:
    names = rng.sample(NAMES, rng.randint(0, 3))
    return [(name, rng.sample([0, 1, 5, -1], rng.randint(1, 3))) for name in names]


def fetch(rng: random.Random) -> Step:
    version = rng.randint(1, 10)
    groups = rng.sample([*GROUPS, ""], rng.randint(1, 3) if version >= 8 else 1)
    topics = some_partitions(rng) if version < 2 or rng.random() < 0.6 else None
    who = rng.choices(["itself", "nobody", "another"], [4, 4, 1])[0]
    shift = rng.choices([0, 1, -1], [6, 1, 1])[0]
    stable = rng.random() < 0.4

    def send(side: Side) -> Any:
        rows = []
        for group in groups:
            member_id, epoch = side.member_of(group)
            named: Any = None
            if topics is not None:
                named = [
                    m.OffsetFetchRequestGroupTopic(
                        name=name,
                        topic_id=side.ids.get(name, UNKNOWN_ID),
                        partition_indexes=list(indexes),
                    )
                    for name, indexes in topics
                ]
            rows.append(
                m.OffsetFetchRequestGroup(
                    group_id=side.full(group),
                    member_id={"itself": member_id, "another": "another"}.get(who),
                    member_epoch=-1 if who == "nobody" else epoch + shift,
                    topics=named,
                )
            )
        old_topics = None
        if topics is not None:
            old_topics = [
                m.OffsetFetchRequestTopic(name=name, partition_indexes=list(indexes))
                for name, indexes in topics
            ]
        body = m.OffsetFetchRequest(
            group_id=side.full(groups[0]), topics=old_topics, groups=rows, require_stable=stable
        )
        return side.plain(side.ask(ApiKey.OFFSET_FETCH, version, body))

    return f"fetch {version} {groups} {topics} {who} {shift} {stable=}", send


def delete_offsets(rng: random.Random) -> Step:
    group, topics = rng.choice([*GROUPS, ""]), some_partitions(rng)

    def send(side: Side) -> Any:
        rows = [
            m.OffsetDeleteRequestTopic(
                name=name,
                partitions=[m.OffsetDeleteRequestPartition(partition_index=i) for i in indexes],
            )
            for name, indexes in topics
        ]
        body = m.OffsetDeleteRequest(group_id=side.full(group), topics=rows)
        return side.plain(side.ask(ApiKey.OFFSET_DELETE, 0, body))

    return f"delete offsets {group!r} {topics}", send


def delete_groups(rng: random.Random) -> Step:
    deletable = [group for group in GROUPS if group != "simple"]
    groups, version = rng.sample([*deletable, ""], rng.randint(1, 2)), rng.randint(0, 2)

    return f"delete groups {groups}", lambda side: delete_groups_named(side, groups, version)


def delete_groups_named(side: Side, groups: list[str], version: int = 2) -> Any:
    body = m.DeleteGroupsRequest(groups_names=[side.full(group) for group in groups])
    return side.plain(side.ask(ApiKey.DELETE_GROUPS, version, body))


def keep_simple_group(side: Side) -> None:
    """Commit an offset that no request deletes."""
    row = m.OffsetCommitRequestPartition(partition_index=0, committed_offset=0)
    topic = m.OffsetCommitRequestTopic(name=KEPT_TOPIC, partitions=[row])
    body = m.OffsetCommitRequest(group_id=side.full("simple"), topics=[topic])
    assert _codes(side.ask(ApiKey.OFFSET_COMMIT, 9, body)) == {0}


def list_groups(rng: random.Random) -> Step:
    version = rng.randint(0, 5)
    known = ["Empty", "stable", "STABLE", "Dead", "PreparingRebalance", "Reconciling", "none", ""]
    states = rng.sample(known, rng.randint(0, 2)) if version >= 4 else []
    known = ["classic", "Consumer", "share", "none", ""]
    types = rng.sample(known, rng.randint(0, 2)) if version >= 5 else []
    return f"list {version} {states} {types}", lambda side: side.list_groups(states, types, version)


def describe(rng: random.Random) -> Step:
    groups = rng.sample([*GROUPS, ""], rng.randint(1, 3))
    operations = rng.random() < 0.5
    if rng.random() < 0.5:
        version = rng.randint(0, 6)

        def send(side: Side) -> Any:
            body = m.DescribeGroupsRequest(
                groups=[side.full(group) for group in groups],
                include_authorized_operations=operations and version >= 3,
            )
            return side.plain(side.ask(ApiKey.DESCRIBE_GROUPS, version, body))

        return f"describe {version} {groups} {operations=}", send
    version = rng.randint(0, 1)

    def send_to_new(side: Side) -> Any:
        body = m.ConsumerGroupDescribeRequest(
            group_ids=[side.full(group) for group in groups],
            include_authorized_operations=operations,
        )
        return side.plain(side.ask(ApiKey.CONSUMER_GROUP_DESCRIBE, version, body))

    return f"describe with consumer protocol {version} {groups} {operations=}", send_to_new


def end_transaction(rng: random.Random) -> Step:
    is_committed = rng.random() < 0.6

    def send(side: Side) -> Any:
        body = m.EndTxnRequest(
            transactional_id=side.full("transaction"), producer_id=side.producer[0],
            producer_epoch=side.producer[1], committed=is_committed,
        )  # fmt: skip
        answer = side.ask(ApiKey.END_TXN, 4, body)
        begin_transaction(side)  # waits for the markers
        return side.plain(answer)

    return f"end transaction {is_committed=}", send


def begin_transaction(side: Side) -> None:
    body = m.InitProducerIdRequest(
        transactional_id=side.full("transaction"), transaction_timeout_ms=600_000
    )
    answer = side.ask(ApiKey.INIT_PRODUCER_ID, 4, body)
    assert answer.error_code == 0
    side.producer = answer.producer_id, answer.producer_epoch


def join_or_leave(rng: random.Random) -> Step:
    if rng.random() < 0.5:
        return "classic member joins or leaves", join_or_leave_classic
    return "consumer joins or leaves", join_or_leave_consumer


def join_or_leave_classic(side: Side) -> Any:
    group = side.full("classic")
    if side.generation >= 0:
        member = m.LeaveGroupRequestMember(member_id=side.member_id)
        left = side.ask(
            ApiKey.LEAVE_GROUP, 5, m.LeaveGroupRequest(group_id=group, members=[member])
        )
        answer = side.plain(left)
        side.member_id, side.generation = "", -1
        return answer
    metadata = struct.pack(">hih9si", 1, 1, 9, b"offsets-a", -1) + struct.pack(">i", 0)
    protocol = m.JoinGroupRequestProtocol(name="range", metadata=metadata)
    join = m.JoinGroupRequest(
        group_id=group, session_timeout_ms=300_000, rebalance_timeout_ms=300_000,
        protocol_type="consumer", protocols=[protocol],
    )  # fmt: skip
    first = side.ask(ApiKey.JOIN_GROUP, 9, join)
    join.member_id = side.member_id = first.member_id
    joined = side.ask(ApiKey.JOIN_GROUP, 9, join)
    side.generation = joined.generation_id
    sync = m.SyncGroupRequest(
        group_id=group, generation_id=joined.generation_id, member_id=side.member_id,
        protocol_type="consumer", protocol_name="range",
        assignments=[m.SyncGroupRequestAssignment(member_id=side.member_id, assignment=b"mine")],
    )  # fmt: skip
    synced = side.ask(ApiKey.SYNC_GROUP, 5, sync)
    return side.plain(first), side.plain(joined), side.plain(synced)


def join_or_leave_consumer(side: Side) -> Any:
    member_id, epoch = side.member_of("consumer")
    answers = []
    # The second one changes the subscription, so that there is a former epoch.
    for topics in (["offsets-b"], ["offsets-a"]) if epoch <= 0 else ([],):
        body = m.ConsumerGroupHeartbeatRequest(
            group_id=side.full("consumer"), member_id=member_id,
            member_epoch=-1 if epoch > 0 else side.epoch,
            rebalance_timeout_ms=300_000, subscribed_topic_names=list(topics) or None,
            topic_partitions=[] if epoch <= 0 and side.epoch == 0 else None,
        )  # fmt: skip
        answer = side.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, body)
        side.epoch = max(answer.member_epoch, 0)
        answers.append((answer.error_code, side.plain(answer.member_epoch > 0)))
    if epoch <= 0:  # it has revoked b
        body.member_epoch, body.topic_partitions = side.epoch, []
        answer = side.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, body)
        side.epoch = answer.member_epoch
        answers.append(side.plain(answer.assignment))
        body.topic_partitions = [
            m.ConsumerGroupHeartbeatRequestTopicPartition(
                topic_id=row.topic_id, partitions=row.partitions
            )
            for row in (answer.assignment.topic_partitions if answer.assignment else [])
        ]
        body.member_epoch = side.epoch
        side.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, body)
    return answers


def next_step(rng: random.Random) -> Step:
    make = rng.choices(
        [commit, fetch, delete_offsets, delete_groups, list_groups, describe, end_transaction,
         join_or_leave],
        [8, 5, 2.5, 1.5, 1, 2, 1, 1.5],
    )[0]  # fmt: skip
    return make(rng)


def run_history(seed: int, sides: tuple[Side, Side]) -> None:
    rng = random.Random(seed)
    trace = [f"seed {seed}"]
    for side in sides:
        find_coordinator(side.client, TRANSACTION, side.full("transaction"))
        for group in GROUPS:
            find_coordinator(side.client, GROUP, side.full(group))
        begin_transaction(side)
        delete_groups_named(side, [""])  # a former history has committed to it
        keep_simple_group(side)
        join_or_leave_classic(side)
        join_or_leave_consumer(side)
    for _ in range(STEPS):
        text, send = next_step(rng)
        kafka, ours = (send(side) for side in sides)
        trace.append(f"{text}: {kafka}")
        assert ours == kafka, "\n".join([*trace, f"but we: {ours}"])
        states = [side.groups() for side in sides]
        assert states[1] == states[0], "\n".join([*trace, f"{states[0]}", f"but we: {states[1]}"])
    for side in sides:  # ends what is open
        begin_transaction(side)


def topic_ids(client: RawClient) -> dict[str, bytes]:
    body = m.MetadataRequest(topics=[m.MetadataRequestTopic(name=name) for name in TOPICS])
    answer: Any = client.request(ApiKey.METADATA, 12, body)
    return {topic.name: topic.topic_id for topic in answer.topics}


@pytest.mark.timeout(300)  # many histories in CI
def test_requests_about_offsets_have_the_answers_and_effects_of_kafka(
    kafka_and_varve: tuple[KafkaBroker, VarveBroker],
) -> None:
    print(f"VARVE_OFFSET_SEEDS={SEEDS.start}:{SEEDS.stop}")
    create_topics(kafka_and_varve, TOPICS)
    for seed in SEEDS:
        with (
            RawClient(kafka_and_varve[0].port) as kafka,
            RawClient(kafka_and_varve[1].port) as ours,
        ):
            name = f"offsets-{seed}"
            run_history(
                seed,
                (
                    Side(kafka, name, topic_ids(kafka), first_epoch=2),
                    Side(ours, name, topic_ids(ours), first_epoch=1),
                ),
            )
