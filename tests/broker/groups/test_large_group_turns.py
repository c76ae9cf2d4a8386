"""The requests of large groups take turns, by owner and then by group."""

import asyncio
from collections.abc import Mapping

import pytest

from broker.groups.large_group_turns import LARGE_GROUP, LargeGroupTurns


async def order_of_turns(owners: Mapping[str, str | None], requests: int) -> list[str]:
    """Let each group wait for some turns, all at once; return the groups in the order of turns."""
    turns, order = LargeGroupTurns(owners.get), list[str]()

    async def take_turn(group_id: str) -> None:
        await turns.wait(group_id, LARGE_GROUP + 1)
        order.append(group_id)

    await asyncio.gather(*(take_turn(group) for group in owners for _ in range(requests)))
    return order


async def test_an_owner_of_many_large_groups_delays_those_of_others_by_one_request() -> None:
    owners = dict.fromkeys((f"g{number}" for number in range(20)), "alice") | {"h": "bob"}
    order = await order_of_turns(owners, requests=3)
    assert order.index("h") <= 2


@pytest.mark.parametrize("owner", ["alice", None])
async def test_large_groups_take_turns(owner: str | None) -> None:
    owners = dict.fromkeys((f"g{number}" for number in range(20)), owner)
    order = await order_of_turns(owners, requests=3)
    assert set(order[:20]) == set(owners)
