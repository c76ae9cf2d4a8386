"""Writes the markers that end a transaction to its partitions.

Rules
- A marker is acknowledged as acks=all is on its partition. It is never written twice: after a
  restart, only partitions on which the transaction is still open get one.
- Offsets that were committed in the transaction take effect with the marker of their partition of
  __consumer_offsets. The marker waits until the groups of that partition are loaded.
"""

from collections.abc import Callable
from typing import Protocol

from broker.groups.offsets.offsets_store import OFFSETS_TOPIC
from broker.topics.end_transaction import append_marker, has_open_transaction
from broker.topics.producer_ids import Producer
from broker.topics.topics import Topics
from storage.errors import OfflinePartitionError
from storage.format.batch import ControlType
from storage.model import TopicPartition


class TransactionalOffsets(Protocol):
    """The part of the group coordinator that keeps offsets of open transactions."""

    def is_loading_partition(self, partition: int) -> bool:
        """Return whether a partition of __consumer_offsets is being loaded."""
        ...

    def end_transaction(self, partition: int, producer_id: int, *, commit: bool) -> None:
        """Apply or drop the offsets of a transaction, whose marker is in the log."""
        ...


class MarkerWriter:
    """Appends markers to the partitions of this broker."""

    def __init__(
        self, topics: Topics, offsets: TransactionalOffsets, wall_ms: Callable[[], int]
    ) -> None:
        self._topics = topics
        self._offsets = offsets
        self._wall_ms = wall_ms

    async def write(
        self, partition: TopicPartition, producer: Producer, *, commit: bool, only_if_open: bool
    ) -> None:
        """Append a marker and wait for its acknowledgement. A deleted partition needs none.

        `only_if_open`: only if the producer has a transaction open there. Raises StorageError.
        """
        served = self._topics.partition(partition)
        if served is None:
            topic = self._topics.get(partition.topic)
            if topic is None or partition.partition >= topic.partition_count:
                return
            raise OfflinePartitionError(partition, "its marker cannot be written")
        has_offsets = partition.topic == OFFSETS_TOPIC
        if has_offsets and self._offsets.is_loading_partition(partition.partition):
            raise OfflinePartitionError(partition, "its groups are being loaded")
        if only_if_open and not has_open_transaction(served, producer.producer_id):
            return
        kind = ControlType.COMMIT if commit else ControlType.ABORT
        info = await append_marker(served, producer, kind, self._wall_ms())
        if not served.is_acked(info):
            await served.wait_flushed(info.last_offset + 1)
        if has_offsets:
            self._offsets.end_transaction(partition.partition, producer.producer_id, commit=commit)
