"""The offsets of OffsetCommit and TxnOffsetCommit requests."""

from collections.abc import Iterable

from broker.event_loop.loop_turns import Turns
from broker.groups.offsets.offset_records import CommittedOffset, committed_offset
from broker.groups.offsets.offsets_store import TopicIndex
from broker.network.request_context import RequestContext
from broker.security.acls import Operation
from protocol.errors import ErrorCode
from protocol.messages import (
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)


class OffsetsToCommit:
    """The offsets of an OffsetCommit or TxnOffsetCommit, and the error of each partition."""

    def __init__(
        self,
        context: RequestContext,
        refusal: ErrorCode,
        expire_timestamp_ms: int,
        now_ms: int,
    ) -> None:
        """`refusal` is the error of all partitions; NONE if the sender may commit to the group."""
        self.errors: dict[TopicIndex, ErrorCode] = {}
        self.offsets: dict[TopicIndex, CommittedOffset] = {}  # those without an error
        # Those with too much metadata: the group's error, if it has one, precedes this one.
        self._too_large: list[TopicIndex] = []
        self._context = context
        self._refusal = refusal
        self._expire_timestamp_ms = expire_timestamp_ms
        self._now_ms = now_ms

    @property
    def concern_group(self) -> bool:
        """Return whether the group has to check who commits."""
        return bool(self.offsets or self._too_large)

    def refuse(self, keys: Iterable[TopicIndex], error: ErrorCode) -> None:
        """Set the error of the group for offsets, and for those with too much metadata."""
        self.errors.update(dict.fromkeys(keys, error))
        self.errors.update(dict.fromkeys(self._too_large, error))
        self._too_large = []

    async def add(
        self, topic: OffsetCommitRequestTopic | TxnOffsetCommitRequestTopic, turns: Turns
    ) -> None:
        """Check the offsets of a topic, and add them."""
        count = self._context.partition_count(topic.name)
        denied = self._refusal
        if denied is ErrorCode.NONE and not self._context.may_topic(Operation.READ, topic.name):
            denied = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        for partition in topic.partitions:
            await turns.take()
            key = (topic.name, partition.partition_index)
            self.errors[key] = denied or self._error(partition, count)
            if self.errors[key] is ErrorCode.OFFSET_METADATA_TOO_LARGE:
                self._too_large.append(key)
            if self.errors[key] is ErrorCode.NONE:
                self.offsets[key] = committed_offset(
                    partition.committed_offset,
                    partition.committed_leader_epoch,
                    partition.committed_metadata or "",
                    self._now_ms,
                    self._expire_timestamp_ms,
                )

    def _error(
        self,
        partition: OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition,
        count: int | None,
    ) -> ErrorCode:
        if count is None or not 0 <= partition.partition_index < count:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        limit = self._context.coordinator.settings.offset_metadata_max_bytes
        if len(partition.committed_metadata or "") > limit:
            return ErrorCode.OFFSET_METADATA_TOO_LARGE
        return ErrorCode.NONE
