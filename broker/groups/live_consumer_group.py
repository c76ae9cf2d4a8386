"""A running consumer group: its state, timers, records and committed offsets.

Rules. Only `_change` replaces the group. What is answered is in the log: an answer waits for the
appends that began before it. Appends contain the difference to what earlier appends have written.
After a failed append the next one writes its keys again, as they are then: the work does not grow
with the number of failures, while a disk is full.
"""

import asyncio
from collections.abc import (
    Callable,
    Collection,
    Coroutine,
    Generator,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final

import structlog

from broker.event_loop.fair_slots import FairSlots
from broker.event_loop.loop_turns import Turns, run_in_turns
from broker.groups.classic.model import CommitRequested, Group
from broker.groups.classic.subscription import CONSUMER_PROTOCOL_TYPE
from broker.groups.clock import Clock
from broker.groups.consumer import classic_members, state
from broker.groups.consumer.model import (
    JOIN_EPOCH,
    ConsumerGroup,
    ConsumerMember,
    Heartbeat,
    HeartbeatAnswer,
    MembershipError,
    PartitionId,
    ResolvedRegex,
    TopicLookup,
    TopicMetadata,
)
from broker.groups.consumer.reconciliation import reconciled
from broker.groups.consumer.records import (
    encode_changes,
    largest_record_bytes,
    tombstone_keys_sliced,
)
from broker.groups.consumer_deadlines import ConsumerDeadlines
from broker.groups.large_group_turns import LargeGroupTurns
from broker.groups.live_classic_group import GroupStats
from broker.groups.member_deadlines import log_expired
from broker.groups.offsets.committed_offsets import CommittedOffsets
from broker.groups.offsets.offset_records import CommittedOffset
from broker.groups.offsets.offsets_store import OFFSETS_TOPIC, TopicIndex
from broker.groups.summary import GroupSummary, GroupType
from broker.logging import RateLimitedLogger
from broker.topics.internal_topic import LogRecord
from protocol.errors import ErrorCode
from storage.slices import run_at_once

logger = structlog.get_logger("broker.groups")
# Clients cause these lines: members that join and leave, or stop.
limited_logger: Final = RateLimitedLogger(logger)

# Steps of an assignment on the event loop, in two milliseconds; larger groups are assigned in a
# thread, two groups at a time and one for each client: the threads share one interpreter.
SMALL_ASSIGNMENT: Final = 1_000
LARGE_ASSIGNMENTS_AT_ONCE: Final = 2
# How often a heartbeat looks for changes of subscribed topics, and how many names it looks up then
# in about 2 ms; a group with more of them looks less often.
TOPIC_CHECK_MS: Final = 1_000
NAMES_PER_CHECK: Final = 5_000
# Of a downgrade in turns, while other members join or leave.
DOWNGRADE_ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class ConsumerRules:
    """Settings of consumer groups, named as Kafka's `group.consumer.*`."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = 2_000
    # group.consumer.migration.policy: whether a group with members may change its protocol.
    allows_upgrade: bool = True
    allows_downgrade: bool = True


@dataclass(frozen=True, slots=True)
class PreparedDowngrade:
    """A classic group that takes the place of a consumer group, and the records that say so."""

    group: Group
    records: Sequence[LogRecord]


@dataclass(frozen=True, slots=True)
class ConsumerGroupContext:
    """The part of the coordinator that consumer groups use. `write` ends with an error code.

    A group calls `resized` with its id and the memory of its members in bytes when members change.
    A consumer group whose members will all use the classic protocol becomes a classic group: it
    calls `prepare_downgrade` with itself and its next value, and then `downgrade`, which begins to
    write the classic group, and to rebalance it if the last argument says so.
    """

    rules: ConsumerRules
    clock: Clock
    topics: TopicLookup
    write: Callable[[str, Sequence[LogRecord]], "asyncio.Future[ErrorCode]"]
    stats: GroupStats
    prepare_downgrade: Callable[
        ["LiveConsumerGroup", ConsumerGroup], Generator[None, None, PreparedDowngrade]
    ]
    downgrade: Callable[["LiveConsumerGroup", PreparedDowngrade, bool], "asyncio.Future[ErrorCode]"]
    resized: Callable[[str, int], None]
    max_record_bytes: Callable[[str], int]  # by group; also of the classic group it may become
    turns: LargeGroupTurns
    large_assignments: FairSlots = field(
        default_factory=partial(FairSlots, LARGE_ASSIGNMENTS_AT_ONCE)
    )


class LiveConsumerGroup:
    """One consumer group; owned by the coordinator."""

    def __init__(
        self,
        group: ConsumerGroup,
        context: ConsumerGroupContext,
        offsets: CommittedOffsets,
        replaced: Sequence[LogRecord] = (),
    ) -> None:
        """Serve a group; `replaced`: the tombstones of the classic group that it was until now."""
        self.group = group
        self.offsets = offsets
        self.is_dead = False
        self.context = context
        self._written = ConsumerGroup(group.group_id) if replaced else group  # by the last append
        # Keys of records that the log may lack, and of the appends under way.
        self._unwritten: dict[bytes, None] = dict.fromkeys(key for key, _ in replaced)
        self._appending: list[Collection[bytes]] = []
        self._append: asyncio.Future[ErrorCode] | None = None
        self._encoding = asyncio.Lock()  # records are appended in the order of the changes
        self._tasks: set[asyncio.Task[ErrorCode]] = set()
        self._assigning: asyncio.Task[None] | None = None
        # The topics of the group that exist, by name, when they were looked up, and for how long.
        self._topics: Mapping[str, TopicMetadata] = {}
        self._topics_checked_ms = self._check_interval_ms = 0
        self._updates = 0  # requests that look up topics
        # When the topics of each expression were looked up. The group keeps the time at which they
        # changed: it writes no record without a change.
        self._resolved_ms: dict[str, int] = {}
        # The search for topics of outdated expressions that is under way, or whose result is new.
        self.search: asyncio.Task[Mapping[str, ResolvedRegex]] | None = None
        self.deadlines = ConsumerDeadlines(
            context.clock, context.rules.session_timeout_ms, self._expire
        )

    def note_size(self) -> None:
        """Report how large the members' metadata is."""
        if not self.is_dead:
            self.context.resized(self.group.group_id, self.group.memory_bytes)

    def start_sessions(self) -> None:
        """Give every member one session timeout to send a heartbeat, after the group was loaded.

        Members that have partitions to revoke get their rebalance timeout for it.
        """
        self.deadlines.start(self.group.members)

    def close(self) -> None:
        """Stop all timers: the group is not served any more."""
        self.is_dead = True
        self.deadlines.close()

    @property
    def has_members(self) -> bool:
        """Return whether members have joined."""
        return bool(self.group.members)

    @property
    def is_empty(self) -> bool:
        """Return whether the group has no member."""
        return not self.group.members

    @property
    def is_void(self) -> bool:
        """Return whether the group has no record and no offset, and nobody is about to join."""
        is_unused = self.group.epoch == 0 and not self.group.members and not self.offsets
        return is_unused and not self._updates

    def summary(self) -> GroupSummary:
        """Return what ListGroups and the metrics show."""
        group = self.group
        return GroupSummary(
            group.group_id,
            GroupType.CONSUMER,
            CONSUMER_PROTOCOL_TYPE,
            group.state.label,
            len(group.members),
        )

    def commit_error(
        self, request: CommitRequested, partitions: Iterable[PartitionId]
    ) -> ErrorCode:
        """Return NONE if a client may commit offsets of these partitions."""
        if self.is_dead:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        return state.commit_error(
            self.group,
            request.member_id,
            request.generation,
            partitions,
            knows_epochs=request.knows_epochs,
        )

    def fetch_error(self, member_id: str, epoch: int) -> ErrorCode:
        """Return NONE if a client may fetch offsets as this member."""
        if self.is_dead:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        return state.fetch_error(self.group, member_id, epoch)

    async def subscribed_topics(self) -> frozenset[str]:
        """Return the topics of all members."""
        return self.group.all_topics()

    def regexes(self) -> dict[str, ResolvedRegex]:
        """Return the regular expressions of the group, with the time at which each was resolved."""
        return {
            expression: replace(
                resolved, resolved_ms=self._resolved_ms.get(expression, resolved.resolved_ms)
            )
            for expression, resolved in self.group.regexes.items()
        }

    async def expired_offsets(
        self, now_ms: int, retention_ms: int
    ) -> dict[TopicIndex, CommittedOffset]:
        """Return offsets committed `retention_ms` ago, of topics without a subscription."""
        kept = self.group.all_topics()
        offsets = list(self.offsets.acknowledged.items())
        expired = {}
        async for key, value in Turns().over(offsets):
            _, _, _, commit_timestamp_ms, _ = value
            if key[0] not in kept and now_ms - commit_timestamp_ms >= retention_ms:
                expired[key] = value
        return expired

    def begin_deletion(self) -> None:
        """Refuse heartbeats and commits from now on, so that no record follows the tombstones."""
        self.is_dead = True

    def fail_deletion(self) -> None:
        """Serve the group again: its tombstones could not be written."""
        self.is_dead = False

    def tombstones(self) -> list[LogRecord]:
        """Return the records that delete the group."""
        return run_at_once(self.tombstones_sliced())

    def tombstones_sliced(self) -> Generator[None, None, list[LogRecord]]:
        """Like `tombstones`, with pauses."""
        values = (self._written, self.group)
        keys: dict[bytes, None] = dict.fromkeys((yield from tombstone_keys_sliced(*values)))
        for maybe_written in (self._unwritten, *self._appending):
            keys |= dict.fromkeys(maybe_written)
        return list(keys.items())

    # Heartbeats ---------------------------------------------------------------------------------

    async def heartbeat(
        self,
        request: Heartbeat,
        regexes: Mapping[str, ResolvedRegex],
        client: Hashable | None = None,
    ) -> HeartbeatAnswer:
        """Return the answer when the changes that it tells of are in the log.

        `regexes` are the expression of the request, and those of the group that were resolved just
        now. `client` is the principal that sent the request.
        """
        try:
            if request.epoch < JOIN_EPOCH:
                return await self._leave(request)
            return await self._heartbeat(request, regexes, client)
        except MembershipError as error:
            return HeartbeatAnswer(error.code, error.reason)

    async def _heartbeat(
        self, request: Heartbeat, regexes: Mapping[str, ResolvedRegex], client: Hashable | None
    ) -> HeartbeatAnswer:
        max_size, turns = self.context.rules.max_size, Turns()
        updated, group = await self.update(
            lambda group: state.update_member(group, request, self._newer(regexes), max_size), turns
        )
        owned_before = updated.member.assigned.keys()
        newer = self._newer(regexes)
        resolved_ms = self._resolved_ms | {each: newer[each].resolved_ms for each in newer}
        self._resolved_ms = {each: resolved_ms[each] for each in resolved_ms.keys() & group.regexes}
        self.deadlines.stop_classic(request.member_id)
        next_step = await self.take_step(group, request.member_id, request.owned, client, turns)
        if next_step is None:
            return HeartbeatAnswer(ErrorCode.UNKNOWN_MEMBER_ID)
        await turns.take()
        error = await self.flush()
        if error is not ErrorCode.NONE:
            return HeartbeatAnswer(error)
        assigned = next_step.assigned.keys()
        is_changed = assigned != owned_before
        # A client that owns something else may have missed the answer that said what it owns.
        owns_other = request.owned is not None and request.owned != assigned
        return HeartbeatAnswer(
            ErrorCode.NONE,
            member_id=request.member_id,
            epoch=next_step.epoch,
            assignment=frozenset(assigned) if request.is_full or is_changed or owns_other else None,
        )

    def _newer(self, regexes: Mapping[str, ResolvedRegex]) -> dict[str, ResolvedRegex]:
        """Return the expressions whose topics the group does not have from a later search."""
        now_ms, newer = self.context.clock.wall_ms(), dict[str, ResolvedRegex]()
        for expression, resolved in regexes.items():
            stored = self.group.regexes.get(expression)
            if stored is not None:
                stored_ms = self._resolved_ms.get(expression, stored.resolved_ms)
                if abs(now_ms - resolved.resolved_ms) > abs(now_ms - stored_ms):
                    continue  # older; times may be later than now, because the clock may jump
            newer[expression] = resolved
        return newer

    async def _leave(self, request: Heartbeat) -> HeartbeatAnswer:
        after = state.after_leave(self.group, request)
        removed = self.group.members.keys() - after.members.keys()
        if removed:
            error = await self.remove(removed)
        else:  # a static member that will return
            self._change(after)
            self.deadlines.watch_revocation(after.members[request.member_id])
            error = await self.flush()
        return HeartbeatAnswer(error, member_id=request.member_id, epoch=request.epoch)

    # Changes that members of both protocols make --------------------------------------------------

    async def remove(self, member_ids: Collection[str]) -> ErrorCode:
        """Remove members, even if the client that waits for it disconnects meanwhile."""
        return await asyncio.shield(self._run_soon(self._remove_in_turns(member_ids)))

    async def _remove_in_turns(self, member_ids: Collection[str]) -> ErrorCode:
        """Remove members that are still there, and downgrade the group if it has to be."""
        for attempt in count(1):
            present = self._present(member_ids)
            if self.is_dead or not present:
                break
            remaining = self.group.without_members(present)
            if not self.may_downgrade(remaining):
                self.deadlines.forget(present)
                self._change(state.without_members(remaining, ()))
                break
            append = await self.begin_downgrade(remaining, attempt, is_changed=True)
            if append is not None:
                return await asyncio.shield(append)
        return ErrorCode.COORDINATOR_NOT_AVAILABLE if self.is_dead else await self.flush()

    def _present(self, member_ids: Collection[str]) -> list[str]:
        return [member_id for member_id in member_ids if member_id in self.group.members]

    async def begin_downgrade(
        self, group: ConsumerGroup, attempt: int, *, is_changed: bool
    ) -> "asyncio.Future[ErrorCode] | None":
        """Encode a value of this group as a classic group, and begin to replace this one by it.

        Return None if this group changed meanwhile. After some attempts, it is encoded in one turn.
        """
        before, written = self.group, self._written
        slices = self.context.prepare_downgrade(self, group)
        may_pause = attempt <= DOWNGRADE_ATTEMPTS
        prepared = await run_in_turns(slices) if may_pause else run_at_once(slices)
        # Of another value, records may be in the log that `prepared` does not delete.
        if self.is_dead or self.group is not before or self._written is not written:
            return None
        return self.context.downgrade(self, prepared, is_changed)

    def may_downgrade(self, group: ConsumerGroup) -> bool:
        """Return whether the group becomes a classic one if this is its next value."""
        return self.context.rules.allows_downgrade and classic_members.uses_classic_only(group)

    async def update(
        self, update: Callable[[ConsumerGroup], state.MemberUpdate], turns: Turns
    ) -> tuple[state.MemberUpdate, ConsumerGroup]:
        """Return an update of the present group, and its group with the epoch that it needs.

        Before, the topics of the group are looked up in turns if it is time to. Meanwhile the group
        may get other topics, which are looked up, too. Raises MembershipError.
        """
        found: dict[str, TopicMetadata] = {}
        topics: dict[str, TopicMetadata] = {}  # those of the group, by name
        are_known = False  # they are as they were at the last look
        looked_up: set[str] = set()
        hashed: frozenset[str] | None = None
        metadata_hash = 0
        self._updates += 1
        try:
            while True:
                updated = update(self.group)
                now_ms = self.context.clock.wall_ms()
                is_recent = abs(now_ms - self._topics_checked_ms) < self._check_interval_ms
                if is_recent and not updated.is_changed:
                    return updated, updated.group
                names = updated.group.all_topics()
                if missing := names - looked_up:
                    async for name in turns.over(missing):
                        topic = self.context.topics.topic(name)
                        if topic is not None:
                            found[name] = topic
                    looked_up |= missing
                elif names != hashed:
                    topics = await self._sorted(names & found.keys(), found, turns)
                    metadata_hash = await run_in_turns(state.metadata_hash_sliced(topics.values()))
                    if not updated.is_changed:
                        are_known = await self._are_known(names, topics, turns)
                    hashed = names
                else:
                    break
                await turns.take()
                if self.is_dead:
                    raise MembershipError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "it is not served")
        finally:
            self._updates -= 1
        self._topics, self._topics_checked_ms = topics, now_ms
        periods = 1 + updated.group.count_names() // NAMES_PER_CHECK
        self._check_interval_ms = periods * TOPIC_CHECK_MS
        is_changed = updated.is_changed
        if is_changed:
            self._check_records(updated, topics)
        elif are_known:  # members with other topics have left, and the others are assigned since
            return updated, state.with_metadata_hash(updated.group, metadata_hash)
        return updated, state.with_next_epoch(updated.group, metadata_hash, is_changed=is_changed)

    async def _are_known(
        self, names: Iterable[str], topics: Mapping[str, TopicMetadata], turns: Turns
    ) -> bool:
        """Return whether the topics with these names are as they were at the last look, if any."""
        known = self._topics
        if not known:
            return False
        async for name in turns.over(names):
            if known.get(name) != topics.get(name):
                return False
        return True

    @staticmethod
    async def _sorted(
        names: Iterable[str], topics: Mapping[str, TopicMetadata], turns: Turns
    ) -> dict[str, TopicMetadata]:
        """Return the topics with these names, sorted by name."""
        await turns.take()
        ordered = sorted(names)
        await turns.take()
        return {name: topics[name] for name in ordered}

    def _check_records(
        self, updated: state.MemberUpdate, topics: Mapping[str, TopicMetadata]
    ) -> None:
        """Refuse a subscription with a record above max.message.bytes. Raises MembershipError."""
        limit_bytes = self.context.max_record_bytes(self.group.group_id)
        size_bytes = largest_record_bytes(self.group, updated.group, updated.member, topics)
        if size_bytes > limit_bytes:
            raise MembershipError(
                ErrorCode.UNKNOWN_SERVER_ERROR,
                f"the subscription may need a record of {size_bytes} bytes, more than"
                f" {limit_bytes}, max.message.bytes of {OFFSETS_TOPIC}; subscribe to fewer topics",
            )

    async def take_step(
        self,
        group: ConsumerGroup,
        member_id: str,
        owned: Set[PartitionId] | None,
        client: Hashable | None,
        turns: Turns,
    ) -> ConsumerMember | None:
        """Put an updated group in place, assign its partitions, and reconcile a member with them.

        `owned` is what the member says that it owns. The changes are not in the log yet. Return
        None if the member left meanwhile.
        """
        self._change(group)
        # The client may leave in any of the next turns.
        self.deadlines.start_session(group.members[member_id])
        await turns.take()
        await self._assign(client)
        await turns.take()
        member = self.group.members.get(member_id)
        if member is None or self.is_dead:
            return None
        next_step = reconciled(self.group, member, owned)
        if next_step is not member:
            self._change(self.group.with_member(next_step))
        self.deadlines.start_session(next_step)
        self.deadlines.watch_revocation(next_step)
        return next_step

    async def _assign(self, client: Hashable | None) -> None:
        """Compute target assignments until they are as new as the group.

        All members of a large group wait for one computation, and then go on in turns.
        """
        while self.group.epoch > self.group.assignment_epoch and not self.is_dead:
            if self._assigning is None or self._assigning.done():
                if state.assignment_size(self.group, self._topics) <= SMALL_ASSIGNMENT:
                    task = state.assignment_task(self.group, self._topics)
                    self._change(state.with_targets(self.group, task.epoch, task.compute()))
                    continue
                # A task of its own, because the first client may disconnect while others wait.
                self._assigning = asyncio.create_task(self._assign_in_thread(client))
            await asyncio.shield(self._assigning)
            await self.context.turns.wait(self.group.group_id, len(self.group.members))

    async def _assign_in_thread(self, client: Hashable | None) -> None:
        async with self.context.large_assignments.slot(client):
            if self.is_dead:
                return
            group, topics = self.group, self._topics
            # Its input takes time in proportion to the members, too.
            targets = await asyncio.to_thread(
                lambda: state.assignment_task(group, topics).compute()
            )
        if not self.is_dead:
            self._change(state.with_targets(self.group, group.epoch, targets))

    def _change(self, after: ConsumerGroup) -> None:
        before, self.group = self.group, after
        if after is before:
            return  # most heartbeats; what follows looks at all members
        if after.members is not before.members:
            self.note_size()
        if after.epoch != before.epoch:
            self.context.stats.rebalances += 1
        if after.state is not before.state:
            limited_logger.info(
                "group changed",
                subject=after.group_id,
                group=after.group_id,
                state=after.state.label,
                before=before.state.label,
                epoch=after.epoch,
                members=len(after.members),
            )

    # Records ------------------------------------------------------------------------------------

    async def flush(self) -> ErrorCode:
        """Append what has changed; return when this and all earlier appends have ended.

        COORDINATOR_NOT_AVAILABLE if an earlier one failed: this one contains only what came after.
        """
        try:
            async with self._encoding:
                await self._begin_append()
        except asyncio.CancelledError:
            if not self.is_dead:
                self.flush_soon()  # the client has left, but its change stays
            raise
        if self.is_dead:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if self._append is None:
            return ErrorCode.NONE
        error = await asyncio.shield(self._append)
        if error is ErrorCode.NONE and self._unwritten:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        return error

    def flush_soon(self) -> None:
        """Append what has changed though no client waits for it."""
        self._run_soon(self.flush())

    def _run_soon(self, work: Coroutine[object, object, ErrorCode]) -> "asyncio.Task[ErrorCode]":
        """Run work that continues although no client waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _begin_append(self) -> None:
        """Begin to append what has changed until now.

        It is encoded in turns. Meanwhile the group may change again, and may be deleted: no record
        may follow its tombstones.
        """
        group = self.group
        if group is self._written and not self._unwritten:
            return
        records = await encode_changes(self._written, group, tuple(self._unwritten))
        if self.is_dead:
            return
        self._written = group
        # Those of an append that has failed meanwhile stay.
        self._unwritten = dict.fromkeys(key for key in self._unwritten if key not in records)
        if not records:
            return
        keys = records.keys()
        self._appending.append(keys)
        append = self._append = self.context.write(group.group_id, list(records.items()))
        append.add_done_callback(lambda future: self._note_appended(future, keys))

    def _note_appended(self, append: "asyncio.Future[ErrorCode]", keys: Collection[bytes]) -> None:
        self._appending = [each for each in self._appending if each is not keys]
        if append.cancelled() or append.result() is not ErrorCode.NONE:
            self._unwritten |= dict.fromkeys(keys)
        if self._append is append:
            self._append = None

    # Deadlines ----------------------------------------------------------------------------------

    def keep_alive(self, member_id: str) -> None:
        """Restart the session of a member whose request waits for its turn."""
        member = self.group.members.get(member_id)
        if member is not None:
            self.deadlines.keep_alive(member)

    def _expire(self, member_ids: tuple[str, ...]) -> None:
        """Remove members that missed a deadline: of a session, a revocation, a join or a sync.

        They leave together: soon after the load of a group, all its members may expire at once.
        """
        self.deadlines.forget(member_ids)
        expired = self._present(member_ids)
        if not expired or self.is_dead:
            return
        self.context.stats.members_expired += len(expired)
        log_expired(self.group.group_id, expired)
        self._run_soon(self._remove_in_turns(expired))
