"""Metrics of the broker's readiness and of its settings file."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from broker.lifecycle.readiness import Readiness
from broker.lifecycle.reload import Reloader
from broker.metrics.families import gauge


def readiness_families(readiness: Readiness) -> Iterator[Metric]:
    """Yield the gauge; it agrees with /readyz."""
    yield gauge(
        "varve_ready",
        "1 if clients are served, and every partition; otherwise /readyz has the reasons",
        float(readiness.not_ready_because() is None),
    )


def settings_families(reloader: Reloader | None) -> Iterator[Metric]:
    """Yield the metrics; a broker without a settings file has no failed reload."""
    yield gauge(
        "varve_settings_reload_failed",
        "1 if the last reload of the settings file failed and the old settings stay in effect",
        float(reloader is not None and reloader.problem is not None),
    )
