"""Static members (KIP-345): known by their instance, fenced by it, back without a rebalance."""

from broker.groups.classic.model import (
    CompletingRebalance,
    Empty,
    PreparingRebalance,
    Stable,
)
from protocol.errors import ErrorCode
from tests.support.broker.groups.group_machine import REBALANCE_MS, Machine

BOTH = (("range", b"r"), ("sticky", b"s"))
STICKY_FIRST = (("sticky", b"s"), ("range", b"r"))


def test_a_static_member_needs_no_id_first() -> None:
    m = Machine()
    answer = m.joined(m.join(instance_id="i"))
    assert answer.error is ErrorCode.NONE
    assert m.group.members[answer.member_id].instance_id == "i"


def test_a_static_member_that_restarts_keeps_its_assignment_without_a_rebalance() -> None:
    m = Machine()
    old = m.stable(instance_id="i")[0]
    waiter = m.join(instance_id="i")
    assert m.waits(waiter)
    stored = m.store()
    answer = m.joined(waiter)
    assert answer.member_id in stored.group.members
    assert answer.generation == 1
    assert isinstance(m.state, Stable)
    assert old not in m.group.members
    assert m.synced(m.sync(answer.member_id, instance_id="i")).assignment == old.encode()


def test_a_static_leader_that_restarts_is_told_to_skip_the_assignment() -> None:
    m = Machine()
    m.stable(instance_id="i")
    waiter = m.join(instance_id="i")
    m.store()
    answer = m.joined(waiter)
    assert answer.skip_assignment
    assert answer.leader == answer.member_id
    assert answer.members


def test_a_leader_that_joins_again_stays_the_leader() -> None:
    m = Machine()
    first = m.stable(instance_id="i")[0]
    m.member()
    m.join(first, instance_id="i")
    m.sync(first, instance_id="i")
    m.store()
    m.join(instance_id="i")
    m.store()
    leader = m.group.leader
    assert list(m.group.members).index(str(leader)) == 1
    m.join(str(leader), instance_id="i")
    m.join(next(iter(m.group.members)))
    assert isinstance(m.state, CompletingRebalance)
    assert m.group.leader == leader


def test_before_version_9_a_static_leader_that_restarts_is_kept_from_leading() -> None:
    m = Machine()
    old = m.stable(instance_id="i")[0]
    waiter = m.join(instance_id="i", version=8)
    m.store()
    answer = m.joined(waiter)
    assert answer.leader == old
    assert not answer.members
    assert not answer.skip_assignment


def test_a_static_member_whose_return_is_not_stored_gets_the_error() -> None:
    m = Machine()
    m.stable(instance_id="i")
    waiter = m.join(instance_id="i")
    m.store(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    assert m.joined(waiter).error is ErrorCode.COORDINATOR_NOT_AVAILABLE


def test_a_replaced_static_member_is_fenced() -> None:
    m = Machine()
    old = m.stable(instance_id="i")[0]
    m.join(instance_id="i")
    m.store()
    assert m.heartbeat(old, instance_id="i") is ErrorCode.FENCED_INSTANCE_ID
    assert m.commit(old, 1, "i") is ErrorCode.FENCED_INSTANCE_ID
    assert m.synced(m.sync(old, instance_id="i")).error is ErrorCode.FENCED_INSTANCE_ID
    assert m.joined(m.join(old, instance_id="i")).error is ErrorCode.FENCED_INSTANCE_ID
    assert m.leave((old, "i")).members[0][2] is ErrorCode.FENCED_INSTANCE_ID


def test_a_static_member_replaced_while_it_waits_is_fenced() -> None:
    m = Machine()
    first = m.stable()[0]
    m.join(instance_id="i")
    old_waiter = len(m.asked)
    assert m.waits(old_waiter)
    new_waiter = m.join(instance_id="i")
    assert m.joined(old_waiter).error is ErrorCode.FENCED_INSTANCE_ID
    m.join(first)
    assert m.joined(new_waiter).error is ErrorCode.NONE


def test_a_static_member_that_returns_with_other_protocols_begins_a_rebalance() -> None:
    m = Machine()
    m.stable(instance_id="i", protocols=BOTH)
    waiter = m.join(instance_id="i", protocols=STICKY_FIRST)
    assert m.joined(waiter).generation == 2
    assert m.group.protocol_name == "sticky"


def test_a_static_member_keeps_its_place_when_it_misses_a_rebalance() -> None:
    m = Machine()
    static = m.stable(instance_id="i")[0]
    m.member()
    m.join_timeout()
    assert static in m.group.members
    assert isinstance(m.state, CompletingRebalance)


def test_a_rebalance_to_which_no_static_member_comes_waits_for_their_sessions() -> None:
    m = Machine()
    m.stable(instance_id="i")
    dynamic = m.member()
    m.leave(dynamic)
    m.join_timeout()
    assert isinstance(m.state, PreparingRebalance)
    assert m.join_timer_ms == REBALANCE_MS
    m.expire(next(iter(m.group.members)))
    assert isinstance(m.state, Empty)


def test_an_administrator_removes_a_static_member_by_its_instance_id() -> None:
    m = Machine()
    m.stable(instance_id="i")
    assert m.leave(("", "i")).members == (("", "i", ErrorCode.NONE),)
    assert isinstance(m.state, Empty)
    assert m.leave(("", "i")).members == (("", "i", ErrorCode.UNKNOWN_MEMBER_ID),)
