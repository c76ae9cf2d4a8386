"""One budget over the buffers of all connections, in one direction.

There is one for requests that are received (Kafka's queued.max.request.bytes), which the rules
below describe, and one for responses that are encoded or sent (response_memory.py).

Rules
- The budget counts the bytes of each buffer beyond its first INITIAL_BYTES. A connection reserves
  memory before its buffer grows. If there is none, the broker stops reading from the connection,
  which waits in a queue.
- Memory is freed in this order: idle connections release the buffers that they keep for their next
  request; connections that have never sent a complete request are closed, the largest first. The
  budget keeps lists of both kinds, and examines each entry once: it never searches all connections.
- The first connection in the queue may exceed the budget until its request is complete, if no other
  connection does. So requests of working clients always complete, and all buffers together hold at
  most the budget plus one request of the largest size.
- While connections wait, a connection releases its buffer after each request and reserves again at
  the end of the queue (network/connection.py). A connection whose client stalls in the middle of a
  request, or takes too long over it, is closed (listener.py).
- Clients share the budget: a client, which is a user, may reserve more as long as it
  has less than is free. Beyond this, only one of its connections at a time may grow; the others
  wait in a queue of this client. So no client keeps large requests of others out. Unauthenticated
  connections have no share: they are closed if others need memory.

This module does not use sockets or a clock.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

# Outdated notes are removed when there are more of them than this, and than others.
OUTDATED_NOTES_MAX: Final = 1_000


class BudgetUser(Protocol):
    """What the budget needs of a connection or of its response."""

    @property
    def is_unauthenticated(self) -> bool:
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


class BufferBudget:
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
        self._unauthenticated: list[tuple[int, int]] = []  # (-bytes used, note number), a heap
        # By note number; notes that are not here are outdated.
        self._noted: dict[int, BudgetUser] = {}
        self._note_of: dict[BudgetUser, int] = {}
        self._notes = 0
        self._is_serving = False

    @property
    def waiting(self) -> int:
        """Return the number of connections that wait."""
        return len(self._waiting) + sum(map(len, self._held_back.values()))

    def is_short(self, connection: BudgetUser) -> bool:
        """Return whether others wait for memory that this connection may have."""
        if self._waiting:
            return True
        return bool(self._held_back) and connection.client in self._held_back

    def reserve(self, connection: BudgetUser, growth: int) -> bool:
        """Reserve `growth` more bytes for a connection; False if it has to wait or was closed."""
        if not self._is_in_share(connection, growth):
            return False
        if not self._fits(growth):
            self._make_room(growth)
        is_next = next(iter(self._waiting), connection) is connection
        may_exceed = self._over is connection or (is_next and self._over is None)
        if may_exceed or (is_next and self._fits(growth)):
            if not self._fits(growth):
                self._over = connection
            self._waiting.pop(connection, None)
            owned = self._reserved[connection] = self._reserved.get(connection, 0) + growth
            self.used_bytes += growth
            if not connection.is_unauthenticated:
                self._count(connection, owned)
            if connection.is_unauthenticated:
                self._note_unauthenticated(connection, owned)
            if self._waiting:
                self._serve_soon()
            return True
        if connection not in self._waiting:
            self._waiting[connection] = None
            if not connection.is_unauthenticated:
                self._over_share.setdefault(connection.client, connection)
            self.waits += 1
        return False

    def note_idle(self, connection: BudgetUser) -> None:
        """Note that a connection may be between two requests, and keeps its buffer for the next."""
        if connection in self._reserved:
            self._idle[connection] = None

    def set_reserved(self, connection: BudgetUser, reserved_bytes: int) -> None:
        """Note that the buffer of a connection has become smaller."""
        before = self._reserved.pop(connection, 0)
        assert reserved_bytes <= before, (reserved_bytes, before)
        if reserved_bytes:
            self._reserved[connection] = reserved_bytes
            if connection.is_unauthenticated and reserved_bytes < before:
                self._note_unauthenticated(connection, reserved_bytes)
        else:
            self._idle.pop(connection, None)
            self._noted.pop(self._note_of.pop(connection, 0), None)
        self.used_bytes -= before - reserved_bytes
        if self._over is connection and reserved_bytes < before:
            self._over = None
        if connection in self._counted and reserved_bytes < before:
            self._count(connection, reserved_bytes)
            if self._over_share.get(connection.client) is connection:
                del self._over_share[connection.client]
        if self._waiting or self._held_back:
            self._serve_soon()

    def forget(self, connection: BudgetUser) -> None:
        """Release all memory of a closed connection."""
        self._waiting.pop(connection, None)
        if self._over is connection:
            self._over = None
        self._admit(connection)
        if self._over_share.get(connection.client) is connection:
            del self._over_share[connection.client]
        self.set_reserved(connection, 0)

    def _is_in_share(self, connection: BudgetUser, growth: int) -> bool:
        """Return whether the client's share allows the growth; otherwise queue the connection."""
        client = connection.client
        is_before = (
            connection in (self._over, self._over_share.get(client)) or connection in self._waiting
        )
        if connection.is_unauthenticated or is_before:
            return True  # a connection with a place in the queue of all needs no share
        queue = self._held_back.get(client, {})
        if next(iter(queue), connection) is connection:
            if not self._has_share(client, growth):
                self._take_idle(client)
            fits = self._has_share(client, growth)
            if fits or client not in self._over_share:
                if not fits:
                    self._over_share[client] = connection
                self._admit(connection)
                return True
        if connection not in queue:
            self._held_back.setdefault(client, {})[connection] = None
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

    def _admit(self, connection: BudgetUser) -> None:
        queue = self._held_back.get(connection.client)
        if queue is not None:
            queue.pop(connection, None)
            if not queue:
                del self._held_back[connection.client]

    def _count(self, connection: BudgetUser, reserved_bytes: int) -> None:
        """Count the bytes that a connection has now for its client."""
        client, before = self._counted.pop(connection, (connection.client, 0))
        self._client_bytes[client] += reserved_bytes - before
        if not self._client_bytes[client]:
            del self._client_bytes[client]
        if reserved_bytes:
            self._counted[connection] = client, reserved_bytes

    def _fits(self, growth: int) -> bool:
        return self.used_bytes + growth <= self.limit_bytes

    def _make_room(self, growth: int) -> None:
        while self._idle and not self._fits(growth):
            connection = next(iter(self._idle))
            del self._idle[connection]  # it is noted again when it is idle again
            connection.give_back()
        while self._unauthenticated and not self._fits(growth):
            _, number = heappop(self._unauthenticated)
            victim = self._noted.pop(number, None)
            if victim is None:
                continue
            del self._note_of[victim]
            if victim.is_unauthenticated:
                self.closed += 1
                victim.close("memory is needed, and no request of this connection is complete yet")

    def _note_unauthenticated(self, connection: BudgetUser, reserved_bytes: int) -> None:
        self._noted.pop(self._note_of.get(connection, 0), None)
        self._notes += 1
        self._note_of[connection] = self._notes
        self._noted[self._notes] = connection
        heappush(self._unauthenticated, (-reserved_bytes, self._notes))
        if len(self._unauthenticated) > 2 * len(self._noted) + OUTDATED_NOTES_MAX:
            self._unauthenticated = [
                note for note in self._unauthenticated if note[1] in self._noted
            ]
            heapify(self._unauthenticated)

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
