"""How partitions are cut into tasks."""

from cleaner.job import CleanJob, SourceSegment
from pipeline.stages.planning import (
    RECORDS_PER_KEY_EXPECTED,
    SHARDS_MAX,
    Limits,
    cut_up,
    is_one_task,
    keys_bound,
    largest_first,
    shards_for,
)
from tests.support.cleaner.cleaning import clean_job

MIB = 1 << 20


def job_of(segments: int, offsets: int, *, first_dirty: int = 0) -> CleanJob:
    """One group for each two segments of 64 MiB and `offsets` offsets each."""
    sources = [
        SourceSegment(n * offsets, (n + 1) * offsets, 64 * MIB, 0, 0) for n in range(segments)
    ]
    groups = [sources[n : n + 2] for n in range(0, segments, 2)]
    return clean_job(groups, first_dirty_offset=first_dirty)


def test_there_are_no_more_keys_than_offsets_in_what_is_indexed() -> None:
    job = job_of(4, 1000, first_dirty=2500)
    assert keys_bound(job, 0) == 4000
    assert keys_bound(job, 2500) == 1500
    assert keys_bound(job, 4000) == 0


def test_a_partition_whose_keys_surely_fit_is_one_task() -> None:
    job = job_of(4, 1000)
    assert is_one_task(job, Limits(memory_bytes=4000 * 27))


def test_a_partition_is_tried_whole_where_each_key_may_have_some_records() -> None:
    job = job_of(4, 1000)
    just_enough = 4000 // RECORDS_PER_KEY_EXPECTED * 24 * 10 // 9 + 1
    assert is_one_task(job, Limits(memory_bytes=just_enough))
    assert not is_one_task(job, Limits(memory_bytes=just_enough // 2))


def test_what_is_clean_takes_no_memory_for_keys() -> None:
    job = job_of(4, 1000, first_dirty=3900)
    assert is_one_task(job, Limits(memory_bytes=3000))
    assert not is_one_task(job, Limits(memory_bytes=3000), first_offset=0)


def test_a_partition_is_cut_at_about_the_size_of_a_task_and_between_groups() -> None:
    cut = cut_up(job_of(8, 1000), Limits(task_bytes=200 * MIB))
    assert cut.combines == ((0, 1000, 2000), (3000, 4000, 5000), (6000, 7000))
    assert cut.rewrites == ((0,), (1,), (2,), (3,))


def test_there_are_shards_for_every_worker_and_for_the_memory() -> None:
    assert shards_for(1000, 8, Limits(parallelism=4)) == 4
    assert shards_for(1000, 2, Limits(parallelism=4)) == 2, "no more than there is to read"
    keys = 8 << 30
    expected = keys // RECORDS_PER_KEY_EXPECTED * 24 * 10 // 9 * 2 // (1 << 30)
    assert shards_for(keys, 100, Limits()) in {expected, expected + 1}
    assert shards_for(1 << 60, 100, Limits()) == SHARDS_MAX
    assert shards_for(1 << 60, 100, Limits(shards=3)) == 3


def test_large_tasks_come_first() -> None:
    assert largest_first([1, 5, 3, 5]) == [1, 3, 2, 0]
