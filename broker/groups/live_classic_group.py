"""A running group: its state, timers, waiting requests and committed offsets.

Rules. Only `send` changes the state. It performs the effects at once and never waits, so events do
not overlap; only the answers to many waiters are spread over the next rounds of the loop. A waiter
is answered once; an answer to a request that was cancelled is dropped.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, assert_never

import structlog

from broker.groups.classic.model import (
    Answer,
    Dead,
    Deleted,
    DeletionFailed,
    Effect,
    Empty,
    Event,
    Group,
    GroupRules,
    GroupStored,
    JoinTimeout,
    Member,
    Reply,
    SessionsExpired,
    Stable,
    StartJoinTimer,
    StartSession,
    StartSyncTimer,
    State,
    StopJoinTimer,
    StopSession,
    StopSyncTimer,
    StoreGroup,
    SyncTimeout,
    Unloaded,
    WaiterGone,
)
from broker.groups.classic.state import downgraded, transition
from broker.groups.classic.subscription import subscribed_topics
from broker.groups.offsets.committed_offsets import CommittedOffsets
from broker.groups.offsets.offset_expiry import expired_offsets
from broker.groups.offsets.offset_records import encode_group_key
from broker.groups.offsets.offsets_store import TopicIndex
from broker.groups.summary import GroupSummary, GroupType
from broker.logging import RateLimitedLogger
from broker.topics.internal_topic import LogRecord
from protocol.errors import ErrorCode

logger = structlog.get_logger("broker.groups")
# Clients cause these lines: members that join and leave, or stop.
limited_logger: Final = RateLimitedLogger(logger)

# Answers that are given at once: some milliseconds. A generation may have thousands of members.
REPLIES_PER_ROUND: Final = 32


class Timer(Protocol):
    """A scheduled callback."""

    def cancel(self) -> None:
        """Do not call back."""
        ...


class Clock(Protocol):
    """Timers in monotonic time, and wall time for stored records."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call back on the event loop in `delay_s` seconds."""
        ...

    def wall_ms(self) -> int:
        """Return milliseconds since 1970."""
        ...


class LoopClock:
    """The timers of the running event loop, and a wall clock."""

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        self.wall_ms = wall_ms

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call back on the event loop in `delay_s` seconds."""
        return asyncio.get_running_loop().call_later(delay_s, callback)


@dataclass(slots=True)
class GroupStats:
    """Counts since the start."""

    rebalances: int = 0
    generations_stable: int = 0
    members_expired: int = 0
    offsets_committed: int = 0
    offsets_expired: int = 0
    groups_deleted: int = 0
    append_errors: int = 0
    records_loaded: int = 0
    records_unknown: int = 0
    records_invalid: int = 0
    offsets_undecided: int = 0


@dataclass(frozen=True, slots=True)
class GroupContext:
    """The part of the coordinator that groups use. `store` always ends with an error code.

    A group calls `idle` after a timer removed a member, because the group may be void then, and
    `resized` with its id and the memory of its members in bytes when members have changed.
    """

    rules: GroupRules
    clock: Clock
    store: Callable[[Group], "asyncio.Future[ErrorCode]"]
    idle: Callable[["LiveClassicGroup"], None]
    resized: Callable[[str, int], None]
    stats: GroupStats


class LiveClassicGroup:
    """One group; owned by the coordinator."""

    __slots__ = (
        "_context",
        "_expired",
        "_is_replying",
        "_join_timer",
        "_next_waiter",
        "_replies",
        "_sessions",
        "_size_bytes",
        "_sync_timer",
        "_waiters",
        "offsets",
        "state",
    )

    def __init__(
        self, state: State, context: GroupContext, offsets: CommittedOffsets | None = None
    ) -> None:
        self.state = state
        self.offsets = CommittedOffsets() if offsets is None else offsets
        self._context = context
        self._sessions: dict[str, Timer] = {}
        self._expired: dict[str, None] = {}  # sessions whose timers have fired just now
        self._size_bytes = _growth_bytes({}, state.group.members)  # of the members
        self._join_timer: Timer | None = None
        self._sync_timer: Timer | None = None
        self._waiters: dict[int, asyncio.Future[Answer]] = {}
        self._next_waiter = 0
        self._replies: deque[Reply] = deque()
        self._is_replying = False

    def begin(self, *, is_changed: bool) -> None:
        """Start to serve a consumer group that became a classic one; rebalance if it changed."""
        rules, now_ms = self._context.rules, self._context.clock.wall_ms()
        self.state, effects = downgraded(self.group, rules, now_ms, is_changed=is_changed)
        self.perform(effects)

    @property
    def group(self) -> Group:
        """Return the data that all states share."""
        return self.state.group

    @property
    def is_dead(self) -> bool:
        """Return whether the group is deleted, or not served any more."""
        return isinstance(self.state, Dead)

    @property
    def has_members(self) -> bool:
        """Return whether members have joined."""
        return not isinstance(self.state, Empty)

    @property
    def is_empty(self) -> bool:
        """Return whether the group has no member, and none that is about to join."""
        return isinstance(self.state, Empty) and not self.state.group.pending

    @property
    def is_void(self) -> bool:
        """Return whether the group has no record, no offset and no pending member."""
        group = self.state.group
        return (
            isinstance(self.state, Empty)
            and group.generation == 0
            and not group.pending
            and not self.offsets
        )

    def summary(self) -> GroupSummary:
        """Return what ListGroups and the metrics show. The states' classes have Kafka's names."""
        group = self.state.group
        return GroupSummary(
            group.group_id,
            GroupType.CLASSIC,
            group.protocol_type or "",
            type(self.state).__name__,
            len(group.members),
        )

    def subscribed_topics(self) -> frozenset[str] | None:
        """Return the topics of all members; None if they use another protocol type."""
        if isinstance(self.state, Empty):
            return frozenset()
        return subscribed_topics(self.state.group)

    def expired_offsets(self, now_ms: int, retention_ms: int) -> list[TopicIndex]:
        """Return the keys of offsets past their retention."""
        return expired_offsets(self.state, self.offsets.acknowledged, now_ms, retention_ms)

    def begin_deletion(self) -> None:
        """Refuse joins and commits from now on, so that no record follows the tombstones."""
        self.send(Deleted())

    def fail_deletion(self) -> None:
        """Serve the group again: its tombstones could not be written."""
        self.send(DeletionFailed())

    def tombstones(self) -> list[LogRecord]:
        """Return the records that delete the group."""
        return [(encode_group_key(self.state.group.group_id), None)]

    def close(self, error: ErrorCode = ErrorCode.NOT_COORDINATOR) -> None:
        """Answer all members with an error: the group is not served any more."""
        self.send(Unloaded(error))

    def new_waiter(self) -> int:
        """Return a number for the next request."""
        self._next_waiter += 1
        return self._next_waiter

    def answer_nowait(self, event: Event, waiter: int) -> Answer:
        """Return the answer to a request that is always answered at once."""
        future = self._send_and_wait(event, waiter)
        if future.done():
            return future.result()
        # The answers to a whole generation come first, but this one does not wait for them.
        del self._waiters[waiter]
        answer = next((r.answer for r in reversed(self._replies) if r.waiter == waiter), None)
        assert answer is not None, event
        return answer

    async def wait_answer(self, event: Event, waiter: int) -> Answer:
        """Wait for the answer to a request. Cancellation sends WaiterGone."""
        future = self._send_and_wait(event, waiter)
        try:
            return await future
        finally:
            if self._waiters.pop(waiter, None) is not None:
                self.send(WaiterGone(waiter))

    def _send_and_wait(self, event: Event, waiter: int) -> "asyncio.Future[Answer]":
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = future
        self.send(event)
        return future

    def send(self, event: Event) -> None:
        """Apply one event and perform its effects."""
        before = self.state
        rules, clock = self._context.rules, self._context.clock
        self.state, effects = transition(before, event, rules, clock.wall_ms())
        if self.state.group.members is not before.group.members:
            self._note_change(before.group.members, self.state.group.members)
        self._report(before, event)
        self.perform(effects)

    def note_size(self) -> None:
        """Report how large the members' metadata is."""
        self._size_bytes = 0
        self._note_change({}, self.state.group.members)

    def _note_change(self, before: Mapping[str, Member], after: Mapping[str, Member]) -> None:
        self._size_bytes += _growth_bytes(before, after)
        size_bytes = 0 if self.is_dead else self._size_bytes
        self._context.resized(self.state.group.group_id, size_bytes)

    def perform(self, effects: tuple[Effect, ...]) -> None:
        """Perform the effects in order."""
        for effect in effects:
            match effect:
                case Reply():
                    self._replies.append(effect)
                case StartSession(member_id, timeout_ms):
                    self._stop_session(member_id)
                    expire = partial(self._session_expired, member_id)
                    self._sessions[member_id] = self._start(timeout_ms, expire)
                case StopSession(member_id):
                    self._stop_session(member_id)
                case StartJoinTimer(timeout_ms):
                    self._stop(self._join_timer)
                    self._join_timer = self._start(timeout_ms, self._join_timed_out)
                case StopJoinTimer():
                    self._stop(self._join_timer)
                    self._join_timer = None
                case StartSyncTimer(timeout_ms):
                    self._stop(self._sync_timer)
                    self._sync_timer = self._start(timeout_ms, self._sync_timed_out)
                case StopSyncTimer():
                    self._stop(self._sync_timer)
                    self._sync_timer = None
                case StoreGroup(group, reply):
                    stored = self._context.store(group)
                    stored.add_done_callback(partial(self._stored, group.generation, reply))
                case _:
                    assert_never(effect)
        if not self._is_replying:
            self._reply()

    def _reply(self) -> None:
        """Answer some requests, and the others in the next rounds: each answer is encoded."""
        for _ in range(min(REPLIES_PER_ROUND, len(self._replies))):
            reply = self._replies.popleft()
            future = self._waiters.pop(reply.waiter, None)
            if future is not None and not future.done():
                future.set_result(reply.answer)
        self._is_replying = bool(self._replies)
        if self._is_replying:
            asyncio.get_running_loop().call_soon(self._reply)

    def _start(self, timeout_ms: int, callback: Callable[[], None]) -> Timer:
        return self._context.clock.call_later(timeout_ms / 1000, callback)

    @staticmethod
    def _stop(timer: Timer | None) -> None:
        if timer is not None:
            timer.cancel()

    def _stop_session(self, member_id: str) -> None:
        self._expired.pop(member_id, None)
        self._stop(self._sessions.pop(member_id, None))

    def _session_expired(self, member_id: str) -> None:
        """Let the session end together with the others that end at the same time."""
        del self._sessions[member_id]
        if not self._expired:
            self._context.clock.call_later(0, self._end_sessions)
        self._expired[member_id] = None

    def _end_sessions(self) -> None:
        if self._expired:
            expired = tuple(self._expired)
            self._expired.clear()
            self.send(SessionsExpired(expired))
            self._context.idle(self)

    def _join_timed_out(self) -> None:
        self._join_timer = None
        self.send(JoinTimeout())

    def _sync_timed_out(self) -> None:
        self._sync_timer = None
        self.send(SyncTimeout())

    def _stored(
        self, generation: int, reply: Reply | None, stored: "asyncio.Future[ErrorCode]"
    ) -> None:
        self.send(GroupStored(generation, stored.result(), reply))

    def _report(self, before: State, event: Event) -> None:
        group, stats = self.state.group, self._context.stats
        if isinstance(event, SessionsExpired):
            for member_id in event.member_ids:
                if member_id not in group.members:
                    stats.members_expired += 1
                    limited_logger.info(
                        "member expired",
                        subject=group.group_id,
                        group=group.group_id,
                        member=member_id,
                    )
        if group.generation != before.group.generation:
            stats.rebalances += 1
        if type(self.state) is type(before):
            return
        stats.generations_stable += isinstance(self.state, Stable)
        settled = isinstance(self.state, Stable | Empty | Dead) and not isinstance(event, Unloaded)
        fields: dict[str, object] = {
            "group": group.group_id,
            "state": type(self.state).__name__,
            "before": type(before).__name__,
            "generation": group.generation,
            "members": len(group.members),
        }
        if settled:
            limited_logger.info("group changed", subject=group.group_id, **fields)
        else:
            logger.debug("group changed", **fields)


def _growth_bytes(before: Mapping[str, Member], after: Mapping[str, Member]) -> int:
    """Return how much more memory the members take after a change, in bytes.

    At the end of a phase all members change, but not their protocols.
    """
    growth = -sum(before[key].memory_bytes for key in before.keys() - after.keys())
    for key, member in after.items():
        earlier = before.get(key)
        if earlier is member:
            continue
        if earlier is None:
            growth += member.memory_bytes
        elif earlier.protocols is member.protocols:
            growth += len(member.assignment) - len(earlier.assignment)
        else:
            growth += member.memory_bytes - earlier.memory_bytes
    return growth
