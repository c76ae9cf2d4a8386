"""The one Prometheus collector. Reads plain counters when scraped; nothing is counted here.

Names are those that jmx_exporter gives Kafka's own metrics (lower case, `_total` for counters), so
that existing dashboards work; ours begin with `varve_`. Label values come from fixed sets and from
the names of topics and data directories.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from broker.context import Services
from broker.housekeeping import Housekeeping
from broker.listener import Listener
from broker.stats import QUANTILES, TopicStats
from cleaner.pool import CleanerPool

TOPIC_COUNTERS: tuple[tuple[str, str, Callable[[TopicStats], int]], ...] = (
    ("messagesin", "Records appended", lambda s: s.messages_in),
    ("bytesin", "Bytes of batches appended", lambda s: s.bytes_in),
    ("bytesout", "Bytes of batches fetched", lambda s: s.bytes_out),
    ("bytesrejected", "Bytes of batches refused", lambda s: s.bytes_rejected),
    ("totalproducerequests", "Produce requests", lambda s: s.produce_requests),
    ("totalfetchrequests", "Fetch requests", lambda s: s.fetch_requests),
    ("failedproducerequests", "Produce requests that failed", lambda s: s.failed_produce_requests),
    ("failedfetchrequests", "Fetch requests that failed", lambda s: s.failed_fetch_requests),
)


class BrokerCollector(Collector):
    """Reads everything from the parts of the running broker."""

    def __init__(
        self, services: Services, listener: Listener, housekeeping: Housekeeping, pool: CleanerPool
    ) -> None:
        self._services = services
        self._listener = listener
        self._housekeeping = housekeeping
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """Every metric family, anew."""
        yield from self._topics()
        yield from self._requests()
        yield from self._logs()
        yield from self._broker()
        yield from self._groups()
        yield from self._cleaner()

    def _topics(self) -> Iterator[Metric]:
        topics = self._services.stats.topics
        for name, text, value in TOPIC_COUNTERS:
            family = CounterMetricFamily(
                f"kafka_server_brokertopicmetrics_{name}", text, labels=["topic"]
            )
            for topic, stats in tuple(topics.items()):
                family.add_metric([topic], value(stats))
            yield family
        unknown = GaugeMetricFamily(
            "varve_topic_policy_unknown",
            "1 for a topic found on disk that has no cleanup.policy yet: it is kept as it is",
            labels=["topic"],
        )
        for one in self._services.topics:
            if not one.config.policy_known:
                unknown.add_metric([one.name], 1)
        yield unknown
        rejects = self._services.stats.rejects
        for name, text, count in (
            ("nokeycompactedtopicrecords", "Batches with a keyless record",
             rejects.no_key_compacted_topic),
            ("invalidmessagecrcrecords", "Batches with a wrong CRC", rejects.invalid_message_crc),
            ("invalidmagicnumberrecords", "Batches of an old format", rejects.invalid_magic_number),
            ("invalidoffsetorsequencerecords", "Batches out of sequence",
             rejects.invalid_offset_or_sequence),
        ):  # fmt: skip
            yield _counter(f"kafka_server_brokertopicmetrics_{name}", text, count)
        yield _counter(
            "varve_decompression_limit_batches",
            "Batches above varve.decompressed.batch.bytes",
            rejects.decompression_limit,
        )

    def _requests(self) -> Iterator[Metric]:
        stats = self._services.stats
        requests = CounterMetricFamily(
            "kafka_network_requestmetrics_requests", "Requests", labels=["request", "version"]
        )
        times = GaugeMetricFamily(
            "kafka_network_requestmetrics_totaltimems",
            "Time from the whole request to its response, upper bound",
            labels=["request", "quantile"],
        )
        counts = SummaryMetricFamily(
            "varve_request_seconds", "Time to answer a request", labels=["request"]
        )
        for name, one in stats.requests.items():
            for version, count in sorted(one.by_version.items()):
                requests.add_metric([name, str(version)], count)
            if one.latency.count:
                for quantile in QUANTILES:
                    times.add_metric([name, str(quantile)], one.latency.quantile_ms(quantile))
                counts.add_metric([name], one.latency.count, one.latency.sum_us / 1e6)
        errors = CounterMetricFamily(
            "kafka_network_requestmetrics_errors", "Error codes given", labels=["request", "error"]
        )
        for (name, error), count in stats.errors.items():
            errors.add_metric([name, error], count)
        yield from (requests, times, counts, errors)
        purgatory = GaugeMetricFamily(
            "kafka_server_delayedoperationpurgatory_purgatorysize",
            "Requests that wait",
            labels=["delayedOperation"],
        )
        purgatory.add_metric(["Fetch"], stats.delayed_fetches)
        purgatory.add_metric(["Produce"], stats.delayed_produces)
        yield purgatory

    def _logs(self) -> Iterator[Metric]:
        labels = ["topic", "partition"]
        size = GaugeMetricFamily("kafka_log_log_size", "Bytes on disk", labels=labels)
        start = GaugeMetricFamily("kafka_log_log_logstartoffset", "First offset", labels=labels)
        end = GaugeMetricFamily("kafka_log_log_logendoffset", "Next offset", labels=labels)
        count = GaugeMetricFamily("kafka_log_log_numlogsegments", "Segments", labels=labels)
        damaged = GaugeMetricFamily(
            "varve_log_damaged_segments", "Segments with a damaged range", labels=labels
        )
        for partition in self._services.topics.partitions():
            names = [partition.partition.topic, str(partition.partition.partition)]
            log = partition.log
            size.add_metric(names, log.size_bytes)
            start.add_metric(names, log.log_start_offset)
            end.add_metric(names, log.log_end_offset)
            count.add_metric(names, log.segment_count)
            if log.damaged:
                damaged.add_metric(names, len(log.damaged))
        yield from (size, start, end, count, damaged)

    def _broker(self) -> Iterator[Metric]:
        topics = self._services.topics
        served = sum(len(topic.partitions) for topic in topics)
        offline = sum(len(topic.offline) for topic in topics)
        directories = self._services.manager.directories
        failed = sum(1 for directory in directories if not directory.is_online)
        stats = self._housekeeping.stats
        for name, text, value in (
            ("kafka_server_replicamanager_partitioncount", "Partitions", served + offline),
            ("kafka_server_replicamanager_leadercount", "Partitions served", served),
            ("kafka_server_replicamanager_offlinereplicacount", "Partitions offline", offline),
            ("kafka_server_replicamanager_underreplicatedpartitions", "Always 0: one node", 0),
            ("kafka_controller_kafkacontroller_activecontrollercount", "This node", 1),
            ("kafka_controller_kafkacontroller_offlinepartitionscount", "Partitions offline",
             offline),
            ("kafka_controller_kafkacontroller_globaltopiccount", "Topics", len(topics)),
            ("kafka_controller_kafkacontroller_globalpartitioncount", "Partitions",
             served + offline),
            ("kafka_log_logmanager_offlinelogdirectorycount", "Data directories offline", failed),
            ("kafka_server_socket_server_metrics_connection_count", "Connections",
             len(self._listener.connections)),
            ("kafka_server_fetchsessioncache_numincrementalfetchsessions", "Fetch sessions",
             len(self._services.sessions)),
            ("kafka_server_fetchsessioncache_numincrementalfetchpartitionscached",
             "Partitions in fetch sessions", self._services.sessions.partitions),
            ("varve_clock_trusted", "1 while deleting by time is allowed",
             int(self._housekeeping.clock_trusted())),
        ):  # fmt: skip
            yield _gauge(name, text, value)
        for name, text, value in (
            ("varve_connections_accepted", "Connections accepted", self._listener.stats.accepted),
            ("varve_connections_refused", "Connections above the limit",
             self._listener.stats.refused),
            ("varve_connections_closed_idle", "Connections closed for their silence",
             self._listener.stats.closed_idle),
            ("varve_connections_closed_stalled", "Connections closed for not reading",
             self._listener.stats.closed_stalled),
            ("kafka_server_fetchsessioncache_incrementalfetchsessionevictions",
             "Fetch sessions that gave way to others", self._services.sessions.evictions),
            ("varve_timer_flushes", "Flushes asked for by flush.ms and flush.messages",
             stats.flushes),
            ("varve_retention_segments", "Segments removed by retention", stats.segments_expired),
            ("varve_retention_bytes", "Bytes removed by retention", stats.bytes_expired),
            ("varve_timer_rolls", "Segments rolled by the timer", stats.segments_rolled),
            ("varve_clock_jumps", "Jumps of the wall clock", stats.clock_jumps),
            ("varve_housekeeping_errors", "Tasks that failed for a partition", stats.errors),
        ):  # fmt: skip
            yield _counter(name, text, value)

    def _groups(self) -> Iterator[Metric]:
        prefix = "kafka_coordinator_group_groupmetadatamanager_numgroups"
        counts = Counter(type(state).__name__.lower() for state in self._services.groups.groups())
        yield _gauge(prefix, "Consumer groups", counts.total())
        for state in ("stable", "empty", "dead", "preparingrebalance", "completingrebalance"):
            yield _gauge(prefix + state, f"Consumer groups that are {state}", counts[state])
        stats = self._services.groups.stats
        for name, text, value in (
            ("rebalances", "Rebalances begun", stats.rebalances),
            ("generations_stable", "Rebalances completed", stats.generations_stable),
            ("members_expired", "Members that fell silent", stats.members_expired),
            ("offsets_committed", "Offsets committed", stats.offsets_committed),
            ("offsets_expired", "Offsets past their retention", stats.offsets_expired),
            ("deleted", "Groups deleted", stats.groups_deleted),
            ("append_errors", "Appends to __consumer_offsets that failed", stats.append_errors),
            ("records_loaded", "Records read from __consumer_offsets", stats.records_loaded),
            ("records_unknown", "Of these, of a kind not known here", stats.records_unknown),
            ("records_invalid", "Of these, not decodable", stats.records_invalid),
            ("offsets_undecided", "Of these, of open transactions", stats.offsets_undecided),
        ):
            yield _counter(f"varve_group_{name}", text, value)

    def _cleaner(self) -> Iterator[Metric]:
        yield from self._cleaner_state()
        yield from self._cleaner_work()
        yield self._quarantined()

    def _cleaner_state(self) -> Iterator[Metric]:
        stats = self._pool.stats
        last = [one.report for one in stats.last.values()]
        slowest = max((one.seconds for one in stats.last.values()), default=0.0)
        written = sum(report.bytes_after for report in last)
        recopied = 100 * written / max(1, sum(report.bytes_before for report in last))
        for name, text, value in (
            ("kafka_log_logcleaner_cleaner_recopy_percent", "Bytes kept by the last cleans",
             recopied),
            ("kafka_log_logcleaner_max_clean_time_secs", "Longest of the last cleans", slowest),
            ("kafka_log_logcleaner_max_compaction_delay_secs", "Furthest over max.compaction.lag",
             stats.over_lag_ms_max / 1000),
            ("kafka_log_logcleaner_deadthreadcount", "Always 0: workers are replaced", 0),
            ("kafka_log_logcleanermanager_max_dirty_percent", "Largest dirty ratio",
             100 * stats.dirty_ratio_max),
            ("varve_cleaner_cleanable_bytes", "Dirty bytes that may be cleaned",
             stats.cleanable_bytes),
            ("varve_cleaner_over_lag_partitions", "Partitions over max.compaction.lag.ms",
             stats.over_lag_partitions),
            ("varve_cleaner_candidates", "Partitions that are due", stats.candidates),
            ("varve_cleaner_look_seconds", "Time of the last look over all partitions",
             stats.scan_seconds),
        ):  # fmt: skip
            yield _gauge(name, text, value)

    def _cleaner_work(self) -> Iterator[Metric]:
        stats = self._pool.stats
        for name, text, value in (
            ("varve_cleaner_cleans", "Jobs that ended well", stats.cleans),
            ("varve_cleaner_aborts", "Jobs given up because somebody wanted the partition",
             stats.aborted),
            ("varve_cleaner_failures", "Attempts that failed", stats.failures),
            ("varve_cleaner_seconds", "Time spent in jobs", stats.clean_seconds),
            ("varve_cleaner_read_bytes", "Bytes read", stats.read_bytes),
            ("varve_cleaner_written_bytes", "Bytes written", stats.written_bytes),
            ("varve_cleaner_read_wait_seconds", "Waiting for the read budget",
             stats.read_wait_seconds),
            ("varve_cleaner_write_wait_seconds", "Waiting for the write budget",
             stats.write_wait_seconds),
            ("varve_cleaner_records_before", "Records before, of finished jobs",
             stats.records_before),
            ("varve_cleaner_records_after", "Records after, of finished jobs",
             stats.records_after),
            ("varve_cleaner_bytes_before", "Bytes before, of finished jobs", stats.bytes_before),
            ("varve_cleaner_bytes_after", "Bytes after, of finished jobs", stats.bytes_after),
            ("varve_cleaner_tombstones_removed", "Tombstones removed, of finished jobs",
             stats.tombstones_removed),
            ("varve_cleaner_maps_full", "Jobs whose key map was full before the dirty end",
             stats.maps_full),
            ("varve_cleaner_stale_jobs", "Jobs void because the log had changed under them",
             stats.stale),
            ("varve_cleaner_groups_published", "Output segments put in place",
             stats.groups_published),
            ("varve_cleaner_groups_dropped", "Output segments whose sources had gone",
             stats.groups_dropped),
            ("varve_cleaner_looks", "Looks over all partitions", stats.scans),
            ("varve_cleaner_look_failures", "Looks, or logs in one, that failed",
             stats.scan_failures),
            ("varve_cleaner_worker_starts", "Workers started", stats.worker_starts),
            ("varve_cleaner_worker_deaths", "Workers that died", stats.worker_deaths),
            ("varve_cleaner_worker_kills", "Workers killed for not heeding", stats.worker_kills),
        ):  # fmt: skip
            yield _counter(name, text, value)

    def _quarantined(self) -> Metric:
        uncleanable = GaugeMetricFamily(
            "kafka_log_logcleanermanager_uncleanable_partitions_count",
            "Quarantined partitions: retried later, never given up",
            labels=["logDirectory"],
        )
        topics = self._services.topics
        found = [topics.partition(one) for one in self._pool.registry.quarantines()]
        for directory in self._services.manager.directories:
            here = sum(
                1
                for one in found
                if one is not None and os.path.dirname(one.log.directory) == directory.path
            )
            uncleanable.add_metric([directory.path], here)
        return uncleanable


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    family = CounterMetricFamily(name, text)
    family.add_metric([], value)
    return family
