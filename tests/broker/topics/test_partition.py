"""A served partition: acknowledgements, group commit, who is woken and when."""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from broker.counters import TopicStats
from broker.topics.data_wait import DataWait
from broker.topics.end_transaction import append_marker
from broker.topics.partition import Partition
from broker.topics.producer_ids import Producer
from storage.errors import LogDirectoryError, OfflinePartitionError, StorageError
from storage.format.batch import TRANSACTIONAL, ControlType, Record, build_batch, read_header
from storage.format.filenames import INDEX, TIME_INDEX, TXN_INDEX, file_name
from storage.log.log import Log
from tests.support.draws import cases
from tests.support.storage.logs import NOW_MS, SMALL, batch_of, open_log, read_records, value_at
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

FLUSHED = replace(SMALL, varve_flush_on_ack=True, segment_bytes=600)


class Flusher:
    """fsyncs a log over several turns of the loop, as a thread would; counts how often."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns
        self.flushes = 0

    async def __call__(self, log: Log) -> None:
        task = log.flusher.begin()
        for _ in range(self.turns):
            await asyncio.sleep(0)
        try:
            task.run()
        except SimulatedCrash as crash:
            raise StorageError("the machine is gone") from crash
        self.flushes += 1
        log.flusher.done(task)


def partition_of(log: Log, flusher: Flusher) -> Partition:
    def fail(error: LogDirectoryError) -> None:
        failures.append(error)

    failures: list[LogDirectoryError] = []
    return Partition(log, TopicStats(), flusher, fail)


async def is_over(waiting: Coroutine[Any, Any, None]) -> bool:
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    is_done = task.done()
    task.cancel()
    return is_done


async def produce(partition: Partition, value: bytes) -> int:
    """What the produce handler does with flush.on.ack; returns the acknowledged offset."""
    batch = batch_of(value)
    info = partition.append(memoryview(batch), read_header(batch), NOW_MS)
    if not partition.is_acked(info):
        await partition.wait_flushed(info.last_offset + 1)
    return info.first_offset


@pytest.mark.parametrize("seed", range(cases(few=10, many=40)))
async def test_what_was_acknowledged_with_flush_on_ack_survives_a_loss_of_power(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    env = MemoryEnv(seed)
    log = open_log(env, FLUSHED)
    partition = partition_of(log, Flusher(turns=rng.randrange(1, 5)))
    acknowledged: list[int] = []

    async def client() -> None:
        for _ in range(20):
            offset = log.log_end_offset
            acknowledged.append(await produce(partition, value_at(offset)))
            assert acknowledged[-1] < log.high_watermark
            await asyncio.sleep(0)

    env.crash_at = env.operations + rng.randrange(1, 200)
    clients = [asyncio.create_task(client()) for _ in range(rng.randrange(1, 6))]
    outcomes = await asyncio.gather(*clients, return_exceptions=True)
    assert all(
        exception is None or isinstance(exception, SimulatedCrash | StorageError)
        for exception in outcomes
    )
    again = open_log(env.crash(), FLUSHED)
    again.flush()  # what was found in the log is made durable before it is shown
    retained = {record.offset: record.value for record in read_records(again)}
    assert set(acknowledged) <= set(retained), sorted(set(acknowledged) - set(retained))
    assert all(value == value_at(offset) for offset, value in retained.items())


async def test_appends_made_during_an_fsync_share_the_next_one() -> None:
    flusher = Flusher()
    log = open_log(MemoryEnv(1), FLUSHED)
    partition = partition_of(log, flusher)
    await asyncio.gather(*(produce(partition, b"v") for _ in range(50)))
    assert log.high_watermark == 50
    assert flusher.flushes <= 2


async def test_nothing_is_visible_before_its_fsync_even_if_nobody_waits() -> None:
    flusher = Flusher()
    log = open_log(MemoryEnv(1), FLUSHED)
    partition = partition_of(log, flusher)
    batch = batch_of(b"v")
    info = partition.append(memoryview(batch), read_header(batch), NOW_MS)
    assert not partition.is_acked(info)
    assert log.high_watermark == 0
    await partition.wait_idle()
    assert log.high_watermark == 1


async def test_readers_are_woken_when_a_record_becomes_visible_and_when_the_partition_goes() -> (
    None
):
    log = open_log(MemoryEnv(1), SMALL)
    partition = partition_of(log, Flusher())
    wait = DataWait()
    partition.add_waiter(wait)
    await produce(partition, b"v")
    assert await is_over(wait.wait(1))
    wait.begin()
    assert not await is_over(wait.wait(1))
    partition.fail_waiters(OfflinePartitionError(log.partition, "gone"))
    assert await is_over(wait.wait(1))
    wait.begin()
    partition.remove_waiter(wait)
    await produce(partition, b"v")
    assert not await is_over(wait.wait(1))


async def test_an_append_wakes_readers_once_enough_bytes_are_appended() -> None:
    log = open_log(MemoryEnv(1), SMALL)
    partition = partition_of(log, Flusher())
    size_bytes = len(batch_of(b"v"))
    wait = DataWait()
    partition.add_waiter(wait)
    waiting = asyncio.ensure_future(wait.wait(3 * size_bytes))
    for expected in (False, False, True):
        await produce(partition, b"v")
        await asyncio.sleep(0)
        assert waiting.done() == expected


async def test_an_end_of_a_transaction_wakes_readers_however_many_bytes_they_miss() -> None:
    log = open_log(MemoryEnv(1), SMALL)
    partition = partition_of(log, Flusher())
    data = build_batch(
        [Record(0, NOW_MS, b"k", b"v")],
        producer_id=7,
        producer_epoch=0,
        base_sequence=0,
        attributes=TRANSACTIONAL,
    )
    wait = DataWait()
    partition.add_waiter(wait)
    partition.append(memoryview(data), read_header(data), NOW_MS, in_transaction=True)
    assert not await is_over(wait.wait(1 << 20))
    await append_marker(partition, Producer(7, 0), ControlType.COMMIT, NOW_MS)
    assert await is_over(wait.wait(1 << 20))


async def test_whoever_waits_for_an_fsync_is_told_when_the_partition_goes() -> None:
    log = open_log(MemoryEnv(1), FLUSHED)
    partition = partition_of(log, Flusher(turns=50))
    waiting = asyncio.create_task(produce(partition, b"v"))
    await asyncio.sleep(0)
    partition.fail_waiters(OfflinePartitionError(log.partition, "its directory failed"))
    with pytest.raises(OfflinePartitionError):
        await waiting
    await partition.wait_idle()


async def test_a_flush_syncs_what_was_recovered_below_the_recovery_point() -> None:
    """The cleaner replaces no segment that waits for a sync: it would wait for the next append."""
    env = MemoryEnv(1)
    log = open_log(env)
    for offset in range(12):
        batch = batch_of(value_at(offset))
        log.append(memoryview(batch), read_header(batch), now_ms=NOW_MS)
    log.roll(NOW_MS)
    log.flush()
    env.unlink(f"{log.directory}/{file_name(0, INDEX)}")
    env.unlink(f"{log.directory}/{file_name(0, TIME_INDEX)}")
    file = env.open(f"{log.directory}/{file_name(0, TXN_INDEX)}", create=True)
    file.pwrite(b"rotten", 0)
    again = open_log(env, recovery_point=log.log_end_offset)
    closed = [facts.base_offset for facts in again.segment_facts()[:-1]]
    assert not again.swap.are_flushed(closed)
    await partition_of(again, Flusher()).flush()
    assert again.swap.are_flushed(closed)
