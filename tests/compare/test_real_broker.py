"""One log of real clients, cleaned by a running Kafka and, from a copy, by our daemon."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from storage.format.batch import BatchHeader, walk_headers
from storage.format.checkpoints import decode_offsets
from storage.format.filenames import META_PROPERTIES
from storage.model import TopicPartition
from tests.support.draws import only_in_ci
from tests.support.peers.kafka import running_kafka, unavailable
from tests.support.reading import assert_same_view, read_topics
from tests.support.varve import running_varve
from tests.support.waiting import wait_until

TOPIC = "mixed"
PARTITION = TopicPartition(TOPIC, 0)
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
KAFKA = {"log.cleaner.backoff.ms": "100", "log.cleaner.dedupe.buffer.size": "8388608"}
CLEANING = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "86400000",
}
SEGMENT_BYTES = 1 << 20


def fill(bootstrap: str) -> None:
    """Idempotent and transactional producers take turns, with every codec."""
    options = {
        "bootstrap.servers": bootstrap,
        "linger.ms": 5,
        "batch.num.messages": 40,
        "log_level": 0,
    }
    plain = {codec: Producer({**options, "compression.type": codec, "enable.idempotence": True})
             for codec in CODECS}  # fmt: skip
    banks = {codec: Producer({**options, "compression.type": codec, "transactional.id": codec})
             for codec in CODECS}  # fmt: skip
    for bank in banks.values():
        bank.init_transactions(60)
    for turn in range(8):
        for place, codec in enumerate(CODECS):
            _write(plain[codec], turn, f"plain-{codec}")
            bank = banks[codec]
            bank.begin_transaction()
            _write(bank, turn, f"bank-{codec}")
            if (turn + place) % 3 == 0:
                bank.abort_transaction(60)
            else:
                bank.commit_transaction(60)


def _write(producer: Producer, turn: int, owner: str) -> None:
    for number in range(80):
        key = f"key-{(number * 7 + turn) % 150}"
        value = None if number % 9 == 0 else f"{owner}-{turn}-{number}-".encode() + bytes(900)
        producer.produce(TOPIC, value, key, headers=[("who", owner.encode())], partition=0)
    assert producer.flush(60) == 0


def last_base(folder: Path) -> int:
    return max(int(path.stem) for path in folder.glob("*.log"))


def headers_of(folder: Path) -> Iterator[tuple[Any, ...]]:
    """What stays the same of each batch, whoever cleaned it, and whether it has a horizon."""
    for path in sorted(folder.glob("*.log")):
        for _, header in walk_headers(path.read_bytes()):
            yield _essence(header)


def _essence(header: BatchHeader) -> tuple[Any, ...]:
    return (
        header.base_offset,
        header.last_offset,
        header.attributes,
        header.max_timestamp,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        header.record_count,
    )


def cleaned_to(checkpoint: Path) -> int:
    if not checkpoint.exists():
        return 0
    return decode_offsets(checkpoint.read_bytes(), str(checkpoint)).get(PARTITION, 0)


def alter(bootstrap: str, values: dict[str, str]) -> None:
    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, value in values.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, TOPIC, incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(30)


@only_in_ci("test_compare.py runs Kafka's cleaner")
@pytest.mark.timeout(300)
def test_a_running_kafka_and_our_daemon_leave_the_same(tmp_path: Path) -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"Apache Kafka cannot be run here: {reason}")
    file_path, path = tmp_path / "kafka", tmp_path / "varve"
    with running_kafka(file_path, KAFKA) as kafka:
        config = {"cleanup.policy": "delete", "segment.bytes": str(SEGMENT_BYTES)}
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        for future in admin.create_topics([NewTopic(TOPIC, 1, 1, config=config)]).values():
            future.result(30)
        fill(kafka.bootstrap)
    copied = path / "data" / str(PARTITION)
    shutil.copytree(file_path / "data" / str(PARTITION), copied)
    shutil.copy(file_path / "data" / META_PROPERTIES, copied.parent)
    with running_kafka(file_path, KAFKA) as kafka:
        folder = kafka.data / str(PARTITION)
        end = last_base(folder)
        assert end > 0
        alter(kafka.bootstrap, CLEANING)
        checkpoint = kafka.data / "cleaner-offset-checkpoint"
        wait_until(lambda: cleaned_to(checkpoint) >= end, "Kafka cleans", 60)
        views = {level: read_topics(kafka.bootstrap, [TOPIC], level) for level in LEVELS}
    settings = {
        "cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 100},
        "topics": {TOPIC: {**CLEANING, "segment.bytes": SEGMENT_BYTES}},
    }
    with running_varve(path, settings) as varve:

        def dirty() -> int:
            path = f"/api/v1/cleaner/partitions/{TOPIC}/0"
            return int(json.loads(varve.get(path))["first_dirty_offset"] or 0)

        wait_until(lambda: dirty() >= end, "ours is cleaned", 60)
        for level in LEVELS:
            assert_same_view(read_topics(varve.bootstrap, [TOPIC], level), views[level])
    remaining = list(headers_of(folder))
    results = list(headers_of(path / "data" / str(PARTITION)))
    # Kafka keeps the last batch of the round, though it is empty:
    # docs/reference/compare-with-kafka.md.
    if len(remaining) > len(results):
        round_end = [item for item in remaining if item[1] == end - 1 and item[-1] == 0]
        remaining = [item for item in remaining if item not in round_end]
    assert results == remaining


LEVELS = ("read_uncommitted", "read_committed")
