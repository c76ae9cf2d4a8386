"""The metrics of the cleaner, under Kafka's names where Kafka has the metric.

Only compacted topics have series by partition: each series takes 60 to 100 bytes of the response,
and a scraper stores all of them.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric

from broker.cleaning.key_recorder import KeyRecorder
from broker.metrics.families import counter, gauge
from broker.topics.topics import Topics
from cleaner.planning.plan import Verdict
from cleaner.planning.scheduling_order import Lane
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.scheduler.explain import blocked_by
from cleaner.scheduler.history import RECORDS_MAX, JobRecord
from cleaner.states import past_of
from config.settings import CleanerSettings
from storage.env import Env
from storage.manager.partition_table import PartitionTable

LABELS = ["topic", "partition"]
PARTITION_GAUGES = {
    "dirty_ratio": "Share of the clean and dirty bytes that no clean has read, 0 to 1",
    "dirty_bytes": "Bytes written since the last clean that can be cleaned now",
    "oldest_dirty_age_seconds": "Age in seconds of the oldest record that no clean has covered",
    "live_estimate_bytes":
        "Expected size of the clean and dirty part after a clean, estimated from earlier cleans",
    "live_bytes": "Bytes of live records, at most, in segments that a clean has read",
    "dead_bytes": "Bytes of superseded records, at least, in segments that a clean has read",
    "unresolved_bytes": "Bytes of segments that no clean has read",
    "deadline_slack_seconds":
        "Seconds until max.compaction.lag.ms is over; negative if it is exceeded",
    "last_job_throttle_wait_seconds":
        "Seconds that the last job waited for the read and write limits",
    "last_clean_timestamp_seconds": "Start of the last finished clean, seconds since 1970",
    "tombstones": "Tombstones that the last clean left in the clean part",
    "quarantined": "1 while in quarantine after a failed clean",
    "quarantined_until_seconds":
        "Time of the next attempt at a quarantined partition, seconds since 1970",
}  # fmt: skip
STEP_PARTITIONS = 32  # between two points where other tasks may run
STEP_QUARANTINES = 512


class CleanerMetrics:
    """Reads the counters of the pool and the result of its last scan."""

    def __init__(
        self,
        env: Env,
        table: PartitionTable,
        topics: Topics,
        pool: CleanerPool,
        key_recorder: KeyRecorder,
        *,
        settings: Callable[[], CleanerSettings],
    ) -> None:
        self._env = env
        self._table = table
        self._topics = topics
        self._pool = pool
        self._key_recorder = key_recorder
        self._settings = settings

    def steps(self) -> Iterator[Metric | None]:
        """Yield all families, and None where other tasks may run."""
        yield from self._kafka()
        yield from self._findings()
        yield from self._work()
        yield from self._quarantined()
        yield from self._by_partition()

    def _kafka(self) -> Iterator[Metric]:
        """Yield the gauges of Kafka's LogCleaner and LogCleanerManager; 0 before the first job."""
        stats = self._pool.stats
        last = [clean.report for clean in stats.last.values()]
        slowest = max((clean.seconds for clean in stats.last.values()), default=0.0)
        fullest = max((report.map_utilization for report in last), default=0.0)
        written = sum(report.bytes_written for report in last)
        recopied = 100 * written / max(1, sum(report.bytes_replaced for report in last))
        workers = self._pool.status().workers
        regular = sum(worker.lane is Lane.REGULAR for worker in workers)
        settings = self._settings()
        missing = (settings.workers if settings.enabled else 0) - regular
        since = 0.0
        if stats.scanned_at is not None:
            since = asyncio.get_running_loop().time() - stats.scanned_at
        for name, text, value in (
            ("kafka_log_logcleaner_cleaner_recopy_percent",
             "Bytes that the last clean of each worker wrote, in percent of its source segments",
             recopied),
            ("kafka_log_logcleaner_max_buffer_utilization_percent",
             "How full the key map was, in percent: the largest of the last cleans of all workers",
             100 * fullest),
            ("kafka_log_logcleaner_max_clean_time_secs",
             "Duration in seconds: the longest of the last cleans of all workers",
             slowest),
            ("kafka_log_logcleaner_max_compaction_delay_secs",
             "Largest time in seconds by which a record exceeds max.compaction.lag.ms",
             stats.over_lag_ms_max / 1000),
            ("kafka_log_logcleaner_deadthreadcount",
             "Number of workers that died and are not replaced yet",
             max(0, missing)),
            ("kafka_log_logcleanermanager_max_dirty_percent",
             "Largest dirty ratio of idle partitions, in percent",
             100 * stats.dirty_ratio_max),
            ("varve_cleaner_last_scan_age_seconds",
             "Seconds since the last scan of all partitions", since),
            ("varve_cleaner_key_memory_bytes",
             "Bytes of memory that the keys of active segments take, at most 64 MiB",
             self._key_recorder.memory_bytes),
        ):  # fmt: skip
            yield gauge(name, text, value)

    def _findings(self) -> Iterator[Metric]:
        stats = self._pool.stats
        for name, text, value in (
            ("varve_cleaner_cleanable_bytes",
             "Bytes of all partitions that can be cleaned now, written since their last cleans",
             stats.cleanable_bytes),
            ("varve_cleaner_over_lag_partitions",
             "Number of partitions with a dirty record older than max.compaction.lag.ms",
             stats.over_lag_partitions),
            ("varve_cleaner_candidates",
             "Number of partitions that are due for cleaning",
             stats.candidates),
            ("varve_cleaner_damaged_partitions", "Number of partitions with damaged segments",
             stats.damaged_partitions),
            ("varve_cleaner_scan_seconds", "Seconds that the last scan of all partitions took",
             stats.scan_seconds),
        ):  # fmt: skip
            yield gauge(name, text, value)

    def _work(self) -> Iterator[Metric]:
        stats = self._pool.stats
        for name, text, value in (
            ("varve_cleaner_cleans", "Number of jobs that finished", stats.cleans),
            ("varve_cleaner_expiries",
             "Number of finished jobs that only removed expired tombstones and markers",
             stats.expiries),
            ("varve_cleaner_adoptions",
             "Number of partitions whose remote compaction was published",
             stats.adoptions),
            ("varve_cleaner_aborts",
             "Number of jobs aborted by an operator, a deletion or a configuration change",
             stats.aborted),
            ("varve_cleaner_failures", "Number of jobs that failed", stats.failures),
            ("varve_cleaner_seconds", "Seconds spent in jobs", stats.clean_seconds),
            ("varve_cleaner_read_bytes", "Bytes that jobs read", stats.read_bytes),
            ("varve_cleaner_written_bytes", "Bytes that jobs wrote", stats.written_bytes),
            ("varve_cleaner_key_index_bytes",
             "Bytes of key indexes that the broker wrote when it closed segments",
             stats.key_index_bytes),
            ("varve_cleaner_read_wait_seconds", "Seconds that workers waited for the read limit",
             stats.read_wait_seconds),
            ("varve_cleaner_write_wait_seconds", "Seconds that workers waited for the write limit",
             stats.write_wait_seconds),
            ("varve_cleaner_records_before", "Records in the sources of finished jobs",
             stats.records_before),
            ("varve_cleaner_records_after", "Records in the output of finished jobs",
             stats.records_after),
            ("varve_cleaner_bytes_before",
             "Bytes in the sources of finished jobs",
             stats.bytes_before),
            ("varve_cleaner_bytes_after",
             "Bytes in the output of finished jobs",
             stats.bytes_after),
            ("varve_cleaner_tombstones_removed", "Tombstones that finished jobs removed",
             stats.tombstones_removed),
            ("varve_cleaner_maps_full",
             "Number of jobs whose key map was too small for the dirty section",
             stats.maps_full),
            ("varve_cleaner_stale_jobs", "Number of jobs discarded because the log had changed",
             stats.stale),
            ("varve_cleaner_groups_published", "Number of output segments published",
             stats.groups_published),
            ("varve_cleaner_groups_dropped",
             "Number of output segments discarded because retention deleted their sources",
             stats.groups_dropped),
            ("varve_cleaner_scans", "Number of scans of all partitions", stats.scans),
            ("varve_cleaner_scan_failures", "Number of scans, or of logs in a scan, that failed",
             stats.scan_failures),
            ("varve_cleaner_worker_starts", "Number of workers started", stats.worker_starts),
            ("varve_cleaner_worker_deaths", "Number of workers that died", stats.worker_deaths),
            ("varve_cleaner_worker_kills",
             "Number of workers killed because they did not respond",
             stats.worker_kills),
        ):  # fmt: skip
            yield counter(name, text, value)

    def _quarantined(self) -> Iterator[Metric | None]:
        labels = ["logdirectory"]
        # `promtool check metrics` accepts no gauge with a name that ends in _count.
        count = UnknownMetricFamily(
            "kafka_log_logcleanermanager_uncleanable_partitions_count",
            "Number of partitions in quarantine after a failed clean; they are retried",
            labels=labels,
        )
        size = GaugeMetricFamily(
            "kafka_log_logcleanermanager_uncleanable_bytes",
            "Dirty bytes of quarantined partitions",
            labels=labels,
        )
        results = {directory.path: [0, 0] for directory in self._table.directories}
        for index, quarantine in enumerate(tuple(self._pool.in_progress.quarantines()), 1):
            if index % STEP_QUARANTINES == 0:
                yield None
            partition = self._topics.partition(quarantine)
            totals = results.get(os.path.dirname(partition.log.directory)) if partition else None
            if totals is not None:
                verdict = self._pool.scanner.verdicts.get(quarantine)
                section = verdict.section if verdict else None
                totals[0] += 1
                totals[1] += section.dirty_bytes if section else 0
        for path, (partitions, dirty_bytes) in results.items():
            count.add_metric([path], partitions)
            size.add_metric([path], dirty_bytes)
        yield from (count, size)

    def _by_partition(self) -> Iterator[Metric | None]:
        families = {
            name: GaugeMetricFamily(f"varve_cleaner_{name}", text, labels=LABELS)
            for name, text in PARTITION_GAUGES.items()
        }
        blocked = GaugeMetricFamily(
            "varve_cleaner_blocked",
            "1 while the partition cannot be cleaned, with the reason as a label",
            labels=[*LABELS, "reason"],
        )
        last = {
            job.partition: job for job in reversed(self._pool.history.newest(limit=RECORDS_MAX))
        }
        now = _Now(self._env.wall_ms(), asyncio.get_running_loop().time() * 1000)
        for index, partition in enumerate(self._topics.partitions()):
            if index % STEP_PARTITIONS == STEP_PARTITIONS - 1:
                yield None
            topic_partition = partition.partition
            verdict = self._pool.scanner.verdicts.get(topic_partition)
            if verdict is None or not partition.log.config.compacts:
                continue
            names = [topic_partition.topic, str(topic_partition.partition)]
            for name, value in self._values_of(verdict, last.get(topic_partition), now):
                families[name].add_metric(names, value)
            state, is_paused = (
                self._pool.in_progress.state(topic_partition),
                self._pool.operator.is_paused(topic_partition),
            )
            obstacle = blocked_by(verdict, state, is_paused=is_paused)
            if obstacle is not None:
                blocked.add_metric([*names, obstacle.value], 1)
        yield from families.values()
        yield blocked

    def _values_of(
        self, verdict: Verdict, last_job: JobRecord | None, now: "_Now"
    ) -> Iterator[tuple[str, float]]:
        """Yield the known gauges of one partition."""
        section = verdict.section
        if section is not None:
            yield "dirty_ratio", verdict.dirty_ratio
            yield "dirty_bytes", section.dirty_bytes
            if verdict.live_bytes is not None:
                yield "live_estimate_bytes", verdict.live_bytes
            if section.dirty_bytes and section.deadline_ms is not None:
                yield "deadline_slack_seconds", (section.deadline_ms - now.wall_ms) / 1000
            if section.oldest_ms is not None:
                yield "oldest_dirty_age_seconds", max(0, now.wall_ms - section.oldest_ms) / 1000
        if verdict.content is not None:
            yield "live_bytes", verdict.content.live
            yield "dead_bytes", verdict.content.dead
            yield "unresolved_bytes", verdict.content.unresolved
        if last_job is not None:
            waited = last_job.read_wait_seconds + last_job.write_wait_seconds
            yield "last_job_throttle_wait_seconds", waited
        cleaner_state = self._pool.state_store.entry(verdict.partition)
        if cleaner_state is not None and cleaner_state.learned_at_ms:
            yield "last_clean_timestamp_seconds", cleaner_state.learned_at_ms // 1000
        if cleaner_state is not None and cleaner_state.tombstones is not None:
            yield "tombstones", cleaner_state.tombstones
        mark = past_of(self._pool.in_progress.state(verdict.partition))
        yield "quarantined", int(mark is not None)
        if mark is not None:
            until_ms = now.wall_ms + mark.until_ms - now.monotonic_ms
            yield "quarantined_until_seconds", until_ms / 1000


class _Now(NamedTuple):
    """Wall time and monotonic time of a scrape, in ms."""

    wall_ms: int
    monotonic_ms: float
