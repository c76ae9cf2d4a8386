"""The whole table of the state machine, legal and illegal, as a text to be reviewed."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from broker.groups.classic.members import Member, Members
from broker.groups.classic.model import (
    CommitRequested,
    CompletingRebalance,
    Dead,
    Deleted,
    DeletionFailed,
    Effect,
    Empty,
    Event,
    Group,
    GroupRules,
    GroupStored,
    HeartbeatReceived,
    IllegalGroupTransitionError,
    JoinRequested,
    JoinTimeout,
    LeaveRequested,
    PreparingRebalance,
    Replies,
    Reply,
    SessionsExpired,
    Stable,
    StartSessions,
    State,
    StopSessions,
    SyncRequested,
    SyncTimeout,
    Unloaded,
    WaiterGone,
)
from broker.groups.classic.state import transition
from protocol.errors import ErrorCode
from tests.conftest import Golden
from tests.support.broker.groups.group_machine import RANGE, join_request

NO_WAITERS: Mapping[str, int] = MappingProxyType({})
CHANGED = (("range", b"changed"),)


def _group(
    *ids: str,
    pending: frozenset[str] = frozenset(),
    joins: Mapping[str, int] = NO_WAITERS,
    syncs: Mapping[str, int] = NO_WAITERS,
) -> Group:
    leader = ids[0] if ids else None
    members = Members.of(Member(key, None, "c", "/h", 10, 60, RANGE) for key in ids)
    group = Group("g", 3, "consumer", "range", leader, members)
    return replace(group, pending=pending, joins=joins, syncs=syncs)


PAIR = _group("lead", "peer")
HALF_JOINED = _group("lead", "peer", joins={"lead": 1})
SYNCING = _group("lead", "peer", syncs={"peer": 2})
STORING = _group("lead", "peer", syncs={"lead": 1, "peer": 2})

STATES: dict[str, State] = {
    "Empty": Empty(Group("g")),
    "Empty, an id given out": Empty(_group(pending=frozenset({"pending"}))),
    "PreparingRebalance, initial": PreparingRebalance(
        _group("lead", joins={"lead": 1}),
        initial=True,
        delay_ms=5,
        remaining_ms=9,
        member_added=True,
    ),
    "PreparingRebalance, peer missing": PreparingRebalance(HALF_JOINED),
    "CompletingRebalance, leader missing": CompletingRebalance(SYNCING, frozenset({"lead"})),
    "CompletingRebalance, storing": CompletingRebalance(STORING, frozenset(), {"lead": b"a"}),
    "Stable": Stable(PAIR),
    "Stable, peer has not synced": Stable(PAIR, frozenset({"peer"})),
    "Dead": Dead(Group("g")),
}

_NEW = join_request(waiter=9, new_member_id="new")
EVENTS: dict[str, Event] = {
    "join without id": _NEW,
    "join without id, before v4": replace(_NEW, id_required=False),
    "join of an id given out": replace(_NEW, member_id="pending"),
    "join of the leader": replace(_NEW, member_id="lead"),
    "join of the peer": replace(_NEW, member_id="peer"),
    "join of the peer, changed": replace(_NEW, member_id="peer", protocols=CHANGED),
    "join with another protocol": replace(_NEW, protocols=(("other", b""),)),
    "join of a static member": replace(_NEW, instance_id="i"),
    "sync of the leader": SyncRequested(9, "lead", None, 3, None, None, {"lead": b"a"}),
    "sync of the peer": SyncRequested(9, "peer", None, 3, None, None, {}),
    "sync of an old generation": SyncRequested(9, "peer", None, 2, None, None, {}),
    "heartbeat of the peer": HeartbeatReceived(9, "peer", None, 3),
    "commit of the peer": CommitRequested(9, "peer", None, 3),
    "commit from outside": CommitRequested(9, "", None, -1),
    "leave of the leader": LeaveRequested(9, (("lead", None),)),
    "leave of all": LeaveRequested(9, (("lead", None), ("peer", None))),
    "leave of an unknown member": LeaveRequested(9, (("unknown", None),)),
    "session of the leader": SessionsExpired(("lead",)),
    "session of the peer": SessionsExpired(("peer",)),
    "session of an id given out": SessionsExpired(("pending",)),
    "join timeout": JoinTimeout(),
    "sync timeout": SyncTimeout(),
    "stored": GroupStored(3, ErrorCode.NONE, None),
    "not stored": GroupStored(3, ErrorCode.COORDINATOR_NOT_AVAILABLE, None),
    "waiter 1 gone": WaiterGone(1),
    "deleted": Deleted(),
    "deletion failed": DeletionFailed(),
    "unloaded": Unloaded(),
}


def test_the_table_of_transitions_is_the_reviewed_one(golden: Golden) -> None:
    golden.check("group_transitions.txt", _table())


def _table() -> str:
    lines = [
        "# Members lead (the leader) and peer; generation 3; the request in question is 9.",
        "",
    ]
    for state_name, state in STATES.items():
        lines.append(state_name)
        lines += [f"    {name:27} {_outcome(state, event)}" for name, event in EVENTS.items()]
        lines.append("")
    return "\n".join(lines)


def _outcome(state: State, event: Event) -> str:
    try:
        after, effects = transition(state, event, GroupRules(initial_rebalance_delay_ms=5), 77)
    except IllegalGroupTransitionError:
        return "-"
    reported = ", ".join(_told(effect) for effect in effects)
    return f"{_described(after)}" + (f": {reported}" if reported else "")


def _described(state: State) -> str:
    group = state.group
    members = "+".join((m + "*" if m == group.leader else m) for m in group.members)
    text = f"{type(state).__name__} g{group.generation} [{members}]"
    if group.pending:
        text += f" pending {'+'.join(sorted(group.pending))}"
    if isinstance(state, CompletingRebalance | Stable) and state.unsynced:
        text += f" unsynced {'+'.join(sorted(state.unsynced))}"
    return text


def _told(effect: Effect) -> str:
    if isinstance(effect, Reply):
        answer = effect.answer
        error = getattr(answer, "error", ErrorCode.NONE)
        errors = [e for _, _, e in answer.members] if type(answer).__name__ == "LeaveAnswer" else []
        named = "+".join(ErrorCode(e).name for e in [error, *errors])
        return f"answer {effect.waiter} {named}"
    name = type(effect).__name__
    match effect:
        case StartSessions(member_ids) | StopSessions(member_ids):
            return f"{name} {'+'.join(sorted(member_ids))}"
        case Replies():
            return ", ".join(map(_told, effect))
    return name


def test_every_event_is_in_the_table() -> None:
    seen = {type(event) for event in EVENTS.values()}
    assert seen == set(Event.__args__)
    assert JoinRequested in seen


def test_every_state_is_in_the_table() -> None:
    assert {type(state) for state in STATES.values()} == set(State.__args__)
