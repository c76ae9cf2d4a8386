"""Random topics for tables, and what they hold in plain Python: records in order, the last of each
key."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from admin.client import ApiClient
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    marker_record,
)
from tests.support.reading import read_topics
from tests.support.varve import VarveBroker

START_MS = 1_700_000_000_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
# The broker's own cleaner has nothing to do: no log is more dirty than wholly so.
CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "min.cleanable.dirty.ratio": "1.0",
    "retention.ms": "-1",
}


@dataclass(frozen=True)
class Row:
    """One committed record."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int


@dataclass
class Model:
    """Every committed record of a topic, by partition and offset."""

    rows: list[Row] = field(default_factory=list)

    def state(self, ends: dict[int, int] | None = None) -> dict[tuple[int, bytes], Row]:
        """The last record of each key, deletes left out; below `ends`."""
        last = {
            (row.partition, row.key): row
            for row in self.rows
            if row.key is not None and (ends is None or row.offset < ends[row.partition])
        }
        return {(number, key): row for (number, key), row in last.items() if row.value is not None}


def make_topic(broker: VarveBroker, topic: str, partitions: int = 2, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    settings = {**CONFIG, **{name.replace("_", "."): value for name, value in config.items()}}
    new = NewTopic(topic, num_partitions=partitions, replication_factor=1, config=settings)
    for future in admin.create_topics([new]).values():
        future.result(30)


def fill(
    broker: VarveBroker,
    topic: str,
    rng: random.Random,
    *,
    records: int,
    keys: int = 200,
    partitions: int = 2,
    rounds: int = 5,
    keyless: float = 0.0,
) -> None:
    """Random records in batches of all codecs; some are deletes, and a part `keyless` has no key:
    a compacted topic takes none of those."""
    failed: list[object] = []

    def delivered(error: object, _: object) -> None:
        if error is not None:
            failed.append(error)

    for number in range(rounds):
        settings = {
            "bootstrap.servers": broker.bootstrap,
            "compression.type": CODECS[number % len(CODECS)],
            "linger.ms": 5,
        }
        producer = Producer(settings)
        for _ in range(records // rounds):
            key = None if rng.random() < keyless else b"key-%d" % int(keys * rng.random() ** 2)
            value = None if key is not None and rng.random() < 0.2 else rng.randbytes(60)
            producer.produce(
                topic, key=key, value=value, partition=rng.randrange(partitions),
                timestamp=START_MS + rng.randrange(10**8),
                on_delivery=delivered,
            )  # fmt: skip
        assert producer.flush(30) == 0
    assert not failed, failed[0]


def transaction(
    producer: int,
    first_offset: int,
    records: Iterable[tuple[bytes, bytes | None]],
    end: ControlType | None,
) -> tuple[list[bytes], int]:
    """Batches of one transaction from `first_offset` on, its marker after, and what comes next."""
    rows = [
        Record(first_offset + place, START_MS, key, value)
        for place, (key, value) in enumerate(records)
    ]
    options = {"producer_id": producer, "producer_epoch": 0}
    batches = [
        bytes(build_batch(rows, base_sequence=0, codec=4, attributes=TRANSACTIONAL, **options))
    ]
    after = first_offset + len(rows)
    if end is not None:
        marker = marker_record(end, 0, START_MS)._replace(offset=after)
        batches.append(bytes(build_batch([marker], attributes=TRANSACTIONAL | CONTROL, **options)))
        after += 1
    return batches, after


def write(
    broker: VarveBroker,
    topic: str,
    records: Iterable[tuple[bytes | None, bytes | None]],
    *,
    partition: int = 0,
    timestamp: int = 0,
) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5})
    for key, value in records:
        producer.produce(topic, key=key, value=value, partition=partition, timestamp=timestamp)
    assert producer.flush(30) == 0


def read_model(broker: VarveBroker, topic: str, partitions: int = 2) -> Model:
    """What a consumer reads to the end, committed records only."""
    model = Model()
    for (_, number), records in read_topics(broker.bootstrap, [topic], "read_committed").items():
        for record in records:
            timestamp_ms = record.timestamp[1]
            model.rows.append(Row(number, record.offset, record.key, record.value, timestamp_ms))
    return model


def truncate_log(broker: VarveBroker, topic: str, *, to: int) -> None:
    """As `varve log truncate TOPIC 0 --to N --force`."""
    client = ApiClient(f"127.0.0.1:{broker.http_port}").below("/api/v1/log")
    client.post(f"/partitions/{topic}/0/truncate?to={to}", {"force": True})
