"""The metric of readiness: whether clients are served, and every partition."""

from prometheus_client.metrics_core import Metric

from broker.metrics.families import gauge


def readiness_family(*, is_ready: bool) -> Metric:
    """Return the gauge; it agrees with /readyz."""
    return gauge(
        "varve_ready",
        "1 if clients are served, and every partition; otherwise /readyz has the reasons",
        float(is_ready),
    )
