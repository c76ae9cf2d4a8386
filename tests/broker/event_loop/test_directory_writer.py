"""A thread changes the logs of a data directory; the event loop waits for it, but not for ever."""

import asyncio
import threading
from functools import partial

import pytest

from broker.event_loop import directory_writer
from broker.event_loop.directory_writer import (
    SLOW_FOR_SECONDS,
    SLOW_SECONDS,
    WAIT_SECONDS,
    ChangePendingError,
    DirectoryWriter,
    run_on_loop,
)
from storage.errors import DirectoryStalledError, NoRoomError


class Disk:
    """A disk that finishes no write before `thaw`."""

    def __init__(self) -> None:
        self.is_thawed = threading.Event()

    def write(self, result: object = None) -> object:
        self.is_thawed.wait()
        if isinstance(result, Exception):
            raise result
        return result


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> DirectoryWriter:
    monkeypatch.setattr(directory_writer, "WAIT_SECONDS", 0.01)
    return DirectoryWriter("/data", lambda: 0.0)


def pending_of(writer: DirectoryWriter, disk: Disk, result: object) -> "asyncio.Future[object]":
    with pytest.raises(ChangePendingError) as raised:
        writer.run(partial(disk.write, result))
    return raised.value.pending


async def test_a_change_runs_in_a_thread_and_returns_as_on_the_loop(
    writer: DirectoryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_writer, "WAIT_SECONDS", 20)
    assert writer.run(threading.current_thread) is not threading.current_thread()
    error = NoRoomError(OSError(28, "full"), "/data")
    with pytest.raises(NoRoomError) as raised:
        writer.run(partial(Disk.write, _thawed(), error))
    assert raised.value is error
    assert writer.pending is None


def _thawed() -> Disk:
    disk = Disk()
    disk.is_thawed.set()
    return disk


@pytest.mark.parametrize("error", [None, NoRoomError(OSError(28, "full"), "/data")])
async def test_a_change_that_the_disk_finishes_late_gives_its_result(
    writer: DirectoryWriter, error: Exception | None
) -> None:
    disk, changes = Disk(), []
    pending = pending_of(writer, disk, error or 7)
    with pytest.raises(DirectoryStalledError) as refused:
        writer.run(partial(changes.append, "refused"))
    assert not isinstance(refused.value, ChangePendingError)
    disk.is_thawed.set()
    (result,) = await asyncio.gather(pending, return_exceptions=True)
    assert result == (error or 7)
    with pytest.raises(DirectoryStalledError):  # whoever waited for the result comes first
        writer.run(partial(changes.append, "too early"))
    await writer.wait_settled()
    assert changes == []
    assert writer.pending is None


async def test_a_disk_that_is_slow_holds_the_loop_for_less_time_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waits = [0.0], list[float]()
    wait = DirectoryWriter._wait

    def noted(writer: DirectoryWriter, seconds: float) -> object:
        waits.append(seconds)
        return wait(writer, 20)

    def take(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(DirectoryWriter, "_wait", noted)
    writer = DirectoryWriter("/data", lambda: now[0])
    for seconds in (SLOW_SECONDS, 0, SLOW_FOR_SECONDS, 0, SLOW_FOR_SECONDS / 2):
        writer.run(partial(take, seconds))
    take(SLOW_FOR_SECONDS)
    writer.run(partial(take, 0))
    assert waits == [WAIT_SECONDS, *[SLOW_SECONDS] * 4, WAIT_SECONDS]


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_call_from_within_a_change_runs_on_the_loop(
    writer: DirectoryWriter, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    disk = Disk() if is_late else _thawed()
    calls: list[threading.Thread] = []

    def call() -> None:
        calls.append(threading.current_thread())
        asyncio.get_running_loop()
        raise ValueError("as on the loop")

    def change() -> str:
        disk.write()
        with pytest.raises(ValueError, match="as on the loop"):
            run_on_loop(call)
        return "done"

    if is_late:
        with pytest.raises(ChangePendingError) as raised:
            writer.run(change)
        disk.is_thawed.set()
        assert await raised.value.pending == "done"
    else:
        monkeypatch.setattr(directory_writer, "WAIT_SECONDS", 20)
        assert writer.run(change) == "done"
    assert calls == [threading.current_thread()]


async def test_a_closed_writer_has_no_thread(
    writer: DirectoryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_writer, "WAIT_SECONDS", 20)
    thread = writer.run(threading.current_thread)
    writer.close()
    thread.join(20)
    assert not thread.is_alive()
