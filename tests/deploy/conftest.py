"""A daemon with topics of every kind, and a Prometheus that scrapes it."""

import shutil
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, Producer

from tests.support.prometheus import Prometheus, running_prometheus
from tests.support.varve import VarveBroker, running_varve

SETTINGS = {
    "cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 200},
    "topics": {
        "customers": {"partitions": 2, "cleanup.policy": "compact", "varve.flush.on.ack": True},
        "prices": {"varve.view": "compacted"},
    },
}


@pytest.fixture(scope="package")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    with running_varve(tmp_path_factory.mktemp("varve"), SETTINGS) as running:
        producer = Producer({"bootstrap.servers": running.bootstrap})
        for topic in ("customers", "prices"):
            for number in range(100):
                producer.produce(topic, b"value", b"key-%d" % (number % 10))
        assert producer.flush(30) == 0
        consumer = Consumer(
            {
                "bootstrap.servers": running.bootstrap,
                "group.id": "readers",
                "auto.offset.reset": "earliest",
            }
        )
        consumer.subscribe(["customers"])
        message = consumer.poll(30)
        assert message is not None
        consumer.commit(message, asynchronous=False)
        consumer.close()
        yield running


@pytest.fixture(scope="package")
def prometheus(
    broker: VarveBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    target = f"127.0.0.1:{broker.http_port}"
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), target) as running:
        yield running
