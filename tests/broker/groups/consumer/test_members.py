"""Members of consumer groups (KIP-848): joins, departures, epochs, and the end of a group."""

import asyncio

import pytest

from broker.groups.classic.model import CommitRequested
from broker.groups.consumer.model import CONSUMER_MEMBER_BYTES, MemberState
from broker.groups.offsets.offset_records import committed_offset
from broker.topics.producer_ids import Producer
from protocol.errors import ErrorCode
from tests.support.broker.groups.classic_client import ClassicClient
from tests.support.broker.groups.consumer_group_world import (
    NO_TOPICS,
    REBALANCE_MS,
    Client,
    FakeTopics,
    check_restart,
    converge,
    group,
    make_world,
    names,
)
from tests.support.broker.groups.group_world import KEY, World

SESSION_MS = 45_000


async def test_a_member_that_leaves_frees_its_partitions() -> None:
    world, _ = make_world()
    first, second = Client(world, "a"), Client(world, "b")
    await converge(first, second)
    answer = await second.leave()
    assert (answer.error, answer.epoch) == (ErrorCode.NONE, -1)
    await converge(first)
    assert len(first.owned) == 6


async def test_a_silent_member_leaves_after_the_session_timeout() -> None:
    world, _ = make_world()
    first, second = Client(world, "a"), Client(world, "b")
    await converge(first, second)
    for _ in range(5):
        await world.clock.advance(SESSION_MS / 5)
        await first.heartbeat()
    await converge(first)
    assert len(first.owned) == 6
    assert (await second.heartbeat()).error is ErrorCode.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_members_whose_time_ends_together_leave_in_one_epoch(*, is_loaded: bool) -> None:
    world, _ = make_world(orders=6)
    clients = [Client(world, name) for name in "abcd"]
    await converge(*clients)
    if is_loaded:
        check_restart(world)
    await world.clock.advance(SESSION_MS - 1)
    await clients[0].heartbeat()
    before = group(world)
    await world.clock.advance(1)
    assert group(world).members.keys() == {"a"}
    assert group(world).epoch == before.epoch + 1
    assert set(group(world).owners.values()) == {"a"}
    assert world.coordinator.stats.members_expired == 3
    await converge(clients[0])
    assert len(clients[0].owned) == 6
    check_restart(world)


async def test_a_member_that_does_not_revoke_in_time_leaves() -> None:
    world, _ = make_world()
    first, second = Client(world, "a"), Client(world, "b")
    await first.heartbeat()
    await second.heartbeat()
    stubborn = first.owned
    await first.heartbeat()
    for _ in range(3):
        await world.clock.advance(REBALANCE_MS / 3)
        first.owned = stubborn
        await first.heartbeat()
        await second.heartbeat()
    assert first.epoch == 0, "it is no member any more"
    assert len(second.owned) == 6


async def test_a_static_member_that_returns_keeps_its_partitions_without_a_rebalance() -> None:
    world, _ = make_world()
    first, second = Client(world, "a", instance_id="i"), Client(world, "b", instance_id="j")
    await converge(first, second)
    epoch, owned = group(world).epoch, first.owned
    assert (await first.leave(-2)).epoch == -2
    returned = Client(world, "a2", instance_id="i")
    await converge(returned, second)
    assert returned.owned == owned
    assert group(world).epoch == epoch


async def test_a_static_member_that_left_while_it_revoked_has_its_session_timeout_to_return() -> (
    None
):
    world, _ = make_world()
    first, second = Client(world, "a", instance_id="i"), Client(world, "b")
    await converge(first)
    await second.heartbeat()
    await first.send(first.epoch, owned=first.owned)
    assert group(world).members["a"].state is MemberState.UNREVOKED_PARTITIONS
    await first.leave(-2)
    await world.clock.advance(REBALANCE_MS + 1)
    assert "a" in group(world).members
    await second.heartbeat()
    await world.clock.advance(SESSION_MS - REBALANCE_MS)
    assert "a" not in group(world).members


async def test_an_instance_id_in_use_is_refused() -> None:
    world, _ = make_world()
    await Client(world, "a", instance_id="i").heartbeat()
    other = Client(world, "b", instance_id="i")
    assert (await other.heartbeat()).error is ErrorCode.UNRELEASED_INSTANCE_ID
    other.epoch = 1
    assert (await other.heartbeat()).error is ErrorCode.FENCED_INSTANCE_ID


async def test_a_lost_answer_is_repeated_but_a_zombie_is_fenced() -> None:
    world, _ = make_world()
    first, second = Client(world, "a"), Client(world, "b")
    await converge(first, second)
    first.epoch -= 1
    assert (await first.heartbeat()).error is ErrorCode.NONE
    await second.leave()
    await converge(first)
    first.epoch -= 2
    assert (await first.heartbeat()).error is ErrorCode.FENCED_MEMBER_EPOCH
    assert (await first.heartbeat()).error is ErrorCode.NONE, "a fenced member joins again at once"
    assert len(first.owned) == 6


async def test_only_a_member_with_the_right_epoch_commits() -> None:
    world, topics = make_world()
    member = Client(world, "a")
    await converge(member)
    commit = world.commit
    assert await commit(member_id="a", generation=member.epoch) is ErrorCode.NONE
    assert await commit(member_id="a", generation=member.epoch + 1) is ErrorCode.STALE_MEMBER_EPOCH
    assert await commit(member_id="b", generation=1) is ErrorCode.UNKNOWN_MEMBER_ID
    assert await commit() is ErrorCode.UNKNOWN_MEMBER_ID, "the group has members"
    before_epochs = CommitRequested(0, "a", None, member.epoch, knows_epochs=False)
    error = await world.coordinator.offsets.commit("g", before_epochs, {KEY: committed_offset(5)})
    assert error is ErrorCode.UNSUPPORTED_VERSION, "of OffsetCommit"
    topics.counts["more"] = 1
    await member.subscribe(frozenset({"orders", "more"}))
    await converge(member)
    earlier = member.epoch - 1
    owned_all_along = await commit(member_id="a", generation=earlier)
    assert owned_all_along is ErrorCode.NONE
    got_later = await commit(member_id="a", generation=earlier, key=("more", 0))
    assert got_later is ErrorCode.STALE_MEMBER_EPOCH
    await member.leave()
    assert await commit(7) is ErrorCode.NONE, "an administrator resets an empty group"
    assert world.offsets() == {
        KEY: 7,
    }


async def test_a_stale_epoch_in_a_transaction_is_an_illegal_generation() -> None:
    """Producers know ILLEGAL_GENERATION and abort; STALE_MEMBER_EPOCH would end them."""
    world, _ = make_world()
    member = Client(world, "a")
    await converge(member)
    stale = CommitRequested(0, "a", None, member.epoch + 1)
    error = await world.coordinator.offsets.commit_in_transaction(
        "g", stale, {KEY: committed_offset(5)}, Producer(1, 0)
    )
    assert error is ErrorCode.ILLEGAL_GENERATION


async def test_only_a_member_with_the_right_epoch_fetches_offsets() -> None:
    world, _ = make_world()
    first, second = Client(world, "a"), Client(world, "b")
    await converge(first)
    fetch_error = world.coordinator.offsets.fetch_error
    assert fetch_error("g", "a", first.epoch) is ErrorCode.NONE
    await converge(first, second)
    assert fetch_error("g", "a", first.epoch - 1) is ErrorCode.STALE_MEMBER_EPOCH
    assert fetch_error("g", "a", first.epoch + 1) is ErrorCode.STALE_MEMBER_EPOCH
    assert fetch_error("g", "c", first.epoch) is ErrorCode.UNKNOWN_MEMBER_ID
    assert fetch_error("g", None, -1) is ErrorCode.NONE, "an administrator"


async def test_while_a_group_is_deleted_no_classic_member_takes_its_place() -> None:
    world, _ = make_world()
    member = Client(world, "a")
    await converge(member)
    await world.commit(5, member_id="a", generation=member.epoch)
    await member.leave()
    world.log.held = True
    deletion = await world.begin(world.coordinator.deletion.delete_group("g"))
    join = await world.begin(world.join())
    world.log.held = False
    world.log.release()
    assert await deletion is ErrorCode.NONE
    assert (await join).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert world.offsets() == {}, "as after a restart"


async def test_a_group_changes_its_protocol_while_it_is_empty_and_keeps_its_offsets() -> None:
    world, _ = make_world()
    classic = await world.stable()
    assert await world.commit(member_id=classic, generation=1) is ErrorCode.NONE
    member = Client(world, "a")
    assert (await member.heartbeat()).error is ErrorCode.GROUP_ID_NOT_FOUND
    world.restart()
    await world.clock.advance(60_000)
    assert (await member.heartbeat()).error is ErrorCode.NONE
    assert world.offsets() == {KEY: 5}
    assert (await world.join()).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    await member.leave()
    refused = await world.join(member_id="unknown")
    assert refused.error is ErrorCode.UNKNOWN_MEMBER_ID
    assert [summary.type for summary in world.coordinator.groups()] == ["consumer"]
    await world.stable()
    world.restart()
    assert [summary.type for summary in world.coordinator.groups()] == ["classic"]
    assert world.offsets() == {KEY: 5}


async def test_a_deleted_group_leaves_nothing_in_the_log() -> None:
    world, _ = make_world()
    member = Client(world, "a", regex="ord.*")
    await converge(member)
    assert await world.coordinator.deletion.delete_group("g") is ErrorCode.NON_EMPTY_GROUP
    await member.leave()
    assert await world.coordinator.deletion.delete_group("g") is ErrorCode.NONE
    world.restart()
    assert list(world.coordinator.groups()) == []


@pytest.mark.parametrize("is_classic", [False, True])
async def test_a_member_whose_client_leaves_during_its_join_has_a_session_timeout(
    every_turn_is_over: None, is_classic: bool
) -> None:
    is_over, turns = False, 0
    while not is_over:
        world, _ = make_world(orders=2)
        first = Client(world, "a")
        await converge(first)
        second = ClassicClient(world, "b", instance_id="b") if is_classic else Client(world, "b")
        join = asyncio.ensure_future(
            second.join() if isinstance(second, ClassicClient) else second.heartbeat()
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        is_over = join.done()
        join.cancel()
        await asyncio.wait([join])
        for _ in range(10):
            await world.clock.advance(SESSION_MS / 5)
            await first.heartbeat()
        assert group(world).members.keys() == {"a"}, f"left after {turns} turns"
        turns += 1
    assert turns > 5


async def test_a_member_does_not_join_a_group_that_is_deleted_while_topics_are_looked_up(
    every_turn_is_over: None,
) -> None:
    world, _ = make_world(orders=1)
    first = Client(world, "a", topics=names(0, 200) | {"orders"})
    join = asyncio.ensure_future(first.heartbeat())
    await asyncio.sleep(0)
    live = world.coordinator._served.get("g")
    assert live is not None
    live.begin_deletion()
    assert (await join).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert not live.group.members


async def test_each_new_member_takes_memory_also_without_names() -> None:
    world = World(max_metadata_bytes=66 * CONSUMER_MEMBER_BYTES, topics=FakeTopics())
    clients = [Client(world, f"c{number}", topics=NO_TOPICS) for number in range(4)]
    errors = [(await client.heartbeat()).error for client in clients]
    assert errors == [ErrorCode.NONE] * 3 + [ErrorCode.POLICY_VIOLATION]
    assert (await clients[0].heartbeat()).error is ErrorCode.NONE
    await clients[1].leave()
    assert (await clients[3].heartbeat()).error is ErrorCode.NONE
