"""What /metrics says, and that nothing is counted for nobody."""

import asyncio
import re
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import broker.cleaner_metrics
import broker.metrics
from broker.groups.live_group import GroupStats
from broker.housekeeping import HousekeepingStats
from broker.listener import ListenerStats
from broker.stats import BrokerStats, LatencyHistogram, RejectStats, TopicStats
from cleaner.stats import PoolStats
from tests.support.broker_in_memory import broker_in_memory
from tests.support.logs import batch_of
from tests.support.memory_env import MemoryEnv
from tests.support.raw_client import RawClient

SOURCE = "".join(
    Path(module.__file__ or "").read_text() for module in (broker.metrics, broker.cleaner_metrics)
)
# Names that dashboards for Kafka look for.
KAFKA_NAMES = (
    "kafka_controller_kafkacontroller_activecontrollercount",
    "kafka_controller_kafkacontroller_offlinepartitionscount",
    "kafka_log_log_size",
    "kafka_log_logcleaner_max_compaction_delay_secs",
    "kafka_log_logcleanermanager_max_dirty_percent",
    "kafka_log_logcleanermanager_uncleanable_partitions_count",
    "kafka_log_logmanager_offlinelogdirectorycount",
    "kafka_network_requestmetrics_requests",
    "kafka_server_brokertopicmetrics_bytesin",
    "kafka_server_brokertopicmetrics_bytesout",
    "kafka_server_brokertopicmetrics_messagesin",
    "kafka_server_delayedoperationpurgatory_purgatorysize",
    "kafka_server_replicamanager_leadercount",
    "kafka_server_replicamanager_partitioncount",
    "kafka_server_replicamanager_underreplicatedpartitions",
    "process_resident_memory_bytes",
)


@pytest.mark.parametrize(
    "counters",
    [BrokerStats, GroupStats, HousekeepingStats, ListenerStats, PoolStats, RejectStats, TopicStats],
    ids=lambda counters: counters.__name__,
)
def test_whatever_is_counted_is_exported(counters: type) -> None:
    names = {field.name for field in fields(counters)}
    assert {name for name in names if not re.search(rf"\.{name}\b", SOURCE)} == set()


async def test_numbers_move_under_the_names_dashboards_know() -> None:
    async with broker_in_memory(MemoryEnv(seed=3), topics={"orders": {}}) as running:
        client = RawClient(running.addresses[0].port)
        with client:
            await asyncio.to_thread(client.produce, "orders", bytes(batch_of(b"one", b"two")))
            await asyncio.to_thread(client.produce, "orders", b"\xff" * 80)
            await asyncio.to_thread(client.fetch, "orders")

        def scrape() -> str:
            with urllib.request.urlopen(f"http://{running.http_address}/metrics") as answer:
                return str(answer.read().decode())

        families = {
            family.name: family
            for family in text_string_to_metric_families(await asyncio.to_thread(scrape))
        }
    assert set(KAFKA_NAMES) <= families.keys()

    def value(family: str, **labels: str) -> float:
        found = [
            sample.value
            for sample in families[family].samples
            if sample.labels == labels and not sample.name.endswith("_created")
        ]
        assert len(found) == 1, (family, labels, families[family].samples)
        return found[0]

    assert value("kafka_server_brokertopicmetrics_messagesin", topic="orders") == 2
    assert value("kafka_server_brokertopicmetrics_failedproducerequests", topic="orders") == 1
    assert value("kafka_server_brokertopicmetrics_totalfetchrequests", topic="orders") == 1
    assert value("kafka_log_log_logendoffset", topic="orders", partition="0") == 2
    assert value("kafka_network_requestmetrics_requests", request="Produce", version="9") == 2
    assert value("varve_connections_accepted") == 1
    assert value("varve_clock_trusted") == 1


def test_a_quantile_is_exact_to_a_factor_of_two() -> None:
    latency = LatencyHistogram()
    assert latency.quantile_ms(0.99) == 0.0
    for microseconds in [100] * 99 + [900_000]:
        latency.add(microseconds)
    assert 0.1 <= latency.quantile_ms(0.5) <= 0.2
    assert 900 <= latency.quantile_ms(0.999) <= 1800
