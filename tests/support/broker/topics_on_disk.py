"""Topics over an in-memory disk, without a broker around them."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from broker.counters import TopicStats
from broker.event_loop.directory_threads import DirectoryThreads
from broker.topics.effective_settings import EffectiveSettings
from broker.topics.metadata_service import MetadataService, NewTopic
from broker.topics.metadata_writer import MetadataWriter
from broker.topics.partition import Partition
from broker.topics.topics import Topic, Topics
from config.settings import CleanerSettings, Settings
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from tests.support.storage.memory_env import MemoryEnv

COMPACT = {"cleanup.policy": "compact"}
GROUP = (
    NewTopic("orders", 2, COMPACT),
    NewTopic("audit", 1),
    NewTopic("customers", 3, COMPACT | {"varve.view": "compacted"}),
)


class NoOffsets:
    """The offsets that are committed: none."""

    async def forget_topics(self, topics: Collection[str], give_way: object = None) -> int:
        return 0

    async def forget_earlier_topic(self, topic: str) -> None:
        pass


class TopicsOnDisk:
    """Topics over an in-memory disk, opened as the broker does; records paused partitions."""

    def __init__(self, env: MemoryEnv, *directories: str, **settings: Any) -> None:
        self.env = env
        self.paused_partitions: list[TopicPartition] = []
        self.retried: list[TopicPartition] = []
        self.wakes = 0
        self.cleaner: list[CleanerSettings] = []
        loaded = Settings.model_validate({"log_dirs": list(directories or ["/disk1"]), **settings})
        self.manager = LogManager(env, loaded.log_dirs)
        self.topics = Topics()
        self.writer = MetadataWriter(self.manager, DirectoryThreads(env.monotonic), lambda: None)
        self.offsets = NoOffsets()
        self.settings = EffectiveSettings(loaded, self.manager)
        self.service = MetadataService(
            self.manager,
            self.writer,
            self.settings,
            self.topics,
            self,
            open_partition=self._partition,
            apply_limits=lambda _limits: None,
            open_views=self._open_views,
            drop_counts=lambda _name: None,
        )
        self.service.offset_deletion = self.offsets

    async def open(self) -> "TopicsOnDisk":
        self.manager.open(self.settings.topic_config)
        self.service.load()
        await self.service.finish_interrupted()
        await self.service.apply_yaml()
        return self

    async def reopen(self, **settings: Any) -> "TopicsOnDisk":
        self.manager.close()
        return await TopicsOnDisk(self.env, *self._directories(), **settings).open()

    def _directories(self) -> list[str]:
        return [directory.path for directory in self.manager.table.directories]

    def _partition(self, opened: Log) -> Partition:
        return Partition(opened, TopicStats(), self._flush, lambda _error: None)

    async def _open_views(self, topics: Iterable[Topic]) -> None:
        pass  # there is no ledger to read

    async def _flush(self, _opened: Log) -> None:
        await asyncio.Event().wait()  # a disk that takes its time

    # What the topics ask of the cleaner.

    @asynccontextmanager
    async def paused(self, partition: TopicPartition, reason: str) -> AsyncIterator[None]:
        self.paused_partitions.append(partition)
        yield

    def forget_failures(self, partition: TopicPartition) -> None:
        self.retried.append(partition)

    def configure(self, settings: CleanerSettings) -> None:
        self.cleaner.append(settings)

    def wake(self) -> None:
        self.wakes += 1


def folders(env: MemoryEnv, directory: str = "/disk1") -> list[str]:
    names = [name for name in env.listdir(directory) if env.is_dir(f"{directory}/{name}")]
    return [name for name in names if not name.endswith("-delete")]


def setting(key: str, value: str) -> Any:
    """A change of one key, as a client asks for it."""

    def change(present: Mapping[str, str]) -> Mapping[str, str]:
        return {**present, key: value}

    return change
