"""Retention under loss of power: what it removes never comes back in part."""

import asyncio
import errno
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from broker.counters import BrokerStats
from broker.event_loop.directory_threads import DirectoryThreads
from broker.topics import log_maintenance as maintenance_module
from broker.topics.checkpoint_writer import CheckpointWriter
from broker.topics.clock_watch import ClockWatch
from broker.topics.log_maintenance import LogMaintenance, Periods
from broker.topics.partition import Partition
from storage.directory.cluster_metadata import TopicEntry
from storage.errors import LogDirectoryError, NoRoomError
from storage.format.filenames import LOG, LOG_START_CHECKPOINT, file_name
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from tests.support.draws import cases
from tests.support.storage.logs import FOLDER, HOME, PARTITION, SMALL, TOPIC_ID, fill, offsets_in
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

COMPACTED = replace(SMALL, cleanup_policy=("compact", "delete"), retention_ms=1000)
BASES = [0, 5, 10, 15, 20]
RECORDS = 22


def opened(env: MemoryEnv) -> LogManager:
    manager = LogManager(env, [HOME])
    manager.open(lambda topic: COMPACTED)
    return manager


def filled(env: MemoryEnv) -> LogManager:
    """Five segments, the last one active; everything is durable."""
    manager = opened(env)
    log = manager.create(PARTITION, TOPIC_ID, COMPACTED)
    placement = {PARTITION.partition: manager.table.directory_id_of(PARTITION)}
    entry = TopicEntry(TOPIC_ID, placement)
    manager.save_metadata(manager.metadata.with_topic(PARTITION.topic, entry))
    fill(log, RECORDS)
    assert [facts.base_offset for facts in log.segment_facts()] == BASES
    log.flush()
    manager.table.checkpoint()
    return manager


def log_maintenance(
    env: MemoryEnv, manager: LogManager, fail: Callable[[LogDirectoryError], None]
) -> LogMaintenance:
    async def note_time() -> None:
        pass

    log = manager.table.logs[PARTITION]

    async def flush_in_thread(opened: Log) -> None:
        task = opened.flusher.begin()
        await asyncio.to_thread(task.run)
        opened.flusher.done(task)

    threads = DirectoryThreads(env.monotonic)
    partition = Partition(log, BrokerStats().topics["orders"], flush_in_thread, fail)
    return LogMaintenance(
        env,
        manager,
        lambda: [partition],
        CheckpointWriter(manager.table, threads, fail),
        threads,
        fail_directory=fail,
        periods=Periods(retention=300, checkpoint=60),
        producer_expiration_ms=86_400_000,
        clock=ClockWatch(env.wall_ms(), env.monotonic() * 1000),
        note_time=note_time,
        damage_gone=lambda where: None,
        broker_stats=BrokerStats(),
    )


def failed(error: LogDirectoryError) -> None:
    raise AssertionError(error)


def rounds(env: MemoryEnv, manager: LogManager, rng: random.Random) -> None:
    """Rounds of retention, now and then with a checkpoint, a flush or a purge in between."""
    log = manager.table.logs[PARTITION]
    writer = log_maintenance(env, manager, failed)
    while log.log_start_offset < RECORDS - 2:
        offset = rng.randrange(log.log_start_offset, RECORDS) + 1
        log.delete_records(min(offset, log.high_watermark))
        asyncio.run(writer.expire())
        for work, share in (
            (manager.table.checkpoint, 0.4),
            (log.flush, 0.2),
            (lambda: log.retention.purge_deleted(env.wall_ms() + 10**9), 0.4),
        ):
            if rng.random() < share:
                with suppress(NoRoomError):
                    work()


def check(env: MemoryEnv) -> Log:
    """Whatever comes back, readers see a log without a hole."""
    manager = opened(env)
    log = manager.table.logs[PARTITION]
    seen = offsets_in(log, start=log.log_start_offset)
    assert seen == list(range(log.log_start_offset, log.log_end_offset)), (seen, env)
    return log


@pytest.mark.parametrize("seed", range(cases(few=12, many=60)))
def test_no_value_comes_back_without_its_tombstone_after_retention(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    env = MemoryEnv(seed)
    manager = filled(env)
    env.crash_at = env.operations + rng.randrange(1, 80)
    with suppress(SimulatedCrash):
        rounds(env, manager, rng)
    check(env.crash())


@pytest.mark.parametrize("seed", range(cases(few=10, many=40)))
def test_without_room_for_a_checkpoint_the_oldest_segment_goes_first_and_durably(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    env = MemoryEnv(seed)
    manager = filled(env)
    env.fail_on(
        lambda operation, path: operation == "pwrite" and LOG_START_CHECKPOINT in path,
        errno.ENOSPC,
    )
    env.crash_at = env.operations + rng.randrange(1, 60)
    with suppress(SimulatedCrash):
        rounds(env, manager, rng)
    after = env.crash()
    remaining = [base for base in BASES if after.exists(f"{FOLDER}/{file_name(base, LOG)}")]
    assert remaining == BASES[len(BASES) - len(remaining) :], (remaining, after)


def test_a_full_disk_does_not_keep_retention_from_removing_segments() -> None:
    env = MemoryEnv(1)
    manager = filled(env)
    log = manager.table.logs[PARTITION]
    env.fail_on(
        lambda operation, path: operation == "pwrite" and LOG_START_CHECKPOINT in path,
        errno.ENOSPC,
    )
    log.delete_records(16)
    writer = log_maintenance(env, manager, failed)
    asyncio.run(writer.expire())
    assert writer.stats.segments_expired == 3
    assert [facts.base_offset for facts in log.segment_facts()] == [15, 20]


def test_one_round_of_retention_syncs_once_however_many_segments_go() -> None:
    env = MemoryEnv(2)
    manager = filled(env)
    log = manager.table.logs[PARTITION]
    log.delete_records(20)
    before = len(env.history)
    asyncio.run(log_maintenance(env, manager, failed).expire())
    assert log.segments.first_base_offset == 20
    synced = [path for operation, path in env.history[before:] if operation.startswith("sync")]
    assert [path for path in synced if path.startswith(FOLDER)] == []
    assert len([path for path in synced if LOG_START_CHECKPOINT in path]) == 1


def test_a_turn_of_the_loop_removes_a_bounded_number_of_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands that expire at once meant tens of thousands of renames in one turn."""
    monkeypatch.setattr(maintenance_module, "EXPIRED_PER_TURN", 1)
    env = MemoryEnv(2)
    manager = filled(env)
    log = manager.table.logs[PARTITION]
    log.delete_records(20)
    counts: list[int] = []

    async def count_segments() -> None:
        while True:
            counts.append(len(log.segments))
            await asyncio.sleep(0)

    async def expire() -> int:
        counting = asyncio.create_task(count_segments())
        writer = log_maintenance(env, manager, failed)
        await writer.expire()
        counting.cancel()
        return writer.stats.segments_expired

    assert asyncio.run(expire()) == len(BASES) - 1
    counts.append(len(log.segments))
    assert counts[-1] == 1
    assert max(before - after for before, after in pairwise(counts)) == 1


def test_the_start_of_a_log_stays_in_the_checkpoint_until_removals_are_durable() -> None:
    env = MemoryEnv(3)
    manager = filled(env)
    log = manager.table.logs[PARTITION]
    log.delete_records(15)
    asyncio.run(log_maintenance(env, manager, failed).expire())
    assert log.segments.first_base_offset == log.log_start_offset == 15
    manager.table.checkpoint()
    assert b" 15\n" in env.read_file(f"{HOME}/{LOG_START_CHECKPOINT}")
    fill(log, 1)
    log.flush()
    manager.table.checkpoint()
    assert b" 15\n" not in env.read_file(f"{HOME}/{LOG_START_CHECKPOINT}")
