"""Rules of one classic group, one sentence each."""

from collections.abc import Collection

import pytest

from broker.groups.classic import rebalance
from broker.groups.classic import state as classic_state
from broker.groups.classic.members import Member, Members
from broker.groups.classic.model import (
    CompletingRebalance,
    Dead,
    Deleted,
    DeletionFailed,
    Effects,
    Empty,
    Group,
    GroupRules,
    IllegalGroupTransitionError,
    JoinTimeout,
    Live,
    PreparingRebalance,
    SessionsExpired,
    Stable,
    StartSessions,
    StopSessions,
    SyncTimeout,
    Unloaded,
    WaiterGone,
)
from broker.groups.classic.rebalance import remove
from broker.groups.classic.state import restored
from protocol.errors import ErrorCode
from tests.support.broker.groups.group_machine import RANGE, REBALANCE_MS, SESSION_MS, Machine

BOTH = (("range", b"r"), ("sticky", b"s"))
STICKY_FIRST = (("sticky", b"s"), ("range", b"r"))


def test_a_new_member_without_id_is_given_one_and_asked_to_come_again() -> None:
    m = Machine()
    answer = m.joined(m.join())
    assert answer.error is ErrorCode.MEMBER_ID_REQUIRED
    assert answer.member_id in m.group.pending
    assert m.sessions == {answer.member_id: SESSION_MS}
    assert isinstance(m.state, Empty)


def test_before_version_4_a_member_without_id_is_let_in_at_once() -> None:
    m = Machine()
    answer = m.joined(m.join(version=3))
    assert answer.error is ErrorCode.NONE
    assert answer.generation == 1
    assert answer.leader == answer.member_id


def test_an_id_nobody_came_back_with_expires() -> None:
    m = Machine()
    pending = m.joined(m.join()).member_id
    m.expire(pending)
    assert not m.group.pending
    assert m.joined(m.join(pending)).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_ids_given_out_are_bounded() -> None:
    m = Machine(rules=GroupRules(max_pending_members=1))
    m.join()
    assert m.joined(m.join()).error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


def test_a_lone_member_leads_a_generation_and_hears_of_itself() -> None:
    m = Machine()
    pending = m.joined(m.join()).member_id
    answer = m.joined(m.join(pending))
    assert answer.error is ErrorCode.NONE
    assert answer.generation == 1
    assert answer.leader == pending
    assert answer.members == ((pending, None, b"r"),)
    assert answer.protocol_type == "consumer"
    assert answer.protocol_name == "range"
    assert isinstance(m.state, CompletingRebalance)


def test_an_assignment_is_given_out_only_after_it_is_stored() -> None:
    m = Machine()
    member = m.member()
    waiter = m.sync(member, assignments={member: b"a"})
    assert m.waits(waiter)
    stored = m.store()
    assert stored.group.assignment(member) == b"a"
    assert m.synced(waiter).assignment == b"a"
    assert m.synced(waiter).protocol_name == "range"
    assert isinstance(m.state, Stable)


def test_a_finished_join_begins_the_ordinary_session() -> None:
    m = Machine()
    m.stable()
    new = m.member()
    assert m.sessions[new] == m.rules.new_member_join_timeout_ms
    m.join_timeout()
    assert m.sessions[new] == SESSION_MS


def test_a_failed_store_is_answered_with_its_error_and_begins_again() -> None:
    m = Machine()
    member = m.member()
    waiter = m.sync(member, assignments={member: b"a"})
    m.store(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    assert m.synced(waiter).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert isinstance(m.state, PreparingRebalance)
    assert m.group.assignment(member) == b""


def test_followers_get_no_list_of_members() -> None:
    m = Machine()
    first = m.stable()[0]
    second = m.member()
    m.join(first)
    answers = [a for a in m.answers.values() if getattr(a, "generation", 0) == 2]
    by_id = {a.member_id: a for a in answers}
    assert {i for i, _, _ in by_id[first].members} == {first, second}
    assert by_id[second].members == ()
    assert by_id[second].leader == first


def test_a_new_member_sends_the_others_back_to_join() -> None:
    m = Machine()
    first = m.stable()[0]
    m.member()
    assert isinstance(m.state, PreparingRebalance)
    assert m.heartbeat(first) is ErrorCode.REBALANCE_IN_PROGRESS
    assert m.synced(m.sync(first)).error is ErrorCode.REBALANCE_IN_PROGRESS
    assert m.join_timer_ms == REBALANCE_MS


def test_a_member_that_does_not_join_again_in_time_is_out() -> None:
    m = Machine()
    first = m.stable()[0]
    second = m.member()
    m.join_timeout()
    assert m.group.members.keys() == {second}
    assert m.group.leader == second
    assert m.heartbeat(first) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_member_that_does_not_sync_in_time_is_out() -> None:
    m = Machine()
    first, second = m.stable(2)
    third = m.member()
    m.join(first)
    m.join(second)
    waiter = m.sync(first, assignments={first: b"a"})
    m.sync_timeout()
    assert m.group.members.keys() == {first}
    assert third not in m.group.members
    assert m.synced(waiter).error is ErrorCode.REBALANCE_IN_PROGRESS


def test_a_follower_that_joins_again_unchanged_keeps_the_generation() -> None:
    m = Machine()
    _, second = m.stable(2)
    answer = m.joined(m.join(second))
    assert answer.error is ErrorCode.NONE
    assert answer.generation == m.group.generation == 2
    assert isinstance(m.state, Stable)


def test_a_follower_that_changes_its_metadata_begins_a_rebalance() -> None:
    m = Machine()
    _, second = m.stable(2)
    assert m.waits(m.join(second, protocols=(("range", b"new"),)))
    assert isinstance(m.state, PreparingRebalance)


def test_a_leader_that_joins_again_begins_a_rebalance_even_unchanged() -> None:
    m = Machine()
    first, _ = m.stable(2)
    assert m.waits(m.join(first))
    assert isinstance(m.state, PreparingRebalance)


def test_a_join_sent_twice_before_the_sync_gets_the_same_generation() -> None:
    m = Machine()
    member = m.member()
    assert m.joined(m.join(member)).generation == 1
    assert isinstance(m.state, CompletingRebalance)


def test_a_second_join_of_the_same_member_answers_the_first() -> None:
    m = Machine()
    m.stable()
    second = m.member()
    old = m.group.joins.get(second)
    assert old is not None
    new = m.join(second)
    assert m.joined(old).error is ErrorCode.REBALANCE_IN_PROGRESS
    assert m.waits(new)


def test_a_second_sync_of_the_same_member_answers_the_first() -> None:
    m = Machine()
    first, second = m.stable(2)
    m.join(first)
    m.join(second)
    old = m.sync(second)
    new = m.sync(second)
    assert m.synced(old).error is ErrorCode.REBALANCE_IN_PROGRESS
    assert m.waits(new)


def test_the_protocol_most_members_prefer_is_chosen() -> None:
    m = Machine()
    first = m.member(protocols=BOTH)
    m.sync(first)
    m.store()
    m.member(protocols=STICKY_FIRST)
    m.member(protocols=STICKY_FIRST)
    m.join(first, protocols=BOTH)
    assert m.group.protocol_name == "sticky"


def test_a_protocol_that_one_member_lacks_is_never_chosen() -> None:
    m = Machine()
    first = m.member(protocols=STICKY_FIRST)
    m.sync(first)
    m.store()
    m.member(protocols=RANGE)
    m.join(first, protocols=STICKY_FIRST)
    assert m.group.protocol_name == "range"


@pytest.mark.parametrize(
    "options",
    [
        {"protocol_type": "connect"},
        {"protocols": (("other", b""),)},
        {"protocols": ()},
    ],
)
def test_a_member_that_shares_no_protocol_is_turned_away(options: dict[str, object]) -> None:
    m = Machine()
    m.stable()
    assert m.joined(m.join(**options)).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_a_group_without_type_or_protocols_cannot_begin() -> None:
    m = Machine()
    assert m.joined(m.join(protocols=())).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert m.joined(m.join(protocol_type="")).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_an_empty_group_takes_the_type_of_its_next_member() -> None:
    m = Machine()
    m.leave(m.stable()[0])
    m.member(protocol_type="connect")
    assert m.group.protocol_type == "connect"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"generation": 7}, ErrorCode.ILLEGAL_GENERATION),
        ({"protocol_type": "connect"}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_name": "sticky"}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": "consumer", "protocol_name": "range"}, ErrorCode.NONE),
    ],
)
def test_a_sync_must_name_the_present_generation_and_protocol(
    options: dict[str, object], error: ErrorCode
) -> None:
    m = Machine()
    member = m.stable()[0]
    assert m.synced(m.sync(member, **options)).error is error  # type: ignore[arg-type]


def test_a_member_that_has_not_joined_is_unknown() -> None:
    m = Machine()
    m.stable()
    assert m.joined(m.join("unknown")).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert m.synced(m.sync("unknown")).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert m.heartbeat("unknown") is ErrorCode.UNKNOWN_MEMBER_ID
    assert m.commit("unknown", 1) is ErrorCode.UNKNOWN_MEMBER_ID
    assert m.leave("unknown").members == (("unknown", None, ErrorCode.UNKNOWN_MEMBER_ID),)
    assert isinstance(m.state, Stable)


def test_an_old_generation_is_told_so() -> None:
    m = Machine()
    member = m.stable()[0]
    assert m.heartbeat(member, 0) is ErrorCode.ILLEGAL_GENERATION
    assert m.commit(member, 0) is ErrorCode.ILLEGAL_GENERATION


def test_a_heartbeat_renews_the_session() -> None:
    m = Machine()
    member = m.stable()[0]
    m.sessions[member] = -1
    assert m.heartbeat(member) is ErrorCode.NONE
    assert m.sessions[member] == SESSION_MS


def test_a_commit_renews_the_session() -> None:
    m = Machine()
    member = m.stable()[0]
    m.sessions[member] = -1
    assert m.commit(member, 1) is ErrorCode.NONE
    assert m.sessions[member] == SESSION_MS


def test_anyone_may_commit_to_an_empty_group_without_a_generation() -> None:
    m = Machine()
    assert m.commit() is ErrorCode.NONE
    assert m.commit("whoever", -1) is ErrorCode.NONE
    assert m.commit("whoever", 0) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_commit_from_outside_a_live_group_is_refused() -> None:
    m = Machine()
    m.stable()
    assert m.commit() is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_commit_between_join_and_assignment_is_refused() -> None:
    m = Machine()
    member = m.member()
    assert m.commit(member, 1) is ErrorCode.REBALANCE_IN_PROGRESS


def test_a_commit_while_the_others_join_is_allowed() -> None:
    m = Machine()
    first = m.stable()[0]
    m.member()
    assert m.commit(first, 1) is ErrorCode.NONE


def test_a_silent_member_is_removed_and_the_rest_rebalance() -> None:
    m = Machine()
    first, second = m.stable(2)
    m.expire(first)
    assert m.group.members.keys() == {second}
    assert m.group.leader == second
    assert isinstance(m.state, PreparingRebalance)


def test_when_the_last_member_goes_the_group_is_empty_and_stored_so() -> None:
    m = Machine()
    m.expire(m.stable()[0])
    assert isinstance(m.state, Empty)
    stored = m.store()
    assert stored.group.members == {}
    assert stored.group.generation == 2
    assert stored.group.protocol_type == "consumer"
    assert stored.group.protocol_name is None
    assert stored.group.leader is None


def test_a_waiting_member_does_not_expire_while_another_is_missing() -> None:
    m = Machine()
    first, second = m.stable(2)
    waiter = m.join(first)
    assert m.waits(waiter)
    m.expire(first)
    assert m.waits(waiter)
    assert m.sessions[first] == SESSION_MS
    assert second in m.group.members


def test_a_new_member_that_waits_too_long_is_removed_and_answered() -> None:
    m = Machine()
    m.stable()
    new = m.member()
    waiter = m.group.joins.get(new)
    assert waiter is not None
    assert m.sessions[new] == m.rules.new_member_join_timeout_ms
    m.expire(new)
    assert m.joined(waiter).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert new not in m.group.members


def test_a_member_whose_connection_closed_while_it_waited_expires_by_its_session() -> None:
    m = Machine()
    first = m.stable()[0]
    second = m.member()
    waiter = m.group.joins.get(second)
    assert waiter is not None
    m.gone.add(waiter)
    m.tell(WaiterGone(waiter))
    assert m.sessions[second] == SESSION_MS
    m.expire(second)
    assert m.group.members.keys() == {first}


def test_a_ghost_does_not_become_a_member_of_the_next_generation() -> None:
    m = Machine()
    first = m.stable()[0]
    second = m.member()
    waiter = m.group.joins.get(second)
    assert waiter is not None
    m.gone.add(waiter)
    m.tell(WaiterGone(waiter))
    again = m.join(first)
    assert m.waits(again)
    m.join_timeout()
    assert [i for i, _, _ in m.joined(again).members] == [first]


def test_a_leaver_is_removed_at_once() -> None:
    m = Machine()
    first, second = m.stable(2)
    assert m.leave(first).members == ((first, None, ErrorCode.NONE),)
    assert m.group.members.keys() == {second}
    assert isinstance(m.state, PreparingRebalance)


def test_many_may_leave_with_one_request() -> None:
    m = Machine()
    first, second = m.stable(2)
    answer = m.leave(first, "unknown", second)
    assert [e for _, _, e in answer.members] == [
        ErrorCode.NONE,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.NONE,
    ]
    assert isinstance(m.state, Empty)


def test_a_leaver_that_waits_is_answered() -> None:
    m = Machine()
    first, second = m.stable(2)
    joining = m.join(first)
    m.leave(first)
    assert m.joined(joining).error is ErrorCode.UNKNOWN_MEMBER_ID
    m.join(second)
    syncing = m.sync(second)
    m.leave(second)
    assert m.synced(syncing).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_an_id_given_out_may_leave() -> None:
    m = Machine()
    pending = m.joined(m.join()).member_id
    assert m.leave(pending).members == ((pending, None, ErrorCode.NONE),)
    assert not m.group.pending


def test_an_id_given_out_holds_a_rebalance_back_until_it_joins_or_expires() -> None:
    m = Machine()
    first = m.stable()[0]
    pending = m.joined(m.join()).member_id
    waiter = m.join(first)
    assert m.waits(waiter)
    m.expire(pending)
    assert m.joined(waiter).generation == 2


# Limits and the delay at the beginning ------------------------------------------------------------


def test_a_full_group_turns_new_members_away() -> None:
    m = Machine(rules=GroupRules(max_group_size=2))
    first, _ = m.stable(2)
    assert m.joined(m.join()).error is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert m.joined(m.join("unknown")).error is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert isinstance(m.state, Stable)
    assert m.waits(m.join(first))


def test_a_group_that_is_too_large_loses_the_last_to_join_again() -> None:
    m = Machine()
    first, second = m.stable(2)
    m.rules = GroupRules(max_group_size=1)
    waiter = m.join(first)
    assert m.joined(m.join(second)).error is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert m.joined(waiter).generation == 3
    assert m.group.members.keys() == {first}


def test_the_first_rebalance_waits_its_delay_for_more_members() -> None:
    m = Machine(rules=GroupRules(initial_rebalance_delay_ms=3_000))
    first = m.join(version=3)
    assert m.join_timer_ms == 3_000
    m.join_timeout()
    assert m.joined(first).generation == 1


def test_the_delay_is_given_again_while_members_arrive_up_to_the_rebalance_timeout() -> None:
    m = Machine(rules=GroupRules(initial_rebalance_delay_ms=3_000))
    waiters = [m.join(version=3, rebalance_timeout_ms=7_000)]
    delays = []
    while isinstance(m.state, PreparingRebalance):
        delays.append(m.join_timer_ms)
        waiters.append(m.join(version=3, rebalance_timeout_ms=7_000))
        m.join_timeout()
    assert delays == [3_000, 3_000, 1_000]
    assert {m.joined(w).generation for w in waiters} == {1}


def test_without_a_delay_the_first_member_goes_ahead_alone() -> None:
    m = Machine(rules=GroupRules(initial_rebalance_delay_ms=0))
    assert m.joined(m.join(version=3)).generation == 1


# The end ------------------------------------------------------------------------------------------


def test_only_an_empty_group_can_be_deleted() -> None:
    m = Machine()
    m.stable()
    with pytest.raises(IllegalGroupTransitionError):
        m.tell(Deleted())


def test_a_deleted_group_sends_everybody_to_look_again() -> None:
    m = Machine()
    pending = m.joined(m.join()).member_id
    m.tell(Deleted())
    gone = ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert m.joined(m.join(pending)).error is gone
    assert m.synced(m.sync("x")).error is gone
    assert m.heartbeat("x") is gone
    assert m.commit() is gone
    assert m.leave("x").error is gone


def test_a_deletion_that_failed_leaves_the_group_empty() -> None:
    m = Machine()
    m.tell(Deleted())
    m.tell(DeletionFailed())
    assert isinstance(m.state, Empty)
    assert m.commit() is ErrorCode.NONE


def test_an_unloaded_group_answers_all_who_wait() -> None:
    m = Machine()
    first, second = m.stable(2)
    third = m.member()
    joining = m.join(first)
    m.tell(Unloaded())
    assert isinstance(m.state, Dead)
    assert m.joined(joining).error is ErrorCode.NOT_COORDINATOR
    assert not {first, second, third} & m.sessions.keys()


def test_a_store_that_ends_after_the_group_died_still_answers() -> None:
    m = Machine()
    m.stable(instance_id="i")
    waiter = m.join(instance_id="i")
    m.tell(Unloaded())
    m.store()
    assert m.joined(waiter).error is ErrorCode.COORDINATOR_NOT_AVAILABLE


def test_a_store_of_an_older_generation_settles_nothing() -> None:
    m = Machine()
    first = m.member()
    m.sync(first, assignments={first: b"old"})
    m.join(first, protocols=(("range", b"changed"),))
    assert m.group.generation == 2
    m.store()
    assert isinstance(m.state, CompletingRebalance)
    assert m.group.assignment(first) == b""


def test_a_store_of_an_older_generation_does_not_stand_for_a_newer_one() -> None:
    m = Machine()
    first = m.member()
    m.sync(first, assignments={first: b"old"})
    m.join(first, protocols=(("range", b"changed"),))
    waiter = m.sync(first, assignments={first: b"new"})
    m.store()
    assert m.waits(waiter)
    m.store()
    assert m.synced(waiter).assignment == b"new"


@pytest.mark.parametrize("event", [JoinTimeout(), SyncTimeout(), SessionsExpired(("x",))])
def test_timers_that_do_not_run_cannot_fire(event: JoinTimeout) -> None:
    m = Machine()
    with pytest.raises(IllegalGroupTransitionError):
        m.tell(event)


def test_restored_members_get_one_session_timeout_to_come_back() -> None:
    members = Members.of([Member("m", None, "c", "/h", SESSION_MS, REBALANCE_MS, RANGE)])
    group = Group("g", 4, "consumer", "range", "m", members, {"m": b"a"})
    state, effects = restored(group)
    assert state == Stable(group)
    assert effects == (StartSessions({"m": SESSION_MS}),)
    assert restored(Group("g", 4)) == (Empty(Group("g", 4)), ())


@pytest.mark.parametrize(
    ("waiting", "event"),
    [
        (PreparingRebalance, JoinTimeout()),
        (CompletingRebalance, SyncTimeout()),
        (Stable, SessionsExpired(tuple(f"m{number}" for number in range(50)))),
    ],
)
def test_members_that_are_late_together_are_removed_in_one_pass_over_the_group(
    monkeypatch: pytest.MonkeyPatch, waiting: type, event: JoinTimeout
) -> None:
    """A pass for each of some thousand members would stop the event loop for seconds."""
    ids = {f"m{number}": None for number in range(50)} | {"last": "i"}
    members = Members.of(
        Member(member_id, instance_id, "c", "/h", SESSION_MS, REBALANCE_MS, RANGE)
        for member_id, instance_id in ids.items()
    )
    group = Group("g", 4, "consumer", "range", "m0", members, joins={"last": 1})
    late = frozenset(members) - {"last"}
    state = CompletingRebalance(group, late) if waiting is CompletingRebalance else waiting(group)
    passes: list[frozenset[str]] = []

    def counted(state: Live, member_ids: Collection[str]) -> tuple[Live, Effects]:
        passes.append(frozenset(member_ids))
        return remove(state, member_ids)

    for module in (rebalance, classic_state):
        monkeypatch.setattr(module, "remove", counted)
    after, effects = classic_state.transition(state, event, GroupRules(), 0)
    assert [each for each in passes if each] == [late]
    assert list(after.group.members) == ["last"]
    assert [set(each.member_ids) for each in effects if isinstance(each, StopSessions)] == [late]
