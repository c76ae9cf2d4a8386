"""The composition root: constructs and connects the parts, starts them, stops them in reverse.

Start: lock the data directories, answer health checks, open the logs (in a thread, because recovery
may take minutes, and stoppable), register topics, create those of the settings file, listen, load
groups, start workers. Stop: refuse new connections, finish requests, stop the cleaner and the
timers, flush and close every log, write the clean-shutdown marker, release the locks.
"""

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import PurePath
from typing import Final

import structlog

from broker.cleaning.cleaner_host import BrokerCleanerHost
from broker.cleaning.dedicated_workers import DedicatedWorkers, StartWorker
from broker.cleaning.key_recorder import KeyRecorder
from broker.cleaning.log_checks import LogChecks
from broker.cleaning.partition_opener import PartitionOpener
from broker.cleaning.spark_offload import SparkRunner
from broker.coordinators import Coordinators
from broker.counters import BrokerStats
from broker.damage.damaged_reads import DamageWatch
from broker.damage.failed_directories import FailedDirectories
from broker.erasure.erasures import Erasures
from broker.erasure.partition_eraser import PartitionEraser
from broker.erasure.store import ErasureStore
from broker.event_loop.directory_threads import ALL, DirectoryThreads
from broker.event_loop.unpack_threads import UnpackThreads
from broker.handlers.administration import Administration
from broker.handlers.routes import make_dispatcher
from broker.handlers.security.sasl import SaslGate
from broker.http.api.routes import make_routes
from broker.http.endpoint import HttpEndpoint
from broker.http.observation import HttpObserver
from broker.inspection.keyless_records import KeylessSampler
from broker.inspection.record_reader import RecordReader
from broker.inspection.segment_history import OBSERVE_SECONDS, SegmentHistory
from broker.leases.leases import Leases
from broker.lifecycle import systemd
from broker.lifecycle.log_opening import open_logs
from broker.lifecycle.readiness import Readiness
from broker.lifecycle.reload import Reloader, Secrets
from broker.metrics.broker_metrics import BrokerMetrics
from broker.metrics.registry import make_metrics
from broker.metrics.startup_metrics import StartupMetrics
from broker.network.connection import RequestHandler
from broker.network.fetch_sessions import FetchSessions
from broker.network.listener import ConnectionLimits, Listener, warn_low_file_limit
from broker.network.request_context import Services
from broker.quotas.client_quotas import ClientQuotas
from broker.security import audit
from broker.security.authorizer import Authorizer
from broker.security.credentials import Credentials
from broker.security.sasl import Authentication, SaslSecrets, read_sasl_secrets
from broker.security.tls import check_renewal, load_server_tls
from broker.topics.checkpoint_writer import CheckpointWriter
from broker.topics.clock_watch import ClockWatch
from broker.topics.cold_reads import ColdReads
from broker.topics.effective_settings import EffectiveSettings
from broker.topics.index_loads import IndexLoads
from broker.topics.log_maintenance import LogMaintenance, Periods
from broker.topics.metadata_service import MetadataService
from broker.topics.metadata_writer import MetadataWriter
from broker.topics.partition import Partition
from broker.topics.producer_ids import ProducerIds
from broker.topics.replica_moves import ReplicaMoves
from broker.topics.topics import TopicError, Topics
from broker.tracing import open_tracing
from broker.views.compaction import ViewTools
from broker.views.scheduler import ViewScheduler
from broker.views.views import Views
from cleaner.planning.dirty_section import DirtySection
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.workers.process import Spawn, spawn_process
from config.address import Address
from config.broker_keys import BrokerLimits
from config.settings import Settings
from protocol.limits import RequestLimits
from storage.directory.cluster_metadata import ClusterMetadata
from storage.env import Env
from storage.errors import LogDirectoryError, StorageError
from storage.format.filenames import parse_partition_dir
from storage.kernels import warm_up
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from storage.manager.open_report import OpenReport
from storage.model import TopicPartition
from storage.segments.segment import IndexNotReadyError, Segment

logger = structlog.get_logger("broker.app")

# While the broker stops, a disk hangs that does not answer within this time. A stop has 30 s on
# Kubernetes and 90 s with systemd.
STOP_SECONDS: Final = 5.0


class Broker:
    """The parts of the running daemon, and the order in which they start and stop."""

    def __init__(
        self,
        settings: Settings,
        env: Env,
        *,
        token: bytes | None = None,
        load: Callable[[], Settings] | None = None,
        view_worker: StartWorker | None = None,
        spawn: Spawn = spawn_process,
        disk_threads: Callable[[], Executor] | None = None,
    ) -> None:
        """Construct the parts; those that need what is on disk follow in `_build_coordinators`.

        `token` protects the HTTP API. `load` reads the settings file again, if there is one.
        `view_worker` replaces the processes that compact views and verify leased work, where a
        process would not find the files. `spawn` starts every other worker. `disk_threads` makes
        the threads of a data directory; without, it uses those of the event loop.
        """
        self.settings = settings
        self._env = env
        self.stats = BrokerStats()
        self.addresses: list[Address] = []

        # Logs and their maintenance.
        self.manager = LogManager(env, settings.log_dirs)
        self.topics = Topics()
        self.directory_threads = DirectoryThreads(
            env.monotonic,
            disk_threads or (lambda: None),
            directories=tuple(map(os.path.abspath, settings.log_dirs)),
            # A single directory has no other that its disk could hold up.
            has_writers=disk_threads is not None and len(settings.log_dirs) > 1,
        )
        self.failed_directories = FailedDirectories(
            self.manager.table, self.topics, went_offline=self._partitions_went_offline
        )
        fail_directory = self.failed_directories.fail
        self.effective_settings = EffectiveSettings(settings, self.manager)
        self.metadata_writer = MetadataWriter(
            self.manager,
            self.directory_threads,
            self._trusted_wall_ms,
            partial(self.stats.measured, "metadata"),
        )
        self.checkpoint_writer = CheckpointWriter(
            self.manager.table, self.directory_threads, fail_directory
        )
        self.log_maintenance = LogMaintenance(
            env,
            self.manager,
            self.topics.partitions,
            self.checkpoint_writer,
            self.directory_threads,
            fail_directory=fail_directory,
            periods=Periods(
                retention=settings.retention_check_interval_ms / 1000,
                checkpoint=settings.checkpoint_interval_ms / 1000,
            ),
            producer_expiration_ms=settings.producer_id_expiration_ms,
            clock=ClockWatch(env.wall_ms(), env.monotonic() * 1000),
            note_time=self.metadata_writer.note_time,
            damage_gone=self._damage_removed,
            broker_stats=self.stats,
        )

        # The cleaner, and views, which limit what it may clean.
        self.views = Views(
            env,
            self.topics,
            self.directory_threads,
            self.stats,
            cleaned_elsewhere_end=self._cleaned_elsewhere_end,
        )
        self.cleaning = BrokerCleanerHost(
            env,
            self.manager,
            self.topics,
            self.directory_threads,
            fail_directory=fail_directory,
            clock_trusted=self.log_maintenance.clock_trusted,
            foreground=self.stats.foreground,
            limit=self.views.limit_of,
            write_checkpoints=self.checkpoint_writer.write,
            before_swap=self._before_swap,
        )
        self.pool = CleanerPool(
            self.cleaning,
            settings.cleaner,
            env,
            spawn=spawn,
            measured=partial(self.stats.measured, "cleaner"),
        )
        self.key_recorder = KeyRecorder(
            env,
            self.directory_threads,
            hash_key=self.cleaning.hash_key,
            settings=self.effective_settings.cleaner,
            stats=self.pool.stats,
            creator=self._creator,
        )
        self.partition_opener = PartitionOpener(
            env,
            self.stats,
            self.key_recorder,
            self.directory_threads,
            wake_cleaner=self.pool.wake,
            fail_directory=fail_directory,
        )

        # Topics, and the coordinators that keep their state in internal topics.
        self.metadata_service = MetadataService(
            self.manager,
            self.metadata_writer,
            self.effective_settings,
            self.topics,
            self.pool,
            open_partition=self.partition_opener.open,
            apply_limits=self._apply_limits,
            open_views=self.views.open_all,
            drop_counts=self.stats.drop_topic,
        )
        self.producer_ids = ProducerIds(self.metadata_writer, env.wall_ms)
        self.coordinators = Coordinators(
            settings,
            env,
            self.topics,
            self.views,
            metadata_service=self.metadata_service,
            producer_ids=self.producer_ids,
            threads=self.directory_threads,
        )
        self.readiness = Readiness(
            self.manager,
            self.directory_threads,
            failures=(self.coordinators.failures, self.views.failures),
        )

        # Work on logs beside the cleaner: compaction of views, moves, leases, checks.
        workers = DedicatedWorkers(spawn, self.pool, self.effective_settings.cleaner)
        self.view_scheduler = ViewScheduler(
            env,
            self.topics,
            self.views,
            ViewTools(
                worker=view_worker or workers.for_views,
                share=workers.view_share,
                pause=self.pool.control.paused,
                cleaning=self.cleaning,
                threads=self.directory_threads,
                fail_directory=fail_directory,
                settings=self.effective_settings.cleaner,
                clock_trusted=self.log_maintenance.clock_trusted,
            ),
            self.stats,
        )
        self.moves = ReplicaMoves(
            env,
            self.manager,
            self.topics,
            self.metadata_writer,
            self.directory_threads,
            pause=self.pool.control.paused,
            view_files=self.view_scheduler.files_of,
            opened=self._replica_moved,
            write_checkpoints=self.checkpoint_writer.write,
            fail_directory=fail_directory,
        )
        self.leases = Leases(
            env,
            self.topics,
            self.cleaning,
            self.pool,
            self.directory_threads,
            start_worker=view_worker or workers.for_leases,
            settings=self.effective_settings.cleaner,
            fail_directory=fail_directory,
            broker_stats=self.stats,
        )
        self.log_checks = LogChecks(
            env, self.cleaning, self.pool, workers.for_checks, self.effective_settings.cleaner
        )

        self.erasures = Erasures(
            env,
            self.topics,
            ErasureStore(env, self.cleaning.data_directories, self.directory_threads),
            PartitionEraser(
                env,
                self.topics,
                self.directory_threads,
                pool=self.pool,
                views=self.views,
                view_scheduler=self.view_scheduler,
                leases=self.leases,
                start_searcher=workers.for_searches,
                settings=self.effective_settings.cleaner,
                directories=lambda: self.manager.table.directories,
            ),
            secret=self.cleaning.hash_key,
            measured=partial(self.stats.measured, "erasures"),
        )

        # Clients: what requests use, the Kafka listener and the HTTP server.
        self.damage = DamageWatch(env, self.stats)
        self.quotas = ClientQuotas(env.monotonic)
        self.unpack_threads = UnpackThreads()
        self.record_reader = RecordReader(env.monotonic, self.directory_threads)
        self._segment_history = SegmentHistory(
            self.topics.partitions, self._dirty_section, self._running_job, env.wall_ms
        )
        self.keyless = KeylessSampler(self.record_reader, env.monotonic)
        self.authentication = Authentication(
            settings.sasl,
            Credentials(self._current_metadata),
            clock=env.monotonic,
            wall_ms=env.wall_ms,
        )
        self.reloader: Reloader | None = None
        if load is not None:
            self.reloader = Reloader(
                load,
                self._reload,
                self._current_settings,
                self._current_metadata,
                wall_ms=env.wall_ms,
            )
        self._services = self._build_services()
        self._dispatcher = make_dispatcher(self._services)
        self._tracing = open_tracing(settings.tracing)
        handler: RequestHandler = self._dispatcher
        if self._tracing is not None:
            handler = self._tracing.traced(handler)
            self.pool.history.observe(self._tracing.job_ended)
        self.listener = Listener(
            handler,
            # `_apply_limits` adds dynamic settings.
            ConnectionLimits.of(settings.limits, self._services.limits),
            rates=self.quotas.connections,
            new_gate=partial(SaslGate, self.authentication, self.stats.authentications),
            env=env,
            note_cut_file=self._note_cut_file,
            cold_reads=self._services.cold_reads,
        )
        self.http = self._build_http(token)
        self.spark = SparkRunner(
            env,
            self.pool,
            self.cleaning,
            settings=self.effective_settings.cleaner,
            api=self.http.own_api,
        )
        self._watchdog: asyncio.Task[None] | None = None

    def _build_services(self) -> Services:
        limits = self.settings.limits
        return Services(
            settings=self.settings,
            env=self._env,
            manager=self.manager,
            topics=self.topics,
            effective_settings=self.effective_settings,
            metadata_service=self.metadata_service,
            metadata_writer=self.metadata_writer,
            authentication=self.authentication,
            producer_ids=self.producer_ids,
            views=self.views,
            coordinators=self.coordinators,
            sessions=FetchSessions(limits.fetch_sessions),
            stats=self.stats,
            limits=RequestLimits(limits.request_bytes, limits.partitions),
            damage=self.damage,
            quotas=self.quotas,
            unpack_threads=self.unpack_threads,
            directory_threads=self.directory_threads,
            index_loads=IndexLoads(self.directory_threads),
            cold_reads=ColdReads(self.directory_threads),
            record_reader=self.record_reader,
            keyless=self.keyless,
            moves=self.moves,
            checkpoint_writer=self.checkpoint_writer,
        )

    def _build_http(self, token: bytes | None) -> HttpEndpoint:
        routes = make_routes(
            self._services,
            Administration(self._services, self._dispatcher, self._env.monotonic),
            readiness=self.readiness,
            log_maintenance=self.log_maintenance,
            reloader=self.reloader,
            pool=self.pool,
            cleaning=self.cleaning,
            view_scheduler=self.view_scheduler,
            leases=self.leases,
            log_checks=self.log_checks,
            key_erasures=self.erasures,
            fail_directory=self.failed_directories.fail,
            damage_skipped=self._damage_removed,
            segment_history=self._segment_history,
            listeners=self.addresses,
        )
        return HttpEndpoint(
            self.settings,
            self.authentication,
            self._services.allows,
            routes,
            token=token,
            health=self.readiness,
            observer=HttpObserver(self.stats.http, self._tracing),
            rates=self.quotas.connections,
            turns=self.listener.turns,
            early_metrics=StartupMetrics(self.manager, self.readiness),
        )

    def _build_metrics(self) -> BrokerMetrics:
        return make_metrics(
            self._services,
            readiness=self.readiness,
            listener=self.listener,
            http=self.http,
            log_maintenance=self.log_maintenance,
            reloader=self.reloader,
            pool=self.pool,
            key_recorder=self.key_recorder,
            view_scheduler=self.view_scheduler,
            leases=self.leases,
            erasures=self.erasures,
        )

    def _creator(self, partition: TopicPartition) -> Hashable | None:
        return self.metadata_service.creator(partition)

    def _cleaned_elsewhere_end(self, log: Log) -> int:
        checkpoint = self.manager.table.cleaner_offsets.get(log.partition)
        return self.pool.state_store.cleaned_elsewhere_end(log.partition, log.topic_id, checkpoint)

    def _build_coordinators(self) -> None:
        """Construct the parts that need the metadata and the topics on disk."""
        metadata = self.manager.metadata
        self.quotas.update(metadata.client_quotas)
        self._services.authorizer = Authorizer(self.settings.authorization, metadata.acls)
        self.coordinators.build()
        self.damage.offsets = self.coordinators.groups.offsets
        self.metadata_service.offset_deletion = self.coordinators.groups.deletion

    # Start --------------------------------------------------------------------

    async def start(self) -> None:
        """Open the logs and serve clients.

        Raises StorageError, OSError, TopicError, TlsError, SecretError, JwksError.
        """
        warm_up()  # here, because importing the compiler later would block the loop
        self.listener.tls = await asyncio.to_thread(load_server_tls, self.settings.tls)
        sasl_secrets = await asyncio.to_thread(read_sasl_secrets, self.settings.sasl)
        await asyncio.to_thread(self.manager.lock)
        self._watchdog = systemd.start_watchdog(self.readiness.unhealthy_because)
        try:
            await self.http.start(self.listener.tls)
        except BaseException:
            await asyncio.to_thread(self.manager.unlock)
            raise
        try:
            report = await open_logs(
                self.manager, self.effective_settings.topic_config, self.readiness
            )
            try:
                await self._serve_clients(report, sasl_secrets)
            except BaseException:
                await self.listener.stop(0)  # clients may have reached the first of its addresses
                # Close the logs, so that the next start, perhaps on a free port, recovers nothing.
                await asyncio.to_thread(self.manager.close)
                raise
        except BaseException:
            await self.http.stop()
            raise

    async def _serve_clients(self, report: OpenReport, sasl_secrets: SaslSecrets) -> None:
        self.failed_directories.note_logged(report.offline_directories)
        self.log_maintenance.check_pause(self.manager.metadata.last_wall_ms)
        self.metadata_service.load()
        self._build_coordinators()
        self.pool.configure(self.effective_settings.cleaner())
        await self.metadata_service.finish_interrupted()
        failure = await self._apply_yaml()
        if failure is not None:
            self._check_online()
            logger.error("topics of the settings file not created", reason=failure)
            if self.reloader is not None:
                self.reloader.note_start(failure)
        await self.pool.load()
        await self.views.open_all(self.topics)  # before clients read them
        await self.leases.start()  # before clients append
        self._apply_limits(self.effective_settings.limits())
        await self.log_maintenance.measure_disks()
        await self.authentication.load(self.settings.sasl, sasl_secrets)
        await self.erasures.load()
        self.http.open(self._build_metrics())
        for listener in self.settings.listeners:
            host, port = await self.listener.start(listener)
            self.addresses.append(Address(host, port))
        self.log_maintenance.start()
        self.log_maintenance.repeat(
            "segment history", OBSERVE_SECONDS, self._segment_history.observe
        )
        self.coordinators.start(self.log_maintenance)
        await self.pool.start()
        self.spark.start()
        self.view_scheduler.start()
        self.erasures.start()
        self.readiness.begin_serving()
        if self.reloader is not None:
            self.reloader.start()
        gc.collect()
        gc.freeze()  # what exists now lives as long as the process

    # Stop ---------------------------------------------------------------------

    def request_stop(self) -> None:
        """Begin an orderly stop."""
        self.readiness.begin_stopping()

    def request_reload(self) -> None:
        """Read the settings file again (SIGHUP); stop if there is none.

        During the start, this waits for its end.
        """
        if self.reloader is None:
            self.request_stop()
        elif not self.readiness.is_stopping:
            self.reloader.request()

    async def wait_stopped(self) -> None:
        """Wait for `request_stop`."""
        await self.readiness.wait_stopping()

    async def stop(self) -> None:
        """Stop every part, close the logs, write the marker. No failed step ends the stop."""
        self.readiness.begin_stopping()
        self.metadata_writer.begin_stopping()
        await self._give_up_hanging()
        budget = self.settings.shutdown_timeout_ms / 1000
        steps: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("listener", partial(self.listener.stop, budget)),
            ("decompression", self.unpack_threads.stop),
            ("authentication", self.authentication.stop),
            ("transactions", self.coordinators.transactions.close),
            ("groups", self.coordinators.groups.close),
            ("reload", self._stop_reloading),
            ("views", self.view_scheduler.stop),  # a move waits for a compaction of its view
            ("replica moves", self.moves.stop),
            ("metadata changes", partial(self.metadata_writer.wait_idle, budget)),
            ("offsets topic", self.coordinators.offsets_topic.stop),
            ("transaction topic", self.coordinators.transaction_topic.stop),
            ("spark", self.spark.stop),
            ("leases", self.leases.stop),
            ("log checks", self.log_checks.stop),
            ("erasures", self.erasures.stop),
            ("keyless records", self.keyless.stop),
            ("cleaner", self.pool.stop),
            ("cleaner checkpoints", self.cleaning.stop),
            ("key indexes", self.key_recorder.stop),
            ("log maintenance", self.log_maintenance.stop),
            ("http", self.http.stop),
        ]
        for name, step in steps:
            await self._stop_part(name, step)
        await self._stop_part("writes and flushes", self._wait_idle)
        reports = asyncio.create_task(self._report_stop(), name="progress of the stop")
        try:
            await self.directory_threads.run(ALL, self._close_logs)
        finally:
            reports.cancel()
        self.directory_threads.close()
        if self._tracing is not None:  # the logs do not wait for a collector
            await self._stop_part("tracing", self._tracing.stop)
        audit.write_repeated()
        if self._watchdog is not None:
            self._watchdog.cancel()

    @property
    def has_hung_threads(self) -> bool:
        """Return whether threads wait for a disk that hangs, after a stop that gave them up."""
        return any(directory.is_hanging for directory in self.manager.table.directories)

    async def _give_up_hanging(self) -> bool:
        """Take data directories offline whose disk does not answer; the others are closed.

        Return whether there are any.
        """
        for path in await self.metadata_writer.find_silent(STOP_SECONDS):
            error = LogDirectoryError(path, "its disk hangs")
            self.failed_directories.fail(error)
            self.manager.table.give_up(path)
            self.directory_threads.abandon(path, error)
        return self.has_hung_threads

    async def _stop_part(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        """Stop a part; do not wait for it if it waits for a disk that hangs."""
        stopping = asyncio.ensure_future(step())
        while not stopping.done():
            await asyncio.wait([stopping], timeout=STOP_SECONDS)
            if not stopping.done() and await self._give_up_hanging():
                await asyncio.wait([stopping], timeout=STOP_SECONDS)
                break
        if not stopping.done():
            logger.error("part not stopped", part=name, reason="the disk of a data directory hangs")
        elif not stopping.cancelled() and (error := stopping.exception()) is not None:
            logger.error("stop failed", part=name, exc_info=error)

    async def _wait_idle(self) -> None:
        for directory in self.manager.table.directories:
            if directory.is_online:
                await self.directory_threads.wait_unstalled(directory.path)
        for partition in self.topics.partitions():
            await partition.wait_idle()

    async def _report_stop(self) -> None:
        reports, logs = systemd.ProgressReports(), tuple(self.manager.table.logs.values())
        while True:
            await asyncio.sleep(systemd.PROGRESS_SECONDS)
            closed = sum(log.is_closed for log in logs)
            logger.info("closing of logs progressed", partitions=closed, of=len(logs))
            reports.report(f"closing {closed} of {len(logs)} partitions", closed)

    def _close_logs(self) -> None:
        """Close the logs; in a thread."""
        directories = {directory.path: directory for directory in self.manager.table.directories}

        def probe(path: str) -> None:
            self.manager.probe(directories[path])

        self.manager.close(
            run_each=partial(self.directory_threads.run_each, probe=probe, seconds=STOP_SECONDS)
        )

    # Calls between the parts ------------------------------------------------------

    def _dirty_section(self, partition: TopicPartition) -> DirtySection | None:
        verdict = self.pool.scanner.verdicts.get(partition)
        return None if verdict is None else verdict.section

    def _running_job(self, partition: TopicPartition) -> str | None:
        attempt = self.pool.control.attempts.get(partition)
        return None if attempt is None else attempt.job.job_id

    def _before_swap(self, log: Log) -> None:
        partition = self.topics.partition(log.partition)
        if partition is not None:
            self._segment_history.observe_partition(partition)

    async def _reload(self, settings: Settings, secrets: Secrets) -> str | None:
        """Use the settings and secrets; return why a topic of the file was not created."""
        check_renewal(self.listener.tls, secrets.tls, self._env.wall_ms() / 1000)
        await self.metadata_service.reload(settings)
        self.settings = self._services.settings = settings
        self.listener.tls = secrets.tls
        self.http.reload(token=secrets.token, tls=secrets.tls)
        await self.authentication.load(settings.sasl, secrets.sasl)
        return await self._apply_yaml()

    async def _apply_yaml(self) -> str | None:
        """Create what the settings file names; return why a topic was not created.

        The other topics are served: dynamic settings may contradict the file, and a broker that
        does not start cannot be reconfigured.
        """
        try:
            await self.metadata_service.apply_yaml()
        except (TopicError, StorageError) as error:
            return str(error)
        return None

    def _check_online(self) -> None:
        """Raise LogDirectoryError if all data directories failed during the start."""
        directories = self.manager.table.directories
        if not any(directory.is_online for directory in directories):
            raise LogDirectoryError(directories[0].path, directories[0].offline_reason or "")

    async def _stop_reloading(self) -> None:
        if self.reloader is not None:
            await self.reloader.stop()

    def _apply_limits(self, limits: BrokerLimits) -> None:
        self.listener.set_connection_limits(
            connections=limits.connections,
            connections_per_ip=limits.connections_per_ip,
            creation_rate=limits.connection_creation_rate,
        )
        self.log_maintenance.producer_expiration_ms = limits.producer_id_expiration_ms
        warn_low_file_limit(limits.connections, self.manager.table.logs.values())

    def _partitions_went_offline(self, lost: Sequence[TopicPartition], reason: str) -> None:
        self.coordinators.fail(lost)
        for partition in lost:
            self.pool.operator.abort(partition, f"it is offline: {reason}")

    def _replica_moved(self, partition: Partition, log: Log) -> None:
        self.partition_opener.connect_to_cleaner(partition, log)
        self.views.reopen(partition)

    def _trusted_wall_ms(self) -> int | None:
        return self.log_maintenance.trusted_wall_ms()

    def _note_cut_file(self, path: str) -> None:
        """Look for damage in a segment whose file was cut, so that readers get what is left."""
        for folder in PurePath(path).parents:  # that of the partition, or the view's inside it
            name = parse_partition_dir(folder.name)
            partition = None if name is None else self.topics.partition(name)
            if partition is None:
                continue
            view = self.views.partition(partition.partition)
            ledger = None if view is None else view.log.ledger
            of_view = None if ledger is None else ledger.segments
            for segment in (*partition.log.segments, *(of_view or ())):
                if segment.path == path:
                    needed = IndexNotReadyError(segment, Segment.note_cut)
                    self._services.index_loads.begin(needed)

    def _damage_removed(self, partition: TopicPartition) -> None:
        self.coordinators.reload_after_repair(partition)
        self.pool.forget_failures(partition)  # the damage may have put it in quarantine
        self.pool.wake()

    def _current_settings(self) -> Settings:
        return self.settings

    def _current_metadata(self) -> ClusterMetadata:
        return self.manager.metadata
