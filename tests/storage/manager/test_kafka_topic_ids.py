"""Which topics Kafka has, and which of them a folder belongs to, as its metadata says."""

import errno

import pytest

from storage.directory.kafka_metadata import FOLDER, PARTITION_RECORD_VERSION_MAX
from storage.env import write_file
from storage.format import filenames
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from tests.support.storage.kafka_metadata_log import batches, config, partition, snapshot, topic
from tests.support.storage.log_managers import ONE, TWO, drop_topic, kafka_folder, opened
from tests.support.storage.memory_env import MemoryEnv

OF_KAFKA = b'{"version":0,"brokerEpoch":243}'
OF_VARVE = b'{"version": 0, "brokerEpoch": -1}'
OLD, NEW, GONE = b"\1" * 16, b"\2" * 16, b"\3" * 16
SNAPSHOT_END = 9


def topic_of_kafka(name: str, topic_id: bytes, partitions: int) -> list[bytes]:
    return [topic(name, topic_id), *(partition(index, topic_id) for index in range(partitions))]


def put_metadata(
    env: MemoryEnv,
    *values: bytes,
    marker: bytes | None = OF_KAFKA,
    end: int = SNAPSHOT_END + 1,
    disk: str = TWO,
) -> None:
    """Write a snapshot, and a log of one more record, as of a Kafka that has stopped.

    `end`: at which Kafka has written its last producer snapshot.
    """
    folder = f"{disk}/{FOLDER}"
    env.mkdir(folder)
    write_file(env, f"{folder}/{SNAPSHOT_END:020}-{1:010}.checkpoint", snapshot(*values))
    more = batches(SNAPSHOT_END, config("re", "segment.ms", "8"))
    write_file(env, f"{folder}/{SNAPSHOT_END:020}.log", more)
    write_file(env, f"{folder}/{end:020}.snapshot", b"")
    if marker is not None:
        write_file(env, f"{disk}/{filenames.CLEAN_SHUTDOWN}", marker)


def put_stale_folders(env: MemoryEnv) -> None:
    """`re` was deleted and created again, and `gone` deleted, while the first disk was offline."""
    kafka_folder(env, "gone-0", GONE, 9)
    kafka_folder(env, "re-0", OLD, 9)
    for index in range(3):
        kafka_folder(env, f"re-{index}", NEW, 2, disk=TWO)


def ends(manager: LogManager) -> dict[str, int]:
    return {str(name): log.log_end_offset for name, log in sorted(manager.table.logs.items())}


def strays(env: MemoryEnv) -> list[str]:
    return sorted(
        f"{disk}/{name.partition('.')[0]}"
        for disk in (ONE, TWO)
        for name in env.listdir(disk)
        if name.endswith("-stray")
    )


def test_folders_whose_id_kafkas_metadata_does_not_have_are_stray(env: MemoryEnv) -> None:
    """Its snapshot does not name what was deleted: only what there is."""
    put_stale_folders(env)
    put_metadata(env, *topic_of_kafka("re", NEW, 3))
    for _ in range(2):
        manager, report = opened(env)
        assert ends(manager) == {"re-0": 2, "re-1": 2, "re-2": 2}
        assert manager.metadata.topics["re"].topic_id == NEW
        assert (report.refused, report.offline) == ((), {})
        assert strays(env) == [f"{ONE}/gone-0", f"{ONE}/re-0"]
        manager.close()


@pytest.mark.parametrize(("marker", "end"), [(None, 10), (OF_VARVE, 10), (b"", 10), (OF_KAFKA, 11)])
def test_no_folder_is_stray_by_metadata_that_may_lack_its_topic(
    env: MemoryEnv, marker: bytes | None, end: int
) -> None:
    """Kafka was killed, Varve served the directory since, or the end of the log is missing.

    The id that it has for a name counts also then, if a folder has it.
    """
    put_stale_folders(env)
    put_metadata(env, *topic_of_kafka("re", NEW, 3), marker=marker, end=end)
    manager, report = opened(env)
    assert ends(manager) == {"gone-0": 9, "re-0": 2, "re-1": 2, "re-2": 2}
    assert report.refused == ((f"{ONE}/re-0", "it belongs to another topic of that name"),)
    assert strays(env) == []


def test_no_folder_is_stray_while_another_copy_of_the_metadata_is_unreadable(
    env: MemoryEnv,
) -> None:
    put_stale_folders(env)
    put_metadata(env, *topic_of_kafka("re", NEW, 3))
    env.mkdir(f"{ONE}/{FOLDER}")
    write_file(env, f"{ONE}/{FOLDER}/{5:020}.log", batches(5, topic("gone", GONE)))
    manager, _ = opened(env)
    assert "gone-0" in ends(manager)
    assert strays(env) == []


@pytest.mark.parametrize("newer", [ONE, TWO])
def test_of_two_copies_of_the_metadata_the_one_that_ends_last_counts(
    env: MemoryEnv, newer: str
) -> None:
    put_stale_folders(env)
    older = ONE if newer == TWO else TWO
    put_metadata(env, *topic_of_kafka("re", NEW, 3), disk=newer)
    env.mkdir(f"{older}/{FOLDER}")
    old = batches(0, *topic_of_kafka("re", OLD, 1), *topic_of_kafka("gone", GONE, 1))
    write_file(env, f"{older}/{FOLDER}/{0:020}.log", old)
    manager, _ = opened(env)
    assert ends(manager) == {"re-0": 2, "re-1": 2, "re-2": 2}
    assert strays(env) == [f"{ONE}/gone-0", f"{ONE}/re-0"]


def test_an_unreadable_folder_is_not_renamed(env: MemoryEnv) -> None:
    kafka_folder(env, "gone-0", None)
    env.mkdir(f"{ONE}/gone-0/{filenames.PARTITION_METADATA}")
    put_metadata(env, *topic_of_kafka("re", NEW, 3), disk=ONE)
    _, report = opened(env)
    assert [folder for folder, _ in report.refused] == [f"{ONE}/gone-0"]
    assert strays(env) == []


def test_a_folder_without_an_id_has_the_one_of_kafkas_metadata(env: MemoryEnv) -> None:
    """Kafka writes the file when the first record arrives: it may have been killed before that."""
    kafka_folder(env, "re-0", None, 0)
    put_metadata(env, *topic_of_kafka("re", NEW, 1), disk=ONE, marker=None)
    manager, _ = opened(env, ONE)
    entry = manager.metadata.topics["re"]
    assert (entry.topic_id, entry.dynamic) == (NEW, {"segment.ms": "8"})


def test_a_folder_without_an_id_has_that_of_the_other_folders(env: MemoryEnv) -> None:
    """Also without Kafka's metadata."""
    kafka_folder(env, "re-0", None)
    kafka_folder(env, "re-1", NEW)
    manager, report = opened(env, ONE)
    assert sorted(manager.table.logs) == [TopicPartition("re", 0), TopicPartition("re", 1)]
    assert manager.metadata.topics["re"].topic_id == NEW
    assert report.refused == ()


def test_a_topic_of_kafka_without_any_folder_is_offline_until_its_directory_is_named(
    env: MemoryEnv,
) -> None:
    """Otherwise clients could create it again, and the folders would belong to another topic."""
    kafka_folder(env, "re-0", NEW)
    kafka_folder(env, "far-0", GONE, 7, disk=TWO)
    kafka_folder(env, "far-1", GONE, 8, disk=TWO)
    put_metadata(
        env, *topic_of_kafka("re", NEW, 1), *topic_of_kafka("far", GONE, 2), disk=ONE, marker=None
    )
    for _ in range(2):
        manager, report = opened(env, ONE)
        assert {str(name): why for name, why in report.offline.items()} == {
            "far-0": f"its folder is missing in {ONE}",
            "far-1": f"its folder is missing in {ONE}",
        }
        manager.close()
    manager, report = opened(env)
    assert ends(manager) == {"far-0": 7, "far-1": 8, "re-0": 3}
    assert report.refused == ()


def test_a_partition_taken_over_that_two_directories_have_is_offline_until_one_is_left(
    env: MemoryEnv,
) -> None:
    """Kafka does not start then: one of the folders is an older copy, and none says which."""
    kafka_folder(env, "re-0", NEW, 2)
    kafka_folder(env, "re-0", NEW, 9, disk=TWO)
    kafka_folder(env, "re-1", NEW, 5)
    reason = f"{ONE} and {TWO} each have a folder of it with records"
    for _ in range(2):
        manager, report = opened(env)
        assert ends(manager) == {"re-1": 5}
        assert [why.partition(":")[0] for why in report.offline.values()] == [reason]
        assert len(report.refused) == 2
        manager.close()
    env.rename(f"{ONE}/re-0", f"{ONE}/older")
    for _ in range(2):
        manager, report = opened(env)
        assert ends(manager) == {"re-0": 9, "re-1": 5}
        assert (report.offline, report.refused) == ({}, ())
        manager.close()


def test_an_empty_folder_gives_way_to_one_with_records(env: MemoryEnv) -> None:
    kafka_folder(env, "re-0", NEW, 0)
    kafka_folder(env, "re-0", NEW, 9, disk=TWO)
    manager, report = opened(env)
    assert ends(manager) == {"re-0": 9}
    assert report.removed == (f"{ONE}/re-0",)


def test_a_log_whose_records_have_all_expired_is_not_empty(env: MemoryEnv) -> None:
    kafka_folder(env, "re-0", NEW, 2)
    kafka_folder(env, "re-0", NEW, 0, disk=TWO)
    log = f"{TWO}/re-0/{filenames.file_name(0, filenames.LOG)}"
    env.rename(log, f"{TWO}/re-0/{filenames.file_name(90, filenames.LOG)}")
    manager, report = opened(env)
    assert ends(manager) == {}
    assert len(report.offline) == 1


def test_a_deleted_topic_that_two_directories_had_is_removed_from_both(env: MemoryEnv) -> None:
    kafka_folder(env, "re-0", NEW, 2)
    kafka_folder(env, "re-0", NEW, 9, disk=TWO)
    manager, _ = opened(env)
    drop_topic(manager, "re")
    manager.close()
    manager, report = opened(env)
    assert sorted(report.removed) == [f"{ONE}/re-0", f"{TWO}/re-0"]
    manager.close()
    manager, report = opened(env)
    assert (report.removed, manager.metadata.topics) == ((), {})
    manager.close()
    assert manager.metadata.deleted_topic_ids == {}


def test_a_topic_that_was_deleted_after_the_first_start_does_not_come_back_offline(
    env: MemoryEnv,
) -> None:
    kafka_folder(env, "re-0", NEW)
    put_metadata(env, *topic_of_kafka("re", NEW, 1), *topic_of_kafka("far", GONE, 2), disk=ONE)
    manager, _ = opened(env, ONE)
    drop_topic(manager, "far")
    manager.close()
    kafka_folder(env, "new-0", OLD)  # the metadata of Kafka is read again
    manager, report = opened(env, ONE)
    assert sorted(manager.metadata.topics) == ["new", "re"]
    assert report.offline == {}


def test_no_folder_is_stray_if_a_later_kafka_has_written_the_partitions(env: MemoryEnv) -> None:
    """In a version that is unknown: the image has none of them."""
    for index in range(2):
        kafka_folder(env, f"re-{index}", NEW)
    later = [bytearray(partition(index, NEW)) for index in range(2)]
    for record in later:
        record[2] = PARTITION_RECORD_VERSION_MAX + 1
    env.mkdir(TWO)
    put_metadata(env, topic("re", NEW), *map(bytes, later), disk=ONE)
    manager, _ = opened(env, ONE)
    assert ends(manager).keys() == {"re-0", "re-1"}
    assert strays(env) == []


def test_a_stray_folder_is_served_under_another_name_without_its_topic_id(env: MemoryEnv) -> None:
    """As the guide says."""
    put_stale_folders(env)
    put_metadata(env, *topic_of_kafka("re", NEW, 3))
    opened(env, ONE, TWO)[0].close()
    (stray,) = [name for name in env.listdir(ONE) if name.startswith("gone-0.")]
    env.rename(f"{ONE}/{stray}", f"{ONE}/wanted-0")
    env.unlink(f"{ONE}/wanted-0/{filenames.PARTITION_METADATA}")
    manager, _ = opened(env, ONE, TWO)
    assert ends(manager)["wanted-0"] == 9


def test_a_partition_that_two_directories_claim_waits_for_both(env: MemoryEnv) -> None:
    """One that has failed again may have the newer folder."""
    kafka_folder(env, "re-0", NEW, 5)
    kafka_folder(env, "re-0", NEW, 3, disk=TWO)
    manager, _ = opened(env)
    assert ends(manager) == {}
    manager.close()
    fault = env.fail_on(lambda _op, path: path.startswith(ONE), errno.EIO)
    manager, _ = opened(env)
    assert ends(manager) == {}
    manager.close()
    fault.remove()
    env.rename(f"{TWO}/re-0", f"{TWO}/old")
    manager, _ = opened(env)
    assert ends(manager) == {"re-0": 5}
