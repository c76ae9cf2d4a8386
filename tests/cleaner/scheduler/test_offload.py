"""Offloaded partitions: which ones they are, and when the workers clean them instead."""

import asyncio
from dataclasses import replace

import pytest

from cleaner.planning.findings import Reason
from cleaner.scheduler.explain import sentences
from cleaner.scheduler.history import JobRecord
from cleaner.scheduler.offload import OffloadedJob
from config.settings import SparkSettings
from storage.model import TopicPartition
from tests.support.cleaner.key_indexes import small_records_are_indexed
from tests.support.cleaner.log_facts import COMPACTED
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.cleaner.scheduler.pool_harness import (
    SETTINGS,
    T0,
    T1,
    PoolHarness,
    run_scenario,
    until_job,
)

SIZE = 400  # below the active segment of a log that `dirty` makes
SPARK = SETTINGS.model_copy(
    update={"engine": "spark", "spark": SparkSettings(min_bytes=SIZE - 1, attempts=2)}
)
OFFLOADED = replace(COMPACTED, varve_cleaner_engine="spark")
LOCAL = replace(COMPACTED, varve_cleaner_engine="local")


async def until_due(b: PoolHarness, *partitions: TopicPartition) -> None:
    await until(lambda: sorted(b.pool.offload.due) == sorted(partitions))


def explain(b: PoolHarness, partition: TopicPartition = T0) -> str:
    return " ".join(sentences(b.pool.explain(partition)))


def begin(b: PoolHarness, *partitions: TopicPartition) -> list[str]:
    """A job that has these; returns with what it will have been interrupted."""
    interrupts: list[str] = []
    b.pool.offload.job_started(OffloadedJob(partitions, "local[2]", b.pool.offload.now_ms()))
    b.pool.offload.interrupt = interrupts.append
    return interrupts


def fail(b: PoolHarness, partition: TopicPartition = T0, reason: str = "no") -> bool:
    b.pool.offload.job_ended()
    return b.pool.offload.failed(partition, reason)


def test_large_partitions_wait_for_spark_and_the_workers_keep_off() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_due(b, T0)
        assert b.link.sent == []
        explanation = b.pool.explain(T0)
        assert explanation.verdict is not None
        assert not explanation.verdict.to_clean
        assert explanation.next_attempt is None
        assert explain(b).startswith("t-0 is not being cleaned: offloaded.")
        assert (
            "Its 400 B are to be cleaned on Spark (local[*]); the job has not started yet."
            in explain(b)
        )
        begin(b, T0)
        await asyncio.sleep(10)
        assert b.pool.offload.due == []
        assert "A job on Spark (local[*]) is cleaning its 400 B." in explain(b)
        assert b.link.sent == []

    run_scenario(scenario, SPARK)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (SETTINGS, {}),
        (SPARK.model_copy(update={"spark": SparkSettings(min_bytes=SIZE)}), {}),
        (SPARK, {"config": LOCAL}),
    ],
    ids=["local engine", "not larger", "the topic says so"],
)
def test_others_are_the_workers_matter(settings, changes) -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(**changes)
        await until_job(b)
        assert b.pool.offload.due == []
        assert "Spark" not in explain(b)

    run_scenario(scenario, settings)


def test_a_deleted_topic_or_a_requested_clean_does_not_start_jobs_that_cannot_be_started() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_due(b, T0)
        b.pool.offload.cannot_start("no Java")
        b.pool.forget_failures(T0)
        b.pool.operator.request_clean(T0)
        assert b.pool.offload.status().unavailable == "no Java"

    run_scenario(scenario, SPARK)


def test_a_topic_can_be_spark_s_whatever_its_size_and_the_engine() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(config=OFFLOADED)
        await until_due(b, T0)
        assert b.link.sent == []

    run_scenario(scenario)


def test_what_is_not_worth_a_clean_is_not_worth_spark() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(config=replace(OFFLOADED, min_cleanable_dirty_ratio=1.0))
        b.dirty(T1, config=OFFLOADED)
        await until_due(b, T1)
        assert "Spark" not in explain(b)
        assert b.pool.operator.request_clean(T0) is not None
        await until_due(b, T0, T1)
        assert b.pool.offload.due == [T0, T1]  # the requested one starts first

    run_scenario(scenario)


def test_an_offloaded_log_is_cleaned_as_a_whole_so_it_waits_for_the_dirty_ratio_itself() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(checkpoint=20, config=OFFLOADED)  # a selective clean would start at 25 %
        b.dirty(T1, config=OFFLOADED)
        await until_due(b, T1)
        assert "50.0% of its bytes are dirty; min.cleanable.dirty.ratio is 50.0%" in explain(b)

    with small_records_are_indexed():
        run_scenario(scenario, SETTINGS.model_copy(update={"strategy": "generational"}))


def test_failures_are_waited_for_and_then_the_workers_take_over_for_a_while() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_due(b, T0)
        begin(b, T0)
        assert not fail(b)
        await asyncio.sleep(5)
        assert b.pool.offload.due == []
        assert b.link.sent == []
        assert "the last attempt failed (no), the next one is in" in explain(b)
        await asyncio.sleep(6)
        await until_due(b, T0)
        begin(b, T0)
        assert fail(b, reason="still not")
        assert b.pool.offload.status().given_up == (T0,)
        assert (
            "2 attempts on Spark (local[*]) failed in a row (still not). The workers clean"
            in explain(b)
        )
        await until_job(b)
        b.link.failed()
        await asyncio.sleep(SPARK.retry_backoff_max_ms / 1000)
        assert b.pool.offload.status().given_up == ()
        await until_due(b, T0)

    run_scenario(scenario, SPARK)


def test_a_log_that_went_on_is_no_failure_but_is_waited_for() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        for _ in range(5):
            await until_due(b, T0)
            begin(b, T0)
            b.pool.offload.job_ended()
            b.pool.offload.job_discarded(T0, "it was cut")
            await asyncio.sleep(1)
            assert b.pool.offload.due == []
        assert b.pool.offload.status().given_up == ()
        assert b.link.sent == []

    run_scenario(scenario, SPARK)


@pytest.mark.parametrize("way", [0, 1], ids=["retry", "other settings"])
def test_where_no_job_can_be_started_the_workers_have_all_until_somebody_says_otherwise(
    way: int,
) -> None:
    async def scenario(b: PoolHarness) -> None:
        assert b.pool.offload.cannot_start("no Java")
        assert not b.pool.offload.cannot_start("no Java")
        b.dirty()
        await until_job(b)
        assert "no job can be started there: no Java. The workers clean it" in explain(b)
        status = b.pool.offload.status()
        assert (status.unavailable, status.wait_ms > 50_000) == ("no Java", True)
        b.dirty(T1)
        if way == 0:
            b.pool.operator.retry(T0)
        else:
            spark = SparkSettings(min_bytes=SIZE - 2)
            b.pool.configure(SPARK.model_copy(update={"spark": spark}))
        await until_due(b, T1)
        assert b.pool.offload.status().unavailable == ""

    run_scenario(scenario, SPARK)


@pytest.mark.parametrize("subject", ["pause", "abort"])
def test_a_pause_and_an_abort_interrupt_the_job_that_has_the_partition(subject: str) -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        b.dirty(T1)
        await until_due(b, T0, T1)
        interrupts = begin(b, T0)
        act = b.pool.operator.pause if subject == "pause" else b.pool.operator.abort
        act(T1)
        assert interrupts == []
        assert act(T0)
        assert len(interrupts) == 1

    run_scenario(scenario, SPARK)


def test_what_only_expired_stays_with_the_workers() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(config=OFFLOADED, checkpoint=40)
        facts = b.host.logs[T0]
        verdict = b.pool.scanner.assess(facts)
        assert verdict is not None
        assert Reason.OFFLOADED not in {finding.reason for finding in verdict.findings}
        assert b.pool.offload.due == []

    run_scenario(scenario)


def test_failures_on_spark_are_kept_like_those_of_workers() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        record = JobRecord(T0, "", 1, 2, "failed", "no", engine="spark")
        b.pool.remote.failed(b.host.logs[T0], record)
        assert b.pool.history.newest(T0) == [record]
        assert b.pool.stats.failures == 1

    run_scenario(scenario, SPARK)


def test_a_deleted_partition_leaves_no_state() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        await until_due(b, T0)
        begin(b, T0)
        fail(b)
        del b.host.logs[T0]
        await asyncio.sleep(5)
        b.dirty()
        await until_due(b, T0)

    run_scenario(scenario, SPARK)
