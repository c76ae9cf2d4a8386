"""Metrics of client quotas: which entities are throttled. Counters start at zero."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from broker.metrics.families import counter
from broker.quotas.client_quotas import ClientQuotas

LABELS = ("quota", "user", "client_id")


def quota_families(quotas: ClientQuotas) -> Iterator[Metric]:
    """Yield the throttled responses and the throttle time of each entity.

    The first hundred entities have series of their own; the others share one per type of quota.
    """
    responses = CounterMetricFamily(
        "varve_quota_throttled_responses",
        "Number of responses with a throttle time, because a client was above its quota",
        labels=LABELS,
    )
    seconds = CounterMetricFamily(
        "varve_quota_throttle_seconds",
        "Sum of the throttle times of responses, in seconds",
        labels=LABELS,
    )
    for key, count in quotas.throttles.items():
        labels = [key.type, key.user, key.client_id]
        responses.add_metric(labels, count.responses)
        seconds.add_metric(labels, count.seconds)
    yield responses
    yield seconds
    yield counter(
        "varve_connections_delayed",
        "Number of connections that had to wait because of max.connection.creation.rate",
        quotas.connections.delayed,
    )
    yield counter(
        "varve_connections_refused_for_rate",
        "Number of connections closed because their address exceeded connection_creation_rate",
        quotas.connections.refused,
    )
