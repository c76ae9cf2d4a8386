"""The cluster metadata of the broker: topics, where their partitions are, users and permissions.

Rules
- Every log directory has a copy, `varve.metadata`, which is replaced atomically. The valid copy
  with the highest epoch is the state; each save increments the epoch, so that a torn or lost copy
  is ignored.
- The broker never starts without metadata beside data: it is an error if copies exist and none is
  readable, or if a newer version wrote one.
- Only dynamic configs are stored (AlterConfigs, CreateTopics). The settings file is read at each
  start.
- The id of a deleted topic stays in the metadata until every directory that may have its folders
  has confirmed their removal: a directory that was offline must not restore the topic. If Kafka
  served the directory since, it decides which topics there are.
- A directory whose copy cannot be written is removed here and reported; the others continue.

This module does not know logs.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from storage.directory.security_entries import (
    AclEntry,
    QuotaEntity,
    QuotaEntries,
    ScramUsers,
    decode_acls,
    decode_quotas,
    decode_scram_users,
    encode_acls,
    encode_quotas,
    encode_scram_users,
)
from storage.env import Env, Folder, remove_temporary, rename_if_room, write_temporary
from storage.errors import (
    CorruptCheckpointError,
    InconsistentDirectoryError,
    LogDirectoryError,
    NoRoomError,
    is_out_of_descriptors,
)
from storage.format import sealed_json
from storage.format.checkpoints import TOPIC_ID_BYTES, decode_topic_id, encode_topic_id

FILE_NAME: Final = "varve.metadata"
MAGIC: Final = "varve-metadata"
VERSION: Final = 1
HASH_KEY_BYTES: Final = 16
# Apache Kafka assigns producer ids from 0 on. Ours begin far above: in a log that both have
# written, two producers must not have the same id (docs/decisions/0010).
FIRST_PRODUCER_ID: Final = 1 << 40
# They grow with the wall time, so that those of earlier starts are not assigned again if the
# metadata was lost or an old copy is used. No broker assigns ids faster for long, and an id fits
# into the 53 bits of a floating point number until the year 3085.
PRODUCER_IDS_PER_MS: Final = 256
# No broker has assigned such ids: a client invented them. To continue after the largest of them
# could leave no free id.
INVENTED_PRODUCER_ID: Final = 1 << 62
# The directory of a partition that several directories claim (partition_placement.py).
NO_DIRECTORY: Final = ""
ENTRIES_AT_ONCE: Final = 500  # users, ACLs or quotas; 1 ms

_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class TopicEntry:
    """One topic. `dynamic` has its dynamic configs by name, with canonical values."""

    topic_id: bytes  # 16 bytes
    partitions: Mapping[int, str]  # index -> directory id
    dynamic: Mapping[str, str] = field(default_factory=dict)
    created_by: str = ""  # "yaml", "client", "first use", "broker", "adopted" (TAKEN_OVER)
    created_ms: int = 0  # wall time
    # Replicas that move: index -> directory ids of source and target (manager/replica_copy.py).
    moves: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    # What the settings file last said of deletion (config/topics/keys.py: `retention_of_file`).
    file_retention: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.topic_id) == TOPIC_ID_BYTES


@dataclass(frozen=True, slots=True)
class ClusterMetadata:
    """The whole state. It is immutable; a change returns a new value."""

    cluster_id: str
    node_id: int
    hash_key: bytes  # 16 bytes, for the hashes of record keys
    epoch: int = 0
    topics: Mapping[str, TopicEntry] = field(default_factory=dict)
    deleted_topic_ids: Mapping[bytes, tuple[str, ...]] = field(default_factory=dict)
    broker_dynamic: Mapping[str, str] = field(default_factory=dict)
    next_producer_id: int = FIRST_PRODUCER_ID
    last_wall_ms: int = 0
    scram_users: ScramUsers = field(default_factory=dict)
    acls: tuple[AclEntry, ...] = ()
    client_quotas: QuotaEntries = field(default_factory=dict)
    features: Mapping[str, int] = field(default_factory=dict)  # levels that a client has set

    def __post_init__(self) -> None:
        assert len(self.hash_key) == HASH_KEY_BYTES

    def with_topic(self, name: str, entry: TopicEntry) -> "ClusterMetadata":
        """Add or replace a topic."""
        return self.with_topics({name: entry})

    def with_topics(self, entries: Mapping[str, TopicEntry]) -> "ClusterMetadata":
        """Add or replace topics."""
        return replace(self, topics={**self.topics, **entries})

    def with_move(self, name: str, index: int, source: str, target: str) -> "ClusterMetadata":
        """Note that a replica may be in either directory. Raises KeyError."""
        entry = self.topics[name]
        return self.with_topic(name, replace(entry, moves={**entry.moves, index: (source, target)}))

    def without_move(self, name: str, index: int) -> "ClusterMetadata":
        """Remove a finished move. Raises KeyError."""
        entry = self.topics[name]
        moves = {other: entry.moves[other] for other in entry.moves if other != index}
        return self.with_topic(name, replace(entry, moves=moves))

    def with_placement(self, name: str, index: int, directory_id: str) -> "ClusterMetadata":
        """Name another directory for a partition. Raises KeyError."""
        entry = self.topics[name]
        return self.with_topic(
            name, replace(entry, partitions={**entry.partitions, index: directory_id})
        )

    def without_topics(self, names: Iterable[str]) -> "ClusterMetadata":
        """Delete topics; their directories have to confirm. Raises KeyError."""
        topics = dict(self.topics)  # as fast as it gets: there may be ten thousand
        deleted = dict(self.deleted_topic_ids)
        for name in names:
            entry = topics.pop(name)
            if entry.partitions:
                directory_ids = {
                    *entry.partitions.values(),
                    *(end for ends in entry.moves.values() for end in ends),
                }
                deleted[entry.topic_id] = tuple(sorted(directory_ids))
        return replace(self, topics=topics, deleted_topic_ids=deleted)

    def confirm_deleted(self, topic_id: bytes, directory_id: str) -> "ClusterMetadata":
        """Return the metadata after a directory has no more folders of a deleted topic."""
        deleted = dict(self.deleted_topic_ids)
        waiting = tuple(item for item in deleted.pop(topic_id, ()) if item != directory_id)
        if waiting:
            deleted[topic_id] = waiting
        return replace(self, deleted_topic_ids=deleted)

    def take_producer_ids(self, count: int, now_ms: int) -> tuple[int, "ClusterMetadata"]:
        """Return the new metadata and the first of `count` unused producer ids; save before use."""
        assert count > 0
        first = max(self.next_producer_id, FIRST_PRODUCER_ID + now_ms * PRODUCER_IDS_PER_MS)
        return first, replace(self, next_producer_id=first + count)


def new_metadata(env: Env, cluster_id: str, node_id: int) -> ClusterMetadata:
    """Return the metadata of a new broker, with a new hash key."""
    return ClusterMetadata(
        cluster_id, node_id, env.random_bytes(HASH_KEY_BYTES), last_wall_ms=env.wall_ms()
    )


class MetadataEncoder:
    """Encodes states of the metadata: each topic, and all users, ACLs and quotas, once.

    Python's JSON encoder holds the interpreter, and thus the event loop, until it ends: 0.2 s for
    10,000 topics, 30 ms for 20,000 ACLs. Two states differ in a topic or two, so the others are
    kept encoded. Users, ACLs and quotas change seldom; they are encoded a few at a time.
    """

    def __init__(self) -> None:
        self._topics: dict[str, tuple[TopicEntry, bytes]] = {}
        self._security: dict[str, tuple[Collection[object], bytes]] = {}

    def encode(self, metadata: ClusterMetadata) -> bytes:
        """Return the content of a metadata file."""
        encoded = {}
        for name, entry in metadata.topics.items():
            cached = self._topics.get(name)
            encoded[name] = (
                cached if cached and cached[0] is entry else (entry, _encode_topic(name, entry))
            )
        self._topics = encoded
        quotas, users = metadata.client_quotas, metadata.scram_users
        members = [
            b'"topics":{%b}' % b",".join([text for _, text in encoded.values()]),
            b'"acls":[%b]' % self._kept("acls", metadata.acls, encode_acls),
            b'"client_quotas":[%b]' % self._kept("quotas", quotas, partial(_some_quotas, quotas)),
            b'"scram_users":{%b}' % self._kept("users", users, partial(_some_users, users)),
            sealed_json.to_json(_small_members(metadata))[1:-1],
        ]
        return sealed_json.seal_body(MAGIC, VERSION, b"{%b}" % b",".join(members))

    def _kept(
        self,
        name: str,
        entries: Collection[_Entry],
        encode: Callable[[Sequence[_Entry]], Mapping[str, object] | Sequence[object]],
    ) -> bytes:
        """Return the entries as the inside of a JSON list or object, encoded when they change."""
        cached = self._security.get(name)
        if cached is not None and cached[0] is entries:
            return cached[1]
        rows = tuple(entries)
        text = b",".join(
            sealed_json.to_json(encode(rows[first : first + ENTRIES_AT_ONCE]))[1:-1]
            for first in range(0, len(rows), ENTRIES_AT_ONCE)
        )
        self._security[name] = (entries, text)
        return text


def _some_quotas(quotas: QuotaEntries, entities: Sequence[QuotaEntity]) -> Sequence[object]:
    return encode_quotas({entity: quotas[entity] for entity in entities})


def _some_users(users: ScramUsers, names: Sequence[str]) -> Mapping[str, object]:
    return encode_scram_users({name: users[name] for name in names})


def _encode_topic(name: str, entry: TopicEntry) -> bytes:
    """Return a member of the JSON object of topics: name, colon, value."""
    fields = {
        "topic_id": encode_topic_id(entry.topic_id),
        "partitions": {str(index): where for index, where in entry.partitions.items()},
        "dynamic": dict(entry.dynamic),
        "created_by": entry.created_by,
        "created_ms": entry.created_ms,
        "moves": {str(index): list(ends) for index, ends in entry.moves.items()},
        "file_retention": dict(entry.file_retention),
    }
    return sealed_json.to_json({name: fields})[1:-1]


def _small_members(metadata: ClusterMetadata) -> dict[str, object]:
    deleted = {encode_topic_id(item): list(at) for item, at in metadata.deleted_topic_ids.items()}
    return {
        "epoch": metadata.epoch,
        "cluster_id": metadata.cluster_id,
        "node_id": metadata.node_id,
        "deleted_topic_ids": deleted,
        "broker_dynamic": dict(metadata.broker_dynamic),
        "hash_key": metadata.hash_key.hex(),
        "next_producer_id": metadata.next_producer_id,
        "last_wall_ms": metadata.last_wall_ms,
        "features": dict(metadata.features),
    }


def decode_metadata(data: bytes, path: str = "") -> ClusterMetadata:
    """Read a metadata file. Raises CorruptCheckpointError and NewerFormatError."""
    payload = sealed_json.unseal(MAGIC, VERSION, data, path)
    try:
        return ClusterMetadata(
            epoch=int(payload["epoch"]),
            cluster_id=str(payload["cluster_id"]),
            node_id=int(payload["node_id"]),
            topics={str(name): _topic(entry) for name, entry in payload["topics"].items()},
            deleted_topic_ids={
                _topic_id(text): tuple(str(item) for item in waiting)
                for text, waiting in payload["deleted_topic_ids"].items()
            },
            broker_dynamic=_texts(payload["broker_dynamic"]),
            hash_key=_hash_key(payload["hash_key"]),
            next_producer_id=int(payload["next_producer_id"]),
            last_wall_ms=int(payload["last_wall_ms"]),
            scram_users=decode_scram_users(payload.get("scram_users", {})),
            acls=decode_acls(payload.get("acls", [])),
            client_quotas=decode_quotas(payload.get("client_quotas", [])),
            features={str(name): int(level) for name, level in payload.get("features", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(path, f"its payload is malformed: {error!r}") from error


def _topic(entry: Mapping[str, Any]) -> TopicEntry:
    return TopicEntry(
        topic_id=_topic_id(entry["topic_id"]),
        partitions={int(index): str(where) for index, where in entry["partitions"].items()},
        dynamic=_texts(entry["dynamic"]),
        created_by=str(entry["created_by"]),
        created_ms=int(entry["created_ms"]),
        moves={
            int(index): (str(source), str(target))
            for index, (source, target) in entry.get("moves", {}).items()
        },
        file_retention=_texts(entry.get("file_retention", {})),
    )


def _topic_id(text: str) -> bytes:
    topic_id = decode_topic_id(text)
    if topic_id is None:
        raise ValueError(f"topic id {text!r:.40}")
    return topic_id


def _hash_key(text: str) -> bytes:
    key = bytes.fromhex(text)
    if len(key) != HASH_KEY_BYTES:
        raise ValueError(f"hash key of {len(key)} bytes")
    return key


def _texts(values: Mapping[str, str]) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items()}


# Runs a call for each data directory; returns the directories that hang, whose calls continue.
RunEach = Callable[[Mapping[str, Callable[[], None]]], frozenset[str]]


def run_in_turn(calls: Mapping[str, Callable[[], None]]) -> frozenset[str]:
    """Run a call for each data directory, one after the other."""
    for call in calls.values():
        call()
    return frozenset()


class MetadataStore:
    """The copies of the metadata in the data directories that are online.

    A directory whose copy cannot be read or written is removed from `directories` and added to
    `failed`; at the end of the operation the store calls `directory_failed(directory, reason)`.
    """

    def __init__(
        self,
        env: Env,
        directories: Sequence[str],
        directory_failed: Callable[[str, str], object] | None = None,
    ) -> None:
        assert directories
        self._env = env
        self._directories = list(directories)
        self._directory_failed = directory_failed
        self._encoder = MetadataEncoder()
        self.failed: dict[str, str] = {}  # directory -> reason
        self.corrupt: dict[str, str] = {}  # directory -> why its copy is invalid
        # Directories with an old copy, which the next save replaces.
        self.stale: tuple[str, ...] = ()
        self._last_dropped = (directories[0], "no data directory is online")

    @property
    def directories(self) -> tuple[str, ...]:
        """Return the directories that a save writes to."""
        return tuple(self._directories)

    def drop(self, directory: str, reason: str) -> None:
        """Remove a directory that went offline."""
        if directory in self._directories:
            self._directories.remove(directory)
            self._last_dropped = (directory, reason)

    def load(self, *, unopened: Iterable[str] = ()) -> ClusterMetadata | None:
        """Return the valid copy with the highest epoch; None if no directory has any copy.

        `unopened` are configured directories that could not be opened. Without a copy elsewhere
        this is an error, because they may have the only one.

        Raises CorruptCheckpointError, NewerFormatError, InconsistentDirectoryError for copies of
        different clusters or nodes, LogDirectoryError if no directory is readable.
        """
        copies: dict[str, ClusterMetadata] = {}
        failed: dict[str, str] = {}
        self.corrupt = {}
        for directory in self._directories:
            path = os.path.join(directory, FILE_NAME)
            try:
                # An administrator may repair a broken link.
                if self._env.exists(path) or self._env.is_link(path):
                    copies[directory] = decode_metadata(self._env.read_file(path), path)
            except CorruptCheckpointError as error:
                self.corrupt[directory] = error.reason
            except OSError as error:
                failed[directory] = f"{path}: {error}"
        newest = _newest(copies)
        if newest is None:
            self._refuse_empty_start(
                {**dict.fromkeys(unopened, "it could not be opened"), **failed}
            )
        self.stale = tuple(
            directory for directory in self._directories if copies.get(directory) != newest
        )
        self._report(failed)
        return newest

    def _refuse_empty_start(self, unreadable: Mapping[str, str]) -> None:
        for directory, reason in self.corrupt.items():
            raise CorruptCheckpointError(os.path.join(directory, FILE_NAME), reason)
        for directory, reason in unreadable.items():
            raise LogDirectoryError(directory, f"{reason}; no other directory has {FILE_NAME}")

    def save(
        self,
        metadata: ClusterMetadata,
        *,
        with_all: bool = True,
        without: Collection[str] = (),
        run_each: RunEach = run_in_turn,
    ) -> ClusterMetadata:
        """Write a state to every directory; return it with its new epoch.

        The result is durable in all remaining `directories` but the `stale` ones. With `with_all`,
        the save fails if one directory has no space or descriptors; otherwise, and if it has no
        space for the name while others have the state, that directory keeps its old copy.
        Directories in `without`, and those that hang, keep theirs in any case. Raises
        LogDirectoryError if no directory has it, NoRoomError if nothing was changed.
        """
        saved = replace(metadata, epoch=metadata.epoch + 1)
        data = self._encoder.encode(saved)
        paths = {
            directory: os.path.join(directory, FILE_NAME)
            for directory in self._directories
            if directory not in without
        }
        failed: dict[str, str] = {}
        refused: dict[str, NoRoomError] = {}
        folders: dict[str, Folder] = {}  # opened before any rename: see Folder

        def write(directory: str) -> None:
            path = paths[directory]
            try:
                folders[directory] = self._write_beside(directory, path, data)
            except NoRoomError as error:
                refused[directory] = error
            except OSError as error:
                failed[directory] = f"{path}: {error}"

        def put_in_place(directory: str) -> None:
            path, folder = paths[directory], folders[directory]
            try:
                try:
                    rename_if_room(self._env, f"{path}.tmp", path)
                except NoRoomError as error:
                    remove_temporary(self._env, f"{path}.tmp")
                    refused[directory] = error
                else:
                    folder.sync()
            except OSError as error:
                failed[directory] = f"{path}: {error}"
            finally:
                folder.close()

        hanging = run_each({directory: partial(write, directory) for directory in paths})
        written = folders.keys() - hanging
        for refusal in tuple(refused.values()) if with_all or not written else ():
            for other in written:
                folders[other].close()
            for other in paths.keys() - failed - hanging:
                remove_temporary(self._env, f"{paths[other]}.tmp")
            raise refusal
        in_order = [directory for directory in paths if directory in written]
        hanging |= run_each({directory: partial(put_in_place, directory) for directory in in_order})
        self.stale = tuple(
            directory
            for directory in self._directories
            if directory in refused or directory in without or directory in hanging
        )
        failures = {path: reason for path, reason in tuple(failed.items()) if path not in hanging}
        self._report(failures)
        if refused and written <= refused.keys():
            raise next(iter(refused.values()))
        if written <= refused.keys() | failures.keys() | hanging:
            raise self._failure(failures)
        return saved

    def _write_beside(self, directory: str, path: str, data: bytes) -> Folder:
        """Write the temporary file and open its folder. Raises NoRoomError, else OSError."""
        write_temporary(self._env, path, data)
        try:
            return self._env.open_folder(directory)
        except OSError as error:
            if is_out_of_descriptors(error):
                raise NoRoomError(error, directory) from error
            raise

    def _report(self, failed: Mapping[str, str]) -> None:
        for directory, reason in failed.items():
            self.drop(directory, reason)
        self.failed.update(failed)
        if self._directory_failed is not None:
            for directory, reason in failed.items():
                self._directory_failed(directory, reason)
        if not self._directories:
            raise self._failure(failed)

    def _failure(self, failed: Mapping[str, str]) -> LogDirectoryError:
        return LogDirectoryError(*next(iter(failed.items()), self._last_dropped))


def _newest(copies: Mapping[str, ClusterMetadata]) -> ClusterMetadata | None:
    """Return the newest copy; of different copies with one epoch, the later one.

    Raises InconsistentDirectoryError for copies of different clusters or nodes.
    """
    newest: ClusterMetadata | None = None
    for directory, copy in copies.items():
        if newest is None:
            newest = copy
            continue
        if copy.cluster_id != newest.cluster_id:
            raise InconsistentDirectoryError(
                directory, "cluster id in varve.metadata", copy.cluster_id, newest.cluster_id
            )
        if copy.node_id != newest.node_id:
            raise InconsistentDirectoryError(
                directory, "node id in varve.metadata", str(copy.node_id), str(newest.node_id)
            )
        if (copy.epoch, copy.last_wall_ms) > (newest.epoch, newest.last_wall_ms):
            newest = copy
    return newest
