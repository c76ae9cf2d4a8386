"""Sums and bounds of Kafka's own planning tests, with their numbers."""

from dataclasses import replace

import pytest

from cleaner.host import JobInputs
from cleaner.planning.cleaner_state import FRESH
from cleaner.planning.findings import ClockReading, Reason
from cleaner.planning.grouping import RELATIVE_OFFSET_MAX, group_segments, plan_job
from cleaner.planning.plan import Verdict, assess
from cleaner.states import Idle
from config.settings import CleanerSettings
from storage.model import SegmentFacts
from tests.support.cleaner.log_facts import COMPACTED, facts, segment

NOW = ClockReading(36_000_000, 5_000)  # before anything of unknown horizon could have expired
HOUR_MS = 3_600_000


def assess_partition(log: object) -> Verdict:
    return assess(log, Idle(), NOW, FRESH)  # type: ignore[arg-type]


def singles(count: int, size_bytes: int = 70) -> list[SegmentFacts]:
    """Segments of one record each, the last one active."""
    return [segment(at, at + 1, size_bytes) for at in range(count)]


def test_the_active_segment_counts_for_nothing() -> None:
    section = assess_partition(facts([*singles(3), segment(3, 9, 1 << 20)])).section
    assert section is not None
    assert section.clean_bytes + section.dirty_bytes == 3 * 70


@pytest.mark.parametrize(
    ("undecided", "lag_ms", "ages_ms", "end", "bound"),
    [
        # no lag: the high watermark, or the oldest open transaction
        (50, 0, [HOUR_MS] * 10, 50, Reason.HIGH_WATERMARK),
        # no lag: the active segment
        (100, 0, [HOUR_MS] * 10, 90, Reason.ACTIVE_SEGMENT),
        # an hour, and two blocks: the first segment of the young one
        (100, HOUR_MS, [2 * HOUR_MS] * 5 + [0] * 5, 50, Reason.MIN_LAG),
        # all of it older than the lag: the active segment
        (100, HOUR_MS, [2 * HOUR_MS] * 10, 90, Reason.ACTIVE_SEGMENT),
    ],
)
def test_the_first_uncleanable_offset_is_the_lowest_of_its_bounds(
    undecided: int, lag_ms: int, ages_ms: list[int], end: int, bound: Reason
) -> None:
    segments = [
        segment(10 * at, 10 * at + 10, first_ms=NOW.wall_ms - age_ms)
        for at, age_ms in enumerate(ages_ms)
    ]
    config = replace(COMPACTED, min_compaction_lag_ms=lag_ms)
    section = assess_partition(facts(segments, undecided=undecided, config=config)).section
    assert section is not None
    assert (section.end_offset, section.bound) == (end, bound)


@pytest.mark.parametrize(
    ("segment_bytes", "index_bytes", "expected"),
    [
        (1 << 30, 1 << 30, [10]),  # huge limits
        (1, 1 << 30, [1] * 10),  # a size, or an index, of one byte
        (1 << 30, 1, [1] * 10),
        (3 * 70, 1 << 30, [3, 3, 3, 1]),  # of three, by either
        (1 << 30, 3 * 10, [3, 3, 3, 1]),
    ],
)
def test_groups_are_as_large_as_the_size_and_the_index_of_a_segment_allow(
    segment_bytes: int, index_bytes: int, expected: list[int]
) -> None:
    sources = singles(10)
    groups = group_segments(sources, segment_bytes, index_bytes)
    assert [len(group) for group in groups] == expected
    assert [source for group in groups for source in group] == sources


def test_a_group_ends_where_the_next_segment_begins_whatever_an_index_says() -> None:
    """An index that is empty or stale says that a segment ends where it begins."""
    sources = [
        segment(0, 1, index_bytes=0),
        segment(1, RELATIVE_OFFSET_MAX + 1, index_bytes=0),
        segment(RELATIVE_OFFSET_MAX + 1, RELATIVE_OFFSET_MAX + 2, index_bytes=0),
    ]
    assert [len(group) for group in group_segments(sources, 1 << 30, 1 << 30)] == [2, 1]


def test_a_job_begins_at_the_start_of_the_log_and_ends_before_what_is_undecided() -> None:
    log = facts(singles(7), undecided=4)
    job = plan_job(
        log,
        assess_partition(log),
        JobInputs(bytes(16)),
        CleanerSettings(),
        job_id="r",
        now_ms=NOW.wall_ms,
    )
    assert job is not None
    assert [source.base_offset for group in job.groups for source in group] == [0, 1, 2, 3]
    assert (job.first_dirty_offset, job.end_offset) == (0, 4)
