"""Decide which partition folders are served, and why others are not; pure.

Rules
- A partition in the metadata is served from the directory that the metadata names. While that
  directory is offline the partition is offline, even if another folder exists: it is never
  recreated.
- If the named directory is online without the folder, and another directory has it, an operator
  moved it: the move is accepted.
- If several directories have an unknown partition with records, one of them is an older copy. Kafka
  does not start then, and here the partition is offline until one folder is left.
- If a partition has two folders, the second one is removed if it is empty: a creation that was
  given up because the disk hung has left it. A second folder with records is refused and not
  touched, unless the metadata says that the replica moves. Then the folder in the target directory
  is the replica, and the one in the source directory is removed. While the target is offline, it is
  unknown which folder is the replica.
- An unknown folder is taken over, with the topic id in it. If the folders of a topic have several
  ids, the one that Kafka's metadata names counts, otherwise the first. Further partitions of its
  topic, which Kafka's metadata names or which are missing in the sequence of the numbers, are
  offline. With too few partitions, a hash modulo their number would lead to the wrong one.
- At the first start, the partitions of a topic in Kafka's metadata that has no folder are offline.
- An unreadable folder is offline if the metadata names its directory, otherwise refused. It is not
  touched, and no other folder replaces it.
- A folder of a deleted topic is removed, and so is an empty folder of an unknown partition of a
  known topic, which an interrupted creation leaves.

storage/manager/partition_creation.py chooses the directories of new partitions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from storage.directory.cluster_metadata import NO_DIRECTORY, ClusterMetadata, TopicEntry
from storage.directory.kafka_metadata import KafkaTopic
from storage.model import TopicPartition

# `TopicEntry.created_by` of topics from folders that another broker wrote. The stored metadata has
# this word for it, so it stays.
TAKEN_OVER: Final = "adopted"
GAPS_MAX: Final = 10_000  # missing numbers; with more, a folder has a wrong name


class FoundFolder(NamedTuple):
    """A partition folder in an online directory. `topic_id` is None if it has none."""

    partition: TopicPartition
    directory_id: str
    topic_id: bytes | None
    has_records: bool
    problem: str | None = None  # why it is unreadable


@dataclass(slots=True)
class Placement:
    """The decisions about all folders."""

    metadata: ClusterMetadata  # including taken_over and moved partitions
    serve: list[FoundFolder] = field(default_factory=list)
    remove: list[FoundFolder] = field(default_factory=list)
    refused: list[tuple[FoundFolder, str]] = field(default_factory=list)
    offline: dict[TopicPartition, str] = field(default_factory=dict)
    taken_over: list[TopicPartition] = field(default_factory=list)


def place_partitions(
    found_folders: Sequence[FoundFolder],
    metadata: ClusterMetadata,
    online: Mapping[str, str],
    new_topic_ids: Sequence[bytes],
    now_ms: int,
    *,
    kafka_topics: Mapping[str, KafkaTopic] = MappingProxyType({}),
    is_new: bool = False,
    all_online: bool = True,
) -> Placement:
    """Return the placement. `online`: directory id -> path. `new_topic_ids`: one per folder, for
    topics taken over without an id. `kafka_topics`: those in Kafka's metadata. `is_new`: it is the
    first start. `all_online`: no data directory is offline."""
    placement = Placement(metadata)
    fresh_ids = iter(new_topic_ids)
    by_partition: dict[TopicPartition, list[FoundFolder]] = {}
    topic_ids: dict[str, list[bytes]] = {}  # in the folders
    for folder in found_folders:
        if folder.topic_id is not None and folder.topic_id in metadata.deleted_topic_ids:
            placement.remove.append(folder)
        else:
            by_partition.setdefault(folder.partition, []).append(folder)
    for partition, folders in sorted(by_partition.items()):
        for folder in folders:
            if folder.topic_id is not None:
                topic_ids.setdefault(partition.topic, []).append(folder.topic_id)
    for partition, folders in sorted(by_partition.items()):
        name = partition.topic
        entry = placement.metadata.topics.get(name)
        if entry is None:
            if all(folder.problem is not None for folder in folders):
                placement.refused += [(folder, folder.problem or "") for folder in folders]
                continue
            topic_id = _choose_topic_id(topic_ids.get(name, []), kafka_topics.get(name), fresh_ids)
            # The partition itself is added below.
            entry = TopicEntry(topic_id, {}, {}, TAKEN_OVER, now_ms)
            placement.metadata = placement.metadata.with_topic(name, entry)
        _settle(placement, partition, folders, entry, online, all_online=all_online)
    if is_new:
        _add_topics(placement, kafka_topics, online, now_ms)
    _add_missing(placement, metadata, kafka_topics, online)
    _miss(placement, online)
    return placement


def _add_topics(
    placement: Placement,
    kafka_topics: Mapping[str, KafkaTopic],
    online: Mapping[str, str],
    now_ms: int,
) -> None:
    """Add the topics of Kafka without a folder. A directory that has them can be named later."""
    entries = {
        name: TopicEntry(
            topic.topic_id,
            dict.fromkeys(sorted(topic.partitions), next(iter(online))),
            created_by=TAKEN_OVER,
            created_ms=now_ms,
        )
        for name, topic in kafka_topics.items()
        if topic.partitions and name not in placement.metadata.topics
    }
    placement.metadata = placement.metadata.with_topics(entries)


def _add_missing(
    placement: Placement,
    before: ClusterMetadata,
    kafka_topics: Mapping[str, KafkaTopic],
    online: Mapping[str, str],
) -> None:
    """Add the partitions without a folder to the topics that are taken over."""
    for name, entry in placement.metadata.topics.items():
        if name in before.topics or not entry.partitions:
            continue
        kafka_topic = kafka_topics.get(name)
        expected: set[int] = set()
        if kafka_topic is not None and kafka_topic.topic_id == entry.topic_id:
            expected.update(kafka_topic.partitions)
        last = max(entry.partitions)
        if last - len(entry.partitions) < GAPS_MAX:
            expected.update(range(last))
        absent = sorted(expected - entry.partitions.keys())
        chosen = entry.partitions[min(entry.partitions)]
        directory_id = next(iter(online)) if chosen == NO_DIRECTORY else chosen
        if absent:
            partitions = {**dict.fromkeys(absent, directory_id), **entry.partitions}
            changed = replace(entry, partitions=partitions)
            placement.metadata = placement.metadata.with_topic(name, changed)


def _choose_topic_id(
    ids: Sequence[bytes], kafka_topic: KafkaTopic | None, new_ids: Iterator[bytes]
) -> bytes:
    """Return the id of an unknown topic whose folders have these ids."""
    if kafka_topic is not None and (not ids or kafka_topic.topic_id in ids):
        return kafka_topic.topic_id
    return ids[0] if ids else next(new_ids)


# One branch for each way in which folders and checkpoints can disagree.
def _settle(  # noqa: C901, PLR0912
    placement: Placement,
    partition: TopicPartition,
    folders: list[FoundFolder],
    entry: TopicEntry,
    online: Mapping[str, str],
    *,
    all_online: bool,
) -> None:
    local = []
    for folder in folders:
        if folder.topic_id is not None and folder.topic_id != entry.topic_id:
            placement.refused.append((folder, "it belongs to another topic of that name"))
        else:
            local.append(folder)
    if not local:
        return
    entry, local = _settle_move(placement, partition, local, entry, online)
    if not local:
        return
    directory_id = entry.partitions.get(partition.partition, NO_DIRECTORY)
    readable = []
    for folder in local:
        if folder.problem is None:
            readable.append(folder)
        elif folder.directory_id == directory_id:
            placement.offline[partition] = folder.problem
        else:
            placement.refused.append((folder, folder.problem))
    if partition in placement.offline:
        placement.refused += [(folder, "its own folder cannot be used") for folder in readable]
        return
    local = readable
    if not local:
        return
    chosen = next((folder for folder in local if folder.directory_id == directory_id), None)
    is_unknown = directory_id == NO_DIRECTORY
    if chosen is None and not is_unknown and directory_id not in online:
        for folder in local:
            placement.refused.append((folder, "its own data directory is offline"))
        return
    if partition.partition in entry.partitions and is_unknown and not all_online:
        placement.offline[partition] = (
            "two data directories had a folder of it with records; start with all of them online,"
            " or move the older one away"
        )
        placement.refused += [(folder, "another directory may have it too") for folder in local]
        return
    if chosen is None and is_unknown and entry.created_by != TAKEN_OVER:
        empty = [folder for folder in local if not folder.has_records]
        placement.remove.extend(empty)
        local = [folder for folder in local if folder.has_records]
        if not local:
            return
    if chosen is None:
        claims = [folder for folder in local if folder.has_records] or local[:1]
        directory_id = claims[0].directory_id if len(claims) == 1 else NO_DIRECTORY
        placement.metadata = placement.metadata.with_placement(
            partition.topic, partition.partition, directory_id
        )
        if directory_id == NO_DIRECTORY:
            paths = " and ".join(online[folder.directory_id] for folder in claims)
            placement.offline[partition] = (
                f"{paths} each have a folder of it with records: move the older one away and"
                " restart"
            )
            placement.refused += [(folder, "another directory has it too") for folder in local]
            return
        chosen = claims[0]
        placement.taken_over.append(partition)
    placement.serve.append(chosen)
    for folder in local:
        if folder is chosen:
            continue
        if not folder.has_records:
            placement.remove.append(folder)
        else:
            placement.refused.append((folder, f"{online[chosen.directory_id]} has it too"))


def _settle_move(
    placement: Placement,
    partition: TopicPartition,
    folders: list[FoundFolder],
    entry: TopicEntry,
    online: Mapping[str, str],
) -> tuple[TopicEntry, list[FoundFolder]]:
    """Decide a move that a crash interrupted; return the entry and the folders that are left."""
    index = partition.partition
    if index not in entry.moves:
        return entry, folders
    source, target = entry.moves[index]
    moved = [folder for folder in folders if folder.directory_id == target]
    is_moved = bool(moved) or entry.partitions.get(index) == target
    if not is_moved and target not in online:
        placement.offline[partition] = (
            f"it was being moved to data directory {target}, which is offline"
        )
        return entry, []
    metadata = placement.metadata
    if is_moved:
        old = [folder for folder in folders if folder.directory_id == source]
        if moved:
            placement.remove += old
        else:  # without the newer replica, this one is the last: keep its files
            placement.refused += [(folder, f"it was moved to {target}") for folder in old]
        folders = [folder for folder in folders if folder.directory_id != source]
        metadata = metadata.with_placement(partition.topic, index, target)
    if not is_moved or (moved and source in online):
        metadata = metadata.without_move(partition.topic, index)
    placement.metadata = metadata
    return metadata.topics[partition.topic], folders


def _miss(placement: Placement, online: Mapping[str, str]) -> None:
    """Handle known partitions without a folder."""
    served = {folder.partition for folder in placement.serve}
    elsewhere = {folder.partition: folder.directory_id for folder, _ in placement.refused}
    refused = {(folder.partition, folder.directory_id): why for folder, why in placement.refused}
    for name, entry in placement.metadata.topics.items():
        for index, directory_id in entry.partitions.items():
            partition = TopicPartition(name, index)
            if partition not in served and partition not in placement.offline:
                where, refusal = online.get(directory_id), refused.get((partition, directory_id))
                if where is not None and refusal is not None:
                    reason = f"the folder of its name in {where} is not served: {refusal}"
                elif where is not None:
                    reason = f"its folder is missing in {where}"
                elif directory_id == NO_DIRECTORY:
                    reason = "no data directory has a folder of it that can be used"
                elif partition in elsewhere:
                    other = online[elsewhere[partition]]
                    reason = (
                        f"its data directory {directory_id} is offline; its folder is in {other},"
                        f" whose meta.properties has directory.id={elsewhere[partition]}. If"
                        f" {other} is that directory, write directory.id={directory_id} there and"
                        " restart"
                    )
                else:
                    reason = f"its data directory {directory_id} is offline"
                placement.offline[partition] = reason
