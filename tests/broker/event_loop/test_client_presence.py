"""Work for clients that may close their connection before its end."""

import asyncio

import pytest

from broker.event_loop import client_presence
from broker.event_loop.client_presence import ClientLeftError, ClientPresence


def test_work_looks_at_once_and_then_when_it_is_time_to(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = 100.0, []
    monkeypatch.setattr(client_presence, "perf_counter", lambda: now)
    presence = ClientPresence(lambda: bool(looks.append(now)))
    for now in (100.0, 100.05, 100.11):  # noqa: B007 - `perf_counter` returns it
        presence.check()
    assert looks == [100.0, 100.11]


def test_work_ends_when_its_client_has_left() -> None:
    with pytest.raises(ClientLeftError):
        ClientPresence(lambda: True).check()


async def test_a_task_goes_on_though_one_client_that_waits_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_presence, "WAIT_SECONDS", 0.0)
    done = asyncio.Event()
    task = asyncio.create_task(done.wait())
    answers = iter((False, False, True))
    with pytest.raises(ClientLeftError):
        await ClientPresence(lambda: next(answers)).wait(task)
    done.set()
    assert await ClientPresence(lambda: False).wait(task)
