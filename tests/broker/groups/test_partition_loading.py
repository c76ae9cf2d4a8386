"""Partitions of __consumer_offsets that are loaded, go offline, or are loaded again."""

import asyncio
from itertools import count

import pytest

from broker.event_loop import loop_turns
from broker.groups.classic.model import (
    CommitRequested,
    Empty,
    HeartbeatReceived,
    LeaveRequested,
)
from broker.groups.offsets.offset_records import committed_offset
from broker.topics.internal_topic import KeyedLog, PartitionState
from broker.topics.producer_ids import Producer
from protocol.errors import ErrorCode
from tests.support.broker.groups.group_machine import SESSION_MS, join_request
from tests.support.broker.groups.group_world import KEY, World


async def test_a_restart_restores_groups_members_and_offsets() -> None:
    world = World()
    member = await world.stable()
    await world.commit(5, member_id=member, generation=1)
    await world.commit(9, group_id="simple")
    world.restart()
    assert world.offsets() == {KEY: 5}
    assert world.offsets("simple") == {KEY: 9}
    assert world.heartbeat(member) is ErrorCode.NONE
    assert (await world.sync(member, 1)).assignment == b"a"
    await world.clock.advance(SESSION_MS)
    assert isinstance(world.state(), Empty)


async def test_restored_members_that_do_not_come_back_expire() -> None:
    world = World()
    member = await world.stable()
    world.restart()
    await world.clock.advance(SESSION_MS)
    assert world.heartbeat(member) is ErrorCode.UNKNOWN_MEMBER_ID


async def test_while_a_partition_is_loaded_its_groups_are_told_to_wait() -> None:
    world = World()
    coordinator = world._coordinator()
    loading = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    request = CommitRequested(0, "", None, -1)
    assert coordinator.is_loading
    assert (await coordinator.members.join("g", join_request())).error is loading
    assert await coordinator.offsets.commit("g", request, {KEY: committed_offset(1)}) is loading
    assert coordinator.offsets.fetch("g") == (loading, {})
    assert coordinator.describe("g") == (loading, None)
    assert await coordinator.deletion.delete_group("g") is loading
    assert coordinator.members.heartbeat("g", HeartbeatReceived(0, "m", None, 1)) is loading
    answer = await coordinator.members.leave("g", LeaveRequested(0, (("m", None),)))
    assert answer.error is loading


async def test_when_a_partition_goes_offline_those_who_wait_are_sent_away() -> None:
    world = World()
    await world.stable()
    second = await world.begin(world.join())
    world.coordinator.loading.deactivate(0, PartitionState.OFFLINE)
    assert (await second).error is ErrorCode.NOT_COORDINATOR
    assert world.coordinator.availability("g") is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert (await world.join()).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert world.clock.running == 0


async def test_only_the_groups_of_an_offline_partition_are_affected() -> None:
    world = World(partition_count=50)
    await world.stable("my-group")  # partition 12
    await world.stable("g")  # partition 3
    world.coordinator.loading.deactivate(3, PartitionState.OFFLINE)
    assert world.coordinator.availability("my-group") is ErrorCode.NONE
    assert [group.group_id for group in world.coordinator.groups()] == ["my-group"]


async def test_a_partition_is_deactivated_without_a_look_at_the_groups_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(partition_count=8)
    group_ids = [f"g{index}" for index in range(50)]
    for group_id in group_ids:
        assert await world.commit(group_id=group_id) is ErrorCode.NONE
    hashed: list[str] = []
    partition_of = KeyedLog.partition_of

    def counted(log: KeyedLog, key: str) -> int:
        hashed.append(key)
        return partition_of(log, key)

    monkeypatch.setattr(KeyedLog, "partition_of", counted)
    for partition in range(8):
        world.coordinator.loading.deactivate(partition, PartitionState.OFFLINE)
    assert len(hashed) <= len(group_ids)
    assert list(world.coordinator.groups()) == []


async def test_the_groups_of_a_loaded_partition_are_taken_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    for number in range(20):
        await world.commit(5, group_id=f"g{number}")
    loaded = world.log.load(0)
    world.coordinator.loading.deactivate(0, PartitionState.LOADING)
    clock = count()
    monkeypatch.setattr(loop_turns, "perf_counter", lambda: next(clock))  # a turn for each group
    loading = asyncio.create_task(world.coordinator.loading.activate(0, loaded))
    rounds = 0
    while not loading.done():
        assert world.coordinator.availability("g1") is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        await asyncio.sleep(0)
        rounds += 1
    assert rounds >= 20
    assert world.offsets("g1") == {KEY: 5}


async def test_the_offsets_of_open_transactions_of_a_group_are_loaded_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, request = World(), CommitRequested(0, "", None, -1)
    for number in range(20):
        assert not await world.coordinator.offsets.commit_in_transaction(
            "g", request, {KEY: committed_offset(number)}, Producer(number, 0)
        )
    loaded = world.log.load(0)
    world.coordinator.loading.deactivate(0, PartitionState.LOADING)
    clock = count()
    monkeypatch.setattr(loop_turns, "perf_counter", lambda: next(clock))  # a turn for each offset
    loading = asyncio.create_task(world.coordinator.loading.activate(0, loaded))
    rounds = 0
    while not loading.done():
        await asyncio.sleep(0)
        rounds += 1
    assert rounds >= 20
    assert world.coordinator.offsets.is_unstable("g", KEY)


async def test_a_partition_that_fails_while_it_is_loaded_is_not_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    for number in range(20):
        await world.commit(5, group_id=f"g{number}")
    loaded = world.log.load(0)
    world.coordinator.loading.deactivate(0, PartitionState.LOADING)
    clock = count()
    monkeypatch.setattr(loop_turns, "perf_counter", lambda: next(clock))
    loading = asyncio.create_task(world.coordinator.loading.activate(0, loaded))
    for _ in range(5):
        await asyncio.sleep(0)
    world.coordinator.loading.deactivate(0, PartitionState.OFFLINE)
    await loading
    assert world.coordinator.availability("g1") is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert list(world.coordinator.groups()) == []
