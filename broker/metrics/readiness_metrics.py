"""The metric of readiness: whether clients are served, and every partition."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from broker.lifecycle.readiness import Readiness
from broker.metrics.families import gauge


def readiness_families(readiness: Readiness) -> Iterator[Metric]:
    """Yield the gauge; it agrees with /readyz."""
    yield gauge(
        "varve_ready",
        "1 if clients are served, and every partition; otherwise /readyz has the reasons",
        float(readiness.not_ready_because() is None),
    )
