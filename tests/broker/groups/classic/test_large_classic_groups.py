"""Classic groups of thousands of members: no step of a rebalance holds the event loop for long."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from broker.groups.classic.model import (
    CompletingRebalance,
    Empty,
    Group,
    JoinAnswer,
    PreparingRebalance,
    Stable,
    SyncAnswer,
)
from protocol.errors import ErrorCode
from tests.support.broker.groups.group_machine import SESSION_MS
from tests.support.broker.groups.group_world import World
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.clocks.virtual_clock import settle

MEMBERS = 2_000  # the default of group.max.size
# As many, and as long, as a member may name with some metadata; clients name 1 to 4.
PROTOCOLS = tuple((f"{number}" * 200, bytes(100)) for number in range(8))
# As in consumer/test_large_subscriptions.py. Some steps have ten lines for each member: they make
# mappings of all members.
CLOCK_RATE = 10
LINES_PER_TURN_MAX = 23_000


def test_no_turn_of_a_rebalance_of_thousands_of_members_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = LoopMeter(CLOCK_RATE)
    turns: dict[str, int] = {}  # the lines of the longest one

    async def scenario() -> None:
        world = World()

        def join(number: int, member_id: str = "") -> "asyncio.Task[JoinAnswer]":
            request = world.join(member_id, instance_id=f"i{number}", protocols=PROTOCOLS)
            return asyncio.ensure_future(request)

        def sync(member_id: str, generation: int) -> "asyncio.Task[SyncAnswer]":
            assignments = {key: bytes(100) for key in ids} if member_id == leader else {}
            return asyncio.ensure_future(world.sync(member_id, generation, **assignments))

        async def measured(
            label: str, step: Callable[[], Awaitable[object]], until: Callable[[], bool]
        ) -> None:
            with meter.measuring(monkeypatch):
                await asyncio.sleep(0)
                await step()
                while not until():
                    await settle()
            turns[label] = meter.longest_turn

        first = await world.stable(instance_id="i0", protocols=PROTOCOLS)
        joins = [join(number) for number in range(1, MEMBERS - 1)]
        while len(group_of(world).members) < MEMBERS - 1:
            await settle()
        joins.append(join(MEMBERS - 1))
        await measured("join", settle, lambda: len(group_of(world).members) == MEMBERS)
        joins.append(join(0, first))
        await measured("last join", settle, lambda: joins[-1].done() and joins[-2].done())
        ids = [task.result().member_id for task in joins]
        generation, leader = joins[0].result().generation, joins[0].result().leader
        syncs = [sync(member_id, generation) for member_id in ids if member_id != leader]
        while len(group_of(world).syncs) < MEMBERS - 1:
            await settle()
        syncs.append(sync(leader, generation))
        await measured("sync of the leader", settle, lambda: syncs[-1].done())
        assert {(await task).error for task in syncs} == {ErrorCode.NONE}
        assert isinstance(world.state(), Stable)
        again = join(0, leader)
        await measured("join of the leader", settle, lambda: bool(group_of(world).joins))
        wait = partial(world.clock.advance, SESSION_MS)
        await measured("end of the other sessions", wait, again.done)
        assert [*group_of(world).members] == [leader]

    asyncio.run(scenario())
    assert {label: lines for label, lines in turns.items() if lines > LINES_PER_TURN_MAX} == {}


def group_of(world: World) -> Group:
    state = world.state()
    assert isinstance(state, Empty | PreparingRebalance | CompletingRebalance | Stable)
    return state.group
