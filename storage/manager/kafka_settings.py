"""Applies the topic configs of Kafka's metadata to topics whose folders are taken over."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from storage.directory.cluster_metadata import ClusterMetadata
from storage.directory.kafka_metadata import KafkaTopic, read_kafka_topics, settings_to_take
from storage.env import Env
from storage.errors import StorageError
from storage.manager.open_report import NAMED_MAX, LogLines


def take_kafka_settings(
    env: Env, directories: Iterable[str], metadata: ClusterMetadata, names: Collection[str]
) -> tuple[ClusterMetadata, LogLines]:
    """Return the metadata with Kafka's configs of the topics with these names, and log lines."""
    lines: list[tuple[str, dict[str, object]]] = []
    topics: dict[str, KafkaTopic] = {}
    for directory in directories:
        try:
            topics |= read_kafka_topics(env, directory) or {}
        except (OSError, StorageError) as error:
            fields: dict[str, object] = {"directory": directory, "reason": str(error)}
            lines.append(("kafka metadata not read", fields))
    taken: list[str] = []
    refused: list[str] = []
    for name in sorted(names):
        entry, topic = metadata.topics[name], topics.get(name)
        if topic is None or topic.topic_id != entry.topic_id or not topic.configs:
            continue
        settings = settings_to_take(topic)
        metadata = metadata.with_topic(name, replace(entry, dynamic=settings.settings))
        taken.append(name)
        refused += [f"{name}: {reason}" for reason in settings.refused]
    if taken:
        fields = {"topics": len(taken), "names": taken[:NAMED_MAX]}
        lines.append(("topic settings taken from kafka", fields))
    if refused:
        fields = {"settings": len(refused), "reasons": refused[:NAMED_MAX]}
        lines.append(("topic settings of kafka not taken", fields))
    return metadata, tuple(lines)
