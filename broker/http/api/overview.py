"""/api/v1/overview: what somebody who opens the console wants to know first."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from aiohttp import web

from broker.counters import BrokerStats
from broker.http.api.json_shapes import Json
from broker.http.api.requests import json_response, query_parameters
from broker.topics.log_maintenance import DiskSize
from storage.manager.log_manager import LogManager

PATH: Final = "/api/v1/overview"


class Readiness(Protocol):
    """The part of the broker that knows whether it serves every partition."""

    def not_ready_because(self) -> str | None:
        """Return the reasons, a line each; None if the broker is ready."""
        ...


class OverviewApi:
    """The handler of /api/v1/overview."""

    def __init__(
        self,
        readiness: Readiness,
        manager: LogManager,
        stats: BrokerStats,
        *,
        disks: Callable[[], Mapping[str, DiskSize]],
        uptime_seconds: Callable[[], float],
        version: str,
    ) -> None:
        self._readiness = readiness
        self._manager = manager
        self._stats = stats
        self._disks = disks
        self._uptime_seconds = uptime_seconds
        self._version = version

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield the route, for the server."""
        yield web.get(PATH, self._overview)

    async def _overview(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        reasons = self._readiness.not_ready_because()
        topics = [*self._stats.topics.values(), self._stats.deleted_topics]
        return json_response(
            {
                "version": self._version,
                "cluster_id": self._manager.metadata.cluster_id,
                "uptime_seconds": round(self._uptime_seconds(), 1),
                "not_ready": [] if reasons is None else reasons.splitlines(),
                "directories": self._directories(),
                "bytes_in": sum(topic.bytes_in for topic in topics),
                "bytes_out": sum(topic.bytes_out for topic in topics),
                "produce_requests": sum(topic.produce_requests for topic in topics),
                "fetch_requests": sum(topic.fetch_requests for topic in topics),
            }
        )

    def _directories(self) -> list[Json]:
        disks, rows = self._disks(), []
        for directory in self._manager.directories:
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
