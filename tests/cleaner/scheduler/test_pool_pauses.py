"""An operator's pause lasts until it is resumed or its partition is deleted."""

import asyncio
from collections.abc import Iterator

import pytest

from cleaner.host import LogFacts
from cleaner.scheduler.history import HISTORY_NAME
from cleaner.states import PauseRequested, Resumed
from storage.model import TopicPartition
from tests.support.cleaner.scheduler.pool_harness import T0, T1, PoolHarness, run_scenario

ID = b"1" * 16


@pytest.mark.parametrize("neighbour", [True, False], ids=["beside another", "alone"])
def test_a_pause_survives_a_start_with_an_unreadable_folder(neighbour: bool) -> None:
    async def first(b: PoolHarness) -> None:
        b.dirty(topic_id=ID)
        if neighbour:
            b.dirty(T1, topic_id=ID)
        assert b.pool.operator.pause(T0)
        assert await b.pool.operator.is_saved(T0)

    async def second(b: PoolHarness) -> None:
        assert b.pool.operator.is_paused(T0)
        b.dirty(TopicPartition("new", 0), topic_id=ID)  # so that the file is written anew
        await asyncio.sleep(60)
        assert b.pool.operator.is_paused(T0)

    async def third(b: PoolHarness) -> None:
        assert b.pool.status().paused == {T0}

    once = run_scenario(first)
    once.host.go_offline(T0)
    again = run_scenario(second, before=once)
    again.host.come_back(T0)
    run_scenario(third, before=again)


def test_every_pause_is_recorded_with_its_reason() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(topic_id=ID)
        async with b.pool.control.paused(T0, "cleanup.policy is being changed"):
            pass
        b.pool.operator.pause(T0)
        b.pool.operator.resume(T0)
        transitions = b.pool.explain(T0).transitions
        assert [t.reason for t in transitions if isinstance(t.event, PauseRequested | Resumed)] == [
            "cleanup.policy is being changed",
            "",
            "an operator paused it",
            "an operator resumed it",
        ]

    run_scenario(scenario)


def test_a_pause_ends_with_its_partition() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(topic_id=ID)
        b.dirty(T1, topic_id=ID)
        assert b.pool.operator.pause(T0)
        del b.host.logs[T0]
        await asyncio.sleep(60)
        assert b.pool.status().paused == frozenset()

    run_scenario(scenario)


def test_a_partition_created_during_a_scan_keeps_its_pause() -> None:
    async def scenario(b: PoolHarness) -> None:
        for index in range(200):
            b.dirty(TopicPartition("many", index), topic_id=ID)
        new = TopicPartition("new", 0)
        facts_of_all = b.host.facts
        under_way = asyncio.Event()

        def facts() -> Iterator[LogFacts]:
            for number, item in enumerate(facts_of_all()):
                if number == 100:
                    under_way.set()
                yield item

        b.host.facts = facts  # type: ignore[method-assign]
        b.pool.wake()
        await under_way.wait()
        b.dirty(new, topic_id=b"2" * 16)
        assert b.pool.operator.pause(new)
        await asyncio.sleep(5)
        assert b.pool.status().paused == {new}

    run_scenario(scenario)


@pytest.mark.parametrize(
    "line",
    [
        b'{"topic":"t","partition":0,"job_id":"r","started_ms":1,"finished_ms":2,'
        b'"outcome":"finished","damaged":[["p",1e999,"w"]]}\n',
        b'{"topic":"t","partition":0,"job_id":"r","started_ms":1,"finished_ms":1e999,'
        b'"outcome":"finished"}\n',
        b"[" * 100_000 + b"\n",
    ],
    ids=["an infinite position", "an infinite time", "a deep one"],
)
def test_a_malformed_line_of_the_history_does_not_end_a_pause(line: bytes) -> None:
    async def first(b: PoolHarness) -> None:
        b.dirty(topic_id=ID)
        assert b.pool.operator.pause(T0)
        assert await b.pool.operator.is_saved(T0)

    async def second(b: PoolHarness) -> None:
        assert b.pool.status().paused == {T0}

    once = run_scenario(first)
    file = once.env.open(f"/data/{HISTORY_NAME}", create=True, write=True)
    file.pwrite(line, 0)
    file.close()
    run_scenario(second, before=once)
