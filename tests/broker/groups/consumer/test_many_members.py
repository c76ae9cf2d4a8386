"""Groups of thousands of members: no step of their requests holds the event loop for long."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from broker.groups.classic.members import Member, Members
from broker.groups.classic.model import Group, PreparingRebalance
from broker.groups.classic.subscription import encode_assignment_sliced
from broker.groups.consumer.model import (
    ClassicProtocol,
    ConsumerGroup,
    ConsumerMember,
    MemberState,
    PartitionId,
)
from broker.groups.live_consumer_group import ConsumerRules
from broker.groups.offsets.offsets_store import LoadedPartition
from broker.topics.internal_topic import PartitionState
from protocol.errors import ErrorCode
from storage.slices import run_at_once
from tests.support.broker.groups.classic_client import subscription
from tests.support.broker.groups.consumer_group_world import (
    REBALANCE_MS,
    Client,
    FakeTopics,
    group,
)
from tests.support.broker.groups.group_world import World
from tests.support.clocks.loop_meter import LoopMeter

MEMBERS = 2_000  # the default of group.max.size
SESSION_MS = 45_000
# As in test_large_subscriptions.py. A step looks at all members some times.
CLOCK_RATE = 10
LINES_PER_TURN_MAX = 23_000
# 1,024 topics of an assignment are read in 30,000; the sessions of all members start in 50,000.
LINES_PER_CHANGE_TURN_MAX = 60_000
LINES_PER_LOAD_TURN_MAX = 30_000  # one turn starts the deadlines of all members
TOPICS = frozenset(f"t{number}" for number in range(20))


def stable_group(topics: FakeTopics) -> ConsumerGroup:
    """A group in which each member has ten partitions."""
    partitions: list[PartitionId] = [
        (topics.id_of(name), index) for name in TOPICS for index in range(topics.counts[name])
    ]
    owned = {f"m{n}": frozenset(partitions[n::MEMBERS]) for n in range(MEMBERS)}
    return ConsumerGroup(
        "g",
        epoch=1,
        assignment_epoch=1,
        members={
            key: ConsumerMember(
                member_id=key,
                instance_id=f"i-{key}",
                rack_id=None,
                client_id="client",
                client_host="/127.0.0.1",
                rebalance_timeout_ms=REBALANCE_MS,
                topics=TOPICS,
                epoch=1,
                previous_epoch=0,
                assigned=dict.fromkeys(of_member, 1),
            )
            for key, of_member in owned.items()
        },
        targets=owned,
        owners={partition: key for key, of_member in owned.items() for partition in of_member},
    )


def test_no_turn_of_a_group_with_thousands_of_members_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = LoopMeter(CLOCK_RATE)
    turns: dict[str, int] = {}  # the lines of the longest one

    async def scenario() -> None:
        topics = FakeTopics(dict.fromkeys(TOPICS, 10 * MEMBERS // len(TOPICS)))
        world = World(topics=topics, consumer_rules=ConsumerRules(max_size=MEMBERS + 1))
        loaded = LoadedPartition(consumer_groups={"g": stable_group(topics)})
        world.coordinator.loading.deactivate(0, PartitionState.LOADING)
        await world.coordinator.loading.activate(0, loaded)

        async def measured(label: str, step: Callable[[], Awaitable[object]]) -> None:
            with meter.measuring(monkeypatch):
                await asyncio.sleep(0)
                await step()
            turns[label] = meter.longest_turn

        def client(member_id: str) -> Client:
            member = group(world).members[member_id]
            owned = frozenset(member.assigned)
            return Client(world, member_id, TOPICS, f"i-{member_id}", epoch=1, owned=owned)

        await measured("assignment", client("m0").heartbeat)
        await measured("heartbeat", client("m1").heartbeat)
        await measured("join", Client(world, "new", TOPICS).heartbeat)
        await measured("heartbeat after a join", client("m2").heartbeat)
        await measured("departure", client("m3").leave)
        await measured("heartbeat after a departure", client("m4").heartbeat)
        await measured("end of all sessions", lambda: world.clock.advance(SESSION_MS))
        assert not group(world).members

    asyncio.run(scenario())
    assert {label: lines for label, lines in turns.items() if lines > LINES_PER_TURN_MAX} == {}


def test_a_group_whose_members_all_revoke_partitions_is_loaded_in_short_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = LoopMeter(CLOCK_RATE)

    async def scenario() -> None:
        topics = FakeTopics(dict.fromkeys(TOPICS, 10 * MEMBERS // len(TOPICS)))
        world = World(topics=topics)
        stable = stable_group(topics)
        revoking = {
            key: replace(member, state=MemberState.UNREVOKED_PARTITIONS)
            for key, member in stable.members.items()
        }
        loaded = LoadedPartition(consumer_groups={"g": replace(stable, members=revoking)})
        world.coordinator.loading.deactivate(0, PartitionState.LOADING)
        with meter.measuring(monkeypatch):
            await world.coordinator.loading.activate(0, loaded)
        await world.clock.advance(REBALANCE_MS)
        assert not group(world).members

    asyncio.run(scenario())
    assert meter.longest_turn <= LINES_PER_LOAD_TURN_MAX


def classic_group(size: int, topics: frozenset[str], assigned: frozenset[str]) -> Group:
    """A stable group of the classic protocol; its members share the topics."""
    ids, names = [f"m{number}" for number in range(size)], sorted(assigned)
    metadata = subscription(topics)
    members = Members.of(
        Member(key, f"i-{key}", "c", "/h", SESSION_MS, REBALANCE_MS, (("range", metadata),))
        for key in ids
    )
    owned = {key: {name: [0] for name in names[number::size]} for number, key in enumerate(ids)}
    assignments = {
        key: run_at_once(encode_assignment_sliced(1, each)) for key, each in owned.items()
    }
    return Group("g", 4, "consumer", "range", "m0", members, assignments)


@pytest.mark.parametrize(("size", "names"), [(2, 8_000), (MEMBERS, 20)])
def test_no_turn_of_an_upgrade_is_long(
    size: int, names: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = LoopMeter(CLOCK_RATE)
    topics = frozenset(f"t{number}" for number in range(names))

    async def scenario() -> None:
        world = World(
            topics=FakeTopics(dict.fromkeys(topics, 1)),
            consumer_rules=ConsumerRules(max_size=MEMBERS + 1),
        )
        world.coordinator.loading.deactivate(0, PartitionState.LOADING)
        loaded = LoadedPartition(groups={"g": classic_group(size, topics, topics)})
        await world.coordinator.loading.activate(0, loaded)
        with meter.measuring(monkeypatch):
            await asyncio.sleep(0)
            answer = await Client(world, "new", frozenset({"t0"})).heartbeat()
        assert answer.error is ErrorCode.NONE
        assert len(group(world).members) == size + 1

    asyncio.run(scenario())
    assert meter.longest_turn <= LINES_PER_CHANGE_TURN_MAX


def test_no_turn_of_a_downgrade_of_many_members_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = LoopMeter(CLOCK_RATE)

    async def scenario() -> None:
        topics = FakeTopics(dict.fromkeys(TOPICS, 10 * MEMBERS // len(TOPICS)))
        stable, protocols = stable_group(topics), (("range", subscription(TOPICS)),)
        members = {
            key: replace(member, classic=ClassicProtocol(SESSION_MS, protocols))
            for key, member in stable.members.items()
        } | {"m0": stable.members["m0"]}
        world = World(topics=topics, consumer_rules=ConsumerRules(max_size=MEMBERS + 1))
        world.coordinator.loading.deactivate(0, PartitionState.LOADING)
        loaded = LoadedPartition(consumer_groups={"g": replace(stable, members=members)})
        await world.coordinator.loading.activate(0, loaded)
        with meter.measuring(monkeypatch):
            await asyncio.sleep(0)
            answer = await Client(world, "m0", TOPICS, "i-m0", epoch=1).leave()
        assert answer.error is ErrorCode.NONE
        state = world.state()
        assert isinstance(state, PreparingRebalance)
        assert len(state.group.members) == MEMBERS - 1

    asyncio.run(scenario())
    assert meter.longest_turn <= LINES_PER_CHANGE_TURN_MAX
