"""A data directory as Apache Kafka leaves it when it is killed, and what its clients had seen.

Everything that is hard about it is in there: a topic that was compacted and written to again,
retention with a log start offset in the middle of a segment, transactions committed, aborted and
left open, every codec, both kinds of timestamps, committed offsets of three kinds.
"""

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from storage.format.checkpoints import decode_offsets
from storage.model import TopicPartition as Partition
from tests.support.peers.kafka import KafkaBroker, start_kafka
from tests.support.reading import View, read_topics
from tests.support.waiting import wait_until

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
TABLE, EVENTS, TRANSFERS, CLOCKED = "table", "events", "transfers", "clocked"
TOPICS = (TABLE, EVENTS, TRANSFERS, CLOCKED)
# Longer than all tests take, so that nobody aborts the transaction that Kafka leaves open.
TRANSACTION_TIMEOUT_MS = 900_000
LONG_AGO_MS = 1_577_836_800_000  # 2020: whoever expires these by a default has not asked anybody
TABLE_KEYS = 300
SETTINGS = {
    "log.cleaner.backoff.ms": "100",
    "log.initial.task.delay.ms": "100",
    "log.flush.start.offset.checkpoint.interval.ms": "200",
    "log.index.size.max.bytes": "1048576",
    "log.cleaner.dedupe.buffer.size": "8388608",
}

# Of our daemon on such a directory: everything that works by time works soon.
ADOPTER_SETTINGS = {
    "cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 100},
    "retention_check_interval_ms": 100,
    "groups": {"initial_rebalance_delay_ms": 0},
}

Committed = dict[tuple[str, str, int], tuple[int, str]]  # (group, topic, partition) -> offset, text


@dataclass(frozen=True)
class KilledKafka:
    """What Kafka's clients had been told, and the directory of the harness it lies in."""

    directory: Path
    uncommitted: View
    committed_only: View
    offsets: Committed
    topic_ids: dict[str, str]

    def copy_to(self, directory: Path) -> Path:
        """A copy of all of it, holes in preallocated files kept as holes."""
        command = ["cp", "-a", "--sparse=always", f"{self.directory}/.", str(directory)]
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, check=True, timeout=60)
        return directory


def make_killed_kafka(directory: Path) -> KilledKafka:
    """Start Kafka, let real clients use it, note what they saw, kill it."""
    broker = start_kafka(directory, SETTINGS)
    try:
        _create_topics(broker.bootstrap)
        producers = {codec: _producer(broker.bootstrap, codec) for codec in CODECS}
        _fill_table(broker, producers)
        _fill_events(broker, producers)
        _fill_clocked(producers)
        _fill_transfers(broker.bootstrap)
        _commit_offsets(broker.bootstrap)
        uncommitted = _read_while_nothing_changes(broker)
        kafka = KilledKafka(
            directory,
            uncommitted,
            read_topics(broker.bootstrap, TOPICS, "read_committed"),
            committed_offsets(broker.bootstrap),
            topic_ids(broker.bootstrap, TOPICS),
        )
    finally:
        broker.kill()
    return kafka


def _create_topics(bootstrap: str) -> None:
    small = {"segment.bytes": "1048576"}
    table = {
        **small,
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.01",
        "delete.retention.ms": "86400000",
    }
    events = {**small, "cleanup.policy": "delete", "retention.ms": "-1"}
    clocked = {**small, "message.timestamp.type": "LogAppendTime"}
    new = [
        NewTopic(TABLE, num_partitions=1, replication_factor=1, config=table),
        NewTopic(EVENTS, num_partitions=3, replication_factor=1, config=events),
        NewTopic(TRANSFERS, num_partitions=2, replication_factor=1, config=events),
        NewTopic(CLOCKED, num_partitions=1, replication_factor=1, config=clocked),
    ]
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics(new).values():
        future.result(30)


def _producer(bootstrap: str, codec: str = "none", **options: Any) -> Producer:
    settings = {
        "bootstrap.servers": bootstrap,
        "compression.type": codec,
        "linger.ms": 20,
        "enable.idempotence": True,
        "batch.num.messages": 200,
        "log_level": 0,
        **options,
    }
    return Producer(settings)


def _finish(producer: Producer) -> None:
    assert producer.flush(60) == 0


def _fill_table(broker: KafkaBroker, producers: dict[str, Producer]) -> None:
    """Let Kafka clean what every codec wrote; then write again, so that both kinds are there."""
    _write_table(producers, "cleaned", 800)
    checkpoint = broker.data / "cleaner-offset-checkpoint"

    def cleaned() -> bool:
        return checkpoint.exists() and bool(_offset_in(checkpoint, Partition(TABLE, 0)))

    wait_until(cleaned, "Kafka cleans the table", 60)
    change = ConfigEntry(
        "min.cleanable.dirty.ratio", "1.0", incremental_operation=AlterConfigOpType.SET
    )
    resource = ConfigResource(ResourceType.TOPIC, TABLE, incremental_configs=[change])
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(30)
    _write_table(producers, "dirty", 200)


def _write_table(producers: dict[str, Producer], word: str, updates: int) -> None:
    for codec, producer in producers.items():
        for number in range(updates):
            value = f"{word}-{codec}-{number}-".encode() + _noise(number)
            headers = [("codec", codec.encode()), ("none", None), ("", b"")]
            producer.produce(TABLE, value, f"key-{number % TABLE_KEYS}", headers=headers)
        for number in range(20):
            producer.produce(TABLE, None, f"key-{number * 7}")
        _finish(producer)


def _noise(number: int) -> bytes:
    """Bytes that no codec can make small, so that segments fill up."""
    state = number + 1
    out = bytearray()
    for _ in range(40):
        state = state * 6364136223846793005 + 1442695040888963407 & 0xFFFFFFFFFFFFFFFF
        out += state.to_bytes(8, "big")
    return bytes(out)


def _fill_events(broker: KafkaBroker, producers: dict[str, Producer]) -> None:
    for codec, idempotent in producers.items():
        plain = _producer(broker.bootstrap, codec, **{"enable.idempotence": False})
        for producer in (plain, idempotent):
            for number in range(1500):
                producer.produce(
                    EVENTS,
                    f"{codec}-{number}-".encode() + _noise(number),
                    None
                    if number % 5 == 0
                    else b""
                    if number % 5 == 1
                    else f"key-{number}".encode(),
                    partition=number % 3,
                    timestamp=LONG_AGO_MS + number,
                    headers=[("n", str(number).encode())] if number % 2 else None,
                )
            _finish(producer)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.delete_records([TopicPartition(EVENTS, 1, 1234)]).values():
        future.result(30)
    checkpoint = broker.data / "log-start-offset-checkpoint"
    wait_until(
        lambda: checkpoint.exists() and _offset_in(checkpoint, Partition(EVENTS, 1)) == 1234,
        "Kafka writes the log start offset down",
    )


def _fill_clocked(producers: dict[str, Producer]) -> None:
    for producer in producers.values():
        for number in range(300):
            producer.produce(CLOCKED, b"%d" % number, b"k", timestamp=LONG_AGO_MS)
        _finish(producer)


def _fill_transfers(bootstrap: str) -> None:
    """Committed, aborted, committed, ... and one that is open when Kafka dies."""
    for place, codec in enumerate(CODECS):
        producer = _producer(bootstrap, codec, **{"transactional.id": f"bank-{place}"})
        producer.init_transactions(30)
        for turn in range(4):
            producer.begin_transaction()
            for number in range(150):
                value = f"{codec}-{turn}-{number}-".encode() + _noise(number)
                producer.produce(TRANSFERS, value, f"key-{number}", partition=number % 2)
            _finish(producer)  # an abort of what was never sent leaves nothing to find
            if turn % 2:
                producer.abort_transaction(30)
            else:
                group = Consumer({"bootstrap.servers": bootstrap, "group.id": "transfer-job"})
                producer.send_offsets_to_transaction(
                    [TopicPartition(EVENTS, 0, 10 * place + turn)],
                    group.consumer_group_metadata(),
                    30,
                )
                group.close()
                producer.commit_transaction(30)
    options = {"transactional.id": "left-open", "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS}
    producer = _producer(bootstrap, "zstd", **options)
    producer.init_transactions(30)
    producer.begin_transaction()
    for number in range(50):
        producer.produce(TRANSFERS, b"open-%d" % number, b"open", partition=0)
    _finish(producer)
    plain = _producer(bootstrap, **{"enable.idempotence": False})
    for number in range(50):
        plain.produce(TRANSFERS, b"behind-%d" % number, b"plain", partition=0)
    _finish(plain)


def _commit_offsets(bootstrap: str) -> None:
    """By a group without members, and by one whose members had joined."""
    settings = {"bootstrap.servers": bootstrap, "enable.auto.commit": False}
    alone = Consumer({**settings, "group.id": "alone"})
    partitions = [
        TopicPartition(EVENTS, index, 1300 + index, f"note {index}") for index in range(3)
    ]
    alone.commit(offsets=partitions, asynchronous=False)
    alone.close()
    member = Consumer({**settings, "group.id": "members", "auto.offset.reset": "earliest"})
    member.subscribe([CLOCKED])
    seen = 0
    while seen < 100:
        seen += len(member.consume(100 - seen, timeout=1))
    member.commit(asynchronous=False)
    member.close()


def committed_offsets(bootstrap: str) -> Committed:
    """The committed offsets of the three groups."""
    results: Committed = {}
    for group, topic, partitions in (
        ("alone", EVENTS, 3),
        ("members", CLOCKED, 1),
        ("transfer-job", EVENTS, 1),
    ):
        consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
        topic_partitions = [TopicPartition(topic, index) for index in range(partitions)]
        for partition in consumer.committed(topic_partitions, timeout=60):
            assert partition.error is None, partition.error
            results[group, topic, partition.partition] = (
                partition.offset,
                partition.metadata or "",
            )
        consumer.close()
    return results


def topic_ids(bootstrap: str, topics: Iterable[str]) -> dict[str, str]:
    """Topic ids, as the protocol tells them."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    described = admin.describe_topics(TopicCollection(list(topics)))
    return {name: str(future.result(30).topic_id) for name, future in described.items()}


def _read_while_nothing_changes(broker: KafkaBroker) -> View:
    """What the table shows must be what the disk holds when Kafka is killed right after."""

    def sizes() -> dict[str, int]:
        return {path.name: path.stat().st_size for path in broker.data.glob("table-0/*.log")}

    while True:
        before = sizes()
        view = read_topics(broker.bootstrap, TOPICS)
        if sizes() == before:
            return view


def _offset_in(checkpoint: Path, partition: Partition) -> int:
    return decode_offsets(checkpoint.read_bytes(), str(checkpoint)).get(partition, 0)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
