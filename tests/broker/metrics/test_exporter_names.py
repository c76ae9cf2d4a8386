"""The names that dashboards of Strimzi and for kafka_exporter ask for."""

import asyncio
import re
import shutil

import pytest

from storage.errors import LogDirectoryError
from tests.broker.metrics.test_metrics import promtool, work
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import scraped
from tests.support.broker.metric_rules import complaints
from tests.support.storage.memory_env import MemoryEnv

TOPICS = {"orders": {"partitions": 2}, "viewed": {"keys": {"varve.view": "compacted"}}}
ON = {"exporter_names": True}

# Metrics in the queries of Strimzi's dashboards strimzi-kafka.json and strimzi-kafka-exporter.json
# (packaging/examples/metrics of the operator), and of Grafana's dashboard 7589.
DASHBOARD_NAMES = {
    "kafka_brokers",
    "kafka_cluster_partition_atminisr",
    "kafka_cluster_partition_replicascount",
    "kafka_cluster_partition_underminisr",
    "kafka_consumergroup_current_offset",
    "kafka_consumergroup_lag",
    "kafka_controller_controllerstats_uncleanleaderelections_total",
    "kafka_controller_kafkacontroller_activecontrollercount",
    "kafka_controller_kafkacontroller_offlinepartitionscount",
    "kafka_exporter_build_info",
    "kafka_log_log_size",
    "kafka_network_socketserver_networkprocessoravgidle_percent",
    "kafka_server_brokertopicmetrics_bytesin_total",
    "kafka_server_brokertopicmetrics_bytesout_total",
    "kafka_server_brokertopicmetrics_failedfetchrequests_total",
    "kafka_server_brokertopicmetrics_failedproducerequests_total",
    "kafka_server_brokertopicmetrics_messagesin_total",
    "kafka_server_brokertopicmetrics_totalfetchrequests_total",
    "kafka_server_brokertopicmetrics_totalproducerequests_total",
    "kafka_server_kafkarequesthandlerpool_requesthandleravgidle_percent",
    "kafka_server_kafkaserver_linux_disk_read_bytes",
    "kafka_server_kafkaserver_linux_disk_write_bytes",
    "kafka_server_replicamanager_leadercount",
    "kafka_server_replicamanager_partitioncount",
    "kafka_server_replicamanager_underreplicatedpartitions",
    "kafka_server_socket_server_metrics_connection_count",
    "kafka_topic_partition_current_offset",
    "kafka_topic_partition_in_sync_replica",
    "kafka_topic_partition_leader_is_preferred",
    "kafka_topic_partition_oldest_offset",
    "kafka_topic_partition_replicas",
    "kafka_topic_partition_under_replicated_partition",
    "kafka_topic_partitions",
    "process_cpu_seconds_total",
    "process_open_fds",
}
# The page on metrics says so: there are no such threads, and the kernel does not count the disk
# I/O of workers as the broker's. Panels about the JVM and Kubernetes are beside the point.
MISSING = {
    "kafka_network_socketserver_networkprocessoravgidle_percent",
    "kafka_server_kafkarequesthandlerpool_requesthandleravgidle_percent",
    "kafka_server_kafkaserver_linux_disk_read_bytes",
    "kafka_server_kafkaserver_linux_disk_write_bytes",
}


def names(page: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\w+) ", page, re.MULTILINE))


def samples(page: str, name: str, topic: str) -> dict[str, float]:
    """The value of each partition."""
    found = re.findall(rf'^{name}{{partition="(\d+)",topic="{topic}"}} (\S+)$', page, re.MULTILINE)
    return {partition: float(value) for partition, value in found}


async def test_dashboards_for_clusters_find_the_names_they_ask_for() -> None:
    async with broker_in_memory(MemoryEnv(seed=3), topics=TOPICS, metrics=ON) as running:
        await asyncio.to_thread(work, running.addresses[0].port)
        page = await scraped(running)
    assert DASHBOARD_NAMES - names(page) == MISSING
    assert 'kafka_topic_partitions{topic="orders"} 2.0' in page
    assert samples(page, "kafka_topic_partition_current_offset", "orders") == {"0": 6, "1": 0}
    assert samples(page, "kafka_topic_partition_oldest_offset", "orders") == {"0": 0, "1": 0}
    assert samples(page, "kafka_topic_partition_in_sync_replica", "orders") == {"0": 1, "1": 1}
    assert samples(page, "kafka_cluster_partition_atminisr", "orders") == {"0": 1, "1": 1}
    assert samples(page, "kafka_cluster_partition_underminisr", "orders") == {"0": 0, "1": 0}
    assert complaints(page) == set()
    if shutil.which("promtool"):
        checked = await asyncio.to_thread(promtool, page)
        assert (checked.stdout, checked.stderr) == ("", "")


async def test_an_offline_partition_has_no_leader_and_a_replica_out_of_sync() -> None:
    env = MemoryEnv(seed=3)
    async with broker_in_memory(env, topics=TOPICS, metrics=ON) as running:
        running.failed_directories.fail(LogDirectoryError("/disk1", "its disk failed"))
        page = await scraped(running)
    assert samples(page, "kafka_topic_partition_leader", "orders") == {}
    assert samples(page, "kafka_topic_partition_current_offset", "orders") == {}
    assert samples(page, "kafka_topic_partition_replicas", "orders") == {"0": 1, "1": 1}
    under_replicated = "kafka_topic_partition_under_replicated_partition"
    assert samples(page, under_replicated, "orders") == {"0": 1, "1": 1}


@pytest.mark.parametrize("setting", [{}, {"metrics": {"exporter_names": False}}])
async def test_names_for_clusters_cost_nothing_where_nobody_asks_for_them(setting: dict) -> None:
    async with broker_in_memory(MemoryEnv(seed=3), topics=TOPICS, **setting) as running:
        page = await scraped(running)
    assert not re.search(r"kafka_(topic|brokers|cluster|exporter)", page)
