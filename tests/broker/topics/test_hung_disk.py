"""A disk whose syncs and removals never return concerns its own partitions only."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from broker.app import Broker
from broker.erasure import store as erasure_store
from broker.erasure.store import ErasureStore
from broker.event_loop import directory_threads
from broker.event_loop.directory_threads import DirectoryThreads
from broker.security.principal import Principal
from broker.topics import log_maintenance, metadata_writer
from broker.topics.partition import Partition
from storage.directory.cluster_metadata import FILE_NAME, decode_metadata
from storage.format import filenames
from storage.format.batch import read_header
from storage.manager.log_manager import LogManager
from tests.support.broker.broker_in_memory import broker_settings
from tests.support.broker.http_client import get
from tests.support.storage.log_managers import ONE, TWO
from tests.support.storage.logs import SMALL, batch_of, read_offsets
from tests.support.storage.memory_env import MemoryEnv

KEYS = {
    "cleanup.policy": "delete",
    "retention.ms": "1",
    "flush.messages": "1",
    "file.delete.delay.ms": "0",
}
TIMERS = ("ROLL_SECONDS", "FLUSH_SECONDS", "PURGE_SECONDS", "WATCH_SECONDS")


class HungEnv(MemoryEnv):
    """The disk of `hung` does not finish syncs and removals before `released`.

    A sync without anything to write returns nevertheless, as on a frozen file system.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.hung = "/none"
        self.released = threading.Event()

    def _wait(self, path: str) -> None:
        if path.startswith(self.hung) and not self.released.is_set():
            assert threading.current_thread() is not threading.main_thread(), path
            self.released.wait()

    def _sync_file(self, inode: Any, path: str) -> None:
        self._wait(path)
        super()._sync_file(inode, path)

    def sync_dir(self, path: str) -> None:
        if self._folder(path).unsynced:
            self._wait(path)
        super().sync_dir(path)

    def unlink(self, path: str) -> None:
        self._wait(path)
        super().unlink(path)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> HungEnv:
    for name in TIMERS:
        monkeypatch.setattr(log_maintenance, name, 0.01)
    for module in (directory_threads, metadata_writer, erasure_store):
        monkeypatch.setattr(module, "HANG_SECONDS", 0.01)
    return HungEnv(seed=1)


@asynccontextmanager
async def broker_on_two_disks(env: HungEnv) -> AsyncIterator[Broker]:
    settings = broker_settings(
        ONE, TWO, retention_check_interval_ms=10, checkpoint_interval_ms=1000
    )
    broker = Broker(settings, env, disk_threads=partial(ThreadPoolExecutor, 4))
    await broker.start()
    try:
        yield broker
        await broker.stop()
    finally:
        env.released.set()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)


def append(partition: Partition, timestamp: int) -> None:
    data = memoryview(batch_of(b"value", timestamp=timestamp))
    partition.append(data, read_header(data), 1000)


async def partitions_of(broker: Broker) -> tuple[Partition, Partition]:
    """A partition on each disk."""
    topic = await broker.metadata_service.create("t", 2, KEYS)
    by_disk = {part.log.log_directory.path: part for part in topic.partitions.values()}
    return by_disk[ONE], by_disk[TWO]


async def test_a_hung_disk_stops_no_maintenance_of_another(env: HungEnv) -> None:
    async with broker_on_two_disks(env) as broker:
        hung, good = await partitions_of(broker)
        env.hung = ONE
        writing = asyncio.create_task(broker.log_starts.write(hung.log.log_directory))
        await until(lambda: broker.directory_threads._begun[ONE] != [])
        for partition in (hung, good):
            append(partition, env.wall_ms())
        await until(lambda: good.log.recovery_point == 1)
        env.advance_ms(60_000)
        await until(lambda: good.log.log_start_offset == 1)  # retention has rolled and removed
        await until(lambda: not any(".deleted" in name for name in env.listdir(good.log.directory)))
        points = f"{TWO}/{filenames.RECOVERY_POINT_CHECKPOINT}"
        await until(lambda: read_offsets(env, points).get(good.partition) == 1)
        assert (hung.log.recovery_point, hung.log.log_end_offset) == (0, 1)
        env.released.set()
        await writing


async def test_a_hung_disk_makes_the_broker_unready_until_it_answers(env: HungEnv) -> None:
    async with broker_on_two_disks(env) as broker:
        hung, _ = await partitions_of(broker)
        env.hung = ONE
        append(hung, env.wall_ms())
        threads = broker.directory_threads
        await until(lambda: threads.longest_seconds(ONE) == 0 and bool(threads._begun[ONE]))
        env.advance_ms(40_000)
        status, text = await get(broker, "/readyz")
        assert (status, text) == (
            503, "data directory /disk1 hangs: its disk has not finished a sync for 40 s\n"
        )  # fmt: skip
        _, page = await get(broker, "/metrics")
        assert 'varve_disk_longest_sync_seconds{directory="/disk1"} 40.0' in page
        assert 'varve_disk_longest_sync_seconds{directory="/disk2"} 0.0' in page
        env.released.set()
        await until(lambda: hung.log.recovery_point == 1)
        assert (await get(broker, "/readyz"))[0] == 200


async def test_a_hung_disk_keeps_no_topic_from_being_created_or_deleted(env: HungEnv) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        await partitions_of(broker)
        env.hung = ONE
        topic = await broker.metadata_service.create("new", 2, {})
        assert {part.log.log_directory.path for part in topic.partitions.values()} == {TWO}
        await broker.metadata_service.delete("t")
        copies = [f"{disk}/{FILE_NAME}" for disk in (ONE, TWO)]
        assert decode_metadata(env.read_file(copies[1]), TWO).topics.keys() == {"new"}
        assert decode_metadata(env.read_file(copies[0]), ONE).topics.keys() == {"t"}
        assert env.is_dir(f"{ONE}/t-0") != env.is_dir(f"{ONE}/t-1")
        env.released.set()
        while env.read_file(copies[0]) != env.read_file(copies[1]):
            await broker.metadata_writer.note_time()
    manager = LogManager(env, [ONE, TWO])
    report = manager.open(lambda _: SMALL)
    assert {partition.topic for partition in manager.logs} == {"new"}
    assert len(report.removed) == 1


async def test_a_stop_with_a_hung_disk_closes_the_other_directories(env: HungEnv) -> None:
    async with asyncio.timeout(20):
        async with broker_on_two_disks(env) as broker:
            hung, good = await partitions_of(broker)
            env.hung = ONE
            for partition in (hung, good):
                append(partition, env.wall_ms())
            await until(lambda: broker.directory_threads._begun[ONE] != [])
            await until(lambda: good.log.recovery_point == 1)
            env.advance_ms(40_000)
        assert env.exists(f"{TWO}/{filenames.CLEAN_SHUTDOWN}")
        assert not env.exists(f"{ONE}/{filenames.CLEAN_SHUTDOWN}")


@pytest.mark.parametrize("hung", [ONE, f"{ONE}/{erasure_store.FILE_NAME}"])
async def test_a_hung_disk_keeps_no_erasure_from_being_requested(env: HungEnv, hung: str) -> None:
    """Also if it begins to hang when the erasure is stored."""
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        await partitions_of(broker)
        env.hung = hung
        topic = await broker.metadata_service.create("t2", 1, {"cleanup.policy": "compact"})
        erasure = await broker.erasures.request(
            topic, b"key", [0], within_ms=86_400_000, requested_by=Principal("operator")
        )
        copy = ErasureStore(env, lambda: (TWO,), DirectoryThreads(env.monotonic))
        await copy.load()
        assert copy.get(erasure.erasure_id) is not None
        env.released.set()
