"""How long a job is expected to take, and what that means for its delete horizons."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleaner.host import JobInputs, LogFacts
from cleaner.job import CleanJob
from cleaner.planning.findings import ClockReading
from cleaner.planning.grouping import expected_work_ms, group_adjacent, group_all, plan_job
from cleaner.planning.plan import assess
from cleaner.states import IDLE
from config.settings import CleanerSettings
from storage.format.index import INTERVAL_BYTES_MAX
from tests.support.cleaner.log_facts import COMPACTED, facts, segment

GIB = 1 << 30
NOW = ClockReading(1_700_000_000_000, 10_000)
INPUTS = JobInputs(bytes(16))


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
