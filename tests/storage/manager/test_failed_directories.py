"""Directories that fail or lose files: what goes offline, and what is recovered."""

import errno
from collections.abc import Iterator

import pytest

from storage.env import write_file_atomically
from storage.errors import (
    InconsistentDirectoryError,
    LogDirectoryError,
    LostIdentityError,
)
from storage.format import filenames
from storage.manager.offset_checkpoints import CONSEQUENCES
from storage.model import TopicPartition
from tests.support.storage.log_managers import (
    ONE,
    ORDERS,
    TWO,
    kafka_folder,
    opened,
    two_disks,
)
from tests.support.storage.logs import SMALL, TOPIC_ID, append, fill, offsets_in, read_offsets
from tests.support.storage.memory_env import MemoryEnv


@pytest.mark.parametrize("operation", ["listdir", "open", "lock", "pread"])
def test_a_directory_that_fails_at_start_is_offline_alone(env: MemoryEnv, operation: str) -> None:
    two_disks(env).close()
    env.fail_on(lambda op, path: op == operation and path.startswith(TWO), errno.EIO)
    manager, report = opened(env)
    assert list(report.offline_directories) == [TWO]
    assert sorted(manager.table.logs) == [ORDERS[0], ORDERS[2]]
    assert sorted(manager.table.offline) == [ORDERS[1], ORDERS[3]]
    assert all(reason for reason in manager.table.offline.values())
    assert append(manager.table.logs[ORDERS[0]], b"x").first_offset == 5


def test_a_start_keeps_the_copy_of_a_partition_that_is_not_served(env: MemoryEnv) -> None:
    two_disks(env).close()
    of_offline = f"{ONE}/{filenames.future_dir_name(ORDERS[1], 'a' * 32)}"
    of_served = f"{ONE}/{filenames.future_dir_name(ORDERS[0], 'b' * 32)}"
    for path in (of_offline, of_served):
        env.mkdir(path)
    # The name of the offline partition's topic begins the name of a topic that is served.
    kafka_folder(env, "orders-old-1", bytes(15) + b"b")
    env.fail_on(lambda _, path: path.startswith(TWO), errno.EIO)
    manager, _ = opened(env)
    assert TopicPartition("orders-old", 1) in manager.table.logs
    assert ORDERS[1] in manager.table.offline
    manager.purge_deleted(0)
    assert env.exists(of_offline)
    assert not env.exists(of_served)


def test_one_error_in_a_directory_at_any_step_of_a_start_spares_the_other() -> None:
    steps = 0

    def is_last(left: Iterator[int], path: str) -> bool:
        return path.startswith(TWO) and next(left, -1) == 0

    while True:
        env = MemoryEnv(seed=5)
        two_disks(env).close()
        left = iter(range(steps, -1, -1))
        env.fail_on(lambda _, path, left=left: is_last(left, path), errno.EIO)
        manager, report = opened(env)
        if next(left, -1) != -1:
            break  # the start has fewer operations
        assert {ORDERS[0], ORDERS[2]} <= manager.table.logs.keys(), f"step {steps}"
        unserved = {ORDERS[1], ORDERS[3]} - manager.table.logs.keys()
        assert unserved == report.offline.keys(), f"step {steps}"
        steps += 1
    assert steps > 20


def test_partitions_of_a_failed_directory_are_not_begun_anew(env: MemoryEnv) -> None:
    two_disks(env).close()
    fault = env.fail_on(lambda op, path: path.startswith(TWO), errno.EIO)
    manager, _ = opened(env)
    manager.close()
    assert not [name for name in env.listdir(ONE) if name in ("orders-1", "orders-3")]
    fault.remove()
    again, report = opened(env)
    assert report.offline == {}
    assert all(offsets_in(log) == [0, 1, 2, 3, 4] for log in again.table.logs.values())


def test_a_directory_that_fails_later_takes_its_partitions_along(env: MemoryEnv) -> None:
    manager = two_disks(env)
    lost = manager.table.fail_directory(TWO, "sync failed")
    assert sorted(lost) == [ORDERS[1], ORDERS[3]]
    assert manager.table.offline == {ORDERS[1]: "sync failed", ORDERS[3]: "sync failed"}
    assert sorted(manager.table.logs) == [ORDERS[0], ORDERS[2]]
    assert manager.table.fail_directory(TWO, "again") == lost
    assert manager.table.offline[ORDERS[1]] == "sync failed"
    manager.save_metadata(manager.metadata)
    manager.table.checkpoint()
    manager.close()
    assert env.exists(f"{ONE}/{filenames.CLEAN_SHUTDOWN}")
    assert not env.exists(f"{TWO}/{filenames.CLEAN_SHUTDOWN}")


def test_a_failing_log_takes_nothing_in_its_directory_any_more(env: MemoryEnv) -> None:
    manager = two_disks(env)
    env.fail_on(lambda op, path: op == "sync" and "orders-1" in path, errno.EIO)
    with pytest.raises(LogDirectoryError) as caught:
        manager.table.logs[ORDERS[1]].flush()
    assert caught.value.directory == TWO
    with pytest.raises(LogDirectoryError):
        append(manager.table.logs[ORDERS[3]], b"x")
    append(manager.table.logs[ORDERS[0]], b"x")


def test_a_partition_is_made_in_the_next_directory_if_one_fails(env: MemoryEnv) -> None:
    manager, _ = opened(env)
    env.fail_on(lambda op, path: path.startswith(f"{ONE}/"), errno.EIO)
    log = manager.create(ORDERS[0], TOPIC_ID, SMALL)
    assert log.directory == f"{TWO}/orders-0"
    assert [directory.is_online for directory in manager.table.directories] == [False, True]
    env.fail_on(lambda op, path: path.startswith(f"{TWO}/"), errno.EIO)
    with pytest.raises(LogDirectoryError):
        manager.create(ORDERS[1], TOPIC_ID, SMALL)


def test_a_log_that_cannot_be_closed_leaves_no_marker(env: MemoryEnv) -> None:
    manager = two_disks(env)
    env.fail_on(lambda op, path: op == "sync" and "orders-1/" in path, errno.EIO)
    manager.close()
    assert env.exists(f"{ONE}/{filenames.CLEAN_SHUTDOWN}")
    assert not env.exists(f"{TWO}/{filenames.CLEAN_SHUTDOWN}")


def test_a_checkpoint_that_fails_names_its_directory_and_spares_the_other(env: MemoryEnv) -> None:
    manager = two_disks(env)
    for log in manager.table.logs.values():
        log.flush()
    env.fail_on(lambda op, path: op == "rename" and path.startswith(ONE), errno.EIO)
    with pytest.raises(LogDirectoryError) as caught:
        manager.table.checkpoint()
    assert caught.value.directory == ONE
    points = read_offsets(env, f"{TWO}/{filenames.RECOVERY_POINT_CHECKPOINT}")
    assert points == {ORDERS[1]: 5, ORDERS[3]: 5}


def lose(env: MemoryEnv, path: str, how: str) -> None:
    """Damage a file so that nothing in it can be believed."""
    if how == "missing":
        env.unlink(path)
    elif how == "a folder":
        env.unlink(path)
        env.mkdir(f"{path}/something")
    else:
        write_file_atomically(env, path, {"empty": b"", "garbage": b"0\n7\ngarbage\n"}[how])


@pytest.mark.parametrize("how", ["missing", "empty", "garbage", "a folder"])
@pytest.mark.parametrize("was_clean", [True, False])
def test_a_lost_recovery_point_has_everything_verified_and_nothing_cut(
    env: MemoryEnv, how: str, was_clean: bool
) -> None:
    manager = two_disks(env)
    log = manager.table.logs[ORDERS[1]]
    fill(log, 15)
    bases = [facts.base_offset for facts in log.segment_facts()]
    if was_clean:
        manager.close()
    else:
        manager.table.checkpoint()
        env = env.kill()
    path = f"{log.directory}/{filenames.file_name(bases[1], filenames.LOG)}"
    file = env.open(path, write=True)
    file.pwrite(b"!", 100)  # in a record of the first batch
    lose(env, f"{TWO}/{filenames.RECOVERY_POINT_CHECKPOINT}", how)
    manager, report = opened(env)
    assert report.offline_directories == report.offline == {}
    assert [directory for directory, _ in report.directory_notes][:1] == [TWO]
    log = manager.table.logs[ORDERS[1]]
    assert log.log_end_offset == 20
    assert offsets_in(log, start=bases[2]) == list(range(bases[2], 20))
    assert len(log.damage.ranges) == (0 if was_clean else 1)
    manager.close()
    again, report = opened(env)
    assert report.directory_notes == ()
    assert again.table.logs[ORDERS[1]].log_end_offset == 20


@pytest.mark.parametrize("name", CONSEQUENCES)
def test_a_checkpoint_that_is_no_regular_file_is_lost_and_its_directory_online(
    env: MemoryEnv, name: str
) -> None:
    """Such as a link to a device."""
    two_disks(env).close()
    path = f"{TWO}/{name}"
    env.fail_on(lambda op, read: op == "read_file" and read == path, errno.EISDIR)
    manager, report = opened(env)
    assert report.offline_directories == report.offline == {}
    ((directory, note),) = report.directory_notes
    assert (directory, path in note, CONSEQUENCES[name] in note) == (TWO, True, True)
    assert manager.table.logs[ORDERS[1]].log_end_offset == 5


def test_a_directory_that_was_killed_before_its_first_checkpoint_has_lost_nothing(
    env: MemoryEnv,
) -> None:
    two_disks(env)
    _, report = opened(env.kill())
    assert report.directory_notes == ()


def test_what_was_never_flushed_is_cut_though_no_checkpoint_was_written_in_time(
    env: MemoryEnv,
) -> None:
    manager = two_disks(env)
    log = manager.table.logs[ORDERS[0]]
    fill(log, 20)
    env = env.kill()
    first = f"{log.directory}/{filenames.file_name(0, filenames.LOG)}"
    env.open(first, write=True).pwrite(b"!", 100)
    log = opened(env)[0].table.logs[ORDERS[0]]
    assert (log.log_end_offset, log.damage.ranges) == (0, ())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_directory_that_lost_all_its_checkpoints_loses_no_whole_batch(
    env: MemoryEnv, is_known: bool
) -> None:
    manager = two_disks(env)
    log = manager.table.logs[ORDERS[0]]
    fill(log, 20)
    log.flush()
    manager.table.checkpoint()
    (home,) = [path for path in (ONE, TWO) if env.exists(f"{path}/orders-0")]
    env = env.kill()
    for name in env.listdir(home):
        if name.endswith("-checkpoint"):
            env.unlink(f"{home}/{name}")
    if not is_known:
        for disk in (ONE, TWO):
            env.unlink(f"{disk}/varve.metadata")
    middle = f"{log.directory}/{filenames.file_name(5, filenames.LOG)}"
    env.open(middle, write=True).pwrite(b"!", 100)
    manager, report = opened(env)
    assert [note for directory, note in report.directory_notes if directory == home]
    log = manager.table.logs[ORDERS[0]]
    assert log.log_end_offset == 25
    assert [(damage.base_offset, damage.next_offset) for damage in log.damage.ranges] == [(5, 6)]
    assert offsets_in(log, start=10) == list(range(10, 25))


@pytest.mark.parametrize("how", ["missing", "empty", "garbage", "a folder"])
@pytest.mark.parametrize("was_clean", [True, False])
def test_without_a_log_start_a_log_begins_at_its_first_segment(
    env: MemoryEnv, how: str, was_clean: bool
) -> None:
    manager = two_disks(env)
    log = manager.table.logs[ORDERS[1]]
    fill(log, 15)
    log.flush()
    log.delete_records(7)
    log.retention.expire(0)
    assert log.segments.first_base_offset == 5
    if was_clean:
        manager.close()
    else:
        manager.table.checkpoint()
        env = env.kill()
    lose(env, f"{TWO}/{filenames.LOG_START_CHECKPOINT}", how)
    manager, report = opened(env)
    assert report.offline_directories == report.offline == {}
    assert manager.table.logs[ORDERS[1]].log_start_offset == 5
    assert offsets_in(manager.table.logs[ORDERS[1]]) == list(range(5, 20))
    manager.table.checkpoint()


@pytest.mark.parametrize("how", ["missing", "empty", "garbage", "a folder"])
@pytest.mark.parametrize("disks", [1, 2])
def test_lost_meta_properties_are_written_again_from_the_metadata(
    env: MemoryEnv, how: str, disks: int
) -> None:
    manager = two_disks(env)
    ids = (manager.metadata.cluster_id, manager.metadata.node_id)
    placement = {partition: manager.table.directory_id_of(partition) for partition in ORDERS}
    manager.close()
    for disk in (ONE, TWO)[:disks]:
        lose(env, f"{disk}/{filenames.META_PROPERTIES}", how)
    manager, report = opened(env)
    assert report.offline_directories == report.offline == {}
    assert {directory for directory, _ in report.directory_notes} == {ONE, TWO}.difference(
        (TWO,) if disks == 1 else ()
    )
    assert (manager.metadata.cluster_id, manager.metadata.node_id) == ids
    assert {
        partition: manager.table.directory_id_of(partition) for partition in ORDERS
    } == placement
    assert all(offsets_in(log) == [0, 1, 2, 3, 4] for log in manager.table.logs.values())
    manager.close()
    again, report = opened(env)
    assert report.directory_notes == ()
    assert sorted(again.table.logs) == ORDERS


def test_no_cluster_id_is_invented_beside_data(env: MemoryEnv) -> None:
    kafka_folder(env, "unknown-0", TOPIC_ID)
    env.unlink(f"{ONE}/{filenames.META_PROPERTIES}")
    before = env.listdir(ONE)
    with pytest.raises(LostIdentityError) as caught:
        opened(env, ONE)
    assert f"{ONE}/{filenames.META_PROPERTIES}" in str(caught.value)
    assert "cluster.id" in caught.value.remedy
    assert sorted({*env.listdir(ONE)} - {filenames.LOCK}) == before


def test_meta_properties_of_another_cluster_than_the_metadata_are_refused(env: MemoryEnv) -> None:
    two_disks(env).close()
    for disk in (ONE, TWO):
        path = f"{disk}/{filenames.META_PROPERTIES}"
        text = env.read_file(path).decode()
        cluster_id = text.partition("cluster.id=")[2].partition("\n")[0]
        write_file_atomically(env, path, text.replace(cluster_id, "x" * 22).encode())
    with pytest.raises(InconsistentDirectoryError, match=r"cluster\.id"):
        opened(env)


def test_the_cleaners_checkpoint_may_be_lost(env: MemoryEnv) -> None:
    manager = two_disks(env)
    manager.table.cleaner_offsets[ORDERS[1]] = 2
    manager.close()
    write_file_atomically(env, f"{TWO}/{filenames.CLEANER_CHECKPOINT}", b"garbage")
    again, report = opened(env)
    assert report.offline_directories == {}
    assert again.table.cleaner_offsets == {}
