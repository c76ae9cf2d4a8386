"""No append, and no move of the log start, waits for the file of leader epochs."""

import errno
import random
from contextlib import suppress

import pytest

from storage.errors import NoRoomError
from storage.format import filenames
from storage.format.leader_epochs import LeaderEpochs
from storage.log.log import Log
from tests.support.storage.log_managers import ONE, ORDERS, opened, two_disks
from tests.support.storage.logs import append, fill
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

EPOCHS = filenames.LEADER_EPOCH_CHECKPOINT


def killed(seed: int = 8) -> MemoryEnv:
    """Five durable records in each of four partitions, of epoch 0."""
    env = MemoryEnv(seed)
    manager = two_disks(env)
    for log in manager.table.logs.values():
        log.flush()
    manager.table.checkpoint()
    return env.kill()


def epochs_in(env: MemoryEnv, log: Log) -> list[tuple[int, int]]:
    path = f"{log.directory}/{EPOCHS}"
    return [tuple(entry) for entry in LeaderEpochs.decode(env.read_file(path), path).entries]


def done_by_append(env: MemoryEnv, log: Log) -> set[str]:
    before = len(env.history)
    append(log, b"x")
    return {operation for operation, _ in env.history[before:]}


def test_the_first_append_after_a_kill_waits_for_no_disk() -> None:
    env = killed()
    manager, _ = opened(env)
    for log in manager.table.logs.values():
        assert log.leader_epoch == 1
        assert done_by_append(env, log) == {"pwrite"}
    after = env.crash()
    assert all(epochs_in(after, log) == [(0, 0), (1, 5)] for log in manager.table.logs.values())


def test_the_first_append_after_an_orderly_stop_waits_for_no_disk_and_nothing_is_written() -> None:
    env = killed()
    opened(env)[0].close()
    before = len(env.history)
    manager, _ = opened(env)
    assert not [path for _, path in env.history[before:] if EPOCHS in path]
    for log in manager.table.logs.values():
        assert done_by_append(env, log) == {"pwrite"}


@pytest.mark.parametrize("seed", range(30))
def test_a_crash_while_epochs_are_entered_loses_none(seed: int) -> None:
    print(f"seed {seed}")
    env = killed(seed)
    env.crash_at = env.operations + random.Random(seed).randrange(1, 160)
    with suppress(SimulatedCrash):
        opened(env)
    env.crash_at = None
    env = env.crash()
    manager, report = opened(env)
    assert report.offline == {}
    for log in manager.table.logs.values():
        entries = epochs_in(env, log)
        assert entries[0] == (0, 0)
        assert entries[-1] == (log.leader_epoch, 5)
        assert log.leader_epoch in (1, 2)


def test_a_log_start_in_another_epoch_waits_for_no_disk_and_is_in_the_file_at_the_stop() -> None:
    env = killed()
    manager, _ = opened(env, ONE, "/disk2")
    log = manager.table.logs[ORDERS[0]]
    fill(log, 5)
    before = len(env.history)
    log.delete_records(7)
    assert env.history[before:] == []
    assert log.reader.end_offset_for_epoch(0) == (0, 7)
    manager.close()
    assert epochs_in(env, log) == [(1, 7)]


def test_a_truncation_begins_an_epoch_by_which_consumers_find_out() -> None:
    manager, _ = opened(killed())
    log = manager.table.logs[ORDERS[0]]
    fill(log, 4)
    assert log.truncate_to(7, now_ms=0)
    fill(log, 4)
    assert log.leader_epoch == 2
    assert log.reader.end_offset_for_epoch(1) == (1, 7)
    assert [log.reader.epoch_of(offset) for offset in (6, 7)] == [1, 2]


@pytest.mark.parametrize("offset", [0, 3, 5, 7])
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("is_killed", [False, True])
def test_no_start_goes_back_behind_the_epoch_of_a_truncation(
    offset: int, is_full: bool, is_killed: bool
) -> None:
    env = killed()
    manager, _ = opened(env)
    log = manager.table.logs[ORDERS[0]]
    fill(log, 4)
    full = env.fail_on(lambda op, path: is_full and op == "pwrite" and EPOCHS in path, errno.ENOSPC)
    assert log.truncate_to(offset, now_ms=env.wall_ms())
    full.remove()
    if is_killed:
        env = env.kill()
    else:
        manager.close()
    again = opened(env)[0].table.logs[ORDERS[0]]
    assert again.leader_epoch >= log.leader_epoch == 2


def test_no_start_goes_back_behind_an_epoch_that_found_no_room_at_the_start_before() -> None:
    env = killed()
    full = env.fail_on(lambda op, path: op == "pwrite" and EPOCHS in path, errno.ENOSPC)
    manager, _ = opened(env)
    full.remove()
    assert {log.leader_epoch for log in manager.table.logs.values()} == {1}
    manager.close()
    again, _ = opened(env)
    assert {log.leader_epoch for log in again.table.logs.values()} == {1}


def test_a_truncation_needs_no_room_for_the_epochs_which_the_next_append_writes() -> None:
    env = killed()
    manager, _ = opened(env)
    log = manager.table.logs[ORDERS[0]]
    assert epochs_in(env, log) == [(0, 0), (1, 5)]
    fill(log, 2)
    full = env.fail_on(lambda op, path: op == "pwrite" and EPOCHS in path, errno.ENOSPC)
    assert log.truncate_to(3, now_ms=env.wall_ms())
    with pytest.raises(NoRoomError):
        append(log, b"refused")
    full.remove()
    append(log, b"x")
    assert log.reader.epoch_of(3) == log.leader_epoch == 2
    assert epochs_in(env, log) == [(0, 0), (2, 3)]
