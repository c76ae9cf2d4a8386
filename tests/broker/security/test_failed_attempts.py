"""The delay after failed authentications, and the attempts of one address."""

import asyncio

from broker.security.failed_attempts import (
    ATTEMPTS_AT_ONCE,
    DELAY_SECONDS_MAX,
    FAILURES_PER_BURST,
    FORGIVEN_PER_SECOND,
    FailedAttempts,
)
from tests.support.clocks.manual_clock import ManualClock


async def fail(attempts: FailedAttempts, address: str, delay: float = 0.1) -> float:
    async with attempts.attempt(address):
        return attempts.note_failure(address, delay)


async def test_delays_grow_with_failures_of_one_address_and_shrink_with_time() -> None:
    clock = ManualClock()
    attempts = FailedAttempts(clock)
    delays = [await fail(attempts, "a") for _ in range(FAILURES_PER_BURST + 20)]
    assert set(delays[:FAILURES_PER_BURST]) == {0.1}
    assert delays[FAILURES_PER_BURST:] == sorted(delays[FAILURES_PER_BURST:])
    assert delays[-1] == DELAY_SECONDS_MAX
    assert await fail(attempts, "b") == 0.1
    assert await fail(attempts, "b", delay=0.0) == 0.0
    assert await fail(attempts, "a", delay=9.0) == 9.0
    clock.now = 100 / FORGIVEN_PER_SECOND
    assert await fail(attempts, "a") == 0.1


async def test_an_address_has_a_limited_number_of_attempts_at_a_time() -> None:
    attempts = FailedAttempts(ManualClock())
    release, started = asyncio.Event(), 0

    async def attempt(address: str) -> None:
        nonlocal started
        async with attempts.attempt(address):
            started += 1
            await release.wait()

    tasks = [asyncio.create_task(attempt("a")) for _ in range(3 * ATTEMPTS_AT_ONCE)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert started == ATTEMPTS_AT_ONCE
    tasks.append(asyncio.create_task(attempt("b")))
    for _ in range(10):
        await asyncio.sleep(0)
    assert started == ATTEMPTS_AT_ONCE + 1
    release.set()
    await asyncio.gather(*tasks)
    assert started == 3 * ATTEMPTS_AT_ONCE + 1
