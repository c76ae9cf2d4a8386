"""An operator's hold stands until it is released or its partition is deleted."""

import asyncio
from collections.abc import Iterator

import pytest

from cleaner.host import LogFacts
from cleaner.scheduler.history import HISTORY_NAME
from storage.model import TopicPartition
from tests.support.cleaner.pool_bench import T0, T1, Bench, on_the_bench

ID = b"1" * 16


@pytest.mark.parametrize("neighbour", [True, False], ids=["beside another", "alone"])
def test_a_hold_outlives_a_start_at_which_the_folder_cannot_be_opened(neighbour: bool) -> None:
    async def first(b: Bench) -> None:
        b.dirty(topic_id=ID)
        if neighbour:
            b.dirty(T1, topic_id=ID)
        assert b.pool.operator.pause(T0)
        assert await b.pool.operator.is_saved(T0)

    async def second(b: Bench) -> None:
        assert b.pool.operator.is_paused(T0)
        b.dirty(TopicPartition("new", 0), topic_id=ID)  # so that the file is written anew
        await asyncio.sleep(60)
        assert b.pool.operator.is_paused(T0)

    async def third(b: Bench) -> None:
        assert b.pool.status().paused == {T0}

    once = on_the_bench(first)
    once.host.go_offline(T0)
    again = on_the_bench(second, before=once)
    again.host.come_back(T0)
    on_the_bench(third, before=again)


def test_a_hold_goes_with_its_partition() -> None:
    async def scenario(b: Bench) -> None:
        b.dirty(topic_id=ID)
        b.dirty(T1, topic_id=ID)
        assert b.pool.operator.pause(T0)
        del b.host.logs[T0]
        await asyncio.sleep(60)
        assert b.pool.status().paused == frozenset()

    on_the_bench(scenario)


def test_a_partition_that_was_made_during_a_look_keeps_its_hold() -> None:
    async def scenario(b: Bench) -> None:
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

    on_the_bench(scenario)


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
def test_an_odd_line_of_the_history_costs_no_hold(line: bytes) -> None:
    async def first(b: Bench) -> None:
        b.dirty(topic_id=ID)
        assert b.pool.operator.pause(T0)
        assert await b.pool.operator.is_saved(T0)

    async def second(b: Bench) -> None:
        assert b.pool.status().paused == {T0}

    once = on_the_bench(first)
    file = once.env.open(f"/data/{HISTORY_NAME}", create=True, write=True)
    file.pwrite(line, 0)
    file.close()
    on_the_bench(second, before=once)
