"""What the checkpoint files of a directory get: present, kept and forgotten entries."""

import errno

import pytest

from storage.directory.log_directory import LogDirectory
from storage.errors import NoRoomError
from storage.format import filenames
from storage.log.log import Log
from storage.manager.known_damage import KnownDamage
from storage.manager.offset_checkpoints import (
    FILES,
    CheckpointTask,
    KeptOffsets,
    OffsetCheckpoints,
    Offsets,
    add_entries,
)
from storage.model import TopicPartition
from tests.support.protocol.slices import drained
from tests.support.storage.logs import NOW_MS, PARTITION, fill, open_log
from tests.support.storage.memory_env import MemoryEnv

OTHER = TopicPartition("orders", 1)
STARTS, RECOVERY = filenames.LOG_START_CHECKPOINT, filenames.RECOVERY_POINT_CHECKPOINT
MARKS, CLEANER = filenames.REPLICATION_CHECKPOINT, filenames.CLEANER_CHECKPOINT


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv()


@pytest.fixture
def log(env: MemoryEnv) -> Log:
    log = open_log(env)
    fill(log, 20)
    return log


def captured(
    checkpoints: OffsetCheckpoints, directory: LogDirectory, log: Log | None
) -> CheckpointTask:
    partitions = {} if log is None else {PARTITION: log}
    capture = checkpoints.capture(
        [directory],
        served=partitions,
        copies={},
        live=partitions,
        offline=(),
        cleaner_offset_of=lambda _: None,
    )
    return drained(capture)[0]


def entries_of(log: Log, cleaner: int | None = None) -> dict[str, Offsets]:
    files: dict[str, Offsets] = {name: {} for name in FILES}
    add_entries(files, log, cleaner)
    return files


def contents(task: CheckpointTask) -> dict[str, dict[TopicPartition, int]]:
    (files,) = task.files.values()
    return {name: dict(offsets) for name, offsets in files.items()}


def test_a_log_that_starts_at_its_first_segment_has_no_log_start(log: Log) -> None:
    assert entries_of(log) == {
        RECOVERY: {PARTITION: 0},
        STARTS: {},
        MARKS: {PARTITION: 20},
        CLEANER: {},
    }


def test_a_log_start_is_never_above_what_is_flushed(log: Log) -> None:
    log.delete_records(15)
    assert entries_of(log)[STARTS] == {PARTITION: 0}
    log.flush()
    assert entries_of(log)[STARTS] == {PARTITION: 15}


def test_a_log_start_is_written_while_a_swap_or_a_crash_could_restore_segments(log: Log) -> None:
    log.flush()
    first = log.segments.first_base_offset
    log.swap.pin([first])
    assert entries_of(log)[STARTS] == {PARTITION: first}
    log.swap.unpin([first])
    log.delete_records(log.segments.bases[1])
    log.retention.finish(NOW_MS, log.log_start_offset)
    start = log.log_start_offset
    assert log.segments.first_base_offset == start
    assert entries_of(log)[STARTS] == {PARTITION: start}
    log.flush()
    assert entries_of(log)[STARTS] == {}


def test_cleaner_offsets_are_written_where_known(log: Log) -> None:
    assert entries_of(log, 7)[CLEANER] == {PARTITION: 7}


def test_entries_of_an_offline_partition_are_kept_until_it_is_deleted(
    env: MemoryEnv, log: Log
) -> None:
    checkpoints = OffsetCheckpoints(env, KnownDamage(env))
    directory = log.log_directory
    checkpoints.keep(directory, OTHER, KeptOffsets(12, None, 5))
    files = contents(captured(checkpoints, directory, log))
    assert files[RECOVERY] == {PARTITION: 0, OTHER: 12}
    assert files[CLEANER] == {OTHER: 5}
    assert OTHER not in files[STARTS]
    checkpoints.forget(OTHER)
    assert contents(captured(checkpoints, directory, log))[RECOVERY] == {PARTITION: 0}


def test_files_may_name_a_partition_until_they_are_written_without_it(
    env: MemoryEnv, log: Log
) -> None:
    checkpoints = OffsetCheckpoints(env, KnownDamage(env))
    directory = log.log_directory
    captured(checkpoints, directory, log).run()
    assert checkpoints.may_name(directory, [OTHER, PARTITION])
    captured(checkpoints, directory, None).run()
    assert not checkpoints.may_name(directory, [OTHER, PARTITION])


def test_a_capture_behind_a_later_one_reports_whether_that_was_written(
    env: MemoryEnv, log: Log
) -> None:
    checkpoints = OffsetCheckpoints(env, KnownDamage(env))
    directory = log.log_directory
    earlier, later = (captured(checkpoints, directory, log) for _ in range(2))
    fault = env.fail_on(lambda op, path: op == "open" and STARTS in path, errno.ENOSPC)
    for task in (later, earlier):
        with pytest.raises(NoRoomError):
            task.run()
    fault.remove()
    captured(checkpoints, directory, log).run()
    earlier.run()
