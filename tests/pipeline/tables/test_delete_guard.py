"""A delete that may have left a topic before a table read it is an error. No Spark, no broker."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from admin.client import ApiClient
from config import exit_codes
from pipeline.errors import JobError
from pipeline.tables.delete_guard import (
    PROGRESS_AGE_MS_MAX,
    UNKNOWN_MS,
    CleanerProgress,
    DeleteGuard,
    read_cleaner_progress,
    read_safe_ms,
    safe_time_id,
)
from pipeline.tables.delta import commit_properties, version_id
from pipeline.tables.state import fetch_cleaned_end_offset

HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000


@dataclass
class World:
    """A broker with one partition, and a clock."""

    now_ms: int = START_MS
    retention_ms: int = HOUR_MS
    cleaned: int | None = 0
    is_calm: bool = True
    looks: list[int] = field(default_factory=list)

    def guard(self, reach: int, safe_ms: int) -> DeleteGuard:
        return DeleteGuard(
            "t",
            [0],
            {0: reach},
            safe_ms,
            read_progress=self._look,
            delete_retention_ms=lambda: self.retention_ms,
            now_ms=lambda: self.now_ms,
        )

    def _look(self, number: int) -> CleanerProgress:
        self.looks.append(self.now_ms)
        return CleanerProgress(self.cleaned, self.is_calm)


def refused(guard: DeleteGuard, reach: int = 20) -> str:
    with pytest.raises(JobError) as error:
        guard.checked_safe_ms({0: reach}, UNKNOWN_MS)
    assert error.value.code == exit_codes.STALE
    return str(error.value)


def test_a_batch_that_was_read_after_deletes_may_have_gone_is_refused() -> None:
    world = World(cleaned=15)
    guard = world.guard(reach=10, safe_ms=START_MS - HOUR_MS)
    guard.checked_safe_ms({0: 20}, UNKNOWN_MS)  # just in time
    world.now_ms += 1
    message = refused(guard)
    assert "t-0 up to offset 10 as of 1.0 h ago, the cleaner has cleaned up to 15" in message
    assert "tombstones stay for 3600 s (delete.retention.ms)" in message


def test_every_batch_is_checked_and_not_only_the_first() -> None:
    """--every may be longer than delete.retention.ms."""
    world = World(cleaned=10)
    guard = world.guard(reach=10, safe_ms=START_MS)
    guard.check()
    for reach in (20, 30):
        safe_ms = guard.checked_safe_ms({0: reach}, world.now_ms)
        guard.committed({0: reach}, safe_ms)
        world.cleaned = reach
    world.now_ms += 2 * HOUR_MS
    world.cleaned = 31
    assert "up to offset 30" in refused(guard, 40)


def test_a_partition_that_was_added_is_checked_with_its_first_batch() -> None:
    """Here the cleaner has not passed the table's reach in the other partition."""
    world = World(cleaned=15)
    guard = world.guard(reach=20, safe_ms=START_MS)
    world.now_ms += HOUR_MS
    planned_ms = START_MS + 1
    assert guard.checked_safe_ms({0: 20, 1: 10}, planned_ms) == planned_ms
    world.now_ms += 1
    assert "t-1 up to offset 0" in refused(guard)


def test_however_long_ago_nothing_is_missed_before_the_cleaner_has_passed() -> None:
    world = World(cleaned=10)
    guard = world.guard(reach=10, safe_ms=UNKNOWN_MS)
    guard.check()


def test_a_table_is_refused_where_the_broker_does_not_know_how_far_cleans_have_come() -> None:
    world = World(cleaned=None)
    world.guard(reach=10, safe_ms=START_MS - HOUR_MS).check()  # deletes are still in the log
    assert "has cleaned up to an unknown offset" in refused(
        world.guard(reach=10, safe_ms=START_MS - HOUR_MS - 1)
    )


@pytest.mark.parametrize("first_dirty", [None, 0])
def test_a_first_dirty_offset_that_fell_or_is_gone_does_not_count(first_dirty: int | None) -> None:
    """The topic is not compacted any more, or the checkpoint was lost."""

    class Client(ApiClient):
        def get(self, path: str, *_: object, **__: object) -> Any:
            return {**answer, "first_dirty_offset": first_dirty, "state": "idle"}

    answer = {"cleaned_end_offset": 20}
    client = Client("http://127.0.0.1:9")
    assert read_cleaner_progress(client, "t", 0) == CleanerProgress(20, is_calm=True)
    assert fetch_cleaned_end_offset(client, "t", 0) == 20
    answer.clear()  # an older broker
    assert read_cleaner_progress(client, "t", 0).cleaned_end_offset is None


def test_a_table_without_a_safe_time_is_refused_once_the_cleaner_has_passed() -> None:
    world = World(cleaned=11)
    assert "as of an unknown time, " in refused(world.guard(10, UNKNOWN_MS))


def test_the_safe_time_of_a_batch_is_no_later_than_its_planning_if_the_cleaner_passed_it() -> None:
    """A batch may take hours to read: its end was planned before."""
    world = World(cleaned=10)
    guard = world.guard(reach=10, safe_ms=START_MS)
    world.now_ms += HOUR_MS // 2
    world.cleaned = 25
    assert guard.checked_safe_ms({0: 20}, START_MS + 5) == START_MS + 5
    assert guard.checked_safe_ms({0: 20}, START_MS - 5) == START_MS
    assert guard.checked_safe_ms({0: 30}, START_MS + 5) == world.now_ms


def test_a_clean_that_is_under_way_may_pass_the_reach_at_any_moment() -> None:
    """Its tombstones expire from when it began: looking at its results comes too late."""
    world = World(cleaned=10, is_calm=False)
    guard = world.guard(reach=10, safe_ms=START_MS)
    world.now_ms += HOUR_MS
    assert guard.checked_safe_ms({0: 20}, START_MS) == START_MS
    world.is_calm = True
    assert guard.checked_safe_ms({0: 20}, START_MS) == world.now_ms


def test_an_idle_topic_stays_safe_by_looks_at_a_bounded_rate() -> None:
    world = World(cleaned=10)
    guard = world.guard(reach=10, safe_ms=START_MS)
    for _ in range(1000):
        world.now_ms += HOUR_MS // 100
        guard.refresh()
        guard.refresh()
    assert len(world.looks) == 500  # of 36 s each, and 60 s between two
    world.cleaned = 12  # a delete came, and was cleaned at once
    world.now_ms += PROGRESS_AGE_MS_MAX
    guard.check()


def test_a_retention_that_was_lowered_counts_from_the_look_before() -> None:
    world = World(cleaned=11)
    guard = world.guard(reach=10, safe_ms=START_MS - HOUR_MS // 2)
    guard.check()
    world.retention_ms = HOUR_MS // 4
    with pytest.raises(JobError, match="tombstones stay for 900 s"):
        guard.check()
    world.retention_ms = HOUR_MS
    with pytest.raises(JobError, match="tombstones stay for 900 s"):
        guard.check()


def test_a_partition_that_is_newer_than_the_table_is_still_unread() -> None:
    world = World(cleaned=5, now_ms=START_MS + HOUR_MS + 1)
    guard = DeleteGuard(
        "t",
        [0, 1],
        {0: 7},
        START_MS,
        read_progress=lambda number: CleanerProgress(5, is_calm=True),
        delete_retention_ms=lambda: world.retention_ms,
        now_ms=lambda: world.now_ms,
    )
    with pytest.raises(JobError, match="it has t-1 up to offset 0 "):
        guard.check()


def test_the_safe_time_is_that_of_the_reading_whoever_commits_and_when(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    rows = pa.table({"key": [b"a"]})
    write_deltalake(path, rows)
    assert read_safe_ms(DeltaTable(path), "t") == UNKNOWN_MS
    commit = commit_properties({}, {version_id("t", 0): 10, safe_time_id("t"): START_MS})
    write_deltalake(path, rows, mode="append", commit_properties=commit)
    write_deltalake(path, rows, mode="append")
    DeltaTable(path).optimize.compact()
    DeltaTable(path).create_checkpoint()
    assert read_safe_ms(DeltaTable(path), "t") == START_MS
    assert read_safe_ms(DeltaTable(path), "other") == UNKNOWN_MS
    # A table that is made anew of other offsets knows its own time, be it none.
    commit = commit_properties({}, {version_id("t", 0): 5, safe_time_id("t"): UNKNOWN_MS})
    write_deltalake(path, rows, mode="overwrite", commit_properties=commit)
    assert read_safe_ms(DeltaTable(path), "t") == UNKNOWN_MS
