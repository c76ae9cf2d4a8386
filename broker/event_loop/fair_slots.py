"""Slots for concurrent work, shared fairly among clients.

Rules. One client, usually a user, may occupy half of the slots; the rest of its work
waits. So a client that always has more work delays the others by the work of half the slots at
most, however many connections it has.
"""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Client:
    share: asyncio.Semaphore
    entries: int = 0  # that have a slot, or wait for one


class FairSlots:
    """The slots, and the clients that use them or wait."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = asyncio.Semaphore(slots)
        self._clients: dict[Hashable, _Client] = {}

    async def acquire(self, client: Hashable) -> None:
        """Wait for a slot."""
        entry = self._enter(client)
        try:
            await entry.share.acquire()
            try:
                await self._free.acquire()
            except asyncio.CancelledError:
                entry.share.release()
                raise
        except asyncio.CancelledError:
            self._forget(client, entry)
            raise

    def release(self, client: Hashable) -> None:
        """Give a slot back."""
        entry = self._clients[client]
        self._free.release()
        entry.share.release()
        self._forget(client, entry)

    def _enter(self, client: Hashable) -> _Client:
        entry = self._clients.get(client)
        if entry is None:
            share = asyncio.Semaphore(max(1, self.slots // 2))
            entry = self._clients[client] = _Client(share)
        entry.entries += 1
        return entry

    def _forget(self, client: Hashable, entry: _Client) -> None:
        entry.entries -= 1
        if not entry.entries:
            del self._clients[client]

    @asynccontextmanager
    async def slot(self, client: Hashable) -> AsyncIterator[None]:
        """Wait for a slot, and occupy it for a block."""
        await self.acquire(client)
        try:
            yield
        finally:
            self.release(client)

    @asynccontextmanager
    async def share(self, client: Hashable) -> AsyncIterator[AbstractAsyncContextManager[None]]:
        """Occupy a place of a client's share for a block; yield the slot that it does not have."""
        entry = self._enter(client)
        try:
            async with entry.share:
                yield self._free
        finally:
            self._forget(client, entry)
