"""Reading: what a fetch gets, at every offset, size and end; and what it costs."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from storage.errors import OffsetOutOfRangeError
from storage.format.batch import Record, build_batch, read_header
from storage.format.index import INTERVAL_BYTES_MAX
from storage.log.log import Log
from tests.support.storage.logs import (
    NOW_MS,
    SMALL,
    append,
    append_batch,
    batch_of,
    fill,
    headers_of,
    offsets_in,
    open_log,
    value_at,
)
from tests.support.storage.memory_env import MemoryEnv

BATCH_BYTES = len(batch_of(value_at(0)))


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=2)


def test_any_offset_inside_a_batch_gives_the_whole_batch(env: MemoryEnv) -> None:
    log = open_log(env)
    append(log, b"a", b"b", b"c")
    append(log, b"d", b"e")
    for offset, base in ((0, 0), (1, 0), (2, 0), (3, 3), (4, 3)):
        data = log.reader.read(offset, 1000, end_offset=5).read()
        assert headers_of(data)[0].base_offset == base


def test_at_the_end_there_is_nothing_yet(env: MemoryEnv) -> None:
    log = open_log(env)
    assert log.reader.read(0, 1000, end_offset=0).length == 0
    fill(log, 3)
    assert log.reader.read(3, 1000, end_offset=3).length == 0
    assert log.reader.read(2, 1000, end_offset=2).length == 0


@pytest.mark.parametrize("offset", [-1, 1, 6, 100])
def test_outside_the_log_is_an_error(env: MemoryEnv, offset: int) -> None:
    log = open_log(env)
    fill(log, 5)
    log.delete_records(2)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        log.reader.read(offset, 1000, end_offset=5)
    assert (caught.value.log_start_offset, caught.value.log_end_offset) == (2, 5)


def test_the_end_is_exclusive(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20))
    fill(log, 10)
    for end in range(11):
        data = log.reader.read(0, 1 << 20, end_offset=end).read()
        assert [header.base_offset for header in headers_of(data)] == list(range(end))


def test_a_batch_across_the_end_is_held_back(env: MemoryEnv) -> None:
    log = open_log(env)
    append(log, b"a")
    append(log, b"b", b"c", b"d")
    assert len(log.reader.read(0, 1000, end_offset=2).read()) == len(batch_of(b"a"))
    assert log.reader.read(1, 1000, end_offset=3).length == 0


def test_the_first_batch_is_given_whole_however_large(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 3)
    assert log.reader.read(0, 1, end_offset=3).length == BATCH_BYTES
    assert log.reader.read(0, 1, end_offset=3, at_least_one=False).length == 0


@pytest.mark.parametrize("interval", [0, 300, 1 << 20])
def test_only_whole_batches_are_given_up_to_the_limit(env: MemoryEnv, interval: int) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20, index_interval_bytes=interval))
    fill(log, 20)
    for limit in (BATCH_BYTES, 2 * BATCH_BYTES - 1, 2 * BATCH_BYTES, 7 * BATCH_BYTES + 5):
        for offset in (0, 3, 19):
            length = log.reader.read(offset, limit, end_offset=20).length
            assert 0 < length <= limit
            assert length % BATCH_BYTES == 0
            # The index may be too coarse for the last few, but never by more than its interval.
            assert length > min(limit, (20 - offset) * BATCH_BYTES) - BATCH_BYTES - interval


def test_without_any_index_a_long_range_may_end_inside_a_batch(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.log.log_state.INTERVAL_BYTES_MAX", 1 << 30)
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20, index_interval_bytes=1 << 30))
    fill(log, 1000)
    fetch_slice = log.reader.read(0, 100_000, end_offset=1000)
    assert fetch_slice.length == 100_000
    assert len(headers_of(fetch_slice.read())) == 100_000 // BATCH_BYTES


@pytest.mark.parametrize("interval", [1 << 20, 2**31 - 1])
def test_an_index_has_an_entry_at_least_every_32_kib(env: MemoryEnv, interval: int) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20, index_interval_bytes=interval))
    fill(log, 1000)
    positions = (0, *log.segments.active.indexes.offsets.positions, log.segments.size_bytes)
    gaps = [after - before for before, after in pairwise(positions)]
    assert max(gaps) <= INTERVAL_BYTES_MAX + BATCH_BYTES
    assert log.config.index_interval_bytes == interval  # as DescribeConfigs answers


def test_a_read_ends_with_its_segment_and_goes_on_in_the_next(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 20)
    assert len(log.segments) > 2
    assert offsets_in(log) == list(range(20))
    first_end = log.segment_facts()[0].next_base_offset
    data = log.reader.read(0, 1 << 20, end_offset=20).read()
    assert headers_of(data)[-1].next_offset == first_end


def test_in_a_hole_the_next_batch_is_given(env: MemoryEnv) -> None:
    log = open_log(env)
    append(log, b"a")
    append_batch(log, build_batch([Record(0, NOW_MS, b"k", b"b")], last_offset_delta=9))
    log._state.log_end_offset = log._state.high_watermark = 30  # offsets that compaction emptied
    append(log, b"c")
    assert offsets_in(log) == [0, 1, 30]
    for offset in (11, 20, 30):
        data = log.reader.read(offset, 1000, end_offset=31).read()
        assert headers_of(data)[0].base_offset == 30


def test_a_hole_at_the_end_of_a_segment_leads_into_the_next(env: MemoryEnv) -> None:
    log = open_log(env)
    append(log, b"a")
    log._state.log_end_offset = log._state.high_watermark = 10
    log.roll(NOW_MS)
    append(log, b"b")
    assert [facts.base_offset for facts in log.segment_facts()] == [0, 10]
    for offset in (1, 5, 9, 10):
        data = log.reader.read(offset, 1000, end_offset=11).read()
        assert headers_of(data)[0].base_offset == 10
    assert log.reader.read(5, 1000, end_offset=10).length == 0


def test_a_slice_outlives_its_segment(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 20)
    fetch_slice = log.reader.read(0, 1 << 20, end_offset=20)
    before = fetch_slice.read()
    log.truncate_to(0, now_ms=NOW_MS)
    log.retention.purge_deleted(NOW_MS + 10**9)
    other = log.reader.read(0, 1 << 20, end_offset=0)
    assert other.length == 0
    log2 = open_log(MemoryEnv(), folder="/elsewhere")
    fill(log2, 20)
    log_slice = log2.reader.read(10, 1 << 20, end_offset=20)
    expected = log_slice.read()
    log2.retention.expire(NOW_MS + 10**12)
    log2.retention.purge_deleted(NOW_MS + 10**13)
    assert log_slice.read() == expected
    assert len(before) == fetch_slice.length


class CountedEnv(MemoryEnv):
    """Counts operations that do not change the disk, too."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.reads: Counter[str] = Counter()

    def _read(self, operation: str, path: str) -> None:
        self.reads[operation] += 1
        super()._read(operation, path)


def test_a_reader_at_the_end_never_searches() -> None:
    env = CountedEnv(1)
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20, index_interval_bytes=4096))
    fill(log, 100)
    assert log.reader.read(50, 1 << 20, end_offset=100).length
    assert env.reads["pread"] > 0
    env.reads.clear()
    for _ in range(50):
        offset = log.log_end_offset
        fill(log, 2)
        assert log.reader.read(offset, 1 << 20, end_offset=offset + 2).length == 2 * BATCH_BYTES
    assert env.reads["pread"] == 0


def test_a_sequential_reader_reads_one_header_per_slice() -> None:
    env = CountedEnv(1)
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20, index_interval_bytes=1000))
    fill(log, 1000)
    env.reads.clear()
    offset = slices = 0
    while offset < 1000:
        fetch_slice = log.reader.read(offset, 10_000, end_offset=1000)
        offset += fetch_slice.length // BATCH_BYTES
        slices += 1
    assert offset == 1000
    assert env.reads["pread"] <= slices


def model_read(
    batches: list[tuple[int, int, int]], offset: int, end_offset: int
) -> list[tuple[int, int, int]]:
    """The batches a read has to begin with: (base, next, segment)."""
    results = [batch for batch in batches if batch[1] > offset and batch[1] <= end_offset]
    return [item for item in results if item[2] == results[0][2]]


@pytest.mark.parametrize("seed", range(12))
def test_every_read_agrees_with_a_list_of_batches(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    config = replace(
        SMALL,
        segment_bytes=rng.choice((400, 1500, 1 << 20)),
        index_interval_bytes=rng.choice((0, 200, 1000, 1 << 20)),
    )
    env = MemoryEnv(seed)
    log: Log = open_log(env, config)
    batches: list[tuple[int, int, int]] = []
    for _ in range(rng.randrange(1, 80)):
        if rng.random() < 0.2:
            log._state.log_end_offset += rng.randrange(20)
        if rng.random() < 0.1:
            log.roll(NOW_MS)
        values = [b"v" * rng.randrange(120) for _ in range(rng.randrange(1, 5))]
        info = append(log, *values)
        segment = log.segment_facts()[-1].base_offset
        batches.append((info.first_offset, info.last_offset + 1, segment))
    if rng.random() < 0.5:
        log.close()
        log = open_log(env, config, was_clean=True, recovery_point=log.log_end_offset)
    ends = [batch[1] for batch in batches]
    for _ in range(300):
        offset = rng.randrange(log.log_end_offset + 1)
        end_offset = rng.choice(ends)
        limit = rng.choice((1, 150, 700, 1 << 20))
        data = log.reader.read(offset, limit, end_offset=end_offset).read()
        headers = headers_of(data)
        expected = model_read(batches, offset, end_offset)
        actual = [(header.base_offset, header.next_offset) for header in headers]
        assert actual == [item[:2] for item in expected[: len(actual)]]
        assert bool(actual) == bool(expected)
        assert len(data) <= max(limit, read_header(data).size_bytes if data else 0)
