"""The turns of one client's requests for changes of the metadata."""

import asyncio

from broker.topics.change_pauses import ChangePauses


def stays() -> bool:
    return False


async def test_requests_of_a_client_run_one_after_the_other_whoever_else_begins() -> None:
    """A new client looks for idle ones just when the next request of another is woken."""
    pauses, steps = ChangePauses(), list[str]()

    async def request(name: str) -> None:
        async with pauses.turn("eve", stays):
            steps.append(f"{name} begins")
            await asyncio.sleep(0)
            steps.append(f"{name} ends")

    async with asyncio.TaskGroup() as tasks:
        async with pauses.turn("eve", stays):
            tasks.create_task(request("second"))
            await asyncio.sleep(0)
        async with pauses.turn("ann", stays):
            tasks.create_task(request("third"))
    assert steps == ["second begins", "second ends", "third begins", "third ends"]
