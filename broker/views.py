"""Compacted views as clients see them: read-only topics named `<topic>.compacted`.

Rules
- A view is there exactly as long as its topic is and has `varve.view: compacted`. Nothing else
  stores that it exists; a topic that has its name already takes it away.
- Its partitions are those of the topic: same numbers, same leader epochs, same offsets. What is
  below the horizon comes from the ledger (storage/view_log.py).
- Its topic id follows from the topic's, so that it is the same after a restart.
- It is read only. Groups may commit offsets for it.
"""

import hashlib
from collections.abc import Iterator
from typing import Final

import structlog

from broker.partition import Partition, Waker
from broker.protocol.errors import ErrorCode
from broker.stats import BrokerStats, TopicStats
from broker.topics import Topic, Topics
from config.topic_keys import TopicConfig, TopicLayers
from config.topic_names import RESERVED_SUFFIX, view_hindrance, view_name
from storage.env import Env
from storage.errors import InvalidViewError
from storage.log import index_limits
from storage.model import TopicPartition
from storage.view_ledger import Ledger, open_ledger
from storage.view_log import ViewCursor, ViewLog

READ_ONLY: Final = "a compacted view is read only; produce to the topic itself"
_ID_SALT: Final = b"varve compacted view"

log = structlog.get_logger("broker.views")


def view_id(topic_id: bytes) -> bytes:
    """The 16-byte id of the view of a topic."""
    return hashlib.sha256(_ID_SALT + topic_id).digest()[:16]


class ViewPartition:
    """One partition of a view, read through `log`; everything else is the partition's below."""

    def __init__(self, base: Partition, stats: TopicStats) -> None:
        self.base = base
        self.partition = TopicPartition(view_name(base.partition.topic), base.partition.partition)
        self.log = ViewLog(base.log)
        self.stats = stats

    def add_waiter(self, waker: Waker) -> None:
        """As Partition.add_waiter: the readable end is the same."""
        self.base.add_waiter(waker)

    def remove_waiter(self, waker: Waker) -> None:
        """As Partition.remove_waiter."""
        self.base.remove_waiter(waker)


class ViewTopic:
    """The view of one topic, in the shape of a topic."""

    is_internal: Final = False

    def __init__(self, base: Topic) -> None:
        self.base = base
        self.name = view_name(base.name)
        self.topic_id = view_id(base.topic_id)
        self.partitions: dict[int, ViewPartition] = {}

    @property
    def offline(self) -> dict[int, str]:
        """Partitions that are not served, with the reason."""
        return self.base.offline

    @property
    def partition_count(self) -> int:
        """As many as the topic has."""
        return self.base.partition_count

    @property
    def layers(self) -> TopicLayers:
        """Settings of the topic that is viewed."""
        return self.base.layers

    @property
    def config(self) -> TopicConfig:
        """Settings of the topic that is viewed."""
        return self.base.config


class Views:
    """All views, made as they are asked for."""

    def __init__(self, env: Env, topics: Topics, stats: BrokerStats) -> None:
        self._env = env
        self._topics = topics
        self._stats = stats
        self._by_name: dict[str, ViewTopic] = {}
        self._by_id: dict[bytes, ViewTopic] = {}

    def __iter__(self) -> Iterator[ViewTopic]:
        for topic in self._topics:
            view = self._view_of(topic)
            if view is not None:
                yield self._complete(view)

    def get(self, name: str) -> ViewTopic | None:
        """The view of that name, with all its partitions."""
        view = self._named(name)
        return None if view is None else self._complete(view)

    def by_id(self, topic_id: bytes) -> ViewTopic | None:
        """The view of that id, with all its partitions."""
        found = self._by_id.get(topic_id)
        return None if found is None else self.get(found.name)

    def partition(self, base: TopicPartition) -> ViewPartition | None:
        """The view of a partition of a topic, by the topic's own name."""
        view = self._named(view_name(base.topic))
        return None if view is None else self._partition_of(view, base.partition)

    def find(self, topic: str | bytes, index: int) -> ViewPartition | ErrorCode:
        """As Topics.find; looks at no other partition, so that a fetch may ask for each of many."""
        by_id = isinstance(topic, bytes)
        known = self._by_id.get(topic) if isinstance(topic, bytes) else None
        name = topic if isinstance(topic, str) else "" if known is None else known.name
        view = self._named(name)
        if view is None:
            unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return ErrorCode.UNKNOWN_TOPIC_ID if by_id else unknown
        found = self._partition_of(view, index)
        if found is not None:
            return found
        offline = index in view.offline
        return ErrorCode.KAFKA_STORAGE_ERROR if offline else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def limit_of(self, base: Partition) -> int:
        """From which offset on the topic's own cleaner has to leave things as they are.

        It would take tombstones that the view has not seen. Without a ledger nothing is carried
        over, and the log alone is complete; but only by offset: what the cleaner takes may be what
        another strategy calls the latest.
        """
        config = base.log.config
        view = self.partition(base.partition) if config.has_view else None
        if view is None:
            return base.log.log_end_offset
        if view.log.ledger is None:
            is_by_offset = config.varve_view_strategy == "offset"
            return base.log.log_end_offset if is_by_offset else base.log.log_start_offset
        return view.log.horizon

    def hindrance(self, topic: Topic) -> str | None:
        """Why a topic that asks for a view has none, in words."""
        name = view_name(topic.name)
        return view_hindrance(topic.name, (name,) if self._topics.get(name) else ())

    def _view_of(self, topic: Topic) -> ViewTopic | None:
        if not topic.config.has_view or self.hindrance(topic) is not None:
            self._forget(view_name(topic.name))
            return None
        view = self._by_name.get(view_name(topic.name))
        if view is None or view.base is not topic:
            view = ViewTopic(topic)
            self._by_name[view.name] = view
            self._by_id[view.topic_id] = view
        return view

    def _named(self, name: str) -> ViewTopic | None:
        if not name.endswith(RESERVED_SUFFIX):
            return None
        topic = self._topics.get(name.removesuffix(RESERVED_SUFFIX))
        return None if topic is None else self._view_of(topic)

    def _complete(self, view: ViewTopic) -> ViewTopic:
        """Bring the partitions of a view up to date."""
        for index in view.partitions.keys() | view.base.partitions.keys():
            self._partition_of(view, index)
        return view

    def _partition_of(self, view: ViewTopic, index: int) -> ViewPartition | None:
        base = view.base.partitions.get(index)
        known = view.partitions.get(index)
        if base is None:
            view.partitions.pop(index, None)
            return None
        if known is None or known.base is not base:
            known = view.partitions[index] = self._open(view.name, base)
        return known

    def _forget(self, name: str) -> None:
        view = self._by_name.pop(name, None)
        if view is not None:
            self._by_id.pop(view.topic_id, None)
            self._stats.drop_topic(name)

    def _open(self, name: str, base: Partition) -> ViewPartition:
        """A view's partition with what is on the disk; a few small reads, once for each."""
        opened = ViewPartition(base, self._stats.topics[name])
        try:
            opened.log.ledger = self.load(base)
        except InvalidViewError as error:
            opened.log.failure = error
            log.error("view cannot be used", partition=str(base.partition), reason=str(error))
        except OSError as error:
            opened.log.failure = InvalidViewError(base.log.directory, str(error))
            log.error("view cannot be read", partition=str(base.partition), reason=str(error))
        return opened

    def load(self, base: Partition) -> Ledger | None:
        """The ledger on the disk, checked against its log. Raises InvalidViewError, OSError."""
        one = base.log
        found = open_ledger(self._env, one.directory, one.topic_id, index_limits(one.config))
        if found is not None and found.horizon > one.log_end_offset:
            raise InvalidViewError(
                one.directory,
                f"its horizon is {found.horizon}, behind the log's end, {one.log_end_offset}",
            )
        return found


Cursors = dict[TopicPartition, ViewCursor]  # of one connection


def cursor_of(cursors: Cursors, view: ViewPartition) -> ViewCursor:
    """The way of one connection through a view; kept from one fetch to the next."""
    cursor = cursors.get(view.partition)
    if cursor is None or not cursor.is_of(view.log):
        cursor = cursors[view.partition] = ViewCursor(view.log)
    return cursor
