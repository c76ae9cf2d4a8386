"""What the parts of an open log share: its folder and its failures, config, segments and offsets.

Rules
- Log start <= high watermark <= log end; recovery point <= log end. The high watermark rises with
  each append (log.py), or with `varve.flush.on.ack` when a flush ends (flush.py).
- Only the parts of the log change it (storage/log/log.py names them); all others read it through
  the log.
- After a failure whose extent only recovery can find out, the log accepts no more changes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from config.topics.keys import TopicConfig
from storage.directory.log_directory import LogDirectory
from storage.env import Env
from storage.errors import (
    LogClosedError,
    LogDirectoryError,
    NoRoomError,
    PartitionFolderError,
    StorageError,
    is_out_of_descriptors,
)
from storage.format.index import INTERVAL_BYTES_MAX, IndexLimits
from storage.log.log_producers import LogProducers
from storage.model import SegmentFacts, TopicPartition
from storage.recovery.load_log import LoadedLog
from storage.segments.segment import Segment


def index_limits(config: TopicConfig) -> IndexLimits:
    """Return the limits of indexes in the topic's config, with the largest interval in use."""
    interval_bytes = min(config.index_interval_bytes, INTERVAL_BYTES_MAX)
    return IndexLimits(interval_bytes, config.segment_index_bytes)


@dataclass(frozen=True, slots=True)
class LogContext:
    """The objects that all logs of a log directory share."""

    env: Env
    log_directory: LogDirectory
    new_generation: Callable[[], str]


class LogState:
    """The shared state of one open log. Offsets are absolute."""

    __slots__ = (
        "_new_generation",
        "config",
        "directory",
        "env",
        "folder_failure",
        "generation",
        "high_watermark",
        "is_closed",
        "is_deleted",
        "leader_epoch",
        "log_directory",
        "log_end_offset",
        "log_start_offset",
        "partition",
        "producers",
        "recovery_point",
        "segments",
        "topic_id",
    )

    def __init__(
        self,
        context: LogContext,
        partition: TopicPartition,
        topic_id: bytes,
        directory: str,
        config: TopicConfig,
        *,
        loaded: LoadedLog,
    ) -> None:
        self.env = context.env
        self.log_directory = context.log_directory
        self._new_generation = context.new_generation
        self.generation = context.new_generation()
        self.partition = partition
        self.topic_id = topic_id
        self.directory = directory
        self.config = config
        self.leader_epoch = loaded.leader_epoch
        self.log_start_offset = loaded.log_start_offset
        self.log_end_offset = loaded.log_end_offset
        self.recovery_point = loaded.recovery_point
        self.high_watermark = loaded.log_end_offset
        self.segments = loaded.segments
        self.producers = LogProducers(loaded.producers)
        self.is_closed = False
        self.is_deleted = False  # its folder was or is being renamed
        self.folder_failure: PartitionFolderError | None = None

    def begin_generation(self) -> None:
        """Invalidate all work that is planned for this log."""
        self.generation = self._new_generation()

    def segment_facts(self) -> tuple[SegmentFacts, ...]:
        """Return the facts of each segment; the last one is active. Raises LogDirectoryError.

        Reads the first header and the index sizes of segments that are new since the last call.
        """
        try:
            return self.segments.facts(self.log_end_offset)
        except OSError as error:
            raise self.failed("read of", error) from error

    # Failures

    @property
    def accepts_changes(self) -> bool:
        """Return whether the log is open and its directory is online."""
        return self.log_directory.offline_reason is None and not self.is_closed

    def refuse(self) -> None:
        """Raise the reason why the log accepts no changes."""
        if self.folder_failure is not None:
            raise PartitionFolderError(self.directory, self.folder_failure.reason)
        if self.is_closed:
            raise LogClosedError(self.directory)
        raise LogDirectoryError(self.log_directory.path, self.log_directory.offline_reason or "")

    def failed(self, action: str, error: OSError) -> StorageError:
        """Return the error to raise for a failed operation on the partition's files.

        For operations that changed nothing; `fail_log` is for partial changes.
        """
        if is_out_of_descriptors(error):
            return NoRoomError(error, self.directory)
        failure = self.log_directory.failure(self.directory, action, error)
        if self.is_deleted and isinstance(failure, PartitionFolderError):
            return LogClosedError(self.directory)  # its folder was renamed under the operation
        return failure

    def fail_log(self, action: str, error: OSError) -> StorageError:
        """Stop writing after a failure whose extent only recovery can find out.

        Return the error to raise. The partition folder or the whole directory goes offline.
        """
        failure = self.failed(action, error)
        if is_out_of_descriptors(error):
            failure = self.log_directory.failure(self.directory, action, error)
        if isinstance(failure, PartitionFolderError):
            self.fail(failure)
        elif isinstance(failure, LogDirectoryError):
            self.log_directory.fail(failure.reason)
        return failure

    def fail(self, failure: PartitionFolderError) -> None:
        """Reject all operations from now on: the partition folder failed."""
        self.folder_failure = self.folder_failure or failure
        self.is_closed = True

    # Offsets

    @property
    def last_stable_offset(self) -> int:
        """Return the start of the oldest undecided transaction, else the high watermark."""
        first = self.producers.first_undecided_offset
        if first is None or first >= self.high_watermark:
            return self.high_watermark
        return max(first, self.log_start_offset)

    def raise_high_watermark(self, offset: int) -> None:
        """Let readers see everything below `offset`."""
        if offset > self.high_watermark:
            self.high_watermark = offset
            self.producers.note_high_watermark(offset)

    def end_of(self, segment: Segment) -> int:
        """Return the offset after all possible offsets of the segment."""
        following = self.segments.since(segment.base_offset)[1:]
        return following[0].base_offset if following else self.log_end_offset
