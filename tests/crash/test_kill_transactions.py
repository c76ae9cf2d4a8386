"""kill -9 of the broker and of a loop that reads, transforms and writes: each record comes once.

Meanwhile our cleaner compacts `__transaction_state` and `__consumer_offsets`.
"""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from functools import partial
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

from storage.format.batch import ControlType, control_type, decode_records, walk_headers
from tests.support.draws import cases
from tests.support.peers import transact_loop
from tests.support.peers.java_programs import java_command
from tests.support.peers.kafka import LIB, unavailable
from tests.support.ports import free_port
from tests.support.reading import read_topics
from tests.support.varve import ROOT, VarveBroker, start_varve
from tests.support.waiting import wait_until

# VARVE_TRANSACTION_KILLS: the number of kills, for long runs.
KILLS = int(os.environ.get("VARVE_TRANSACTION_KILLS", cases(few=2, many=8)))
RECORDS_PER_KILL = 300
PARTITIONS = 2
SECONDS_MAX = 120 + 3 * KILLS
# The programs give up a call after 20 s, and a transaction of a dead one ends after 5 s.
STALL_SECONDS = 60
INTERNAL_TOPICS = ("__transaction_state", "__consumer_offsets")
# One partition each, so that the segments with the records of the loop roll and are cleaned.
SETTINGS: dict[str, Any] = {
    "cleaner": {"dedupe_buffer_bytes": "16MiB", "backoff_ms": 50},
    "transactions": {"timeout_check_interval_ms": 500, "state_partitions": 1},
    "groups": {"offsets_partitions": 1},
    "checkpoint_interval_ms": 100,
    "retention_check_interval_ms": 100,
}
INTERNAL_CONFIG = {
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "100",
    "delete.retention.ms": "100",  # of markers too, once no record of their transaction is left
}


@pytest.fixture(params=["librdkafka", "java"])
def program(request: pytest.FixtureRequest) -> list[str]:
    """The loop of a client: librdkafka adds partitions by request, Java uses KIP-890."""
    if request.param == "librdkafka":
        return [sys.executable, "-m", transact_loop.__name__]
    if (reason := unavailable()) is not None:
        pytest.skip(f"Kafka's Java client cannot be run here: {reason}")
    return java_command(LIB, "TransactLoop")


class Loop:
    """The process of the loop, which is started again whenever it ended."""

    def __init__(self, program: list[str], broker: VarveBroker) -> None:
        self._command = [*program, broker.bootstrap, "source", "sink", "g", str(PARTITIONS)]
        self._log = broker.directory / "loop.log"
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Start the process if none runs."""
        if self._process is None or self._process.poll() is not None:
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(
                    self._command, cwd=ROOT, stdout=output, stderr=output
                )

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    @property
    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


def compact_internal_topics(admin: AdminClient) -> None:
    """Let the cleaner clean the internal topics all the time."""
    wait_until(
        lambda: set(INTERNAL_TOPICS) <= set(admin.list_topics(timeout=30).topics),
        "the loop made the broker create its internal topics",
    )
    changes = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, value in INTERNAL_CONFIG.items()
    ]
    resources = [
        ConfigResource(ResourceType.TOPIC, topic, incremental_configs=changes)
        for topic in INTERNAL_TOPICS
    ]
    for future in admin.incremental_alter_configs(resources).values():
        future.result(30)


def has_each_key_once(folder: Path) -> bool:
    """Return whether the closed segments of a partition are compacted."""
    keys: list[bytes | None] = []
    try:
        for path in sorted(folder.glob("*.log"))[:-1]:
            content = path.read_bytes()
            for position, header in walk_headers(content):
                if not header.is_control:
                    keys += [r.key for r in decode_records(content, header, position)]
    except FileNotFoundError:  # replaced by the cleaner meanwhile
        return False
    return len(keys) == len(set(keys)) > 0


def fill(broker: VarveBroker, first: int, count: int) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    for number in range(first, first + count):
        producer.produce("source", b"%d" % number, partition=number % PARTITIONS)
    assert producer.flush(30) == 0


def committed(broker: VarveBroker) -> list[int]:
    view = read_topics(broker.bootstrap, ["sink"], "read_committed")
    return sorted(int(record.value or b"") for records in view.values() for record in records)


def committed_in_files(data: Path) -> list[int]:
    """What the files of the topic say, read without the broker."""
    seen: list[int] = []
    for folder in data.glob("sink-*"):
        opened: dict[int, list[int]] = {}
        for path in sorted(folder.glob("*.log")):
            content = path.read_bytes()
            for position, header in walk_headers(content):
                records = decode_records(content, header, position)
                if not header.is_control:
                    rows = opened.setdefault(header.producer_id, [])
                    rows += [int(record.value or b"") for record in records]
                elif control_type(records[0]) == ControlType.COMMIT:
                    seen += opened.pop(header.producer_id, [])
                else:
                    opened.pop(header.producer_id, None)
        assert not any(opened.values()), f"{folder}: records of an open transaction"
    return sorted(seen)


@pytest.mark.timeout(300 + 5 * KILLS)
def test_a_loop_that_is_killed_with_its_broker_writes_each_record_once(
    program: list[str], tmp_path: Path
) -> None:
    seed = random.Random().randrange(1 << 30) if os.environ.get("VARVE_DRAWS") == "fresh" else 1
    print(f"seed {seed}")
    rng = random.Random(seed)
    port = free_port()
    broker = start_varve(tmp_path, SETTINGS, port=port)
    loop = Loop(program, broker)
    total = 0
    try:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        new = [NewTopic(topic, PARTITIONS, 1) for topic in ("source", "sink")]
        for future in admin.create_topics(new).values():
            future.result(30)
        loop.ensure()
        compact_internal_topics(admin)
        for _ in range(KILLS):
            fill(broker, total, RECORDS_PER_KILL)
            total += RECORDS_PER_KILL
            time.sleep(rng.uniform(0.2, 1.5))
            if rng.random() < 0.5:
                broker.kill()
                broker = start_varve(tmp_path, SETTINGS, port=port)
            else:
                loop.kill()
            loop.ensure()
        wait_until_written(broker, loop, total)
        loop.kill()
        for topic in INTERNAL_TOPICS:
            folder = broker.data / f"{topic}-0"
            wait_until(partial(has_each_key_once, folder), f"{topic} is compacted", 60)
    finally:
        loop.kill()
        broker.stop()
    assert committed_in_files(tmp_path / "data") == list(range(total))
    assert "Traceback" not in broker.log_text


def wait_until_written(broker: VarveBroker, loop: Loop, total: int) -> None:
    """Wait for the loop to write what is left; each record must be there once."""
    deadline = time.monotonic() + SECONDS_MAX
    count, since = 0, time.monotonic()
    while len(seen := committed(broker)) < total:
        now = time.monotonic()
        assert now < deadline, f"{len(seen)} of {total} records"
        if len(seen) > count:
            count, since = len(seen), now
        assert now - since < STALL_SECONDS, f"stuck at {count} of {total}: {loop.last_words}"
        loop.ensure()
        time.sleep(0.5)
    assert [n for n, times in Counter(seen).items() if times > 1] == []
    assert seen == list(range(total))
