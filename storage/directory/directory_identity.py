"""Rebuild the identity of a data directory whose `meta.properties` is lost.

Rules
- A directory without data gets a new identity. A directory with partitions or a `varve.metadata`
  had an identity, and another cluster or directory id would detach its partitions from their
  metadata. So its identity is rebuilt, or the start is refused with instructions.
- Every copy of `varve.metadata` contains the cluster and node id, and so does the `meta.properties`
  of the other directories.
- The directory id is the one under which the metadata lists the partitions of this directory.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from storage.directory.cluster_metadata import FILE_NAME, ClusterMetadata, decode_metadata
from storage.env import Env
from storage.errors import LostIdentityError, StorageError
from storage.format import filenames
from storage.format.checkpoints import MetaProperties
from storage.format.filenames import DirectoryKind
from storage.model import TopicPartition

REMEDY = (
    "Restore the file, or write one with the lines `version=1`, `cluster.id=<id>` and"
    " `node.id=<number>` that the cluster had"
)


@dataclass(frozen=True, slots=True)
class LostIdentity:
    """A directory without a valid `meta.properties`, and the reason."""

    path: str
    reason: str
    partitions: frozenset[TopicPartition]


def partitions_in(env: Env, directory: str) -> frozenset[TopicPartition]:
    """Return the partitions that have a folder in a data directory. Raises OSError."""
    names = [
        name
        for name in env.listdir(directory)
        if filenames.kind_of_dir(name) is DirectoryKind.PARTITION
        and env.is_dir(os.path.join(directory, name))
    ]
    return frozenset(filter(None, map(filenames.parse_partition_dir, names)))


def newest_metadata(env: Env, directories: Iterable[str]) -> ClusterMetadata | None:
    """Return the readable copy of the metadata with the highest epoch, None without one.

    It serves for ids only; MetadataStore decides whether the broker may start from it.
    """
    copies = []
    for directory in directories:
        path = os.path.join(directory, FILE_NAME)
        try:
            copies.append(decode_metadata(env.read_file(path), path))
        except (OSError, StorageError):
            continue
    return max(copies, key=lambda copy: copy.epoch, default=None)


def recover_identity(
    lost: LostIdentity,
    metadata: ClusterMetadata | None,
    *,
    cluster_id: str | None,
    node_id: int | None,
    others: Collection[str | None],
) -> MetaProperties:
    """Return the lost `meta.properties` of a directory with data; pure.

    `cluster_id` and `node_id` come from the other directories or the configuration; `others` are
    the ids of the other directories. Raises LostIdentityError if the cluster is unknown.
    """
    if metadata is not None:
        cluster_id = cluster_id or metadata.cluster_id
        node_id = metadata.node_id if node_id is None else node_id
    if cluster_id is None or node_id is None:
        path = os.path.join(lost.path, filenames.META_PROPERTIES)
        raise LostIdentityError(path, lost.reason, REMEDY)
    return MetaProperties(cluster_id, node_id, _directory_id(lost, metadata, others))


def _directory_id(
    lost: LostIdentity, metadata: ClusterMetadata | None, others: Collection[str | None]
) -> str | None:
    placement: Counter[str] = Counter()
    for partition in lost.partitions:
        entry = metadata.topics.get(partition.topic) if metadata is not None else None
        directory_id = entry.partitions.get(partition.partition) if entry is not None else None
        if directory_id and directory_id not in others:
            placement[directory_id] += 1
    return max(placement, key=lambda each: (placement[each], each), default=None)
