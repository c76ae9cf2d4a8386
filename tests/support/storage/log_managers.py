"""Log managers on two disks of an in-memory file system, and topics on them."""

from dataclasses import replace

from config.topics.keys import TopicConfig
from storage.directory.cluster_metadata import TopicEntry
from storage.env import write_file_atomically
from storage.format import filenames
from storage.format.checkpoints import (
    encode_partition_metadata,
)
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from storage.manager.open_report import OpenReport
from storage.model import TopicPartition
from tests.support.storage.logs import SMALL, TOPIC_ID, fill, open_log
from tests.support.storage.memory_env import MemoryEnv

ONE, TWO = "/disk1", "/disk2"
KAFKA_PROPERTIES = b"version=1\ncluster.id=a-cluster-of-kafka\nnode.id=7\n"
ORDERS = [TopicPartition("orders", index) for index in range(4)]


def config_of(name: str) -> TopicConfig:
    return replace(SMALL, policy_known=name != "unknown")


def opened(env: MemoryEnv, *paths: str) -> tuple[LogManager, OpenReport]:
    manager = LogManager(env, paths or (ONE, TWO))
    report = manager.open(config_of)
    return manager, report


def make_topic(
    manager: LogManager,
    name: str = "orders",
    partitions: int = 4,
    topic_id: bytes = TOPIC_ID,
    config: TopicConfig = SMALL,
) -> list[Log]:
    """As the broker does: intent, folders, metadata."""
    entry = TopicEntry(topic_id, {})
    manager.save_metadata(manager.metadata.with_topic(name, entry))
    placement, logs = {}, []
    for index in range(partitions):
        partition = TopicPartition(name, index)
        logs.append(manager.create(partition, topic_id, config))
        placement[index] = manager.table.directory_id_of(partition)
    entry = replace(entry, partitions=placement)
    manager.save_metadata(manager.metadata.with_topic(name, entry))
    return logs


def drop_topic(manager: LogManager, name: str = "orders") -> None:
    entry = manager.metadata.topics[name]
    manager.save_metadata(manager.metadata.without_topics([name]))
    failures = manager.delete_all(TopicPartition(name, index) for index in entry.partitions)
    if failures:
        raise failures[0]


def two_disks(env: MemoryEnv) -> LogManager:
    """orders-0 and orders-2 on the first disk, 1 and 3 on the second, five records in each."""
    manager, _ = opened(env)
    for log in make_topic(manager):
        fill(log, 5)
    assert manager.table.logs[ORDERS[0]].directory == f"{ONE}/orders-0"
    assert manager.table.logs[ORDERS[1]].directory == f"{TWO}/orders-1"
    return manager


def kafka_folder(
    env: MemoryEnv, name: str, topic_id: bytes | None, records: int = 3, *, disk: str = ONE
) -> None:
    log = open_log(env, folder=f"{disk}/{name}", was_clean=True)
    fill(log, records)
    log.close()
    if not env.exists(f"{disk}/{filenames.META_PROPERTIES}"):
        write_file_atomically(env, f"{disk}/{filenames.META_PROPERTIES}", KAFKA_PROPERTIES)
    if topic_id is not None:
        path = f"{disk}/{name}/{filenames.PARTITION_METADATA}"
        write_file_atomically(env, path, encode_partition_metadata(topic_id))
