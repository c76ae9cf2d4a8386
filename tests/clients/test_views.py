"""Compacted views as each family of clients reads them: the real daemon, its command line."""

import asyncio
import json
import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AioPartition
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kafka import KafkaConsumer
from kafka import TopicPartition as PythonPartition

from admin.client import ApiClient, partition_path
from admin.http.views import ROOT as ROOT_PATH
from tests.support.draws import cases, seed_of_test
from tests.support.peers.java_programs import quick_java
from tests.support.peers.kafka import LIB, unavailable
from tests.support.processes.fork_server import run_forked
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

KEYS = 200
SECONDS = 60
Values = dict[bytes | None, bytes | None]


def varve(broker: VarveBroker, *arguments: str, code: int = 0) -> str:
    """Run the command line; its standard output."""
    done = run_forked(*arguments, url=broker.url)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout if code == 0 else done.stderr


def make_topic(broker: VarveBroker, name: str, partitions: int = 1, **keys: str) -> None:
    config = {"varve.view": "compacted", **{k.replace("_", "."): v for k, v in keys.items()}}
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(SECONDS)


class Writer:
    """Produces updates and deletes of a few hundred keys, which no other codec has."""

    def __init__(self, broker: VarveBroker, topic: str, codec: str = "none") -> None:
        settings = {"bootstrap.servers": broker.bootstrap, "linger.ms": 5}
        self._producer = Producer({**settings, "compression.type": codec})
        self._topic = topic
        self._codec = codec.encode()
        self._at = 0
        self.latest: Values = {}
        self._stopping = threading.Event()

    def write(self, count: int) -> None:
        for _ in range(count):
            key = b"%s-%d" % (self._codec, self._at * 7919 % KEYS)
            value = None if self._at % 11 == 0 else b"value-%d" % self._at
            self._producer.produce(self._topic, value, key)
            self.latest[key] = value
            self._at += 1
        assert self._producer.flush(SECONDS) == 0

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Writes in a thread for the length of a block."""

        def go() -> None:
            while not self._stopping.wait(0.05):
                self.write(50)

        thread = threading.Thread(target=go)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join(SECONDS)

    @property
    def values(self) -> Values:
        return {key: value for key, value in self.latest.items() if value is not None}


def applied(values: Values) -> Values:
    return {key: value for key, value in values.items() if value is not None}


# --- the families ---------------------------------------------------------------------------------


class ConfluentReader:
    """confluent-kafka (librdkafka)."""

    def __init__(self, broker: VarveBroker, topic: str, partition: int = 0) -> None:
        self._where = TopicPartition(topic, partition, 0)
        self._consumer = Consumer(
            {
                "bootstrap.servers": broker.bootstrap,
                "group.id": "readers",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
            }
        )
        self._consumer.assign([self._where])
        self._at = -1  # after the last record, or where the client last said that the end is
        self.values: Values = {}

    def read_to_the_end(self) -> None:
        """To the present end, by a record or by the client's own word: it gives that once."""
        _, end = self._consumer.get_watermark_offsets(self._where, timeout=SECONDS)
        while self._at < end:
            message = self._consumer.poll(SECONDS)
            assert message is not None, "the client hangs"
            error = message.error()
            if error is None:
                self.values[message.key()] = message.value()
                self._at = (message.offset() or 0) + 1
                continue
            if error.code() == KafkaError._PARTITION_EOF:
                self._at = message.offset() or 0
                continue
            raise KafkaException(error)

    def close(self) -> None:
        self._consumer.close()


class KafkaPythonReader:
    """kafka-python, in a thread that polls all the time: the client fetches only while it polls.

    The other families fetch in the background. A reader that does not fetch falls behind a horizon,
    and does not learn of deletes below it (docs/decisions/0016-compacted-view.md).
    """

    def __init__(self, broker: VarveBroker, topic: str, partition: int = 0) -> None:
        self._where = PythonPartition(topic, partition)
        self._consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap, group_id=None)
        self._consumer.assign([self._where])
        self._consumer.seek_to_beginning(self._where)
        self._ends = KafkaConsumer(bootstrap_servers=broker.bootstrap, group_id=None)
        self.values: Values = {}
        self._position = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stopping.is_set():
            for rows in self._consumer.poll(timeout_ms=100).values():
                self.values.update({row.key: row.value for row in rows})
            self._position = self._consumer.position(self._where)

    def read_to_the_end(self) -> None:
        end = self._ends.end_offsets([self._where])[self._where]
        wait_until(lambda: self._position >= end, "the client has read to the end", SECONDS)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(SECONDS)
        self._consumer.close()
        self._ends.close()


class AiokafkaReader:
    """aiokafka, on a loop of its own."""

    def __init__(self, broker: VarveBroker, topic: str, partition: int = 0) -> None:
        self._where = AioPartition(topic, partition)
        self._loop = asyncio.new_event_loop()
        self.values: Values = {}
        self._consumer = self._run(self._start(broker))

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, SECONDS))

    async def _start(self, broker: VarveBroker) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(bootstrap_servers=broker.bootstrap)
        await consumer.start()
        consumer.assign([self._where])
        await consumer.seek_to_beginning(self._where)
        return consumer

    def read_to_the_end(self) -> None:
        self._run(self._read())

    async def _read(self) -> None:
        end = (await self._consumer.end_offsets([self._where]))[self._where]
        while await self._consumer.position(self._where) < end:
            for rows in (await self._consumer.getmany(timeout_ms=200)).values():
                self.values.update({row.key: row.value for row in rows})

    def close(self) -> None:
        self._run(self._consumer.stop())
        self._loop.close()


class JavaReader:
    """Apache Kafka's own client, in its console consumer. It cannot say where it is: it ends when
    nothing has come for a while, so `read_to_the_end` may be called once.
    """

    IDLE_MS = 8_000

    def __init__(self, broker: VarveBroker, topic: str, partition: int = 0) -> None:
        options = {"bootstrap-server": broker.bootstrap, "topic": topic, "offset": "earliest"}
        options |= {"partition": str(partition), "timeout-ms": str(self.IDLE_MS)}
        shown = ("print.key=true", "key.separator=:", "null.literal=null")
        self._process = subprocess.Popen(
            [
                *quick_java(LIB),
                "org.apache.kafka.tools.consumer.ConsoleConsumer",
                *(word for name, value in options.items() for word in (f"--{name}", value)),
                *(word for item in shown for word in ("--formatter-property", item)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.values: Values = {}
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                key, _, value = line.rstrip(b"\n").partition(b":")
                self.values[key] = None if value == b"null" else value

    def read_to_the_end(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the client hangs"

    def close(self) -> None:
        self._process.kill()
        self._process.wait(SECONDS)
        self._thread.join(SECONDS)


FAMILIES: list[Any] = [ConfluentReader, KafkaPythonReader, AiokafkaReader]


def test_a_reader_ends_whatever_is_left(broker: VarveBroker, topic: str) -> None:
    """Nothing at all, tombstones only, a tombstone at the end; nothing is produced any more."""
    make_topic(broker, topic, partitions=3)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for partition, rows in (
        (1, [(b"a", b"1"), (b"b", b"1"), (b"a", None), (b"b", None)]),
        (2, [(b"a", b"1"), (b"b", b"1"), (b"a", None)]),
    ):
        for key, value in rows:
            producer.produce(topic, value, key, partition)
    assert producer.flush(SECONDS) == 0
    varve(broker, "view", "compact", topic)
    for family in FAMILIES:
        for partition, expected in ((0, {}), (1, {}), (2, {b"b": b"1"})):
            reader = family(broker, f"{topic}.compacted", partition)
            reader.read_to_the_end()
            reader.close()
            assert reader.values == expected, (family, partition)


class Views:
    """The API of the view of a partition."""

    def __init__(self, broker: VarveBroker, topic: str) -> None:
        self._api = ApiClient(f"http://127.0.0.1:{broker.http_port}").below(ROOT_PATH)
        self._path = partition_path(topic, 0)
        self._admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        self._topic = topic

    def compact(self) -> int:
        """Compact the view; its horizon."""
        self._api.post(f"{self._path}/compact")

        def ended() -> bool:
            row = self._api.get(self._path)
            assert row["state"] in ("waiting", "running", "done"), row
            return row["state"] == "done" and not row["place"]

        wait_until(ended, "the view is compacted", SECONDS)
        return int(self._api.get(self._path)["horizon"])

    def compact_and_expire(self) -> None:
        """Compact the view, and have the originals gone up to its horizon."""
        self.expire(self.compact())

    def expire(self, horizon: int) -> None:
        """Have the originals gone up to an offset."""
        partition = TopicPartition(self._topic, 0, horizon)
        self._admin.delete_records([partition])[partition].result(SECONDS)


PUBLICATIONS = 6  # more than replaced ledgers are kept for slow readers


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("families", "codecs"),
    [(FAMILIES, ["none", "lz4", "zstd"]), ([JavaReader], ["snappy"])][: cases(few=1, many=2)],
    ids=["python", "java"][: cases(few=1, many=2)],
)
def test_a_view_is_read_to_the_end_while_it_is_published_and_originals_expire(
    broker: VarveBroker, topic: str, families: list[type[Any]], codecs: list[str]
) -> None:
    """Several families read at once, beside a producer of each codec."""
    has_java = JavaReader in families
    if has_java and (reason := unavailable()) is not None:
        pytest.skip(f"Apache Kafka's client cannot be run here: {reason}")
    make_topic(broker, topic)
    writers, views = [Writer(broker, topic, codec) for codec in codecs], Views(broker, topic)
    for writer in writers:
        writer.write(3_000 // len(writers))
    views.compact_and_expire()
    readers = [family(broker, f"{topic}.compacted") for family in families]
    with ExitStack() as production:
        for writer in writers:
            production.enter_context(writer.going_on())
        if has_java:
            wait_until(lambda: readers[0].values, "it has begun", SECONDS)
        for _ in range(PUBLICATIONS):
            horizon = views.compact()
            for reader in readers:
                if not has_java:  # a slow reader learns of deletes while the originals exist
                    reader.read_to_the_end()
            views.expire(horizon)
    expected = {key: value for writer in writers for key, value in writer.values.items()}
    for reader in readers:
        reader.read_to_the_end()  # what was written meanwhile
        reader.close()
        assert applied(reader.values) == expected, type(reader)

    views.compact_and_expire()
    for family in families:
        again = family(broker, f"{topic}.compacted")
        again.read_to_the_end()
        again.close()
        assert again.values == expected, f"{family}: no tombstone is left"


@pytest.mark.parametrize("strategy", ["timestamp", "header"])
def test_every_family_reads_the_value_of_the_largest_rank(
    broker: VarveBroker, topic: str, strategy: str
) -> None:
    header = {"varve_view_version_header": "v"} if strategy == "header" else {}
    make_topic(broker, topic, varve_view_strategy=strategy, retention_ms="-1", **header)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "compression.type": "zstd"})
    views = Views(broker, topic)
    rng = random.Random(seed_of_test(1))
    best: dict[bytes, tuple[int, int, bytes | None]] = {}
    for at in range(6_000):
        key, rank = b"key-%d" % rng.randrange(KEYS), rng.randrange(1_000_000)
        value = None if rng.random() < 0.2 else b"%d" % at
        producer.produce(
            topic, value, key, timestamp=1_700_000_000_000 + rank,
            headers=[("v", rank.to_bytes(8, "big"))],
        )  # fmt: skip
        best[key] = max(best.get(key, (-1, -1, None)), (rank, at, value))
        if at % 2_000 == 1_999:
            assert producer.flush(SECONDS) == 0
            views.compact_and_expire()
    expected = {key: value for key, (_, _, value) in best.items() if value is not None}
    for family in FAMILIES:
        reader = family(broker, f"{topic}.compacted")
        reader.read_to_the_end()
        reader.close()
        assert reader.values == expected, family


# --- the command line -----------------------------------------------------------------------------


def test_the_status_tells_of_every_view(broker: VarveBroker, topic: str) -> None:
    make_topic(broker, topic, partitions=2)
    Writer(broker, topic).write(100)
    before = json.loads(varve(broker, "view", "status", topic, "--json"))["views"]
    assert [(row["partition"], row["state"], row["made_ms"]) for row in before] == [
        (0, "never", -1),
        (1, "never", -1),
    ]
    assert "was compacted below offset" in varve(broker, "view", "compact", topic, "1")
    after = json.loads(varve(broker, "view", "status", topic, "--json"))["views"]
    assert [row["state"] for row in after] == ["never", "done"]
    assert after[1]["horizon"] == after[1]["log_end_offset"]
    assert topic in varve(broker, "view", "status")
    assert broker.metric("varve_view_horizon", topic=topic, partition="1") == after[1]["horizon"]
    not_running = "no compaction is running or queued"
    assert f"{topic}-1: {not_running}" in varve(broker, "view", "abort", topic, "1")
    assert varve(broker, "view", "abort", topic).count(not_running) == len(after)


def test_what_cannot_be_compacted_is_refused_with_a_reason(broker: VarveBroker, topic: str) -> None:
    assert "there is no topic" in varve(broker, "view", "compact", topic, code=1)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(SECONDS)
    assert "has no view" in varve(broker, "view", "compact", topic, code=1)
    assert "has no view" in varve(broker, "view", "compact", topic, "0", code=1)


def test_a_producer_is_told_that_a_view_is_read_only(broker: VarveBroker, topic: str) -> None:
    make_topic(broker, topic)
    reported = []
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce(
        f"{topic}.compacted", b"1", b"a", on_delivery=lambda error, _: reported.append(error)
    )
    assert producer.flush(SECONDS) == 0
    assert [error.name() for error in reported] == ["TOPIC_AUTHORIZATION_FAILED"]
