"""Applies Kafka's metadata to the cluster metadata when Kafka's folders are taken over.

Rules
- Of several copies of the metadata the one that ends last counts.
- A topic whose folders are taken over gets the configs that Kafka had for it.
- Users, access control lists and quotas are taken together, and only by a broker that has none of
  its own: a mixture would allow what neither broker did.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from storage.directory.cluster_metadata import ClusterMetadata
from storage.directory.kafka_metadata import (
    KafkaTopic,
    MetadataImage,
    read_kafka_metadata,
    settings_to_take,
)
from storage.directory.kafka_security import SecurityImage
from storage.directory.log_directory import LogDirectory
from storage.env import Env
from storage.errors import LogDirectoryError, StorageError
from storage.manager.open_report import NAMED_MAX, LogLines

_NOT_A_FILE = (IsADirectoryError, NotADirectoryError)
_Lines = list[tuple[str, dict[str, object]]]


def read_image(env: Env, directories: Iterable[LogDirectory]) -> tuple[MetadataImage, LogLines]:
    """Return Kafka's newest metadata, empty if no directory has some, and log lines.

    It is complete only if Kafka was the last broker here, stopped cleanly, and left no other copy
    that cannot be read: a broker that served the directory since has topics of its own.

    Raises LogDirectoryError if a disk or its permissions hide the metadata: they may be there at
    the next start, but topics that were taken over without their settings keep none.
    """
    lines: _Lines = []
    newest = MetadataImage()
    for directory in directories:
        try:
            image = read_kafka_metadata(env, directory.path)
        except (StorageError, *_NOT_A_FILE) as error:
            fields: dict[str, object] = {"directory": directory.path, "reason": str(error)}
            lines.append(("kafka metadata not read", fields))
            continue
        except OSError as error:
            raise LogDirectoryError(
                directory.path, f"Kafka's metadata in it cannot be read: {error}"
            ) from error
        if image is not None and image.end_offset >= newest.end_offset:
            newest = image
            newest.is_complete = image.is_complete and directory.was_closed_by_kafka
    newest.is_complete = newest.is_complete and not lines
    return newest, tuple(lines)


def take_kafka_settings(
    image: MetadataImage, metadata: ClusterMetadata, names: Collection[str]
) -> tuple[ClusterMetadata, LogLines]:
    """Return the metadata with Kafka's users, ACLs, quotas and configs of these topics; log lines.

    `names` are the topics that are taken over.
    """
    lines: _Lines = []
    metadata = _take_configs(metadata, names, image.topics(), lines)
    metadata = _take_security(metadata, image.security, lines)
    return metadata, tuple(lines)


def _take_configs(
    metadata: ClusterMetadata,
    names: Collection[str],
    topics: Mapping[str, KafkaTopic],
    lines: _Lines,
) -> ClusterMetadata:
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
        lines.append(
            ("topic settings taken from kafka", {"topics": len(taken), "names": taken[:NAMED_MAX]})
        )
    if refused:
        fields: dict[str, object] = {"settings": len(refused), "reasons": refused[:NAMED_MAX]}
        lines.append(("topic settings of kafka not taken", fields))
    return metadata


def _take_security(
    metadata: ClusterMetadata, security: SecurityImage, lines: _Lines
) -> ClusterMetadata:
    if security.is_empty:
        return metadata
    counts: dict[str, object] = {
        "acls": len(security.acls),
        "users": len(security.scram_users),
        "quotas": len(security.client_quotas),
    }
    if metadata.acls or metadata.scram_users or metadata.client_quotas:
        reason = "this broker has its own; add what is missing with kafka-acls and kafka-configs"
        lines.append(("security settings of kafka not taken", {**counts, "reason": reason}))
        return metadata
    lines.append(("security settings taken from kafka", counts))
    return replace(
        metadata,
        acls=tuple(dict.fromkeys(security.acls.values())),
        scram_users=security.scram_users,
        client_quotas=security.client_quotas,
    )
