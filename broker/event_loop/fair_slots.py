"""Slots for concurrent work, shared fairly among clients.

Rules. A client, usually a user, gets a slot only while it has fewer slots than are free; this is
the rule of broker/quotas/shares.py. So one client gets at most half of the slots, the next one half
of the rest, and so on. Further work waits, and the clients that wait take turns: before a client
without a slot gets one, each other client gets at most one, however much work it has.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class FairSlots:
    """The slots, and the clients that use them or wait."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = slots
        self._used = Counter[Hashable]()  # by client
        # The work of each client that waits, oldest first; the client whose turn is next is first.
        self._waiting: dict[Hashable, dict[asyncio.Future[None], None]] = {}

    async def acquire(self, client: Hashable) -> None:
        """Wait for a slot."""
        if self._admits(client):  # then it has no older work that waits
            self._take(client)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, {})[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove(client, turn)
            else:  # it got its slot at the same time
                self.release(client)
            raise

    def release(self, client: Hashable) -> None:
        """Give a slot back."""
        self._free += 1
        self._used[client] -= 1
        if not self._used[client]:
            del self._used[client]
        if client in self._waiting:
            self._waiting[client] = self._waiting.pop(client)  # behind the others
        while self._free and self._serve_next():
            pass

    def _admits(self, client: Hashable) -> bool:
        return self._used[client] < self._free

    def _take(self, client: Hashable) -> None:
        self._free -= 1
        self._used[client] += 1

    def _serve_next(self) -> bool:
        """Give a slot to the first waiting client that may have one; return False if there is none.

        Those before it have slots, so they are few.
        """
        for client, turns in self._waiting.items():
            if self._admits(client):
                turn = next(iter(turns))
                self._remove(client, turn)
                if client in self._waiting:
                    self._waiting[client] = self._waiting.pop(client)  # behind the others
                if not turn.cancelled():
                    self._take(client)
                    turn.set_result(None)
                return True
        return False

    def _remove(self, client: Hashable, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(client, {})
        turns.pop(turn, None)
        if not turns:
            self._waiting.pop(client, None)

    @asynccontextmanager
    async def slot(self, client: Hashable) -> AsyncIterator[None]:
        """Wait for a slot, and occupy it for a block."""
        await self.acquire(client)
        try:
            yield
        finally:
            self.release(client)
