"""Metrics of consumer groups: committed offsets, and their lag behind the log end offset.

Names and labels are those of kafka_exporter, because dashboards for consumer lag use them; the
broker knows its groups, so it needs no exporter. Lag counts offsets: in a compacted topic fewer
records may be left to read. For a compacted view, the end is that of the view's log.

Clients choose group names and may commit to every partition, so the text of these families has
about SERIES_BYTES_MAX at most. If all groups need more, each principal gets its share, and its
smallest groups come first. A group has all of its series or none: a part of a lag would mislead. So
the groups of one principal take nothing from those of another. After a start, groups count for no
principal until a client uses them; these share what one principal gets.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Hashable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric

from broker.groups.coordinator import GroupCoordinator
from broker.max_min_share import max_min_share
from broker.metrics.families import gauge
from broker.topics.topics import Topics

SERIES_BYTES_MAX: Final = 8 << 20
GROUPS_MAX: Final = 10_000  # of one principal
LINE_BYTES: Final = 150  # a series, without the name of its group
LINES_PER_OFFSET: Final = 3
STEP_ROWS: Final = 64  # offsets or groups between two places where other tasks may run


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
        shown = yield from self._shown_groups()
        rows, groups_left_out, offsets_left_out = 0, 0, 0
        for summary in self._groups.groups():
            group = summary.group_id
            _, committed = self._groups.offsets.fetch(group)
            rows += 1
            if rows % STEP_ROWS == 0:
                yield None
            if group not in shown:
                groups_left_out += 1
                offsets_left_out += len(committed)
                continue
            members.add_metric([group], summary.members)
            lag_sums = Counter[str]()
            for where, (offset, *_) in tuple(committed.items()):
                rows += 1
                if rows % STEP_ROWS == 0:
                    yield None
                end = self._topics.readable_end(*where)
                if end is None:
                    continue
                lag = max(0, end - offset)
                lag_sums[where[0]] += lag
                names = [group, where[0], str(where[1])]
                offsets.add_metric(names, offset)
                lags.add_metric(names, lag)
            for topic, total in lag_sums.items():
                rows += 1
                if rows % STEP_ROWS == 0:
                    yield None
                sums.add_metric([group, topic], total)
        yield from (offsets, lags, sums, members)
        yield gauge(
            "varve_consumer_groups_left_out",
            "Consumer groups without series because there are too many",
            groups_left_out,
        )
        yield gauge(
            "varve_consumer_offsets_left_out",
            "Committed offsets of consumer groups without series",
            offsets_left_out,
        )

    def _shown_groups(self) -> Generator[None, None, Collection[str]]:
        """Return the groups that have series."""
        sizes = defaultdict[Hashable, dict[str, int]](dict)  # of the groups of each principal
        for number, summary in enumerate(self._groups.groups(), 1):
            group = summary.group_id
            of_owner = sizes[self._groups.offsets.owner(group)]
            if len(of_owner) < GROUPS_MAX:
                _, committed = self._groups.offsets.fetch(group)
                lines = 1 + LINES_PER_OFFSET * len(committed)
                of_owner[group] = lines * (LINE_BYTES + len(group))
            if number % STEP_ROWS == 0:
                yield None
        shown = set[str]()
        share = max_min_share([sum(each.values()) for each in sizes.values()], SERIES_BYTES_MAX)
        for of_owner in sizes.values():
            yield None
            left = sum(of_owner.values()) if share is None else share
            for group in sorted(of_owner, key=of_owner.__getitem__):
                left -= of_owner[group]
                if left < 0:
                    break
                shown.add(group)
        return shown
