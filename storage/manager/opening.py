"""Opens all logs at the start: finds the partition folders, places them, loads their logs.

Rules
- A directory that fails goes offline with its partitions, and the others continue.
- A partition with a fault of its own (no permission, a missing folder, a swap that cannot be
  completed) is left offline alone, and so is one that found no room while it was loaded. Any other
  error of the system takes its directory offline.
- The metadata defines which partitions exist. An unknown folder is taken over; a partition without
  a folder is offline and never recreated. See storage/directory/partition_placement.py.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from config.topics.keys import TopicConfig
from storage.directory.cluster_metadata import INVENTED_PRODUCER_ID, ClusterMetadata
from storage.directory.kafka_metadata import MetadataImage
from storage.directory.log_directory import LogDirectory
from storage.directory.partition_folders import scan_partition_folders
from storage.directory.partition_placement import (
    TAKEN_OVER,
    FoundFolder,
    Placement,
    place_partitions,
)
from storage.env import Env, write_file, write_file_atomically
from storage.errors import (
    LogDirectoryError,
    NoRoomError,
    OpeningStoppedError,
    PartitionFolderError,
    StorageError,
    is_folder_error,
    is_scarcity,
)
from storage.format import filenames
from storage.format.checkpoints import TOPIC_ID_BYTES, encode_partition_metadata
from storage.log.folder_stamp import folder_stamp
from storage.log.log import Log
from storage.log.log_state import LogContext, index_limits
from storage.manager.deleted_folders import DeletedFolders
from storage.manager.kafka_settings import read_image, take_kafka_settings
from storage.manager.known_damage import KnownDamage
from storage.manager.offset_checkpoints import FoundCheckpoints, OffsetCheckpoints
from storage.manager.open_report import NAMED_MAX, LogLines, OpenReport
from storage.manager.partition_table import PartitionTable
from storage.model import TopicPartition
from storage.recovery.load_log import LoadedLog, RecoveryCounts, load_log
from storage.recovery.old_segments import OldSegments


@dataclass(slots=True)
class OpeningProgress:
    """The progress of opening, in partitions. Any thread may read it or stop the opening."""

    done: int = 0
    total: int = 0
    is_stopped: bool = False
    remaining_logs: dict[str, int] = field(default_factory=dict)  # by data directory
    # Segments left of the partition in recovery, by log directory.
    remaining_segments: dict[str, int] = field(default_factory=dict)

    def go_on(self) -> None:
        """Raise OpeningStoppedError if the opening has to stop."""
        if self.is_stopped:
            raise OpeningStoppedError

    def begin(self, logs: Mapping[str, int]) -> None:
        """Set the number of logs to open in each log directory."""
        self.total = sum(logs.values())
        self.remaining_logs = dict(logs)
        self.remaining_segments = dict.fromkeys(logs, 0)

    def opened(self, directory: str) -> None:
        """Count a log that is open or offline."""
        self.done += 1
        self.remaining_logs[directory] -= 1
        self.remaining_segments[directory] = 0


@dataclass(frozen=True, slots=True)
class ScannedDirectories:
    """What the log directories contain that could be read."""

    by_id: Mapping[str, LogDirectory]
    checkpoints: Mapping[str, FoundCheckpoints]  # by directory id
    folders: Sequence[FoundFolder]  # of partitions
    deleted: Sequence[tuple[LogDirectory, str]]  # folders to remove
    copies: Sequence[tuple[LogDirectory, str]]  # that a crash left incomplete


def scan_directories(
    env: Env,
    directories: Iterable[LogDirectory],
    checkpoints: OffsetCheckpoints,
    damage: KnownDamage,
) -> ScannedDirectories:
    """Read the checkpoints and the folders of the online directories.

    A directory that cannot be read goes offline, and the others continue.
    """
    by_id: dict[str, LogDirectory] = {}
    existing: dict[str, FoundCheckpoints] = {}
    folders: list[FoundFolder] = []
    deleted: list[tuple[LogDirectory, str]] = []
    copies: list[tuple[LogDirectory, str]] = []
    for directory in directories:
        if not directory.is_online:
            continue
        try:
            read = checkpoints.read(directory)
            damage.read(directory)
            seen = scan_partition_folders(env, directory)
        except OSError as error:
            directory.fail(str(error))
            continue
        by_id[directory.directory_id] = directory
        existing[directory.directory_id] = read
        folders += seen.partitions
        deleted += [(directory, path) for path in seen.deleted]
        copies += [(directory, path) for path in seen.copies]
    return ScannedDirectories(by_id, existing, folders, deleted, copies)


def enter_epochs(env: Env, logs: Iterable[Log]) -> None:
    """Record durably where the current leader epoch of each log begins, like `LogEpochs.enter`.

    After a clean stop the files are current and nothing is written. Raises OSError,
    LogDirectoryError.
    """
    files: dict[str, bytes] = {}

    def collect(_env: Env, path: str, data: bytes) -> None:
        if not env.exists(path) or env.read_file(path) != data:
            files[path] = data

    for log in logs:
        log.epochs.enter(collect)
    for path, data in files.items():
        write_file(env, f"{path}.tmp", data)
    env.sync_all([f"{path}.tmp" for path in files], [])
    for path in files:
        env.rename(f"{path}.tmp", path)
    env.sync_all([], [os.path.dirname(path) for path in files])


class LogOpener:
    """Opens the logs of all directories, once."""

    def __init__(
        self,
        env: Env,
        table: PartitionTable,
        deleted: DeletedFolders,
        damage: KnownDamage,
        *,
        progress: OpeningProgress,
        new_generation: Callable[[], str],
        config_of: Callable[[str], TopicConfig],
    ) -> None:
        self._env = env
        self._table = table
        self._deleted = deleted
        self._damage = damage
        self._progress = progress
        self._new_generation = new_generation
        self._config_of = cache(config_of)  # the same for all partitions of a topic
        self._metadata: ClusterMetadata
        self._scanned: ScannedDirectories
        self._placement: Placement
        self._takeover_lines: LogLines = ()
        self._removed: list[str] = []  # folders
        self._loaded: list[tuple[TopicPartition, LoadedLog]] = []

    def find_partitions(self, metadata: ClusterMetadata, *, is_new: bool) -> ClusterMetadata:
        """Decide where each partition is; return the metadata with the folders taken over.

        `is_new`: no directory had metadata.
        """
        scanned = scan_directories(
            self._env, self._table.directories, self._table.checkpoints, self._damage
        )
        for directory, path in scanned.deleted:
            self._deleted.add(directory, path)
        metadata = self._without_undone_deletions(scanned, metadata)
        image = MetadataImage()
        if is_new or any(item.partition.topic not in metadata.topics for item in scanned.folders):
            image, self._takeover_lines = read_image(self._env, scanned.by_id.values())
            scanned = self._without_deleted(scanned, metadata, image)
        placement = place_partitions(
            scanned.folders,
            metadata,
            {directory_id: directory.path for directory_id, directory in scanned.by_id.items()},
            [self._env.random_bytes(TOPIC_ID_BYTES) for _ in scanned.folders],
            self._env.wall_ms(),
            kafka_topics=image.topics(),
            is_new=is_new,
            all_online=all(directory.is_online for directory in self._table.directories),
        )
        self._scanned, self._placement = scanned, placement
        self._leave_offline(placement.offline)
        self._metadata = placement.metadata
        taken_over = placement.metadata.topics.keys() - metadata.topics.keys()
        if taken_over or is_new:
            self._metadata, lines = take_kafka_settings(image, placement.metadata, taken_over)
            self._takeover_lines += lines
        return self._metadata

    def _without_undone_deletions(
        self, scanned: ScannedDirectories, metadata: ClusterMetadata
    ) -> ClusterMetadata:
        """Forget deletions in directories that Kafka has served since.

        Kafka does not know of them, makes the topics again with the same ids, and takes records.
        """
        for directory_id, directory in scanned.by_id.items():
            if directory.was_closed_by_kafka:
                for topic_id in metadata.deleted_topic_ids:
                    metadata = metadata.confirm_deleted(topic_id, directory_id)
        return metadata

    def _without_deleted(
        self, scanned: ScannedDirectories, metadata: ClusterMetadata, image: MetadataImage
    ) -> ScannedDirectories:
        """Rename folders of topics that Kafka has deleted, as Kafka does; return the others.

        Kafka answers a deletion before it renames the folders, so a kill may leave them, and so
        does a directory that was offline.
        """
        others: list[FoundFolder] = []
        renamed: list[str] = []
        for folder in scanned.folders:
            is_kept = folder.partition.topic in metadata.topics or folder.problem is not None
            if is_kept or not image.has_deleted(folder.partition, folder.topic_id):
                others.append(folder)
                continue
            directory = scanned.by_id[folder.directory_id]
            unique = self._env.random_bytes(16).hex()
            name = filenames.stray_dir_name(folder.partition, unique)
            try:
                self._env.rename(directory.file(str(folder.partition)), directory.file(name))
                self._env.sync_dir(directory.path)
            except OSError as error:
                self._table.fail_directory(directory.path, str(error))
            else:
                renamed.append(str(folder.partition))
        if renamed:
            fields: dict[str, object] = {
                "folders": len(renamed),
                "names": renamed[:NAMED_MAX],
                "reason": "their topic ids are not in Kafka's metadata",
            }
            self._takeover_lines += (("stray folders renamed", fields),)
        return replace(scanned, folders=others)

    def _leave_offline(self, reasons: Mapping[TopicPartition, str]) -> None:
        """Leave partitions offline that have no folder which could be served."""
        self._table.offline.update(reasons)
        present = {(folder.partition, folder.directory_id) for folder in self._scanned.folders}
        for partition, reason in reasons.items():
            for directory_id, log_directory in self._scanned.by_id.items():
                self._table.leave_offline(
                    partition,
                    reason,
                    log_directory,
                    self._scanned.checkpoints[directory_id],
                    has_folder=(partition, directory_id) in present,
                )

    def open_logs(self) -> None:
        """Open the logs that `find_partitions` found. Raises OpeningStoppedError."""
        self._remove_folders()
        scanned, folders = self._scanned, self._placement.serve
        for checkpoints in scanned.checkpoints.values():
            checkpoints.taken_over.update(self._placement.taken_over)
        self._progress.begin(Counter(scanned.by_id[item.directory_id].path for item in folders))
        for folder in folders:
            self._progress.go_on()
            self._serve(folder)
            self._progress.opened(scanned.by_id[folder.directory_id].path)
        self._discard_copies()
        self._enter_epochs()
        self._deleted.confirm_absent(scanned.folders, self._metadata, self._table.directories)

    def _remove_folders(self) -> None:
        """Rename folders of deleted topics and of interrupted changes; the first purge removes."""
        for folder in self._placement.remove:
            log_directory = self._scanned.by_id.get(folder.directory_id)
            if log_directory is None:
                continue
            path = log_directory.file(str(folder.partition))
            try:
                self._deleted.move_away(
                    log_directory, folder.partition, folder.topic_id, at_once=True
                )
                self._deleted.sync(log_directory)
                self._removed.append(path)
            except NoRoomError as error:
                log_directory.notes.append(f"a folder stays until the next start: {error}")
            except OSError as error:
                failure = log_directory.failure(path, "removal of", error)
                if isinstance(failure, PartitionFolderError):
                    log_directory.notes.append(failure.reason)
                else:
                    self._table.fail_directory(log_directory.path, failure.reason)

    def _serve(self, folder: FoundFolder) -> None:
        """Open one log, or record why it is offline."""
        table, partition = self._table, folder.partition
        log_directory = self._scanned.by_id[folder.directory_id]
        checkpoints = self._scanned.checkpoints[folder.directory_id]
        table.place(partition, log_directory)
        if not log_directory.is_online:
            return
        try:
            log, loaded = self._open_log(folder, log_directory, checkpoints)
        except OSError as error:
            if is_folder_error(error) or is_scarcity(error):
                table.leave_offline(partition, str(error), log_directory, checkpoints)
            else:
                table.fail_directory(log_directory.path, f"{partition}: {error}")
        except LogDirectoryError as error:
            table.fail_directory(log_directory.path, error.reason)
        except StorageError as error:
            table.leave_offline(partition, str(error), log_directory, checkpoints)
        else:
            table.serve(log)
            self._loaded.append((partition, loaded))
            clean_below = checkpoints.cleaner.get(partition, 0)
            if 0 < clean_below <= log.log_end_offset:  # else the log was truncated below it
                table.cleaner_offsets[partition] = clean_below

    def _open_log(
        self, folder: FoundFolder, log_directory: LogDirectory, checkpoints: FoundCheckpoints
    ) -> tuple[Log, LoadedLog]:
        partition = folder.partition
        path = log_directory.file(str(partition))
        entry = self._metadata.topics[partition.topic]
        topic_id = entry.topic_id
        if folder.topic_id is None:
            metadata_path = f"{path}/{filenames.PARTITION_METADATA}"
            write_file_atomically(self._env, metadata_path, encode_partition_metadata(topic_id))
        old_segments = OldSegments.NONE
        if entry.created_by == TAKEN_OVER:
            is_first_start = partition in checkpoints.taken_over
            old_segments = OldSegments.ANY if is_first_start else OldSegments.FIRST
        # Kafka syncs less at its stop.
        was_durable = log_directory.was_clean and not log_directory.was_closed_by_kafka
        found = folder_stamp(self._env, path) if was_durable else None
        config = self._config_of(partition.topic)
        remaining_segments = self._progress.remaining_segments
        loaded = load_log(
            self._env,
            path,
            index_limits(config),
            was_clean=log_directory.was_clean,
            recovery_point=checkpoints.recovery_point_of(partition),
            log_start_offset=checkpoints.log_starts.get(partition),
            old_segments=old_segments,
            go_on=self._progress.go_on,
            segments_left=partial(remaining_segments.__setitem__, log_directory.path),
        )
        context = LogContext(self._env, log_directory, self._new_generation)
        log = Log(context, partition, topic_id, path, config, loaded=loaded)
        self._damage.restore(log_directory, log)
        if log.high_watermark < log.log_end_offset:
            log.flush()  # no record that a power failure could lose may be visible
        if found is not None and folder_stamp(self._env, path) == found:
            log.note_durable()
        return log, loaded

    def _discard_copies(self) -> None:
        """Remove copies that a crash left incomplete, if their partition is served."""
        for log_directory, path in self._scanned.copies:
            name = os.path.basename(path)
            if any(filenames.may_be_copy_of(name, partition) for partition in self._table.logs):
                self._deleted.add(log_directory, path)

    def _enter_epochs(self) -> None:
        for log_directory in self._table.directories:
            if not log_directory.is_online:
                continue
            logs = self._table.logs_in(log_directory).values()
            try:
                enter_epochs(self._env, logs)
            except (OSError, LogDirectoryError) as error:
                if isinstance(error, OSError) and is_scarcity(error):
                    for log in logs:
                        log.epochs.undo_enter()  # the first append enters it
                else:
                    self._table.fail_directory(log_directory.path, str(error))

    def report(self, unclean: tuple[str, ...], seconds: float) -> OpenReport:
        """Return what was found and repaired. `unclean` directories had to be recovered."""
        directories, by_id = self._table.directories, self._scanned.by_id
        counts = [loaded.counts for _, loaded in self._loaded]
        return OpenReport(
            offline_directories={
                directory.path: directory.offline_reason or ""
                for directory in directories
                if not directory.is_online
            },
            offline=dict(self._table.offline),
            taken_over=tuple(self._placement.taken_over),
            settings=self._takeover_lines,
            refused=tuple(
                (by_id[folder.directory_id].file(str(folder.partition)), reason)
                for folder, reason in self._placement.refused
                if folder.directory_id in by_id
            ),
            removed=tuple(self._removed),
            notes=tuple(
                (partition, note) for partition, loaded in self._loaded for note in loaded.notes
            ),
            directory_notes=tuple(
                (directory.path, note) for directory in directories for note in directory.notes
            ),
            unclean=unclean,
            recovered_partitions=sum(1 for each in counts if each.segments_verified),
            counts=RecoveryCounts.total(counts),
            seconds=seconds,
        )


def skip_known_producers(metadata: ClusterMetadata, logs: Iterable[Log]) -> ClusterMetadata:
    """Return the metadata with a next producer id above those that the logs have."""
    ids = (last_record for log in logs for last_record in log.producers.last_records())
    highest = max((item for item in ids if item < INVENTED_PRODUCER_ID), default=-1)
    if highest < metadata.next_producer_id:
        return metadata
    return replace(metadata, next_producer_id=highest + 1)
