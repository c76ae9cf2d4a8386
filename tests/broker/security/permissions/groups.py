"""Questions about groups of both protocols, and about their committed offsets."""

from typing import Final

from protocol import messages as m
from protocol.api import ApiKey
from protocol.messages import Message
from tests.broker.security.permissions.question import GROUP, MODERN_GROUP, TOPIC, Asked, Questions

questions: Final = Questions()


@questions.add(ApiKey.FIND_COORDINATOR)
def find_the_coordinator_of_a_group(_: Asked) -> Message:
    return m.FindCoordinatorRequest(key_type=0, coordinator_keys=[GROUP])


@questions.add(ApiKey.FIND_COORDINATOR)
def find_the_coordinator_of_a_transaction(_: Asked) -> Message:
    return m.FindCoordinatorRequest(key_type=1, coordinator_keys=["tx"])


@questions.add(ApiKey.JOIN_GROUP)
def join_group(_: Asked) -> Message:
    protocol = m.JoinGroupRequestProtocol(name="range", metadata=b"")
    return m.JoinGroupRequest(
        group_id=GROUP,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=[protocol],
    )


@questions.add(ApiKey.SYNC_GROUP)
def sync_group(_: Asked) -> Message:
    return m.SyncGroupRequest(
        group_id=GROUP, member_id="x", protocol_type="consumer", protocol_name="range"
    )


@questions.add(ApiKey.HEARTBEAT)
def heartbeat(_: Asked) -> Message:
    return m.HeartbeatRequest(group_id=GROUP, member_id="x")


@questions.add(ApiKey.LEAVE_GROUP)
def leave_group(_: Asked) -> Message:
    member = m.LeaveGroupRequestMember(member_id="x", group_instance_id=None)
    return m.LeaveGroupRequest(group_id=GROUP, members=[member])


def commit_of(topic: str, partition: int = 0) -> m.OffsetCommitRequestTopic:
    row = m.OffsetCommitRequestPartition(partition_index=partition, committed_offset=0)
    return m.OffsetCommitRequestTopic(name=topic, partitions=[row])


@questions.add(ApiKey.OFFSET_COMMIT, 9)
def offset_commit(_: Asked) -> Message:
    return m.OffsetCommitRequest(
        group_id=GROUP,
        generation_id_or_member_epoch=-1,
        topics=[commit_of(TOPIC), commit_of("missing")],
    )


@questions.add(ApiKey.OFFSET_COMMIT)
def offset_commit_by_id(asked: Asked) -> Message:
    row = commit_of("")
    row.topic_id = asked.topic_ids[TOPIC]
    return m.OffsetCommitRequest(group_id=GROUP, generation_id_or_member_epoch=-1, topics=[row])


@questions.add(ApiKey.OFFSET_FETCH, 7)
def offset_fetch_of_one_group(_: Asked) -> Message:
    rows = [
        m.OffsetFetchRequestTopic(name=name, partition_indexes=[0]) for name in (TOPIC, "missing")
    ]
    return m.OffsetFetchRequest(group_id=GROUP, topics=rows)


@questions.add(ApiKey.OFFSET_FETCH, 9)
def offset_fetch(_: Asked) -> Message:
    rows = [
        m.OffsetFetchRequestGroupTopic(name=name, partition_indexes=[0])
        for name in (TOPIC, "missing")
    ]
    return m.OffsetFetchRequest(
        groups=[m.OffsetFetchRequestGroup(group_id=GROUP, member_id=None, topics=rows)]
    )


@questions.add(ApiKey.OFFSET_FETCH, 9)
def offset_fetch_of_all_topics(_: Asked) -> Message:
    return m.OffsetFetchRequest(
        groups=[m.OffsetFetchRequestGroup(group_id=GROUP, member_id=None, topics=None)]
    )


@questions.add(ApiKey.OFFSET_FETCH)
def offset_fetch_by_id(asked: Asked) -> Message:
    row = m.OffsetFetchRequestGroupTopic(topic_id=asked.topic_ids[TOPIC], partition_indexes=[0])
    return m.OffsetFetchRequest(
        groups=[m.OffsetFetchRequestGroup(group_id=GROUP, member_id=None, topics=[row])]
    )


@questions.add(ApiKey.OFFSET_DELETE)
def offset_delete(_: Asked) -> Message:
    rows = [
        m.OffsetDeleteRequestTopic(
            name=name, partitions=[m.OffsetDeleteRequestPartition(partition_index=0)]
        )
        for name in (TOPIC, "missing")
    ]
    return m.OffsetDeleteRequest(group_id=GROUP, topics=rows)


@questions.add(ApiKey.DESCRIBE_GROUPS)
def describe_groups(_: Asked) -> Message:
    return m.DescribeGroupsRequest(groups=[GROUP], include_authorized_operations=True)


@questions.add(ApiKey.LIST_GROUPS)
def list_groups(_: Asked) -> Message:
    return m.ListGroupsRequest(types_filter=["classic"])


@questions.add(ApiKey.DELETE_GROUPS)
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


@questions.add(ApiKey.CONSUMER_GROUP_HEARTBEAT)
def join_a_consumer_group(asked: Asked) -> Message:
    return modern_heartbeat(f"of-{asked.user}", "member-0", topics=[TOPIC])


@questions.add(ApiKey.CONSUMER_GROUP_HEARTBEAT)
def leave_a_consumer_group(asked: Asked) -> Message:
    return modern_heartbeat(f"of-{asked.user}", "member-0", epoch=-1)


@questions.add(ApiKey.CONSUMER_GROUP_DESCRIBE)
def describe_a_consumer_group(_: Asked) -> Message:
    return m.ConsumerGroupDescribeRequest(
        group_ids=[MODERN_GROUP], include_authorized_operations=True
    )
