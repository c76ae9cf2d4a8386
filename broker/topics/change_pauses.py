"""Pauses between the changes of the metadata that one client makes.

Rules
- Each change writes the metadata of all topics, and lines to the log. So the writes of one client
  may take WRITE_SHARE of the time, after a burst: a client above that waits before its next change.
- Who pauses does not wait for the writer yet, so changes of other clients do not wait for a pause.
- The changes of a client that pauses begin in order, one after the other.
- The broker's own changes (client None) never wait here, and none does while the broker stops.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager, suppress
from typing import Final

from broker.quotas.rates import TokenBucket

WRITE_SHARE: Final = 0.1  # of the time, in which one client's changes may write
BURST_SECONDS: Final = 10.0  # of writes without a pause: a thousand changes of 10 ms
# What a change counts at least, because of its lines in the log: ten changes a second.
CHANGE_SECONDS_MIN: Final = 0.01
CHANGE_SECONDS_MAX: Final = 1.0  # what it counts at most: its client did not make the disk hang
SWEPT_AT_ONCE: Final = 2  # clients, for each new one; so their number falls while they are idle


class _Client:
    """One client: what its changes have cost, and a lock for the change that begins next."""

    __slots__ = ("begins", "cost")

    def __init__(self) -> None:
        self.cost = TokenBucket(BURST_SECONDS / WRITE_SHARE)
        self.begins = asyncio.Lock()


class ChangePauses:
    """The clients that have made changes lately."""

    def __init__(self) -> None:
        self._clients = OrderedDict[Hashable, _Client]()  # oldest first
        self._stopping = asyncio.Event()

    def end(self) -> None:
        """End all pauses: the broker stops."""
        self._stopping.set()

    @asynccontextmanager
    async def before_change(self, client: Hashable) -> AsyncIterator[None]:
        """Pause if the client has to; the client's next change pauses after the block.

        The block takes the turn of the change. So a change that waits for its turn has not been
        counted when the next one pauses: a client may be ahead by one change.
        """
        if client is None:
            yield
            return
        entry = self._client(client)
        async with entry.begins:
            pause = entry.cost.throttle_seconds(WRITE_SHARE, _now())
            if pause:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause)
            yield

    def count(self, client: Hashable, write_seconds: float) -> None:
        """Count a change that has ended, and how long it wrote."""
        if client is not None:
            cost = min(max(write_seconds, CHANGE_SECONDS_MIN), CHANGE_SECONDS_MAX)
            self._client(client).cost.record(cost, WRITE_SHARE, _now())

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
            if entry.begins.locked() or not entry.cost.is_idle(WRITE_SHARE, _now()):
                self._clients[client] = entry


def _now() -> float:
    return asyncio.get_running_loop().time()
