"""kill -9 of the broker and of a loop that reads, transforms and writes: each record comes once."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from storage.format.batch import ControlType, control_type, decode_records, walk_headers
from tests.support.draws import cases
from tests.support.peers import transact_loop
from tests.support.peers.java_programs import java_command
from tests.support.peers.kafka import LIB, unavailable
from tests.support.ports import free_port
from tests.support.reading import read_topics
from tests.support.varve import ROOT, VarveBroker, start_varve

# VARVE_TRANSACTION_KILLS: the number of kills, for long runs.
KILLS = int(os.environ.get("VARVE_TRANSACTION_KILLS", cases(few=3, many=8)))
RECORDS_PER_KILL = 300
PARTITIONS = 2
SECONDS_MAX = 120
# librdkafka 2.16 sometimes never sends TxnOffsetCommit after the broker restarted, nor gives up.
STALL_SECONDS = 15
SETTINGS = {"cleaner": {"enabled": False}, "transactions": {"timeout_check_interval_ms": 500}}


@pytest.fixture(params=["librdkafka", "java"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The loop of a client: librdkafka adds partitions by request, Java uses KIP-890."""
    if request.param == "librdkafka":
        return [sys.executable, "-m", transact_loop.__name__]
    if (reason := unavailable()) is not None:
        pytest.skip(f"Kafka's Java client cannot be run here: {reason}")
    return java_command(LIB, tmp_path, "TransactLoop")


def start_loop(program: list[str], bootstrap: str) -> subprocess.Popen[bytes]:
    command = [*program, bootstrap, "source", "sink", "g", str(PARTITIONS)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


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
    loop = None
    total = 0
    try:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        new = [NewTopic(topic, PARTITIONS, 1) for topic in ("source", "sink")]
        for future in admin.create_topics(new).values():
            future.result(30)
        loop = start_loop(program, broker.bootstrap)
        for _ in range(KILLS):
            fill(broker, total, RECORDS_PER_KILL)
            total += RECORDS_PER_KILL
            time.sleep(rng.uniform(0.2, 1.5))
            if rng.random() < 0.5:
                broker.kill()
                broker = start_varve(tmp_path, SETTINGS, port=port)
            else:
                loop.kill()
                loop.wait(10)
            if loop.poll() is not None:
                loop = start_loop(program, broker.bootstrap)
        deadline = time.monotonic() + SECONDS_MAX
        count, since = 0, time.monotonic()
        while len(seen := committed(broker)) < total:
            assert time.monotonic() < deadline, f"{len(seen)} of {total} records"
            if len(seen) > count:
                count, since = len(seen), time.monotonic()
            elif time.monotonic() - since > STALL_SECONDS:
                loop.kill()
                loop.wait(10)
                since = time.monotonic()
            if loop.poll() is not None:
                loop = start_loop(program, broker.bootstrap)
            time.sleep(0.5)
        assert [n for n, count in Counter(seen).items() if count > 1] == []
        assert seen == list(range(total))
        loop.kill()
        loop.wait(10)
    finally:
        if loop is not None and loop.poll() is None:
            loop.kill()
            loop.wait(10)
        broker.stop()
    assert committed_in_files(tmp_path / "data") == list(range(total))
