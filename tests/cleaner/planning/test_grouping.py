"""How segments are grouped, what a job has, and how long it is expected to take."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleaner.host import JobInputs, LogFacts
from cleaner.job import CleanJob
from cleaner.planning.findings import ClockReading
from cleaner.planning.grouping import (
    RELATIVE_OFFSET_MAX,
    expected_work_ms,
    group_adjacent,
    group_all,
    group_segments,
    plan_job,
)
from cleaner.planning.plan import assess
from cleaner.states import IDLE
from config.settings import CleanerSettings
from storage.format.compression import GZIP, LZ4, ZSTD
from storage.format.index import INTERVAL_BYTES_MAX
from storage.model import SegmentFacts
from tests.support.cleaner.log_facts import COMPACTED, even, facts, segment

GIB = 1 << 30
NOW = ClockReading(1_700_000_000_000, 10_000)
INPUTS = JobInputs(bytes(16), last_records=((7, 0, 3),))


def sizes(groups: list[list[SegmentFacts]]) -> list[int]:
    return [len(group) for group in groups]


@pytest.mark.parametrize(
    ("segment_bytes", "index_bytes", "expected"),
    [
        (10_000, 10_000, [6]),
        (200, 10_000, [2, 2, 2]),
        (199, 10_000, [1] * 6),
        (1, 10_000, [1] * 6),
        (10_000, 30, [3, 3]),
        (10_000, 29, [2, 2, 2]),
    ],
)
def test_a_group_stays_within_a_segments_sizes(
    segment_bytes: int, index_bytes: int, expected: list[int]
) -> None:
    assert sizes(group_segments(even(6)[:-1], segment_bytes, index_bytes)) == expected


def test_the_time_index_limits_a_group_too() -> None:
    sources = [segment(i, i + 1, time_index_bytes=20) for i in range(4)]
    assert sizes(group_segments(sources, 10_000, 40)) == [2, 2]


def test_a_group_spans_no_more_than_a_relative_offset_can_say() -> None:
    edge = RELATIVE_OFFSET_MAX + 1
    fits = [segment(0, 10), segment(10, edge), segment(edge, edge + 1)]
    assert sizes(group_segments(fits, 10_000, 10_000)) == [2, 1]
    over = [segment(0, 10), segment(10, edge + 1)]
    assert sizes(group_segments(over, 10_000, 10_000)) == [1, 1]


def test_empty_segments_group_over_any_distance() -> None:
    far = 10 * RELATIVE_OFFSET_MAX
    sources = [segment(0, 10), segment(10, far, 0), segment(far, far + 1)]
    assert sizes(group_segments(sources, 10_000, 10_000)) == [2, 1]


@given(st.lists(st.tuples(st.integers(1, 1 << 32), st.integers(0, 300)), min_size=1, max_size=30))
def test_groups_cover_all_sources_in_order_and_none_could_take_one_more(
    shapes: list[tuple[int, int]],
) -> None:
    base, sources = 0, []
    for length, size_bytes in shapes:
        sources.append(segment(base, base + length, size_bytes))
        base += length
    groups = group_segments(sources, 300, 60)
    assert [source for group in groups for source in group] == sources
    for group, following in pairwise(groups):
        more = [*group, following[0]]
        assert (
            sum(source.size_bytes for source in more) > 300
            or len(more) > 6
            or following[0].next_base_offset - 1 - group[0].base_offset > RELATIVE_OFFSET_MAX
        )


def planned(log: LogFacts) -> CleanJob | None:
    """Plan a clean 99 s after the records of the log were written."""
    verdict = assess(log, IDLE, ClockReading(wall_ms=100_000, monotonic_ms=5_000))
    return plan_job(log, verdict, INPUTS, CleanerSettings(), job_id="run-1", now_ms=123)


def test_a_job_carries_what_the_worker_needs() -> None:
    config = replace(COMPACTED, segment_bytes=250, delete_retention_ms=77, compression_lz4_level=4)
    log = facts(even(4), checkpoint=10, config=config)
    job = planned(log)
    assert job is not None
    assert [[x.base_offset for x in group] for group in job.groups] == [[0, 10], [20, 30]]
    assert (job.first_dirty_offset, job.end_offset, job.log_end_offset_is_end) == (10, 40, False)
    assert (job.generation, job.job_id, job.now_ms) == ("boot-1", "run-1", 123)
    assert (job.delete_retention_ms, job.segment_bytes) == (77, 250)
    assert (job.hash_key, job.last_records) == (bytes(16), ((7, 0, 3),))
    assert job.compression_levels == ((GZIP, -1), (LZ4, 4), (ZSTD, 3))
    assert job.drop_expired_tombstones


def test_the_last_batch_is_kept_where_nothing_follows() -> None:
    log = facts([segment(0, 10), segment(10, 10, 0)])
    job = planned(log)
    assert job is not None
    assert job.log_end_offset_is_end


def test_an_empty_active_segment_is_no_source() -> None:
    log = facts([segment(0, 10), segment(10, 10, 0)])
    job = planned(log)
    assert job is not None
    assert [x.base_offset for group in job.groups for x in group] == [0]


def test_no_tombstone_is_dropped_by_a_clock_that_cannot_be_trusted() -> None:
    log = facts(even(2), clock_trusted=False)
    job = planned(log)
    assert job is not None
    assert not job.drop_expired_tombstones


def test_there_is_no_job_for_what_is_not_to_be_cleaned() -> None:
    log = facts(even(4), checkpoint=40)
    assert planned(log) is None


def large(count: int) -> LogFacts:
    """Closed segments of 1 GiB and an active one."""
    closed = [segment(at * 10, at * 10 + 10, GIB) for at in range(count)]
    return facts([*closed, segment(count * 10, count * 10 + 10)])


def job_of(log: LogFacts, settings: CleanerSettings) -> CleanJob:
    job = plan_job(log, assess(log, IDLE, NOW), INPUTS, settings, job_id="r", now_ms=NOW.wall_ms)
    assert job is not None
    return job


def test_a_clean_writes_an_index_entry_at_least_every_32_kib() -> None:
    log = large(2)
    sparse = replace(log, config=replace(log.config, index_interval_bytes=1 << 30))
    assert job_of(sparse, CleanerSettings()).index_interval_bytes == INTERVAL_BYTES_MAX
    assert job_of(log, CleanerSettings()).index_interval_bytes == log.config.index_interval_bytes


@pytest.mark.parametrize(
    ("gigabytes", "rate", "minutes"),
    [(0, None, 0), (1, None, 1), (10, None, 17), (10, 1_000_000, 357), (10, 10**12, 17)],
)
def test_a_job_takes_as_long_as_it_takes_to_read_its_segments_twice(
    gigabytes: int, rate: int | None, minutes: int
) -> None:
    groups = group_all(large(gigabytes), gigabytes * 10) if gigabytes else []
    assert expected_work_ms(groups, rate) == minutes * 60_000


def test_a_tombstone_of_a_long_job_stays_for_its_retention_after_the_job() -> None:
    job = job_of(large(10), CleanerSettings())
    assert job.delete_horizon_ms == NOW.wall_ms + 17 * 60_000 + COMPACTED.delete_retention_ms


def test_a_job_is_late_when_half_of_the_time_of_its_tombstones_is_over() -> None:
    job = job_of(large(10), CleanerSettings())
    half_ms = COMPACTED.delete_retention_ms // 2
    assert not job.is_late(job.delete_horizon_ms - half_ms)
    assert job.is_late(job.delete_horizon_ms - half_ms + 1)
    for change in ({"expired_only": True}, {"drop_expired_tombstones": False}):
        assert not replace(job, **change).is_late(job.delete_horizon_ms)
    assert not replace(job, delete_retention_ms=0).is_late(job.delete_horizon_ms + 1)


def test_a_short_job_stamps_as_kafka_does_by_the_time_of_its_plan() -> None:
    small = facts([segment(0, 10, 1000), segment(10, 20)])
    job = job_of(small, CleanerSettings())
    assert job.published_by_ms is None
    assert job.delete_horizon_ms == NOW.wall_ms + COMPACTED.delete_retention_ms


@pytest.mark.parametrize("change", ["no retention", "untrusted clock"])
def test_where_nothing_is_promised_a_long_job_stamps_by_the_time_of_its_plan(change: str) -> None:
    log = large(10)
    if change == "no retention":
        log = replace(log, config=replace(log.config, delete_retention_ms=0))
    else:
        log = replace(log, clock_trusted=False)
    assert job_of(log, CleanerSettings()).published_by_ms is None


@given(st.lists(st.integers(0, 100)), st.integers(0, 200))
def test_groups_of_adjacent_items_contain_each_once_and_are_as_large_as_allowed(
    sizes: list[int], wanted: int
) -> None:
    results = group_adjacent(enumerate(sizes), wanted)
    assert [index for item in results for index in item] == list(range(len(sizes)))
    total = [sum(sizes[index] for index in item) for item in results]
    assert all(size <= wanted or len(item) == 1 for size, item in zip(total, results, strict=True))
    for size, following in zip(total, results[1:], strict=False):
        assert size + sizes[following[0]] > wanted
