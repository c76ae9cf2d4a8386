"""Server-sent events: what has changed, so that a page need not ask every second.

Rules
- An event says which resource changed, and nothing of its contents: the reader asks for it by its
  ordinary route, with the permission for that route.
- There are at most STREAMS_MAX streams, half of them of one user at most. A stream ends after
  STREAM_SECONDS, when the broker stops, when its reader accepts no data for SEND_SECONDS, or when
  an entry takes the reader's permission. The reader opens another one, and is authenticated again.
- A stream compares a few figures twice a second, which takes up to 20 us for any number of topics
  and groups. So 32 streams cost less than 1 % of a core while nothing happens, and a page shows a
  change within a second.
- The figures of `topics` and `groups` are counters and ends of logs, not the rows of the lists.
  They can miss a change, such as a tombstone that an erasure appends, so readers also ask twice a
  minute.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Final

from aiohttp import web

from broker.groups.offsets.offsets_store import OFFSETS_TOPIC
from broker.http.api.lookup import served_partition
from broker.http.api.permissions import Permissions
from broker.http.api.requests import ApiError, parse_partition, query_parameters
from broker.http.audited import sender_of
from broker.http.authentication import Sender
from broker.lifecycle.readiness import Readiness
from broker.lifecycle.reload import Reloader
from broker.network.request_context import Services
from broker.quotas.shares import Shares
from broker.security.acls import CLUSTER_NAME, Operation, ResourceType
from broker.topics.log_maintenance import LogMaintenance
from cleaner.scheduler.cleaner_pool import CleanerPool
from storage.model import TopicPartition

CLEANER: Final = "/api/v1/cleaner/events"
LISTS: Final = "/api/v1/events/{resource}"
TOPIC: Final = "/api/v1/topics/{topic}/events"
PARTITION: Final = "/api/v1/topics/{topic}/partitions/{partition}/events"
STREAMS: Final = (CLEANER, LISTS, TOPIC, PARTITION)
STREAMS_MAX: Final = 32  # of 128 HTTP connections; a tab has one
STREAM_SECONDS: Final = 600.0
TICK_SECONDS: Final = 0.5
# Between two comments while nothing changes: proxies close connections that are silent longer.
SILENT_TICKS_MAX: Final = 30
SEND_SECONDS: Final = 10.0
QUEUE_ROWS: Final = 100  # compared, of the partitions that wait
PARTITIONS_MAX: Final = 100  # whose ends are compared, of a topic
SIZE_REQUESTS: Final = ("Produce", "DeleteRecords", "EndTxn")  # change the sizes of topics
READING: Final = ("GET", "HEAD")  # methods of HTTP that change nothing

Figures = Callable[[], object]  # of a resource; two that are equal show the same page


class EventsApi:
    """Handlers of the routes that stream events."""

    def __init__(
        self,
        services: Services,
        pool: CleanerPool,
        readiness: Readiness,
        log_maintenance: LogMaintenance,
        reloader: Reloader | None,
    ) -> None:
        self._topics = services.topics
        self._stats = services.stats
        self._manager = services.manager
        self._coordinators = services.coordinators  # its groups come when the broker starts
        self._pool = pool
        self._readiness = readiness
        self._log_maintenance = log_maintenance
        self._reloader = reloader
        self._permissions = Permissions(services.allows)
        self._lists: dict[str, Figures] = {
            "overview": self._overview_figures,
            "topics": self._topics_figures,
            "groups": self._groups_figures,
        }
        self._streams = itertools.count()
        self._shares = Shares(STREAMS_MAX)
        self._open: set[str] = set()
        self._stopping = asyncio.Event()

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.get(CLEANER, self._cleaner, allow_head=False)
        yield web.get(LISTS, self._list, allow_head=False)
        yield web.get(TOPIC, self._topic, allow_head=False)
        yield web.get(PARTITION, self._partition, allow_head=False)

    async def stop(self, _application: web.Application) -> None:
        """End all streams."""
        self._stopping.set()

    async def _cleaner(self, request: web.Request) -> web.StreamResponse:
        query_parameters(request, ())
        return await self._stream(request, "cleaner", self._cleaner_figures)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        query_parameters(request, ())
        resource = request.match_info["resource"]
        figures = self._lists.get(resource)
        if figures is None:
            names = ", ".join(self._lists)
            raise ApiError(404, f"there are no events of {resource!r}, only of {names}")
        return await self._stream(request, resource, figures)

    async def _topic(self, request: web.Request) -> web.StreamResponse:
        query_parameters(request, ())
        name = request.match_info["topic"]
        if name not in self._topics:
            raise ApiError(404, f"there is no topic {name}")
        return await self._stream(request, name, partial(self._topic_figures, name))

    async def _partition(self, request: web.Request) -> web.StreamResponse:
        query_parameters(request, ())
        partition = parse_partition(request)
        served_partition(self._topics, partition)
        return await self._stream(
            request, str(partition), lambda: self._partition_figures(partition)
        )

    def _cleaner_figures(self) -> object:
        pool = self._pool
        stats, waiting = pool.stats, pool.scanner.queue
        return (
            pool.workers(),
            (stats.cleans, stats.failures, stats.aborted, stats.adoptions),
            (stats.cleanable_bytes, stats.candidates, len(waiting), tuple(waiting[:QUEUE_ROWS])),
            (len(pool.control.operator_pauses), len(pool.in_progress.quarantines())),
        )

    def _overview_figures(self) -> object:
        return (
            self._cleaner_figures(),
            self._topics_figures(),
            self._requests(("Fetch",)),
            self._readiness.is_stopping,
            [directory.is_online for directory in self._manager.table.directories],
            tuple(self._log_maintenance.disks.values()),
        )

    def _topics_figures(self) -> object:
        expired = self._log_maintenance.stats.segments_expired
        return self._definitions(), expired, self._requests(SIZE_REQUESTS), self._cleaner_figures()

    def _definitions(self) -> object:
        """Return what changes with topics, their settings, and partitions that go offline."""
        reload = None if self._reloader is None else self._reloader.last
        epoch, offline = self._manager.metadata.epoch, len(self._manager.table.offline)
        return len(self._topics), epoch, offline, reload

    def _groups_figures(self) -> object:
        """Commits and members of the newer protocol are records of the groups' log."""
        groups, stats = self._coordinators.groups, self._coordinators.groups.stats
        counters = groups.count, stats.rebalances, stats.members_expired, stats.offsets_expired
        return counters, self._ends(OFFSETS_TOPIC), self._requests(("Produce",))

    def _topic_figures(self, name: str) -> object:
        """Return figures of this topic alone: its owner may not know what happens to others."""
        topic, pool = self._topics.get(name), self._pool
        if topic is None:
            return None
        stats = self._stats.topics.get(name)
        appended = 0 if stats is None else stats.messages_in
        partitions = list(islice(topic.partitions.values(), PARTITIONS_MAX))
        return (
            (topic.topic_id, topic.layers, topic.config, len(topic.offline)),
            (self._ends(name), appended),
            [partition.log.segments.size_bytes for partition in partitions],
            [pool.in_progress.state(partition.partition) for partition in partitions],
            [pool.operator.is_paused(partition.partition) for partition in partitions],
            [
                worker
                for worker in pool.workers()
                if worker.partition is not None and worker.partition.topic == name
            ],
        )

    def _requests(self, names: tuple[str, ...]) -> list[int]:
        """Return how many Kafka requests with these names, and HTTP requests, may change topics."""
        counted, http = self._stats.requests, self._stats.http
        over_http = sum(http[key].requests for key in http if key[0] not in READING)
        return [over_http, *(counted[name].latency.count for name in names if name in counted)]

    def _ends(self, name: str) -> object:
        """Return the bounds of the first partitions of a topic."""
        topic = self._topics.get(name)
        if topic is None:
            return None
        logs = [partition.log for partition in islice(topic.partitions.values(), PARTITIONS_MAX)]
        return len(topic.partitions), [(log.log_start_offset, log.log_end_offset) for log in logs]

    def _partition_figures(self, name: TopicPartition) -> object:
        pool, partition = self._pool, self._topics.partition(name)
        if partition is None:
            return None
        log = partition.log
        last_job = pool.history.last_of(name)
        return (
            (log.log_start_offset, log.log_end_offset, log.high_watermark),
            (log.segments.size_bytes, len(log.segments), len(log.damage.ranges)),
            pool.in_progress.state(name),
            [worker for worker in pool.workers() if worker.partition == name],
            pool.operator.is_paused(name),
            "" if last_job is None else last_job.job_id,
        )

    async def _stream(
        self, request: web.Request, resource: str, figures: Figures
    ) -> web.StreamResponse:
        with self._place(sender_of(request)):
            response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream",
                    "Cache-Control": "no-store",
                    "X-Accel-Buffering": "no",  # for nginx
                }
            )
            await response.prepare(request)
            event = f"event: changed\ndata: {json.dumps({'resource': resource})}\n\n".encode()
            await self._send_changes(response, event, figures, partial(self._may_read, request))
        return response

    def _may_read(self, request: web.Request) -> bool:
        """Return whether the reader still has the permission with which the stream began."""
        resources = [(ResourceType.CLUSTER, CLUSTER_NAME)]
        if "topic" in request.match_info:
            resources.append((ResourceType.TOPIC, request.match_info["topic"]))
        may = self._permissions.has
        return any(may(request, Operation.DESCRIBE, *resource) for resource in resources)

    async def _send_changes(
        self,
        response: web.StreamResponse,
        event: bytes,
        figures: Figures,
        may_read: Callable[[], bool],
    ) -> None:
        """Send the event after each change until the stream ends."""
        last, silent = figures(), 0
        await response.write(b": the stream begins\n\n")
        for _ in range(round(STREAM_SECONDS / TICK_SECONDS)):
            if await self._wait_stopped(TICK_SECONDS) or not may_read():
                return
            present = figures()
            silent = 0 if present != last else silent + 1
            if silent and silent < SILENT_TICKS_MAX:
                continue
            last = present
            text = b": nothing changed\n\n" if silent else event
            silent = 0
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await response.write(text)
            except (TimeoutError, ConnectionError):
                return

    async def _wait_stopped(self, seconds: float) -> bool:
        """Return whether the streams end; wait at most this long."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def _place(self, sender: Sender) -> Iterator[None]:
        """Take one of the places for streams. Raises ApiError 503."""
        creator = None if sender.is_unlimited else sender.principal
        if not self._shares.admits(creator, len(self._open)):
            raise ApiError(
                503,
                f"{len(self._open)} streams of events are open, and {STREAMS_MAX} may be, half of "
                "them of one user: poll instead",
                {"Retry-After": "60"},
            )
        name = str(next(self._streams))
        self._open.add(name)
        self._shares.add(name, creator)
        try:
            yield
        finally:
            self._open.discard(name)
            self._shares.remove(name)
