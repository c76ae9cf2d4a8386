"""The listening sockets, and the limits of all connections together.

`Listener.sweep` closes connections that are idle or stalled.

Rules. At the connection limit, a new connection replaces one of the address with the most
connections: first one that has never sent a complete request, else the one that has been silent for
longest. A connection that was active within IDLE_EVICT_SECONDS is replaced only for an address with
far fewer connections. So neither idle connections nor a single address can lock out other clients.
A client whose connection was closed connects again.
"""

import asyncio
import heapq
import ipaddress
import resource
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Final

import structlog

from broker.event_loop.loop_turns import ConnectionTurns, Turns
from broker.network.acceptor import Acceptor
from broker.network.buffer_budget import BufferBudget
from broker.network.connection import STOPPING, AuthenticationGate, Connection, RequestHandler
from broker.network.socket_writer import ignore
from broker.quotas.connection_rates import ConnectionRates
from broker.security.tls import ServerTls
from broker.topics.cold_reads import ColdReads
from config.settings import LimitSettings, ListenerSettings
from protocol.limits import RequestLimits
from storage.env import Env
from storage.log.log import Log

logger = structlog.get_logger("broker.listener")

BACKLOG = 1024  # a burst of reconnecting clients after a restart
SWEEP_SECONDS = 5.0  # between two searches for idle and stalled connections
DRAIN_POLL_SECONDS = 0.01
STALL_SECONDS = 60.0  # a client that reads no byte of its response for so long is disconnected
IDLE_EVICT_SECONDS = 10.0
# An honest client needs less to authenticate, with TLS and SASL.
HANDSHAKE_SECONDS = 5.0
# While others wait for memory, a connection that received no byte of its request for this long is
# closed: the others need an answer within 30 s (request.timeout.ms of the clients).
RECEIVE_STALL_SECONDS = 10.0
# So is one whose request is incomplete after this time, even if bytes arrive steadily: twice the
# default of request.timeout.ms, so its client has given up.
RECEIVE_SECONDS_MAX = 60.0
# The same times for a client that reads its response, while others wait to encode theirs, or while
# it keeps deleted files on the disk.
SEND_STALL_SECONDS = 10.0
SEND_SECONDS_MAX = 60.0
# Eviction candidates that a search returns, and the time between searches: a search visits all
# connections of an address, which takes a millisecond for four thousand.
EVICT_BATCH = 32
EVICT_SEARCH_SECONDS = 0.1
FAR_FEWER = 2  # connections of an address: less than half of another's


@dataclass(slots=True)
class ListenerStats:
    """Counts since the start."""

    accepted: int = 0
    refused: int = 0
    evicted: int = 0
    closed_idle: int = 0
    closed_stalled: int = 0
    closed_silent: int = 0  # without a first complete request in time
    tls_failures: int = 0


@dataclass(slots=True)
class ConnectionLimits:
    """Limits of connections, requests and times."""

    max_connections: int
    max_connections_per_ip: int
    max_request_bytes: int
    max_queued_bytes: int
    max_idle_seconds: float
    max_first_request_seconds: float
    requests: RequestLimits

    @classmethod
    def of(cls, limits: LimitSettings, requests: RequestLimits) -> "ConnectionLimits":
        """Return the limits that the section `limits` of the settings file says."""
        return cls(
            max_connections=limits.connections,
            max_connections_per_ip=limits.connections_per_ip,
            max_request_bytes=limits.request_bytes,
            max_queued_bytes=limits.queued_request_bytes,
            max_idle_seconds=limits.connection_idle_ms / 1000,
            max_first_request_seconds=limits.first_request_ms / 1000,
            requests=requests,
        )


@dataclass(slots=True)
class _Progress:
    sent: int = -1
    since: float = 0.0


@dataclass(slots=True)
class Listener:
    """Accepts connections on every configured address and closes those above a limit."""

    handler: RequestHandler
    limits: ConnectionLimits
    stats: ListenerStats = field(default_factory=ListenerStats)
    connections: set[Connection] = field(default_factory=set)
    tls: ServerTls | None = None  # of new connections; a reload replaces it
    new_gate: Callable[[], AuthenticationGate] | None = None  # of a connection with SASL
    env: Env | None = None  # counts file descriptors
    note_cut_file: Callable[[str], None] = ignore  # see ConnectionOwner
    cold_reads: ColdReads | None = None  # for clients that read slowly
    rates: ConnectionRates = field(default_factory=lambda: ConnectionRates(monotonic))
    budget: BufferBudget = field(init=False)
    response_budget: BufferBudget = field(init=False)
    turns: ConnectionTurns = field(default_factory=ConnectionTurns)
    _by_address: dict[str, set[Connection]] = field(default_factory=dict)
    _eviction_candidates: list[tuple[Connection, float]] = field(default_factory=list)
    _next_search_at: float = 0.0
    _acceptors: list[Acceptor] = field(default_factory=list)
    _progress: dict[Connection, _Progress] = field(default_factory=dict)
    _sweeper: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        """Create the budgets of all receive buffers and of all responses."""
        self.budget, self.response_budget = (
            BufferBudget(
                self.limits.max_queued_bytes,
                lambda work: asyncio.get_running_loop().call_soon(work),
            )
            for _ in range(2)
        )

    @property
    def max_request_bytes(self) -> int:
        """Return socket.request.max.bytes."""
        return self.limits.max_request_bytes

    def max_request_bytes_of(self, api_key: int) -> int:
        """Return the size limit of requests of one API."""
        return self.limits.requests.of(api_key).frame_bytes

    async def start(self, listener: ListenerSettings) -> tuple[str, int]:
        """Listen; return the bound address (port 0 picks a free one). Raises OSError."""
        acceptor = Acceptor(partial(self._serve, listener))
        address = listener.address
        bound = await acceptor.listen(address.host, address.port, backlog=BACKLOG)
        self._acceptors.append(acceptor)
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep(), name="connection sweeper")
        return bound

    async def _serve(self, listener: ListenerSettings, accepted: socket.socket, _peer: str) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: self._new_connection(listener), accepted)

    def _new_connection(self, listener: ListenerSettings) -> Connection:
        context, gate = None, None
        if listener.uses_tls:
            assert self.tls is not None, listener  # the settings demand a certificate
            context = self.tls.password_context if listener.uses_sasl else self.tls.context
        if listener.uses_sasl:
            assert self.new_gate is not None, listener
            gate = self.new_gate()
        return Connection(self, listener, context, gate)

    def tls_failed(self) -> None:
        """Count a connection that is closed because of an error of TLS."""
        self.stats.tls_failures += 1

    def set_connection_limits(
        self, *, connections: int, connections_per_ip: int, creation_rate: int | None = None
    ) -> None:
        """Change the limits for new connections; existing ones stay open."""
        self.limits.max_connections = connections
        self.limits.max_connections_per_ip = connections_per_ip
        self.rates.limit = creation_rate

    def admit(self, connection: Connection) -> str | None:
        """Register a new connection; return why it must be closed at once, None if it may stay.

        One above the rate of its address stays too, but is not served (see `_throttle`).
        """
        address = address_of(connection.peer_host)
        neighbours = self._by_address.get(address, ())
        if len(neighbours) >= self.limits.max_connections_per_ip:
            self.stats.refused += 1
            return "too many connections from this address"
        is_full = len(self.connections) >= self.limits.max_connections
        now = asyncio.get_running_loop().time()
        if is_full and not self._evict(len(neighbours), now):
            self.stats.refused += 1
            return "too many connections"
        if not is_full and self._is_short_of_descriptors():
            is_full = self._evict(len(neighbours), now, unauthenticated_only=True)
        if is_full:  # evict it next, without a search, unless it sends a complete request
            self._eviction_candidates.insert(0, (connection, connection.last_active))
        if self._throttle(connection):
            self.stats.accepted += 1
        else:
            self.stats.refused += 1
        self.connections.add(connection)
        self._by_address.setdefault(address, set()).add(connection)
        return None

    def _throttle(self, connection: Connection) -> bool:
        """Apply the rates of new connections (KIP-612); return whether the connection is served.

        One above the broker's rate is served after a delay. One above the rate of its address stays
        open for the throttle time, because its client would come back at once, and is then closed.
        """
        admission = self.rates.admit(connection.peer_host)
        if admission.delay_seconds:
            # A refused connection is closed before it would be read.
            connection.mute(admission.delay_seconds + admission.is_refused)
        if admission.is_refused:
            asyncio.get_running_loop().call_later(
                admission.delay_seconds, connection.close, "too many new connections a second"
            )
        return not admission.is_refused

    def disconnected(self, connection: Connection) -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        self._progress.pop(connection, None)
        address = address_of(connection.peer_host)
        neighbours = self._by_address.get(address)
        if neighbours is not None:
            neighbours.discard(connection)
            if not neighbours:
                del self._by_address[address]

    def _is_short_of_descriptors(self) -> bool:
        """Return whether connections use descriptors that logs may need."""
        return (
            bool(self.connections) and self.env is not None and not self.env.has_spare_descriptors()
        )

    def _evict(self, own: int, now: float, *, unauthenticated_only: bool = False) -> bool:
        """Evict a connection for a new one whose address has `own` connections."""
        most = max(self._by_address.values(), key=len)
        is_far_fewer = own * FAR_FEWER < len(most)

        def may_go(victim: Connection) -> bool:
            if unauthenticated_only:
                return victim.is_unauthenticated and now - victim.opened_at > HANDSHAKE_SECONDS
            return is_far_fewer or _is_evictable(victim, now)

        if self._evict_one(may_go):
            return True
        if now >= self._next_search_at:
            self._find_eviction_candidates(most)
            if self._evict_one(may_go):
                return True
            self._next_search_at = now + EVICT_SEARCH_SECONDS
        return False

    def _find_eviction_candidates(self, connections: set[Connection]) -> None:
        results = heapq.nsmallest(EVICT_BATCH, connections, key=_eviction_order)
        self._eviction_candidates = [
            (connection, connection.last_active) for connection in reversed(results)
        ]

    def _evict_one(self, may_go: Callable[[Connection], bool]) -> bool:
        while self._eviction_candidates:
            victim, last_active = self._eviction_candidates.pop()
            # It may have closed, or have been active, since the search.
            is_unchanged = victim in self.connections and victim.last_active == last_active
            if is_unchanged and may_go(victim):
                self.stats.evicted += 1
                self.disconnected(victim)
                victim.close("evicted for a new connection")
                return True
        return False

    async def stop(self, drain_seconds: float) -> None:
        """Stop accepting, finish running requests, then close all connections."""
        for acceptor in self._acceptors:
            acceptor.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in tuple(self.connections):
            connection.finish()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain_seconds
        # Polling is cheaper here: an event would cost every request, and this happens once.
        while loop.time() < deadline and any(c.busy for c in self.connections):  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        for connection in tuple(self.connections):
            connection.close(STOPPING)
        self._acceptors.clear()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await self.sweep(loop.time())

    async def sweep(self, now: float) -> None:
        """Close connections that are idle or stalled for too long at loop time `now`, in turns."""
        async for connection in Turns().over(tuple(self.connections)):
            if connection not in self.connections:
                continue
            if connection.stalled:
                self._sweep_stalled(connection, now)
                await self._sweep_deleted_files(connection, now)
                continue
            self._progress.pop(connection, None)
            open_for = now - connection.opened_at
            silent_for = now - connection.last_active
            if connection.is_unauthenticated and open_for > self.limits.max_first_request_seconds:
                self.stats.closed_silent += 1
                connection.close(
                    "no complete request within limits.first_request_ms"
                    if connection.gate is None
                    else "not authenticated within limits.first_request_ms"
                )
            elif (
                self.budget.is_short(connection)
                and connection.receives_with_reserved_memory
                and (
                    silent_for > RECEIVE_STALL_SECONDS
                    or now - connection.receiving_since > RECEIVE_SECONDS_MAX
                )
            ):
                self.budget.closed += 1
                connection.close(
                    "receive memory is short, and the rest of the request did not arrive in time: "
                    f"no byte in {RECEIVE_STALL_SECONDS:.0f} s, or not all in "
                    f"{RECEIVE_SECONDS_MAX:.0f} s"
                )
            elif now - connection.idle_since > self.limits.max_idle_seconds:
                self.stats.closed_idle += 1
                connection.close("idle")

    def _sweep_stalled(self, connection: Connection, now: float) -> None:
        seen = self._progress.setdefault(connection, _Progress(since=now))
        if seen.sent != connection.bytes_sent:
            seen.sent, seen.since = connection.bytes_sent, now
        stalled_for = now - seen.since
        if stalled_for > STALL_SECONDS:
            self.stats.closed_stalled += 1
            connection.close("the client does not read its responses")
        elif connection.response_memory.is_needed and (
            stalled_for > SEND_STALL_SECONDS or now - connection.last_active > SEND_SECONDS_MAX
        ):
            self.stats.closed_stalled += 1
            connection.close(
                "memory for responses is short, and the client did not read its response in time: "
                f"no byte in {SEND_STALL_SECONDS:.0f} s, or not all in {SEND_SECONDS_MAX:.0f} s"
            )

    async def _sweep_deleted_files(self, connection: Connection, now: float) -> None:
        """Close a connection that keeps files on the disk which retention or a clean has deleted.

        Otherwise a client that reads some bytes a minute keeps whole segments for hours, and with
        further fetches those of each later clean. Kafka closes the files itself.
        """

        def is_slow() -> bool:
            return connection.stalled and now - connection.last_active > SEND_SECONDS_MAX

        if not is_slow():
            return
        async for file in Turns().over(connection.unsent_files):
            if is_slow() and file.is_deleted():
                self.stats.closed_stalled += 1
                connection.close(
                    "the log files of its response are deleted, and the client did not read it in "
                    f"{SEND_SECONDS_MAX:.0f} s"
                )


def address_of(host: str) -> str:
    """Return the address for limits: for IPv6 the first 64 bits, which identify a network."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return address.exploded[:19]


def _is_evictable(connection: Connection, now: float) -> bool:
    return connection.is_unauthenticated or now - connection.idle_since > IDLE_EVICT_SECONDS


def _eviction_order(connection: Connection) -> tuple[bool, float]:
    """Order connections without a complete request first, then by the time of silence."""
    return not connection.is_unauthenticated, connection.idle_since


def raise_file_limit() -> int:
    """Raise the limit of open files to the hard limit; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


# Files of a log beside one for each segment: the two indexes of the active segment, and three files
# of a segment that a roll or a clean is about to add.
FILES_PER_LOG: Final = 5
FILES_PER_CONNECTION: Final = 2  # the socket for reads, and its copy for writes (SocketWriter)
OTHER_FILES: Final = 512  # HTTP, workers, checkpoints, libraries


def files_needed(connections: int, logs: Iterable[Log]) -> int:
    """Return how many files may be open at a time."""
    log_files = sum(len(log.segments) + FILES_PER_LOG for log in logs)
    return connections * FILES_PER_CONNECTION + log_files + OTHER_FILES


def warn_low_file_limit(connections: int, logs: Iterable[Log]) -> None:
    """Warn if connections could use up the file descriptors that logs need."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(connections, logs)
    if limit != resource.RLIM_INFINITY and limit < needed:
        logger.warning(
            "file descriptor limit is low",
            limit=limit,
            needed=needed,
            remedy="raise it with `ulimit -n` or LimitNOFILE=",
        )
