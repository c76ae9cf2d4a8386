"""The errors of storage, as exceptions with fields.

protocol/errors.py translates them into error codes of the protocol. The messages are for people.
"""

import errno
import os.path
from collections.abc import Sequence
from typing import Final

from storage.model import TopicPartition

# A resource is used up, by us or by another program. The disk works.
_OUT_OF_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE))
# Without memory for its buffers, the system refuses a write (ENOMEM).
_OUT_OF_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.ENOMEM))
# One folder or file has a fault. The device works.
_OF_ONE_FOLDER: Final = frozenset(
    (
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ELOOP,
        errno.ENXIO,  # a socket
        errno.EFBIG,
        errno.EBUSY,  # a mount
        errno.ENOTEMPTY,  # another process wrote a file during the removal
    )
)


class StorageError(Exception):
    """Base of all operating errors of the log."""


class CorruptBatchError(StorageError):
    """The bytes are not a valid record batch: wrong CRC, wrong lengths or broken compression."""

    def __init__(self, reason: str, position: int = -1, path: str = "") -> None:
        where = f" at {path or 'byte'} {position}" if position >= 0 else ""
        super().__init__(f"corrupt batch{where}: {reason}")
        self.reason = reason
        self.position = position
        self.path = path


class UnsupportedMagicError(CorruptBatchError):
    """The batch has an old format (magic 0 or 1)."""

    def __init__(self, magic: int, position: int = -1, path: str = "") -> None:
        super().__init__(f"message format {magic} is not supported", position, path)
        self.magic = magic


class DecompressionLimitError(StorageError):
    """The batch decompresses to more than the topic's limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"batch unpacks to more than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class InvalidRecordError(StorageError):
    """The produced batch is invalid; `batch_indexes` names the invalid records."""

    def __init__(self, reason: str, batch_indexes: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.batch_indexes = tuple(batch_indexes)


class MissingKeyError(InvalidRecordError):
    """A record for a compacted topic has no key."""


class InvalidOffsetsError(InvalidRecordError):
    """The offsets, counts or sequence numbers in the batch contradict each other."""


class InvalidTimestampError(InvalidRecordError):
    """The timestamp of a record is outside the limits of the topic."""


class UnsupportedCompressionError(StorageError):
    """This request version or this broker does not support the codec."""

    def __init__(self, codec: int) -> None:
        super().__init__(f"compression codec {codec} cannot be used here")
        self.codec = codec


class MessageTooLargeError(StorageError):
    """The batch exceeds max.message.bytes."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"batch of {size_bytes} bytes, max.message.bytes is {limit_bytes}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class RecordListTooLargeError(StorageError):
    """The batch exceeds segment.bytes."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"batch of {size_bytes} bytes, segment.bytes is {limit_bytes}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class OutOfOrderSequenceError(StorageError):
    """An idempotent producer skipped or repeated a sequence number."""

    def __init__(self, producer_id: int, expected: int, actual: int) -> None:
        super().__init__(f"producer {producer_id}: sequence {actual}, expected {expected}")
        self.producer_id = producer_id
        self.expected = expected
        self.got = actual


class InvalidProducerEpochError(StorageError):
    """A newer epoch of the same producer id has fenced the producer."""

    def __init__(self, producer_id: int, current: int, actual: int) -> None:
        super().__init__(f"producer {producer_id}: epoch {actual}, current is {current}")
        self.producer_id = producer_id
        self.current = current
        self.got = actual


class InvalidTransactionStateError(StorageError):
    """A transactional batch without transaction, or a plain one during a transaction."""

    def __init__(self, producer_id: int, reason: str) -> None:
        super().__init__(f"producer {producer_id}: {reason}")
        self.producer_id = producer_id
        self.reason = reason


class OffsetOutOfRangeError(StorageError):
    """The offset is outside [log_start_offset, log_end_offset]."""

    def __init__(self, offset: int, log_start_offset: int, log_end_offset: int) -> None:
        super().__init__(f"offset {offset} is outside [{log_start_offset}, {log_end_offset}]")
        self.offset = offset
        self.log_start_offset = log_start_offset
        self.log_end_offset = log_end_offset


class DamagedSegmentError(StorageError):
    """Flushed data is damaged. The broker neither changes nor serves it."""

    def __init__(self, path: str, position: int, reason: str) -> None:
        super().__init__(f"{path} is damaged at byte {position}: {reason}")
        self.path = path
        self.position = position
        self.reason = reason


class TransactionIndexError(StorageError):
    """The transaction indexes contradict a marker of the log."""

    def __init__(self, producer_id: int, offset: int) -> None:
        super().__init__(
            f"the transaction index contradicts the log: producer {producer_id}, offset {offset}"
        )
        self.producer_id = producer_id
        self.offset = offset


class LogDirectoryError(StorageError):
    """A log directory failed. Its partitions are offline until it is repaired."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(f"{directory} is offline: {reason}")
        self.directory = directory
        self.reason = reason


class OfflinePartitionError(StorageError):
    """The partition exists but is not served: its directory failed, or its data is damaged."""

    def __init__(self, partition: TopicPartition, reason: str) -> None:
        super().__init__(f"{partition} is offline: {reason}")
        self.partition = partition
        self.reason = reason


class DirectoryStalledError(StorageError):
    """The disk of a log directory has not finished an earlier change. Nothing was changed."""

    def __init__(self, directory: str) -> None:
        super().__init__(f"the disk of {directory} has not finished an earlier write; try again")
        self.directory = directory


class PartitionFolderError(LogDirectoryError):
    """The folder of one partition failed: that partition is offline until the next start.

    Other partitions of its log directory keep running. It is a LogDirectoryError, so that the same
    code handles both; `PartitionTable.fail` takes the partition or the directory offline.
    """

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(os.path.dirname(folder), reason)
        self.args = (f"{folder} cannot be used: {reason}",)
        self.folder = folder


class NoRoomError(StorageError, OSError):
    """There was no space, memory or file descriptor. Nothing was changed; the request is refused.

    The directory stays online, so that compaction and retention can make room. This is an OSError
    as well: code that does not handle it takes the directory offline.
    """

    def __init__(self, error: OSError, path: str) -> None:
        super().__init__(error.errno, error.strerror, path)


def is_folder_error(error: OSError) -> bool:
    """Return whether an error is about one folder or file and not about the device."""
    return error.errno in _OF_ONE_FOLDER


def is_scarcity(error: OSError) -> bool:
    """Return whether space, memory or descriptors ran out. Do not use it for a failed sync."""
    return error.errno in _OUT_OF_DESCRIPTORS or error.errno in _OUT_OF_ROOM


def is_out_of_descriptors(error: OSError) -> bool:
    """Return whether a file could not be opened for lack of a descriptor."""
    return error.errno in _OUT_OF_DESCRIPTORS


def is_no_room(error: OSError) -> bool:
    """Return whether it is a NoRoomError or a lack of descriptors: never a failed sync."""
    return isinstance(error, NoRoomError) or is_out_of_descriptors(error)


class DirectoryLockedError(StorageError):
    """Another process owns the data directory; `pid` is 0 if it cannot be known."""

    def __init__(self, directory: str, pid: int = 0) -> None:
        process = f" (process {pid})" if pid else ""
        super().__init__(
            f"{directory} is in use by another broker{process}. Stop it, or use another data "
            "directory"
        )
        self.directory = directory


class OpeningStoppedError(Exception):
    """The broker had to stop while it opened its logs. Not an error of storage."""


class InconsistentDirectoryError(StorageError):
    """The log directories belong to different clusters or nodes."""

    def __init__(
        self, directory: str, field: str, value: str, expected: str, *, remedy: str = ""
    ) -> None:
        text = f"{directory}: {field} is {value}, expected {expected}"
        super().__init__(f"{text}. {remedy}" if remedy else text)
        self.directory = directory
        self.field = field
        self.found = value
        self.expected = expected


class LostIdentityError(StorageError):
    """The log directory has data, but its cluster is unknown."""

    def __init__(self, path: str, reason: str, remedy: str) -> None:
        super().__init__(f"{path}: {reason}, and its directory holds data. {remedy}")
        self.path = path
        self.reason = reason
        self.remedy = remedy


class CorruptCheckpointError(StorageError):
    """A checkpoint or metadata file has an invalid format."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class CorruptSnapshotError(CorruptCheckpointError):
    """A producer state snapshot has a wrong CRC or is cut short."""


class NewerFormatError(StorageError):
    """A newer version of the broker wrote the file. Overwriting it would lose data."""

    def __init__(self, path: str, version: int, existing: int) -> None:
        super().__init__(f"{path} has format version {version}, this broker knows up to {existing}")
        self.path = path
        self.version = version
        self.known = existing


class SwapRefusedError(StorageError):
    """The swap was refused and changed nothing. The cleaner cleans the group again.

    `lacks_room`: only for lack of space or of file descriptors, so the same swap may succeed later.
    """

    def __init__(self, directory: str, reason: str, *, lacks_room: bool = False) -> None:
        super().__init__(f"{directory}: {reason}")
        self.directory = directory
        self.reason = reason
        self.lacks_room = lacks_room


class SwapInterruptedError(StorageError):
    """A committed swap found no room. `finish_swap` completes it."""

    def __init__(self, directory: str, error: OSError) -> None:
        super().__init__(f"{directory}: a swap is not finished: {error}")
        self.directory = directory


class UnfinishedSwapError(StorageError):
    """An interrupted swap cannot be finished. No file was changed."""

    def __init__(self, directory: str, file: str, reason: str) -> None:
        super().__init__(f"{directory}: {file}: {reason}")
        self.directory = directory
        self.file = file
        self.reason = reason


class OverlappingSegmentsError(StorageError):
    """A segment has offsets of the following segment with other records."""

    def __init__(self, path: str, position: int, first: int, last: int, reason: str) -> None:
        super().__init__(
            f"{path}: the batch at byte {position} holds offsets {first} to {last}, which belong to"
            f" the following segment, and {reason}. Nothing was changed. Compare the two segments"
            " and move the wrong one out of the folder, then restart"
        )
        self.path = path
        self.position = position
        self.reason = reason


class LogClosedError(StorageError):
    """The log was closed or deleted meanwhile."""

    def __init__(self, directory: str) -> None:
        super().__init__(f"{directory} is closed")
        self.directory = directory


class TruncatedLogError(StorageError):
    """An operator truncated the log meanwhile: what was to be flushed may be gone."""

    def __init__(self, partition: TopicPartition, end_offset: int) -> None:
        super().__init__(f"an operator truncated {partition} to offset {end_offset}")
        self.partition = partition
        self.end_offset = end_offset


class InvalidViewError(StorageError):
    """The files of a compacted view are invalid. The log itself is not affected."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
