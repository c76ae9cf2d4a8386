"""Handlers of the members of classic groups: JoinGroup, SyncGroup, Heartbeat, LeaveGroup.

The handlers translate between messages and the coordinator, which makes all decisions. They are
async if they wait or may have many rows.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from broker.event_loop.loop_turns import Turns, yield_to_loop
from broker.groups.classic.model import (
    UNKNOWN_WAITER,
    HeartbeatReceived,
    JoinAnswer,
    JoinRequested,
    LeaveAnswer,
    LeaveRequested,
    SyncRequested,
)
from broker.groups.member_requests import MemberRequests
from broker.network.request_context import RequestContext
from broker.security.acls import Operation
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode
from protocol.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    JoinGroupResponseMember,
    LeaveGroupRequest,
    LeaveGroupRequestMember,
    LeaveGroupResponse,
    LeaveGroupResponseMember,
    SyncGroupRequest,
    SyncGroupResponse,
)

LEAVERS_PER_TURN = 32  # some milliseconds in a group of thousands
# Of protocols, in all groups: up to 8 MB.
SHARED_NAMES_MAX: Final = 256


async def join_group(
    context: RequestContext, header: RequestHeader, body: JoinGroupRequest
) -> JoinGroupResponse:
    """Answer JoinGroup 0-9, once the next generation has formed."""
    if not context.may_group(Operation.READ, body.group_id):
        return JoinGroupResponse(error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED)
    version = header.api_version
    rebalance_timeout_ms = body.rebalance_timeout_ms if version >= 1 else body.session_timeout_ms
    request = JoinRequested(
        waiter=UNKNOWN_WAITER,
        member_id=body.member_id,
        new_member_id="",
        instance_id=body.group_instance_id,
        client_id=header.client_id or "",
        client_host=context.java_client_host,
        session_timeout_ms=body.session_timeout_ms,
        rebalance_timeout_ms=max(rebalance_timeout_ms, 0),
        protocol_type=body.protocol_type,
        protocols=tuple((shared_name(p.name), p.metadata) for p in body.protocols),
        id_required=version >= 4,  # KIP-394
        may_skip_assignment=version >= 9,  # KIP-814
    )
    answer = await context.coordinator.members.join(
        body.group_id, request, context.creator, context.viewer
    )
    return await _join_response(answer, version)


@lru_cache(SHARED_NAMES_MAX)
def shared_name(name: str) -> str:
    """Return the same object for equal names of protocols.

    All members of a group name the same few, so to compare them costs less. Python 3.12 never frees
    what sys.intern returns, and clients choose the names.
    """
    return name


async def _join_response(answer: JoinAnswer, version: int) -> JoinGroupResponse:
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
            async for m, instance, metadata in Turns().over(answer.members)
        ],
    )


async def sync_group(
    context: RequestContext, header: RequestHeader, body: SyncGroupRequest
) -> SyncGroupResponse:
    """Answer SyncGroup 0-5, once the leader's assignment is in the log."""
    if not context.may_group(Operation.READ, body.group_id):
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


def heartbeat(
    context: RequestContext, header: RequestHeader, body: HeartbeatRequest
) -> HeartbeatResponse:
    """Answer Heartbeat 0-4."""
    if not context.may_group(Operation.READ, body.group_id):
        return HeartbeatResponse(error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED)
    request = HeartbeatReceived(
        UNKNOWN_WAITER, body.member_id, body.group_instance_id, body.generation_id
    )
    return HeartbeatResponse(
        error_code=context.coordinator.members.heartbeat(body.group_id, request)
    )


async def leave_group(
    context: RequestContext, header: RequestHeader, body: LeaveGroupRequest
) -> LeaveGroupResponse:
    """Answer LeaveGroup 0-5: one member up to version 2, a list from version 3 on."""
    if not context.may_group(Operation.READ, body.group_id):
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
