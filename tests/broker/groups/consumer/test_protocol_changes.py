"""Groups that change between the classic and the consumer protocol while they have members."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from broker.event_loop import loop_turns
from broker.groups.classic.members import memory_of
from broker.groups.classic.model import Stable
from broker.groups.classic.subscription import ENTRIES_PER_SLICE
from broker.groups.consumer.classic_members import UPGRADE_BYTES_MAX
from broker.groups.consumer.model import ConsumerGroup, GroupState
from broker.groups.live_consumer_group import ConsumerRules
from broker.groups.topic_regex import TopicViewer
from protocol.errors import ErrorCode
from tests.support.broker.groups.classic_client import ClassicClient, Owned, subscription
from tests.support.broker.groups.consumer_group_world import Client, FakeTopics, group
from tests.support.broker.groups.group_machine import join_request
from tests.support.broker.groups.group_world import World
from tests.support.clocks.virtual_clock import settle
from tests.support.draws import cases

PARTITIONS = 6
Member = Client | ClassicClient


def make_world(**settings: object) -> World:
    return World(topics=FakeTopics({"orders": PARTITIONS}), **settings)


def owned(member: Member) -> Owned:
    if isinstance(member, ClassicClient):
        return member.owned
    return frozenset((id_.rstrip(b"\0").decode(), index) for id_, index in member.owned)


async def step(*members: Member) -> None:
    for member in members:
        await (member.step() if isinstance(member, ClassicClient) else member.heartbeat())
        check_owners(*members)


def check_owners(*members: Member) -> None:
    counts = Counter(partition for member in members for partition in owned(member))
    assert all(count == 1 for count in counts.values()), members


async def converge(*members: Member, rounds: int = 12) -> None:
    for _ in range(rounds):
        await step(*members)
    assert sum(len(owned(member)) for member in members) == PARTITIONS, members


def classic_members(world: World) -> set[str]:
    return {m.member_id for m in group(world).members.values() if m.classic is not None}


@pytest.mark.parametrize("is_cooperative", [False, True])
async def test_a_consumer_member_converts_a_classic_group(is_cooperative: bool) -> None:
    world = make_world()
    first = ClassicClient(world, "a", is_cooperative=is_cooperative)
    second = ClassicClient(world, "b", is_cooperative=is_cooperative)
    await converge(first, second)
    last = Client(world, "c")
    await converge(first, second, last)
    assert group(world).state is GroupState.STABLE
    assert classic_members(world) == {first.member_id, second.member_id}
    assert [len(owned(member)) for member in (first, second, last)] == [2, 2, 2]


async def test_a_classic_member_is_told_to_join_again() -> None:
    world = make_world()
    classic, modern = ClassicClient(world, "a"), Client(world, "b")
    await converge(classic)
    generation = classic.generation
    await modern.heartbeat()
    assert owned(modern) == frozenset(), "the classic member has not given up anything"
    assert classic.heartbeat() is ErrorCode.REBALANCE_IN_PROGRESS
    assert await classic.sync({}) is ErrorCode.REBALANCE_IN_PROGRESS
    joined = await classic.join()
    assert (joined.leader, joined.members) == ("", ())
    assert joined.generation == generation + 1 == group(world).epoch
    assert await classic.sync({}) is ErrorCode.NONE
    assert len(classic.owned) == 3
    assert classic.heartbeat() is ErrorCode.NONE


async def test_a_classic_member_joins_a_consumer_group() -> None:
    world = make_world()
    modern, classic = Client(world, "a"), ClassicClient(world, "b", is_cooperative=True)
    await converge(modern)
    await converge(modern, classic)
    assert len(owned(modern)) == len(owned(classic)) == 3


async def test_the_group_is_classic_after_its_last_consumer_member() -> None:
    world = make_world()
    first, second, last = ClassicClient(world, "a"), ClassicClient(world, "b"), Client(world, "c")
    await converge(first, second)
    await converge(first, second, last)
    epoch = group(world).epoch
    assert (await last.leave()).error is ErrorCode.NONE
    await converge(first, second)
    state = world.state()
    assert isinstance(state, Stable)
    assert state.group.generation == epoch + 1
    world.restart()
    await converge(first, second)
    assert isinstance(world.state(), Stable)


async def test_wherever_its_client_closes_the_connection_the_last_consumer_member_leaves(
    every_turn_is_over: None,
) -> None:
    """Clients send that they leave, and do not wait: the broker encodes a downgrade in turns."""
    is_over, turns = False, 1
    while not is_over:
        world = make_world()
        classic, modern = ClassicClient(world, "a"), Client(world, "b")
        await converge(classic, modern)
        leave = asyncio.ensure_future(modern.leave())
        for _ in range(turns):
            await asyncio.sleep(0)
        is_over = leave.done()
        leave.cancel()
        await converge(classic)
        assert isinstance(world.state(), Stable), f"left after {turns} turns"
        turns += 1
    assert turns > 5


async def test_wherever_a_consumer_member_joins_while_the_last_one_leaves_no_member_is_lost(
    every_turn_is_over: None,
) -> None:
    is_over, turns = False, 0
    while not is_over:
        world = make_world()
        classic, modern, other = ClassicClient(world, "a"), Client(world, "b"), Client(world, "c")
        await converge(classic, modern)
        leave = asyncio.ensure_future(modern.leave())
        for _ in range(turns):
            await asyncio.sleep(0)
        is_over = leave.done()
        await other.heartbeat()
        assert (await leave).error is ErrorCode.NONE
        await converge(classic, other)
        assert group(world).members.keys() == {classic.member_id, "c"}, f"after {turns} turns"
        check = group(world)
        world.restart()
        assert group(world) == check
        turns += 1
    assert turns > 5


async def test_wherever_a_member_joins_while_its_group_is_upgraded_no_member_is_lost(
    every_turn_is_over: None,
) -> None:
    is_over, turns = False, 0
    while not is_over:
        world = make_world()
        first, second, modern = (
            ClassicClient(world, "a"),
            ClassicClient(world, "b"),
            Client(world, "m"),
        )
        await converge(first)
        upgrade = asyncio.ensure_future(modern.heartbeat())
        for _ in range(turns):
            await asyncio.sleep(0)
        is_over = upgrade.done()
        await second.step()
        assert (await upgrade).error in (ErrorCode.NONE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        await converge(first, second, modern)
        assert classic_members(world) == {first.member_id, second.member_id}, f"after {turns} turns"
        assert set(group(world).members) == {first.member_id, second.member_id, "m"}
        turns += 1
    assert turns > 2


async def test_wherever_its_client_closes_the_connection_an_upgraded_group_is_in_the_log(
    every_turn_is_over: None,
) -> None:
    """No other client may send a change for long."""
    is_over, turns, upgraded = False, 0, 0
    while not is_over:
        world = make_world()
        classic, modern = ClassicClient(world, "a"), Client(world, "m")
        await converge(classic)
        upgrade = asyncio.ensure_future(modern.heartbeat())
        for _ in range(turns):
            await asyncio.sleep(0)
        is_over = upgrade.done()
        upgrade.cancel()
        for _ in range(10):
            await settle()  # the records are encoded in turns
        is_upgraded = isinstance(world.state(), ConsumerGroup)
        world.restart()
        assert isinstance(world.state(), ConsumerGroup) is is_upgraded, f"left after {turns} turns"
        if is_upgraded:
            assert classic.member_id in group(world).members
        upgraded += is_upgraded
        turns += 1
    assert upgraded > 2


async def test_wherever_a_member_joins_while_a_static_one_changes_its_protocol_none_is_lost(
    every_turn_is_over: None,
) -> None:
    is_over, turns = False, 0
    while not is_over:
        world = make_world()
        modern, other = Client(world, "m", instance_id="i"), Client(world, "o")
        classic = ClassicClient(world, "a", instance_id="j")
        await converge(classic, modern)
        returned = ClassicClient(world, "c", instance_id="i")
        join = asyncio.ensure_future(returned.join())
        for _ in range(turns):
            await asyncio.sleep(0)
        is_over = join.done()
        await other.heartbeat()
        await join
        await converge(classic, returned, other)
        members = {classic.member_id, returned.member_id, "o"}
        assert group(world).members.keys() == members, f"after {turns} turns"
        turns += 1
    assert turns > 2


async def test_an_expired_consumer_member_downgrades_the_group() -> None:
    world = make_world()
    classic, modern = ClassicClient(world, "a"), Client(world, "b")
    await converge(classic, modern)
    for _ in range(30):
        await world.clock.advance(2_000)
        await classic.step()
    await converge(classic)
    assert isinstance(world.state(), Stable)


@pytest.mark.parametrize("allows_upgrade", [False, True])
async def test_the_policy_forbids_a_change(allows_upgrade: bool) -> None:
    rules = ConsumerRules(allows_upgrade=allows_upgrade, allows_downgrade=not allows_upgrade)
    world = make_world(consumer_rules=rules)
    classic, modern = ClassicClient(world, "a"), Client(world, "b")
    await converge(classic)
    answer = await modern.heartbeat()
    if not allows_upgrade:
        assert answer.error is ErrorCode.GROUP_ID_NOT_FOUND
        assert classic.heartbeat() is ErrorCode.NONE
        return
    await converge(classic, modern)
    await modern.leave()
    await converge(classic)
    assert classic_members(world) == set(group(world).members) == {classic.member_id}


async def test_a_static_member_changes_its_protocol_and_keeps_its_partitions() -> None:
    world = make_world()
    first = ClassicClient(world, "a", instance_id="i")
    second = ClassicClient(world, "b", instance_id="j")
    await converge(first, second)
    before = first.owned
    modern = Client(world, "m", instance_id="i")
    await converge(modern, second)
    assert owned(modern) == before
    assert first.heartbeat() is ErrorCode.FENCED_INSTANCE_ID
    returned = ClassicClient(world, "c", instance_id="i")
    assert (await returned.join()).error is ErrorCode.NONE
    modern.owned = frozenset()
    assert isinstance(world.state(), Stable), "it was the last consumer member"
    assert await returned.sync({}) is ErrorCode.NONE
    assert returned.owned == before
    await converge(returned, second)


async def test_an_administrator_removes_members_of_both_protocols_by_instance_id() -> None:
    world = make_world()
    classic, modern = (
        ClassicClient(world, "a", instance_id="i"),
        Client(world, "b", instance_id="j"),
    )
    other = ClassicClient(world, "c")
    await converge(classic, other, modern)
    classic.member_id = ""
    assert await classic.leave() is ErrorCode.NONE
    assert set(group(world).members) == {"b", other.member_id}
    by_instance = ClassicClient(world, "d", instance_id="j")
    assert await by_instance.leave() is ErrorCode.NONE
    await converge(other)
    assert isinstance(world.state(), Stable)


async def test_commits_are_checked_by_generation_and_by_epoch() -> None:
    world = make_world()
    classic, modern = ClassicClient(world, "a", is_cooperative=True), Client(world, "b")
    await converge(classic)
    generation = classic.generation
    await converge(classic, modern)
    commit, member_id = world.commit, classic.member_id
    assert await commit(member_id=member_id, generation=classic.generation) is ErrorCode.NONE
    assert generation < classic.generation
    kept = min(classic.owned)
    owned_all_along = await commit(member_id=member_id, generation=generation, key=kept)
    assert owned_all_along is ErrorCode.NONE, "KIP-1251"
    (given_up, *_) = set(owned(modern))
    old = await commit(member_id=member_id, generation=generation, key=given_up)
    assert old is ErrorCode.ILLEGAL_GENERATION
    assert await commit(member_id="b", generation=modern.epoch + 1) is ErrorCode.STALE_MEMBER_EPOCH


async def test_a_classic_member_that_does_not_join_again_in_time_leaves() -> None:
    world = make_world()
    classic, modern = ClassicClient(world, "a"), Client(world, "b")
    await converge(classic)
    await modern.heartbeat()
    for _ in range(40):
        classic.heartbeat()
        await modern.heartbeat()
        await world.clock.advance(2_000)
    assert classic.heartbeat() is ErrorCode.UNKNOWN_MEMBER_ID
    assert len(owned(modern)) == PARTITIONS


async def test_another_protocol_type_is_refused() -> None:
    world = make_world()
    await converge(Client(world, "a"))
    answer = await world.join(protocol_type="connect")
    assert answer.error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    connect = make_world()
    await connect.stable(protocol_type="connect")
    assert (await Client(connect, "a").heartbeat()).error is ErrorCode.GROUP_ID_NOT_FOUND


@pytest.mark.parametrize("seed", range(cases(few=6, many=400)))
async def test_members_of_both_protocols_share_partitions_through_anything(seed: int) -> None:
    chance = random.Random(seed)
    print("seed", seed)
    world = make_world()
    names = iter(range(1000))

    def new_member(instance_id: str | None = None) -> Member:
        name = f"m{next(names)}"
        if chance.random() < 0.5:
            return Client(world, name, instance_id=instance_id)
        is_cooperative = chance.random() < 0.5
        protocol = "cooperative-sticky" if is_cooperative else "range"
        client = ClassicClient(world, name, instance_id=instance_id, is_cooperative=is_cooperative)
        client.protocol = "range" if chance.random() < 0.9 else protocol
        return client

    members: list[Member] = []
    for _ in range(60):
        event = chance.random()
        if event < 0.2 and len(members) < 5:
            members.append(new_member())
        elif event < 0.3 and members:
            await members.pop(chance.randrange(len(members))).leave()
        elif event < 0.36 and members:
            crashed = members.pop(chance.randrange(len(members)))
            if isinstance(crashed, ClassicClient):
                crashed.crash()
        elif event < 0.42:
            world.restart()
        elif event < 0.6:
            await world.clock.advance(3_000)
        chance.shuffle(members)
        await step(*members)
        described = world.state()
        if isinstance(described, ConsumerGroup):
            check_values(described)
    if not members:
        members.append(new_member())
    for _ in range(80):
        await world.clock.advance(3_000)
        await step(*members)
    classic = [m for m in members if isinstance(m, ClassicClient) and m.generation >= 0]
    stuck = [m for m in members if isinstance(m, ClassicClient) and m.generation < 0]
    # Who has no protocol in common with the classic members that are there is refused.
    assert classic or not stuck
    assert not {m.protocol for m in stuck} & {m.protocol for m in classic}
    await converge(*[m for m in members if m not in stuck])
    before = world.state()
    world.restart()
    await converge(*[m for m in members if m not in stuck])
    assert type(world.state()) is type(before)


def check_values(described: ConsumerGroup) -> None:
    counts = Counter(p for member in described.members.values() for p in member.owned())
    assert all(count == 1 for count in counts.values())
    assert set(counts) == set(described.owners)


async def test_members_with_large_metadata_keep_a_group_classic() -> None:
    world = make_world()
    topics = frozenset(
        {"orders", *(f"t{index:06}" * 20 for index in range(UPGRADE_BYTES_MAX // 140))}
    )
    classic = ClassicClient(world, "a", topics=topics)
    await converge(classic)
    refused = await Client(world, "b").heartbeat()
    assert refused.error is ErrorCode.GROUP_ID_NOT_FOUND
    assert "bytes" in (refused.message or "")
    assert isinstance(world.state(), Stable)


async def test_the_names_of_a_classic_member_are_read_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_turns, "perf_counter", lambda: 0.0)  # no other turn ends
    world = make_world()
    await converge(Client(world, "a"))
    names = frozenset(f"t{index}" for index in range(5 * ENTRIES_PER_SLICE))
    join = asyncio.ensure_future(ClassicClient(world, "b", topics=names).join())
    for _ in range(4):
        await asyncio.sleep(0)
        assert not join.done()
        assert len(world.state().members) == 1  # type: ignore[attr-defined]
    assert (await join).error is ErrorCode.NONE


async def test_classic_members_fit_the_record_of_the_group_that_they_may_form() -> None:
    world = make_world()
    world.log.max_batch_bytes = 13_000  # a member of a consumer group has its names in two places
    modern = Client(world, "a")
    *fitting, other = (
        ClassicClient(world, name, topics=frozenset({"orders", name * 6_000})) for name in "bcd"
    )
    await modern.heartbeat()
    for client in fitting:
        assert (await client.join()).error is ErrorCode.NONE
    assert (await other.join()).error is ErrorCode.UNKNOWN_SERVER_ERROR
    await modern.leave()
    members = [*world.state().group.members]  # type: ignore[attr-defined]
    assert members == [client.member_id for client in fitting]


async def test_a_group_that_changes_its_protocol_still_counts_for_the_metadata_budget() -> None:
    large_bytes = 9_950  # of 10,000; the two members of the other group take some thousand more
    world = make_world(max_metadata_bytes=64 * 10_000)
    classic, modern = ClassicClient(world, "a"), Client(world, "b")
    protocols = (("range", subscription(frozenset({"orders", ""}))),)
    filler = "x" * (large_bytes - memory_of(protocols, None, "c"))
    large = ClassicClient(world, "c", topics=frozenset({"orders", filler}), group_id="h")
    await converge(classic, modern)
    assert not isinstance(world.state(), Stable)
    assert (await large.join()).error is ErrorCode.POLICY_VIOLATION
    await modern.leave()
    await converge(classic)
    assert isinstance(world.state(), Stable)
    assert (await large.join()).error is ErrorCode.NONE
    await classic.leave()


OWN = TopicViewer("eve", "eve", lambda topic: topic == "orders")


async def test_a_classic_member_subscribes_only_to_topics_that_it_may_describe() -> None:
    """Its assignment would tell that there is such a topic, and how many partitions it has."""
    world = World(topics=FakeTopics({"orders": PARTITIONS, "secret": 3}))
    await converge(Client(world, "a"))
    for topics, error in (
        ({"orders", "secret"}, ErrorCode.TOPIC_AUTHORIZATION_FAILED),
        ({"orders", "missing"}, ErrorCode.TOPIC_AUTHORIZATION_FAILED),
        ({"orders"}, ErrorCode.NONE),
    ):
        request = join_request("", protocols=(("range", subscription(frozenset(topics))),))
        members = world.coordinator.members
        pending = await members.join("g", request, viewer=OWN)
        request = replace(request, member_id=pending.member_id)
        assert (await members.join("g", request, viewer=OWN)).error is error


async def test_an_upgrade_assigns_only_topics_that_its_client_may_describe() -> None:
    world = World(topics=FakeTopics({"orders": PARTITIONS, "secret": 3}))
    classic = ClassicClient(world, "a", topics=frozenset({"orders", "secret"}))
    for _ in range(6):
        await classic.step()
    assert ("secret", 0) in classic.owned
    modern = Client(world, "b", viewer=OWN)
    await modern.heartbeat()
    (member,) = (m for m in group(world).members.values() if m.classic is not None)
    assert member.topics == {"orders"}
    assert all(topic_id.startswith(b"orders") for topic_id, _ in member.assigned)
