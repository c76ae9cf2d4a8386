"""Creates, changes and deletes topics, and changes dynamic settings of the broker.

Rules
- Changes are serialised and durable (broker/topics/metadata_writer.py). A change saves its intent
  first, then makes the folders, then saves the metadata that names them; a start undoes a creation
  that was cut off.
- A change that makes or removes many folders (topic_folders.py), or the offsets of many groups,
  gives way between them to the changes of other clients.
- The number of partitions has a limit, and clients have shares of it (partition_limits.py).
- One change may create, delete or alter several topics. Their results are those of one change
  after the other.
- Settings have layers (config/topics/keys.py): AlterConfigs changes the dynamic layer only. The
  settings file never deletes a topic and never removes partitions.
"""

import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import structlog

from broker.event_loop.loop_turns import Turns
from broker.topics.effective_settings import INTERNAL_SETTINGS, EffectiveSettings, resolve_layers
from broker.topics.metadata_writer import MetadataWriter
from broker.topics.partition import Partition
from broker.topics.partition_limits import PartitionLimits
from broker.topics.topic_folders import TopicFolders
from broker.topics.topics import Topic, TopicError, Topics
from config.broker_keys import BrokerLimits
from config.settings import CleanerSettings, Settings
from config.topics.keys import TopicConfig, TopicLayers, is_left_by_file, retention_of_file
from config.topics.names import InvalidTopicNameError, check_new_name, view_conflict, view_name
from config.units import counted
from protocol.errors import ErrorCode
from storage.directory.cluster_metadata import ClusterMetadata, TopicEntry
from storage.directory.partition_placement import TAKEN_OVER
from storage.errors import NoRoomError, StorageError
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition

logger = structlog.get_logger("broker.topics")

_T = TypeVar("_T")

# Partitions of topics that are created, deleted or altered together. They share the saves of the
# metadata, which take 30 ms each among 4,000 topics.
PARTITIONS_PER_GROUP: Final = 50

# Maps the present dynamic settings to the new ones. Raises TopicError.
Change = Callable[[Mapping[str, str]], Mapping[str, str]]
# Takes the number of partitions of a topic that is about to be created or deleted, and refuses it
# with a TopicError.
Charge = Callable[[int], None]


class CleanerControl(Protocol):
    """The methods of cleaner/scheduler/cleaner_pool.py that changes of topics call."""

    def paused(self, partition: TopicPartition, reason: str) -> AbstractAsyncContextManager[None]:
        """Pause cleaning during the block; entering waits until the worker releases the files."""
        ...

    def forget_failures(self, partition: TopicPartition) -> None:
        """Forget earlier failures: the partition is a new one."""

    def configure(self, settings: CleanerSettings) -> None:
        """Apply new settings; running jobs continue."""

    def wake(self) -> None:
        """Look for work: settings changed."""


class OffsetDeletion(Protocol):
    """The methods of broker/groups/deletion.py that changes of topics call."""

    async def forget_topics(
        self, topics: Collection[str], give_way: Callable[[], Awaitable[None]] | None = None
    ) -> int:
        """Delete the offsets that are committed for topics and views; return their number.

        `give_way` is called after each group that has such offsets.
        """
        ...

    async def forget_earlier_topic(self, topic: str) -> None:
        """Delete the offsets of a deleted topic, before a topic of the same name is created."""
        ...


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create. `dynamic` has its dynamic settings by name, with canonical values."""

    name: str
    partitions: int
    dynamic: Mapping[str, str] = field(default_factory=dict)
    created_by: str = "client"
    creator: Hashable = None  # for whose share it counts; None: for nobody's


@dataclass(frozen=True, slots=True)
class TopicAlteration:
    """A change of the dynamic settings of a topic."""

    name: str
    change: Change


# A topic that was created, deleted or altered, or why it was not.
TopicResult = Topic | TopicError | StorageError


@dataclass(frozen=True, slots=True)
class _NewSettings:
    """A topic with the settings that it is about to get."""

    topic: Topic
    layers: TopicLayers
    config: TopicConfig

    @property
    def voids_cleans(self) -> bool:
        """Return whether the change starts or ends compaction, which voids a running clean.

        All other keys wait for the next job, so that a client that alters a topic all the time
        does not keep it from being cleaned.
        """
        old, new = self.topic.config, self.config
        return (old.compacts, old.policy_known) != (new.compacts, new.policy_known)


class MetadataService:
    """Carries out changes of topics and dynamic settings."""

    def __init__(
        self,
        manager: LogManager,
        writer: MetadataWriter,
        settings: EffectiveSettings,
        topics: Topics,
        cleaner: CleanerControl,
        *,
        open_partition: Callable[[Log], Partition],
        apply_limits: Callable[[BrokerLimits], None],
        open_views: Callable[[Iterable[Topic]], Awaitable[None]],
        drop_counts: Callable[[str], None],
    ) -> None:
        """`open_partition` serves a log; `apply_limits` applies limits that a client changed.

        `open_views` opens the compacted views that topics have, and waits for them. `drop_counts`
        forgets what was counted for a deleted topic or view.
        """
        self.offset_deletion: OffsetDeletion  # set before topics are created and deleted
        self._manager = manager
        self._writer = writer
        self._settings = settings
        self._topics = topics
        self._cleaner = cleaner
        self._open_partition = open_partition
        self._apply_limits = apply_limits
        self._open_views = open_views
        self._drop_counts = drop_counts
        self._folders = TopicFolders(manager, writer, settings)
        self._limits = PartitionLimits(settings, self._folders.partition_count)

    # Start ------------------------------------------------------------------------

    def load(self) -> None:
        """Register the topics whose logs the manager has opened."""
        for name, entry in self._manager.metadata.topics.items():
            if not entry.partitions:
                continue  # its creation was cut off; `finish_interrupted` undoes it
            topic = self._register(name, entry, {})
            _warn_of_unknown_policy(topic)

    async def finish_interrupted(self) -> None:
        """Undo creations that a crash cut off; opening the logs has removed their folders."""
        metadata = self._manager.metadata
        names = [name for name, entry in metadata.topics.items() if not entry.partitions]
        for name in names:
            logger.warning("interrupted topic creation undone", topic=name)
        if names:
            with suppress(NoRoomError):  # the next start does the same
                await self._writer.save(metadata.without_topics(names))

    async def apply_yaml(self) -> None:
        """Create the topics that the settings file names, and add partitions to those that exist.

        Partitions are only added if the file gives their number for the topic itself: a default is
        for new topics. Raises the first TopicError or StorageError when all other topics are done.
        """
        await self._writer.run(None, self._note_file_retention)
        new_topics, errors = list[NewTopic](), list[Exception]()
        for name, settings in self._settings.file.topics.items():
            requested = settings.partitions
            topic = self._topics.get(name)
            if topic is None:
                partitions = self._settings.file.partitions(name)
                new_topics.append(NewTopic(name, partitions, created_by="yaml"))
            elif requested is None:
                continue
            elif topic.partition_count < requested:
                logger.warning(
                    "adding partitions: new records of a key may go to another partition",
                    reason="the topic has fewer partitions than configured",
                    topic=name,
                    partitions=topic.partition_count,
                    configured=requested,
                )
                try:
                    await self.add_partitions(name, requested)
                except (TopicError, StorageError) as error:
                    errors.append(error)
            elif topic.partition_count > requested:
                logger.warning(
                    "partitions not removed",
                    reason="the topic has more partitions than configured",
                    topic=name,
                    partitions=topic.partition_count,
                    configured=requested,
                )
        results = await self.create_all(new_topics)
        errors += [result for result in results if isinstance(result, Exception)]
        if errors:
            raise errors[0]

    async def _note_file_retention(self) -> None:
        """Save what the settings file says of deletion, for a start without it."""
        changed, turns = {}, Turns()
        for topic in self._topics:
            entry = self._manager.metadata.topics[topic.name]
            noted = _note_retention(entry, topic.layers)
            if noted is not entry:
                changed[topic.name] = noted
            await turns.take()
        if changed:
            with suppress(NoRoomError):  # the next start or reload does the same
                await self._writer.save(self._manager.metadata.with_topics(changed))

    # Topics -----------------------------------------------------------------------

    def check_name(self, name: str) -> None:
        """Refuse a name that no topic may have. Raises TopicError."""
        if name not in INTERNAL_SETTINGS:
            try:
                check_new_name(name)
            except InvalidTopicNameError as error:
                raise TopicError(ErrorCode.INVALID_TOPIC_EXCEPTION, str(error)) from error

    def check_is_new(self, name: str) -> None:
        """Refuse a name that no topic may have, or one has already. Raises TopicError."""
        self.check_name(name)
        if name in self._topics:
            raise TopicError(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {name} exists already")

    def check_new(self, new_topic: NewTopic, before: Iterable[NewTopic] = ()) -> TopicConfig:
        """Return the settings of a topic to create after those `before` it.

        Raises TopicError if it may not exist.
        """
        name, partitions = new_topic.name, new_topic.partitions
        self.check_is_new(name)
        pending = sum(other.partitions for other in before)
        self._limits.check(partitions, partitions, new_topic.creator, pending)
        config = resolve_layers(self._settings.layers(name, new_topic.dynamic, taken_over=False))
        self._check_view(name, config)
        return config

    def creator(self, partition: TopicPartition) -> Hashable | None:
        """Return the client for which a partition counts; None if it counts for nobody."""
        return self._limits.creator(partition)

    def check_growth(self, name: str, total: int, creator: Hashable = None) -> Topic:
        """Refuse a number of partitions that is not larger than the present. Raises TopicError."""
        topic = self._topics.existing(name)
        if total <= topic.partition_count:
            raise TopicError(
                ErrorCode.INVALID_PARTITIONS,
                f"topic {name} has {counted(topic.partition_count, 'partition')} already; the "
                f"number can only grow, so {total} is not possible",
            )
        self._limits.check(total, total - topic.partition_count, creator)
        return topic

    async def create(
        self,
        name: str,
        partitions: int,
        dynamic: Mapping[str, str],
        *,
        client: Hashable = None,
        created_by: str = "client",
        creator: Hashable = None,
    ) -> Topic:
        """Create a topic; -1 partitions means the default. Raises TopicError, StorageError."""
        if partitions == -1:
            partitions = self._settings.file.partitions(name)
        new_topic = NewTopic(name, partitions, dynamic, created_by, creator)
        (result,) = await self.create_all([new_topic], client=client)
        if isinstance(result, Exception):
            raise result
        return result

    async def create_all(
        self,
        new_topics: Sequence[NewTopic],
        charge: Charge | None = None,
        *,
        client: Hashable = None,
    ) -> list[TopicResult]:
        """Create topics with different names, in groups; return a result for each."""
        change = partial(self._create_group, charge=charge)
        return await self._in_groups(change, new_topics, client)

    async def _in_groups(
        self,
        change: Callable[[Sequence[_T]], Coroutine[Any, Any, list[TopicResult]]],
        topics: Sequence[_T],
        client: Hashable,
    ) -> list[TopicResult]:
        """Make a change that takes a few of the topics at a time, until it has taken all."""
        results: list[TopicResult] = []
        while len(results) < len(topics):
            rest = topics[len(results) : len(results) + PARTITIONS_PER_GROUP]
            results += await self._writer.run(client, change, rest)
        return results

    async def _create_group(
        self, new_topics: Sequence[NewTopic], charge: Charge | None
    ) -> list[TopicResult]:
        """Create the first of the topics, as many as make a group; return their results."""
        await self._folders.wait_finished([new_topic.name for new_topic in new_topics])
        # There is room for all topics of a group. So no topic is refused because of another one
        # whose creation then fails.
        sizes = [new_topic.partitions for new_topic in new_topics]
        group = new_topics[: _group_size(sizes, min(PARTITIONS_PER_GROUP, self._limits.room))]
        results: dict[str, TopicResult] = {}
        permitted, turns = list[NewTopic](), Turns()
        for new_topic in group:
            await turns.take()
            try:
                self.check_new(new_topic, permitted)
                if charge is not None:
                    charge(new_topic.partitions)
            except TopicError as error:
                results[new_topic.name] = error
                continue
            for name in self._names_with_view(new_topic.name):
                await self.offset_deletion.forget_earlier_topic(name)
            permitted.append(new_topic)
            self._limits.add(new_topic.name, range(new_topic.partitions), new_topic.creator)
        if permitted:
            self._writer.note_lines(len(permitted))
            results |= await self._create_permitted(permitted)
        for new_topic in permitted:
            if new_topic.name not in self._topics:  # it failed
                await self._limits.remove(new_topic.name, range(new_topic.partitions))
        return [results[new_topic.name] for new_topic in group]

    async def _create_permitted(self, new_topics: Sequence[NewTopic]) -> dict[str, TopicResult]:
        """Save the intents, make the folders, save the placements, then serve the topics."""
        intents = {}
        for topic in new_topics:
            layers = self._settings.layers(topic.name, topic.dynamic, taken_over=False)
            intents[topic.name] = TopicEntry(
                uuid.uuid4().bytes,
                {},
                dict(topic.dynamic),
                topic.created_by,
                file_retention=retention_of_file(layers),
            )
        try:
            await self._writer.save(self._manager.metadata.with_topics(intents))
        except StorageError as error:
            return dict.fromkeys(intents, error)
        placements: dict[str, Mapping[int, str]] = {}
        failures: dict[str, TopicResult] = {}
        left: dict[str, Mapping[int, str]] = {}  # of failures
        with self._folders.locked({topic.name: topic.partitions for topic in new_topics}):
            for topic in new_topics:
                try:
                    placements[topic.name] = await self._folders.make(
                        topic.name, range(topic.partitions)
                    )
                except StorageError as error:
                    failures[topic.name] = error
                    left |= await self._folders.remove(_partitions_of(topic.name, topic.partitions))
            try:
                metadata = self._placed(placements | left).without_topics(failures)
                await self._writer.save(metadata)
            except StorageError as error:
                await self._undo_creation(placements, intents, left)
                return dict.fromkeys(placements, error) | failures
        return failures | await self._serve_created(placements)

    async def _undo_creation(
        self,
        placements: Mapping[str, Mapping[int, str]],
        intents: Iterable[str],
        left: Mapping[str, Mapping[int, str]],
    ) -> None:
        """Remove folders that the metadata does not name, and the intents to create topics.

        `left`: other folders that could not be removed.
        """
        left_now = await self._folders.remove(
            [TopicPartition(name, index) for name in placements for index in placements[name]]
        )
        try:
            await self._writer.save(self._placed({**left, **left_now}).without_topics(intents))
        except StorageError as error:  # the next start removes them
            logger.error("topic creation not undone", topics=list(intents), reason=str(error))

    async def _serve_created(self, names: Iterable[str]) -> dict[str, TopicResult]:
        """Open and register the partitions of new topics; return the topics."""
        topics, turns = {}, Turns()
        for name in names:
            topic = topics[name] = await self._register_created(name, turns)
            logger.info(
                "topic created",
                topic=name,
                partitions=topic.partition_count,
                created_by=self._manager.metadata.topics[name].created_by,
            )
        await self._open_views(topics.values())
        return dict(topics)

    async def ensure(
        self,
        name: str,
        partitions: int = -1,
        *,
        client: Hashable = None,
        created_by: str = "first use",
        creator: Hashable = None,
    ) -> Topic:
        """Return the topic, creating it if there is none. Raises TopicError, StorageError."""
        topic = self._topics.get(name)
        if topic is None:
            try:
                topic = await self.create(
                    name, partitions, {}, client=client, created_by=created_by, creator=creator
                )
            except TopicError as error:
                topic = self._topics.get(name)  # another client may have been quicker
                if topic is None or error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                    raise
        return topic

    async def add_partitions(
        self, name: str, total: int, *, client: Hashable = None, creator: Hashable = None
    ) -> None:
        """Grow a topic to `total` partitions. Raises TopicError, StorageError."""
        await self._writer.run(client, self._add_partitions, name, total, creator)

    async def _add_partitions(self, name: str, total: int, creator: Hashable) -> None:
        await self._folders.wait_finished([name])
        topic = self.check_growth(name, total, creator)
        indexes = range(topic.partition_count, total)
        self._limits.add(name, indexes, creator)
        try:
            with self._folders.locked({name: len(indexes)}):
                await self._place_partitions(name, indexes)
        except StorageError:
            await self._limits.remove(name, indexes)
            raise
        await self._register_created(name, Turns())
        await self._open_views([topic])
        logger.info("partitions added", topic=name, partitions=total)

    async def _place_partitions(self, name: str, indexes: range) -> None:
        """Make the folders of more partitions and name them in the metadata, or do nothing."""
        try:
            placement = await self._folders.make(name, indexes)
            await self._writer.save(self._placed({name: placement}))
        except StorageError:
            await self._folders.remove([TopicPartition(name, index) for index in indexes])
            raise

    async def delete(self, name: str, *, client: Hashable = None) -> None:
        """Delete the topic that has this name. Raises TopicError, StorageError."""
        await self._writer.run(client, self._delete, name)

    async def _delete(self, name: str) -> None:
        await self._folders.wait_finished([name])
        await self._delete_permitted([self._topics.existing(name)])

    async def delete_all(
        self,
        topics: Sequence[Topic],
        charge: Charge | None = None,
        *,
        client: Hashable = None,
    ) -> list[TopicResult]:
        """Delete these topics, and no others of their names, in groups; return their results.

        No topic is there twice.
        """
        change = partial(self._delete_group, charge=charge)
        return await self._in_groups(change, topics, client)

    async def _delete_group(
        self, topics: Sequence[Topic], charge: Charge | None
    ) -> list[TopicResult]:
        """Delete the first of the topics, as many as make a group; return their results."""
        await self._folders.wait_finished([topic.name for topic in topics])
        sizes = [topic.partition_count for topic in topics]
        results: list[TopicResult] = []
        permitted: list[Topic] = []
        for topic in topics[: _group_size(sizes, PARTITIONS_PER_GROUP)]:
            try:
                if self._topics.existing(topic.name) is not topic:
                    another = f"another topic is named {topic.name} now"
                    raise TopicError(ErrorCode.UNKNOWN_TOPIC_ID, another)
                if charge is not None:
                    charge(topic.partition_count)
            except TopicError as error:
                results.append(error)
            else:
                permitted.append(topic)
                results.append(topic)
        try:
            await self._delete_permitted(permitted)
        except StorageError as error:
            return [error if isinstance(result, Topic) else result for result in results]
        return results

    async def _delete_permitted(self, topics: Sequence[Topic]) -> None:
        """Save metadata without the topics, then remove them. Raises StorageError before that."""
        if not topics:
            return
        self._writer.note_lines(len(topics))
        served = [row.partition for topic in topics for row in topic.partitions.values()]
        offline = [TopicPartition(topic.name, index) for topic in topics for index in topic.offline]
        names, turns = [topic.name for topic in topics], Turns()
        async with self._cleaning_paused(served, "the topic is being deleted"):
            await self._writer.save(self._manager.metadata.without_topics(names))
            for topic in topics:
                self._topics.remove(topic)
            for topic in topics:
                deleted = TopicError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{topic.name} was deleted"
                )
                for each in tuple(topic.partitions.values()):
                    each.fail_waiters(deleted)
                    await turns.take()
            with self._folders.locked(dict.fromkeys(names, 0)):
                await self._folders.remove(served + offline)
        for topic in topics:
            await self._limits.remove(topic.name, range(topic.partition_count))
            await self._release(topic)
        for partition in served:
            self._cleaner.forget_failures(partition)  # a new topic of this name has none
            await turns.take()
        # No topic of these names is created meanwhile, whose offsets would be deleted.
        forgotten = [each for name in names for each in self._names_with_view(name)]
        with self._folders.locked(dict.fromkeys(names, 0)):
            await self.offset_deletion.forget_topics(forgotten, self._writer.give_way)
        for name in forgotten:
            self._drop_counts(name)
        for name in names:
            logger.info("topic deleted", topic=name)

    # Settings -----------------------------------------------------------------------

    async def alter(
        self,
        name: str,
        change: Change,
        *,
        validate_only: bool = False,
        client: Hashable = None,
    ) -> None:
        """Change a topic's dynamic settings. Raises TopicError, StorageError."""
        alteration = TopicAlteration(name, change)
        (result,) = await self.alter_all([alteration], validate_only=validate_only, client=client)
        if isinstance(result, Exception):
            raise result

    async def alter_all(
        self,
        alterations: Sequence[TopicAlteration],
        *,
        validate_only: bool = False,
        client: Hashable = None,
    ) -> list[TopicResult]:
        """Change the settings of topics with different names, in groups; return their results."""
        change = partial(self._alter_group, validate_only=validate_only)
        return await self._in_groups(change, alterations, client)

    async def _alter_group(
        self, alterations: Sequence[TopicAlteration], *, validate_only: bool
    ) -> list[TopicResult]:
        """Alter the first of the topics, as many as make a group; return their results."""
        await self._folders.wait_finished([alteration.name for alteration in alterations])
        topics = [self._topics.get(alteration.name) for alteration in alterations]
        sizes = [1 if topic is None else topic.partition_count for topic in topics]
        results: list[TopicResult] = []
        altered: dict[str, TopicEntry] = {}
        new_settings, turns = list[_NewSettings](), Turns()
        for alteration in alterations[: _group_size(sizes, PARTITIONS_PER_GROUP)]:
            await turns.take()
            try:
                settings, entry = self._altered(alteration)
            except TopicError as error:
                results.append(error)
            else:
                results.append(settings.topic)
                new_settings.append(settings)
                altered[alteration.name] = entry
        if validate_only or not altered:
            return results
        self._writer.note_lines(len(altered))
        try:
            await self._apply(new_settings, self._manager.metadata.with_topics(altered))
        except StorageError as error:
            return [error if isinstance(result, Topic) else result for result in results]
        for name, entry in altered.items():
            logger.info("topic settings changed", topic=name, dynamic=entry.dynamic)
        return results

    def _altered(self, alteration: TopicAlteration) -> tuple[_NewSettings, TopicEntry]:
        """Return the new settings of a topic, and its entry with them. Raises TopicError."""
        name = alteration.name
        topic = self._topics.existing(name)
        entry = self._manager.metadata.topics[name]
        dynamic = dict(alteration.change(entry.dynamic))
        layers = self._settings.layers(name, dynamic, taken_over=topic.layers.taken_over)
        policy = dynamic.get("cleanup.policy")
        is_new_policy = policy is not None and policy != entry.dynamic.get("cleanup.policy")
        if layers.left_by_file and is_new_policy:
            # Somebody decides anew about the records of the log, but not about the view, which may
            # have the only copy of others.
            kept = {key: v for key, v in entry.file_retention.items() if key == "varve.view"}
            entry = replace(entry, file_retention=kept)
            layers = replace(layers, left_by_file=is_left_by_file(layers, kept))
        settings = _NewSettings(topic, layers, resolve_layers(layers))
        if not topic.config.has_view:
            self._check_view(name, settings.config)
        return settings, _note_retention(replace(entry, dynamic=dynamic), layers)

    async def alter_broker(
        self, change: Change, *, validate_only: bool = False, client: Hashable = None
    ) -> None:
        """Change the broker's dynamic settings (Kafka's names). Raises TopicError, StorageError."""
        await self._writer.run(client, self._alter_broker, change, validate_only=validate_only)

    async def _alter_broker(self, change: Change, *, validate_only: bool) -> None:
        metadata = self._manager.metadata
        dynamic = dict(change(metadata.broker_dynamic))
        new_settings, entries, turns = [], {}, Turns()
        for topic in self._topics:
            entry = metadata.topics[topic.name]
            layers = self._settings.layers(
                topic.name,
                entry.dynamic,
                taken_over=topic.layers.taken_over,
                broker_dynamic=dynamic,
            )
            new_settings.append(_with_layers(topic, layers))
            entries[topic.name] = _note_retention(entry, layers)
            await turns.take()
        cleaner = self._settings.check_cleaner(self._settings.file, dynamic)
        if validate_only:
            return
        metadata = replace(metadata.with_topics(entries), broker_dynamic=dynamic)
        await self._apply(new_settings, metadata)
        self._cleaner.configure(cleaner)
        self._apply_limits(self._settings.limits())
        logger.info("broker settings changed", dynamic=dynamic)

    async def reload(self, file: Settings) -> None:
        """Replace the settings file's layers; `apply_yaml` creates the topics that the file adds.

        Raises TopicError, and changes nothing, if the file contradicts dynamic settings.
        """
        await self._writer.run(None, self._reload, file)

    async def _reload(self, file: Settings) -> None:
        new_settings, turns = [], Turns()
        for topic in self._topics:
            dynamic = self._manager.metadata.topics[topic.name].dynamic
            layers = self._settings.layers(
                topic.name, dynamic, taken_over=topic.layers.taken_over, file=file
            )
            if layers != topic.layers:
                new_settings.append(_with_layers(topic, layers))
            await turns.take()
        cleaner = self._settings.check_cleaner(file, self._manager.metadata.broker_dynamic)
        self._settings.file = file
        await self._apply(new_settings, None)
        for change in new_settings:
            _warn_of_unknown_policy(change.topic)
        self._cleaner.configure(cleaner)

    # Steps ----------------------------------------------------------------------

    async def _apply(self, changes: list[_NewSettings], metadata: ClusterMetadata | None) -> None:
        """Save `metadata`, then apply new settings while no worker owns an affected log."""
        partitions = [
            partition.partition
            for change in changes
            if change.voids_cleans
            for partition in change.topic.partitions.values()
        ]
        turns = Turns()
        async with self._cleaning_paused(partitions, "cleanup.policy is being changed"):
            if metadata is not None:
                await self._writer.save(metadata)
            for change in changes:
                change.topic.layers, change.topic.config = change.layers, change.config
                for partition in tuple(change.topic.partitions.values()):
                    partition.log.update_config(change.config)
                    await turns.take()
        await self._open_views(change.topic for change in changes if change.config.has_view)
        self._cleaner.wake()

    @asynccontextmanager
    async def _cleaning_paused(
        self, partitions: Iterable[TopicPartition], reason: str
    ) -> AsyncIterator[None]:
        """Pause and resume in turns, for there may be thousands of partitions."""
        turns = Turns()
        async with AsyncExitStack() as stack:
            for partition in partitions:
                stack.push_async_callback(turns.take)
                await stack.enter_async_context(self._cleaner.paused(partition, reason))
                await turns.take()
            yield

    def _placed(self, placements: Mapping[str, Mapping[int, str]]) -> ClusterMetadata:
        """Return the metadata with the directories of new partitions, by topic."""
        metadata = self._manager.metadata
        entries = {}
        for name, placement in placements.items():
            entry = metadata.topics[name]  # other partitions may have moved
            entries[name] = replace(entry, partitions={**entry.partitions, **placement})
        return metadata.with_topics(entries)

    async def _release(self, topic: Topic) -> None:
        """Let go of the logs of a deleted topic in turns: each closes its files."""
        partitions, turns = list(topic.partitions.values()), Turns()
        topic.partitions = {}  # requests that read the former dictionary keep it
        while partitions:
            partitions.pop()
            await turns.take()

    async def _register_created(self, name: str, turns: Turns) -> Topic:
        """Open new partitions in turns, for there may be thousands; then register them at once."""
        entry = self._manager.metadata.topics[name]
        partitions: dict[int, Partition] = {}
        topic = self._topics.get(name)
        for index in entry.partitions:
            log = self._manager.table.logs.get(TopicPartition(name, index))
            if log is not None and (topic is None or index not in topic.partitions):
                partitions[index] = self._open_partition(log)
            await turns.take()
        topic = self._register(name, entry, partitions)
        for partition in partitions.values():
            if partition.log.config != topic.config:  # a change to which the creation gave way
                partition.log.update_config(topic.config)
            await turns.take()
        return topic

    def _register(self, name: str, entry: TopicEntry, opened: Mapping[int, Partition]) -> Topic:
        """Register the partitions of a topic; those in `opened` have been opened already."""
        topic = self._topics.get(name)
        if topic is None:
            taken_over = entry.created_by == TAKEN_OVER
            layers = self._settings.layers(name, entry.dynamic, taken_over=taken_over)
            topic = Topic(name, entry.topic_id, layers, self._settings.topic_config(name))
        for index in entry.partitions:
            topic_partition = TopicPartition(name, index)
            log = self._manager.table.logs.get(topic_partition)
            if log is None:
                topic.offline[index] = self._manager.table.offline.get(
                    topic_partition, "its folder is missing"
                )
            elif index not in topic.partitions:
                topic.partitions[index] = opened.get(index) or self._open_partition(log)
        self._topics.add(topic)
        return topic

    def _names_with_view(self, name: str) -> Iterator[str]:
        """Yield the name of a topic, and that of its view unless it is a topic itself.

        Groups may have offsets of a view that was switched off.
        """
        yield name
        if view_name(name) not in self._topics:
            yield view_name(name)

    def _check_view(self, name: str, config: TopicConfig) -> None:
        """Refuse a compacted view that no client could read. Raises TopicError."""
        conflict = view_conflict(name, self._topics) if config.has_view else None
        if conflict is not None:
            raise TopicError(ErrorCode.INVALID_CONFIG, f"varve.view: {conflict}")


def _with_layers(topic: Topic, layers: TopicLayers) -> _NewSettings:
    """Return a topic with the settings of new layers. Raises TopicError, which names the topic."""
    try:
        return _NewSettings(topic, layers, resolve_layers(layers))
    except TopicError as error:
        raise TopicError(error.code, f"topics.{topic.name}: {error}") from error


def _note_retention(entry: TopicEntry, layers: TopicLayers) -> TopicEntry:
    """Return the entry with what the settings file says of deletion; the same object if it has it.

    A topic that the file has left keeps what was noted.
    """
    if layers.left_by_file or (retention := retention_of_file(layers)) == entry.file_retention:
        return entry
    return replace(entry, file_retention=retention)


def _warn_of_unknown_policy(topic: Topic) -> None:
    if topic.config.policy_known:
        return
    if topic.layers.taken_over:
        logger.warning(
            "policy unknown",
            topic=topic.name,
            reason="adopted from Kafka: set cleanup.policy to clean or expire this topic",
        )
    elif topic.layers.left_by_file:
        logger.warning(
            "policy unknown",
            topic=topic.name,
            reason="a settings file had the policy of this topic, and this start has no file that "
            "names it; the defaults would keep its records for less time, or remove its view: name "
            "it in the file, or set the cleanup.policy or retention.ms that it had, and varve.view "
            "if it had a view, to clean or expire it",
        )


def _partitions_of(name: str, count: int) -> list[TopicPartition]:
    return [TopicPartition(name, index) for index in range(count)]


def _group_size(sizes: Sequence[int], partitions_max: int) -> int:
    """Return how many of the first topics make a group: one, or several with so many partitions."""
    partitions = 0
    for number, size in enumerate(sizes):
        partitions += size
        if number > 0 and partitions > partitions_max:
            return number
    return len(sizes)
