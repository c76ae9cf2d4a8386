"""Places that clients share."""

import asyncio

from broker.event_loop.fair_slots import FairSlots


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_each_client_leaves_half_of_the_free_slots_to_others() -> None:
    """Two clients together held all slots."""
    slots, active = FairSlots(8), list[str]()
    may_end = asyncio.Event()

    async def work(client: str) -> None:
        async with slots.slot(client):
            active.append(client)
            await may_end.wait()

    tasks = [asyncio.create_task(work(client)) for client in "aaaaaabbbbbb"]
    await settle()
    assert sorted(active) == list("aaaabb")
    tasks += [asyncio.create_task(work(client)) for client in "ccdde"]
    await settle()
    assert sorted(active) == list("aaaabbcd")
    may_end.set()
    await asyncio.gather(*tasks)
    assert len(active) == 17
    assert not slots._used
    assert not slots._waiting


async def test_a_client_without_slots_waits_for_one_slot_of_each_other_client() -> None:
    slots, order = FairSlots(2), list[str]()

    async def work(client: str) -> None:
        async with slots.slot(client):
            order.append(client)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(work(client)) for client in "a" * 50 + "b" * 50]
    await settle()
    tasks.append(asyncio.create_task(work("c")))
    await asyncio.sleep(0)
    begun = len(order)
    assert begun < 90
    await asyncio.gather(*tasks)
    assert "c" in order[begun : begun + 3]


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
    assert not slots._used
    assert not slots._waiting
    async with asyncio.timeout(20), slots.slot("c"), slots.slot("d"):
        pass
