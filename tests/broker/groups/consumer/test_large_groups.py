"""Consumer groups (KIP-848) with many members or names: their limits, turns and threads."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest

from broker.groups import large_group_turns, live_consumer_group
from broker.groups.consumer import state
from broker.groups.consumer.model import (
    CONSUMER_MEMBER_BYTES,
    NAME_BYTES,
    Assignment,
    ConsumerGroup,
    TopicMetadata,
)
from broker.groups.consumer.state import NAMES_MAX, AssignmentTask, assignment_task
from broker.groups.live_consumer_group import NAMES_PER_CHECK
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatRequestTopicPartition,
)
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.groups.consumer_group_world import (
    NO_TOPICS,
    Client,
    FakeTopics,
    converge,
    group,
    make_world,
    names,
)
from tests.support.broker.groups.group_world import World
from tests.support.broker.principals import PrincipalClient
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.storage.memory_env import MemoryEnv


async def test_a_heartbeat_that_names_many_partitions_takes_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = ConsumerGroupHeartbeatRequest(
        group_id="g",
        member_id="m",
        member_epoch=0,
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=[],
        topic_partitions=[],
    )
    row = ConsumerGroupHeartbeatRequestTopicPartition(topic_id=b"t" * 16, partitions=[])
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        client, meter = PrincipalClient(broker, "eve"), LoopMeter(clock_rate=10)
        answer = await client.request(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request)
        row.partitions = list(range(49_000))
        request.member_epoch, request.topic_partitions = answer.member_epoch, [row]
        with meter.measuring(monkeypatch):
            answer = await client.request(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request)
        assert answer.error_code == ErrorCode.NONE
        assert meter.longest_turn < len(row.partitions) // 5


async def test_the_subscriptions_of_a_group_have_a_limit() -> None:
    world, _ = make_world()
    first = Client(world, "a", topics=names(0, NAMES_MAX - 1))
    second = Client(world, "b", topics=names(NAMES_MAX, 2))
    assert (await first.heartbeat()).error is ErrorCode.NONE
    before = group(world)
    refused = await second.heartbeat()
    assert refused.error is ErrorCode.INVALID_REQUEST
    assert str(NAMES_MAX) in (refused.message or "")
    assert group(world) is before
    assert (await first.subscribe(names(0, 1))).error is ErrorCode.NONE
    assert (await second.heartbeat()).error is ErrorCode.NONE


async def test_the_expressions_of_a_group_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "REGEXES_MAX", 2)
    world, _ = make_world()
    clients = [Client(world, name, topics=NO_TOPICS, regex=f"none-{name}") for name in "abc"]
    errors = [(await client.heartbeat()).error for client in clients]
    assert errors == [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.INVALID_REQUEST]
    await clients[1].leave()
    assert (await clients[2].heartbeat()).error is ErrorCode.NONE
    again = Client(world, "d", topics=NO_TOPICS, regex="none-a")
    assert (await again.heartbeat()).error is ErrorCode.NONE


async def test_equal_subscriptions_count_once_and_are_kept_once() -> None:
    world, _ = make_world()
    clients = [Client(world, name, topics=names(0, NAMES_MAX)) for name in "ab"]
    await converge(*clients, rounds=2)
    world.restart()
    for _ in range(2):
        first, second = group(world).members.values()
        assert first.topics is second.topics
        await converge(*clients, rounds=1)


async def test_one_user_has_one_large_assignment_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, may_end = list[str](), threading.Event()
    world, topics = make_world(alice=2, bob=2)
    compute = AssignmentTask.compute

    def slow_for_alice(task: AssignmentTask) -> Mapping[str, Assignment]:
        (topic,) = task.topics
        began.append(topic)
        assert topic == "bob" or may_end.wait(60)
        return compute(task)

    monkeypatch.setattr(AssignmentTask, "compute", slow_for_alice)
    monkeypatch.setattr(live_consumer_group, "SMALL_ASSIGNMENT", 0)

    def member(user: str, group_id: str) -> Client:
        return Client(world, "m", topics=frozenset({user}), group_id=group_id, user=user)

    waiting = [await world.begin(member("alice", f"g{number}").heartbeat()) for number in range(3)]
    try:
        answer = await member("bob", "h").heartbeat()
        assert answer.assignment == {(topics.id_of("bob"), index) for index in range(2)}
        assert sorted(began) == ["alice", "bob"]
    finally:
        may_end.set()
    assert [len(answer.assignment or ()) for answer in await asyncio.gather(*waiting)] == [2, 2, 2]


@pytest.fixture
def every_assignment_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_consumer_group, "SMALL_ASSIGNMENT", 0)
    monkeypatch.setattr(large_group_turns, "LARGE_GROUP", 1)


async def test_members_that_wait_for_a_large_assignment_share_the_next_one(
    monkeypatch: pytest.MonkeyPatch, every_assignment_is_large: None
) -> None:
    threads, may_end = list[int](), threading.Event()
    world, _ = make_world(orders=12)

    def slow(group: ConsumerGroup, topics: Mapping[str, TopicMetadata]) -> AssignmentTask:
        threads.append(threading.get_ident())
        assert may_end.wait(60)
        return assignment_task(group, topics)

    monkeypatch.setattr(state, "assignment_task", slow)
    joins = [await world.begin(Client(world, name).heartbeat()) for name in "abcdefghij"]
    for _ in range(50):
        await asyncio.sleep(0)
    may_end.set()
    answers = await asyncio.gather(*joins)
    assert {answer.error for answer in answers} == {ErrorCode.NONE}
    assert len(threads) == 2, "of the first member, and of all"
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("epoch", [0, -1])
async def test_heartbeats_of_large_groups_take_turns(
    monkeypatch: pytest.MonkeyPatch, every_assignment_is_large: None, epoch: int
) -> None:
    world, rounds = make_world(orders=12)[0], [0]
    clients = [Client(world, f"m{n}", group_id=g) for n in range(6) for g in ("g", "h")]
    await converge(*clients, rounds=3)
    visits: dict[tuple[object, ...], int] = {}  # the round of each step that looks at all members

    def note(place: ModuleType, step: str, member_id: Callable[..., str]) -> None:
        function = getattr(place, step)

        def noted(group: ConsumerGroup, *arguments: Any) -> object:
            visits.setdefault((step, group.group_id, member_id(*arguments)), rounds[-1])
            return function(group, *arguments)

        monkeypatch.setattr(place, step, noted)

    note(state, "update_member", lambda request, *_: request.member_id)
    note(state, "after_leave", lambda request: request.member_id)
    note(live_consumer_group, "reconciled", lambda member, _owned: member.member_id)
    for client in clients:
        client.epoch = epoch
    beats = [asyncio.ensure_future(client.heartbeat()) for client in clients]
    while not all(beat.done() for beat in beats):
        rounds.append(rounds[-1] + 1)
        await asyncio.sleep(0)
    assert len(visits) == len(clients) * (2 if epoch == 0 else 1)
    most = Counter((step, visited) for (step, *_), visited in visits.items())
    assert max(most.values()) == 1, most


async def test_a_heartbeat_that_reports_nothing_waits_for_no_other(
    every_assignment_is_large: None,
) -> None:
    """Or the sessions of a group of thousands would end while its heartbeats wait."""
    world, _ = make_world(orders=12)
    clients = [Client(world, f"m{n}", group_id="g") for n in range(6)]
    await converge(*clients, rounds=3)
    for client in clients[:-1]:
        client.epoch = 0
    joins = [asyncio.ensure_future(client.heartbeat()) for client in clients[:-1]]
    answer = asyncio.ensure_future(clients[-1].send(clients[-1].epoch))
    for _ in range(3):
        await asyncio.sleep(0)
    assert answer.done()
    assert not all(join.done() for join in joins)
    await asyncio.gather(*joins)


class CountedTopics(FakeTopics):
    lookups = 0

    def topic(self, name: str) -> TopicMetadata | None:
        self.lookups += 1
        return super().topic(name)


async def test_the_topics_of_a_subscription_are_looked_up_in_turns(
    every_turn_is_over: None,
) -> None:
    topics = CountedTopics({"orders": 1, "bills": 1})
    world = World(topics=topics)
    first = Client(world, "a", topics=names(0, 200) | {"orders"})
    second = Client(world, "b", topics=names(200, 400) | {"bills"})
    joins = [asyncio.ensure_future(client.heartbeat()) for client in (first, second)]
    most = 0
    while not all(join.done() for join in joins):
        before = topics.lookups
        await asyncio.sleep(0)
        most = max(most, topics.lookups - before)
    assert most <= 2
    await converge(first, second)
    owned = [{topic_id.rstrip(b"\0") for topic_id, _ in c.owned} for c in (first, second)]
    assert owned == [{b"orders"}, {b"bills"}], "each has looked up the topics of the other"


async def test_a_group_is_served_while_the_topics_of_its_first_member_are_looked_up(
    every_turn_is_over: None,
) -> None:
    world, _ = make_world(orders=1)
    first = Client(world, "a", topics=names(0, 200) | {"orders"})
    join = asyncio.ensure_future(first.heartbeat())
    await asyncio.sleep(0)
    outsider = Client(world, "b")
    outsider.epoch = 3
    assert (await outsider.heartbeat()).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert not join.done()
    assert (await join).error is ErrorCode.NONE
    assert group(world).members.keys() == {"a"}


async def test_a_group_of_many_names_looks_for_topics_less_often() -> None:
    topics = CountedTopics({"orders": 1})
    world = World(topics=topics)
    client = Client(world, "a", topics=names(0, NAMES_MAX))
    await client.heartbeat()
    topics.lookups = 0
    for _ in range(20):
        await world.clock.advance(1_000)
        await client.heartbeat()
    assert topics.lookups <= 20 * NAMES_PER_CHECK
    topics.counts["t000000"] = 1
    await world.clock.advance(10_000)
    await client.heartbeat()
    assert len(client.owned) == 1


async def test_names_of_subscriptions_have_a_budget() -> None:
    request_bytes = 10 * NAME_BYTES + CONSUMER_MEMBER_BYTES
    world = World(max_metadata_bytes=64 * request_bytes, topics=FakeTopics())
    first, second = (Client(world, name, topics=names(0, 10)) for name in "ab")
    third = Client(world, "c", topics=names(10, 10))
    answers = [await client.heartbeat() for client in (first, second, third)]
    assert [answer.error for answer in answers] == [0, 0, ErrorCode.POLICY_VIOLATION]
    await first.leave()
    await second.leave()
    assert (await third.heartbeat()).error is ErrorCode.NONE
