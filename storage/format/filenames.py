"""Build and parse the names of files and folders in a data directory; pure.

The layout is Kafka's. The name of a segment file is its base offset in 20 digits and a suffix. A
second suffix (`.cleaned`, `.swap`, `.deleted`) marks a file that is being added or removed. Of the
names in a partition folder only these are ours: the job id in `<offset>.<kind>.<job id>.cleaned`,
which separates the files of two cleans, the kind `.keys` and CONTENT_IDS, which Kafka ignores. A
name that does not format back to itself is not ours and is left unchanged.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from storage.model import TopicPartition

LOG: Final = ".log"
INDEX: Final = ".index"
TIME_INDEX: Final = ".timeindex"
TXN_INDEX: Final = ".txnindex"
SNAPSHOT: Final = ".snapshot"
SEGMENT_KINDS: Final = (LOG, INDEX, TIME_INDEX, TXN_INDEX)
FILE_KINDS: Final = (*SEGMENT_KINDS, SNAPSHOT)
# The key index of a closed segment (cleaner/engine/selective/key_index.py): no part of a segment's
# files, and removed when the log is opened, unless CONTENT_IDS knows the segment.
KEYS: Final = ".keys"
CONTENT_IDS: Final = "varve.content-ids"  # (storage/segments/content_ids.py)

# The bytes that an operator removed from a segment as damaged: `<offset>.log.<range>.<id>.damaged`.
# They are no part of the log, and only the operator deletes them.
DAMAGED_BYTES: Final = ".damaged"

CLEANED: Final = ".cleaned"
SWAP: Final = ".swap"
DELETED: Final = ".deleted"
TEMPORARY_SUFFIXES: Final = (CLEANED, SWAP, DELETED)

LEADER_EPOCH_CHECKPOINT: Final = "leader-epoch-checkpoint"
PARTITION_METADATA: Final = "partition.metadata"

CLEANER_CHECKPOINT: Final = "cleaner-offset-checkpoint"
RECOVERY_POINT_CHECKPOINT: Final = "recovery-point-offset-checkpoint"
LOG_START_CHECKPOINT: Final = "log-start-offset-checkpoint"
REPLICATION_CHECKPOINT: Final = "replication-offset-checkpoint"
META_PROPERTIES: Final = "meta.properties"
CLEAN_SHUTDOWN: Final = ".kafka_cleanshutdown"
LOCK: Final = ".lock"
DAMAGE: Final = "varve.damage"
PROBE: Final = "varve.probe"  # as a temporary file only

CLUSTER_METADATA_TOPIC: Final = "__cluster_metadata"

LARGEST_OFFSET: Final = (1 << 63) - 1
LARGEST_PARTITION: Final = (1 << 31) - 1
NAME_CHARS_MAX: Final = 255  # of one file name, on the file systems in use

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}", re.ASCII)
_PARTITION_DIR = re.compile(r"([a-zA-Z0-9._-]{1,249})-(0|[1-9][0-9]{0,9})", re.ASCII)
_MARKED_DIR = re.compile(
    r"(?P<topic>[a-zA-Z0-9._-]{0,249})-(?P<partition>[0-9]{1,10})"
    r"\.[0-9a-f]{32}-(?P<kind>delete|future|stray)",
    re.ASCII,
)
_SEGMENT_FILE = re.compile(
    r"([0-9]{20})(\.(?:log|index|timeindex|txnindex|snapshot|keys))"
    r"(?:(?:\.([0-9A-Za-z_-]{1,64}))?(\.cleaned)|(\.swap|\.deleted))?",
    re.ASCII,
)
_RUN_ID = re.compile(r"[0-9A-Za-z_-]{1,64}", re.ASCII)


class DirectoryKind(Enum):
    """The kind of a folder inside a log directory."""

    PARTITION = "partition"
    DELETED = "delete"
    FUTURE = "future"
    STRAY = "stray"
    CLUSTER_METADATA = "cluster metadata"
    UNKNOWN = "unknown"


class SegmentFile(NamedTuple):
    """A parsed file name.

    `kind` is KEYS or in FILE_KINDS, `temporary` is "" or in TEMPORARY_SUFFIXES.
    """

    base_offset: int
    kind: str
    temporary: str = ""
    job_id: str = ""

    @property
    def name(self) -> str:
        """Return the file name this was parsed from."""
        job_id = f".{self.job_id}" if self.job_id else ""
        return f"{self.base_offset:020d}{self.kind}{job_id}{self.temporary}"


@dataclass(frozen=True, slots=True)
class PartitionFiles:
    """The content of a partition folder by kind; offsets are base offsets, ascending."""

    logs: tuple[int, ...]
    indexes: tuple[int, ...]
    time_indexes: tuple[int, ...]
    txn_indexes: tuple[int, ...]
    snapshots: tuple[int, ...]
    keys: tuple[int, ...]
    cleaned: tuple[SegmentFile, ...]
    swaps: tuple[SegmentFile, ...]
    deleted: tuple[SegmentFile, ...]
    others: tuple[str, ...]


def is_legal_topic(name: str) -> bool:
    """Return whether Kafka allows this topic name."""
    return _TOPIC.fullmatch(name) is not None and name not in (".", "..")


def file_name(base_offset: int, kind: str) -> str:
    """Return the name of a published segment file, for example `00000000000000000042.log`."""
    assert 0 <= base_offset <= LARGEST_OFFSET
    assert kind == KEYS or kind in FILE_KINDS
    return f"{base_offset:020d}{kind}"


def cleaned_name(base_offset: int, kind: str, job_id: str) -> str:
    """Return the name of a cleaned file before its publication."""
    assert _RUN_ID.fullmatch(job_id)
    return f"{file_name(base_offset, kind)}.{job_id}{CLEANED}"


def scratch_name(number: int, job_id: str) -> str:
    """Return the name of scratch file `number` of a clean, which is never synced or published.

    It is the name of a cleaned file of a kind that no cleaned segment has, so that the removal of a
    clean's files removes it as well.
    """
    return cleaned_name(number, SNAPSHOT, job_id)


def parse_file_name(name: str) -> SegmentFile | None:
    """Parse a file name in a partition folder; None if it is not a segment file."""
    match = _SEGMENT_FILE.fullmatch(name)
    if match is None:
        return None
    base_offset = int(match[1])
    if base_offset > LARGEST_OFFSET:
        return None
    return SegmentFile(base_offset, match[2], match[4] or match[5] or "", match[3] or "")


def classify(names: Iterable[str]) -> PartitionFiles:
    """Group the names in a partition folder by the kind of file."""
    in_place: dict[str, list[int]] = {kind: [] for kind in (*FILE_KINDS, KEYS)}
    moving: dict[str, list[SegmentFile]] = {suffix: [] for suffix in TEMPORARY_SUFFIXES}
    others: list[str] = []
    for name in names:
        parsed = parse_file_name(name)
        if parsed is None:
            others.append(name)
        elif parsed.temporary:
            moving[parsed.temporary].append(parsed)
        else:
            in_place[parsed.kind].append(parsed.base_offset)
    return PartitionFiles(
        logs=tuple(sorted(in_place[LOG])),
        indexes=tuple(sorted(in_place[INDEX])),
        time_indexes=tuple(sorted(in_place[TIME_INDEX])),
        txn_indexes=tuple(sorted(in_place[TXN_INDEX])),
        snapshots=tuple(sorted(in_place[SNAPSHOT])),
        keys=tuple(sorted(in_place[KEYS])),
        cleaned=tuple(sorted(moving[CLEANED])),
        swaps=tuple(sorted(moving[SWAP])),
        deleted=tuple(sorted(moving[DELETED])),
        others=tuple(sorted(others)),
    )


def partition_dir_name(partition: TopicPartition) -> str:
    """Return the folder of a partition, `<topic>-<partition>`."""
    assert is_legal_topic(partition.topic)
    assert 0 <= partition.partition <= LARGEST_PARTITION
    return str(partition)


def deleted_dir_name(partition: TopicPartition, unique_hex: str) -> str:
    """Return the folder of a partition in deletion; its topic is cut to fit 255 characters."""
    return _marked_dir_name(partition, unique_hex, DirectoryKind.DELETED)


def future_dir_name(partition: TopicPartition, unique_hex: str) -> str:
    """Return the folder of an incomplete copy of a partition, cut like `deleted_dir_name`."""
    return _marked_dir_name(partition, unique_hex, DirectoryKind.FUTURE)


def stray_dir_name(partition: TopicPartition, unique_hex: str) -> str:
    """Return the folder of a partition of no known topic, cut like `deleted_dir_name`."""
    return _marked_dir_name(partition, unique_hex, DirectoryKind.STRAY)


def _marked_dir_name(partition: TopicPartition, unique_hex: str, kind: DirectoryKind) -> str:
    assert re.fullmatch(r"[0-9a-f]{32}", unique_hex)
    tail = f"-{partition.partition}.{unique_hex}-{kind.value}"
    return partition.topic[: NAME_CHARS_MAX - len(tail)] + tail


def may_be_copy_of(name: str, partition: TopicPartition) -> bool:
    """Return whether a folder in deletion or in a move may be one of this partition.

    If the name was cut, topics with the same beginning cannot be told apart.
    """
    match = _MARKED_DIR.fullmatch(name)
    if match is None or int(match["partition"]) != partition.partition:
        return False
    is_cut = len(name) == NAME_CHARS_MAX
    return match["topic"] == partition.topic or (
        is_cut and partition.topic.startswith(match["topic"])
    )


def parse_partition_dir(name: str) -> TopicPartition | None:
    """Return the partition of a folder; None if the folder has no log to serve.

    Folders in deletion or in a move (`-delete`, `-future`, `-stray`) and Kafka's own metadata log
    are not served.
    """
    match = _PARTITION_DIR.fullmatch(name)
    if match is None or not is_legal_topic(match[1]) or match[1] == CLUSTER_METADATA_TOPIC:
        return None
    partition = int(match[2])
    return TopicPartition(match[1], partition) if partition <= LARGEST_PARTITION else None


def kind_of_dir(name: str) -> DirectoryKind:
    """Return the kind of a folder inside a log directory, by its name."""
    if parse_partition_dir(name) is not None:
        return DirectoryKind.PARTITION
    if name.startswith(f"{CLUSTER_METADATA_TOPIC}-"):
        return DirectoryKind.CLUSTER_METADATA
    match = _MARKED_DIR.fullmatch(name)
    return DirectoryKind.UNKNOWN if match is None else DirectoryKind(match["kind"])
