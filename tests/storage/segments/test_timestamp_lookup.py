"""Records by time: the answer is a record that is there, with its own timestamp."""

import random
from dataclasses import replace

import pytest

from storage.format.batch import Record, build_batch, read_header
from storage.log.log import Log
from storage.segments import timestamp_lookup
from storage.segments.timestamp_lookup import HEADERS_AT_ONCE, HeaderScan, TimestampScan
from tests.support.storage.empty_batch import empty_batch
from tests.support.storage.logs import SMALL, append, append_batch, batch_of, open_log, read_records
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.timestamps import first_of_largest, first_since


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=5)


def found_at(log: Log, timestamp: int) -> tuple[int, int] | None:
    offset_found = first_since(log, timestamp)
    return None if offset_found is None else (offset_found.timestamp_ms, offset_found.offset)


def largest(log: Log) -> tuple[int, int] | None:
    offset_found = first_of_largest(log)
    return None if offset_found is None else (offset_found.timestamp_ms, offset_found.offset)


def test_an_empty_log_has_no_record_of_any_time(env: MemoryEnv) -> None:
    log = open_log(env)
    assert found_at(log, 0) is None
    assert largest(log) is None


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4])
def test_the_search_goes_into_the_batch(env: MemoryEnv, codec: int) -> None:
    log = open_log(env)
    append_batch(log, batch_of(b"a", b"b", b"c", timestamps=[10, 20, 30], codec=codec))
    assert found_at(log, 5) == (10, 0)
    assert found_at(log, 11) == (20, 1)
    assert found_at(log, 30) == (30, 2)
    assert found_at(log, 31) is None
    assert largest(log) == (30, 2)


def test_a_thread_reads_the_headers_that_the_index_cannot_skip(env: MemoryEnv) -> None:
    """Behind a record of the future, the index has no entry until the others reach its time."""
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20))
    append(log, b"future", timestamp=1_000)
    for _ in range(HEADERS_AT_ONCE + 1):
        append(log, b"v", timestamp=500)
    append(log, b"later", timestamp=2_000)
    search = log.reader.search_timestamp(1_500)
    assert isinstance(next(search), HeaderScan)
    last = log.log_end_offset - 1
    assert found_at(log, 1_500) == largest(log) == (2_000, last)
    assert found_at(log, 2_001) is None


def test_a_long_run_of_headers_is_read_in_steps(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no search keeps the thread from the searches of other clients."""
    monkeypatch.setattr(timestamp_lookup, "HEADERS_PER_SCAN", 10)
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20))
    append(log, b"future", timestamp=1_000)
    for _ in range(HEADERS_AT_ONCE + 25):
        append(log, b"v", timestamp=500)
    append(log, b"later", timestamp=2_000)
    search = log.reader.search_timestamp(1_500)
    step = next(search)
    for _ in range(3):
        assert isinstance(step, HeaderScan)
        step.run()
        step = search.send(None)
    assert isinstance(step, TimestampScan)
    assert found_at(log, 1_500) == (2_000, log.log_end_offset - 1)


def test_a_thread_searches_for_the_end_of_damage_in_front_of_a_time(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20))
    append(log, b"future", timestamp=1_000)
    for _ in range(3):
        append(log, b"v", timestamp=500)
    append(log, b"later", timestamp=2_000)
    segment = log.segments.active
    size = len(batch_of(b"v"))
    segment.file.pwrite(bytes(size), len(batch_of(b"future")) + size)
    search = log.reader.search_timestamp(1_500)
    step = next(search)
    assert isinstance(step, HeaderScan)
    step.run()
    assert not segment.damages  # the loop owns the segment
    assert isinstance(search.send(None), TimestampScan)
    assert len(segment.damages) == 1
    assert found_at(log, 1_500) == (2_000, 4)


def test_of_equal_timestamps_the_first_record_counts(env: MemoryEnv) -> None:
    log = open_log(env)
    for timestamp in (10, 30, 20, 30):
        append(log, b"v", timestamp=timestamp)
    append_batch(log, batch_of(b"a", b"b", timestamps=[30, 30]))
    assert largest(log) == (30, 1)
    assert found_at(log, 30) == (30, 1)


def test_of_equal_timestamps_in_two_segments_the_first_counts(env: MemoryEnv) -> None:
    log = open_log(env)
    append(log, b"v", timestamp=30)
    log.roll(0)
    append(log, b"v", timestamp=30)
    assert largest(log) == (30, 0)


def test_the_leader_epoch_of_the_record_comes_with_it(env: MemoryEnv) -> None:
    log = open_log(env)
    append(log, b"v", timestamp=10)
    log._state.leader_epoch = 4
    append(log, b"v", timestamp=20)
    offset_found = first_since(log, 15)
    assert offset_found is not None
    assert offset_found.leader_epoch == 4


def test_records_below_the_log_start_are_not_found(env: MemoryEnv) -> None:
    log = open_log(env)
    append_batch(log, batch_of(b"a", b"b", b"c", timestamps=[50, 20, 30]))
    log.delete_records(1)
    assert found_at(log, 5) == (20, 1)
    assert found_at(log, 40) is None
    assert largest(log) == (30, 2)


def test_an_emptied_batch_does_not_end_the_search(env: MemoryEnv) -> None:
    log = open_log(env)
    gone = batch_of(b"a", timestamp=90)
    append_batch(log, empty_batch(read_header(gone)))
    append(log, b"v", timestamp=20)
    assert log.segment_facts()[0].largest_timestamp_ms == 90
    assert found_at(log, 10) == (20, 1)
    assert found_at(log, 50) is None
    assert largest(log) == (20, 1)


def test_an_emptied_segment_does_not_end_the_search(env: MemoryEnv) -> None:
    log = open_log(env)
    append_batch(log, empty_batch(read_header(batch_of(b"a", timestamp=90))))
    log.roll(0)
    append(log, b"v", timestamp=60)
    assert found_at(log, 50) == (60, 1)
    assert largest(log) == (60, 1)


def test_a_header_that_lies_about_its_maximum_costs_no_answer(env: MemoryEnv) -> None:
    log = open_log(env)
    liar = build_batch([Record(0, 10, b"k", b"v")], max_timestamp=1000)
    append_batch(log, liar)
    append(log, b"v", timestamp=500)
    assert found_at(log, 100) == (500, 1)
    assert largest(log) == (500, 1)


def test_records_without_timestamps_are_not_found(env: MemoryEnv) -> None:
    log = open_log(env)
    append(log, b"v", timestamp=-1)
    assert found_at(log, 0) is None
    assert largest(log) is None


@pytest.mark.parametrize("seed", range(10))
def test_every_answer_agrees_with_a_walk_over_all_records(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    config = replace(
        SMALL,
        segment_bytes=rng.choice((500, 3000)),
        index_interval_bytes=rng.choice((0, 300, 1 << 20)),
    )
    env = MemoryEnv(seed)
    log = open_log(env, config)
    for _ in range(60):
        count = rng.randrange(1, 4)
        times = [rng.randrange(-1, 300) for _ in range(count)]
        append_batch(
            log, batch_of(*[b"v"] * count, timestamps=times, codec=rng.choice((0, 0, 1, 4)))
        )
        if rng.random() < 0.1:
            log._state.log_end_offset += 7
            log._state.high_watermark = log.log_end_offset
    if rng.random() < 0.5:
        log = open_log(env, config)
    log.delete_records(rng.randrange(10))
    records = read_records(log)
    for timestamp in range(-1, 302):
        later = [
            (record.timestamp, record.offset) for record in records if record.timestamp >= timestamp
        ]
        assert found_at(log, timestamp) == (later[0] if later else None), timestamp
    best = max(record.timestamp for record in records)
    assert largest(log) == next(
        (record.timestamp, record.offset) for record in records if record.timestamp == best
    )
