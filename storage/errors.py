"""Everything that can go wrong in a log, as types with fields.

The wire codes are given in one table, protocol/errors.py; messages here are for people.
"""

import errno
import os.path
from collections.abc import Sequence
from typing import Final

# What another program, or we ourselves, have used up for now. The disk is as good as ever.
_OUT_OF_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE))
_OUT_OF_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
# What is wrong with one folder or file; the device that holds it works.
_OF_ONE_FOLDER: Final = frozenset(
    (errno.EACCES, errno.EPERM, errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
)


class StorageError(Exception):
    """Base of all operating errors of the log."""


class CorruptBatchError(StorageError):
    """Bytes that are no record batch: bad CRC, lengths that lie, undecodable compression."""

    def __init__(self, reason: str, position: int = -1, path: str = "") -> None:
        where = f" at {path or 'byte'} {position}" if position >= 0 else ""
        super().__init__(f"corrupt batch{where}: {reason}")
        self.reason = reason
        self.position = position
        self.path = path


class UnsupportedMagicError(CorruptBatchError):
    """A batch of an old format (magic 0 or 1)."""

    def __init__(self, magic: int, position: int = -1, path: str = "") -> None:
        super().__init__(f"message format {magic} is not supported", position, path)
        self.magic = magic


class DecompressionLimitError(StorageError):
    """A batch that unpacks to more than the topic's limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"batch unpacks to more than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class InvalidRecordError(StorageError):
    """A batch that a producer may not send; `batch_indexes` name the records it is about."""

    def __init__(self, reason: str, batch_indexes: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.batch_indexes = tuple(batch_indexes)


class InvalidTimestampError(InvalidRecordError):
    """A record whose timestamp lies outside the topic's window."""


class UnsupportedCompressionError(StorageError):
    """A codec that this request version or this broker does not know."""

    def __init__(self, codec: int) -> None:
        super().__init__(f"compression codec {codec} cannot be used here")
        self.codec = codec


class MessageTooLargeError(StorageError):
    """A batch above max.message.bytes."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"batch of {size_bytes} bytes, max.message.bytes is {limit_bytes}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class RecordListTooLargeError(StorageError):
    """A batch above segment.bytes."""

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
    """A producer that was fenced by a newer epoch of itself."""

    def __init__(self, producer_id: int, current: int, actual: int) -> None:
        super().__init__(f"producer {producer_id}: epoch {actual}, current is {current}")
        self.producer_id = producer_id
        self.current = current
        self.got = actual


class InvalidTransactionStateError(StorageError):
    """A transactional batch without a transaction, or another one while it is open."""

    def __init__(self, producer_id: int, reason: str) -> None:
        super().__init__(f"producer {producer_id}: {reason}")
        self.producer_id = producer_id
        self.reason = reason


class OffsetOutOfRangeError(StorageError):
    """An offset outside [log_start_offset, log_end_offset]."""

    def __init__(self, offset: int, log_start_offset: int, log_end_offset: int) -> None:
        super().__init__(f"offset {offset} is outside [{log_start_offset}, {log_end_offset}]")
        self.offset = offset
        self.log_start_offset = log_start_offset
        self.log_end_offset = log_end_offset


class DamagedSegmentError(StorageError):
    """Flushed data that is no longer what was written: left untouched, not served."""

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
    """A data directory that failed; its partitions are offline until it is repaired."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(f"{directory} is offline: {reason}")
        self.directory = directory
        self.reason = reason


class PartitionFolderError(LogDirectoryError):
    """The folder of one partition failed: that partition is offline until the next start.

    The other partitions of its data directory are not concerned. Code that handles a failure of
    the directory gets this one too; `LogManager.fail` takes the right share offline.
    """

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(os.path.dirname(folder), reason)
        self.args = (f"{folder} cannot be used: {reason}",)
        self.folder = folder


class NoRoomError(StorageError, OSError):
    """No space or no descriptor was left, and nothing has been changed: whoever asked is refused.

    The directory stays in use, so that compaction and retention can make room. An OSError as well:
    whoever does not know better takes the directory offline.
    """

    def __init__(self, error: OSError, path: str) -> None:
        super().__init__(error.errno, error.strerror, path)


def is_folder_error(error: OSError) -> bool:
    """Return whether an error is about one folder or file and not about the device."""
    return error.errno in _OF_ONE_FOLDER


def is_scarcity(error: OSError) -> bool:
    """Whether space or descriptors have run out; never to be asked about a sync that failed."""
    return error.errno in _OUT_OF_DESCRIPTORS or error.errno in _OUT_OF_ROOM


def is_out_of_descriptors(error: OSError) -> bool:
    """Whether a file could not be opened for want of a descriptor. No sync fails for that."""
    return error.errno in _OUT_OF_DESCRIPTORS


class DirectoryLockedError(StorageError):
    """Another process owns the data directory."""

    def __init__(self, directory: str) -> None:
        super().__init__(f"{directory} is in use by another broker")
        self.directory = directory


class OpeningStoppedError(Exception):
    """The broker was told to stop while its logs were being opened. No error of storage."""


class InconsistentDirectoryError(StorageError):
    """Data directories that belong to different clusters or nodes."""

    def __init__(self, directory: str, field: str, value: str, expected: str) -> None:
        super().__init__(f"{directory}: {field} is {value}, expected {expected}")
        self.directory = directory
        self.field = field
        self.found = value
        self.expected = expected


class LostIdentityError(StorageError):
    """A data directory with data whose cluster is not known."""

    def __init__(self, path: str, reason: str, remedy: str) -> None:
        super().__init__(f"{path}: {reason}, and its directory holds data. {remedy}")
        self.path = path
        self.reason = reason
        self.remedy = remedy


class CorruptCheckpointError(StorageError):
    """A checkpoint or metadata file that does not follow its format."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class CorruptSnapshotError(CorruptCheckpointError):
    """A producer state snapshot that fails its CRC or is cut short."""


class NewerFormatError(StorageError):
    """A file that a newer version of the broker wrote; starting over it would lose what it says."""

    def __init__(self, path: str, version: int, existing: int) -> None:
        super().__init__(f"{path} has format version {version}, this broker knows up to {existing}")
        self.path = path
        self.version = version
        self.known = existing


class SwapRefusedError(StorageError):
    """A swap that cannot be done; nothing has been changed. The group is to be cleaned again."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(f"{directory}: {reason}")
        self.directory = directory
        self.reason = reason


class SwapInterruptedError(StorageError):
    """A swap that is committed and ran out of file descriptors; `finish_swap` carries on."""

    def __init__(self, directory: str, error: OSError) -> None:
        super().__init__(f"{directory}: a swap is not finished: {error}")
        self.directory = directory


class UnfinishedSwapError(StorageError):
    """A swap found half done that cannot be finished; everything was left as it was found."""

    def __init__(self, directory: str, file: str, reason: str) -> None:
        super().__init__(f"{directory}: {file}: {reason}")
        self.directory = directory
        self.file = file
        self.reason = reason


class OverlappingSegmentsError(StorageError):
    """A segment that holds offsets of the following one, and not only copies of its records."""

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
    """A log that was closed or deleted meanwhile."""

    def __init__(self, directory: str) -> None:
        super().__init__(f"{directory} is closed")
        self.directory = directory


class InvalidViewError(StorageError):
    """A view on disk that cannot be believed; the log itself is not concerned."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
