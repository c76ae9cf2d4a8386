"""A log directory: its identity, its lock, its clean-shutdown marker, and whether it is online.

Rules
- An open directory is locked; the lock ends with the process.
- Directories are opened all together or not at all: directories of different clusters or nodes, or
  a copy of another directory, are refused before anything is written.
- The clean-shutdown marker is read once and deleted at once, so that a later crash is detected.
- A failed directory is offline, with a reason, until the next start. The others continue.
- Kafka's `meta.properties` is taken over: cluster, node and directory ids and unknown keys stay. If
  it is lost or damaged beside data, see storage/directory/directory_identity.py.
- A folder with the name of one of the directory's files is renamed, and the file counts as lost.

This module does not know the partitions inside.
"""

import base64
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from storage.directory.cluster_metadata import FILE_NAME
from storage.directory.directory_identity import (
    LostIdentity,
    newest_metadata,
    partitions_in,
    recover_identity,
)
from storage.env import Env, Lock, mkdir_durably, write_file_atomically
from storage.errors import (
    CorruptCheckpointError,
    InconsistentDirectoryError,
    LogDirectoryError,
    PartitionFolderError,
    is_folder_error,
    is_no_room,
)
from storage.format import filenames
from storage.format.checkpoints import (
    META_PROPERTIES_VERSION,
    MetaProperties,
    decode_meta_properties,
    encode_meta_properties,
)

OTHER_BROKER: Final = "It belongs to another broker: remove it from log_dirs (--data)"

DEFAULT_NODE_ID: Final = 1
UNKNOWN_BROKER_EPOCH: Final = -1
# Our files in every log directory that can be recreated; not the lock, which is in use, and not the
# metadata, which must not be lost.
OWN_FILES: Final = (
    filenames.META_PROPERTIES,
    filenames.CLEAN_SHUTDOWN,
    filenames.RECOVERY_POINT_CHECKPOINT,
    filenames.LOG_START_CHECKPOINT,
    filenames.REPLICATION_CHECKPOINT,
    filenames.CLEANER_CHECKPOINT,
    filenames.DAMAGE,
)
# In the clean-shutdown marker. Kafka writes the epoch of its registration, others -1.
_EPOCH_OF_KAFKA: Final = re.compile(rb'"brokerEpoch"\s*:\s*[0-9]')
ASIDE: Final = ".not-a-file."  # suffix of a renamed folder that had the name of a file


def random_id(env: Env) -> str:
    """Return a random (version 4) UUID in Kafka's form, 22 characters of base64url.

    Like Kafka's Uuid.randomUuid it never begins with a dash, which tools would take for an option.
    """
    while True:
        raw = bytearray(env.random_bytes(16))
        raw[6] = raw[6] & 0x0F | 0x40
        raw[8] = raw[8] & 0x3F | 0x80
        text = base64.urlsafe_b64encode(raw).decode().rstrip("=")
        if not text.startswith("-"):
            return text


class LogDirectory:
    """One log directory, open or offline. `open_directories` creates it."""

    def __init__(self, env: Env, path: str) -> None:
        self.path = path
        self.directory_id = ""  # 22 characters; empty if unknown
        self.was_clean = False  # it had the clean-shutdown marker
        self.was_closed_by_kafka = False  # and it was Kafka's
        self.is_new = False  # it was empty
        self.notes: list[str] = []  # repairs at opening
        self.offline_reason: str | None = None
        self.is_hanging = False  # it was given up while a thread may write to it
        self._env = env
        self._lock: Lock | None = None

    @property
    def is_online(self) -> bool:
        """Return whether its files may be used."""
        return self.offline_reason is None

    def fail(self, reason: str) -> bool:
        """Take it offline; return whether it was online. It stays locked."""
        if self.offline_reason is not None:
            return False
        self.offline_reason = reason
        return True

    def failure(self, folder: str, action: str, error: OSError) -> LogDirectoryError:
        """Return the failure for an error in a partition folder: of the folder or the directory.

        A missing or forbidden folder fails its partition only, unless the log directory itself is
        missing. A lack of space or file descriptors is not a failure of the device.
        """
        reason = f"{action} {folder}: {error}"
        is_of_folder = is_folder_error(error) or is_no_room(error)
        if is_of_folder and self._is_there():
            return PartitionFolderError(folder, reason)
        return LogDirectoryError(self.path, reason)

    def _is_there(self) -> bool:
        try:
            return self._env.is_dir(self.path)
        except OSError:
            return False

    def file(self, name: str) -> str:
        """Return the path of a file or folder in it."""
        return os.path.join(self.path, name)

    def mark_clean(self) -> None:
        """Write the clean-shutdown marker: everything in the directory is flushed.

        Format: `.kafka_cleanshutdown`, version 0. Raises OSError.
        """
        assert self.is_online
        content = {"version": 0, "brokerEpoch": UNKNOWN_BROKER_EPOCH}
        write_file_atomically(
            self._env, self.file(filenames.CLEAN_SHUTDOWN), json.dumps(content).encode()
        )

    def release(self) -> None:
        """Release the lock, unless another process could then write together with a thread."""
        if self.is_hanging:
            return
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def lock(self) -> None:
        """Create the directory and lock it. Raises DirectoryLockedError, OSError."""
        assert self._lock is None
        mkdir_durably(self._env, self.path)
        self._lock = self._env.lock(self.file(filenames.LOCK))

    def read_properties(self) -> MetaProperties | LostIdentity | None:
        """Return its `meta.properties`; None for a directory without data that has none.

        Raises NewerFormatError.
        """
        path = self.file(filenames.META_PROPERTIES)
        try:
            if self._env.is_dir(path):
                raise CorruptCheckpointError(path, "it is a folder")
            return decode_meta_properties(self._env.read_file(path), path)
        except FileNotFoundError:
            reason = "it is missing"
        except CorruptCheckpointError as error:
            reason = error.reason
        partitions = partitions_in(self._env, self.path)
        if (
            reason == "it is missing"
            and not partitions
            and not self._env.exists(self.file(FILE_NAME))
        ):
            return None
        return LostIdentity(self.path, reason, partitions)

    def move_folders_aside(self) -> None:
        """Rename folders that have the names of our files. Raises OSError."""
        for name in OWN_FILES:
            path = self.file(name)
            if self._env.is_dir(path):
                aside = f"{path}{ASIDE}{self._env.random_bytes(4).hex()}"
                self._env.rename(path, aside)
                self._env.sync_dir(self.path)
                self.notes.append(f"{path} is a folder and was renamed to {aside}")

    def settle(
        self,
        written: MetaProperties | None,
        cluster_id: str,
        node_id: int,
        *,
        recovered: MetaProperties | None = None,
    ) -> None:
        """Complete `meta.properties` and delete the marker. Raises OSError.

        `written` is the content of the file, `recovered` the content of a lost file.
        """
        self.move_folders_aside()
        self.is_new = written is None and recovered is None
        present = written or recovered or MetaProperties(None, None, None)
        self.directory_id = present.directory_id or random_id(self._env)
        complete = replace(
            present,
            cluster_id=cluster_id,
            node_id=node_id,
            directory_id=self.directory_id,
            version=META_PROPERTIES_VERSION,
        )
        if complete != written:
            write_file_atomically(
                self._env,
                self.file(filenames.META_PROPERTIES),
                encode_meta_properties(complete),
            )
        marker = self.file(filenames.CLEAN_SHUTDOWN)
        self.was_clean = self._env.exists(marker)
        if self.was_clean:
            self.was_closed_by_kafka = self._is_of_kafka(marker)
            self._env.unlink(marker)
            self._env.sync_dir(self.path)

    def _is_of_kafka(self, marker: str) -> bool:
        try:
            return _EPOCH_OF_KAFKA.search(self._env.read_file(marker)) is not None
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class OpenedDirectories:
    """All configured directories, online and offline, and their cluster and node."""

    directories: tuple[LogDirectory, ...]
    cluster_id: str
    node_id: int

    @property
    def online(self) -> tuple[LogDirectory, ...]:
        """Return the directories that are online."""
        return tuple(directory for directory in self.directories if directory.is_online)

    def release(self) -> None:
        """Release all locks."""
        for directory in self.directories:
            directory.release()


def open_directories(env: Env, paths: Sequence[str]) -> OpenedDirectories:
    """Lock the log directories, read or create their identity, delete the clean markers.

    New directories get the cluster and node id of the others, or a new cluster id and node 1. A
    directory with an OSError is offline in the result.

    Raises, with all locks released: DirectoryLockedError (also for a directory that is named
    twice), InconsistentDirectoryError, LostIdentityError for an unreadable `meta.properties` that
    cannot be rebuilt, NewerFormatError, LogDirectoryError if no directory can be used.
    """
    assert paths
    opened = tuple(LogDirectory(env, os.path.abspath(path)) for path in paths)
    try:
        return _open(env, opened)
    except BaseException:
        for directory in opened:
            directory.release()
        raise


def _open(env: Env, opened: tuple[LogDirectory, ...]) -> OpenedDirectories:
    results: dict[LogDirectory, MetaProperties | LostIdentity | None] = {}
    for directory in opened:
        try:
            directory.lock()
            results[directory] = directory.read_properties()
        except OSError as error:
            directory.fail(str(error))
    written = {
        directory: has for directory, has in results.items() if isinstance(has, MetaProperties)
    }
    all_properties = {directory.path: has for directory, has in written.items()}
    cluster_id, node_id = agree(all_properties)
    recovered = _recover_lost(env, results, cluster_id, node_id)
    all_properties |= {directory.path: has for directory, has in recovered.items()}
    cluster_id, node_id = agree(all_properties)
    cluster_id = cluster_id or random_id(env)
    node_id = DEFAULT_NODE_ID if node_id is None else node_id
    for directory in results:
        try:
            directory.settle(
                written.get(directory), cluster_id, node_id, recovered=recovered.get(directory)
            )
        except OSError as error:
            directory.fail(str(error))
    if not any(directory.is_online for directory in opened):
        raise LogDirectoryError(opened[0].path, opened[0].offline_reason or "")
    return OpenedDirectories(opened, cluster_id, node_id)


def _recover_lost(
    env: Env,
    value: dict[LogDirectory, MetaProperties | LostIdentity | None],
    cluster_id: str | None,
    node_id: int | None,
) -> dict[LogDirectory, MetaProperties]:
    """Rebuild lost `meta.properties`. Raises LostIdentityError."""
    lost = {directory: has for directory, has in value.items() if isinstance(has, LostIdentity)}
    if not lost:
        return {}
    metadata = newest_metadata(env, [directory.path for directory in value])
    others = {has.directory_id for has in value.values() if isinstance(has, MetaProperties)}
    recovered: dict[LogDirectory, MetaProperties] = {}
    for directory, has in lost.items():
        properties = recover_identity(
            has, metadata, cluster_id=cluster_id, node_id=node_id, others=others
        )
        others.add(properties.directory_id)
        recovered[directory] = properties
        path = directory.file(filenames.META_PROPERTIES)
        directory.notes.append(
            f"{path}: {has.reason}; written again for cluster {properties.cluster_id}"
        )
    return recovered


def agree(all_properties: dict[str, MetaProperties]) -> tuple[str | None, int | None]:
    """Return the cluster and node id that all directories agree on; pure.

    Raises InconsistentDirectoryError if they differ, or if two have the same directory id (one is a
    copy of the other).
    """
    cluster_id: str | None = None
    node_id: int | None = None
    owners: dict[str, str] = {}
    for path, properties in all_properties.items():
        if properties.cluster_id is not None:
            cluster_id = cluster_id or properties.cluster_id
            if properties.cluster_id != cluster_id:
                raise InconsistentDirectoryError(
                    path, "cluster.id", properties.cluster_id, cluster_id, remedy=OTHER_BROKER
                )
        if properties.node_id is not None:
            node_id = properties.node_id if node_id is None else node_id
            if properties.node_id != node_id:
                raise InconsistentDirectoryError(
                    path, "node.id", str(properties.node_id), str(node_id), remedy=OTHER_BROKER
                )
        if properties.directory_id is not None:
            owner = owners.setdefault(properties.directory_id, path)
            if owner != path:
                raise InconsistentDirectoryError(
                    path,
                    "directory.id",
                    properties.directory_id,
                    f"one that {owner} has not",
                    remedy="It is a copy of that directory: remove one of them from log_dirs",
                )
    return cluster_id, node_id
