"""The group coordinator: consumer groups, their committed offsets, and the log that stores both.

Rules
- Only the event loop calls this module. Only broker/groups/state.py changes a group's state.
- Acknowledged data is in the log: a committed offset is answered and visible after its append.
- Records of one group are appended in the order in which they were decided.
- Every wait ends: joins and syncs by their timers, appends by `append_timeout_ms`, waits of a
  closed connection by cancellation.
- A group is served while its partition of __consumer_offsets is active. While the partition is
  loading or offline, requests get an error that says so.

This module does not know the wire format of requests, nor which topics exist.
"""

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import structlog

from broker.groups.committed_offsets import CommittedOffsets
from broker.groups.consumer.classic_members import downgraded, upgraded
from broker.groups.consumer.model import (
    JOIN_EPOCH,
    NAME_BYTES,
    ConsumerGroup,
    Heartbeat,
    HeartbeatAnswer,
    MembershipError,
    ResolvedRegex,
    Topic,
    TopicLookup,
)
from broker.groups.live_consumer_group import (
    ConsumerGroupContext,
    ConsumerRules,
    LiveConsumerGroup,
)
from broker.groups.live_group import Clock, GroupContext, GroupStats, LiveGroup
from broker.groups.model import (
    NO_MEMBER_ID,
    CommitRequested,
    Empty,
    ErrorAnswer,
    Group,
    GroupRules,
    HeartbeatReceived,
    JoinAnswer,
    JoinRequested,
    LeaveAnswer,
    LeaveRequested,
    Stable,
    State,
    SyncAnswer,
    SyncRequested,
)
from broker.groups.offset_records import (
    CommittedOffset,
    OffsetKey,
    encode_offset_key,
    encode_offset_value,
)
from broker.groups.offsets_store import (
    LoadedPartition,
    TopicIndex,
    group_record,
)
from broker.groups.state import restored
from broker.groups.subscription import CONSUMER_PROTOCOL_TYPE
from broker.groups.summary import GroupSummary
from broker.groups.topic_regex import EVERYTHING, REFRESH_MS, TopicRegexes, TopicViewer
from broker.logging import RateLimitedLogger
from broker.loop_turns import Turns
from broker.quotas.metadata_budget import MetadataBudget
from broker.quotas.shares import Shares
from broker.topics.internal_topic import KeyedLog, LogRecord, PartitionState
from broker.topics.producer_ids import Producer
from protocol.errors import ErrorCode
from storage.errors import (
    InvalidProducerEpochError,
    MessageTooLargeError,
    RecordListTooLargeError,
    StorageError,
)

logger = structlog.get_logger("broker.groups")
# Clients cause these lines: members that join and leave, or stop.
limited_logger: Final = RateLimitedLogger(logger)

L = TypeVar("L", "LiveGroup", "LiveConsumerGroup")

WEEK_MS = 7 * 24 * 3600 * 1000
# Records are split into appends of about this size: far below any max.message.bytes, above any
# single record of an offset.
APPEND_BYTES = 256 * 1024
# Tombstones of one append: three or four milliseconds.
OFFSETS_AT_ONCE = 1_000
# Characters of a client's name in its member ids, so that these fit a string of the protocol
# (32,767 bytes).
NAME_CHARS = 255
# Groups of one partition with offsets in one transaction: a marker ends them in one turn. Producers
# commit the offsets of one group.
GROUPS_PER_TRANSACTION_MAX = 100
# Open transactions with offsets of one group: one commit may drop those of all. Kafka Streams has a
# producer for each thread or task.
TRANSACTIONS_PER_GROUP_MAX = 10_000
# The longest string in a record of the log; compact strings of requests can be longer.
TEXT_BYTES_MAX = 2**15 - 1


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Settings of the coordinator, named as Kafka's broker settings where Kafka has them."""

    rules: GroupRules = field(default_factory=GroupRules)
    consumer_rules: ConsumerRules = field(default_factory=ConsumerRules)
    group_min_session_timeout_ms: int = 6_000
    group_max_session_timeout_ms: int = 1_800_000
    offsets_retention_ms: int = WEEK_MS  # offsets.retention.minutes
    offset_metadata_max_bytes: int = 4_096
    # Kafka has none of the following bounds.
    max_groups: int = 100_000
    max_protocols: int = 64  # clients send 1 to 4
    max_member_metadata_bytes: int = 1024 * 1024  # the group's record holds that of all members
    max_metadata_bytes: int = 256 * 1024 * 1024  # of the members of all groups, in memory
    append_timeout_ms: int = 5_000  # offsets.commit.timeout.ms


class NoTopics:
    """For a coordinator whose members assign partitions themselves."""

    def topic(self, name: str) -> Topic | None:
        """Return None."""
        return None

    def names(self) -> Iterable[str]:
        """Return no name."""
        return ()


class GroupCoordinator:
    """All consumer groups of this broker."""

    def __init__(
        self,
        store: KeyedLog,
        clock: Clock,
        settings: CoordinatorSettings | None = None,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
        topics: TopicLookup | None = None,
    ) -> None:
        self.settings = settings or CoordinatorSettings()
        self.stats = GroupStats()
        self._store = store
        self._clock = clock
        self._new_id = new_id
        self._groups: dict[str, LiveGroup | LiveConsumerGroup] = {}
        self._ids: list[set[str]] = [set() for _ in range(store.partition_count)]  # by partition
        self._shares = Shares(self.settings.max_groups)
        self._metadata = MetadataBudget(self.settings.max_metadata_bytes)
        # Groups of a partition with offsets of a producer's open transaction.
        self._transactional: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        self._partitions = [PartitionState.LOADING] * store.partition_count
        self._writes: set[asyncio.Future[list[object]]] = set()
        # Offsets of deleted topics: a broker that is killed deletes the topic and not its offsets.
        self._deleted_topics: set[str] = set()  # that have offsets, as far as they are loaded
        self._new_topics: set[str] = set()  # created while a partition was not loaded
        self._forgetting: set[asyncio.Task[int]] = set()
        self._context = GroupContext(
            self.settings.rules,
            clock,
            self._store_group,
            self._forget_if_void,
            self._metadata.note,
            self.stats,
        )
        self._topics = topics or NoTopics()
        self._regexes = TopicRegexes(self._topics, clock.wall_ms)
        self._consumer_context = ConsumerGroupContext(
            self.settings.consumer_rules,
            clock,
            self._topics,
            self._store_records,
            self.stats,
            self._downgrade,
            self._metadata.note,
        )

    # Partitions ---------------------------------------------------------------------------------

    def activate(self, partition: int, loaded: LoadedPartition) -> None:
        """Serve the groups that were loaded from a partition."""
        assert self._partitions[partition] is not PartitionState.ACTIVE
        self._partitions[partition] = PartitionState.ACTIVE
        self.stats.records_loaded += loaded.records
        self.stats.records_unknown += loaded.unknown_records
        self.stats.records_invalid += loaded.invalid_records
        self.stats.offsets_undecided += loaded.undecided_offsets
        group_ids = loaded.group_ids()
        new_topics = self._note_topics(loaded.topics)
        for group_id in group_ids:
            offsets = CommittedOffsets(loaded.offsets.get(group_id, {}))
            for producer_id, pending in loaded.transactional.get(group_id, {}).items():
                offsets.add_transactional(producer_id, pending)
                self._transactional[partition, producer_id].add(group_id)
            consumer_group = loaded.consumer_groups.get(group_id)
            if consumer_group is not None:
                live = LiveConsumerGroup(consumer_group, self._consumer_context, offsets)
                self._put(live)
                live.note_size()
                live.start_sessions()
                continue
            state, effects = restored(loaded.groups.get(group_id, Group(group_id)))
            classic = self._put(LiveGroup(state, self._context, offsets))
            classic.note_size()
            classic.perform(effects)
        for topic in new_topics:
            task = asyncio.create_task(self.forget_topic(topic), name="forget offsets")
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)
        logger.log(
            logging.INFO if loaded.records else logging.DEBUG,
            "groups loaded",
            partition=partition,
            groups=len(group_ids),
            records=loaded.records,
            unknown=loaded.unknown_records,
            invalid=loaded.invalid_records,
        )

    def _note_topics(self, topics: Iterable[str]) -> list[str]:
        """Note topics of loaded offsets; return those that an offset precedes."""
        new_topics = []
        for topic in topics:
            if self._topics.topic(topic) is None:
                self._deleted_topics.add(topic)
            elif topic in self._new_topics:
                new_topics.append(topic)
        if all(state is PartitionState.ACTIVE for state in self._partitions):
            self._new_topics.clear()
        return new_topics

    def deactivate(self, partition: int, state: PartitionState) -> None:
        """Stop serving the groups of a partition that failed or will be loaded again."""
        assert state is not PartitionState.ACTIVE
        self._partitions[partition] = state
        group_ids, self._ids[partition] = self._ids[partition], set()
        for group_id in group_ids:
            live = self._groups.pop(group_id)
            self._shares.remove(group_id)
            for producer_id in live.offsets.transactional:
                self._note_transactional_end(partition, group_id, producer_id)
            live.close()
            self._metadata.remove(group_id)

    def is_offline(self, partition: int) -> bool:
        """Return whether the groups of a partition are neither served nor being loaded."""
        return self._partitions[partition] is PartitionState.OFFLINE

    def availability(self, group_id: str) -> ErrorCode:
        """Return NONE if the group's partition is served, else the error for the client."""
        if len(group_id) > TEXT_BYTES_MAX:
            return ErrorCode.INVALID_GROUP_ID  # hashing takes time in proportion to its length
        return self._partitions[self._store.partition_of(group_id)].error

    def is_loading_partition(self, partition: int) -> bool:
        """Return whether a partition is being loaded."""
        return self._partitions[partition] is PartitionState.LOADING

    @property
    def is_loading(self) -> bool:
        """Return whether a partition is still being loaded."""
        return PartitionState.LOADING in self._partitions

    async def close(self) -> None:
        """Answer all waiting members with an error, and wait for appends until they time out."""
        for partition in range(len(self._partitions)):
            self.deactivate(partition, PartitionState.OFFLINE)
        for task in self._forgetting:
            task.cancel()
        if self._writes:
            await asyncio.wait(self._writes, timeout=self.settings.append_timeout_ms / 1000)

    # Members ------------------------------------------------------------------------------------

    async def join(
        self, group_id: str, request: JoinRequested, creator: Hashable | None = None
    ) -> JoinAnswer:
        """Answer JoinGroup when the next generation forms. Sets `waiter` and `new_member_id`."""
        error = self._join_error(group_id, request)
        if error is not ErrorCode.NONE:
            return JoinAnswer(error, request.member_id)
        live = self._groups.get(group_id)
        if not self._admits(group_id, live, request, creator):
            return JoinAnswer(ErrorCode.POLICY_VIOLATION, request.member_id)
        name = request.instance_id or request.client_id
        request = replace(request, new_member_id=f"{name[:NAME_CHARS]}-{self._new_id()}")
        if isinstance(live, LiveConsumerGroup):
            if not live.is_empty:
                self._metadata.own(group_id, creator)
                return await live.join(request)
            live = self._replace(live, self._new_classic(group_id, live.offsets))
        if live is None:
            if request.member_id != NO_MEMBER_ID:
                return JoinAnswer(ErrorCode.UNKNOWN_MEMBER_ID, request.member_id)
            if not self._may_create(creator):
                return JoinAnswer(ErrorCode.POLICY_VIOLATION)
            live = self._create(group_id, creator)
        self._metadata.own(group_id, creator)
        waiter = live.new_waiter()
        try:
            answer = await live.wait_answer(replace(request, waiter=waiter), waiter)
        finally:
            self._forget_if_void(live)
        assert isinstance(answer, JoinAnswer)
        return answer

    def _admits(
        self,
        group_id: str,
        live: LiveGroup | LiveConsumerGroup | None,
        request: JoinRequested,
        creator: Hashable | None,
    ) -> bool:
        """Return whether there is memory for the metadata of a member."""
        more_bytes = sum(len(metadata) for _, metadata in request.protocols)
        if live is not None:
            member = live.group.members.get(request.member_id)
            if member is None and request.instance_id is not None:
                member = live.group.static_member(request.instance_id)
            more_bytes -= 0 if member is None else member.metadata_bytes
        return self._metadata.admits(group_id, more_bytes, creator)

    def _join_error(self, group_id: str, request: JoinRequested) -> ErrorCode:
        limits = self.settings
        if not group_id or not _fits(group_id):
            return ErrorCode.INVALID_GROUP_ID
        timeouts_ms = (limits.group_min_session_timeout_ms, limits.group_max_session_timeout_ms)
        if not timeouts_ms[0] <= request.session_timeout_ms <= timeouts_ms[1]:
            return ErrorCode.INVALID_SESSION_TIMEOUT
        metadata_bytes = sum(len(metadata) for _, metadata in request.protocols)
        if metadata_bytes > limits.max_member_metadata_bytes:
            return ErrorCode.INVALID_REQUEST
        if len(request.protocols) > limits.max_protocols:
            return ErrorCode.INVALID_REQUEST
        names = [name for name, _ in request.protocols]
        if not _fits(request.protocol_type, request.instance_id or "", request.client_id, *names):
            return ErrorCode.INVALID_REQUEST
        return self.availability(group_id)

    async def sync(self, group_id: str, request: SyncRequested) -> SyncAnswer:
        """Answer SyncGroup when the leader's assignment is stored. Sets `waiter`."""
        live, error = self._live(group_id)
        if live is None:
            return SyncAnswer(error)
        if isinstance(live, LiveConsumerGroup):
            return await live.sync(request)
        size_bytes = sum(map(len, request.assignments.values()))
        if not self._metadata.admits(group_id, size_bytes):
            return SyncAnswer(ErrorCode.POLICY_VIOLATION)
        waiter = live.new_waiter()
        answer = await live.wait_answer(replace(request, waiter=waiter), waiter)
        assert isinstance(answer, SyncAnswer)
        return answer

    def heartbeat(self, group_id: str, request: HeartbeatReceived) -> ErrorCode:
        """Answer Heartbeat. Sets `waiter`."""
        live, error = self._live(group_id)
        if live is None:
            return error
        if isinstance(live, LiveConsumerGroup):
            return live.classic_heartbeat(request)
        waiter = live.new_waiter()
        answer = live.answer_nowait(replace(request, waiter=waiter), waiter)
        assert isinstance(answer, ErrorAnswer)
        return answer.error

    async def leave(self, group_id: str, request: LeaveRequested) -> LeaveAnswer:
        """Answer LeaveGroup. Sets `waiter`."""
        live, error = self._live(group_id)
        if live is None and error is ErrorCode.UNKNOWN_MEMBER_ID:
            unknown = tuple((member, instance, error) for member, instance in request.members)
            return LeaveAnswer(ErrorCode.NONE, unknown)
        if live is None:
            return LeaveAnswer(error)
        if isinstance(live, LiveConsumerGroup):
            return await live.classic_leave(request)
        waiter = live.new_waiter()
        answer = live.answer_nowait(replace(request, waiter=waiter), waiter)
        assert isinstance(answer, LeaveAnswer)
        self._forget_if_void(live)
        return answer

    def _live(self, group_id: str) -> tuple[LiveGroup | LiveConsumerGroup | None, ErrorCode]:
        if not group_id:
            return None, ErrorCode.INVALID_GROUP_ID
        error = self.availability(group_id)
        if error is not ErrorCode.NONE:
            return None, error
        return self._groups.get(group_id), ErrorCode.UNKNOWN_MEMBER_ID

    def _may_create(self, creator: Hashable | None) -> bool:
        return self._shares.admits(creator, len(self._groups))

    def _create(self, group_id: str, creator: Hashable | None) -> LiveGroup:
        self._shares.add(group_id, creator)
        return self._put(self._new_classic(group_id, CommittedOffsets()))

    def _new_classic(self, group_id: str, offsets: CommittedOffsets) -> LiveGroup:
        group = Group(group_id, since_ms=self._clock.wall_ms())
        return LiveGroup(Empty(group), self._context, offsets)

    def _replace(self, empty: LiveGroup | LiveConsumerGroup, live: L) -> L:
        """Put a group of the other protocol in place of an empty one; it keeps the offsets."""
        group_id = empty.group.group_id
        self._write(group_id, empty.tombstones(), lambda error: None)
        self._put(live)
        empty.close()
        live.note_size()
        return live

    def _upgrade(self, classic: LiveGroup, request: Heartbeat) -> LiveConsumerGroup:
        """Put a consumer group in place of a classic group with members; it keeps the offsets.

        The heartbeat that follows writes its records. Raises MembershipError.
        """
        group_id, rules = classic.group.group_id, self.settings.consumer_rules
        if not rules.allows_upgrade:
            text = f"classic group {group_id} cannot become a consumer group: a setting forbids it"
            raise MembershipError(ErrorCode.GROUP_ID_NOT_FOUND, text)
        group = upgraded(classic.group, self._topics)
        is_replacement = request.instance_id is not None and group.static_member(
            request.instance_id
        )
        if len(group.members) + (not is_replacement) > rules.max_size:
            text = f"the group has more than {rules.max_size} members, the limit"
            raise MembershipError(ErrorCode.GROUP_MAX_SIZE_REACHED, text)
        tombstones = classic.tombstones()
        live = LiveConsumerGroup(group, self._consumer_context, classic.offsets, tombstones)
        self._put(live)
        classic.close(ErrorCode.REBALANCE_IN_PROGRESS)
        live.note_size()
        live.start_sessions()
        limited_logger.info(
            "group upgraded",
            subject=group_id,
            group=group_id,
            epoch=group.epoch,
            members=len(group.members),
        )
        return live

    def _downgrade(
        self, live: LiveConsumerGroup, group: ConsumerGroup, *, is_changed: bool
    ) -> "asyncio.Future[ErrorCode]":
        """Put a classic group in place of a consumer group; it keeps the offsets."""
        now_ms = self._clock.wall_ms()
        classic = downgraded(group, self._topics, now_ms)
        records = [*live.tombstones(), group_record(classic)]
        written = self._write(group.group_id, records, lambda error: None)
        replacement = LiveGroup(Stable(classic), self._context, live.offsets)
        self._put(replacement)
        live.close()
        replacement.note_size()
        replacement.begin(is_changed=is_changed)
        limited_logger.info(
            "group downgraded",
            subject=group.group_id,
            group=group.group_id,
            generation=classic.generation,
            members=len(classic.members),
        )
        return written

    def _forget_if_void(self, live: LiveGroup | LiveConsumerGroup) -> None:
        group_id = live.group.group_id
        if live.is_void and self._groups.get(group_id) is live:
            self._remove(group_id)

    def _put(self, live: L) -> L:
        """Serve a group, perhaps in place of another one."""
        group_id = live.group.group_id
        self._groups[group_id] = live
        self._ids[self._store.partition_of(group_id)].add(group_id)
        return live

    def _remove(self, group_id: str) -> None:
        del self._groups[group_id]
        self._ids[self._store.partition_of(group_id)].discard(group_id)
        self._shares.remove(group_id)
        self._metadata.remove(group_id)

    def new_member_id(self) -> str:
        """Return an id for a member that has chosen none (ConsumerGroupHeartbeat 0)."""
        return self._new_id()

    async def consumer_heartbeat(
        self,
        group_id: str,
        request: Heartbeat,
        viewer: TopicViewer = EVERYTHING,
        creator: Hashable | None = None,
    ) -> HeartbeatAnswer:
        """Answer ConsumerGroupHeartbeat when the changes that it reports are in the log."""
        error = self._heartbeat_error(group_id, request)
        if error is not ErrorCode.NONE:
            return HeartbeatAnswer(error)
        try:
            regexes = await self._resolve(group_id, request.regex, viewer)
            live = self._consumer_group(group_id, request, creator)
        except MembershipError as refused:
            return HeartbeatAnswer(refused.code, refused.reason)
        try:
            if not self._admits_topics(live.group, request, creator):
                text = "the broker has no memory for more subscriptions of this size"
                return HeartbeatAnswer(ErrorCode.POLICY_VIOLATION, text)
            self._metadata.own(group_id, creator)
            return await live.heartbeat(request, regexes)
        finally:
            self._forget_if_void(live)

    def _admits_topics(
        self, group: ConsumerGroup, request: Heartbeat, creator: Hashable | None
    ) -> bool:
        """Return whether there is memory for the names of a subscription."""
        topics = request.topics
        if topics is None or group.shared(topics) is not topics:
            return True
        member = group.members.get(request.member_id)
        more_names = len(topics) - (0 if member is None else len(member.topics))
        return self._metadata.admits(group.group_id, NAME_BYTES * more_names, creator)

    def _heartbeat_error(self, group_id: str, request: Heartbeat) -> ErrorCode:
        texts = (group_id, request.member_id, request.instance_id or "", request.rack_id or "")
        if not _fits(*texts, request.client_id, request.regex or ""):
            return ErrorCode.INVALID_REQUEST
        return self.availability(group_id)

    async def _resolve(
        self, group_id: str, expression: str | None, viewer: TopicViewer
    ) -> Mapping[str, ResolvedRegex]:
        """Return the topics of the group's expressions, as the client that sent the request sees.

        A group keeps its topics for a while, so that members with different permissions do not
        cause a rebalance with each heartbeat. It keeps them for good for an expression that a Kafka
        broker has stored and that is refused here. Raises MembershipError for `expression`.
        """
        live = self._groups.get(group_id)
        resolved = dict(live.group.regexes) if isinstance(live, LiveConsumerGroup) else {}
        for each in sorted({*resolved, expression} if expression else resolved):
            before = resolved.get(each)
            try:
                now = await self._regexes.resolve(each, viewer)
            except MembershipError:
                if each == expression or before is None:
                    raise
                continue
            if before is None or now.resolved_ms - before.resolved_ms >= REFRESH_MS:
                resolved[each] = now
        return resolved

    def _consumer_group(
        self, group_id: str, request: Heartbeat, creator: Hashable | None
    ) -> LiveConsumerGroup:
        live = self._groups.get(group_id)
        if isinstance(live, LiveConsumerGroup) and not live.is_dead:
            return live
        is_join = request.epoch == JOIN_EPOCH
        if live is not None and (not is_join or live.is_dead):
            text = f"group {group_id} is not a consumer group"
            raise MembershipError(ErrorCode.GROUP_ID_NOT_FOUND, text)
        if isinstance(live, LiveGroup) and live.has_members:
            return self._upgrade(live, request)
        group = ConsumerGroup(group_id)
        if live is not None:
            replacement = LiveConsumerGroup(group, self._consumer_context, live.offsets)
            return self._replace(live, replacement)
        if not is_join:
            text = f"there is no group {group_id}"
            raise MembershipError(ErrorCode.GROUP_ID_NOT_FOUND, text)
        if not self._may_create(creator):
            text = f"the broker has at most {self.settings.max_groups} groups, half for one user"
            raise MembershipError(ErrorCode.POLICY_VIOLATION, text)
        self._shares.add(group_id, creator)
        created = LiveConsumerGroup(group, self._consumer_context, CommittedOffsets())
        return self._put(created)

    # Offsets ------------------------------------------------------------------------------------

    async def commit(
        self,
        group_id: str,
        request: CommitRequested,
        offsets: Mapping[TopicIndex, CommittedOffset],
        creator: Hashable | None = None,
    ) -> ErrorCode:
        """Answer OffsetCommit when the offsets are in the log. Sets `waiter`."""
        error = self._commit_error(group_id, request, offsets, creator)
        if error is not ErrorCode.NONE or not offsets:
            return error
        live = self._groups.get(group_id) or self._create(group_id, creator)
        append = live.offsets.begin(offsets)
        records = _offset_records(group_id, offsets)

        def appended(error: ErrorCode) -> None:
            live.offsets.end(append, offsets, is_appended=error is ErrorCode.NONE)
            if error is ErrorCode.NONE:
                self.stats.offsets_committed += len(offsets)

        too_large = ErrorCode.INVALID_COMMIT_OFFSET_SIZE
        error = await self._write(group_id, records, appended, too_large)
        self._forget_if_void(live)
        return error

    def _commit_error(
        self,
        group_id: str,
        request: CommitRequested,
        keys: Iterable[TopicIndex],
        creator: Hashable | None,
    ) -> ErrorCode:
        if (not group_id and request.generation >= 0) or not _fits(group_id):
            return ErrorCode.INVALID_GROUP_ID
        error = self.availability(group_id)
        if error is not ErrorCode.NONE:
            return error
        live = self._groups.get(group_id)
        if live is None:
            if request.generation >= 0:
                return ErrorCode.ILLEGAL_GENERATION
            return ErrorCode.NONE if self._may_create(creator) else ErrorCode.POLICY_VIOLATION
        if isinstance(live, LiveConsumerGroup):
            partitions = [(topic.topic_id, i) for n, i in keys if (topic := self._topics.topic(n))]
            return live.commit_error(request.member_id, request.generation, partitions)
        waiter = live.new_waiter()
        answer = live.answer_nowait(replace(request, waiter=waiter), waiter)
        assert isinstance(answer, ErrorAnswer)
        return answer.error

    async def commit_in_transaction(
        self,
        group_id: str,
        request: CommitRequested,
        offsets: Mapping[TopicIndex, CommittedOffset],
        producer: Producer,
        creator: Hashable | None = None,
    ) -> ErrorCode:
        """Answer TxnOffsetCommit: the offsets are in the log and wait for the transaction's end."""
        names_member = request.member_id or request.instance_id is not None
        error = self.availability(group_id)
        if error is ErrorCode.NONE and (request.generation >= 0 or names_member):
            error = self._commit_error(group_id, request, offsets, creator)
        if not group_id:
            error = ErrorCode.INVALID_GROUP_ID
        if error is not ErrorCode.NONE or not offsets:
            return error
        live = self._groups.get(group_id)
        if live is not None and live.is_dead:  # no record may follow its tombstones
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        transaction = self.partition_of(group_id), producer.producer_id
        group_ids = self._transactional.get(transaction, ())
        if len(group_ids) >= GROUPS_PER_TRANSACTION_MAX and group_id not in group_ids:
            return ErrorCode.POLICY_VIOLATION
        if live is None:
            if not self._may_create(creator):
                return ErrorCode.POLICY_VIOLATION
            live = self._create(group_id, creator)
        pending = live.offsets.transactional
        if len(pending) >= TRANSACTIONS_PER_GROUP_MAX and producer.producer_id not in pending:
            return ErrorCode.POLICY_VIOLATION
        append = live.offsets.add_transactional(producer.producer_id, offsets)
        self._transactional[transaction].add(group_id)

        def appended(error: ErrorCode) -> None:
            if error is not ErrorCode.NONE:
                live.offsets.remove_transactional(producer.producer_id, append)

        records = _offset_records(group_id, offsets)
        too_large = ErrorCode.INVALID_COMMIT_OFFSET_SIZE
        error = await self._write(group_id, records, appended, too_large, producer)
        self._forget_if_void(live)
        return error

    def end_transaction(self, partition: int, producer_id: int, *, commit: bool) -> None:
        """Apply or drop the offsets of a transaction whose marker is in the log."""
        for group_id in self._transactional.pop((partition, producer_id), ()):
            live = self._groups.get(group_id)
            if live is not None:
                ended = live.offsets.end_transaction(producer_id, commit=commit)
                self.stats.offsets_committed += ended
                self._forget_if_void(live)

    def _note_transactional_end(self, partition: int, group_id: str, producer_id: int) -> None:
        group_ids = self._transactional[partition, producer_id]
        group_ids.discard(group_id)
        if not group_ids:
            del self._transactional[partition, producer_id]

    def is_unstable(self, group_id: str, key: TopicIndex) -> bool:
        """Return whether an open transaction has committed an offset of a partition."""
        live = self._groups.get(group_id)
        return live is not None and live.offsets.is_unstable(key)

    def partition_of(self, group_id: str) -> int:
        """Return the partition of __consumer_offsets that stores a group."""
        return self._store.partition_of(group_id)

    def offsets(self, group_id: str) -> tuple[ErrorCode, Mapping[TopicIndex, CommittedOffset]]:
        """Return the committed offsets of a group; none, without an error, if it does not exist."""
        error = self.availability(group_id)
        live = self._groups.get(group_id)
        if error is not ErrorCode.NONE or live is None or live.is_dead:
            return error, {}
        return error, live.offsets.acknowledged

    def fetch_error(self, group_id: str, member_id: str | None, epoch: int) -> ErrorCode:
        """Return NONE if a client may fetch offsets as this member (OffsetFetch 9 and later)."""
        live = self._groups.get(group_id)
        if not isinstance(live, LiveConsumerGroup) or (member_id is None and epoch < 0):
            return ErrorCode.NONE
        return live.commit_error(member_id or "", epoch, ())

    def committed_in(self, topic: str, partition: int) -> Iterator[tuple[str, int]]:
        """Yield each group with a committed offset for a partition, and that offset."""
        for group_id, live in tuple(self._groups.items()):
            committed = live.offsets.acknowledged.get((topic, partition))
            if committed is not None:
                yield group_id, committed.offset

    async def delete_offsets(
        self, group_id: str, keys: Sequence[TopicIndex]
    ) -> tuple[ErrorCode, Mapping[TopicIndex, ErrorCode]]:
        """Answer OffsetDelete: an error for the whole request, or one for each key."""
        error = self.availability(group_id)
        if error is not ErrorCode.NONE:
            return error, {}
        live = self._groups.get(group_id)
        if live is None or live.is_dead:
            return ErrorCode.GROUP_ID_NOT_FOUND, {}
        protocol_type = live.summary().protocol_type
        if live.has_members and protocol_type != CONSUMER_PROTOCOL_TYPE:
            return ErrorCode.NON_EMPTY_GROUP, {}
        subscribed = live.subscribed_topics()
        errors = {
            key: ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
            if subscribed is None or key[0] in subscribed
            else ErrorCode.NONE
            for key in keys
        }
        committed = live.offsets.written()
        deletable = [key for key in keys if errors[key] is ErrorCode.NONE and key in committed]
        return await self._delete_offsets(live, deletable), errors

    async def forget_topic(self, topic: str) -> int:
        """Delete all committed offsets of a deleted topic; return their number."""
        forgotten = 0
        turns = Turns()
        self._new_topics.discard(topic)
        for live in list(self._groups.values()):
            await turns.take()
            keys = [key for key in live.offsets.written() if key[0] == topic]
            if not keys:
                continue
            if await self._delete_offsets(live, keys) is ErrorCode.NONE:
                forgotten += len(keys)
            else:
                self._deleted_topics.add(topic)
        return forgotten

    async def forget_earlier_topic(self, topic: str) -> None:
        """Delete offsets that a deleted topic has left, before a new one gets its name."""
        if topic in self._deleted_topics:
            self._deleted_topics.discard(topic)
            await self.forget_topic(topic)
        if any(state is not PartitionState.ACTIVE for state in self._partitions):
            self._new_topics.add(topic)

    async def expire_offsets(self, now_ms: int) -> int:
        """Delete offsets past their retention, and empty groups; return the number of offsets.

        A timer calls this (Kafka: every 10 minutes), only while the wall clock is trusted.
        """
        expired, turns = 0, Turns()
        for group_id in list(self._groups):
            await turns.take()
            live = self._groups.get(group_id)
            if live is None or self.availability(group_id) is not ErrorCode.NONE:
                continue
            # Search again after each append, because commits may have arrived meanwhile.
            while keys := self._expired(live, now_ms):
                if await self._delete_offsets(live, keys) is not ErrorCode.NONE:
                    break
                expired += len(keys)
            if live.is_empty and not live.is_dead and not live.offsets:
                await self._delete(live)
        self.stats.offsets_expired += expired
        if expired:
            logger.info("offsets expired", offsets=expired)
        return expired

    def _expired(self, live: LiveGroup | LiveConsumerGroup, now_ms: int) -> list[TopicIndex]:
        old = live.expired_offsets(now_ms, self.settings.offsets_retention_ms)
        changing = live.offsets.in_flight.keys() | live.offsets.unstable()
        return [key for key in old if key not in changing][:OFFSETS_AT_ONCE]

    async def _delete_offsets(
        self, live: LiveGroup | LiveConsumerGroup, keys: Sequence[TopicIndex]
    ) -> ErrorCode:
        if not keys:
            return ErrorCode.NONE
        group_id = live.group.group_id
        tombstones = [(encode_offset_key(OffsetKey(group_id, *key)), None) for key in keys]
        append = live.offsets.begin(())

        def appended(error: ErrorCode) -> None:
            if error is ErrorCode.NONE:
                # Appends end in order, so these offsets were committed before their tombstones.
                live.offsets.forget(append, keys)

        return await self._write(group_id, tombstones, appended)

    # Groups -------------------------------------------------------------------------------------

    def describe(self, group_id: str) -> tuple[ErrorCode, State | ConsumerGroup | None]:
        """Return the state of a group; None if it does not exist."""
        error = self.availability(group_id)
        live = self._groups.get(group_id)
        if error is not ErrorCode.NONE or live is None:
            return error, None
        if isinstance(live, LiveGroup):
            return error, live.state
        return error, None if live.is_dead else live.group

    def groups(self) -> Iterator[GroupSummary]:
        """Yield all groups that are served."""
        for live in tuple(self._groups.values()):  # groups change while other tasks run
            if not live.is_dead:
                yield live.summary()

    async def delete_group(self, group_id: str) -> ErrorCode:
        """Answer DeleteGroups when the tombstones of the group and its offsets are in the log."""
        error = self.availability(group_id)
        if error is not ErrorCode.NONE:
            return error
        live = self._groups.get(group_id)
        if live is None or live.is_dead:
            return ErrorCode.GROUP_ID_NOT_FOUND
        if live.has_members:
            return ErrorCode.NON_EMPTY_GROUP
        return await self._delete(live)

    async def _delete(self, live: LiveGroup | LiveConsumerGroup) -> ErrorCode:
        group_id = live.group.group_id
        *first_chunks, last_chunk = chunks_of(list(live.offsets.written()))
        live.begin_deletion()
        error = ErrorCode.COORDINATOR_NOT_AVAILABLE
        try:
            for chunk in first_chunks:
                error = await self._delete_offsets(live, chunk)
                if error is not ErrorCode.NONE:
                    return error
            error = ErrorCode.NONE
        finally:
            if error is not ErrorCode.NONE:  # or this task was cancelled
                live.fail_deletion()
        keys = [encode_offset_key(OffsetKey(group_id, *key)) for key in last_chunk]
        tombstones: list[LogRecord] = [(key, None) for key in keys]
        tombstones += live.tombstones()

        def appended(error: ErrorCode) -> None:
            if error is not ErrorCode.NONE:
                live.fail_deletion()
            elif self._groups.get(group_id) is live:
                self._remove(group_id)
                self.stats.groups_deleted += 1

        return await self._write(group_id, tombstones, appended)

    # The log ------------------------------------------------------------------------------------

    def _store_records(
        self, group_id: str, records: Sequence[LogRecord]
    ) -> "asyncio.Future[ErrorCode]":
        return self._write(group_id, records, lambda error: None)

    def _store_group(self, group: Group) -> "asyncio.Future[ErrorCode]":
        return self._write(group.group_id, [group_record(group)], lambda error: None)

    def _write(
        self,
        group_id: str,
        records: Sequence[LogRecord],
        appended: Callable[[ErrorCode], None],
        too_large: ErrorCode = ErrorCode.UNKNOWN_SERVER_ERROR,
        producer: Producer | None = None,
    ) -> "asyncio.Future[ErrorCode]":
        """Start to append; call `appended` with the outcome, however late it comes.

        The future ends with the outcome, or with COORDINATOR_NOT_AVAILABLE after
        `append_timeout_ms`. Cancelling it does not stop the append.
        """
        outcome: asyncio.Future[ErrorCode] = asyncio.get_running_loop().create_future()
        appends = [self._store.append(group_id, chunk, producer) for chunk in _chunks(records)]
        ended = asyncio.gather(*appends, return_exceptions=True)
        self._writes.add(ended)

        def settle(error: ErrorCode) -> None:
            if not outcome.done():
                outcome.set_result(error)

        timeout_s = self.settings.append_timeout_ms / 1000
        timer = self._clock.call_later(
            timeout_s, lambda: settle(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        )

        def finish(ended: "asyncio.Future[list[object]]") -> None:
            timer.cancel()
            self._writes.discard(ended)
            error = self._worst(group_id, ended.result(), too_large)
            try:
                appended(error)
            finally:
                settle(error)

        ended.add_done_callback(finish)
        return outcome

    def _worst(self, group_id: str, results: Iterable[object], too_large: ErrorCode) -> ErrorCode:
        for result in results:
            if not isinstance(result, BaseException):
                continue
            self.stats.append_errors += 1
            logger.error("group append failed", group=group_id, reason=repr(result))
            match result:
                case MessageTooLargeError() | RecordListTooLargeError():
                    return too_large
                case InvalidProducerEpochError():
                    return ErrorCode.INVALID_PRODUCER_EPOCH
                case StorageError() | asyncio.CancelledError():
                    return ErrorCode.COORDINATOR_NOT_AVAILABLE
                case _:
                    return ErrorCode.UNKNOWN_SERVER_ERROR
        return ErrorCode.NONE


def _offset_records(
    group_id: str, offsets: Mapping[TopicIndex, CommittedOffset]
) -> list[LogRecord]:
    return [
        (encode_offset_key(OffsetKey(group_id, *key)), encode_offset_value(value))
        for key, value in offsets.items()
    ]


def _fits(*texts: str) -> bool:
    return all(len(text.encode()) <= TEXT_BYTES_MAX for text in texts)


def chunks_of(keys: Sequence[TopicIndex]) -> list[Sequence[TopicIndex]]:
    """Split keys into chunks for one append each; return at least one chunk, perhaps empty."""
    firsts = range(0, max(1, len(keys)), OFFSETS_AT_ONCE)
    return [keys[first : first + OFFSETS_AT_ONCE] for first in firsts]


def _chunks(records: Sequence[LogRecord]) -> Iterator[Sequence[LogRecord]]:
    """Split records into appends of about APPEND_BYTES; a single record may be larger."""
    first, size_bytes = 0, 0
    for index, (key, value) in enumerate(records):
        record_bytes = len(key) + len(value or b"")
        if size_bytes and size_bytes + record_bytes > APPEND_BYTES:
            yield records[first:index]
            first, size_bytes = index, 0
        size_bytes += record_bytes
    yield records[first:]
