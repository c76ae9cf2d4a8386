"""The delay after failed authentications, and the attempts of one address."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from broker.event_loop import client_presence
from broker.event_loop.client_presence import ClientLeftError
from broker.security.failed_attempts import (
    ATTEMPTS_AT_ONCE,
    DELAY_SECONDS_MAX,
    FAILURES_PER_BURST,
    FORGIVEN_PER_SECOND,
    LOGIN_ATTEMPTS_AT_ONCE,
    SUCCESSES_MAX,
    Attempt,
    FailedAttempts,
)
from tests.support.clocks.manual_clock import ManualClock


async def fail(attempts: FailedAttempts, address: str, delay: float = 0.1) -> float:
    async with attempts.attempt(address, "user"):
        return attempts.note_failure(address, delay)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Clients:
    """Attempts that stay in progress until the test ends."""

    def __init__(self) -> None:
        self.attempts = FailedAttempts(ManualClock())
        self.begun: list[str] = []
        self.stack = AsyncExitStack()

    async def begin(self, address: str, login: str) -> Attempt:
        attempt = await self.stack.enter_async_context(self.attempts.attempt(address, login))
        self.begun.append(login)
        return attempt

    async def try_to_begin(self, address: str, *logins: str) -> None:
        for login in logins:
            task = asyncio.create_task(self.begin(address, login))
            self.stack.callback(task.cancel)
        await settle()

    async def succeed(self, address: str, login: str) -> None:
        async with self.attempts.attempt(address, login) as attempt:
            attempt.succeeded()


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    clients = Clients()
    async with clients.stack:
        yield clients


GUESSES = [f"guess {number}" for number in range(ATTEMPTS_AT_ONCE)]


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


async def test_an_address_has_a_limited_number_of_attempts_at_a_time(clients: Clients) -> None:
    await clients.try_to_begin("a", *GUESSES, "x", "y")
    assert clients.begun == GUESSES
    await clients.try_to_begin("b", "z")
    assert clients.begun == [*GUESSES, "z"]


async def test_many_attempts_with_one_login_do_not_hold_up_others_of_the_address(
    clients: Clients,
) -> None:
    await clients.try_to_begin("a", *["mistaken"] * 100, "good", "other")
    assert clients.begun.count("mistaken") == ATTEMPTS_AT_ONCE // 2
    assert clients.begun[-2:] == ["good", "other"]


async def test_a_login_that_has_succeeded_does_not_queue_behind_guesses_from_its_address(
    clients: Clients,
) -> None:
    await clients.succeed("a", "alice")
    await clients.succeed("b", "bob")
    await clients.try_to_begin("a", *GUESSES)
    await clients.try_to_begin("a", "bob", *["alice"] * ATTEMPTS_AT_ONCE)
    assert clients.begun == [*GUESSES, *["alice"] * (ATTEMPTS_AT_ONCE // 2)]


async def test_an_attempt_whose_client_has_left_leaves_the_queue(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_presence, "WAIT_SECONDS", 0.001)
    have_left = False

    async def begin_and_leave(login: str) -> None:
        async with clients.attempts.attempt("a", login, has_left=lambda: have_left):
            pytest.fail("it began")

    await clients.try_to_begin("a", *GUESSES, *["victim"] * LOGIN_ATTEMPTS_AT_ONCE)
    leaving = [asyncio.create_task(begin_and_leave("victim")) for _ in range(100)]
    await settle()
    entry = clients.attempts._addresses["a"]
    assert entry.attempts == len(GUESSES) + LOGIN_ATTEMPTS_AT_ONCE + len(leaving)
    have_left = True
    results = await asyncio.gather(*leaving, return_exceptions=True)
    assert {type(result) for result in results} == {ClientLeftError}
    assert entry.attempts == len(GUESSES) + LOGIN_ATTEMPTS_AT_ONCE


async def test_a_failure_queues_whether_or_not_the_login_has_succeeded_before() -> None:
    clients, ended = Clients(), list[str]()

    async def fail(login: str) -> None:
        async with clients.attempts.attempt("a", login) as attempt:
            await attempt.failed(0.0)
        ended.append(login)

    await clients.succeed("a", "alice")
    async with clients.stack:
        await clients.try_to_begin("a", *GUESSES)
        tasks = [asyncio.create_task(fail(login)) for login in ("unknown", "alice", "other")]
        await settle()
        assert not ended
    await asyncio.gather(*tasks)
    assert ended == ["unknown", "alice", "other"]


async def test_the_number_of_successes_in_memory_is_bounded(clients: Clients) -> None:
    await clients.succeed("a", "alice")
    for number in range(SUCCESSES_MAX):
        await clients.succeed("b", str(number))
    assert len(clients.attempts._succeeded) == SUCCESSES_MAX
    assert ("a", "alice") not in clients.attempts._succeeded
