"""Folders that the metadata does not know: taken over, or left as they are."""

import errno
from itertools import count

from storage.directory.cluster_metadata import TopicEntry
from storage.env import write_file
from storage.format import filenames
from storage.format.batch import Record
from storage.format.checkpoints import (
    decode_partition_metadata,
)
from storage.format.filenames import LOG, file_name
from storage.model import TopicPartition
from tests.support.storage.log_managers import (
    ONE,
    ORDERS,
    kafka_folder,
    make_topic,
    opened,
)
from tests.support.storage.logs import NOW_MS, SMALL, TOPIC_ID, append, offsets_in, read_records
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.old_messages import old_messages


def test_folders_nobody_knows_are_taken_over(env: MemoryEnv) -> None:
    kafka_folder(env, "unknown-0", TOPIC_ID)
    kafka_folder(env, "unknown-2", TOPIC_ID)
    manager, report = opened(env, ONE)
    assert [str(partition) for partition in report.taken_over] == ["unknown-0", "unknown-2"]
    entry = manager.metadata.topics["unknown"]
    assert (entry.topic_id, entry.created_by) == (TOPIC_ID, "adopted")
    assert sorted(entry.partitions) == [0, 1, 2]
    assert [item.partition for item in manager.table.offline] == [1]  # it may have been lost
    log = manager.table.logs[TopicPartition("unknown", 0)]
    assert offsets_in(log) == [0, 1, 2]
    assert log.retention.expire(env.wall_ms() + 10**12) == []
    manager.close()
    again, report = opened(env, ONE)
    assert report.taken_over == ()
    assert len(again.table.logs) == 2


def test_a_folder_taken_over_without_an_id_gets_one(env: MemoryEnv) -> None:
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
    assert manager.table.logs == {}
    assert report.taken_over == ()
    manager.purge_deleted(0)
    names = env.listdir(ONE)
    assert set(remaining) <= set(names)
    assert not [name for name in names if name.endswith("-delete")]


def test_what_a_cut_off_creation_left_is_removed(env: MemoryEnv) -> None:
    manager, _ = opened(env, ONE)
    manager.save_metadata(manager.metadata.with_topic("orders", TopicEntry(TOPIC_ID, {})))
    manager.create(ORDERS[0], TOPIC_ID, SMALL)
    again, report = opened(env.kill(), ONE)
    assert again.table.logs == {}
    assert report.removed == (f"{ONE}/orders-0",)
    assert report.taken_over == ()


def test_a_start_with_room_converts_old_messages_that_one_without_room_could_not(
    env: MemoryEnv,
) -> None:
    kafka_folder(env, "unknown-0", TOPIC_ID)
    records = [Record(offset, NOW_MS, b"k", b"v") for offset in range(6)]
    for first in (0, 2, 4):
        path = f"{ONE}/unknown-0/{file_name(first, LOG)}"
        write_file(env, path, old_messages(records[first : first + 2], 1))
    written = count(1)
    fault = env.fail_on(
        lambda op, path: op == "pwrite" and path.endswith(".cleaned") and next(written) > 1,
        errno.ENOSPC,
    )
    manager, _ = opened(env, ONE)
    assert TopicPartition("unknown", 0) in manager.table.offline
    manager.close()
    fault.remove()
    again, _ = opened(env, ONE)
    log = again.table.logs[TopicPartition("unknown", 0)]
    assert read_records(log) == records
    assert not log.damage.ranges
