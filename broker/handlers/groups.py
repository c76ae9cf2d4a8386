"""Handlers of the group APIs: FindCoordinator, JoinGroup, SyncGroup, Heartbeat, LeaveGroup,
ListGroups, DescribeGroups, DeleteGroups.

The handlers translate between messages and the coordinator, which makes all decisions. They are
async if they wait or may have many rows. Handlers of offsets: broker/handlers/committed_offsets.py.
"""

from collections.abc import Sequence
from typing import Protocol

from broker.groups.consumer.model import ConsumerGroup
from broker.groups.coordinator import GroupCoordinator
from broker.groups.member_requests import MemberRequests
from broker.groups.model import (
    HeartbeatReceived,
    JoinAnswer,
    JoinRequested,
    LeaveAnswer,
    LeaveRequested,
    Stable,
    State,
    SyncRequested,
)
from broker.groups.offsets_store import OFFSETS_TOPIC
from broker.groups.topic_regex import TopicViewer
from broker.loop_turns import Turns, yield_to_loop
from broker.security.acls import Operation, ResourceType
from broker.security.principal import Principal
from broker.transactions.coordinator import TransactionCoordinator
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
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    FindCoordinatorResponseCoordinator,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    JoinGroupResponseMember,
    LeaveGroupRequest,
    LeaveGroupRequestMember,
    LeaveGroupResponse,
    LeaveGroupResponseMember,
    ListGroupsRequest,
    ListGroupsResponse,
    ListGroupsResponseGroup,
    SyncGroupRequest,
    SyncGroupResponse,
)

UNKNOWN_WAITER = 0  # the coordinator numbers requests

KEY_TYPE_GROUP = 0
KEY_TYPE_TRANSACTION = 1
UNKNOWN_KEY_TYPE = "this broker coordinates groups and transactions only"
GROUP_NOT_FOUND = "group {} not found"
NOT_CLASSIC = "group {} is not a classic group"
LEAVERS_PER_TURN = 32  # some milliseconds in a group of thousands


class GroupRequestContext(Protocol):
    """The parts of the broker and of the connection that these handlers use."""

    @property
    def coordinator(self) -> GroupCoordinator:
        """Return the groups of this broker."""
        ...

    @property
    def node_id(self) -> int:
        """Return the id of this broker."""
        ...

    @property
    def host(self) -> str:
        """Return the advertised host."""
        ...

    @property
    def port(self) -> int:
        """Return the advertised port."""
        ...

    @property
    def client_host(self) -> str:
        """Return the address of the client."""
        ...

    async def wait_offsets_topic(self) -> ErrorCode:
        """Create __consumer_offsets if there is none; return NONE if it exists then."""
        ...

    @property
    def transactions(self) -> TransactionCoordinator:
        """Return the transactions of this broker."""
        ...

    async def wait_transaction_topic(self) -> ErrorCode:
        """Create __transaction_state if there is none; return NONE if it exists then."""
        ...

    @property
    def creator(self) -> Principal | None:
        """Return who creates groups; None without authorization."""
        ...

    @property
    def has_consumer_groups(self) -> bool:
        """Return whether the consumer rebalance protocol is in effect (group.version)."""
        ...

    def partition_count(self, topic: str) -> int | None:
        """Return the number of partitions of a topic or view; None if there is none."""
        ...

    def topic_name(self, topic_id: bytes) -> str | None:
        """Return the name of the topic or view with this id; None if there is none."""
        ...

    def topic_id(self, name: str) -> bytes | None:
        """Return the id of the topic or view with this name; None if there is none."""
        ...

    def wall_ms(self) -> int:
        """Return the wall time in milliseconds since 1970."""
        ...

    def may(
        self,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        *,
        is_filter: bool = False,
    ) -> bool:
        """Return whether the client may perform an operation on a resource."""
        ...

    def may_topic(self, operation: Operation, topic: str, *, is_filter: bool = False) -> bool:
        """Return whether the client may perform an operation on a topic."""
        ...

    def may_cluster(self, operation: Operation, *, is_filter: bool = False) -> bool:
        """Return whether the client may perform an operation on the cluster."""
        ...

    def group_operations(self, group_id: str) -> int:
        """Return what the client may do with a group, as bits of Operation."""
        ...

    @property
    def viewer(self) -> TopicViewer:
        """Return which topics the client may describe."""
        ...


async def handle_find_coordinator(
    context: GroupRequestContext, header: RequestHeader, body: FindCoordinatorRequest
) -> FindCoordinatorResponse:
    """FindCoordinator 0-6: return this broker for groups and transactional ids."""
    batched = header.api_version >= 4
    keys = body.coordinator_keys if batched else [body.key]
    result, turns, created = [], Turns(), None
    for key in keys:
        await turns.take()
        refusal = _key_refusal(context, key, body.key_type)
        if refusal is ErrorCode.NONE and created is None:
            created = await _create_internal_topic(context, body.key_type)
        result.append(_coordinator_of(context, key, body.key_type, refusal or created or refusal))
    if batched:
        return FindCoordinatorResponse(coordinators=result)
    only = result[0]
    return FindCoordinatorResponse(
        error_code=only.error_code,
        error_message=only.error_message,
        node_id=only.node_id,
        host=only.host,
        port=only.port,
    )


def _key_refusal(context: GroupRequestContext, key: str, key_type: int) -> ErrorCode:
    if key_type == KEY_TYPE_GROUP and not context.may(Operation.DESCRIBE, ResourceType.GROUP, key):
        return ErrorCode.GROUP_AUTHORIZATION_FAILED
    if key_type == KEY_TYPE_TRANSACTION and not context.may(
        Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, key
    ):
        return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    return ErrorCode.NONE


async def _create_internal_topic(context: GroupRequestContext, key_type: int) -> ErrorCode:
    if key_type == KEY_TYPE_GROUP:
        return await context.wait_offsets_topic()
    if key_type == KEY_TYPE_TRANSACTION:
        return await context.wait_transaction_topic()
    return ErrorCode.NONE


def _coordinator_of(
    context: GroupRequestContext, key: str, key_type: int, created: ErrorCode
) -> FindCoordinatorResponseCoordinator:
    error, text = created, None
    if key_type not in (KEY_TYPE_GROUP, KEY_TYPE_TRANSACTION):
        error, text = ErrorCode.INVALID_REQUEST, UNKNOWN_KEY_TYPE
    elif error is ErrorCode.NONE and key_type == KEY_TYPE_GROUP:
        error = context.coordinator.availability(key)
    elif error is ErrorCode.NONE:
        error = context.transactions.availability(key)
    if error not in (ErrorCode.NONE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS):
        return FindCoordinatorResponseCoordinator(
            key=key, node_id=-1, host="", port=-1, error_code=error, error_message=text
        )
    # A partition that is still loading is found all the same; the group APIs say "retry".
    return FindCoordinatorResponseCoordinator(
        key=key, node_id=context.node_id, host=context.host, port=context.port
    )


async def handle_join_group(
    context: GroupRequestContext, header: RequestHeader, body: JoinGroupRequest
) -> JoinGroupResponse:
    """Answer JoinGroup 0-9, once the next generation has formed."""
    if not may_read_group(context, body.group_id):
        return JoinGroupResponse(error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED)
    version = header.api_version
    rebalance_timeout_ms = body.rebalance_timeout_ms if version >= 1 else body.session_timeout_ms
    request = JoinRequested(
        waiter=UNKNOWN_WAITER,
        member_id=body.member_id,
        new_member_id="",
        instance_id=body.group_instance_id,
        client_id=header.client_id or "",
        client_host=client_host(context),
        session_timeout_ms=body.session_timeout_ms,
        rebalance_timeout_ms=max(rebalance_timeout_ms, 0),
        protocol_type=body.protocol_type,
        protocols=tuple((p.name, p.metadata) for p in body.protocols),
        id_required=version >= 4,  # KIP-394
        may_skip_assignment=version >= 9,  # KIP-814
    )
    answer = await context.coordinator.members.join(body.group_id, request, context.creator)
    return _join_response(answer, version)


def _join_response(answer: JoinAnswer, version: int) -> JoinGroupResponse:
    # Null only from version 7 on; an empty string said "none" before.
    none = None if version >= 7 else ""
    return JoinGroupResponse(
        error_code=answer.error,
        generation_id=answer.generation,
        protocol_type=answer.protocol_type,
        protocol_name=none if answer.protocol_name is None else answer.protocol_name,
        leader=answer.leader,
        skip_assignment=answer.skip_assignment,
        member_id=answer.member_id,
        members=[
            JoinGroupResponseMember(member_id=m, group_instance_id=instance, metadata=metadata)
            for m, instance, metadata in answer.members
        ],
    )


async def handle_sync_group(
    context: GroupRequestContext, header: RequestHeader, body: SyncGroupRequest
) -> SyncGroupResponse:
    """Answer SyncGroup 0-5, once the leader's assignment is in the log."""
    if not may_read_group(context, body.group_id):
        return SyncGroupResponse(error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED)
    request = SyncRequested(
        waiter=UNKNOWN_WAITER,
        member_id=body.member_id,
        instance_id=body.group_instance_id,
        generation=body.generation_id,
        protocol_type=body.protocol_type,
        protocol_name=body.protocol_name,
        assignments={a.member_id: a.assignment async for a in Turns().over(body.assignments)},
    )
    if header.api_version >= 5 and (body.protocol_type is None or body.protocol_name is None):
        # From version 5 on both are mandatory (KIP-559).
        return SyncGroupResponse(error_code=ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
    answer = await context.coordinator.members.sync(body.group_id, request)
    return SyncGroupResponse(
        error_code=answer.error,
        protocol_type=answer.protocol_type,
        protocol_name=answer.protocol_name,
        assignment=answer.assignment,
    )


def handle_heartbeat(
    context: GroupRequestContext, header: RequestHeader, body: HeartbeatRequest
) -> HeartbeatResponse:
    """Answer Heartbeat 0-4."""
    if not may_read_group(context, body.group_id):
        return HeartbeatResponse(error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED)
    request = HeartbeatReceived(
        UNKNOWN_WAITER, body.member_id, body.group_instance_id, body.generation_id
    )
    return HeartbeatResponse(
        error_code=context.coordinator.members.heartbeat(body.group_id, request)
    )


async def handle_leave_group(
    context: GroupRequestContext, header: RequestHeader, body: LeaveGroupRequest
) -> LeaveGroupResponse:
    """Answer LeaveGroup 0-5: one member up to version 2, a list from version 3 on."""
    if not may_read_group(context, body.group_id):
        return LeaveGroupResponse(error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED)
    single = header.api_version <= 2
    members = body.members
    if single:
        members = [LeaveGroupRequestMember(member_id=body.member_id, group_instance_id=None)]
    answer = await _leave(context.coordinator.members, body.group_id, members)
    if single:
        error = answer.members[0][2] if answer.members else answer.error
        return LeaveGroupResponse(error_code=error)
    return LeaveGroupResponse(
        error_code=answer.error,
        members=[
            LeaveGroupResponseMember(member_id=m, group_instance_id=instance, error_code=error)
            async for m, instance, error in Turns().over(answer.members)
        ],
    )


async def _leave(
    requests: MemberRequests, group_id: str, members: Sequence[LeaveGroupRequestMember]
) -> LeaveAnswer:
    """Remove some members at a time: each removal takes time in proportion to the others."""
    reported: list[tuple[str, str | None, ErrorCode]] = []
    for first in range(0, max(1, len(members)), LEAVERS_PER_TURN):
        if first:
            await yield_to_loop()
        leaving = tuple(
            (member.member_id, member.group_instance_id)
            for member in members[first : first + LEAVERS_PER_TURN]
        )
        answer = await requests.leave(group_id, LeaveRequested(UNKNOWN_WAITER, leaving))
        if answer.error is not ErrorCode.NONE:
            return answer
        reported += answer.members
    return LeaveAnswer(ErrorCode.NONE, tuple(reported))


async def handle_list_groups(
    context: GroupRequestContext, header: RequestHeader, body: ListGroupsRequest
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
            or context.may(Operation.DESCRIBE, ResourceType.GROUP, group.group_id, is_filter=True)
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


async def handle_describe_groups(
    context: GroupRequestContext, header: RequestHeader, body: DescribeGroupsRequest
) -> DescribeGroupsResponse:
    """Answer DescribeGroups 0-6: unknown groups are Dead, in version 6 also an error (KIP-1043)."""
    described, turns = [], Turns()
    distinct = {group_id: None async for group_id in turns.over(body.groups)}
    async for group_id in turns.over(distinct):  # a large group may be named often
        if not context.may(Operation.DESCRIBE, ResourceType.GROUP, group_id):
            described.append(
                DescribeGroupsResponseGroup(
                    group_id=group_id, error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED
                )
            )
            continue
        group = _describe(context.coordinator, group_id, header.api_version)
        if body.include_authorized_operations and group.error_code == ErrorCode.NONE:
            group.authorized_operations = context.group_operations(group_id)
        described.append(group)
    return DescribeGroupsResponse(groups=described)


def _describe(
    coordinator: GroupCoordinator, group_id: str, version: int
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
    # Between generations, members have no final protocol or assignment.
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
                member_assignment=member.assignment if settled else b"",
            )
            for member in group.members.values()
        ],
    )


async def handle_delete_groups(
    context: GroupRequestContext, header: RequestHeader, body: DeleteGroupsRequest
) -> DeleteGroupsResponse:
    """Answer DeleteGroups 0-2, once the tombstones are in the log."""
    results, turns = [], Turns()
    for group_id in body.groups_names:
        await turns.take()
        error = ErrorCode.GROUP_AUTHORIZATION_FAILED
        if context.may(Operation.DELETE, ResourceType.GROUP, group_id):
            error = await context.coordinator.deletion.delete_group(group_id)
        results.append(DeleteGroupsResponseGroup(group_id=group_id, error_code=error))
    return DeleteGroupsResponse(results=results)


def may_read_group(context: GroupRequestContext, group_id: str) -> bool:
    """Return whether the client may be a member of a group."""
    return context.may(Operation.READ, ResourceType.GROUP, group_id)


def client_host(context: GroupRequestContext) -> str:
    """Return the client's address as tools expect it."""
    # Java prints an address without a name with a slash.
    host = context.client_host
    return host if host.startswith("/") else f"/{host}"


def _name(state: State) -> str:
    # The classes have Kafka's names of the states.
    return type(state).__name__
