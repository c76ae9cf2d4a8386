"""Deleted partitions: their folders, and what may not be said of their successors."""

import errno
from dataclasses import replace

import pytest

from storage.env import write_file
from storage.errors import PartitionFolderError
from storage.format import filenames
from storage.manager.deleted_folders import FOLDERS_AT_ONCE
from storage.manager.log_manager import LogManager
from tests.support.storage.log_managers import (
    ONE,
    ORDERS,
    TWO,
    drop_topic,
    kafka_folder,
    make_topic,
    opened,
    two_disks,
)
from tests.support.storage.logs import SMALL, TOPIC_ID, fill, offsets_in
from tests.support.storage.memory_env import MemoryEnv


def test_a_deleted_partition_gets_another_name_and_goes_later(env: MemoryEnv) -> None:
    manager = two_disks(env)
    log = manager.table.logs[ORDERS[0]]
    fetch_slice = log.reader.read(0, 1 << 20, end_offset=5)
    before = fetch_slice.read()
    drop_topic(manager)
    assert manager.table.logs == {}
    scheduled = [name for name in env.listdir(ONE) if name.endswith("-delete")]
    assert len(scheduled) == 2
    assert fetch_slice.read() == before
    assert manager.purge_deleted(env.wall_ms() + SMALL.file_delete_delay_ms - 1) == 0
    assert manager.purge_deleted(env.wall_ms() + SMALL.file_delete_delay_ms) == 4
    assert not [name for name in env.listdir(ONE) if "orders" in name]
    manager.save_metadata(manager.metadata)
    assert manager.metadata.deleted_topic_ids == {}


def test_a_clock_that_is_set_back_delays_a_removal_by_one_delay_at_most(env: MemoryEnv) -> None:
    manager = two_disks(env)
    drop_topic(manager)
    past_ms = env.wall_ms() - 10**9
    assert manager.purge_deleted(past_ms) == 0
    assert manager.purge_deleted(past_ms + SMALL.file_delete_delay_ms - 1) == 0
    assert manager.purge_deleted(past_ms + SMALL.file_delete_delay_ms) == 4


def test_folders_that_were_being_deleted_go_at_the_next_start(env: MemoryEnv) -> None:
    manager = two_disks(env)
    drop_topic(manager)
    again, report = opened(env.kill())
    assert again.table.logs == {}
    assert report.taken_over == ()
    assert again.purge_deleted(0) == 4


def test_a_deleted_topic_does_not_come_back_with_its_directory(env: MemoryEnv) -> None:
    two_disks(env).close()
    fault = env.fail_on(lambda op, path: path.startswith(TWO), errno.EIO)
    manager, report = opened(env)
    assert list(report.offline_directories) == [TWO]
    drop_topic(manager)
    assert manager.purge_deleted(env.wall_ms() + 10**9) == 2
    manager.close()
    fault.remove()
    again, report = opened(env)
    assert again.table.logs == {}
    assert sorted(report.removed) == [f"{TWO}/orders-1", f"{TWO}/orders-3"]
    assert again.purge_deleted(0) == 2
    again.save_metadata(again.metadata)
    assert again.metadata.deleted_topic_ids == {}


def test_a_topic_whose_folders_are_being_deleted_in_turns_does_not_come_back(
    env: MemoryEnv,
) -> None:
    """The folders of the first turn may be removed before those of the next are renamed."""
    manager = two_disks(env)
    later_ms = env.wall_ms() + 10**9
    manager.save_metadata(manager.metadata.without_topics(["orders"]))
    assert manager.delete_all(ORDERS[:2]) == []  # one on each disk
    assert manager.purge_deleted(later_ms) == 2
    manager.save_metadata(manager.metadata)
    again, report = opened(env.kill())
    assert (again.table.logs, report.taken_over) == ({}, ())
    assert len(report.removed) == 2


def test_a_topic_is_forgotten_when_the_folders_of_the_last_turn_are_gone(env: MemoryEnv) -> None:
    manager = two_disks(env)
    later_ms = env.wall_ms() + 10**9
    manager.save_metadata(manager.metadata.without_topics(["orders"]))
    for turn in (ORDERS[:2], ORDERS[2:]):
        assert manager.metadata.deleted_topic_ids
        assert manager.delete_all(turn) == []
        assert manager.purge_deleted(later_ms) == 2
        manager.save_metadata(manager.metadata)
    assert manager.metadata.deleted_topic_ids == {}


@pytest.mark.parametrize("error", [errno.EBUSY, errno.ENOSPC])
def test_a_folder_that_could_not_be_renamed_does_not_bring_its_topic_back(
    env: MemoryEnv, error: int
) -> None:
    """A longer name may need another block of the data directory."""
    manager = two_disks(env)
    manager.save_metadata(manager.metadata.without_topics(["orders"]))
    fault = env.fail_on(lambda op, path: op == "rename" and "/orders-0." in path, error)
    (failure,) = manager.delete_all(ORDERS)
    assert isinstance(failure, PartitionFolderError)
    assert all(directory.is_online for directory in manager.table.directories)
    fault.remove()
    assert manager.purge_deleted(env.wall_ms() + 10**9) == 3
    manager.save_metadata(manager.metadata)
    again, report = opened(env.kill())
    assert (again.table.logs, report.taken_over) == ({}, ())


def test_a_start_without_room_for_the_new_name_of_a_deleted_folder_leaves_it(
    env: MemoryEnv,
) -> None:
    manager = two_disks(env)
    manager.save_metadata(manager.metadata.without_topics(["orders"]))
    manager.close()
    fault = env.fail_on(lambda op, path: op == "rename" and "/orders-0." in path, errno.ENOSPC)
    manager, report = opened(env)
    assert (manager.table.logs, report.offline_directories) == ({}, {})
    assert len(report.removed) == 3
    manager.close()
    fault.remove()
    _, report = opened(env)
    assert len(report.removed) == 1


def test_a_topic_can_be_made_again_under_another_id(env: MemoryEnv) -> None:
    manager = two_disks(env)
    drop_topic(manager)
    other = bytes(range(100, 116))
    logs = make_topic(manager, topic_id=other)
    assert [log.log_end_offset for log in logs] == [0, 0, 0, 0]
    manager.close()
    again, report = opened(env)
    assert report.removed == ()
    assert {log.topic_id for log in again.table.logs.values()} == {other}


def test_nothing_said_of_a_deleted_topic_holds_for_the_next_one_of_its_name(env: MemoryEnv) -> None:
    manager, _ = opened(env)
    for log in make_topic(manager):
        fill(log, 50)
        log.flush()
        log.delete_records(40)
    manager.table.checkpoint()
    late = manager.table.checkpoint_begin()  # a round that is under way all the while
    drop_topic(manager)
    for log in make_topic(manager, topic_id=bytes(range(16, 32))):
        fill(log, 5)
        log.flush()
    late.run()
    manager, report = opened(env.kill())
    assert report.notes == ()
    for log in manager.table.logs.values():
        assert (log.log_start_offset, offsets_in(log)) == (0, [0, 1, 2, 3, 4])


def test_a_checkpoint_of_this_run_does_not_apply_to_the_next_topic_of_its_name(
    env: MemoryEnv,
) -> None:
    manager, _ = opened(env)
    for log in make_topic(manager):
        fill(log, 50)
        log.flush()
        log.delete_records(40)
    manager.table.checkpoint()
    drop_topic(manager)
    for log in make_topic(manager, topic_id=bytes(range(16, 32))):
        fill(log, 5)
    manager, _ = opened(env.kill())
    for log in manager.table.logs.values():
        assert (log.log_start_offset, offsets_in(log)) == (0, [0, 1, 2, 3, 4])


def test_nothing_said_before_a_restart_holds_for_a_topic_of_the_same_name(env: MemoryEnv) -> None:
    manager, _ = opened(env)
    for log in make_topic(manager):
        fill(log, 50)
        log.flush()
    manager.table.checkpoint()
    drop_topic(manager)
    env = env.kill()
    manager, _ = opened(env)
    for log in make_topic(manager, topic_id=bytes(range(16, 32))):
        fill(log, 5)
    manager, _ = opened(env.kill())
    assert [log.log_end_offset for log in manager.table.logs.values()] == [5] * 4


def test_a_deleted_folder_stays_as_long_as_the_broker_says_whatever_its_topic_says(
    env: MemoryEnv,
) -> None:
    forever = replace(SMALL, file_delete_delay_ms=1 << 62)
    manager = LogManager(env, [ONE])
    manager.open(lambda topic: forever if topic else SMALL)
    make_topic(manager, partitions=1, config=forever)
    drop_topic(manager)
    assert manager.purge_deleted(env.wall_ms() + SMALL.file_delete_delay_ms) == 1


@pytest.mark.parametrize("is_orderly", [True, False])
@pytest.mark.parametrize("is_closed_by_kafka", [True, False])
def test_what_kafka_writes_to_a_topic_deleted_here_is_kept(
    env: MemoryEnv, *, is_orderly: bool, is_closed_by_kafka: bool
) -> None:
    """Its metadata has the topic, so it makes the folders again, with the same topic id.

    Only if both brokers were killed, the folders look like those of a deletion that was cut off.
    """
    manager = two_disks(env)
    drop_topic(manager)
    if is_orderly:
        manager.close()
    else:
        env = env.kill()
    for disk in (ONE, TWO):
        for name in env.listdir(disk):
            if name.endswith("-delete"):
                env.remove_tree(f"{disk}/{name}")
        if is_closed_by_kafka:
            marker = b'{"version":0,"brokerEpoch":243}'
            write_file(env, f"{disk}/{filenames.CLEAN_SHUTDOWN}", marker)
    kafka_folder(env, "orders-0", TOPIC_ID, 3)
    again, report = opened(env)
    if is_orderly or is_closed_by_kafka:
        assert offsets_in(again.table.logs[ORDERS[0]]) == [0, 1, 2]
        assert (report.removed, again.metadata.deleted_topic_ids) == ((), {})
    else:
        assert report.removed == (f"{ONE}/orders-0",)
    again.close()


def test_a_stop_does_not_confirm_a_deletion_that_is_not_complete(env: MemoryEnv) -> None:
    manager = two_disks(env)
    partitions = manager.metadata.topics["orders"].partitions
    manager.save_metadata(manager.metadata.without_topics(["orders"]))
    manager.delete_all([ORDERS[0], ORDERS[1], ORDERS[3]])
    manager.close()
    again, report = opened(env)
    assert report.removed == (f"{ONE}/orders-2",)
    assert again.metadata.deleted_topic_ids == {TOPIC_ID: (partitions[2],)}


def test_a_purge_removes_some_folders_with_one_sync_and_the_next_one_the_rest(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, _ = opened(env, ONE)
    make_topic(manager, "wide", FOLDERS_AT_ONCE + 3)
    drop_topic(manager, "wide")
    assert manager.metadata.deleted_topic_ids
    synced: list[str] = []
    sync_dir = env.sync_dir

    def note(path: str) -> None:
        synced.append(path)
        sync_dir(path)

    monkeypatch.setattr(env, "sync_dir", note)
    past_ms = env.wall_ms() + SMALL.file_delete_delay_ms
    for removed, left in ((FOLDERS_AT_ONCE, 3), (3, 0), (0, 0)):
        synced.clear()
        assert manager.purge_deleted(past_ms) == removed
        assert synced == [ONE] * (removed > 0)
        assert sum(name.endswith("-delete") for name in env.listdir(ONE)) == left
        assert bool(manager._deleted.confirmed) == (left == 0)
