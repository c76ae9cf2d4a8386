"""kill -9 while producers write, segments roll and the cleaner works: what was acknowledged stays.

One set of producers lives through all kills, as real ones do: they reconnect and send again what
was not acknowledged. Each kill comes after a random number of acknowledgements.
"""

import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.draws import cases
from tests.support.ports import free_port
from tests.support.reading import SeenRecord, View, read_topics
from tests.support.varve import VarveBroker, start_varve
from tests.support.waiting import wait_until

KILLS = cases(few=2, many=3)
KEYS = 200
UNDER_WAY = 2000  # records a producer holds at most: what a restart has to take at once
LOG, TABLE, GENERATIONS = "log", "table", "generations"
TABLES = (TABLE, GENERATIONS)
CLEANER = {"workers": 1, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 50}
SETTINGS: dict[str, Any] = {
    "cleaner": CLEANER,
    # Short, so that recovery points lie in the middle of what is written.
    "checkpoint_interval_ms": 100,
    "retention_check_interval_ms": 100,
}
CONFIGS: dict[str, dict[str, str]] = {
    "default": {},
    "flush-on-ack": {"varve.flush.on.ack": "true"},
}
TABLE_CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": "1048576",
    "segment.ms": "300",
    "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "100",
    "varve.cleaner.strategy": "dirty-ratio",
}
GENERATIONS_CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": "1048576",
    "segment.ms": "300",
    "min.cleanable.dirty.ratio": "0.4",
    "varve.cleaner.strategy": "generational",  # the records are large enough
    "varve.compaction.slack": "0.2",
}


class Sent(NamedTuple):
    """What was sent under one number, and where it was acknowledged."""

    topic: str
    key: bytes
    offset: int  # -1: acknowledged as a duplicate of what was there before


@dataclass
class Writer:
    """A producer in its own thread, and what was acknowledged to it."""

    name: str
    idempotent: bool
    rng: random.Random
    newest: dict[tuple[str, bytes], int] = field(default_factory=dict)  # table and key -> number
    acked: dict[int, Sent] = field(default_factory=dict)  # by number
    refused: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    limit: int = 0  # numbers it may use: enough to be busy at the kill, few enough to be compared

    def start(self, bootstrap: str) -> None:
        options: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "enable.idempotence": self.idempotent,
            "linger.ms": 2,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
            "retry.backoff.ms": 20,
            "message.timeout.ms": 60_000,
            "log_level": 0,
        }
        if not self.idempotent:
            # Several in flight could change places when they are sent again, and that is allowed.
            options["max.in.flight.requests.per.connection"] = 1
        run = threading.Thread(target=self._run, args=(Producer(options),), daemon=True)
        self._thread = run
        run.start()

    def finish(self) -> None:
        """Send what is left, and wait until all of it is acknowledged."""
        self.stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), f"{self.name} could not send everything"
        assert not self.refused, self.refused[:3]

    def _run(self, producer: Producer) -> None:
        number = 0
        while not self.stop.is_set():
            if number >= self.limit or len(producer) > UNDER_WAY:
                producer.poll(0.02)
                continue
            self._send(producer, number)
            number += 1
            if number % 50 == 0:
                producer.poll(0)
        producer.flush(50)

    def _send(self, producer: Producer, number: int) -> None:
        topic = LOG if number % 2 else TABLES[number // 2 % 2]
        key = f"{self.name}-{self.rng.randrange(KEYS)}".encode()
        value = f"{self.name} {number} ".encode() + b"x" * self.rng.randrange(300, 700)
        if topic in TABLES:
            self.newest[topic, key] = number
        producer.produce(topic, value, key, on_delivery=self._delivered)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.refused.append(str(error))
            return
        sent = Sent(str(message.topic()), message.key() or b"", int(message.offset()))
        self.acked[number_in(message.value())] = sent


def number_in(value: bytes | None) -> int:
    return int((value or b"").split(b" ", 2)[1])


def source_of(record: SeenRecord) -> tuple[str, int]:
    """Which writer wrote it, under which number."""
    name, number, _ = (record.value or b"").split(b" ", 2)
    return name.decode(), int(number)


def create_topics(broker: VarveBroker, config: dict[str, str]) -> None:
    new = [
        NewTopic(LOG, config={"segment.bytes": "1048576", **config}),
        NewTopic(TABLE, config={**TABLE_CONFIG, **config}),
        NewTopic(GENERATIONS, config={**GENERATIONS_CONFIG, **config}),
    ]
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_topics(new).values():
        future.result(30)


def assert_kept(view: View, writer: Writer, acked: dict[int, Sent]) -> None:
    """Of the deleted topic every acknowledged record, of the compacted ones each key's last."""
    by_offset = {record.offset: source_of(record) for record in view[LOG, 0]}
    present = set(by_offset.values())
    newest = {
        (table, record.key or b""): number_in(record.value)
        for table in TABLES
        for record in view[table, 0]
    }
    last_acked: dict[tuple[str, bytes], int] = {}
    for number, sent in sorted(acked.items()):
        source = (writer.name, number)
        if sent.topic in TABLES:
            last_acked[sent.topic, sent.key] = number
            continue
        assert source in present, f"{source} was acknowledged and is lost"
        assert sent.offset < 0 or by_offset.get(sent.offset) == source, f"{source} has moved"
    for key, number in last_acked.items():
        result = newest.get(key, -1)
        assert number <= result <= writer.newest[key], f"{key!r}: acked {number}, found {result}"


def assert_each_once_and_in_order(view: View, writer: Writer) -> None:
    """What idempotence promises, whatever was sent again after a kill."""
    for records in view.values():
        numbers = [n for name, n in map(source_of, records) if name == writer.name]
        assert numbers == sorted(set(numbers))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", list(CONFIGS)[: cases(few=1, many=2)])
@pytest.mark.parametrize("seed", [1])
def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path, name: str, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    port = free_port()
    broker = start_varve(tmp_path, SETTINGS, port=port)
    create_topics(broker, CONFIGS[name])
    writers = [Writer(name, name == "once", random.Random(seed)) for name in ("once", "again")]
    for writer in writers:
        writer.start(broker.bootstrap)
    try:
        for _ in range(KILLS):
            wait_for_a_clean(broker, writers)
            wait_for_acknowledgements(writers, rng.randrange(500, 9_000))
            broker.kill()
            acked = [dict(writer.acked) for writer in writers]
            broker = start_varve(tmp_path, SETTINGS, port=port)
            view = read_topics(broker.bootstrap, [LOG, *TABLES])
            for writer, sents in zip(writers, acked, strict=True):
                assert_kept(view, writer, sents)
        for writer in writers:
            writer.finish()
        view = read_topics(broker.bootstrap, [LOG, *TABLES])
        for writer in writers:
            assert_kept(view, writer, writer.acked)
        assert_each_once_and_in_order(view, writers[0])
        assert_segments_were_rolled_and_cleaned(broker, writers)
    finally:
        for writer in writers:
            writer.stop.set()
        broker.kill()


def wait_for_a_clean(broker: VarveBroker, writers: list[Writer]) -> None:
    """Until this process has cleaned the table: else the kill may come before its worker starts."""
    acked = sum(len(writer.acked) for writer in writers)
    for writer in writers:
        writer.limit = acked + UNDER_WAY
    started = broker.log_text.rindex('"event": "ready"')
    wait_until(
        lambda: '"event": "clean finished"' in broker.log_text[started:], "the table is cleaned", 60
    )


def wait_for_acknowledgements(writers: list[Writer], more: int) -> None:
    """Until `more` records were acknowledged; the writers are still writing then."""
    expected = sum(len(writer.acked) for writer in writers) + more
    for writer in writers:
        writer.limit = expected + 2 * UNDER_WAY
    wait_until(
        lambda: sum(len(writer.acked) for writer in writers) >= expected, f"{expected} in all"
    )


def assert_segments_were_rolled_and_cleaned(broker: VarveBroker, writers: list[Writer]) -> None:
    """And nothing went wrong in the broker meanwhile."""
    assert len(list((broker.data / f"{LOG}-0").glob("*.log"))) > 2
    sents = [sent.topic for writer in writers for sent in writer.acked.values()]
    wait_until(
        lambda: all(
            len(records) < sents.count(table) / 2
            for (table, _), records in read_topics(broker.bootstrap, TABLES).items()
        ),
        f"less than half of {len(sents)} records are left in each table",
        60,
    )
    assert "Traceback" not in broker.log_text
    assert '"exception"' not in broker.log_text
