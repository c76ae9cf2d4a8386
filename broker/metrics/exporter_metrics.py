"""Metrics of topics and partitions under names that dashboards for Kafka clusters ask for.

`kafka_brokers` and `kafka_topic_*` are those of kafka_exporter, `kafka_cluster_partition_*` those
of Kafka's brokers. They repeat what other metrics say, or what one broker without replication makes
constant, in eleven series for each partition; so `metrics.exporter_names` has to ask for them.

An offline partition has a replica that is not in sync, no leader, and no offsets, as in Metadata.
A partition that is served has as many replicas in sync as Kafka requires of it (the lesser of
min.insync.replicas and the replication factor), so it is "at" this number and never below it.
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from broker.metrics.families import gauge
from broker.network.request_context import Services
from broker.topics.topics import Topic

STEP_PARTITIONS: Final = 16  # between two places where other tasks may run: eleven series each
PARTITION_GAUGES: Final = (
    ("kafka_topic_partition_leader", "Id of the broker that leads the partition"),
    ("kafka_topic_partition_current_offset", "High watermark"),
    ("kafka_topic_partition_oldest_offset", "Log start offset"),
    ("kafka_topic_partition_replicas", "Replicas"),
    ("kafka_topic_partition_in_sync_replica", "Replicas in sync"),
    ("kafka_topic_partition_leader_is_preferred", "1 if the first replica leads"),
    ("kafka_topic_partition_under_replicated_partition", "1 if a replica is not in sync"),
    ("kafka_cluster_partition_replicascount", "Replicas of a partition that has a leader"),
    ("kafka_cluster_partition_underreplicated", "1 if a replica is not in sync with the leader"),
    ("kafka_cluster_partition_atminisr", "1 if just enough replicas are in sync"),
    ("kafka_cluster_partition_underminisr", "1 if too few replicas are in sync"),
)
# Without an offset and without a leader: None has no sample.
OFFLINE: Final = (None, None, None, 1, 0, 0, 1, 0, 0, 0, 0)


class ExporterMetrics:
    """Reads the topics, if the settings ask for these names."""

    def __init__(self, services: Services, version: str) -> None:
        self._services = services
        self._version = version

    def steps(self) -> Iterator[Metric | None]:
        """Yield every family, and None where other tasks may run; nothing if switched off."""
        if not self._services.settings.metrics.exporter_names:
            return
        counts = GaugeMetricFamily("kafka_topic_partitions", "Partitions", labels=["topic"])
        families = [
            GaugeMetricFamily(name, text, labels=["topic", "partition"])
            for name, text in PARTITION_GAUGES
        ]
        done = 0
        for topic in tuple(self._services.topics):
            counts.add_metric([topic.name], topic.partition_count)
            for index, values in self._partitions(topic):
                for family, value in zip(families, values, strict=True):
                    if value is not None:
                        family.add_metric([topic.name, str(index)], value)
                done += 1
                if done % STEP_PARTITIONS == 0:
                    yield None
        yield from self._cluster()
        yield from (counts, *families)

    def _partitions(self, topic: Topic) -> Iterator[tuple[int, tuple[float | None, ...]]]:
        for index, partition in tuple(topic.partitions.items()):
            end, start = partition.log.high_watermark, partition.log.log_start_offset
            yield index, (self._services.node_id, end, start, 1, 1, 1, 0, 1, 0, 1, 0)
        for index in topic.offline.keys() - topic.partitions.keys():
            yield index, OFFLINE

    def _cluster(self) -> Iterator[Metric]:
        yield gauge("kafka_brokers", "Brokers", 1)
        information = GaugeMetricFamily(
            "kafka_exporter_build_info",
            "Always 1; dashboards for kafka_exporter find their targets by it",
            labels=["version"],
        )
        information.add_metric([self._version], 1)
        yield information
        elections = CounterMetricFamily(
            "kafka_controller_controllerstats_uncleanleaderelections",
            "Always 0: a partition has one replica",
        )
        elections.add_metric([], 0)
        yield elections
