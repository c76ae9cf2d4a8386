"""What tests do on Kafka and on this broker before they send both the same requests."""

from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka.admin import AdminClient, NewTopic

from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from tests.support.peers.kafka import KafkaBroker
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

GROUP, TRANSACTION = 0, 1  # types of coordinators


def create_topics(brokers: Iterable[KafkaBroker | VarveBroker], topics: Mapping[str, int]) -> None:
    """Create topics, by name and number of partitions, that keep their records for ever."""
    for broker in brokers:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        config = {"retention.ms": "-1"}
        new = [NewTopic(name, count, 1, config=config) for name, count in topics.items()]
        for future in admin.create_topics(new).values():
            future.result(30)


def find_coordinator(client: RawClient, kind: int, name: str) -> None:
    """Ask for a coordinator until it is available: Kafka makes the internal topic then."""
    body = m.FindCoordinatorRequest(key_type=kind, coordinator_keys=[name])

    def is_found() -> bool:
        answer: Any = client.request(ApiKey.FIND_COORDINATOR, 4, body)
        return bool(answer.coordinators[0].error_code == ErrorCode.NONE)

    wait_until(is_found, f"a coordinator of {name}")
