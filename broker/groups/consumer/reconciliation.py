"""Moves a member towards its target assignment, one heartbeat at a time (KIP-848).

A member first revokes what the target takes from it, then confirms, then gets what others have
released. No partition has two owners at any time. Pure functions.
"""

from collections.abc import Iterable, Set
from dataclasses import replace

from broker.groups.consumer.model import (
    NO_PARTITIONS,
    ConsumerGroup,
    ConsumerMember,
    MemberState,
    PartitionId,
)


def reconciled(
    group: ConsumerGroup, member: ConsumerMember, owned: Set[PartitionId] | None
) -> ConsumerMember:
    """Return the member after its next step; the same object if it has to wait or is done.

    `owned` is what the client says that it owns; None if it did not say.
    """
    waits_for_revocation = member.state is MemberState.UNREVOKED_PARTITIONS
    if waits_for_revocation and _owns_any(owned, member.pending_revocation.keys()):
        return member
    if member.state is MemberState.STABLE and member.epoch == group.assignment_epoch:
        return member
    return _next_step(group, member, owned)


def _next_step(
    group: ConsumerGroup, member: ConsumerMember, owned: Set[PartitionId] | None
) -> ConsumerMember:
    target = group.targets.get(member.member_id, NO_PARTITIONS)
    kept = dict(member.assigned)
    revoked = {p: kept.pop(p) for p in member.assigned.keys() - target}
    if revoked and _owns_any(owned, revoked.keys()):
        # The epoch stays: the member gets the next one when it has confirmed the revocation.
        return replace(
            member,
            state=MemberState.UNREVOKED_PARTITIONS,
            previous_epoch=member.epoch,
            assigned=kept,
            pending_revocation=revoked,
        )
    missing = target - kept.keys()
    owned_now = missing.intersection(group.owners)
    free = missing - {p for p in owned_now if group.owners[p] != member.member_id}
    epoch = group.assignment_epoch
    after = replace(
        member,
        state=MemberState.STABLE
        if len(free) == len(missing)
        else MemberState.UNRELEASED_PARTITIONS,
        epoch=epoch,
        previous_epoch=member.epoch,
        assigned={**kept, **dict.fromkeys(free, epoch)},
        pending_revocation={},
    )
    return member if _same_assignment(member, after) else after


def _owns_any(owned: Set[PartitionId] | None, partitions: Iterable[PartitionId]) -> bool:
    """Return whether the client still owns any of the partitions; yes, if it did not say."""
    return owned is None or not owned.isdisjoint(partitions)


def _same_assignment(before: ConsumerMember, after: ConsumerMember) -> bool:
    return (
        before.epoch == after.epoch
        and before.state is after.state
        and before.assigned.keys() == after.assigned.keys()
        and not before.pending_revocation
    )
