"""Key indexes that the broker writes from what clients produce."""

import asyncio
import errno
import gc
import random
from collections.abc import Hashable
from dataclasses import replace
from functools import partial

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.cleaning import key_recorder
from broker.cleaning.key_recorder import KeyRecorder
from broker.topics.partition import Partition
from cleaner.engine.clean import run_clean
from cleaner.engine.selective.appended_keys import PENDING_BYTES_MIN
from cleaner.key_memory import KeyMemory
from cleaner.planning.grouping import plan_job
from cleaner.stats import PoolStats
from config.settings import CleanerSettings
from storage.format.batch import Record, build_batch, read_header
from storage.format.compression import LZ4
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.cleaner.cleaning import Recorder
from tests.support.protocol.raw_client import RawClient
from tests.support.storage.memory_env import MemoryEnv

STATE = TopicPartition("state", 0)
TOPICS = {"state": {"keys": {"cleanup.policy": "compact"}}}
VALUE = random.Random(1).randbytes(400)  # large enough for key indexes, also compressed
SETTINGS = CleanerSettings(strategy="generational", dedupe_buffer_bytes=1 << 20)


class Recorded:
    """A broker whose partition is recorded, and how often its cleaner was woken."""

    def __init__(self, env: MemoryEnv, broker: Broker, settings: CleanerSettings) -> None:
        self.env, self.broker = env, broker
        self.woken = 0
        self.value = VALUE
        partition = broker.topics.partition(STATE)
        assert partition is not None
        self.partition: Partition = partition
        hash_key = broker.manager.metadata.hash_key
        self.stats = PoolStats()
        self.recorder = KeyRecorder(
            env,
            broker.directory_threads,
            hash_key=lambda: hash_key,
            settings=lambda: settings,
            stats=self.stats,
            creator=lambda _: None,
        )
        wake = partial(setattr, self, "woken", 1)
        partition.log.roller.on_roll = partial(self.recorder.rolled, partition, wake)

    async def begin(self) -> None:
        """Load the kernels, then begin."""
        self.recorder.begin(self.partition)
        await self.recorder.stop()
        self.recorder.begin(self.partition)

    async def produce(self, *keys: bytes, codec: int = 0) -> None:
        now_ms = self.env.wall_ms()
        records = [Record(at, now_ms, key, self.value) for at, key in enumerate(keys)]
        batch = bytes(build_batch(records, codec=codec))
        with RawClient(self.broker.addresses[0].port) as client:
            answer = await asyncio.to_thread(client.produce, "state", batch)
        assert answer.error_code == 0

    async def roll(self) -> None:
        self.partition.log.roll(self.env.wall_ms())
        await self.recorder.stop()

    def indexes(self) -> list[str]:
        return [
            name
            for name in self.env.listdir(self.partition.log.directory)
            if name.endswith(".keys")
        ]

    def clean(self) -> tuple[int, list[int]]:
        """Clean selectively; the bytes read of segments, and those of each segment."""
        facts = self.broker.cleaning.facts_of(STATE)
        assert facts is not None
        verdict = self.broker.pool.scanner.assess(facts)
        assert verdict is not None
        inputs = self.broker.cleaning.job_inputs(STATE, 0, facts.log_end_offset)
        job = plan_job(facts, verdict, inputs, SETTINGS, job_id="r1", now_ms=self.env.wall_ms())
        assert job is not None
        report = run_clean(self.env, replace(job, slack=9.0), Recorder())
        assert report.resolved_end == facts.segments[-1].base_offset
        return report.bytes_read, [segment.size_bytes for segment in facts.segments[:-1]]


async def test_a_segment_that_clients_filled_is_not_read_for_its_keys() -> None:
    env = MemoryEnv(seed=3)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        world = Recorded(env, broker, SETTINGS)
        await world.begin()
        await world.produce(b"a", b"b", b"c")
        await world.produce(b"a", b"d", codec=LZ4)
        await world.produce(b"a")
        await world.roll()
        assert len(world.indexes()) == 1
        assert world.woken == 1
        assert world.stats.key_index_bytes > 0
        assert world.recorder.memory_bytes == 0
        assert world.clean()[0] == 0


async def test_a_segment_that_was_not_recorded_from_its_beginning_is_read() -> None:
    env = MemoryEnv(seed=4)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        world = Recorded(env, broker, SETTINGS)
        await world.produce(b"a", b"b")
        await world.begin()
        await world.produce(b"a")
        await world.roll()
        assert world.indexes() == []
        assert world.woken == 1
        await world.produce(b"a", b"x")
        await world.roll()
        read, sizes = world.clean()
        assert read == sizes[0]


async def test_the_keys_of_a_topic_use_the_share_of_the_client_that_created_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    charged: set[Hashable] = set()

    def charge(_memory: KeyMemory, client: Hashable, _more_bytes: int) -> bool:
        charged.add(client)
        return True

    monkeypatch.setattr(KeyMemory, "charge", charge)
    async with broker_in_memory(MemoryEnv(seed=9), topics=TOPICS) as broker:
        keys = {"cleanup.policy": "compact"}
        topic = await broker.metadata_service.create("of-eve", 1, keys, creator="eve")
        recorder = broker.key_recorder
        monkeypatch.setattr(recorder, "_settings", lambda: SETTINGS)
        recorder.begin(topic.partitions[0])
        await recorder.stop()  # the kernels are loaded
        for each in (topic.partitions[0], broker.topics.existing("state").partitions[0]):
            recorder.begin(each)
            batch = memoryview(build_batch([Record(0, 0, b"k", VALUE)]))
            header = read_header(batch)
            each.record_keys(batch, header, each.append(batch, header, 0), None)
    assert charged == {"eve", None}


async def test_a_deleted_topic_gives_the_memory_for_its_keys_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with broker_in_memory(MemoryEnv(seed=9), topics=TOPICS) as broker:
        recorder = broker.key_recorder
        monkeypatch.setattr(recorder, "_settings", lambda: SETTINGS)
        keys = {"cleanup.policy": "compact"}
        topic = await broker.metadata_service.create("of-eve", 1, keys, creator="eve")
        recorder.begin(topic.partitions[0])
        await recorder.stop()  # the kernels are loaded
        recorder.begin(topic.partitions[0])
        batch = memoryview(build_batch([Record(0, 0, b"k", VALUE)]))
        header = read_header(batch)
        info = topic.partitions[0].append(batch, header, 0)
        topic.partitions[0].record_keys(batch, header, info, None)
        assert recorder.memory_bytes > 0
        await broker.metadata_service.delete(topic.name)
        gc.collect()
        assert recorder.memory_bytes == 0
        assert not recorder._memory._used_by


async def test_kernels_that_cannot_be_loaded_disturb_no_append(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(key_recorder, "_load_kernels", fail)
    env = MemoryEnv(seed=8)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        world = Recorded(env, broker, SETTINGS)
        with capture_logs() as lines:
            await world.begin()
        assert [line["event"] for line in lines] == ["key kernels not loaded"]
        assert world.partition.keys is None
        await world.produce(b"a", codec=LZ4)
        await world.roll()
        assert (world.indexes(), world.woken) == ([], 1)


async def test_a_segment_that_retention_removed_first_gets_no_index() -> None:
    env = MemoryEnv(seed=7)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        world = Recorded(env, broker, SETTINGS)
        await world.begin()
        await world.produce(b"a")
        log, keys = world.partition.log, world.partition.keys
        assert keys is not None
        log.roller.on_roll = lambda *_: None  # the index is written later, below
        log.roll(env.wall_ms())
        log.delete_records(log.log_end_offset)
        log.retention.expire(env.wall_ms())
        assert len(log.segments.closed) == 0
        assert key_recorder.prepare_index(env, log, keys, SETTINGS) is None


async def test_a_segment_that_was_truncated_is_read() -> None:
    env = MemoryEnv(seed=7)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        world = Recorded(env, broker, SETTINGS)
        await world.begin()
        await world.produce(b"a", b"b")
        await world.produce(b"c")
        log, keys = world.partition.log, world.partition.keys
        assert keys is not None
        log.truncate_to(2, now_ms=env.wall_ms())
        batch = build_batch([Record(0, env.wall_ms(), b"x", VALUE)])
        log.append(batch, read_header(batch), now_ms=env.wall_ms())  # past the recorder
        assert (log.log_end_offset, log.segment_facts()[-1].size_bytes) == (
            keys.next_offset,
            keys.listed_bytes + len(keys._pending),
        )
        await world.roll()
        assert world.indexes() == []


async def test_a_segment_of_small_records_gets_no_index() -> None:
    env = MemoryEnv(seed=5)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        world = Recorded(env, broker, SETTINGS)
        world.value = VALUE[:200]
        await world.begin()
        for _ in range(PENDING_BYTES_MIN // 200):
            await world.produce(b"a", b"b")
        assert world.recorder.memory_bytes == 0
        await world.roll()
        assert (world.indexes(), world.woken) == ([], 1)
        world.value = VALUE
        await world.produce(b"a", b"b")
        await world.roll()
        assert len(world.indexes()) == 1


async def test_a_topic_with_another_strategy_is_not_recorded() -> None:
    env = MemoryEnv(seed=5)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        world = Recorded(env, broker, SETTINGS.model_copy(update={"strategy": "dirty-ratio"}))
        await world.begin()
        assert world.partition.keys is None
        await world.produce(b"a")
        await world.roll()
        assert (world.indexes(), world.woken) == ([], 1)


async def test_an_offloaded_topic_is_not_recorded() -> None:
    topics = {"state": {"keys": TOPICS["state"]["keys"] | {"varve.cleaner.engine": "spark"}}}
    env = MemoryEnv(seed=5)
    async with broker_in_memory(env, topics=topics) as broker:
        world = Recorded(env, broker, SETTINGS)
        await world.begin()
        assert world.partition.keys is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE])
async def test_an_index_that_cannot_be_written_costs_a_reading_and_no_more(code: int) -> None:
    env = MemoryEnv(seed=6)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        world = Recorded(env, broker, SETTINGS)
        await world.begin()
        await world.produce(b"a", b"b")
        fault = env.fail_on(lambda operation, path: operation == "open" and ".keys" in path, code)
        await world.roll()
        fault.remove()
        assert (world.indexes(), world.woken) == ([], 1)
        assert broker.manager.table.directories[0].is_online
        read, sizes = world.clean()
        assert read == sizes[0]
