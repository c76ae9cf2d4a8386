"""Metrics of the certificate that listeners with TLS present."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from broker.lifecycle.reload import Reloader
from broker.metrics.families import counter
from broker.network.listener import Listener


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
