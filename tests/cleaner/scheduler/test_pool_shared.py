"""A large clean that several workers share: parts, fairness, abort, death, a worker that hangs."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from cleaner import states as s
from cleaner.engine.shared.parts import IndexPart, RewritePart, RowsResult, WaitPart
from cleaner.job import CleanJob, ViewRules
from cleaner.planning.shared_clean import PartSizes, can_share
from cleaner.workers.channel import RunJob, RunPart
from cleaner.workers.throttle import Direction
from storage.format.txn_index import TxnIndexEntry
from tests.support.cleaner.cleaner_jobs import job as make_job
from tests.support.cleaner.log_facts import even
from tests.support.cleaner.scheduler.cleaner_fakes import FakeLink, empty_result, until
from tests.support.cleaner.scheduler.pool_harness import (
    SETTINGS,
    T0,
    T1,
    PoolHarness,
    pause_and_check,
    run_scenario,
)

TWO = SETTINGS.model_copy(update={"workers": 2})
SIZES = PartSizes(shared_min=200, part_min=100, part_max=100, one_pass=0)


def share(scenario: Callable[[PoolHarness], Coroutine[Any, Any, None]]) -> PoolHarness:
    """Run a scenario with two workers that share every log of at least two segments."""

    async def with_small_parts(b: PoolHarness) -> None:
        b.pool.dispatcher.part_sizes = SIZES
        await until(lambda: len(b.pool.status().workers) == 2)
        await until(lambda: all(worker.ready for worker in b.pool.status().workers))
        await scenario(b)

    return run_scenario(with_small_parts, TWO)


async def both(b: PoolHarness) -> tuple[FakeLink, FakeLink]:
    """The worker that has started the job, and the one that helps."""
    links = b.fake_workers.links
    await until(lambda: all(link.sent for link in links))
    return links[0], links[1]


async def run_to_the_end(b: PoolHarness, *links: FakeLink) -> None:
    """Let the workers do all parts."""
    while not b.host.done:
        for link in links:
            if link.sent and link._ordered.is_set() and isinstance(link.sent[-1], RunPart):
                link.part_done()
        await asyncio.sleep(0.001)


def test_idle_workers_do_parts_of_a_large_job() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 6)
        lead, helper = await both(b)
        first, second = await lead.part(), await helper.part()
        assert isinstance(first, IndexPart)
        assert isinstance(second, IndexPart)
        assert first.segments != second.segments
        assert lead.run == helper.run
        assert {worker.partition for worker in b.pool.status().workers} == {T0}
        lead.charge(100)
        helper.charge(50)
        await run_to_the_end(b, lead, helper)
        assert isinstance(b.state(), s.Idle)
        assert helper.ended
        assert lead.ended
        (job, report), *others = b.host.done
        assert not others
        assert report.next_dirty_offset == job.end_offset
        bases = [base for _, group in b.host.published for base in group]
        assert bases == [segment.base_offset for group in job.groups for segment in group]
        assert b.pool.stats.read_bytes == 150
        record = b.pool.history.last_of(T0)
        assert record is not None
        assert record.bytes_read == 150

    share(scenario)


def test_a_small_job_is_not_divided() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 1)
        await until(lambda: b.fake_workers.links[0].sent)
        assert isinstance(b.fake_workers.links[0].sent[-1], RunJob)
        assert not b.fake_workers.links[1].sent
        b.fake_workers.links[0].done()
        await until(lambda: b.host.done)

    share(scenario)


def test_a_helper_goes_to_another_partition_after_its_part() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 6)
        lead, helper = await both(b)
        b.dirty(T1, 1)
        b.pool.wake()
        await until(lambda: T1 in b.pool.scanner.queue)
        helper.part_done()
        await until(lambda: isinstance(helper.sent[-1], RunJob))
        assert helper.sent[-1].job.partition == T1
        assert isinstance(b.state(T0), s.Cleaning)
        assert b.pool.stats.aborted == 0
        helper.done()
        await until(lambda: isinstance(helper.sent[-1], RunPart))  # it is idle again
        await run_to_the_end(b, lead, helper)

    share(scenario)


def test_an_abort_of_a_later_job_does_not_stop_a_worker_that_helps_an_earlier_one() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 6)
        lead, helper = await both(b)
        b.dirty(T1, 1)
        b.pool.wake()
        await until(lambda: T1 in b.pool.scanner.queue)
        helper.part_done()
        await until(lambda: isinstance(helper.sent[-1], RunJob))
        b.pool.control.pause(T1)
        assert helper.aborted()
        helper.stopped()
        await until(lambda: isinstance(helper.sent[-1], RunPart))
        assert helper.sent[-1].job.partition == T0
        assert not helper.aborted()
        b.pool.control.abort(T0, "for the test")
        assert helper.aborted()
        lead.stopped()
        helper.stopped()
        await until(lambda: isinstance(b.state(T0), s.Cleaning))
        await run_to_the_end(b, lead, helper)
        assert not b.host.failures

    share(scenario)


def test_a_partition_that_waits_is_never_behind_a_part() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.host.logs.clear()
        b.dirty(T0, 6)
        b.dirty(T1, 1)
        lead, other = await both(b)
        jobs = {link.sent[-1].job.partition: type(link.sent[-1]) for link in (lead, other)}
        assert jobs == {T0: RunPart, T1: RunJob}
        links = sorted((lead, other), key=lambda link: link.sent[-1].job.partition)
        links[1].done()
        await until(lambda: isinstance(links[1].sent[-1], RunPart))
        links[0].part_done()
        links[1].part_done()
        await until(lambda: len(b.host.done) == 1)
        while len(b.host.done) < 2:
            for link in links:
                if link._ordered.is_set():
                    link.part_done()
            await asyncio.sleep(0.001)

    share(scenario)


def test_a_pause_waits_for_all_workers() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 6)
        lead, helper = await both(b)
        attempt = b.pool.control.attempts[T0]
        path = b.leave_file(T0, attempt.job.job_id)
        b.pool.control.pause(T0)
        assert isinstance(b.state(), s.Aborting)
        assert lead.aborted()
        assert helper.aborted()
        lead.stopped()
        await until(lambda: attempt.active == [attempt.workers[-1]])
        assert isinstance(b.state(), s.Aborting)
        assert b.env.exists(path)
        helper.stopped()
        await until(lambda: isinstance(b.state(), s.Paused))
        assert not b.env.exists(path)
        assert not b.host.published
        b.pool.control.resume(T0)
        await until(lambda: len(lead.sent) > 1)
        await run_to_the_end(b, lead, helper)

    share(scenario)


def test_a_pause_while_the_first_worker_waits_for_the_other() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 2)
        lead, helper = await both(b)
        lead.part_done()
        await until(lambda: isinstance(lead.last_part, WaitPart))
        b.pool.control.pause(T0)
        lead.stopped()
        helper.part_done()  # it was complete just then
        await until(lambda: isinstance(b.state(), s.Paused))
        await pause_and_check(b, T0)
        b.pool.control.resume(T0)
        await until(lambda: isinstance(b.state(), s.Cleaning))
        await run_to_the_end(b, lead, helper)

    share(scenario)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_worker_fails_the_job_and_stops_the_others(victim: int) -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 6)
        links = await both(b)
        path = b.leave_file(T0, b.pool.control.attempts[T0].job.job_id)
        dead, other = links[victim], links[1 - victim]
        dead.die()
        await until(other.aborted)
        assert isinstance(b.state(), s.Aborting)
        other.stopped()
        await until(lambda: b.host.failures)
        assert "its worker died" in b.host.failures[0][1]
        assert isinstance(b.state(), s.Quarantined)
        assert not b.env.exists(path)
        record = b.pool.history.last_of(T0)
        assert record is not None
        assert record.outcome == "failed"
        await until(lambda: isinstance(b.state(), s.Cleaning))
        await run_to_the_end(b, other, b.fake_workers.links[2])
        assert isinstance(b.state(), s.Idle)

    share(scenario)


def test_an_aborted_job_ends_once_if_its_last_workers_die_together() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 6)
        lead, helper = await both(b)
        b.pool.control.pause(T0)
        attempt = b.pool.control.attempts[T0]
        lead.stopped()
        await until(lambda: attempt.active == [attempt.workers[-1]])
        with capture_logs() as lines:
            helper.die()
            lead.die()
            await until(lambda: isinstance(b.state(), s.Paused))
            b.pool.control.resume(T0)
            await until(lambda: len(b.fake_workers.links) == 4)
            await run_to_the_end(b, *b.fake_workers.links[2:])
        assert not [line for line in lines if line["event"] == "worker supervision failed"]
        assert b.pool.stats.aborted == 1

    share(scenario)


def test_a_failed_part_fails_the_job() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 6)
        lead, helper = await both(b)
        helper.failed("OSError: disk")
        await until(lead.aborted)
        lead.stopped()
        await until(lambda: b.host.failures)
        assert b.host.failures[0][1] == "OSError: disk"
        await until(lambda: isinstance(b.state(), s.Cleaning))
        await run_to_the_end(b, lead, helper)

    share(scenario)


def test_a_helper_that_hangs_is_found_although_the_first_worker_waits() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 2)
        lead, helper = await both(b)
        lead.part_done()
        while not lead.aborted():  # it does nothing but wait
            if lead._ordered.is_set():
                assert isinstance(lead.last_part, WaitPart)
                lead.part_done()
            await asyncio.sleep(0.01)
        lead.stopped()
        await until(lambda: helper.killed)
        await until(lambda: b.host.failures)
        assert "no progress" in b.host.failures[0][1]

    share(scenario)


def test_transactions_leave_the_job_to_one_worker() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 6)
        lead, helper = await both(b)
        part = await helper.part()
        result = empty_result(helper.sent[-1].job, part)
        assert isinstance(result, RowsResult)
        helper.part_done(replace(result, transactions_seen=True))
        await until(lead.aborted)
        lead.stopped()
        await until(
            lambda: isinstance(lead.sent[-1], RunJob) or isinstance(helper.sent[-1], RunJob)
        )
        record = b.pool.history.last_of(T0)
        assert record is not None
        assert record.outcome == "stale"
        assert "transactions" in record.reason
        assert not b.host.failures
        one = lead if isinstance(lead.sent[-1], RunJob) else helper
        one.done()
        await until(lambda: b.host.done)

    share(scenario)


def test_without_scratch_space_the_job_is_left_to_one_worker() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 6)
        lead, helper = await both(b)
        lead.no_space()
        await until(helper.aborted)
        helper.stopped()
        await until(
            lambda: isinstance(lead.sent[-1], RunJob) or isinstance(helper.sent[-1], RunJob)
        )
        record = b.pool.history.last_of(T0)
        assert record is not None
        assert "the disk is full" in record.reason
        one = lead if isinstance(lead.sent[-1], RunJob) else helper
        one.done()
        await until(lambda: b.host.done)

    share(scenario)


def test_a_worker_that_is_superfluous_leaves_after_its_part() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 6)
        lead, helper = await both(b)
        b.pool.configure(SETTINGS)
        helper.part_done()
        await until(lambda: helper.closed)
        await run_to_the_end(b, lead)
        assert b.pool.stats.worker_deaths == 0

    share(scenario)


def test_groups_are_published_in_order_whoever_finishes_first() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 4)
        b.change(T0, config=replace(b.host.logs[T0].config, segment_bytes=100))
        lead, helper = await both(b)
        while not isinstance(lead.last_part, RewritePart):
            for link in (lead, helper):
                if link._ordered.is_set():
                    link.part_done()
            await asyncio.sleep(0.001)
        await until(lambda: isinstance(helper.last_part, RewritePart))
        assert isinstance(lead.last_part, RewritePart)
        later = max((lead, helper), key=lambda link: link.sent[-1].part.groups)  # type: ignore[union-attr]
        later.part_done()
        await until(lambda: later._ordered.is_set())
        assert not b.host.published
        await run_to_the_end(b, lead, helper)
        bases = [base for _, group in b.host.published for base in group]
        assert bases == sorted(bases)

    share(scenario)


def large_job(**changes: object) -> CleanJob:
    sources = tuple(segment for segment in even(4, size_bytes=1 << 30)[:-1])
    groups = tuple(
        (
            replace(
                make_job().groups[0][0],
                base_offset=segment.base_offset,
                next_base_offset=segment.next_base_offset,
                size_bytes=segment.size_bytes,
            ),
        )
        for segment in sources
    )
    return replace(
        make_job(groups=groups, end_offset=40, spill_bytes_max=1 << 40),
        **changes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("changes", "workers", "shared"),
    [
        ({}, 2, False),  # one pass is faster
        ({"first_dirty_offset": 25}, 2, False),
        ({"first_dirty_offset": 35}, 2, True),  # the clean section is large
        ({"dedupe_buffer_bytes": 0}, 2, True),
        ({"first_dirty_offset": 35, "by_index": True}, 2, False),  # most of it stays unread
        ({"dedupe_buffer_bytes": 0, "by_index": True}, 2, True),  # nothing is clean yet
        ({"dedupe_buffer_bytes": 0}, 1, False),
        ({"dedupe_buffer_bytes": 0, "spill_bytes_max": 0}, 2, False),
        ({"dedupe_buffer_bytes": 0, "view": ViewRules()}, 2, False),
        ({"dedupe_buffer_bytes": 0, "aborted": (TxnIndexEntry(1, 0, 5, 3),)}, 2, False),
        ({"expired_only": True, "first_dirty_offset": 40}, 2, False),
    ],
)
def test_which_jobs_are_divided(changes: dict[str, object], workers: int, shared: bool) -> None:
    assert can_share(large_job(**changes), workers) is shared


def test_a_direction_of_the_budget_is_charged_by_each_worker() -> None:
    async def scenario(b: PoolHarness) -> None:
        b.dirty(T0, 6)
        lead, helper = await both(b)
        for link in (lead, helper):
            link.side.charge(Direction.WRITE, 10)
        await run_to_the_end(b, lead, helper)
        assert b.pool.stats.written_bytes == 20

    share(scenario)
