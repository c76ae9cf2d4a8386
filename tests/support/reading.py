"""Everything in a partition as a real client sees it, to be compared record by record."""

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

READ_SECONDS = 60


class SeenRecord(NamedTuple):
    """One record as a consumer got it."""

    offset: int
    timestamp: tuple[int, int]  # type (create time, log append time), milliseconds
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


View = dict[tuple[str, int], list[SeenRecord]]
NO_SECURITY: Mapping[str, str] = {}


def partitions_of(
    bootstrap: str, topics: Iterable[str], security: Mapping[str, str] = NO_SECURITY
) -> list[tuple[str, int]]:
    """(topic, partition) of the topics that exist; `security` are settings of librdkafka."""
    admin = AdminClient({"bootstrap.servers": bootstrap, **security})
    metadatas = admin.list_topics(timeout=30).topics
    return [(topic, index) for topic in topics for index in sorted(metadatas[topic].partitions)]


def read_partitions(
    bootstrap: str,
    partitions: Iterable[tuple[str, int]],
    isolation: str = "read_uncommitted",
    security: Mapping[str, str] = NO_SECURITY,
) -> View:
    """Every record from the log start to the end that `isolation` allows.

    Retention may move a log start between its lookup and the first fetch: then the partition is
    read again from its new start.
    """
    results: View = {where: [] for where in partitions}
    unfinished = set(results)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": isolation,
            "check.crcs": True,
            # A waiting fetch of one finished partition must not hold up another one for long.
            "fetch.wait.max.ms": 50,
            "auto.offset.reset": "error",
            **security,
        }
    )
    consumer.assign([TopicPartition(topic, index, OFFSET_BEGINNING) for topic, index in results])
    deadline = time.monotonic() + READ_SECONDS
    while unfinished:
        assert time.monotonic() < deadline, f"no end of {sorted(unfinished)}"
        for message in consumer.consume(5000, timeout=0.2):
            where = (message.topic(), message.partition())
            error = message.error()
            if error is None:
                results[where].append(
                    SeenRecord(
                        message.offset(),
                        message.timestamp(),
                        message.key(),
                        message.value(),
                        tuple(message.headers() or ()),
                    )
                )
            elif error.code() == KafkaError._PARTITION_EOF:
                unfinished.discard(where)
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                results[where].clear()
                again = TopicPartition(*where, OFFSET_BEGINNING)
                consumer.incremental_unassign([again])
                consumer.incremental_assign([again])
            else:
                assert not error.fatal(), error
                assert error.retriable() or error.code() in TRANSPORT_ERRORS, f"{where}: {error}"
    consumer.close()
    return results


TRANSPORT_ERRORS = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)


def read_topics(
    bootstrap: str,
    topics: Iterable[str],
    isolation: str = "read_uncommitted",
    security: Mapping[str, str] = NO_SECURITY,
) -> View:
    """`read_partitions` of all partitions of the topics."""
    partitions = partitions_of(bootstrap, topics, security)
    return read_partitions(bootstrap, partitions, isolation, security)


def assert_same_view(value: View, expected: View) -> None:
    """Compare record by record; the first difference is named."""
    assert value.keys() == expected.keys()
    for where, records in expected.items():
        for number, (record, other) in enumerate(zip(value[where], records, strict=False)):
            assert record == other, f"{where}: record {number} is {record}, expected {other}"
        assert len(value[where]) == len(records), f"{where}: {len(value[where])} of {len(records)}"
