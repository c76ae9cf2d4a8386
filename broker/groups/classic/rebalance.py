"""The phases of a rebalance: members join, the next generation forms, members get assignments.

This is part of the pure state machine of broker/groups/classic/state.py and follows its rules.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final, TypeVar

from broker.groups.classic.members import Member
from broker.groups.classic.membership import elected_leader
from broker.groups.classic.model import (
    NO_MEMBER_ID,
    CompletingRebalance,
    Effect,
    Effects,
    Empty,
    Group,
    GroupRules,
    JoinAnswer,
    Live,
    PreparingRebalance,
    Replies,
    Stable,
    StartJoinTimer,
    StartSessions,
    StartSyncTimer,
    Step,
    StopJoinTimer,
    StopSessions,
    StopSyncTimer,
    StoreGroup,
    SyncAnswer,
)
from protocol.errors import ErrorCode

GENERATION_MAX = 2**31 - 1  # int32 on the wire

NO_ASSIGNMENTS: Final[Mapping[str, bytes]] = MappingProxyType({})

L = TypeVar("L", bound=Live)
V = TypeVar("V")
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
    group = state.group
    missing = [member for key, member in group.members.items() if key not in group.joins]
    late = [member.member_id for member in missing if member.instance_id is None]
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
    joins = group.joins
    protocol_name = group.members.protocols.elected()
    group = replace(group, protocol_name=protocol_name, joins={}, new=frozenset())
    effects += [
        Replies(joins, partial(joined, group)),
        sessions(group, group.members),
        StartSyncTimer(group.rebalance_timeout_ms),
    ]
    return CompletingRebalance(group, frozenset(group.members)), tuple(effects)


def propagate(
    state: CompletingRebalance, error: ErrorCode, assignments: Mapping[str, bytes] = NO_ASSIGNMENTS
) -> tuple[CompletingRebalance, Effects]:
    """Answer all members that wait for an assignment, with the assignment or with the error."""
    syncs = state.group.syncs
    group = replace(state.group, assignments=assignments, syncs={})
    effects: Effects = ()
    if syncs:
        is_error = error is not ErrorCode.NONE
        answer = partial(_refused, error) if is_error else partial(synced, group)
        effects = (Replies(syncs, answer), sessions(group, syncs))
    return replace(state, group=group, assignment=None), effects


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
    return replace(group, members=group.members.with_member(member))


def remove(state: Live, member_ids: Collection[str]) -> tuple[Live, Effects]:
    """Remove members and pending ids; their waiting requests are answered first.

    Takes as long for all members as for one: a whole group may expire at the same time.
    """
    if not member_ids:
        return state, ()
    group, removed = state.group, frozenset(member_ids)
    assert removed <= group.pending.union(group.members), removed
    effects: list[Effect] = [StopSessions(member_ids)]
    effects.extend(answers(group, removed, ErrorCode.UNKNOWN_MEMBER_ID, NO_MEMBER_ID))
    members = group.members.without(member_ids)
    group = replace(
        group,
        members=members,
        leader=group.leader if group.leader in members else next(iter(members), None),
        assignments=_without(group.assignments, removed),
        joins=_without(group.joins, removed),
        syncs=_without(group.syncs, removed),
        new=group.new - removed,
        pending=group.pending - removed,
    )
    state = with_group(state, group)
    if isinstance(state, CompletingRebalance | Stable) and not removed.isdisjoint(state.unsynced):
        state = replace(state, unsynced=state.unsynced - removed)
        if not state.unsynced:
            effects.append(StopSyncTimer())
    return state, tuple(effects)


def _without(by_member: Mapping[str, V], removed: frozenset[str]) -> Mapping[str, V]:
    if removed.isdisjoint(by_member):
        return by_member
    return {key: value for key, value in by_member.items() if key not in removed}


def answers(
    group: Group, member_ids: Collection[str], error: ErrorCode, join_id: str | None = None
) -> Effects:
    """Return replies with an error to the waiting requests of members.

    The answer to a join has the id of the member, or `join_id` if that is given.
    """
    effects: list[Effect] = []
    joins = {key: waiter for key, waiter in group.joins.items() if key in member_ids}
    syncs = {key: waiter for key, waiter in group.syncs.items() if key in member_ids}
    if joins:
        effects.append(
            Replies(joins, lambda key: JoinAnswer(error, key if join_id is None else join_id))
        )
    if syncs:
        effects.append(Replies(syncs, partial(_refused, error)))
    return tuple(effects)


def _refused(error: ErrorCode, _member_id: str) -> SyncAnswer:
    return SyncAnswer(error)


def sessions(group: Group, member_ids: Iterable[str]) -> StartSessions:
    """Return the effect that restarts the session timers of members."""
    members = group.members
    return StartSessions({key: members[key].session_timeout_ms for key in member_ids})


def joined(group: Group, member_id: str) -> JoinAnswer:
    """Return the answer to JoinGroup; only the leader gets the list of members."""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    if member_id == group.leader:
        members = tuple(
            (m.member_id, m.instance_id, m.metadata(group.protocol_name))
            for m in group.members.values()
        )
    return JoinAnswer(
        ErrorCode.NONE,
        member_id,
        group.generation,
        group.protocol_type,
        group.protocol_name,
        group.leader or "",
        members,
    )


def synced(group: Group, member_id: str) -> SyncAnswer:
    """Return the answer to SyncGroup."""
    return SyncAnswer(
        ErrorCode.NONE, group.protocol_type, group.protocol_name, group.assignment(member_id)
    )


def assigned(group: Group, assignments: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return the leader's assignments of members; a missing one is empty."""
    return {key: data for key, data in assignments.items() if key in group.members}
