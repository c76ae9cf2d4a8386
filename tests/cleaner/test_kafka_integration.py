"""What Kafka's integration tests of its cleaner show, shown of ours: real workers, a real disk.

One partition for each codec, side by side. Only the wall clock is moved by hand.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cleaner import states as s
from cleaner.scheduler.cleaner_pool import CleanerPool
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.env import RealEnv
from storage.format.batch import Record, build_batch, decode_records, read_header, walk_headers
from storage.format.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD
from storage.format.filenames import LOG, file_name
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from tests.support.cleaner.scheduler.log_host import LogHost

pytestmark = pytest.mark.usefixtures("forked_workers")

CODECS = [NONE, GZIP, SNAPPY, LZ4, ZSTD]
CONFIG = TopicConfig(
    cleanup_policy=("compact",),
    segment_bytes=32 * 1024,
    min_cleanable_dirty_ratio=0.01,
    max_message_bytes=256 * 1024,
    retention_ms=-1,
    file_delete_delay_ms=0,
)
SETTINGS = CleanerSettings(
    workers=2, backoff_ms=50, retry_backoff_ms=60_000, retry_backoff_max_ms=60_000, nice=0
)
KEYS = 40
LAG_MS = 60 * 60 * 1000

State = dict[bytes, tuple[int, bytes]]


class MovedClock(RealEnv):
    """The real machine, at another time of day."""

    moved_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.moved_ms


class Partitions:
    """A log for each codec, and what was written to each last."""

    def __init__(self, folder: Path, config: TopicConfig, settings: CleanerSettings) -> None:
        self.env = MovedClock()
        self.manager = LogManager(self.env, [str(folder)])
        self.manager.open(lambda topic: config)
        self.logs: dict[int, Log] = {
            codec: self.manager.create(TopicPartition("t", codec), bytes(range(16)), config)
            for codec in CODECS
        }
        self.latest: dict[int, State] = {codec: {} for codec in CODECS}
        self.host = LogHost(self.env, self.manager)
        self.pool = CleanerPool(self.host, settings, self.env)

    def write(self, rounds: int, *, size: int = 100) -> None:
        """Every key of every partition, `rounds` times; each partition is rolled at the end."""
        for codec, log in self.logs.items():
            for _ in range(rounds):
                for first in range(0, KEYS, 10):
                    keys = [b"key-%03d" % n for n in range(first, first + 10)]
                    self.append(codec, keys, size)
            log.roll(self.env.wall_ms())

    def append(self, codec: int, keys: Iterable[bytes], size: int) -> None:
        log, now_ms = self.logs[codec], self.env.wall_ms()
        base = log.log_end_offset
        records = [
            Record(at, now_ms, key, b"%d of " % (base + at) + bytes(size))
            for at, key in enumerate(keys)
        ]
        batch = build_batch(records, codec=codec)
        log.append(batch, read_header(batch), now_ms=now_ms)
        for record in records:
            assert record.key is not None
            assert record.value is not None
            self.latest[codec][record.key] = (base + record.offset, record.value)

    def records(self, codec: int) -> list[Record]:
        log = self.logs[codec]
        records: list[Record] = []
        offset = log.log_start_offset
        while offset < log.log_end_offset:
            data = log.reader.read(offset, 1 << 20, end_offset=log.log_end_offset).read()
            if not data:
                break
            for position, header in walk_headers(data):
                assert header.codec == codec
                records += decode_records(data, header, position)
                offset = header.next_offset
        return records

    def state(self, codec: int) -> State:
        return {
            record.key: (record.offset, record.value)
            for record in self.records(codec)
            if record.key is not None and record.value is not None
        }

    async def cleaned(self, offsets: dict[int, int] | None = None) -> None:
        """Wait until every partition is clean up to there, or up to its end."""
        async with asyncio.timeout(90):
            for codec, log in self.logs.items():
                offset = log.log_end_offset if offsets is None else offsets[codec]
                await self.pool.wait_cleaned(log.partition, offset)

    async def looked(self) -> None:
        """Wait for two scans of all partitions: every candidate has been started."""
        seen = self.pool.stats.scans
        self.pool.wake()
        await until(lambda: self.pool.stats.scans >= seen + 2)

    def sizes(self) -> dict[int, int]:
        return {codec: log.segments.size_bytes for codec, log in self.logs.items()}

    def ends(self) -> dict[int, int]:
        return {codec: log.log_end_offset for codec, log in self.logs.items()}


async def until(holds: Callable[[], object]) -> None:
    """Workers are processes: what they do is looked for now and then."""
    async with asyncio.timeout(90):
        while not holds():  # noqa: ASYNC110 - another process is what is waited for
            await asyncio.sleep(0.005)


def spoil(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(70)  # among the records of the first batch, after its header
        file.write(b"garbage")


@asynccontextmanager
async def partitions(
    folder: Path, config: TopicConfig = CONFIG, settings: CleanerSettings = SETTINGS
) -> AsyncIterator[Partitions]:
    """Logs and a started pool; both are closed in the end."""
    made = Partitions(folder, config, settings)
    await made.pool.start()
    try:
        yield made
    finally:
        await made.pool.stop()
        made.manager.close()


async def test_in_every_codec_the_latest_values_stay_and_a_large_message_too(
    tmp_path: Path,
) -> None:
    async with partitions(tmp_path) as many:
        for codec in CODECS:
            many.append(codec, [b"large"], 200_000)
        many.write(10)
        before = many.sizes()
        await many.cleaned()
        for codec in CODECS:
            assert many.state(codec) == many.latest[codec]
            assert len(many.records(codec)) == KEYS + 1
            assert many.logs[codec].segments.size_bytes < before[codec]
        many.write(5)  # a second round
        await many.cleaned()
        assert all(many.state(codec) == many.latest[codec] for codec in CODECS)
        assert many.host.failures == []
        # A partition that is removed takes its line of the checkpoint along.
        gone = TopicPartition("t", ZSTD)
        assert gone in many.manager.table.cleaner_offsets
        many.manager.delete_all([gone])
        del many.logs[ZSTD]
        assert gone not in many.manager.table.cleaner_offsets


async def test_in_every_codec_compact_and_delete_compacts_first_and_expires_later(
    tmp_path: Path,
) -> None:
    both = replace(CONFIG, cleanup_policy=("compact", "delete"), retention_ms=LAG_MS)
    async with partitions(tmp_path, both) as many:
        for _ in range(2):  # and it works again afterwards
            many.write(6)
            await many.cleaned()
            assert all(many.state(codec) == many.latest[codec] for codec in CODECS)
            many.env.moved_ms += LAG_MS + 60_000
            for log in many.logs.values():
                log.retention.expire(many.env.wall_ms())
                assert log.log_start_offset == log.log_end_offset
                assert len(log.segments) == 1
            many.latest = {codec: {} for codec in CODECS}
        assert many.host.failures == []


async def test_in_every_codec_nothing_is_cleaned_before_the_minimum_lag(tmp_path: Path) -> None:
    lagging = replace(CONFIG, min_compaction_lag_ms=LAG_MS)
    async with partitions(tmp_path, lagging) as many:
        many.write(6)
        first_ends, first_sizes = many.ends(), many.sizes()
        await many.looked()
        assert many.pool.stats.cleans == 0
        assert many.sizes() == first_sizes
        many.env.moved_ms += LAG_MS + 60_000
        many.write(6)
        all_sizes = many.sizes()
        await many.cleaned(first_ends)
        await many.looked()
        for codec in CODECS:
            below = [r for r in many.records(codec) if r.offset < first_ends[codec]]
            assert len(below) == KEYS, "the first block is compacted"
            young = [r for r in many.records(codec) if r.offset >= first_ends[codec]]
            assert len(young) == 6 * KEYS, "the second is as it was written"
            assert many.state(codec) == many.latest[codec]
            assert many.logs[codec].segments.size_bytes < all_sizes[codec]


async def test_with_a_ratio_of_one_only_the_maximum_lag_cleans_one_block_after_the_other(
    tmp_path: Path,
) -> None:
    late = replace(CONFIG, min_cleanable_dirty_ratio=1.0, max_compaction_lag_ms=LAG_MS)
    async with partitions(tmp_path, late) as many:
        many.write(6)
        first_ends, first_sizes = many.ends(), many.sizes()
        await many.looked()
        assert many.sizes() == first_sizes, "not before the lag"
        many.env.moved_ms += LAG_MS + 60_000
        await many.cleaned(first_ends)
        for codec in CODECS:
            assert len(many.records(codec)) == KEYS
        many.write(6)
        cleans, sizes = many.pool.stats.cleans, many.sizes()
        await many.looked()
        assert (many.pool.stats.cleans, many.sizes()) == (cleans, sizes), "not before another"
        many.env.moved_ms += LAG_MS + 60_000
        await many.cleaned()
        assert all(many.state(codec) == many.latest[codec] for codec in CODECS)


async def test_garbage_in_some_partitions_is_told_of_and_harms_no_other(tmp_path: Path) -> None:
    async with partitions(tmp_path) as many:
        broken = [LZ4, ZSTD]
        for codec in CODECS:
            many.append(codec, [b"first"], 1000)
        for codec in broken:
            log = many.logs[codec]
            log.flush()
            spoil(Path(log.directory, file_name(0, LOG)))
        many.write(10)
        sound = {codec: log for codec, log in many.logs.items() if codec not in broken}
        async with asyncio.timeout(90):
            for log in sound.values():
                await many.pool.wait_cleaned(log.partition, log.log_end_offset)
        await until(lambda: len(many.pool.in_progress.quarantines()) == 2)
        named = {partition.partition for partition in many.pool.in_progress.quarantines()}
        assert named == set(broken)
        assert {partition.partition for partition, _ in many.host.damages} == set(broken)
        for codec, log in sound.items():
            assert many.state(codec) == many.latest[codec]
            assert isinstance(many.pool.in_progress.state(log.partition), s.Idle)
        many.manager.delete_all([TopicPartition("t", ZSTD)])
        await many.looked()
        assert [partition.partition for partition in many.pool.in_progress.quarantines()] == [LZ4]
