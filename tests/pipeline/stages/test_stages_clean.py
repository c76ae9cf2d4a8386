"""Single rules of cleaning by stages, each beside the cleaner itself."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cleaner.engine.kernels import warm_up
from cleaner.engine.kernels.passes import counting, shards
from cleaner.job import CleanJob
from pipeline.compaction.cleaning import clean_partitions
from pipeline.compaction.indexing import index_partitions
from pipeline.stages.planning import Limits
from storage.format.batch import Record
from storage.format.compression import LZ4
from tests.support.cleaner.clean_cases import batch, record
from tests.support.cleaner.cleaning import Segment, clean_job, segment, write_segments
from tests.support.stages import DirectEngine, assert_same, source_of
from tests.support.storage.memory_env import MemoryEnv

IN_SHARDS = Limits(memory_bytes=1 << 20, task_bytes=1, parallelism=2, shards=3)


def prepared(*segments: Segment, **changes: object) -> tuple[MemoryEnv, CleanJob]:
    """A log with a group for each segment, and its job."""
    env = MemoryEnv(1)
    sources = write_segments(env, segments)
    return env, clean_job([[source] for source in sources], **changes)


def cleaned(env: MemoryEnv, job: CleanJob, limits: Limits = IN_SHARDS) -> list[str]:
    """Clean and compare -> the stages whose tasks were run."""
    engine = DirectEngine(env)
    (cleaned_partition,) = clean_partitions(engine, [job], source_of, limits)
    assert_same(env, cleaned_partition, job)
    return engine.ran


def test_groups_are_rewritten_apart_where_there_are_no_transactions() -> None:
    env, job = prepared(
        segment(0, [batch(record(0, "a"), record(1, "b"))], 2),
        segment(2, [batch(record(2, "a"), record(3, "c"))], 4),
        segment(4, [batch(record(4, "a"))], 5),
    )
    assert cleaned(env, job).count("rewrite") == 3


def test_every_task_is_told_of_the_segments_that_it_reads_alone() -> None:
    env, job = prepared(*(segment(n, [batch(record(n, "a"))], n + 1) for n in range(6)))
    named: dict[str, list[list[int]]] = {}

    class Noting(DirectEngine):
        def run(self, stage: str, tasks: Sequence[bytes], **more: Any) -> list[bytes]:
            document = [json.loads(task)["job"]["groups"] for task in tasks]
            named[stage] = [
                [item["base_offset"] for group in job for item in group] for job in document
            ]
            return super().run(stage, tasks, **more)

    clean_partitions(Noting(env), [job], source_of, IN_SHARDS)
    apart = [[n] for n in range(6)]
    assert sorted(named["combine"]) == sorted(named["rewrite"]) == apart
    assert not any(named["merge"])


def test_one_task_rewrites_a_partition_with_transactions() -> None:
    env, job = prepared(
        segment(0, [batch(record(0, "a"), attributes=0x10, producer_id=7, producer_epoch=0)], 2),
        segment(2, [batch(record(2, "a"), record(3, "c"))], 4),
    )
    assert cleaned(env, job).count("rewrite") == 1


def test_records_of_the_clean_section_stay_beside_older_ones_of_their_key_there() -> None:
    """Only what is dirty supersedes: as it is where a clean was cut short by a full map."""
    env, job = prepared(
        segment(0, [batch(record(0, "a"), record(1, "a"), record(2, "b"))], 3),
        segment(3, [batch(record(3, "b"), record(4, "c"))], 5),
        first_dirty_offset=3,
    )
    (cleaned_partition,) = clean_partitions(DirectEngine(env), [job], source_of, IN_SHARDS)
    assert (cleaned_partition.report.records_before, cleaned_partition.report.records_after) == (
        5,
        4,
    )
    assert_same(env, cleaned_partition, job)


def test_batches_wider_than_any_window_are_filtered_by_their_survivors() -> None:
    wide = 1 << 28
    records = [record(0, "a"), record(1, "b"), record(wide - 1, "c")]
    env, job = prepared(
        segment(0, [batch(*records, last_offset_delta=wide)], wide + 1),
        segment(wide + 1, [batch(record(wide + 1, "a"), record(wide + 2, "d"))], wide + 3),
    )
    cleaned(env, job)


def test_offsets_far_apart_take_no_memory_for_what_lies_between() -> None:
    far = 1 << 40
    middle = [
        batch(Record(far, 5, b"a", b"v")),
        batch(Record(far + (1 << 30), 5, b"b", None)),
    ]
    env, job = prepared(
        segment(0, [batch(record(0, "a"), record(1, "b"))], far),
        segment(far, middle, 2 * far),
        segment(2 * far, [batch(Record(2 * far, 5, b"c", b"v"))], 2 * far + 1),
    )
    cleaned(env, job)


def test_a_partition_whose_keys_do_not_fit_after_all_is_cut_up() -> None:
    records = [batch(record(offset, f"key {offset}")) for offset in range(200)]
    env, job = prepared(segment(0, records[:100], 100), segment(100, records[100:], 200))
    engine = DirectEngine(env)
    limits = Limits(memory_bytes=1000)
    (cleaned_partition,) = clean_partitions(engine, [job], source_of, limits)
    assert engine.ran[:2] == ["whole", "combine"]
    assert_same(env, cleaned_partition, job)


def test_a_partition_without_records_comes_to_nothing() -> None:
    env, job = prepared(segment(0, [], 5), segment(5, [], 9))
    cleaned(env, job)


@pytest.mark.parametrize("limits", [Limits(), IN_SHARDS])
def test_nothing_but_what_has_expired_is_one_task(limits: Limits) -> None:
    horizon = batch(record(0, "a", None), delete_horizon_ms=5)
    env, job = prepared(segment(0, [horizon, batch(record(1, "b"))], 2))
    job = replace(job, expired_only=True, first_dirty_offset=job.end_offset)
    assert cleaned(env, job, limits) == ["whole"]


def test_partitions_go_through_the_stages_together() -> None:
    env = MemoryEnv(1)
    first = write_segments(env, [segment(0, [batch(record(0, "a"), record(1, "a"))], 2)])
    jobs = [
        clean_job([first]),
        clean_job([first], job_id="run2"),
        clean_job([first], job_id="r3"),
    ]
    engine = DirectEngine(env)
    cleaneds = clean_partitions(engine, jobs, source_of, replace(IN_SHARDS, shards=1))
    assert engine.ran == ["combine"] * 3 + ["merge"] * 3 + ["rewrite"] * 3
    for job, cleaned_partition in zip(jobs, cleaneds, strict=True):
        assert_same(env, cleaned_partition, job)


def test_warming_up_compiles_all_that_stages_call() -> None:
    warm_up()
    kernels = [
        shards.count_by_shard,
        shards.sort_by_shard,
        shards.merge_rows,
        shards.list_entries,
        shards.list_batches,
        shards.list_unpacked,
        shards.list_missing,
        shards.check_markers,
        counting.count_and_index,
        counting.count_and_index_unpacked,
    ]
    compiled = [len(kernel.signatures) for kernel in kernels]  # type: ignore[attr-defined]
    assert all(compiled)
    records = [
        batch(record(0, "a"), attributes=0x10, producer_id=7, producer_epoch=0),
        batch(record(1, "a"), record(2, "b", None), codec=LZ4),
        batch(record(3, "c")),
        batch(record(4, "a"), codec=LZ4),
    ]
    for dirty in (0, 4):
        env, job = prepared(segment(0, records, 5), first_dirty_offset=dirty)
        cleaned(env, job)
        for limits in (Limits(), IN_SHARDS):
            index_partitions(DirectEngine(env), [job], source_of, limits)
    assert [len(kernel.signatures) for kernel in kernels] == compiled  # type: ignore[attr-defined]
