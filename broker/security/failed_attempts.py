"""Slows down addresses whose authentications fail.

Rules
- The answer to a failure waits for the configured delay. After FAILURES_PER_BURST failures of one
  address it waits twice as long at each further failure, up to DELAY_SECONDS_MAX.
- An address has ATTEMPTS_AT_ONCE places for attempts in progress, delays included; the others
  queue. So it can try three passwords a second, however many connections it opens.
- Logins, which are names of users or signed tokens, share the places fairly (fair_slots.py). So a
  client that repeats a wrong password does not delay other clients of its address, such as those
  behind the same gateway.
- An attempt whose client has left leaves the queue. Once it has begun, it goes on, and waits for
  its delay: otherwise a client that leaves could guess faster.
- At most LOGIN_ATTEMPTS_AT_ONCE attempts with one login are in progress. A login that has succeeded
  from an address needs a place there only if an attempt fails. So clients that reconnect do not
  queue behind those that guess passwords. A failed attempt queues like that of any login, so the
  time of the answer does not show whether a user exists.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from broker.event_loop.client_presence import ClientPresence
from broker.event_loop.fair_slots import FairSlots

ATTEMPTS_AT_ONCE: Final = 16
LOGIN_ATTEMPTS_AT_ONCE: Final = ATTEMPTS_AT_ONCE // 2
FAILURES_PER_BURST: Final = 10
FORGIVEN_PER_SECOND: Final = 0.2
FIRST_DELAY_SECONDS: Final = 0.1
DELAY_SECONDS_MAX: Final = 5.0  # clients give up a connection after 10 s
# In memory, with at most 1 KB each; the least recently used is dropped.
ADDRESSES_MAX: Final = 10_000
SUCCESSES_MAX: Final = 10_000  # pairs of an address and a login

HasLeft = Callable[[], bool]


@dataclass(slots=True)
class _Address:
    places: FairSlots = field(default_factory=partial(FairSlots, ATTEMPTS_AT_ONCE))
    logins: WeakValueDictionary[Hashable, asyncio.Semaphore] = field(
        default_factory=WeakValueDictionary
    )
    attempts: int = 0  # in progress or in the queue
    failures: float = 0.0
    updated: float = 0.0  # seconds of the clock

    def attempts_of(self, login: Hashable) -> asyncio.Semaphore:
        """Return the limit of attempts with one login; it exists while there are some."""
        return self.logins.setdefault(login, asyncio.Semaphore(LOGIN_ATTEMPTS_AT_ONCE))


def _stays() -> bool:
    return False


async def _enter(
    stack: AsyncExitStack, limit: AbstractAsyncContextManager[object], has_left: HasLeft
) -> None:
    """Wait for a place below a limit. Raises ClientLeftError if the client leaves before."""
    entering = asyncio.create_task(stack.enter_async_context(limit))
    try:
        await ClientPresence(has_left).wait(entering)
    finally:
        if not entering.done():
            entering.cancel()
            await asyncio.wait((entering,))


class Attempt:
    """An attempt in progress. It must say how it ends, unless it only goes on."""

    def __init__(
        self,
        stack: AsyncExitStack,
        place: AbstractAsyncContextManager[object],
        note_failure: Callable[[float], float],
        note_success: Callable[[], None],
    ) -> None:
        """`stack` holds what the attempt occupies, and later its place."""
        self._stack = stack
        self._place: AbstractAsyncContextManager[object] | None = place
        self._note_failure = note_failure
        self.succeeded = note_success

    async def take_place(self, has_left: HasLeft = _stays) -> None:
        """Wait for a place of the address, unless the attempt has one. Raises ClientLeftError."""
        place, self._place = self._place, None
        if place is not None:
            await _enter(self._stack, place, has_left)

    async def failed(self, delay_seconds: float) -> None:
        """Count a failure and wait, at least for `delay_seconds`."""
        await self.take_place()
        await asyncio.sleep(self._note_failure(delay_seconds))


class FailedAttempts:
    """The attempts in progress, the recent failures, and the successes of each address."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._addresses: dict[str, _Address] = {}  # least recently used first
        self._succeeded: dict[tuple[str, Hashable], None] = {}  # likewise

    @asynccontextmanager
    async def attempt(
        self,
        address: str,
        login: Hashable,
        *,
        is_guess: bool = True,
        has_left: HasLeft = _stays,
    ) -> AsyncIterator[Attempt]:
        """Wait until an attempt may begin, and carry it out in a block.

        Without `is_guess` it begins at once: it cannot succeed yet, or the connection has
        authenticated with this login before. `has_left` returns whether the client has closed the
        connection. Raises ClientLeftError if it does so before.
        """
        entry = self._addresses.pop(address, None) or _Address(updated=self._clock())
        self._addresses[address] = entry
        entry.attempts += 1
        self._drop_idle()
        try:
            async with AsyncExitStack() as stack:
                if is_guess:
                    await _enter(stack, entry.attempts_of(login), has_left)
                attempt = Attempt(
                    stack,
                    entry.places.slot(login),
                    partial(self.note_failure, address),
                    partial(self._note_success, address, login),
                )
                if is_guess and (address, login) not in self._succeeded:
                    await attempt.take_place(has_left)
                yield attempt
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

    def _note_success(self, address: str, login: Hashable) -> None:
        self._succeeded.pop((address, login), None)
        self._succeeded[address, login] = None
        if len(self._succeeded) > SUCCESSES_MAX:
            del self._succeeded[next(iter(self._succeeded))]

    def _drop_idle(self) -> None:
        if len(self._addresses) > ADDRESSES_MAX:
            idle = (name for name, entry in self._addresses.items() if not entry.attempts)
            name = next(idle, None)
            if name is not None:
                del self._addresses[name]
