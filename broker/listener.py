"""The listening sockets, and the limits that hold for all connections together."""

import asyncio
import resource
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog

from broker.connection import STOPPING, Connection, RequestHandler
from broker.protocol.limits import RequestLimits
from storage.log import Log

log = structlog.get_logger("broker.listener")

BACKLOG = 1024  # a burst of reconnecting clients after a restart
SWEEP_SECONDS = 5.0  # how often idle and stalled connections are looked for
DRAIN_POLL_SECONDS = 0.01
STALL_SECONDS = 60.0  # a client that takes no byte of its response for so long is closed


@dataclass(slots=True)
class ListenerStats:
    """Counts since the start."""

    accepted: int = 0
    refused: int = 0
    closed_idle: int = 0
    closed_stalled: int = 0


@dataclass(slots=True)
class ConnectionLimits:
    """Bounds on what strangers may hold."""

    max_connections: int
    max_request_bytes: int
    max_idle_seconds: float
    requests: RequestLimits


@dataclass(slots=True)
class _Progress:
    sent: int = -1
    since: float = 0.0


@dataclass(slots=True)
class Listener:
    """Accepts connections on every configured address and closes those that misbehave."""

    handler: RequestHandler
    limits: ConnectionLimits
    stats: ListenerStats = field(default_factory=ListenerStats)
    connections: set[Connection] = field(default_factory=set)
    _servers: list[asyncio.Server] = field(default_factory=list)
    _progress: dict[Connection, _Progress] = field(default_factory=dict)
    _sweeper: asyncio.Task[None] | None = None

    @property
    def max_request_bytes(self) -> int:
        """socket.request.max.bytes."""
        return self.limits.max_request_bytes

    def max_request_bytes_of(self, api_key: int) -> int:
        """Bytes of the largest request of one API."""
        return self.limits.requests.of(api_key).frame_bytes

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the bound address (a port of 0 picks a free one). Raises OSError."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(self), host, port, backlog=BACKLOG, reuse_address=True
        )
        self._servers.append(server)
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep(), name="connection sweeper")
        bound = server.sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    def connected(self, connection: Connection) -> bool:
        """Count a new connection; False when there are enough."""
        if len(self.connections) >= self.limits.max_connections:
            self.stats.refused += 1
            return False
        self.stats.accepted += 1
        self.connections.add(connection)
        return True

    def disconnected(self, connection: Connection) -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        self._progress.pop(connection, None)

    async def stop(self, drain_seconds: float) -> None:
        """Stop accepting, let requests under way finish, then close what is left."""
        for server in self._servers:
            server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in tuple(self.connections):
            connection.finish()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain_seconds
        # Polled: this happens once, and an event would be bookkeeping on every request.
        while loop.time() < deadline and any(c.busy for c in self.connections):  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        for connection in tuple(self.connections):
            connection.close(STOPPING)
        self._servers.clear()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep(loop.time())

    def sweep(self, now: float) -> None:
        """Close connections that are idle or stalled for too long at loop time `now`."""
        for connection in tuple(self.connections):
            if connection.stalled:
                seen = self._progress.setdefault(connection, _Progress(since=now))
                if seen.sent != connection.bytes_sent:
                    seen.sent, seen.since = connection.bytes_sent, now
                elif now - seen.since > STALL_SECONDS:
                    self.stats.closed_stalled += 1
                    connection.close("the client does not read its responses")
                continue
            self._progress.pop(connection, None)
            if now - connection.idle_since > self.limits.max_idle_seconds:
                self.stats.closed_idle += 1
                connection.close("idle")


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows it; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


# Of a log, beside one for each segment: the two indexes of the active one, and as much again for
# a segment that a roll or a clean is about to add.
FILES_OF_A_LOG: Final = 5
FILES_OF_THE_PROCESS: Final = 512  # HTTP, workers, checkpoints, libraries


def files_needed(connections: int, logs: Iterable[Log]) -> int:
    """How many files may be open at a time: what is refused where the limit is below it."""
    of_logs = sum(one.segment_count + FILES_OF_A_LOG for one in logs)
    return connections + of_logs + FILES_OF_THE_PROCESS


def tell_of_low_file_limit(connections: int, logs: Iterable[Log]) -> None:
    """Warn where clients alone could use up the files that logs need."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(connections, logs)
    if limit != resource.RLIM_INFINITY and limit < needed:
        log.warning("few files may be open", limit=limit, needed=needed)
