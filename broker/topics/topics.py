"""The topics of this broker: names, ids, partitions, settings - and how they change.

Rules. One change at a time (`_changing`), each durable before it is answered: intent, folders,
then the metadata that names them. A change that has begun goes on to its end though the client that
asked for it leaves: half of one would be in the way of all that follow. A topic is seen by clients
only when all of it exists. Settings come in layers (config/topic_keys.py); AlterConfigs touches the
dynamic layer only, YAML never deletes a topic or takes partitions away.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar

import structlog

from broker.loop_turns import Turns
from broker.topics.partition import OfflinePartitionError, Partition
from config.broker_keys import BrokerLimits, broker_limits, cleaner_settings
from config.settings import PARTITIONS_PER_TOPIC_MAX, CleanerSettings, Settings
from config.topic_keys import (
    InvalidTopicConfigError,
    TopicConfig,
    TopicLayers,
    resolve,
)
from config.topic_names import (
    INTERNAL_TOPICS,
    InvalidTopicNameError,
    check_new_name,
    view_conflict,
)
from protocol.errors import ErrorCode
from storage.directory.cluster_metadata import ClusterMetadata, TopicEntry
from storage.directory.partition_placement import ADOPTED
from storage.errors import StorageError
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition

logger = structlog.get_logger("broker.topics")

# The dynamic layer as it stands -> as it is to be. Raises TopicError.
Change = Callable[[Mapping[str, str]], Mapping[str, str]]
_T = TypeVar("_T")

# Kafka's own topics are compacted whatever the defaults say; small segments let them shrink.
INTERNAL_SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    name: {"cleanup.policy": "compact", "segment.bytes": str(100 << 20)}
    for name in ("__consumer_offsets", "__transaction_state")
}


class TopicError(Exception):
    """A change that is refused; `code` goes onto the wire with the text."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(slots=True)
class Topic:
    """One topic. A partition is served, or offline for a reason."""

    name: str
    topic_id: bytes
    layers: TopicLayers
    config: TopicConfig
    partitions: dict[int, Partition] = field(default_factory=dict)
    offline: dict[int, str] = field(default_factory=dict)

    @property
    def partition_count(self) -> int:
        """Partitions that exist, served or not."""
        return len(self.partitions.keys() | self.offline.keys())

    @property
    def is_internal(self) -> bool:
        """Kafka's own bookkeeping."""
        return self.name in INTERNAL_TOPICS


class PartitionFactory(Protocol):
    """Makes a served partition of an open log."""

    def __call__(self, opened: Log) -> Partition:
        """A partition around a log."""
        ...


class CleanerControl(Protocol):
    """What changes of topics ask of the cleaner (cleaner/scheduler/cleaner_pool.py)."""

    def paused(self, partition: TopicPartition, reason: str) -> AbstractAsyncContextManager[None]:
        """Held while the block runs; entering waits until a worker has let go."""
        ...

    def retry(self, partition: TopicPartition) -> None:
        """Forget earlier failures: it is another partition now."""

    def configure(self, settings: CleanerSettings) -> None:
        """Take other settings; running jobs go on."""

    def wake(self) -> None:
        """There may be something to do: settings changed."""


class Topics:
    """All topics; the only place that creates, changes or deletes one."""

    def __init__(
        self,
        manager: LogManager,
        settings: Settings,
        make_partition: PartitionFactory,
        *,
        cleaner: Callable[[], CleanerControl],
        apply_limits: Callable[[BrokerLimits], None] = lambda _limits: None,
    ) -> None:
        """`apply_limits` puts limits that a client changed into effect."""
        self._manager = manager
        self._settings = settings
        self._make_partition = make_partition
        self._changing = asyncio.Lock()
        self._running_changes: set[asyncio.Task[Any]] = (
            set()
        )  # changes that wait for it, or have it
        self._by_name: dict[str, Topic] = {}
        self._by_id: dict[bytes, Topic] = {}
        self._apply_limits = apply_limits
        self._cleaner = cleaner  # called when it is needed: it is made after this

    # Looking ------------------------------------------------------------------

    def __iter__(self) -> Iterator[Topic]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Topic | None:
        """The topic of that name."""
        return self._by_name.get(name)

    def by_id(self, topic_id: bytes) -> Topic | None:
        """The topic of that id."""
        return self._by_id.get(topic_id)

    def partitions(self) -> Iterator[Partition]:
        """Every partition that is served."""
        for topic in self:
            yield from tuple(topic.partitions.values())

    def partition(self, partition: TopicPartition) -> Partition | None:
        """A served partition."""
        topic = self._by_name.get(partition.topic)
        return topic.partitions.get(partition.partition) if topic else None

    def find(self, topic: str | bytes, index: int) -> Partition | ErrorCode:
        """A served partition of a topic by name or id, or the code that says why there is none."""
        by_id = isinstance(topic, bytes)
        result = self._by_id.get(topic) if isinstance(topic, bytes) else self._by_name.get(topic)
        if result is None:
            unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return ErrorCode.UNKNOWN_TOPIC_ID if by_id else unknown
        partition = result.partitions.get(index)
        if partition is not None:
            return partition
        offline = index in result.offline
        return ErrorCode.KAFKA_STORAGE_ERROR if offline else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def layers_of(self, name: str, dynamic: Mapping[str, str], *, adopted: bool) -> TopicLayers:
        """The layers of settings of a topic, present or to be."""
        return replace(
            self._settings.layers(name),
            dynamic={**INTERNAL_SETTINGS.get(name, {}), **dynamic},
            broker_dynamic=self._manager.metadata.broker_dynamic,
            adopted=adopted and name not in INTERNAL_SETTINGS,
        )

    def config_of(self, name: str) -> TopicConfig:
        """Resolved settings of a topic by name; of one that nobody knows as of an adopted one.

        Settings that contradict each other by now (a default changed) are those of the table, and
        the topic counts as one whose policy is unknown: nothing is deleted by a mistake.
        """
        entry = self._manager.metadata.topics.get(name)
        dynamic = entry.dynamic if entry else {}
        adopted = entry is None or entry.created_by == ADOPTED
        layers = self.layers_of(name, dynamic, adopted=adopted)
        try:
            return resolve(layers)
        except InvalidTopicConfigError as error:
            logger.error("settings contradict; nothing is cleaned", topic=name, reason=str(error))
            return TopicConfig(policy_known=False)

    # Opening --------------------------------------------------------------------

    def load(self) -> None:
        """Take over what the manager has opened."""
        for name, entry in self._manager.metadata.topics.items():
            if not entry.partitions:
                continue  # a creation that was cut off; `finish_interrupted` undoes it
            topic = self._register(name, entry)
            if not topic.config.policy_known:
                logger.warning(
                    "cleanup.policy is unknown; neither cleaned nor expired until one is given",
                    topic=name,
                )

    async def finish_interrupted(self) -> None:
        """Undo creations that a crash cut off; their folders are gone already."""
        metadata = self._manager.metadata
        for name, entry in metadata.topics.items():
            if not entry.partitions:
                logger.warning("creation was cut off and is undone", topic=name)
                await asyncio.to_thread(self._manager.save_metadata, metadata.without_topic(name))

    async def apply_yaml(self) -> None:
        """Create the topics that the operator's file names, and add partitions it asks for."""
        for name in self._settings.topics:
            requested = self._settings.partitions(name)
            topic = self.get(name)
            if topic is None:
                await self.create(name, requested, {}, created_by="yaml")
            elif topic.partition_count < requested:
                await self.add_partitions(name, requested)
            elif topic.partition_count > requested:
                logger.warning(
                    "more partitions than configured; none is taken away",
                    topic=name,
                    partitions=topic.partition_count,
                    configured=requested,
                )

    # Changing -------------------------------------------------------------------

    def check_name(self, name: str) -> None:
        """Refuse a name that no topic may have. Raises TopicError."""
        if name not in INTERNAL_SETTINGS:
            try:
                check_new_name(name)
            except InvalidTopicNameError as error:
                raise TopicError(ErrorCode.INVALID_TOPIC_EXCEPTION, str(error)) from error

    def check_new(self, name: str, partitions: int, dynamic: Mapping[str, str]) -> TopicConfig:
        """Refuse a topic that may not be created. Raises TopicError."""
        self.check_name(name)
        if name in self._by_name:
            raise TopicError(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {name} exists already")
        self._check_count(partitions)
        config = self._resolve(self.layers_of(name, dynamic, adopted=False))
        self._check_view(name, config)
        return config

    async def create(
        self, name: str, partitions: int, dynamic: Mapping[str, str], *, created_by: str = "client"
    ) -> Topic:
        """Create a topic; durable when this returns. Raises TopicError, LogDirectoryError."""
        if partitions == -1:
            partitions = self._settings.partitions(name)
        return await self._shielded(self._create(name, partitions, dynamic, created_by))

    async def _create(
        self, name: str, partitions: int, dynamic: Mapping[str, str], created_by: str
    ) -> Topic:
        async with self._changing:
            self.check_new(name, partitions, dynamic)
            entry = TopicEntry(uuid.uuid4().bytes, {}, dict(dynamic), created_by)
            await self._save(self._manager.metadata.with_topic(name, entry))
            try:
                entry = await self._make_folders(name, entry, range(partitions))
            except StorageError:
                await self._save(self._manager.metadata.without_topic(name))
                raise
            topic = await self._register_created(name, entry)
        logger.info("topic created", topic=name, partitions=partitions, created_by=created_by)
        return topic

    async def ensure(self, name: str) -> Topic:
        """The topic, created on first use if need be. Raises TopicError, LogDirectoryError."""
        topic = self.get(name)
        if topic is None:
            try:
                topic = await self.create(name, -1, {}, created_by="first use")
            except TopicError as error:
                topic = self.get(name)  # another client was quicker
                if topic is None or error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                    raise
        return topic

    async def ensure_internal(self, name: str, partitions: int) -> Topic:
        """One of Kafka's own topics. Raises LogDirectoryError."""
        topic = self.get(name)
        return topic or await self.create(name, partitions, {}, created_by="broker")

    async def add_partitions(self, name: str, total: int) -> None:
        """Grow a topic to `total` partitions. Raises TopicError, LogDirectoryError."""
        await self._shielded(self._add_partitions(name, total))

    async def _add_partitions(self, name: str, total: int) -> None:
        async with self._changing:
            topic = self.check_growth(name, total)
            entry = self._manager.metadata.topics[name]
            await self._make_folders(name, entry, range(topic.partition_count, total))
            await self._register_created(name, self._manager.metadata.topics[name])
        logger.info("partitions added", topic=name, partitions=total)

    def check_growth(self, name: str, total: int) -> Topic:
        """Refuse a number of partitions that is no growth. Raises TopicError."""
        topic = self._existing(name)
        if total <= topic.partition_count:
            raise TopicError(
                ErrorCode.INVALID_PARTITIONS,
                f"topic {name} has {topic.partition_count} partitions; {total} would not be more",
            )
        self._check_count(total, total - topic.partition_count)
        return topic

    async def delete(self, name: str) -> None:
        """Delete a topic; durable when this returns. Raises TopicError."""
        await self._shielded(self._delete(name))

    async def _delete(self, name: str) -> None:
        async with self._changing:
            topic = self._existing(name)
            partitions = [partition.partition for partition in topic.partitions.values()]
            async with _pause_all(self._cleaner(), partitions, "its topic is deleted"):
                await self._save(self._manager.metadata.without_topic(name))
                del self._by_name[name]
                del self._by_id[topic.topic_id]
                gone = TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{name} was deleted")
                for partition in topic.partitions.values():
                    partition.close(gone)
                await self._remove_folders(name, topic.partitions.keys() | topic.offline.keys())
            for topic_partition in partitions:
                self._cleaner().retry(
                    topic_partition
                )  # the next one of this name did nothing wrong
        logger.info("topic deleted", topic=name)

    async def alter(self, name: str, change: Change, *, validate_only: bool = False) -> None:
        """Change a topic's dynamic settings, or only say whether that may be. Raises TopicError.

        `change` is called when no other change is under way, so that none overwrites another.
        """
        await self._shielded(self._alter(name, change, validate_only=validate_only))

    async def _alter(self, name: str, change: Change, *, validate_only: bool) -> None:
        async with self._changing:
            topic = self._existing(name)
            entry = self._manager.metadata.topics[name]
            dynamic = dict(change(entry.dynamic))
            layers = self.layers_of(name, dynamic, adopted=topic.layers.adopted)
            resettled = [(topic, layers, self._resolve(layers))]
            if not topic.config.has_view:
                self._check_view(name, resettled[0][2])
            if validate_only:
                return
            entry = replace(entry, dynamic=dynamic)
            await self._settle(resettled, self._manager.metadata.with_topic(name, entry))
        logger.info("topic settings changed", topic=name, dynamic=dynamic)

    async def alter_broker(self, change: Change, *, validate_only: bool = False) -> None:
        """Change the broker's dynamic settings (Kafka's names); as `alter`. Raises TopicError."""
        await self._shielded(self._alter_broker(change, validate_only=validate_only))

    async def _alter_broker(self, change: Change, *, validate_only: bool) -> None:
        async with self._changing:
            metadata = self._manager.metadata
            dynamic = dict(change(metadata.broker_dynamic))
            resettled = []
            turns = Turns()
            for topic in self:
                layers = replace(topic.layers, broker_dynamic=dynamic)
                resettled.append((topic, layers, self._resolve(layers)))
                await turns.take()
            cleaner = self._cleaner_settings(self._settings, dynamic)
            if validate_only:
                return
            await self._settle(resettled, replace(metadata, broker_dynamic=dynamic))
            self._cleaner().configure(cleaner)
            self._apply_limits(self.limits)
        logger.info("broker settings changed", dynamic=dynamic)

    async def reload(self, settings: Settings) -> None:
        """Put the file's layers in the place of the old ones, and make what it asks for.

        Raises TopicError where they contradict what clients set; then nothing is changed. Raises
        TopicError or LogDirectoryError also where a topic cannot be made; the rest holds then.
        """
        await self._shielded(self._reload(settings))

    async def _reload(self, settings: Settings) -> None:
        turns = Turns()
        async with self._changing:
            resettled = []
            for topic in self:
                layers = replace(
                    topic.layers,
                    yaml=settings.layers(topic.name).yaml,
                    topic_defaults=settings.topic_defaults.keys,
                )
                if layers != topic.layers:
                    try:
                        resettled.append((topic, layers, self._resolve(layers)))
                    except TopicError as error:
                        raise TopicError(error.code, f"topics.{topic.name}: {error}") from error
                await turns.take()
            cleaner = self._cleaner_settings(settings, self._manager.metadata.broker_dynamic)
            self._settings = settings
            await self._settle(resettled, None)
            self._cleaner().configure(cleaner)
        await self.apply_yaml()

    @property
    def limits(self) -> BrokerLimits:
        """The limits as they hold: what clients set over the file."""
        return broker_limits(self._settings, self._manager.metadata.broker_dynamic)

    @property
    def cleaner_settings(self) -> CleanerSettings:
        """The cleaner's settings as they hold: what clients set over the file.

        Where they contradict each other by now (the file changed between two runs) it is the
        file's: a broker that does not start could not be told otherwise.
        """
        try:
            return self._cleaner_settings(self._settings, self._manager.metadata.broker_dynamic)
        except TopicError as error:
            logger.error("dynamic settings of the cleaner are ignored", reason=str(error))
            return self._settings.cleaner

    async def note_time(self) -> None:
        """Write down what time it is, so that a clock that was set back shows at the next start."""
        async with self._changing:
            await self._save(self._manager.metadata)

    async def take_producer_ids(self, count: int) -> int:
        """The first of `count` producer ids that nobody was given before; durable."""
        return await self._shielded(self._take_producer_ids(count))

    async def _take_producer_ids(self, count: int) -> int:
        async with self._changing:
            first, metadata = self._manager.metadata.take_producer_ids(count)
            await self._save(metadata)
            return first

    def fail(self, partitions: Iterable[TopicPartition], reason: str) -> None:
        """Partitions whose directory failed: known, not served."""
        for topic_partition in partitions:
            topic = self._by_name.get(topic_partition.topic)
            if topic is None:
                continue
            topic.offline[topic_partition.partition] = reason
            partition = topic.partitions.pop(topic_partition.partition, None)
            if partition is not None:
                partition.close(OfflinePartitionError(topic_partition, reason))

    async def wait_idle(self, seconds: float) -> None:
        """Until no change is under way, but not longer than that."""
        if self._running_changes:
            await asyncio.wait(self._running_changes, timeout=seconds)

    # Steps ----------------------------------------------------------------------

    async def _shielded(self, change: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.create_task(change)
        self._running_changes.add(task)
        task.add_done_callback(self._running_changes.discard)
        return await asyncio.shield(task)

    async def _save(self, metadata: ClusterMetadata) -> None:
        await asyncio.to_thread(self._manager.save_metadata, metadata)

    async def _settle(
        self,
        resettled: list[tuple[Topic, TopicLayers, TopicConfig]],
        metadata: ClusterMetadata | None,
    ) -> None:
        """Make changed settings durable, then valid; no worker has a log whose policy changes."""
        partitions = [
            partition.partition
            for topic, _, config in resettled
            if _concerns_jobs(topic.config, config)
            for partition in topic.partitions.values()
        ]
        turns = Turns()
        async with _pause_all(self._cleaner(), partitions, "its cleanup.policy changes"):
            if metadata is not None:
                await self._save(metadata)
            for topic, layers, config in resettled:
                topic.layers, topic.config = layers, config
                for partition in tuple(topic.partitions.values()):
                    partition.log.update_config(config)
                    await turns.take()
        self._cleaner().wake()

    async def _make_folders(self, name: str, entry: TopicEntry, indexes: range) -> TopicEntry:
        """All of them, or none: what was made before a failure is taken away again."""
        config = self._resolve(self.layers_of(name, entry.dynamic, adopted=False))
        placement, turns = dict(entry.partitions), Turns()
        new = [TopicPartition(name, index) for index in indexes]
        try:
            await asyncio.to_thread(self._manager.create_all, new, entry.topic_id, config)
            for partition in new:
                placement[partition.partition] = self._manager.directory_id_of(partition)
                await turns.take()
            entry = replace(entry, partitions=placement)
            await self._save(self._manager.metadata.with_topic(name, entry))
        except StorageError:
            await self._remove_folders(name, indexes)
            raise
        return entry

    async def _remove_folders(self, name: str, indexes: Iterable[int]) -> None:
        """Those that cannot be removed now are when their directory is opened again."""
        for index in sorted(indexes):
            try:
                await asyncio.to_thread(self._manager.delete, TopicPartition(name, index))
            except StorageError as error:
                logger.error("folder stays", topic=name, partition=index, reason=str(error))

    async def _register_created(self, name: str, entry: TopicEntry) -> Topic:
        """As `_register`, in turns: there may be thousands. Seen when all of them are ready."""
        made: dict[Log, Partition] = {}
        topic, turns = self._by_name.get(name), Turns()
        for index in entry.partitions:
            opened = self._manager.logs.get(TopicPartition(name, index))
            if opened is not None and (topic is None or index not in topic.partitions):
                made[opened] = self._make_partition(opened)
            await turns.take()
        return self._register(name, entry, made)

    def _register(
        self, name: str, entry: TopicEntry, made: Mapping[Log, Partition] | None = None
    ) -> Topic:
        topic = self._by_name.get(name)
        if topic is None:
            layers = self.layers_of(name, entry.dynamic, adopted=entry.created_by == ADOPTED)
            topic = Topic(name, entry.topic_id, layers, self.config_of(name))
        for index in entry.partitions:
            topic_partition = TopicPartition(name, index)
            opened = self._manager.logs.get(topic_partition)
            if opened is None:
                topic.offline[index] = self._manager.offline.get(
                    topic_partition, "its folder is missing"
                )
            elif index not in topic.partitions:
                partition = made.get(opened) if made is not None else None
                topic.partitions[index] = partition or self._make_partition(opened)
        self._by_name[name] = topic
        self._by_id[topic.topic_id] = topic
        return topic

    def _existing(self, name: str) -> Topic:
        topic = self._by_name.get(name)
        if topic is None:
            raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        return topic

    def _cleaner_settings(self, file: Settings, dynamic: Mapping[str, str]) -> CleanerSettings:
        try:
            return cleaner_settings(file, dynamic)
        except InvalidTopicConfigError as error:
            raise TopicError(ErrorCode.INVALID_CONFIG, str(error)) from error

    def _check_view(self, name: str, config: TopicConfig) -> None:
        """Refuse to set up a view that could not be read. Raises TopicError."""
        conflict = view_conflict(name, self._by_name) if config.has_view else None
        if conflict is not None:
            raise TopicError(ErrorCode.INVALID_CONFIG, f"varve.view: {conflict}")

    def _resolve(self, layers: TopicLayers) -> TopicConfig:
        try:
            return resolve(layers)
        except InvalidTopicConfigError as error:
            raise TopicError(ErrorCode.INVALID_CONFIG, str(error)) from error

    def _check_count(self, partitions: int, added: int | None = None) -> None:
        if not (partitions == -1 or 1 <= partitions <= PARTITIONS_PER_TOPIC_MAX):
            raise TopicError(
                ErrorCode.INVALID_PARTITIONS,
                f"a topic has 1 to {PARTITIONS_PER_TOPIC_MAX} partitions, not {partitions}",
            )
        present = len(self._manager.logs) + len(self._manager.offline)
        limit = self._settings.limits.partitions
        if present + (partitions if added is None else added) > limit:
            raise TopicError(
                ErrorCode.INVALID_PARTITIONS,
                f"this broker has {present} partitions, limits.partitions is {limit}",
            )


def _concerns_jobs(old: TopicConfig, new: TopicConfig) -> bool:
    """Whether a clean under way is void: compaction begins or ends with this change.

    All other keys, retention beside compaction among them, are those of the next job. So a client
    that alters a topic all the time does not keep it from being cleaned.
    """
    return (old.compacts, old.policy_known) != (new.compacts, new.policy_known)


@asynccontextmanager
async def _pause_all(
    cleaner: CleanerControl, partitions: list[TopicPartition], reason: str
) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for partition in partitions:
            await stack.enter_async_context(cleaner.paused(partition, reason))
        yield
