"""The log manager: all logs of this broker, in several log directories, each of which may fail.

Rules
- Directories are opened all together or not at all. A directory that fails later, or during
  loading, goes offline with its partitions; the others continue.
- Recovery points and log start offsets are written after the data is durable, so that after a crash
  they are never too high. Before a partition is created, the checkpoints of its directory have no
  entry of an earlier partition with its name.
- `lock`, `load`, `create_all`, `delete_all`, `save_metadata`, `purge_deleted` and
  `CheckpointTask.run` may run in a thread, one at a time each, the last two one for each directory;
  everything else runs on the event loop. While `load` runs, only `opening` and `stop_opening` may
  be used.

`table` has the partitions that are served and that are offline (partition_table.py).
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from config.topics.keys import TopicConfig
from storage.directory.cluster_metadata import (
    ClusterMetadata,
    MetadataStore,
    RunEach,
    new_metadata,
    run_in_turn,
)
from storage.directory.log_directory import LogDirectory, OpenedDirectories, open_directories
from storage.env import Env, remove_temporary, write_temporary
from storage.errors import (
    DirectoryStalledError,
    InconsistentDirectoryError,
    LogDirectoryError,
    NoRoomError,
    PartitionFolderError,
    StorageError,
    is_out_of_descriptors,
)
from storage.format import filenames
from storage.format.checkpoints import write_offsets
from storage.log.log import Log
from storage.log.log_state import LogContext
from storage.manager.deleted_folders import DeletedFolders
from storage.manager.folder_changes import FolderChanges
from storage.manager.known_damage import KnownDamage
from storage.manager.offset_checkpoints import OffsetCheckpoints
from storage.manager.open_report import OpenReport
from storage.manager.opening import LogOpener, OpeningProgress, skip_known_producers
from storage.manager.partition_creation import (
    choose_directories,
    make_partitions,
    remove_partitions,
)
from storage.manager.partition_table import PartitionTable
from storage.manager.replica_copy import ReplicaCopy
from storage.model import TopicPartition

ConfigOf = Callable[[str], TopicConfig]
NO_TOPIC: Final = ""  # its config is that of the broker


class LogManager:
    """The logs, their directories and the metadata."""

    def __init__(
        self,
        env: Env,
        directories: Sequence[str],
    ) -> None:
        self._env = env
        self._paths = tuple(directories)
        self._opened: OpenedDirectories
        self._store: MetadataStore
        self._config_of: ConfigOf
        self._deleted = DeletedFolders(env, lambda: self._config_of(NO_TOPIC).file_delete_delay_ms)
        self._changes = FolderChanges()
        boot_id = env.random_bytes(6).hex()
        counter = itertools.count(1)
        self._new_generation = lambda: f"{boot_id}-{next(counter)}"
        self._damage = KnownDamage(env)
        self.table = PartitionTable(OffsetCheckpoints(env, self._damage))
        self.metadata: ClusterMetadata
        self.opening = OpeningProgress()

    # Opening

    def open(self, config_of: ConfigOf) -> OpenReport:
        """Lock the directories, load the metadata, open every log.

        Raises the errors of `open_directories` and `MetadataStore.load`, with all locks released.
        """
        self.lock()
        return self.load(config_of)

    def lock(self) -> None:
        """Lock the directories: the quick first half of `open`."""
        self._opened = open_directories(self._env, self._paths)
        self.table.directories = self._opened.directories

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
        self._store = MetadataStore(
            self._env,
            [directory.path for directory in self._opened.online],
            self.table.fail_directory,
        )
        unopened = [each.path for each in self.table.directories if not each.is_online]
        loaded = self._store.load(unopened=unopened)
        if loaded is not None:
            self._check_identity(loaded)
        begun, unclean = self._env.monotonic(), self.unclean_directories
        opener = LogOpener(
            self._env,
            self.table,
            self._deleted,
            self._damage,
            progress=self.opening,
            new_generation=self._new_generation,
            config_of=config_of,
        )
        self.metadata = loaded or new_metadata(
            self._env, self._opened.cluster_id, self._opened.node_id
        )
        self.metadata = opener.find_partitions(self.metadata, is_new=loaded is None)
        opener.open_logs()
        self.metadata = skip_known_producers(self.metadata, self.table.logs.values())
        if self.metadata is not loaded or self._store.stale or self._deleted.confirmed:
            try:
                self.save_metadata(self.metadata, with_all=False)
            except NoRoomError:
                if loaded is None:
                    raise
                # The next start decides the same again.
        return opener.report(unclean, self._env.monotonic() - begun)

    def _check_identity(self, loaded: ClusterMetadata) -> None:
        """Raise InconsistentDirectoryError if `meta.properties` names another cluster."""
        for name, result, expected in (
            ("cluster.id", self._opened.cluster_id, loaded.cluster_id),
            ("node.id", str(self._opened.node_id), str(loaded.node_id)),
        ):
            if result != expected:
                path = self._opened.online[0].file(filenames.META_PROPERTIES)
                raise InconsistentDirectoryError(path, name, result, expected)

    # Partitions

    def create(self, partition: TopicPartition, topic_id: bytes, config: TopicConfig) -> Log:
        """Like `create_all`, for one partition."""
        self.create_all([partition], topic_id, config)
        return self.table.logs[partition]

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
        partitions. `avoid`: directories that get none. Raises InconsistentDirectoryError if another
        folder has the name; LogDirectoryError, NoRoomError or DirectoryStalledError if no directory
        is left. The logs in other directories, and the folders in a directory that failed, may then
        exist.
        """
        assert self.table.logs.keys().isdisjoint(partitions)
        remaining = list(partitions)
        failure: StorageError | None = None
        excluded = {*avoid, *self._changes.late}
        while remaining:
            online = [
                directory
                for directory in self.table.directories
                if directory.is_online and directory.path not in excluded
            ]
            if not online:
                first = self.table.directories[0]
                reason = first.offline_reason or "no data directory has room and answers"
                raise failure or LogDirectoryError(first.path, reason)
            shares = choose_directories(remaining, online, self.table.counts())
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
            remaining = []
            refusal: StorageError | None = None
            for log_directory, share in shares:
                result = results[log_directory.path]
                if not isinstance(result, StorageError):
                    for log in result:
                        self.table.serve(log)
                    continue
                remaining += share
                if isinstance(result, NoRoomError | DirectoryStalledError):
                    failure = result
                    excluded.add(log_directory.path)
                elif type(result) is LogDirectoryError:
                    failure = result
                    self.table.fail_directory(log_directory.path, failure.reason)
                else:
                    refusal = result
            if refusal is not None:
                raise refusal

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
                self._deleted.free_name(log_directory, partition, deleted_ids)
            if self.table.checkpoints.may_name(log_directory, partitions):
                # Their offsets would truncate or hide records of the new partitions.
                self.table.checkpoint_begin(log_directory).run()
            context = LogContext(self._env, log_directory, self._new_generation)
            return make_partitions(context, partitions, topic_id, config)
        except NoRoomError:
            raise
        except OSError as error:
            if is_out_of_descriptors(error):
                raise NoRoomError(error, log_directory.path) from error
            raise LogDirectoryError(log_directory.path, f"{partitions[0]}: {error}") from error

    def delete_all(
        self,
        partitions: Iterable[TopicPartition],
        leave: Collection[str] = (),
        run_each: RunEach = run_in_turn,
    ) -> list[StorageError]:
        """Delete partitions: rename their folders now and remove them later.

        The folder of an offline partition, or in a directory in `leave`, stays until a start with
        its directory online; the metadata has the id of the deleted topic. Return the failures: a
        PartitionFolderError for a folder that cannot be renamed, which stays until the next start,
        or that of its directory.
        """
        deleted: dict[LogDirectory, list[Log]] = {}
        for partition in partitions:
            log = self.table.remove(partition)
            if log is not None and log.log_directory.path not in leave:
                deleted.setdefault(log.log_directory, []).append(log)
        results = self._changes.run(
            {
                log_directory.path: partial(self._delete_in, log_directory, logs)
                for log_directory, logs in deleted.items()
            },
            [directory.path for directory in self.table.directories if directory.is_online],
            run_each,
        )
        failures: list[StorageError] = []
        for result in results.values():
            failures += [result] if isinstance(result, StorageError) else result
        return failures

    def _delete_in(
        self, log_directory: LogDirectory, logs: Sequence[Log]
    ) -> list[LogDirectoryError]:
        """Rename the folders of deleted partitions in one directory; return the failures."""
        failures: list[LogDirectoryError] = []
        for log in logs:
            move = partial(self._deleted.move_away, log_directory, log.partition, log.topic_id)
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
                self.table.fail_directory(log_directory.path, failure.reason)
            return [failure]
        return []

    def purge_deleted(self, now_ms: int, only: LogDirectory | None = None) -> int:
        """Remove folders of deleted partitions after their delay; return how many.

        `only`: those of one directory. Raises the errors of DeletedFolders.purge, after all others.
        """
        removed, faults = 0, list[StorageError]()
        for directory in self.table.directories if only is None else (only,):
            try:
                removed += self._deleted.purge(directory, now_ms)
            except StorageError as error:
                faults.append(error)
        for fault in faults:
            raise fault
        return removed

    # Moving a replica (replica_copy.py)

    def begin_copy(self, log: Log, log_directory: LogDirectory) -> ReplicaCopy:
        """Return a copy of a log in another directory, without any file yet."""
        assert log_directory is not log.log_directory
        return ReplicaCopy(self._env, log, log_directory, self._new_generation)

    def check_free(self, partition: TopicPartition, log_directory: LogDirectory) -> None:
        """Raise StorageError if a directory has another folder of this name."""
        path = log_directory.file(str(partition))
        if log_directory.path in self._changes.late:
            raise DirectoryStalledError(log_directory.path)
        if self._env.exists(path):
            raise StorageError(f"{path} exists already: move or remove it first")

    def discard_copy(self, copy: ReplicaCopy) -> None:
        """Remove the folder of a copy that does not become the replica."""
        self.table.drop_copy(copy.source.partition)
        self._deleted.add(copy.log_directory, copy.folder)

    def remove_old_replica(self, log: Log, log_directory: LogDirectory) -> None:
        """Rename the folder of a replica that was moved, durably; it is removed later.

        Raises LogDirectoryError, and NoRoomError if there is no room for the longer name.
        """
        try:
            self._deleted.move_away(log_directory, log.partition, None)
            self._deleted.sync(log_directory)
        except NoRoomError:
            raise
        except OSError as error:
            raise LogDirectoryError(
                log_directory.path, f"deletion of {log.directory}: {error}"
            ) from error
        self.table.checkpoints.release(log_directory, log.partition)

    # Durable state

    def probe(self, log_directory: LogDirectory) -> None:
        """Sync a new file in a log directory, to see whether its disk answers; in a thread.

        A sync without anything to write, as of a folder, returns although the disk hangs.
        """
        path = log_directory.file(filenames.PROBE)
        try:
            write_temporary(self._env, path, b"")
            remove_temporary(self._env, f"{path}.tmp")
        except NoRoomError:
            pass  # an answer
        except OSError as error:
            if not is_out_of_descriptors(error):
                self.table.fail_directory(log_directory.path, str(error))

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
        for directory in self.table.directories:
            if directory.offline_reason is not None:
                self._store.drop(directory.path, directory.offline_reason)
        self.metadata = self._store.save(
            metadata, with_all=with_all, without=without, run_each=run_each
        )
        del self._deleted.confirmed[: len(confirmed)]

    # Closing

    def close(self, run_each: RunEach = run_in_turn) -> None:
        """Close every log, write the clean-shutdown markers, release the locks.

        A directory gets no marker if it or one of its partitions failed, or if it hangs. The lock
        of one that hangs ends with the process, because a thread may still write to it. `run_each`
        runs the steps in the directories.
        """

        def in_each(step: Callable[[LogDirectory], None]) -> None:
            online = {each.path: partial(step, each) for each in self._opened.online}
            for directory in run_each(online):
                self.table.give_up(directory)

        try:
            in_each(self._close_logs)
            if self._opened.online:
                with suppress(NoRoomError):  # the file has older but valid values
                    self.save_metadata(self.metadata, run_each=run_each)
            in_each(self._mark_clean)
        finally:
            self._opened.release()

    def _close_logs(self, directory: LogDirectory) -> None:
        # While the logs can be read. Without room, new damage must be found again.
        self.table.checkpoint_begin(directory).write_damage()
        for log in self.table.logs_in(directory).values():
            try:
                log.close()
            except PartitionFolderError as error:
                self.table.fail(error)
            except LogDirectoryError as error:
                directory.fail(error.reason)
        with suppress(OSError):  # the next start confirms them
            self._deleted.confirm_renamed(directory)
        files = self.table.checkpoint_begin(directory).files.get(directory, {})
        for name, offsets in files.items():
            try:
                if directory.is_online:
                    write_offsets(self._env, directory.file(name), offsets)
            except OSError as error:
                directory.fail(f"{name}: {error}")

    def _mark_clean(self, directory: LogDirectory) -> None:
        try:
            if directory.path not in self.table.unclean:
                directory.mark_clean()
        except OSError as error:
            directory.fail(str(error))
