"""kill -9 of the broker while a run hands back: the log says what it said, and the run goes on or
is refused; nothing of it is left in the end.
"""

import random
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from admin.client import ApiClient, UnreachableError
from cleaner.engine.clean import run_clean
from cleaner.remote_compaction import COMPACTIONS_PATH, AdoptOutcome
from pipeline.client.lease import Lease, LeaseClient, LeaseLostError
from storage.env import RealEnv
from tests.support.cleaner.cleaning import Recorder
from tests.support.draws import cases, seed_of_test
from tests.support.ports import free_port
from tests.support.reading import read_topics
from tests.support.varve import VarveBroker, start_varve
from tests.support.waiting import wait_until

ROUNDS = cases(few=2, many=5)
KEYS = 300
TOPIC = "orders"
SECONDS = 120
SETTINGS = {"cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB"}}
CONFIG = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1"}
Values = dict[bytes | None, bytes | None]


def produce(broker: VarveBroker, rng: random.Random, latest: Values, number: int) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5, "log_level": 0})
    for at in range(3_000):
        key = b"key-%d" % rng.randrange(KEYS)
        value = b"%d-%d" % (number, at)
        producer.produce(TOPIC, value, key)
        latest[key] = value
    assert producer.flush(SECONDS) == 0


def read_all(broker: VarveBroker) -> tuple[Values, int]:
    """The latest values, and how many records were read for them."""
    (records,) = read_topics(broker.bootstrap, [TOPIC]).values()
    return {record.key: record.value for record in records}, len(records)


def carry_out(lease: Lease) -> None:
    """On the broker's disk, and hand back."""
    (part,) = lease.plan.partitions
    out = Path(part.job.directory).parent / "out" / "attempt"
    out.mkdir()
    recorder = Recorder()
    report = run_clean(RealEnv(), replace(part.job, output_directory=str(out)), recorder)
    folders = ["attempt"] * len(recorder.groups)
    lease.submit(part.job, recorder.groups, folders, report, engine="test")


class Asking(threading.Thread):
    """Whoever asks for the adoption, and loses the broker over it."""

    def __init__(self, broker: VarveBroker, compaction_id: str) -> None:
        super().__init__()
        self._client = ApiClient(f"http://127.0.0.1:{broker.http_port}").below(
            f"{COMPACTIONS_PATH}/{compaction_id}"
        )

    def run(self) -> None:
        with suppress(UnreachableError):
            self._client.post("/adopt")


def adopted(broker: VarveBroker, compaction_id: str) -> AdoptOutcome:
    """What becomes of the run now that the broker is there again."""
    lease = LeaseClient(ApiClient(f"http://127.0.0.1:{broker.http_port}")).reopen(compaction_id)
    lease.end()
    try:
        (result,) = lease.adopt()
    except LeaseLostError:  # it was adopted before, and the log is another one since
        return AdoptOutcome.STALE
    if result.outcome is AdoptOutcome.NOTHING:
        lease.abandon()
    return result.outcome


def test_a_hand_back_survives_kills_of_the_broker_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(seed_of_test(1))
    port = free_port()
    broker = start_varve(tmp_path, SETTINGS, port=port)
    outcomes: list[AdoptOutcome] = []
    try:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic(TOPIC, 1, 1, config=CONFIG)])[TOPIC].result(SECONDS)
        latest: Values = {}
        staged = broker.data / f"{TOPIC}-0" / "varve.leases"
        for number in range(ROUNDS):
            produce(broker, rng, latest, number)
            leases = LeaseClient(ApiClient(f"http://127.0.0.1:{broker.http_port}"))
            lease = leases.open(TOPIC, roll=True)
            lease.end()  # nobody keeps it alive: it has two minutes
            asking = Asking(broker, lease.plan.compaction_id)
            # Before anything is made; before it is asked for; at once; and at any moment after.
            if number > 0:
                carry_out(lease)
            if number > 1:
                asking.start()
            if number > 2:
                asking.join(rng.uniform(0.2, 2))
            broker.kill()
            if number > 1:
                asking.join()
            broker = start_varve(tmp_path, SETTINGS, port=port)
            assert read_all(broker)[0] == latest
            outcomes.append(adopted(broker, lease.plan.compaction_id))
            values, count = read_all(broker)
            assert values == latest
            assert count == len(latest) or outcomes[-1] is AdoptOutcome.NOTHING, outcomes
            wait_until(lambda: not staged.exists() or not any(staged.iterdir()), "swept", SECONDS)
        print(outcomes)
        assert outcomes[:2] == [AdoptOutcome.NOTHING, AdoptOutcome.ADOPTED]
        assert broker.stop() == 0
    finally:
        if broker.process.poll() is None:
            broker.kill()
