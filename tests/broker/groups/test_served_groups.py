"""Which groups are served, by partition, and what they take from the limits of the broker."""

import pytest

from broker.groups.classic.model import Empty, Group
from broker.groups.coordinator import NoTopics
from broker.groups.group_factory import GroupFactory
from broker.groups.group_log import GROUP_NAME_BYTES_MAX, GroupLog
from broker.groups.large_group_turns import LargeGroupTurns
from broker.groups.live_classic_group import GroupStats, LiveClassicGroup
from broker.groups.offsets.committed_offsets import CommittedOffsets
from broker.groups.offsets.offset_records import committed_offset
from broker.groups.served_groups import ServedGroups
from broker.groups.settings import CoordinatorSettings
from broker.quotas.memory_budget import MemoryBudget
from broker.topics.internal_topic import KeyedLog, PartitionState
from protocol.errors import ErrorCode
from tests.support.broker.groups.group_world import KEY
from tests.support.broker.groups.offsets_log import OffsetsLog
from tests.support.clocks.virtual_clock import VirtualClock

PARTITIONS = 50
# Java computes the hashes of these names.
PARTITION_OF = {"g": 3, "my-group": 12}


class Groups:
    """Served groups of active partitions, and the factory that creates more."""

    def __init__(self, max_groups: int = 10) -> None:
        store = KeyedLog(PARTITIONS, OffsetsLog(PARTITIONS).append)
        clock, stats = VirtualClock(), GroupStats()
        self.metadata = MemoryBudget(64_000)
        self.served = ServedGroups(store, max_groups, self.metadata, MemoryBudget(64_000))
        for partition in range(PARTITIONS):
            self.served.partitions.activate(partition)
        self.factory = GroupFactory(
            self.served,
            GroupLog(store, clock, stats, 5_000),
            settings=CoordinatorSettings(),
            clock=clock,
            topics=NoTopics(),
            metadata=self.metadata,
            stats=stats,
            turns=LargeGroupTurns(self.metadata.owner),
        )

    def create(self, group_id: str, creator: str = "ann") -> LiveClassicGroup:
        return self.factory.create_classic(group_id, creator)

    @property
    def ids(self) -> set[str]:
        return {live.group.group_id for live in self.served}


@pytest.fixture
def groups() -> Groups:
    return Groups()


async def test_the_groups_of_other_partitions_stay_when_one_is_deactivated(groups: Groups) -> None:
    removed = groups.create("g")
    groups.create("my-group")
    assert {name: groups.served.partition_of(name) for name in PARTITION_OF} == PARTITION_OF
    assert groups.served.deactivate(PARTITION_OF["g"], PartitionState.OFFLINE) == [removed]
    assert removed.is_dead
    assert groups.ids == {"my-group"}
    assert groups.served.availability("g") is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert groups.served.availability("my-group") is ErrorCode.NONE


async def test_a_group_that_was_replaced_is_not_removed_in_place_of_the_new_one(
    groups: Groups,
) -> None:
    old = groups.create("g")
    new = groups.served.put(groups.factory.classic(Empty(Group("g")), old.offsets))
    assert not groups.served.remove(old)
    assert groups.served.get("g") is new
    assert groups.served.remove(new)
    assert not groups.served.remove(new)
    assert groups.ids == set()


async def test_only_a_group_without_records_offsets_and_members_is_void(groups: Groups) -> None:
    offsets = CommittedOffsets({KEY: committed_offset(1)})
    kept = groups.served.put(groups.factory.classic(Empty(Group("kept")), offsets))
    for live in (groups.create("void"), kept):
        groups.served.remove_if_void(live)
    assert groups.ids == {"kept"}


async def test_groups_may_change_while_a_caller_reads_them(groups: Groups) -> None:
    for group_id in ("a", "b", "c"):
        groups.create(group_id)
    for live in groups.served:
        groups.served.remove(live)
        groups.create(f"new-{live.group.group_id}")
    assert set(groups.served.ids()) == groups.ids == {"new-a", "new-b", "new-c"}


@pytest.mark.parametrize("by_partition", [False, True])
async def test_a_removed_group_leaves_its_place_and_its_metadata_to_others(
    by_partition: bool,
) -> None:
    groups = Groups(max_groups=2)
    live = groups.create("g")
    groups.metadata.note("g", 1_000)
    assert not groups.served.may_add("ann"), "one user gets half of the groups"
    assert groups.served.may_add("bob")
    if by_partition:
        groups.served.deactivate(PARTITION_OF["g"], PartitionState.LOADING)
    else:
        groups.served.remove(live)
    assert groups.served.may_add("ann")
    assert groups.metadata.used_bytes == 0


async def test_a_group_id_that_no_record_can_contain_has_no_partition(groups: Groups) -> None:
    assert groups.served.availability("g" * GROUP_NAME_BYTES_MAX) is ErrorCode.NONE
    too_long = "g" * (GROUP_NAME_BYTES_MAX + 1)
    assert groups.served.availability(too_long) is ErrorCode.INVALID_GROUP_ID
