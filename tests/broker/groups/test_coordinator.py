"""The coordinator under a clock that tests move and a log they acknowledge."""

import asyncio
import random
import re
from pathlib import Path
from typing import Final

import pytest

from broker import groups, transactions
from broker.groups.classic.model import (
    CommitRequested,
    GroupRules,
    LeaveRequested,
)
from broker.groups.offsets.offset_records import committed_offset
from protocol.errors import ErrorCode
from storage.errors import LogDirectoryError
from tests.support.broker.groups.group_machine import REBALANCE_MS, join_request
from tests.support.broker.groups.group_world import KEY, World
from tests.support.clocks.virtual_clock import settle
from tests.support.draws import cases

UNLIMITED_LINE: Final = re.compile(r'\blogger\.(?:info|warning|error)\(\s*"([^"]+)"')


async def test_the_number_of_groups_is_bounded() -> None:
    world = World(max_groups=1)
    await world.stable("g")
    assert (await world.join(group_id="h")).error is ErrorCode.POLICY_VIOLATION
    assert await world.commit(group_id="h") is ErrorCode.POLICY_VIOLATION


async def test_one_principal_leaves_groups_for_others() -> None:
    world = World(max_groups=4)
    offsets = {KEY: committed_offset(1)}
    request = CommitRequested(0, "", None, -1)

    async def commit(group_id: str, creator: str) -> ErrorCode:
        return await world.coordinator.offsets.commit(group_id, request, offsets, creator)

    assert [await commit(f"a{n}", "a") for n in range(3)] == [0, 0, ErrorCode.POLICY_VIOLATION]
    assert (await world.coordinator.members.join("a3", join_request(), "a")).error is (
        ErrorCode.POLICY_VIOLATION
    )
    assert await commit("b", "b") is ErrorCode.NONE
    assert await world.coordinator.deletion.delete_group("a0") is ErrorCode.NONE
    assert await world.coordinator.deletion.delete_group("a1") is ErrorCode.NONE
    assert await commit("a4", "a") is ErrorCode.NONE


def test_lines_that_clients_cause_are_limited() -> None:
    """Only what the broker does by itself, once in a while, is written without a limit."""
    unlimited = set()
    for package in (groups, transactions):
        for path in Path(package.__path__[0]).rglob("*.py"):
            unlimited |= set(UNLIMITED_LINE.findall(path.read_text()))
    assert unlimited == {
        "marker not written",
        "offsets expired",
        "transaction append failed",
        "transactional id not expired",
        "transactional ids expired",
    }


async def test_a_close_answers_everybody_and_waits_for_what_was_begun() -> None:
    world = World()
    await world.stable()
    joining = await world.begin(world.join())
    world.log.held = True
    commit = await world.begin(world.commit(5, group_id="simple"))
    closing = await world.begin(world.coordinator.close())
    assert (await joining).error is ErrorCode.NOT_COORDINATOR
    assert not closing.done()
    world.log.release()
    await closing
    assert await commit is ErrorCode.NONE
    assert world.clock.running == 0


@pytest.mark.parametrize("seed", range(cases(few=6, many=20)))
async def test_in_random_lives_nobody_waits_for_ever(seed: int) -> None:
    """Clients with real join, sync, heartbeat loops; some vanish, some appends fail."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    world = World(rules=GroupRules(initial_rebalance_delay_ms=chance.choice([0, 3_000])))
    clients = [
        asyncio.ensure_future(_client(world, random.Random(chance.random()))) for _ in range(8)
    ]
    for _ in range(60):
        await world.clock.advance(chance.choice([100, 3_000, 9_000]))
        world.log.error = LogDirectoryError("/d", "disk") if chance.random() < 0.1 else None
        if chance.random() < 0.2:
            chance.choice(clients).cancel()
    for client in clients:
        client.cancel()
    await settle()
    world.log.error = None
    await world.clock.advance(10 * REBALANCE_MS)
    for group in list(world.coordinator.groups()):
        assert group.state == "Empty", group
    assert world.clock.running == 0
    assert {type(r) for r in await asyncio.gather(*clients, return_exceptions=True)} == {
        asyncio.CancelledError
    }


async def _client(world: World, chance: random.Random) -> None:
    member_id = ""
    while True:
        answer = await world.join(member_id)
        if answer.error is not ErrorCode.NONE:
            member_id = "" if answer.error is ErrorCode.UNKNOWN_MEMBER_ID else member_id
            await _pause(world, 100)
            continue
        member_id = answer.member_id
        assignments = {m: m.encode() for m, _, _ in answer.members}
        synced = await world.sync(member_id, answer.generation, **assignments)
        if synced.error is not ErrorCode.NONE:
            continue
        assert synced.assignment == member_id.encode()
        while world.heartbeat(member_id, answer.generation) is ErrorCode.NONE:
            await world.commit(1, member_id=member_id, generation=answer.generation)
            if chance.random() < 0.1:
                await world.coordinator.members.leave("g", LeaveRequested(0, ((member_id, None),)))
                member_id = ""
                break
            await _pause(world, chance.choice([1_000, 3_000, 20_000]))


async def _pause(world: World, ms: int) -> None:
    passed = asyncio.get_running_loop().create_future()
    timer = world.clock.call_later(ms / 1000, lambda: passed.done() or passed.set_result(None))
    try:
        await passed
    finally:
        timer.cancel()
