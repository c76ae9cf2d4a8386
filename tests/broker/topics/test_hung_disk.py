"""A disk whose syncs, removals or writes never return concerns its own partitions only."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from broker import app
from broker.app import Broker
from broker.erasure import store as erasure_store
from broker.erasure.store import ErasureStore
from broker.event_loop import directory_threads
from broker.event_loop.directory_threads import DirectoryThreads
from broker.event_loop.directory_writer import ChangePendingError, DirectoryWriter
from broker.groups.offsets.offsets_store import OFFSETS_TOPIC
from broker.leases.lease_issuer import LeaseRequest
from broker.leases.model import LeaseError
from broker.security.principal import Principal
from broker.topics import log_maintenance, metadata_writer
from broker.topics.index_loads import IndexLoads
from broker.topics.partition import Partition
from broker.views.compaction import ViewError
from cleaner.remote_compaction import Purpose
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.messages import (
    ListOffsetsRequest,
    ListOffsetsRequestPartition,
    ListOffsetsRequestTopic,
    ListOffsetsResponse,
)
from storage.directory.cluster_metadata import FILE_NAME, decode_metadata
from storage.errors import DirectoryLockedError, DirectoryStalledError, LogClosedError
from storage.format import filenames
from storage.format.batch import read_header
from storage.manager.log_manager import LogManager
from storage.segments.segment import IndexNotReadyError
from tests.support.broker.broker_in_memory import broker_settings, client_of
from tests.support.broker.http_client import get
from tests.support.broker.large_batches import large_batches
from tests.support.protocol.raw_client import FETCH_VERSION, fetch_request
from tests.support.storage.log_managers import ONE, TWO
from tests.support.storage.logs import SMALL, batch_of, offsets_in, read_offsets
from tests.support.storage.memory_env import MemoryEnv, MemoryFile

KEYS = {
    "cleanup.policy": "delete",
    "retention.ms": "1",
    "flush.messages": "1",
    "file.delete.delay.ms": "0",
}
TIMERS = ("ROLL_SECONDS", "FLUSH_SECONDS", "PURGE_SECONDS", "WATCH_SECONDS")


class HungEnv(MemoryEnv):
    """The disk of `hung` does not finish syncs and removals before `released`.

    A sync without anything to write returns nevertheless, as on a frozen file system. The disk of
    `frozen` finishes no writes of any kind, that of `hung_reads` no look into a folder.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.hung = self.frozen = self.hung_reads = "/none"
        self.released = threading.Event()
        self.waiting = 0  # writes to `frozen`
        self.on_loop: list[str] = []  # those that the event loop waits for
        self.freezes_at = ""  # the disk freezes before this file is written

    def _wait(self, path: str) -> None:
        if path.startswith(self.hung) and not self.released.is_set():
            assert threading.current_thread() is not threading.main_thread(), path
            self.released.wait()

    def _wait_to_write(self, path: str) -> None:
        if path.startswith(self.frozen) and not self.released.is_set():
            if threading.current_thread() is threading.main_thread():
                self.on_loop.append(path)
            self.waiting += 1
            self.released.wait(20)

    def _wait_to_read(self, path: str) -> None:
        if threading.current_thread() is threading.main_thread():
            self.on_loop.append(path)
        self.waiting += 1
        self.released.wait(20)

    def freeze(self, directory: str) -> None:
        self.hung = self.frozen = directory

    def open(
        self, path: str, *, create: bool = False, write: bool = False, truncate: bool = False
    ) -> MemoryFile:
        if path == self.freezes_at:
            self.freeze(ONE)
        if create or truncate:
            self._wait_to_write(path)
        return super().open(path, create=create, write=write, truncate=truncate)

    def rename(self, src: str, dst: str) -> None:
        if dst == self.freezes_at:
            self.freeze(ONE)
        self._wait_to_write(src)
        super().rename(src, dst)

    def link(self, src: str, dst: str) -> None:
        self._wait_to_write(dst)
        super().link(src, dst)

    def mkdir(self, path: str, *, parents: bool = True) -> None:
        self._wait_to_write(path)
        super().mkdir(path, parents=parents)

    def _pwrite(self, inode: Any, path: str, data: bytes, position: int) -> None:
        self._wait_to_write(path)
        super()._pwrite(inode, path, data, position)

    def _truncate(self, inode: Any, path: str, length: int) -> None:
        self._wait_to_write(path)
        super()._truncate(inode, path, length)

    def _sync_file(self, inode: Any, path: str) -> None:
        self._wait(path)
        super()._sync_file(inode, path)

    def is_dir(self, path: str) -> bool:
        if path.startswith(self.hung_reads):
            self._wait_to_read(path)
        return super().is_dir(path)

    def listdir(self, path: str) -> list[str]:
        if path.startswith(self.hung_reads):
            self._wait_to_read(path)
        return super().listdir(path)

    def sync_dir(self, path: str) -> None:
        if self._folder(path).unsynced:
            self._wait(path)
        super().sync_dir(path)

    def unlink(self, path: str) -> None:
        self._wait(path)
        super().unlink(path)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungEnv]:
    for name in TIMERS:
        monkeypatch.setattr(log_maintenance, name, 0.01)
    for module in (directory_threads, metadata_writer, erasure_store):
        monkeypatch.setattr(module, "HANG_SECONDS", 0.3)
    monkeypatch.setattr(app, "STOP_SECONDS", 1)
    env = HungEnv(seed=1)
    wait = DirectoryWriter._wait

    def wait_briefly_if_frozen(writer: DirectoryWriter, _: float) -> Any:
        is_frozen = env.frozen.startswith(writer._directory) and not env.released.is_set()
        return wait(writer, 0.01 if is_frozen else 20)

    monkeypatch.setattr(DirectoryWriter, "_wait", wait_briefly_if_frozen)
    yield env
    assert not env.on_loop


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


def append(partition: Partition, timestamp: int, value: bytes = b"value") -> None:
    data = memoryview(batch_of(value, timestamp=timestamp))
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
        writing = asyncio.create_task(broker.checkpoint_writer.write(hung.log.log_directory))
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
    assert {partition.topic for partition in manager.table.logs} == {"new"}
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


async def produced(
    broker: Broker, partition: Partition, sequence: int, value: bytes = b"value"
) -> tuple[int, int]:
    """Produce a record as an idempotent client; return the error code and the offset."""
    name = partition.partition
    records = batch_of(value, producer_id=7, producer_epoch=0, base_sequence=sequence)

    def produce() -> tuple[int, int]:
        with client_of(broker) as client:
            row = client.produce(name.topic, bytes(records), name.partition)
            return row.error_code, row.base_offset

    return await asyncio.to_thread(produce)


async def test_an_append_to_a_frozen_disk_holds_no_client_of_another(env: HungEnv) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        frozen, good = await partitions_of(broker)
        assert await produced(broker, frozen, 0) == (ErrorCode.NONE, 0)
        env.freeze(ONE)
        pending = asyncio.create_task(produced(broker, frozen, 1))
        await until(lambda: broker.directory_threads.is_stalled(ONE))
        assert await produced(broker, good, 0) == (ErrorCode.NONE, 0)
        assert (await get(broker, "/readyz"))[0] == 200
        assert (await get(broker, "/metrics"))[0] == 200
        assert await produced(broker, frozen, 1) == (ErrorCode.KAFKA_STORAGE_ERROR, -1)
        assert frozen.log.high_watermark == 1
        env.released.set()
        assert await pending == (ErrorCode.NONE, 1)
        await until(lambda: not broker.directory_threads.is_stalled(ONE))
        assert await produced(broker, frozen, 1) == (ErrorCode.NONE, 1)  # the same record again
        assert await produced(broker, frozen, 2) == (ErrorCode.NONE, 2)
        assert offsets_in(frozen.log) == [0, 1, 2]


async def test_a_part_of_a_batch_that_a_disk_does_not_finish_holds_no_client(env: HungEnv) -> None:
    """The batch is appended once when it does; meanwhile the partition takes no other one."""
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        frozen, good = await partitions_of(broker)
        with large_batches(500, 100):
            env.freeze(ONE)
            pending = asyncio.create_task(produced(broker, frozen, 0, bytes(1000)))
            await until(lambda: broker.directory_threads.is_stalled(ONE))
            assert await produced(broker, good, 0, bytes(1000)) == (ErrorCode.NONE, 0)
            for value in (b"value", bytes(1000)):
                code = ErrorCode.KAFKA_STORAGE_ERROR
                assert await produced(broker, frozen, 0, value) == (code, -1)
            assert frozen.log.log_end_offset == 0
            env.released.set()
            assert await pending == (ErrorCode.NONE, 0)
            assert await produced(broker, frozen, 1, bytes(1000)) == (ErrorCode.NONE, 1)
        assert offsets_in(frozen.log) == [0, 1]
        assert frozen.log.segments.active.is_cut()


async def test_an_append_to_a_frozen_disk_survives_its_client(env: HungEnv) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        frozen, _ = await partitions_of(broker)
        env.freeze(ONE)
        data = memoryview(batch_of(b"value"))
        with pytest.raises(ChangePendingError) as stalled:
            frozen.append(data, read_header(data), 1000)
        with pytest.raises(DirectoryStalledError):
            frozen.roll(1000)
        waiting = asyncio.create_task(frozen.wait_change(partial(raise_again, stalled.value)))
        await asyncio.sleep(0)
        waiting.cancel()
        env.released.set()
        await until(lambda: frozen.log.high_watermark == 1)
        await until(lambda: not broker.directory_threads.is_stalled(ONE))
        frozen.roll(1000)
        assert len(frozen.log.segments) == 2


def raise_again(error: Exception) -> None:
    raise error


async def test_an_append_that_fails_after_a_freeze_takes_its_directory_offline(
    env: HungEnv,
) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        frozen, good = await partitions_of(broker)
        env.freeze(ONE)
        pending = asyncio.create_task(produced(broker, frozen, 0))
        await until(lambda: broker.directory_threads.is_stalled(ONE))
        env.fail_on(lambda _, path: path.startswith(ONE), errno.EIO)
        env.released.set()
        assert await pending == (ErrorCode.KAFKA_STORAGE_ERROR, -1)
        assert not frozen.log.log_directory.is_online
        assert await produced(broker, good, 0) == (ErrorCode.NONE, 0)


async def test_the_maintenance_of_a_frozen_disk_holds_no_client(env: HungEnv) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        frozen, good = await partitions_of(broker)
        for partition in (frozen, good):
            append(partition, env.wall_ms())
        env.freeze(ONE)
        env.advance_ms(60_000)
        await until(lambda: good.log.log_start_offset == 1)
        await until(lambda: env.waiting > 0)
        assert await produced(broker, good, 0) == (ErrorCode.NONE, 1)
        env.released.set()
        await until(lambda: frozen.log.log_start_offset == 1)


async def test_an_append_of_a_coordinator_ends_when_the_disk_has_written_it(env: HungEnv) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        topic = broker.coordinators.offsets_topic
        assert await topic.ensure() is ErrorCode.NONE
        served = broker.topics.get(OFFSETS_TOPIC)
        assert served is not None
        index, log = next(
            (number, part.log)
            for number, part in served.partitions.items()
            if part.log.log_directory.path == ONE
        )
        env.freeze(ONE)
        appending = asyncio.ensure_future(topic.append(index, [(b"key", b"value")]))
        with pytest.raises(DirectoryStalledError):
            topic.append(index, [(b"key", b"later")])
        await until(lambda: env.waiting > 0)
        assert not appending.done()
        env.released.set()
        await appending
        assert log.high_watermark == 1


@pytest.mark.parametrize("file", ["varve.metadata.tmp", "varve.metadata"])
async def test_a_disk_that_freezes_during_a_save_keeps_no_topic_from_being_created(
    env: HungEnv, file: str
) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        await partitions_of(broker)
        env.freezes_at = f"{ONE}/{file}"
        await broker.metadata_service.create("new", 1, {})
        copies = [f"{disk}/{FILE_NAME}" for disk in (ONE, TWO)]
        assert decode_metadata(env.read_file(copies[1]), TWO).topics.keys() == {"t", "new"}
        assert decode_metadata(env.read_file(copies[0]), ONE).topics.keys() == {"t"}
        env.freezes_at = ""
        env.released.set()
        while env.read_file(copies[0]) != env.read_file(copies[1]):
            await broker.metadata_writer.note_time()


async def test_a_stop_gives_up_a_disk_that_froze_just_now(env: HungEnv) -> None:
    async with asyncio.timeout(20):
        async with broker_on_two_disks(env) as broker:
            frozen, good = await partitions_of(broker)
            assert await produced(broker, good, 0) == (ErrorCode.NONE, 0)
            env.freeze(ONE)
            pending = asyncio.create_task(produced(broker, frozen, 0))
            await until(lambda: broker.directory_threads.is_stalled(ONE))
        assert broker.has_hung_threads
        with pytest.raises(DirectoryLockedError):  # a thread may still write to it
            env.lock(f"{ONE}/{filenames.LOCK}")
        env.lock(f"{TWO}/{filenames.LOCK}").release()
        assert env.exists(f"{TWO}/{filenames.CLEAN_SHUTDOWN}")
        assert not env.exists(f"{ONE}/{filenames.CLEAN_SHUTDOWN}")
        assert (await pending)[0] == ErrorCode.KAFKA_STORAGE_ERROR


async def test_a_stop_waits_for_a_slow_write_of_a_disk_that_answers(env: HungEnv) -> None:
    async with asyncio.timeout(20):
        async with broker_on_two_disks(env) as broker:
            slow, _ = await partitions_of(broker)
            env.frozen = slow.log.directory
            pending = asyncio.create_task(produced(broker, slow, 0))
            await until(lambda: broker.directory_threads.is_stalled(ONE))
            stopping = asyncio.create_task(broker._wait_idle())
            await asyncio.wait([stopping], timeout=0.1)
            assert not stopping.done()
            env.released.set()
            await stopping
            assert not broker.directory_threads.is_stalled(ONE)
            assert await pending == (ErrorCode.NONE, 0)
        assert env.exists(f"{ONE}/{filenames.CLEAN_SHUTDOWN}")


async def test_a_disk_that_freezes_while_logs_are_closed_leaves_the_others_clean(
    env: HungEnv,
) -> None:
    async with asyncio.timeout(20):
        async with broker_on_two_disks(env) as broker:
            await partitions_of(broker)
            env.freezes_at = f"{ONE}/{filenames.RECOVERY_POINT_CHECKPOINT}.tmp"
        assert env.exists(f"{TWO}/{filenames.CLEAN_SHUTDOWN}")
        assert not env.exists(f"{ONE}/{filenames.CLEAN_SHUTDOWN}")


async def test_cold_reads_of_a_hung_disk_take_no_thread_of_another(
    env: HungEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()

    def warm(file: MemoryFile, position: int, length: int) -> None:
        if file.path.startswith(ONE):
            hung.wait()

    monkeypatch.setattr(MemoryFile, "is_cached", lambda *_: False)
    monkeypatch.setattr(MemoryFile, "warm", warm)
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        cold, good = await partitions_of(broker)
        for partition in (cold, good):
            append(partition, env.wall_ms())
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(20) as clients:
            fetches = [loop.run_in_executor(clients, fetched, broker, cold) for _ in range(10)]
            assert await loop.run_in_executor(clients, fetched, broker, good) == ErrorCode.NONE
            hung.set()
            assert await asyncio.gather(*fetches) == [ErrorCode.NONE] * 10


def fetched(broker: Broker, partition: Partition) -> int:
    with client_of(broker) as client:
        name = partition.partition
        return client.fetch(name.topic, partition=name.partition).error_code


async def test_a_look_up_in_a_cold_log_does_not_read_on_the_event_loop(
    env: HungEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop, warm, read = list[int](), set[int](), MemoryFile.pread

    def pread(file: MemoryFile, length: int, position: int) -> bytes:
        if file.path == path and threading.current_thread() is not main:
            warm.update(range(position, position + length))
        elif file.path == path and position not in warm:
            on_loop.append(position)
        return read(file, length, position)

    main = threading.current_thread()
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        partition = (await broker.metadata_service.create("t", 1, {})).partitions[0]
        for timestamp in range(30):
            append(partition, env.wall_ms() + timestamp, bytes(5_000))
        partition.roll(env.wall_ms())
        partition.log.segment_facts()  # retention reads nothing more
        path = partition.log.segments.closed[0].file.path
        partition.log.segments.closed[0].position_hints.clear()
        monkeypatch.setattr(MemoryFile, "pread", pread)
        monkeypatch.setattr(
            MemoryFile, "is_cached", lambda _, at, length: {at, at + length - 1} <= warm
        )
        monkeypatch.setattr(
            MemoryFile, "warm", lambda file, position, length: pread(file, length, position)
        )
        name = partition.partition

        def look_up() -> None:
            with client_of(broker) as client:
                fetch = fetch_request(name.topic, 20, name.partition)
                fetch.topics[0].partitions[0].partition_max_bytes = 40_000
                client.request(ApiKey.FETCH, FETCH_VERSION, fetch)
                warm.clear()
                by_time = ListOffsetsRequestPartition(
                    partition_index=name.partition, timestamp=env.wall_ms() + 20
                )
                topic = ListOffsetsRequestTopic(name=name.topic, partitions=[by_time])
                answer = client.request(
                    ApiKey.LIST_OFFSETS, 7, ListOffsetsRequest(replica_id=-1, topics=[topic])
                )
                assert isinstance(answer, ListOffsetsResponse)
                assert answer.topics[0].partitions[0].offset == 20

        await asyncio.to_thread(look_up)
        assert on_loop == []


async def test_a_disk_that_freezes_during_a_creation_delays_no_other_change(env: HungEnv) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        await partitions_of(broker)
        folder = f"{ONE}/new-0"
        env.freezes_at = f"{folder}/{filenames.PARTITION_METADATA}"
        topic = await broker.metadata_service.create("new", 2, {})
        assert {part.log.log_directory.path for part in topic.partitions.values()} == {TWO}
        assert env.is_dir(folder)
        await broker.metadata_service.create("next", 2, {})
        env.released.set()
        await until(lambda: not broker.manager._changes.late)
        assert not env.exists(folder)
        env.freezes_at = ""
        later = await broker.metadata_service.create("later", 1, {})
        assert later.partitions[0].log.log_directory.path == ONE


async def test_a_disk_that_freezes_during_a_deletion_delays_no_other_change(env: HungEnv) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        hung, _ = await partitions_of(broker)
        rename = env.rename

        def freeze_and_rename(src: str, dst: str) -> None:
            if src == hung.log.directory:
                env.freeze(ONE)
            rename(src, dst)

        env.rename = freeze_and_rename  # type: ignore[method-assign]
        await broker.metadata_service.delete("t")
        again = await broker.metadata_service.create("t", 2, {})
        assert {part.log.log_directory.path for part in again.partitions.values()} == {TWO}
        env.released.set()
        await until(lambda: not env.exists(hung.log.directory))
    manager = LogManager(env.kill(), [ONE, TWO])
    manager.open(lambda _: SMALL)
    assert manager.metadata.topics["t"].topic_id == again.topic_id


async def test_work_that_looks_at_a_hung_disk_takes_no_thread_of_other_work(env: HungEnv) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        hung, _ = await partitions_of(broker)
        env.hung_reads = hung.log.directory
        sweeps = [asyncio.create_task(broker.leases.sweep()) for _ in range(40)]
        await until(lambda: env.waiting == 4)  # as many as the directory has threads
        await asyncio.to_thread(lambda: None)
        for sweep in sweeps:
            sweep.cancel()
        env.released.set()


async def test_a_view_on_a_hung_disk_delays_no_view_of_another(env: HungEnv) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        hung, good = await partitions_of(broker)
        env.hung_reads = hung.log.directory
        topic = broker.topics.get("t")
        assert topic is not None
        topic.config = replace(topic.config, varve_view="compacted")
        opening = asyncio.create_task(broker.views.open_all([topic]))
        await until(lambda: env.waiting > 0)
        view = broker.views.partition(good.partition)
        assert view is not None
        await until(lambda: not view.is_opening)
        assert not opening.done()
        env.released.set()
        await opening


async def test_a_view_and_a_lease_on_a_frozen_disk_hold_no_client_of_another(env: HungEnv) -> None:
    keys = {"cleanup.policy": "compact", "varve.view": "compacted"}
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        topic = await broker.metadata_service.create("v", 2, keys)
        by_disk = {part.log.log_directory.path: part for part in topic.partitions.values()}
        frozen, good = by_disk[ONE], by_disk[TWO]
        for partition in (frozen, good):
            append(partition, env.wall_ms())
            partition.roll(env.wall_ms())
            await partition.flush()
        env.freeze(ONE)
        request = LeaseRequest("v", (frozen.partition.partition,), Purpose.COMPACT, False, 60)
        with pytest.raises(LeaseError, match="has not finished"):
            await broker.leases.open(request)
        with pytest.raises(ViewError, match="has not finished"):
            await broker.view_scheduler.compact(frozen.partition)
        assert env.on_loop == []
        assert await produced(broker, good, 0) == (ErrorCode.NONE, 1)
        env.released.set()


async def test_a_stalled_change_creates_no_folder_of_a_topic_that_was_deleted_meanwhile(
    env: HungEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        slow, _ = await partitions_of(broker)
        work, started = DirectoryWriter._work, threading.Event()

        def start_late(writer: DirectoryWriter) -> None:
            if writer._directory == ONE:
                started.wait(20)
            work(writer)

        monkeypatch.setattr(DirectoryWriter, "_work", start_late)
        broker.directory_threads._writers.pop(ONE, None)
        env.frozen = ONE  # the event loop does not wait
        folder = f"{slow.log.directory}/varve.leases"
        with pytest.raises(ChangePendingError) as stalled:
            slow.make_folder(partial(env.mkdir, folder))
        env.frozen = "/none"
        await broker.metadata_service.delete("t")
        started.set()
        with pytest.raises(LogClosedError):
            await stalled.value.pending
        assert not env.exists(slow.log.directory)


async def test_reads_of_two_places_in_a_cold_segment_do_not_wait_for_each_other(
    env: HungEnv,
) -> None:
    async with broker_on_two_disks(env) as broker, asyncio.timeout(20):
        partition, _ = await partitions_of(broker)
        loads = IndexLoads(broker.directory_threads)
        segment, both = partition.log.segments.active, threading.Barrier(2, timeout=10)
        pages = [IndexNotReadyError(segment, lambda _: both.wait(), place) for place in (0, 4096)]
        assert await asyncio.gather(*(loads.load([page]) for page in pages)) == [True, True]
        assert not both.broken
