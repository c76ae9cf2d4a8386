"""Slows down addresses whose authentications fail.

Rules. The answer to a failure waits for the configured delay. After FAILURES_PER_BURST failures of
one address it waits twice as long at each further failure, up to DELAY_SECONDS_MAX. An address can
have ATTEMPTS_AT_ONCE attempts in progress, delays included; the others queue. So an address can try
three passwords a second, however many connections it opens, and a single client with a wrong
password does not delay the other clients of its address. Each HTTP request authenticates: those
that repeat the user of their connection do not queue.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final

ATTEMPTS_AT_ONCE: Final = 16
FAILURES_PER_BURST: Final = 10
FORGIVEN_PER_SECOND: Final = 0.2
FIRST_DELAY_SECONDS: Final = 0.1
DELAY_SECONDS_MAX: Final = 5.0  # clients give up a connection after 10 s
ADDRESSES_MAX: Final = 10_000  # in memory, 500 bytes each; the least recently used is dropped


@dataclass(slots=True)
class _Address:
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ATTEMPTS_AT_ONCE))
    attempts: int = 0  # in progress or in the queue
    failures: float = 0.0
    updated: float = 0.0  # seconds of the clock


class FailedAttempts:
    """The attempts in progress and the recent failures of each address."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._addresses: dict[str, _Address] = {}  # least recently used first

    @asynccontextmanager
    async def attempt(self, address: str, *, is_repeated: bool = False) -> AsyncIterator[None]:
        """Wait for a place among the attempts of an address, and occupy it for a block.

        `is_repeated`: the connection has authenticated as this client before, so the client needs
        no place. It does not guess, and others who do so at its address do not stop its work.
        """
        entry = self._addresses.pop(address, None) or _Address(updated=self._clock())
        self._addresses[address] = entry
        entry.attempts += 1
        self._drop_idle()
        try:
            async with nullcontext() if is_repeated else entry.places:
                yield
        finally:
            entry.attempts -= 1

    def note_failure(self, address: str, delay_seconds: float) -> float:
        """Count a failure of an attempt in progress; return how many seconds its answer waits.

        `delay_seconds` is how long it waits at least.
        """
        entry, now = self._addresses[address], self._clock()
        forgiven = (now - entry.updated) * FORGIVEN_PER_SECOND
        entry.failures = max(0.0, entry.failures - forgiven) + 1
        entry.updated = now
        excess = int(entry.failures) - FAILURES_PER_BURST
        if excess <= 0:
            return delay_seconds
        longer = max(delay_seconds, FIRST_DELAY_SECONDS) * (1 << min(excess, 10))
        return max(delay_seconds, min(longer, DELAY_SECONDS_MAX))

    def _drop_idle(self) -> None:
        if len(self._addresses) > ADDRESSES_MAX:
            idle = (name for name, entry in self._addresses.items() if not entry.attempts)
            name = next(idle, None)
            if name is not None:
                del self._addresses[name]
