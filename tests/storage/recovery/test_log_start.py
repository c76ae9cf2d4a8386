"""Where a log begins, though nothing is left there."""

import pytest

from storage.directory.cluster_metadata import TopicEntry
from storage.format import filenames
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from tests.support.storage.logs import (
    HOME,
    PARTITION,
    SMALL,
    TOPIC_ID,
    fill,
    offsets_in,
    publish,
    read_offsets,
    segments_of,
)
from tests.support.storage.memory_env import MemoryEnv


def opened(env: MemoryEnv) -> LogManager:
    manager = LogManager(env, [HOME])
    manager.open(lambda topic: SMALL)
    return manager


def filled(manager: LogManager) -> Log:
    log = manager.create(PARTITION, TOPIC_ID, SMALL)
    placement = {PARTITION.partition: manager.table.directory_id_of(PARTITION)}
    entry = TopicEntry(TOPIC_ID, placement)
    manager.save_metadata(manager.metadata.with_topic(PARTITION.topic, entry))
    fill(log, 20)
    return log


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=8)


def test_a_log_begins_where_it_did_though_compaction_left_nothing_there(env: MemoryEnv) -> None:
    manager = opened(env)
    log = filled(manager)
    first, second, *_ = (base for base, _ in segments_of(log))
    publish(env, log, [first], keep=[])
    assert (log.log_start_offset, log.segments.first_base_offset) == (0, second)
    manager.close()
    manager = opened(env)
    log = manager.table.logs[PARTITION]
    assert log.log_start_offset == 0  # a consumer that stands there goes on after the hole
    assert offsets_in(log, start=0) == list(range(second, 20))
    manager.close()


def test_a_log_whose_front_was_deleted_begins_behind_it(env: MemoryEnv) -> None:
    manager = opened(env)
    log = filled(manager)
    _, second, *_ = (base for base, _ in segments_of(log))
    log.delete_records(second + 1)
    log.retention.expire(0)
    manager.close()
    manager = opened(env)
    assert manager.table.logs[PARTITION].log_start_offset == second + 1
    manager.close()


def test_while_segments_are_swapped_the_log_start_is_written_down(env: MemoryEnv) -> None:
    manager = opened(env)
    log = filled(manager)
    path = f"{HOME}/{filenames.LOG_START_CHECKPOINT}"
    log.flush()
    manager.table.checkpoint()
    assert PARTITION not in read_offsets(env, path)
    log.swap.pin([0])
    manager.table.checkpoint()
    assert read_offsets(env, path)[PARTITION] == 0
    log.swap.unpin([0])
    manager.table.checkpoint()
    assert PARTITION not in read_offsets(env, path)
    manager.close()


def test_a_log_start_is_not_written_down_before_what_is_below_it_is_flushed(env: MemoryEnv) -> None:
    """So that a log start after the end of a recovered log can only be a damaged checkpoint."""
    manager = opened(env)
    log = filled(manager)
    log.delete_records(7)
    manager.table.checkpoint()
    path = f"{HOME}/{filenames.LOG_START_CHECKPOINT}"
    assert read_offsets(env, path) == {PARTITION: 0}
    log.flush()
    manager.table.checkpoint()
    assert read_offsets(env, path) == {PARTITION: 7}
    manager.close()
