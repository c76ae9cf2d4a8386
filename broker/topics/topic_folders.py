"""Creates and removes the folders of topics in steps; changes of other topics run in between.

Rules
- Other changes of the same topic wait until the whole change has ended.
- Partitions whose folders do not exist yet count as partitions of the broker.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import structlog

from broker.event_loop.loop_turns import Turns
from broker.topics.effective_settings import EffectiveSettings, resolve_layers
from broker.topics.metadata_writer import MetadataWriter
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition

logger = structlog.get_logger("broker.topics")

# Folders of one topic that are made or removed before other clients have their turn. Each takes 2
# to 10 ms, with fsync. With 50 at once, others waited 2.6 s for a change, with 16 they wait 0.4 s:
# the threads that sync them compete with the event loop.
FOLDERS_AT_ONCE: Final = 16


class TopicFolders:
    """Makes and removes folders within changes of the metadata."""

    def __init__(
        self, manager: LogManager, writer: MetadataWriter, settings: EffectiveSettings
    ) -> None:
        self._manager = manager
        self._writer = writer
        self._settings = settings
        # Topics whose folders are being made or removed, with the number that is not yet made.
        self._unfinished: dict[str, int] = {}

    def partition_count(self) -> int:
        """Return the number of partitions, with those that are being created."""
        present = len(self._manager.table.logs) + len(self._manager.table.offline)
        return present + sum(self._unfinished.values())

    async def wait_finished(self, names: Sequence[str]) -> None:
        """Wait for earlier changes of these topics that gave way."""
        while not self._unfinished.keys().isdisjoint(names):
            await self._writer.give_way()

    @contextmanager
    def locked(self, missing: Mapping[str, int]) -> Iterator[None]:
        """Make other changes of topics wait for the end of a block that gives way.

        `missing`: topic -> number of partitions that the block makes.
        """
        self._unfinished |= missing
        try:
            yield
        finally:
            for name in missing:
                del self._unfinished[name]

    async def make(self, name: str, indexes: range) -> dict[int, str]:
        """Create the folders of new partitions and return their placement.

        Raises StorageError; some folders may then exist.
        """
        placement: dict[int, str] = {}
        turns = Turns()
        for first in range(0, len(indexes), FOLDERS_AT_ONCE):
            if first > 0:
                await self._writer.give_way()
            step = indexes[first : first + FOLDERS_AT_ONCE]
            new = [TopicPartition(name, index) for index in step]
            await self._make(new)
            for partition in new:
                placement[partition.partition] = self._manager.table.directory_id_of(partition)
                await turns.take()
            self._unfinished[name] -= len(new)
        return placement

    async def _make(self, new: list[TopicPartition]) -> None:
        """Create folders of one topic."""
        name = new[0].topic
        entry = self._manager.metadata.topics[name]
        config = resolve_layers(self._settings.layers(name, entry.dynamic, taken_over=False))
        create = partial(
            self._manager.create_all, new, entry.topic_id, config, avoid=self._writer.hanging
        )
        await self._writer.run_by_directory(lambda run_each: create(run_each=run_each))

    async def remove(self, partitions: Sequence[TopicPartition]) -> dict[str, dict[int, str]]:
        """Remove folders; return the placement of those that may be left, by topic.

        Before the metadata forgets a topic, its entry must name them: the next start takes over the
        folders of an unknown topic.
        """
        leave, left = self._writer.hanging, defaultdict[str, dict[int, str]](dict)
        for first in range(0, len(partitions), FOLDERS_AT_ONCE):
            if first > 0:
                await self._writer.give_way()
            step = partitions[first : first + FOLDERS_AT_ONCE]
            directories = {
                partition: self._manager.table.find_directory(partition) for partition in step
            }
            delete = partial(self._manager.delete_all, step, leave)
            failures = await self._writer.run_by_directory(delete)
            for failure in failures:
                logger.error("folder not removed", reason=str(failure))
            for partition, directory in directories.items() if failures or leave else ():
                if directory is not None:
                    left[partition.topic][partition.partition] = directory.directory_id
        return left
