"""The registry of topics and partitions: what requests look up.

Rules. The registry holds topics that exist completely; a topic is added when all its partitions are
ready. Only broker/topics/metadata_service.py adds, changes and removes topics.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from broker.topics.partition import Partition
from broker.topics.partition_rows import PartitionRows
from config.topics.keys import TopicConfig, TopicLayers
from config.topics.names import INTERNAL_TOPICS, RESERVED_SUFFIX
from protocol.errors import ErrorCode
from storage.errors import OfflinePartitionError
from storage.model import TopicPartition


class TopicError(Exception):
    """A refused request about a topic; `code` and the text go to the client."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(slots=True)
class Topic:
    """One topic. Each partition is either served or offline with a reason."""

    name: str
    topic_id: bytes
    layers: TopicLayers
    config: TopicConfig
    partitions: dict[int, Partition] = field(default_factory=dict)
    offline: dict[int, str] = field(default_factory=dict)
    rows: PartitionRows = field(default_factory=PartitionRows, compare=False, repr=False)

    @property
    def partition_count(self) -> int:
        """Return the number of partitions, served or not."""
        if not self.offline:  # the common case, also of topics with thousands of partitions
            return len(self.partitions)
        return len(self.partitions.keys() | self.offline.keys())

    @property
    def is_internal(self) -> bool:
        """Return whether this is one of Kafka's own topics."""
        return self.name in INTERNAL_TOPICS


class Topics:
    """All topics of this broker, by name and id."""

    def __init__(self) -> None:
        self._by_name: dict[str, Topic] = {}
        self._by_id: dict[bytes, Topic] = {}

    def __iter__(self) -> Iterator[Topic]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Topic | None:
        """Return the topic with this name."""
        return self._by_name.get(name)

    def by_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic with this id."""
        return self._by_id.get(topic_id)

    def existing(self, name: str) -> Topic:
        """Return the topic with this name. Raises TopicError."""
        topic = self._by_name.get(name)
        if topic is None:
            raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        return topic

    def partitions(self) -> Iterator[Partition]:
        """Yield every partition that is served."""
        for topic in self:
            yield from tuple(topic.partitions.values())

    def partition(self, partition: TopicPartition) -> Partition | None:
        """Return a partition if it is served."""
        topic = self._by_name.get(partition.topic)
        return topic.partitions.get(partition.partition) if topic else None

    def readable_end(self, topic: str, index: int) -> int | None:
        """Return the end offset for readers of a topic or of its view; None if it is not served."""
        partition = self.partition(TopicPartition(topic.removesuffix(RESERVED_SUFFIX), index))
        return None if partition is None else partition.log.high_watermark

    def find(self, topic: str | bytes, index: int) -> Partition | ErrorCode:
        """Return a served partition of a topic by name or id, or why it cannot be served."""
        if isinstance(topic, bytes):
            result, unknown = self._by_id.get(topic), ErrorCode.UNKNOWN_TOPIC_ID
        else:
            result, unknown = self._by_name.get(topic), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if result is None:
            return unknown
        partition = result.partitions.get(index)
        if partition is not None:
            return partition
        is_offline = index in result.offline
        return ErrorCode.KAFKA_STORAGE_ERROR if is_offline else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def add(self, topic: Topic) -> None:
        """Make a topic visible, or keep one that is."""
        self._by_name[topic.name] = topic
        self._by_id[topic.topic_id] = topic

    def remove(self, topic: Topic) -> None:
        """Forget a deleted topic. Requests may still wait for its partitions."""
        del self._by_name[topic.name]
        del self._by_id[topic.topic_id]

    def take_offline(self, partitions: Iterable[TopicPartition], reason: str) -> None:
        """Stop serving partitions whose data directory or folder failed."""
        for topic_partition in partitions:
            topic = self._by_name.get(topic_partition.topic)
            if topic is None:
                continue
            topic.offline[topic_partition.partition] = reason
            partition = topic.partitions.pop(topic_partition.partition, None)
            if partition is not None:
                partition.fail_waiters(OfflinePartitionError(topic_partition, reason))
