"""Kafka's own clients and tools use the transactions of the running daemon."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.compare.kafka_side import run_kafka
from tests.support.draws import only_in_ci
from tests.support.peers.java_programs import java_command
from tests.support.peers.kafka import LIB, run_tool, start_kafka
from tests.support.reading import read_topics
from tests.support.varve import VarveBroker, running_varve

RECORDS = 300
# Open the files, take all records for replicated, close the segment, clean it.
CLEAN_SCRIPT = """\
now {now_ms}
config cleanup.policy=compact min.cleanable.dirty.ratio=0 delete.retention.ms=86400000
reopen unclean
roll 0
dump
clean 10000 1048576
dump
"""
TOOL = "org.apache.kafka.tools.TransactionsCommand"


@pytest.fixture(scope="module")
def broker(real_kafka: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    with running_varve(tmp_path_factory.mktemp("transactions")) as running:
        yield running


def run_java(program: str, bootstrap: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        java_command(LIB, program, bootstrap, *arguments),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def create(broker: VarveBroker, *topics: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_topics([NewTopic(topic, 2, 1) for topic in topics]).values():
        future.result(30)


def values(bootstrap: str, topic: str) -> list[bytes]:
    view = read_topics(bootstrap, [topic], "read_committed")
    return sorted(record.value or b"" for records in view.values() for record in records)


def begin(bootstrap: str, transactional_id: str, topic: str, **settings: object) -> Producer:
    """A producer with an open transaction."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "transactional.id": transactional_id, **settings}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(30)
    return producer


@only_in_ci("test_kill_transactions.py kills such a loop, and a test below has its records")
def test_a_java_loop_of_consume_transform_produce_writes_each_record_once(
    broker: VarveBroker,
) -> None:
    create(broker, "source", "sink")
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(RECORDS):
        producer.produce("source", b"%d" % number, b"%d" % (number % 7))
    producer.flush(30)
    done = run_java("Transact", broker.bootstrap, "source", "sink", "loop", "20", str(RECORDS))
    assert done.stdout.splitlines() == [f"read {RECORDS}"], done.stderr[-2000:]
    assert values(broker.bootstrap, "sink") == sorted(b"out-%d" % n for n in range(RECORDS))


@only_in_ci("test_kill_transactions.py kills the same client")
def test_a_sink_commits_in_another_process_what_a_dead_one_prepared(
    real_kafka: None, tmp_path: Path
) -> None:
    """Two phases, as Flink writes: the broker is killed between them, the commit repeated."""
    with running_varve(tmp_path) as broker:
        create(broker, "prepared")
        prepared = run_java(
            "TwoPhaseSink", broker.bootstrap, "flink-1", "prepare", "prepared", "20"
        )
        producer = prepared.stdout.split()
        assert len(producer) == 2, prepared.stderr[-2000:]
        assert values(broker.bootstrap, "prepared") == []
        broker.kill()
    with running_varve(tmp_path) as broker:
        for _ in range(2):
            done = run_java("TwoPhaseSink", broker.bootstrap, "flink-1", "commit", *producer)
            assert done.returncode == 0, done.stderr[-2000:]
        assert values(broker.bootstrap, "prepared") == sorted(
            b"value-%d" % number for number in range(20)
        )


def test_kafka_transactions_lists_describes_and_aborts(broker: VarveBroker) -> None:
    create(broker, "described")
    producer = begin(broker.bootstrap, "described-id", "described")
    server = ("--bootstrap-server", broker.bootstrap)
    listed = run_tool(TOOL, *server, "list")
    assert "described-id" in listed.stdout, listed.stdout + listed.stderr
    described = run_tool(TOOL, *server, "describe", "--transactional-id", "described-id")
    assert "Ongoing" in described.stdout, described.stdout + described.stderr
    assert "described-0" in described.stdout
    aborted = run_tool(
        TOOL, *server, "abort", "--topic", "described", "--partition", "0", "--start-offset", "0"
    )
    assert aborted.returncode == 0, aborted.stdout + aborted.stderr
    assert values(broker.bootstrap, "described") == []
    del producer


def test_a_transaction_is_aborted_after_its_timeout(real_kafka: None, tmp_path: Path) -> None:
    with running_varve(tmp_path, {"transactions": {"timeout_check_interval_ms": 100}}) as broker:
        create(broker, "late")
        producer = begin(broker.bootstrap, "late-id", "late", **{"transaction.timeout.ms": 1000})
        deadline = time.monotonic() + 30
        while broker.metric("varve_transactions_timed_out_total") == 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert values(broker.bootstrap, "late") == []
        del producer


def test_kafkas_tools_read_the_log_of_transactions_and_of_their_offsets(
    real_kafka: None, tmp_path: Path
) -> None:
    with running_varve(tmp_path) as broker:
        create(broker, "in", "out")
        plain = Producer({"bootstrap.servers": broker.bootstrap})
        for number in range(20):
            plain.produce("in", b"%d" % number, partition=0)
        plain.flush(30)
        run_java("Transact", broker.bootstrap, "in", "out", "dumped", "4", "20")  # one aborts
        # The client follows transaction version 2: its produce requests add the partitions.
        metric = "kafka_network_requestmetrics_requests_total"
        assert broker.metric(metric, request="EndTxn", version="5") > 0
        assert broker.metric(metric, request="AddPartitionsToTxn", version="3") == 0
        assert values(broker.bootstrap, "out") == sorted(b"out-%d" % n for n in range(20))
    states = dump(broker, "__transaction_state", "--transaction-log-decoder")
    assert "loop-dumped" in states
    assert '"transactionStatus":4' in states  # CompleteCommit
    offsets = dump(broker, "__consumer_offsets", "--offsets-decoder")
    assert '"group":"dumped"' in offsets
    assert "isTransactional: true" in offsets
    assert "endTxnMarker: COMMIT" in offsets


@only_in_ci("tests/compare runs Kafka's cleaner, and Kafka's tool reads these logs above")
@pytest.mark.parametrize("topic", ["__transaction_state", "__consumer_offsets"])
def test_kafkas_cleaner_keeps_the_last_state_of_every_key(
    broker: VarveBroker, topic: str, tmp_path: Path
) -> None:
    source, sink = f"in-{topic}", f"out-{topic}"
    create(broker, source, sink)
    plain = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(100):
        plain.produce(source, b"%d" % number, partition=0)
    plain.flush(30)
    run_java("Transact", broker.bootstrap, source, sink, f"cleaned-{topic}", "10", "100")
    homes = []
    for folder in sorted(broker.data.glob(f"{topic}-*")):
        end = sum(path.stat().st_size for path in folder.glob("*.log"))
        if not end:
            continue
        home = tmp_path / folder.name
        shutil.copytree(folder, home / "kafka-data" / "topic-0")
        (home / "script").write_text(CLEAN_SCRIPT.format(now_ms=time.time_ns() // 1_000_000))
        homes.append(home)
    assert homes
    run_kafka(tmp_path)
    for home in homes:
        assert not (home / "kafka" / "failed").exists(), (home / "kafka" / "failed").read_text()
    before, after = ([dumped(home, number) for home in homes] for number in (0, 1))
    assert list(map(dict, after)) == list(map(dict, before))
    assert sum(map(len, after)) < sum(map(len, before)) / 2


def dumped(home: Path, number: int) -> list[tuple[str, str]]:
    """The keys and values of a dump, in order, without the markers of transactions."""
    rows: list[tuple[str, str]] = []
    is_control = False
    for line in (home / "kafka" / f"{number:02}.batches").read_text().splitlines():
        kind, *words = line.split()
        if kind == "batch":
            is_control = "control=true" in words
        elif not is_control:
            rows.append((words[2], words[3]))
    return rows


def dump(broker: VarveBroker, topic: str, decoder: str) -> str:
    """What DumpLogSegments says of every segment of a topic."""
    paths = [path for path in broker.data.glob(f"{topic}-*/*.log") if path.stat().st_size]
    files = ",".join(map(str, paths))
    done = run_tool("org.apache.kafka.tools.DumpLogSegments", decoder, "--files", files)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_open_transactions_of_a_killed_kafka_are_taken_over(
    real_kafka: None, tmp_path: Path
) -> None:
    kafka = start_kafka(tmp_path)
    try:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        admin.create_topics([NewTopic("taken", 2, 1)])["taken"].result(30)
        producers = [begin(kafka.bootstrap, f"id-{number}", "taken") for number in range(2)]
        producers[0].commit_transaction(30)
    finally:
        kafka.kill()
    settings = {"transactions": {"timeout_check_interval_ms": 100}}
    with running_varve(tmp_path, settings) as broker:
        server = ("--bootstrap-server", broker.bootstrap)
        described = run_tool(TOOL, *server, "describe", "--transactional-id", "id-1")
        assert "Ongoing" in described.stdout, described.stdout + described.stderr
        fencing = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "id-1"})
        fencing.init_transactions(30)  # aborts what its predecessor left
        assert values(broker.bootstrap, "taken") == [b"open"]
