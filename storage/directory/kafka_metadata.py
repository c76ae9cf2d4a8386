"""Read Apache Kafka's metadata log when its folders are taken over: topics, users, ACLs, quotas.

Kafka (KRaft) keeps its metadata in the folder `__cluster_metadata-0` of one data directory: a log
of records, and snapshots `<end offset>-<epoch>.checkpoint`, which are record batches as well. The
value of a record is a frame (version 1), the type and its version, each an unsigned varint, and a
message in Kafka's flexible encoding. The types that matter here are TopicRecord (2), ConfigRecord
(4) and RemoveTopicRecord (9), those of kafka_security.py, all in version 0, and those that bracket
a transaction of the controller (KIP-868), of which only a finished one counts.

Rules
- Read the newest snapshot, then the log after it. If records between them are missing, or a batch
  before the end of the log is damaged, use none of it.
- Ignore a torn end of the log: a killed Kafka leaves one. A snapshot ends with its footer; without
  it, it is incomplete.
- A topic that the records do not name may have been in a lost end of the log. The image is complete
  only if it reaches the last producer snapshot, which Kafka writes at the end of each log when it
  stops, and if no record of a partition has a version that a later Kafka wrote.
- Write nothing, and never prevent the broker from starting.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from config.topics.values import InvalidTopicConfigError, parse_value
from storage.directory.kafka_records import MetadataLogError, ValueReader
from storage.directory.kafka_security import SECURITY_RECORDS, SecurityImage
from storage.env import Env
from storage.errors import CorruptBatchError
from storage.format.batch import ControlType, Record, control_type, iterate_records
from storage.format.filenames import CLUSTER_METADATA_TOPIC, LOG, classify
from storage.model import TopicPartition
from storage.segments.batch_scan import find_batch, scan, verify

FOLDER: Final = f"{CLUSTER_METADATA_TOPIC}-0"
TOPIC_ID_BYTES: Final = 16
FRAME_VERSION: Final = 1
TOPIC_RECORD: Final = 2
PARTITION_RECORD: Final = 3
PARTITION_RECORD_VERSION_MAX: Final = 2  # they all begin with partition and topic id
CONFIG_RECORD: Final = 4
REMOVE_TOPIC_RECORD: Final = 9
TOPIC_RECORDS: Final = frozenset((TOPIC_RECORD, CONFIG_RECORD, REMOVE_TOPIC_RECORD))
BEGIN_TRANSACTION: Final = 23
END_TRANSACTION: Final = 24
ABORT_TRANSACTION: Final = 25
LARGEST_OFFSET: Final = (1 << 63) - 1
TOPIC_RESOURCE: Final = 2  # of ConfigRecord: org.apache.kafka.common.config.ConfigResource.Type
_SNAPSHOT: Final = re.compile(r"([0-9]{20})-([0-9]{10})\.checkpoint", re.ASCII)
_SEGMENT: Final = re.compile(rf"([0-9]{{20}}){re.escape(LOG)}", re.ASCII)


class KafkaTopic(NamedTuple):
    """A topic in Kafka's metadata; `configs` are those set on the topic itself."""

    topic_id: bytes
    configs: Mapping[str, str]
    partitions: frozenset[int] = frozenset()


class TakenSettings(NamedTuple):
    """The configs of a topic that are taken over, and those that are not, with reasons."""

    settings: Mapping[str, str]  # canonical values
    refused: tuple[str, ...]


@dataclass(slots=True)
class MetadataImage:
    """The state after the records so far."""

    topic_ids: dict[str, bytes] = field(default_factory=dict)
    configs: dict[str, dict[str, str]] = field(default_factory=dict)
    partitions: dict[bytes, set[int]] = field(default_factory=dict)  # by topic id
    deleted_ids: set[bytes] = field(default_factory=set)  # of topics that the log removes
    security: SecurityImage = field(default_factory=SecurityImage)
    end_offset: int = 0  # of the last record
    is_complete: bool = False  # no record after the last one was lost, or could not be read
    knows_partitions: bool = True  # no record of a partition has an unknown version
    _pending: list[bytes] | None = None  # values of the open transaction

    def apply(self, value: bytes) -> None:
        """Apply one record. Raises MetadataLogError if it is invalid."""
        reader = ValueReader(value)
        if reader.uvarint() != FRAME_VERSION:
            raise MetadataLogError("a record has a frame of another version")
        kind, version = reader.uvarint(), reader.uvarint()
        if kind == BEGIN_TRANSACTION:
            self._pending = []
        elif kind in (END_TRANSACTION, ABORT_TRANSACTION):
            done, self._pending = self._pending or [], None
            for item in done if kind == END_TRANSACTION else []:
                self.apply(item)
        elif kind in TOPIC_RECORDS | SECURITY_RECORDS or _is_partition(kind, version):
            if version != 0 and kind != PARTITION_RECORD:
                raise MetadataLogError(f"a record of type {kind} has version {version}")
            if self._pending is None:
                self._change(kind, reader)
            else:
                self._pending.append(value)
        elif kind == PARTITION_RECORD:
            self.knows_partitions = False

    def _change(self, kind: int, reader: ValueReader) -> None:
        if kind in SECURITY_RECORDS:
            self.security.change(kind, reader)
        elif kind == TOPIC_RECORD:
            name = reader.text()
            self.topic_ids[name] = reader.take(TOPIC_ID_BYTES)
        elif kind == PARTITION_RECORD:
            index, topic_id = reader.int32(), reader.take(TOPIC_ID_BYTES)
            self.partitions.setdefault(topic_id, set()).add(index)
        elif kind == REMOVE_TOPIC_RECORD:
            deleted = reader.take(TOPIC_ID_BYTES)
            self.deleted_ids.add(deleted)
            self.partitions.pop(deleted, None)
            for name in [name for name, topic_id in self.topic_ids.items() if topic_id == deleted]:
                del self.topic_ids[name]
                self.configs.pop(name, None)
        elif reader.take(1)[0] == TOPIC_RESOURCE:
            topic, key, text = reader.text(), reader.text(), reader.nullable_text()
            settings = self.configs.setdefault(topic, {})
            if text is None:
                settings.pop(key, None)
            else:
                settings[key] = text

    def topics(self) -> dict[str, KafkaTopic]:
        """Return every topic."""
        return {
            name: KafkaTopic(
                topic_id,
                dict(self.configs.get(name, {})),
                frozenset(self.partitions.get(topic_id, ())),
            )
            for name, topic_id in self.topic_ids.items()
        }

    def has_deleted(self, partition: TopicPartition, topic_id: bytes | None) -> bool:
        """Return whether a folder belongs to no topic of Kafka any more.

        Kafka calls it stray. `topic_id`: None if the folder has none.
        """
        if topic_id in self.deleted_ids:
            return True
        if topic_id is None:
            topic_id = self.topic_ids.get(partition.topic, b"")
        return self.is_complete and partition.partition not in self.partitions.get(topic_id, ())


def _is_partition(kind: int, version: int) -> bool:
    return kind == PARTITION_RECORD and version <= PARTITION_RECORD_VERSION_MAX


def read_kafka_metadata(env: Env, directory: str) -> MetadataImage | None:
    """Return Kafka's metadata in a data directory; None where it holds none.

    Raises MetadataLogError, and OSError as it comes.
    """
    folder = f"{directory}/{FOLDER}"
    if not env.is_dir(folder) and not env.is_link(folder):
        return None
    names = env.listdir(folder)  # a broken link fails here: its target may come back
    snapshots = sorted(name for name in names if _SNAPSHOT.fullmatch(name))
    segments = sorted(name for name in names if _SEGMENT.fullmatch(name))
    image, next_offset = MetadataImage(), 0
    if snapshots:
        next_offset = int(snapshots[-1].partition("-")[0])
        path, is_complete = f"{folder}/{snapshots[-1]}", False
        for record in _records(env, path, is_last=False):
            _apply(image, record)
            is_complete = record.is_footer
        if not is_complete:
            raise MetadataLogError(f"{path}: the snapshot is incomplete")
    for name in segments:
        is_last = name == segments[-1]
        for record in _records(env, f"{folder}/{name}", is_last=is_last):
            if record.offset < next_offset:
                continue
            if record.offset > next_offset:
                raise MetadataLogError(f"offset {next_offset} is missing before {name}")
            next_offset += 1
            _apply(image, record)
    image.end_offset = next_offset
    producer_snapshots = classify(names).snapshots
    is_whole = bool(producer_snapshots) and next_offset >= producer_snapshots[-1]
    image.is_complete = is_whole and image.knows_partitions
    return image


def _apply(image: MetadataImage, record: "_Data") -> None:
    if record.value is not None:
        image.apply(record.value)


class _Data(NamedTuple):
    """A record of the metadata log; `value` is None for one of the raft protocol itself."""

    offset: int
    value: bytes | None
    is_footer: bool  # of a snapshot


def _records(env: Env, path: str, *, is_last: bool) -> Iterator[_Data]:
    """Yield the records of one file; `is_last`: a bad batch without one after it is a torn end."""
    file = env.open(path)
    end, position, next_offset = file.size(), 0, 0
    try:
        for batch in scan(file, 0, end, whole=True):
            verify(batch, path)
            for record in iterate_records(batch.buffer, batch.header, batch.at):
                is_control = batch.header.is_control
                yield _Data(
                    record.offset,
                    _value(record, is_control=is_control),
                    is_control and control_type(record) == ControlType.SNAPSHOT_FOOTER,
                )
            position, next_offset = batch.end_position, batch.header.next_offset
    except CorruptBatchError as error:
        later = range(next_offset + 1, LARGEST_OFFSET)
        if not is_last or find_batch(file, position + 1, end, later) < end:
            raise MetadataLogError(f"{path}: {error}") from error
    finally:
        file.close()


def _value(record: Record, *, is_control: bool) -> bytes | None:
    return None if is_control or record.value is None else bytes(record.value)


def settings_to_take(topic: KafkaTopic) -> TakenSettings:
    """Return which of a topic's settings Varve takes over.

    A policy that deletes is taken only together with the topic's own `retention.ms`: otherwise
    Kafka's `server.properties` decides how long records stay, and that file is not read.
    """
    settings: dict[str, str] = {}
    refused: list[str] = []
    for key, raw in sorted(topic.configs.items()):
        try:
            settings[key] = parse_value(key, raw)
        except InvalidTopicConfigError as error:
            refused.append(str(error))
    if "delete" in settings.get("cleanup.policy", "") and "retention.ms" not in settings:
        del settings["cleanup.policy"]
        refused.append("cleanup.policy: it deletes, and the topic has no retention.ms of its own")
    return TakenSettings(settings, tuple(refused))
