"""The parts of the broker and of a connection that handlers of groups use."""

from typing import Protocol

from broker.event_loop.loop_turns import Turns
from broker.groups.coordinator import GroupCoordinator
from broker.groups.offsets.offset_records import CommittedOffset, committed_offset
from broker.groups.offsets.offsets_store import TopicIndex
from broker.groups.topic_regex import TopicViewer
from broker.security.acls import Operation, ResourceType
from broker.security.principal import Principal
from broker.transactions.coordinator import TransactionCoordinator
from protocol.errors import ErrorCode
from protocol.messages import (
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)

UNKNOWN_WAITER = 0  # the coordinator numbers requests


class GroupRequestContext(Protocol):
    """The parts of the broker and of the connection that these handlers use."""

    @property
    def coordinator(self) -> GroupCoordinator:
        """Return the groups of this broker."""
        ...

    @property
    def node_id(self) -> int:
        """Return the id of this broker."""
        ...

    @property
    def host(self) -> str:
        """Return the advertised host."""
        ...

    @property
    def port(self) -> int:
        """Return the advertised port."""
        ...

    @property
    def client_host(self) -> str:
        """Return the address of the client."""
        ...

    async def wait_offsets_topic(self) -> ErrorCode:
        """Create __consumer_offsets if there is none; return NONE if it exists then."""
        ...

    @property
    def transactions(self) -> TransactionCoordinator:
        """Return the transactions of this broker."""
        ...

    async def wait_transaction_topic(self) -> ErrorCode:
        """Create __transaction_state if there is none; return NONE if it exists then."""
        ...

    @property
    def creator(self) -> Principal | None:
        """Return who creates groups; None without authorization."""
        ...

    @property
    def has_consumer_groups(self) -> bool:
        """Return whether the consumer rebalance protocol is in effect (group.version)."""
        ...

    def partition_count(self, topic: str) -> int | None:
        """Return the number of partitions of a topic or view; None if there is none."""
        ...

    def topic_name(self, topic_id: bytes) -> str | None:
        """Return the name of the topic or view with this id; None if there is none."""
        ...

    def topic_id(self, name: str) -> bytes | None:
        """Return the id of the topic or view with this name; None if there is none."""
        ...

    def wall_ms(self) -> int:
        """Return the wall time in milliseconds since 1970."""
        ...

    def may(
        self,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        *,
        is_filter: bool = False,
    ) -> bool:
        """Return whether the client may perform an operation on a resource."""
        ...

    def may_topic(self, operation: Operation, topic: str, *, is_filter: bool = False) -> bool:
        """Return whether the client may perform an operation on a topic."""
        ...

    def may_cluster(self, operation: Operation, *, is_filter: bool = False) -> bool:
        """Return whether the client may perform an operation on the cluster."""
        ...

    def group_operations(self, group_id: str) -> int:
        """Return what the client may do with a group, as bits of Operation."""
        ...

    @property
    def viewer(self) -> TopicViewer:
        """Return which topics the client may describe."""
        ...


def may_read_group(context: GroupRequestContext, group_id: str) -> bool:
    """Return whether the client may be a member of a group."""
    return context.may(Operation.READ, ResourceType.GROUP, group_id)


def client_host(context: GroupRequestContext) -> str:
    """Return the client's address as tools expect it."""
    # Java prints an address without a name with a slash.
    host = context.client_host
    return host if host.startswith("/") else f"/{host}"


class OffsetsToCommit:
    """The offsets of an OffsetCommit or TxnOffsetCommit, and the error of each partition."""

    def __init__(
        self,
        context: GroupRequestContext,
        refusal: ErrorCode,
        expire_timestamp_ms: int,
        now_ms: int,
    ) -> None:
        """`refusal` is the error of all partitions; NONE if the sender may commit to the group."""
        self.errors: dict[TopicIndex, ErrorCode] = {}
        self.offsets: dict[TopicIndex, CommittedOffset] = {}  # those without an error
        self._context = context
        self._refusal = refusal
        self._expire_timestamp_ms = expire_timestamp_ms
        self._now_ms = now_ms

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
