"""The metrics of the broker: they read plain counters at each scrape.

Names are those that jmx_exporter gives Kafka's own metrics (names and labels in lower case,
`_total` for counters), so that existing dashboards work; ours begin with `varve_`. A name of
Kafka's that `promtool check metrics` refuses is replaced by one of ours, and
docs/reference/metrics.md maps it. Label values come from fixed sets and from the names of topics
and data directories. A scrape of thousands of partitions is collected in turns (`snapshot`), so
that clients do not wait for it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from broker.counters import UNSUPPORTED, TopicStats
from broker.event_loop.loop_turns import Turns
from broker.logging import RateLimitedLogger
from broker.metrics.cleaner_metrics import CleanerMetrics
from broker.metrics.directory_metrics import directory_families, hang_family, recovery_families
from broker.metrics.families import LatencyFamilies, counter, gauge
from broker.network.listener import Listener
from broker.network.request_context import Services
from broker.topics.log_maintenance import LogMaintenance

# A family, or None: a point where other tasks may run.
Step: TypeAlias = Metric | None
Families: TypeAlias = Callable[[], Iterable[Step]]  # the metrics of one part of the broker
STEP_ROWS = 64  # series of a family between two such points

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


class BrokerMetrics:
    """Reads everything from the parts of the running broker."""

    def __init__(
        self,
        services: Services,
        listener: Listener,
        log_maintenance: LogMaintenance,
        cleaner: CleanerMetrics,
        others: Sequence[Families],
    ) -> None:
        self._services = services
        self._listener = listener
        self._log_maintenance = log_maintenance
        self._cleaner = cleaner
        self._others = others
        self._process = ProcessCollector(registry=None)

    async def snapshot(self) -> Sequence[Metric]:
        """Return all metric families."""
        return await self._services.stats.measured("metrics", self._snapshot())

    async def _snapshot(self) -> Sequence[Metric]:
        turns = Turns()
        families = []
        for step in self._steps():
            if step is not None:
                families.append(step)
            await turns.take()
        # In a thread: it lists all file descriptors of the process.
        families += await asyncio.to_thread(lambda: list(self._process.collect()))
        return families

    def _steps(self) -> Iterator[Step]:
        yield from self._topics()
        yield from self._requests()
        yield from self._logs()
        yield from self._broker()
        yield from self._groups()
        yield from self._cleaner.steps()
        for families in self._others:
            yield from families()

    def _topics(self) -> Iterator[Step]:
        topics = self._services.stats.topics
        for name, text, value in TOPIC_COUNTERS:
            family = CounterMetricFamily(
                f"kafka_server_brokertopicmetrics_{name}", text, labels=["topic"]
            )
            for index, (topic, stats) in enumerate(tuple(topics.items())):
                family.add_metric([topic], value(stats))
                if index % STEP_ROWS == STEP_ROWS - 1:
                    yield None
            yield family
        unknown = GaugeMetricFamily(
            "varve_topic_policy_unknown",
            "1 for a topic that is neither cleaned nor expired, because its cleanup.policy is "
            "unknown: taken over from Kafka, or no longer in the settings file",
            labels=["topic"],
        )
        for item in self._services.topics:
            if not item.config.policy_known:
                unknown.add_metric([item.name], 1)
        yield unknown
        rejects = self._services.stats.rejects
        for name, text, count in (
            ("nokeycompactedtopicrecords", "Batches refused because a record has no key",
             rejects.no_key_compacted_topic),
            ("invalidmessagecrcrecords",
             "Batches refused because of a wrong CRC",
             rejects.invalid_message_crc),
            ("invalidmagicnumberrecords",
             "Batches refused because of an old format",
             rejects.invalid_magic_number),
            ("invalidoffsetorsequencerecords",
             "Batches refused because of their offsets or sequence numbers",
             rejects.invalid_offset_or_sequence),
        ):  # fmt: skip
            yield counter(f"kafka_server_brokertopicmetrics_{name}", text, count)
        yield counter(
            "varve_decompression_limit_batches",
            "Batches refused because they exceed varve.decompressed.batch.bytes",
            rejects.decompression_limit,
        )

    def _requests(self) -> Iterator[Step]:
        stats = self._services.stats
        requests = CounterMetricFamily(
            "kafka_network_requestmetrics_requests", "Requests", labels=["request", "version"]
        )
        times = LatencyFamilies(
            kafkas="kafka_network_requestmetrics_totaltimems",
            local="varve_request_seconds",
            text="Time from the complete request to its response",
            labels=["request"],
        )
        for name, request in tuple(stats.requests.items()):
            for version, count in sorted(request.by_version.items()):
                label = "unsupported" if version == UNSUPPORTED else str(version)
                requests.add_metric([name, label], count)
            if request.latency.count:
                times.add([name], request.latency)
            yield None
        holds = GaugeMetricFamily(
            "varve_request_longest_hold_seconds",
            "Longest time that one step of a request occupied the event loop since startup",
            labels=["request"],
        )
        for name, request in stats.requests.items():
            if request.longest_turn_ns:
                holds.add_metric([name], request.longest_turn_ns / 1e9)
        yield holds
        yield from self._holds()
        yield from self._http()
        errors = CounterMetricFamily(
            "kafka_network_requestmetrics_errors",
            "Error codes in responses",
            labels=["request", "error"],
        )
        for (name, error), count in stats.errors.items():
            errors.add_metric([name, error], count)
        yield from (requests, *times.families(), errors)
        flushes = LatencyFamilies(
            kafkas="kafka_log_logflushstats_logflushrateandtimems",
            local="varve_flush_seconds",
            text="Duration of a flush of one log to disk",
        )
        flushes.add([], stats.flushes)
        yield from flushes.families()
        purgatory = GaugeMetricFamily(
            "kafka_server_delayedoperationpurgatory_purgatorysize",
            "Requests that wait for data or for a flush",
            labels=["delayedoperation"],
        )
        purgatory.add_metric(["Fetch"], stats.delayed_fetches)
        purgatory.add_metric(["Produce"], stats.delayed_produces)
        yield purgatory
        yield GaugeMetricFamily(
            "varve_large_requests",
            "Requests with thousands of rows that are in progress",
            stats.large_requests,
        )

    def _http(self) -> Iterator[Step]:
        labels = ["method", "route"]
        requests = CounterMetricFamily("varve_http_requests", "HTTP requests", labels=labels)
        loop = CounterMetricFamily(
            "varve_http_loop_seconds",
            "Time that HTTP requests occupied the event loop",
            labels=labels,
        )
        longest = GaugeMetricFamily(
            "varve_http_longest_hold_seconds",
            "Longest time that one step of an HTTP request occupied the event loop since startup",
            labels=labels,
        )
        for (method, route), stats in self._services.stats.http.items():
            requests.add_metric([method, route], stats.requests)
            loop.add_metric([method, route], stats.loop_ns / 1e9)
            longest.add_metric([method, route], stats.longest_turn_ns / 1e9)
        yield from (requests, loop, longest)

    def _holds(self) -> Iterator[Step]:
        stats = self._services.stats
        holds = GaugeMetricFamily(
            "varve_background_longest_hold_seconds",
            "Longest time that one step of a background task occupied the event loop since startup",
            labels=["task"],
        )
        for name, held_ns in stats.background_holds_ns.items():
            holds.add_metric([name], held_ns / 1e9)
        longest = GaugeMetricFamily(
            "varve_gc_longest_pause_seconds",
            "Longest pause for a collection of cyclic garbage since startup",
            labels=["generation"],
        )
        total = CounterMetricFamily(
            "varve_gc_pause_seconds",
            "Time in which collections of cyclic garbage paused the broker",
            labels=["generation"],
        )
        for generation, longest_ns in enumerate(stats.gc_pauses.longest_ns):
            longest.add_metric([str(generation)], longest_ns / 1e9)
            total.add_metric([str(generation)], stats.gc_pauses.total_ns[generation] / 1e9)
        yield from (holds, longest, total)

    def _logs(self) -> Iterator[Step]:
        labels = ["topic", "partition"]
        size = GaugeMetricFamily("kafka_log_log_size", "Bytes on disk", labels=labels)
        start = GaugeMetricFamily("kafka_log_log_logstartoffset", "Log start offset", labels=labels)
        end = GaugeMetricFamily("kafka_log_log_logendoffset", "Log end offset", labels=labels)
        count = GaugeMetricFamily("kafka_log_log_numlogsegments", "Segments", labels=labels)
        damaged = GaugeMetricFamily(
            "varve_log_damaged_segments", "Segments with a damaged range", labels=labels
        )
        for index, partition in enumerate(self._services.topics.partitions()):
            if index % STEP_ROWS == STEP_ROWS - 1:
                yield None
            names = [partition.partition.topic, str(partition.partition.partition)]
            log = partition.log
            size.add_metric(names, log.segments.size_bytes)
            start.add_metric(names, log.log_start_offset)
            end.add_metric(names, log.log_end_offset)
            count.add_metric(names, len(log.segments))
            if log.damage.ranges:
                damaged.add_metric(names, len(log.damage.ranges))
        refused = CounterMetricFamily(
            "varve_log_damaged_fetches",
            "Fetches of offsets in a damaged range, answered with CORRUPT_MESSAGE",
            labels=["topic"],
        )
        for topic, fetches in tuple(self._services.stats.damaged_fetches.items()):
            refused.add_metric([topic], fetches)
        yield from (size, start, end, count, damaged, refused)

    def _broker(self) -> Iterator[Step]:
        topics = self._services.topics
        served = sum(len(topic.partitions) for topic in topics)
        offline = sum(len(topic.offline) for topic in topics)
        stats = self._log_maintenance.stats
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
            ("varve_receive_buffer_bytes", "Memory used by requests that are being received",
             self._listener.budget.used_bytes),
            ("varve_response_buffer_bytes", "Memory used by large responses that are not sent yet",
             self._listener.response_budget.used_bytes),
            ("kafka_server_fetchsessioncache_numincrementalfetchsessions", "Fetch sessions",
             len(self._services.sessions)),
            ("kafka_server_fetchsessioncache_numincrementalfetchpartitionscached",
             "Partitions in fetch sessions", self._services.sessions.partitions),
            ("varve_clock_trusted", "1 while time-based deletion is allowed",
             int(self._log_maintenance.clock_trusted())),
        ):  # fmt: skip
            yield gauge(name, text, value)
        # `promtool check metrics` accepts no gauge with a name that ends in _count.
        connections = UnknownMetricFamily(
            "kafka_server_socket_server_metrics_connection_count", "Connections"
        )
        connections.add_metric([], len(self._listener.connections))
        yield connections
        yield from recovery_families(self._services.manager)
        yield from directory_families(self._services.manager.table, self._log_maintenance.disks)
        yield hang_family(self._services.manager.table, self._log_maintenance.threads)
        for name, text, value in (
            ("varve_connections_accepted", "Connections accepted", self._listener.stats.accepted),
            ("varve_connections_refused", "Connections above the limit",
             self._listener.stats.refused),
            ("varve_connections_evicted", "Connections closed to make room for others",
             self._listener.stats.evicted),
            ("varve_connections_closed_silent",
             "Connections closed because they sent no complete request in time",
             self._listener.stats.closed_silent),
            ("varve_receive_waits", "Connections that waited for memory to receive a request",
             self._listener.budget.waits),
            ("varve_response_waits", "Responses that waited for memory",
             self._listener.response_budget.waits),
            ("varve_receive_closed", "Connections closed because other requests needed the memory",
             self._listener.budget.closed),
            ("varve_connections_closed_idle", "Connections closed after connections.max.idle.ms",
             self._listener.stats.closed_idle),
            ("varve_connections_closed_stalled",
             "Connections closed because the client did not read its responses",
             self._listener.stats.closed_stalled),
            ("kafka_server_fetchsessioncache_incrementalfetchsessionevictions",
             "Fetch sessions evicted to make room for others", self._services.sessions.evictions),
            ("varve_log_lines_suppressed", "Log lines suppressed because clients caused too many",
             RateLimitedLogger.suppressed_total),
            ("varve_timer_flushes", "Flushes due by flush.ms or flush.messages",
             stats.flushes),
            ("varve_retention_segments", "Segments removed by retention", stats.segments_expired),
            ("varve_retention_bytes", "Bytes removed by retention", stats.bytes_expired),
            ("varve_timer_rolls", "Segments rolled by the timer", stats.segments_rolled),
            ("varve_clock_jumps", "Jumps of the wall clock", stats.clock_jumps),
            ("varve_housekeeping_errors",
             "Maintenance tasks that failed for a partition",
             stats.errors),
        ):  # fmt: skip
            yield counter(name, text, value)

    def _groups(self) -> Iterator[Step]:
        prefix = "kafka_coordinator_group_groupmetadatamanager_numgroups"
        counts = Counter[str]()
        for group in self._services.coordinators.groups.groups():  # there may be 50,000
            counts[group.state.lower()] += 1
            yield None
        yield gauge(prefix, "Number of consumer groups", counts.total())
        for state in (
            *("Stable", "Empty", "Dead", "PreparingRebalance", "CompletingRebalance"),
            *("Assigning", "Reconciling"),  # of the consumer protocol
        ):
            name = state.lower()
            yield gauge(prefix + name, f"Number of consumer groups in state {state}", counts[name])
        stats = self._services.coordinators.groups.stats
        for name, text, value in (
            ("rebalances", "Rebalances started", stats.rebalances),
            ("generations_stable", "Rebalances completed", stats.generations_stable),
            (
                "members_expired",
                "Members removed because they sent no heartbeat in time",
                stats.members_expired,
            ),
            ("offsets_committed", "Offsets committed", stats.offsets_committed),
            (
                "offsets_expired",
                "Committed offsets removed after offsets.retention.minutes",
                stats.offsets_expired,
            ),
            ("deleted", "Groups deleted", stats.groups_deleted),
            ("append_errors", "Appends to __consumer_offsets that failed", stats.append_errors),
            ("records_loaded", "Records read from __consumer_offsets", stats.records_loaded),
            (
                "records_unknown",
                "Records of __consumer_offsets of an unknown kind",
                stats.records_unknown,
            ),
            (
                "records_invalid",
                "Records of __consumer_offsets that cannot be decoded",
                stats.records_invalid,
            ),
            (
                "offsets_undecided",
                "Offsets in __consumer_offsets of open transactions",
                stats.offsets_undecided,
            ),
        ):
            yield counter(f"varve_group_{name}", text, value)
