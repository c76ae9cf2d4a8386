"""The timers' rounds, and their end."""

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from structlog.testing import capture_logs

from broker.counters import BrokerStats
from broker.event_loop.directory_threads import DirectoryThreads
from broker.logging import RateLimitedLogger
from broker.topics import log_maintenance as log_maintenance_module
from broker.topics.checkpoint_writer import CheckpointWriter
from broker.topics.clock_watch import ClockWatch
from broker.topics.log_maintenance import LogMaintenance, Periods
from storage.errors import NoRoomError
from storage.format.batch import Record, build_batch, read_header
from storage.format.producer_state import ProducerStates
from storage.log.log_producers import LogProducers
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from tests.support.clocks.virtual_loop import run_virtually
from tests.support.storage.logs import HOME, SMALL
from tests.support.storage.memory_env import MemoryEnv


def maintenance(
    env: MemoryEnv,
    manager: LogManager,
    partitions: Callable[[], Iterable[Any]],
    note_time: Callable[[], Awaitable[None]],
) -> LogMaintenance:
    threads = DirectoryThreads(env.monotonic)
    return LogMaintenance(
        env,
        manager,
        partitions,
        CheckpointWriter(manager.table, threads, lambda error: None),
        threads,
        fail_directory=lambda error: None,
        periods=Periods(retention=300, checkpoint=2),
        producer_expiration_ms=86_400_000,
        clock=ClockWatch(env.wall_ms(), env.monotonic() * 1000),
        note_time=note_time,
        damage_gone=lambda where: None,
        broker_stats=BrokerStats(),
    )


def test_an_error_of_every_partition_is_counted_for_each_and_logged_for_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited_logger = RateLimitedLogger(log_maintenance_module.logger, clock=lambda: 0.0)
    monkeypatch.setattr(log_maintenance_module, "limited_logger", limited_logger)
    env = MemoryEnv(1)
    partitions = [Mock(partition=TopicPartition("t", index)) for index in range(1_000)]
    for partition in partitions:
        error = NoRoomError(OSError(errno.ENOSPC, "full"), str(partition.partition))
        partition.log.producers.expire.side_effect = error

    async def main() -> int:
        log_maintenance = maintenance(env, LogManager(env, [HOME]), lambda: partitions, AsyncMock())
        await log_maintenance.expire_producers()
        return log_maintenance.stats.errors

    with capture_logs() as lines:
        assert run_virtually(main()) == 1_000
    assert 0 < len([line for line in lines if line["event"] == "task failed"]) <= 101


def test_a_timer_does_not_list_all_partitions_before_it_begins() -> None:
    """A list of 9,000 partitions takes 4 ms, and belongs to no turn."""
    env = MemoryEnv(1)
    listed: list[int] = []
    worked: list[int] = []  # how many were listed at each partition

    def partitions() -> Iterator[Mock]:
        for index in range(10):
            listed.append(index)
            partition = Mock(partition=TopicPartition("t", index))
            partition.log.producers.expire = lambda *_: worked.append(len(listed))
            yield partition

    run_virtually(maintained(env, partitions))
    assert worked == list(range(1, 11))


async def maintained(env: MemoryEnv, partitions: Callable[[], Iterable[Mock]]) -> None:
    log_maintenance = maintenance(env, LogManager(env, [HOME]), partitions, AsyncMock())
    await log_maintenance.expire_producers()


def test_the_logs_with_most_producers_forget_idle_ones_if_all_have_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_maintenance_module, "ALL_PRODUCERS_MAX", 100)
    env = MemoryEnv(1)
    logs = [log_with_producers(count) for count in (3, 70, 80)]
    partitions = [Mock(log=log) for log in logs]

    async def main() -> None:
        manager = LogManager(env, [HOME])
        await maintenance(env, manager, lambda: partitions, AsyncMock()).limit_producers()

    run_virtually(main())
    assert [log.producers.states.idle_count for log in logs] == [3, 48, 48]
    assert logs[2].producers.states.producers[0].producer_id == 80 - 48


def log_with_producers(count: int) -> Mock:
    states = ProducerStates()
    for producer_id in range(count):
        batch = build_batch([Record(0, 0, None, b"")], producer_id=producer_id, producer_epoch=0)
        states.update_from_log(read_header(batch))
    return Mock(producers=LogProducers(states))


def test_a_stop_waits_for_the_round_under_way_and_does_not_cancel_it() -> None:
    """Its thread would write the metadata beside whoever closes the logs, under the same name."""
    env = MemoryEnv(1)
    manager = LogManager(env, [HOME])
    manager.open(lambda topic: SMALL)
    reported: list[str] = []

    async def note_time() -> None:
        reported.append("begun")
        await asyncio.sleep(5)
        reported.append("ended")

    async def main() -> None:
        log_maintenance = maintenance(env, manager, list, note_time)
        log_maintenance.start()
        await asyncio.sleep(3)
        await log_maintenance.stop()
        reported.append("stopped")

    run_virtually(main())
    assert reported == ["begun", "ended", "stopped"]
