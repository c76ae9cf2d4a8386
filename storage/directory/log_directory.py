"""A data directory: whose it is, whether it was left in order, whether it still works.

Rules
- A directory that is open is locked; the lock falls with the process.
- Whatever can be refused is refused before anything is written: directories that belong to
  different clusters or nodes, or to one another's copies, are opened all together or not at all.
- The clean-shutdown marker is read once and removed at once: from then on a crash is a crash.
- A directory that cannot be used is offline with a reason, and stays so until the next start. The
  others go on.
- Kafka's `meta.properties` is adopted: cluster, node and directory ids stay what they are, keys
  that we do not know are kept. If it is lost or damaged beside data, see
  storage/directory/directory_identity.py.
- A folder under the name of one of the directory's own files is renamed: the file counts as lost.

This knows nothing of the partitions inside.
"""

import base64
import json
import os
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
    is_out_of_descriptors,
)
from storage.format import filenames
from storage.format.checkpoints import (
    META_PROPERTIES_VERSION,
    MetaProperties,
    decode_meta_properties,
    encode_meta_properties,
)

DEFAULT_NODE_ID: Final = 1
UNKNOWN_BROKER_EPOCH: Final = -1
# Files of ours in every data directory that can be made anew. Not among them: the lock, which is
# held, and the metadata, without which nothing is started beside a damaged copy.
OWN_FILES: Final = (
    filenames.META_PROPERTIES,
    filenames.CLEAN_SHUTDOWN,
    filenames.RECOVERY_POINT_CHECKPOINT,
    filenames.LOG_START_CHECKPOINT,
    filenames.REPLICATION_CHECKPOINT,
    filenames.CLEANER_CHECKPOINT,
)
ASIDE: Final = ".not-a-file."  # behind the name of a folder that stood under the name of a file


def random_id(env: Env) -> str:
    """A random (version 4) UUID in Kafka's form: 22 characters of base64url, not beginning with -.

    Kafka's Uuid.randomUuid avoids the dash too: tools would take such an id for an option.
    """
    while True:
        raw = bytearray(env.random_bytes(16))
        raw[6] = raw[6] & 0x0F | 0x40
        raw[8] = raw[8] & 0x3F | 0x80
        text = base64.urlsafe_b64encode(raw).decode().rstrip("=")
        if not text.startswith("-"):
            return text


class LogDirectory:
    """One data directory, open or offline. Made by `open_directories`."""

    def __init__(self, env: Env, path: str) -> None:
        self.path = path
        self.directory_id = ""  # 22 characters; empty while it is not known
        self.was_clean = False  # the marker of an orderly stop was there
        self.is_new = False  # nothing had been in it
        self.notes: list[str] = []  # what had to be mended when it was opened
        self.offline_reason: str | None = None
        self._env = env
        self._lock: Lock | None = None

    @property
    def is_online(self) -> bool:
        """Return whether its files may be used."""
        return self.offline_reason is None

    def fail(self, reason: str) -> bool:
        """Take it offline; True if it was online. The lock is kept: its files are still ours."""
        if self.offline_reason is not None:
            return False
        self.offline_reason = reason
        return True

    def failure(self, folder: str, action: str, error: OSError) -> LogDirectoryError:
        """Return what an error in a partition's folder means: that folder failed, or all of this.

        A folder that is missing or must not be used is that partition's fault alone, unless the
        data directory itself is missing. A lack of file descriptors is no fault of the device.
        """
        reason = f"{action} {folder}: {error}"
        is_of_folder = is_folder_error(error) or is_out_of_descriptors(error)
        if is_of_folder and self._env.is_dir(self.path):
            return PartitionFolderError(folder, reason)
        return LogDirectoryError(self.path, reason)

    def file(self, name: str) -> str:
        """Return the path of a file or folder in it."""
        return os.path.join(self.path, name)

    def mark_clean(self) -> None:
        """Leave the marker of an orderly stop: everything in the directory is flushed.

        Format: `.kafka_cleanshutdown`, version 0. OSError as it comes.
        """
        assert self.is_online
        content = {"version": 0, "brokerEpoch": UNKNOWN_BROKER_EPOCH}
        write_file_atomically(
            self._env, self.file(filenames.CLEAN_SHUTDOWN), json.dumps(content).encode()
        )

    def release(self) -> None:
        """Give the lock back."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def lock(self) -> None:
        """Make the directory and lock it. Raises DirectoryLockedError, and OSError as it comes."""
        assert self._lock is None
        mkdir_durably(self._env, self.path)
        self._lock = self._env.lock(self.file(filenames.LOCK))

    def read_properties(self) -> MetaProperties | LostIdentity | None:
        """Its `meta.properties`; None for a directory without data that has none.

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
        """Rename folders that stand under the names of files of ours. OSError as it comes."""
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
        """Make it ours: complete `meta.properties`, take the marker away. OSError as it comes.

        `written` is what the file says, `recovered` what it said before it was lost.
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
            self._env.unlink(marker)
            self._env.sync_dir(self.path)


@dataclass(frozen=True, slots=True)
class OpenedDirectories:
    """All configured directories, those offline included, and whose they are."""

    directories: tuple[LogDirectory, ...]
    cluster_id: str
    node_id: int

    @property
    def online(self) -> tuple[LogDirectory, ...]:
        """Those that can be used."""
        return tuple(directory for directory in self.directories if directory.is_online)

    def release(self) -> None:
        """Give all locks back."""
        for directory in self.directories:
            directory.release()


def open_directories(
    env: Env, paths: Sequence[str], *, cluster_id: str | None = None, node_id: int | None = None
) -> OpenedDirectories:
    """Lock the data directories, adopt or create their identity, take the clean markers away.

    `cluster_id` and `node_id` are what was configured; None takes what the directories say, or a
    new cluster id and node 1. A directory that gives an OSError is offline in the result.

    Raises, with every lock given back: DirectoryLockedError (the same directory named twice
    included), InconsistentDirectoryError, LostIdentityError for an unreadable `meta.properties`
    that cannot be made anew, NewerFormatError, LogDirectoryError when no directory can be used.
    """
    assert paths
    opened = tuple(LogDirectory(env, os.path.abspath(path)) for path in paths)
    try:
        return _open(env, opened, cluster_id, node_id)
    except BaseException:
        for directory in opened:
            directory.release()
        raise


def _open(
    env: Env, opened: tuple[LogDirectory, ...], cluster_id: str | None, node_id: int | None
) -> OpenedDirectories:
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
    cluster_id, node_id = agree(all_properties, cluster_id, node_id)
    recovered = _recover_lost(env, results, cluster_id, node_id)
    all_properties |= {directory.path: has for directory, has in recovered.items()}
    cluster_id, node_id = agree(all_properties, cluster_id, node_id)
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
    """Find out what lost `meta.properties` said. Raises LostIdentityError."""
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


def agree(
    all_properties: dict[str, MetaProperties], cluster_id: str | None, node_id: int | None
) -> tuple[str | None, int | None]:
    """Return the cluster and node id that all directories agree on; pure.

    Raises InconsistentDirectoryError when two of them, or one and the configuration, differ, or
    when two have the same directory id (one is a copy of the other).
    """
    owners: dict[str, str] = {}
    for path, properties in all_properties.items():
        if properties.cluster_id is not None:
            cluster_id = cluster_id or properties.cluster_id
            if properties.cluster_id != cluster_id:
                raise InconsistentDirectoryError(
                    path, "cluster.id", properties.cluster_id, cluster_id
                )
        if properties.node_id is not None:
            node_id = properties.node_id if node_id is None else node_id
            if properties.node_id != node_id:
                raise InconsistentDirectoryError(
                    path, "node.id", str(properties.node_id), str(node_id)
                )
        if properties.directory_id is not None:
            owner = owners.setdefault(properties.directory_id, path)
            if owner != path:
                raise InconsistentDirectoryError(
                    path, "directory.id", properties.directory_id, f"one that {owner} has not"
                )
    return cluster_id, node_id
