"""What the pool counts. Plain numbers; the metrics collector reads them when it is asked."""

from dataclasses import dataclass, field

from cleaner.job import CleanReport
from storage.model import TopicPartition


@dataclass(slots=True)
class LastClean:
    """One worker's last finished job, for the gauges that Kafka has of a thread's last clean."""

    partition: TopicPartition
    seconds: float
    report: CleanReport


@dataclass(slots=True)
class PoolStats:
    """Counters since the start, and the findings of the last look over all partitions."""

    cleans: int = 0  # jobs that came to their end
    expiries: int = 0  # of these, for tombstones past their horizon alone
    adoptions: int = 0  # jobs done outside of the pool that were published; not among the cleans
    aborted: int = 0  # jobs given up because somebody wanted the partition
    failures: int = 0  # attempts that failed, for whatever reason
    stale: int = 0  # jobs void because the log had changed under them
    groups_published: int = 0
    groups_dropped: int = 0  # their sources had gone, or the job was being given up
    clean_seconds: float = 0.0
    read_bytes: int = 0  # charged to the budgets, also by jobs that did not end well
    written_bytes: int = 0
    read_wait_seconds: float = 0.0  # lost in waiting for the budgets
    write_wait_seconds: float = 0.0
    bytes_before: int = 0  # of finished jobs
    bytes_after: int = 0
    records_before: int = 0
    records_after: int = 0
    tombstones_removed: int = 0
    maps_full: int = 0
    worker_starts: int = 0
    worker_deaths: int = 0  # unasked ends
    worker_kills: int = 0  # did not heed an abort or the stop
    last: dict[int, LastClean] = field(default_factory=dict)  # by worker
    # Of the last look over all partitions:
    scans: int = 0
    scan_failures: int = 0
    scanned_at: float | None = None  # the loop's clock, seconds
    scan_seconds: float = 0.0
    candidates: int = 0
    damaged_partitions: int = 0  # with a segment that is left as it is
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
