"""The groups that this broker serves: those of the active partitions of __consumer_offsets."""

from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from broker.groups.group_log import GROUP_NAME_BYTES_MAX
from broker.groups.live_classic_group import LiveClassicGroup
from broker.groups.live_consumer_group import LiveConsumerGroup
from broker.groups.offsets.committed_offsets import size_of
from broker.groups.offsets.offset_records import CommittedOffset
from broker.groups.offsets.offsets_store import TopicIndex
from broker.quotas.memory_budget import MemoryBudget
from broker.quotas.shares import Shares
from broker.topics.internal_topic import KeyedLog, PartitionState, PartitionStates
from protocol.errors import ErrorCode

AnyGroup = LiveClassicGroup | LiveConsumerGroup
L = TypeVar("L", LiveClassicGroup, LiveConsumerGroup)


class ServedGroups:
    """The groups by id and by partition, and what they take from the limits of the broker."""

    def __init__(
        self,
        store: KeyedLog,
        max_groups: int,
        metadata: MemoryBudget,
        offsets: MemoryBudget,
    ) -> None:
        """`metadata` is the memory of all members, `offsets` that of all committed offsets."""
        self.partitions = PartitionStates(store)
        self._store = store
        self._groups: dict[str, AnyGroup] = {}
        self._ids: list[set[str]] = [set() for _ in range(store.partition_count)]  # by partition
        self._shares = Shares(max_groups)
        self._metadata = metadata
        self._offsets = offsets

    def availability(self, group_id: str) -> ErrorCode:
        """Return NONE if the group's partition is served, else the error for the client."""
        if len(group_id) > GROUP_NAME_BYTES_MAX:
            return ErrorCode.INVALID_GROUP_ID  # hashing takes time in proportion to its length
        return self.partitions.error(group_id)

    def partition_of(self, group_id: str) -> int:
        """Return the partition of __consumer_offsets that stores a group."""
        return self._store.partition_of(group_id)

    def max_record_bytes(self, group_id: str) -> int:
        """Return how large a record of a group may be."""
        return self._store.max_batch_bytes(group_id)

    def get(self, group_id: str) -> AnyGroup | None:
        """Return a group, also while it is being deleted; None if there is none."""
        return self._groups.get(group_id)

    def __iter__(self) -> Iterator[AnyGroup]:
        """Yield the groups of this moment: groups change while other tasks run."""
        return iter(tuple(self._groups.values()))

    def __len__(self) -> int:
        return len(self._groups)

    def ids(self) -> tuple[str, ...]:
        """Return the ids of the groups of this moment."""
        return tuple(self._groups)

    def may_add(self, creator: Hashable | None) -> bool:
        """Return whether a principal may create one more group."""
        return self._shares.admits(creator, len(self._groups))

    def add(self, live: L, creator: Hashable | None) -> L:
        """Serve a group that a principal created."""
        self._shares.add(live.group.group_id, creator)
        return self.put(live)

    def put(self, live: L) -> L:
        """Serve a group that was loaded, or that takes the place of another one."""
        group_id = live.group.group_id
        self._groups[group_id] = live
        self._ids[self._store.partition_of(group_id)].add(group_id)
        self.note_offsets(live)
        return live

    def may_commit(
        self, group_id: str, offsets: Mapping[TopicIndex, CommittedOffset], creator: Hashable | None
    ) -> bool:
        """Return whether there is memory for offsets that a principal commits to a group."""
        size_bytes = size_of(offsets.values())
        if self._offsets.admits(group_id, size_bytes, creator):
            return True
        live = self._groups.get(group_id)
        if live is None:
            return False
        more_bytes = size_bytes - live.offsets.size_of_acknowledged(offsets)
        return self._offsets.admits(group_id, more_bytes, creator)

    def own_offsets(self, group_id: str, creator: Hashable | None) -> None:
        """Count the offsets of a group for a principal, unless they count for another one."""
        self._offsets.own(group_id, creator)

    def offsets_owner(self, group_id: str) -> Hashable | None:
        """Return the principal for which the offsets of a group count; None for nobody."""
        return self._offsets.owner(group_id)

    def note_offsets(self, live: AnyGroup) -> None:
        """Note how much memory the offsets of a group take now, if the group is served."""
        group_id = live.group.group_id
        if self._groups.get(group_id) is live:
            self._offsets.note(group_id, live.offsets.size_bytes)

    def remove(self, live: AnyGroup) -> bool:
        """Stop serving a group; return whether it was served."""
        group_id = live.group.group_id
        if self._groups.get(group_id) is not live:
            return False
        del self._groups[group_id]
        self._ids[self._store.partition_of(group_id)].discard(group_id)
        self._shares.remove(group_id)
        self._metadata.remove(group_id)
        self._offsets.remove(group_id)
        return True

    def remove_if_void(self, live: AnyGroup) -> None:
        """Stop serving a group that has no record, no offset and no member."""
        if live.is_void:
            self.remove(live)

    def deactivate(self, partition: int, state: PartitionState) -> list[AnyGroup]:
        """Stop serving the groups of a partition: close and return them."""
        self.partitions.deactivate(partition, state)
        group_ids, self._ids[partition] = self._ids[partition], set()
        removed = []
        for group_id in group_ids:
            live = self._groups.pop(group_id)
            self._shares.remove(group_id)
            live.close()
            self._metadata.remove(group_id)
            self._offsets.remove(group_id)
            removed.append(live)
        return removed
