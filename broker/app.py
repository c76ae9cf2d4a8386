"""The composition root: builds every part, starts them in order, stops them in reverse.

Start: lock the data directories, answer health checks, open the logs (in a thread: after a crash it
takes its time, and may be stopped), take over topics, create those of the YAML, listen, say that we
are ready; then what may take its time: groups are loaded, workers are started. Stop: take
no new connections, let requests finish, stop the cleaner and the timers, flush and close every
log, leave the clean-shutdown marker, release the locks.
"""

import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import structlog

from broker import systemd
from broker.banner import ready_text
from broker.cleaning.cleaner_host import BrokerCleanerHost
from broker.cleaning.spark_offload import SparkRunner
from broker.counters import BrokerStats
from broker.damage.damaged_reads import DamageWatch
from broker.damage.log_repair import LogRepair
from broker.descriptors import run_in_thread
from broker.groups.coordinator import CoordinatorSettings, GroupCoordinator
from broker.groups.live_group import LoopClock
from broker.groups.model import GroupRules
from broker.groups.offsets_store import OffsetsStore
from broker.groups.offsets_topic import OffsetsTopic
from broker.handlers.routes import make_dispatcher
from broker.http.access import Guard
from broker.http.api import openapi
from broker.http.api.cleaner import CleanerApi
from broker.http.api.leases import TRANSFERS, LeasesApi
from broker.http.api.log import LogApi
from broker.http.api.requests import translate_errors
from broker.http.api.views import ViewApi
from broker.http.server import HttpServer
from broker.leases.adoption import Adopter
from broker.leases.file_transfer import Transfers
from broker.leases.leases import Leases
from broker.leases.leasing import LeaseIssuer
from broker.logging import may_print, writes_text
from broker.metrics.broker_metrics import BrokerMetrics
from broker.metrics.cleaner_metrics import CleanerMetrics
from broker.metrics.consumer_metrics import ConsumerMetrics
from broker.metrics.directory_metrics import StartMetrics
from broker.metrics.lease_metrics import lease_families
from broker.metrics.view_metrics import view_families
from broker.network.fetch_sessions import FetchSessions
from broker.network.listener import (
    ConnectionLimits,
    Listener,
    raise_file_limit,
    warn_low_file_limit,
)
from broker.network.request_context import Services
from broker.reload import Reloader
from broker.topics.log_maintenance import CONFIRM_MS, ClockWatch, Housekeeping, Periods
from broker.topics.partition import Partition
from broker.topics.topics import TopicError, Topics
from broker.version import installed_version
from broker.views.compaction import StartWorker, ViewTools
from broker.views.scheduler import ViewCompactions
from broker.views.views import Views
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.workers.budget_share import Share, own_share
from cleaner.workers.dedicated_worker import JobRunner, solo_worker
from cleaner.workers.process import Spawn, spawn_process
from config.address import Address
from config.broker_keys import BrokerLimits
from config.settings import Settings
from config.token import TokenFileError, read_token
from protocol.limits import RequestLimits
from storage.env import Env, RealEnv
from storage.errors import (
    LogDirectoryError,
    OpeningStoppedError,
    PartitionFolderError,
    StorageError,
)
from storage.kernels import warm_up
from storage.log.log import Log
from storage.manager.log_manager import LogManager, OpenReport
from storage.model import TopicPartition

logger = structlog.get_logger("broker.app")

# A broker that stood still for longer waits with deleting until its clock has held for a while.
PLAUSIBLE_PAUSE_MS = 86_400_000
PROGRESS_SECONDS = 5.0  # between two lines about a long recovery
VIEW_WORKER = -1  # its number among those that share the cleaner's budgets
LEASE_WORKER = -2  # likewise
UNSERVED_LISTED_MAX = 20  # partitions named in the answer of /readyz
EXIT_OK = 0
EXIT_CANNOT_START = 1


class Broker:
    """Every part of the running daemon, and their order."""

    def __init__(
        self,
        settings: Settings,
        env: Env,
        *,
        token: bytes | None = None,
        load: Callable[[], Settings] | None = None,
        view_worker: StartWorker | None = None,
        spawn: Spawn = spawn_process,
    ) -> None:
        """`token`: of the HTTP API. `load` reads the settings file anew, if there is one.

        `view_worker` compacts views, and compares what comes from outside, where a process would
        not find the files. `spawn` starts every other worker.
        """
        self._spawn = spawn
        self.settings = settings
        self._token = token
        self.stats = BrokerStats()
        self._env = env
        self._stopping = asyncio.Event()
        self._ready = False
        self.manager = LogManager(env, settings.log_dirs)
        self.topics = Topics(
            self.manager,
            settings,
            self._make_partition,
            cleaner=lambda: self.pool,
            apply_limits=self._apply_limits,
        )
        wall_ms, monotonic_ms = env.wall_ms(), env.monotonic() * 1000
        self.housekeeping = Housekeeping(
            env,
            self.manager,
            self.topics.partitions,
            fail_directory=self.fail_directory,
            periods=Periods(
                retention=settings.retention_check_interval_ms / 1000,
                checkpoint=settings.checkpoint_interval_ms / 1000,
            ),
            producer_expiration_ms=settings.producer_id_expiration_ms,
            clock=ClockWatch(wall_ms, monotonic_ms),
            note_time=self.topics.note_time,
            damage_gone=self._damage_removed,
            broker_stats=self.stats,
        )
        self.views = Views(env, self.topics, self.stats)
        self.cleaning = BrokerCleanerHost(
            env,
            self.manager,
            self.topics,
            fail_directory=self.fail_directory,
            clock_trusted=self.housekeeping.clock_trusted,
            foreground=self.stats.foreground,
            limit=self.views.limit_of,
        )
        self.pool = self._make_pool(spawn)
        self.view_runs = self._make_view_runs(view_worker or self._view_worker)
        self.leases = self._make_leases(view_worker or self._lease_worker)
        self.spark = self._make_spark()
        self.damage = DamageWatch(env, self.stats, lambda: self.groups)
        self.reloader: Reloader | None = None
        if load is not None:
            self.reloader = Reloader(
                load, self._reload, lambda: self.settings, lambda: self.manager.metadata
            )
        self._services: Services
        self.offsets_topic: OffsetsTopic
        self.groups: GroupCoordinator  # once it is ready, and so the API is open
        self.listener: Listener
        self.http: HttpServer
        self.addresses: list[Address] = []
        self.http_address = settings.http
        self._failed: set[str] = set()  # data directories that are known to be offline

    def _make_view_runs(self, worker: StartWorker) -> ViewCompactions:
        return ViewCompactions(
            self._env,
            self.topics,
            self.views,
            ViewTools(
                worker=worker,
                share=self._view_share,
                pause=self.pool.paused,
                cleaning=self.cleaning,
                fail_directory=self.fail_directory,
                hash_key=lambda: self.manager.metadata.hash_key,
                settings=lambda: self.topics.cleaner_settings,
                clock_trusted=self.housekeeping.clock_trusted,
            ),
        )

    def _make_leases(self, worker: StartWorker) -> Leases:
        issuer = LeaseIssuer(
            self._env,
            self.topics,
            self.cleaning,
            self.pool,
            settings=lambda: self.topics.cleaner_settings,
            fail_directory=self.fail_directory,
        )
        adopter = Adopter(self._env, self.cleaning, self.pool, worker)
        return Leases(self._env, self.topics, issuer, adopter, hold=self.pool.paused)

    def _make_spark(self) -> SparkRunner:
        return SparkRunner(
            self._env,
            self.pool,
            self.cleaning,
            settings=lambda: self.topics.cleaner_settings,
            url=lambda: f"http://{self.http_address.here}",
            token_file=lambda: self.settings.http_token_file,
        )

    # Start --------------------------------------------------------------------

    async def start(self) -> None:
        """Open, listen, be ready. Raises StorageError, OSError, TopicError when that cannot be."""
        warm_up()  # importing the compiler later would hold up the loop
        await asyncio.to_thread(self.manager.lock)
        try:
            await self._start_http()
        except BaseException:
            await asyncio.to_thread(self.manager.unlock)
            raise
        try:
            report = await self._open_logs()
            try:
                await self._start(report)
            except BaseException:
                # So that the next start, on a free port perhaps, has nothing to recover.
                await asyncio.to_thread(self.manager.close)
                raise
        except BaseException:
            await self.http.stop()
            raise

    async def _open_logs(self) -> OpenReport:
        """In a thread, with a line now and then that says how far it is.

        Raises OpeningStoppedError after `request_stop`.
        """
        unclean = self.manager.unclean_directories
        if unclean:
            logger.warning(
                "last stop was not orderly; logs are recovered from their recovery points",
                directories=list(unclean),
            )
        opening = asyncio.create_task(asyncio.to_thread(self.manager.load, self.topics.config_of))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while not opening.done():
                tasks = (opening,) if self._stopping.is_set() else (opening, stopping)
                await asyncio.wait(
                    tasks, timeout=PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if self._stopping.is_set():
                    self.manager.stop_opening()
                elif not opening.done():
                    done, total = self.manager.opening.done, self.manager.opening.total
                    logger.info("recovering", partitions=done, of=total)
                    systemd.notify(f"STATUS=recovering {done} of {total} partitions")
        finally:
            stopping.cancel()
            self.manager.stop_opening()  # nobody waits any more
        return await opening

    async def _start(self, report: OpenReport) -> None:
        self._failed.update(report.offline_directories)
        for event, fields in report.routine_lines():
            logger.info(event, **fields)
        for event, fields in report.lines():
            logger.warning(event, **fields)
        self._distrust_jumped_clock()
        self.topics.load()
        self.pool.configure(self.topics.cleaner_settings)
        await self.topics.finish_interrupted()
        await self.topics.apply_yaml()
        await asyncio.to_thread(list, self.views)  # opened before clients ask for them
        await self.leases.start()  # before anybody appends
        services = self._services = self._make_services()
        limits = self.settings.limits
        self.listener = Listener(
            make_dispatcher(services),
            ConnectionLimits(
                max_connections=limits.connections,  # until `_apply_limits`
                max_connections_per_ip=limits.connections_per_ip,
                max_request_bytes=limits.request_bytes,
                max_queued_bytes=limits.queued_request_bytes,
                max_idle_seconds=limits.connection_idle_ms / 1000,
                max_first_request_seconds=limits.first_request_ms / 1000,
                requests=services.limits,
            ),
        )
        self._apply_limits(self.topics.limits)
        await self.housekeeping.measure_disks()
        self._open_http(services)
        for address in self.settings.listeners:
            host, port = await self.listener.start(address.host, address.port)
            self.addresses.append(Address(host, port))
        self.housekeeping.start()
        self.offsets_topic.start()
        await self.pool.start()
        self.spark.start()
        self.view_runs.start()
        self._ready = True
        gc.collect()
        gc.freeze()  # what was built until here lives as long as the process

    def _make_pool(self, spawn: Spawn) -> CleanerPool:
        return CleanerPool(
            self.cleaning,
            self.settings.cleaner,
            self._env,
            spawn=spawn,
            measured=partial(self.stats.measured, "cleaner"),
        )

    def _make_services(self) -> Services:
        groups = self.settings.groups
        self.offsets_topic = OffsetsTopic(
            self.topics, self._env, groups, self.housekeeping.clock_trusted
        )
        store = OffsetsStore(self.offsets_topic.partition_count, self.offsets_topic.append)
        rules = GroupRules(
            initial_rebalance_delay_ms=groups.initial_rebalance_delay_ms,
            max_group_size=groups.members,
        )
        self.groups = GroupCoordinator(
            store,
            LoopClock(self._env.wall_ms),
            CoordinatorSettings(
                rules=rules,
                group_min_session_timeout_ms=groups.min_session_timeout_ms,
                group_max_session_timeout_ms=groups.max_session_timeout_ms,
                offsets_retention_ms=groups.offsets_retention_minutes * 60_000,
                offset_metadata_max_bytes=groups.offset_metadata_bytes,
            ),
        )
        self.offsets_topic.coordinator = self.groups
        return Services(
            settings=self.settings,
            env=self._env,
            manager=self.manager,
            topics=self.topics,
            views=self.views,
            groups=self.groups,
            offsets_topic=self.offsets_topic,
            sessions=FetchSessions(self.settings.limits.fetch_sessions),
            stats=self.stats,
            limits=RequestLimits(
                self.settings.limits.request_bytes, self.settings.limits.partitions
            ),
            damage=self.damage,
            cluster_id=self.manager.metadata.cluster_id,
            node_id=self.manager.metadata.node_id,
        )

    async def _start_http(self) -> None:
        """Health checks; all else is refused until `_open_http`."""
        address = self.settings.http
        api = CleanerApi(self._env, self.topics, self.pool, self.fail_directory, self.damage)
        views = ViewApi(self.topics, self.view_runs)
        offline = LeasesApi(self.leases, Transfers(self._env, self.leases))
        documents = openapi.routes(installed_version())
        logs = LogApi(
            self.manager,
            self.topics,
            self.damage,
            LogRepair(self._env, self.cleaning, self.pool.paused),
            skipped=self._damage_removed,
            fail_directory=self.fail_directory,
        )
        routes = [*api.routes(), *logs.routes(), *views.routes(), *offline.routes(), *documents]
        guard = Guard.of(address, self._token)
        early = StartMetrics(self.manager)
        self.http = HttpServer(
            self, guard, routes, [translate_errors], TRANSFERS, early_metrics=early
        )
        host, port = await self.http.start(address.host, address.port)
        self.http_address = Address(host, port)

    def _open_http(self, services: Services) -> None:
        cleaner = CleanerMetrics(
            self._env, self.manager, self.topics, self.pool, self._wanted_workers
        )
        self.http.open(
            BrokerMetrics(
                services,
                self.listener,
                self.housekeeping,
                cleaner,
                [
                    ConsumerMetrics(self.groups, self.topics).steps,
                    lambda: view_families(self.view_runs),
                    lambda: lease_families(self.leases),
                ],
            )
        )

    def _distrust_jumped_clock(self) -> None:
        """A wall clock behind the last time that was written down was set back, and one far ahead
        of it may have been set: for a while nothing is deleted by it.
        """
        passed_ms = self._env.wall_ms() - self.manager.metadata.last_wall_ms
        if not 0 <= passed_ms <= PLAUSIBLE_PAUSE_MS:
            self.housekeeping.clock.distrust(self._env.monotonic() * 1000)
            logger.warning(
                "wall clock is far from that of the last run; retention suspended",
                passed_ms=passed_ms,
                for_ms=CONFIRM_MS,
            )

    # Stop ---------------------------------------------------------------------

    def request_stop(self) -> None:
        """Begin an orderly stop; `run` goes on from there."""
        self._ready = False
        self._stopping.set()

    def request_reload(self) -> None:
        """SIGHUP: read the settings file anew. Without one it means what it says: stop."""
        if self.reloader is None:
            self.request_stop()
        elif self._ready:
            self.reloader.request()

    async def wait_stopped(self) -> None:
        """Until somebody asks for a stop."""
        await self._stopping.wait()

    async def stop(self) -> None:
        """Stop every part, flush, leave the marker. Takes each step, whatever failed."""
        self._ready = False
        budget = self.settings.shutdown_timeout_ms / 1000
        steps: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("listener", lambda: self.listener.stop(budget)),
            ("groups", self.groups.close),
            ("reload", self._stop_reloading),
            ("topics", lambda: self.topics.wait_idle(budget)),
            ("offsets topic", self.offsets_topic.stop),
            ("spark", self.spark.stop),
            ("views", self.view_runs.stop),
            ("offline runs", self.leases.stop),
            ("cleaner", self.pool.stop),
            ("cleaner checkpoints", self.cleaning.stop),
            ("housekeeping", self.housekeeping.stop),
            ("http", self.http.stop),
        ]
        for name, step in steps:
            try:
                await step()
            except Exception:
                logger.exception("stop failed", part=name)
        for partition in self.topics.partitions():
            await partition.wait_idle()
        await asyncio.to_thread(self.manager.close)

    def banner(self) -> str:
        """What a person reads when the broker is ready."""
        text = ready_text(
            version=installed_version(),
            listeners=self.addresses,
            http=self.http_address,
            log_dirs=self.settings.log_dirs,
            topics=len(self.topics),
            partitions=self._partition_count(),
        )
        return f"{text}\n"

    def summary(self) -> dict[str, object]:
        """The banner's facts as fields of a log line."""
        return {
            "version": installed_version(),
            "listeners": [str(address) for address in self.addresses],
            "http": str(self.http_address),
            "log_dirs": list(self.settings.log_dirs),
            "topics": len(self.topics),
            "partitions": self._partition_count(),
        }

    def _partition_count(self) -> int:
        return sum(topic.partition_count for topic in self.topics)

    # What the parts ask of each other -------------------------------------------

    def not_ready_because(self) -> str | None:
        """For /readyz: None if every partition that should be served is."""
        if self._stopping.is_set():
            return "stopping"
        if self._ready:
            return self._unserved()
        opening = self.manager.opening
        if opening.done < opening.total:
            return f"recovering {opening.done} of {opening.total} partitions"
        return "starting"

    def _unserved(self) -> str | None:
        """What should be served and is not, a line each; None if all of it is."""
        lines = [
            f"data directory {directory.path} is offline: {directory.offline_reason}"
            for directory in self.manager.directories
            if not directory.is_online
        ]
        unserved = {str(partition): reason for partition, reason in self.manager.offline.items()}
        unserved |= {str(partition): str(reason) for partition, reason in self.views.failures()}
        named = sorted(unserved)[:UNSERVED_LISTED_MAX]
        lines += [f"partition {name} is not served: {unserved[name]}" for name in named]
        if len(unserved) > len(named):
            lines.append(f"{len(unserved) - len(named)} more partitions are not served")
        return "\n".join(lines) or None

    def unhealthy_because(self) -> str | None:
        """For /healthz: the process works as long as one data directory does."""
        if any(directory.is_online for directory in self.manager.directories):
            return None
        return "no data directory is online"

    async def _reload(self, settings: Settings, token: bytes | None) -> None:
        await self.topics.reload(settings)
        self.settings = self._services.settings = settings
        self._token = token
        self.http.guard = Guard.of(self.settings.http, token)

    async def _stop_reloading(self) -> None:
        if self.reloader is not None:
            await self.reloader.stop()

    def _apply_limits(self, limits: BrokerLimits) -> None:
        self.listener.set_connection_limits(
            connections=limits.connections, connections_per_ip=limits.connections_per_ip
        )
        self.housekeeping.producer_expiration_ms = limits.producer_id_expiration_ms
        warn_low_file_limit(limits.connections, self.manager.logs.values())

    def fail_directory(self, error: LogDirectoryError) -> None:
        """Take a data directory, or one partition of it, offline; log it once. The rest goes on."""
        lost = self.manager.fail(error)
        if isinstance(error, PartitionFolderError):
            for partition in lost:
                logger.error("partition is offline", partition=str(partition), reason=error.reason)
        elif error.directory not in self._failed:
            self._failed.add(error.directory)
            logger.error(
                "data directory is offline",
                directory=error.directory,
                reason=error.reason,
                partitions=len(lost),
            )
        self.topics.fail(lost, error.reason)
        self.offsets_topic.fail(lost)
        for partition in lost:
            self.pool.abort(partition, f"it is offline: {error.reason}")

    def _make_partition(self, opened: Log) -> Partition:
        stats = self.stats.topics[opened.partition.topic]
        opened.on_roll = self._cleaner_waker(opened)
        return Partition(opened, stats, self._flush_in_thread, self.fail_directory)

    async def _flush_in_thread(self, opened: Log) -> None:
        task = opened.flush_begin()
        began = self._env.monotonic()
        await run_in_thread(task.run, opened.directory)
        self.stats.flushes.add(int(1e6 * (self._env.monotonic() - began)))
        opened.flush_done(task)

    def _damage_removed(self, partition: TopicPartition) -> None:
        self.offsets_topic.damage_gone(partition)
        self.pool.retry(partition)  # it may have been in quarantine for it
        self.pool.wake()

    def _cleaner_waker(self, opened: Log) -> Callable[[], None]:
        def wake() -> None:
            if opened.config.compacts:
                self.pool.wake()

        return wake

    def _view_worker(self) -> AbstractAsyncContextManager[JobRunner]:
        """A worker beside the pool's, under the same budgets."""
        return self._solo_worker(VIEW_WORKER)

    def _lease_worker(self) -> AbstractAsyncContextManager[JobRunner]:
        """Likewise: it compares what comes from outside."""
        return self._solo_worker(LEASE_WORKER)

    def _solo_worker(self, index: int) -> AbstractAsyncContextManager[JobRunner]:
        return solo_worker(
            self._spawn,
            self.topics.cleaner_settings.nice,
            index=index,
            budgets=self.pool.throttle,
            top_up=self.pool.top_up,
        )

    def _view_share(self) -> AbstractAsyncContextManager[Share]:
        """What that worker's budget is, for what is copied before there is one."""
        return own_share(index=VIEW_WORKER, budgets=self.pool.throttle, top_up=self.pool.top_up)

    def _wanted_workers(self) -> int:
        settings = self.topics.cleaner_settings
        return settings.workers if settings.enabled else 0


def run(settings: Settings, load: Callable[[], Settings] | None = None) -> int:
    """Run the daemon until SIGTERM or SIGINT; returns the exit code.

    `load` reads the settings file anew at SIGHUP; without it SIGHUP is one more way to stop.
    """
    raise_file_limit()
    try:
        import uvloop
    except ImportError:  # not on this platform: the loop of the standard library serves as well
        return asyncio.run(_serve(settings, load))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, load))


async def _serve(settings: Settings, load: Callable[[], Settings] | None) -> int:
    try:
        path = settings.http_token_file
        token = None if path is None else await asyncio.to_thread(read_token, path)
        broker = Broker(settings, RealEnv(), token=token, load=load)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, broker.request_stop)
        loop.add_signal_handler(signal.SIGHUP, broker.request_reload)
        await broker.start()
    except OpeningStoppedError:
        logger.info("stopped while logs were being opened")
        return EXIT_OK
    except (StorageError, OSError, TopicError, TokenFileError) as error:
        reason = str(error) or repr(error)  # an OSError without arguments has no text
        if writes_text(settings.logging.format, sys.stderr.isatty()):
            sys.stderr.write(f"varve: cannot start: {reason}\n")
        logger.error("cannot start", reason=reason)
        return EXIT_CANNOT_START
    if may_print(settings.logging.format, output=sys.stdout, errors=sys.stderr):
        sys.stdout.write(broker.banner())
        sys.stdout.flush()
    systemd.notify("READY=1")
    logger.info("ready", **broker.summary())
    await broker.wait_stopped()
    systemd.notify("STOPPING=1")
    logger.info("stopping")
    await broker.stop()
    logger.info("stopped")
    return EXIT_OK
