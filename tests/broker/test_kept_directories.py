"""The data directory that each release left is opened by the present version."""

import json
import tarfile
from pathlib import Path

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.support.processes.kept_directory import COMMITTED, KEPT, KEYS, RECORDS, SETTINGS
from tests.support.varve import VarveBroker, running_varve

RELEASES = sorted(path.name for path in KEPT.glob("*.tar.xz"))


def values_of(broker: VarveBroker, topic: str) -> dict[bytes, bytes]:
    """The last value of each key that a consumer of committed records reads."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "test",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    values: dict[bytes, bytes] = {}
    while (message := consumer.poll(30)) is not None and message.error() is None:
        values[message.key()] = message.value()
    consumer.close()
    return values


def test_there_is_a_directory() -> None:
    assert RELEASES


@pytest.mark.parametrize("release", RELEASES)
def test_the_directory_of_a_release_is_served_whole(release: str, tmp_path: Path) -> None:
    with tarfile.open(KEPT / release) as archive:
        archive.extractall(tmp_path, filter="data")
    expected = {b"%d" % key: b"%d" % (RECORDS - KEYS + key) for key in range(KEYS)}
    with running_varve(tmp_path, SETTINGS) as broker:
        assert json.loads(broker.get("/api/v1/overview"))["attention"] == []
        for topic in ("customers", "prices", "prices.compacted"):
            assert values_of(broker, topic) == expected, topic
        (view,) = json.loads(broker.get("/api/v1/view"))["views"]
        assert (view["ledger_records"], view["is_usable"]) == (KEYS, True)
        cleaner = json.loads(broker.get("/api/v1/cleaner/partitions/customers/0"))
        assert cleaner["cleanup_policy"] == ["compact"]
        assert cleaner["last_job"]["outcome"] == "finished"
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        asked = [ConsumerGroupTopicPartitions("readers", [TopicPartition("customers", 0)])]
        (future,) = admin.list_consumer_group_offsets(asked).values()
        assert future.result(30).topic_partitions[0].offset == COMMITTED
        assert json.loads(broker.get("/api/v1/users"))["users"][0]["user"] == "ada"
