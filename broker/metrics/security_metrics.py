"""Metrics of authentications, under Kafka's names (socket-server-metrics), and of certificates."""

from collections.abc import Iterator
from typing import Final, Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UnknownMetricFamily

from broker.counters import BrokerStats
from broker.lifecycle.reload import Reloader
from broker.metrics.families import counter
from broker.network.listener import Listener

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


class Https(Protocol):
    """The part of the HTTP server that counts failures of https."""

    @property
    def tls_failures(self) -> int:
        """Return the number of connections whose handshake failed."""
        ...


def tls_families(listener: Listener, http: Https, reloader: Reloader | None) -> Iterator[Metric]:
    """Yield the metrics; without TLS, the expiry has no sample."""
    expiry = GaugeMetricFamily(
        "varve_tls_certificate_expiry_timestamp_seconds",
        "When the certificate of the listeners expires, in seconds since 1970",
    )
    if listener.tls is not None:
        expiry.add_metric([], listener.tls.expires_at)
    yield expiry
    yield GaugeMetricFamily(
        "varve_tls_certificate_refused",
        "1 if the last reload could not use the certificate files and kept the old certificate",
        value=float(reloader is not None and reloader.certificate_refused),
    )
    yield counter(
        "varve_tls_failures",
        "Connections closed because of an error of TLS",
        listener.stats.tls_failures + http.tls_failures,
    )
