"""Real worker processes clean a real log on a real disk, through the pool, under disturbance."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cleaner import states as s
from cleaner.engine.selective import index_size
from cleaner.scheduler.cleaner_pool import CleanerPool
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.env import RealEnv
from storage.format.batch import Record, build_batch, decode_records, read_header, walk_headers
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from tests.support.cleaner.scheduler.log_host import LogHost

pytestmark = pytest.mark.usefixtures("forked_workers")

T0, T1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
CONFIG = TopicConfig(
    cleanup_policy=("compact",), segment_bytes=64 * 1024, min_cleanable_dirty_ratio=0.01
)
SETTINGS = CleanerSettings(
    workers=1, backoff_ms=50, retry_backoff_ms=100, retry_backoff_max_ms=400, nice=0
)
KEYS = 50


class Shop:
    """A log, what was written to it, and the pool that cleans it."""

    def __init__(self, folder: Path, settings: CleanerSettings) -> None:
        self.env = RealEnv()
        self.manager = LogManager(self.env, [str(folder)])
        self.manager.open(lambda topic: CONFIG)
        self.log: Log = self.manager.create(T0, bytes(range(16)), CONFIG)
        self.host = LogHost(self.env, self.manager)
        self.pool = CleanerPool(self.host, settings, self.env)
        self.latest: dict[bytes, tuple[int, bytes | None]] = {}
        self.rng = random.Random(7)

    def produce(self, batches: int, codec: int = 0, *, random_bytes: int = 0) -> None:
        """Append batches of ten records; `random_bytes` of each value cannot be compressed."""
        now_ms = self.env.wall_ms()
        for _ in range(batches):
            base = self.log.log_end_offset
            records = []
            for offset in range(base, base + 10):
                key = b"key-%03d" % self.rng.randrange(KEYS)
                value = b"%d-" % offset + self.rng.randbytes(random_bytes) + bytes(100)
                records.append(Record(offset, now_ms, key, value, ()))
                self.latest[key] = (offset, value)
            batch = build_batch(records, base_offset=base, codec=codec)
            self.log.append(batch, read_header(batch), now_ms=now_ms)

    def roll(self) -> int:
        self.log.roll(self.env.wall_ms())
        return self.log.log_end_offset

    def records(self) -> list[Record]:
        records: list[Record] = []
        offset = self.log.log_start_offset
        while offset < self.log.log_end_offset:
            data = self.log.reader.read(offset, 1 << 20, end_offset=self.log.log_end_offset).read()
            assert data
            for position, header in walk_headers(data):
                records += decode_records(data, header, position)
                offset = header.next_offset
        return records

    def check(self, *, compacted: bool = True) -> None:
        """Every key's last value is there; if all is compacted, nothing else is."""
        records = self.records()
        last = {record.key: (record.offset, record.value) for record in records}
        assert last == self.latest
        assert [r.offset for r in records] == sorted({r.offset for r in records})
        if compacted:
            assert len(records) == len(self.latest)

    def leftovers(self) -> list[str]:
        return [n for n in os.listdir(self.log.directory) if "cleaned" in n or "swap" in n]

    async def until(self, holds: Callable[[], object], seconds: float = 90) -> None:
        async with asyncio.timeout(seconds):
            while not holds():  # noqa: ASYNC110 - another process is what is waited for
                await asyncio.sleep(0.005)

    async def cleaned(self, offset: int) -> None:
        async with asyncio.timeout(90):
            await self.pool.wait_cleaned(T0, offset)


@asynccontextmanager
async def open_shop(folder: Path, settings: CleanerSettings = SETTINGS) -> AsyncIterator[Shop]:
    shop = Shop(folder, settings)
    await shop.pool.start()
    try:
        yield shop
    finally:
        await shop.pool.stop()
        shop.manager.close()
    assert shop.leftovers() == []


async def test_a_log_is_cleaned_by_a_worker_and_reads_back(tmp_path: Path) -> None:
    async with open_shop(tmp_path) as shop:
        shop.produce(300)
        size_before = shop.log.segments.size_bytes
        await shop.cleaned(shop.roll())
        shop.check()
        assert shop.log.segments.size_bytes < size_before / 10
        assert shop.host.published == sum(len(job.groups) for job, _ in shop.host.done)
        stats = shop.pool.stats
        assert stats.cleans == len(shop.host.done) >= 1
        assert stats.read_bytes >= size_before
        assert stats.written_bytes > 0


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
async def test_round_after_round_leaves_one_record_a_key(tmp_path: Path, codec: int) -> None:
    async with open_shop(tmp_path) as shop:
        for _ in range(3):
            shop.produce(60, codec)
            await shop.cleaned(shop.roll())
            shop.check()
        assert shop.host.failures == []


async def test_a_selective_clean_rewrites_only_the_segments_with_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS.model_copy(update={"strategy": "generational"})
    module = sys.modules[__name__]
    async with open_shop(tmp_path, settings) as shop:
        monkeypatch.setattr(index_size, "INDEXED_BYTES", 0)
        monkeypatch.setattr(module, "KEYS", 3_000)
        shop.produce(600)
        await shop.cleaned(shop.roll())  # the first clean is one of the whole log
        clean_bytes = shop.log.segments.size_bytes
        cold = {segment.base_offset for segment in shop.log.segment_facts()[:-1]}
        monkeypatch.setattr(module, "KEYS", 3)
        shop.produce(300)
        end = shop.roll()
        await shop.until(lambda: shop.host.done[-1][1].resolved_end == end)
        shop.check(compacted=False)
        assert shop.log.segments.size_bytes < 1.6 * clean_bytes
        assert cold <= {segment.base_offset for segment in shop.log.segment_facts()}
        selective = [report for _, report in shop.host.done if report.resolved_end is not None]
        assert sum(report.bytes_written for report in selective) < clean_bytes / 3
        assert shop.host.failures == []
        shop.pool.operator.request_clean(T0)  # of the whole log
        await shop.cleaned(end)
        shop.check()


async def test_the_checkpoint_and_the_cleaned_log_survive_a_reopening(tmp_path: Path) -> None:
    async with open_shop(tmp_path) as shop:
        shop.produce(100)
        end = shop.roll()
        await shop.cleaned(end)
        before = shop.records()
    manager = LogManager(RealEnv(), [str(tmp_path)])
    manager.open(lambda topic: CONFIG)
    try:
        assert manager.table.cleaner_offsets == {T0: end}
        shop.log = manager.table.logs[T0]
        assert shop.records() == before
        shop.check()
    finally:
        manager.close()


async def test_a_killed_worker_costs_one_attempt(tmp_path: Path) -> None:
    slow = SETTINGS.model_copy(update={"read_bytes_per_second": 64 * 1024})
    async with open_shop(tmp_path, slow) as shop:
        shop.produce(200)
        end = shop.roll()
        await shop.until(lambda: isinstance(shop.pool.in_progress.state(T0), s.Cleaning))
        killed = shop.pool.status().workers[0].pid
        os.kill(killed, signal.SIGKILL)
        await shop.until(lambda: shop.host.failures)
        assert isinstance(shop.pool.in_progress.state(T0), s.Quarantined)
        assert "signal 9" in shop.host.failures[0][1]
        assert shop.leftovers() == []
        shop.check(compacted=False)
        shop.pool.configure(SETTINGS)
        await shop.cleaned(end)
        shop.check()
        assert shop.pool.in_progress.quarantines() == {}
        assert [w.pid != killed for w in shop.pool.status().workers] == [True]  # its place is taken


async def test_workers_come_and_go_while_jobs_run_and_no_job_is_lost(tmp_path: Path) -> None:
    # The second worker has loaded its kernels long before the first job has read 260 KB.
    slow = SETTINGS.model_copy(update={"read_bytes_per_second": 16 * 1024})
    two = slow.model_copy(update={"workers": 2})
    async with open_shop(tmp_path, slow) as shop:
        logs = [shop.log, shop.manager.create(T1, bytes(range(16)), CONFIG)]
        for shop.log in logs:
            shop.produce(200)
            shop.roll()
        await shop.until(lambda: len(shop.pool.in_progress.states()) == 1)
        shop.pool.configure(two)
        await shop.until(lambda: len(shop.pool.in_progress.states()) == 2)
        runs = {worker.job_id for worker in shop.pool.status().workers}
        shop.pool.configure(slow)
        shop.pool.configure(SETTINGS)  # one worker, and no limit any more: both jobs go on
        async with asyncio.timeout(90):
            for log in logs:
                await shop.pool.wait_cleaned(log.partition, log.log_end_offset)
        assert runs <= {job.job_id for job, _ in shop.host.done}
        assert shop.host.failures == []
        assert shop.pool.stats.aborted == 0
        await shop.until(lambda: len(shop.pool.status().workers) == 1)


async def test_a_pause_takes_the_partition_from_a_slow_job_and_truncation_is_safe(
    tmp_path: Path,
) -> None:
    slow = SETTINGS.model_copy(update={"read_bytes_per_second": 64 * 1024})
    async with open_shop(tmp_path, slow) as shop:
        shop.produce(400)
        shop.roll()
        await shop.until(lambda: isinstance(shop.pool.in_progress.state(T0), s.Cleaning))
        async with asyncio.timeout(10), shop.pool.control.paused(T0):
            assert shop.leftovers() == []
            shop.log.truncate_to(1000, now_ms=shop.env.wall_ms())
            shop.latest = {
                record.key or b"": (record.offset, record.value) for record in shop.records()
            }
        shop.pool.configure(SETTINGS)
        shop.produce(20)
        await shop.cleaned(shop.roll())
        shop.check()


async def test_an_explicit_rate_is_kept(tmp_path: Path) -> None:
    rate = 256 * 1024
    slow = SETTINGS.model_copy(update={"read_bytes_per_second": rate})
    async with open_shop(tmp_path, slow) as shop:
        shop.produce(400)  # half a megabyte, read twice
        end = shop.roll()
        await shop.until(lambda: shop.pool.status().workers and shop.pool.status().workers[0].ready)
        began = asyncio.get_running_loop().time()
        await shop.cleaned(end)
        seconds = asyncio.get_running_loop().time() - began
        assert shop.pool.stats.read_bytes <= rate * (seconds + 1) + 1
        assert shop.pool.stats.read_wait_seconds > 0
        shop.check()


async def test_stopping_in_the_middle_of_a_job_leaves_the_log_whole(tmp_path: Path) -> None:
    slow = SETTINGS.model_copy(update={"read_bytes_per_second": 64 * 1024})
    async with open_shop(tmp_path, slow) as shop:
        shop.produce(200)
        shop.roll()
        await shop.until(lambda: isinstance(shop.pool.in_progress.state(T0), s.Cleaning))
        began = asyncio.get_running_loop().time()
        await shop.pool.stop()
        assert asyncio.get_running_loop().time() - began < 10
        assert shop.pool.in_progress.states() == {}
        shop.check(compacted=False)
