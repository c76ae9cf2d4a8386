"""SIGHUP: one reload at a time, all of it or nothing; what it tells."""

import asyncio
import errno
import threading

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.lifecycle import reload, systemd
from broker.lifecycle.reload import Reloader, Secrets
from broker.metrics.lifecycle_metrics import settings_families
from broker.topics.topics import TopicError
from config.reload import Reloaded, reloaded
from config.settings import Settings
from protocol.errors import ErrorCode
from storage.directory.cluster_metadata import ClusterMetadata, new_metadata
from storage.errors import LogDirectoryError, NoRoomError
from tests.support.broker.broker_in_memory import broker_in_memory, broker_settings
from tests.support.storage.memory_env import MemoryEnv


class Daemon:
    """What a reloader reads and changes."""

    def __init__(self) -> None:
        self.file = Settings()
        self.running = Settings()
        self.applied: list[Settings] = []
        self.gate = asyncio.Event()
        self.failure: Exception | None = None
        self.not_created: str | None = None  # why a topic of the file was not
        self.reloader = Reloader(
            lambda: self.file,
            self._apply,
            lambda: self.running,
            self._metadata,
            wall_ms=lambda: 5000,
        )
        self.reloader.start()

    def _metadata(self) -> ClusterMetadata:
        return new_metadata(MemoryEnv(seed=1), "cluster", 1)

    async def _apply(self, settings: Settings, _secrets: Secrets) -> str | None:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.applied.append(settings)
        return self.not_created


async def test_signals_during_a_reload_are_one_more() -> None:
    daemon = Daemon()
    daemon.reloader.request()
    while daemon.reloader._requested:  # noqa: ASYNC110 - until it has begun
        await asyncio.sleep(0)
    for _ in range(5):
        daemon.reloader.request()
    daemon.gate.set()
    while daemon.reloader._task is not None:  # noqa: ASYNC110 - a thread reads
        await asyncio.sleep(0.001)
    assert len(daemon.applied) == 2


async def test_the_event_loop_checks_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of thousands of topics takes seconds."""
    daemon, threads = Daemon(), set[int]()

    def checked(running: Settings, file: Settings) -> Reloaded:
        threads.add(threading.get_ident())
        return reloaded(running, file)

    monkeypatch.setattr(reload, "reloaded", checked)
    daemon.gate.set()
    assert await daemon.reloader.reload()
    assert threading.get_ident() not in threads != set()


async def test_a_mistake_of_ours_ends_one_reload_and_not_the_next() -> None:
    daemon = Daemon()
    daemon.gate.set()
    daemon.failure = RuntimeError("a mistake")
    with capture_logs() as lines:
        daemon.reloader.request()
        while daemon.reloader._task is not None:  # noqa: ASYNC110 - a thread reads
            await asyncio.sleep(0.001)
    assert [line["event"] for line in lines] == ["settings not reloaded"]
    assert daemon.reloader.last is not None
    assert daemon.reloader.last.failure == "internal error: RuntimeError('a mistake')"
    daemon.failure = None
    daemon.reloader.request()
    await daemon.reloader.stop()
    assert await daemon.reloader.reload()


async def test_without_a_file_a_hang_up_is_an_orderly_stop() -> None:
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        broker.request_reload()
        async with asyncio.timeout(5):
            await broker.wait_stopped()
        assert broker.readiness.not_ready_because() == "stopping"


@pytest.mark.parametrize("problem", ["absent: No such file", "expected one token"])
async def test_a_token_that_cannot_be_read_changes_nothing(problem: str, tmp_path: object) -> None:
    daemon = Daemon()
    daemon.gate.set()
    path = f"{tmp_path}/absent"
    if "one token" in problem:
        path = f"{tmp_path}/short"
        with open(path, "w") as file:  # noqa: ASYNC230
            file.write("short")
    daemon.file = Settings(http_token_file=path)
    with capture_logs() as lines:
        assert not await daemon.reloader.reload()
    assert daemon.applied == []
    assert problem in lines[0]["reason"]
    assert lines[0]["reason"].startswith(f"http_token_file: {path}: ")


async def test_the_outcome_of_the_last_reload_is_kept_and_sent_to_systemd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states: list[str] = []
    monkeypatch.setattr(systemd, "notify", states.append)
    daemon = Daemon()
    daemon.gate.set()

    async def outcome() -> tuple[str | None, float, str]:
        daemon.reloader.request()
        while daemon.reloader._task is not None:  # noqa: ASYNC110 - a thread reads
            await asyncio.sleep(0.001)
        (family,) = settings_families(daemon.reloader)
        assert daemon.reloader.last is not None
        return daemon.reloader.last.failure, family.samples[0].value, states[-1]

    daemon.failure = TopicError(ErrorCode.INVALID_CONFIG, "orders: it\ncannot shrink")
    kept = "serving clients; settings not reloaded, the old ones stay in effect: orders: it cannot"
    failure, value, state = await outcome()
    assert (failure, value) == ("orders: it\ncannot shrink", 1)
    assert state == f"READY=1\nSTATUS={kept} shrink"
    daemon.failure, daemon.not_created = None, "no room"
    used = "serving clients; settings in effect, but not all topics created: no room"
    assert await outcome() == ("no room", 1, f"READY=1\nSTATUS={used}")
    daemon.not_created = None
    assert await outcome() == (None, 0, "READY=1\nSTATUS=serving clients; settings reloaded")


async def test_a_topic_that_finds_no_room_keeps_no_new_secret_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full() -> None:
        raise NoRoomError(OSError(errno.ENOSPC, "no space left"), "/disk1")

    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        monkeypatch.setattr(broker.metadata_service, "apply_yaml", full)
        reason = await broker._reload(broker.settings, Secrets(token=b"new", tls=None))
        assert reason is not None
        assert "no space left" in reason
        assert broker.http.server.authentication.tokens[0] == b"new"


async def test_a_topic_of_the_file_that_cannot_be_created_stops_no_start_and_no_other_topic() -> (
    None
):
    env, limits = MemoryEnv(seed=2), {"partitions": 5}
    async with broker_in_memory(env, limits=limits) as broker:
        await broker.metadata_service.create("used", 2, {})
    topics = {"large": {"partitions": 4}, "small": {"partitions": 1}}
    settings = broker_settings(limits=limits, topics=topics)
    broker = Broker(settings, env, load=lambda: settings)
    await broker.start()
    try:
        assert broker.topics.get("used") is not None
        assert broker.topics.get("large") is None
        assert broker.topics.get("small") is not None
        assert broker.reloader is not None
        problem = broker.reloader.problem or ""
        assert problem.startswith("settings in effect, but not all topics created: ")
        assert "limits.partitions allows 5" in problem
        assert not await broker.reloader.reload()  # as before: the file asks for too much
    finally:
        await broker.stop()


async def test_a_start_fails_if_its_only_disk_fails_while_topics_of_the_file_are_created() -> None:
    env = MemoryEnv(seed=2)
    async with broker_in_memory(env):
        pass
    settings = broker_settings(topics={"t": {}})
    env.fail_on(lambda op, path: op == "rename" and "varve.metadata" in path, errno.EIO)
    with pytest.raises(LogDirectoryError, match="/disk1 is offline"):
        await Broker(settings, env, load=lambda: settings).start()


async def test_signals_during_the_start_are_one_reload_when_it_ends() -> None:
    settings, reads = broker_settings(), list[Settings]()

    def load() -> Settings:
        reads.append(settings)
        return settings

    broker = Broker(settings, MemoryEnv(seed=3), load=load)
    for _ in range(3):
        broker.request_reload()
    await broker.start()
    try:
        async with asyncio.timeout(5):
            while broker.reloader is None or broker.reloader.last is None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert len(reads) == 1
        assert broker.reloader.problem is None
    finally:
        await broker.stop()
