"""The routes of the HTTP API and the console: which part of the broker answers which request."""

from collections.abc import Callable, Iterator, Sequence

from aiohttp import web

from broker.cleaning.cleaner_host import BrokerCleanerHost
from broker.cleaning.log_checks import LogChecks
from broker.damage.log_repair import LogRepair
from broker.erasure.erasures import Erasures
from broker.http.api import audit, schemas, topics
from broker.http.api.audit import AuditApi
from broker.http.api.compaction import cleaner as cleaner_routes
from broker.http.api.compaction import erasures, views
from broker.http.api.compaction.cleaner import END_TRANSACTION, CleanerApi
from broker.http.api.compaction.cleaner_queue import CleanerQueueApi
from broker.http.api.compaction.erasures import ErasuresApi
from broker.http.api.compaction.leases import TRANSFERS, LeasesApi
from broker.http.api.compaction.verify import VerifyApi
from broker.http.api.compaction.views import ViewApi
from broker.http.api.events import STREAMS, EventsApi
from broker.http.api.groups import GroupsApi
from broker.http.api.kafka import (
    acls,
    broker_settings,
    group_changes,
    records,
    topic_changes,
    users,
)
from broker.http.api.kafka.acls import AclsApi
from broker.http.api.kafka.broker_settings import BrokerSettingsApi
from broker.http.api.kafka.client import KafkaHandlers
from broker.http.api.kafka.group_changes import GroupChanges
from broker.http.api.kafka.records import RecordsApi
from broker.http.api.kafka.topic_changes import TopicChanges
from broker.http.api.kafka.users import UsersApi
from broker.http.api.log import SKIP, TRUNCATE, LogApi
from broker.http.api.openapi import openapi
from broker.http.api.overview import OverviewApi
from broker.http.api.requests import translate_errors
from broker.http.api.schemas import SchemasApi
from broker.http.api.topics import TopicsApi
from broker.http.api.user_quotas import within_quotas
from broker.http.console import OPEN_ROUTES, Console
from broker.http.server import Routes
from broker.inspection.segment_history import SegmentHistory
from broker.leases.file_transfer import Transfers
from broker.leases.leases import Leases
from broker.lifecycle.readiness import Readiness
from broker.lifecycle.reload import Reloader
from broker.logging import recent_audit_events
from broker.network.request_context import Services
from broker.topics.log_maintenance import LogMaintenance
from broker.version import installed_version
from broker.views.scheduler import ViewScheduler
from cleaner.scheduler.cleaner_pool import CleanerPool
from config.address import Address
from storage.errors import LogDirectoryError
from storage.model import TopicPartition

FailDirectory = Callable[[LogDirectoryError], None]


def make_routes(
    services: Services,
    handlers: KafkaHandlers,
    *,
    readiness: Readiness,
    log_maintenance: LogMaintenance,
    reloader: Reloader | None,
    pool: CleanerPool,
    cleaning: BrokerCleanerHost,
    view_scheduler: ViewScheduler,
    leases: Leases,
    log_checks: LogChecks,
    key_erasures: Erasures,
    fail_directory: FailDirectory,
    damage_skipped: Callable[[TopicPartition], None],
    segment_history: SegmentHistory,
    listeners: Sequence[Address],
) -> Routes:
    """Return every route. `handlers` answers requests as it answers those of Kafka clients.

    `damage_skipped` is called after damage of a partition was skipped. `listeners` are the bound
    ones, none before clients are served.
    """
    settings, version = services.effective_settings.cleaner, installed_version()
    repair = LogRepair(
        services.env,
        services.manager.table,
        cleaning,
        services.directory_threads,
        pause=pool.control.paused,
        write_checkpoints=services.checkpoint_writer.write,
        forget_records=pool.state_store.forget_records,
        view_horizon=services.views.horizon_of,
        erasure_end=key_erasures.end_in,
    )
    transfers = Transfers(services.env, services.directory_threads, leases)
    log = LogApi(
        services.topics,
        services.damage,
        repair,
        skipped=damage_skipped,
        fail_directory=fail_directory,
        allows=services.allows,
    )
    cleaner = CleanerApi(services, pool, settings=settings)
    overview = OverviewApi(
        services,
        readiness,
        log_maintenance,
        pool,
        reloader,
        erasures=key_erasures,
        settings=settings,
        version=version,
        listeners=listeners,
    )
    events = EventsApi(services, pool, readiness, log_maintenance, reloader)
    return Routes(
        (
            *cleaner.routes(),
            *CleanerQueueApi(pool, services.env.wall_ms).routes(),
            *VerifyApi(services.topics, log_checks).routes(),
            *log.routes(),
            *ViewApi(services.topics, view_scheduler).routes(),
            *LeasesApi(leases, transfers).routes(),
            *ErasuresApi(services.topics, key_erasures, services.allows).routes(),
            *TopicsApi(
                services.topics,
                services.views,
                pool,
                segment_history,
                allows=services.allows,
            ).routes(),
            *GroupsApi(services).routes(),
            *_kafka_routes(services, handlers, fail_directory),
            *BrokerSettingsApi(services, handlers, reloader).routes(),
            *AuditApi(recent_audit_events, services.allows).routes(),
            *overview.routes(),
            *events.routes(),
            *Console().routes(),
            *openapi.routes(version),
        ),
        middlewares=(translate_errors, within_quotas(handlers)),
        transfers=frozenset(TRANSFERS),
        streams=frozenset(STREAMS),
        of_cluster=frozenset((SKIP, TRUNCATE, END_TRANSACTION)),
        of_query_topic=frozenset((*cleaner_routes.OF_QUERY_TOPIC, views.ROOT)),
        administrative=frozenset(
            (
                *topics.ADMINISTRATIVE,
                *topic_changes.ADMINISTRATIVE,
                *group_changes.ADMINISTRATIVE,
                *records.ADMINISTRATIVE,
                *broker_settings.ADMINISTRATIVE,
                *users.ADMINISTRATIVE,
                *acls.ADMINISTRATIVE,
                *audit.ADMINISTRATIVE,
                *schemas.ADMINISTRATIVE,
                *erasures.ADMINISTRATIVE,
            )
        ),
        open=frozenset(OPEN_ROUTES),
        at_stop=(events.stop,),
    )


def _kafka_routes(
    services: Services,
    handlers: KafkaHandlers,
    fail_directory: FailDirectory,
) -> Iterator[web.RouteDef]:
    """Yield the routes that the handlers of the Kafka protocol answer."""
    yield from TopicChanges(handlers, services.topics, services.allows, services.keyless).routes()
    yield from GroupChanges(handlers, services.topics, services.allows).routes()
    yield from RecordsApi(
        services.topics,
        services.views,
        handlers,
        services.record_reader,
        allows=services.allows,
        now_ms=services.env.wall_ms,
        fail_directory=fail_directory,
    ).routes()
    yield from SchemasApi(services.settings.schema_registry, services.allows).routes()
    yield from UsersApi(handlers, services.allows).routes()
    yield from AclsApi(handlers).routes()
