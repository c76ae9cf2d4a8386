"""What consumer groups (KIP-848) assign to their members, by topics, expressions and assignors."""

import random

import pytest

from broker import client_patterns
from broker.groups.consumer.model import NO_PARTITIONS, GroupState
from broker.groups.consumer.state import assignment_size, assignment_task, preferred_assignor
from protocol.errors import ErrorCode
from storage.errors import LogDirectoryError
from tests.support.broker.groups.consumer_group_world import (
    NO_TOPICS,
    Client,
    check_restart,
    converge,
    group,
    make_world,
    names,
)
from tests.support.broker.groups.group_world import World
from tests.support.draws import cases


async def test_the_first_member_gets_every_partition_with_its_join() -> None:
    world, topics = make_world()
    member = Client(world, "a")
    answer = await member.heartbeat()
    assert (answer.error, answer.epoch) == (ErrorCode.NONE, 1)
    assert answer.assignment == {(topics.id_of("orders"), index) for index in range(6)}
    assert group(world).state is GroupState.STABLE


async def test_a_partition_moves_only_after_its_owner_has_revoked_it() -> None:
    world, _ = make_world()
    first, second = Client(world, "a"), Client(world, "b")
    await first.heartbeat()
    joined = await second.heartbeat()
    assert joined.assignment == NO_PARTITIONS, "the first member owns all partitions"
    revoke = await first.heartbeat()
    assert revoke.assignment is not None
    assert len(revoke.assignment) == 3
    assert revoke.epoch == 1, "the epoch follows when the revocation is confirmed"
    assert (await second.heartbeat()).assignment is None, "nothing is released yet"
    assert (await first.heartbeat()).epoch == 2
    await second.heartbeat()
    assert len(second.owned) == 3
    assert not first.owned & second.owned
    assert group(world).state is GroupState.STABLE


async def test_members_of_a_stable_group_keep_their_partitions_when_one_joins() -> None:
    world, _ = make_world(orders=12)
    clients = [Client(world, name) for name in "abc"]
    await converge(*clients)
    before = [client.owned for client in clients]
    last = Client(world, "d")
    await converge(*clients, last)
    assert all(client.owned < owned for client, owned in zip(clients, before, strict=True))
    assert [len(client.owned) for client in (*clients, last)] == [3, 3, 3, 3]


async def test_new_partitions_and_topics_reach_the_members() -> None:
    world, topics = make_world()
    member = Client(world, "a", topics=frozenset({"orders", "later"}))
    await converge(member)
    topics.counts |= {"orders": 8, "later": 2}
    await world.clock.advance(5_000)
    await converge(member)
    assert len(member.owned) == 10
    del topics.counts["orders"]
    await world.clock.advance(5_000)
    await converge(member)
    assert len(member.owned) == 2


async def test_an_expression_follows_the_topics_that_it_matches() -> None:
    world, topics = make_world(**{"orders-eu": 2, "orders-us": 2, "other": 2})
    member = Client(world, "a", topics=frozenset(), regex="orders-.*")
    await converge(member)
    assert {topic_id.rstrip(b"\0") for topic_id, _ in member.owned} == {b"orders-eu", b"orders-us"}
    topics.counts["orders-asia"] = 3
    await world.clock.advance(11_000)
    await converge(member)
    assert len(member.owned) == 7


@pytest.mark.parametrize("regex", ["(", "(?<=a)b", "x" * 20_000])
async def test_an_expression_that_is_not_valid_is_refused(regex: str) -> None:
    world, _ = make_world()
    answer = await Client(world, "a", regex=regex).heartbeat()
    assert answer.error is ErrorCode.INVALID_REGULAR_EXPRESSION
    assert list(world.coordinator.groups()) == []


async def test_the_range_assignor_assigns_equal_topics_alike() -> None:
    world, topics = make_world(left=4, right=4)
    names = frozenset({"left", "right"})
    clients = [Client(world, name, topics=names, assignor="range") for name in "ab"]
    await converge(*clients)
    for client in clients:
        indexes = {name: {i for t, i in client.owned if t == topics.id_of(name)} for name in names}
        assert indexes["left"] == indexes["right"]
        assert len(indexes["left"]) == 2


@pytest.mark.parametrize("seed", range(cases(few=20, many=200)))
async def test_in_random_lives_no_partition_has_two_owners_and_all_are_assigned(seed: int) -> None:
    """Members join, leave, fall silent, subscribe anew; topics grow; appends fail; restarts."""
    chance = random.Random(seed)
    world, topics = make_world(orders=chance.randint(1, 12), more=chance.randint(1, 5))
    names = [frozenset({"orders"}), frozenset({"orders", "more"})]
    clients = [
        Client(
            world,
            f"m{index}",
            topics=names[0],
            instance_id=chance.choice([None, f"i{index}"]),
            assignor=chance.choice([None, "uniform", "range"]),
        )
        for index in range(chance.randint(1, 5))
    ]
    for step in range(80):
        world.log.error = LogDirectoryError("/d", "disk") if chance.random() < 0.05 else None
        client = chance.choice(clients)
        match chance.random():
            case x if x < 0.75:
                await client.heartbeat()
            case x if x < 0.80 and client.epoch > 0:
                await client.leave(-2 if client.instance_id and chance.random() < 0.5 else -1)
            case x if x < 0.87 and client.epoch > 0:
                await client.subscribe(chance.choice(names))
            case x if x < 0.90:
                topics.counts["orders"] += chance.randint(0, 2)
            case x if x < 0.95:
                await world.clock.advance(chance.randint(0, 20_000))
            case _ if world.log.error is None:
                if (await client.heartbeat()).error is ErrorCode.NONE:
                    before = group(world)
                    world.restart()
                    assert group(world) == before, (seed, step)
        _check_owners(world, clients, seed, step)
    world.log.error = None
    await world.clock.advance(2_000)
    await converge(*clients, rounds=15)
    wanted = {(topics.id_of(n), i) for n in ("orders",) for i in range(topics.counts[n])}
    owned = [partition for client in clients for partition in client.owned]
    assert len(owned) == len(set(owned)), seed
    assert wanted <= set(owned), seed
    assert group(world).state is GroupState.STABLE, seed


def _check_owners(world: World, clients: list[Client], seed: int, step: int) -> None:
    """Nobody else owns what a client owns that the coordinator still counts as a member."""
    if not list(world.coordinator.groups()):
        return
    members = group(world).members
    owners: dict[tuple[bytes, int], str] = {}
    for client in clients:
        member = members.get(client.member_id)
        if member is None or member.epoch < client.epoch:
            continue
        for partition in client.owned:
            assert owners.setdefault(partition, client.member_id) == client.member_id, (seed, step)


async def test_members_with_one_expression_share_its_topics() -> None:
    world, _ = make_world(**{f"t{index}": 1 for index in range(4)})
    clients = [Client(world, name, topics=NO_TOPICS, regex="t.*") for name in "ab"]
    await converge(*clients)
    task = assignment_task(group(world), {})
    first, second = (member.topics for member in task.members)
    assert first is second


async def test_names_of_topics_that_do_not_exist_cost_an_assignor_nothing() -> None:
    world, topics = make_world(orders=6)
    missing = names(0, 2_000)
    clients = [
        Client(world, "a", topics=missing | {"orders"}, assignor="range"),
        Client(world, "b", topics=missing | {"orders"}, assignor="range"),
        Client(world, "c", topics=frozenset({"orders"})),
    ]
    await converge(*clients)
    task = assignment_task(group(world), topics.existing())
    first, second, third = (member.topics for member in task.members)
    assert first is second is third
    assert first == {"orders"}


async def test_the_size_of_an_assignment_counts_the_members_of_each_topic() -> None:
    world, topics = make_world(orders=50, bills=50)
    clients = [
        Client(world, "a", topics=frozenset({"orders"})),
        Client(world, "b", topics=frozenset({"orders", "bills"})),
    ]
    await converge(*clients)
    assert assignment_size(group(world), topics.existing()) == 2 + 100 + 2 * 2


async def test_a_stored_assignor_that_only_another_broker_has_does_not_count() -> None:
    world, _ = make_world()
    stored = Client(world, "a", assignor="com.example.Assignor")
    assert (await stored.heartbeat()).error is ErrorCode.NONE, "as a Kafka broker has taken it"
    world.restart()
    client = Client(world, "b", assignor="range")
    await converge(stored, client)
    assert preferred_assignor(group(world)) == "range"
    assert len(client.owned) == 3


async def test_a_stored_expression_that_is_refused_here_keeps_its_topics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, _ = make_world()
    stored, other = Client(world, "a", topics=NO_TOPICS, regex="(orders)+"), Client(world, "b")
    await stored.heartbeat()
    world.restart()
    monkeypatch.setattr(client_patterns, "PATTERN_CHARS_MAX", 5)
    await converge(stored, other)
    assert [len(client.owned) for client in (stored, other)] == [3, 3]
    refused = Client(world, "c", regex="(orders)+.")
    assert (await refused.heartbeat()).error is ErrorCode.INVALID_REGULAR_EXPRESSION


async def test_a_group_has_no_further_epoch_after_a_member_with_topics_of_its_own_left() -> None:
    world, topics = make_world(orders=6, payments=2)
    stays, leaves = Client(world, "stays"), Client(world, "leaves", topics=frozenset({"payments"}))
    await converge(stays, leaves)
    await leaves.leave()
    await converge(stays)
    epoch = group(world).epoch
    await world.clock.advance(5_000)
    await converge(stays)
    assert group(world).epoch == epoch
    check_restart(world)
    topics.counts["orders"] = 7
    await world.clock.advance(5_000)
    await converge(stays)
    assert group(world).epoch == epoch + 1
