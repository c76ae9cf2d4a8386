"""One Kafka is filled and killed once; every test works on a copy of what it left."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.peers.kafka import KafkaBroker, running_kafka, unavailable
from tests.support.peers.killed_kafka import ADOPTER_SETTINGS, KilledKafka, make_killed_kafka
from tests.support.varve import VarveBroker, running_varve


@pytest.fixture(scope="session")
def real_kafka() -> None:
    """Asked for by what needs Apache Kafka; says truly why it cannot be had."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"Apache Kafka cannot be run here: {reason}")


@pytest.fixture(scope="session")
def killed_kafka(real_kafka: None, tmp_path_factory: pytest.TempPathFactory) -> KilledKafka:
    """What a killed Kafka left behind. Not to be opened: copies are."""
    return make_killed_kafka(tmp_path_factory.mktemp("killed") / "kafka")


@pytest.fixture(scope="module")
def adopted(
    killed_kafka: KilledKafka, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VarveBroker]:
    """The daemon on a copy, for tests that only look."""
    directory: Path = killed_kafka.copy_to(tmp_path_factory.mktemp("adopted"))
    with running_varve(directory, ADOPTER_SETTINGS) as running:
        yield running


@pytest.fixture(scope="session")
def kafka_and_varve(
    real_kafka: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[KafkaBroker, VarveBroker]]:
    """Both, for tests that ask them the same: with as many partitions of the internal topics, and
    assignments at once.
    """
    at_once = {"group.consumer.assignment.interval.ms": "0"}
    settings = {"groups": {"offsets_partitions": 4}, "transactions": {"state_partitions": 4}}
    with (
        running_kafka(tmp_path_factory.mktemp("kafka"), at_once) as kafka,
        running_varve(tmp_path_factory.mktemp("varve"), settings) as varve,
    ):
        yield kafka, varve
