"""Who may have a partition, for how long, and what is left when it is over."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from broker.app import Broker
from broker.leases import leases
from broker.leases.lease_issuer import LeaseRequest
from broker.leases.leases import Leases
from broker.leases.model import LeaseError
from cleaner.lease_states import LeaseState
from cleaner.remote_compaction import PartitionPlan, Purpose
from cleaner.states import Paused
from storage.format import filenames
from storage.format.batch import TRANSACTIONAL, read_header
from tests.support.broker.leases import (
    FOLDER,
    ORDERS,
    RECORDS,
    adopted,
    append,
    carried_out,
    fill,
    leasing_broker,
    log_files,
    opened,
    served,
    settled,
    staged,
)
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.storage.logs import batch_of, offsets_in
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put

CLOCK_RATE = 10  # a turn of 2 ms is 4,000 lines


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=32)


async def refusal(request: Awaitable[object]) -> LeaseError:
    with pytest.raises(LeaseError) as refused:
        await request
    return refused.value


def only(plan: object) -> PartitionPlan:
    (part,) = plan.partitions  # type: ignore[attr-defined]
    assert isinstance(part, PartitionPlan)
    return part


# --- what is leased -------------------------------------------------------------------------------


async def test_the_plan_covers_the_closed_segments_and_the_broker_pins_them(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 3)
        append(env, partition)
        part = only(await opened(broker))
        job = part.job
        assert (job.first_dirty_offset, job.end_offset) == (0, 3 * RECORDS)
        assert [s.base_offset for group in job.groups for s in group] == [0, 10, 20]
        assert part.topic_id == partition.log.topic_id
        assert part.inputs_bytes == sum(s.size_bytes for s in partition.log.segment_facts()[:-1])
        names = env.listdir(job.directory)
        assert [n for n in names if n.endswith(".log")] == [
            filenames.file_name(base, filenames.LOG) for base in (0, 10, 20)
        ]
        for name in names:
            assert env.read_file(f"{job.directory}/{name}") == env.read_file(f"{FOLDER}/{name}")


async def test_the_active_segment_is_closed_on_demand(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 1)
        append(env, partition)
        assert only(await opened(broker, roll=True)).job.end_offset == RECORDS + 1


async def test_an_open_transaction_and_the_minimum_lag_bound_what_is_compacted(
    env: MemoryEnv,
) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 1)
        undecided = batch_of(
            b"x", producer_id=7, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL
        )
        partition.log.append(
            memoryview(undecided),
            read_header(undecided),
            now_ms=env.wall_ms(),
            in_transaction=True,
        )
        fill(env, broker, 1)
        plan = await opened(broker)
        assert only(plan).job.end_offset == RECORDS
        broker.leases.abandon(plan.compaction_id)
        read = only(await opened(broker, purpose=Purpose.READ))
        assert read.job.end_offset == RECORDS
    env = MemoryEnv(seed=32)
    async with leasing_broker(env, keys={"min.compaction.lag.ms": "60000"}) as broker:
        fill(env, broker, 1)
        env.advance_ms(60_001)
        fill(env, broker, 1)
        assert only(await opened(broker)).job.end_offset == RECORDS
        # A reader wants all that is decided, be it young.
        assert only(await opened(broker, purpose=Purpose.READ)).job.end_offset == 2 * RECORDS


async def test_the_job_is_the_one_that_the_pool_would_give_a_worker(env: MemoryEnv) -> None:
    from cleaner.planning.grouping import plan_job

    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        broker.cleaning.checkpoint(ORDERS, served(broker).log.generation, RECORDS)
        facts = broker.cleaning.facts_of(ORDERS)
        assert facts is not None
        verdict = broker.pool.scanner.assess(facts)
        assert verdict is not None
        inputs = broker.cleaning.job_inputs(ORDERS, 0, facts.log_end_offset)
        settings = broker.effective_settings.cleaner()
        plan = await opened(broker)
        job = only(plan).job
        clean_job = plan_job(
            facts, verdict, inputs, settings, job_id=plan.compaction_id, now_ms=job.now_ms
        )
        assert clean_job is not None
        assert replace(job, directory=clean_job.directory, published_by_ms=None) == clean_job


@pytest.mark.parametrize(
    ("lease_request", "status", "reason"),
    [
        (LeaseRequest("nothing", None, Purpose.COMPACT, False, 60), 404, "no topic nothing"),
        (LeaseRequest("orders", (9,), Purpose.COMPACT, False, 60), 404, "has 1 partitions"),
        (LeaseRequest("audit", None, Purpose.COMPACT, False, 60), 400, "is not compacted"),
        (LeaseRequest("orders", None, Purpose.COMPACT, False, 0), 400, "ttl_seconds"),
        (LeaseRequest("orders", None, Purpose.COMPACT, False, 3601), 400, "ttl_seconds"),
    ],
)
async def test_what_cannot_be_leased_is_refused_in_words(
    env: MemoryEnv, lease_request: LeaseRequest, status: int, reason: str
) -> None:
    async with leasing_broker(env) as broker:
        await broker.metadata_service.create("audit", 1, {"cleanup.policy": "delete"})
        error = await refusal(broker.leases.open(lease_request))
        assert (error.status, reason in error.reason) == (status, True), error.reason
        assert broker.pool.in_progress.states() == {}


async def test_a_partition_that_an_operator_paused_is_not_compacted_from_outside(
    env: MemoryEnv,
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 1)
        broker.pool.operator.pause(ORDERS)
        assert "paused by an operator" in (await refusal(opened(broker))).reason
        assert only(await opened(broker, purpose=Purpose.READ)).job.end_offset == RECORDS


async def test_a_topic_that_is_not_compacted_can_be_read(env: MemoryEnv) -> None:
    async with leasing_broker(env, keys={"cleanup.policy": "delete"}) as broker:
        fill(env, broker, 2)
        assert only(await opened(broker, purpose=Purpose.READ)).job.end_offset == 2 * RECORDS


# --- two at once ----------------------------------------------------------------------------------


async def test_one_run_compacts_a_partition_and_a_second_is_told_which(env: MemoryEnv) -> None:
    async with leasing_broker(env, partitions=2) as broker:
        for number in range(2):
            fill(env, broker, 2, number)
        first = await opened(broker, 0)
        error = await refusal(opened(broker))
        assert error.status == 409
        assert first.compaction_id in error.reason
        assert staged(env, "/disk1/orders-1") == []  # nothing of it was leased
        await opened(broker, 1)
        await opened(broker, purpose=Purpose.READ)  # readers are in nobody's way
        await opened(broker, purpose=Purpose.READ)


async def test_a_refusal_says_until_when_the_lease_lasts_and_how_to_free_it(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        first = await opened(broker)
        env.advance_ms(15_000)
        reason = (await refusal(opened(broker))).reason
        compaction = broker.leases.table.find(first.compaction_id)
        until = datetime.fromtimestamp(compaction.expires_ms / 1000, UTC).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        )
        assert f"until {until} (45 s from now)" in reason
        assert f"end the lease with `varve leases end {first.compaction_id}`" in reason
        broker.leases.abandon(first.compaction_id)
        await opened(broker)


async def test_of_two_that_come_at_the_same_time_one_gets_it(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        results = await asyncio.gather(*(opened(broker) for _ in range(3)), return_exceptions=True)
        refused = [item for item in results if isinstance(item, LeaseError)]
        assert [error.status for error in refused] == [409, 409]


async def test_there_are_only_so_many_runs(env: MemoryEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.leases.leases.COMPACTIONS_MAX", 2)
    async with leasing_broker(env) as broker:
        fill(env, broker, 1)
        await opened(broker, purpose=Purpose.READ)
        last = await opened(broker, purpose=Purpose.READ)
        assert (await refusal(opened(broker, purpose=Purpose.READ))).status == 429
        broker.leases.abandon(last.compaction_id)
        await opened(broker, purpose=Purpose.READ)


# --- the broker's own cleaner ---------------------------------------------------------------------


async def test_a_run_that_compacts_holds_the_cleaner_off_and_one_that_reads_does_not(
    env: MemoryEnv,
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        await opened(broker, purpose=Purpose.READ)
        assert broker.pool.in_progress.states() == {}
        plan = await opened(broker)
        assert broker.pool.in_progress.state(ORDERS) == Paused(1)
        broker.leases.abandon(plan.compaction_id)
        await settled(broker)
        assert broker.pool.in_progress.states() == {}


async def test_a_lease_that_is_not_renewed_lets_go(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker, ttl_seconds=60)
        carried_out(env, plan).leave_manifest(env)
        before = log_files(env)
        env.advance_ms(59_000)
        broker.leases.expire_due()
        broker.leases.renew(plan.compaction_id, None)
        env.advance_ms(59_000)
        broker.leases.expire_due()
        assert staged(env) == [plan.compaction_id]
        env.advance_ms(1_000)
        broker.leases.expire_due()
        await settled(broker)
        assert broker.pool.in_progress.states() == {}
        assert staged(env) == []
        assert log_files(env) == before
        for request in (
            lambda: broker.leases.renew(plan.compaction_id, None),
            lambda: broker.leases.table.authorize(plan.compaction_id, 0, plan.token),
        ):
            with pytest.raises(LeaseError, match="not renewed in time") as refused:
                request()
            assert refused.value.status == 410
        error = await refusal(broker.leases.adoptions.adopt(plan.compaction_id, None))
        assert error.status == 410
        assert broker.leases.table.stats.expired == 1


async def test_leases_expire_while_a_sweep_waits_for_a_disk(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = asyncio.Event()
    monkeypatch.setattr(leases, "WATCH_SECONDS", 0)
    monkeypatch.setattr(leases, "SWEEP_SECONDS", 0)
    monkeypatch.setattr(Leases, "sweep", lambda _: hung.wait())
    async with leasing_broker(env) as broker, asyncio.timeout(20):
        fill(env, broker, 2)
        await opened(broker, ttl_seconds=60)
        env.advance_ms(60_000)
        while broker.leases.table.alive():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        assert broker.leases.table.stats.expired == 1


async def test_a_lease_does_not_run_out_in_the_midst_of_an_adoption(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        publish = broker.cleaning.publish

        async def late(*args: object) -> object:
            env.advance_ms(3_600_000)
            broker.leases.expire_due()
            return await publish(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(broker.cleaning, "publish", late)
        assert (await adopted(broker, plan)).groups_published == 1


async def test_a_run_that_is_given_up_leaves_nothing(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        before = log_files(env)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        broker.leases.abandon(plan.compaction_id)
        await settled(broker)
        assert staged(env) == []
        assert log_files(env) == before
        with pytest.raises(LeaseError, match="a request ended its lease") as refused:
            broker.leases.abandon(plan.compaction_id)
        assert refused.value.status == 410


# --- what a lease does not block ------------------------------------------------------------------


async def retention(env: MemoryEnv, broker: Broker) -> None:
    partition = served(broker)
    partition.log.delete_records(RECORDS)
    partition.log.retention.expire(env.wall_ms())
    assert partition.log.log_start_offset == RECORDS


async def an_append(env: MemoryEnv, broker: Broker) -> None:
    append(env, served(broker))


async def a_deletion(_env: MemoryEnv, broker: Broker) -> None:
    async with asyncio.timeout(10):
        await broker.metadata_service.delete("orders")


async def another_setting(_env: MemoryEnv, broker: Broker) -> None:
    async with asyncio.timeout(10):
        await broker.metadata_service.alter(
            "orders", lambda now: {**now, "cleanup.policy": "delete"}
        )


async def a_view_of_it(env: MemoryEnv, broker: Broker) -> None:
    async with asyncio.timeout(10), broker.pool.control.paused(ORDERS):
        pass


@pytest.mark.parametrize(
    "change", [retention, an_append, a_deletion, another_setting, a_view_of_it]
)
async def test_nobody_waits_for_a_lease(
    env: MemoryEnv, change: Callable[[MemoryEnv, Broker], Awaitable[None]]
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        await opened(broker)
        await change(env, broker)


async def test_pinned_inputs_stay_when_retention_took_the_segments(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 3)
        job = only(await opened(broker)).job
        path = f"{job.directory}/{filenames.file_name(0, filenames.LOG)}"
        data = env.read_file(path)
        await retention(env, broker)
        env.advance_ms(3_600_000)
        partition.log.retention.purge_deleted(env.wall_ms())
        assert env.read_file(path) == data


async def test_what_retention_takes_before_it_is_linked_is_planned_anew(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    from broker.leases import lease_issuer as issue

    link, requested = issue.link_inputs, []

    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        loop = asyncio.get_running_loop()

        def after_retention(*args: object) -> object:
            if not requested:
                requested.append(asyncio.run_coroutine_threadsafe(retention(env, broker), loop))
                requested[0].result(10)
            return link(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(issue, "link_inputs", after_retention)
        plan = await opened(broker)
        assert only(plan).job.log_start_offset == RECORDS
        assert staged(env) == [plan.compaction_id]


async def test_segments_that_the_cleaner_replaces_while_they_are_linked_are_linked_anew(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read, no clean is given up; and no link is of a file that came in its midst."""
    from broker.leases import lease_issuer as issue

    async with leasing_broker(env) as broker:
        fill(env, broker, 4)
        compacting = await opened(broker)
        carried_out(env, compacting).leave_manifest(env)
        link, count = issue.link_inputs, 0
        loop = asyncio.get_running_loop()

        def in_the_midst(env: MemoryEnv, directory: str, folder: str, bases: list[int]) -> object:
            nonlocal count
            count += 1
            if count == 1:
                link(env, directory, folder, bases[:1])
                task = asyncio.run_coroutine_threadsafe(adopted(broker, compacting), loop)
                assert task.result(20).groups_published == 1
                return link(env, directory, folder, bases[1:])
            return link(env, directory, folder, bases)

        monkeypatch.setattr(issue, "link_inputs", in_the_midst)
        part = only(await opened(broker, purpose=Purpose.READ))
        assert count == 2
        assert [s.base_offset for group in part.job.groups for s in group] == [0]
        name = filenames.file_name(0, filenames.LOG)
        assert env.read_file(f"{part.job.directory}/{name}") == env.read_file(f"{FOLDER}/{name}")


async def test_a_disk_that_fails_at_staging_leaves_no_lease(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        fault = env.fail_on(lambda op, path: op == "link" and path.endswith(".index"), errno.EIO)
        assert (await refusal(opened(broker))).status == 409
        fault.remove()
        assert staged(env) == []
        assert broker.pool.in_progress.states() == {}
        await opened(broker)


# --- sweeping -------------------------------------------------------------------------------------


async def test_what_no_run_owns_is_swept(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        env.mkdir(f"{FOLDER}/varve.leases/orphan/out/attempt-7")
        put(env, f"{FOLDER}/varve.leases/orphan/out/attempt-7/x", b"x")
        put(env, f"{FOLDER}/varve.leases/stray", b"x")
        await broker.leases.sweep()
        assert staged(env) == [plan.compaction_id]
        assert broker.leases.table.stats.swept == 2
        assert (await opened(broker, purpose=Purpose.READ)).compaction_id in staged(env)


async def test_thousands_of_partitions_are_swept_in_turns(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = LoopMeter(CLOCK_RATE)
    async with leasing_broker(env) as broker:
        partitions = [*broker.topics.partitions()] * 5_000
        with monkeypatch.context() as patched:
            patched.setattr(broker.topics, "partitions", lambda: iter(partitions))
            with meter.measuring(monkeypatch):
                await broker.leases.sweep()
    assert meter.lines > 2 * len(partitions)
    assert meter.longest_turn < len(partitions)


async def test_files_that_cannot_be_removed_are_swept_later(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        fault = env.fail_on(lambda op, path: op == "unlink" and "/in/" in path, errno.EIO)
        broker.leases.abandon(plan.compaction_id)
        await settled(broker)
        assert staged(env) == [plan.compaction_id]
        await opened(broker)  # its lease is over all the same
        fault.remove()
        await broker.leases.sweep()
        assert plan.compaction_id not in staged(env)


async def test_ended_remote_compactions_are_listed_for_a_while(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.leases.lease_table.ENDED_MAX", 1)
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plans = []
        for _ in range(2):
            plans.append(await opened(broker))
            broker.leases.abandon(plans[-1].compaction_id)
        with pytest.raises(LeaseError) as refused:
            broker.leases.table.find(plans[0].compaction_id)
        assert refused.value.status == 404
        assert (
            broker.leases.table.find(plans[1].compaction_id).parts[0].state is LeaseState.ABANDONED
        )


async def test_the_log_is_read_and_written_as_ever_beside_a_run(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 2)
        await opened(broker)
        fill(env, broker, 1)
        assert offsets_in(partition.log) == list(range(3 * RECORDS))
