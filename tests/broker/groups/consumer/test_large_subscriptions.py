"""Members with thousands of topics: no step of their requests holds the event loop for long."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import pytest

from broker.groups.classic.model import PreparingRebalance, Stable
from broker.groups.classic.subscription import decode_assignment_sliced
from broker.groups.consumer.model import Assignment, Heartbeat, HeartbeatAnswer, TopicMetadata
from protocol.errors import ErrorCode
from storage.slices import run_at_once
from tests.support.broker.groups.classic_client import ClassicClient, subscription
from tests.support.broker.groups.consumer_group_world import Client, group
from tests.support.broker.groups.group_world import World
from tests.support.clocks.loop_meter import LoopMeter

TOPICS = 8_000
# The clock goes ten times faster, as in tests/broker/network/test_budgets.py: a turn of 2 ms is
# 4,000 lines, and a step that is not divided takes some lines for each topic. The longest step that
# is left encodes 512 rows of a record, in 20,000 lines.
CLOCK_RATE = 10
LINES_PER_TURN_MAX = 23_000
OWNED = 8_000
OWNED_LINES_PER_TURN_MAX = 45_000  # 1,024 topics of a subscription are read in 30,000


class Topics:
    def __init__(self) -> None:
        self.existing = {
            name: TopicMetadata(name, number.to_bytes(16), 1)
            for number, name in enumerate(f"topic-{number}" for number in range(TOPICS))
        }

    def topic(self, name: str) -> TopicMetadata | None:
        return self.existing.get(name)

    def names(self) -> Iterable[str]:
        return self.existing


def beat(
    member_id: str,
    epoch: int,
    topics: frozenset[str] | None = None,
    owned: Assignment | None = None,
) -> Heartbeat:
    timeout_ms = 60_000 if epoch == 0 else -1
    return Heartbeat(member_id, epoch, None, None, "c", "/h", timeout_ms, topics, None, None, owned)


def test_no_turn_of_a_member_with_thousands_of_topics_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = LoopMeter(CLOCK_RATE)
    turns: dict[str, int] = {}  # the lines of the longest one

    async def scenario() -> None:
        world = World(topics=Topics())
        members, names = world.coordinator.members, frozenset(Topics().existing)

        async def measured(
            label: str, request: Callable[[], Awaitable[HeartbeatAnswer]]
        ) -> HeartbeatAnswer:
            with meter.measuring(monkeypatch):
                await asyncio.sleep(0)
                answer = await request()
            assert answer.error is ErrorCode.NONE
            turns[label] = meter.longest_turn
            return answer

        def heartbeat(label: str, request: Heartbeat) -> Awaitable[HeartbeatAnswer]:
            return measured(label, lambda: members.consumer_heartbeat("g", request))

        first = await heartbeat("join", beat("a", 0, names, frozenset()))
        owned = first.assignment
        assert owned is not None
        assert len(owned) == TOPICS
        other = await heartbeat("second join", beat("b", 0, frozenset(list(names)), frozenset()))
        left = await heartbeat("revocation", beat("a", first.epoch, None, owned))
        await heartbeat("confirmation", beat("a", left.epoch, None, left.assignment))
        got = await heartbeat("assignment", beat("b", other.epoch))
        assert got.assignment is not None
        assert len(got.assignment) == TOPICS // 2
        await heartbeat("departure", beat("b", -1))

    asyncio.run(scenario())
    assert {label: lines for label, lines in turns.items() if lines > LINES_PER_TURN_MAX} == {}


@pytest.mark.parametrize("topic", ["none-{}", "topic-1"])
def test_no_turn_of_a_classic_member_that_says_it_owns_thousands_of_partitions_is_long(
    monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    """The client writes this: names of topics that exist or not, in any number."""
    meter = LoopMeter(CLOCK_RATE)

    async def scenario() -> None:
        world = World(topics=Topics())
        names = frozenset({"topic-1"})
        await Client(world, "a", names).heartbeat()
        owned = frozenset((topic.format(number), number) for number in range(OWNED))
        protocols = (("range", subscription(names, owned)),)
        with meter.measuring(monkeypatch):
            await asyncio.sleep(0)
            answer = await world.join(protocols=protocols)
        assert answer.error is ErrorCode.NONE

    asyncio.run(scenario())
    assert meter.longest_turn <= OWNED_LINES_PER_TURN_MAX


def test_no_turn_of_a_downgrade_with_thousands_of_topics_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = LoopMeter(CLOCK_RATE)

    async def scenario() -> None:
        world = World(topics=Topics())
        modern = Client(world, "a", frozenset(Topics().existing))
        classic = ClassicClient(world, "c", modern.topics, is_cooperative=True)
        await modern.heartbeat()
        for _ in range(6):
            await classic.step()
            await modern.heartbeat()
        assert len(modern.owned) == TOPICS // 2
        before = group(world)
        with meter.measuring(monkeypatch):
            await asyncio.sleep(0)
            await modern.leave()
        state = world.state()
        assert isinstance(state, PreparingRebalance)
        (member_id,) = state.group.members
        assignment = run_at_once(
            decode_assignment_sliced(state.group.assignment(member_id))
        ).partitions
        topics = Topics().existing
        named = {topics[name].topic_id for name in assignment}
        assert named == {topic_id for topic_id, _ in before.targets[member_id]}

    asyncio.run(scenario())
    assert meter.longest_turn <= LINES_PER_TURN_MAX


def test_no_turn_is_long_when_a_static_member_with_thousands_of_topics_changes_its_protocol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was the last one that used the consumer protocol."""
    meter = LoopMeter(CLOCK_RATE)

    async def scenario() -> None:
        world = World(topics=Topics())
        modern = Client(world, "a", frozenset(Topics().existing), instance_id="i")
        other = ClassicClient(world, "c", modern.topics, instance_id="j", is_cooperative=True)
        await modern.heartbeat()
        for _ in range(6):
            await other.step()
            await modern.heartbeat()
        assert len(modern.owned) == TOPICS // 2
        await modern.leave(-2)
        protocols = (("range", subscription(modern.topics)),)
        with meter.measuring(monkeypatch):
            await asyncio.sleep(0)
            answer = await world.join(instance_id="i", protocols=protocols)
        assert answer.error is ErrorCode.NONE
        assert isinstance(world.state(), Stable)

    asyncio.run(scenario())
    # The rest of a subscription is read together with what follows it.
    assert meter.longest_turn <= 2 * LINES_PER_TURN_MAX
