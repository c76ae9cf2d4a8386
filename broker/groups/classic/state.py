"""The state machine of a classic consumer group: (state, event) -> (state, effects).

Rules
- Functions here are pure: time is an argument, and effects are returned.
- Every request gets exactly one Reply, now or later. For a later one, the member stores the waiter;
  code that removes the member or the waiter replies first.
- Every member and every pending id has a running session timer. The timer does not expire a member
  that waits for an answer, unless the member is new.
- PreparingRebalance has a running join timer, unsynced members have a running sync timer.
- The leader, if there is one, is a member.

This module does not know offsets, records, futures or connections.
"""

from collections.abc import Mapping
from dataclasses import replace

from broker.groups.classic.members import Member
from broker.groups.classic.membership import (
    has_room,
    identity_error,
    speaks_common_protocol,
)
from broker.groups.classic.model import (
    NO_MEMBER_ID,
    CommitRequested,
    CompletingRebalance,
    Dead,
    Deleted,
    DeletionFailed,
    Effect,
    Effects,
    Empty,
    ErrorAnswer,
    Event,
    Group,
    GroupRules,
    GroupStored,
    HeartbeatReceived,
    IllegalGroupTransitionError,
    JoinAnswer,
    JoinRequested,
    JoinTimeout,
    LeaveAnswer,
    LeaveRequested,
    Live,
    PreparingRebalance,
    Reply,
    SessionsExpired,
    Stable,
    StartJoinTimer,
    StartSessions,
    State,
    Step,
    StopJoinTimer,
    StopSessions,
    StopSyncTimer,
    StoreGroup,
    SyncAnswer,
    SyncRequested,
    SyncTimeout,
    Unloaded,
    WaiterGone,
)
from broker.groups.classic.rebalance import (
    after_removal,
    answers,
    assigned,
    chain,
    complete_join,
    has_member,
    joined,
    prepare_or_complete,
    propagate,
    remove,
    sessions,
    synced,
    with_group,
    with_member,
)
from protocol.errors import ErrorCode


def transition(state: State, event: Event, rules: GroupRules, now_ms: int) -> Step:
    """Return the next state and the effects. Raises IllegalGroupTransitionError for a bug."""
    match state, event:
        case Dead(), _:
            return _when_dead(state, event)
        case _, JoinRequested():
            return _join(state, event, rules, now_ms)
        case _, SyncRequested():
            return _sync(state, event)
        case _, HeartbeatReceived():
            return _heartbeat(state, event)
        case _, CommitRequested():
            return _commit(state, event)
        case _, LeaveRequested():
            return _leave(state, event, rules, now_ms)
        case _, SessionsExpired():
            return _expire(state, event, rules, now_ms)
        case PreparingRebalance(), JoinTimeout():
            return _join_timeout(state, rules, now_ms)
        case CompletingRebalance() | Stable(), SyncTimeout() if state.unsynced:
            return _sync_timeout(state, rules, now_ms)
        case _, GroupStored():
            return _stored(state, event, rules, now_ms)
        case _, WaiterGone(waiter):
            return _waiter_gone(state, waiter)
        case Empty(group), Deleted():
            return Dead(group), (StopSessions(group.pending),) if group.pending else ()
        case _, Unloaded(error):
            return _unload(state, error)
        case _:
            raise IllegalGroupTransitionError(state, event)


def restored(group: Group) -> Step:
    """Return the group of a record from the log; members have one session timeout to return."""
    return _restored_members(group) if group.members else (Empty(group), ())


def _restored_members(group: Group) -> tuple[Stable, Effects]:
    return Stable(group), (sessions(group, group.members),)


def downgraded(group: Group, rules: GroupRules, now_ms: int, *, is_changed: bool) -> Step:
    """Return a consumer group that became a classic one; `is_changed`: it starts a rebalance."""
    if not is_changed:
        return restored(group)
    return chain(_restored_members(group), after_removal, rules, now_ms)


# Requests ---------------------------------------------------------------------------------------


def _when_dead(state: Dead, event: Event) -> Step:
    error = ErrorCode.COORDINATOR_NOT_AVAILABLE
    match event:
        case JoinRequested(waiter, member_id):
            return state, (Reply(waiter, JoinAnswer(error, member_id)),)
        case SyncRequested(waiter):
            return state, (Reply(waiter, SyncAnswer(error)),)
        case HeartbeatReceived(waiter) | CommitRequested(waiter):
            return state, (Reply(waiter, ErrorAnswer(error)),)
        case LeaveRequested(waiter):
            return state, (Reply(waiter, LeaveAnswer(error)),)
        case GroupStored(_, _, Reply(waiter)):
            return state, (Reply(waiter, JoinAnswer(error)),)
        case GroupStored() | WaiterGone() | Unloaded():
            return state, ()
        case DeletionFailed():
            return Empty(replace(state.group, pending=frozenset())), ()
        case _:
            raise IllegalGroupTransitionError(state, event)


def _join(state: Live, event: JoinRequested, rules: GroupRules, now_ms: int) -> Step:
    if not has_room(state, event.member_id, rules):
        full = Reply(event.waiter, JoinAnswer(ErrorCode.GROUP_MAX_SIZE_REACHED))
        if not has_member(state.group, event.member_id):
            return state, (full,)
        state_without, effects = remove(state, (event.member_id,))
        return chain((state_without, (*effects, full)), after_removal, rules, now_ms)
    if not speaks_common_protocol(state, event):
        error = ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        return state, (Reply(event.waiter, JoinAnswer(error, event.member_id)),)
    if event.member_id == NO_MEMBER_ID:
        return _join_without_id(state, event, rules, now_ms)
    if event.member_id in state.group.pending and event.instance_id is None:
        return _add(state, event, event.member_id, rules, now_ms)
    error = identity_error(state.group, event.member_id, event.instance_id)
    if error is not ErrorCode.NONE:
        return state, (Reply(event.waiter, JoinAnswer(error, event.member_id)),)
    return _rejoin(state, event, rules, now_ms)


def _join_without_id(state: Live, event: JoinRequested, rules: GroupRules, now_ms: int) -> Step:
    group = state.group
    if event.instance_id is not None:
        member = group.static_member(event.instance_id)
        if member is not None:
            return _replace_static(state, event, member, rules, now_ms)
        return _add(state, event, event.new_member_id, rules, now_ms)
    if not event.id_required:
        return _add(state, event, event.new_member_id, rules, now_ms)
    if len(group.pending) >= rules.max_pending_members:
        # A retriable error: some pending ids expire before the client tries again.
        return state, (Reply(event.waiter, JoinAnswer(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)),)
    pending = group.pending | {event.new_member_id}
    return with_group(state, replace(group, pending=pending)), (
        StartSessions({event.new_member_id: event.session_timeout_ms}),
        Reply(event.waiter, JoinAnswer(ErrorCode.MEMBER_ID_REQUIRED, event.new_member_id)),
    )


def _add(state: Live, event: JoinRequested, member_id: str, rules: GroupRules, now_ms: int) -> Step:
    group = state.group
    group = replace(
        group,
        members=group.members.with_member(_member_of(event, member_id)),
        joins={**group.joins, member_id: event.waiter},
        new=group.new | {member_id},
        pending=group.pending - {member_id},
        leader=group.leader or member_id,
        protocol_type=group.protocol_type if group.members else event.protocol_type,
    )
    state = with_group(state, group)
    if isinstance(state, PreparingRebalance) and state.initial:
        state = replace(state, member_added=True)
    started = StartSessions({member_id: rules.new_member_join_timeout_ms})
    return chain((state, (started,)), prepare_or_complete, rules, now_ms)


def _rejoin(state: Live, event: JoinRequested, rules: GroupRules, now_ms: int) -> Step:
    group = state.group
    member = group.members[event.member_id]
    unchanged = member.protocols == event.protocols
    match state:
        # The client may have missed the answer; nothing changed, so repeat it.
        case CompletingRebalance() if unchanged:
            return state, (Reply(event.waiter, joined(group, member.member_id)),)
        # A leader that rejoins asks for a new assignment, even with unchanged metadata.
        case Stable() if unchanged and group.leader != member.member_id:
            return state, (Reply(event.waiter, joined(group, member.member_id)),)
    return chain(_await_join(state, event, member), prepare_or_complete, rules, now_ms)


def _replace_static(
    state: Live, event: JoinRequested, old: Member, rules: GroupRules, now_ms: int
) -> Step:
    """Give a static member that returned without its id a new id, and fence the old one."""
    before, old_id, new_id = state.group, old.member_id, event.new_member_id
    fenced = answers(before, (old_id,), ErrorCode.FENCED_INSTANCE_ID)
    leader = new_id if before.leader == old_id else before.leader
    group = replace(
        before,
        members=before.members.changed((old_id,), (_member_of(event, new_id),)),
        leader=leader,
        assignments=_renamed(before.assignments, old_id, new_id),
        joins={key: waiter for key, waiter in before.joins.items() if key != old_id},
        syncs={key: waiter for key, waiter in before.syncs.items() if key != old_id},
        new=before.new - {old_id},
    )
    state = _renamed_unsynced(with_group(state, group), old_id, new_id)
    effects: Effects = (
        *fenced,
        StopSessions((old_id,)),
        StartSessions({new_id: event.session_timeout_ms}),
    )
    if isinstance(state, Stable) and group.members.protocols.elected() == group.protocol_name:
        # No rebalance is needed, but the new id must be in the log before the client uses it.
        answer = joined(group, new_id)
        if event.may_skip_assignment:
            answer = replace(answer, skip_assignment=leader == new_id)
        else:
            # Before KIP-814, only the old leader's id in the answer keeps a leader from assigning.
            answer = replace(answer, leader=before.leader or "", members=())
        return state, (*effects, StoreGroup(group, Reply(event.waiter, answer)))
    state = with_group(state, replace(group, joins={**group.joins, new_id: event.waiter}))
    return chain((state, effects), prepare_or_complete, rules, now_ms)


def _sync(state: Live, event: SyncRequested) -> Step:
    error = _sync_error(state, event)
    if error is not ErrorCode.NONE:
        return state, (Reply(event.waiter, SyncAnswer(error)),)
    assert isinstance(state, CompletingRebalance | Stable)
    group = state.group
    member_id = event.member_id
    unsynced = state.unsynced - {member_id}
    effects: list[Effect] = []
    if not unsynced and state.unsynced:
        effects.append(StopSyncTimer())
    if isinstance(state, Stable):
        answer = synced(group, member_id)
        return replace(state, unsynced=unsynced), (*effects, Reply(event.waiter, answer))
    if member_id in group.syncs:
        again = SyncAnswer(ErrorCode.REBALANCE_IN_PROGRESS)
        effects.append(Reply(group.syncs[member_id], again))
    group = replace(group, syncs={**group.syncs, member_id: event.waiter})
    state = replace(state, group=group, unsynced=unsynced)
    if member_id == group.leader and state.assignment is None:
        assignment = assigned(group, event.assignments)
        state = replace(state, assignment=assignment)
        effects.append(StoreGroup(replace(group, assignments=assignment)))
    return state, tuple(effects)


def _sync_error(state: Live, event: SyncRequested) -> ErrorCode:
    group = state.group
    error = identity_error(group, event.member_id, event.instance_id)
    if error is not ErrorCode.NONE:
        return error
    if event.generation != group.generation:
        return ErrorCode.ILLEGAL_GENERATION
    if event.protocol_type is not None and event.protocol_type != group.protocol_type:
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if event.protocol_name is not None and event.protocol_name != group.protocol_name:
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if isinstance(state, PreparingRebalance):
        return ErrorCode.REBALANCE_IN_PROGRESS
    return ErrorCode.NONE


def _heartbeat(state: Live, event: HeartbeatReceived) -> Step:
    group = state.group
    error = identity_error(group, event.member_id, event.instance_id)
    if error is ErrorCode.NONE and event.generation != group.generation:
        error = ErrorCode.ILLEGAL_GENERATION
    if error is not ErrorCode.NONE:
        return state, (Reply(event.waiter, ErrorAnswer(error)),)
    if isinstance(state, PreparingRebalance):
        error = ErrorCode.REBALANCE_IN_PROGRESS
    return state, (sessions(group, (event.member_id,)), Reply(event.waiter, ErrorAnswer(error)))


def _commit(state: Live, event: CommitRequested) -> Step:
    group = state.group
    if event.generation < 0 and isinstance(state, Empty):
        # The client is an administrator, or a consumer that assigns its partitions itself.
        return state, (Reply(event.waiter, ErrorAnswer(ErrorCode.NONE)),)
    if event.generation < 0 and not event.member_id and event.instance_id is None:
        return state, (Reply(event.waiter, ErrorAnswer(ErrorCode.UNKNOWN_MEMBER_ID)),)
    error = identity_error(group, event.member_id, event.instance_id)
    if error is ErrorCode.NONE and event.generation != group.generation:
        error = ErrorCode.ILLEGAL_GENERATION
    if error is not ErrorCode.NONE:
        return state, (Reply(event.waiter, ErrorAnswer(error)),)
    if isinstance(state, CompletingRebalance) and not event.is_transactional:
        # The member does not know its new partitions yet: it may commit for another's partition.
        # As in Kafka, a transaction may: its producer does not know this error and would fail.
        error = ErrorCode.REBALANCE_IN_PROGRESS
    return state, (sessions(group, (event.member_id,)), Reply(event.waiter, ErrorAnswer(error)))


def _leave(state: Live, event: LeaveRequested, rules: GroupRules, now_ms: int) -> Step:
    results: list[tuple[str, str | None, ErrorCode]] = []
    effects: list[Effect] = []
    for member_id, instance_id in event.members:
        leaver, error = _leaver(state.group, member_id, instance_id)
        if error is ErrorCode.NONE:
            state, removal = remove(state, (leaver,))
            effects.extend(removal)
        results.append((member_id, instance_id, error))
    effects.append(Reply(event.waiter, LeaveAnswer(ErrorCode.NONE, tuple(results))))
    if all(error is not ErrorCode.NONE for _, _, error in results):
        return state, tuple(effects)
    return chain((state, tuple(effects)), after_removal, rules, now_ms)


def _leaver(group: Group, member_id: str, instance_id: str | None) -> tuple[str, ErrorCode]:
    if member_id == NO_MEMBER_ID and instance_id is not None:
        # An administrator removes a static member by its instance id alone.
        static = group.static_member(instance_id)
        if static is not None:
            return static.member_id, ErrorCode.NONE
    if member_id in group.pending:
        return member_id, ErrorCode.NONE
    return member_id, identity_error(group, member_id, instance_id)


# Timers and outcomes of effects -------------------------------------------------------------------


def _expire(state: Live, event: SessionsExpired, rules: GroupRules, now_ms: int) -> Step:
    group, effects = state.group, list[Effect]()
    if not group.pending.union(group.members).issuperset(event.member_ids):
        raise IllegalGroupTransitionError(state, event)
    # If a member waits for an answer from the broker, its silence is legitimate.
    excused = (group.joins.keys() | group.syncs.keys()) - group.new
    silent = [key for key in event.member_ids if key not in excused]
    if len(silent) < len(event.member_ids):
        effects.append(sessions(group, excused.intersection(event.member_ids)))
    if not silent:
        return state, tuple(effects)
    state, removal = remove(state, silent)
    return chain((state, (*effects, *removal)), after_removal, rules, now_ms)


def _join_timeout(state: PreparingRebalance, rules: GroupRules, now_ms: int) -> Step:
    if state.initial and state.member_added and state.remaining_ms > 0:
        delay_ms = min(rules.initial_rebalance_delay_ms, state.remaining_ms)
        remaining_ms = max(state.remaining_ms - state.delay_ms, 0)
        again = replace(state, member_added=False, delay_ms=delay_ms, remaining_ms=remaining_ms)
        return again, (StartJoinTimer(delay_ms),)
    return complete_join(state, rules, now_ms)


def _sync_timeout(state: CompletingRebalance | Stable, rules: GroupRules, now_ms: int) -> Step:
    return chain(remove(state, sorted(state.unsynced)), after_removal, rules, now_ms)


def _stored(state: Live, event: GroupStored, rules: GroupRules, now_ms: int) -> Step:
    if event.reply is not None:
        # The request of a static member that returned is answered whatever has happened since.
        answer = event.reply.answer
        assert isinstance(answer, JoinAnswer)
        if event.error is not ErrorCode.NONE:
            answer = JoinAnswer(event.error)
        elif answer.member_id not in state.group.members:
            answer = JoinAnswer(ErrorCode.UNKNOWN_MEMBER_ID)
        return state, (replace(event.reply, answer=answer),)
    if not isinstance(state, CompletingRebalance):
        return state, ()
    assignment = state.assignment
    if assignment is None or event.generation != state.group.generation:
        return state, ()
    if event.error is not ErrorCode.NONE:
        state, effects = propagate(state, event.error)
        return chain((state, effects), after_removal, rules, now_ms)
    settled, effects = propagate(state, ErrorCode.NONE, assignment)
    return Stable(replace(settled.group, since_ms=now_ms), settled.unsynced), effects


def _waiter_gone(state: Live, waiter: int) -> Step:
    group = state.group
    waiting = (*group.joins.items(), *group.syncs.items())
    member_id = next((key for key, number in waiting if number == waiter), None)
    if member_id is None:
        return state, ()
    group = replace(
        group,
        joins={key: number for key, number in group.joins.items() if key != member_id},
        syncs={key: number for key, number in group.syncs.items() if key != member_id},
        new=group.new - {member_id},
    )
    return with_group(state, group), (sessions(group, (member_id,)),)


def _unload(state: Live, error: ErrorCode) -> Step:
    group = state.group
    effects: list[Effect] = [StopJoinTimer(), StopSyncTimer()]
    serving = (*group.pending, *group.members)
    if serving:
        effects.append(StopSessions(serving))
    effects.extend(answers(group, group.members, error))
    return Dead(replace(group, joins={}, syncs={}, pending=frozenset())), tuple(effects)


# Small parts ------------------------------------------------------------------------------------


def _renamed(assignments: Mapping[str, bytes], old_id: str, new_id: str) -> Mapping[str, bytes]:
    if old_id not in assignments:
        return assignments
    others = {key: data for key, data in assignments.items() if key != old_id}
    return {**others, new_id: assignments[old_id]}


def _renamed_unsynced(state: Live, old_id: str, new_id: str) -> Live:
    if isinstance(state, CompletingRebalance | Stable) and old_id in state.unsynced:
        return replace(state, unsynced=(state.unsynced - {old_id}) | {new_id})
    return state


def _await_join(state: Live, event: JoinRequested, member: Member) -> tuple[Live, Effects]:
    group, member_id = state.group, member.member_id
    effects: Effects = ()
    if member_id in group.joins:
        # The member joins over a new connection; the request of the old one must be repeated.
        retry = JoinAnswer(ErrorCode.REBALANCE_IN_PROGRESS, member_id)
        effects = (Reply(group.joins[member_id], retry),)
    joining = replace(
        member,
        protocols=event.protocols,
        session_timeout_ms=event.session_timeout_ms,
        rebalance_timeout_ms=event.rebalance_timeout_ms,
    )
    joins = {**group.joins, member_id: event.waiter}
    return with_group(state, replace(with_member(group, joining), joins=joins)), effects


def _member_of(event: JoinRequested, member_id: str) -> Member:
    return Member(
        member_id=member_id,
        instance_id=event.instance_id,
        client_id=event.client_id,
        client_host=event.client_host,
        session_timeout_ms=event.session_timeout_ms,
        rebalance_timeout_ms=event.rebalance_timeout_ms,
        protocols=event.protocols,
    )
