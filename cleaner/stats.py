"""The counters of the cleaner, read by the metrics collector."""

from dataclasses import dataclass, field

from cleaner.job import CleanReport
from storage.model import TopicPartition


@dataclass(slots=True)
class LastClean:
    """One worker's last finished job, for Kafka's gauges of a cleaner thread."""

    partition: TopicPartition
    seconds: float
    report: CleanReport


@dataclass(slots=True)
class PoolStats:
    """Counters since the start, and the figures of the last scan."""

    cleans: int = 0  # jobs that ran to their end
    expiries: int = 0  # of these, jobs that only removed expired tombstones
    adoptions: int = 0  # published remote cleans; not among `cleans`
    aborted: int = 0  # jobs that were aborted
    failures: int = 0  # failed attempts
    stale: int = 0  # jobs discarded because the log had changed
    groups_published: int = 0
    groups_dropped: int = 0  # because their sources were gone or the job was aborted
    clean_seconds: float = 0.0
    read_bytes: int = 0  # charged to the budgets, also by failed jobs
    written_bytes: int = 0
    key_index_bytes: int = 0  # that the broker wrote when it closed segments
    read_wait_seconds: float = 0.0  # of waiting for the budgets
    write_wait_seconds: float = 0.0
    bytes_before: int = 0  # of finished jobs
    bytes_after: int = 0
    records_before: int = 0
    records_after: int = 0
    tombstones_removed: int = 0
    maps_full: int = 0
    worker_starts: int = 0
    worker_deaths: int = 0  # that were not stopped, by a fault or a signal
    worker_kills: int = 0  # because they ignored an abort or the stop
    last: dict[int, LastClean] = field(default_factory=dict)  # by worker
    # Of the last scan:
    scans: int = 0
    scan_failures: int = 0
    scanned_at: float | None = None  # loop time, seconds
    scan_seconds: float = 0.0
    candidates: int = 0
    damaged_partitions: int = 0  # with a damaged segment
    dirty_ratio_max: float = 0.0
    over_lag_partitions: int = 0
    over_lag_ms_max: int = 0
    cleanable_bytes: int = 0  # dirty bytes below the first uncleanable offsets

    def count_report(self, worker: int, seconds: float, report: CleanReport) -> None:
        """Add a finished job."""
        self.cleans += 1
        self.clean_seconds += seconds
        self.bytes_before += report.bytes_before
        self.bytes_after += report.bytes_after
        self.records_before += report.records_before
        self.records_after += report.records_after
        self.tombstones_removed += report.tombstones_removed
        self.maps_full += report.map_full
        self.last[worker] = LastClean(report.partition, seconds, report)
