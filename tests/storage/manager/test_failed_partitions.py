"""Partitions that go offline alone, with their folders."""

import errno
from collections.abc import Callable

import pytest

from storage.env import write_file_atomically
from storage.errors import (
    InconsistentDirectoryError,
    LogClosedError,
    LogDirectoryError,
    NoRoomError,
    PartitionFolderError,
)
from storage.format import filenames
from storage.format.batch import ControlType
from storage.format.checkpoints import (
    encode_partition_metadata,
    write_offsets,
)
from storage.log.log import Log
from storage.model import TopicPartition
from tests.support.storage.damaged_worlds import transaction
from tests.support.storage.log_managers import (
    ONE,
    ORDERS,
    TWO,
    drop_topic,
    make_topic,
    opened,
    two_disks,
)
from tests.support.storage.logs import (
    NOW_MS,
    SMALL,
    TOPIC_ID,
    append,
    fill,
    offsets_in,
    open_log,
    read_offsets,
)
from tests.support.storage.memory_env import MemoryEnv


def test_a_folder_nobody_may_read_is_offline_alone(env: MemoryEnv) -> None:
    two_disks(env).close()
    env.fail_on(lambda op, path: op == "open" and "orders-1/0" in path, errno.EACCES)
    manager, report = opened(env)
    assert list(report.offline) == [ORDERS[1]]
    assert report.offline_directories == {}
    assert sorted(manager.table.logs) == [ORDERS[0], ORDERS[2], ORDERS[3]]


def test_a_flush_of_a_partition_that_is_deleted_meanwhile_fails_nobody_else(
    env: MemoryEnv,
) -> None:
    manager = two_disks(env)
    log = manager.table.logs[ORDERS[0]]
    log.roll(NOW_MS)
    flush = log.flusher.begin()  # runs in a thread, and syncs the folder for the new segment's name
    drop_topic(manager)
    with pytest.raises(LogClosedError):
        flush.run()
    assert all(directory.is_online for directory in manager.table.directories)


def test_a_roll_of_a_partition_that_is_deleted_meanwhile_fails_nobody_else(env: MemoryEnv) -> None:
    manager = two_disks(env)
    log = manager.table.logs[ORDERS[0]]
    drop_topic(manager)  # in a thread, while the loop is inside of roll
    with pytest.raises(LogClosedError):
        log.roll(NOW_MS)
    assert all(directory.is_online for directory in manager.table.directories)


ON_A_FOLDER: dict[str, Callable[[Log], object]] = {
    "roll": lambda log: log.roll(NOW_MS),
    "append that rolls": lambda log: fill(log, 20),
    "truncation": lambda log: log.truncate_to(2, now_ms=NOW_MS),
    "epochs": lambda log: log.epochs.enter(),
    "retention": lambda log: (log.delete_records(20), log.retention.expire(NOW_MS)),
    "close": lambda log: log.close(),
}


@pytest.mark.parametrize("action", ON_A_FOLDER)
def test_a_folder_removed_by_hand_takes_only_its_partition_offline(
    env: MemoryEnv, action: str
) -> None:
    manager = two_disks(env)
    lost, log = manager.table.logs[ORDERS[0]], manager.table.logs[ORDERS[2]]
    if action == "retention":
        fill(lost, 15)
        lost.roll(NOW_MS)
        lost.flush()
    if action == "epochs":
        lost._state.leader_epoch += 1
    env.remove_tree(lost.directory)
    with pytest.raises(PartitionFolderError, match="/disk1/orders-0") as caught:
        ON_A_FOLDER[action](lost)
    assert manager.table.fail(caught.value) == (ORDERS[0],)
    assert "No such file" in manager.table.offline[ORDERS[0]]
    assert all(directory.is_online for directory in manager.table.directories)
    fill(log, 1)
    log.flush()
    with pytest.raises(PartitionFolderError):
        append(lost, b"late")


def test_a_data_directory_that_is_missing_is_offline_as_a_whole(env: MemoryEnv) -> None:
    manager = two_disks(env)
    env.remove_tree(ONE)
    with pytest.raises(LogDirectoryError) as caught:
        manager.table.logs[ORDERS[0]].roll(NOW_MS)
    assert manager.table.fail(caught.value) == (ORDERS[0], ORDERS[2])


def test_a_topic_whose_folder_was_removed_by_hand_can_be_deleted_and_made_again(
    env: MemoryEnv,
) -> None:
    manager = two_disks(env)
    env.remove_tree(f"{ONE}/orders-0")
    drop_topic(manager)
    assert manager.purge_deleted(env.wall_ms() + SMALL.file_delete_delay_ms) == 4
    assert all(directory.is_online for directory in manager.table.directories)
    [log, *_] = make_topic(manager, topic_id=bytes(16))
    assert (log.log_start_offset, log.log_end_offset) == (0, 0)
    manager.close()
    _, report = opened(env)
    assert report.offline == {}


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_what_checkpoints_say_of_a_partition_that_is_offline_alone_is_kept(
    env: MemoryEnv, when: str
) -> None:
    manager = two_disks(env)
    log = manager.table.logs[ORDERS[0]]
    log.flush()
    log.delete_records(3)
    manager.table.cleaner_offsets[ORDERS[0]] = 4
    manager.table.checkpoint()
    closed = env.fail_on(lambda _, path: path.startswith(f"{ONE}/orders-0/"), errno.EACCES)
    if when == "later":
        with pytest.raises(PartitionFolderError) as caught:
            log.roll(NOW_MS)
        manager.table.fail(caught.value)
    else:
        env = env.kill()
        closed = env.fail_on(lambda _, path: path.startswith(f"{ONE}/orders-0/"), errno.EACCES)
        manager, report = opened(env)
        assert list(report.offline) == [ORDERS[0]]
    manager.table.checkpoint()
    manager.close()
    closed.remove()
    manager, report = opened(env)
    assert report.offline == {}
    log = manager.table.logs[ORDERS[0]]
    assert (log.log_start_offset, log.recovery_point, log.log_end_offset) == (3, 5, 5)
    assert manager.table.cleaner_offsets[ORDERS[0]] == 4


def test_a_folder_that_is_missing_is_not_made_anew(env: MemoryEnv) -> None:
    two_disks(env).close()
    env.remove_tree(f"{TWO}/orders-1")
    manager, report = opened(env)
    assert "missing" in report.offline[ORDERS[1]]
    assert not env.exists(f"{TWO}/orders-1")
    assert sorted(manager.table.logs) == [ORDERS[0], ORDERS[2], ORDERS[3]]


def test_the_same_partition_in_two_directories_is_served_from_its_own(env: MemoryEnv) -> None:
    two_disks(env).close()
    stray = open_log(env, folder=f"{TWO}/orders-0", was_clean=True)
    fill(stray, 3)
    stray.close()
    manager, report = opened(env)
    assert manager.table.logs[ORDERS[0]].directory == f"{ONE}/orders-0"
    assert [(folder, ONE in reason) for folder, reason in report.refused] == [
        (f"{TWO}/orders-0", True)
    ]
    assert env.exists(f"{TWO}/orders-0")


def test_a_folder_moved_by_hand_is_served_where_it_is(env: MemoryEnv) -> None:
    two_disks(env).close()
    env.rename(f"{ONE}/orders-0", f"{TWO}/orders-0")
    points = read_offsets(env, f"{TWO}/{filenames.RECOVERY_POINT_CHECKPOINT}")
    write_offsets(env, f"{TWO}/{filenames.RECOVERY_POINT_CHECKPOINT}", {**points, ORDERS[0]: 5})
    manager, report = opened(env)
    assert report.offline == {}
    assert manager.table.logs[ORDERS[0]].directory == f"{TWO}/orders-0"
    assert manager.metadata.topics["orders"].partitions[0] == manager.table.directory_id_of(
        ORDERS[0]
    )


@pytest.mark.parametrize("way", ["taken over", "moved"])
def test_one_damaged_batch_in_a_folder_from_elsewhere_costs_no_other(
    env: MemoryEnv, way: str
) -> None:
    """No checkpoint of the directory says what was flushed there."""
    manager, _ = opened(env)
    (log,) = make_topic(manager, partitions=1)
    fill(log, 40)
    manager.close()
    (home,) = [path for path in (ONE, TWO) if env.exists(f"{path}/orders-0")]
    other, name = (TWO if home == ONE else ONE), "orders-0" if way == "moved" else "unknown-0"
    env.rename(f"{home}/orders-0", f"{other}/{name}")
    env.unlink(f"{other}/{filenames.CLEAN_SHUTDOWN}")
    path = f"{other}/{name}/{filenames.file_name(5, filenames.LOG)}"
    data = bytearray(env.read_file(path))
    data[100] ^= 1
    env.open(path, write=True).pwrite(bytes(data), 0)
    if way == "taken over":
        env.unlink(f"{other}/{name}/{filenames.PARTITION_METADATA}")
    manager, _ = opened(env)
    log = manager.table.logs[TopicPartition(name.removesuffix("-0"), 0)]
    assert log.log_end_offset == 40
    assert [(damage.base_offset, damage.next_offset) for damage in log.damage.ranges] == [(5, 6)]


def test_a_folder_of_another_topic_id_is_refused(env: MemoryEnv) -> None:
    two_disks(env).close()
    path = f"{ONE}/orders-0/{filenames.PARTITION_METADATA}"
    write_file_atomically(env, path, encode_partition_metadata(bytes(16)))
    manager, report = opened(env)
    assert "belongs to another topic" in report.offline[ORDERS[0]], "its folder is not missing"
    assert [folder for folder, _ in report.refused] == [f"{ONE}/orders-0"]
    assert ORDERS[0] not in manager.table.logs


def test_a_folder_in_the_way_is_not_overwritten(env: MemoryEnv) -> None:
    manager, _ = opened(env, ONE)
    other = open_log(env, folder=f"{ONE}/orders-0", was_clean=True)
    fill(other, 3)
    other.close()
    with pytest.raises(InconsistentDirectoryError):
        manager.create(ORDERS[0], TOPIC_ID, SMALL)
    assert manager.table.directories[0].is_online


def test_a_partition_that_fails_while_checkpoints_are_written_keeps_its_entries(
    env: MemoryEnv,
) -> None:
    """Without its recovery point, the next start could take flushed data for a torn tail."""
    manager = two_disks(env)
    log = manager.table.logs[ORDERS[0]]
    log.flush()
    task = manager.table.checkpoint_begin()
    manager.table.fail(PartitionFolderError(log.directory, "not readable"))
    task.run()
    path = f"{ONE}/{filenames.RECOVERY_POINT_CHECKPOINT}"
    assert read_offsets(env, path)[ORDERS[0]] == 5


def test_a_log_that_could_not_be_recovered_is_recovered_later(env: MemoryEnv) -> None:
    """A clean stop of the others meanwhile does not make its torn end whole."""
    two_disks(env)
    env = env.kill()
    path = f"{ONE}/orders-0/{filenames.file_name(0, filenames.LOG)}"
    file = env.open(path, write=True)
    last = file.size() - 1
    file.pwrite(bytes([file.pread(1, last)[0] ^ 1]), last)
    closed = env.fail_on(lambda _, path: path.startswith(f"{ONE}/orders-0/"), errno.EACCES)
    manager, report = opened(env)
    assert list(report.offline) == [ORDERS[0]]
    manager.close()
    closed.remove()
    manager, report = opened(env)
    assert report.offline == {}
    assert manager.table.logs[ORDERS[0]].log_end_offset == 4
    assert offsets_in(manager.table.logs[ORDERS[0]]) == [0, 1, 2, 3]


def test_a_full_disk_at_the_start_lets_logs_be_read_and_refuses_appends(env: MemoryEnv) -> None:
    """Folders of deleted topics are removed there, which makes room."""
    manager = two_disks(env)
    for log in make_topic(manager, "deleted", topic_id=bytes(16)):
        fill(log, 5)
    drop_topic(manager, "deleted")
    env = env.kill()
    full = env.fail_on(lambda op, path: op == "pwrite" and "orders" in path, errno.ENOSPC)
    manager, report = opened(env)
    assert (report.offline, report.offline_directories) == ({}, {})
    assert manager.purge_deleted(0) == 4
    logs = [manager.table.logs[partition] for partition in ORDERS]
    assert [offsets_in(log) for log in logs] == [[0, 1, 2, 3, 4]] * 4
    for log in logs:
        with pytest.raises(NoRoomError):
            append(log, b"refused")
    full.remove()
    for log in logs:
        fill(log, 20)  # rolls
    manager.close()
    manager, report = opened(env)
    assert report.offline == {}
    assert [offsets_in(manager.table.logs[name]) for name in ORDERS] == [list(range(25))] * 4


def test_a_kill_after_a_start_on_a_full_disk_loses_nothing(env: MemoryEnv) -> None:
    manager = two_disks(env)
    for partition in ORDERS:
        fill(manager.table.logs[partition], 20)
    env = env.kill()
    full = env.fail_on(lambda op, path: op == "pwrite", errno.ENOSPC)
    manager, report = opened(env)
    assert (report.offline, report.offline_directories) == ({}, {})
    full.remove()
    fill(manager.table.logs[ORDERS[0]], 1)
    env = env.kill()
    manager, report = opened(env)
    assert (report.offline, report.offline_directories) == ({}, {})
    ends = [len(offsets_in(manager.table.logs[partition])) for partition in ORDERS]
    assert ends == [26, 25, 25, 25]


def test_without_room_only_a_log_with_aborted_transactions_is_offline(env: MemoryEnv) -> None:
    """Without their index, readers of committed records would get aborted ones."""
    manager = two_disks(env)
    transaction(manager.table.logs[ORDERS[0]], 7, ControlType.ABORT)
    env = env.kill()
    env.fail_on(lambda op, path: op == "pwrite", errno.ENOSPC)
    _, report = opened(env)
    assert list(report.offline) == [ORDERS[0]]
    assert "No space left on device" in report.offline[ORDERS[0]]
    assert report.offline_directories == {}


def test_without_room_for_the_leader_epochs_the_first_append_enters_them(env: MemoryEnv) -> None:
    two_disks(env)
    env = env.kill()
    path = f"{ONE}/orders-0/{filenames.LEADER_EPOCH_CHECKPOINT}"
    before = env.read_file(path)
    full = env.fail_on(
        lambda op, path: op == "pwrite" and filenames.LEADER_EPOCH_CHECKPOINT in path, errno.ENOSPC
    )
    manager, report = opened(env)
    assert (report.offline, report.offline_directories) == ({}, {})
    log = manager.table.logs[ORDERS[0]]
    with pytest.raises(NoRoomError):
        append(log, b"refused")
    assert (log.log_end_offset, env.read_file(path)) == (5, before)
    full.remove()
    append(log, b"accepted")
    assert log.epochs.known.latest == (log.leader_epoch, 5)
    assert env.read_file(path) == log.epochs.known.encode()
