"""A topic's own rate limit: when its next clean starts, and what it costs nobody else."""

import asyncio
from dataclasses import replace

import pytest

from cleaner import states as s
from cleaner.planning.findings import Reason
from cleaner.scheduler.explain import sentences
from config.topics.keys import InvalidTopicConfigError, TopicLayers, resolve
from storage.model import TopicPartition
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

KEY = "varve.cleaner.io.max.bytes.per.second"
RATE = 1000
LIMITED = replace(COMPACTED, varve_cleaner_io_max_bytes_per_second=RATE)
OTHER = TopicPartition("other", 0)


def limited(b: PoolHarness, partition: TopicPartition, topic_id: bytes = b"topic t") -> None:
    b.dirty(partition, config=LIMITED, topic_id=topic_id)


def blocked_by(b: PoolHarness, partition: TopicPartition) -> list[Reason]:
    verdict = b.pool.explain(partition).verdict
    assert verdict is not None
    return [finding.reason for finding in verdict.findings if finding.blocks]


async def move(b: PoolHarness, count: int) -> None:
    """Let the job read so many bytes, and end."""
    done = len(b.host.done)
    b.link.charge(count)
    b.link.done()
    await until(lambda: len(b.host.done) == done + 1)


async def next_job(b: PoolHarness, number: int) -> tuple[TopicPartition, float]:
    """The partition of the worker's next job, and when it began."""
    await until(lambda: len(b.link.sent) == number, seconds=600)
    return (await b.link.job()).partition, asyncio.get_running_loop().time()


def test_a_topic_rests_after_a_clean_until_its_bytes_are_within_the_limit() -> None:
    async def scenario(b: PoolHarness) -> None:
        limited(b, T0)
        await until_job(b)
        began = asyncio.get_running_loop().time()
        limited(b, T1)
        await asyncio.sleep(5)
        assert blocked_by(b, T1) == [Reason.TOPIC_LIMIT]
        assert b.pool.explain(T1).next_attempt is None, "nobody knows when the clean ends"
        assert "another partition of it is being cleaned." in " ".join(
            sentences(b.pool.explain(T1))
        )
        await move(b, 60 * RATE)
        explanation = b.pool.explain(T1)
        assert explanation.next_attempt is not None
        wait_ms = explanation.next_attempt.at_ms - explanation.at_ms
        assert explanation.next_attempt.cause is Reason.TOPIC_LIMIT
        assert 50_000 < wait_ms < 56_000
        text = " ".join(sentences(explanation))
        assert "may read and write 1000 B/s" in text
        assert "when the rate limit of its topic allows it" in text
        partition, at = await next_job(b, 2)
        assert partition == T1
        assert 60 <= at - began <= 62

    run_scenario(scenario)


def test_a_topic_that_rests_occupies_no_worker() -> None:
    async def scenario(b: PoolHarness) -> None:
        limited(b, T0)
        await until_job(b)
        await move(b, 3600 * RATE)
        limited(b, T1)
        b.dirty(OTHER, topic_id=b"another topic")
        partition, _ = await next_job(b, 2)
        assert partition == OTHER
        assert [worker.index for worker in b.pool.status().workers] == [0]

    run_scenario(scenario)


def test_the_cleans_of_a_topic_with_a_limit_run_one_after_another() -> None:
    async def scenario(b: PoolHarness) -> None:
        limited(b, T0)
        limited(b, T1)
        await until(lambda: len(b.fake_workers.links) == 2)
        await until(lambda: any(link.sent for link in b.fake_workers.links))
        await asyncio.sleep(20)
        assert sum(len(link.sent) for link in b.fake_workers.links) == 1

    run_scenario(scenario, SETTINGS.model_copy(update={"workers": 2}))


def test_a_clean_that_failed_or_was_aborted_counts_with_what_it_moved() -> None:
    async def scenario(b: PoolHarness) -> None:
        limited(b, T0)
        await until_job(b)
        began = asyncio.get_running_loop().time()
        b.link.charge(100 * RATE)
        b.link.failed("OSError: disk")
        await until(lambda: isinstance(b.state(), s.Quarantined))
        _, at = await next_job(b, 2)
        assert 100 <= at - began <= 102
        b.link.charge(200 * RATE)
        b.pool.operator.abort(T0)
        b.link.stopped()
        _, later = await next_job(b, 3)
        assert 200 <= later - at <= 202

    run_scenario(scenario)


def test_a_requested_clean_does_not_wait_for_the_limit_and_does_not_count() -> None:
    async def scenario(b: PoolHarness) -> None:
        limited(b, T0)
        await until_job(b)
        began = asyncio.get_running_loop().time()
        await move(b, 60 * RATE)
        limited(b, T1)
        assert b.pool.operator.request_clean(T1) is not None
        partition, at = await next_job(b, 2)
        assert partition == T1
        assert at - began < 5
        await move(b, 3600 * RATE)
        limited(b, T0)
        partition, at = await next_job(b, 3)
        assert partition == T0
        assert 60 <= at - began <= 62

    run_scenario(scenario)


def test_a_changed_limit_holds_at_once_and_one_that_is_taken_away_ends_the_rest() -> None:
    async def scenario(b: PoolHarness) -> None:
        limited(b, T0)
        await until_job(b)
        began = asyncio.get_running_loop().time()
        await move(b, 3600 * RATE)
        faster = replace(COMPACTED, varve_cleaner_io_max_bytes_per_second=100 * RATE)
        b.dirty(T0, config=faster, topic_id=b"topic t")
        _, at = await next_job(b, 2)
        assert 36 <= at - began <= 38
        await move(b, 3600 * RATE)
        b.dirty(T0, topic_id=b"topic t")
        _, later = await next_job(b, 3)
        assert later - at < 5

    run_scenario(scenario)


def test_a_topic_that_is_created_again_does_not_rest() -> None:
    async def scenario(b: PoolHarness) -> None:
        limited(b, T0)
        await until_job(b)
        began = asyncio.get_running_loop().time()
        await move(b, 3600 * RATE)
        limited(b, T0, topic_id=b"another topic t")
        _, at = await next_job(b, 2)
        assert at - began < 5
        await asyncio.sleep(5)
        assert len(b.pool.scanner.rests._last) == 1

    run_scenario(scenario)


@pytest.mark.parametrize(("value", "rate"), [("-1", None), ("65536", 65536)])
def test_no_limit_is_minus_one(value: str, rate: int | None) -> None:
    assert resolve(TopicLayers(dynamic={KEY: value})).cleaner_bytes_per_second_max == rate


@pytest.mark.parametrize("value", ["0", "1", "65535"])
def test_a_limit_below_the_minimum_is_refused(value: str) -> None:
    with pytest.raises(InvalidTopicConfigError):
        resolve(TopicLayers(dynamic={KEY: value}))
