"""The group APIs as clients see them: every version through the real codec, both ways."""

import asyncio
import inspect
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from broker.event_loop.loop_turns import FreedLater, Turns
from broker.groups.classic.model import CommitRequested
from broker.groups.consumer.model import ConsumerGroup, ConsumerMember
from broker.groups.coordinator import GroupCoordinator
from broker.groups.offsets.offset_records import committed_offset
from broker.groups.offsets.offsets_store import LoadedPartition
from broker.groups.settings import CoordinatorSettings
from broker.groups.topic_regex import EVERYTHING, TopicViewer
from broker.handlers.groups import (
    administration,
    classic_protocol,
    committed_offsets,
    consumer_protocol,
    find_coordinator,
)
from broker.security.principal import Principal
from broker.topics.internal_topic import KeyedLog, PartitionState
from broker.topics.producer_ids import Producer
from protocol import messages as m
from protocol.api import APIS, ApiKey
from protocol.codec import decode_response, encode_request, encode_response
from protocol.errors import ErrorCode
from tests.support.broker.groups.offsets_log import OffsetsLog
from tests.support.clocks.all_turns import take_all_turns
from tests.support.clocks.virtual_clock import VirtualClock, settle
from tests.support.protocol.requests import advertised_range, decode_request

HANDLERS: dict[ApiKey, Any] = {
    ApiKey.FIND_COORDINATOR: find_coordinator.find_coordinator,
    ApiKey.JOIN_GROUP: classic_protocol.join_group,
    ApiKey.SYNC_GROUP: classic_protocol.sync_group,
    ApiKey.HEARTBEAT: classic_protocol.heartbeat,
    ApiKey.LEAVE_GROUP: classic_protocol.leave_group,
    ApiKey.LIST_GROUPS: administration.list_groups,
    ApiKey.DESCRIBE_GROUPS: administration.describe_groups,
    ApiKey.DELETE_GROUPS: administration.delete_groups,
    ApiKey.OFFSET_COMMIT: committed_offsets.offset_commit,
    ApiKey.OFFSET_FETCH: committed_offsets.offset_fetch,
    ApiKey.OFFSET_DELETE: committed_offsets.offset_delete,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: consumer_protocol.consumer_group_heartbeat,
    ApiKey.CONSUMER_GROUP_DESCRIBE: consumer_protocol.consumer_group_describe,
}
ALL_OPERATIONS = 1 << 3 | 1 << 6 | 1 << 8
CONSUMER = [m.JoinGroupRequestProtocol(name="range", metadata=b"meta")]


def versions(key: ApiKey, first: int = 0, last: int = 99) -> list[int]:
    api_range = advertised_range(key)
    return list(range(max(first, api_range.min_version), min(last, api_range.max_version) + 1))


def id_of(topic: str) -> bytes:
    return topic.encode().ljust(16, b".")


@dataclass
class Client:
    """A broker with topic "orders" of three partitions, as the context of a request sees it."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    log: OffsetsLog = field(default_factory=OffsetsLog)
    node_id: int = 7
    host: str = "127.0.0.1"
    port: int = 9092
    java_client_host: str = "/10.0.0.1"
    created: ErrorCode = ErrorCode.NONE
    topics: dict[str, int] = field(default_factory=lambda: {"orders": 3})
    has_consumer_groups: bool = True
    creator: Principal | None = None
    viewer: TopicViewer = EVERYTHING
    services: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(freed_later=FreedLater())
    )

    def __post_init__(self) -> None:
        store = KeyedLog(1, self.log.append)
        self.coordinator = GroupCoordinator(store, self.clock, CoordinatorSettings())
        take_all_turns(self.coordinator.loading.activate(0, LoadedPartition()))

    async def wait_offsets_topic(self) -> ErrorCode:
        return self.created

    def partition_count(self, topic: str) -> int | None:
        return self.topics.get(topic)

    def topic_id(self, name: str) -> bytes | None:
        return id_of(name) if name in self.topics else None

    def topic_name(self, topic_id: bytes) -> str | None:
        return next((name for name in self.topics if id_of(name) == topic_id), None)

    def wall_ms(self) -> int:
        return self.clock.wall_ms()

    def may(self, *_: Any, is_filter: bool = False) -> bool:
        return True

    may_group = may_topic = may_cluster = may

    def group_operations(self, group_id: str) -> int:
        return ALL_OPERATIONS

    async def ask(self, key: ApiKey, version: int, body: Any) -> Any:
        assert version in APIS[key].versions
        frame = encode_request(key, version, 1, "my-client", body)[4:]
        header, request = decode_request(key, version, frame)
        answer = HANDLERS[key](self, header, request)
        if inspect.isawaitable(answer):
            answer = await answer
        frame = encode_response(key, version, 1, answer)[4:]
        return decode_response(key, version, frame)[1]

    async def join(self, version: int = 9, member_id: str = "", **fields: Any) -> Any:
        body = m.JoinGroupRequest(
            group_id="g",
            session_timeout_ms=10_000,
            rebalance_timeout_ms=60_000,
            member_id=member_id,
            protocol_type="consumer",
            protocols=fields.pop("protocols", CONSUMER),
            **fields,
        )
        return await self.ask(ApiKey.JOIN_GROUP, version, body)

    async def stable(self) -> str:
        first = await self.join()
        joined = await self.join(member_id=first.member_id)
        synced = await self.sync(5, joined.member_id, assignment=b"mine")
        assert synced.error_code == 0
        return str(joined.member_id)

    async def sync(self, version: int, member_id: str, assignment: bytes = b"") -> Any:
        body = m.SyncGroupRequest(
            group_id="g",
            generation_id=1,
            member_id=member_id,
            protocol_type="consumer" if version >= 5 else None,
            protocol_name="range" if version >= 5 else None,
            assignments=[m.SyncGroupRequestAssignment(member_id=member_id, assignment=assignment)],
        )
        return await self.ask(ApiKey.SYNC_GROUP, version, body)

    async def commit(
        self,
        version: int = 9,
        *,
        offset: int = 5,
        metadata: str | None = "",
        topic: str = "orders",
        index: int = 0,
        **fields: Any,
    ) -> int:
        partition = m.OffsetCommitRequestPartition(
            partition_index=index, committed_offset=offset, committed_metadata=metadata
        )
        if version >= 6:
            partition.committed_leader_epoch = 4
        body = m.OffsetCommitRequest(
            group_id=fields.pop("group_id", "g"),
            topics=[
                m.OffsetCommitRequestTopic(
                    name=topic, topic_id=id_of(topic), partitions=[partition]
                )
            ],
            **fields,
        )
        answer = await self.ask(ApiKey.OFFSET_COMMIT, version, body)
        if version >= 10:
            assert answer.topics[0].topic_id == id_of(topic)
        else:
            assert answer.topics[0].name == topic
        assert answer.topics[0].partitions[0].partition_index == index
        return int(answer.topics[0].partitions[0].error_code)

    async def fetch(
        self, version: int = 9, topics: dict[str, list[int]] | None = None, group_id: str = "g"
    ) -> Any:
        """The answer for one group; None for topics asks for all."""
        if version >= 8:
            expected = None
            if topics is not None:
                expected = [
                    m.OffsetFetchRequestGroupTopic(name=t, topic_id=id_of(t), partition_indexes=i)
                    for t, i in topics.items()
                ]
            request_groups = [m.OffsetFetchRequestGroup(group_id=group_id, topics=expected)]
            answer = await self.ask(
                ApiKey.OFFSET_FETCH, version, m.OffsetFetchRequest(groups=request_groups)
            )
            assert answer.groups[0].group_id == group_id
            if version >= 10:
                for topic in answer.groups[0].topics:
                    topic.name = topic.topic_id.rstrip(b".").decode()
            return answer.groups[0]
        old = None
        if topics is not None:
            old = [
                m.OffsetFetchRequestTopic(name=t, partition_indexes=i) for t, i in topics.items()
            ]
        body = m.OffsetFetchRequest(group_id=group_id, topics=old)
        return await self.ask(ApiKey.OFFSET_FETCH, version, body)


# FindCoordinator ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(ApiKey.FIND_COORDINATOR, last=3))
async def test_a_group_is_coordinated_here(version: int) -> None:
    answer = await Client().ask(ApiKey.FIND_COORDINATOR, version, m.FindCoordinatorRequest(key="g"))
    assert (answer.error_code, answer.node_id, answer.host, answer.port) == (
        0,
        7,
        "127.0.0.1",
        9092,
    )


@pytest.mark.parametrize("version", versions(ApiKey.FIND_COORDINATOR, first=4))
async def test_many_groups_are_found_at_once(version: int) -> None:
    body = m.FindCoordinatorRequest(coordinator_keys=["a", "b"])
    answer = await Client().ask(ApiKey.FIND_COORDINATOR, version, body)
    assert [(c.key, c.error_code, c.node_id) for c in answer.coordinators] == [
        ("a", 0, 7),
        ("b", 0, 7),
    ]


async def test_another_kind_of_key_is_an_invalid_request() -> None:
    body = m.FindCoordinatorRequest(key_type=2, coordinator_keys=["share"])
    answer = await Client().ask(ApiKey.FIND_COORDINATOR, 6, body)
    assert answer.coordinators[0].error_code == ErrorCode.INVALID_REQUEST


async def test_a_group_whose_partition_is_offline_has_no_coordinator() -> None:
    client = Client()
    client.coordinator.loading.deactivate(0, PartitionState.OFFLINE)
    answer = await client.ask(ApiKey.FIND_COORDINATOR, 0, m.FindCoordinatorRequest(key="g"))
    assert answer.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE


async def test_without_an_offsets_topic_there_is_no_coordinator() -> None:
    client = Client(created=ErrorCode.COORDINATOR_NOT_AVAILABLE)
    answer = await client.ask(ApiKey.FIND_COORDINATOR, 0, m.FindCoordinatorRequest(key="g"))
    assert answer.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE


# Members ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(ApiKey.JOIN_GROUP))
async def test_a_member_joins(version: int) -> None:
    client = Client()
    answer = await client.join(version)
    if version >= 4:
        assert answer.error_code == ErrorCode.MEMBER_ID_REQUIRED
        assert answer.protocol_name == (None if version >= 7 else "")
        answer = await client.join(version, answer.member_id)
    assert answer.error_code == 0
    assert answer.member_id.startswith("my-client-")
    assert answer.leader == answer.member_id
    assert answer.generation_id == 1
    assert answer.protocol_name == "range"
    assert answer.protocol_type == ("consumer" if version >= 7 else None)
    assert [(x.member_id, x.metadata) for x in answer.members] == [(answer.member_id, b"meta")]


async def test_in_version_0_the_session_timeout_is_the_rebalance_timeout() -> None:
    client = Client()
    await client.join(0)
    _, state = client.coordinator.describe("g")
    assert state is not None
    assert [x.rebalance_timeout_ms for x in state.group.members.values()] == [10_000]


@pytest.mark.parametrize("version", versions(ApiKey.SYNC_GROUP))
async def test_a_leader_gives_itself_its_assignment(version: int) -> None:
    client = Client()
    joined = await client.join(3)
    answer = await client.sync(version, joined.member_id, b"mine")
    assert (answer.error_code, answer.assignment) == (0, b"mine")
    assert answer.protocol_name == ("range" if version >= 5 else None)


async def test_from_version_5_a_sync_has_to_name_its_protocol() -> None:
    client = Client()
    joined = await client.join(3)
    body = m.SyncGroupRequest(group_id="g", generation_id=1, member_id=joined.member_id)
    answer = await client.ask(ApiKey.SYNC_GROUP, 5, body)
    assert answer.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL


@pytest.mark.parametrize("version", versions(ApiKey.HEARTBEAT))
async def test_a_heartbeat_is_answered(version: int) -> None:
    client = Client()
    member = await client.stable()
    body = m.HeartbeatRequest(group_id="g", generation_id=1, member_id=member)
    assert (await client.ask(ApiKey.HEARTBEAT, version, body)).error_code == 0
    body.member_id = "unknown"
    answer = await client.ask(ApiKey.HEARTBEAT, version, body)
    assert answer.error_code == ErrorCode.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("version", versions(ApiKey.LEAVE_GROUP, last=2))
async def test_a_member_leaves_alone(version: int) -> None:
    client = Client()
    body = m.LeaveGroupRequest(group_id="g", member_id=await client.stable())
    assert (await client.ask(ApiKey.LEAVE_GROUP, version, body)).error_code == 0
    answer = await client.ask(ApiKey.LEAVE_GROUP, version, body)
    assert answer.error_code == ErrorCode.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("version", versions(ApiKey.LEAVE_GROUP, first=3))
async def test_members_leave_together(version: int) -> None:
    client = Client()
    leavers = [m.LeaveGroupRequestMember(member_id=x) for x in (await client.stable(), "unknown")]
    body = m.LeaveGroupRequest(group_id="g", members=leavers)
    answer = await client.ask(ApiKey.LEAVE_GROUP, version, body)
    assert answer.error_code == 0
    assert [x.error_code for x in answer.members] == [0, ErrorCode.UNKNOWN_MEMBER_ID]


# Offsets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(ApiKey.OFFSET_COMMIT))
async def test_an_offset_is_committed(version: int) -> None:
    client = Client()
    assert await client.commit(version, offset=-2, metadata="méta") == 0
    partition = (await client.fetch(9)).topics[0].partitions[0]
    assert (partition.committed_offset, partition.metadata) == (-2, "méta")
    assert partition.committed_leader_epoch == (4 if version >= 6 else -1)


async def test_no_metadata_is_empty_metadata() -> None:
    client = Client()
    assert await client.commit(metadata=None) == 0
    assert (await client.fetch()).topics[0].partitions[0].metadata == ""


@pytest.mark.parametrize(
    ("length", "error"),
    [
        (4_096, ErrorCode.NONE),
        (4_097, ErrorCode.OFFSET_METADATA_TOO_LARGE),
    ],
)
async def test_metadata_has_a_bound(length: int, error: ErrorCode) -> None:
    client = Client()
    assert await client.commit(metadata="m" * length) == error
    assert bool((await client.fetch()).topics) == (error is ErrorCode.NONE)


@pytest.mark.parametrize(("topic", "index"), [("nope", 0), ("orders", 3), ("orders", -1)])
async def test_offsets_are_kept_for_partitions_that_exist(topic: str, index: int) -> None:
    client = Client()
    error = await client.commit(topic=topic, index=index)
    assert error == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_retention_time_of_the_clients_own_is_kept() -> None:
    client = Client()
    assert await client.commit(3, retention_time_ms=1_000) == 0
    assert await client.coordinator.deletion.expire_offsets(client.wall_ms() + 1_000) == 1
    assert await client.commit(3, retention_time_ms=2**63 - 1) == 0


async def test_a_commit_from_outside_a_live_group_is_refused() -> None:
    client = Client()
    member = await client.stable()
    assert await client.commit() == ErrorCode.UNKNOWN_MEMBER_ID
    assert await client.commit(member_id=member, generation_id_or_member_epoch=1) == 0


@pytest.mark.parametrize(
    ("version", "error"),
    [(8, ErrorCode.ILLEGAL_GENERATION), (9, ErrorCode.GROUP_ID_NOT_FOUND)],
)
async def test_a_commit_of_a_member_to_no_group_has_an_error_of_its_version(
    version: int, error: ErrorCode
) -> None:
    client = Client()
    generation = {"generation_id_or_member_epoch": 3, "member_id": "gone"}
    assert await client.commit(version, **generation) == error


async def test_who_commits_is_checked_before_the_metadata() -> None:
    client = Client()
    await client.stable()
    error = await client.commit(
        metadata="m" * 5000, generation_id_or_member_epoch=1, member_id="another"
    )
    assert error == ErrorCode.UNKNOWN_MEMBER_ID


async def test_an_empty_group_id_is_invalid_where_it_cannot_have_members() -> None:
    client = Client()
    await client.commit(group_id="")
    deletion = m.OffsetDeleteRequest(group_id="")
    answer = await client.ask(ApiKey.OFFSET_DELETE, 0, deletion)
    assert answer.error_code == ErrorCode.INVALID_GROUP_ID
    description = m.ConsumerGroupDescribeRequest(group_ids=[""])
    answer = await client.ask(ApiKey.CONSUMER_GROUP_DESCRIBE, 1, description)
    assert answer.groups[0].error_code == ErrorCode.INVALID_GROUP_ID


@pytest.mark.parametrize("version", versions(ApiKey.OFFSET_FETCH))
async def test_what_was_not_committed_is_minus_one_without_error(version: int) -> None:
    client = Client()
    await client.commit(index=1, offset=9)
    answer = await client.fetch(version, {"orders": [0, 1], "nope": [5]})
    assert answer.error_code == 0
    assert [
        (t.name, p.partition_index, p.committed_offset, p.metadata, p.error_code)
        for t in answer.topics
        for p in t.partitions
    ] == [
        ("orders", 0, -1, "", 0),
        ("orders", 1, 9, "", 0),
        ("nope", 5, -1, "", ErrorCode.UNKNOWN_TOPIC_ID if version >= 10 else 0),
    ]


async def test_a_commit_by_an_unknown_id_is_refused_and_the_other_topics_are_committed() -> None:
    client = Client()
    rows = [
        m.OffsetCommitRequestTopic(
            topic_id=id_of(name),
            partitions=[m.OffsetCommitRequestPartition(partition_index=0, committed_offset=8)],
        )
        for name in ("nope", "orders")
    ]
    body = m.OffsetCommitRequest(group_id="g", topics=rows)
    answer = await client.ask(ApiKey.OFFSET_COMMIT, 10, body)
    assert [(t.topic_id, [p.error_code for p in t.partitions]) for t in answer.topics] == [
        (id_of("nope"), [ErrorCode.UNKNOWN_TOPIC_ID]),
        (id_of("orders"), [0]),
    ]
    assert (await client.fetch(9)).topics[0].partitions[0].committed_offset == 8


async def test_offsets_of_a_deleted_topic_are_left_out_where_topics_have_ids() -> None:
    client = Client()
    client.topics["audit"] = 1
    await client.commit(topic="audit")
    await client.commit(topic="orders")
    del client.topics["audit"]
    assert [t.name for t in (await client.fetch(9)).topics] == ["audit", "orders"]
    assert [t.name for t in (await client.fetch(10)).topics] == ["orders"]


@pytest.mark.parametrize("version", versions(ApiKey.OFFSET_FETCH, first=2))
async def test_no_topics_means_all_topics(version: int) -> None:
    client = Client()
    client.topics["audit"] = 1
    for topic, index in (("orders", 2), ("audit", 0), ("orders", 0)):
        await client.commit(topic=topic, index=index)
    answer = await client.fetch(version, None)
    assert [(t.name, [p.partition_index for p in t.partitions]) for t in answer.topics] == [
        ("audit", [0]),
        ("orders", [0, 2]),
    ]


@pytest.mark.parametrize("version", versions(ApiKey.OFFSET_FETCH, first=2))
async def test_an_unknown_group_has_no_offsets_and_no_error(version: int) -> None:
    answer = await Client().fetch(version, None, "nobody")
    assert (answer.error_code, answer.topics) == (0, [])


@pytest.mark.parametrize("version", versions(ApiKey.OFFSET_FETCH))
async def test_while_offsets_are_loaded_a_fetch_is_told_to_wait(version: int) -> None:
    client = Client()
    client.coordinator.loading.deactivate(0, PartitionState.LOADING)
    answer = await client.fetch(version, {"orders": [0]})
    if version == 1:
        answer = answer.topics[0].partitions[0]
    assert answer.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


async def test_offsets_are_deleted() -> None:
    client = Client()
    await client.commit()
    partitions = [m.OffsetDeleteRequestPartition(partition_index=i) for i in (0, 9)]
    body = m.OffsetDeleteRequest(
        group_id="g", topics=[m.OffsetDeleteRequestTopic(name="orders", partitions=partitions)]
    )
    answer = await client.ask(ApiKey.OFFSET_DELETE, 0, body)
    assert [p.error_code for p in answer.topics[0].partitions] == [
        0,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert (await client.fetch()).topics == []
    body.group_id = "nobody"
    answer = await client.ask(ApiKey.OFFSET_DELETE, 0, body)
    assert answer.error_code == ErrorCode.GROUP_ID_NOT_FOUND


# Administration -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(ApiKey.LIST_GROUPS))
async def test_groups_are_listed(version: int) -> None:
    client = Client()
    await client.stable()
    await client.commit(group_id="simple")
    answer = await client.ask(ApiKey.LIST_GROUPS, version, m.ListGroupsRequest())
    assert answer.error_code == 0
    listed = {g.group_id: (g.protocol_type, g.group_state, g.group_type) for g in answer.groups}
    states = ("Stable", "Empty") if version >= 4 else ("", "")
    kind = "classic" if version >= 5 else ""
    assert listed == {"g": ("consumer", states[0], kind), "simple": ("", states[1], kind)}


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        ({"states_filter": ["stable"]}, ["g"]),
        ({"states_filter": ["Empty", "Dead"]}, ["simple"]),
        ({"types_filter": ["classic"]}, ["g", "simple"]),
        ({"types_filter": ["consumer"]}, []),
        ({"types_filter": ["Classic"], "states_filter": ["PreparingRebalance"]}, []),
    ],
)
async def test_groups_are_listed_by_state_and_type(
    filters: dict[str, list[str]], ids: list[str]
) -> None:
    client = Client()
    await client.stable()
    await client.commit(group_id="simple")
    answer = await client.ask(ApiKey.LIST_GROUPS, 5, m.ListGroupsRequest(**filters))
    assert [g.group_id for g in answer.groups] == ids


async def test_a_list_waits_for_groups_that_are_loaded_not_for_a_topic_that_is_not_there() -> None:
    client = Client()
    client.coordinator.loading.deactivate(0, PartitionState.LOADING)
    answer = await client.ask(ApiKey.LIST_GROUPS, 5, m.ListGroupsRequest())
    assert answer.error_code == 0
    client.topics["__consumer_offsets"] = 1
    answer = await client.ask(ApiKey.LIST_GROUPS, 5, m.ListGroupsRequest())
    assert answer.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


@pytest.mark.parametrize("version", versions(ApiKey.DESCRIBE_GROUPS))
async def test_a_stable_group_is_described_with_its_members(version: int) -> None:
    client = Client()
    member = await client.stable()
    body = m.DescribeGroupsRequest(groups=["g"])
    group = (await client.ask(ApiKey.DESCRIBE_GROUPS, version, body)).groups[0]
    assert (group.error_code, group.group_id, group.group_state) == (0, "g", "Stable")
    assert (group.protocol_type, group.protocol_data) == ("consumer", "range")
    assert group.authorized_operations == -(2**31)
    described = group.members[0]
    assert (described.member_id, described.client_id) == (member, "my-client")
    assert described.client_host == "/10.0.0.1"
    assert (described.member_metadata, described.member_assignment) == (b"meta", b"mine")


async def test_a_group_that_is_named_often_is_told_of_once() -> None:
    client = Client()
    await client.stable()
    body = m.DescribeGroupsRequest(groups=["g", "h"] * 500)
    answer = await client.ask(ApiKey.DESCRIBE_GROUPS, 5, body)
    assert [group.group_id for group in answer.groups] == ["g", "h"]
    all_of_it = m.OffsetFetchRequestGroup(group_id="g", topics=None)
    answer = await client.ask(
        ApiKey.OFFSET_FETCH, 8, m.OffsetFetchRequest(groups=[all_of_it] * 500)
    )
    assert [group.group_id for group in answer.groups] == ["g"]


@pytest.mark.parametrize("version", versions(ApiKey.OFFSET_FETCH))
async def test_a_partition_that_is_named_often_is_fetched_once(version: int) -> None:
    client = Client()
    await client.commit(index=1, offset=9)
    answer = await client.fetch(version, {"orders": [1, 0] * 500})
    rows = [(p.partition_index, p.committed_offset) for t in answer.topics for p in t.partitions]
    assert rows == [(1, 9), (0, -1)]


@pytest.mark.parametrize("version", versions(ApiKey.DESCRIBE_GROUPS))
async def test_an_unknown_group_is_dead(version: int) -> None:
    body = m.DescribeGroupsRequest(groups=["nobody"])
    group = (await Client().ask(ApiKey.DESCRIBE_GROUPS, version, body)).groups[0]
    assert group.group_state == "Dead"
    assert group.error_code == (ErrorCode.GROUP_ID_NOT_FOUND if version >= 6 else 0)


async def test_a_group_between_generations_is_described_with_its_former_assignments() -> None:
    client = Client()
    member = await client.stable()
    await client.join(member_id=member)  # the leader asks for a new assignment
    body = m.DescribeGroupsRequest(groups=["g"], include_authorized_operations=True)
    group = (await client.ask(ApiKey.DESCRIBE_GROUPS, 6, body)).groups[0]
    assert group.group_state == "CompletingRebalance"
    assert group.protocol_data == ""
    described = group.members[0]
    assert (described.member_metadata, described.member_assignment) == (b"", b"mine")
    assert group.authorized_operations == 1 << 3 | 1 << 6 | 1 << 8


@pytest.mark.parametrize("version", versions(ApiKey.DELETE_GROUPS))
async def test_groups_are_deleted_each_with_its_answer(version: int) -> None:
    client = Client()
    await client.stable()
    await client.commit(group_id="simple")
    body = m.DeleteGroupsRequest(groups_names=["g", "simple", "nobody"])
    answer = await client.ask(ApiKey.DELETE_GROUPS, version, body)
    assert [(r.group_id, r.error_code) for r in answer.results] == [
        ("g", ErrorCode.NON_EMPTY_GROUP),
        ("simple", 0),
        ("nobody", ErrorCode.GROUP_ID_NOT_FOUND),
    ]


@pytest.mark.parametrize(
    ("topic", "error"),
    [
        ("x" * 249, ErrorCode.NONE),
        ("x" * 250, ErrorCode.INVALID_TOPIC_EXCEPTION),
        ("é", ErrorCode.INVALID_TOPIC_EXCEPTION),
    ],
)
async def test_a_group_keeps_no_name_that_no_topic_can_have(topic: str, error: ErrorCode) -> None:
    body = m.ConsumerGroupHeartbeatRequest(
        group_id="g",
        member_id="m",
        member_epoch=0,
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=[topic],
        topic_partitions=[],
    )
    answer = await Client().ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, body)
    assert answer.error_code == error


async def test_a_member_with_many_topics_is_described_in_turns_and_no_names_are_sorted(
    monkeypatch: pytest.MonkeyPatch, every_turn_is_over: None
) -> None:
    """A member may have 25,000 topics: to sort their names takes 8 ms."""
    client = Client(topics={f"t{number}": 1 for number in range(50)})
    owned = {(id_of(name), 0): 1 for name in client.topics}
    member = ConsumerMember(
        "m", None, None, "c", "/h", 60_000, frozenset(client.topics), epoch=1, assigned=owned
    )
    group = ConsumerGroup("g", 1, 0, 1, {"m": member}, {"m": frozenset(owned)})
    client.coordinator.loading.deactivate(0, PartitionState.LOADING)
    await client.coordinator.loading.activate(0, LoadedPartition(consumer_groups={"g": group}))
    monkeypatch.setattr(consumer_protocol, "sorted", None, raising=False)
    body = m.ConsumerGroupDescribeRequest(group_ids=["g"])
    asked = asyncio.ensure_future(client.ask(ApiKey.CONSUMER_GROUP_DESCRIBE, 1, body))
    rounds = 0
    while not asked.done():
        await asyncio.sleep(0)
        rounds += 1
    assert rounds > 2 * len(client.topics), "of the assignment, and of its target"
    (described,) = (await asked).groups[0].members
    assert set(described.subscribed_topic_names) == client.topics.keys()
    for assignment in (described.assignment, described.target_assignment):
        assert {row.topic_name for row in assignment.topic_partitions} == client.topics.keys()


async def test_a_join_is_answered_when_the_others_have_joined() -> None:
    client = Client()
    first = await client.stable()
    pending = await client.join()
    second = asyncio.ensure_future(client.join(member_id=pending.member_id))
    await settle()
    assert not second.done()
    again = await client.join(member_id=first)
    assert again.generation_id == (await second).generation_id == 2
    assert len(again.members) == 2
    assert (await second).members == []


@pytest.mark.parametrize("names_partitions", [False, True])
@pytest.mark.parametrize("version", [7, 9])
async def test_a_stable_fetch_never_returns_the_offset_before_a_transaction(
    monkeypatch: pytest.MonkeyPatch, version: int, names_partitions: bool
) -> None:
    """Wherever the fetch gives way to other tasks, and the transaction commits meanwhile."""
    ended_in_between = 0
    for ends_at in range(12):
        client, producer = Client(), Producer(1, 0)
        await client.commit()
        request = CommitRequested(0, "", None, -1)
        offsets = {("orders", 0): committed_offset(99)}
        coordinator = client.coordinator
        await coordinator.offsets.commit_in_transaction("g", request, offsets, producer)
        taken = count()

        class EndingTurns(Turns):
            async def take(self) -> None:
                if next(taken) == ends_at:  # noqa: B023
                    coordinator.offsets.end_transaction(0, 1, commit=True)  # noqa: B023

        monkeypatch.setattr(committed_offsets, "Turns", EndingTurns)
        if version >= 8:
            topics = [m.OffsetFetchRequestGroupTopic(name="orders", partition_indexes=[0])]
            group = m.OffsetFetchRequestGroup(
                group_id="g", topics=topics if names_partitions else None, member_epoch=-1
            )
            body = m.OffsetFetchRequest(groups=[group], require_stable=True)
            answer = (await client.ask(ApiKey.OFFSET_FETCH, version, body)).groups[0]
        else:
            old = [m.OffsetFetchRequestTopic(name="orders", partition_indexes=[0])]
            body = m.OffsetFetchRequest(
                group_id="g", topics=old if names_partitions else None, require_stable=True
            )
            answer = await client.ask(ApiKey.OFFSET_FETCH, version, body)
        monkeypatch.undo()
        row = answer.topics[0].partitions[0]
        result = (row.error_code, row.committed_offset)
        assert result in ((ErrorCode.UNSTABLE_OFFSET_COMMIT, -1), (ErrorCode.NONE, 99)), ends_at
        ended_in_between += result[1] == 99
    assert ended_in_between


def test_few_names_of_protocols_are_kept_for_members_to_share() -> None:
    number = classic_protocol.SHARED_NAMES_MAX
    names = ["".join(("range", str(each))) for each in range(2 * number)]
    for name in names:
        assert classic_protocol.shared_name("".join(name)) == name
    last = "".join(("range", str(2 * number - 1)))
    assert last is not names[-1]
    assert classic_protocol.shared_name(last) is classic_protocol.shared_name(names[-1])
    assert classic_protocol.shared_name.cache_info().currsize == number
