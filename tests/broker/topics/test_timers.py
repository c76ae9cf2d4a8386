"""What the timers do beside clients: nothing that takes long is done on the loop."""

import asyncio
import gc
import threading
from itertools import count
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.counters import BrokerStats
from broker.event_loop import loop_turns
from broker.event_loop.directory_threads import DirectoryThreads
from broker.topics import log_maintenance
from broker.topics.clock_watch import ClockWatch
from broker.topics.log_maintenance import LogMaintenance, Periods
from storage.errors import LogDirectoryError
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.storage.memory_env import MemoryEnv


class Retention:
    """Files that are due, and who unlinked them."""

    def __init__(self, due: list[str], error: LogDirectoryError | None = None) -> None:
        self.due = due
        self.unlinked: list[tuple[str, threading.Thread]] = []
        self._error = error

    def take_deleted(self, now_ms: int) -> list[str]:
        assert threading.current_thread() is threading.main_thread()
        due, self.due = self.due, []
        return due

    def unlink_deleted(self, paths: list[str]) -> None:
        if self._error is not None:
            raise self._error
        self.unlinked += [(path, threading.current_thread()) for path in paths]


def make(
    *retentions: Retention, large: int = 0, stats: BrokerStats | None = None
) -> tuple[LogMaintenance, list[LogDirectoryError]]:
    failed: list[LogDirectoryError] = []
    disk = SimpleNamespace(path="/disk1")
    partitions: list[Any] = [
        SimpleNamespace(log=SimpleNamespace(retention=each, log_directory=disk), partition="t-0")
        for each in retentions
    ]
    env = MemoryEnv(seed=1)
    made = LogMaintenance(
        env,
        cast("Any", SimpleNamespace(table=SimpleNamespace(directories=()))),
        lambda: partitions,
        cast("Any", None),
        DirectoryThreads(env.monotonic),
        fail_directory=failed.append,
        periods=Periods(retention=1, checkpoint=1),
        producer_expiration_ms=1,
        clock=ClockWatch(0, 0),
        note_time=cast("Any", None),
        damage_gone=cast("Any", None),
        broker_stats=stats or BrokerStats(large_requests=large),
    )
    return made, failed


async def test_files_are_unlinked_in_a_thread() -> None:
    """To unlink a segment that is in the page cache takes milliseconds."""
    log = Retention(["a.deleted", "b.deleted"])
    timers, _ = make(log)
    await timers.purge()
    assert [path for path, _ in log.unlinked] == ["a.deleted", "b.deleted"]
    assert all(thread is not threading.main_thread() for _, thread in log.unlinked)


async def test_a_directory_where_unlinking_fails_goes_offline_and_the_others_go_on() -> None:
    error = LogDirectoryError("/disk1", "broken")
    bad, good = Retention(["a.deleted"], error), Retention(["b.deleted"])
    timers, failed = make(bad, good)
    await timers.purge()
    assert failed == [error]
    assert [path for path, _ in good.unlinked] == ["b.deleted"]


async def test_full_collections_are_left_to_the_timer_while_the_broker_runs() -> None:
    before = gc.get_threshold()
    timers, _ = make()
    timers.start()
    try:
        assert gc.get_threshold() == log_maintenance.COLLECTION_THRESHOLDS
    finally:
        await timers.stop()
    assert gc.get_threshold() == before


async def test_work_that_deletes_by_age_waits_until_the_clock_is_trusted() -> None:
    timers, _ = make()
    done: list[str] = []

    async def work() -> None:
        done.append("expired")

    timers.clock.distrusted_until_ms = inf
    timers.repeat("expire", 0, work, is_by_age=True)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not done
    timers.clock.distrusted_until_ms = 0
    for _ in range(10):
        await asyncio.sleep(0)
    await timers.stop()
    assert done


async def test_the_longest_hold_of_each_timer_is_noted() -> None:
    stats, ticks = BrokerStats(), count()
    timers, _ = make(stats=stats)

    async def hold() -> None:
        await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as patched:
        # Each turn reads the clock twice: before and after.
        patched.setattr(loop_turns, "perf_counter_ns", lambda: next(ticks) ** 2)
        await stats.measured("retention", hold())
        await stats.measured("roll", timers.collect_garbage())
    assert stats.background_holds_ns == {"retention": 9 - 4, "roll": 25 - 16}


async def test_pauses_for_garbage_are_measured_while_the_broker_runs() -> None:
    stats = BrokerStats()
    timers, _ = make(stats=stats)
    callbacks = list(gc.callbacks)
    timers.start()
    gc.collect()
    await timers.stop()
    assert gc.callbacks == callbacks
    pauses = stats.gc_pauses
    assert 0 < pauses.longest_ns[2] <= pauses.total_ns[2]


async def test_the_holds_of_views_and_leases_and_of_changes_of_topics_are_measured() -> None:
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        await broker.metadata_service.create("t", 1, {})
        holds = broker.stats.background_holds_ns
        assert {"views", "leases", "metadata"} <= holds.keys()
        assert holds["metadata"] > 0
