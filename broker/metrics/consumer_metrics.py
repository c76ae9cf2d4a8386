"""Metrics of consumer groups: committed offsets, and their lag behind the log end offset.

Names and labels are those of kafka_exporter, because dashboards for consumer lag use them; the
broker knows its groups, so it needs no exporter. Lag counts offsets: in a compacted topic fewer
records may be left to read. For a compacted view, the end is that of the view's log.

Clients choose group names and may commit to every partition, so the number of series is bounded;
`varve_consumer_offsets_left_out` counts the committed offsets without a series.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric

from broker.groups.coordinator import GroupCoordinator
from broker.metrics.families import gauge
from broker.topics.topics import Topics

OFFSETS_MAX: Final = 10_000  # committed offsets with series: two each, 2 MB of the answer
STEP_OFFSETS: Final = 64  # between two places where other tasks may run


class ConsumerMetrics:
    """Reads the groups that are loaded and the ends of the logs they read."""

    def __init__(self, groups: GroupCoordinator, topics: Topics) -> None:
        self._groups = groups
        self._topics = topics

    def steps(self) -> Iterator[Metric | None]:
        """Yield every family, and None where other tasks may run."""
        labels = ["consumergroup", "topic", "partition"]
        offsets = GaugeMetricFamily(
            "kafka_consumergroup_current_offset", "Committed offset", labels=labels
        )
        lags = GaugeMetricFamily(
            "kafka_consumergroup_lag",
            "Log end offset minus committed offset",
            labels=labels,
        )
        # A name that ends in _sum is no gauge to `promtool check metrics`.
        sums = UnknownMetricFamily(
            "kafka_consumergroup_lag_sum", "Lag over all partitions", labels=labels[:2]
        )
        members = GaugeMetricFamily(
            "kafka_consumergroup_members", "Members of the group", labels=labels[:1]
        )
        coordinator, shown, left_out = self._groups, 0, 0
        for summary in coordinator.groups():
            group = summary.group_id
            members.add_metric([group], summary.members)
            _, committed = coordinator.offsets.fetch(group)
            lag_sums = Counter[str]()
            for where, (offset, *_) in tuple(committed.items()):
                end = self._topics.readable_end(*where)
                if end is None:
                    continue
                lag = max(0, end - offset)
                lag_sums[where[0]] += lag
                shown += 1
                if shown % STEP_OFFSETS == 0:
                    yield None
                if shown > OFFSETS_MAX:
                    left_out += 1
                    continue
                names = [group, where[0], str(where[1])]
                offsets.add_metric(names, offset)
                lags.add_metric(names, lag)
            for topic, total in lag_sums.items():
                sums.add_metric([group, topic], total)
            yield None
        yield from (offsets, lags, sums, members)
        yield gauge(
            "varve_consumer_offsets_left_out",
            "Committed offsets without a series because there are too many",
            left_out,
        )
