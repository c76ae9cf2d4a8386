"""Checks of whole logs: one at a time, what they report as different, and how they end."""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from broker.app import Broker
from broker.cleaning import log_checks
from broker.cleaning.log_checks import (
    RESULTS_MAX,
    CheckRefusedError,
    CheckStatus,
    LogChecks,
    differences_of,
)
from cleaner.host import LogFacts
from cleaner.job import CleanJob, Damage, RangeDigest
from cleaner.states import Idle, Paused
from cleaner.verification import IndexState, LogCheck, LogCheckRequest, SegmentCheck
from cleaner.workers.dedicated_worker import JobFailedError, OnProgress, ignore_progress
from storage.errors import NoRoomError
from storage.format.batch import Record, build_batch, read_header
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import call_api
from tests.support.storage.memory_env import MemoryEnv

ORDERS = TopicPartition("orders", 0)
PATH = "/api/v1/cleaner/partitions/orders/0/verify"
TOPICS = {"orders": {"partitions": 2, "keys": {"cleanup.policy": "compact"}}}
SEGMENT = SegmentCheck(0, 10, 1000, records=8, live=5, tombstones=1, index=IndexState.CURRENT)
CHECK = LogCheck(
    end_offset=10,
    segments=(SEGMENT,),
    keys=5,
    uncleaned=0,
    digests=(),
    changed=(),
    compared=0,
    bytes_read=2000,
    seconds=0.5,
)


class FakeChecker:
    """A LogChecker that answers once `gate` is open."""

    def __init__(self, answer: LogCheck | Exception = CHECK) -> None:
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.jobs: list[CleanJob] = []
        self._answer = answer

    @asynccontextmanager
    async def worker(self) -> AsyncIterator["FakeChecker"]:
        yield self

    async def check_log(
        self, job: CleanJob, request: LogCheckRequest, on_progress: OnProgress = ignore_progress
    ) -> LogCheck:
        self.jobs.append(job)
        on_progress("map", 1, 2)
        self.begun.set()
        await self.gate.wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def close_segment(broker: Broker, partition: TopicPartition, now_ms: int) -> None:
    """Append a record and close its segment."""
    served = broker.topics.partition(partition)
    assert served is not None
    batch = build_batch([Record(0, now_ms, b"k", b"v")])
    served.log.append(batch, read_header(batch), now_ms=now_ms)
    served.log.roll(now_ms)


@asynccontextmanager
async def broker_with(checker: FakeChecker) -> AsyncIterator[tuple[Broker, LogChecks]]:
    """A broker whose partition orders-0 has a closed segment, and its checks."""
    env = MemoryEnv(seed=7)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        close_segment(broker, ORDERS, env.wall_ms())
        settings = broker.effective_settings.cleaner
        checks = LogChecks(env, broker.cleaning, broker.pool, checker.worker, settings)
        try:
            yield broker, checks
        finally:
            await checks.stop()


async def ended(checks: LogChecks) -> CheckStatus:
    """The status of orders-0 once it has ended."""
    await checks.wait_ended()
    status = checks.status(ORDERS)
    assert status is not None
    return status


async def test_a_log_without_a_closed_segment_has_nothing_that_differs() -> None:
    async with broker_in_memory(MemoryEnv(seed=7), topics=TOPICS) as broker:
        status, before = await call_api(broker, "GET", PATH)
        assert status == 404
        assert before["detail"] == "orders-0 was not verified since the broker started"
        status, begun = await call_api(broker, "POST", PATH)
        assert (status, begun["topic"]) == (200, "orders")
        await ended(broker.log_checks)
        _, done = await call_api(broker, "GET", PATH)
    assert (done["state"], done["differences"], done["segments"]) == ("done", [], [])
    assert done["result"]["keys"] == 0


async def test_an_offline_partition_is_not_verified() -> None:
    async with broker_in_memory(MemoryEnv(seed=7), topics=TOPICS) as broker:
        broker.topics.take_offline([ORDERS], "its disk is gone")
        status, result = await call_api(broker, "POST", PATH)
    assert (status, result["detail"]) == (409, "orders-0 is offline: its disk is gone")


async def test_the_cleaner_leaves_the_partition_alone_during_the_check() -> None:
    checker = FakeChecker()
    async with broker_with(checker) as (broker, checks):
        checks.begin(ORDERS)
        await checker.begun.wait()
        assert isinstance(broker.pool.in_progress.state(ORDERS), Paused)
        begun = checks.status(ORDERS)
        assert begun is not None
        assert (begun.state, begun.share) == ("running", 0.25)
        checker.gate.set()
        done = await ended(checks)
        assert isinstance(broker.pool.in_progress.state(ORDERS), Idle)
    assert (done.state, done.check) == ("done", CHECK)
    (job,) = checker.jobs
    assert (job.first_dirty_offset, job.end_offset) == (0, 1)


async def test_one_check_runs_at_a_time_and_the_others_wait() -> None:
    checker, other = FakeChecker(), TopicPartition("orders", 1)
    async with broker_with(checker) as (_, checks):
        assert not checks.abort(other)
        checks.begin(ORDERS)
        await checker.begun.wait()
        with pytest.raises(CheckRefusedError, match="orders-0 is being verified"):
            checks.begin(ORDERS)
        assert checks.begin(other).state == "waiting"
        assert checks.abort(ORDERS)
        states = [await ended(checks), checks.status(other)]
        assert [status and status.state for status in states] == ["aborted", "done"]


async def test_clients_take_turns_with_their_checks() -> None:
    topics = {"orders": {"partitions": 4, "keys": {"cleanup.policy": "compact"}}}
    async with broker_in_memory(MemoryEnv(seed=7), topics=topics) as broker:
        checks, order = broker.log_checks, list[int]()

        async def check(begun: CheckStatus) -> LogCheck:
            order.append(begun.partition.partition)
            await asyncio.sleep(0)
            return CHECK

        checks._check = check  # type: ignore[method-assign]
        for number, client in enumerate("aaab"):
            checks.begin(TopicPartition("orders", number), client)
        await checks.wait_ended()
    assert order == [0, 3, 1, 2]


async def test_one_client_leaves_room_for_the_checks_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_checks, "CHECKS_MAX", 4)
    topics = {"orders": {"partitions": 4, "keys": {"cleanup.policy": "compact"}}}
    async with broker_in_memory(MemoryEnv(seed=7), topics=topics) as broker:
        checks = broker.log_checks
        partitions = [TopicPartition("orders", number) for number in range(4)]
        for partition in partitions[:2]:
            checks.begin(partition, "a")
        with pytest.raises(CheckRefusedError, match="2 checks run or wait") as refused:
            checks.begin(partitions[2], "a")
        assert "orders" not in str(refused.value), "another client may not know the name"
        checks.begin(partitions[3], "b")
        await checks.stop()


async def test_a_check_whose_worker_fails_says_why() -> None:
    checker = FakeChecker(JobFailedError("no progress for 60 s"))
    checker.gate.set()
    async with broker_with(checker) as (_, checks):
        checks.begin(ORDERS)
        status = await ended(checks)
    assert (status.state, status.reason) == ("failed", "no progress for 60 s")


async def test_a_log_that_was_truncated_meanwhile_is_not_verified() -> None:
    checker = FakeChecker()
    async with broker_with(checker) as (broker, checks):
        checks.begin(ORDERS)
        await checker.begun.wait()
        served = broker.topics.partition(ORDERS)
        assert served is not None
        served.log.begin_generation()
        checker.gate.set()
        status = await ended(checks)
    assert status.state == "failed"
    assert "the log was truncated or changed meanwhile" in status.reason


async def test_the_results_of_few_partitions_are_kept() -> None:
    topics = {"orders": {"partitions": RESULTS_MAX + 2, "keys": {"cleanup.policy": "compact"}}}
    async with broker_in_memory(MemoryEnv(seed=7), topics=topics) as broker:
        checks = broker.log_checks
        for number in range(RESULTS_MAX + 2):
            checks.begin(TopicPartition("orders", number))
            await checks.wait_ended()
        kept = [checks.status(TopicPartition("orders", n)) for n in range(RESULTS_MAX + 2)]
    assert [status is None for status in kept] == [True, True] + [False] * RESULTS_MAX


async def test_a_client_with_many_results_does_not_displace_that_of_another() -> None:
    topics = {"orders": {"partitions": 2 * RESULTS_MAX, "keys": {"cleanup.policy": "compact"}}}
    async with broker_in_memory(MemoryEnv(seed=7), topics=topics) as broker:
        checks = broker.log_checks
        for number in range(2 * RESULTS_MAX):
            checks.begin(TopicPartition("orders", number), "alice" if number else "bob")
            await checks.wait_ended()
        kept = [n for n in range(2 * RESULTS_MAX) if checks.status(TopicPartition("orders", n))]
    assert kept == [0, *range(RESULTS_MAX + 1, 2 * RESULTS_MAX)]


@pytest.mark.parametrize(
    ("check", "kinds"),
    [
        (CHECK, []),
        (replace(CHECK, segments=(replace(SEGMENT, index=IndexState.STALE),)), []),
        (replace(CHECK, segments=(replace(SEGMENT, index=IndexState.MISSING),)), []),
        (replace(CHECK, segments=(replace(SEGMENT, index=IndexState.WRONG),)), ["key index"]),
        (replace(CHECK, segments=(replace(SEGMENT, index=IndexState.DAMAGED),)), ["key index"]),
        (replace(CHECK, segments=(replace(SEGMENT, damage=Damage("p", 1, "bad")),)), ["damage"]),
        (replace(CHECK, segments=(replace(SEGMENT, misplaced=2),)), ["offset index"]),
        (replace(CHECK, uncleaned=3), ["superseded records"]),
        (replace(CHECK, uncleaned=None), []),
        (replace(CHECK, changed=(RangeDigest(0, 10, 4, "00"),)), ["lost records"]),
    ],
)
def test_only_what_must_not_be_is_a_difference(check: LogCheck, kinds: list[str]) -> None:
    assert [difference.kind for difference in differences_of(check)] == kinds


async def test_a_check_that_is_aborted_before_it_begins_makes_room_for_another() -> None:
    """Two operators may ask in the same turn of the loop."""
    checker = FakeChecker()
    async with broker_with(checker) as (_, checks):
        checks.begin(ORDERS)
        assert checks.abort(ORDERS)
        assert (await ended(checks)).state == "aborted"
        checks.begin(ORDERS)


async def test_a_check_of_a_deleted_topic_says_nothing_of_a_new_one() -> None:
    checker = FakeChecker()
    checker.gate.set()
    async with broker_with(checker) as (broker, checks):
        checks.begin(ORDERS)
        assert (await ended(checks)).state == "done"
        await broker.metadata_service.delete("orders")
        await broker.metadata_service.create("orders", 1, {"cleanup.policy": "compact"})
        assert checks.status(ORDERS) is None


async def test_a_check_that_waits_keeps_no_place_of_a_topic_that_was_created_again() -> None:
    checker = FakeChecker()
    async with broker_with(checker) as (broker, checks):
        other = TopicPartition("orders", 1)
        close_segment(broker, other, 0)
        checks.begin(other)
        await checker.begun.wait()
        checks.begin(ORDERS)
        await broker.metadata_service.delete("orders")
        await broker.metadata_service.create("orders", 1, {"cleanup.policy": "compact"})
        assert checks.status(ORDERS) is None
        assert not checks.abort(ORDERS)
        checks.begin(ORDERS)
        checker.gate.set()
        assert (await ended(checks)).state == "done"
        assert [job.partition for job in checker.jobs] == [other]


async def test_a_partition_whose_files_cannot_be_opened_now_is_no_internal_error() -> None:
    async with broker_with(FakeChecker()) as (broker, _):

        def full(*_: object) -> LogFacts:
            raise NoRoomError(OSError(errno.EMFILE, "too many open files"), "/disk1/orders-0")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(broker.cleaning), "facts_of", full)
            for method, path in (("POST", PATH), ("GET", PATH.removesuffix("/verify"))):
                status, answer = await call_api(broker, method, path)
                assert (status, "too many open files" in answer["detail"]) == (409, True)
