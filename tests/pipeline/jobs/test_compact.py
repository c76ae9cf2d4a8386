"""`varve pipeline compact` against a real broker, on every engine and over both transports.

The broker publishes nothing that is not, byte for byte, what its own engine makes of the same job:
an adoption is the proof that the engines agree.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from config import exit_codes
from pipeline.cli import pipeline
from pipeline.client.lease import Lease
from tests.pipeline.cluster import (
    EXECUTOR_SETTINGS,
    OTHER_USER,
    Cluster,
    can_blind,
)
from tests.pipeline.conftest import BROKER_SETTINGS
from tests.support.draws import cases, only_in_ci
from tests.support.reading import read_topics
from tests.support.varve import VarveBroker, running_varve

ROOT = Path(__file__).parents[3]
RUN_SECONDS = 110
CLUSTER_SECONDS = 300  # of a test: a run on two cores is a driver and two executors, three JVMs
KEYS = 500
UPDATES = 20
# The broker's own cleaner has nothing to do: no log is more dirty than wholly so.
TOPIC_CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "min.cleanable.dirty.ratio": "1.0",
}
SPARK = ("--engine", "spark", "--memory", "512m")


def made_topic(broker: VarveBroker, topic: str, partitions: int = 2) -> dict[bytes, bytes]:
    """A topic with many updates of few keys; returns the last value of each key."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    new = NewTopic(topic, num_partitions=partitions, replication_factor=1, config=TOPIC_CONFIG)
    for future in admin.create_topics([new]).values():
        future.result(30)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5})
    last = {}
    for update in range(UPDATES):
        for number in range(KEYS):
            key, value = b"key-%d" % number, b"%d of %d %s" % (update, number, b"x" * 400)
            producer.produce(topic, key=key, value=value)
            last[key] = value
        producer.flush(30)
    return last


def read_all(broker: VarveBroker, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    """Every record that is left, by partition and offset."""
    view = read_topics(broker.bootstrap, [topic])
    return [(record.key, record.value) for records in view.values() for record in records]


def compact(broker: VarveBroker, topic: str, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "pipeline", "compact", topic, *options]
    return subprocess.Popen(
        [*command, "--json", "--http", f"127.0.0.1:{broker.http_port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def run_here(broker: VarveBroker, *arguments: str) -> Result:
    """Run a command of the pipeline in this process."""
    return CliRunner().invoke(pipeline, [*arguments, "--http", f"127.0.0.1:{broker.http_port}"])


def compacted(broker: VarveBroker, topic: str, *options: str) -> dict[str, Any]:
    """A run in this process that has to go well, and say nothing but its result."""
    done = run_here(broker, "compact", topic, "--json", *options)
    assert (done.exit_code, done.stderr) == (exit_codes.DONE, ""), done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def compacted_by_program(broker: VarveBroker, topic: str, *options: str) -> dict[str, Any]:
    """A run in a process of its own that has to go well, and say nothing but its result."""
    process = compact(broker, topic, *options)
    output, errors = process.communicate(timeout=RUN_SECONDS)
    assert (process.returncode, errors) == (exit_codes.DONE, ""), output
    answer: dict[str, Any] = json.loads(output)
    return answer


def assert_compacted(
    broker: VarveBroker, topic: str, last: dict[bytes, bytes], answer: dict[str, Any]
) -> None:
    assert [partition["outcome"] for partition in answer["partitions"]] == ["adopted"] * 2
    assert sum(partition["records_after"] for partition in answer["partitions"]) == KEYS
    assert sorted(read_all(broker, topic)) == sorted(last.items())


def states(broker: VarveBroker, topic: str) -> list[str]:
    """Of the topic's runs, as the broker remembers them."""
    document = json.loads(broker.get("/api/v1/remote-compactions"))["remote_compactions"]
    return [str(run["state"]) for run in document if run["topic"] == topic]


@pytest.mark.parametrize(
    "options",
    [
        ("--transport", "http"),
        ("--task-memory", "1KiB", "--task-size", "1KiB"),  # in shards, from the disk
        ("--transport", "disk"),
    ][: cases(few=2, many=3)],
    ids=" ".join,
)
@pytest.mark.usefixtures("forked_stages")
def test_a_topic_is_compacted_by_processes(
    broker: VarveBroker, topic: str, options: tuple[str, ...]
) -> None:
    last = made_topic(broker, topic)
    answer = compacted(broker, topic, "--processes", "2", *options)
    assert answer["engine"] == "local"
    assert_compacted(broker, topic, last, answer)
    again = compacted(broker, topic, "--processes", "1")
    assert all(
        partition["records_before"] == partition["records_after"]
        for partition in again["partitions"]
    )


def test_a_dry_run_tells_what_a_run_comes_to_and_changes_nothing(
    broker: VarveBroker, topic: str
) -> None:
    last = made_topic(broker, topic)
    before = read_all(broker, topic)
    answer = compacted_by_program(broker, topic, "--dry-run", "--processes", "2")
    assert [item["outcome"] for item in answer["partitions"]] == ["would"] * 2
    assert sum(item["keys"] for item in answer["partitions"]) == len(last)
    for partition in answer["partitions"]:
        assert partition["bytes_after"] < partition["bytes_before"] / 5
    assert read_all(broker, topic) == before
    assert states(broker, topic) == ["abandoned"]


@pytest.mark.usefixtures("forked_stages")
def test_what_was_left_is_adopted_later(broker: VarveBroker, topic: str) -> None:
    last = made_topic(broker, topic)
    before = read_all(broker, topic)
    answer = compacted(broker, topic, "--no-adopt", "--processes", "2")
    assert [partition["outcome"] for partition in answer["partitions"]] == ["handed back"] * 2
    assert read_all(broker, topic) == before
    for _ in range(2):  # a repeated request has the same response
        done = run_here(broker, "adopt", answer["compaction_id"])
        assert done.exit_code == exit_codes.DONE, done.stderr
        assert ": compacted" in done.stdout
    assert run_here(broker, "adopt", "no-such-run").exit_code == exit_codes.STALE
    assert sorted(read_all(broker, topic)) == sorted(last.items())


@pytest.mark.usefixtures("forked_stages")
def test_output_whose_adoption_a_restarted_broker_forgot_is_not_called_ready(
    broker: VarveBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that is killed after it published a partition has no result of it."""
    last = made_topic(broker, topic)
    adopt = Lease.adopt
    monkeypatch.setattr(Lease, "adopt", lambda lease: adopt(lease)[:1])
    done = run_here(broker, "compact", topic, "--processes", "2")
    assert done.exit_code == exit_codes.FAILED
    assert "which it may have published. Run the job again" in done.stdout
    assert "pipeline adopt" not in done.stdout
    assert sorted(read_all(broker, topic)) == sorted(last.items())


@pytest.mark.usefixtures("forked_stages")
def test_a_topic_that_is_leased_is_refused_and_can_be_tried_again(
    broker: VarveBroker, topic: str
) -> None:
    made_topic(broker, topic)
    answer = compacted(broker, topic, "--no-adopt", "--processes", "1")
    refused = run_here(broker, "compact", topic, "--json", "--processes", "1")
    assert (refused.exit_code, refused.stdout) == (exit_codes.STALE, "")
    assert len(refused.stderr.splitlines()) == 1
    done = run_here(broker, "adopt", answer["compaction_id"], "--abandon")
    assert done.exit_code == 0, done.stderr
    assert compacted(broker, topic, "--processes", "1")["partitions"][0]["outcome"] == "adopted"


@pytest.mark.parametrize(
    "number", cases(few=[signal.SIGTERM], many=[signal.SIGINT, signal.SIGTERM])
)
def test_an_interrupted_run_is_given_up(
    broker: VarveBroker, topic: str, number: signal.Signals
) -> None:
    made_topic(broker, topic)
    before = read_all(broker, topic)
    process = compact(
        broker, topic, "--processes", "1", "--task-memory", "1KiB", "--task-size", "1"
    )
    for _ in range(2000):
        if states(broker, topic):
            break
        threading.Event().wait(0.01)
    process.send_signal(number)
    output, errors = process.communicate(timeout=RUN_SECONDS)
    assert (process.returncode, output) == (exit_codes.INTERRUPTED, "")
    assert errors == "varve: interrupted; whatever was published is complete\n"
    assert states(broker, topic) == ["abandoned"]
    assert read_all(broker, topic) == before


@pytest.mark.usefixtures("forked_stages")
def test_an_empty_topic_has_nothing_to_compact(broker: VarveBroker, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    new = NewTopic(topic, num_partitions=1, replication_factor=1, config=TOPIC_CONFIG)
    for future in admin.create_topics([new]).values():
        future.result(30)
    answer = compacted(broker, topic, "--processes", "1")
    assert all(partition["records_before"] == 0 for partition in answer["partitions"])
    assert compacted(broker, topic, "--processes", "1", "--dry-run")["dry_run"] is True


@pytest.mark.spark
def test_a_topic_is_compacted_on_spark(broker: VarveBroker, topic: str) -> None:
    last = made_topic(broker, topic)
    answer = compacted_by_program(broker, topic, *SPARK, "--master", "local[2]")
    assert (answer["engine"], answer["transport"]) == ("spark", "disk")
    assert_compacted(broker, topic, last, answer)


# On a cluster -----------------------------------------------------------------------------


def on_cluster(cluster: Cluster) -> tuple[str, ...]:
    settings = [word for pair in EXECUTOR_SETTINGS.items() for word in ("--conf", "=".join(pair))]
    return (*SPARK, "--master", cluster.master, *settings)


@pytest.mark.spark
@pytest.mark.timeout(CLUSTER_SECONDS)
@only_in_ci("test_a_topic_is_compacted_on_spark runs the same stages on this machine")
def test_a_cluster_that_shares_the_disk_works_on_it(
    broker: VarveBroker, topic: str, cluster: Cluster
) -> None:
    last = made_topic(broker, topic)
    answer = compacted_by_program(broker, topic, *on_cluster(cluster), "--transport", "disk")
    assert answer["transport"] == "disk"
    assert_compacted(broker, topic, last, answer)


@pytest.mark.spark
@pytest.mark.timeout(CLUSTER_SECONDS)
@pytest.mark.skipif(not can_blind(), reason="needs root and setpriv")
@only_in_ci("test_a_topic_is_compacted_by_processes compacts in shards and over HTTP")
def test_a_cluster_that_cannot_read_the_disk_goes_by_http(
    topic: str, cluster: Cluster, tmp_path: Path
) -> None:
    """In shards, so that what stages leave for each other goes this way as well."""
    with running_varve(tmp_path / "varve", BROKER_SETTINGS) as broker:
        os.chown(broker.data, OTHER_USER, OTHER_USER)
        broker.data.chmod(0o700)
        last = made_topic(broker, topic)
        by_disk = compact(broker, topic, *on_cluster(cluster), "--transport", "disk")
        _, errors = by_disk.communicate(timeout=RUN_SECONDS)
        assert by_disk.returncode == exit_codes.FAILED
        assert "Permission denied" in errors  # they really cannot
        small = ("--task-memory", "1KiB", "--task-size", "1MiB")
        answer = compacted_by_program(broker, topic, *on_cluster(cluster), *small)
        assert answer["transport"] == "http"
        assert_compacted(broker, topic, last, answer)
