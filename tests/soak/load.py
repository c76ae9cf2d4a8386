"""Writers that never stop, and what a reader must find of what was acknowledged to them."""

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, Message, Producer

from tests.support.reading import SeenRecord

UNDER_WAY: Final = 2000  # records a producer holds at most
TOMBSTONES: Final = 0.1
FINISH_SECONDS: Final = 90


@dataclass
class KeyState:
    """One key of one writer. Numbers grow with every record of the writer."""

    sent: int = -1
    acked: int = -1
    acked_at: float = 0.0  # monotonic
    last_tombstone: int = -1  # the last one sent
    value_bytes: int = 0  # of the last record sent


@dataclass(frozen=True)
class Acknowledged:
    """What was known of one key before somebody began to read."""

    acked: int
    acked_at: float


@dataclass
class Writer:
    """An idempotent producer in a thread; its keys are its own, so their order is known."""

    topic: str
    name: str
    rng: random.Random
    keys: int
    records_per_second: float
    value_bytes: int
    codec: str
    state: dict[bytes, KeyState] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    sent: int = 0
    acked: int = 0
    sent_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self, bootstrap: str) -> None:
        options: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "compression.type": self.codec,
            "linger.ms": 5,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
            "retry.backoff.ms": 20,
            "message.timeout.ms": 120_000,
            "log_level": 0,
        }
        run = threading.Thread(target=self._run, args=(Producer(options),), daemon=True)
        self._thread = run
        run.start()

    def finish(self) -> None:
        """Send what is left, and wait until all of it is acknowledged."""
        self._stop.set()
        self._thread.join(FINISH_SECONDS)
        assert not self._thread.is_alive(), f"{self.name} could not send everything"
        self.check()

    def check(self) -> None:
        """Nothing was refused so far."""
        assert not self.refused, f"{self.name}: {self.refused[:3]}"

    def acknowledged(self) -> dict[bytes, Acknowledged]:
        """What has been acknowledged up to now."""
        with self.lock:
            return {
                key: Acknowledged(state.acked, state.acked_at) for key, state in self.state.items()
            }

    def live_bytes(self) -> int:
        """What one record of each key takes, without compression."""
        with self.lock:
            return sum(state.value_bytes + len(key) + 40 for key, state in self.state.items())

    def _run(self, producer: Producer) -> None:
        began = time.monotonic()
        while not self._stop.is_set():
            due = (time.monotonic() - began) * self.records_per_second
            if self.sent >= due or len(producer) > UNDER_WAY:
                producer.poll(0.005)
                if len(producer) > UNDER_WAY:
                    began = time.monotonic() - self.sent / self.records_per_second
                continue
            self._send(producer)
            if self.sent % 50 == 0:
                producer.poll(0)
        producer.flush(FINISH_SECONDS - 10)

    def _send(self, producer: Producer) -> None:
        number = self.sent
        # Some keys are hot, most are cold.
        place = min(self.rng.randrange(self.keys), self.rng.randrange(self.keys))
        key = f"{self.name}/{place}".encode()
        value = None
        if self.rng.random() >= TOMBSTONES:
            value = self.rng.randbytes(self.rng.randrange(1, self.value_bytes))
        headers = [("number", str(number).encode())]
        with self.lock:
            state = self.state.setdefault(key, KeyState())
            state.sent = number
            state.value_bytes = len(value or b"")
            if value is None:
                state.last_tombstone = number
            self.sent += 1
            self.sent_bytes += len(key) + len(value or b"") + 40
        delivered = partial(self._delivered, key, number)
        producer.produce(self.topic, value, key, headers=headers, on_delivery=delivered)

    def _delivered(
        self, key: bytes, number: int, error: KafkaError | None, message: Message
    ) -> None:
        if error is not None:
            self.refused.append(str(error))
            return
        with self.lock:
            state = self.state[key]
            state.acked = max(state.acked, number)
            state.acked_at = time.monotonic()
            self.acked += 1


def number_of(record: SeenRecord) -> int:
    """Its writer's number for it."""
    return int(dict(record.headers)["number"] or b"")


def check_view(
    writer: Writer,
    reporters: Mapping[bytes, Acknowledged],
    records: list[SeenRecord],
    *,
    kept_since: float | None = None,
) -> None:
    """What a reader from the beginning saw, that began after `reporters` was taken.

    Of every key the last acknowledged value, or a later one that was sent, and nothing where that
    one is a tombstone; records in the order in which they were written. `kept_since`: what was
    acknowledged before may be gone by retention, too.
    """
    newest: dict[bytes, SeenRecord] = {}
    for record in records:
        key = record.key or b""
        if key.partition(b"/")[0] != writer.name.encode():
            continue
        earlier = newest.get(key)
        if earlier is not None:
            where = f"{key!r} at {earlier.offset} and {record.offset}"
            assert number_of(earlier) < number_of(record), f"order of {where}"
        newest[key] = record
    for key, reporter in reporters.items():
        seen_record = newest.get(key)
        with writer.lock:
            state = writer.state[key]
            last_sent, last_tombstone = state.sent, state.last_tombstone
        if seen_record is None:
            expired = kept_since is not None and reporter.acked_at < kept_since
            is_deleted = last_tombstone >= reporter.acked
            assert is_deleted or expired or reporter.acked < 0, (
                f"{key!r}: number {reporter.acked} is lost"
            )
            continue
        number = number_of(seen_record)
        assert reporter.acked <= number <= last_sent, (
            f"{key!r} has number {number}, acknowledged was {reporter.acked}, sent {last_sent}"
        )
