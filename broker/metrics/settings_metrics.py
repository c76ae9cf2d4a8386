"""Metrics of the settings file."""

from collections.abc import Iterator

from prometheus_client import Metric

from broker.lifecycle.reload import Reloader
from broker.metrics.families import gauge


def settings_families(reloader: Reloader | None) -> Iterator[Metric]:
    """Yield the metrics; a broker without a settings file has no failed reload."""
    yield gauge(
        "varve_settings_reload_failed",
        "1 if the last reload of the settings file failed and the old settings stay in effect",
        float(reloader is not None and reloader.failure is not None),
    )
