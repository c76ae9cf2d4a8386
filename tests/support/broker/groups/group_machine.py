"""Drives the pure group state machine: performs effects on paper and checks the rules each time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from broker.groups.classic.members import Members
from broker.groups.classic.model import (
    Answer,
    CommitRequested,
    CompletingRebalance,
    Dead,
    Effect,
    Empty,
    ErrorAnswer,
    Event,
    Group,
    GroupRules,
    GroupStored,
    HeartbeatReceived,
    JoinAnswer,
    JoinRequested,
    JoinTimeout,
    LeaveAnswer,
    LeaveRequested,
    PreparingRebalance,
    Replies,
    Reply,
    SessionsExpired,
    Stable,
    StartJoinTimer,
    StartSessions,
    StartSyncTimer,
    State,
    StopJoinTimer,
    StopSessions,
    StopSyncTimer,
    StoreGroup,
    SyncAnswer,
    SyncRequested,
    SyncTimeout,
)
from broker.groups.classic.state import transition
from protocol.errors import ErrorCode

RANGE = (("range", b"r"),)
SESSION_MS = 10_000
REBALANCE_MS = 60_000


def join_request(
    member_id: str = "",
    *,
    instance_id: str | None = None,
    client_id: str = "client",
    protocols: tuple[tuple[str, bytes], ...] = RANGE,
    protocol_type: str = "consumer",
    session_timeout_ms: int = SESSION_MS,
    rebalance_timeout_ms: int = REBALANCE_MS,
    version: int = 9,
    waiter: int = 0,
    new_member_id: str = "",
) -> JoinRequested:
    return JoinRequested(
        waiter=waiter,
        member_id=member_id,
        new_member_id=new_member_id,
        instance_id=instance_id,
        client_id=client_id,
        client_host="/127.0.0.1",
        session_timeout_ms=session_timeout_ms,
        rebalance_timeout_ms=rebalance_timeout_ms,
        protocol_type=protocol_type,
        protocols=protocols,
        id_required=version >= 4,
        may_skip_assignment=version >= 9,
    )


@dataclass
class Machine:
    """One group. Timers are a set on paper; tests fire them by hand."""

    rules: GroupRules = field(default_factory=GroupRules)
    state: State = field(default_factory=lambda: Empty(Group("g")))
    now_ms: int = 1_000
    answers: dict[int, Answer] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    sessions: dict[str, int] = field(default_factory=dict)
    join_timer_ms: int | None = None
    sync_timer_ms: int | None = None
    stores: list[StoreGroup] = field(default_factory=list)
    leaders: dict[int, set[str]] = field(default_factory=dict)
    next_id: int = 0

    # Requests -------------------------------------------------------------------------------------

    def join(self, member_id: str = "", **options: object) -> int:
        self.next_id += 1
        waiter = self._waiter()
        new_id = f"m{self.next_id}"
        request = join_request(member_id, waiter=waiter, new_member_id=new_id, **options)  # type: ignore[arg-type]
        self.tell(request)
        return waiter

    def sync(
        self,
        member_id: str,
        generation: int | None = None,
        assignments: Mapping[str, bytes] | None = None,
        *,
        instance_id: str | None = None,
        protocol_type: str | None = None,
        protocol_name: str | None = None,
    ) -> int:
        waiter = self._waiter()
        if generation is None:
            generation = self.group.generation
        self.tell(
            SyncRequested(
                waiter,
                member_id,
                instance_id,
                generation,
                protocol_type,
                protocol_name,
                assignments or {},
            )
        )
        return waiter

    def heartbeat(
        self, member_id: str, generation: int | None = None, instance_id: str | None = None
    ) -> ErrorCode:
        waiter = self._waiter()
        if generation is None:
            generation = self.group.generation
        self.tell(HeartbeatReceived(waiter, member_id, instance_id, generation))
        answer = self.answers[waiter]
        assert isinstance(answer, ErrorAnswer)
        return answer.error

    def commit(
        self, member_id: str = "", generation: int = -1, instance_id: str | None = None
    ) -> ErrorCode:
        waiter = self._waiter()
        self.tell(CommitRequested(waiter, member_id, instance_id, generation))
        answer = self.answers[waiter]
        assert isinstance(answer, ErrorAnswer)
        return answer.error

    def leave(self, *members: str | tuple[str, str | None]) -> LeaveAnswer:
        waiter = self._waiter()
        named = tuple((m, None) if isinstance(m, str) else m for m in members)
        self.tell(LeaveRequested(waiter, named))
        answer = self.answers[waiter]
        assert isinstance(answer, LeaveAnswer)
        return answer

    # What came of them ----------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        return self.state.group

    def joined(self, waiter: int) -> JoinAnswer:
        answer = self.answers[waiter]
        assert isinstance(answer, JoinAnswer)
        return answer

    def synced(self, waiter: int) -> SyncAnswer:
        answer = self.answers[waiter]
        assert isinstance(answer, SyncAnswer)
        return answer

    def waits(self, waiter: int) -> bool:
        return waiter not in self.answers

    # Timers and writes ----------------------------------------------------------------------------

    def expire(self, member_id: str) -> None:
        del self.sessions[member_id]
        self.tell(SessionsExpired((member_id,)))

    def join_timeout(self) -> None:
        assert self.join_timer_ms is not None
        self.join_timer_ms = None
        self.tell(JoinTimeout())

    def sync_timeout(self) -> None:
        assert self.sync_timer_ms is not None
        self.sync_timer_ms = None
        self.tell(SyncTimeout())

    def store(self, error: ErrorCode = ErrorCode.NONE) -> StoreGroup:
        stored = self.stores.pop(0)
        self.tell(GroupStored(stored.group.generation, error, stored.reply))
        return stored

    # Short cuts -----------------------------------------------------------------------------------

    def member(self, **options: object) -> str:
        """One more member joins with an id of its own; returns the id. Its answer may be owed."""
        first = self.join(**options)
        answer = self.answers.get(first)
        if isinstance(answer, JoinAnswer) and answer.error is ErrorCode.MEMBER_ID_REQUIRED:
            self.join(answer.member_id, **options)
            return answer.member_id
        return f"m{self.next_id}"

    def stable(self, count: int = 1, **options: object) -> list[str]:
        """A stable group of `count` members, the first its leader."""
        ids = [self.member(**options) for _ in range(count)]
        while any(i not in self.group.joins for i in ids) and count > 1:
            for member_id in ids:
                if member_id not in self.group.joins:
                    self.join(member_id, **{k: v for k, v in options.items() if k != "version"})
            if isinstance(self.state, CompletingRebalance):
                break
        for member_id in ids:
            self.sync(member_id, assignments={i: i.encode() for i in ids})
        self.store()
        assert isinstance(self.state, Stable)
        return ids

    # The rules ------------------------------------------------------------------------------------

    def tell(self, event: Event) -> tuple[Effect, ...]:
        self.now_ms += 1
        self.state, effects = transition(self.state, event, self.rules, self.now_ms)
        for effect in effects:
            self._perform(effect)
            if isinstance(effect, Reply | Replies) and not isinstance(event, GroupStored):
                for reply in [effect] if isinstance(effect, Reply) else effect:
                    self._check_generation(reply.answer)
        self.check()
        return effects

    def _check_generation(self, answer: Answer) -> None:
        """Whoever is let in is let into the generation that stands."""
        if isinstance(answer, JoinAnswer) and answer.error is ErrorCode.NONE:
            assert answer.generation == self.group.generation
            assert answer.protocol_name == self.group.protocol_name
            assert answer.member_id in self.group.members

    def drain(self) -> None:
        """Let all writes end and all timers fire: nobody may be left waiting."""
        for _ in range(100):
            while self.stores:
                self.store()
            for member_id in list(self.sessions):
                if member_id in self.sessions:
                    self.expire(member_id)
            if self.sync_timer_ms is not None:
                self.sync_timeout()
            if self.join_timer_ms is not None:
                self.join_timeout()
            if not self.sessions and not self.stores and self.join_timer_ms is None:
                break
        assert isinstance(self.state, Empty | Dead), self.state
        assert self.asked - self.gone <= self.answers.keys()

    def _waiter(self) -> int:
        waiter = len(self.asked) + 1
        self.asked.add(waiter)
        return waiter

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Reply(waiter, answer):
                assert waiter not in self.answers, f"{waiter} answered twice"
                self.answers[waiter] = answer
                if isinstance(answer, JoinAnswer):
                    self._note_leader(answer)
            case Replies():
                for reply in effect:
                    self._perform(reply)
            case StartSessions(timeouts_ms):
                self.sessions |= timeouts_ms
            case StopSessions(member_ids):
                for member_id in member_ids:
                    self.sessions.pop(member_id, None)
            case StartJoinTimer(timeout_ms):
                self.join_timer_ms = timeout_ms
            case StopJoinTimer():
                self.join_timer_ms = None
            case StartSyncTimer(timeout_ms):
                self.sync_timer_ms = timeout_ms
            case StopSyncTimer():
                self.sync_timer_ms = None
            case StoreGroup():
                self.stores.append(effect)

    def _note_leader(self, answer: JoinAnswer) -> None:
        if answer.error is not ErrorCode.NONE or answer.skip_assignment:
            return
        assert (answer.leader == answer.member_id) == bool(answer.members)
        if answer.leader == answer.member_id:
            leaders = self.leaders.setdefault(answer.generation, set())
            leaders.add(answer.member_id)
            assert len(leaders) == 1, f"two leaders in generation {answer.generation}: {leaders}"

    def check(self) -> None:
        group, state = self.group, self.state
        owed = {*group.joins.values(), *group.syncs.values()}
        owed |= {s.reply.waiter for s in self.stores if s.reply is not None}
        unanswered = self.asked - self.answers.keys() - self.gone
        assert unanswered == owed - self.gone, "a waiter that nobody remembers"
        if isinstance(state, Dead):
            assert not self.sessions
            assert self.join_timer_ms is None
            assert self.sync_timer_ms is None
            return
        assert self.sessions.keys() == group.members.keys() | group.pending
        assert not group.members.keys() & group.pending
        assert group.joins.keys() | group.syncs.keys() | group.new <= group.members.keys()
        assert group.assignments.keys() <= group.members.keys()
        assert group.members.protocols == Members.of(group.members.values()).protocols
        assert group.members.memory_bytes == sum(m.memory_bytes for m in group.members.values())
        assert (self.join_timer_ms is not None) == isinstance(state, PreparingRebalance)
        unsynced = state.unsynced if isinstance(state, CompletingRebalance | Stable) else ()
        assert (self.sync_timer_ms is not None) == bool(unsynced)
        assert set(unsynced) <= group.members.keys()
        assert (group.leader is None) == (not group.members)
        assert group.leader is None or group.leader in group.members
        instances = [m.instance_id for m in group.members.values() if m.instance_id is not None]
        assert len(instances) == len(set(instances))
        if isinstance(state, Empty):
            assert not group.members
        if isinstance(state, CompletingRebalance | Stable):
            assert group.members
            assert not group.joins
            assert not group.new
            assert all(group.protocol_name in dict(m.protocols) for m in group.members.values())
        if not isinstance(state, CompletingRebalance):
            assert not group.syncs
