"""confluent-kafka (librdkafka) against the running daemon."""

import time
from functools import cache

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from tests.support.reading import read_topics
from tests.support.varve import VarveBroker

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


def admin_of(broker: VarveBroker) -> AdminClient:
    """Kept, because its answers are lost when it goes."""
    return _admin(broker.bootstrap)


@cache
def _admin(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap})


def create(broker: VarveBroker, topic: str, partitions: int = 1, **config: str) -> None:
    dotted = {key.replace("_", "."): value for key, value in config.items()}
    new = NewTopic(topic, num_partitions=partitions, replication_factor=1, config=dotted)
    for future in admin_of(broker).create_topics([new]).values():
        future.result(30)


def produce(
    broker: VarveBroker,
    topic: str,
    records: list[tuple[str | None, bytes | None]],
    **options: object,
) -> None:
    failures: list[str] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5, **options})
    for key, value in records:
        producer.produce(
            topic, value, key, on_delivery=lambda e, _: failures.append(str(e)) if e else None
        )
    assert producer.flush(60) == 0
    assert not failures, failures[:3]


def read_all(broker: VarveBroker, topic: str) -> list[tuple[int, bytes | None, bytes | None]]:
    """Every record of the topic's one partition: offset, key and value."""
    (records,) = read_topics(broker.bootstrap, [topic]).values()
    return [(record.offset, record.key, record.value) for record in records]


@pytest.mark.parametrize("codec", CODECS)
def test_records_of_every_codec_come_back_as_they_were(
    broker: VarveBroker, topic: str, codec: str
) -> None:
    create(broker, topic)
    records = [(f"key-{n}", b"value-%d-" % n * 10) for n in range(2000)]
    produce(broker, topic, records, **{"compression.type": codec})
    results = read_all(broker, topic)
    assert [(key.decode(), value) for _, key, value in results] == records
    assert [offset for offset, _, _ in results] == list(range(2000))


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("acks", ["1", "all"])
def test_acknowledged_records_are_readable_at_once(
    broker: VarveBroker, topic: str, acks: str, idempotent: bool
) -> None:
    if idempotent and acks != "all":
        acks = "all"
    create(broker, topic)
    options = {"acks": acks, "enable.idempotence": idempotent}
    produce(broker, topic, [("k", b"%d" % n) for n in range(100)], **options)
    assert [value for _, _, value in read_all(broker, topic)] == [b"%d" % n for n in range(100)]


def test_acks_0_gets_no_answer_and_the_records_arrive(broker: VarveBroker, topic: str) -> None:
    create(broker, topic)
    produce(broker, topic, [("k", b"%d" % n) for n in range(100)], acks="0")
    deadline = time.monotonic() + 30
    while len(read_all(broker, topic)) < 100:
        assert time.monotonic() < deadline


def test_a_group_reads_every_partition_once_and_goes_on_from_its_commit(
    broker: VarveBroker, topic: str
) -> None:
    create(broker, topic, partitions=3)
    produce(broker, topic, [(f"key-{n}", b"%d" % n) for n in range(300)])
    options = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": f"group-{topic}",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }

    def consume(count: int) -> set[bytes]:
        consumer = Consumer(options)
        consumer.subscribe([topic])
        seen: list[bytes] = []
        deadline = time.monotonic() + 60
        while len(seen) < count:
            assert time.monotonic() < deadline, f"{len(seen)} of {count}"
            for message in consumer.consume(500, timeout=0.5):
                assert message.error() is None, message.error()
                seen.append(message.value())
        consumer.commit(asynchronous=False)
        consumer.close()
        assert len(seen) == len(set(seen))
        return set(seen)

    assert consume(300) == {b"%d" % n for n in range(300)}
    produce(broker, topic, [(f"key-{n}", b"%d" % n) for n in range(300, 350)])
    assert consume(50) == {b"%d" % n for n in range(300, 350)}
    groups = admin_of(broker).list_consumer_groups().result(30)
    assert f"group-{topic}" in {group.group_id for group in groups.valid}
    described = admin_of(broker).describe_consumer_groups([f"group-{topic}"])
    assert described[f"group-{topic}"].result(30).members == []
    admin_of(broker).delete_consumer_groups([f"group-{topic}"])[f"group-{topic}"].result(30)


def test_two_members_share_the_partitions(broker: VarveBroker, topic: str) -> None:
    create(broker, topic, partitions=4)
    options = {"bootstrap.servers": broker.bootstrap, "group.id": f"group-{topic}"}
    members = [Consumer(options), Consumer(options)]
    for member in members:
        member.subscribe([topic])
    deadline = time.monotonic() + 60
    while sorted(len(member.assignment()) for member in members) != [2, 2]:
        assert time.monotonic() < deadline, [member.assignment() for member in members]
        for member in members:
            member.poll(0.1)
    members[0].close()
    while len(members[1].assignment()) != 4:
        assert time.monotonic() < deadline
        members[1].poll(0.1)
    members[1].close()


def test_a_topic_is_created_described_grown_altered_and_deleted(
    broker: VarveBroker, topic: str
) -> None:
    admin = admin_of(broker)
    create(broker, topic, partitions=2, cleanup_policy="compact")
    assert len(admin.list_topics(topic, timeout=10).topics[topic].partitions) == 2
    resource = ConfigResource(ResourceType.TOPIC, topic)
    entries = admin.describe_configs([resource])[resource].result(30)
    assert entries["cleanup.policy"].value == "compact"
    assert not entries["cleanup.policy"].is_default
    change = ConfigEntry("retention.ms", "12345", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change])
    admin.incremental_alter_configs([resource])[resource].result(30)
    entries = admin.describe_configs([resource])[resource].result(30)
    assert entries["retention.ms"].value == "12345"
    admin.create_partitions([NewPartitions(topic, 5)])[topic].result(30)
    assert len(admin.list_topics(topic, timeout=10).topics[topic].partitions) == 5
    admin.delete_topics([topic])[topic].result(30)
    assert topic not in admin.list_topics(timeout=10).topics


def test_a_second_creation_and_an_unknown_key_are_refused_by_name(
    broker: VarveBroker, topic: str
) -> None:
    create(broker, topic)
    with pytest.raises(KafkaException) as caught:
        create(broker, topic)
    assert caught.value.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
    with pytest.raises(KafkaException) as caught:
        create(broker, f"{topic}-x", no_such_key="1")
    assert caught.value.args[0].code() == KafkaError.INVALID_CONFIG
    with pytest.raises(KafkaException) as caught:
        create(broker, f"{topic}.compacted")
    assert caught.value.args[0].code() == KafkaError.TOPIC_EXCEPTION


def test_offsets_are_found_by_time_and_records_deleted_up_to_one(
    broker: VarveBroker, topic: str
) -> None:
    create(broker, topic)
    now = int(time.time() * 1000)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for n in range(10):
        producer.produce(topic, b"%d" % n, timestamp=now - 10_000 + n * 1000)
    assert producer.flush(30) == 0
    admin = admin_of(broker)
    partition = TopicPartition(topic, 0)

    def offset_of(spec: OffsetSpec) -> int:
        return int(admin.list_offsets({partition: spec})[partition].result(30).offset)

    assert offset_of(OffsetSpec.earliest()) == 0
    assert offset_of(OffsetSpec.latest()) == 10
    assert offset_of(OffsetSpec.for_timestamp(now - 7500)) == 3
    assert offset_of(OffsetSpec.max_timestamp()) == 9
    done = admin.delete_records([TopicPartition(topic, 0, 4)])[TopicPartition(topic, 0, 4)]
    assert done.result(30).low_watermark == 4
    assert offset_of(OffsetSpec.earliest()) == 4
    assert [offset for offset, _, _ in read_all(broker, topic)] == list(range(4, 10))


def test_a_null_key_on_a_compacted_topic_is_refused(broker: VarveBroker, topic: str) -> None:
    create(broker, topic, cleanup_policy="compact")
    errors: list[KafkaError] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce(topic, b"no key", on_delivery=lambda e, _: errors.append(e))
    producer.flush(30)
    assert errors[0].code() == KafkaError.INVALID_RECORD
    assert read_all(broker, topic) == []


@pytest.mark.parametrize("codec", CODECS)
def test_a_compacted_topic_shrinks_by_itself_and_keeps_the_last_value_of_every_key(
    broker: VarveBroker, topic: str, codec: str
) -> None:
    create(
        broker, topic, cleanup_policy="compact", segment_ms="500", segment_bytes="1048576",
        min_cleanable_dirty_ratio="0.01", max_compaction_lag_ms="100", delete_retention_ms="0",
    )  # fmt: skip
    last: dict[str, bytes | None] = {}
    records: list[tuple[str | None, bytes | None]] = []
    for n in range(20_000):
        key, value = f"key-{n % 200}", b"value-%d-" % n + b"x" * 50
        records.append((key, value))
        last[key] = value
    for n in range(0, 200, 4):
        records.append((f"key-{n}", None))
        last[f"key-{n}"] = None
    produce(broker, topic, records, **{"compression.type": codec})
    deadline = time.monotonic() + 60
    while True:
        results = read_all(broker, topic)
        if len(results) < 1000:
            break
        assert time.monotonic() < deadline, f"{len(results)} records are left"
    seen = {(key or b"").decode(): value for _, key, value in results}
    for key, value in last.items():
        assert seen.get(key) == value, key
    assert [offset for offset, _, _ in results] == sorted(offset for offset, _, _ in results)


def test_a_topic_is_created_by_its_first_use(broker: VarveBroker, topic: str) -> None:
    produce(broker, topic, [("k", b"v")])
    assert [value for _, _, value in read_all(broker, topic)] == [b"v"]
