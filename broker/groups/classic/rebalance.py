"""The phases of a rebalance: members join, the next generation forms, members get assignments.

This is part of the pure state machine of broker/groups/classic/state.py and follows its rules.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, TypeVar

from broker.groups.classic.membership import elected_leader, elected_protocol
from broker.groups.classic.model import (
    NO_ASSIGNMENT,
    NO_MEMBER_ID,
    CompletingRebalance,
    Effect,
    Effects,
    Empty,
    Group,
    GroupRules,
    JoinAnswer,
    Live,
    Member,
    PreparingRebalance,
    Reply,
    Stable,
    StartJoinTimer,
    StartSession,
    StartSyncTimer,
    Step,
    StopJoinTimer,
    StopSession,
    StopSyncTimer,
    StoreGroup,
    SyncAnswer,
)
from protocol.errors import ErrorCode

GENERATION_MAX = 2**31 - 1  # int32 on the wire

NO_ASSIGNMENTS: Final[Mapping[str, bytes]] = MappingProxyType({})

L = TypeVar("L", bound=Live)
Phase = Callable[[Live, GroupRules, int], Step]


def prepare_or_complete(state: Live, rules: GroupRules, now_ms: int) -> Step:
    """Start a rebalance after a join, or end the join phase if all members have joined."""
    if isinstance(state, PreparingRebalance):
        return _maybe_complete_join(state, rules, now_ms)
    return _prepare(state, rules, now_ms)


def after_removal(state: Live, rules: GroupRules, now_ms: int) -> Step:
    """Start a rebalance of the remaining members."""
    if isinstance(state, Empty):
        return state, ()
    return prepare_or_complete(state, rules, now_ms)


def _prepare(state: Empty | CompletingRebalance | Stable, rules: GroupRules, now_ms: int) -> Step:
    """Start a rebalance; responses make members that wait for an assignment join again."""
    effects: Effects = ()
    if isinstance(state, CompletingRebalance):
        state, effects = propagate(state, ErrorCode.REBALANCE_IN_PROGRESS)
    if isinstance(state, CompletingRebalance | Stable) and state.unsynced:
        effects = (*effects, StopSyncTimer())
    group = replace(state.group, since_ms=now_ms)
    timeout_ms = group.rebalance_timeout_ms
    if isinstance(state, Empty) and rules.initial_rebalance_delay_ms > 0:
        delay_ms = rules.initial_rebalance_delay_ms
        waiting = PreparingRebalance(
            group, initial=True, delay_ms=delay_ms, remaining_ms=max(timeout_ms - delay_ms, 0)
        )
        return waiting, (*effects, StartJoinTimer(delay_ms))
    preparing = PreparingRebalance(group)
    if group.all_joined or isinstance(state, Empty):
        completed, more = complete_join(preparing, rules, now_ms)
        return completed, (*effects, *more)
    return preparing, (*effects, StartJoinTimer(timeout_ms))


def _maybe_complete_join(state: PreparingRebalance, rules: GroupRules, now_ms: int) -> Step:
    if state.initial or not state.group.all_joined:
        return state, ()
    return complete_join(state, rules, now_ms)


def complete_join(state: PreparingRebalance, rules: GroupRules, now_ms: int) -> Step:
    """End the join phase: the members that joined form the next generation."""
    effects: list[Effect] = [StopJoinTimer()]
    late = [
        m.member_id
        for m in state.group.members.values()
        if m.join_waiter is None and m.instance_id is None
    ]
    remaining, removal = remove(state, late)
    effects.extend(removal)
    group = remaining.group
    leader = elected_leader(group)
    if group.members and leader is None:
        # All members are static and none has joined: wait for them or for their session timeouts.
        return PreparingRebalance(group), (*effects, StartJoinTimer(group.rebalance_timeout_ms))
    generation = group.generation + 1 if group.generation < GENERATION_MAX else 1
    group = replace(group, generation=generation, leader=leader, since_ms=now_ms)
    if not group.members:
        group = replace(group, protocol_name=None)
        return Empty(group), (*effects, StoreGroup(group))
    group = replace(group, protocol_name=elected_protocol(group))
    members = {}
    for member in group.members.values():
        if member.join_waiter is not None:
            effects.append(Reply(member.join_waiter, joined(group, member)))
        effects.append(session(member))
        members[member.member_id] = replace(member, join_waiter=None, is_new=False)
    effects.append(StartSyncTimer(group.rebalance_timeout_ms))
    unsynced = frozenset(members)
    return CompletingRebalance(replace(group, members=members), unsynced), tuple(effects)


def propagate(
    state: CompletingRebalance, error: ErrorCode, assignments: Mapping[str, bytes] = NO_ASSIGNMENTS
) -> tuple[CompletingRebalance, Effects]:
    """Answer all members that wait for an assignment, with the assignment or with the error."""
    effects: list[Effect] = []
    members = {}
    for member in state.group.members.values():
        assignment = assignments.get(member.member_id, NO_ASSIGNMENT)
        if member.sync_waiter is not None:
            failed = error is not ErrorCode.NONE
            answer = SyncAnswer(error) if failed else synced(state.group, assignment)
            effects.append(Reply(member.sync_waiter, answer))
            effects.append(session(member))
        members[member.member_id] = replace(member, assignment=assignment, sync_waiter=None)
    group = replace(state.group, members=members)
    return replace(state, group=group, assignment=None), tuple(effects)


# Small parts ------------------------------------------------------------------------------------


def chain(step: tuple[Live, Effects], after: Phase, rules: GroupRules, now_ms: int) -> Step:
    """Apply a second step to the result of the first; return the effects of both in order."""
    state, effects = step
    final, more = after(state, rules, now_ms)
    return final, (*effects, *more)


def has_member(group: Group, member_id: str) -> bool:
    """Return whether the id belongs to a member or is pending."""
    return member_id in group.members or member_id in group.pending


def with_group(state: L, group: Group) -> L:
    """Return the same state with another group."""
    return replace(state, group=group)


def with_member(group: Group, member: Member) -> Group:
    """Return the group with this member added or replaced."""
    return replace(group, members={**group.members, member.member_id: member})


def remove(state: Live, member_ids: Collection[str]) -> tuple[Live, Effects]:
    """Remove members and pending ids; their waiting requests are answered first.

    Takes as long for all members as for one: a whole group may expire at the same time.
    """
    group, removed = state.group, frozenset(member_ids)
    effects: list[Effect] = []
    for member_id in member_ids:
        assert has_member(group, member_id), member_id
        effects.append(StopSession(member_id))
        member = group.members.get(member_id)
        if member is not None:
            effects.extend(answers(member, ErrorCode.UNKNOWN_MEMBER_ID, NO_MEMBER_ID))
    members = {key: value for key, value in group.members.items() if key not in removed}
    leader = group.leader if group.leader in members else next(iter(members), None)
    group = replace(group, members=members, leader=leader, pending=group.pending - removed)
    state = with_group(state, group)
    if isinstance(state, CompletingRebalance | Stable) and not removed.isdisjoint(state.unsynced):
        state = replace(state, unsynced=state.unsynced - removed)
        if not state.unsynced:
            effects.append(StopSyncTimer())
    return state, tuple(effects)


def answers(member: Member, error: ErrorCode, member_id: str) -> Effects:
    """Return replies with the same error to all waiting requests of a member."""
    effects: list[Effect] = []
    if member.join_waiter is not None:
        effects.append(Reply(member.join_waiter, JoinAnswer(error, member_id)))
    if member.sync_waiter is not None:
        effects.append(Reply(member.sync_waiter, SyncAnswer(error)))
    return tuple(effects)


def session(member: Member) -> StartSession:
    """Return the effect that restarts the member's session timer."""
    return StartSession(member.member_id, member.session_timeout_ms)


def joined(group: Group, member: Member) -> JoinAnswer:
    """Return the answer to JoinGroup; only the leader gets the list of members."""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    if member.member_id == group.leader:
        members = tuple(
            (m.member_id, m.instance_id, m.metadata(group.protocol_name))
            for m in group.members.values()
        )
    return JoinAnswer(
        ErrorCode.NONE,
        member.member_id,
        group.generation,
        group.protocol_type,
        group.protocol_name,
        group.leader or "",
        members,
    )


def synced(group: Group, assignment: bytes) -> SyncAnswer:
    """Return the answer to SyncGroup."""
    return SyncAnswer(ErrorCode.NONE, group.protocol_type, group.protocol_name, assignment)


def assigned(group: Group, assignments: Mapping[str, bytes]) -> Group:
    """Return the group with the leader's assignments; a missing one is empty."""
    members = {
        m.member_id: replace(m, assignment=assignments.get(m.member_id, NO_ASSIGNMENT))
        for m in group.members.values()
    }
    return replace(group, members=members)
