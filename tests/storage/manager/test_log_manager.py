"""Several data directories: starts, stops, checkpoints, new partitions, crashes."""

import errno
import random
from contextlib import suppress
from dataclasses import replace

import pytest

from config.topics.keys import TopicConfig
from storage.errors import (
    DirectoryLockedError,
    LogDirectoryError,
    PartitionFolderError,
    StorageError,
)
from storage.format import filenames
from storage.manager.log_manager import LogManager
from storage.manager.open_report import OpenReport
from storage.model import TopicPartition
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
from tests.support.storage.logs import SMALL, TOPIC_ID, append, fill, offsets_in, read_offsets
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash


def test_an_orderly_stop_leaves_everything_as_it_was(env: MemoryEnv) -> None:
    two_disks(env).close()
    for disk in (ONE, TWO):
        assert env.exists(f"{disk}/{filenames.CLEAN_SHUTDOWN}")
    manager, report = opened(env)
    assert list(report.lines()) == []
    assert sorted(manager.table.logs) == ORDERS
    for log in manager.table.logs.values():
        assert offsets_in(log) == [0, 1, 2, 3, 4]
        assert (log.recovery_point, log.leader_epoch, log.topic_id) == (5, 0, TOPIC_ID)
    assert not env.exists(f"{ONE}/{filenames.CLEAN_SHUTDOWN}")


def test_a_kill_is_recovered_from(env: MemoryEnv) -> None:
    two_disks(env)
    manager, report = opened(env.kill())
    assert report.offline == {}
    for log in manager.table.logs.values():
        assert offsets_in(log) == [0, 1, 2, 3, 4]
        assert log.leader_epoch == 1


def report_lines(report: OpenReport) -> dict[str, dict[str, object]]:
    return dict([*report.routine_lines(), *report.lines()])


def test_a_start_after_a_kill_says_what_was_recovered_and_how_long_it_took(env: MemoryEnv) -> None:
    log = two_disks(env).table.logs[ORDERS[1]]
    _, report = opened(env.kill())
    assert report_lines(report) == {
        "log recovery finished": {
            "unclean_directories": [ONE, TWO],
            "partitions": 4,
            "segments_verified": 4,
            "bytes_verified": 4 * log.segments.size_bytes,
            "bytes_cut": 0,
            "seconds": 0.0,
        }
    }


def test_a_first_start_recovers_nothing(env: MemoryEnv) -> None:
    manager, report = opened(env)
    assert (manager.unclean_directories, report_lines(report)) == ((), {})


def test_files_that_were_being_deleted_are_no_interrupted_swap(env: MemoryEnv) -> None:
    manager = two_disks(env)
    log = manager.table.logs[ORDERS[0]]
    fill(log, 15)
    log.flush()
    log.delete_records(7)
    log.retention.expire(0)
    deleted = [name for name in env.listdir(log.directory) if name.endswith(".deleted")]
    assert deleted
    _, report = opened(env.kill())
    lines = report_lines(report)
    assert set(lines) == {"log recovery finished", "deletion of files finished"}
    assert lines["deletion of files finished"] == {"files": len(deleted)}


def test_folders_taken_over_are_one_log_line(env: MemoryEnv) -> None:
    for index in range(30):
        kafka_folder(env, f"topic{index:02d}-0", None)
        kafka_folder(env, f"topic{index:02d}-1", None)
    _, report = opened(env, ONE)
    lines = [fields for subject, fields in report.lines() if "taken over" in subject]
    assert [(line["partitions"], line["topics"]) for line in lines] == [(60, 30)]
    assert lines[0]["names"] == [f"topic{index:02d}" for index in range(20)]


def test_generations_of_two_lives_differ(env: MemoryEnv) -> None:
    manager = two_disks(env)
    before = {log.generation for log in manager.table.logs.values()}
    assert len(before) == 4
    manager.close()
    again, _ = opened(env)
    assert not before & {log.generation for log in again.table.logs.values()}


def test_after_a_kill_flush_on_ack_shows_only_what_is_synced(env: MemoryEnv) -> None:
    manager = two_disks(env)
    manager.table.checkpoint()
    env = env.kill()
    again = LogManager(env, [ONE, TWO])
    again.open(lambda name: replace(SMALL, varve_flush_on_ack=True))
    for log in again.table.logs.values():
        assert (log.high_watermark, log.recovery_point) == (5, 5)
    survivor, _ = opened(env.crash())
    assert all(offsets_in(log) == [0, 1, 2, 3, 4] for log in survivor.table.logs.values())


def test_a_second_manager_is_refused(env: MemoryEnv) -> None:
    two_disks(env)
    with pytest.raises(DirectoryLockedError):
        opened(env)


def test_new_partitions_go_where_there_are_fewest(env: MemoryEnv) -> None:
    manager, _ = opened(env, "/a", "/b", "/c")
    make_topic(manager, partitions=20)
    load = [sum(log.directory.startswith(disk) for log in manager.table.logs.values())
            for disk in ("/a/", "/b/", "/c/")]  # fmt: skip
    assert sorted(load) == [6, 7, 7]


def test_checkpoints_say_what_kafka_would(env: MemoryEnv) -> None:
    manager = two_disks(env)
    first, third = manager.table.logs[ORDERS[0]], manager.table.logs[ORDERS[2]]
    first.flush()
    first.delete_records(3)
    manager.table.cleaner_offsets[ORDERS[2]] = 4
    manager.table.cleaner_offsets[ORDERS[1]] = 2
    manager.table.checkpoint()

    def output(disk: str, name: str) -> dict[TopicPartition, int]:
        return read_offsets(env, f"{disk}/{name}")

    assert output(ONE, filenames.RECOVERY_POINT_CHECKPOINT) == {ORDERS[0]: 5, ORDERS[2]: 0}
    assert output(ONE, filenames.LOG_START_CHECKPOINT) == {ORDERS[0]: 3}
    assert output(ONE, filenames.REPLICATION_CHECKPOINT) == {ORDERS[0]: 5, ORDERS[2]: 5}
    assert output(ONE, filenames.CLEANER_CHECKPOINT) == {ORDERS[2]: 4}
    assert output(TWO, filenames.CLEANER_CHECKPOINT) == {ORDERS[1]: 2}
    manager.close()
    again, _ = opened(env)
    assert again.table.logs[ORDERS[0]].log_start_offset == 3
    assert again.table.cleaner_offsets == {ORDERS[2]: 4, ORDERS[1]: 2}
    assert third.log_start_offset == 0


def test_what_is_clean_beyond_the_end_of_a_log_that_was_cut_is_dirty_again(env: MemoryEnv) -> None:
    manager = two_disks(env)
    end = manager.table.logs[ORDERS[0]].log_end_offset
    manager.table.cleaner_offsets[ORDERS[0]] = end
    manager.table.cleaner_offsets[ORDERS[2]] = end + 1  # the tail was lost with the power
    manager.close()
    again, _ = opened(env)
    assert again.table.cleaner_offsets == {ORDERS[0]: end}


def test_an_older_capture_is_not_written_over_a_newer_one(env: MemoryEnv) -> None:
    manager = two_disks(env)
    manager.table.cleaner_offsets[ORDERS[0]] = 1
    older = manager.table.checkpoint_begin()
    manager.table.cleaner_offsets[ORDERS[0]] = 2
    manager.table.checkpoint_begin().run()
    older.run()
    assert read_offsets(env, f"{ONE}/{filenames.CLEANER_CHECKPOINT}")[ORDERS[0]] == 2
    manager.close()


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
        fill(manager.table.logs[ORDERS[0]], 2)
        manager.table.logs[ORDERS[0]].flush()
        manager.table.checkpoint()
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
        log = again.table.logs[TopicPartition("kept", index)]
        assert offsets_in(log) == [0, 1, 2, 3]
    assert report.offline == {}
    entry = again.metadata.topics.get("orders")
    served = {partition for partition in again.table.logs if partition.topic == "orders"}
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


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EBUSY, errno.ENOTEMPTY])
def test_a_deleted_folder_that_cannot_be_removed_keeps_no_directory_offline(
    env: MemoryEnv, number: int
) -> None:
    manager, _ = opened(env)
    for number_of_topic, topic in enumerate(("orders", "sales")):
        make_topic(manager, topic, 2, topic_id=bytes([number_of_topic]) * 16)
    for topic in ("orders", "sales"):
        drop_topic(manager, topic)
    fault = env.fail_on(
        lambda operation, path: operation in ("unlink", "rmdir") and "/orders-" in path, number
    )
    now_ms = env.wall_ms() + 10**9

    def folders() -> list[str]:
        names = [name for path in (ONE, TWO) for name in env.listdir(path)]
        return sorted(name.partition("-")[0] for name in names if name.endswith("-delete"))

    with pytest.raises(StorageError, match=r"removal of .*/orders-") as raised:
        manager.purge_deleted(now_ms)
    assert not isinstance(raised.value, LogDirectoryError)
    assert all(directory.is_online for directory in manager.table.directories)
    assert folders() == ["orders", "orders"]
    assert manager.purge_deleted(now_ms) == 0
    fault.remove()
    assert manager.purge_deleted(now_ms + 60_000) == 2
    assert folders() == []


def test_a_data_directory_that_is_gone_goes_offline_at_the_removal_of_a_folder(
    env: MemoryEnv,
) -> None:
    manager, _ = opened(env)
    make_topic(manager, "orders", 2)
    drop_topic(manager, "orders")
    env.remove_tree(ONE)
    with pytest.raises(LogDirectoryError):
        manager.purge_deleted(env.wall_ms() + 10**9)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EBUSY])
def test_a_folder_that_cannot_be_renamed_at_its_deletion_keeps_no_directory_offline(
    env: MemoryEnv, number: int
) -> None:
    manager, _ = opened(env)
    make_topic(manager, "kept", 2, topic_id=bytes([1]) * 16)
    make_topic(manager, "orders", 1)
    fault = env.fail_on(
        lambda operation, path: operation == "rename" and "/orders-0." in path, number
    )
    with pytest.raises(PartitionFolderError, match=r"deletion of .*/orders-0"):
        drop_topic(manager, "orders")
    assert all(directory.is_online for directory in manager.table.directories)
    manager.close()
    manager, report = opened(env)
    assert (report.offline_directories, report.offline) == ({}, {})
    assert any("removal of" in note for _, note in report.directory_notes)
    manager.close()
    fault.remove()
    manager, report = opened(env)
    assert [path.rpartition("/")[2] for path in report.removed] == ["orders-0"]
