"""Pauses between the changes of the metadata that one client makes.

Rules
- Each change writes the metadata of all topics, and lines to the log. So the writes of one client
  may take WRITE_SHARE of the time, after a burst: a client above that waits before its next change.
- A client pauses before its request is decoded. It holds nothing then that another client needs:
  neither a slot for large requests nor the writer of the metadata.
- The requests for changes of one client run one after the other. So a client with many connections
  is never ahead by more than one request.
- A request that had to wait is dropped if its connection was closed meanwhile: nobody expects the
  change any more, and its client may have sent it again.
- Over HTTP, a request that changes the metadata is refused instead
  (broker/http/api/kafka/client.py).
- The broker's own changes (client None) never wait here, and none does while the broker stops.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from typing import Final

from broker.event_loop.client_presence import WAIT_SECONDS, ClientLeftError
from broker.quotas.rates import TokenBucket
from protocol.api import ApiKey

# Requests that change the metadata.
METADATA_CHANGES: Final = frozenset(
    (
        ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_TOPICS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        ApiKey.CREATE_ACLS,
        ApiKey.DELETE_ACLS,
        ApiKey.ALTER_CLIENT_QUOTAS,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        ApiKey.UPDATE_FEATURES,
    )
)
WRITE_SHARE: Final = 0.1  # of the time, in which one client's changes may write
BURST_SECONDS: Final = 10.0  # of writes without a pause: a thousand changes of 10 ms
# What a change counts at least that writes to the disk: ten changes a second.
CHANGE_SECONDS_MIN: Final = 0.01
LINE_SECONDS: Final = 0.001  # what a line in the log counts at least: a hundred lines a second
CHANGE_SECONDS_MAX: Final = 1.0  # what it counts at most: its client did not make the disk hang
SWEPT_AT_ONCE: Final = 2  # clients, for each new one; so their number falls while they are idle


class _Client:
    """One client: what its changes have cost, and a lock for its request that runs."""

    __slots__ = ("cost", "requests", "runs")

    def __init__(self) -> None:
        self.cost = TokenBucket(BURST_SECONDS / WRITE_SHARE)
        self.requests = 0  # that run or wait
        self.runs = asyncio.Lock()


class ChangePauses:
    """The clients that have made changes lately."""

    def __init__(self) -> None:
        self._clients = OrderedDict[Hashable, _Client]()  # oldest first
        self._stopping = asyncio.Event()

    def end(self) -> None:
        """End all pauses: the broker stops."""
        self._stopping.set()

    @asynccontextmanager
    async def turn(self, client: Hashable, has_left: Callable[[], bool]) -> AsyncIterator[None]:
        """Wait for the client's earlier requests, and pause if it has to; the block is a request.

        The changes that it makes are counted while it runs. `has_left` returns whether the client
        has closed the connection. Raises ClientLeftError if it does so before its turn.
        """
        entry = self._client(client)
        has_waited = entry.requests > 0
        entry.requests += 1
        try:
            async with entry.runs:
                ends_at = _now() + self.pause_of(client)
                while (seconds := ends_at - _now()) > 0 and not self._stopping.is_set():
                    has_waited = True
                    _check_presence(has_left)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._stopping.wait(), min(seconds, WAIT_SECONDS))
                if has_waited:
                    _check_presence(has_left)
                yield
        finally:
            entry.requests -= 1

    def pause_of(self, client: Hashable) -> float:
        """Return for how many seconds the next change of a client has to wait."""
        entry = self._clients.get(client)
        if entry is None or self._stopping.is_set():
            return 0.0
        return entry.cost.throttle_seconds(WRITE_SHARE, _now())

    def count(self, client: Hashable, write_seconds: float, lines: int) -> None:
        """Count a change that wrote to the disk: for how long, and how many lines to the log."""
        if client is not None:
            cost = max(write_seconds, CHANGE_SECONDS_MIN, lines * LINE_SECONDS)
            self._client(client).cost.record(min(cost, CHANGE_SECONDS_MAX), WRITE_SHARE, _now())

    def _client(self, client: Hashable) -> _Client:
        entry = self._clients.get(client)
        if entry is None:
            self._sweep()
            entry = self._clients[client] = _Client()
        return entry

    def _sweep(self) -> None:
        """Drop the oldest clients if they are idle."""
        for _ in range(min(SWEPT_AT_ONCE, len(self._clients))):
            client, entry = self._clients.popitem(last=False)
            if entry.requests or not entry.cost.is_idle(WRITE_SHARE, _now()):
                self._clients[client] = entry


def _check_presence(has_left: Callable[[], bool]) -> None:
    if has_left():
        raise ClientLeftError("the client has closed the connection")


def _now() -> float:
    return asyncio.get_running_loop().time()
