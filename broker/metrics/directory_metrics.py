"""Metrics of data directories: state, size, and progress of recovery.

The recovery gauges have Kafka's names. After startup they are 0. A timer measures the file systems
in a thread (`LogMaintenance.measure_disks`): the system call may not return if a disk is dead.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from broker.event_loop.directory_threads import DirectoryThreads
from broker.metrics.families import gauge
from broker.topics.log_maintenance import DiskSize
from storage.manager.log_manager import LogManager
from storage.manager.partition_table import PartitionTable

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
    for directory in manager.table.directories:
        logs.add_metric([directory.path], opening.remaining_logs.get(directory.path, 0))
        segments.add_metric([directory.path], opening.remaining_segments.get(directory.path, 0))
    yield from (logs, segments)


def directory_families(table: PartitionTable, disks: Mapping[str, DiskSize]) -> Iterator[Metric]:
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
    for directory in table.directories:
        failed += not directory.is_online
        offline.add_metric([directory.path], int(not directory.is_online))
        size = disks.get(directory.path)
        if size is not None:
            total.add_metric([directory.path], size.total_bytes)
            free.add_metric([directory.path], size.free_bytes)
    yield gauge("kafka_log_logmanager_offlinelogdirectorycount", "Data directories offline", failed)
    yield from (offline, total, free)


def hang_family(table: PartitionTable, threads: DirectoryThreads) -> Metric:
    """Return for how long the oldest sync of each data directory has been running."""
    family = GaugeMetricFamily(
        "varve_disk_longest_sync_seconds",
        "Time since the begin of the oldest unfinished sync of the data directory; 0 without one",
        labels=["directory"],
    )
    for directory in table.directories:
        family.add_metric([directory.path], threads.longest_seconds(directory.path))
    return family
