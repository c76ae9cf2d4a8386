"""A large batch is written in parts after the end of the log, and appended with the last one."""

import errno
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from storage.env import ReadBuffer
from storage.errors import LogClosedError, LogDirectoryError, NoRoomError, OutOfOrderSequenceError
from storage.format.batch import read_header
from storage.format.filenames import LOG
from storage.log.log import Log
from storage.model import AppendInfo
from storage.segments import segment
from tests.support.draws import cases
from tests.support.storage.logs import (
    NOW_MS,
    SMALL,
    append,
    append_batch,
    batch_of,
    content,
    fill,
    offsets_in,
    open_log,
    read_records,
    segments_of,
)
from tests.support.storage.memory_env import MemoryEnv, MemoryFile, SimulatedCrash

LARGE = replace(SMALL, segment_bytes=2000)
VALUE = bytes(range(256)) * 4
FATES = 12  # of a crash: what survives it


@pytest.fixture(autouse=True)
def parts_of_100_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "PART_BYTES", 100)


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=1)


def large_batch(value: bytes = VALUE, **fields: int) -> memoryview:
    return memoryview(batch_of(value, **fields))  # type: ignore[arg-type]


def write_part(log: Log, batch: memoryview) -> bool:
    return log.append_part(batch, read_header(batch), now_ms=NOW_MS)


def write_parts(log: Log, batch: memoryview, count: int = 100) -> None:
    """Write `count` parts, or all but the last one."""
    for _ in range(count):
        if write_part(log, batch):
            return


def finish(log: Log, batch: memoryview) -> AppendInfo:
    return log.append(batch, read_header(batch), now_ms=NOW_MS)


def check_files(log: Log) -> None:
    """No file has bytes after the batches of its segment."""
    assert all(each.is_cut() for each in log.segments)


def check_after_a_kill(log: Log) -> None:
    """Each batch is whole, and none is damaged."""
    check_files(log)
    env, values = log._state.env, [record.value for record in read_records(log)]
    assert isinstance(env, MemoryEnv)
    again = open_log(env.kill(), log.config)
    assert not again.damage.ranges
    assert [record.value for record in read_records(again)] == values


def test_a_batch_in_parts_leaves_the_same_bytes_as_one_in_a_piece() -> None:
    files = []
    for in_parts in (True, False):
        env = MemoryEnv(seed=1)
        log, batch = open_log(env, LARGE), large_batch()
        append(log, b"before")
        if in_parts:
            write_parts(log, batch)
        info = finish(log, batch)
        append(log, b"behind")
        assert (info.first_offset, info.last_offset, log.log_end_offset) == (1, 1, 3)
        files.append(content(env, 0, LOG))
    assert files[0] == files[1]


def test_a_part_is_no_larger_than_its_limit_and_the_last_one_remains(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    log, batch = open_log(env, LARGE), large_batch()
    pwrite = MemoryFile.pwrite

    def note(file: MemoryFile, data: ReadBuffer, position: int) -> None:
        written.extend([len(data)] if file.path.endswith(LOG) else [])
        pwrite(file, data, position)

    monkeypatch.setattr(MemoryFile, "pwrite", note)
    write_parts(log, batch)
    write_parts(log, batch)  # nothing is left to write in parts
    finish(log, batch)
    assert sum(written) == len(batch)
    assert max(written) <= 100
    assert len(written) == -(-len(batch) // 100)


def test_parts_are_neither_visible_nor_flushed_nor_counted(env: MemoryEnv) -> None:
    log, batch = open_log(env, LARGE), large_batch()
    append(log, b"before")
    before = (log.log_end_offset, log.high_watermark, log.segments.size_bytes, log.segment_facts())
    write_parts(log, batch)
    log.flush()
    now = (log.log_end_offset, log.high_watermark, log.segments.size_bytes, log.segment_facts())
    assert now == before
    assert (log.recovery_point, offsets_in(log)) == (1, [0])
    assert log.flusher.is_flushed


def test_a_batch_of_append_time_is_stamped_once(env: MemoryEnv) -> None:
    log = open_log(env, replace(LARGE, message_timestamp_type="LogAppendTime"))
    first = large_batch(timestamp=5)
    finish(log, first)
    stamped = memoryview(bytearray(first))
    write_parts(log, stamped)
    assert finish(log, stamped).log_append_time_ms == NOW_MS
    assert [record.timestamp for record in read_records(log)] == [NOW_MS, NOW_MS]


def test_a_batch_whose_header_has_changed_begins_anew(env: MemoryEnv) -> None:
    log, batch = open_log(env, LARGE), large_batch(timestamp=5)
    write_parts(log, batch)
    log.update_config(replace(LARGE, message_timestamp_type="LogAppendTime"))
    finish(log, batch)
    assert [record.timestamp for record in read_records(log)] == [NOW_MS]
    check_after_a_kill(log)


def roll(log: Log) -> None:
    log.roll(NOW_MS)


def append_other(log: Log) -> None:
    append(log, b"other")


def append_other_large(log: Log) -> None:
    other = large_batch(b"other".ljust(len(VALUE)))
    write_parts(log, other, 3)
    finish(log, other)


def truncate(log: Log) -> None:
    log.truncate_to(1, now_ms=NOW_MS)


def truncate_to_the_same_size(log: Log) -> None:
    """The log ends at the same byte as before, but the parts are gone."""
    size_bytes = log.segments.active.size_bytes
    log.truncate_to(1, now_ms=NOW_MS)
    append(log, b"three", timestamp=NOW_MS + 1)
    assert log.segments.active.size_bytes == size_bytes


def drop(log: Log) -> None:
    log.drop_last_parts()


def fail_another(log: Log) -> None:
    env: MemoryEnv = log._state.env  # type: ignore[assignment]
    fault = env.fail_on(lambda op, path: op == "pwrite" and path.endswith(LOG), errno.ENOSPC)
    with pytest.raises(NoRoomError):
        append(log, b"other")
    fault.remove()


CHANGES: tuple[Callable[[Log], None], ...] = (
    roll,
    append_other,
    append_other_large,
    truncate,
    truncate_to_the_same_size,
    drop,
    fail_another,
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("parts", [1, 5, 100])
@pytest.mark.parametrize("goes_on", [True, False])
def test_any_other_change_makes_a_batch_begin_anew(
    change: Callable[[Log], None], parts: int, goes_on: bool
) -> None:
    """Whether it goes on in parts or is appended in one piece."""
    log, batch = open_log(MemoryEnv(seed=1), LARGE), large_batch()
    append(log, b"first")
    append(log, b"three", timestamp=NOW_MS + 1)
    write_parts(log, batch, parts)
    change(log)
    check_files(log)
    end = log.log_end_offset
    if goes_on:
        write_parts(log, batch)
    assert finish(log, batch).first_offset == end
    append(log, b"behind")
    *_, large, _ = read_records(log)
    assert large.value == VALUE
    check_after_a_kill(log)


def test_a_batch_rolls_before_its_first_part(env: MemoryEnv) -> None:
    log = open_log(env, LARGE)
    for _ in range(3):
        batch = large_batch()
        write_parts(log, batch)
        finish(log, batch)
    assert [count for _, count in segments_of(log)] == [len(large_batch())] * 3
    check_after_a_kill(log)


def test_a_refused_or_repeated_batch_leaves_the_log_as_before(env: MemoryEnv) -> None:
    log = open_log(env, LARGE)
    fields = {"producer_id": 7, "producer_epoch": 0}
    append_batch(log, batch_of(b"a", base_sequence=0, **fields))
    before = content(env, 0, LOG)
    refused = large_batch(base_sequence=5, **fields)
    write_parts(log, refused)
    with pytest.raises(OutOfOrderSequenceError):
        finish(log, refused)
    log.drop_last_parts()
    assert content(env, 0, LOG) == before
    repeated = large_batch(base_sequence=0, **fields)
    write_parts(log, repeated)
    assert finish(log, repeated).duplicate
    log.drop_last_parts()
    assert content(env, 0, LOG) == before
    check_files(log)


@pytest.mark.parametrize("part", [0, 1, 4])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_part_that_fails_leaves_the_log_as_before(part: int, number: int) -> None:
    env = MemoryEnv(seed=part)
    log, batch = open_log(env, LARGE), large_batch()
    append(log, b"first")
    write_parts(log, batch, part)
    fault = env.fail_on(lambda op, path: op == "pwrite" and path.endswith(LOG), number)
    with pytest.raises(NoRoomError if number == errno.ENOSPC else LogDirectoryError):
        write_part(log, batch)
    fault.remove()
    assert offsets_in(log) == [0]
    assert log.segments.active.is_cut()
    if number == errno.ENOSPC:
        write_parts(log, batch)
        finish(log, batch)
        assert offsets_in(log) == [0, 1]


def test_a_deleted_log_takes_no_parts(env: MemoryEnv) -> None:
    log, batch = open_log(env, LARGE), large_batch()
    write_parts(log, batch, 3)
    log.mark_deleted()
    log.drop_last_parts()
    with pytest.raises(LogClosedError):
        write_part(log, batch)
    with pytest.raises(LogClosedError):
        finish(log, batch)


def test_a_clean_stop_leaves_no_parts(env: MemoryEnv) -> None:
    log, batch = open_log(env, LARGE), large_batch()
    append(log, b"first")
    write_parts(log, batch)
    log.close()
    again = open_log(env.crash(), LARGE, was_clean=True, recovery_point=1)
    assert (offsets_in(again), again.log_end_offset) == ([0], 1)
    check_files(again)


def work(log: Log, change: Callable[[Log], None]) -> None:
    """A large batch with syncs and a change in between, as a client and the broker's timers do."""
    append(log, b"first")
    append(log, b"three", timestamp=NOW_MS + 1)
    batch = large_batch()
    write_parts(log, batch, 4)
    task = log.flusher.begin()
    task.run()  # with the parts
    write_parts(log, batch, 2)
    change(log)
    log.flusher.done(task)
    write_parts(log, batch)
    finish(log, batch)
    append(log, b"behind")


@pytest.mark.parametrize("change", CHANGES[:5])
def test_a_crash_at_any_step_leaves_whole_batches_and_no_damage(
    change: Callable[[Log], None],
) -> None:
    def run(seed: int, crash_at: int | None) -> tuple[MemoryEnv, Log]:
        env = MemoryEnv(seed)
        log = open_log(env, LARGE)
        env.crash_at = None if crash_at is None else env.operations + crash_at
        with suppress(SimulatedCrash):
            work(log, change)
        env.crash_at = None
        return env, log

    operations = run(0, None)[0].operations
    for crash_at in range(1, operations + 1, cases(few=7, many=1)):
        for fate in range(FATES):
            env, log = run(crash_at * FATES + fate, crash_at)
            # A truncation is announced by the recovery point before it begins.
            point = min(log.recovery_point, 1 if "truncate" in change.__name__ else 10)
            survived = env.kill() if fate == 0 else env.crash()
            again = open_log(survived, LARGE, recovery_point=point)
            where = f"crash at {crash_at}, fate {fate}"
            assert not again.damage.ranges, where
            values = [record.value for record in read_records(again)]
            allowed = (b"first", b"three", b"other", VALUE, b"behind", b"other".ljust(len(VALUE)))
            assert set(values) <= set(allowed), where
            assert values.count(VALUE) <= 1
            assert again.log_end_offset <= log.log_end_offset + 1, where
            if fate == 0 and change is not truncate and change is not truncate_to_the_same_size:
                assert again.log_end_offset >= log.log_end_offset, where
            fill(again, 1)
            check_after_a_kill(again)


@pytest.mark.parametrize("seed", range(30))
def test_a_batch_that_was_refused_never_comes_back(seed: int) -> None:
    """Its last part was not written, so it is not whole."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    env = MemoryEnv(seed)
    log, batch = open_log(env, LARGE), large_batch()
    append(log, b"first")
    write_parts(log, batch)
    log.flush()
    if rng.random() < 0.5:
        log.drop_last_parts()
    env = env.crash() if rng.random() < 0.5 else env.kill()
    again = open_log(env, LARGE, recovery_point=1)
    assert (offsets_in(again), again.log_end_offset) == ([0], 1)
    assert not again.damage.ranges
