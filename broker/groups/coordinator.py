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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import structlog

from broker.groups.expiry import expired_offsets
from broker.groups.live_group import Clock, GroupContext, GroupStats, LiveGroup
from broker.groups.model import (
    NO_MEMBER_ID,
    CommitRequested,
    Dead,
    Deleted,
    DeletionFailed,
    Empty,
    ErrorAnswer,
    Group,
    GroupRules,
    HeartbeatReceived,
    JoinAnswer,
    JoinRequested,
    LeaveAnswer,
    LeaveRequested,
    State,
    SyncAnswer,
    SyncRequested,
    Unloaded,
)
from broker.groups.offset_records import (
    CommittedOffset,
    OffsetKey,
    encode_group_key,
    encode_offset_key,
    encode_offset_value,
)
from broker.groups.offsets_store import (
    LoadedPartition,
    LogRecord,
    OffsetsStore,
    TopicIndex,
    group_record,
)
from broker.groups.state import restored
from broker.groups.subscription import CONSUMER_PROTOCOL_TYPE, subscribed_topics
from broker.loop_turns import Turns
from protocol.errors import ErrorCode
from storage.errors import MessageTooLargeError, RecordListTooLargeError, StorageError

logger = structlog.get_logger("broker.groups")

WEEK_MS = 7 * 24 * 3600 * 1000
# Records are split into appends of about this size: far below any max.message.bytes, above any
# single record of an offset.
APPEND_BYTES = 256 * 1024
# Tombstones of one append: three or four milliseconds.
OFFSETS_AT_ONCE = 1_000
# Characters of a client's name in its member ids, so that these fit a string of the protocol
# (32,767 bytes).
NAME_CHARS = 255
# The longest string in a record of the log; compact strings of requests can be longer.
TEXT_BYTES_MAX = 2**15 - 1


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Settings of the coordinator, named as Kafka's broker settings where Kafka has them."""

    rules: GroupRules = field(default_factory=GroupRules)
    group_min_session_timeout_ms: int = 6_000
    group_max_session_timeout_ms: int = 1_800_000
    offsets_retention_ms: int = WEEK_MS  # offsets.retention.minutes
    offset_metadata_max_bytes: int = 4_096
    # Kafka has none of the following bounds.
    max_groups: int = 100_000
    max_protocols: int = 64  # clients send 1 to 4
    max_member_metadata_bytes: int = 1024 * 1024  # the group's record holds that of all members
    append_timeout_ms: int = 5_000  # offsets.commit.timeout.ms


class PartitionState(Enum):
    """The state of one partition of __consumer_offsets."""

    LOADING = "loading"
    ACTIVE = "active"
    OFFLINE = "offline"


class GroupCoordinator:
    """All consumer groups of this broker."""

    def __init__(
        self,
        store: OffsetsStore,
        clock: Clock,
        settings: CoordinatorSettings | None = None,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self.settings = settings or CoordinatorSettings()
        self.stats = GroupStats()
        self._store = store
        self._clock = clock
        self._new_id = new_id
        self._groups: dict[str, LiveGroup] = {}
        self._partitions = [PartitionState.LOADING] * store.partition_count
        self._writes: set[asyncio.Future[list[object]]] = set()
        self._context = GroupContext(
            self.settings.rules, clock, self._store_group, self._forget_if_void, self.stats
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
        for group_id in loaded.groups.keys() | loaded.offsets.keys():
            state, effects = restored(loaded.groups.get(group_id, Group(group_id)))
            live = self._groups[group_id] = LiveGroup(state, self._context)
            live.offsets.update(loaded.offsets.get(group_id, {}))
            live.perform(effects)
        logger.log(
            logging.INFO if loaded.records else logging.DEBUG,
            "groups loaded",
            partition=partition,
            groups=len(loaded.groups.keys() | loaded.offsets.keys()),
            records=loaded.records,
            unknown=loaded.unknown_records,
            invalid=loaded.invalid_records,
        )

    def deactivate(self, partition: int, state: PartitionState) -> None:
        """Stop serving the groups of a partition that failed or will be loaded again."""
        assert state is not PartitionState.ACTIVE
        self._partitions[partition] = state
        for group_id in [g for g in self._groups if self._store.partition_of(g) == partition]:
            self._groups.pop(group_id).send(Unloaded())

    def is_offline(self, partition: int) -> bool:
        """Return whether the groups of a partition are neither served nor being loaded."""
        return self._partitions[partition] is PartitionState.OFFLINE

    def availability(self, group_id: str) -> ErrorCode:
        """Return NONE if the group's partition is served, else the error for the client."""
        if len(group_id) > TEXT_BYTES_MAX:
            return ErrorCode.INVALID_GROUP_ID  # hashing takes time in proportion to its length
        match self._partitions[self._store.partition_of(group_id)]:
            case PartitionState.ACTIVE:
                return ErrorCode.NONE
            case PartitionState.LOADING:
                return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
            case PartitionState.OFFLINE:
                return ErrorCode.COORDINATOR_NOT_AVAILABLE

    @property
    def is_loading(self) -> bool:
        """Return whether a partition is still being loaded."""
        return PartitionState.LOADING in self._partitions

    async def close(self) -> None:
        """Answer all waiting members with an error, and wait for appends until they time out."""
        for partition in range(len(self._partitions)):
            self.deactivate(partition, PartitionState.OFFLINE)
        if self._writes:
            await asyncio.wait(self._writes, timeout=self.settings.append_timeout_ms / 1000)

    # Members ------------------------------------------------------------------------------------

    async def join(self, group_id: str, request: JoinRequested) -> JoinAnswer:
        """Answer JoinGroup when the next generation forms. Sets `waiter` and `new_member_id`."""
        error = self._join_error(group_id, request)
        if error is not ErrorCode.NONE:
            return JoinAnswer(error, request.member_id)
        live = self._groups.get(group_id)
        if live is None:
            if request.member_id != NO_MEMBER_ID:
                return JoinAnswer(ErrorCode.UNKNOWN_MEMBER_ID, request.member_id)
            if len(self._groups) >= self.settings.max_groups:
                return JoinAnswer(ErrorCode.POLICY_VIOLATION)
            live = self._create(group_id)
        waiter = live.new_waiter()
        name = request.instance_id or request.client_id
        new_member_id = f"{name[:NAME_CHARS]}-{self._new_id()}"
        request = replace(request, waiter=waiter, new_member_id=new_member_id)
        try:
            answer = await live.wait_answer(request, waiter)
        finally:
            self._forget_if_void(live)
        assert isinstance(answer, JoinAnswer)
        return answer

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
        waiter = live.new_waiter()
        answer = await live.wait_answer(replace(request, waiter=waiter), waiter)
        assert isinstance(answer, SyncAnswer)
        return answer

    def heartbeat(self, group_id: str, request: HeartbeatReceived) -> ErrorCode:
        """Answer Heartbeat. Sets `waiter`."""
        live, error = self._live(group_id)
        if live is None:
            return error
        waiter = live.new_waiter()
        answer = live.answer_nowait(replace(request, waiter=waiter), waiter)
        assert isinstance(answer, ErrorAnswer)
        return answer.error

    def leave(self, group_id: str, request: LeaveRequested) -> LeaveAnswer:
        """Answer LeaveGroup. Sets `waiter`."""
        live, error = self._live(group_id)
        if live is None and error is ErrorCode.UNKNOWN_MEMBER_ID:
            unknown = tuple((member, instance, error) for member, instance in request.members)
            return LeaveAnswer(ErrorCode.NONE, unknown)
        if live is None:
            return LeaveAnswer(error)
        waiter = live.new_waiter()
        answer = live.answer_nowait(replace(request, waiter=waiter), waiter)
        assert isinstance(answer, LeaveAnswer)
        self._forget_if_void(live)
        return answer

    def _live(self, group_id: str) -> tuple[LiveGroup | None, ErrorCode]:
        if not group_id:
            return None, ErrorCode.INVALID_GROUP_ID
        error = self.availability(group_id)
        if error is not ErrorCode.NONE:
            return None, error
        return self._groups.get(group_id), ErrorCode.UNKNOWN_MEMBER_ID

    def _create(self, group_id: str) -> LiveGroup:
        group = Group(group_id, since_ms=self._clock.wall_ms())
        live = self._groups[group_id] = LiveGroup(Empty(group), self._context)
        return live

    def _forget_if_void(self, live: LiveGroup) -> None:
        group_id = live.group.group_id
        if live.is_void and self._groups.get(group_id) is live:
            del self._groups[group_id]

    # Offsets ------------------------------------------------------------------------------------

    async def commit(
        self,
        group_id: str,
        request: CommitRequested,
        offsets: Mapping[TopicIndex, CommittedOffset],
    ) -> ErrorCode:
        """Answer OffsetCommit when the offsets are in the log. Sets `waiter`."""
        error = self._commit_error(group_id, request)
        if error is not ErrorCode.NONE or not offsets:
            return error
        live = self._groups.get(group_id) or self._create(group_id)
        live.commits_in_flight.update(offsets.keys())
        records = [
            (encode_offset_key(OffsetKey(group_id, *key)), encode_offset_value(value))
            for key, value in offsets.items()
        ]

        def appended(error: ErrorCode) -> None:
            live.commits_in_flight.subtract(offsets.keys())
            live.commits_in_flight = +live.commits_in_flight
            if error is ErrorCode.NONE:
                self.stats.offsets_committed += len(offsets)
                live.offsets.update(offsets)

        too_large = ErrorCode.INVALID_COMMIT_OFFSET_SIZE
        error = await self._write(group_id, records, appended, too_large)
        self._forget_if_void(live)
        return error

    def _commit_error(self, group_id: str, request: CommitRequested) -> ErrorCode:
        if (not group_id and request.generation >= 0) or not _fits(group_id):
            return ErrorCode.INVALID_GROUP_ID
        error = self.availability(group_id)
        if error is not ErrorCode.NONE:
            return error
        live = self._groups.get(group_id)
        if live is None:
            if request.generation >= 0:
                return ErrorCode.ILLEGAL_GENERATION
            full = len(self._groups) >= self.settings.max_groups
            return ErrorCode.POLICY_VIOLATION if full else ErrorCode.NONE
        waiter = live.new_waiter()
        answer = live.answer_nowait(replace(request, waiter=waiter), waiter)
        assert isinstance(answer, ErrorAnswer)
        return answer.error

    def offsets(self, group_id: str) -> tuple[ErrorCode, Mapping[TopicIndex, CommittedOffset]]:
        """Return the committed offsets of a group; none, without an error, if it does not exist."""
        error = self.availability(group_id)
        live = self._groups.get(group_id)
        if error is not ErrorCode.NONE or live is None or isinstance(live.state, Dead):
            return error, {}
        return error, live.offsets

    def committed_in(self, topic: str, partition: int) -> Iterator[tuple[str, int]]:
        """Yield each group with a committed offset for a partition, and that offset."""
        for group_id, live in tuple(self._groups.items()):
            committed = live.offsets.get((topic, partition))
            if committed is not None:
                yield group_id, committed.offset

    async def delete_offsets(
        self, group_id: str, keys: Sequence[TopicIndex]
    ) -> tuple[ErrorCode, Mapping[TopicIndex, ErrorCode]]:
        """Answer OffsetDelete: an error for the whole request, or one for each key."""
        error, state = self.describe(group_id)
        if error is not ErrorCode.NONE:
            return error, {}
        if state is None or isinstance(state, Dead):
            return ErrorCode.GROUP_ID_NOT_FOUND, {}
        subscribed: frozenset[str] | None = frozenset()
        if not isinstance(state, Empty):
            if state.group.protocol_type != CONSUMER_PROTOCOL_TYPE:
                return ErrorCode.NON_EMPTY_GROUP, {}
            subscribed = subscribed_topics(state.group)
        errors = {
            key: ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
            if subscribed is None or key[0] in subscribed
            else ErrorCode.NONE
            for key in keys
        }
        live = self._groups[group_id]
        committed = _committed(live)
        deletable = [key for key in keys if errors[key] is ErrorCode.NONE and key in committed]
        return await self._delete_offsets(live, deletable), errors

    async def forget_topic(self, topic: str) -> int:
        """Delete all committed offsets of a deleted topic; return their number."""
        forgotten = 0
        turns = Turns()
        for live in list(self._groups.values()):
            await turns.take()
            keys = [key for key in _committed(live) if key[0] == topic]
            if keys and await self._delete_offsets(live, keys) is ErrorCode.NONE:
                forgotten += len(keys)
        return forgotten

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
            if isinstance(live.state, Empty) and not live.group.pending and not _committed(live):
                await self._delete(live)
        self.stats.offsets_expired += expired
        if expired:
            logger.info("offsets expired", offsets=expired)
        return expired

    def _expired(self, live: LiveGroup, now_ms: int) -> list[TopicIndex]:
        retention_ms = self.settings.offsets_retention_ms
        old = expired_offsets(live.state, live.offsets, now_ms, retention_ms)
        return [key for key in old if key not in live.commits_in_flight][:OFFSETS_AT_ONCE]

    async def _delete_offsets(self, live: LiveGroup, keys: Sequence[TopicIndex]) -> ErrorCode:
        if not keys:
            return ErrorCode.NONE
        group_id = live.group.group_id
        tombstones = [(encode_offset_key(OffsetKey(group_id, *key)), None) for key in keys]

        def appended(error: ErrorCode) -> None:
            if error is ErrorCode.NONE:
                # Appends end in order, so these offsets were committed before their tombstones.
                for key in keys:
                    live.offsets.pop(key, None)

        return await self._write(group_id, tombstones, appended)

    # Groups -------------------------------------------------------------------------------------

    def describe(self, group_id: str) -> tuple[ErrorCode, State | None]:
        """Return the state of a group; None if it does not exist."""
        error = self.availability(group_id)
        live = self._groups.get(group_id)
        return error, None if live is None or error is not ErrorCode.NONE else live.state

    def groups(self) -> Iterator[State]:
        """Yield the states of all groups that are served."""
        for live in tuple(self._groups.values()):  # groups change while other tasks run
            if not isinstance(live.state, Dead):
                yield live.state

    async def delete_group(self, group_id: str) -> ErrorCode:
        """Answer DeleteGroups when the tombstones of the group and its offsets are in the log."""
        error = self.availability(group_id)
        if error is not ErrorCode.NONE:
            return error
        live = self._groups.get(group_id)
        if live is None or isinstance(live.state, Dead):
            return ErrorCode.GROUP_ID_NOT_FOUND
        if not isinstance(live.state, Empty):
            return ErrorCode.NON_EMPTY_GROUP
        return await self._delete(live)

    async def _delete(self, live: LiveGroup) -> ErrorCode:
        group_id = live.group.group_id
        *first_chunks, last_chunk = chunks_of(list(_committed(live)))
        # From now on the group refuses joins and commits, so no record follows the tombstones.
        live.send(Deleted())
        error = ErrorCode.COORDINATOR_NOT_AVAILABLE
        try:
            for chunk in first_chunks:
                error = await self._delete_offsets(live, chunk)
                if error is not ErrorCode.NONE:
                    return error
            error = ErrorCode.NONE
        finally:
            if error is not ErrorCode.NONE:  # or this task was cancelled
                live.send(DeletionFailed())
        keys = [encode_offset_key(OffsetKey(group_id, *key)) for key in last_chunk]
        tombstones: list[LogRecord] = [(key, None) for key in keys]
        tombstones.append((encode_group_key(group_id), None))

        def appended(error: ErrorCode) -> None:
            if error is not ErrorCode.NONE:
                live.send(DeletionFailed())
            elif self._groups.get(group_id) is live:
                del self._groups[group_id]
                self.stats.groups_deleted += 1

        return await self._write(group_id, tombstones, appended)

    # The log ------------------------------------------------------------------------------------

    def _store_group(self, group: Group) -> "asyncio.Future[ErrorCode]":
        return self._write(group.group_id, [group_record(group)], lambda error: None)

    def _write(
        self,
        group_id: str,
        records: Sequence[LogRecord],
        appended: Callable[[ErrorCode], None],
        too_large: ErrorCode = ErrorCode.UNKNOWN_SERVER_ERROR,
    ) -> "asyncio.Future[ErrorCode]":
        """Start to append; call `appended` with the outcome, however late it comes.

        The future ends with the outcome, or with COORDINATOR_NOT_AVAILABLE after
        `append_timeout_ms`. Cancelling it does not stop the append.
        """
        outcome: asyncio.Future[ErrorCode] = asyncio.get_running_loop().create_future()
        appends = [self._store.append(group_id, chunk) for chunk in _chunks(records)]
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
                case StorageError() | asyncio.CancelledError():
                    return ErrorCode.COORDINATOR_NOT_AVAILABLE
                case _:
                    return ErrorCode.UNKNOWN_SERVER_ERROR
        return ErrorCode.NONE


def _fits(*texts: str) -> bool:
    return all(len(text.encode()) <= TEXT_BYTES_MAX for text in texts)


def _committed(live: LiveGroup) -> set[TopicIndex]:
    """Return the keys with an offset in the log, acknowledged or not yet."""
    return live.offsets.keys() | live.commits_in_flight.keys()


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
