"""Rules of membership: admission, the leader, and the protocol of a classic group."""

from collections import Counter
from collections.abc import Mapping

from broker.groups.classic.model import (
    NO_ASSIGNMENT,
    Empty,
    Group,
    GroupRules,
    JoinRequested,
    PreparingRebalance,
    Protocols,
    State,
    stored_bytes,
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
        member = members.get(member_id)
        if member is not None and member.join_waiter is not None:
            return True
        waiting = sum(1 for m in members.values() if m.join_waiter is not None)
        return waiting < rules.max_group_size
    return member_id in members or len(members) < rules.max_group_size


def outgrows_record(
    members: Mapping[str, tuple[Protocols, bytes]],
    member_id: str,
    protocols: Protocols,
    limit_bytes: int,
) -> bool:
    """Return whether a join with these protocols makes a group too large for its record.

    `members`: see `stored_bytes`. Kafka admits the member, and then can store no assignment.
    """
    before, assignment = members.get(member_id, ((), NO_ASSIGNMENT))
    if sum(len(data) for _, data in protocols) <= sum(len(data) for _, data in before):
        return False
    others = {key: stored for key, stored in members.items() if key != member_id}
    return stored_bytes((*others.values(), (protocols, assignment))) > limit_bytes


def speaks_common_protocol(state: State, event: JoinRequested) -> bool:
    """Return whether the request has the group's type and a protocol that all members support."""
    names = [name for name, _ in event.protocols]
    if isinstance(state, Empty):
        return bool(event.protocol_type) and bool(names)
    if event.protocol_type != state.group.protocol_type:
        return False
    shared = _supported_by_all(state.group)
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
    joined = [m.member_id for m in group.members.values() if m.join_waiter is not None]
    if group.leader in joined:
        return group.leader
    return joined[0] if joined else None


def elected_protocol(group: Group) -> str:
    """Return the protocol with the most votes; in a tie, the one that got a vote first.

    Each member votes for its most preferred protocol of those that all members support. There is at
    least one, because `speaks_common_protocol` refuses other members.
    """
    shared = _supported_by_all(group)
    assert shared, "members without a common protocol"
    votes = Counter(
        next(name for name, _ in member.protocols if name in shared)
        for member in group.members.values()
    )
    return max(votes, key=votes.__getitem__)


def _supported_by_all(group: Group) -> set[str] | None:
    """Return the protocols that every member supports; None without members: any protocol."""
    shared: set[str] | None = None
    for member in group.members.values():
        names = [name for name, _ in member.protocols]
        shared = set(names) if shared is None else shared.intersection(names)
    return shared
