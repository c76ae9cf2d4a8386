"""Opening the views of partitions: which thread reads, and what clients get meanwhile."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.topics.partition import Partition
from broker.views.opening import BATCH_MAX
from broker.views.view_partition import ViewPartition
from cleaner.host import Undecided
from protocol.errors import ErrorCode
from storage.view.ledger import Ledger
from storage.view.manifest import MANIFEST_NAME, VIEW_FOLDER
from tests.support.broker.principals import make_context
from tests.support.broker.views.view_broker import (
    ON,
    READ_SECONDS,
    WHERE,
    broker_with_view,
    produce,
    read_all,
)
from tests.support.storage.memory_env import MemoryEnv

VIEW_NAME = "orders.compacted"
COMPACT = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1"}


class HeldLoads:
    """Counts reads of versions on disk, and holds each until `go` is set."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun = threading.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.partitions: list[int] = []
        self._load = broker.views._opener._load
        monkeypatch.setattr(broker.views._opener, "_load", self._held)

    def _held(self, base: Partition) -> Ledger | None:
        result = self._load(base)
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.go.wait(5)
        self.partitions.append(base.partition.partition)
        return result


@asynccontextmanager
async def broker_with_ledger(env: MemoryEnv) -> AsyncIterator[Broker]:
    async with broker_with_view(env, COMPACT) as broker:
        await produce(broker, (b"a", b"1"), (b"a", b"2"))
        await broker.view_scheduler.compact(WHERE)
        yield broker


def open_again(broker: Broker) -> ViewPartition:
    """As after a move to another directory."""
    partition = broker.topics.partition(WHERE)
    assert partition is not None
    broker.views.reopen(partition)
    view = broker.views.partition(WHERE)
    assert view is not None
    return view


async def test_the_files_of_a_view_are_not_read_on_the_event_loop() -> None:
    env = MemoryEnv()
    threads: list[int] = []

    def is_read(operation: str, path: str) -> bool:
        if f"/{VIEW_FOLDER}" in path and operation in ("open", "pread", "read_file", "sync_dir"):
            threads.append(threading.get_ident())
        return False

    async with broker_with_ledger(env):
        pass
    env.fail_on(is_read, errno.EIO)  # it only counts
    for change in ("start", "setting", "move", "new topic"):
        threads.clear()
        async with broker_with_view(env) as broker:
            alter = broker.metadata_service.alter
            if change != "start":
                threads.clear()
            if change == "setting":
                await alter("orders", lambda _: {"varve.view": "none"})
                assert broker.views.partition(WHERE) is None
                await alter("orders", lambda _: ON)
            elif change == "move":
                open_again(broker)
                await broker.views._opener.wait_opened(broker.settings.log_dirs)
            elif change == "new topic":
                await broker.metadata_service.create("others", BATCH_MAX + 1, ON)
            assert threads, change
            assert threading.get_ident() not in threads, change


async def test_a_view_that_is_being_opened_is_like_a_leader_that_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with broker_with_ledger(MemoryEnv()) as broker:
        loads = HeldLoads(broker, monkeypatch)
        view = open_again(broker)
        services = make_context(broker).services
        assert services.readable(VIEW_NAME, 0) is ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert broker.views.limit_of(view.base) == (0, Undecided.VIEW_UNKNOWN)
        assert not list(broker.views.failures()), "it is no failure"
        loads.go.set()
        await broker.views._opener.wait_opened(broker.settings.log_dirs)
        assert services.readable(VIEW_NAME, 0) is view
        assert await read_all(broker) == [(1, b"a", b"2")]


async def test_a_partition_that_is_not_opened_yet_is_described_and_its_first_reader_opens_it() -> (
    None
):
    async with broker_with_ledger(MemoryEnv()) as broker:
        topic = broker.topics.get("orders")
        assert topic is not None
        config = topic.config
        topic.config = replace(config, varve_view="none")
        assert broker.views.get(VIEW_NAME) is None
        topic.config = config
        view = broker.views.get(VIEW_NAME)
        assert view is not None
        assert (view.partitions, view.opened) == (topic.partitions, {})
        services = make_context(broker).services
        assert services.readable(VIEW_NAME, 0) is ErrorCode.NOT_LEADER_OR_FOLLOWER
        await broker.views._opener.wait_opened(broker.settings.log_dirs)
        assert services.readable(VIEW_NAME, 0) is view.opened[0]
        assert await read_all(broker) == [(1, b"a", b"2")]


async def test_a_round_of_maintenance_drops_partitions_that_went_offline() -> None:
    async with broker_with_ledger(MemoryEnv()) as broker:
        view = broker.views.get(VIEW_NAME)
        assert view is not None
        assert list(view.opened) == [0]
        broker.topics.take_offline([WHERE], "its directory failed")
        await broker.view_scheduler.tidy()
        assert view.opened == {}
        assert broker.views.find(VIEW_NAME, 0) is ErrorCode.KAFKA_STORAGE_ERROR


async def test_a_change_of_settings_waits_until_the_view_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with broker_with_ledger(MemoryEnv()) as broker:
        loads = HeldLoads(broker, monkeypatch)
        alter = broker.metadata_service.alter
        await alter("orders", lambda _: {"varve.view": "none"})
        assert broker.views.partition(WHERE) is None
        change = asyncio.ensure_future(alter("orders", lambda _: ON))
        async with asyncio.timeout(READ_SECONDS):
            await loads.begun.wait()
        assert not change.done()
        loads.go.set()
        await change
        view = broker.views.partition(WHERE)
        assert view is not None
        assert view.log.horizon == 2


async def test_a_version_that_was_read_before_the_files_changed_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with broker_with_ledger(MemoryEnv()) as broker:
        loads = HeldLoads(broker, monkeypatch)
        view = open_again(broker)
        async with asyncio.timeout(READ_SECONDS):
            await loads.begun.wait()
        view.distrust()  # as a publication does
        assert view.is_opening
        loads.go.set()
        await broker.views._opener.wait_opened(broker.settings.log_dirs)
        assert loads.partitions == [0, 0]
        assert (view.is_opening, view.log.is_known, view.log.horizon) == (False, True, 2)


async def test_one_call_of_a_thread_reads_many_views(monkeypatch: pytest.MonkeyPatch) -> None:
    async with broker_with_view(MemoryEnv()) as broker:
        calls: list[int] = []
        read_all = broker.views._opener._read_all

        def count(views: list[ViewPartition]) -> list[Ledger | Exception | None]:
            calls.append(len(views))
            return read_all(views)

        monkeypatch.setattr(broker.views._opener, "_read_all", count)
        await broker.metadata_service.create("others", BATCH_MAX + 6, ON)
        assert sum(calls) == BATCH_MAX + 6
        assert len(calls) <= 3
        assert max(calls) <= BATCH_MAX


async def test_a_view_whose_partition_goes_offline_in_a_round_is_no_conflict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with broker_with_view(MemoryEnv(seed=3)) as broker:
        await broker.view_scheduler.tidy()
        views = broker._services.views
        monkeypatch.setattr(views, "partition", lambda _: None)
        with capture_logs() as logs:
            await broker.view_scheduler.tidy()
    assert [line for line in logs if line["event"] == "view cannot be offered"] == []


async def test_a_view_whose_manifest_is_missing_is_served_and_its_manifest_restored() -> None:
    env = MemoryEnv()
    path = f"/disk1/{WHERE}/{VIEW_FOLDER}/{MANIFEST_NAME}"
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        await broker.view_scheduler.compact(WHERE)
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        partition.log.delete_records(2)
    manifest = env.read_file(path)
    env.unlink(path)
    with capture_logs() as lines:
        async with broker_with_view(env) as broker:
            await broker.view_scheduler.tidy()
            assert [key for _, key, _ in await read_all(broker)] == [b"a", b"b"]
    assert env.read_file(path) == manifest
    (line,) = [line for line in lines if "manifest" in line["event"]]
    assert (line["event"], line["log_level"]) == (
        "view manifest restored from its copy", "warning"
    )  # fmt: skip


async def test_the_missing_copy_of_a_manifest_is_written_again() -> None:
    env = MemoryEnv()
    folder = f"/disk1/{WHERE}/{VIEW_FOLDER}"
    async with broker_with_ledger(env) as broker:
        view = broker.views.partition(WHERE)
        assert view is not None
        assert view.log.ledger is not None
        copy = f"{folder}/{view.log.ledger.manifest.compaction_id}/{MANIFEST_NAME}"
    env.unlink(copy)
    async with broker_with_view(env, COMPACT) as broker:
        await broker.view_scheduler.tidy()
    assert env.read_file(copy) == env.read_file(f"{folder}/{MANIFEST_NAME}")
