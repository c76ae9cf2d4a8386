"""Random requests of members of classic groups have the answers and effects of Kafka.

A history is a list of requests from a seed: members join, sync, beat, commit, leave and lose their
ids, some of them static; requests name other members, generations and protocols. It runs against
Kafka 4.3.0 and against this broker. JoinGroup and SyncGroup wait for other members, so each request
has a connection of its own; after each step the same requests are answered, with the same answers,
and both describe the group alike. Sources: KIP-62, KIP-345, KIP-394, KIP-559, KIP-814.
"""

import random
import re
import select
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest

from protocol import messages as m
from protocol.api import ApiKey
from protocol.codec import decode_response, encode_request
from protocol.errors import ErrorCode
from tests.interop.both_brokers import GROUP, create_topics, find_coordinator
from tests.support.draws import seeds_of_tests
from tests.support.peers.kafka import KafkaBroker
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

SEEDS = seeds_of_tests("VARVE_CLASSIC_GROUP_SEEDS", few=5, many=15)
STEPS: Final = 60
TOPIC: Final = "classic-members"
TYPE: Final = "consumer"
PROTOCOLS: Final = ["p", "q", "r"]
LONG_MS: Final = 300_000  # nothing expires in a test
NOBODY: Final = "nobody"  # an id of no member
ROUNDS: Final = 3  # of descriptions, after which a request without an answer waits for others
CORRELATION_ID: Final = 1
MADE_ID: Final = re.compile(r"(.*)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
OMITTED: Final = {"throttle_time_ms", "error_message"}
CHOSEN: Final = {"leader", "protocol_name", "members"}  # of the answer to JoinGroup
pytestmark = pytest.mark.xdist_group("kafka beside")

Protocols = tuple[tuple[str, bytes], ...]
Answers = dict[int, Any]  # by the number of the request


@dataclass(frozen=True)
class Request:
    """A request, by names of members; a field that its API does not have is ignored."""

    api: ApiKey
    version: int
    client_id: str
    member: str = ""
    instance: str | None = None
    generation: int = -1
    group: str = "group"
    protocol_type: str | None = TYPE
    protocol_name: str | None = None
    protocols: Protocols = ()
    assignments: tuple[tuple[str, bytes], ...] = ()
    leavers: tuple[tuple[str, str | None], ...] = ()
    session_timeout_ms: int = LONG_MS


@dataclass
class Client:
    """A client as it knows itself: the same on both sides as long as the answers are."""

    instance: str | None = None
    member: str = ""
    generation: int = -1
    protocol_name: str | None = None
    protocols: Protocols = ()
    led: tuple[str, ...] | None = None  # the members, if it is the leader
    due: str = "join"  # what it would do next
    waiting: set[int] = field(default_factory=set)  # numbers of requests without an answer

    def forget(self) -> None:
        self.member, self.generation, self.led, self.due = "", -1, None, "join"


class Side:
    """One broker, asked by one connection for each request without an answer."""

    def __init__(self, port: int, group: str) -> None:
        self._port = port
        self._group = group
        self._control = RawClient(port)  # of questions about the group
        self._idle: list[RawClient] = []
        self._waiting: dict[int, tuple[RawClient, Request]] = {}
        self._names: dict[str, str] = {}  # by member id
        self._ids: dict[str, str] = {}  # by name
        self._counts = Counter[str]()
        self.answers: Answers = {}

    def find_coordinator(self) -> None:
        find_coordinator(self._control, GROUP, self._group)
        body = m.HeartbeatRequest(group_id=self._group, member_id=NOBODY)

        def is_loaded() -> bool:
            answer: Any = self._control.request(ApiKey.HEARTBEAT, 4, body)
            return bool(answer.error_code == ErrorCode.UNKNOWN_MEMBER_ID)

        wait_until(is_loaded, f"the coordinator of {self._group}")

    def close(self) -> None:
        waiting = [connection for connection, _ in self._waiting.values()]
        for connection in (self._control, *self._idle, *waiting):
            connection.socket.close()

    def send(self, number: int, request: Request) -> None:
        connection = self._idle.pop() if self._idle else RawClient(self._port)
        body = self._body(request)
        # A static member that returns has the client id of its former self in Kafka.
        client_id = request.client_id if request.instance is None else "static"
        connection.send(
            encode_request(request.api, request.version, CORRELATION_ID, client_id, body)
        )
        self._waiting[number] = connection, request

    def receive(self) -> None:
        """Take all answers that have come."""
        numbers = {connection.socket: key for key, (connection, _) in self._waiting.items()}
        ready = select.select(list(numbers), [], [], 0)[0]
        for number in sorted(numbers[socket] for socket in ready):
            connection, request = self._waiting.pop(number)
            _, answer = decode_response(request.api, request.version, connection.receive_frame())
            self.answers[number] = self._plain(answer)
            self._idle.append(connection)

    def drop(self, number: int) -> None:
        """Forget a request that gets no answer."""
        self._waiting.pop(number)[0].socket.close()

    @property
    def waiting(self) -> set[int]:
        return set(self._waiting)

    @property
    def members(self) -> list[str]:
        """Return the names of all member ids of the past."""
        return list(self._ids)

    def describe(self) -> tuple[Any, Any]:
        """Return the group as DescribeGroups and ListGroups have it."""
        body = m.DescribeGroupsRequest(groups=[self._group])
        described = self._plain(self._control.request(ApiKey.DESCRIBE_GROUPS, 5, body))
        listed: Any = self._control.request(ApiKey.LIST_GROUPS, 5, m.ListGroupsRequest())
        listed.groups = [group for group in listed.groups if group.group_id == self._group]
        return described, self._plain(listed)

    def _plain(self, value: Any) -> Any:
        """Return an answer without what differs by chance: member ids, order."""
        if isinstance(value, m.Message):
            return {
                name: self._plain(getattr(value, name))
                for name in value.__slots__
                if name not in OMITTED
            }
        if isinstance(value, list):
            return sorted((self._plain(row) for row in value), key=repr)
        if isinstance(value, str):
            return "group" if value == self._group else self._name(value)
        return value

    def _name(self, text: str) -> str:
        made = MADE_ID.fullmatch(text)
        if made is None:
            return text
        if text not in self._names:
            prefix = made.group(1)
            name = f"{prefix}#{self._counts[prefix]}"
            self._counts[prefix] += 1
            self._names[text], self._ids[name] = name, text
        return self._names[text]

    def _id(self, name: str) -> str:
        return self._ids.get(name, name)

    def _body(self, request: Request) -> m.Message:
        common: Any = {
            "group_id": self._group if request.group else "",
            "member_id": self._id(request.member),
            "group_instance_id": request.instance,
        }
        match request.api:
            case ApiKey.JOIN_GROUP:
                return m.JoinGroupRequest(
                    session_timeout_ms=request.session_timeout_ms,
                    rebalance_timeout_ms=LONG_MS,
                    protocol_type=request.protocol_type or "",
                    protocols=[
                        m.JoinGroupRequestProtocol(name=name, metadata=metadata)
                        for name, metadata in request.protocols
                    ],
                    **common,
                )
            case ApiKey.SYNC_GROUP:
                return m.SyncGroupRequest(
                    generation_id=request.generation,
                    protocol_type=request.protocol_type,
                    protocol_name=request.protocol_name,
                    assignments=[
                        m.SyncGroupRequestAssignment(member_id=self._id(name), assignment=data)
                        for name, data in request.assignments
                    ],
                    **common,
                )
            case ApiKey.HEARTBEAT:
                return m.HeartbeatRequest(generation_id=request.generation, **common)
            case ApiKey.LEAVE_GROUP:
                leavers = [
                    m.LeaveGroupRequestMember(member_id=self._id(name), group_instance_id=instance)
                    for name, instance in request.leavers
                ]
                return m.LeaveGroupRequest(
                    group_id=common["group_id"], member_id=common["member_id"], members=leavers
                )
            case ApiKey.OFFSET_COMMIT:
                row = m.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
                topic = m.OffsetCommitRequestTopic(name=TOPIC, partitions=[row])
                return m.OffsetCommitRequest(
                    generation_id_or_member_epoch=request.generation, topics=[topic], **common
                )
            case _:
                assert request.api is ApiKey.DELETE_GROUPS
                return m.DeleteGroupsRequest(groups_names=[common["group_id"]])


# A group of which all joins were refused exists in Kafka for some minutes; with an offset, in both.
CREATION: Final = Request(ApiKey.OFFSET_COMMIT, 8, "admin")


class History:
    """The requests of one seed. What they name depends on the answers, which are equal."""

    def __init__(self, seed: int, sides: tuple[Side, Side]) -> None:
        self._rng = random.Random(seed)
        self._sides = sides
        self._clients = [Client() for _ in range(3)]
        self._clients += [Client(instance) for instance in ("one", "two", "two")]
        # If members prefer different protocols, the votes may be equal.
        self._has_one_preference = self._rng.random() < 0.7
        self._requests: dict[int, tuple[Client | None, Request]] = {}
        self._leader: str | None = None
        self._group: Any = None  # as it was described
        self.trace = [f"seed {seed}"]
        self.errors = Counter[str]()

    def run(self) -> None:
        assert self._step(None, CREATION)
        for _ in range(STEPS):
            if not self._step(*self._next()):
                # Both have chosen rightly, but not the same: the group begins anew.
                everyone = tuple((name, None) for name in self._sides[0].members)
                leave = Request(ApiKey.LEAVE_GROUP, 5, "reset", leavers=everyone)
                assert self._step(None, leave)
                for client in self._clients:
                    client.forget()

    def _step(self, client: Client | None, request: Request) -> bool:
        """Send a request; return whether both have chosen the same leader and protocol."""
        number = len(self._requests)
        self._requests[number] = client, request
        for side in self._sides:
            side.answers = {}
            side.send(number, request)
        if client is not None:
            client.waiting.add(number)
        seen: list[Any] = []

        def is_settled() -> bool:
            for _ in range(ROUNDS):
                for side in self._sides:
                    side.receive()
                self._drop_replaced(number)
                seen[:] = [(side.answers, side.describe()) for side in self._sides]
                kafka, ours = seen
                if kafka[0].keys() != ours[0].keys() or self._stated(*kafka) != self._stated(*ours):
                    return False
            return True

        with suppress(AssertionError):  # what differs is shown below
            wait_until(is_settled, "the same answers and states", 3)
        kafka, ours = seen
        self.trace.append(f"{number} {request}:\n    {kafka[0]}")
        chosen = self._chosen(kafka[0]), self._chosen(ours[0])
        is_other = chosen[0] != chosen[1]
        if is_other and self._may_differ(request, kafka[0], *chosen):
            views = [({n: _without_choice(a) for n, a in s[0].items()}, s[1]) for s in seen]
            self.trace.append(f"    we chose {chosen[1]}")
        else:
            is_other, views = False, seen
        for key, answer in kafka[0].items():
            if self._is_failure(self._requests[key][1], answer):
                kafka[0][key] = ours[0].get(key)
        text = "\n".join([*self.trace, f"{kafka[1]}", f"but we: {ours[0]}", f"    {ours[1]}"])
        assert views[0] == views[1], text
        self._group = kafka[1][0]["groups"][0]
        for answered, answer in sorted(kafka[0].items()):
            self._take(answered, answer)
        self._follow_leader(request)
        if request.api is ApiKey.DELETE_GROUPS and self._group["group_state"] == "Dead":
            assert self._step(None, CREATION)
        return not is_other

    def _follow_leader(self, request: Request) -> None:
        """Note whether the leader has left, or returned with another id."""
        members = {row["member_id"] for row in self._group["members"]}
        if self._leader not in members:
            self._leader = next(iter(self._replacements(request, members)), None)

    def _replacements(self, request: Request, members: Iterable[str]) -> set[str]:
        """Return the new id of the leader if a request without its id has replaced it."""
        if self._leader is None or request.api is not ApiKey.JOIN_GROUP or request.member:
            return set()
        if request.instance is None or request.instance != _prefix(self._leader):
            return set()
        return {name for name in members if _prefix(name) == request.instance}

    def _drop_replaced(self, number: int) -> None:
        """Forget requests that Kafka never answers.

        The same member has sent it again, or it waited for an assignment and has left.
        """
        kafka, ours = self._sides
        for other, answer in list(ours.answers.items()):
            sent, now = self._requests[other][1], self._requests[number][1]
            error = answer.get("error_code")
            is_replaced = (
                sent.api is now.api
                and now.member in (sent.member, answer.get("member_id"))
                and error == ErrorCode.REBALANCE_IN_PROGRESS
            )
            has_left = (
                sent.api is ApiKey.SYNC_GROUP
                and now.api is ApiKey.LEAVE_GROUP
                and error == ErrorCode.UNKNOWN_MEMBER_ID
            )
            if other in kafka.waiting and other != number and (is_replaced or has_left):
                kafka.drop(other)
                del ours.answers[other]
                for client in self._clients:
                    client.waiting.discard(other)

    @staticmethod
    def _is_failure(request: Request, answer: Any) -> bool:
        """Return whether Kafka fails: an id is pending, and a static member joins with it."""
        is_join = request.api is ApiKey.JOIN_GROUP and request.instance is not None
        return is_join and answer["error_code"] == ErrorCode.UNKNOWN_SERVER_ERROR

    @staticmethod
    def _stated(answers: Answers, description: tuple[Any, Any]) -> Any:
        return answers.keys(), description

    @staticmethod
    def _chosen(answers: Answers) -> tuple[Any, Any] | None:
        """Return leader and protocol of the generation that a join has completed."""
        joins = [a for a in answers.values() if "leader" in a and not a["error_code"]]
        newest = max(joins, key=lambda answer: answer["generation_id"], default=None)
        return None if newest is None else (newest["leader"], newest["protocol_name"])

    def _may_differ(self, request: Request, answers: Answers, kafka: Any, ours: Any) -> bool:
        """Return whether a group may have either leader and protocol."""
        if kafka is None or ours is None:
            return False
        joined = {
            answer["member_id"]: self._requests[number][1].protocols
            for number, answer in answers.items()
            if "leader" in answer and not answer["error_code"]
        }
        if kafka[0] != ours[0]:  # a new one among those that have joined
            has_leader = self._leader in joined or self._replacements(request, joined)
            if ours[0] not in joined or has_leader:
                return False
        if kafka[1] == ours[1]:
            return True
        names = [[name for name, _ in protocols] for protocols in joined.values()]
        shared = set(names[0]).intersection(*names)
        votes = Counter(next(name for name in row if name in shared) for row in names)
        return votes[kafka[1]] == votes[ours[1]] == max(votes.values())

    def _take(self, number: int, answer: Any) -> None:
        """Let the client know the answer to its request."""
        client, request = self._requests[number]
        self.errors.update(f"{request.api.name} {ErrorCode(code).name}" for code in _codes(answer))
        if client is None:
            return
        client.waiting.discard(number)
        error = answer.get("error_code")
        match request.api:
            case ApiKey.JOIN_GROUP if error == ErrorCode.NONE:
                self._leader = answer["leader"]
                client.member, client.generation = answer["member_id"], answer["generation_id"]
                client.protocol_name = answer["protocol_name"]
                client.protocols = request.protocols
                client.led = None
                if answer["leader"] == client.member:
                    client.led = tuple(row["member_id"] for row in answer["members"])
                client.due = "sync"
            case ApiKey.JOIN_GROUP if error == ErrorCode.MEMBER_ID_REQUIRED:
                client.member, client.due = answer["member_id"], "join"
            case ApiKey.SYNC_GROUP if error == ErrorCode.NONE:
                client.due = "beat"
            case ApiKey.LEAVE_GROUP:
                client.forget()
            case _ if error in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
                if request.member == client.member:
                    client.forget()
            case _ if error in (ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.ILLEGAL_GENERATION):
                client.due = "join"

    # Requests ------------------------------------------------------------------------------------

    def _next(self) -> tuple[Client | None, Request]:
        rng = self._rng
        kind = rng.choices(["client", "remove", "delete", "clear"], [60, 2, 1, 0.5])[0]
        lost = self._lost()
        if lost and rng.random() < 0.3:
            leavers = tuple((name, None) for name in lost)
            return None, Request(ApiKey.LEAVE_GROUP, 5, "admin", leavers=leavers)
        if kind == "clear":
            everyone = tuple((name, None) for name in self._sides[0].members)
            return None, Request(ApiKey.LEAVE_GROUP, 5, "clear", leavers=everyone)
        if kind == "remove":
            return None, self._remove()
        if kind == "delete":
            return None, Request(ApiKey.DELETE_GROUPS, 2, "admin")
        clients = self._clients[:-1] if rng.random() < 0.9 else self._clients
        free = [client for client in clients if not client.waiting]
        client = rng.choice(free if free and rng.random() < 0.93 else clients)
        request = self._of_client(client)
        return client, self._wrong(request) if rng.random() < 0.12 else request

    def _lost(self) -> list[str]:
        """Return the members for which the group waits, but which no client knows."""
        if self._group is None or self._group["group_state"] != "PreparingRebalance":
            return []
        owned = {client.member for client in self._clients}
        sent = [self._requests[n][1].member for client in self._clients for n in client.waiting]
        described = {row["member_id"]: row["group_instance_id"] for row in self._group["members"]}
        return [
            name
            for name in self._sides[0].members
            if name not in owned and name not in sent and described.get(name) is None
        ]

    def _remove(self) -> Request:
        """Return what an administrator sends to remove members."""
        rng = self._rng
        known = [row["member_id"] for row in self._group["members"]] if self._group else []
        owned = {client.member for client in self._clients}
        lost = [name for name in self._sides[0].members if name not in owned]
        rows: list[tuple[str, str | None]] = []
        for _ in range(rng.randint(1, 3)):
            name = rng.choice([NOBODY, "", *known, *known, *lost])
            instance = rng.choices([None, "one", "two", "three", ""], [6, 1, 1, 0.5, 0.3])[0]
            rows.append((name, instance))
        return Request(ApiKey.LEAVE_GROUP, rng.choice([3, 4, 5]), "admin", leavers=tuple(rows))

    def _of_client(self, client: Client) -> Request:
        """Return a request that fits what the client knows."""
        rng = self._rng
        due = client.due
        if rng.random() < 0.12 or (due == "beat" and rng.random() < 0.3):
            due = rng.choices(
                ["join", "sync", "beat", "commit", "leave", "lost"], [2, 1, 2, 3, 1, 1]
            )[0]
        is_static = client.instance is not None
        request = Request(
            ApiKey.HEARTBEAT,
            rng.randint(3, 4),
            f"c{len(self._requests)}",
            client.member,
            client.instance,
            client.generation,
            protocol_name=client.protocol_name,
        )
        match due:
            case "join" | "lost":
                oldest = 5 if is_static else 2
                version = rng.choices([9, rng.randint(oldest, 8)], [7, 3])[0]
                protocols = client.protocols
                if not protocols or rng.random() < 0.25:
                    protocols = self._protocols()
                member = "" if due == "lost" else client.member
                if due == "lost" and rng.random() < 0.6:
                    protocols = client.protocols or protocols
                return replace(
                    request,
                    api=ApiKey.JOIN_GROUP,
                    version=version,
                    member=member,
                    protocols=protocols,
                )
            case "sync":
                version = rng.choices([5, rng.randint(3 if is_static else 0, 4)], [7, 3])[0]
                return replace(
                    request,
                    api=ApiKey.SYNC_GROUP,
                    version=version,
                    assignments=self._assignments(client),
                )
            case "commit":
                version = rng.randint(7, 8)
                return replace(request, api=ApiKey.OFFSET_COMMIT, version=version)
            case "leave":
                version = rng.choices([5, 4, 3, 0 if is_static else rng.randint(0, 2)])[0]
                member = "" if is_static and rng.random() < 0.4 else client.member
                leavers = ((member, client.instance),)
                return replace(request, api=ApiKey.LEAVE_GROUP, version=version, leavers=leavers)
            case _:
                return request

    def _protocols(self) -> Protocols:
        rng = self._rng
        names = rng.choices([["p"], ["p", "q"], ["q", "r"], ["p", "q", "r"]], [3, 4, 1, 2])[0]
        if not self._has_one_preference:
            rng.shuffle(names := list(names))
        return tuple((name, rng.choice([b"", b"x", b"y"])) for name in names)

    def _assignments(self, client: Client) -> tuple[tuple[str, bytes], ...]:
        rng = self._rng
        number = len(self._requests)
        names: Iterable[str] = client.led or ()
        if client.led is None and rng.random() < 0.2:
            names = [client.member]
        rows = [(name, f"{name} in {number}".encode()) for name in names if rng.random() < 0.9]
        if rng.random() < 0.1:
            rows.append((NOBODY, b"nothing"))
        return tuple(rows)

    def _wrong(self, request: Request) -> Request:
        """Return a request with a field that does not fit."""
        rng = self._rng
        others = [client.member for client in self._clients]
        ids = [NOBODY, "", *others, *self._sides[0].members[-5:]]
        changes: list[dict[str, Any]] = [
            {"member": rng.choice(ids)},
            {"member": rng.choice(ids)},
            {"instance": rng.choice([None, "one", "two", "three", ""])},
        ]
        if request.api is not ApiKey.OFFSET_COMMIT:  # the group without a name takes commits
            changes.append({"group": ""})
        match request.api:
            case ApiKey.JOIN_GROUP:
                changes += [
                    {"protocol_type": rng.choice(["connect", ""])},
                    {"protocols": rng.choice([(), (("s", b""),), (("s", b""), ("q", b"z"))])},
                    {"session_timeout_ms": rng.choice([5_999, 1_800_001, 0, -1])},
                ]
            case ApiKey.SYNC_GROUP:
                changes += [
                    {"generation": request.generation + rng.choice([1, -1])},
                    {"protocol_type": rng.choice(["connect", "", None])},
                    {"protocol_name": rng.choice(["q", "s", "", None])},
                    {"assignments": ((NOBODY, b"x"), (request.member, b"y"))},
                ]
            case ApiKey.LEAVE_GROUP:
                rows = [(rng.choice(ids), rng.choice([None, "one", "two"])) for _ in range(2)]
                changes += [{"leavers": (*rows, *request.leavers)}, {"leavers": ()}]
            case _:
                changes += [{"generation": request.generation + rng.choice([1, -1])}] * 2
        changed = replace(request, **rng.choice(changes))
        has_instance = {
            ApiKey.JOIN_GROUP: 5, ApiKey.SYNC_GROUP: 3, ApiKey.HEARTBEAT: 3,
            ApiKey.OFFSET_COMMIT: 7, ApiKey.LEAVE_GROUP: 3,
        }  # fmt: skip
        if changed.instance is not None or changed.api is ApiKey.LEAVE_GROUP:
            version = max(changed.version, has_instance[changed.api])
            changed = replace(changed, version=version)
        return changed


def _codes(answer: Any) -> list[int]:
    """Return all error codes of an answer."""
    if isinstance(answer, list):
        return [code for row in answer for code in _codes(row)]
    if not isinstance(answer, dict):
        return []
    codes = [answer["error_code"]] if "error_code" in answer else []
    return codes + [code for value in answer.values() for code in _codes(value)]


def _prefix(name: str) -> str:
    return name.partition("#")[0]


def _without_choice(answer: Any) -> Any:
    if "leader" not in answer:
        return answer
    return {name: value for name, value in answer.items() if name not in CHOSEN}


@pytest.mark.timeout(600)  # many histories in CI
def test_members_in_any_order_have_the_answers_and_effects_of_kafka(
    kafka_and_varve: tuple[KafkaBroker, VarveBroker],
) -> None:
    print(f"VARVE_CLASSIC_GROUP_SEEDS={SEEDS.start}:{SEEDS.stop}")
    create_topics(kafka_and_varve, {TOPIC: 1})
    errors = Counter[str]()
    for seed in SEEDS:
        kafka, ours = (Side(broker.port, f"classic-{seed}") for broker in kafka_and_varve)
        history = History(seed, (kafka, ours))
        try:
            for side in (kafka, ours):
                side.find_coordinator()
            history.run()
        finally:
            kafka.close()
            ours.close()
        errors += history.errors
    print(sorted(errors.items()))
    wanted = [
        "JOIN_GROUP MEMBER_ID_REQUIRED",
        "JOIN_GROUP FENCED_INSTANCE_ID",
        "JOIN_GROUP INCONSISTENT_GROUP_PROTOCOL",
        "SYNC_GROUP NONE",
        "SYNC_GROUP REBALANCE_IN_PROGRESS",
    ]
    assert errors.keys() >= set(wanted)
