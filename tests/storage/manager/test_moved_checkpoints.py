"""The checkpoints of both directories while a replica moves: a crash loses no log start offset."""

import pytest

from storage.log.log import Log
from storage.manager.log_manager import LogManager
from storage.manager.replica_copy import ReplicaCopy
from tests.support.storage.log_managers import ORDERS, TWO, opened, two_disks
from tests.support.storage.logs import offsets_in
from tests.support.storage.memory_env import MemoryEnv

MOVING = ORDERS[0]
START = 3


def almost_moved(env: MemoryEnv) -> tuple[LogManager, Log, ReplicaCopy]:
    """A replica whose copy only has to be published. Records below START are deleted."""
    manager = two_disks(env)
    log = manager.table.logs[MOVING]
    log.delete_records(START)
    log.roll(env.wall_ms())
    log.flush()
    manager.table.checkpoint()
    target = next(directory for directory in manager.table.directories if directory.path == TWO)
    source_id = manager.table.directory_id_of(MOVING)
    copy = manager.begin_copy(log, target)
    copy.begin()
    for segment in copy.segments:
        copy.copy_segment(segment)
    copy.open()
    copy.flush()
    assert copy.log is not None
    copy.log.retention.raise_log_start(START)
    manager.save_metadata(
        manager.metadata.with_move(MOVING.topic, MOVING.partition, source_id, target.directory_id)
    )
    manager.table.add_copy(copy.log)
    manager.table.checkpoint()
    return manager, log, copy


def start_offset_after(env: MemoryEnv) -> tuple[str, int, list[int]]:
    manager, _ = opened(env)
    log = manager.table.logs[MOVING]
    return log.directory, log.log_start_offset, offsets_in(log)


@pytest.mark.parametrize("seed", range(8))
def test_a_checkpoint_before_the_rename_is_durable_keeps_the_source(seed: int) -> None:
    """The power may fail before the rename is durable: then the source is the replica."""
    env = MemoryEnv(seed)
    manager, log, copy = almost_moved(env)
    source = manager.table.find_directory(MOVING)
    manager.table.replace(log, copy.publish())
    manager.table.checkpoint_begin(source).run()
    directory, start, offsets = start_offset_after(env.crash())
    print(seed, directory)
    assert (start, offsets) == (START, [3, 4])


@pytest.mark.parametrize("seed", range(8))
def test_a_checkpoint_captured_before_the_switch_keeps_the_entries_of_the_copy(seed: int) -> None:
    env = MemoryEnv(seed)
    manager, log, copy = almost_moved(env)
    task = manager.table.checkpoint_begin()
    manager.table.replace(log, copy.publish())
    task.run()
    _, start, offsets = start_offset_after(env.crash())
    assert (start, offsets) == (START, [3, 4])


@pytest.mark.parametrize("seed", range(8))
def test_an_old_replica_does_not_return_when_its_removal_has_ended(seed: int) -> None:
    """The metadata has no note of the move then: a start would leave two folders."""
    env = MemoryEnv(seed)
    manager, log, copy = almost_moved(env)
    source = manager.table.find_directory(MOVING)
    assert source is not None
    manager.table.replace(log, copy.publish())
    manager.remove_old_replica(log, source)
    assert not env.crash().exists(source.file(str(MOVING)))


def test_a_replica_moves_although_a_thread_takes_its_old_directory_offline() -> None:
    """The creation of a topic, in a thread, may be the first to find that the disk fails."""
    manager, log, copy = almost_moved(MemoryEnv(seed=1))
    manager.table.fail_directory(log.log_directory.path, "EIO")
    manager.table.replace(log, copy.publish())
    assert manager.table.logs[MOVING] is copy.log
    assert MOVING not in manager.table.offline
    assert manager.table.find_directory(MOVING) is copy.log_directory
