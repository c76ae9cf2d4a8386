"""While the broker opens logs, it answers requests and can be stopped."""

import asyncio
import errno
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from broker.app import Broker
from broker.lifecycle import systemd
from storage.errors import DirectoryLockedError, OpeningStoppedError
from storage.format import filenames
from tests.support.broker.broker_in_memory import broker_in_memory, broker_settings
from tests.support.broker.http_client import basic, get
from tests.support.os_errors import raises_errno
from tests.support.storage.log_managers import make_topic, opened
from tests.support.storage.logs import fill
from tests.support.storage.memory_env import MemoryEnv
from tests.support.waiting import wait_until


def killed() -> MemoryEnv:
    """The disk of a broker that was killed with three batches in each of three partitions."""
    env = MemoryEnv(seed=6)
    manager, _ = opened(env, "/disk1")
    for log in make_topic(manager, partitions=3):
        fill(log, 3)
    return env.kill()


class Delayed:
    """Block the reader of the second partition until it is released."""

    def __init__(self, env: MemoryEnv) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        env.fail_on(self._hold_up, 5)

    def _hold_up(self, operation: str, path: str) -> bool:
        if operation == "pread" and "orders-1/" in path and not self.go_on.is_set():
            self.reached.set()
            assert self.go_on.wait(20)
        return False


@asynccontextmanager
async def starting(broker: Broker, held_up: Delayed) -> AsyncIterator["asyncio.Task[None]"]:
    """A start that is under way, in the middle of opening its logs."""
    task = asyncio.create_task(broker.start())
    try:
        assert await asyncio.to_thread(held_up.reached.wait, 20)
        yield task
    finally:
        held_up.go_on.set()


async def test_while_logs_are_opened_health_checks_say_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statuses: list[str] = []
    monkeypatch.setattr(systemd, "PROGRESS_SECONDS", 0.01)
    report = lambda _, status, __: statuses.append(status)  # noqa: E731
    monkeypatch.setattr(systemd.ProgressReports, "report", report)
    env = killed()
    held_up = Delayed(env)
    broker = Broker(broker_settings(), env)
    async with starting(broker, held_up) as task:
        reported = "recovering 1 of 3 partitions"
        assert await get(broker, "/readyz") == (503, f"{reported}\n")
        assert await get(broker, "/healthz") == (200, "ok\n")
        status, text = await get(broker, "/metrics")
        assert status == 200
        for remaining in ("logstorecover", "segmentstorecover"):
            count = 2 if remaining == "logstorecover" else 1
            series = f'kafka_log_logmanager_remaining{remaining}{{dir="/disk1"}} {count}.0'
            assert f"\n{series}\n" in text
        status, text = await get(broker, "/api/v1/cleaner")
        assert (status, reported in text) == (503, True)
        await asyncio.to_thread(wait_until, lambda: reported in statuses, "a line about it")
    await task
    assert (await get(broker, "/readyz"))[0] == 200
    status, text = await get(broker, "/metrics")
    assert status == 200
    assert 'remaininglogstorecover{dir="/disk1"} 0.0' in text
    assert all(partition.log.log_end_offset == 3 for partition in broker.topics.partitions())
    await broker.stop()


async def test_while_logs_are_opened_a_user_gets_no_metrics() -> None:
    env = killed()
    held_up = Delayed(env)
    broker = Broker(broker_settings(http_users=True), env)
    async with starting(broker, held_up) as task:
        status, text = await get(broker, "/metrics", Authorization=basic("alice"))
        assert (status, text) == (503, "recovering 1 of 3 partitions\n")
    await task
    await broker.stop()


async def test_a_stop_while_logs_are_opened_takes_effect_at_the_next_batch() -> None:
    env = killed()
    held_up = Delayed(env)
    broker = Broker(broker_settings(), env)
    async with starting(broker, held_up) as task:
        broker.request_stop()
        assert await get(broker, "/readyz") == (503, "stopping\n")
    with pytest.raises(OpeningStoppedError):
        await task
    assert broker.manager.opening.done == 1
    assert not env.exists(f"/disk1/{filenames.CLEAN_SHUTDOWN}")
    async with broker_in_memory(env) as again:
        assert all(partition.log.log_end_offset == 3 for partition in again.topics.partitions())


async def test_a_second_broker_is_refused_before_it_listens() -> None:
    env = MemoryEnv(seed=6)
    async with broker_in_memory(env) as broker:
        settings = broker_settings(http=str(broker.http.address))
        with pytest.raises(DirectoryLockedError):
            await Broker(settings, env).start()


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_start_without_a_port_for_http_leaves_nothing_to_recover(is_new: bool) -> None:
    env = MemoryEnv(seed=6)
    if not is_new:
        async with broker_in_memory(env, http="127.0.0.1:0"):
            pass
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        broker = Broker(broker_settings(http=f"127.0.0.1:{sock.getsockname()[1]}"), env)
        with raises_errno(errno.EADDRINUSE):
            await broker.start()
    assert env.exists(f"/disk1/{filenames.CLEAN_SHUTDOWN}")
    async with broker_in_memory(env):
        pass
