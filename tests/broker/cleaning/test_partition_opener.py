"""Partitions of open logs: when they wake the cleaner, and how they flush."""

import asyncio
from collections.abc import Callable, Hashable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeVar

import pytest

from broker.cleaning.key_recorder import KeyRecorder
from broker.cleaning.partition_opener import PartitionOpener
from broker.counters import BrokerStats
from broker.event_loop.directory_threads import THREADS_MAX, DirectoryThreads
from broker.event_loop.fair_slots import FairSlots
from broker.security.principal import Principal
from broker.topics.partition import Partition
from cleaner.stats import PoolStats
from config.settings import CleanerSettings
from protocol.api import ApiKey
from storage.errors import LogDirectoryError
from storage.format.batch import read_header
from storage.log.log import Log
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.principals import PrincipalClient
from tests.support.protocol.raw_client import PRODUCE_VERSION, produce_request
from tests.support.storage.logs import NOW_MS, SMALL, append, batch_of, open_log
from tests.support.storage.memory_env import MemoryEnv

COMPACTED = replace(SMALL, cleanup_policy=("compact",))
FLUSHED = replace(SMALL, varve_flush_on_ack=True)
T = TypeVar("T")


class Opened:
    """An opener with its statistics, how often it woke the cleaner, and what it reported."""

    def __init__(self, env: MemoryEnv, threads: DirectoryThreads | None = None) -> None:
        self.stats = BrokerStats()
        self.wakes = 0
        self.failures: list[LogDirectoryError] = []
        threads = threads or DirectoryThreads(env.monotonic)
        settings = CleanerSettings(strategy="dirty-ratio")  # records no keys
        recorder = KeyRecorder(
            env,
            threads,
            hash_key=bytes,
            settings=lambda: settings,
            stats=PoolStats(),
            creator=lambda _: None,
        )
        self.opener = PartitionOpener(
            env,
            self.stats,
            recorder,
            threads,
            wake_cleaner=self._wake,
            fail_directory=self.failures.append,
        )

    def _wake(self) -> None:
        self.wakes += 1


class HeldSyncs(DirectoryThreads):
    """Threads whose syncs end when the test says so."""

    def __init__(self, env: MemoryEnv) -> None:
        super().__init__(env.monotonic)
        self.released = asyncio.Event()
        self.running = 0

    async def sync(self, directory: str, call: Callable[[], T]) -> T:
        self.running += 1
        await self.released.wait()
        self.running -= 1
        return call()


def roll(log: Log) -> None:
    append(log, b"value")
    log.roll(NOW_MS)


def test_a_closed_segment_wakes_the_cleaner_only_if_the_topic_is_compacted() -> None:
    env = MemoryEnv(seed=1)
    opened = Opened(env)
    deleted = open_log(env)
    opened.opener.open(deleted)
    roll(deleted)
    assert opened.wakes == 0
    compacted = open_log(env, COMPACTED, folder="/data/orders-1")
    opened.opener.open(compacted)
    roll(compacted)
    assert opened.wakes == 1


async def test_a_flush_makes_the_log_durable_and_is_counted() -> None:
    env = MemoryEnv(seed=2)
    opened = Opened(env)
    log = open_log(env)
    partition = opened.opener.open(log)
    append(log, b"value")
    await partition.flush()
    assert log.recovery_point == log.log_end_offset == 1
    assert opened.stats.flushes.count == 1
    assert opened.failures == []


async def test_a_client_with_many_partitions_leaves_half_of_the_flushes_to_others() -> None:
    env = MemoryEnv(seed=3)
    threads = HeldSyncs(env)
    opened = Opened(env, threads)

    async def produce(number: int, client: Hashable) -> Log:
        log = open_log(env, FLUSHED, folder=f"/data/orders-{number}")
        partition, batch = opened.opener.open(log), batch_of(b"value")
        info = partition.append(memoryview(batch), read_header(batch), NOW_MS, client=client)
        await partition.wait_flushed(info.last_offset + 1)
        return log

    greedy = [asyncio.create_task(produce(number, "greedy")) for number in range(100)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert threads.running == THREADS_MAX // 2
    others = [asyncio.create_task(produce(100, "other")), asyncio.create_task(produce(101, None))]
    for _ in range(10):
        await asyncio.sleep(0)
    assert threads.running == THREADS_MAX // 2 + 2
    threads.released.set()
    logs = await asyncio.gather(*greedy, *others)
    assert all(log.high_watermark == 1 for log in logs)


@pytest.mark.parametrize("client", ["other", None])
async def test_the_flush_of_a_partition_does_not_wait_behind_those_of_another_client(
    client: Hashable,
) -> None:
    env = MemoryEnv(seed=5)
    threads = HeldSyncs(env)
    opened = Opened(env, threads)
    logs = [open_log(env, FLUSHED, folder=f"/data/orders-{number}") for number in range(100)]
    partitions = [opened.opener.open(log) for log in logs]

    def produce(partition: Partition, client: Hashable) -> None:
        batch = batch_of(b"value")
        partition.append(memoryview(batch), read_header(batch), NOW_MS, client=client)

    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    for partition in partitions:
        produce(partition, "greedy")
    await settle()
    shared = partitions[-1]
    assert threads.running == THREADS_MAX // 2
    if client is None:
        flush = asyncio.ensure_future(shared.flush())  # as retention and moves do
    else:
        produce(shared, client)
        flush = asyncio.ensure_future(shared.wait_flushed(2))
    await settle()
    assert threads.running == THREADS_MAX // 2 + 1
    assert shared.flushing.locked()
    threads.released.set()
    await flush
    await asyncio.gather(*(partition.wait_idle() for partition in partitions))
    assert opened.stats.flushes.count == len(partitions)


async def test_a_produced_record_takes_the_share_of_its_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients: list[Hashable] = []
    slot = FairSlots.slot

    def noted(slots: FairSlots, client: Hashable) -> AbstractAsyncContextManager[None]:
        clients.append(client)
        return slot(slots, client)

    monkeypatch.setattr(FairSlots, "slot", noted)
    async with broker_in_memory(MemoryEnv(seed=4)) as broker:
        await broker.metadata_service.create("orders", 1, {"varve.flush.on.ack": "true"})
        request = produce_request("orders", bytes(batch_of(b"value")))
        await PrincipalClient(broker, "ada").request(ApiKey.PRODUCE, PRODUCE_VERSION, request)
    assert Principal("ada") in clients
