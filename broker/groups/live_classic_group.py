"""A running group: its state, timers, waiting requests and committed offsets.

Rules. Only `send` changes the state. It performs the effects at once and never waits, so events do
not overlap; only the answers to many waiters, and the encoding of a record, take further rounds of
the loop. Each waiter gets one answer; the answer to a cancelled request is dropped.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, assert_never

import structlog

from broker.event_loop.loop_turns import Turns, run_in_turns
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
    SyncTimeout,
    Unloaded,
    WaiterGone,
)
from broker.groups.classic.state import downgraded, transition
from broker.groups.classic.subscription import subscribed_topics_sliced
from broker.groups.clock import Clock, Timer
from broker.groups.member_deadlines import MemberDeadlines, log_expired
from broker.groups.offsets.committed_offsets import CommittedOffsets
from broker.groups.offsets.offset_expiry import is_expired, kept_topics_sliced
from broker.groups.offsets.offset_records import CommittedOffset, encode_group_key
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
    """The part of the coordinator that groups use.

    `store` is GroupLog.append_group, which always ends with an error code. A group calls `idle`
    after a timer has removed members, because the group may be empty then. It calls `resized`, with
    its id and the bytes of memory that its members take, when members or assignments have changed.
    """

    rules: GroupRules
    clock: Clock
    store: Callable[[Group, asyncio.Lock, Callable[[], bool]], "asyncio.Future[ErrorCode]"]
    idle: Callable[["LiveClassicGroup"], None]
    resized: Callable[[str, int], None]
    stats: GroupStats


class LiveClassicGroup:
    """One group; owned by the coordinator."""

    __slots__ = (
        "__weakref__",
        "_context",
        "_is_replying",
        "_join_timer",
        "_next_waiter",
        "_replies",
        "_sessions",
        "_storing",
        "_sync_timer",
        "_waiters",
        "assignment_bytes",
        "offsets",
        "state",
    )

    def __init__(
        self, state: State, context: GroupContext, offsets: CommittedOffsets | None = None
    ) -> None:
        self.state = state
        self.offsets = CommittedOffsets() if offsets is None else offsets
        self._context = context
        self._sessions = MemberDeadlines(context.clock, self._sessions_expired)
        self.assignment_bytes = _size_of(state.group.assignments)
        self._join_timer: Timer | None = None
        self._sync_timer: Timer | None = None
        self._waiters: dict[int, asyncio.Future[Answer]] = {}
        self._next_waiter = 0
        self._storing = asyncio.Lock()
        self._replies: deque[Iterator[Reply]] = deque()
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

    async def subscribed_topics(self) -> frozenset[str] | None:
        """Return the topics of all members, in turns; None if they use another protocol type."""
        while not isinstance(self.state, Empty):
            group = self.state.group
            topics = await run_in_turns(subscribed_topics_sliced(group))
            if group.members is self.state.group.members:
                return topics
        return frozenset()

    async def expired_offsets(
        self, now_ms: int, retention_ms: int
    ) -> dict[TopicIndex, CommittedOffset]:
        """Return the offsets past their retention, in turns."""
        state = self.state
        kept = await run_in_turns(kept_topics_sliced(state))
        if kept is None:
            return {}
        return {
            key: value
            async for key, value in Turns().over(list(self.offsets.acknowledged.items()))
            if key[0] not in kept and is_expired(state, value, now_ms, retention_ms)
        }

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
        return self._send_and_wait(event, waiter).result()

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
        after = self.state.group
        if after.assignments is not before.group.assignments:
            self.assignment_bytes = _size_of(after.assignments)
            self.note_size()
        elif after.members is not before.group.members:
            self.note_size()
        self._report(before, event)
        self.perform(effects)

    def note_size(self) -> None:
        """Report how large the members' metadata is."""
        group = self.state.group
        size_bytes = group.members.memory_bytes + self.assignment_bytes
        self._context.resized(group.group_id, 0 if self.is_dead else size_bytes)

    def perform(self, effects: tuple[Effect, ...]) -> None:
        """Perform the effects in order."""
        for effect in effects:
            match effect:
                case Reply():
                    self._answer(effect)
                case Replies():
                    self._replies.append(iter(effect))
                case StartSessions(timeouts_ms):
                    self._sessions.start(timeouts_ms)
                case StopSessions(member_ids):
                    self._sessions.stop(member_ids)
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
                    stored = self._context.store(group, self._storing, lambda: not self.is_dead)
                    stored.add_done_callback(partial(self._stored, group.generation, reply))
                case _:
                    assert_never(effect)
        if not self._is_replying:
            self._reply()

    def _reply(self) -> None:
        """Answer some requests, and the others in the next rounds: each answer is encoded."""
        for _ in range(REPLIES_PER_ROUND):
            reply = self._next_reply()
            if reply is None:
                break
            self._answer(reply)
        self._is_replying = bool(self._replies)
        if self._is_replying:
            asyncio.get_running_loop().call_soon(self._reply)

    def _next_reply(self) -> Reply | None:
        while self._replies:
            reply = next(self._replies[0], None)
            if reply is not None:
                return reply
            self._replies.popleft()
        return None

    def _answer(self, reply: Reply) -> None:
        future = self._waiters.pop(reply.waiter, None)
        if future is not None and not future.done():
            future.set_result(reply.answer)

    def _start(self, timeout_ms: int, callback: Callable[[], None]) -> Timer:
        return self._context.clock.call_later(timeout_ms / 1000, callback)

    @staticmethod
    def _stop(timer: Timer | None) -> None:
        if timer is not None:
            timer.cancel()

    def _sessions_expired(self, member_ids: tuple[str, ...]) -> None:
        self.send(SessionsExpired(member_ids))
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
        if not stored.cancelled():  # as when the event loop ends
            self.send(GroupStored(generation, stored.result(), reply))

    def _report(self, before: State, event: Event) -> None:
        group, stats = self.state.group, self._context.stats
        if isinstance(event, SessionsExpired):
            expired = frozenset(event.member_ids) - group.members.keys()
            stats.members_expired += len(expired)
            if expired:
                log_expired(group.group_id, expired)
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


def _size_of(assignments: Mapping[str, bytes]) -> int:
    return sum(map(len, assignments.values()))
