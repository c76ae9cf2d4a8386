"""Clean stops: what they sync, and that nothing is lost if the power fails afterwards."""

import random
from collections.abc import Callable

import pytest

from storage.format import filenames
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from tests.support.storage.log_managers import ONE, ORDERS, TWO, make_topic, opened, two_disks
from tests.support.storage.logs import NOW_MS, fill, offsets_in
from tests.support.storage.memory_env import MemoryEnv

KAFKAS_MARKER = b'{"version":0,"brokerEpoch":7}'


def written_at_stop(env: MemoryEnv, manager: LogManager) -> set[str]:
    """Stop; return the partition folders in which something was written or synced."""
    before = len(env.history)
    manager.close()
    changes = [path for operation, path in env.history[before:] if operation != "sync_dir"]
    changes += [f"{path}/" for operation, path in env.history[before:] if operation == "sync_dir"]
    return {path.split("/")[2] for path in changes if "/orders-" in path}


def restarted(env: MemoryEnv) -> LogManager:
    two_disks(env).close()
    return opened(env)[0]


def test_a_clean_stop_touches_no_log_that_was_not_changed_since_the_start(env: MemoryEnv) -> None:
    manager = restarted(env)
    fill(manager.table.logs[ORDERS[2]], 1)
    assert written_at_stop(env, manager) == {"orders-2"}
    assert written_at_stop(env, opened(env)[0]) == set()


def test_a_clean_stop_touches_no_partition_that_was_created_and_never_written(
    env: MemoryEnv,
) -> None:
    manager, _ = opened(env)
    make_topic(manager)
    assert written_at_stop(env, manager) == set()
    again, report = opened(env.crash())
    assert list(report.lines()) == []
    assert [log.log_end_offset for log in again.table.logs.values()] == [0] * 4


def flip_marker(env: MemoryEnv) -> None:
    for disk in (ONE, TWO):
        file = env.open(f"{disk}/{filenames.CLEAN_SHUTDOWN}", truncate=True)
        file.pwrite(KAFKAS_MARKER, 0)
        file.sync()
        file.close()


def test_logs_that_kafka_closed_are_synced(env: MemoryEnv) -> None:
    two_disks(env).close()
    flip_marker(env)
    assert len(written_at_stop(env, opened(env)[0])) == 4


def test_logs_that_were_recovered_are_synced(env: MemoryEnv) -> None:
    two_disks(env)
    killed = env.kill()
    assert len(written_at_stop(killed, opened(killed)[0])) == 4


def delete_half(log: Log) -> None:
    log.delete_records((log.log_start_offset + log.log_end_offset) // 2)


CHANGES: tuple[Callable[[Log], object], ...] = (
    lambda log: fill(log, 1),
    lambda log: fill(log, 12),
    lambda log: log.roll(NOW_MS),
    lambda log: log.flush(),
    delete_half,
    lambda log: log.truncate_to(max(log.log_start_offset, log.log_end_offset - 2), now_ms=NOW_MS),
)


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_lost_if_the_power_fails_after_a_clean_stop(
    change: Callable[[Log], object],
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(20):
        env = MemoryEnv(seed=rng.randrange(1 << 32))
        manager = restarted(env)
        for log in manager.table.logs.values():
            if rng.random() < 0.5:
                change(log)
            if rng.random() < 0.2:
                rng.choice(CHANGES)(log)
        expected = {where: offsets_in(log) for where, log in manager.table.logs.items()}
        manager.close()
        for _ in range(2):  # the second stop changes nothing
            env = env.crash()
            manager, report = opened(env)
            assert list(report.lines()) == []
            assert {w: offsets_in(log) for w, log in manager.table.logs.items()} == expected
            manager.close()
