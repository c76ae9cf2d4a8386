"""kill -9 while a view is compacted: the view is the old one or the new one, and never less."""

import random
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from admin.client import ApiClient, partition_path
from admin.http.views import ROOT
from tests.support.draws import cases, seed_of_test
from tests.support.ports import free_port
from tests.support.reading import read_topics
from tests.support.varve import VarveBroker, start_varve
from tests.support.waiting import wait_until

KILLS = cases(few=2, many=4)
KEYS = 500
TOPIC = "orders"
SECONDS = 120
SETTINGS = {"cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB"}}
Values = dict[bytes | None, bytes | None]


def produce(broker: VarveBroker, rng: random.Random, latest: Values, number: int) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5, "log_level": 0})
    for at in range(4_000):
        key = b"key-%d" % rng.randrange(KEYS)
        value = None if rng.random() < 0.1 else b"%d-%d" % (number, at)
        producer.produce(TOPIC, value, key)
        latest[key] = value
    assert producer.flush(SECONDS) == 0


def read_view(broker: VarveBroker) -> Values:
    (records,) = read_topics(broker.bootstrap, [f"{TOPIC}.compacted"]).values()
    values = {record.key: record.value for record in records}
    return {key: value for key, value in values.items() if value is not None}


class Views:
    """The API of a broker's views, for the one partition there is."""

    def __init__(self, broker: VarveBroker) -> None:
        self._api = ApiClient(f"http://127.0.0.1:{broker.http_port}").below(ROOT)
        self._path = partition_path(TOPIC, 0)
        self._folder = broker.data / f"{TOPIC}-0" / "varve.view"

    @property
    def horizon(self) -> int:
        return int(self._api.get(self._path)["horizon"])

    def begin(self) -> None:
        self._api.post(f"{self._path}/compact")

    def has_ended(self) -> bool:
        row = self._api.get(self._path)
        assert row["state"] in ("waiting", "running", "done"), row
        return bool(row["state"] == "done")

    def runs(self) -> int:
        """Folders of runs, published or not."""
        names = self._folder.iterdir() if self._folder.is_dir() else ()
        return sum(path.is_dir() for path in names)

    def has_output(self) -> bool:
        """Whether a worker has begun to write, or was too quick to be seen doing it."""
        return any(self._folder.rglob("*.cleaned")) or self.has_ended()

    def has_run_beyond(self, count: int) -> bool:
        return self.runs() > count


@pytest.mark.parametrize("strategy", ["timestamp", "offset"][: cases(few=1, many=2)])
def test_a_view_survives_kills_at_any_moment_of_its_compaction(
    tmp_path: Path, strategy: str
) -> None:
    rng = random.Random(seed_of_test(1))
    port = free_port()
    broker = start_varve(tmp_path, SETTINGS, port=port)
    try:
        config = {"varve.view": "compacted", "varve.view.min.bytes": "-1"}
        config["varve.view.strategy"] = strategy  # the producer's times ascend
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic(TOPIC, 1, 1, config=config)])[TOPIC].result(SECONDS)
        latest: Values = {}
        horizon = 0
        for number in range(KILLS):
            produce(broker, rng, latest, number)
            views = Views(broker)
            before = views.runs()
            views.begin()
            # Right away, at the first sign of the run, in its midst, or after its end.
            moment = rng.randrange(4)
            if moment:
                wait_until(partial(views.has_run_beyond, before), "a run begins", SECONDS)
            if moment == 3:
                wait_until(views.has_ended, "the run ends", SECONDS)
            if moment == 2:
                wait_until(views.has_output, "the worker writes", SECONDS)
            broker.kill()
            broker = start_varve(tmp_path, SETTINGS, port=port)
            views = Views(broker)
            assert views.horizon >= horizon, "a published view is not lost"
            horizon = views.horizon
            assert read_view(broker) == {k: v for k, v in latest.items() if v is not None}
        views = Views(broker)
        views.begin()
        wait_until(views.has_ended, "the run ends", SECONDS)
        wait_until(lambda: views.runs() == 1, "what was left is swept", SECONDS)
        assert read_view(broker) == {k: v for k, v in latest.items() if v is not None}
        assert broker.stop() == 0
    finally:
        if broker.process.poll() is None:
            broker.kill()
