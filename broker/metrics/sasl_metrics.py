"""Metrics of authentications, under Kafka's names (socket-server-metrics)."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, UnknownMetricFamily

from broker.counters import BrokerStats

PREFIX: Final = "kafka_server_socket_server_metrics_"
COUNTERS: Final = (
    ("successes", "successful_authentication", "Connections that authenticated with SASL"),
    ("failures", "failed_authentication", "Connections whose authentication failed"),
    ("reauthentications", "successful_reauthentication", "Connections that authenticated again"),
    (
        "reauthentication_failures",
        "failed_reauthentication",
        "Connections whose repeated authentication failed",
    ),
)


def sasl_families(broker_stats: BrokerStats) -> Iterator[Metric]:
    """Yield the metrics."""
    stats = broker_stats.authentications
    for field, name, text in COUNTERS:
        family = CounterMetricFamily(PREFIX + name, text, labels=["listener", "mechanism"])
        for labels, counts in stats.by_mechanism.items():
            family.add_metric(labels, getattr(counts, field))
        yield family
    # `promtool check metrics` accepts no counter with a name that ends in _count.
    expired = UnknownMetricFamily(
        f"{PREFIX}expired_connections_killed_count",
        "Connections closed at a request after the end of their session",
    )
    expired.add_metric([], stats.expired_connections)
    yield expired
