"""Bulk reading over the wire: what comes, what is retried, what is refused."""

import itertools
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka import TopicPartition as Place
from confluent_kafka.admin import AdminClient, NewTopic

from config.security.clients import Cluster
from pipeline.client.kafka_client import (
    EARLIEST,
    LATEST,
    NO_OFFSET,
    Fetched,
    Isolation,
    WireClient,
)
from pipeline.client.producer import BulkProducer, ProduceError
from pipeline.client.range_reader import ReadOptions, StalledError, read_range
from pipeline.client.wire_errors import (
    OffsetsGoneError,
    UnknownTopicError,
    UnreachableBrokerError,
)
from pipeline.records.columns import ALL_COLUMNS
from pipeline.records.partitioner import partition_of
from protocol.api import ApiKey
from protocol.client.connection import BrokerRefusedError, WireError
from protocol.errors import ErrorCode
from protocol.messages import (
    ApiVersionsResponse,
    FetchResponse,
    FetchResponseAbortedTransaction,
)
from storage.errors import CorruptBatchError
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    marker_record,
    walk_headers,
)
from storage.format.compression import ZSTD
from storage.model import TopicPartition
from tests.pipeline import fake_broker
from tests.pipeline.fake_broker import fake_brokers
from tests.support.draws import cases, only_in_ci
from tests.support.peers import kafka
from tests.support.varve import VarveBroker, start_varve

START_MS = 1_700_000_000_000


def create(broker: VarveBroker, topic: str, partitions: int = 1, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    # The records are of the past, and the daemon looks twice a second for what is too old.
    new = NewTopic(topic, partitions, config={"retention.ms": "-1"} | config)
    for future in admin.create_topics([new]).values():
        future.result()


def fill(broker: VarveBroker, topic: str, count: int, seed: int = 0, **settings: Any) -> None:
    """Records with times a second apart, every seventh a tombstone, every fifth without a key."""
    chance = random.Random(seed)
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap, "linger.ms": 5, "batch.size": 4000} | settings
    )
    for n in range(count):
        producer.produce(
            topic,
            key=None if n % 5 == 0 else b"key-%d" % chance.randrange(50),
            value=None if n % 7 == 0 else chance.randbytes(chance.randrange(200)),
            headers=[("n", b"%d" % n), ("none", None)] if n % 3 == 0 else None,
            timestamp=START_MS + 1000 * n,
            partition=0,
        )
        producer.poll(0)
    assert producer.flush(30) == 0


def as_consumed(broker: VarveBroker, topic: str, count: int) -> list[dict[str, Any]]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "x"})
    consumer.assign([Place(topic, 0, 0)])
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        for message in consumer.consume(count, 1):
            assert message.error() is None
            headers = [{"key": k, "value": v} for k, v in message.headers() or []]
            rows.append(
                {
                    "key": message.key(),
                    "value": message.value(),
                    "topic": topic,
                    "partition": 0,
                    "offset": message.offset(),
                    "timestamp": message.timestamp()[1],
                    "timestampType": 0,
                    "headers": headers or None,
                }
            )
    consumer.close()
    return rows


def rows_of(batches: Iterator[Any]) -> list[dict[str, Any]]:
    rows = [row for batch in batches for row in batch.to_pylist()]
    for row in rows:
        if "timestamp" in row:
            row["timestamp"] = round(row["timestamp"].timestamp() * 1000)
    return rows


# against a real broker


@pytest.mark.parametrize("codec", ["none", "zstd", "gzip", "snappy", "lz4"][: cases(few=2, many=5)])
def test_what_is_read_equals_what_a_consumer_gets(
    broker: VarveBroker, topic: str, codec: str
) -> None:
    create(broker, topic)
    fill(broker, topic, 300, **{"compression.type": codec})
    expected = as_consumed(broker, topic, 300)
    place = TopicPartition(topic, 0)
    with WireClient(Cluster(broker.bootstrap)) as client:
        for fetch_bytes in (100, 10_000, 8 << 20):
            options = ReadOptions(columns=ALL_COLUMNS, fetch_bytes=fetch_bytes)
            assert rows_of(read_range(client, place, 0, 300, options)) == expected
            assert rows_of(read_range(client, place, 123, 256, options)) == expected[123:256]
        read_options = ReadOptions(columns=ALL_COLUMNS, keep=lambda offsets: offsets % 10 == 3)
        assert rows_of(read_range(client, place, 0, 300, read_options)) == expected[3::10]


def test_bounds_are_those_of_the_log(broker: VarveBroker, topic: str) -> None:
    create(broker, topic, 3)
    fill(broker, topic, 100)
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    with WireClient(Cluster(broker.bootstrap)) as client:
        assert topic in client.topics()
        assert client.partitions([topic]) == {topic: [0, 1, 2]}
        assert client.offsets({first: EARLIEST, second: LATEST}) == {first: 0, second: 0}
        assert client.offsets({first: LATEST}, Isolation.READ_COMMITTED) == {first: 100}
        assert client.offsets({first: START_MS + 41_500}) == {first: 42}
        assert client.offsets({first: START_MS + 10**9}) == {first: NO_OFFSET}
        assert client.offsets({}) == {}


def test_a_topic_that_is_not_there_is_named(broker: VarveBroker, topic: str) -> None:
    with WireClient(Cluster(broker.bootstrap)) as client:
        with pytest.raises(UnknownTopicError, match=topic):
            client.partitions([topic])
        with pytest.raises(UnknownTopicError, match=topic):
            client.offsets({TopicPartition(topic, 0): LATEST})
    assert topic not in AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics().topics


def test_offsets_that_are_gone_are_named_with_what_is_there(
    broker: VarveBroker, topic: str
) -> None:
    create(broker, topic)
    fill(broker, topic, 50)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.delete_records([Place(topic, 0, 20)]).values():
        future.result()
    place = TopicPartition(topic, 0)
    with WireClient(Cluster(broker.bootstrap)) as client:
        with pytest.raises(OffsetsGoneError) as caught:
            rows_of(read_range(client, place, 5, 50))
        assert (caught.value.log_start_offset, caught.value.end_offset) == (20, 50)
        errors: list[OffsetsGoneError] = []
        options = ReadOptions(on_gone=errors.append)
        results = rows_of(read_range(client, place, 5, 50, options))
        assert [row["offset"] for row in results] == list(range(20, 50))
        assert rows_of(read_range(client, place, 900, 950, options)) == []
        assert [error.offset for error in errors] == [5, 900]


def test_a_range_behind_the_end_is_an_error_in_time(broker: VarveBroker, topic: str) -> None:
    create(broker, topic)
    fill(broker, topic, 5)
    options = ReadOptions(stall_seconds=0.2, fetch_wait_ms=50)
    with (
        WireClient(Cluster(broker.bootstrap)) as client,
        pytest.raises(StalledError, match=r"from offset 5 .* requested \[5, 9\)"),
    ):
        rows_of(read_range(client, TopicPartition(topic, 0), 0, 9, options))


def test_a_range_behind_the_end_ends_at_once_where_losses_are_allowed(
    broker: VarveBroker, topic: str
) -> None:
    create(broker, topic)
    fill(broker, topic, 5)
    errors: list[OffsetsGoneError] = []
    options = ReadOptions(on_gone=errors.append, stall_seconds=10, fetch_wait_ms=50)
    with WireClient(Cluster(broker.bootstrap)) as client:
        results = rows_of(read_range(client, TopicPartition(topic, 0), 0, 9, options))
    assert [row["offset"] for row in results] == list(range(5))
    assert [(error.offset, error.end_offset) for error in errors] == [(5, 5)]


def test_a_range_from_the_start_of_the_log_begins_where_retention_has_moved_it(
    broker: VarveBroker, topic: str
) -> None:
    create(broker, topic)
    fill(broker, topic, 50)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.delete_records([Place(topic, 0, 20)]).values():
        future.result()
    options = ReadOptions(from_start=True)
    with WireClient(Cluster(broker.bootstrap)) as client:
        results = rows_of(read_range(client, TopicPartition(topic, 0), 5, 50, options))
        assert [row["offset"] for row in results] == list(range(20, 50))
        assert rows_of(read_range(client, TopicPartition(topic, 0), 5, 9, options)) == []
        with pytest.raises(OffsetsGoneError):
            rows_of(read_range(client, TopicPartition(topic, 0), 60, 70, options))


def test_records_that_retention_removes_while_a_range_is_read_are_lost() -> None:
    place = TopicPartition("t", 0)
    records = bytes(build_batch([Record(0, START_MS, b"k", b"v", ())]))
    answers = iter([Fetched(records, 0, 9, 9, ())])

    def fetch(partition: TopicPartition, offset: int, **_: object) -> Fetched:
        for answer in answers:
            return answer
        raise OffsetsGoneError(partition, offset, 5, 9)

    client: Any = SimpleNamespace(fetch=fetch, send_fetch=lambda *_, **__: None)
    with pytest.raises(OffsetsGoneError):
        rows_of(read_range(client, place, 0, 9, ReadOptions(from_start=True)))


def test_reading_goes_on_over_a_restart_of_the_broker(tmp_path: Path, topic: str) -> None:
    running = start_varve(tmp_path)
    try:
        create(running, topic)
        fill(running, topic, 400)
        place = TopicPartition(topic, 0)
        options = ReadOptions(fetch_bytes=2000, batch_rows=10)
        with WireClient(Cluster(running.bootstrap)) as client:
            batches = read_range(client, place, 0, 400, options)
            results = list(itertools.islice(batches, 5))
            running.stop()
            running = start_varve(tmp_path, port=running.port)
            results += list(batches)
        offsets = [n for batch in results for n in batch.column("offset").to_pylist()]
        assert offsets == list(range(400))
    finally:
        running.stop()


# against brokers that say what they are told to


def test_nobody_there_is_an_error_that_names_who_was_asked() -> None:
    with (
        WireClient(Cluster("127.0.0.1:1,localhost:2"), timeout_seconds=0.2) as client,
        pytest.raises(UnreachableBrokerError, match=r"127.0.0.1:1: .*localhost:2: "),
    ):
        client.topics()


@pytest.mark.parametrize("text", ["", " , ", "host", "host:port", "a:1,b"])
def test_a_bootstrap_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|is empty"):
        WireClient(Cluster(text))


def test_a_host_that_never_answered_is_given_up_sooner_than_one_that_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr("pipeline.client.kafka_client.time", clock)
    with fake_brokers({ApiKey.METADATA: lambda _: fake_broker.metadata({}, {})}) as (broker,):
        client = WireClient(Cluster(broker.address), timeout_seconds=60, reach_seconds=5)
        client.topics()
    client.close()
    with pytest.raises(UnreachableBrokerError, match=broker.address):
        client.topics()
    assert 50 < now <= 60
    now = 0.0
    with (
        WireClient(Cluster(broker.address), timeout_seconds=60, reach_seconds=5) as other,
        pytest.raises(UnreachableBrokerError, match=broker.address),
    ):
        other.topics()
    assert 3 < now <= 5


def test_each_partition_is_asked_of_its_leader_and_again_when_that_moved() -> None:
    leaders = {("t", 0): 1, ("t", 1): 2}
    ports: dict[int, int] = {}

    def answers(node: int) -> fake_broker.Answers:
        def listed(topic: str, number: int) -> tuple[int, int]:
            if leaders[topic, number] != node:
                return ErrorCode.NOT_LEADER_OR_FOLLOWER, -1
            return 0, 100 * node + number

        return {
            ApiKey.METADATA: lambda _: fake_broker.metadata(ports, leaders),
            ApiKey.LIST_OFFSETS: lambda request: fake_broker.offsets(request, listed),
        }

    with fake_brokers(answers(1), answers(2)) as brokers:
        ports |= {1: brokers[0].port, 2: brokers[1].port}
        first, second = TopicPartition("t", 0), TopicPartition("t", 1)
        with WireClient(Cluster(brokers[0].address), timeout_seconds=5) as client:
            expected = {first: LATEST, second: LATEST}
            assert client.offsets(expected) == {first: 100, second: 201}
            leaders["t", 0] = 2
            assert client.offsets(expected) == {first: 200, second: 201}
            leaders["t", 1] = 3  # which is not there
        with (
            WireClient(Cluster(brokers[0].address), timeout_seconds=0.3) as client,
            pytest.raises(WireError, match=r"t-1 has no leader"),
        ):
            client.offsets(expected)


def _one(answer: Any) -> fake_broker.Answers:
    return {ApiKey.METADATA: lambda _: answer}


def test_an_answer_too_large_is_refused_before_it_is_read() -> None:
    with (
        fake_brokers(_one(struct.pack(">i", 2**31 - 1))) as brokers,
        WireClient(Cluster(brokers[0].address), timeout_seconds=5) as client,
        pytest.raises(WireError, match="announces a response of 2147483647 bytes"),
    ):
        client.topics()


@pytest.mark.parametrize(
    "answer",
    [None, struct.pack(">ii", 8, 77) + bytes(4), struct.pack(">ii", 8, 2) + b"\xff" * 4],
    ids=["closes", "another request", "garbage"],
)
def test_answers_that_make_no_sense_are_asked_for_again_and_then_told(answer: Any) -> None:
    with fake_brokers(_one(answer)) as brokers:
        began = time.monotonic()
        with (
            WireClient(Cluster(brokers[0].address), timeout_seconds=3) as client,
            pytest.raises(UnreachableBrokerError, match="metadata"),
        ):
            client.topics()
        assert brokers[0].requests.count(ApiKey.METADATA) > 1
        assert time.monotonic() - began < 30


def test_a_refusal_that_will_not_pass_is_told_at_once() -> None:
    def listed(topic: str, number: int) -> tuple[int, int]:
        return ErrorCode.TOPIC_AUTHORIZATION_FAILED, -1

    ports: dict[int, int] = {}
    answers = {
        ApiKey.METADATA: lambda _: fake_broker.metadata(ports, {("t", 0): 1}),
        ApiKey.LIST_OFFSETS: lambda request: fake_broker.offsets(request, listed),
    }
    with fake_brokers(answers) as brokers:
        ports[1] = brokers[0].port
        with (
            WireClient(Cluster(brokers[0].address)) as client,
            pytest.raises(BrokerRefusedError, match="offsets of t-0: TOPIC_AUTHORIZATION_FAILED"),
        ):
            client.offsets({TopicPartition("t", 0): LATEST})
        assert brokers[0].requests.count(ApiKey.LIST_OFFSETS) == 1


def test_a_client_that_was_refused_connects_again() -> None:
    refusals = [ApiVersionsResponse(error_code=ErrorCode.UNKNOWN_SERVER_ERROR, api_keys=[])]
    answers = {
        ApiKey.API_VERSIONS: lambda _: refusals.pop() if refusals else fake_broker.versions(),
        ApiKey.METADATA: lambda _: fake_broker.metadata({}, {}),
    }
    with fake_brokers(answers) as (broker,), WireClient(Cluster(broker.address)) as client:
        with pytest.raises(BrokerRefusedError, match="ApiVersions"):
            client.topics()
        assert client.topics() == []


def test_a_throttled_fetch_is_sent_again_after_the_throttle_time() -> None:
    """Above a quota the broker answers without partitions, as Kafka does."""
    ports: dict[int, int] = {}
    throttled = [FetchResponse(throttle_time_ms=1), FetchResponse(throttle_time_ms=1)]

    def answer(request: Any) -> Any:
        return throttled.pop() if throttled else fake_broker.fetched(request, high_watermark=7)

    answers = {
        ApiKey.METADATA: lambda _: fake_broker.metadata(ports, {("t", 0): 1}),
        ApiKey.FETCH: answer,
    }
    with fake_brokers(answers) as brokers, WireClient(Cluster(brokers[0].address)) as client:
        ports[1] = brokers[0].port
        assert client.fetch(TopicPartition("t", 0), 7).high_watermark == 7
        assert brokers[0].requests.count(ApiKey.FETCH) == 3
        assert brokers[0].requests.count(ApiKey.API_VERSIONS) == 1  # on the connection it had


def test_a_fetch_that_is_throttled_for_longer_than_its_time_is_an_error() -> None:
    ports: dict[int, int] = {}
    answers = {
        ApiKey.METADATA: lambda _: fake_broker.metadata(ports, {("t", 0): 1}),
        ApiKey.FETCH: lambda _: FetchResponse(throttle_time_ms=60_000),
    }
    with (
        fake_brokers(answers) as brokers,
        WireClient(Cluster(brokers[0].address), timeout_seconds=5) as client,
    ):
        ports[1] = brokers[0].port
        with pytest.raises(WireError, match="fetch of t-0 from 7: throttled by a quota for 60 s"):
            client.fetch(TopicPartition("t", 0), 7)


class _Log:
    """One partition served in pieces, with what a broker says of aborted transactions."""

    def __init__(self, data: bytes, aborted: list[tuple[int, int, int]], end: int) -> None:
        self.data = data
        self.aborted = aborted  # producer, first offset, marker
        self.end = end
        self.ports: dict[int, int] = {}

    def answers(self) -> fake_broker.Answers:
        return {
            ApiKey.METADATA: lambda _: fake_broker.metadata(self.ports, {("t", 0): 1}),
            ApiKey.FETCH: self._fetch,
        }

    def _fetch(self, request: Any) -> Any:
        expected = request.topics[0].partitions[0]
        begin = end = -1
        last = 0
        for position, header in walk_headers(self.data):
            if header.next_offset <= expected.fetch_offset:
                continue
            begin = position if begin < 0 else begin
            fits = position + header.size_bytes - begin <= expected.partition_max_bytes
            if end >= 0 and not fits:
                break
            end, last = position + header.size_bytes, header.last_offset
        # A batch cut short stands at the end, as with a real broker.
        records = self.data[begin : end + 20] if begin >= 0 else b""
        aborted = [
            FetchResponseAbortedTransaction(producer_id=producer, first_offset=first)
            for producer, first, marker in self.aborted
            if first <= last and marker >= expected.fetch_offset
        ]
        return fake_broker.fetched(
            request,
            records=records,
            high_watermark=self.end,
            last_stable_offset=self.end,
            aborted_transactions=aborted if request.isolation_level else None,
        )


def _transactions(seed: int) -> tuple[_Log, list[int], list[int]]:
    """-> (log, offsets of all records, offsets of those that were not aborted)."""
    chance = random.Random(seed)
    data = bytearray()
    aborted: list[tuple[int, int, int]] = []
    open_since: dict[int, int] = {}
    of: dict[int, list[int]] = {}
    every: list[int] = []
    dropped: set[int] = set()
    offset = 0
    for _ in range(60):
        producer = chance.randrange(3)
        if producer in open_since and chance.random() < 0.4:
            kind = chance.choice((ControlType.ABORT, ControlType.COMMIT))
            record = marker_record(kind, 0, START_MS)._replace(offset=offset)
            flags = TRANSACTIONAL | CONTROL
            data += build_batch([record], producer_id=producer, attributes=flags)
            if kind == ControlType.ABORT:
                aborted.append((producer, open_since[producer], offset))
                dropped.update(of[producer])
            del open_since[producer]
            offset += 1
            continue
        offsets = list(range(offset, offset + chance.randrange(1, 6)))
        records = [Record(n, START_MS, b"k", b"v" * 20) for n in offsets]
        plain = chance.random() < 0.3
        data += build_batch(
            records,
            producer_id=-1 if plain else producer,
            attributes=0 if plain else TRANSACTIONAL,
        )
        if not plain:
            if producer not in open_since:
                open_since[producer], of[producer] = offset, []
            of[producer] += offsets
        every += offsets
        offset += len(offsets)
    return _Log(bytes(data), aborted, offset), every, [n for n in every if n not in dropped]


@pytest.mark.parametrize("seed", range(cases(few=6, many=15)))
def test_a_committed_reader_never_sees_what_was_aborted(seed: int) -> None:
    """However the log is cut into answers: markers may come in a later one."""
    print("seed", seed)
    log, every, committed = _transactions(seed)
    with fake_brokers(log.answers()) as brokers:
        log.ports[1] = brokers[0].port
        with WireClient(Cluster(brokers[0].address)) as client:
            for fetch_bytes in (1, 300, 1500, 1 << 20):
                for isolation, expected in (
                    (Isolation.READ_COMMITTED, committed),
                    (Isolation.READ_UNCOMMITTED, every),
                ):
                    options = ReadOptions(fetch_bytes=fetch_bytes, isolation=isolation)
                    place = TopicPartition("t", 0)
                    results = rows_of(read_range(client, place, 0, log.end, options))
                    assert [row["offset"] for row in results] == expected


def test_a_marker_that_unpacks_to_more_than_a_marker_is_damage() -> None:
    records = [
        marker_record(ControlType.ABORT, 0, START_MS)._replace(offset=n) for n in range(9999)
    ]
    flags = TRANSACTIONAL | CONTROL
    bomb = build_batch(records, producer_id=1, attributes=flags, codec=ZSTD)
    log = _Log(bytes(bomb), [(1, 0, 9998)], 9999)
    with fake_brokers(log.answers()) as (broker,), WireClient(Cluster(broker.address)) as client:
        log.ports[1] = broker.port
        options = ReadOptions(isolation=Isolation.READ_COMMITTED)
        with pytest.raises(CorruptBatchError, match=r"t-0 fetched.*unpacks to more"):
            list(read_range(client, TopicPartition("t", 0), 0, 9999, options))


@only_in_ci("test_a_committed_reader_never_sees_what_was_aborted has the rule")
def test_transactions_of_kafka_itself_are_read_as_its_consumers_read_them(tmp_path: Path) -> None:
    reason = kafka.unavailable()
    if reason is not None:
        pytest.skip(f"no Kafka to compare with: {reason}")
    with kafka.running_kafka(tmp_path) as running:
        admin = AdminClient({"bootstrap.servers": running.bootstrap})
        for future in admin.create_topics([NewTopic("t", 1)]).values():
            future.result()
        writers = [
            Producer({"bootstrap.servers": running.bootstrap, "transactional.id": f"w{n}"})
            for n in range(2)
        ]
        for writer in writers:
            writer.init_transactions()
        for turn in range(8):
            for writer in writers:
                writer.begin_transaction()
            for n in range(30):
                writers[n % 2].produce("t", key=b"%d" % turn, value=b"%d" % n)
            for number, writer in enumerate(writers):
                writer.flush(30)
                if (turn + number) % 3:
                    writer.commit_transaction()
                else:
                    writer.abort_transaction()
        place = TopicPartition("t", 0)
        with WireClient(Cluster(running.bootstrap)) as client:
            for isolation in Isolation:
                end = client.offsets({place: LATEST}, isolation)[place]
                expected = _consumed(running.bootstrap, isolation, end)
                for fetch_bytes in (200, 1 << 20):
                    options = ReadOptions(isolation=isolation, fetch_bytes=fetch_bytes)
                    results = rows_of(read_range(client, place, 0, end, options))
                    assert [(row["offset"], row["value"]) for row in results] == expected
        assert 0 < len(expected) < 8 * 30


def _consumed(bootstrap: str, isolation: Isolation, end: int) -> list[tuple[int, bytes]]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "x",
            "isolation.level": isolation.name.lower(),
            "enable.partition.eof": True,
        }
    )
    consumer.assign([Place("t", 0, 0)])
    results: list[tuple[int, bytes]] = []
    while True:
        message = consumer.poll(30)
        assert message is not None
        error = message.error()
        if error is not None:
            assert error.code() == KafkaError._PARTITION_EOF
            break
        results.append((message.offset(), message.value()))
    consumer.close()
    return results


def test_a_damaged_batch_is_an_error_that_says_where_it_came_from() -> None:
    data = bytearray(build_batch([Record(n, START_MS, b"k", b"v") for n in range(9)]))
    data[-1] ^= 1
    log = _Log(bytes(data), [], 9)
    with fake_brokers(log.answers()) as brokers:
        log.ports[1] = brokers[0].port
        with (
            WireClient(Cluster(brokers[0].address)) as client,
            pytest.raises(CorruptBatchError, match="t-0 fetched from offset 3 0: the checksum"),
        ):
            rows_of(read_range(client, TopicPartition("t", 0), 3, 9))


# writing


def test_keys_go_where_javas_default_partitioner_puts_them(broker: VarveBroker, topic: str) -> None:
    """The numbers are those of org.apache.kafka.common.utils.Utils.murmur2 in its own tests."""
    golden = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    for key, number in golden.items():
        assert partition_of(key, 1000) == (number & 0x7FFFFFFF) % 1000
    chance = random.Random(4)
    keys = [b""] + [chance.randbytes(chance.randrange(1, 30)) for _ in range(300)]
    create(broker, topic, 7)
    with BulkProducer(Cluster(broker.bootstrap)) as producer:
        for key in keys:
            producer.send(topic, key, b"v")
        assert producer.flush() == len(keys)
    with WireClient(Cluster(broker.bootstrap)) as client:
        ends = client.offsets({TopicPartition(topic, n): LATEST for n in range(7)})
        for place, end in ends.items():
            for row in rows_of(read_range(client, place, 0, end)):
                assert partition_of(row["key"], 7) == place.partition


def test_what_was_not_written_is_told(broker: VarveBroker, topic: str) -> None:
    with (
        pytest.raises(ProduceError, match=topic),
        BulkProducer(Cluster(broker.bootstrap), {"delivery.timeout.ms": "1500"}) as producer,
    ):
        producer.send(topic, b"k", b"v")
    create(broker, topic, **{"max.message.bytes": "2000"})
    with (
        pytest.raises(ProduceError, match=f"{topic}-0: MSG_SIZE_TOO_LARGE") as caught,
        BulkProducer(Cluster(broker.bootstrap)) as producer,
    ):
        producer.send(topic, b"k", random.Random(1).randbytes(5000))
    assert caught.value.failed == 1
    with pytest.raises(ProduceError, match=r"No such configuration property"):
        BulkProducer(Cluster(broker.bootstrap), {"no.such": "1"})


def test_headers_times_and_partitions_are_written_as_given(broker: VarveBroker, topic: str) -> None:
    create(broker, topic, 3)
    with BulkProducer(Cluster(broker.bootstrap), {"max.request.size": "2000000"}) as producer:
        producer.send(
            topic,
            None,
            b"v",
            partition=2,
            headers=[("a", b"1"), ("b", None)],
            timestamp_ms=START_MS,
        )
    with WireClient(Cluster(broker.bootstrap)) as client:
        options = ReadOptions(columns=ALL_COLUMNS)
        (row,) = rows_of(read_range(client, TopicPartition(topic, 2), 0, 1, options))
    assert row["key"] is None
    assert row["timestamp"] == START_MS
    assert row["headers"] == [{"key": "a", "value": b"1"}, {"key": "b", "value": None}]
