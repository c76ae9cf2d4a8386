"""Starts and stops serving the groups of a partition of __consumer_offsets.

A group is served while its partition is active. While the partition is being loaded or is offline,
requests get an error that says so. internal_topic.py reads the partition, and `OffsetsLoader`
(offsets/offsets_store.py) its records.
"""

import logging

import structlog

from broker.event_loop.loop_turns import Turns
from broker.groups.classic.model import Group
from broker.groups.classic.state import restored
from broker.groups.deletion import GroupDeletion
from broker.groups.group_factory import GroupFactory
from broker.groups.live_classic_group import GroupStats
from broker.groups.offset_commits import OffsetCommits
from broker.groups.offsets.committed_offsets import CommittedOffsets
from broker.groups.offsets.offsets_store import LoadedPartition
from broker.groups.served_groups import ServedGroups
from broker.topics.internal_topic import PartitionState

logger = structlog.get_logger("broker.groups")


class PartitionLoading:
    """Receives the partitions that InternalTopic has loaded, and those that it cannot read."""

    def __init__(
        self,
        served: ServedGroups,
        factory: GroupFactory,
        offsets: OffsetCommits,
        deletion: GroupDeletion,
        stats: GroupStats,
    ) -> None:
        self._served = served
        self._factory = factory
        self._offsets = offsets
        self._deletion = deletion
        self._stats = stats

    async def activate(self, partition: int, loaded: LoadedPartition) -> None:
        """Serve the groups that were loaded from a partition; see internal_topic.Coordinator."""
        self._count(loaded)
        group_ids, turns = loaded.group_ids(), Turns()
        for group_id in group_ids:
            offsets = await _offsets_of(group_id, loaded, turns)
            if not self._served.partitions.is_loading(partition):
                return  # it failed meanwhile
            self._serve(partition, group_id, loaded, offsets)
        self._served.partitions.activate(partition)
        self._deletion.note_loaded(loaded.topics)
        logger.log(
            logging.INFO if loaded.records else logging.DEBUG,
            "groups loaded",
            partition=partition,
            groups=len(group_ids),
            records=loaded.records,
            unknown=loaded.unknown_records,
            invalid=loaded.invalid_records,
        )

    def _serve(
        self, partition: int, group_id: str, loaded: LoadedPartition, offsets: CommittedOffsets
    ) -> None:
        self._offsets.note_loaded(partition, group_id, offsets)
        consumer_group = loaded.consumer_groups.get(group_id)
        if consumer_group is not None:
            live = self._served.put(self._factory.consumer(consumer_group, offsets))
            live.note_size()
            live.start_sessions()
            return
        state, effects = restored(loaded.groups.get(group_id, Group(group_id)))
        classic = self._served.put(self._factory.classic(state, offsets))
        classic.note_size()
        classic.perform(effects)

    def _count(self, loaded: LoadedPartition) -> None:
        self._stats.records_loaded += loaded.records
        self._stats.records_unknown += loaded.unknown_records
        self._stats.records_invalid += loaded.invalid_records
        self._stats.offsets_undecided += loaded.undecided_offsets

    def deactivate(self, partition: int, state: PartitionState) -> None:
        """Stop serving the groups of a partition that failed or will be loaded again."""
        for live in self._served.deactivate(partition, state):
            self._offsets.note_unloaded(partition, live.group.group_id, live.offsets)

    def is_offline(self, partition: int) -> bool:
        """Return whether the groups of a partition are neither served nor being loaded."""
        return self._served.partitions.is_offline(partition)


async def _offsets_of(group_id: str, loaded: LoadedPartition, turns: Turns) -> CommittedOffsets:
    await turns.take()
    offsets = CommittedOffsets(loaded.offsets.get(group_id, {}))
    for producer_id, pending in loaded.transactional.get(group_id, {}).items():
        for key, (record_offset, value) in pending.items():
            await turns.take()
            offsets.load_transactional(producer_id, key, record_offset, value)
    return offsets
