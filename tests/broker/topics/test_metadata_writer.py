"""The pace at which one client may change the metadata, in virtual time."""

import asyncio
from collections.abc import Hashable
from typing import Any

import pytest

from broker.event_loop.client_presence import WAIT_SECONDS, ClientLeftError
from broker.topics.change_pauses import (
    BURST_SECONDS,
    CHANGE_SECONDS_MAX,
    CHANGE_SECONDS_MIN,
    WRITE_SHARE,
)
from tests.support.broker.topics_on_disk import TopicsOnDisk
from tests.support.clocks.virtual_loop import VirtualLoop, run_virtually
from tests.support.storage.memory_env import MemoryEnv

BURST = round(BURST_SECONDS / CHANGE_SECONDS_MIN)  # changes
SHORTEST_PAUSE = CHANGE_SECONDS_MIN / WRITE_SHARE


class Changes:
    """A writer whose writes take the same time each, and when they ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, write_seconds: float = 0.0) -> None:
        self.disk = TopicsOnDisk(MemoryEnv(seed=1))
        self.ends: dict[Hashable, list[float]] = {}
        self.left = set[Hashable]()  # clients that have closed their connections
        save = self.disk.manager.save_metadata

        def slow_save(*args: Any, **kwargs: Any) -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.now += write_seconds
            save(*args, **kwargs)

        monkeypatch.setattr(self.disk.manager, "save_metadata", slow_save)

    async def open(self) -> "Changes":
        await self.disk.open()
        return self

    async def make(self, client: Hashable, count: int = 1) -> float:
        """Make changes at once; return how many seconds they took."""
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._make(client) for _ in range(count)))
        return asyncio.get_running_loop().time() - began

    async def _make(self, client: Hashable) -> None:
        writer = self.disk.writer
        if client is None:
            await writer.run(None, lambda: writer.save(writer.metadata))
        else:
            async with writer.pauses.turn(client, lambda: client in self.left):
                await writer.run(client, lambda: writer.save(writer.metadata))
        self.ends.setdefault(client, []).append(asyncio.get_running_loop().time())


def test_a_client_with_few_changes_does_not_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        changes = await Changes(monkeypatch).open()
        assert await changes.make("ann", BURST) == 0

    run_virtually(main())


def test_the_changes_of_one_client_write_for_a_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_seconds = 5 * CHANGE_SECONDS_MIN

    async def main() -> None:
        changes = await Changes(monkeypatch, write_seconds).open()
        await changes.make("eve", BURST // 5)
        seconds = await changes.make("eve", 500)
        assert 500 * write_seconds / seconds == pytest.approx(WRITE_SHARE, rel=0.05)

    run_virtually(main())


def test_changes_that_cost_nothing_have_a_pace_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them writes lines to the log."""

    async def main() -> None:
        changes = await Changes(monkeypatch).open()
        await changes.make("eve", BURST)
        assert await changes.make("eve", 500) == pytest.approx(500 * SHORTEST_PAUSE, rel=0.05)

    run_virtually(main())


def test_a_change_does_not_wait_for_the_pauses_of_other_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_seconds = 5 * CHANGE_SECONDS_MIN

    async def main() -> None:
        changes = await Changes(monkeypatch, write_seconds).open()
        await changes.make("eve", BURST)
        flood = asyncio.ensure_future(changes.make("eve", 100))
        await asyncio.sleep(1)
        for client in ("ann", None):
            seconds = await changes.make(client)
            assert seconds < 3 * write_seconds, client  # its own write, and one in progress
            assert not flood.done()
        await flood

    run_virtually(main())


def test_a_client_that_made_a_pause_has_its_burst_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        changes = await Changes(monkeypatch).open()
        await changes.make("ann", 2 * BURST)
        await asyncio.sleep(BURST_SECONDS / WRITE_SHARE)
        assert await changes.make("ann", BURST) == 0

    run_virtually(main())


def test_a_disk_that_hung_during_a_change_does_not_cost_its_client_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        changes = await Changes(monkeypatch, write_seconds=600.0).open()
        for _ in range(2 * round(BURST_SECONDS / CHANGE_SECONDS_MAX)):
            pause = await changes.make("ann") - 600.0
            assert pause <= CHANGE_SECONDS_MAX / WRITE_SHARE

    run_virtually(main())


def test_nobody_pauses_while_the_broker_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        changes = await Changes(monkeypatch).open()
        await changes.make("eve", BURST)
        flood = asyncio.ensure_future(changes.make("eve", 1000))
        await asyncio.sleep(1)
        changes.disk.writer.begin_stopping()
        began = asyncio.get_running_loop().time()
        await flood
        assert asyncio.get_running_loop().time() == began

    run_virtually(main())


def test_a_change_whose_client_leaves_while_it_waits_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its client would send it again, and so pause for a change that nobody expects."""

    async def main() -> None:
        changes = await Changes(monkeypatch).open()
        for _ in range(3):
            await changes.make("eve", BURST // 2)
        flood = [asyncio.ensure_future(changes.make("eve")) for _ in range(100)]
        await asyncio.sleep(SHORTEST_PAUSE / 2)
        made, began = len(changes.ends["eve"]), asyncio.get_running_loop().time()
        changes.left.add("eve")
        results = await asyncio.gather(*flood, return_exceptions=True)
        assert {type(result) for result in results} == {ClientLeftError}
        assert len(changes.ends["eve"]) == made
        assert asyncio.get_running_loop().time() - began <= WAIT_SECONDS

    run_virtually(main())
