"""Outputs that were made outside: adopted if they are what the job leaves, refused otherwise."""

import errno
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.leases.model import LeaseError
from cleaner.job import RangeDigest
from cleaner.remote_compaction import AdoptOutcome, Purpose
from cleaner.scheduler.control import PartitionBusyError
from storage.errors import SwapRefusedError
from storage.format.batch import walk_headers
from tests.support.broker.leases import (
    ATTEMPT,
    KEYS,
    ORDERS,
    RECORDS,
    Made,
    adopted,
    append,
    carried_out,
    fill,
    latest,
    leasing_broker,
    log_files,
    opened,
    served,
    settled,
    staged,
)
from tests.support.storage.logs import offsets_in
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=31)


async def test_what_was_made_outside_is_read_from_then_on(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 4)
        before, size_bytes = latest(partition), partition.log.segments.size_bytes
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        with capture_logs() as lines:
            result = await adopted(broker, plan)
        assert (result.outcome, result.groups_published) == (AdoptOutcome.ADOPTED, 1)
        assert result.bytes_after < result.bytes_before == size_bytes
        assert latest(partition) == before
        assert offsets_in(partition.log) == list(range(4 * RECORDS - KEYS, 4 * RECORDS))
        assert partition.log.segments.size_bytes < size_bytes
        assert broker.manager.table.cleaner_offsets[ORDERS] == 4 * RECORDS
        assert staged(env) == []
        (line,) = (line for line in lines if line["event"] == "clean finished")
        assert (line["engine"], line["job_id"]) == ("test", plan.compaction_id)
        (job,) = broker.pool.history.newest(ORDERS)
        assert (job.engine, job.outcome, job.groups_published) == ("test", "finished", 1)
        assert broker.pool.stats.adoptions == 1
        again = await adopted(broker, plan)  # a client that lost the response repeats the request
        assert again == result


async def test_the_broker_cleans_on_where_a_run_has_ended(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 2)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        await adopted(broker, plan)
        fill(env, broker, 2)
        plan = await opened(broker)
        (part,) = plan.partitions
        assert part.job.first_dirty_offset == 2 * RECORDS
        carried_out(env, plan).leave_manifest(env)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED
        assert offsets_in(partition.log) == list(range(4 * RECORDS - KEYS, 4 * RECORDS))


async def test_what_is_appended_meanwhile_stays(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 2)
        plan = await opened(broker)
        made = carried_out(env, plan)
        fill(env, broker, 1)
        made.leave_manifest(env)
        before = latest(partition)
        await adopted(broker, plan)
        assert latest(partition) == before
        expected = [*range(2 * RECORDS - KEYS, 2 * RECORDS), *range(2 * RECORDS, 3 * RECORDS)]
        assert offsets_in(partition.log) == expected


@pytest.mark.parametrize("when", ["before the executor is done", "after"])
async def test_a_group_of_which_retention_took_the_front_replaces_the_rest(
    env: MemoryEnv, when: str
) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 4)
        plan = await opened(broker)
        if when == "after":
            made = carried_out(env, plan)
        partition.log.delete_records(2 * RECORDS)
        partition.log.retention.expire(env.wall_ms())
        if when != "after":
            made = carried_out(env, plan)  # its inputs are still there
        made.leave_manifest(env)
        result = await adopted(broker, plan)
        assert (result.outcome, result.groups_published) == (AdoptOutcome.ADOPTED, 1)
        assert partition.log.log_start_offset == 2 * RECORDS
        start = partition.log.log_start_offset
        assert offsets_in(partition.log, start=start) == list(
            range(4 * RECORDS - KEYS, 4 * RECORDS)
        )


async def test_a_group_that_retention_took_is_dropped(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 2)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        fill(env, broker, 1)
        partition.log.delete_records(2 * RECORDS)
        partition.log.retention.expire(env.wall_ms())
        before = log_files(env)
        result = await adopted(broker, plan)
        assert (result.outcome, result.groups_published) == (AdoptOutcome.ADOPTED, 0)
        assert log_files(env) == before
        assert offsets_in(partition.log, start=2 * RECORDS) == list(range(2 * RECORDS, 3 * RECORDS))


async def test_a_manifest_without_groups_says_that_all_is_clean(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        partition = served(broker)
        for _ in range(KEYS):  # nothing in it supersedes anything
            append(env, partition)
        partition.log.roll(env.wall_ms())
        plan = await opened(broker)
        made = carried_out(env, plan)
        assert made.manifest.groups == ()
        made.leave_manifest(env)
        before = log_files(env)
        result = await adopted(broker, plan)
        assert (result.outcome, result.groups_published) == (AdoptOutcome.ADOPTED, 0)
        assert log_files(env) == before
        assert broker.manager.table.cleaner_offsets[ORDERS] == KEYS


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("why", ["no data", "only the active segment", "all of it is clean"])
async def test_where_there_is_nothing_to_do_the_plan_is_empty_and_so_is_the_adoption(
    env: MemoryEnv, purpose: Purpose, why: str
) -> None:
    async with leasing_broker(env) as broker:
        if why == "only the active segment":
            append(env, served(broker))
        if why == "all of it is clean":
            fill(env, broker, 1)
            broker.cleaning.checkpoint(ORDERS, served(broker).log.generation, RECORDS)
        plan = await opened(broker, purpose=purpose)
        if purpose is Purpose.READ and why == "all of it is clean":
            assert [planned.job.end_offset for planned in plan.partitions] == [RECORDS]
            return
        assert plan.partitions == ()
        assert staged(env) == []
        assert broker.pool.in_progress.states() == {}
        if purpose is Purpose.COMPACT:
            done, results, _ = await broker.leases.adoptions.adopt(plan.compaction_id, None)
            assert (done, results) == (True, [])


# --- refusals -------------------------------------------------------------------------------------

Spoil = Callable[[MemoryEnv, Broker, Made], Awaitable[object]]


def flip(env: MemoryEnv, path: str, position: int = 70) -> None:
    file = env.open(path, write=True)
    (byte,) = file.pread(1, position)
    file.pwrite(bytes([byte ^ 1]), position)
    file.close()


async def flipped_bit(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    made.leave_manifest(env)
    flip(env, made.path())


async def flipped_bit_of_an_index(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    made.leave_manifest(env)
    flip(env, made.path(kind=2), 3)


def with_batches(
    env: MemoryEnv, made: Made, retained: Callable[[int], bool], extra: int = 0
) -> None:
    """Write a log with other batches; what the manifest says of it fits."""
    from crc32c import crc32c

    data = env.read_file(made.path())
    ends = [*(at for at, _ in walk_headers(data)), len(data)]
    batches = [data[first:end] for first, end in pairwise(ends)]
    forged = (
        b"".join(batch for at, batch in enumerate(batches) if retained(at)) + batches[-1] * extra
    )
    put(env, made.path(), forged)
    (group,) = made.manifest.groups
    output = group.output
    assert output is not None
    log = replace(output.files[0], size_bytes=len(forged), crc=crc32c(forged))
    output = replace(output, files=(log, *output.files[1:]))
    group = replace(group, output=output, bytes_after=len(forged))
    made.leave_manifest(env, groups=(group,))


async def missing_record(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    with_batches(env, made, lambda at: at != 1)


async def extra_record(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    with_batches(env, made, lambda _: True, extra=1)


async def missing_file(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    made.leave_manifest(env)
    env.unlink(made.path())


async def missing_index(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    made.leave_manifest(env)
    env.unlink(made.path(kind=1))


async def missing_group(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    made.leave_manifest(env, groups=(), folders=())


async def torn_manifest(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    made.leave_manifest(env)
    flip(env, f"{made.run_folder}/manifest", 90)


async def beyond_the_horizon(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    made.leave_manifest(env, end_offset=made.manifest.end_offset + 1)


async def group_beyond_the_horizon(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    (group,) = made.manifest.groups
    far = replace(group, source_base_offsets=(*group.source_base_offsets, 10**6))
    made.leave_manifest(env, groups=(far,))


async def of_another_topic(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    made.leave_manifest(env, topic_id=bytes(16))


async def of_another_partition(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    made.leave_manifest(env, partition=ORDERS._replace(partition=1))


async def of_another_run(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    made.leave_manifest(env, compaction_id="other")


async def out_of_its_folder(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    made.leave_manifest(env, folders=("../in",))


async def a_file_of_the_log(env: MemoryEnv, _broker: Broker, made: Made) -> None:
    (group,) = made.manifest.groups
    assert group.output is not None
    name = "../../../../00000000000000000000.log"
    files = tuple(replace(file, name=name) for file in group.output.files)
    made.leave_manifest(env, groups=(replace(group, output=replace(group.output, files=files)),))


async def a_forged_input(env: MemoryEnv, broker: Broker, made: Made) -> None:
    """The run's inputs were replaced: what was made of them fits them, and not the log."""
    name = "00000000000000000000.log"
    data = env.read_file(f"{made.part.job.directory}/{name}")
    env.unlink(f"{made.part.job.directory}/{name}")
    put(env, f"{made.part.job.directory}/{name}", b"\0" * len(data))
    again = carried_out(env, made.plan, attempt="forged")
    again.leave_manifest(env)


@pytest.mark.parametrize(
    "spoil",
    [
        flipped_bit,
        flipped_bit_of_an_index,
        missing_record,
        extra_record,
        missing_file,
        missing_index,
        missing_group,
        torn_manifest,
        beyond_the_horizon,
        group_beyond_the_horizon,
        of_another_topic,
        of_another_partition,
        of_another_run,
        out_of_its_folder,
        a_file_of_the_log,
        a_forged_input,
    ],
)
async def test_what_the_job_does_not_leave_is_refused_and_the_log_unchanged(
    env: MemoryEnv, spoil: Spoil
) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 4)
        plan = await opened(broker)
        made = carried_out(env, plan)
        before, existing = log_files(env), latest(partition)
        await spoil(env, broker, made)
        result = await adopted(broker, plan)
        assert (result.outcome, result.groups_published) == (AdoptOutcome.INVALID, 0)
        assert result.reason
        assert "check/" not in result.reason
        assert log_files(env) == before
        assert latest(partition) == existing
        assert staged(env) == []
        assert ORDERS not in broker.manager.table.cleaner_offsets
        plan = await opened(broker)  # nobody is in the way of the next one
        carried_out(env, plan).leave_manifest(env)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED


async def truncated(env: MemoryEnv, broker: Broker) -> None:
    served(broker).log.truncate_to(4 * RECORDS - 1, now_ms=env.wall_ms())


async def another_policy(_env: MemoryEnv, broker: Broker) -> None:
    await broker.metadata_service.alter("orders", lambda now: {**now, "cleanup.policy": "delete"})


async def deleted(_env: MemoryEnv, broker: Broker) -> None:
    await broker.metadata_service.delete("orders")


async def deleted_and_made_again(env: MemoryEnv, broker: Broker) -> None:
    await broker.metadata_service.delete("orders")
    await broker.metadata_service.create("orders", 1, {"cleanup.policy": "compact"})
    fill(env, broker, 4)


@pytest.mark.parametrize("change", [truncated, another_policy, deleted, deleted_and_made_again])
@pytest.mark.parametrize("noticed", ["by the watch", "by the adoption"])
async def test_a_lease_holds_up_no_change_and_is_stale_after_it(
    env: MemoryEnv, change: Callable[[MemoryEnv, Broker], Awaitable[None]], noticed: str
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 4)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        await change(env, broker)
        partition = broker.topics.partition(ORDERS)
        before = None if partition is None else offsets_in(partition.log)
        if noticed == "by the watch":
            broker.leases.expire_due()
        result = await adopted(broker, plan)
        assert (result.outcome, result.groups_published) == (AdoptOutcome.STALE, 0)
        with pytest.raises(LeaseError) as refused:
            broker.leases.renew(plan.compaction_id, None)
        assert refused.value.status == 409
        await settled(broker)
        assert partition is None or offsets_in(partition.log) == before
        assert not env.is_dir("/disk1/orders-0") or staged(env) == []
        assert broker.pool.in_progress.states() == {}  # no partition is paused any more


async def test_a_change_between_comparison_and_publication_makes_it_stale(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 4)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        publish = broker.leases.adoptions._adopter._publish

        async def cut_then_publish(*args: object) -> int:
            partition.log.truncate_to(35, now_ms=env.wall_ms())
            return await publish(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(broker.leases.adoptions._adopter, "_publish", cut_then_publish)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.STALE
        assert offsets_in(partition.log) == list(range(35))
        assert staged(env) == []
        assert [name for name in log_files(env) if "cleaned" in name] == []


async def test_digests_are_dropped_before_the_records_that_they_include(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 4)
        broker.pool.store_digests(ORDERS, 10, (RangeDigest(0, 10, 10, "0" * 32),))
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        publish = broker.cleaning.publish

        async def publish_without_digests(*args: object) -> object:
            assert broker.pool.state_of(ORDERS).digests == ()
            return await publish(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(broker.cleaning, "publish", publish_without_digests)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED


async def test_a_publication_that_is_refused_leaves_nothing_behind(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 4)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        before = log_files(env)

        async def refuse(*_: object) -> None:
            raise SwapRefusedError("/disk1/orders-0", "a source is gone")

        monkeypatch.setattr(broker.cleaning, "publish", refuse)
        result = await adopted(broker, plan)
        assert (result.outcome, result.reason) == (
            AdoptOutcome.STALE,
            "publication refused: /disk1/orders-0: a source is gone",
        )
        assert log_files(env) == before
        assert staged(env) == []


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EMFILE])
async def test_output_whose_publication_lacks_room_is_adopted_later(
    env: MemoryEnv, error: int
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 4)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        before = log_files(env)
        full = env.fail_on(lambda op, path: op == "open" and ".journal" in path, error)
        with pytest.raises(LeaseError, match="no room for its journal") as refused:
            await adopted(broker, plan)
        assert refused.value.status == 503
        assert log_files(env) == before
        full.remove()
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED


async def test_whoever_changes_the_topic_waits_for_a_publication(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    async with leasing_broker(env) as broker:
        fill(env, broker, 4)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        publish, order = broker.cleaning.publish, []
        deletion: list[asyncio.Task[None]] = []

        async def slowly(*args: object) -> object:
            deletion.append(asyncio.create_task(broker.metadata_service.delete("orders")))
            for _ in range(50):
                await asyncio.sleep(0)
            assert not deletion[0].done()
            outcomes = await publish(*args)  # type: ignore[arg-type]
            order.append("published")
            return outcomes

        monkeypatch.setattr(broker.cleaning, "publish", slowly)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED
        await deletion[0]
        assert order == ["published"]
        assert broker.topics.get("orders") is None


async def test_nothing_is_published_while_an_operator_has_paused_the_partition(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.leases.adoption.BUSY_SECONDS", 0.1)
    async with leasing_broker(env) as broker:
        fill(env, broker, 4)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        before = log_files(env)
        broker.pool.operator.pause(ORDERS)
        with pytest.raises(LeaseError, match="also paused by an operator") as refused:
            await broker.leases.adoptions.adopt(plan.compaction_id, None)
        assert refused.value.status == 503
        assert log_files(env) == before
        with pytest.raises(PartitionBusyError), broker.pool.control.adopting(ORDERS):
            pass
        broker.pool.operator.resume(ORDERS)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED


async def test_without_a_manifest_the_run_goes_on(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 4)
        plan = await opened(broker)
        made = carried_out(env, plan)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.NOTHING
        assert staged(env) == [plan.compaction_id]
        made.leave_manifest(env)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED


async def test_partitions_of_a_run_are_judged_each_for_itself(env: MemoryEnv) -> None:
    async with leasing_broker(env, partitions=3) as broker:
        for number in range(3):
            fill(env, broker, 2, number)
        plan = await opened(broker)
        for index in range(3):
            carried_out(env, plan, index).leave_manifest(env)
        flip(env, carried_out(env, plan, 1, attempt=ATTEMPT).path())
        served(broker, 2).log.truncate_to(3, now_ms=env.wall_ms())
        done, results, compaction = await broker.leases.adoptions.adopt(plan.compaction_id, None)
        assert done
        assert {r.partition.partition: r.outcome for r in results} == {
            0: AdoptOutcome.ADOPTED,
            1: AdoptOutcome.INVALID,
            2: AdoptOutcome.STALE,
        }
        assert not compaction.is_alive


async def test_of_a_run_for_reading_nothing_comes_back(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker, purpose=Purpose.READ)
        carried_out(env, plan).leave_manifest(env)
        with pytest.raises(LeaseError, match="for reading"):
            await broker.leases.adoptions.adopt(plan.compaction_id, None)
