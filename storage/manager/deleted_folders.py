"""Folders of deleted partitions, replaced replicas and abandoned copies, until they are removed.

A deletion renames a folder at once; `purge` removes it after the broker's delay. When a directory
has no folder of a deleted topic any more, this module confirms it, and the metadata forgets the
topic's id (storage/directory/cluster_metadata.py). A start would take over a folder that is still
in place, because its topic is being deleted in turns, was offline, or could not be renamed. A stop
confirms the renamed folders: Kafka, which does not know of the deletion, may make new ones of the
same id.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Final, NamedTuple

from storage.directory.cluster_metadata import NO_DIRECTORY, ClusterMetadata
from storage.directory.log_directory import LogDirectory
from storage.directory.partition_folders import topic_id_in
from storage.directory.partition_placement import FoundFolder
from storage.env import Env, rename_if_room
from storage.errors import (
    NoRoomError,
    PartitionFolderError,
    StorageError,
    is_folder_error,
    is_out_of_descriptors,
)
from storage.format import filenames
from storage.log.deletion import Delay
from storage.model import TopicPartition

# What a purge removes. It syncs the directory once for that, and a stop waits for it.
FOLDERS_AT_ONCE: Final = 100
PURGE_SECONDS_MAX: Final = 1.0
RETRY_MS: Final = 60_000  # until the next attempt to remove a folder that could not be removed


class DeletedFolder(NamedTuple):
    """A folder to remove."""

    delay: Delay
    path: str
    topic: str  # empty if the folder belongs to no deleted topic
    topic_id: bytes | None


class DeletedFolders:
    """The folders that wait for their removal."""

    def __init__(self, env: Env, delay_ms: Callable[[], int]) -> None:
        """`delay_ms` returns how long a renamed folder stays: as in Kafka, a setting of the broker.

        With a setting of the topic, its owner could keep deleted folders for ever.
        """
        self._env = env
        self._delay_ms = delay_ms
        self._waiting: defaultdict[str, list[DeletedFolder]] = defaultdict(list)  # by directory
        self.confirmed: list[tuple[bytes, str]] = []  # (topic id, directory id)

    def add(self, log_directory: LogDirectory, path: str) -> None:
        """Remove a folder at the next purge."""
        self._waiting[log_directory.path].append(DeletedFolder(Delay(0, 0), path, "", None))

    def move_away(
        self,
        log_directory: LogDirectory,
        partition: TopicPartition,
        topic_id: bytes | None,
        *,
        at_once: bool = False,
    ) -> None:
        """Rename the folder of a partition, and remove it after the delay or at the next purge.

        Raises OSError, NoRoomError if there is no room for the longer name. Call `sync` afterwards.
        Until then a crash may restore the folder, but the metadata has the id of the deleted topic.
        """
        delay_ms = 0 if at_once else self._delay_ms()
        name = filenames.deleted_dir_name(partition, self._env.random_bytes(16).hex())
        try:
            rename_if_room(self._env, log_directory.file(str(partition)), log_directory.file(name))
        except FileNotFoundError:
            if not self._env.is_dir(log_directory.path):
                raise
            # The folder was removed by hand: the purge finds nothing and confirms that.
        delay = Delay(self._env.wall_ms(), delay_ms)
        path = log_directory.file(name)
        folder = DeletedFolder(delay, path, partition.topic, topic_id)
        self._waiting[log_directory.path].append(folder)

    def free_name(
        self,
        log_directory: LogDirectory,
        partition: TopicPartition,
        deleted_ids: Container[bytes | None],
    ) -> None:
        """Rename a folder of a deleted topic that has the name of a new partition, durably.

        A move that failed at its end, or a fault of the folder itself, leaves such a folder.
        Raises OSError and NoRoomError.
        """
        path = log_directory.file(str(partition))
        try:
            topic_id = topic_id_in(self._env, path) if self._env.exists(path) else None
        except OSError as error:
            if is_folder_error(error):
                return  # `make_partitions` refuses it
            raise
        if topic_id in deleted_ids:
            self.move_away(log_directory, partition, topic_id)
            self.sync(log_directory)

    def sync(self, log_directory: LogDirectory) -> None:
        """Make renames durable; without file descriptors, the purge does. Raises OSError."""
        try:
            self._env.sync_dir(log_directory.path)
        except OSError as error:
            if not is_out_of_descriptors(error):
                raise

    def purge(self, log_directory: LogDirectory, now_ms: int) -> int:
        """Remove the first folders that are due, for a second at most; return how many they were.

        A folder with a fault of its own, for example a file of another user or a mount, stays for
        RETRY_MS; then a StorageError is raised after the other folders.
        Raises LogDirectoryError, and NoRoomError if a later purge should try again.
        """
        if not log_directory.is_online:
            return 0
        waiting = self._waiting[log_directory.path]
        for at, item in enumerate(tuple(waiting)):  # others only append meanwhile
            waiting[at] = item._replace(delay=item.delay.seen_at(now_ms))
        present = tuple(waiting)
        due = [item for item in present if item.delay.is_over(now_ms)][:FOLDERS_AT_ONCE]
        faults: list[StorageError] = []
        removed: list[DeletedFolder] = []
        end = self._env.monotonic() + PURGE_SECONDS_MAX
        for folder in due:
            if self._env.monotonic() >= end:
                break
            try:
                if self._env.exists(folder.path):  # otherwise it was removed by hand
                    self._env.remove_tree(folder.path)
            except OSError as error:
                failure = self._failure(log_directory, folder.path, "removal of", error)
                if not isinstance(failure, PartitionFolderError):
                    raise failure from error
                later = folder._replace(delay=Delay(now_ms, RETRY_MS))
                waiting[waiting.index(folder)] = later
                faults.append(StorageError(failure.reason))
            else:
                removed.append(folder)
        if removed:
            left = Counter(item.topic_id for item in present)
            left.subtract(item.topic_id for item in removed)
            gone = {item.topic_id: item.topic for item in removed if not left[item.topic_id]}
            try:
                # The order matters: a folder that is renamed after the check is synced, too.
                confirmed = self._all_renamed(log_directory, gone)
                self._env.sync_dir(log_directory.path)
            except OSError as error:
                path = log_directory.path
                raise self._failure(log_directory, path, "sync of", error) from error
            for folder in removed:
                waiting.remove(folder)
            self.confirmed += [(topic_id, log_directory.directory_id) for topic_id in confirmed]
        if faults:
            raise faults[0]
        return len(removed)

    def _failure(
        self, log_directory: LogDirectory, path: str, action: str, error: OSError
    ) -> StorageError:
        if is_out_of_descriptors(error):
            return NoRoomError(error, path)
        return log_directory.failure(path, action, error)

    def confirm_renamed(self, log_directory: LogDirectory) -> None:
        """Confirm the topics whose folders were all renamed: the last step before a stop.

        Raises OSError.
        """
        topics = {item.topic_id: item.topic for item in tuple(self._waiting[log_directory.path])}
        renamed = self._all_renamed(log_directory, topics)
        if renamed:
            self._env.sync_dir(log_directory.path)
        self.confirmed += [(topic_id, log_directory.directory_id) for topic_id in renamed]

    def _all_renamed(
        self, log_directory: LogDirectory, topics: Mapping[bytes | None, str]
    ) -> list[bytes]:
        """Return the ids of those deleted topics that have no folder in place. Raises OSError.

        `topics`: names by id; None is no topic.
        """
        ids = {name: set[bytes]() for name in topics.values()}
        for topic_id, name in topics.items():
            if topic_id is not None:
                ids[name].add(topic_id)
        in_place = set[bytes]()
        for name in self._env.listdir(log_directory.path) if any(ids.values()) else ():
            partition = filenames.parse_partition_dir(name)
            candidates = None if partition is None else ids.get(partition.topic)
            if not candidates:
                continue
            try:
                topic_id = topic_id_in(self._env, log_directory.file(name))
            except OSError as error:
                if not is_folder_error(error):
                    raise
                topic_id = None  # unknown
            in_place |= candidates if topic_id is None else candidates & {topic_id}
        return [
            topic_id for topic_id in topics if topic_id is not None and topic_id not in in_place
        ]

    def confirm_absent(
        self,
        folders: Sequence[FoundFolder],
        metadata: ClusterMetadata,
        directories: Collection[LogDirectory],
    ) -> None:
        """Confirm the directories that have no folder of a deleted topic at the start."""
        present = {(folder.topic_id, folder.directory_id) for folder in folders}
        online = {directory.directory_id for directory in directories if directory.is_online}
        # The topic of an unreadable folder is unknown.
        online -= {folder.directory_id for folder in folders if folder.problem is not None}
        if len(online) == len(directories):
            online.add(NO_DIRECTORY)  # whichever it was
            present |= {(topic_id, NO_DIRECTORY) for topic_id, _ in present}
        for topic_id, waiting in metadata.deleted_topic_ids.items():
            self.confirmed += [
                (topic_id, directory_id)
                for directory_id in waiting
                if directory_id in online and (topic_id, directory_id) not in present
            ]
