"""kill -9 of the broker while it erases keys: requests go on, and no value is left in a file."""

import random
import stat
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

from click.testing import CliRunner
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from admin.client import ApiClient
from admin.http.erase import erase
from broker.erasure.store import FILE_NAME
from storage.format.batch import Record, decode_records, walk_headers
from tests.support.draws import cases, seed_of_test
from tests.support.ports import free_port
from tests.support.varve import VarveBroker, start_varve
from tests.support.waiting import wait_until

ROUNDS = cases(few=2, many=8)
TOPIC = "orders"
SECONDS = 120
SETTINGS = {"cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB"}}
CONFIG = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1", "segment.bytes": "1048576"}


def produce(broker: VarveBroker, rng: random.Random, key: bytes) -> None:
    """Write some values of the key among many others, compressed and not."""
    for codec in ("none", "zstd"):
        settings = {"bootstrap.servers": broker.bootstrap, "linger.ms": 5, "log_level": 0}
        producer = Producer({**settings, "compression.type": codec})
        for at in range(2_000):
            owner = key if at % 500 == 0 else b"key-%d" % rng.randrange(1_000)
            producer.produce(
                TOPIC, b"of %s: " % owner + rng.randbytes(300), owner, partition=at % 2
            )
        assert producer.flush(SECONDS) == 0


def rows(broker: VarveBroker) -> dict[str, Any]:
    client = ApiClient(broker.url).below(f"/api/v1/topics/{TOPIC}/erasures")
    return {row["id"]: row for row in client.get("")["erasures"]}


def records(data: Path) -> Iterator[Record]:
    """Every record in every file with batches."""
    for path in data.rglob("*.log*"):
        content = path.read_bytes()
        for at, header in walk_headers(content):
            yield from decode_records(content, header, at)


def test_erasures_survive_kills_of_the_broker_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(seed_of_test(1))
    port = free_port()
    broker = start_varve(tmp_path, SETTINGS, port=port)
    keys = [b"ada-%d@example.org" % number for number in range(ROUNDS)]
    try:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic(TOPIC, 2, 1, config=CONFIG)])[TOPIC].result(SECONDS)
        for number, key in enumerate(keys):
            produce(broker, rng, key)
            arguments = [TOPIC, "--key", key.decode(), "--by", "1h", "--http", broker.url]
            result = CliRunner().invoke(erase, arguments)
            assert result.exit_code == 0, result.output
            mode = stat.S_IMODE((broker.data / FILE_NAME).stat().st_mode)
            assert mode == 0o600
            assert len(rows(broker)) == number + 1
            Event().wait(rng.uniform(0.0, 3.0))
            broker.kill()
            broker = start_varve(tmp_path, SETTINGS, port=port)
        wait_until(
            lambda: all(row["state"] == "complete" for row in rows(broker).values()),
            "every erasure is complete",
            SECONDS,
        )
        assert len(rows(broker)) == len(keys)
        result = CliRunner().invoke(erase, [TOPIC, "--status", "--http", broker.url])
        assert result.output.count("complete: no value of ") == len(keys)
        assert broker.stop() == 0
        assert not [
            record for record in records(broker.data) if record.value and record.key in keys
        ]
        assert b"ada-".hex() not in (broker.data / FILE_NAME).read_text()
    finally:
        if broker.process.poll() is None:
            broker.kill()
