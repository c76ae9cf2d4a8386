"""Transactional producers of real clients: commits, aborts, offsets and fencing."""

import time
import uuid

import pytest
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.varve import VarveBroker

TIMEOUT = 20


@pytest.fixture
def transactional_id() -> str:
    """An id that no other test uses."""
    return f"tx-{uuid.uuid4().hex[:12]}"


def producer_of(broker: VarveBroker, transactional_id: str, **settings: object) -> Producer:
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "transactional.id": transactional_id,
            "linger.ms": 0,
            **settings,
        }
    )
    producer.init_transactions(TIMEOUT)
    return producer


def create(broker: VarveBroker, topic: str, partitions: int = 3) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(TIMEOUT)


def consumer_of(broker: VarveBroker, isolation: str, group: str | None = None) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group or uuid.uuid4().hex,
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )


def values(broker: VarveBroker, topic: str, partitions: int, isolation: str) -> list[bytes]:
    """Every value that a consumer sees until the end of each partition."""
    consumer = consumer_of(broker, isolation)
    consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
    seen, ended, deadline = [], set(), time.monotonic() + TIMEOUT
    while len(ended) < partitions:
        assert time.monotonic() < deadline
        message = consumer.poll(1)
        if message is None:
            continue
        if message.error() is None:
            seen.append(message.value())
        else:
            assert message.error().code() == KafkaError._PARTITION_EOF
            ended.add(message.partition())
    consumer.close()
    return sorted(seen)


def test_a_consumer_of_committed_records_sees_exactly_the_committed_transactions(
    broker: VarveBroker, topic: str, transactional_id: str
) -> None:
    create(broker, topic)
    producer = producer_of(broker, transactional_id)
    committed = []
    for number in range(10):
        producer.begin_transaction()
        batch = [b"%d-%d" % (number, row) for row in range(30)]
        for row, value in enumerate(batch):
            producer.produce(topic, value, partition=row % 3)
        if number % 3:
            producer.commit_transaction(TIMEOUT)
            committed += batch
        else:
            producer.flush(TIMEOUT)
            producer.abort_transaction(TIMEOUT)
    assert values(broker, topic, 3, "read_committed") == sorted(committed)
    assert len(values(broker, topic, 3, "read_uncommitted")) == 300


def test_a_consumer_of_committed_records_waits_for_the_end_of_a_transaction(
    broker: VarveBroker, topic: str, transactional_id: str
) -> None:
    create(broker, topic, 1)
    producer = producer_of(broker, transactional_id)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(TIMEOUT)
    assert values(broker, topic, 1, "read_committed") == []
    assert values(broker, topic, 1, "read_uncommitted") == [b"open"]
    producer.commit_transaction(TIMEOUT)
    assert values(broker, topic, 1, "read_committed") == [b"open"]


def test_a_second_producer_of_an_id_fences_the_first_and_aborts_its_transaction(
    broker: VarveBroker, topic: str, transactional_id: str
) -> None:
    create(broker, topic, 1)
    first = producer_of(broker, transactional_id)
    first.begin_transaction()
    first.produce(topic, b"zombie", partition=0)
    first.flush(TIMEOUT)
    second = producer_of(broker, transactional_id)
    with pytest.raises(KafkaException) as raised:
        first.commit_transaction(TIMEOUT)
    assert raised.value.args[0].code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED)
    second.begin_transaction()
    second.produce(topic, b"second", partition=0)
    second.commit_transaction(TIMEOUT)
    assert values(broker, topic, 1, "read_committed") == [b"second"]


def test_a_fenced_producer_cannot_append(
    broker: VarveBroker, topic: str, transactional_id: str
) -> None:
    create(broker, topic, 1)
    first = producer_of(broker, transactional_id)
    first.begin_transaction()
    producer_of(broker, transactional_id)
    first.produce(topic, b"zombie", partition=0)
    with pytest.raises(KafkaException) as raised:
        first.flush(TIMEOUT)
    assert raised.value.args[0].code() == KafkaError._FENCED
    assert values(broker, topic, 1, "read_uncommitted") == []


@pytest.mark.parametrize("commit", [True, False])
def test_offsets_of_a_transaction_take_effect_when_it_commits_and_never_after_an_abort(
    broker: VarveBroker, topic: str, transactional_id: str, commit: bool
) -> None:
    create(broker, topic, 1)
    plain = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(5):
        plain.produce(topic, b"%d" % number, partition=0)
    plain.flush(TIMEOUT)
    group = f"g-{topic}"
    consumer = consumer_of(broker, "read_committed", group)
    consumer.subscribe([topic])
    seen = 0
    while seen < 5:
        message = consumer.poll(TIMEOUT)
        assert message is not None
        seen += message.error() is None
    producer = producer_of(broker, transactional_id)
    producer.begin_transaction()
    offsets = consumer.position([TopicPartition(topic, 0)])
    producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), TIMEOUT)
    if commit:
        producer.commit_transaction(TIMEOUT)
    else:
        producer.abort_transaction(TIMEOUT)
    committed = consumer.committed([TopicPartition(topic, 0)], TIMEOUT)
    assert committed[0].offset == (5 if commit else -1001)
    consumer.close()
