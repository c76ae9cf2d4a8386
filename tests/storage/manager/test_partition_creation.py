"""Thousands of partitions are made at one stroke, and are whole or not at all after a crash."""

import errno
import random
from contextlib import suppress
from dataclasses import replace

import pytest

from storage.directory.cluster_metadata import TopicEntry
from storage.errors import InconsistentDirectoryError, NoRoomError
from storage.format import filenames
from storage.format.checkpoints import decode_partition_metadata
from storage.model import TopicPartition
from tests.support.storage.log_managers import ONE, ORDERS, TWO, make_topic, opened
from tests.support.storage.logs import SMALL, TOPIC_ID, append, fill, offsets_in, open_log
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

MANY = [TopicPartition("many", index) for index in range(40)]


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=8)


def folders_of(topic: str, env: MemoryEnv) -> list[str]:
    return [name for name in env.listdir(ONE) if name.startswith(topic)]


def test_all_are_there_whole_when_they_were_made(env: MemoryEnv) -> None:
    manager, _ = opened(env)
    manager.create_all(MANY, TOPIC_ID, SMALL)
    placement = [
        manager.table.logs[topic_partition].directory.rpartition("/")[0] for topic_partition in MANY
    ]
    assert placement == [ONE, TWO] * 20
    after = env.crash()
    for partition, directory in zip(MANY, placement, strict=True):
        folder = f"{directory}/{partition}"
        data = after.read_file(f"{folder}/{filenames.PARTITION_METADATA}")
        assert decode_partition_metadata(data, folder) == TOPIC_ID
        assert after.read_file(f"{folder}/{filenames.LEADER_EPOCH_CHECKPOINT}")
        assert after.exists(f"{folder}/{filenames.file_name(0, filenames.LOG)}")


def test_their_folders_are_named_durably_once_for_all_of_them(env: MemoryEnv) -> None:
    manager, _ = opened(env)
    before = len(env.history)
    manager.create_all(MANY, TOPIC_ID, SMALL)
    done = env.history[before:]
    for disk in (ONE, TWO):
        assert done.count(("sync_dir", disk)) == 1
    assert len([operation for operation, _ in done if operation in ("sync", "sync_dir")]) == 122


def test_the_share_of_a_directory_that_fails_goes_to_the_other(env: MemoryEnv) -> None:
    manager, _ = opened(env)
    env.fail_on(lambda op, path: op == "sync_dir" and path.startswith(f"{TWO}/many"), errno.EIO)
    manager.create_all(MANY, TOPIC_ID, SMALL)
    assert [directory.is_online for directory in manager.table.directories] == [True, False]
    assert {manager.table.logs[partition].directory for partition in MANY} == {
        f"{ONE}/{partition}" for partition in MANY
    }
    assert append(manager.table.logs[MANY[1]], b"x").first_offset == 0


@pytest.mark.parametrize("operation", ["mkdir", "open", "pwrite"])
def test_a_partition_is_made_in_the_next_directory_if_one_has_no_room(
    env: MemoryEnv, operation: str
) -> None:
    manager, _ = opened(env)
    env.fail_on(lambda op, path: op == operation and path.startswith(f"{ONE}/"), errno.ENOSPC)
    assert manager.create(ORDERS[0], TOPIC_ID, SMALL).directory == f"{TWO}/orders-0"
    env.fail_on(lambda op, path: op == operation and path.startswith(f"{TWO}/"), errno.EMFILE)
    with pytest.raises(NoRoomError):
        manager.create(ORDERS[1], TOPIC_ID, SMALL)
    assert all(directory.is_online for directory in manager.table.directories)


def test_a_directory_stays_online_if_no_descriptor_is_left_to_look_at_an_old_folder(
    env: MemoryEnv,
) -> None:
    """The topic id of a folder that is there already is read before the folder is used."""
    manager, _ = opened(env, ONE)
    env.mkdir(f"{ONE}/{ORDERS[0]}")
    for operation in ("sync_dir", "read_file"):
        fault = env.fail_on(lambda op, _path, failing=operation: op == failing, errno.EMFILE)
        with pytest.raises(NoRoomError):
            manager.create(ORDERS[0], TOPIC_ID, SMALL)
        fault.remove()
    assert manager.create(ORDERS[0], TOPIC_ID, SMALL).log_end_offset == 0
    assert manager.table.directories[0].is_online


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("mkdir", "many-7"),
        ("pwrite", "many-7/partition.metadata"),
        ("open", "many-7/00000000000000000000.log"),
    ],
)
def test_where_there_is_no_room_for_one_the_folders_of_the_others_are_removed(
    env: MemoryEnv, operation: str, name: str
) -> None:
    manager, _ = opened(env, ONE)
    full = env.fail_on(lambda op, path: op == operation and name in path, errno.ENOSPC)
    with pytest.raises(NoRoomError):
        manager.create_all(MANY, TOPIC_ID, SMALL)
    full.remove()
    assert manager.table.directories[0].is_online
    assert folders_of("many", env) == []
    assert folders_of("many", env.crash()) == []


def test_where_one_is_in_the_way_none_of_its_directory_is_made(env: MemoryEnv) -> None:
    manager, _ = opened(env, ONE)
    other = open_log(env, folder=f"{ONE}/many-7", was_clean=True)
    fill(other, 3)
    other.close()
    with pytest.raises(InconsistentDirectoryError):
        manager.create_all(MANY, TOPIC_ID, SMALL)
    assert folders_of("many", env) == ["many-7"]
    assert manager.table.directories[0].is_online


@pytest.mark.parametrize("seed", range(20))
def test_what_a_crash_leaves_half_made_is_gone_at_the_next_start(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    env = MemoryEnv(seed)
    manager, _ = opened(env)
    for log in make_topic(manager, "kept", 2):
        fill(log, 4)
        log.flush()
    env.crash_at = env.operations + rng.randrange(1, 200)
    topics = {"orders": ORDERS, "many": MANY[:3]}
    with suppress(SimulatedCrash):
        entries = {
            name: TopicEntry(bytes([number]) * 16, {}) for number, name in enumerate(topics, 7)
        }
        manager.save_metadata(manager.metadata.with_topics(entries))
        for name, partitions in topics.items():
            manager.create_all(partitions, entries[name].topic_id, SMALL)
            placement = {
                partition.partition: manager.table.directory_id_of(partition)
                for partition in partitions
            }
            entries[name] = replace(entries[name], partitions=placement)
        manager.save_metadata(manager.metadata.with_topics(entries))
    env.crash_at = None
    again, report = opened(env.crash())
    assert report.offline_directories == report.offline == {}
    assert len(offsets_in(again.table.logs[TopicPartition("kept", 0)])) == 4
    for name, partitions in topics.items():
        served = {partition for partition in again.table.logs if partition.topic == name}
        topic_entry = again.metadata.topics.get(name)
        is_created = topic_entry is not None and topic_entry.partitions
        assert served == (set(partitions) if is_created else set())


def test_a_start_removes_the_folder_of_a_creation_that_another_directory_took_over(
    env: MemoryEnv,
) -> None:
    """Otherwise a start after the topic's deletion would take it for an unknown topic."""
    manager, _ = opened(env)
    (log,) = make_topic(manager, "kept", 1)
    other = TWO if log.directory.startswith(ONE) else ONE
    env.mkdir(f"{other}/kept-0")
    manager.close()
    again, report = opened(env)
    assert report.removed == (f"{other}/kept-0",)
    assert again.table.logs[log.partition].directory == log.directory
