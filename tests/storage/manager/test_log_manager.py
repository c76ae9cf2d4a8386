"""Several data directories: what is opened, adopted, refused, and what fails alone."""

import errno
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from config.topic_keys import TopicConfig
from storage.directory.cluster_metadata import TopicEntry
from storage.env import write_file_atomically
from storage.errors import (
    DirectoryLockedError,
    InconsistentDirectoryError,
    LogClosedError,
    LogDirectoryError,
    LostIdentityError,
    PartitionFolderError,
)
from storage.format import filenames
from storage.format.checkpoints import (
    decode_partition_metadata,
    encode_partition_metadata,
    read_offsets,
    write_offsets,
)
from storage.log.log import Log
from storage.manager.log_manager import LogManager, OpenReport
from storage.model import TopicPartition
from tests.support.storage.logs import NOW_MS, SMALL, TOPIC_ID, append, fill, offsets_in, open_log
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

ONE, TWO = "/disk1", "/disk2"
ORDERS = [TopicPartition("orders", index) for index in range(4)]


def config_of(name: str) -> TopicConfig:
    return replace(SMALL, policy_known=name != "unknown")


def opened(env: MemoryEnv, *paths: str) -> tuple[LogManager, OpenReport]:
    manager = LogManager(env, paths or (ONE, TWO))
    report = manager.open(config_of)
    return manager, report


def make_topic(
    manager: LogManager, name: str = "orders", partitions: int = 4, topic_id: bytes = TOPIC_ID
) -> list[Log]:
    """As the broker does: intent, folders, metadata."""
    entry = TopicEntry(topic_id, {})
    manager.save_metadata(manager.metadata.with_topic(name, entry))
    placement, logs = {}, []
    for index in range(partitions):
        partition = TopicPartition(name, index)
        logs.append(manager.create(partition, topic_id, SMALL))
        placement[index] = manager.directory_id_of(partition)
    entry = replace(entry, partitions=placement)
    manager.save_metadata(manager.metadata.with_topic(name, entry))
    return logs


def drop_topic(manager: LogManager, name: str = "orders") -> None:
    entry = manager.metadata.topics[name]
    manager.save_metadata(manager.metadata.without_topic(name))
    for index in entry.partitions:
        manager.delete(TopicPartition(name, index))


def two_disks(env: MemoryEnv) -> LogManager:
    """orders-0 and orders-2 on the first disk, 1 and 3 on the second, five records in each."""
    manager, _ = opened(env)
    for log in make_topic(manager):
        fill(log, 5)
    assert manager.logs[ORDERS[0]].directory == f"{ONE}/orders-0"
    assert manager.logs[ORDERS[1]].directory == f"{TWO}/orders-1"
    return manager


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=8)


# --- life ---------------------------------------------------------------------------------------


def test_an_orderly_stop_leaves_everything_as_it_was(env: MemoryEnv) -> None:
    two_disks(env).close()
    for disk in (ONE, TWO):
        assert env.exists(f"{disk}/{filenames.CLEAN_SHUTDOWN}")
    manager, report = opened(env)
    assert list(report.lines()) == []
    assert sorted(manager.logs) == ORDERS
    for log in manager.logs.values():
        assert offsets_in(log) == [0, 1, 2, 3, 4]
        assert (log.recovery_point, log.leader_epoch, log.topic_id) == (5, 0, TOPIC_ID)
    assert not env.exists(f"{ONE}/{filenames.CLEAN_SHUTDOWN}")


def test_a_kill_is_recovered_from(env: MemoryEnv) -> None:
    two_disks(env)
    manager, report = opened(env.kill())
    assert report.offline == {}
    for log in manager.logs.values():
        assert offsets_in(log) == [0, 1, 2, 3, 4]
        assert log.leader_epoch == 1


def report_lines(report: OpenReport) -> dict[str, dict[str, object]]:
    return dict([*report.routine_lines(), *report.lines()])


def test_a_start_after_a_kill_says_what_was_recovered_and_how_long_it_took(env: MemoryEnv) -> None:
    log = two_disks(env).logs[ORDERS[1]]
    _, report = opened(env.kill())
    assert report_lines(report) == {
        "log recovery finished": {
            "unclean_directories": [ONE, TWO],
            "partitions": 4,
            "segments_verified": 4,
            "bytes_verified": 4 * log.size_bytes,
            "bytes_cut": 0,
            "seconds": 0.0,
        }
    }


def test_a_first_start_recovers_nothing(env: MemoryEnv) -> None:
    manager, report = opened(env)
    assert (manager.unclean_directories, report_lines(report)) == ((), {})


def test_files_that_were_being_deleted_are_no_interrupted_swap(env: MemoryEnv) -> None:
    manager = two_disks(env)
    log = manager.logs[ORDERS[0]]
    fill(log, 15)
    log.flush()
    log.delete_records(7)
    log.expire(0)
    deleted = [name for name in env.listdir(log.directory) if name.endswith(".deleted")]
    assert deleted
    _, report = opened(env.kill())
    lines = report_lines(report)
    assert set(lines) == {"log recovery finished", "deletion of files finished"}
    assert lines["deletion of files finished"] == {"files": len(deleted)}


def test_adoption_is_one_line_whatever_the_number_of_partitions(env: MemoryEnv) -> None:
    for index in range(30):
        kafka_folder(env, f"topic{index:02d}-0", None)
        kafka_folder(env, f"topic{index:02d}-1", None)
    _, report = opened(env, ONE)
    lines = [fields for subject, fields in report.lines() if "adopted" in subject]
    assert [(line["partitions"], line["topics"]) for line in lines] == [(60, 30)]
    assert lines[0]["names"] == [f"topic{index:02d}" for index in range(20)]


def test_generations_of_two_lives_differ(env: MemoryEnv) -> None:
    manager = two_disks(env)
    before = {log.generation for log in manager.logs.values()}
    assert len(before) == 4
    manager.close()
    again, _ = opened(env)
    assert not before & {log.generation for log in again.logs.values()}


def test_after_a_kill_flush_on_ack_shows_only_what_is_synced(env: MemoryEnv) -> None:
    manager = two_disks(env)
    manager.checkpoint()
    env = env.kill()
    again = LogManager(env, [ONE, TWO])
    again.open(lambda name: replace(SMALL, varve_flush_on_ack=True))
    for log in again.logs.values():
        assert (log.high_watermark, log.recovery_point) == (5, 5)
    survivor, _ = opened(env.crash())
    assert all(offsets_in(log) == [0, 1, 2, 3, 4] for log in survivor.logs.values())


def test_a_second_manager_is_refused(env: MemoryEnv) -> None:
    two_disks(env)
    with pytest.raises(DirectoryLockedError):
        opened(env)


def test_new_partitions_go_where_there_are_fewest(env: MemoryEnv) -> None:
    manager, _ = opened(env, "/a", "/b", "/c")
    make_topic(manager, partitions=20)
    load = [sum(log.directory.startswith(disk) for log in manager.logs.values())
            for disk in ("/a/", "/b/", "/c/")]  # fmt: skip
    assert sorted(load) == [6, 7, 7]


def test_checkpoints_say_what_kafka_would(env: MemoryEnv) -> None:
    manager = two_disks(env)
    first, third = manager.logs[ORDERS[0]], manager.logs[ORDERS[2]]
    first.flush()
    first.delete_records(3)
    manager.set_cleaner_offset(ORDERS[2], 4)
    manager.set_cleaner_offset(ORDERS[1], 2)
    manager.checkpoint()

    def output(disk: str, name: str) -> dict[TopicPartition, int]:
        return read_offsets(env, f"{disk}/{name}")

    assert output(ONE, filenames.RECOVERY_POINT_CHECKPOINT) == {ORDERS[0]: 5, ORDERS[2]: 0}
    assert output(ONE, filenames.LOG_START_CHECKPOINT) == {ORDERS[0]: 3}
    assert output(ONE, filenames.REPLICATION_CHECKPOINT) == {ORDERS[0]: 5, ORDERS[2]: 5}
    assert output(ONE, filenames.CLEANER_CHECKPOINT) == {ORDERS[2]: 4}
    assert output(TWO, filenames.CLEANER_CHECKPOINT) == {ORDERS[1]: 2}
    manager.close()
    again, _ = opened(env)
    assert again.logs[ORDERS[0]].log_start_offset == 3
    assert again.cleaner_offsets == {ORDERS[2]: 4, ORDERS[1]: 2}
    assert third.log_start_offset == 0


def test_what_is_clean_beyond_the_end_of_a_log_that_was_cut_is_dirty_again(env: MemoryEnv) -> None:
    manager = two_disks(env)
    end = manager.logs[ORDERS[0]].log_end_offset
    manager.set_cleaner_offset(ORDERS[0], end)
    manager.set_cleaner_offset(ORDERS[2], end + 1)  # the tail was lost with the power
    manager.close()
    again, _ = opened(env)
    assert again.cleaner_offsets == {ORDERS[0]: end}


def test_an_older_capture_is_not_written_over_a_newer_one(env: MemoryEnv) -> None:
    manager = two_disks(env)
    manager.set_cleaner_offset(ORDERS[0], 1)
    older = manager.checkpoint_begin()
    manager.set_cleaner_offset(ORDERS[0], 2)
    manager.checkpoint_begin().run()
    older.run()
    assert read_offsets(env, f"{ONE}/{filenames.CLEANER_CHECKPOINT}")[ORDERS[0]] == 2
    manager.close()


# --- deletion -----------------------------------------------------------------------------------


def test_a_deleted_partition_gets_another_name_and_goes_later(env: MemoryEnv) -> None:
    manager = two_disks(env)
    log = manager.logs[ORDERS[0]]
    fetch_slice = log.read(0, 1 << 20, end_offset=5)
    before = fetch_slice.read()
    drop_topic(manager)
    assert manager.logs == {}
    scheduled = [name for name in env.listdir(ONE) if name.endswith("-delete")]
    assert len(scheduled) == 2
    assert fetch_slice.read() == before
    assert manager.purge_deleted(env.wall_ms() + SMALL.file_delete_delay_ms - 1) == 0
    assert manager.purge_deleted(env.wall_ms() + SMALL.file_delete_delay_ms) == 4
    assert not [name for name in env.listdir(ONE) if "orders" in name]
    manager.save_metadata(manager.metadata)
    assert manager.metadata.deleted_topic_ids == {}


def test_folders_that_were_being_deleted_go_at_the_next_start(env: MemoryEnv) -> None:
    manager = two_disks(env)
    drop_topic(manager)
    again, report = opened(env.kill())
    assert again.logs == {}
    assert report.adopted == ()
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
    assert again.logs == {}
    assert sorted(report.removed) == [f"{TWO}/orders-1", f"{TWO}/orders-3"]
    assert again.purge_deleted(0) == 2
    again.save_metadata(again.metadata)
    assert again.metadata.deleted_topic_ids == {}


def test_a_topic_can_be_made_again_under_another_id(env: MemoryEnv) -> None:
    manager = two_disks(env)
    drop_topic(manager)
    other = bytes(range(100, 116))
    logs = make_topic(manager, topic_id=other)
    assert [log.log_end_offset for log in logs] == [0, 0, 0, 0]
    manager.close()
    again, report = opened(env)
    assert report.removed == ()
    assert {log.topic_id for log in again.logs.values()} == {other}


def test_nothing_said_of_a_deleted_topic_holds_for_the_next_one_of_its_name(env: MemoryEnv) -> None:
    manager, _ = opened(env)
    for log in make_topic(manager):
        fill(log, 50)
        log.flush()
        log.delete_records(40)
    manager.checkpoint()
    late = manager.checkpoint_begin()  # a round that is under way all the while
    drop_topic(manager)
    for log in make_topic(manager, topic_id=bytes(range(16, 32))):
        fill(log, 5)
        log.flush()
    late.run()
    manager, report = opened(env.kill())
    assert report.notes == ()
    for log in manager.logs.values():
        assert (log.log_start_offset, offsets_in(log)) == (0, [0, 1, 2, 3, 4])


def test_nothing_said_before_a_restart_holds_for_a_topic_of_the_same_name(env: MemoryEnv) -> None:
    manager, _ = opened(env)
    for log in make_topic(manager):
        fill(log, 50)
        log.flush()
    manager.checkpoint()
    drop_topic(manager)
    env = env.kill()
    manager, _ = opened(env)
    for log in make_topic(manager, topic_id=bytes(range(16, 32))):
        fill(log, 5)
    manager, _ = opened(env.kill())
    assert [log.log_end_offset for log in manager.logs.values()] == [5] * 4


# --- directories that fail ----------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["listdir", "open", "lock", "pread"])
def test_a_directory_that_fails_at_start_is_offline_alone(env: MemoryEnv, operation: str) -> None:
    two_disks(env).close()
    env.fail_on(lambda op, path: op == operation and path.startswith(TWO), errno.EIO)
    manager, report = opened(env)
    assert list(report.offline_directories) == [TWO]
    assert sorted(manager.logs) == [ORDERS[0], ORDERS[2]]
    assert sorted(manager.offline) == [ORDERS[1], ORDERS[3]]
    assert all(reason for reason in manager.offline.values())
    assert append(manager.logs[ORDERS[0]], b"x").first_offset == 5


def test_partitions_of_a_failed_directory_are_not_begun_anew(env: MemoryEnv) -> None:
    two_disks(env).close()
    fault = env.fail_on(lambda op, path: path.startswith(TWO), errno.EIO)
    manager, _ = opened(env)
    manager.close()
    assert not [name for name in env.listdir(ONE) if name in ("orders-1", "orders-3")]
    fault.remove()
    again, report = opened(env)
    assert report.offline == {}
    assert all(offsets_in(log) == [0, 1, 2, 3, 4] for log in again.logs.values())


def test_a_directory_that_fails_later_takes_its_partitions_along(env: MemoryEnv) -> None:
    manager = two_disks(env)
    lost = manager.fail_directory(TWO, "sync failed")
    assert sorted(lost) == [ORDERS[1], ORDERS[3]]
    assert manager.offline == {ORDERS[1]: "sync failed", ORDERS[3]: "sync failed"}
    assert sorted(manager.logs) == [ORDERS[0], ORDERS[2]]
    assert manager.fail_directory(TWO, "again") == lost
    assert manager.offline[ORDERS[1]] == "sync failed"
    manager.save_metadata(manager.metadata)
    manager.checkpoint()
    manager.close()
    assert env.exists(f"{ONE}/{filenames.CLEAN_SHUTDOWN}")
    assert not env.exists(f"{TWO}/{filenames.CLEAN_SHUTDOWN}")


def test_a_failing_log_takes_nothing_in_its_directory_any_more(env: MemoryEnv) -> None:
    manager = two_disks(env)
    env.fail_on(lambda op, path: op == "sync" and "orders-1" in path, errno.EIO)
    with pytest.raises(LogDirectoryError) as caught:
        manager.logs[ORDERS[1]].flush()
    assert caught.value.directory == TWO
    with pytest.raises(LogDirectoryError):
        append(manager.logs[ORDERS[3]], b"x")
    append(manager.logs[ORDERS[0]], b"x")


def test_a_partition_is_made_in_the_next_directory_if_one_fails(env: MemoryEnv) -> None:
    manager, _ = opened(env)
    env.fail_on(lambda op, path: path.startswith(f"{ONE}/"), errno.EIO)
    log = manager.create(ORDERS[0], TOPIC_ID, SMALL)
    assert log.directory == f"{TWO}/orders-0"
    assert [directory.is_online for directory in manager.directories] == [False, True]
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
    for log in manager.logs.values():
        log.flush()
    env.fail_on(lambda op, path: op == "rename" and path.startswith(ONE), errno.EIO)
    with pytest.raises(LogDirectoryError) as caught:
        manager.checkpoint()
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
    log = manager.logs[ORDERS[1]]
    fill(log, 15)
    bases = [facts.base_offset for facts in log.segment_facts()]
    if was_clean:
        manager.close()
    else:
        manager.checkpoint()
        env = env.kill()
    path = f"{log.directory}/{filenames.file_name(bases[1], filenames.LOG)}"
    file = env.open(path, write=True)
    file.pwrite(b"!", 100)  # in a record of the first batch
    lose(env, f"{TWO}/{filenames.RECOVERY_POINT_CHECKPOINT}", how)
    manager, report = opened(env)
    assert report.offline_directories == report.offline == {}
    assert [directory for directory, _ in report.directory_notes][:1] == [TWO]
    log = manager.logs[ORDERS[1]]
    assert log.log_end_offset == 20
    assert offsets_in(log, start=bases[2]) == list(range(bases[2], 20))
    assert len(log.damaged) == (0 if was_clean else 1)
    manager.close()
    again, report = opened(env)
    assert report.directory_notes == ()
    assert again.logs[ORDERS[1]].log_end_offset == 20


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
    log = manager.logs[ORDERS[0]]
    fill(log, 20)
    env = env.kill()
    first = f"{log.directory}/{filenames.file_name(0, filenames.LOG)}"
    env.open(first, write=True).pwrite(b"!", 100)
    log = opened(env)[0].logs[ORDERS[0]]
    assert (log.log_end_offset, log.damaged) == (0, ())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_directory_that_lost_all_its_checkpoints_loses_no_whole_batch(
    env: MemoryEnv, is_known: bool
) -> None:
    manager = two_disks(env)
    log = manager.logs[ORDERS[0]]
    fill(log, 20)
    log.flush()
    manager.checkpoint()
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
    log = manager.logs[ORDERS[0]]
    assert log.log_end_offset == 25
    assert [(damage.base_offset, damage.next_offset) for damage in log.damaged] == [(5, 6)]
    assert offsets_in(log, start=10) == list(range(10, 25))


@pytest.mark.parametrize("how", ["missing", "empty", "garbage", "a folder"])
@pytest.mark.parametrize("was_clean", [True, False])
def test_without_a_log_start_a_log_begins_at_its_first_segment(
    env: MemoryEnv, how: str, was_clean: bool
) -> None:
    manager = two_disks(env)
    log = manager.logs[ORDERS[1]]
    fill(log, 15)
    log.flush()
    log.delete_records(7)
    log.expire(0)
    assert log.first_base_offset == 5
    if was_clean:
        manager.close()
    else:
        manager.checkpoint()
        env = env.kill()
    lose(env, f"{TWO}/{filenames.LOG_START_CHECKPOINT}", how)
    manager, report = opened(env)
    assert report.offline_directories == report.offline == {}
    assert manager.logs[ORDERS[1]].log_start_offset == 5
    assert offsets_in(manager.logs[ORDERS[1]]) == list(range(5, 20))
    manager.checkpoint()


@pytest.mark.parametrize("how", ["missing", "empty", "garbage", "a folder"])
@pytest.mark.parametrize("disks", [1, 2])
def test_lost_meta_properties_are_written_again_from_the_metadata(
    env: MemoryEnv, how: str, disks: int
) -> None:
    manager = two_disks(env)
    ids = (manager.metadata.cluster_id, manager.metadata.node_id)
    placement = {partition: manager.directory_id_of(partition) for partition in ORDERS}
    manager.close()
    for disk in (ONE, TWO)[:disks]:
        lose(env, f"{disk}/{filenames.META_PROPERTIES}", how)
    manager, report = opened(env)
    assert report.offline_directories == report.offline == {}
    assert {directory for directory, _ in report.directory_notes} == {ONE, TWO}.difference(
        (TWO,) if disks == 1 else ()
    )
    assert (manager.metadata.cluster_id, manager.metadata.node_id) == ids
    assert {partition: manager.directory_id_of(partition) for partition in ORDERS} == placement
    assert all(offsets_in(log) == [0, 1, 2, 3, 4] for log in manager.logs.values())
    manager.close()
    again, report = opened(env)
    assert report.directory_notes == ()
    assert sorted(again.logs) == ORDERS


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
    manager.set_cleaner_offset(ORDERS[1], 2)
    manager.close()
    write_file_atomically(env, f"{TWO}/{filenames.CLEANER_CHECKPOINT}", b"garbage")
    again, report = opened(env)
    assert report.offline_directories == {}
    assert again.cleaner_offsets == {}


# --- partitions that fail alone -----------------------------------------------------------------


def test_a_folder_nobody_may_read_is_offline_alone(env: MemoryEnv) -> None:
    two_disks(env).close()
    env.fail_on(lambda op, path: op == "open" and "orders-1/0" in path, errno.EACCES)
    manager, report = opened(env)
    assert list(report.offline) == [ORDERS[1]]
    assert report.offline_directories == {}
    assert sorted(manager.logs) == [ORDERS[0], ORDERS[2], ORDERS[3]]


def test_a_flush_of_a_partition_that_is_deleted_meanwhile_fails_nobody_else(
    env: MemoryEnv,
) -> None:
    manager = two_disks(env)
    log = manager.logs[ORDERS[0]]
    log.roll(NOW_MS)
    flush = log.flush_begin()  # runs in a thread, and syncs the folder for the new segment's name
    drop_topic(manager)
    with pytest.raises(LogClosedError):
        flush.run()
    assert all(directory.is_online for directory in manager.directories)


def test_a_roll_of_a_partition_that_is_deleted_meanwhile_fails_nobody_else(env: MemoryEnv) -> None:
    manager = two_disks(env)
    log = manager.logs[ORDERS[0]]
    drop_topic(manager)  # in a thread, while the loop is inside of roll
    with pytest.raises(LogClosedError):
        log.roll(NOW_MS)
    assert all(directory.is_online for directory in manager.directories)


ON_A_FOLDER: dict[str, Callable[[Log], object]] = {
    "roll": lambda log: log.roll(NOW_MS),
    "append that rolls": lambda log: fill(log, 20),
    "truncation": lambda log: log.truncate_to(2, now_ms=NOW_MS),
    "epochs": lambda log: log.enter_epoch(),
    "retention": lambda log: (log.delete_records(20), log.expire(NOW_MS)),
    "close": lambda log: log.close(),
}


@pytest.mark.parametrize("action", ON_A_FOLDER)
def test_a_folder_removed_by_hand_takes_only_its_partition_offline(
    env: MemoryEnv, action: str
) -> None:
    manager = two_disks(env)
    lost, log = manager.logs[ORDERS[0]], manager.logs[ORDERS[2]]
    if action == "retention":
        fill(lost, 15)
        lost.roll(NOW_MS)
        lost.flush()
    if action == "epochs":
        lost.leader_epoch += 1
    env.remove_tree(lost.directory)
    with pytest.raises(PartitionFolderError, match="/disk1/orders-0") as caught:
        ON_A_FOLDER[action](lost)
    assert manager.fail(caught.value) == (ORDERS[0],)
    assert "No such file" in manager.offline[ORDERS[0]]
    assert all(directory.is_online for directory in manager.directories)
    fill(log, 1)
    log.flush()
    with pytest.raises(PartitionFolderError):
        append(lost, b"late")


def test_a_data_directory_that_is_missing_is_offline_as_a_whole(env: MemoryEnv) -> None:
    manager = two_disks(env)
    env.remove_tree(ONE)
    with pytest.raises(LogDirectoryError) as caught:
        manager.logs[ORDERS[0]].roll(NOW_MS)
    assert manager.fail(caught.value) == (ORDERS[0], ORDERS[2])


def test_a_topic_whose_folder_was_removed_by_hand_can_be_deleted_and_made_again(
    env: MemoryEnv,
) -> None:
    manager = two_disks(env)
    env.remove_tree(f"{ONE}/orders-0")
    drop_topic(manager)
    assert manager.purge_deleted(env.wall_ms() + SMALL.file_delete_delay_ms) == 4
    assert all(directory.is_online for directory in manager.directories)
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
    log = manager.logs[ORDERS[0]]
    log.flush()
    log.delete_records(3)
    manager.set_cleaner_offset(ORDERS[0], 4)
    manager.checkpoint()
    closed = env.fail_on(lambda _, path: path.startswith(f"{ONE}/orders-0/"), errno.EACCES)
    if when == "later":
        with pytest.raises(PartitionFolderError) as caught:
            log.roll(NOW_MS)
        manager.fail(caught.value)
    else:
        env = env.kill()
        closed = env.fail_on(lambda _, path: path.startswith(f"{ONE}/orders-0/"), errno.EACCES)
        manager, report = opened(env)
        assert list(report.offline) == [ORDERS[0]]
    manager.checkpoint()
    manager.close()
    closed.remove()
    manager, report = opened(env)
    assert report.offline == {}
    log = manager.logs[ORDERS[0]]
    assert (log.log_start_offset, log.recovery_point, log.log_end_offset) == (3, 5, 5)
    assert manager.cleaner_offsets[ORDERS[0]] == 4


def test_a_folder_that_is_missing_is_not_made_anew(env: MemoryEnv) -> None:
    two_disks(env).close()
    env.remove_tree(f"{TWO}/orders-1")
    manager, report = opened(env)
    assert "missing" in report.offline[ORDERS[1]]
    assert not env.exists(f"{TWO}/orders-1")
    assert sorted(manager.logs) == [ORDERS[0], ORDERS[2], ORDERS[3]]


def test_the_same_partition_in_two_directories_is_served_from_its_own(env: MemoryEnv) -> None:
    two_disks(env).close()
    stray = open_log(env, folder=f"{TWO}/orders-0", was_clean=True)
    fill(stray, 3)
    stray.close()
    manager, report = opened(env)
    assert manager.logs[ORDERS[0]].directory == f"{ONE}/orders-0"
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
    assert manager.logs[ORDERS[0]].directory == f"{TWO}/orders-0"
    assert manager.metadata.topics["orders"].partitions[0] == manager.directory_id_of(ORDERS[0])


@pytest.mark.parametrize("way", ["adopted", "moved"])
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
    if way == "adopted":
        env.unlink(f"{other}/{name}/{filenames.PARTITION_METADATA}")
    manager, _ = opened(env)
    log = manager.logs[TopicPartition(name.removesuffix("-0"), 0)]
    assert log.log_end_offset == 40
    assert [(damage.base_offset, damage.next_offset) for damage in log.damaged] == [(5, 6)]


def test_a_folder_of_another_topic_id_is_refused(env: MemoryEnv) -> None:
    two_disks(env).close()
    path = f"{ONE}/orders-0/{filenames.PARTITION_METADATA}"
    write_file_atomically(env, path, encode_partition_metadata(bytes(16)))
    manager, report = opened(env)
    assert ORDERS[0] in report.offline
    assert [folder for folder, _ in report.refused] == [f"{ONE}/orders-0"]
    assert ORDERS[0] not in manager.logs


def test_a_folder_in_the_way_is_not_overwritten(env: MemoryEnv) -> None:
    manager, _ = opened(env, ONE)
    other = open_log(env, folder=f"{ONE}/orders-0", was_clean=True)
    fill(other, 3)
    other.close()
    with pytest.raises(InconsistentDirectoryError):
        manager.create(ORDERS[0], TOPIC_ID, SMALL)
    assert manager.directories[0].is_online


# --- adoption -----------------------------------------------------------------------------------


KAFKA_PROPERTIES = b"version=1\ncluster.id=a-cluster-of-kafka\nnode.id=7\n"


def kafka_folder(env: MemoryEnv, name: str, topic_id: bytes | None, records: int = 3) -> None:
    log = open_log(env, folder=f"{ONE}/{name}", was_clean=True)
    fill(log, records)
    log.close()
    if not env.exists(f"{ONE}/{filenames.META_PROPERTIES}"):
        write_file_atomically(env, f"{ONE}/{filenames.META_PROPERTIES}", KAFKA_PROPERTIES)
    if topic_id is not None:
        path = f"{ONE}/{name}/{filenames.PARTITION_METADATA}"
        write_file_atomically(env, path, encode_partition_metadata(topic_id))


def test_folders_nobody_knows_are_adopted(env: MemoryEnv) -> None:
    kafka_folder(env, "unknown-0", TOPIC_ID)
    kafka_folder(env, "unknown-2", TOPIC_ID)
    manager, report = opened(env, ONE)
    assert [str(partition) for partition in report.adopted] == ["unknown-0", "unknown-2"]
    entry = manager.metadata.topics["unknown"]
    assert (entry.topic_id, entry.created_by) == (TOPIC_ID, "adopted")
    assert sorted(entry.partitions) == [0, 2]
    log = manager.logs[TopicPartition("unknown", 0)]
    assert offsets_in(log) == [0, 1, 2]
    assert log.expire(env.wall_ms() + 10**12) == []
    manager.close()
    again, report = opened(env, ONE)
    assert report.adopted == ()
    assert len(again.logs) == 2


def test_an_adopted_folder_without_an_id_gets_one(env: MemoryEnv) -> None:
    kafka_folder(env, "unknown-0", None)
    kafka_folder(env, "unknown-1", None)
    manager, _ = opened(env, ONE)
    value = manager.metadata.topics["unknown"].topic_id
    for index in (0, 1):
        path = f"{ONE}/unknown-{index}/{filenames.PARTITION_METADATA}"
        assert decode_partition_metadata(env.read_file(path), path) == value


def test_no_producer_id_that_a_log_knows_is_given_out_again(env: MemoryEnv) -> None:
    manager, _ = opened(env, ONE)
    log = make_topic(manager, partitions=1)[0]
    existing = manager.metadata.next_producer_id + 41
    append(log, b"v", producer_id=existing, producer_epoch=0, base_sequence=0)
    manager.close()
    again, _ = opened(env, ONE)
    assert again.metadata.next_producer_id == existing + 1


def test_an_id_that_a_client_invented_does_not_use_up_all_others(env: MemoryEnv) -> None:
    manager, _ = opened(env, ONE)
    log = make_topic(manager, partitions=1)[0]
    append(log, b"v", producer_id=(1 << 63) - 1, producer_epoch=0, base_sequence=0)
    manager.close()
    again, _ = opened(env, ONE)
    assert again.metadata.next_producer_id == manager.metadata.next_producer_id


def test_other_folders_are_left_alone(env: MemoryEnv) -> None:
    remaining = [
        "__cluster_metadata-0",
        f"orders-0.{'a' * 32}-stray",
        f"orders-0.{'b' * 32}-future",
        "lost+found",
        "notes",
    ]
    for name in remaining:
        env.mkdir(f"{ONE}/{name}")
        env.open(f"{ONE}/{name}/00000000000000000000.log", create=True).close()
    env.mkdir(f"{ONE}/orders-0.{'c' * 32}-delete")
    manager, report = opened(env, ONE)
    assert manager.logs == {}
    assert report.adopted == ()
    manager.purge_deleted(0)
    names = env.listdir(ONE)
    assert set(remaining) <= set(names)
    assert not [name for name in names if name.endswith("-delete")]


def test_what_a_cut_off_creation_left_is_removed(env: MemoryEnv) -> None:
    manager, _ = opened(env, ONE)
    manager.save_metadata(manager.metadata.with_topic("orders", TopicEntry(TOPIC_ID, {})))
    manager.create(ORDERS[0], TOPIC_ID, SMALL)
    again, report = opened(env.kill(), ONE)
    assert again.logs == {}
    assert report.removed == (f"{ONE}/orders-0",)
    assert report.adopted == ()


# --- crashes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_topic_is_there_whole_or_not_at_all_after_a_crash(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    env = MemoryEnv(seed)
    manager, _ = opened(env)
    logs = make_topic(manager, "kept", 2)
    for log in logs:
        fill(log, 4)
        log.flush()
    made: list[str] = []
    dropped: list[str] = []
    env.crash_at = env.operations + rng.randrange(1, 150)
    with suppress(SimulatedCrash):
        make_topic(manager, "orders", 2, topic_id=bytes([7]) * 16)
        made.append("orders")
        fill(manager.logs[ORDERS[0]], 2)
        manager.logs[ORDERS[0]].flush()
        manager.checkpoint()
        drop_topic(manager, "orders")
        dropped.append("orders")
        manager.purge_deleted(env.wall_ms() + 10**9)
        manager.close()
    for _ in range(2):
        env.crash_at = None
        env = env.crash()
        env.crash_at = env.operations + rng.randrange(1, 100)
        with suppress(SimulatedCrash):
            opened(env)
    env.crash_at = None
    again, report = opened(env.crash())
    assert report.offline_directories == {}
    for index in range(2):
        log = again.logs[TopicPartition("kept", index)]
        assert offsets_in(log) == [0, 1, 2, 3]
    assert report.offline == {}
    entry = again.metadata.topics.get("orders")
    served = {partition for partition in again.logs if partition.topic == "orders"}
    if dropped:
        assert served == set()
    if entry is not None and entry.partitions:
        assert served == {ORDERS[0], ORDERS[1]}
    else:
        assert served == set()


def test_the_first_append_to_a_new_log_waits_for_no_disk(env: MemoryEnv) -> None:
    manager, _ = opened(env, "/disk1")
    log = manager.create(TopicPartition("fresh", 0), bytes(range(16)), TopicConfig())
    before = len(env.history)
    append(log, b"value")
    assert [operation for operation, _ in env.history[before:]] == ["pwrite"]
    manager.close()
