"""Random requests of members of consumer groups (KIP-848) have the answers of Kafka.

A history is a list of heartbeats from a seed: members join, acknowledge, change subscriptions,
come with a former epoch, leave and return, some of them static. It runs against Kafka 4.3.0 and
against this broker; after each request both describe the group alike.
"""

import random
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import pytest

from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from tests.interop.both_brokers import GROUP, create_topics, find_coordinator, wait_until_assigned
from tests.support.draws import seeds_of_tests
from tests.support.peers.kafka import KafkaBroker
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

SEEDS = seeds_of_tests("VARVE_GROUP_SEEDS", few=10, many=40)
STEPS: Final = 50
TOPICS: Final = {"members-a": 3, "members-b": 1, "members-c": 4}
NO_TOPIC: Final = "members-missing"
LOADING: Final = (
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
)
pytestmark = pytest.mark.xdist_group("kafka beside")

Assignment = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass
class Member:
    """A member as its client knows it: the same on both sides as long as the answers are."""

    member_id: str
    instance_id: str | None = None
    epoch: int = 0
    former_epoch: int | None = None  # if the last answer raised the epoch
    owned: Assignment = ()
    assigned: Assignment = ()


@dataclass(frozen=True)
class Request:
    """A heartbeat, by names of topics; None leaves a field as it was."""

    member_id: str
    epoch: int
    instance_id: str | None = None
    topics: tuple[str, ...] | None = None
    owned: Assignment | None = None
    assignor: str | None = None
    timeout_ms: int = -1


@dataclass
class Side:
    """One broker, asked by one connection."""

    client: RawClient
    group: str
    ids: dict[str, bytes]
    names: dict[bytes, str] = field(init=False)
    first_epoch: int | None = None  # of the group: Kafka 4.3 begins with 2

    def __post_init__(self) -> None:
        self.names = {topic_id: name for name, topic_id in self.ids.items()}

    def relative(self, epoch: int) -> int:
        """Return an epoch as if the group had begun with 1."""
        if epoch <= 0:
            return epoch
        if self.first_epoch is None:
            self.first_epoch = epoch
        return epoch - self.first_epoch + 1

    def absolute(self, epoch: int) -> int:
        return epoch if epoch <= 0 or self.first_epoch is None else epoch + self.first_epoch - 1

    def heartbeat(self, request: Request) -> tuple[str, int, Assignment | None]:
        owned = request.owned
        body = m.ConsumerGroupHeartbeatRequest(
            group_id=self.group,
            member_id=request.member_id,
            member_epoch=self.absolute(request.epoch),
            instance_id=request.instance_id,
            rebalance_timeout_ms=request.timeout_ms,
            subscribed_topic_names=None if request.topics is None else list(request.topics),
            server_assignor=request.assignor,
            topic_partitions=None
            if owned is None
            else [
                m.ConsumerGroupHeartbeatRequestTopicPartition(
                    topic_id=self.ids[name], partitions=list(partitions)
                )
                for name, partitions in owned
            ],
        )
        answers: list[Any] = []

        def is_answered() -> bool:
            answers.append(self.client.request(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, body))
            return answers[-1].error_code not in LOADING

        wait_until(is_answered, f"the coordinator of {self.group}")
        answer = answers[-1]
        assignment = answer.assignment
        return (
            ErrorCode(answer.error_code).name,
            self.relative(answer.member_epoch),
            None if assignment is None else self._named(assignment.topic_partitions),
        )

    def _named(self, topics: Any) -> Assignment:
        return tuple(
            sorted(
                (self.names[topic.topic_id], tuple(sorted(topic.partitions))) for topic in topics
            )
        )

    def describe(self) -> list[Any]:
        """Return the group and its members, without what is of the connection."""
        body = m.ConsumerGroupDescribeRequest(group_ids=[self.group])
        answer: Any = self.client.request(ApiKey.CONSUMER_GROUP_DESCRIBE, 1, body)
        group = answer.groups[0]
        members = sorted(
            (
                member.member_id,
                member.instance_id,
                self.relative(member.member_epoch),
                tuple(sorted(member.subscribed_topic_names)),
                self._named(member.assignment.topic_partitions),
                self._named(member.target_assignment.topic_partitions),
            )
            for member in group.members
        )
        error = ErrorCode(group.error_code).name
        return [
            error, group.group_state, self.relative(group.group_epoch),
            self.relative(group.assignment_epoch),
            group.assignor_name, members,
        ]  # fmt: skip


def next_request(rng: random.Random, members: list[Member]) -> tuple[Member, Request]:
    """Return a heartbeat that fits what the member was answered, or one that does not."""
    member = rng.choice(members)
    topics = tuple(sorted(rng.sample([*TOPICS, NO_TOPIC], rng.randint(1, 2))))
    if member.epoch <= 0:
        assignor = "range"
        request = Request(member.member_id, 0, member.instance_id, topics, (), assignor, 300_000)
        return member, request
    kind = rng.choices(
        ["alive", "acknowledge", "subscribe", "former", "leave", "join", "wrong"],
        [4, 8, 2, 1, 1, 0.7, 0.7],
    )[0]
    same = Request(member.member_id, member.epoch, member.instance_id)
    match kind:
        case "alive":
            return member, same
        case "acknowledge":
            member.owned = member.assigned
            return member, _changed(same, owned=member.owned)
        case "subscribe" if member.owned == member.assigned:
            return member, _changed(same, topics=topics)
        case "former" if member.former_epoch is not None:  # its answer was lost
            return member, _changed(same, epoch=member.former_epoch, owned=member.owned)
        case "leave":
            is_away = member.instance_id is not None and rng.random() < 0.6
            return member, Request(member.member_id, -2 if is_away else -1, member.instance_id)
        case "join" if member.instance_id is None:  # the client lost its state
            return member, Request(
                member.member_id, 0, member.instance_id, topics, (), "range", 300_000
            )
        case _:
            return member, rng.choice(
                [
                    _changed(same, epoch=member.epoch + 1),
                    _changed(same, member_id=str(UUID(int=rng.getrandbits(128)))),
                    _changed(same, assignor="missing"),
                    _changed(same, owned=(("members-a", (0, 1, 2)),)),
                    Request(member.member_id, -3, member.instance_id),
                ]
            )


def _changed(request: Request, **changes: Any) -> Request:
    return Request(**{**request.__dict__, **changes})


def run_history(seed: int, sides: tuple[Side, Side]) -> set[str]:
    rng = random.Random(seed)
    members = [Member(str(UUID(int=rng.getrandbits(128)))) for _ in range(2)]
    members += [Member(str(UUID(int=rng.getrandbits(128))), name) for name in ("one", "two", "two")]
    trace, errors = [f"seed {seed}"], set[str]()
    present = set[str]()
    for _ in range(STEPS):
        member, request = next_request(rng, members)
        if request.epoch == 0 and request.instance_id and request.member_id in present:
            continue  # Kafka makes a static member wait for the end of its own session
        kafka, ours = (side.heartbeat(request) for side in sides)
        trace.append(f"{request}: {kafka}")
        if kafka[2] is None:  # we repeat it to a member that owns something else
            ours = (*ours[:2], None)
        assert ours == kafka, "\n".join([*trace, f"but we: {ours}"])
        error, epoch, assignment = kafka
        errors.add(error)
        if error == "NONE":
            was_raised = 0 < request.epoch < epoch
            member.former_epoch = request.epoch if was_raised else None
            member.epoch = epoch
            if assignment is not None:
                member.assigned = assignment
            if request.epoch <= 0:
                member.owned = ()
        elif error == "FENCED_MEMBER_EPOCH" and member.instance_id is not None:
            pass  # it could not return before its session ends; ours can
        elif error in ("UNKNOWN_MEMBER_ID", "FENCED_MEMBER_EPOCH", "FENCED_INSTANCE_ID"):
            member.epoch, member.owned, member.assigned = 0, (), ()
        states = [side.describe() for side in sides]
        assert states[1] == states[0], "\n".join([*trace, f"{states[0]}", f"but we: {states[1]}"])
        present = {row[0] for row in states[0][-1] if row[2] != -2}
    return errors


def topic_ids(client: RawClient) -> dict[str, bytes]:
    body = m.MetadataRequest(topics=[m.MetadataRequestTopic(name=name) for name in TOPICS])
    answer: Any = client.request(ApiKey.METADATA, 12, body)
    return {topic.name: topic.topic_id for topic in answer.topics}


@pytest.mark.timeout(300)  # many histories in CI
def test_heartbeats_in_any_order_have_the_answers_and_effects_of_kafka(
    kafka_and_varve: tuple[KafkaBroker, VarveBroker],
) -> None:
    print(f"VARVE_GROUP_SEEDS={SEEDS.start}:{SEEDS.stop}")
    create_topics(kafka_and_varve, TOPICS)
    wait_until_assigned(kafka_and_varve, TOPICS)
    errors = set[str]()
    for seed in SEEDS:
        group = f"members-{seed}"
        with (
            RawClient(kafka_and_varve[0].port) as kafka,
            RawClient(kafka_and_varve[1].port) as ours,
        ):
            for client in (kafka, ours):
                find_coordinator(client, GROUP, group)
            sides = Side(kafka, group, topic_ids(kafka)), Side(ours, group, topic_ids(ours))
            errors |= run_history(seed, sides)
    assert errors >= {"NONE", "FENCED_MEMBER_EPOCH", "UNKNOWN_MEMBER_ID"}
