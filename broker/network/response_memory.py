"""The memory of the response that a connection encodes or sends, in the budget of all responses.

Rules
- A response counts from its first slices until the socket has taken it, except for its first
  UNCOUNTED_BYTES. Records that sendfile sends take no memory and do not count.
- Encoding waits while the budget has no memory. The budget (buffer_budget.py) is that of receive
  buffers with other users: one response may exceed it, and clients share it.
- While others wait, the listener closes a connection whose client does not read (listener.py).
"""

import asyncio
from collections.abc import Callable, Hashable
from typing import Final

from broker.network.buffer_budget import BufferBudget

UNCOUNTED_BYTES: Final = 256 << 10  # most responses have less, and never wait
# The broker sends no larger response: librdkafka reads no more (receive.message.max.bytes).
RESPONSE_BYTES_MAX: Final = 100 << 20


class ResponseMemory:
    """What one connection has reserved for its response, as a user of the budget."""

    is_unauthenticated = False  # requests without authentication have small responses

    def __init__(self, budget: BufferBudget, client: Callable[[], Hashable]) -> None:
        self._budget = budget
        self._client = client
        self._reserved_bytes = 0
        self._growth = 0  # bytes to reserve, while it waits
        self._reserved: asyncio.Future[None] | None = None  # done when it need not wait any more

    @property
    def client(self) -> Hashable:
        """Return the client among which memory is shared."""
        return self._client()

    @property
    def is_needed(self) -> bool:
        """Return whether it has memory that others wait for."""
        return self._reserved_bytes > 0 and self._budget.is_short(self)

    async def grow_to(self, response_bytes: int) -> None:
        """Reserve memory for a response of so many bytes; wait while there is none."""
        self._growth = response_bytes - UNCOUNTED_BYTES - self._reserved_bytes
        if self._growth > 0 and not self._reserve():
            self._reserved = asyncio.get_running_loop().create_future()
            await self._reserved

    def release(self) -> None:
        """Release all: the response has been sent, or the connection is closed."""
        if self._reserved_bytes or self._reserved is not None:
            self._reserved_bytes, self._reserved = 0, None
            self._budget.forget(self)

    # Called by the budget

    def memory_freed(self) -> None:
        """Continue to encode if there is memory now."""
        if self._reserve() and self._reserved is not None and not self._reserved.done():
            self._reserved.set_result(None)

    def give_back(self) -> None:
        """Do nothing: it keeps no memory for later."""

    def close(self, reason: str) -> None:
        """Fail: the budget closes only unauthenticated connections."""
        raise AssertionError(reason)

    def _reserve(self) -> bool:
        if not self._budget.reserve(self, self._growth):
            return False
        self._reserved_bytes += self._growth
        return True
