"""The topics and views that consumer groups can subscribe to."""

from collections.abc import Iterable

from broker.groups.consumer.model import TopicMetadata
from broker.topics.topics import Topics
from broker.views.views import Views


class SubscribableTopics:
    """Looks up topics and views for the assignors of consumer groups."""

    def __init__(self, topics: Topics, views: Views) -> None:
        self._topics = topics
        self._views = views

    def topic(self, name: str) -> TopicMetadata | None:
        """Return the topic or view with this name; None if there is none."""
        topic = self._topics.get(name) or self._views.get(name)
        return None if topic is None else TopicMetadata(name, topic.topic_id, topic.partition_count)

    def names(self) -> Iterable[str]:
        """Return the names of all topics; an expression matches no view."""
        return (topic.name for topic in self._topics)
