"""What tests do on Kafka and on this broker before they send both the same requests."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from uuid import uuid4

from confluent_kafka.admin import AdminClient, NewTopic

from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from tests.support.peers.kafka import KafkaBroker
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

GROUP, TRANSACTION = 0, 1  # types of coordinators
PROBE = "probe"  # a group


def create_topics(brokers: Iterable[KafkaBroker | VarveBroker], topics: Mapping[str, int]) -> None:
    """Create topics, by name and number of partitions, that keep their records for ever."""
    for broker in brokers:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        config = {"retention.ms": "-1"}
        new = [NewTopic(name, count, 1, config=config) for name, count in topics.items()]
        for future in admin.create_topics(new).values():
            future.result(30)


def wait_until_assigned(
    brokers: Iterable[KafkaBroker | VarveBroker], topics: Mapping[str, int]
) -> None:
    """Wait until a member of a new group gets all partitions of the topics.

    Kafka's coordinator learns of topics a little after they have been created.
    """
    for broker in brokers:
        with RawClient(broker.port) as client:
            find_coordinator(client, GROUP, PROBE)
            wait_until(partial(_has_all, client, topics), f"the partitions of {sorted(topics)}")


def _has_all(client: RawClient, topics: Mapping[str, int]) -> bool:
    """Let a member join and leave, and return whether it got all partitions."""
    member_id = str(uuid4())
    joins = m.ConsumerGroupHeartbeatRequest(
        group_id=PROBE,
        member_id=member_id,
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=sorted(topics),
        topic_partitions=[],
    )
    leaves = m.ConsumerGroupHeartbeatRequest(group_id=PROBE, member_id=member_id, member_epoch=-1)
    answer: Any = client.request(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, joins)
    if answer.error_code != ErrorCode.NONE:
        return False
    client.request(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, leaves)
    assigned = answer.assignment.topic_partitions if answer.assignment else ()
    return sum(len(topic.partitions) for topic in assigned) == sum(topics.values())


def find_coordinator(client: RawClient, kind: int, name: str) -> None:
    """Ask for a coordinator until it is available: Kafka makes the internal topic then."""
    body = m.FindCoordinatorRequest(key_type=kind, coordinator_keys=[name])

    def is_found() -> bool:
        answer: Any = client.request(ApiKey.FIND_COORDINATOR, 4, body)
        return bool(answer.coordinators[0].error_code == ErrorCode.NONE)

    wait_until(is_found, f"a coordinator of {name}")
