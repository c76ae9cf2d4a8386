"""Handlers of the consumer rebalance protocol (KIP-848): ConsumerGroupHeartbeat and
ConsumerGroupDescribe.

The handlers check the form of a request and translate between topic ids and names; the coordinator
makes all decisions.
"""

from collections.abc import AsyncIterator, Iterable
from typing import Final

from broker.event_loop.loop_turns import Turns
from broker.groups.consumer.assignors import ASSIGNORS
from broker.groups.consumer.model import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    LEAVE_STATIC_EPOCH,
    NO_PARTITIONS,
    ConsumerGroup,
    ConsumerMember,
    Heartbeat,
    PartitionId,
)
from broker.groups.consumer.records import each_topic
from broker.groups.consumer.state import preferred_assignor
from broker.network.request_context import RequestContext
from broker.security.acls import Operation
from config.topics.names import can_exist
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode
from protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerGroupDescribeResponseAssignment,
    ConsumerGroupDescribeResponseGroup,
    ConsumerGroupDescribeResponseMember,
    ConsumerGroupDescribeResponseTargetAssignment,
    ConsumerGroupDescribeResponseTargetPartition,
    ConsumerGroupDescribeResponseTopicPartition,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatRequestTopicPartition,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupHeartbeatResponseAssignment,
    ConsumerGroupHeartbeatResponseTopicPartition,
)

UNDESCRIBED_TOPIC = (
    "The group has described topic(s) that the client is not authorized to describe."
)
IDS_AT_ONCE: Final = 500  # of partitions, without a possible end of turn: 0.1 ms
CLASSIC_MEMBER = 0
CONSUMER_MEMBER = 1  # the type of a member that speaks this protocol (version 1)


async def consumer_group_heartbeat(
    context: RequestContext, header: RequestHeader, body: ConsumerGroupHeartbeatRequest
) -> ConsumerGroupHeartbeatResponse:
    """Answer ConsumerGroupHeartbeat 0-1. From version 1 on the client chooses its member id."""
    if not context.has_consumer_groups:
        return ConsumerGroupHeartbeatResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    topics, rows = body.subscribed_topic_names, body.topic_partitions
    denied = await _denied(context, body.group_id, topics or ())
    if denied is not ErrorCode.NONE:
        return ConsumerGroupHeartbeatResponse(error_code=denied)
    refusal = _invalid(header.api_version, body)
    if refusal is None and body.server_assignor not in (None, *ASSIGNORS):
        supported = ", ".join(ASSIGNORS)
        return ConsumerGroupHeartbeatResponse(
            error_code=ErrorCode.UNSUPPORTED_ASSIGNOR,
            error_message=f"assignor {body.server_assignor} is not supported; use {supported}",
        )
    if refusal is not None:
        return ConsumerGroupHeartbeatResponse(
            error_code=ErrorCode.INVALID_REQUEST, error_message=refusal
        )
    if body.member_epoch == JOIN_EPOCH:
        error = await context.wait_offsets_topic()
        if error is not ErrorCode.NONE:
            return ConsumerGroupHeartbeatResponse(error_code=error)
    owned = None if rows is None else await _partition_ids(rows)
    request = Heartbeat(
        member_id=body.member_id or context.coordinator.members.new_member_id(),
        epoch=body.member_epoch,
        instance_id=body.instance_id,
        rack_id=body.rack_id,
        client_id=header.client_id or "",
        client_host=context.java_client_host,
        rebalance_timeout_ms=body.rebalance_timeout_ms,
        topics=None if topics is None else frozenset([t async for t in Turns().over(topics)]),
        regex=body.subscribed_topic_regex,
        assignor=body.server_assignor,
        owned=owned,
    )
    try:
        answer = await context.coordinator.members.consumer_heartbeat(
            body.group_id, request, context.viewer, context.creator
        )
    finally:
        if owned is not None:
            context.services.freed_later.add(owned)
    response = ConsumerGroupHeartbeatResponse(
        error_code=answer.error,
        error_message=answer.message,
        member_id=answer.member_id,
        member_epoch=answer.epoch,
        heartbeat_interval_ms=context.coordinator.settings.consumer_rules.heartbeat_interval_ms
        if answer.error is ErrorCode.NONE
        else 0,
    )
    if answer.assignment is not None:
        response.assignment = ConsumerGroupHeartbeatResponseAssignment(
            topic_partitions=[
                ConsumerGroupHeartbeatResponseTopicPartition(
                    topic_id=topic_id, partitions=partitions
                )
                async for topic_id, partitions in each_topic(answer.assignment, Turns())
            ]
        )
    return response


async def _partition_ids(
    rows: Iterable[ConsumerGroupHeartbeatRequestTopicPartition],
) -> set[PartitionId]:
    """Return the partitions that the rows of a request name. One row may have 50,000."""
    ids, turns = set[PartitionId](), Turns()
    for row in rows:
        for first in range(0, len(row.partitions), IDS_AT_ONCE):
            await turns.take()
            ids.update([(row.topic_id, i) for i in row.partitions[first : first + IDS_AT_ONCE]])
    return ids


async def _denied(context: RequestContext, group_id: str, topics: Iterable[str]) -> ErrorCode:
    """Return why the client may not be a member with this subscription, or NONE."""
    if not context.may_group(Operation.READ, group_id):
        return ErrorCode.GROUP_AUTHORIZATION_FAILED
    async for topic in Turns().over(topics):
        if not context.may_topic(Operation.DESCRIBE, topic):
            return ErrorCode.TOPIC_AUTHORIZATION_FAILED
        if not can_exist(topic):  # the group would keep it
            return ErrorCode.INVALID_TOPIC_EXCEPTION
    return ErrorCode.NONE


def _invalid(version: int, body: ConsumerGroupHeartbeatRequest) -> str | None:
    """Return what is wrong with the form of a request; Kafka checks the same."""
    if not body.group_id.strip():
        return "GroupId must not be empty"
    for name, value in (("InstanceId", body.instance_id), ("RackId", body.rack_id)):
        if value is not None and not value.strip():
            return f"{name} must not be empty"
    if not body.member_id and (version >= 1 or body.member_epoch != JOIN_EPOCH):
        return "MemberId must not be empty"
    if body.member_epoch == JOIN_EPOCH:
        if body.rebalance_timeout_ms <= 0:
            return "RebalanceTimeoutMs must be given in the first request"
        if body.topic_partitions != []:
            return "TopicPartitions must be empty when a member joins"
        if body.subscribed_topic_names is None and body.subscribed_topic_regex is None:
            return "SubscribedTopicNames or SubscribedTopicRegex must be given in the first request"
    elif body.member_epoch == LEAVE_STATIC_EPOCH and body.instance_id is None:
        return "InstanceId must be given to leave with epoch -2"
    elif body.member_epoch < LEAVE_STATIC_EPOCH:
        return f"MemberEpoch {body.member_epoch} is not valid; {LEAVE_EPOCH} leaves the group"
    return None


async def consumer_group_describe(
    context: RequestContext, header: RequestHeader, body: ConsumerGroupDescribeRequest
) -> ConsumerGroupDescribeResponse:
    """Answer ConsumerGroupDescribe 0-1."""
    described, turns = [], Turns()
    distinct = {group_id: None async for group_id in turns.over(body.group_ids)}
    async for group_id in turns.over(distinct):  # a large group may be named often
        if not context.may_group(Operation.DESCRIBE, group_id):
            denied = ErrorCode.GROUP_AUTHORIZATION_FAILED
            described.append(
                ConsumerGroupDescribeResponseGroup(group_id=group_id, error_code=denied)
            )
            continue
        group = await _describe(context, group_id, turns)
        if body.include_authorized_operations and group.error_code == ErrorCode.NONE:
            group.authorized_operations = context.group_operations(group_id)
        described.append(group)
    return ConsumerGroupDescribeResponse(groups=described)


async def _describe(
    context: RequestContext, group_id: str, turns: Turns
) -> ConsumerGroupDescribeResponseGroup:
    error, group = context.coordinator.describe(group_id)
    if not group_id:
        error = ErrorCode.INVALID_GROUP_ID
    if error is not ErrorCode.NONE:
        return ConsumerGroupDescribeResponseGroup(group_id=group_id, error_code=error)
    if not isinstance(group, ConsumerGroup):
        return ConsumerGroupDescribeResponseGroup(
            group_id=group_id,
            error_code=ErrorCode.GROUP_ID_NOT_FOUND,
            error_message=f"group {group_id} not found"
            if group is None
            else f"group {group_id} is not a consumer group",
        )
    members, topics = [], set[str]()
    async for member in turns.over(group.members.values()):
        row = await _member(context, group, member, turns)
        for assignment in (row.assignment, row.target_assignment):
            topics.update([topic.topic_name for topic in assignment.topic_partitions])
            await turns.take()
        members.append(row)
    async for topic in turns.over(topics):
        if not context.may_topic(Operation.DESCRIBE, topic, is_filter=True):
            return ConsumerGroupDescribeResponseGroup(
                group_id=group_id,
                error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
                error_message=UNDESCRIBED_TOPIC,
            )
    return ConsumerGroupDescribeResponseGroup(
        group_id=group_id,
        group_state=group.state.label,
        group_epoch=group.epoch,
        assignment_epoch=group.assignment_epoch,
        assignor_name=preferred_assignor(group),
        members=members,
    )


async def _member(
    context: RequestContext, group: ConsumerGroup, member: ConsumerMember, turns: Turns
) -> ConsumerGroupDescribeResponseMember:
    target = group.targets.get(member.member_id, NO_PARTITIONS)
    return ConsumerGroupDescribeResponseMember(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        member_epoch=member.epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(member.topics),  # unsorted: 25,000 take 8 ms to sort
        subscribed_topic_regex=member.regex or "",
        assignment=ConsumerGroupDescribeResponseAssignment(
            topic_partitions=[
                ConsumerGroupDescribeResponseTopicPartition(
                    topic_id=topic_id, topic_name=name, partitions=partitions
                )
                async for topic_id, name, partitions in _existing(context, member.owned(), turns)
            ]
        ),
        target_assignment=ConsumerGroupDescribeResponseTargetAssignment(
            topic_partitions=[
                ConsumerGroupDescribeResponseTargetPartition(
                    topic_id=topic_id, topic_name=name, partitions=partitions
                )
                async for topic_id, name, partitions in _existing(context, target, turns)
            ]
        ),
        member_type=CONSUMER_MEMBER if member.classic is None else CLASSIC_MEMBER,
    )


async def _existing(
    context: RequestContext, partitions: Iterable[PartitionId], turns: Turns
) -> AsyncIterator[tuple[bytes, str, list[int]]]:
    """Yield id, name and partitions of each topic that still exists."""
    async for topic_id, indexes in each_topic(partitions, turns):
        name = context.topic_name(topic_id)
        if name is not None:
            yield topic_id, name, indexes
