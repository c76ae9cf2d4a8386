"""Metrics of data directories: state, size, and progress of recovery.

The recovery gauges have Kafka's names. During startup they are the only metrics with values;
afterwards they are 0. A timer measures the file systems in a thread
(`Housekeeping.measure_disks`), because the system call may not return for a dead disk.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from broker.metrics.families import gauge
from broker.topics.log_maintenance import DiskSize
from storage.manager.log_manager import LogManager

LABELS: Final = ["logdirectory"]  # Kafka's, in lower case


def recovery_families(manager: LogManager) -> Iterator[Metric]:
    """Return the recovery work that is left, by data directory."""
    opening = manager.opening
    logs = GaugeMetricFamily(
        "kafka_log_logmanager_remaininglogstorecover",
        "Partitions that startup has not opened yet",
        labels=["dir"],
    )
    segments = GaugeMetricFamily(
        "kafka_log_logmanager_remainingsegmentstorecover",
        "Segments not verified yet in the partition under recovery",
        labels=["dir"],
    )
    for directory in manager.directories:
        logs.add_metric([directory.path], opening.remaining_logs.get(directory.path, 0))
        segments.add_metric([directory.path], opening.remaining_segments.get(directory.path, 0))
    yield from (logs, segments)


def directory_families(manager: LogManager, disks: Mapping[str, DiskSize]) -> Iterator[Metric]:
    """Return the state and size of each data directory."""
    offline = GaugeMetricFamily(
        "kafka_log_logmanager_logdirectoryoffline",
        "1 if the data directory is offline",
        labels=LABELS,
    )
    total = GaugeMetricFamily(
        "varve_disk_size_bytes", "Size of the data directory's file system", labels=["directory"]
    )
    free = GaugeMetricFamily(
        "varve_disk_free_bytes",
        "Bytes that can still be written to the data directory's file system",
        labels=["directory"],
    )
    failed = 0
    for directory in manager.directories:
        failed += not directory.is_online
        offline.add_metric([directory.path], int(not directory.is_online))
        size = disks.get(directory.path)
        if size is not None:
            total.add_metric([directory.path], size.total_bytes)
            free.add_metric([directory.path], size.free_bytes)
    yield gauge("kafka_log_logmanager_offlinelogdirectorycount", "Data directories offline", failed)
    yield from (offline, total, free)


class StartMetrics:
    """The metrics that are served while the broker opens its logs."""

    def __init__(self, manager: LogManager) -> None:
        self._manager = manager
        self._process = ProcessCollector(registry=None)

    async def snapshot(self) -> Sequence[Metric]:
        """Return every metric family of this phase."""
        return [
            *recovery_families(self._manager),
            *directory_families(self._manager, {}),
            *self._process.collect(),
        ]
