"""The topic __consumer_offsets: creates it on first use, loads it, appends to it.

An existing topic keeps its number of partitions, because a group's partition depends on it; the
settings give the number for a new topic. Appends are acknowledged as with acks=all.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from broker.groups.coordinator import GroupCoordinator, PartitionState
from broker.groups.offsets_store import OFFSETS_TOPIC, LogRecord, load
from broker.topics.metadata_service import MetadataService
from broker.topics.partition import Partition
from broker.topics.topics import TopicError, Topics
from config.settings import GroupSettings
from protocol.errors import ErrorCode, code_of
from storage.env import Env
from storage.errors import LogDirectoryError, StorageError
from storage.format.batch import Record, build_batch, read_header
from storage.model import TopicPartition

logger = structlog.get_logger("broker.offsets_topic")

LOADERS = 2  # partitions loaded at a time: decoding is bound by the one interpreter


class OffsetsTopic:
    """The coordinator's access to __consumer_offsets."""

    def __init__(
        self,
        topics: Topics,
        metadata_service: MetadataService,
        env: Env,
        settings: GroupSettings,
        *,
        clock_trusted: Callable[[], bool],
    ) -> None:
        self._topics = topics
        self._metadata_service = metadata_service
        self._env = env
        self._configured = settings.offsets_partitions
        self._check_seconds = settings.offsets_retention_check_interval_ms / 1000
        self._clock_trusted = clock_trusted
        self._creating: asyncio.Task[ErrorCode] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.coordinator: GroupCoordinator  # set before `start`

    @property
    def partition_count(self) -> int:
        """Return the number of partitions that the topic has, or will have."""
        topic = self._topics.get(OFFSETS_TOPIC)
        return topic.partition_count if topic is not None else self._configured

    def start(self) -> None:
        """Load the topic in the background and start the expiry of offsets."""
        self._tasks.append(asyncio.create_task(self._expire(), name="expire offsets"))
        if self._topics.get(OFFSETS_TOPIC) is not None:
            self._tasks.append(asyncio.create_task(self._load_all(), name="load groups"))

    async def stop(self) -> None:
        """Stop loading and expiring."""
        tasks = self._tasks if self._creating is None else [*self._tasks, self._creating]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def ensure(self) -> ErrorCode:
        """Create the topic if there is none; return NONE if it exists then."""
        if self._creating is None or self._creating.done():
            if self._topics.get(OFFSETS_TOPIC) is not None:
                return ErrorCode.NONE
            # A task of its own, because the first client may disconnect while others wait.
            self._creating = asyncio.create_task(self._create(), name="create offsets topic")
        return await asyncio.shield(self._creating)

    async def _create(self) -> ErrorCode:
        try:
            await self._metadata_service.ensure(
                OFFSETS_TOPIC, self._configured, created_by="broker"
            )
        except TopicError as error:
            return error.code
        except StorageError as error:
            return code_of(error)
        await self._load_all()
        return ErrorCode.NONE

    def append(self, partition: int, records: Sequence[LogRecord]) -> Awaitable[object]:
        """Append records; they have their offsets when this returns (see offsets_store.Append)."""
        served = self._partition(partition)
        now_ms = self._env.wall_ms()
        batch = build_batch(
            [Record(index, now_ms, key, value, ()) for index, (key, value) in enumerate(records)]
        )
        info = served.append(memoryview(batch), read_header(batch), now_ms)
        if served.is_acked(info):
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done
        return served.wait_flushed(info.last_offset + 1)

    def fail(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop serving the groups of partitions that are offline."""
        for partition in partitions:
            if partition.topic == OFFSETS_TOPIC:
                self.coordinator.deactivate(partition.partition, PartitionState.OFFLINE)

    def damage_gone(self, partition: TopicPartition) -> None:
        """Load the groups of a partition again if damage prevented it before."""
        if partition.topic == OFFSETS_TOPIC and self.coordinator.is_offline(partition.partition):
            self.coordinator.deactivate(partition.partition, PartitionState.LOADING)
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(
                asyncio.create_task(self._load(partition.partition), name="load groups again")
            )

    def _partition(self, index: int) -> Partition:
        partition = self._topics.partition(TopicPartition(OFFSETS_TOPIC, index))
        if partition is None:
            raise LogDirectoryError(OFFSETS_TOPIC, f"partition {index} is offline")
        return partition

    async def _load_all(self) -> None:
        gate = asyncio.Semaphore(LOADERS)

        async def load_partition(index: int) -> None:
            async with gate:
                await self._load(index)

        await asyncio.gather(*(load_partition(index) for index in range(self.partition_count)))

    async def _load(self, index: int) -> None:
        partition = self._topics.partition(TopicPartition(OFFSETS_TOPIC, index))
        if partition is None:
            self.coordinator.deactivate(index, PartitionState.OFFLINE)
            return
        log = partition.log
        try:
            loaded = await asyncio.to_thread(
                load, log.read_batches, log.log_start_offset, log.log_end_offset
            )
        except StorageError as error:
            logger.error("groups not loaded", partition=index, reason=str(error))
            self.coordinator.deactivate(index, PartitionState.OFFLINE)
            return
        except Exception:
            # Supervised: the other partitions are loaded, and clients of this one get an error.
            logger.exception("groups not loaded", partition=index)
            self.coordinator.deactivate(index, PartitionState.OFFLINE)
            return
        is_served = self._topics.partition(partition.partition) is partition
        if is_served:  # else its directory failed meanwhile
            self.coordinator.activate(index, loaded)

    async def _expire(self) -> None:
        """Delete offsets that no consumer has used for the retention time."""
        while True:
            await asyncio.sleep(self._check_seconds)
            try:
                if self._clock_trusted():
                    await self.coordinator.expire_offsets(self._env.wall_ms())
            except Exception:
                # Supervised: a bug in one round must not silently end all later rounds.
                logger.exception("offsets not expired")
