"""A log drops the transaction indexes of idle segments from memory, and reads them again."""

import errno
from collections.abc import Callable

import pytest

from storage.errors import LogDirectoryError
from storage.format import filenames
from storage.log.log import Log
from storage.segments.index_load import IndexLoad
from storage.segments.segment import IndexNotReadyError, Segment
from tests.support.storage.logs import FOLDER, NOW_MS, open_log
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.transactions import end, write

Aborted = list[tuple[int, int, int]]


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=3)


def three_segments(env: MemoryEnv) -> Log:
    """The transaction of producer 9 begins in the first segment and ends in the second."""
    log = open_log(env)
    for first in (10, 20, 30):
        for producer_id in (first, first + 1):
            write(log, producer_id)
            if log.log_end_offset == 1:
                write(log, 9)
            end(log, producer_id)
        if len(log.segments) == 2:
            end(log, 9)
        log.roll(NOW_MS)
    log.flush()
    assert len(log.segments) == 4
    return log


def drop(log: Log) -> None:
    for _ in range(2):  # the first time, it was used
        for segment in log.segments:
            segment.drop_idle_indexes()
    assert [segment.txn_index.is_loaded for segment in log.segments] == [False] * 3 + [True]


def aborted(log: Log, *, in_place: bool = True) -> Aborted:
    end = log.log_end_offset
    entries = log.reader.aborted_transactions(0, end, in_place=in_place)
    return [(entry.producer_id, entry.first_offset, entry.last_offset) for entry in entries]


def path_of(segment: Segment) -> str:
    return segment.txn_index.path


def test_dropped_entries_are_read_again_and_stay_while_they_are_used(env: MemoryEnv) -> None:
    log = three_segments(env)
    expected = aborted(log)
    assert len(expected) == 7
    drop(log)
    assert aborted(log) == expected
    for segment in log.segments:
        segment.drop_idle_indexes()
    assert all(segment.txn_index.is_loaded for segment in log.segments)


def test_a_thread_reads_them_for_a_reader_that_does_not_wait(env: MemoryEnv) -> None:
    log = three_segments(env)
    expected = aborted(log)
    drop(log)
    reads: list[str] = []
    env.fail_on(lambda operation, _: bool(reads.append(operation)), errno.EIO)  # fails none
    for _ in range(3):
        with pytest.raises(IndexNotReadyError) as raised:
            aborted(log, in_place=False)
        assert "read_file" not in reads
        load = IndexLoad(raised.value.segment, raised.value.repair)
        load.run()
        assert load.finish()
        reads.clear()
    assert aborted(log, in_place=False) == expected


def flip(env: MemoryEnv, segment: Segment) -> None:
    file = env.open(path_of(segment), write=True)
    file.pwrite(bytes([file.pread(1, 9)[0] ^ 1]), 9)  # of a producer id


def remove(env: MemoryEnv, segment: Segment) -> None:
    env.unlink(path_of(segment))


def shorten(env: MemoryEnv, segment: Segment) -> None:
    file = env.open(path_of(segment), write=True)
    file.truncate(file.size() - 34)


@pytest.mark.parametrize("damage", [flip, remove, shorten])
@pytest.mark.parametrize("index", range(3))
def test_an_index_whose_file_was_changed_is_rebuilt_from_the_log(
    env: MemoryEnv, damage: Callable[[MemoryEnv, Segment], None], index: int
) -> None:
    log = three_segments(env)
    expected = aborted(log)
    content = env.read_file(path_of(log.segments[index]))
    drop(log)
    damage(env, log.segments[index])
    assert aborted(log) == expected
    assert env.read_file(path_of(log.segments[index])) == content
    log.flush()
    log.close()
    assert aborted(open_log(env, was_clean=True)) == expected


def test_a_missing_index_of_a_removed_segment_is_not_rebuilt(env: MemoryEnv) -> None:
    log = three_segments(env)
    drop(log)
    (load, *_) = log.reader.txn_index_loads(0)
    for kind in (filenames.LOG, filenames.TXN_INDEX):
        env.unlink(f"{FOLDER}/{filenames.file_name(0, kind)}")
    with pytest.raises(FileNotFoundError):
        load.run()


def test_an_index_that_cannot_be_read_fails_the_read(env: MemoryEnv) -> None:
    log = three_segments(env)
    expected = aborted(log)
    drop(log)
    fault = env.fail_on(lambda _, path: path.endswith(".txnindex"), errno.EIO)
    with pytest.raises(LogDirectoryError):
        aborted(log)
    fault.remove()
    assert aborted(log) == expected


def test_a_load_that_another_change_overtook_is_dropped(env: MemoryEnv) -> None:
    log = three_segments(env)
    drop(log)
    first = log.segments[0]
    (load, *_) = log.reader.txn_index_loads(0)
    load.run()
    kept = aborted(log)[:1]
    entries = list(first.txn_index.entries[:1])
    first.write_txn_entries(entries)
    load.finish()
    assert list(first.txn_index.entries) == entries
    first.txn_index.drop()
    load.finish()
    assert not first.txn_index.is_loaded
    assert aborted(log)[:1] == kept


def test_a_pin_loads_dropped_indexes_before_other_files_get_their_names(env: MemoryEnv) -> None:
    log = three_segments(env)
    expected = aborted(log)
    drop(log)
    bases = [segment.base_offset for segment in log.segments.closed]
    log.swap.pin(bases)
    for segment in log.segments.closed:
        env.unlink(path_of(segment))
    for segment in [*log.segments] * 2:
        segment.drop_idle_indexes()
    assert aborted(log) == expected


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_a_truncation_keeps_the_entries_below_its_offset(env: MemoryEnv, segments: int) -> None:
    log = three_segments(env)
    expected = aborted(log)
    drop(log)
    offset = log.segments[segments - 1].base_offset + 3
    assert log.truncate_to(offset, now_ms=NOW_MS)
    remaining = [row for row in expected if row[2] < offset]
    assert aborted(log) == remaining
    write(log, 1)
    end(log, 1)
    assert aborted(log) == [*remaining, (1, offset, offset + 1)]
    log.flush()
    log.close()
    assert aborted(open_log(env, was_clean=True)) == aborted(log)


def test_a_start_keeps_only_the_index_of_the_active_segment_in_memory(env: MemoryEnv) -> None:
    log = three_segments(env)
    write(log, 1)
    end(log, 1)
    expected = aborted(log)
    log.flush()
    log.close()
    log = open_log(env, was_clean=True)
    assert [segment.txn_index.is_loaded for segment in log.segments] == [False] * 3 + [True]
    assert aborted(log) == expected


def test_a_repair_compares_dropped_indexes_with_the_log(env: MemoryEnv) -> None:
    log = three_segments(env)
    expected = aborted(log)
    drop(log)
    assert log.damage.repair_txn_indexes() == []
    flip(env, log.segments[1])
    assert log.damage.repair_txn_indexes() == [path_of(log.segments[1])]
    assert aborted(log) == expected


def test_the_file_names_of_a_segment_do_not_change_when_its_index_is_dropped(
    env: MemoryEnv,
) -> None:
    log = three_segments(env)
    names = [segment.file_names() for segment in log.segments]
    drop(log)
    assert [segment.file_names() for segment in log.segments] == names
