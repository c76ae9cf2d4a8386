"""Quotas as clients of librdkafka see them."""

import json
import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

from protocol import messages as m
from protocol.api import ApiKey
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker, running_varve


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    with running_varve(tmp_path_factory.mktemp("quotas")) as running:
        yield running


def test_librdkafka_learns_its_throttle_time(own_broker: VarveBroker) -> None:
    client_id = f"limited-{uuid.uuid4().hex[:8]}"
    entry = m.AlterClientQuotasRequestEntry(
        entity=[m.AlterClientQuotasRequestEntity(entity_type="client-id", entity_name=client_id)],
        ops=[m.AlterClientQuotasRequestOp(key="producer_byte_rate", value=20_000.0)],
    )
    with RawClient(own_broker.port) as client:
        client.request(ApiKey.ALTER_CLIENT_QUOTAS, 1, m.AlterClientQuotasRequest(entries=[entry]))
    throttle_ms: list[int] = []

    def note_statistics(text: str) -> None:
        throttle_ms.extend(row["throttle"]["max"] for row in json.loads(text)["brokers"].values())

    producer = Producer(
        {
            "bootstrap.servers": own_broker.bootstrap,
            "client.id": client_id,
            "statistics.interval.ms": 100,
            "stats_cb": note_statistics,
            "linger.ms": 1,
        }
    )
    for _ in range(26):
        producer.produce("limited", bytes(10_000))
        producer.flush(30)
    producer.poll(0.2)
    assert max(throttle_ms) > 100
    assert own_broker.metric("varve_quota_throttled_responses_total", client_id=client_id) >= 1
