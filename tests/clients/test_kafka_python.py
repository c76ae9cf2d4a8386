"""kafka-python (newest request versions, idempotent by default) against the running daemon."""

import time

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic

from tests.support.varve import VarveBroker

CODECS = [None, "gzip", "snappy", "lz4", "zstd"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def produce(
    broker: VarveBroker, topic: str, records: list[tuple[bytes, bytes | None]], **options: object
) -> None:
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap, **options)
    futures = [producer.send(topic, value, key) for key, value in records]
    producer.flush(60)
    for future in futures:
        future.get(30)
    producer.close()


def read(broker: VarveBroker, topic: str, count: int) -> list[tuple[int, bytes, bytes]]:
    consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap, auto_offset_reset="earliest")
    consumer.assign([TopicPartition(topic, 0)])
    consumer.seek_to_beginning()
    results: list[tuple[int, bytes, bytes]] = []
    deadline = time.monotonic() + 60
    while len(results) < count:
        assert time.monotonic() < deadline, f"{len(results)} of {count}"
        for messages in consumer.poll(500).values():
            results += [(m.offset, m.key, m.value) for m in messages]
    consumer.close()
    return results


@pytest.mark.parametrize("codec", CODECS)
def test_records_of_every_codec_come_back_as_they_were(
    broker: VarveBroker, topic: str, codec: str | None
) -> None:
    records = [(b"key-%d" % n, b"value-%d" % n * 10) for n in range(500)]
    produce(broker, topic, records, compression_type=codec)
    assert [(key, value) for _, key, value in read(broker, topic, 500)] == records


def test_a_group_commits_and_goes_on(broker: VarveBroker, topic: str) -> None:
    produce(broker, topic, [(b"k", b"%d" % n) for n in range(50)])

    def consume(count: int) -> list[bytes]:
        consumer = KafkaConsumer(
            topic,
            bootstrap_servers=broker.bootstrap,
            group_id=f"group-{topic}",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        results: list[bytes] = []
        deadline = time.monotonic() + 60
        while len(results) < count:
            assert time.monotonic() < deadline, f"{len(results)} of {count}"
            for messages in consumer.poll(500).values():
                results += [m.value for m in messages]
        consumer.commit()
        consumer.close()
        return results

    assert consume(50) == [b"%d" % n for n in range(50)]
    produce(broker, topic, [(b"k", b"%d" % n) for n in range(50, 60)])
    assert consume(10) == [b"%d" % n for n in range(50, 60)]


def test_a_topic_is_created_and_deleted(broker: VarveBroker, topic: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    admin.create_topics([NewTopic(topic, 2, 1, topic_configs={"cleanup.policy": "compact"})])
    assert topic in admin.list_topics()
    admin.delete_topics([topic])
    assert topic not in admin.list_topics()
    admin.close()


def test_a_tombstone_is_read_as_a_null_value(broker: VarveBroker, topic: str) -> None:
    produce(broker, topic, [(b"k", b"v"), (b"k", None)])
    assert [value for _, _, value in read(broker, topic, 2)] == [b"v", None]
