"""Look up the topic and partition that a request names; answer when its files fail."""

from collections.abc import Callable

from broker.http.api.requests import ApiError
from broker.topics.partition import Partition
from broker.topics.topics import Topic, Topics
from broker.views.view_partition import ViewPartition
from broker.views.views import Views
from storage.errors import LogDirectoryError, StorageError
from storage.model import TopicPartition


def find_topic(topics: Topics, name: str) -> Topic:
    """Return a topic. Raises ApiError 404."""
    topic = topics.get(name)
    if topic is None:
        raise ApiError(404, f"there is no topic {name[:300]}")
    return topic


def find_partition(topics: Topics, name: TopicPartition) -> Partition | str:
    """Return a served partition, or why it is offline. Raises ApiError 404."""
    topic = find_topic(topics, name.topic)
    partition = topic.partitions.get(name.partition)
    if partition is not None:
        return partition
    if name.partition in topic.offline:
        return topic.offline[name.partition]
    last = topic.partition_count - 1
    raise ApiError(404, f"{topic.name} has no partition {name.partition}; its last one is {last}")


def served_partition(topics: Topics, name: TopicPartition) -> Partition:
    """Return a served partition. Raises ApiError 404, and 409 if it is offline."""
    partition_or_reason = find_partition(topics, name)
    if isinstance(partition_or_reason, str):
        raise ApiError(409, f"{name} is offline: {partition_or_reason}")
    return partition_or_reason


def readable_partition(
    topics: Topics, views: Views, name: TopicPartition
) -> Partition | ViewPartition:
    """Return a served partition of a topic or of a compacted view; errors as above."""
    view = views.find(name.topic, name.partition)
    if name.topic in topics or not isinstance(view, ViewPartition):
        return served_partition(topics, name)
    return view


class LogFailures:
    """Answers requests that failed on the files of a log."""

    def __init__(self, fail_directory: Callable[[LogDirectoryError], None]) -> None:
        self._fail_directory = fail_directory

    def refuse(
        self, partition: Partition | ViewPartition, error: StorageError | OSError
    ) -> ApiError:
        """Return the answer; take the log directory offline if its device failed."""
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            base = partition.base if isinstance(partition, ViewPartition) else partition
            error = base.log.failure(error)
        if isinstance(error, LogDirectoryError):
            self._fail_directory(error)
        return ApiError(409, f"{partition.partition}: {error}")
