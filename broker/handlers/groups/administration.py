"""Handlers that list, describe and delete groups: ListGroups, DescribeGroups, DeleteGroups."""

from broker.event_loop.loop_turns import Turns
from broker.groups.classic.model import (
    Stable,
    State,
)
from broker.groups.consumer.model import ConsumerGroup
from broker.groups.coordinator import GroupCoordinator
from broker.groups.offsets.offsets_store import OFFSETS_TOPIC
from broker.network.request_context import RequestContext
from broker.security.acls import Operation
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode
from protocol.messages import (
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DeleteGroupsResponseGroup,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    DescribeGroupsResponseGroup,
    DescribeGroupsResponseMember,
    ListGroupsRequest,
    ListGroupsResponse,
    ListGroupsResponseGroup,
)

GROUP_NOT_FOUND = "group {} not found"
NOT_CLASSIC = "group {} is not a classic group"


async def list_groups(
    context: RequestContext, header: RequestHeader, body: ListGroupsRequest
) -> ListGroupsResponse:
    """Answer ListGroups 0-5. The filters by state and type ignore case."""
    states = {name.lower() for name in body.states_filter}
    types = {name.lower() for name in body.types_filter}
    groups: list[ListGroupsResponseGroup] = []
    turns = Turns()
    may_describe_all = context.may_cluster(Operation.DESCRIBE, is_filter=True)
    for group in context.coordinator.groups():
        await turns.take()
        is_listed = (not types or group.type in types) and (
            may_describe_all
            or context.may_group(Operation.DESCRIBE, group.group_id, is_filter=True)
        )
        if is_listed and (not states or group.state.lower() in states):
            groups.append(
                ListGroupsResponseGroup(
                    group_id=group.group_id,
                    protocol_type=group.protocol_type,
                    group_state=group.state,
                    group_type=group.type,
                )
            )
    error = ErrorCode.NONE
    # __consumer_offsets is created at its first use; before, there is nothing to load.
    if context.coordinator.is_loading and context.partition_count(OFFSETS_TOPIC) is not None:
        error = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    return ListGroupsResponse(error_code=error, groups=groups)


async def describe_groups(
    context: RequestContext, header: RequestHeader, body: DescribeGroupsRequest
) -> DescribeGroupsResponse:
    """Answer DescribeGroups 0-6: unknown groups are Dead, in version 6 also an error (KIP-1043)."""
    described, turns = [], Turns()
    distinct = {group_id: None async for group_id in turns.over(body.groups)}
    async for group_id in turns.over(distinct):  # a large group may be named often
        if not context.may_group(Operation.DESCRIBE, group_id):
            described.append(
                DescribeGroupsResponseGroup(
                    group_id=group_id, error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED
                )
            )
            continue
        group = await _describe(context.coordinator, group_id, header.api_version, turns)
        if body.include_authorized_operations and group.error_code == ErrorCode.NONE:
            group.authorized_operations = context.group_operations(group_id)
        described.append(group)
    return DescribeGroupsResponse(groups=described)


async def _describe(
    coordinator: GroupCoordinator, group_id: str, version: int, turns: Turns
) -> DescribeGroupsResponseGroup:
    error, state = coordinator.describe(group_id)
    if error is not ErrorCode.NONE:
        return DescribeGroupsResponseGroup(group_id=group_id, error_code=error)
    if state is None or isinstance(state, ConsumerGroup):
        dead = DescribeGroupsResponseGroup(group_id=group_id, group_state="Dead")
        if version >= 6:
            text = GROUP_NOT_FOUND if state is None else NOT_CLASSIC
            dead.error_code = ErrorCode.GROUP_ID_NOT_FOUND
            dead.error_message = text.format(group_id)
        return dead
    group = state.group
    # Between generations, members have no protocol, but still what the last generation gave them.
    settled = isinstance(state, Stable)
    return DescribeGroupsResponseGroup(
        group_id=group_id,
        group_state=_name(state),
        protocol_type=group.protocol_type or "",
        protocol_data=(group.protocol_name or "") if settled else "",
        members=[
            DescribeGroupsResponseMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.metadata(group.protocol_name) if settled else b"",
                member_assignment=group.assignment(member.member_id),
            )
            async for member in turns.over(group.members.values())
        ],
    )


async def delete_groups(
    context: RequestContext, header: RequestHeader, body: DeleteGroupsRequest
) -> DeleteGroupsResponse:
    """Answer DeleteGroups 0-2, once the tombstones are in the log."""
    results, turns = [], Turns()
    for group_id in body.groups_names:
        await turns.take()
        error = ErrorCode.GROUP_AUTHORIZATION_FAILED
        if context.may_group(Operation.DELETE, group_id):
            error = await context.coordinator.deletion.delete_group(group_id)
        results.append(DeleteGroupsResponseGroup(group_id=group_id, error_code=error))
    return DeleteGroupsResponse(results=results)


def _name(state: State) -> str:
    # The classes have Kafka's names of the states.
    return type(state).__name__
