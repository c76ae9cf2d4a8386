"""Metrics of erasures. Counters start at zero with the broker."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from broker.erasure.erasures import Erasures
from broker.metrics.families import counter, gauge


def erasure_families(erasures: Erasures) -> Iterator[Metric]:
    """Yield the open erasures, those that will be late, and how many were completed."""
    yield gauge("varve_erasures", "Number of open erasures", erasures.open_count)
    at_risk = GaugeMetricFamily(
        "varve_erasure_partitions_at_risk",
        "Number of partitions in which an open erasure is expected to miss its deadline",
        labels=["risk"],
    )
    for risk, count in erasures.at_risk.items():
        at_risk.add_metric([risk.value], count)
    yield at_risk
    yield counter("varve_erasures_completed", "Number of completed erasures", erasures.completed)
