"""Places that clients share."""

import asyncio

from broker.fair_places import FairPlaces


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_client_occupies_half_of_the_places() -> None:
    places, active = FairPlaces(6), list[str]()
    may_end = asyncio.Event()

    async def work(client: str) -> None:
        async with places.place(client):
            active.append(client)
            await may_end.wait()

    tasks = [asyncio.create_task(work(client)) for client in "aaaaaaaabbbc"]
    await settle()
    assert sorted(active) == list("aaabbb")
    may_end.set()
    await asyncio.gather(*tasks)
    assert len(active) == 12
    assert not places._clients


async def test_work_that_is_cancelled_while_it_waits_frees_what_it_had() -> None:
    places = FairPlaces(2)
    await places.acquire("a")
    await places.acquire("b")
    waiting = [asyncio.create_task(places.acquire(client)) for client in "abc"]
    await settle()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    places.release("a")
    places.release("b")
    assert not places._clients
    async with asyncio.timeout(20), places.place("c"), places.place("d"):
        pass
