"""The metrics that are served while the broker opens its logs."""

from collections.abc import Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from broker.lifecycle.readiness import Readiness
from broker.metrics.directory_metrics import directory_families, recovery_families
from broker.metrics.lifecycle_metrics import readiness_families
from storage.manager.log_manager import LogManager


class StartupMetrics:
    """Process, readiness, directory and recovery metrics, without those of partitions."""

    def __init__(self, manager: LogManager, readiness: Readiness) -> None:
        self._manager = manager
        self._readiness = readiness
        self._process = ProcessCollector(registry=None)

    async def snapshot(self) -> Sequence[Metric]:
        """Return every metric family of this phase."""
        return [
            *readiness_families(self._readiness),
            *recovery_families(self._manager),
            *directory_families(self._manager.table, {}),
            *self._process.collect(),
        ]
