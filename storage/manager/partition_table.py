"""The table of partitions: in which log directory each one is, and whether it is served.

Rules
- A partition is either served by its log or offline with a reason. A failed one is offline until
  the next start.
- A fault of a partition's own takes it offline alone, any other failure its whole log directory.
- The checkpoint entries of an offline partition are kept until it is served again or deleted:
  without its recovery point, a later start would take flushed data for a torn tail. Those of a
  replica that moved are kept in its old directory until the old folder is removed: a crash may undo
  the move.
- A thread may add and remove partitions while the event loop reads the table.
"""

import os
from collections import Counter
from collections.abc import Generator, Mapping

from storage.directory.log_directory import LogDirectory
from storage.errors import LogDirectoryError, PartitionFolderError
from storage.format import filenames
from storage.log.log import Log
from storage.manager.offset_checkpoints import (
    CheckpointTask,
    FoundCheckpoints,
    OffsetCheckpoints,
    Offsets,
    kept_offsets,
)
from storage.model import TopicPartition
from storage.slices import run_at_once


class PartitionTable:
    """All partitions of this broker, and the checkpoints of their offsets."""

    def __init__(self, checkpoints: OffsetCheckpoints) -> None:
        self.checkpoints = checkpoints
        # All that are configured, online and offline; none before they are locked.
        self.directories: tuple[LogDirectory, ...] = ()
        self.logs: dict[TopicPartition, Log] = {}  # of the partitions that are served
        self.offline: dict[TopicPartition, str] = {}  # the reasons
        # Paths of directories with a log that could not be closed, or recovered at the start.
        self.unclean: set[str] = set()
        self.cleaner_offsets: Offsets = {}  # first dirty offsets of the logs that were cleaned
        # The same in the cleaner state on the disk, where known; checkpoints have no higher ones.
        self.saved_cleaner_offsets: Offsets = {}
        self._directory_of: dict[TopicPartition, LogDirectory] = {}
        self._copies: dict[TopicPartition, Log] = {}  # that will become the replicas

    # Where partitions are

    def find_directory(self, partition: TopicPartition) -> LogDirectory | None:
        """Return the directory a partition is in; None if it is in none."""
        return self._directory_of.get(partition)

    def directory_id_of(self, partition: TopicPartition) -> str:
        """Return the id of the directory a partition is in. KeyError if it is in none."""
        return self._directory_of[partition].directory_id

    def logs_in(self, log_directory: LogDirectory) -> dict[TopicPartition, Log]:
        """Return the logs that are served from a directory."""
        return _in_directory(self.logs, log_directory)

    def counts(self) -> Counter[str]:
        """Return the number of partitions in each directory, by path."""
        return Counter(log_directory.path for log_directory in tuple(self._directory_of.values()))

    # Changes

    def place(self, partition: TopicPartition, log_directory: LogDirectory) -> None:
        """Note where the folder of a partition is; it is offline with its directory."""
        self._directory_of[partition] = log_directory
        if not log_directory.is_online:
            self.offline[partition] = log_directory.offline_reason or ""

    def serve(self, log: Log) -> None:
        """Serve a partition by its log."""
        self.offline.pop(log.partition, None)
        self._directory_of[log.partition] = log.log_directory
        self.logs[log.partition] = log

    def leave_offline(
        self,
        partition: TopicPartition,
        reason: str,
        log_directory: LogDirectory,
        checkpoints: FoundCheckpoints,
        *,
        has_folder: bool = True,
    ) -> None:
        """Leave a partition offline at the start, and keep its checkpoint entries.

        `has_folder`: its log is in the directory. If that needs recovery, it still needs it after a
        clean stop of the others, so the directory gets no clean-shutdown marker then.
        """
        self.offline[partition] = reason
        if has_folder and not log_directory.was_clean:
            self.unclean.add(log_directory.path)
        if partition in checkpoints.partitions:
            self.checkpoints.keep(log_directory, partition, checkpoints.kept(partition))

    def remove(self, partition: TopicPartition) -> Log | None:
        """Remove a partition that is deleted; return its log if it was served."""
        log = self.logs.pop(partition, None)
        self.offline.pop(partition, None)
        self.cleaner_offsets.pop(partition, None)
        self.saved_cleaner_offsets.pop(partition, None)
        self.checkpoints.forget(partition)
        self._directory_of.pop(partition, None)
        if log is not None:
            log.mark_deleted()
        return log

    def add_copy(self, copy: Log) -> None:
        """Include the copy of a partition in the checkpoints of the directory that it moves to."""
        self._copies[copy.partition] = copy

    def drop_copy(self, partition: TopicPartition) -> None:
        """Undo `add_copy`."""
        self._copies.pop(partition, None)

    def replace(self, log: Log, copy: Log) -> None:
        """Serve a partition by its copy, whose folder has just got the name of the partition.

        A thread may have taken `log`, the old replica, offline with its directory meanwhile.
        """
        self._keep_offsets(copy, log.log_directory)  # a crash may undo the rename
        del self._copies[copy.partition]
        self.serve(copy)
        log.mark_deleted()

    # Failures

    def fail(self, error: LogDirectoryError) -> tuple[TopicPartition, ...]:
        """Take the failed partition or directory offline; return the partitions that go offline."""
        if isinstance(error, PartitionFolderError):
            return self._fail_partition(error)
        return self.fail_directory(error.directory, error.reason)

    def _fail_partition(self, error: PartitionFolderError) -> tuple[TopicPartition, ...]:
        """Take one partition offline; return it if it was served."""
        partition = filenames.parse_partition_dir(os.path.basename(error.folder))
        log = None if partition is None else self.logs.get(partition)
        if partition is None or log is None or log.directory != error.folder:
            return ()
        log.fail(error)
        del self.logs[partition]
        self.offline[partition] = error.reason
        self._keep_offsets(log, log.log_directory)
        self.unclean.add(error.directory)
        return (partition,)

    def fail_directory(self, directory: str, reason: str) -> tuple[TopicPartition, ...]:
        """Take a directory offline; return its partitions, also those that were offline."""
        log_directory = self._directory(directory)
        log_directory.fail(reason)
        lost = tuple(
            partition
            for partition, its_directory in tuple(self._directory_of.items())
            if its_directory is log_directory
        )
        for partition in lost:
            self.logs.pop(partition, None)
            self.offline.setdefault(partition, log_directory.offline_reason or reason)
        return lost

    def give_up(self, directory: str) -> None:
        """Take a directory offline whose disk hangs, while the broker stops."""
        self.fail_directory(directory, "its disk hangs")
        self._directory(directory).is_hanging = True

    def _directory(self, path: str) -> LogDirectory:
        return next(directory for directory in self.directories if directory.path == path)

    def _keep_offsets(self, log: Log, log_directory: LogDirectory) -> None:
        """Keep the entries of a log in the checkpoints of a directory."""
        offset = self._cleaner_checkpoint_of(log.partition)
        self.checkpoints.keep(log_directory, log.partition, kept_offsets(log, offset))

    # Checkpoints

    def _cleaner_checkpoint_of(self, partition: TopicPartition) -> int | None:
        offset = self.cleaner_offsets.get(partition)
        return offset and min(offset, self.saved_cleaner_offsets.get(partition, offset))

    def checkpoint_slices(
        self, only: LogDirectory | None = None
    ) -> Generator[None, None, CheckpointTask]:
        """Capture the checkpoints of all online directories, or of one; yield between logs.

        The task has at least the changes that were made before the first slice.
        """
        return self.checkpoints.capture(
            [
                directory
                for directory in self.directories
                if directory.is_online and (only is None or directory is only)
            ],
            served=dict(self.logs),  # a copy: a thread may create or delete partitions
            copies=dict(self._copies),
            live=self.logs,
            offline=self.offline,
            cleaner_offset_of=self._cleaner_checkpoint_of,
        )

    def checkpoint_begin(self, only: LogDirectory | None = None) -> CheckpointTask:
        """Like `checkpoint_slices`, at once."""
        return run_at_once(self.checkpoint_slices(only))

    def checkpoint(self) -> None:
        """Write recovery points, log start offsets and cleaner offsets now."""
        self.checkpoint_begin().run()


def _in_directory(
    logs: Mapping[TopicPartition, Log], log_directory: LogDirectory
) -> dict[TopicPartition, Log]:
    return {
        partition: log
        for partition, log in tuple(logs.items())
        if log.log_directory is log_directory
    }
