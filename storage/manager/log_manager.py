"""The log manager: all logs of this broker, in several log directories, each of which may fail.

Rules
- Directories are opened all together or not at all. A directory that fails later, or during
  loading, goes offline with its partitions; the others continue.
- A partition with a fault of its own (no permission, a missing folder, a swap that cannot be
  completed) is offline alone, and so is one that found no room while it was loaded. Any other error
  of the system takes its directory offline. The checkpoint entries of an offline partition are kept
  until it is served again or deleted: without its recovery point, a later start would take flushed
  data for a torn tail. Those of a replica that moved are kept in its old directory until the old
  folder is removed: a crash may undo the move.
- The metadata defines which partitions exist. An unknown folder is taken over; a partition without
  a folder is offline and never recreated. See storage/directory/partition_placement.py.
- Recovery points and log start offsets are written after the data is durable, so that after a crash
  they are never too high. Before a partition is created, the checkpoints of its directory have no
  entry of an earlier partition with its name.
- `lock`, `load`, `create_all`, `delete`, `save_metadata`, `purge_deleted` and `CheckpointTask.run`
  may run in a thread, one at a time each, the last two one for each directory; everything else runs
  on the event loop. While `load` runs, only `opening` and `stop_opening` may be used.
"""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Final

from config.topics.keys import TopicConfig
from storage.directory.cluster_metadata import (
    INVENTED_PRODUCER_ID,
    ClusterMetadata,
    MetadataStore,
    RunEach,
    new_metadata,
    run_in_turn,
)
from storage.directory.log_directory import LogDirectory, OpenedDirectories, open_directories
from storage.directory.partition_placement import FoundFolder, place_partitions
from storage.env import Env, remove_if_there, write_file_atomically, write_temporary
from storage.errors import (
    DirectoryStalledError,
    InconsistentDirectoryError,
    LogDirectoryError,
    NoRoomError,
    PartitionFolderError,
    StorageError,
    is_folder_error,
    is_out_of_descriptors,
    is_scarcity,
)
from storage.format import filenames
from storage.format.checkpoints import encode_partition_metadata, write_offsets
from storage.log.log import Log
from storage.log.log_state import LogContext, index_limits
from storage.manager.deleted_folders import DeletedFolders
from storage.manager.folder_changes import FolderChanges
from storage.manager.kafka_settings import take_kafka_settings
from storage.manager.known_damage import KnownDamage
from storage.manager.offset_checkpoints import (
    CheckpointTask,
    FoundCheckpoints,
    OffsetCheckpoints,
    Offsets,
    kept_offsets,
)
from storage.manager.open_report import LogLines, OpenReport
from storage.manager.opening import OpeningProgress, enter_epochs, scan_directories
from storage.manager.partition_creation import make_partitions, remove_partitions, shares_of
from storage.manager.replica_copy import ReplicaCopy
from storage.model import TopicPartition
from storage.recovery.load_log import LoadedLog, RecoveryCounts, load_log

ConfigOf = Callable[[str], TopicConfig]
NO_TOPIC: Final = ""  # its config is that of the broker
TOPIC_ID_BYTES: Final = 16


class LogManager:
    """The logs, their directories and the metadata."""

    def __init__(
        self,
        env: Env,
        directories: Sequence[str],
        *,
        cluster_id: str | None = None,
        node_id: int | None = None,
    ) -> None:
        self._env = env
        self._paths = tuple(directories)
        self._configured = (cluster_id, node_id)
        self._opened: OpenedDirectories
        self._store: MetadataStore
        self._config_of: ConfigOf
        self._directory_of: dict[TopicPartition, LogDirectory] = {}
        self._deleted = DeletedFolders(env)
        self._changes = FolderChanges()
        boot_id = env.random_bytes(6).hex()
        counter = itertools.count(1)
        self._new_generation = lambda: f"{boot_id}-{next(counter)}"
        self.metadata: ClusterMetadata
        self.logs: dict[TopicPartition, Log] = {}
        # Directories with a log that could not be closed, or recovered at the start.
        self._unclean: set[str] = set()
        self.offline: dict[TopicPartition, str] = {}
        self._damage = KnownDamage(env)
        self._checkpoints = OffsetCheckpoints(env, self._damage)
        self.opening = OpeningProgress()
        self._copies: dict[TopicPartition, ReplicaCopy] = {}  # that will become the replicas

    # Opening

    @property
    def directories(self) -> tuple[LogDirectory, ...]:
        """Return all configured directories, online and offline."""
        return self._opened.directories

    def open(self, config_of: ConfigOf) -> OpenReport:
        """Lock the directories, load the metadata, open every log.

        Raises the errors of `open_directories` and `MetadataStore.load`, with all locks released.
        """
        self.lock()
        return self.load(config_of)

    def lock(self) -> None:
        """Lock the directories: the quick first half of `open`."""
        cluster_id, node_id = self._configured
        self._opened = open_directories(
            self._env, self._paths, cluster_id=cluster_id, node_id=node_id
        )

    @property
    def unclean_directories(self) -> tuple[str, ...]:
        """Return directories with data whose last stop was unclean; call it after `lock`."""
        return tuple(
            directory.path
            for directory in self._opened.online
            if not (directory.was_clean or directory.is_new)
        )

    def unlock(self) -> None:
        """Undo `lock` before anything was opened: the next start has nothing to recover."""
        try:
            for directory in self._opened.online:
                if directory.was_clean or directory.is_new:
                    directory.mark_clean()
        finally:
            self._opened.release()

    def load(self, config_of: ConfigOf) -> OpenReport:
        """Load metadata and logs: the second half of `open`, long after a crash; see `opening`.

        Raises the errors of `MetadataStore.load` and OpeningStoppedError, with locks released.
        """
        try:
            return self._open(config_of)
        except BaseException:
            self._opened.release()
            raise

    def stop_opening(self) -> None:
        """Stop `load` soon, from any thread. The state on disk is as after a kill."""
        self.opening.is_stopped = True

    def _open(self, config_of: ConfigOf) -> OpenReport:
        self._config_of = config_of
        online = self._opened.online
        self._store = MetadataStore(
            self._env, [directory.path for directory in online], self._directory_failed
        )
        unopened = [directory.path for directory in self.directories if not directory.is_online]
        loaded = self._store.load(unopened=unopened)
        if loaded is not None:
            self._check_identity(loaded)
        self.metadata = loaded or new_metadata(
            self._env, self._opened.cluster_id, self._opened.node_id
        )
        begun, unclean = self._env.monotonic(), self.unclean_directories
        scanned = scan_directories(self._env, self.directories, self._checkpoints, self._damage)
        by_id, checkpoints, folders = scanned.by_id, scanned.checkpoints, scanned.folders
        for directory, path in scanned.deleted:
            self._deleted.add(directory, path)
        placement = place_partitions(
            folders,
            self.metadata,
            {directory_id: directory.path for directory_id, directory in by_id.items()},
            [self._env.random_bytes(TOPIC_ID_BYTES) for _ in folders],
            self._env.wall_ms(),
        )
        self.offline = dict(placement.offline)
        present = {(folder.partition, folder.directory_id) for folder in folders}
        for partition, reason in placement.offline.items():
            for directory_id, log_directory in by_id.items():
                self._leave_offline(
                    partition,
                    reason,
                    log_directory,
                    checkpoints[directory_id],
                    has_folder=(partition, directory_id) in present,
                )
        changed = placement.metadata is not self.metadata
        taken_over = placement.metadata.topics.keys() - self.metadata.topics.keys()
        self.metadata = placement.metadata
        settings_lines: LogLines = ()
        if taken_over or loaded is None:
            paths = [directory.path for directory in by_id.values()]
            self.metadata, settings_lines = take_kafka_settings(
                self._env, paths, self.metadata, taken_over
            )
        removed = self._remove_folders(placement.remove, by_id)
        for read in checkpoints.values():
            read.taken_over.update(placement.taken_over)
        opened = self._serve_all(placement.serve, by_id, checkpoints, config_of)
        self._discard_copies(scanned.copies)
        self._enter_epochs()
        self._deleted.confirm_absent(folders, self.metadata, self.directories)
        changed |= self._skip_known_producers()
        if changed or loaded is None or self._store.stale or self._deleted.confirmed:
            try:
                self.save_metadata(self.metadata, with_all=False)
            except NoRoomError:
                if loaded is None:
                    raise
                # The next start decides the same again.
        return OpenReport(
            {
                directory.path: directory.offline_reason or ""
                for directory in self.directories
                if not directory.is_online
            },
            dict(self.offline),
            tuple(placement.taken_over),
            settings_lines,
            tuple(
                (by_id[folder.directory_id].file(str(folder.partition)), reason)
                for folder, reason in placement.refused
                if folder.directory_id in by_id
            ),
            tuple(removed),
            tuple((partition, note) for partition, loaded in opened for note in loaded.notes),
            tuple(
                (directory.path, note) for directory in self.directories for note in directory.notes
            ),
            unclean,
            sum(1 for _, loaded in opened if loaded.counts.segments_verified),
            RecoveryCounts.total(loaded.counts for _, loaded in opened),
            self._env.monotonic() - begun,
        )

    def _serve_all(
        self,
        folders: Sequence[FoundFolder],
        by_id: Mapping[str, LogDirectory],
        checkpoints: Mapping[str, FoundCheckpoints],
        config_of: ConfigOf,
    ) -> list[tuple[TopicPartition, LoadedLog]]:
        """Open the logs of these folders; return those that could be opened."""
        opened: list[tuple[TopicPartition, LoadedLog]] = []
        config_of_topic = cache(config_of)  # the same for all partitions of a topic
        self.opening.begin(Counter(by_id[folder.directory_id].path for folder in folders))
        for folder in folders:
            self.opening.go_on()
            log_directory = by_id[folder.directory_id]
            loaded = self._serve(
                folder, log_directory, checkpoints[folder.directory_id], config_of_topic
            )
            if loaded is not None:
                opened.append((folder.partition, loaded))
            self.opening.opened(log_directory.path)
        return opened

    def _check_identity(self, loaded: ClusterMetadata) -> None:
        """Raise InconsistentDirectoryError if `meta.properties` names another cluster."""
        for name, result, expected in (
            ("cluster.id", self._opened.cluster_id, loaded.cluster_id),
            ("node.id", str(self._opened.node_id), str(loaded.node_id)),
        ):
            if result != expected:
                path = self._opened.online[0].file(filenames.META_PROPERTIES)
                raise InconsistentDirectoryError(path, name, result, expected)

    def _enter_epochs(self) -> None:
        for log_directory in self._opened.online:
            here = [
                log
                for partition, log in self.logs.items()
                if self._directory_of[partition] is log_directory
            ]
            try:
                enter_epochs(self._env, here)
            except (OSError, LogDirectoryError) as error:
                if isinstance(error, OSError) and is_scarcity(error):
                    for log in here:
                        log.epochs.undo_enter()  # the first append enters it
                else:
                    self.fail_directory(log_directory.path, str(error))

    def _remove_folders(
        self, folders: Sequence[FoundFolder], by_id: Mapping[str, LogDirectory]
    ) -> list[str]:
        removed = []
        for folder in folders:
            log_directory = by_id.get(folder.directory_id)
            if log_directory is None:
                continue
            try:
                self._deleted.move_away(
                    log_directory, folder.partition, folder.topic_id, delay_ms=0
                )
                self._deleted.sync(log_directory)
                removed.append(log_directory.file(str(folder.partition)))
            except NoRoomError as error:
                log_directory.notes.append(f"a folder stays until the next start: {error}")
            except OSError as error:
                path = log_directory.file(str(folder.partition))
                failure = log_directory.failure(path, "removal of", error)
                if isinstance(failure, PartitionFolderError):
                    log_directory.notes.append(failure.reason)
                else:
                    self.fail_directory(log_directory.path, failure.reason)
        return removed

    def _skip_known_producers(self) -> bool:
        """Skip producer ids that a log already has; return whether the metadata changed."""
        ids = (
            last_record
            for log in self.logs.values()
            for last_record in log.producers.last_records()
        )
        existing = max((item for item in ids if item < INVENTED_PRODUCER_ID), default=-1)
        first = existing + 1
        if first <= self.metadata.next_producer_id:
            return False
        self.metadata = replace(self.metadata, next_producer_id=first)
        return True

    def _serve(
        self,
        folder: FoundFolder,
        log_directory: LogDirectory,
        checkpoints: FoundCheckpoints,
        config_of: ConfigOf,
    ) -> LoadedLog | None:
        """Open one log, or record why it is offline."""
        partition = folder.partition
        self._directory_of[partition] = log_directory
        if not log_directory.is_online:
            self.offline[partition] = log_directory.offline_reason or ""
            return None
        try:
            if folder.topic_id is None:
                topic_id = self.metadata.topics[partition.topic].topic_id
                self._write_partition_metadata(log_directory.file(str(partition)), topic_id)
            log, loaded = self._open_log(
                log_directory, partition, config_of(partition.topic), checkpoints
            )
        except OSError as error:
            if is_folder_error(error) or is_scarcity(error):
                self._leave_offline(partition, str(error), log_directory, checkpoints)
            else:
                self.fail_directory(log_directory.path, f"{partition}: {error}")
            return None
        except LogDirectoryError as error:
            self.fail_directory(log_directory.path, error.reason)
            return None
        except StorageError as error:
            self._leave_offline(partition, str(error), log_directory, checkpoints)
            return None
        self.logs[partition] = log
        # The log was truncated below it: new records there are dirty.
        clean_below = checkpoints.cleaner.get(partition, 0)
        if 0 < clean_below <= log.log_end_offset:
            self.cleaner_offsets[partition] = clean_below
        return loaded

    def _leave_offline(
        self,
        partition: TopicPartition,
        reason: str,
        log_directory: LogDirectory,
        checkpoints: FoundCheckpoints,
        *,
        has_folder: bool = True,
    ) -> None:
        """Take a partition offline with this reason; keep its checkpoint entries.

        `has_folder`: its log is in the directory. If that needs recovery, it still needs it after a
        clean stop of the others, so the directory gets no clean-shutdown marker then.
        """
        self.offline[partition] = reason
        if has_folder and not log_directory.was_clean:
            self._unclean.add(log_directory.path)
        if partition in checkpoints.partitions:
            self._checkpoints.keep(log_directory, partition, checkpoints.kept(partition))

    def _open_log(
        self,
        log_directory: LogDirectory,
        partition: TopicPartition,
        config: TopicConfig,
        checkpoints: FoundCheckpoints,
    ) -> tuple[Log, LoadedLog]:
        path = log_directory.file(str(partition))
        loaded = load_log(
            self._env,
            path,
            index_limits(config),
            was_clean=log_directory.was_clean,
            recovery_point=checkpoints.recovery_point_of(partition),
            log_start_offset=checkpoints.log_starts.get(partition),
            go_on=self.opening.go_on,
            segments_left=partial(self.opening.remaining_segments.__setitem__, log_directory.path),
        )
        topic_id = self.metadata.topics[partition.topic].topic_id
        log = Log(self._context(log_directory), partition, topic_id, path, config, loaded=loaded)
        self._damage.restore(log_directory, log)
        if log.high_watermark < log.log_end_offset:
            log.flush()  # no record that a power failure could lose may be visible
        return log, loaded

    # Moving a replica (replica_copy.py)

    def begin_copy(self, log: Log, log_directory: LogDirectory) -> ReplicaCopy:
        """Return a copy of a log in another directory, without any file yet."""
        assert log_directory is not self._directory_of[log.partition]
        return ReplicaCopy(self._env, log, log_directory, self._new_generation)

    def note_copy(self, copy: ReplicaCopy) -> None:
        """Include an opened copy in the checkpoints of its directory."""
        self._copies[copy.source.partition] = copy

    def publish_copy(self, copy: ReplicaCopy) -> Log:
        """Make a copy the replica, by one rename; return its log.

        The rename is durable when the caller has synced the directory. Raises LogDirectoryError or
        NoRoomError if it failed; the old log is the replica then.
        """
        partition, log = copy.source.partition, copy.log
        assert log is not None
        folder = copy.log_directory.file(str(partition))
        try:
            self._env.rename(copy.folder, folder)
        except OSError as error:
            if is_scarcity(error):
                raise NoRoomError(error, folder) from error
            raise copy.log_directory.failure(folder, "move to", error) from error
        log.replace_replica(copy.source, folder)
        # A crash may undo the rename.
        kept = kept_offsets(log, self.cleaner_offsets.get(partition))
        self._checkpoints.keep(self._directory_of[partition], partition, kept)
        del self._copies[partition]
        self.logs[partition] = log
        self._directory_of[partition] = copy.log_directory
        copy.source.mark_deleted()
        return log

    def remove_old_replica(self, log: Log, log_directory: LogDirectory) -> None:
        """Rename the folder of a replica that was moved, durably; it is removed later.

        Raises LogDirectoryError.
        """
        try:
            self._move_away(log_directory, log.partition, None)
            self._deleted.sync(log_directory)
        except OSError as error:
            raise LogDirectoryError(
                log_directory.path, f"deletion of {log.directory}: {error}"
            ) from error
        self._checkpoints.release(log_directory, log.partition)

    def left_source(self, partition: TopicPartition) -> LogDirectory | None:
        """Return the online directory with the source folder that an unfinished move left."""
        source_id, _ = self.metadata.topics[partition.topic].moves.get(
            partition.partition, ("", "")
        )
        return next(
            (
                directory
                for directory in self.directories
                if directory.is_online
                and directory.directory_id == source_id
                and directory is not self._directory_of[partition]
            ),
            None,
        )

    def check_free(self, partition: TopicPartition, log_directory: LogDirectory) -> None:
        """Raise StorageError if a directory has another folder of this name."""
        path = log_directory.file(str(partition))
        if log_directory.path in self._changes.late:
            raise DirectoryStalledError(log_directory.path)
        if self._env.exists(path):
            raise StorageError(f"{path} exists already: move or remove it first")

    def discard_copy(self, copy: ReplicaCopy) -> None:
        """Remove the folder of a copy that does not become the replica."""
        self._copies.pop(copy.source.partition, None)
        self._deleted.add(copy.log_directory, copy.folder)

    def _discard_copies(self, copies: Sequence[tuple[LogDirectory, str]]) -> None:
        """Remove copies that a crash left incomplete, if their partition is served."""
        for log_directory, path in copies:
            name, _, _ = os.path.basename(path).rpartition(".")
            topic, _, index = name.rpartition("-")
            is_served = any(
                partition.partition == int(index) and partition.topic.startswith(topic)
                for partition in self.logs
            )
            if is_served:
                self._deleted.add(log_directory, path)

    # Partitions

    def create(self, partition: TopicPartition, topic_id: bytes, config: TopicConfig) -> Log:
        """Like `create_all`, for one partition."""
        self.create_all([partition], topic_id, config)
        return self.logs[partition]

    def create_all(
        self,
        partitions: Sequence[TopicPartition],
        topic_id: bytes,
        config: TopicConfig,
        *,
        avoid: Collection[str] = (),
        run_each: RunEach = run_in_turn,
    ) -> None:
        """Create partition folders, each in the directory with the fewest, and open their logs.

        If a directory fails (and goes offline), hangs or has no room, the others get its
        partitions. `avoid`: directories that get none. Raises LogDirectoryError or NoRoomError if
        no directory is left, and InconsistentDirectoryError if another folder has the name. The
        logs in other directories, and the folders in a directory that failed, may then exist.
        """
        assert self.logs.keys().isdisjoint(partitions)
        topic_partitions = list(partitions)
        failure: LogDirectoryError | NoRoomError | None = None
        full = {*avoid, *self._changes.late}
        while topic_partitions:
            failed: list[TopicPartition] = []
            online = [
                directory
                for directory in self.directories
                if directory.is_online and directory.path not in full
            ]
            if not online:
                first = self.directories[0]
                reason = first.offline_reason or "no data directory has room and answers"
                raise failure or LogDirectoryError(first.path, reason)
            present = Counter(
                log_directory.path for log_directory in tuple(self._directory_of.values())
            )
            shares = shares_of(topic_partitions, online, present)
            results = self._changes.run(
                {
                    log_directory.path: partial(
                        self._create_in, log_directory, share, topic_id, config
                    )
                    for log_directory, share in shares
                },
                [directory.path for directory in online],
                run_each,
                undo=self._remove_created,
            )
            refusal: StorageError | None = None
            for log_directory, share in shares:
                result = results.get(log_directory.path)
                if isinstance(result, list):
                    for log in result:
                        self.offline.pop(log.partition, None)
                        self._directory_of[log.partition] = log_directory
                        self.logs[log.partition] = log
                    continue
                failed += share
                if result is None:
                    failure = LogDirectoryError(log_directory.path, "its disk does not answer")
                    full.add(log_directory.path)
                elif isinstance(result, NoRoomError):
                    failure = result
                    full.add(log_directory.path)
                elif type(result) is LogDirectoryError:
                    failure = result
                    self.fail_directory(log_directory.path, failure.reason)
                else:
                    refusal = result
            if refusal is not None:
                raise refusal
            topic_partitions = failed

    def _remove_created(self, directory: str, logs: list[Log]) -> None:
        """Remove partitions that a hanging disk has made, and that another directory has now."""
        remove_partitions(self._env, directory, [log.directory for log in logs])

    def _create_in(
        self,
        log_directory: LogDirectory,
        partitions: Sequence[TopicPartition],
        topic_id: bytes,
        config: TopicConfig,
    ) -> list[Log]:
        try:
            deleted_ids = self.metadata.deleted_topic_ids
            for partition in partitions if deleted_ids else ():
                self._deleted.free_name(
                    log_directory, partition, deleted_ids, delay_ms=self._delete_delay_ms
                )
            if self._checkpoints.may_name(log_directory, partitions):
                # Their offsets would truncate or hide records of the new partitions.
                self.checkpoint_begin(log_directory).run()
            return make_partitions(self._context(log_directory), partitions, topic_id, config)
        except NoRoomError:
            raise
        except OSError as error:
            if is_out_of_descriptors(error):
                raise NoRoomError(error, log_directory.path) from error
            raise LogDirectoryError(log_directory.path, f"{partitions[0]}: {error}") from error

    @property
    def _delete_delay_ms(self) -> int:
        """Return how long a renamed folder stays: as in Kafka, a setting of the broker.

        The owner of a topic could keep deleted folders for ever with the topic's own.
        """
        return self._config_of(NO_TOPIC).file_delete_delay_ms

    def _move_away(
        self, log_directory: LogDirectory, partition: TopicPartition, topic_id: bytes | None
    ) -> None:
        """Rename a partition's folder, and remove it after the broker's delay. Raises OSError."""
        delay_ms = self._delete_delay_ms
        self._deleted.move_away(log_directory, partition, topic_id, delay_ms=delay_ms)

    def _context(self, log_directory: LogDirectory) -> LogContext:
        return LogContext(self._env, log_directory, self._new_generation)

    def _write_partition_metadata(self, folder: str, topic_id: bytes) -> None:
        path = f"{folder}/{filenames.PARTITION_METADATA}"
        write_file_atomically(self._env, path, encode_partition_metadata(topic_id))

    def delete_all(
        self,
        partitions: Iterable[TopicPartition],
        leave: Collection[str] = (),
        run_each: RunEach = run_in_turn,
    ) -> list[LogDirectoryError]:
        """Delete partitions: rename their folders now and remove them later.

        The folder of an offline partition, or in a directory in `leave`, stays until a start with
        its directory online; the metadata has the id of the deleted topic. Return the failures: a
        PartitionFolderError for a folder that cannot be renamed, which stays until the next start,
        or that of its directory.
        """
        deleted: dict[LogDirectory, list[Log]] = {}
        for partition in partitions:
            log = self.logs.pop(partition, None)
            self.offline.pop(partition, None)
            self._checkpoints.forget(partition)
            log_directory = self._directory_of.pop(partition, None)
            if log is not None and log_directory is not None:
                log.mark_deleted()
                if log_directory.path not in leave:
                    deleted.setdefault(log_directory, []).append(log)
        late = self._changes.late
        results = self._changes.run(
            {
                log_directory.path: partial(self._delete_in, log_directory, logs)
                for log_directory, logs in deleted.items()
                if log_directory.path not in late
            },
            [directory.path for directory in self.directories if directory.is_online],
            run_each,
        )
        failures: list[LogDirectoryError] = []
        for log_directory in deleted:
            result = results.get(log_directory.path)
            if isinstance(result, list):
                failures += result
            else:
                failures.append(LogDirectoryError(log_directory.path, "its disk does not answer"))
        return failures

    def _delete_in(
        self, log_directory: LogDirectory, logs: Sequence[Log]
    ) -> list[LogDirectoryError]:
        """Rename the folders of deleted partitions in one directory; return the failures."""
        failures: list[LogDirectoryError] = []
        for log in logs:
            move = partial(self._move_away, log_directory, log.partition, log.topic_id)
            failures += self._attempt_deletion(log_directory, log, move)
        sync = partial(self._deleted.sync, log_directory)
        return failures + self._attempt_deletion(log_directory, logs[0], sync)

    def _attempt_deletion(
        self, log_directory: LogDirectory, log: Log, step: Callable[[], None]
    ) -> list[LogDirectoryError]:
        """Carry out a step of a deletion; return its failure, if there is one."""
        try:
            step()
        except NoRoomError as error:
            return [PartitionFolderError(log.directory, f"no room to delete it: {error}")]
        except OSError as error:
            failure = log_directory.failure(log.directory, "deletion of", error)
            if not isinstance(failure, PartitionFolderError):
                self.fail_directory(log_directory.path, failure.reason)
            return [failure]
        return []

    def purge_deleted(self, now_ms: int, only: LogDirectory | None = None) -> int:
        """Remove folders of deleted partitions after their delay; return how many.

        `only`: those of one directory. Raises the errors of DeletedFolders.purge, after all others.
        """
        removed, faults = 0, list[StorageError]()
        for directory in self.directories if only is None else (only,):
            try:
                removed += self._deleted.purge(directory, now_ms)
            except StorageError as error:
                faults.append(error)
        for fault in faults:
            raise fault
        return removed

    def find_directory(self, partition: TopicPartition) -> LogDirectory | None:
        """Return the directory a partition is in; None if it is in none."""
        return self._directory_of.get(partition)

    def directory_id_of(self, partition: TopicPartition) -> str:
        """Return the id of the directory a partition is in. KeyError if it is in none."""
        return self._directory_of[partition].directory_id

    # Failures

    def fail(self, error: LogDirectoryError) -> tuple[TopicPartition, ...]:
        """Take the failed partition or directory offline; return the partitions that go offline."""
        if isinstance(error, PartitionFolderError):
            return self._fail_partition(error)
        return self.fail_directory(error.directory, error.reason)

    def _fail_partition(self, error: PartitionFolderError) -> tuple[TopicPartition, ...]:
        """Take one partition offline until the next start; return it if it was served."""
        partition = filenames.parse_partition_dir(os.path.basename(error.folder))
        log = None if partition is None else self.logs.get(partition)
        if partition is None or log is None or log.directory != error.folder:
            return ()
        log.fail(error)
        del self.logs[partition]
        self.offline[partition] = error.reason
        kept = kept_offsets(log, self.cleaner_offsets.get(partition))
        self._checkpoints.keep(self._directory_of[partition], partition, kept)
        self._unclean.add(error.directory)
        return (partition,)

    def fail_directory(self, directory: str, reason: str) -> tuple[TopicPartition, ...]:
        """Take a directory offline until the next start; return its partitions."""
        log_directory = next(
            (
                log_directory
                for log_directory in self.directories
                if log_directory.path == directory
            ),
            None,
        )
        assert log_directory is not None, directory
        log_directory.fail(reason)
        self._store.drop(directory, reason)
        lost = tuple(
            partition
            for partition, directory in tuple(self._directory_of.items())
            if directory is log_directory
        )
        for partition in lost:
            self.logs.pop(partition, None)
            self.offline.setdefault(partition, log_directory.offline_reason or reason)
        return lost

    def _directory_failed(self, directory: str, reason: str) -> None:
        self.fail_directory(directory, reason)

    def probe(self, log_directory: LogDirectory) -> None:
        """Sync a new file in a log directory, to see whether its disk answers; in a thread.

        A sync without anything to write, as of a folder, returns although the disk hangs.
        """
        path = log_directory.file(filenames.PROBE)
        try:
            write_temporary(self._env, path, b"")
            remove_if_there(self._env, f"{path}.tmp")
        except NoRoomError:
            pass  # an answer
        except OSError as error:
            if not is_out_of_descriptors(error):
                self.fail_directory(log_directory.path, str(error))

    def failure_in(self, folder: str, error: OSError) -> LogDirectoryError:
        """Return the failure for an OSError in a partition folder, for `fail`."""
        path = os.path.dirname(folder)
        log_directory = next(directory for directory in self.directories if directory.path == path)
        return log_directory.failure(folder, "access to", error)

    # Durable state

    def save_metadata(
        self,
        metadata: ClusterMetadata,
        *,
        with_all: bool = True,
        without: Collection[str] = (),
        wall_ms: int | None = None,
        run_each: RunEach = run_in_turn,
    ) -> None:
        """Save the metadata durably in every online directory and use it from now on.

        `wall_ms`: the time to note in it; without one, it keeps the time that was noted last.
        `without`: directories that keep their old copy until the next save. `run_each` runs the
        steps in the directories.
        Raises LogDirectoryError if no directory is left, NoRoomError: see MetadataStore.save.
        """
        confirmed = tuple(self._deleted.confirmed)
        for topic_id, directory_id in confirmed:
            metadata = metadata.confirm_deleted(topic_id, directory_id)
        if wall_ms is not None:
            metadata = replace(metadata, last_wall_ms=wall_ms)
        self.metadata = self._store.save(
            metadata, with_all=with_all, without=without, run_each=run_each
        )
        del self._deleted.confirmed[: len(confirmed)]

    @property
    def cleaner_offsets(self) -> Offsets:
        """Return the first dirty offsets of the logs that were cleaned."""
        return self._checkpoints.cleaner

    def set_cleaner_offset(self, partition: TopicPartition, offset: int) -> None:
        """Set the first dirty offset; the next checkpoint writes it. A loss costs time only."""
        self.cleaner_offsets[partition] = offset

    def checkpoint_begin(self, only: LogDirectory | None = None) -> CheckpointTask:
        """Capture the checkpoints of all online directories, or of one."""
        captured = dict(self.logs)  # a copy: a thread may create or delete partitions
        placed = {
            directory: {
                partition: log
                for partition, log in captured.items()
                if self._directory_of.get(partition) is directory
            }
            for directory in self.directories
            if directory.is_online and (only is None or directory is only)
        }
        return self._checkpoints.capture(
            placed,
            {directory: self._copied_logs(directory) for directory in placed},
            captured=captured,
            live=self.logs,
            offline=frozenset(self.offline),
        )

    def _copied_logs(self, directory: LogDirectory) -> dict[TopicPartition, Log]:
        return {
            partition: copy.log
            for partition, copy in tuple(self._copies.items())
            if copy.log_directory is directory and copy.log is not None
        }

    def checkpoint(self) -> None:
        """Write recovery points, log start offsets and cleaner offsets now."""
        self.checkpoint_begin().run()

    # Closing

    def close(self, *, clean: bool = True, run_each: RunEach = run_in_turn) -> None:
        """Close every log, write the clean-shutdown markers, release the locks.

        A directory gets no marker if it or one of its partitions failed, or if it hangs. The lock
        of one that hangs ends with the process, because a thread may still write to it.
        `clean=False` only releases the locks. `run_each` runs the steps in the directories.
        """
        try:
            if clean:
                self._close_cleanly(run_each)
        finally:
            self._opened.release()

    def give_up(self, directory: str) -> tuple[TopicPartition, ...]:
        """Take a directory offline whose disk hangs, while the broker stops."""
        lost = self.fail_directory(directory, "its disk hangs")
        next(each for each in self.directories if each.path == directory).is_hanging = True
        return lost

    def _close_cleanly(self, run_each: RunEach) -> None:
        def in_each(step: Callable[[LogDirectory], None]) -> None:
            online = {each.path: partial(step, each) for each in self._opened.online}
            for directory in run_each(online):
                self.give_up(directory)

        in_each(self._close_logs)
        if self._opened.online:
            for directory in self.directories:
                if not directory.is_online:
                    self._store.drop(directory.path, directory.offline_reason or "")
            with suppress(NoRoomError):  # the file has older but valid values
                self.save_metadata(self.metadata, run_each=run_each)
        in_each(self._mark_clean)

    def _close_logs(self, directory: LogDirectory) -> None:
        # While the logs can be read. Without room, new damage must be found again.
        self.checkpoint_begin(directory).write_damage()
        for partition, log in tuple(self.logs.items()):
            if self._directory_of[partition] is not directory:
                continue
            try:
                log.close()
            except PartitionFolderError as error:
                self._fail_partition(error)
            except LogDirectoryError as error:
                directory.fail(error.reason)
        for _, name, offsets in self.checkpoint_begin(directory).files:
            try:
                if directory.is_online:
                    write_offsets(self._env, directory.file(name), offsets)
            except OSError as error:
                directory.fail(f"{name}: {error}")

    def _mark_clean(self, directory: LogDirectory) -> None:
        try:
            if directory.path not in self._unclean:
                directory.mark_clean()
        except OSError as error:
            directory.fail(str(error))
