"""The metrics of every part of the broker, in the order of a scrape."""

from functools import partial

from broker.cleaning.key_recorder import KeyRecorder
from broker.erasure.erasures import Erasures
from broker.leases.leases import Leases
from broker.lifecycle.readiness import Readiness
from broker.lifecycle.reload import Reloader
from broker.metrics.broker_metrics import BrokerMetrics
from broker.metrics.cleaner_metrics import CleanerMetrics
from broker.metrics.consumer_metrics import ConsumerMetrics
from broker.metrics.erasure_metrics import erasure_families
from broker.metrics.exporter_metrics import ExporterMetrics
from broker.metrics.lease_metrics import lease_families
from broker.metrics.lifecycle_metrics import readiness_families, settings_families
from broker.metrics.quota_metrics import quota_families
from broker.metrics.security_metrics import Https, sasl_families, tls_families
from broker.metrics.transaction_metrics import transaction_families
from broker.metrics.view_metrics import view_families
from broker.network.listener import Listener
from broker.network.request_context import Services
from broker.topics.log_maintenance import LogMaintenance
from broker.version import installed_version
from broker.views.scheduler import ViewScheduler
from cleaner.scheduler.cleaner_pool import CleanerPool


def make_metrics(
    services: Services,
    *,
    readiness: Readiness,
    listener: Listener,
    http: Https,
    log_maintenance: LogMaintenance,
    reloader: Reloader | None,
    pool: CleanerPool,
    key_recorder: KeyRecorder,
    view_scheduler: ViewScheduler,
    leases: Leases,
    erasures: Erasures,
) -> BrokerMetrics:
    """Return the metrics of a broker that has opened its logs."""
    cleaner = CleanerMetrics(
        services.env,
        services.manager.table,
        services.topics,
        pool,
        key_recorder,
        settings=services.effective_settings.cleaner,
    )
    return BrokerMetrics(
        services,
        listener,
        log_maintenance,
        cleaner,
        [
            partial(readiness_families, readiness),
            ExporterMetrics(services, installed_version()).steps,
            ConsumerMetrics(services.coordinators.groups, services.topics).steps,
            partial(view_families, view_scheduler),
            partial(lease_families, leases),
            partial(erasure_families, erasures),
            partial(transaction_families, services.coordinators.transactions),
            partial(tls_families, listener, http, reloader),
            partial(quota_families, services.quotas),
            partial(sasl_families, services.stats),
            partial(settings_families, reloader),
        ],
    )
