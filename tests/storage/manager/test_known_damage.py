"""Damage that was found stays known over restarts, as long as the same bytes are there."""

import errno
from dataclasses import replace

import pytest

from storage.directory.cluster_metadata import TopicEntry
from storage.errors import DamagedSegmentError
from storage.format import filenames
from storage.log.log import Log
from storage.manager.known_damage import (
    RANGES_MAX,
    DamageEntry,
    decode_damage,
    encode_damage,
)
from storage.manager.log_manager import LogManager
from storage.manager.open_report import OpenReport
from storage.model import TopicPartition
from tests.support.storage.logs import SMALL, TOPIC_ID, fill, offsets_in
from tests.support.storage.memory_env import MemoryEnv

HOME = "/disk"
ORDERS = TopicPartition("orders", 0)
PATH = f"{HOME}/{filenames.DAMAGE}"


def opened(env: MemoryEnv) -> tuple[LogManager, OpenReport]:
    manager = LogManager(env, [HOME])
    return manager, manager.open(lambda _: SMALL)


def with_damage(env: MemoryEnv) -> tuple[LogManager, Log]:
    """A log of several segments; a byte of its first batch is wrong and known to be."""
    manager, _ = opened(env)
    log = manager.create(ORDERS, TOPIC_ID, SMALL)
    entry = TopicEntry(TOPIC_ID, {0: manager.table.directory_id_of(ORDERS)})
    manager.save_metadata(manager.metadata.with_topic(ORDERS.topic, entry))
    fill(log, 20)
    log.flush()
    flip(env, log)
    log.damage.mark(first_path(log), 0, "CRC does not match")
    assert len(log.damage.ranges) == 1
    return manager, log


def first_path(log: Log) -> str:
    return f"{log.directory}/{filenames.file_name(0, filenames.LOG)}"


def flip(env: MemoryEnv, log: Log) -> None:
    file = env.open(first_path(log), write=True)
    file.pwrite(bytes([file.pread(1, 70)[0] ^ 1]), 70)
    file.sync()
    file.close()


def close(manager: LogManager, env: MemoryEnv, how: str) -> MemoryEnv:
    if how == "orderly":
        manager.close()
        return env
    manager.table.checkpoint()
    return env.kill() if how == "killed" else env.crash()


@pytest.mark.parametrize("how", ["orderly", "killed", "power lost"])
def test_damage_is_known_after_a_restart(env: MemoryEnv, how: str) -> None:
    manager, log = with_damage(env)
    damaged = log.damage.ranges
    env = close(manager, env, how)
    again, _ = opened(env)
    log = again.table.logs[ORDERS]
    assert log.damage.ranges == damaged
    assert offsets_in(log, start=damaged[0].next_offset)[-1] == 19
    with pytest.raises(DamagedSegmentError):
        offsets_in(log)


def test_damage_whose_bytes_were_put_right_is_forgotten(env: MemoryEnv) -> None:
    manager, log = with_damage(env)
    manager.close()
    flip(env, log)
    again, _ = opened(env)
    assert again.table.logs[ORDERS].damage.ranges == ()
    assert offsets_in(again.table.logs[ORDERS])[0] == 0
    again.table.checkpoint()
    assert decode_damage(env.read_file(PATH), PATH) == {}


def test_damage_of_a_removed_segment_is_forgotten(env: MemoryEnv) -> None:
    manager, log = with_damage(env)
    manager.table.checkpoint()
    log.delete_records(log.log_end_offset)
    log.retention.expire(env.wall_ms())
    assert log.damage.ranges == ()
    manager.table.checkpoint()
    assert decode_damage(env.read_file(PATH), PATH) == {}


def test_damage_of_a_deleted_topic_does_not_apply_to_one_with_its_name(env: MemoryEnv) -> None:
    manager, _ = with_damage(env)
    manager.close()
    ((entry,),) = decode_damage(env.read_file(PATH), PATH).values()
    other = {ORDERS: (replace(entry, topic_id=bytes(16).hex()),)}
    file = env.open(PATH, write=True, truncate=True)
    file.pwrite(encode_damage(other), 0)
    file.close()
    again, _ = opened(env)
    assert again.table.logs[ORDERS].damage.ranges == ()


def test_damage_of_an_offline_partition_stays_known(env: MemoryEnv) -> None:
    manager, log = with_damage(env)
    manager.close()
    aside = f"{HOME}/aside"
    env.rename(log.directory, aside)
    offline, _ = opened(env)
    assert ORDERS in offline.table.offline
    offline.table.checkpoint()
    offline.close()
    env.rename(aside, log.directory)
    again, _ = opened(env)
    assert len(again.table.logs[ORDERS].damage.ranges) == 1


def test_the_file_is_written_only_when_the_ranges_change(env: MemoryEnv) -> None:
    manager, _ = with_damage(env)
    manager.table.checkpoint()
    writes: list[str] = []
    env.fail_on(lambda operation, path: PATH in path and bool(writes.append(operation)), 5)
    manager.table.checkpoint()
    assert writes == []


def test_a_full_disk_loses_no_checkpoint_for_the_damage(env: MemoryEnv) -> None:
    manager, _ = with_damage(env)
    env.fail_on(lambda operation, path: operation == "pwrite" and PATH in path, 28)
    with pytest.raises(OSError, match="28"):
        manager.table.checkpoint()
    assert manager.table.directories[0].is_online
    assert env.exists(f"{HOME}/{filenames.RECOVERY_POINT_CHECKPOINT}")


def test_the_ranges_of_a_directory_are_bounded() -> None:
    assert RANGES_MAX == 10_000
    reason = "x" * 200
    entry = DamageEntry("0" * 32, *(1 << 60, 1 << 30, 1 << 31, 1 << 60, 1 << 60), 1 << 31, reason)
    size = len(encode_damage({TopicPartition("t" * 249, 0): (entry,) * RANGES_MAX}))
    assert size < 10 << 20


def test_a_file_that_the_disk_does_not_give_is_kept_and_its_directory_is_offline(
    env: MemoryEnv,
) -> None:
    manager, _ = with_damage(env)
    manager.close()
    before = env.read_file(PATH)
    fault = env.fail_on(lambda op, path: op == "read_file" and path == PATH, errno.EIO)
    failed, report = opened(env)
    assert PATH in report.offline_directories[HOME]
    failed.close()
    fault.remove()
    assert env.read_file(PATH) == before
    manager, _ = opened(env)
    assert len(manager.table.logs[ORDERS].damage.ranges) == 1
