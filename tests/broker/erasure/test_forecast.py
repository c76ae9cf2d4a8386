"""When erasures are expected to be complete, and which are at risk."""

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest

from broker.erasure.forecast import Obstacle, PartitionWork, Risk, forecast, work_left
from broker.event_loop import loop_turns
from broker.event_loop.loop_turns import Turns
from broker.http.api.compaction.erasures import ErasuresApi
from tests.support.broker import http_client
from tests.support.broker.erasure import (
    ADA,
    ORDERS,
    broker_of,
    call_api,
    completed,
    erase,
    one,
    paused_erasure,
    reaches,
    risk_of,
    waits_for,
    write,
)
from tests.support.storage.memory_env import MemoryEnv

NOW_MS = 1_000_000


def part(seconds: float, deadline: float, **changes: Any) -> PartitionWork:
    """Work of some seconds, with a deadline some seconds from now."""
    return PartitionWork(
        deadline_ms=int(NOW_MS + 1000 * deadline),
        read_bytes=int(seconds * 100),
        write_bytes=0,
        read_rate=100.0,
        write_rate=100.0,
        **changes,
    )


def expected(*parts: PartitionWork) -> list[tuple[float | None, Risk | None]]:
    """The seconds from now until each is done, and its risk."""
    return [
        (None if each.expected_ms is None else (each.expected_ms - NOW_MS) / 1000, each.risk)
        for each in forecast(parts, NOW_MS)
    ]


def test_parts_take_turns_and_the_later_ones_wait_for_the_earlier_ones() -> None:
    assert expected(part(10, 60), part(20, 60)) == [(10.0, None), (30.0, None)]


def test_a_part_that_the_rate_does_not_allow_in_time_is_at_risk_before_its_deadline() -> None:
    assert expected(part(30, 60), part(40, 60)) == [(30.0, None), (70.0, Risk.RATE)]


def test_an_obstacle_with_an_end_delays_a_part_and_no_other_one() -> None:
    waiting = part(10, 60, obstacle=Obstacle(NOW_MS + 20_000))
    assert expected(waiting, part(10, 60)) == [(30.0, None), (20.0, None)]


def test_an_obstacle_that_ends_too_late_is_the_risk() -> None:
    waiting = part(10, 60, obstacle=Obstacle(NOW_MS + 55_000))
    assert expected(waiting) == [(65.0, Risk.OBSTACLE)]


def test_an_obstacle_without_a_known_end_is_a_risk_at_once() -> None:
    assert expected(part(10, 60, obstacle=Obstacle()), part(5, 60)) == [
        (None, Risk.OBSTACLE),
        (5.0, None),
    ]


def test_after_the_deadline_a_part_is_overdue() -> None:
    assert expected(part(1, -1)) == [(1.0, Risk.OVERDUE)]
    assert expected(part(1, -1, obstacle=Obstacle())) == [(None, Risk.OVERDUE)]


def test_the_work_left_shrinks_from_the_worst_case_to_the_last_search() -> None:
    before = work_left(1000, 0, is_searched=False, share_searched=0.5)
    found = work_left(1000, 100, is_searched=True, share_searched=0.0)
    last = work_left(1000, 0, is_searched=True, share_searched=0.25)
    assert (before, found, last) == ((3500, 1000), (2100, 100), (750, 0))


async def test_a_pause_is_named_and_puts_the_deadline_at_risk() -> None:
    async with broker_of(MemoryEnv(seed=5)) as broker:
        erasure = await paused_erasure(broker)
        answer = await reaches(broker, erasure["id"], lambda a: risk_of(a) == "obstacle")
        assert answer["partitions"][0]["records_left"] == 1
        assert broker.erasures.at_risk == {Risk.OVERDUE: 0, Risk.OBSTACLE: 1, Risk.RATE: 0}
        _, overview = await call_api(broker, "GET", "/api/v1/overview")
        texts = [problem["text"] for problem in overview["attention"]]
        assert "1 partition with an erasure that will miss its deadline" in texts
        page = await http_client.scraped(broker)
        assert 'varve_erasure_partitions_at_risk{risk="obstacle"} 1.0' in page
        assert "varve_erasures 1.0" in page
        broker.pool.operator.resume(ORDERS)
        await completed(broker, erasure["id"])
        assert "varve_erasures_completed_total 1.0" in await http_client.scraped(broker)


async def test_min_compaction_lag_delays_an_erasure_and_is_a_risk_only_if_it_ends_too_late() -> (
    None
):
    day_ms = 86_400_000
    keys = {"min.compaction.lag.ms": str(day_ms), "max.compaction.lag.ms": str(2 * day_ms)}
    async with broker_of(MemoryEnv(seed=5), keys) as broker:
        write(broker, f"{ADA}=secret-1")
        late = await erase(broker, within_seconds=3600)
        in_time = await erase(broker, within_seconds=7 * 24 * 3600)
        answer = await reaches(broker, late["id"], lambda a: risk_of(a) is not None)
        assert (risk_of(answer), "min.compaction.lag.ms" in waits_for(answer)) == ("obstacle", True)
        assert answer["partitions"][0]["expected_ms"] >= late["requested_ms"] + day_ms
        await reaches(broker, in_time["id"], lambda a: "min.compaction.lag" in waits_for(a))
        assert risk_of(await one(broker, in_time["id"])) is None


async def test_the_partitions_of_an_erasure_are_forecast_and_shown_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten thousand partitions held the loop for 45 ms in an answer, and for 70 ms in a forecast."""
    async with broker_of(MemoryEnv(seed=5), partitions=20) as broker:
        await broker.erasures.stop()  # nothing is searched
        await erase(broker)
        (erasure,) = broker.erasures.all()
        api = ErasuresApi(broker.topics, broker.erasures, lambda *_: True)
        clock = itertools.count()
        monkeypatch.setattr(loop_turns, "perf_counter", lambda: next(clock))  # a turn for each row
        assert await rounds_of(broker.erasures._forecast()) >= 20
        parts = [(erasure, part) for part in erasure.parts]
        assert await rounds_of(broker.erasures._in_turns(parts, Turns())) >= 20
        assert await rounds_of(api._encode(erasure, Turns())) >= 20
        assert broker.erasures.forecast_of(erasure, erasure.parts[19]) is not None


async def rounds_of(work: Coroutine[Any, Any, object]) -> int:
    """Run work, and return how many rounds of the loop it takes."""
    task, rounds = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0)
        rounds += 1
    return rounds
