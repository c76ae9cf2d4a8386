"""Partitions of open logs: when they wake the cleaner, and how they flush."""

from dataclasses import replace

from broker.cleaning.key_recorder import KeyRecorder
from broker.cleaning.partition_opener import PartitionOpener
from broker.counters import BrokerStats
from broker.event_loop.directory_threads import DirectoryThreads
from cleaner.stats import PoolStats
from config.settings import CleanerSettings
from storage.errors import LogDirectoryError
from storage.log.log import Log
from tests.support.storage.logs import NOW_MS, SMALL, append, open_log
from tests.support.storage.memory_env import MemoryEnv

COMPACTED = replace(SMALL, cleanup_policy=("compact",))


class Opened:
    """An opener with its statistics, how often it woke the cleaner, and what it reported."""

    def __init__(self, env: MemoryEnv) -> None:
        self.stats = BrokerStats()
        self.wakes = 0
        self.failures: list[LogDirectoryError] = []
        threads = DirectoryThreads(env.monotonic)
        settings = CleanerSettings(strategy="dirty-ratio")  # records no keys
        recorder = KeyRecorder(
            env, threads, hash_key=bytes, settings=lambda: settings, stats=PoolStats()
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
