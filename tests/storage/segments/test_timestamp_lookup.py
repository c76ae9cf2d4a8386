"""Records by time: the answer is a record that is there, with its own timestamp."""

import random
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from storage.env import File
from storage.errors import CorruptBatchError, DecompressionLimitError
from storage.format.batch import (
    BATCH_LENGTH_MIN,
    HEADER_BYTES,
    LARGEST_INT64,
    LOG_APPEND_TIME,
    NO_PRODUCER_ID,
    BatchHeader,
    Record,
    build_batch,
    encode_record,
    iterate_records,
    read_header,
)
from storage.format.compression import compress
from storage.format.filenames import TIME_INDEX, file_name
from storage.format.index import TIME_ENTRY_BYTES
from storage.log.log import Log
from storage.model import TimestampOffset
from storage.segments import timestamp_lookup
from storage.segments.batch_scan import ScannedBatch
from storage.segments.timestamp_lookup import HEADERS_AT_ONCE, HeaderScan, TimestampScan
from tests.support.draws import cases
from tests.support.storage.empty_batch import empty_batch
from tests.support.storage.logs import (
    FOLDER,
    NOW_MS,
    SMALL,
    append,
    append_batch,
    batch_of,
    open_log,
    read_records,
)
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
    """After a record of the future, the index has no entry until the others reach its time."""
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


def plain_walk(scan: TimestampScan, batch: ScannedBatch) -> TimestampOffset | None:
    """Search a batch record by record, in Python."""
    header, best = batch.header, None
    epoch = header.partition_leader_epoch
    try:
        for record in iterate_records(batch.buffer, header, limit_bytes=scan.limit_bytes):
            if record.offset < scan.log_start_offset:
                continue
            found = TimestampOffset(record.timestamp, record.offset, epoch)
            if scan.at_least_ms is not None:
                if record.timestamp >= scan.at_least_ms:
                    return found
            elif record.timestamp > (-1 if best is None else best.timestamp_ms):
                best = found
    except DecompressionLimitError:
        first_offset = max(header.base_offset, scan.log_start_offset)
        return TimestampOffset(header.max_timestamp, first_offset, epoch)
    return best


def any_batch(rng: random.Random) -> ScannedBatch:
    """Return a batch that may be damaged; its checksum does not matter."""
    count = rng.randrange(8)
    step = rng.choice((1, 1, 5))
    deltas = [number * step + rng.randrange(step) for number in range(count)]
    if rng.random() < 0.1:
        rng.shuffle(deltas)
    text = (None, b"", b"text", bytes(200))
    data = bytearray()
    for delta in deltas:
        headers = ((rng.choice(("", "name", b"\xff")), rng.choice(text)),) * rng.choice((0, 0, 2))
        record = Record(0, 0, rng.choice(text), rng.choice(text), headers)
        time_delta = rng.choice((rng.randrange(-50, 50), 0, 0, 1 << 40, LARGEST_INT64))
        data += encode_record(record, delta, time_delta)
    if data and rng.random() < 0.3:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 2, 127, 128, 255, rng.randrange(256)))
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data) + 1)] + bytes(rng.choice((0, 0, 1, 7)))
    codec = rng.randrange(5)
    packed = compress(codec, data)
    header = BatchHeader(
        base_offset=rng.choice((0, 100)),
        batch_length=BATCH_LENGTH_MIN + len(packed),
        partition_leader_epoch=rng.randrange(3),
        magic=2,
        crc=0,
        attributes=codec | rng.choice((0, 0, LOG_APPEND_TIME)),
        last_offset_delta=max([*deltas, 0]) + rng.choice((0, 0, 0, 3, -1)),
        base_timestamp=rng.choice((-1, 40, 40, 40, 1 << 40, LARGEST_INT64)),
        max_timestamp=rng.choice((-1, 60, 60)),
        producer_id=NO_PRODUCER_ID,
        producer_epoch=-1,
        base_sequence=-1,
        record_count=max(0, count + rng.choice((0, 0, 0, 0, 1, -1))),
    )
    return ScannedBatch(0, header, bytes(HEADER_BYTES) + packed, 0)


def any_scan(rng: random.Random, file: File, base_offset: int) -> TimestampScan:
    return TimestampScan(
        file,
        0,
        rng.choice((None, None, -5, 0, 30, 45, 60, 61, 1 << 40, -LARGEST_INT64 - 1)),
        rng.choice((0, base_offset, base_offset + rng.randrange(9), LARGEST_INT64)),
        rng.choice((1 << 20, 1 << 20, 100)),
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_search_in_a_batch_agrees_with_a_plain_walk_over_its_records(
    env: MemoryEnv, seed: int
) -> None:
    """Also in a damaged batch: a record in front of the damage is found, if it is the first."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    file = open_log(env).segments.active.file
    outcomes: set[str] = set()
    for _ in range(1_000):
        batch = any_batch(rng)
        scan = any_scan(rng, file, batch.header.base_offset)
        try:
            expected = plain_walk(scan, batch)
        except CorruptBatchError:
            outcomes.add("damage")
            with pytest.raises(CorruptBatchError):
                scan.find(batch)
        else:
            outcomes.add("match" if expected else "none")
            assert scan.find(batch) == expected, (scan, batch)
    assert outcomes == {"damage", "match", "none"}


@pytest.mark.parametrize("at_least_ms", [None, 40])
def test_a_time_beyond_64_bits_from_the_horizon_does_not_hide_the_records_beside_it(
    env: MemoryEnv, at_least_ms: int | None
) -> None:
    records = [Record(0, -(1 << 63) + 5, b"k", None), Record(1, 50, b"k", b"v")]
    batch = bytes(build_batch(records, delete_horizon_ms=1 << 40))
    scan = TimestampScan(open_log(env).segments.active.file, 0, at_least_ms, 0, 1 << 20)
    match = scan.find(ScannedBatch(0, read_header(batch), batch, 0))
    assert match is not None
    assert (match.offset, match.timestamp_ms) == (1, 50)


@pytest.mark.parametrize("at_least_ms", [None, 1])
def test_the_interpreter_is_not_occupied_by_the_records_of_a_batch(
    env: MemoryEnv, at_least_ms: int | None
) -> None:
    file = open_log(env).segments.active.file

    def lines_for(count: int) -> int:
        lines = 0

        def count_line(_frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return count_line

        batch = bytes(build_batch([Record(offset, 0, b"k", b"v") for offset in range(count)]))
        scan = TimestampScan(file, 0, at_least_ms, 0, 1 << 20)
        scanned = ScannedBatch(0, read_header(batch), batch, 0)
        scan.find(scanned)  # loads the kernel
        before = sys.gettrace()
        sys.settrace(count_line)
        try:
            scan.find(scanned)
        finally:
            sys.settrace(before)
        return lines

    assert 0 < lines_for(1) == lines_for(1_000)


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


def closed_segment(env: MemoryEnv, rng: random.Random) -> tuple[str, int]:
    """A log with a closed segment, some of whose records are late; its time index and its end."""
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20))
    for at in range(24):
        append(log, b"v", timestamp=1_000 + 10 * at - rng.choice([0, 0, 300]) * (at > 3))
    log.roll(NOW_MS)
    append(log, b"v", timestamp=900)
    log.close()
    return f"{FOLDER}/{file_name(0, TIME_INDEX)}", log.log_end_offset


def answers(log: Log) -> list[tuple[int, int] | None]:
    return [found_at(log, timestamp) for timestamp in range(690, 1_250, 5)]


def with_time_index(env: MemoryEnv, path: str, raw: bytes, end: int) -> Log:
    file = env.open(path, write=True, truncate=True)
    file.pwrite(raw, 0)
    file.close()
    return open_log(env, was_clean=True, recovery_point=end)


def entries_of(raw: bytes) -> list[bytes]:
    return [raw[at : at + TIME_ENTRY_BYTES] for at in range(0, len(raw), TIME_ENTRY_BYTES)]


@pytest.mark.parametrize("seed", range(3))
def test_a_time_index_without_some_entries_gives_the_same_answers(seed: int) -> None:
    env = MemoryEnv(seed)
    path, end = closed_segment(env, random.Random(seed))
    raw = env.read_file(path)
    expected = answers(open_log(env, was_clean=True, recovery_point=end))
    entries = entries_of(raw)
    losses = [entries[:count] for count in range(len(entries))]
    losses += [entries[:at] + entries[at + 1 :] for at in range(len(entries))]
    for left in losses:
        log = with_time_index(env, path, b"".join(left), end)
        assert answers(log) == expected, (env, len(left))


@pytest.mark.parametrize("seed", range(3))
def test_a_time_index_with_a_wrong_bit_gives_the_same_answers(seed: int) -> None:
    env = MemoryEnv(seed)
    path, end = closed_segment(env, random.Random(seed))
    raw = env.read_file(path)
    expected = answers(open_log(env, was_clean=True, recovery_point=end))
    for bit in range(seed, 8 * len(raw), cases(few=11, many=3)):
        wrong = bytearray(raw)
        wrong[bit // 8] ^= 1 << bit % 8
        log = with_time_index(env, path, bytes(wrong), end)
        assert answers(log) == expected, (env, bit)
