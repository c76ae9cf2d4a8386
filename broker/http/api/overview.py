"""/api/v1/overview: readiness, data directories and totals, for the console's first page."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Final

from aiohttp import web

from broker.banner import demo_command, is_open
from broker.erasure.erasures import Erasures
from broker.event_loop.loop_turns import Turns
from broker.http.api.attention import Problem, problems
from broker.http.api.json_shapes import Json
from broker.http.api.requests import json_response, query_parameters
from broker.lifecycle.readiness import Readiness
from broker.lifecycle.reload import Reloader
from broker.network.request_context import Services
from broker.topics.log_maintenance import LogMaintenance
from cleaner.scheduler.cleaner_pool import CleanerPool
from config.address import Address
from config.settings import CleanerSettings
from config.topics.names import INTERNAL_TOPICS

PATH: Final = "/api/v1/overview"
TRAFFIC: Final = ("bytes_in", "bytes_out", "produce_requests", "fetch_requests")


class OverviewApi:
    """The handler of /api/v1/overview."""

    def __init__(
        self,
        services: Services,
        readiness: Readiness,
        log_maintenance: LogMaintenance,
        pool: CleanerPool,
        reloader: Reloader | None,
        *,
        erasures: Erasures,
        settings: Callable[[], CleanerSettings],
        version: str,
        listeners: Sequence[Address],
    ) -> None:
        self._env = services.env
        self._manager = services.manager
        self._stats = services.stats
        self._topics = services.topics
        self._readiness = readiness
        self._log_maintenance = log_maintenance
        self._pool = pool
        self._reloader = reloader
        self._erasures = erasures
        self._settings = settings
        self._version = version
        self._listeners = listeners
        self._is_open = is_open(services.settings)
        self._began = self._env.monotonic()

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield the route, for the server."""
        yield web.get(PATH, self._overview)

    async def _overview(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        reasons = self._readiness.not_ready_because()
        not_ready = [] if reasons is None else reasons.splitlines()
        turns = Turns()
        return json_response(
            {
                "version": self._version,
                "cluster_id": self._manager.metadata.cluster_id,
                "uptime_seconds": round(self._env.monotonic() - self._began, 1),
                "not_ready": not_ready,
                "attention": [
                    asdict(problem) for problem in await self._problems(not_ready, turns)
                ],
                "topics": len(self._topics) - sum(name in self._topics for name in INTERNAL_TOPICS),
                "demo": self._demo(),
                "directories": self._directories(),
                **await self._traffic(turns),
            }
        )

    def _demo(self) -> str | None:
        """Return a command that runs the demo here; None if the broker would refuse it."""
        return demo_command(self._listeners[0]) if self._is_open and self._listeners else None

    async def _problems(self, not_ready: list[str], turns: Turns) -> list[Problem]:
        damaged = Counter[str]()
        policy_unknown = [
            topic.name async for topic in turns.over(self._topics) if not topic.config.policy_known
        ]
        async for partition in turns.over(self._topics.partitions()):
            if partition.log.damage.ranges:
                damaged[partition.partition.topic] += 1
        paused = self._pool.control.operator_pauses
        return problems(
            not_served=not_ready,
            damaged=damaged,
            quarantines=self._pool.in_progress.quarantines(),
            policy_unknown=policy_unknown,
            over_max_lag=self._pool.stats.over_lag_partitions,
            erasures_unknown=self._erasures.unknown_because,
            erasures_at_risk=sum(self._erasures.at_risk.values()),
            paused=len(paused),
            paused_internal=sum(partition.topic in INTERNAL_TOPICS for partition in paused),
            cleaner_enabled=self._settings().enabled,
            reload_problem=None if self._reloader is None else self._reloader.problem,
        )

    async def _traffic(self, turns: Turns) -> Json:
        """Return the counters of bytes and requests, summed over topics."""
        sums = dict.fromkeys(TRAFFIC, 0)
        topics = (*self._stats.topics.values(), self._stats.deleted_topics)
        async for topic in turns.over(topics):
            for name in TRAFFIC:
                sums[name] += getattr(topic, name)
        return sums

    def _directories(self) -> list[Json]:
        disks, rows = self._log_maintenance.disks, []
        for directory in self._manager.table.directories:
            size = disks.get(directory.path)
            rows.append(
                {
                    "path": directory.path,
                    "online": directory.is_online,
                    "reason": directory.offline_reason,
                    "total_bytes": None if size is None else size.total_bytes,
                    "free_bytes": None if size is None else size.free_bytes,
                }
            )
        return rows
