"""Random lives of a group. The rules that must hold after every event are the Machine's."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.groups.classic.model import (
    CompletingRebalance,
    Dead,
    Deleted,
    DeletionFailed,
    Empty,
    GroupRules,
    PreparingRebalance,
    Stable,
    Unloaded,
    WaiterGone,
)
from protocol.errors import ErrorCode
from tests.support.broker.groups.group_machine import Machine
from tests.support.draws import cases

PROTOCOLS = st.sampled_from(
    [
        (("range", b"r"),),
        (("range", b"r"), ("sticky", b"s")),
        (("sticky", b"s"), ("range", b"r")),
        (("sticky", b"t"),),
        (),
    ]
)
INSTANCES = st.sampled_from([None, None, None, "i1", "i2"])
VERSIONS = st.sampled_from([0, 3, 5, 8, 9])
ERRORS = st.sampled_from([ErrorCode.NONE, ErrorCode.NONE, ErrorCode.COORDINATOR_NOT_AVAILABLE])


class GroupLife(RuleBasedStateMachine):
    """Members come, go, fall silent and lose their connections in any order."""

    delay_ms = 0

    def __init__(self) -> None:
        super().__init__()
        rules = GroupRules(
            initial_rebalance_delay_ms=self.delay_ms, max_group_size=4, max_pending_members=3
        )
        self.m = Machine(rules=rules)

    def somebody(self, data: st.DataObject) -> str:
        existing = [*self.m.group.members, *self.m.group.pending, "unknown"]
        return data.draw(st.sampled_from(existing), label="member")

    def instance_of(self, member_id: str, data: st.DataObject) -> str | None:
        member = self.m.group.members.get(member_id)
        own = None if member is None else member.instance_id
        return data.draw(st.sampled_from([own, own, own, None, "i1"]), label="instance")

    def generation(self, data: st.DataObject) -> int:
        now = self.m.group.generation
        return data.draw(st.sampled_from([now, now, now, now - 1, -1]), label="generation")

    @rule(protocols=PROTOCOLS, instance_id=INSTANCES, version=VERSIONS)
    def somebody_new_joins(
        self, protocols: tuple[tuple[str, bytes], ...], instance_id: str | None, version: int
    ) -> None:
        self.m.join(protocols=protocols, instance_id=instance_id, version=version)

    @rule(data=st.data(), protocols=PROTOCOLS, version=VERSIONS)
    def somebody_known_joins(
        self, data: st.DataObject, protocols: tuple[tuple[str, bytes], ...], version: int
    ) -> None:
        member_id = self.somebody(data)
        instance_id = self.instance_of(member_id, data)
        member = self.m.group.members.get(member_id)
        if member is not None and data.draw(st.booleans(), label="unchanged"):
            protocols = member.protocols
        self.m.join(member_id, protocols=protocols, version=version, instance_id=instance_id)

    @precondition(lambda self: isinstance(self.m.state, PreparingRebalance))
    @rule()
    def everybody_joins(self) -> None:
        for member in list(self.m.group.members.values()):
            if member.member_id in self.m.group.members.keys() - self.m.group.joins.keys():
                self.m.join(
                    member.member_id, protocols=member.protocols, instance_id=member.instance_id
                )

    @rule(data=st.data())
    def somebody_syncs(self, data: st.DataObject) -> None:
        member_id = self.somebody(data)
        self.m.sync(
            member_id,
            self.generation(data),
            {member_id: b"a"},
            instance_id=self.instance_of(member_id, data),
        )

    @precondition(lambda self: isinstance(self.m.state, CompletingRebalance))
    @rule()
    def the_leader_syncs(self) -> None:
        leader = self.m.group.leader
        assert leader is not None
        self.m.sync(leader, assignments={m: m.encode() for m in self.m.group.members})

    @rule(data=st.data())
    def somebody_heartbeats(self, data: st.DataObject) -> None:
        member_id = self.somebody(data)
        self.m.heartbeat(member_id, self.generation(data), self.instance_of(member_id, data))

    @rule(data=st.data())
    def somebody_commits(self, data: st.DataObject) -> None:
        member_id = data.draw(st.sampled_from([self.somebody(data), ""]))
        self.m.commit(member_id, self.generation(data), self.instance_of(member_id, data))

    @rule(data=st.data())
    def some_leave(self, data: st.DataObject) -> None:
        first, second = self.somebody(data), self.somebody(data)
        self.m.leave((first, self.instance_of(first, data)), (second, None))

    @precondition(lambda self: self.m.sessions)
    @rule(data=st.data())
    def somebody_falls_silent(self, data: st.DataObject) -> None:
        self.m.expire(data.draw(st.sampled_from(sorted(self.m.sessions)), label="silent"))

    @precondition(lambda self: self.m.join_timer_ms is not None)
    @rule()
    def the_time_to_join_is_over(self) -> None:
        self.m.join_timeout()

    @precondition(lambda self: self.m.sync_timer_ms is not None)
    @rule()
    def the_time_to_sync_is_over(self) -> None:
        self.m.sync_timeout()

    @precondition(lambda self: self.m.stores)
    @rule(error=ERRORS)
    def a_write_ends(self, error: ErrorCode) -> None:
        self.m.store(error)

    @rule(data=st.data())
    def a_connection_closes(self, data: st.DataObject) -> None:
        waiting = sorted(self.m.asked - self.m.answers.keys() - self.m.gone)
        if waiting:
            waiter = data.draw(st.sampled_from(waiting), label="waiter")
            self.m.gone.add(waiter)
            self.m.tell(WaiterGone(waiter))

    @precondition(lambda self: isinstance(self.m.state, Empty))
    @rule(failed=st.booleans())
    def it_is_deleted(self, failed: bool) -> None:
        self.m.tell(Deleted())
        self.m.join()
        self.m.heartbeat("x")
        if failed:
            self.m.tell(DeletionFailed())

    @precondition(lambda self: isinstance(self.m.state, PreparingRebalance | Stable))
    @rule(really=st.sampled_from([False] * 9 + [True]))
    def its_partition_goes_away(self, really: bool) -> None:
        if really:
            self.m.tell(Unloaded())

    @invariant()
    def a_dead_group_stays_dead_or_empty(self) -> None:
        if isinstance(self.m.state, Dead):
            assert not self.m.sessions

    def teardown(self) -> None:
        self.m.drain()


class DelayedGroupLife(GroupLife):
    """The same with an initial rebalance delay."""

    delay_ms = 3_000


_SETTINGS = settings(
    max_examples=cases(few=25, many=150), stateful_step_count=40, deadline=None, print_blob=True
)

TestGroupLife = GroupLife.TestCase
TestGroupLife.settings = _SETTINGS
TestDelayedGroupLife = DelayedGroupLife.TestCase
TestDelayedGroupLife.settings = _SETTINGS
