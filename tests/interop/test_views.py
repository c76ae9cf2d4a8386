"""Views and Apache Kafka: what it thinks of our folder in its, and views of what it wrote."""

from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from admin.client import ApiClient, partition_path
from admin.http.views import ROOT
from tests.support.draws import only_in_ci
from tests.support.peers.kafka import running_kafka, start_kafka
from tests.support.peers.killed_kafka import ADOPTER_SETTINGS, EVENTS, TRANSFERS, KilledKafka
from tests.support.reading import SeenRecord, read_topics
from tests.support.varve import VarveBroker, running_varve
from tests.support.waiting import wait_until

SECONDS = 120


def compact(broker: VarveBroker, topic: str, partition: int) -> int:
    """Compact a view; its horizon."""
    api = ApiClient(f"http://127.0.0.1:{broker.http_port}").below(ROOT)
    path = partition_path(topic, partition)
    api.post(f"{path}/compact")

    def ended() -> bool:
        row = api.get(path)
        assert row["state"] in ("waiting", "running", "done"), row
        return bool(row["state"] == "done")

    wait_until(ended, "the view is compacted", SECONDS)
    return int(api.get(path)["horizon"])


def switch_on(broker: VarveBroker, topic: str, **keys: str) -> None:
    changes = {"varve.view": "compacted", "varve.view.min.bytes": "-1", **keys}
    resource = ConfigResource(
        ResourceType.TOPIC,
        topic,
        incremental_configs=[
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            for key, value in changes.items()
        ],
    )
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(SECONDS)


@only_in_ci("tests/broker/views has the folder; Kafka starts twice")
def test_kafka_leaves_a_view_in_its_folder_alone_and_takes_it_along(
    real_kafka: None, tmp_path: Path
) -> None:
    broker = start_kafka(tmp_path / "kafka")
    try:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic("orders", 1, 1)])["orders"].result(SECONDS)
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        producer.produce("orders", b"1", b"a")
        assert producer.flush(SECONDS) == 0
    finally:
        broker.stop()
    folder = broker.data / "orders-0" / "varve.view"
    (folder / "run").mkdir(parents=True)
    (folder / "manifest").write_bytes(b"ours")
    (folder / "run" / f"{0:020d}.log").write_bytes(b"")
    with running_kafka(tmp_path / "kafka") as again:
        (records,) = read_topics(again.bootstrap, ["orders"]).values()
        assert [record.value for record in records] == [b"1"]
        assert (folder / "manifest").read_bytes() == b"ours"
        admin = AdminClient({"bootstrap.servers": again.bootstrap})
        admin.delete_topics(["orders"])["orders"].result(SECONDS)
        wait_until(lambda: not folder.exists(), "the folder is renamed with its topic", SECONDS)


def latest(records: list[SeenRecord], horizon: int) -> list[Any]:
    """What a view with this horizon shows of a log, rule by rule."""
    last = {r.key: r.offset for r in records if r.key is not None and r.offset < horizon}
    return [
        record
        for record in records
        if record.offset >= horizon
        or record.key is None
        or (record.offset == last[record.key] and record.value is not None)
    ]


def test_a_view_of_what_kafka_wrote_holds_the_latest_committed_records(
    killed_kafka: KilledKafka, tmp_path: Path
) -> None:
    directory = killed_kafka.copy_to(tmp_path / "copy")
    with running_varve(directory, ADOPTER_SETTINGS) as broker:
        for topic in (TRANSFERS, EVENTS):
            switch_on(broker, topic, **{"cleanup.policy": "delete", "retention.ms": "-1"})
            committed = read_topics(broker.bootstrap, [topic], "read_committed")
            everything = read_topics(broker.bootstrap, [topic])
            horizons = {partition: compact(broker, topic, partition) for _, partition in committed}
            assert any(horizons.values())
            view = f"{topic}.compacted"
            seen = read_topics(broker.bootstrap, [view], "read_committed")
            for (_, partition), records in committed.items():
                expected = latest(records, horizons[partition])
                assert seen[view, partition] == expected, (topic, partition)
            # Below the horizon nothing is undecided; above it everything is shown who asks for it.
            seen = read_topics(broker.bootstrap, [view])
            for (_, partition), records in everything.items():
                horizon = horizons[partition]
                below = [r for r in committed[topic, partition] if r.offset < horizon]
                above = [r for r in records if r.offset >= horizon]
                expected = latest(below + above, horizon)
                assert seen[view, partition] == expected, (topic, partition)
