"""Rules of membership: admission, the leader, and the protocol of a classic group."""

from broker.groups.classic.members import Protocols, ProtocolTotals
from broker.groups.classic.model import (
    Empty,
    Group,
    GroupRules,
    JoinRequested,
    PreparingRebalance,
    State,
)
from protocol.errors import ErrorCode


def has_room(state: State, member_id: str, rules: GroupRules) -> bool:
    """Return whether a member may join, or join again.

    While a rebalance is prepared, only the members that have joined count, because the others may
    have left: a group above its limit refuses the last members to return.
    """
    members = state.group.members
    if isinstance(state, Empty):
        return True
    if isinstance(state, PreparingRebalance):
        joins = state.group.joins
        return member_id in joins or len(joins) < rules.max_group_size
    return member_id in members or len(members) < rules.max_group_size


def outgrows_record(
    totals: ProtocolTotals,
    before: Protocols,
    after: Protocols,
    *,
    assignment_bytes: int = 0,
    limit_bytes: int,
) -> bool:
    """Return whether a join makes a group too large for its record.

    The member has the protocols `before`, and joins with the protocols `after`. Kafka would admit
    the member, and then could not store any assignment.
    """
    if sum(len(data) for _, data in after) <= sum(len(data) for _, data in before):
        return False
    totals = totals.changed((before,) if before else (), (after,))
    return totals.largest_bytes + assignment_bytes > limit_bytes


def speaks_common_protocol(state: State, event: JoinRequested) -> bool:
    """Return whether the request has the group's type and a protocol that all members support."""
    names = [name for name, _ in event.protocols]
    if isinstance(state, Empty):
        return bool(event.protocol_type) and bool(names)
    if event.protocol_type != state.group.protocol_type:
        return False
    shared = state.group.members.protocols.supported_by_all()
    return bool(names) and (shared is None or any(name in shared for name in names))


def identity_error(group: Group, member_id: str, instance_id: str | None) -> ErrorCode:
    """Return NONE, UNKNOWN_MEMBER_ID, or FENCED_INSTANCE_ID for a replaced static member."""
    if instance_id is not None:
        static = group.static_member(instance_id)
        if static is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if static.member_id != member_id:
            return ErrorCode.FENCED_INSTANCE_ID
    if member_id not in group.members:
        return ErrorCode.UNKNOWN_MEMBER_ID
    return ErrorCode.NONE


def elected_leader(group: Group) -> str | None:
    """Return the present leader if it has joined again, else the first member that has joined."""
    if group.leader in group.joins:
        return group.leader
    return next((member_id for member_id in group.members if member_id in group.joins), None)
