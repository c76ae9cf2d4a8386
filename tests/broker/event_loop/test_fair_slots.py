"""Places that clients share."""

import asyncio

from broker.event_loop.fair_slots import FairSlots


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_client_occupies_half_of_the_slots() -> None:
    slots, active = FairSlots(6), list[str]()
    may_end = asyncio.Event()

    async def work(client: str) -> None:
        async with slots.slot(client):
            active.append(client)
            await may_end.wait()

    tasks = [asyncio.create_task(work(client)) for client in "aaaaaaaabbbc"]
    await settle()
    assert sorted(active) == list("aaabbb")
    may_end.set()
    await asyncio.gather(*tasks)
    assert len(active) == 12
    assert not slots._clients


async def test_work_that_is_cancelled_while_it_waits_frees_what_it_had() -> None:
    slots = FairSlots(2)
    await slots.acquire("a")
    await slots.acquire("b")
    waiting = [asyncio.create_task(slots.acquire(client)) for client in "abc"]
    await settle()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    slots.release("a")
    slots.release("b")
    assert not slots._clients
    async with asyncio.timeout(20), slots.slot("c"), slots.slot("d"):
        pass
