"""`__transaction_state` compacted by our cleaner, cut off in a killed Kafka, or lost."""

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from broker.topics.internal_topic import partition_of
from broker.transactions.model import Status, Transaction
from broker.transactions.state_records import (
    TRANSACTION_TOPIC,
    TransactionLoader,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.format.batch import (
    BatchHeader,
    Record,
    build_batch,
    decode_records,
    stamp,
    walk_headers,
)
from tests.support.draws import cases, only_in_ci
from tests.support.peers.kafka import run_tool, start_kafka
from tests.support.protocol.raw_client import RawClient
from tests.support.reading import read_topics
from tests.support.varve import VarveBroker, running_varve
from tests.support.waiting import wait_until

HOUR_MS = 3_600_000
KAFKA_PARTITIONS = 4  # of both internal topics, tests/support/peers/kafka.py
CLEANED_AT_ONCE = {
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0",
    "max.compaction.lag.ms": "1",
}
TOOL = "org.apache.kafka.tools.TransactionsCommand"
FAST = {"timeout_check_interval_ms": 100}
OPTIONS = {"log_level": 0, "linger.ms": 0}


@contextmanager
def killed_varve(directory: Path, transactions: dict[str, int]) -> Iterator[VarveBroker]:
    """A daemon that is killed at the end."""
    settings = {
        "cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 50},
        "retention_check_interval_ms": 100,
        "transactions": {"state_partitions": 1, **transactions},
    }
    with running_varve(directory, settings) as broker:
        yield broker
        broker.kill()


def create(bootstrap: str, *topics: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics([NewTopic(topic, 1, 1) for topic in topics]).values():
        future.result(30)


def begin(
    bootstrap: str, name: str, *, timeout_ms: int = 900_000, timestamp_ms: int = 0
) -> Producer:
    """Open a transaction: a record in the topic of this name."""
    settings = {"transactional.id": name, "transaction.timeout.ms": timeout_ms}
    producer = Producer({"bootstrap.servers": bootstrap, **OPTIONS, **settings})
    producer.init_transactions(30)
    add_transaction(producer, name, timestamp_ms=timestamp_ms)
    return producer


def add_transaction(producer: Producer, topic: str, *, timestamp_ms: int = 0) -> None:
    producer.begin_transaction()
    producer.produce(topic, b"open", timestamp=timestamp_ms)
    assert producer.flush(30) == 0


def values(bootstrap: str, topic: str) -> list[bytes | None]:
    view = read_topics(bootstrap, [topic], "read_committed")
    return [record.value for records in view.values() for record in records]


def records_of(folder: Path) -> Iterator[Record]:
    """The records of the segments of a partition."""
    for path in sorted(folder.glob("*.log")):
        content = path.read_bytes()
        for position, header in walk_headers(content):
            yield from decode_records(content, header, position)


def states(folder: Path) -> dict[str, Transaction]:
    """The transactions that the segments of a partition hold."""
    loader = TransactionLoader()
    for path in sorted(folder.glob("*.log")):
        content = path.read_bytes()
        for position, header in walk_headers(content):
            loader.add_records(header, decode_records(content, header, position))
    assert (loader.loaded.invalid_records, loader.loaded.unknown_records) == (0, 0)
    return loader.finish().transactions


def described(broker: VarveBroker, names: list[str]) -> dict[str, tuple[object, ...]]:
    """What the coordinator says of these transactional ids."""
    with RawClient(broker.port) as client:
        request = m.DescribeTransactionsRequest(transactional_ids=names)

        def ask() -> list[m.DescribeTransactionsResponseTransaction]:
            answer = client.request(ApiKey.DESCRIBE_TRANSACTIONS, 0, request)
            assert isinstance(answer, m.DescribeTransactionsResponse)
            return answer.transaction_states

        loading = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        wait_until(lambda: all(row.error_code != loading for row in ask()), "all ids are loaded")
        return {
            row.transactional_id: (
                ErrorCode(row.error_code),
                row.transaction_state,
                row.producer_id,
                row.producer_epoch,
                row.transaction_start_time_ms,
                [(topic.topic, topic.partitions) for topic in row.topics],
            )
            for row in ask()
        }


def compact(broker: VarveBroker, producer: Producer) -> None:
    """Let the cleaner clean `__transaction_state`, all but the active segment."""
    changes = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, value in CLEANED_AT_ONCE.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, TRANSACTION_TOPIC, incremental_configs=changes)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(30)
    folder = broker.data / f"{TRANSACTION_TOPIC}-0"

    def cleaned() -> bool:
        try:
            keys = [record.key for record in records_of(folder)]
        except FileNotFoundError:  # the cleaner replaces this segment just now
            return False
        # Each key once, and what the last transaction appended since.
        return len(keys) <= len(set(keys)) + 6

    add_transaction(producer, "roll")
    producer.commit_transaction(30)
    wait_until(cleaned, "the log of transactions is compacted", 30)


def append_to_log(folder: Path, key: bytes, value: bytes) -> None:
    """Append a record to the last segment, as the coordinator did before a crash."""
    path = max(folder.glob("*.log"))
    content = path.read_bytes()
    *_, (position, last) = walk_headers(content)
    leader_epoch = int.from_bytes(content[position + 12 : position + 16])
    batch = build_batch([Record(0, time.time_ns() // 1_000_000, key, value, ())])
    stamp(batch, 0, last.next_offset, leader_epoch)
    with path.open("ab") as file:
        file.write(batch)


@only_in_ci("test_kill_transactions.py cleans the same topic between its kills")
def test_our_cleaner_keeps_the_last_state_of_every_transactional_id(
    real_kafka: None, tmp_path: Path
) -> None:
    complete = [f"complete-{number}" for number in range(5)]
    names = [*complete, "aborted", "open", "prepared"]
    folder = tmp_path / "data" / f"{TRANSACTION_TOPIC}-0"
    fast_expiry = {"id_expiration_ms": 2000, "id_expiration_check_interval_ms": 100}
    with killed_varve(tmp_path, fast_expiry) as broker:
        create(broker.bootstrap, "expired", "roll", *names)
        begin(broker.bootstrap, "expired").commit_transaction(30)
        wait_until(
            lambda: any(record.value is None for record in records_of(folder)), "the id expires"
        )
    with killed_varve(tmp_path, {}) as broker:
        for name in complete:
            producer = begin(broker.bootstrap, name)
            for _ in range(4):
                producer.commit_transaction(30)
                add_transaction(producer, name)
            producer.commit_transaction(30)
        begin(broker.bootstrap, "aborted").abort_transaction(30)
        unended = [begin(broker.bootstrap, name) for name in ("open", "prepared")]
    before = states(folder)
    prepared = replace(before["prepared"], status=Status.PREPARE_COMMIT)
    append_to_log(folder, encode_key("prepared"), encode_value(prepared))
    # Its marker has to wait while the partition is offline.
    hidden = shutil.move(tmp_path / "data" / "prepared-0", tmp_path / "prepared-0")
    with killed_varve(tmp_path, {}) as broker:
        roll = begin(broker.bootstrap, "roll")
        roll.commit_transaction(30)
        compact(broker, roll)
        live = described(broker, names)
    after = states(folder)
    assert after.items() >= {**before, "prepared": prepared}.items()
    assert [decode_key(r.key or b"") for r in records_of(folder) if r.value is None] == ["expired"]
    with killed_varve(tmp_path, {}) as broker:
        assert described(broker, names) == live
        statuses = {name: state[1] for name, state in live.items()}
        assert statuses == {
            **dict.fromkeys(complete, "CompleteCommit"),
            "aborted": "CompleteAbort",
            "open": "Ongoing",
            "prepared": "PrepareCommit",
        }
        assert described(broker, ["expired"])["expired"][0] is ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    dumped = dump(folder)
    assert {*names, "roll", "expired"} == set(re.findall(r'"transactionalId":"([^"]+)"', dumped))
    assert {"1", "2", "4", "5"} == set(re.findall(r'"transactionStatus":(\d)', dumped))
    assert "<DELETE>" in dumped
    shutil.move(hidden, tmp_path / "data" / "prepared-0")
    with killed_varve(tmp_path, {}) as broker:
        wait_until(
            lambda: described(broker, ["prepared"])["prepared"][1] == "CompleteCommit",
            "the prepared transaction ends with its partition",
        )
        assert values(broker.bootstrap, "prepared") == [b"open"]
        assert values(broker.bootstrap, "open") == []
    del unended


def dump(folder: Path) -> str:
    """What DumpLogSegments says of the segments of `__transaction_state`."""
    paths = [str(path) for path in sorted(folder.glob("*.log")) if path.stat().st_size]
    done = run_tool(
        "org.apache.kafka.tools.DumpLogSegments",
        "--transaction-log-decoder",
        "--files",
        ",".join(paths),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


# A killed Kafka -------------------------------------------------------------------------------


def cut_after_prepare(data: Path, name: str) -> Status:
    """Remove what Kafka wrote after its decision: the markers and the completion.

    The decision is the last record then, as if Kafka had been killed right after it.
    """
    folder = data / f"{TRANSACTION_TOPIC}-{partition_of(name, KAFKA_PARTITIONS)}"
    path = max(folder.glob("*.log"))
    content = path.read_bytes()
    for position, header in walk_headers(content):
        for record in decode_records(content, header, position):
            if decode_key(record.key or b"") != name:
                continue
            transaction = decode_value(name, record.value or b"")
            assert transaction is not None
            if transaction.status in (Status.PREPARE_COMMIT, Status.PREPARE_ABORT):
                path.write_bytes(content[: position + header.size_bytes])
                group = f"__consumer_offsets-{partition_of(group_of(name), KAFKA_PARTITIONS)}"
                for marked in (data / f"{name}-0", data / group):
                    cut_last_marker(marked, transaction.producer_id)
                return transaction.status
    raise AssertionError(f"Kafka decided nothing about {name}")


def cut_last_marker(folder: Path, producer_id: int) -> None:
    path = max(folder.glob("*.log"))
    content = path.read_bytes()
    *_, (position, last) = walk_headers(content)
    assert (last.is_control, last.producer_id) == (True, producer_id)
    path.write_bytes(content[:position])


def group_of(name: str) -> str:
    return f"group-of-{name}"


def distinct_names(*kinds: str) -> list[str]:
    """Names of these kinds whose ids, and groups, are in partitions of their own."""
    names: list[str] = []
    for kind in kinds:
        names.append(
            next(
                name
                for name in (f"{kind}-{number}" for number in range(1000))
                if is_apart(name, names)
            )
        )
    return names


def is_apart(name: str, names: list[str]) -> bool:
    return all(
        partition_of(kind(name), KAFKA_PARTITIONS) != partition_of(kind(other), KAFKA_PARTITIONS)
        for kind in (str, group_of)
        for other in names
    )


def send_offset(producer: Producer, bootstrap: str, name: str) -> None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group_of(name)})
    metadata = consumer.consumer_group_metadata()
    producer.send_offsets_to_transaction([TopicPartition(name, 0, 7)], metadata, 30)
    consumer.close()


def committed(broker: VarveBroker, name: str) -> tuple[ErrorCode, int]:
    """The stable offset of the group of a transaction: an error, or the offset."""
    topic = m.OffsetFetchRequestGroupTopic(name=name, partition_indexes=[0])
    group = m.OffsetFetchRequestGroup(group_id=group_of(name), topics=[topic])
    body = m.OffsetFetchRequest(groups=[group], require_stable=True)
    with RawClient(broker.port) as client:
        answer = client.request(ApiKey.OFFSET_FETCH, 8, body)
    assert isinstance(answer, m.OffsetFetchResponse)
    assert answer.groups[0].error_code == ErrorCode.NONE
    row = answer.groups[0].topics[0].partitions[0]
    return ErrorCode(row.error_code), row.committed_offset


@only_in_ci("test_open_transactions_of_a_killed_kafka_are_taken_over has the rule")
def test_what_a_killed_kafka_decided_is_carried_out_and_the_rest_is_aborted(
    real_kafka: None, tmp_path: Path
) -> None:
    names = distinct_names("commit", "abort", "late", "fenced")
    commit, abort, late, fenced = names
    kafka = start_kafka(tmp_path)
    try:
        create(kafka.bootstrap, *names)
        producers = {
            name: begin(kafka.bootstrap, name, timeout_ms=20_000 if name == late else 900_000)
            for name in names
        }
        for name, producer in producers.items():
            send_offset(producer, kafka.bootstrap, name)
        producers[commit].commit_transaction(30)
        producers[abort].abort_transaction(30)
        for name in (commit, abort):
            folder = kafka.data / f"{TRANSACTION_TOPIC}-{partition_of(name, KAFKA_PARTITIONS)}"
            wait_until(
                lambda name=name, folder=folder: (
                    states(folder)[name].status in (Status.COMPLETE_COMMIT, Status.COMPLETE_ABORT)
                ),
                "Kafka wrote the markers",
            )
    finally:
        kafka.kill()
    assert cut_after_prepare(kafka.data, commit) is Status.PREPARE_COMMIT
    assert cut_after_prepare(kafka.data, abort) is Status.PREPARE_ABORT
    with running_varve(tmp_path, {"transactions": FAST}) as broker:
        wait_until(
            lambda: (
                [described(broker, names)[name][1] for name in (commit, abort)]
                == ["CompleteCommit", "CompleteAbort"]
            ),
            "the decisions of Kafka are carried out",
        )
        assert committed(broker, commit) == (ErrorCode.NONE, 7)
        assert committed(broker, abort) == (ErrorCode.NONE, -1)
        assert committed(broker, fenced) == (ErrorCode.UNSTABLE_OFFSET_COMMIT, -1)
        successor = Producer(
            {"bootstrap.servers": broker.bootstrap, **OPTIONS, "transactional.id": fenced}
        )
        successor.init_transactions(30)
        assert committed(broker, fenced) == (ErrorCode.NONE, -1)
        wait_until(
            lambda: described(broker, [late])[late][1] == "CompleteAbort",
            "the transaction is aborted after its timeout",
            60,
        )
        assert committed(broker, late) == (ErrorCode.NONE, -1)
        read = {name: values(broker.bootstrap, name) for name in names}
        assert read == {commit: [b"open"], abort: [], late: [], fenced: []}
        for name in names:
            kinds = [header.is_control for header in headers_of(broker.data / f"{name}-0")]
            assert kinds == [False, True], f"{name}: one marker"


def headers_of(folder: Path) -> list[BatchHeader]:
    return [
        header
        for path in sorted(folder.glob("*.log"))
        for _, header in walk_headers(path.read_bytes())
    ]


# A lost coordinator ---------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["log", "id"][: cases(few=1, many=2)])
def test_kafkas_tool_finds_and_aborts_a_transaction_without_a_coordinator(
    real_kafka: None, tmp_path: Path, lost: str
) -> None:
    an_hour_ago = time.time_ns() // 1_000_000 - HOUR_MS
    with killed_varve(tmp_path, {}) as broker:
        create(broker.bootstrap, "hangs")
        producer = begin(broker.bootstrap, "hangs", timestamp_ms=an_hour_ago)
    folder = broker.data / f"{TRANSACTION_TOPIC}-0"
    if lost == "log":
        for path in folder.iterdir():
            path.unlink()
    else:
        path = max(folder.glob("*.log"))
        state = replace(
            states(folder)["hangs"], status=Status.COMPLETE_COMMIT, partitions=frozenset()
        )
        append_to_log(folder, encode_key("hangs"), encode_value(state))
    with running_varve(tmp_path, {"transactions": {"state_partitions": 1, **FAST}}) as broker:
        server = ("--bootstrap-server", broker.bootstrap)
        found = run_tool(TOOL, *server, "find-hanging", "--broker-id", "1")
        rows = [line.split() for line in found.stdout.splitlines()]
        assert rows[-1][:2] == ["hangs", "0"], found.stdout + found.stderr
        start_offset = rows[-1][rows[0].index("StartOffset")]
        assert values(broker.bootstrap, "hangs") == []
        where = ("--topic", "hangs", "--partition", "0", "--start-offset", start_offset)
        aborted = run_tool(TOOL, *server, "abort", *where)
        assert aborted.returncode == 0, aborted.stdout + aborted.stderr
        found = run_tool(TOOL, *server, "find-hanging", "--broker-id", "1")
        assert "hangs" not in found.stdout, found.stdout
        plain = Producer({"bootstrap.servers": broker.bootstrap})
        plain.produce("hangs", b"after")
        assert plain.flush(30) == 0
        assert values(broker.bootstrap, "hangs") == [b"after"]
    del producer
