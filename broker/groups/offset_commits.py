"""The committed offsets of all groups: commits, with and without a transaction, and reads.

Rules
- Acknowledged data is in the log: a committed offset is answered and visible after its append.
- Offsets of a transaction are visible from the commit marker of their partition on.
"""

import asyncio
from collections import defaultdict
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace

from broker.event_loop.loop_turns import run_in_turns
from broker.groups.classic.model import CommitRequested, ErrorAnswer
from broker.groups.consumer.model import TopicLookup
from broker.groups.group_factory import GroupFactory
from broker.groups.group_log import GroupLog, are_names
from broker.groups.live_classic_group import GroupStats
from broker.groups.live_consumer_group import LiveConsumerGroup
from broker.groups.offsets.committed_offsets import CommittedOffsets
from broker.groups.offsets.offset_records import (
    CommittedOffset,
    OffsetKey,
    encode_offset_key,
    encode_offset_value,
)
from broker.groups.offsets.offsets_store import TopicIndex
from broker.groups.served_groups import ServedGroups
from broker.topics.internal_topic import LogRecord
from broker.topics.producer_ids import Producer
from protocol.errors import ErrorCode

# Groups of one partition with offsets in one transaction: their ends begin in one turn. Producers
# commit the offsets of one group.
GROUPS_PER_TRANSACTION_MAX = 100
# Open transactions with offsets of one group: one commit may replace those of all, of which each
# takes some nanoseconds. Kafka Streams has a producer for each thread or task.
TRANSACTIONS_PER_GROUP_MAX = 10_000
# Offsets of a transaction that take effect without a pause for others: two milliseconds.
ENDED_AT_ONCE = 500


class OffsetCommits:
    """Commits and reads offsets of groups; ends the transactions that have committed some."""

    def __init__(
        self,
        served: ServedGroups,
        factory: GroupFactory,
        log: GroupLog,
        topics: TopicLookup,
        stats: GroupStats,
    ) -> None:
        self._served = served
        self._factory = factory
        self._log = log
        self._topics = topics
        self._stats = stats
        # Groups of a partition with offsets of a producer's open transaction.
        self._transactional: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        # Transactions with many offsets end one after the other: each turn delays all requests.
        self._ending = asyncio.Lock()
        self._ending_tasks: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Stop to end transactions: their markers are in the log."""
        for task in self._ending_tasks:
            task.cancel()

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
        if not self._served.may_commit(group_id, offsets, creator):
            return ErrorCode.POLICY_VIOLATION
        live = self._served.get(group_id) or self._factory.create_classic(group_id, creator)
        append = live.offsets.begin(offsets)
        self._served.own_offsets(group_id, creator)
        self._served.note_offsets(live)
        records = _offset_records(group_id, offsets)

        def appended(error: ErrorCode) -> None:
            live.offsets.end(append, offsets, is_appended=error is ErrorCode.NONE)
            self._served.note_offsets(live)
            if error is ErrorCode.NONE:
                self._stats.offsets_committed += len(offsets)

        too_large = ErrorCode.INVALID_COMMIT_OFFSET_SIZE
        error = await self._log.append(group_id, records, appended, too_large=too_large)
        self._served.remove_if_void(live)
        return error

    def _commit_error(
        self,
        group_id: str,
        request: CommitRequested,
        keys: Iterable[TopicIndex],
        creator: Hashable | None,
    ) -> ErrorCode:
        if (not group_id and request.generation >= 0) or not are_names(group_id):
            return ErrorCode.INVALID_GROUP_ID
        error = self._served.availability(group_id)
        if error is not ErrorCode.NONE:
            return error
        live = self._served.get(group_id)
        if live is None:
            if request.generation >= 0:
                return (
                    ErrorCode.GROUP_ID_NOT_FOUND
                    if request.knows_epochs and not request.is_transactional
                    else ErrorCode.ILLEGAL_GENERATION
                )
            return ErrorCode.NONE if self._served.may_add(creator) else ErrorCode.POLICY_VIOLATION
        if isinstance(live, LiveConsumerGroup):
            partitions = [(topic.topic_id, i) for n, i in keys if (topic := self._topics.topic(n))]
            return live.commit_error(request, partitions)
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
        error = self._served.availability(group_id)
        if error is ErrorCode.NONE and (request.generation >= 0 or names_member):
            request = replace(request, is_transactional=True)
            error = self._commit_error(group_id, request, offsets, creator)
            if error is ErrorCode.STALE_MEMBER_EPOCH:  # as in Kafka: producers do not know it
                error = ErrorCode.ILLEGAL_GENERATION
        if not group_id:
            error = ErrorCode.INVALID_GROUP_ID
        if error is not ErrorCode.NONE or not offsets:
            return error
        live = self._served.get(group_id)
        if live is not None and live.is_dead:  # no record may follow its tombstones
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        transaction = self._served.partition_of(group_id), producer.producer_id
        group_ids = self._transactional.get(transaction, ())
        if len(group_ids) >= GROUPS_PER_TRANSACTION_MAX and group_id not in group_ids:
            return ErrorCode.POLICY_VIOLATION
        if not self._served.may_commit(group_id, offsets, creator):
            return ErrorCode.POLICY_VIOLATION
        if live is None:
            if not self._served.may_add(creator):
                return ErrorCode.POLICY_VIOLATION
            live = self._factory.create_classic(group_id, creator)
        pending = live.offsets.transactional
        if len(pending) >= TRANSACTIONS_PER_GROUP_MAX and producer.producer_id not in pending:
            return ErrorCode.POLICY_VIOLATION
        append = live.offsets.add_transactional(producer.producer_id, offsets)
        self._transactional[transaction].add(group_id)
        self._served.own_offsets(group_id, creator)
        self._served.note_offsets(live)

        def appended(error: ErrorCode) -> None:
            if error is not ErrorCode.NONE:
                live.offsets.remove_transactional(producer.producer_id, append, offsets)
                self._served.note_offsets(live)

        records = _offset_records(group_id, offsets)
        too_large = ErrorCode.INVALID_COMMIT_OFFSET_SIZE
        error = await self._log.append(
            group_id, records, appended, too_large=too_large, producer=producer
        )
        self._served.remove_if_void(live)
        return error

    def end_transaction(self, partition: int, producer_id: int, *, commit: bool) -> None:
        """Apply or drop the offsets of a transaction whose marker is in the log.

        If there are many, the rest of them follows in turns of the event loop, and is unstable
        until then.
        """
        ended = {}
        for group_id in self._transactional.pop((partition, producer_id), ()):
            live = self._served.get(group_id)
            if live is not None:
                slices = live.offsets.end_transaction(
                    producer_id, commit=commit, at_once=ENDED_AT_ONCE
                )
                ended[group_id] = live.offsets, slices
        all_slices = self._end(ended)
        for _ in all_slices:  # there are more
            task = asyncio.create_task(self._end_in_turns(all_slices), name="end transaction")
            self._ending_tasks.add(task)
            task.add_done_callback(self._ending_tasks.discard)
            break

    def _end(
        self, ended: Mapping[str, tuple[CommittedOffsets, Generator[None, None, int]]]
    ) -> Generator[None, None, None]:
        for number, (group_id, (offsets, slices)) in enumerate(ended.items()):
            if number:
                yield
            self._stats.offsets_committed += yield from slices
            live = self._served.get(group_id)
            if live is not None and live.offsets is offsets:  # else it has been deleted meanwhile
                self._served.note_offsets(live)
                self._served.remove_if_void(live)

    async def _end_in_turns(self, slices: Generator[None, None, None]) -> None:
        async with self._ending:
            await run_in_turns(slices)

    def note_loaded(self, partition: int, group_id: str, offsets: CommittedOffsets) -> None:
        """Note the open transactions of a group that was loaded."""
        for producer_id in offsets.transactional:
            self._transactional[partition, producer_id].add(group_id)

    def note_unloaded(self, partition: int, group_id: str, offsets: CommittedOffsets) -> None:
        """Forget the open transactions of a group that is not served any more."""
        for producer_id in offsets.transactional:
            group_ids = self._transactional[partition, producer_id]
            group_ids.discard(group_id)
            if not group_ids:
                del self._transactional[partition, producer_id]

    def is_loading_partition(self, partition: int) -> bool:
        """Return whether the offsets of a partition of __consumer_offsets are being loaded."""
        return self._served.partitions.is_loading(partition)

    def is_unstable(self, group_id: str, key: TopicIndex) -> bool:
        """Return whether an open transaction has committed an offset of a partition."""
        live = self._served.get(group_id)
        return live is not None and live.offsets.is_unstable(key)

    def fetch(self, group_id: str) -> tuple[ErrorCode, Mapping[TopicIndex, CommittedOffset]]:
        """Return the committed offsets of a group; none, without an error, if it does not exist."""
        error = self._served.availability(group_id)
        live = self._served.get(group_id)
        if error is not ErrorCode.NONE or live is None or live.is_dead:
            return error, {}
        return error, live.offsets.acknowledged

    def owner(self, group_id: str) -> Hashable | None:
        """Return the principal for which the offsets of a group count; None for nobody."""
        return self._served.offsets_owner(group_id)

    def fetch_stable(
        self, group_id: str, key: TopicIndex
    ) -> tuple[ErrorCode, CommittedOffset | None]:
        """Return the committed offset of a partition, unless an open transaction may change it.

        UNSTABLE_OFFSET_COMMIT: one has committed another offset (KIP-447).
        """
        error, offsets = self.fetch(group_id)
        if error is ErrorCode.NONE and self.is_unstable(group_id, key):
            error = ErrorCode.UNSTABLE_OFFSET_COMMIT
        return error, None if error else offsets.get(key)

    def fetch_error(self, group_id: str, member_id: str | None, epoch: int) -> ErrorCode:
        """Return NONE if a client may fetch offsets as this member (OffsetFetch 9 and later)."""
        live = self._served.get(group_id)
        if not isinstance(live, LiveConsumerGroup) or (member_id is None and epoch < 0):
            return ErrorCode.NONE
        return live.fetch_error(member_id or "", epoch)

    def committed_in(self, topic: str, partition: int) -> Iterator[tuple[str, int]]:
        """Yield each group with a committed offset for a partition, and that offset."""
        for live in self._served:
            committed = live.offsets.acknowledged.get((topic, partition))
            if committed is not None:
                offset, *_ = committed
                yield live.group.group_id, offset


def _offset_records(
    group_id: str, offsets: Mapping[TopicIndex, CommittedOffset]
) -> list[LogRecord]:
    return [
        (encode_offset_key(OffsetKey(group_id, *key)), encode_offset_value(value))
        for key, value in offsets.items()
    ]
