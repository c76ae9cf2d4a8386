"""One budget over the receive buffers of all connections (Kafka's queued.max.request.bytes).

Rules. The budget counts the bytes of each buffer beyond its first INITIAL_BYTES. A connection
reserves memory before its buffer grows. If there is none, the broker stops reading from it, and it
waits in a queue. Memory is freed in this order: idle connections release the buffers that they keep
for their next request; connections that have never sent a complete request are closed, the largest
first; otherwise the connection waits. Finding memory does not search all connections: those that
may be idle and those that were strangers when they reserved are noted, and each note is looked at
once. The first in the queue may exceed the budget, if no other
connection does, until its request is complete. While connections wait, a connection releases its
buffer after each request and reserves again at the end of the queue (network/connection.py), and a
connection whose client stalls in the middle of a request, or takes too long over it, is closed
(listener.py). So requests of working clients always complete, and all buffers together hold at most
the budget plus one request of the largest size.

Clients share the budget: a client, which is a user at an address, may reserve more while it has
less than is free. Beyond this, one of its connections at a time may complete its request, and the
others are held back, in a queue of this client. So no client keeps large requests of others out.
Strangers do not count: they are closed if others need memory.

This module does not use sockets or a clock.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

# Outdated notes are removed when there are more of them than this, and than others.
OUTDATED_NOTES_MAX: Final = 1_000


class BudgetUser(Protocol):
    """What the budget needs of a connection."""

    @property
    def is_stranger(self) -> bool:
        """Return whether it has never sent a complete request, or has not authenticated."""
        ...

    @property
    def client(self) -> Hashable:
        """Return the client among which the budget is shared."""
        ...

    def give_back(self) -> None:
        """Release the buffer kept for the next request, if none has begun."""
        ...

    def memory_freed(self) -> None:
        """Try to reserve again."""
        ...

    def close(self, reason: str) -> None:
        """Close the connection, which releases what it holds."""
        ...


class ReceiveBudget:
    """The memory that each connection has reserved, and the queue of those that wait."""

    def __init__(self, limit_bytes: int, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """`call_soon` runs a function in a later turn of the loop."""
        assert limit_bytes > 0
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.waits = 0  # how often a connection was muted
        self.closed = 0  # connections that lost their buffer
        self._call_soon = call_soon
        self._reserved: dict[BudgetUser, int] = {}
        self._waiting: dict[BudgetUser, None] = {}  # in order
        self._counted: dict[BudgetUser, tuple[Hashable, int]] = {}  # the client and its bytes
        self._client_bytes: Counter[Hashable] = Counter()
        self._held_back: dict[Hashable, dict[BudgetUser, None]] = {}  # by client, in order
        self._over_share: dict[Hashable, BudgetUser] = {}  # who may exceed its client's share
        self._over: BudgetUser | None = None  # who may exceed the budget
        self._idle: dict[BudgetUser, None] = {}  # keep memory, and may be between two requests
        self._strangers: list[tuple[int, int]] = []  # (-bytes used, note number), a heap
        self._noted: dict[
            int, BudgetUser
        ] = {}  # by note number; notes that are not here are outdated
        self._note_of: dict[BudgetUser, int] = {}
        self._notes = 0
        self._is_serving = False

    @property
    def waiting(self) -> int:
        """Return the number of connections that wait."""
        return len(self._waiting) + sum(map(len, self._held_back.values()))

    def is_short(self, holder: BudgetUser) -> bool:
        """Return whether others wait for memory that this holder may have."""
        if self._waiting:
            return True
        return bool(self._held_back) and holder.client in self._held_back

    def reserve(self, holder: BudgetUser, growth: int) -> bool:
        """Reserve `growth` more bytes for a holder; False if it has to wait or was closed."""
        if not self._is_in_share(holder, growth):
            return False
        if not self._fits(growth):
            self._make_room(growth)
        is_next = next(iter(self._waiting), holder) is holder
        may_exceed = self._over is holder or (is_next and self._over is None)
        if may_exceed or (is_next and self._fits(growth)):
            if not self._fits(growth):
                self._over = holder
            self._waiting.pop(holder, None)
            owned = self._reserved[holder] = self._reserved.get(holder, 0) + growth
            self.used_bytes += growth
            if not holder.is_stranger:
                self._count(holder, owned)
            if holder.is_stranger:
                self._note_stranger(holder, owned)
            if self._waiting:
                self._serve_soon()
            return True
        if holder not in self._waiting:
            self._waiting[holder] = None
            if not holder.is_stranger:
                self._over_share.setdefault(holder.client, holder)
            self.waits += 1
        return False

    def note_idle(self, holder: BudgetUser) -> None:
        """Note that a holder may be between two requests, and keeps its buffer for the next."""
        if holder in self._reserved:
            self._idle[holder] = None

    def set_reserved(self, holder: BudgetUser, reserved_bytes: int) -> None:
        """Note that the buffer of a holder has become smaller."""
        before = self._reserved.pop(holder, 0)
        assert reserved_bytes <= before, (reserved_bytes, before)
        if reserved_bytes:
            self._reserved[holder] = reserved_bytes
            if holder.is_stranger and reserved_bytes < before:
                self._note_stranger(holder, reserved_bytes)
        else:
            self._idle.pop(holder, None)
            self._noted.pop(self._note_of.pop(holder, 0), None)
        self.used_bytes -= before - reserved_bytes
        if self._over is holder and reserved_bytes < before:
            self._over = None
        if holder in self._counted and reserved_bytes < before:
            self._count(holder, reserved_bytes)
            if self._over_share.get(holder.client) is holder:
                del self._over_share[holder.client]
        if self._waiting or self._held_back:
            self._serve_soon()

    def forget(self, holder: BudgetUser) -> None:
        """Release all memory of a closed connection."""
        self._waiting.pop(holder, None)
        if self._over is holder:
            self._over = None
        self._admit(holder)
        if self._over_share.get(holder.client) is holder:
            del self._over_share[holder.client]
        self.set_reserved(holder, 0)

    def _is_in_share(self, holder: BudgetUser, growth: int) -> bool:
        """Return whether the client's share allows the growth; if not, hold the holder back."""
        client = holder.client
        is_before = holder in (self._over, self._over_share.get(client)) or holder in self._waiting
        if holder.is_stranger or is_before:
            return True  # whom the budget waits for never waits for its client
        queue = self._held_back.get(client, {})
        if next(iter(queue), holder) is holder:
            if not self._has_share(client, growth):
                self._take_idle(client)
            fits = self._has_share(client, growth)
            if fits or client not in self._over_share:
                if not fits:
                    self._over_share[client] = holder
                self._admit(holder)
                return True
        if holder not in queue:
            self._held_back.setdefault(client, {})[holder] = None
            self.waits += 1
        return False

    def _has_share(self, client: Hashable, growth: int) -> bool:
        free = self.limit_bytes - self.used_bytes
        return self._client_bytes[client] + growth <= free - growth

    def _take_idle(self, client: Hashable) -> None:
        """Take the buffers that a client keeps for its next requests."""
        for idle in [idle for idle in self._idle if idle.client == client]:
            del self._idle[idle]
            idle.give_back()

    def _admit(self, holder: BudgetUser) -> None:
        queue = self._held_back.get(holder.client)
        if queue is not None:
            queue.pop(holder, None)
            if not queue:
                del self._held_back[holder.client]

    def _count(self, holder: BudgetUser, reserved_bytes: int) -> None:
        """Count the bytes that a holder has now for its client."""
        client, before = self._counted.pop(holder, (holder.client, 0))
        self._client_bytes[client] += reserved_bytes - before
        if not self._client_bytes[client]:
            del self._client_bytes[client]
        if reserved_bytes:
            self._counted[holder] = client, reserved_bytes

    def _fits(self, growth: int) -> bool:
        return self.used_bytes + growth <= self.limit_bytes

    def _make_room(self, growth: int) -> None:
        while self._idle and not self._fits(growth):
            holder = next(iter(self._idle))
            del self._idle[holder]  # it is noted again when it is idle again
            holder.give_back()
        while self._strangers and not self._fits(growth):
            _, number = heappop(self._strangers)
            stranger = self._noted.pop(number, None)
            if stranger is None:
                continue
            del self._note_of[stranger]
            if stranger.is_stranger:
                self.closed += 1
                stranger.close(
                    "memory is needed, and no request of this connection is complete yet"
                )

    def _note_stranger(self, holder: BudgetUser, reserved_bytes: int) -> None:
        self._noted.pop(self._note_of.get(holder, 0), None)
        self._notes += 1
        self._note_of[holder] = self._notes
        self._noted[self._notes] = holder
        heappush(self._strangers, (-reserved_bytes, self._notes))
        if len(self._strangers) > 2 * len(self._noted) + OUTDATED_NOTES_MAX:
            self._strangers = [note for note in self._strangers if note[1] in self._noted]
            heapify(self._strangers)

    def _serve_soon(self) -> None:
        if not self._is_serving:
            self._is_serving = True
            self._call_soon(self._serve)

    def _serve(self) -> None:
        """Let waiting connections try again, in order, until one has to keep waiting."""
        self._is_serving = False
        while self._waiting:
            first = next(iter(self._waiting))
            first.memory_freed()
            if next(iter(self._waiting), None) is first:
                break
        for client in tuple(self._held_back):
            while queue := self._held_back.get(client):
                first = next(iter(queue))
                first.memory_freed()
                if next(iter(self._held_back.get(client, ())), None) is first:
                    break
