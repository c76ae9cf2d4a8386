"""Groups and offsets that go: deleted, expired, forgotten with their topic."""

import asyncio
import gc
import weakref
from collections.abc import Iterable
from dataclasses import replace

import pytest

from broker.groups.classic import subscription
from broker.groups.classic.model import (
    LeaveRequested,
)
from broker.groups.consumer.model import TopicMetadata
from broker.groups.group_log import RECORDS_AT_ONCE
from broker.groups.offsets.offsets_store import LoadedPartition
from broker.topics.internal_topic import PartitionState
from protocol.errors import ErrorCode
from storage.errors import LogDirectoryError
from tests.support.broker.groups.consumer_group_world import Client
from tests.support.broker.groups.group_machine import SESSION_MS
from tests.support.broker.groups.group_world import DAY_MS, KEY, SUBSCRIBED, World
from tests.support.clocks.virtual_clock import settle


async def test_a_deleted_group_is_gone_from_the_log_with_its_offsets() -> None:
    world = World()
    await world.stable()
    await world.clock.advance(SESSION_MS)
    await world.commit(5)
    assert await world.coordinator.deletion.delete_group("g") is ErrorCode.NONE
    assert world.state() is None
    assert world.offsets() == {}
    loaded = world.log.load()
    assert loaded.groups == {}
    assert loaded.offsets == {}


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_a_deleted_group_is_freed_without_a_garbage_collection(protocol: str) -> None:
    world = World()
    if protocol == "classic":
        leaver = (await world.stable(), None)
        await world.coordinator.members.leave("g", LeaveRequested(0, (leaver,)))
    else:
        client = Client(world, "a")
        await client.heartbeat()
        await client.leave()
    gc.disable()
    try:
        group = weakref.ref(world.coordinator._served.get("g"))
        assert await world.coordinator.deletion.delete_group("g") is ErrorCode.NONE
        await settle()
        assert group() is None
    finally:
        gc.enable()


async def test_a_live_group_is_not_deleted() -> None:
    world = World()
    await world.stable()
    assert await world.coordinator.deletion.delete_group("g") is ErrorCode.NON_EMPTY_GROUP


async def test_an_unknown_group_cannot_be_deleted() -> None:
    assert await World().coordinator.deletion.delete_group("g") is ErrorCode.GROUP_ID_NOT_FOUND


async def test_while_a_group_is_deleted_everyone_is_sent_away_and_may_come_back_after() -> None:
    world = World()
    await world.commit(5)
    world.log.held = True
    deletion = await world.begin(world.coordinator.deletion.delete_group("g"))
    gone = ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert (await world.join()).error is gone
    assert await world.commit(6) is gone
    assert await world.coordinator.deletion.delete_group("g") is ErrorCode.GROUP_ID_NOT_FOUND
    assert world.offsets() == {}
    world.log.held = False
    world.log.release()
    assert await deletion is ErrorCode.NONE
    assert await world.commit(7) is ErrorCode.NONE
    assert world.offsets() == {KEY: 7}
    assert world.log.load().offsets["g"][KEY][0] == 7


async def test_a_commit_under_way_is_deleted_with_the_group() -> None:
    world = World()
    await world.commit(5, key=("orders", 1))
    world.log.held = True
    commit = await world.begin(world.commit(5))
    deletion = await world.begin(world.coordinator.deletion.delete_group("g"))
    world.log.release()
    assert await commit is ErrorCode.NONE
    assert await deletion is ErrorCode.NONE
    assert world.offsets() == {}
    assert world.log.load().offsets == {}


async def test_a_deletion_that_failed_leaves_everything_as_it_was() -> None:
    world = World()
    await world.commit(5)
    world.log.error = LogDirectoryError("/d", "disk")
    assert await world.coordinator.deletion.delete_group("g") is ErrorCode.COORDINATOR_NOT_AVAILABLE
    world.log.error = None
    assert world.offsets() == {KEY: 5}
    assert await world.commit(6) is ErrorCode.NONE


async def test_offsets_of_topics_in_use_are_not_deleted() -> None:
    world = World()
    member = await world.stable(protocols=SUBSCRIBED)
    await world.commit(5, member_id=member, generation=1)
    await world.commit(5, member_id=member, generation=1, key=("old", 0))
    error, errors = await world.coordinator.deletion.delete_offsets(
        "g", [KEY, ("old", 0), ("old", 9)]
    )
    assert error is ErrorCode.NONE
    assert errors == {
        KEY: ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC,
        ("old", 0): ErrorCode.NONE,
        ("old", 9): ErrorCode.NONE,
    }
    assert world.offsets() == {KEY: 5}
    assert world.log.load().offsets["g"].keys() == {KEY}


async def test_no_offset_is_deleted_of_a_group_that_ended_while_its_members_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscription, "MEMBERS_PER_SLICE", 1)
    world = World()
    member = await world.stable(protocols=SUBSCRIBED)
    await world.commit(5, member_id=member, generation=1, key=("old", 0))
    deletion = asyncio.ensure_future(world.coordinator.deletion.delete_offsets("g", [("old", 0)]))
    await asyncio.sleep(0)
    live = world.coordinator._served.get("g")
    assert live is not None
    world.coordinator._served.remove(live)
    assert await deletion == (ErrorCode.COORDINATOR_NOT_AVAILABLE, {})
    assert world.log.load().offsets["g"].keys() == {("old", 0)}


async def test_offsets_of_an_empty_group_may_be_deleted() -> None:
    world = World()
    await world.commit(5)
    assert await world.coordinator.deletion.delete_offsets("g", [KEY]) == (
        ErrorCode.NONE,
        {KEY: ErrorCode.NONE},
    )
    assert world.offsets() == {}


async def test_offsets_of_another_kind_of_live_group_are_not_deleted() -> None:
    world = World()
    await world.stable(protocol_type="connect")
    error, _ = await world.coordinator.deletion.delete_offsets("g", [KEY])
    assert error is ErrorCode.NON_EMPTY_GROUP
    error, _ = await world.coordinator.deletion.delete_offsets("nobody", [KEY])
    assert error is ErrorCode.GROUP_ID_NOT_FOUND


async def test_what_was_committed_for_a_deleted_topic_goes_with_it() -> None:
    world = World()
    await world.commit(5)
    await world.commit(6, key=("other", 0))
    assert await world.coordinator.deletion.forget_topics(["orders"]) == 1
    assert world.offsets() == {("other", 0): 6}
    assert world.log.load().offsets["g"].keys() == {("other", 0)}


class SomeTopics:
    def __init__(self, *names: str) -> None:
        self.existing = set(names)

    def topic(self, name: str) -> TopicMetadata | None:
        return TopicMetadata(name, bytes(16), 1) if name in self.existing else None

    def names(self) -> Iterable[str]:
        return self.existing


async def test_a_new_topic_has_no_offsets_of_one_whose_deletion_was_cut_off() -> None:
    topics = SomeTopics("orders", "other")
    world = World(topics=topics)
    await world.commit(5)
    await world.commit(6, key=("other", 0))
    topics.existing.remove("orders")
    world.restart()
    await world.coordinator.deletion.forget_earlier_topic("other")
    assert world.offsets() == {KEY: 5, ("other", 0): 6}  # it may be taken over later
    await world.coordinator.deletion.forget_earlier_topic("orders")
    topics.existing.add("orders")
    assert world.offsets() == {("other", 0): 6}
    assert world.log.load().offsets["g"].keys() == {("other", 0)}
    await world.commit(1)
    world.restart()
    assert world.offsets() == {KEY: 1, ("other", 0): 6}


@pytest.mark.parametrize("created", ["before", "after"])
async def test_a_topic_whose_creation_begins_before_its_offsets_are_loaded_has_none(
    created: str,
) -> None:
    topics = SomeTopics("other")
    world = World(topics=topics)
    await world.commit(5)
    await world.commit(6, key=("other", 0))
    world.coordinator.loading.deactivate(0, PartitionState.LOADING)
    await world.coordinator.deletion.forget_earlier_topic("orders")
    if created == "before":
        topics.existing.add("orders")
    await world.coordinator.loading.activate(0, world.log.load(0))
    topics.existing.add("orders")
    await settle()
    assert world.offsets() == {("other", 0): 6}
    assert world.log.load().offsets["g"].keys() == {("other", 0)}


async def test_offsets_of_a_simple_group_expire_a_week_after_their_commit() -> None:
    world = World()
    await world.commit(5)
    await world.clock.advance(3 * DAY_MS)
    await world.commit(6, key=("orders", 1))
    await world.clock.advance(4 * DAY_MS - 1)
    assert await world.coordinator.deletion.expire_offsets(world.clock.wall_ms()) == 0
    await world.clock.advance(1)
    assert await world.coordinator.deletion.expire_offsets(world.clock.wall_ms()) == 1
    assert world.offsets() == {("orders", 1): 6}


async def test_offsets_of_a_group_expire_a_week_after_its_last_member_left() -> None:
    world = World()
    member = await world.stable(session_timeout_ms=1_800_000)
    await world.commit(5, member_id=member, generation=1)
    await world.clock.advance(1_700_000)
    await world.coordinator.members.leave("g", LeaveRequested(0, ((member, None),)))
    await world.clock.advance(7 * DAY_MS - 1)
    assert await world.coordinator.deletion.expire_offsets(world.clock.wall_ms()) == 0
    await world.clock.advance(1)
    assert await world.coordinator.deletion.expire_offsets(world.clock.wall_ms()) == 1
    assert world.state() is None
    assert world.log.load() == replace(
        LoadedPartition(), records=world.log.ends[0], groups={}, offsets={}
    )


async def test_a_live_group_keeps_the_offsets_of_what_it_is_subscribed_to() -> None:
    world = World()
    member = await world.stable(protocols=SUBSCRIBED, session_timeout_ms=1_800_000)
    await world.commit(5, member_id=member, generation=1)
    await world.commit(5, member_id=member, generation=1, key=("old", 0))
    for _ in range(400):
        await world.clock.advance(1_700_000)
        assert world.heartbeat(member) is ErrorCode.NONE
    assert await world.coordinator.deletion.expire_offsets(world.clock.wall_ms()) == 1
    assert world.offsets() == {KEY: 5}


async def test_a_group_whose_subscription_cannot_be_read_keeps_everything() -> None:
    world = World()
    member = await world.stable(session_timeout_ms=1_800_000)
    await world.commit(5, member_id=member, generation=1)
    now_ms = world.clock.wall_ms() + 30 * DAY_MS
    assert await world.coordinator.deletion.expire_offsets(now_ms) == 0


async def test_a_retention_time_of_its_own_goes_before_the_brokers() -> None:
    world = World()
    await world.commit(5, expire_timestamp_ms=world.clock.wall_ms() + 1_000)
    assert await world.coordinator.deletion.expire_offsets(world.clock.wall_ms() + 999) == 0
    assert await world.coordinator.deletion.expire_offsets(world.clock.wall_ms() + 1_000) == 1


async def test_an_offset_committed_again_just_now_does_not_expire() -> None:
    world = World()
    await world.commit(5)
    await world.clock.advance(8 * DAY_MS)
    world.log.held = True
    commit = await world.begin(world.commit(6))
    assert await world.coordinator.deletion.expire_offsets(world.clock.wall_ms()) == 0
    world.log.release()
    assert await commit is ErrorCode.NONE
    assert world.offsets() == {KEY: 6}


async def commit_many(world: World, count: int) -> None:
    for index in range(count):
        assert await world.commit(key=("orders", index)) is ErrorCode.NONE
    world.log.appends.clear()


async def test_a_group_of_many_offsets_is_deleted_some_at_a_time() -> None:
    world = World()
    await commit_many(world, 2 * RECORDS_AT_ONCE + 1)
    assert await world.coordinator.deletion.delete_group("g") is ErrorCode.NONE
    assert [len(append) for append in world.log.appends] == [RECORDS_AT_ONCE, RECORDS_AT_ONCE, 2]
    assert world.state() is None
    loaded = world.log.load()
    assert not loaded.offsets
    assert not loaded.groups


async def test_a_deletion_that_is_cut_off_leaves_a_group_that_can_be_deleted_again() -> None:
    world = World()
    await commit_many(world, RECORDS_AT_ONCE + 1)
    world.log.held = True
    deletion = await world.begin(world.coordinator.deletion.delete_group("g"))
    deletion.cancel()
    await asyncio.gather(deletion, return_exceptions=True)
    world.log.held = False
    world.log.release()
    await settle()
    assert len(world.offsets()) == 1
    assert world.log.load().offsets["g"].keys() == world.offsets().keys()
    assert await world.coordinator.deletion.delete_group("g") is ErrorCode.NONE
    assert world.state() is None


async def test_many_offsets_expire_some_at_a_time_but_not_one_that_is_committed_meanwhile() -> None:
    world = World()
    await commit_many(world, 2 * RECORDS_AT_ONCE)
    await world.clock.advance(8 * DAY_MS)
    now_ms = world.clock.wall_ms()
    world.log.held = True
    expiry = await world.begin(world.coordinator.deletion.expire_offsets(now_ms))
    assert [len(append) for append in world.log.appends] == [RECORDS_AT_ONCE]
    last = ("orders", 2 * RECORDS_AT_ONCE - 1)
    commit = await world.begin(world.commit(77, key=last))
    world.log.held = False
    world.log.release()
    assert await commit is ErrorCode.NONE
    assert await expiry == 2 * RECORDS_AT_ONCE - 1
    assert world.offsets() == {last: 77}
    assert world.log.load().offsets["g"].keys() == {last}
