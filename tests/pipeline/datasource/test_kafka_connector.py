"""Spark's own Kafka connector against this broker: batch, stream with a checkpoint, sink.

It runs where its jars can be had (tests/support/peers/spark_kafka.py).
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from config.security.clients import Cluster
from pipeline.client.kafka_client import LATEST, WireClient
from pipeline.client.producer import BulkProducer
from pipeline.client.range_reader import ReadOptions, read_range
from pipeline.client.topics import create_topic
from storage.model import TopicPartition
from tests.pipeline.secured_broker import Secured
from tests.pipeline.spark_driver import environment
from tests.support.draws import cases, only_in_ci
from tests.support.peers import spark_kafka
from tests.support.varve import VarveBroker

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(900),
    only_in_ci("test_source.py has its schema, bounds and streams; tests/clients its requests"),
]
START_MS = 1_700_000_000_000
JOB_SECONDS = 300


@pytest.fixture(scope="module")
def connector(tmp_path_factory: pytest.TempPathFactory) -> Iterator["subprocess.Popen[str]"]:
    """A process with a session that has the connector; see kafka_connector_job.py."""
    reason = spark_kafka.unavailable()
    if reason is not None:
        pytest.skip(f"no Kafka connector of Spark: {reason}")
    log = tmp_path_factory.mktemp("connector") / "stderr"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.kafka_connector_job", *spark_kafka.jars()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(),
        )
    yield process
    process.communicate(timeout=JOB_SECONDS)
    assert process.returncode == 0, log.read_text()[-4000:]


@pytest.fixture
def topics(broker: VarveBroker, topic: str) -> tuple[str, str]:
    """One with 500 records in three partitions, and an empty one."""
    names = (topic, f"{topic}-copy")
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    new = [NewTopic(name, 3, config={"retention.ms": "-1"}) for name in names]
    for future in admin.create_topics(new).values():
        future.result()
    write(broker, topic, 0, 500)
    return names


def write(broker: VarveBroker, topic: str, first: int, end: int) -> None:
    with BulkProducer(Cluster(broker.bootstrap), {"compression.type": "zstd"}) as producer:
        for n in range(first, end):
            producer.send(
                topic,
                None if n % 10 == 9 else b"k%d" % n,
                None if n % 7 == 0 else b"v%d" % n,
                partition=n % 3,
                headers=[("n", b"%d" % n), ("none", None)] if n % 2 else None,
                timestamp_ms=START_MS + 1000 * n,
            )


def job(
    broker: VarveBroker,
    connector: "subprocess.Popen[str]",
    topics: tuple[str, str],
    **more: Any,
) -> Any:
    client = {"kafka.bootstrap.servers": broker.bootstrap}
    return run(connector, client=client, source=topics[0], sink=topics[1], **more)


def run(connector: "subprocess.Popen[str]", **document: Any) -> Any:
    assert connector.stdin is not None
    assert connector.stdout is not None
    print(json.dumps(document), file=connector.stdin, flush=True)
    while line := connector.stdout.readline():
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError("the session with the connector ended")


def content(broker: VarveBroker, topic: str) -> list[str]:
    """Keys, values and headers, in no order."""
    options = ReadOptions(columns=("key", "value", "headers"))
    with WireClient(Cluster(broker.bootstrap)) as client:
        places = [TopicPartition(topic, n) for n in range(3)]
        ends = client.offsets(dict.fromkeys(places, LATEST))
        return sorted(
            repr(row)
            for place in places
            for batch in read_range(client, place, 0, ends[place], options)
            for row in batch.to_pylist()
        )


def test_both_sources_give_the_same_rows_for_the_same_options(
    broker: VarveBroker, connector: "subprocess.Popen[str]", topics: tuple[str, str]
) -> None:
    start = json.dumps({topics[0]: {"0": 3, "1": -2, "2": 100}})
    end = json.dumps({topics[0]: {"0": 50, "1": -1, "2": 101}})
    same: list[tuple[dict[str, Any], int]] = [
        ({"includeHeaders": "true", "kafka.isolation.level": "read_committed"}, 500),
        ({"startingOffsets": start, "endingOffsets": end}, 47 + 167 + 1),
        ({"startingTimestamp": START_MS + 40_500, "endingTimestamp": START_MS + 99_000}, 58),
        ({}, 500),
        ({"minPartitions": 7}, 500),
    ]
    same = same[: cases(few=3, many=5)]
    options = [option for option, _ in same]
    answer = job(broker, connector, topics, what="compare", options=options)
    assert answer["counts"] == [count for _, count in same]
    assert answer["schemas"] == [True] * len(options)
    assert answer["equal"] == [True] * len(options)


def test_a_stream_goes_on_from_its_checkpoint_into_the_sink(
    broker: VarveBroker, connector: "subprocess.Popen[str]", topics: tuple[str, str], tmp_path: Path
) -> None:
    def follow() -> list[int]:
        more = {"what": "stream", "checkpoint": str(tmp_path)}
        return list(job(broker, connector, topics, **more)["batches"])

    first = follow()
    assert sum(first) == 500
    assert len(first) > 2
    write(broker, topics[0], 500, 520)
    assert sum(follow()) == 20
    assert content(broker, topics[1]) == content(broker, topics[0])


def test_its_sink_writes_what_its_source_read(
    broker: VarveBroker, connector: "subprocess.Popen[str]", topics: tuple[str, str]
) -> None:
    job(broker, connector, topics, what="write")
    assert content(broker, topics[1]) == content(broker, topics[0])


def test_its_source_and_sink_sign_in_over_tls(
    secured: Secured, connector: "subprocess.Popen[str]", topic: str
) -> None:
    sink = f"{topic}-copy"
    secured.fill(topic)
    create_topic(secured.cluster, sink, 2, {})
    client = secured.options() | {"kafka.ssl.truststore.type": "PEM"}
    answer = run(connector, client=client, source=topic, sink=sink, what="compare", options=[{}])
    assert answer == {"schemas": [True], "counts": [100], "equal": [True]}
    run(connector, client=client, source=topic, sink=sink, what="write")
    answer = run(connector, client=client, source=sink, sink=sink, what="compare", options=[{}])
    assert answer == {"schemas": [True], "counts": [100], "equal": [True]}
