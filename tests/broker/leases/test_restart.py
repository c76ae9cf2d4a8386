"""A broker that restarts in the midst of a run: taken up where nothing changed, swept elsewhere."""

import errno
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import AsyncMock

import pytest

from broker.app import Broker
from broker.leases.lease_folder import LEASES_FOLDER
from broker.leases.model import LeaseError
from cleaner.remote_compaction import AdoptOutcome, Purpose
from cleaner.states import Paused
from storage.format import filenames
from tests.support.broker.leases import (
    FOLDER,
    KEYS,
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
    staged,
)
from tests.support.storage.logs import offsets_in
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=33)


@pytest.mark.parametrize("fate", ["restart", "kill", "power"])
@pytest.mark.parametrize("moment", ["before the executor", "before the manifest", "after it"])
async def test_a_run_goes_on_behind_a_restart(
    env: MemoryEnv, fate: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 4)
        plan = await opened(broker)
        if moment != "before the executor":
            made = carried_out(env, plan)
        if moment == "after it":
            made.leave_manifest(env)
        if fate == "power":
            env.settle()  # some minutes later
        if fate != "restart":
            monkeypatch.setattr(broker.manager, "close", lambda **_: None)
    again = env if fate == "restart" else env.kill() if fate == "kill" else env.crash()
    async with leasing_broker(again) as broker:
        assert broker.pool.in_progress.state(ORDERS) == Paused(1)
        assert broker.leases.table.stats.resumed == 1
        with pytest.raises(LeaseError, match=plan.compaction_id):
            await opened(broker)
        broker.leases.renew(plan.compaction_id, None)
        assert broker.leases.table.authorize(plan.compaction_id, 0, plan.token).where == ORDERS
        if moment == "before the executor":
            made = carried_out(again, plan)
        if moment != "after it":
            made.leave_manifest(again)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED
        assert offsets_in(served(broker).log) == list(range(4 * RECORDS - KEYS, 4 * RECORDS))
        assert staged(again) == []


async def test_what_was_appended_before_the_restart_is_no_hindrance(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        fill(env, broker, 1)
    async with leasing_broker(env) as broker:
        append(env, served(broker))
        carried_out(env, plan).leave_manifest(env)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED
        expected = list(range(2 * RECORDS - KEYS, 3 * RECORDS + 1))
        assert offsets_in(served(broker).log) == expected


async def test_what_retention_took_before_the_restart_is_no_hindrance(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        partition = fill(env, broker, 4)
        plan = await opened(broker)
        partition.log.delete_records(RECORDS)
        partition.log.retention.expire(env.wall_ms())
    async with leasing_broker(env) as broker:
        carried_out(env, plan).leave_manifest(env)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED
        start = served(broker).log.log_start_offset
        assert start == RECORDS
        assert offsets_in(served(broker).log, start=start) == list(
            range(4 * RECORDS - KEYS, 4 * RECORDS)
        )


async def test_a_checkpoint_that_was_not_on_the_disk_yet_is_no_hindrance(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        first = await opened(broker)
        carried_out(env, first).leave_manifest(env)
        await adopted(broker, first)
        fill(env, broker, 2)
        plan = await opened(broker)
        assert plan.partitions[0].job.first_dirty_offset == 2 * RECORDS
        await broker.leases.stop()
        del broker.manager.table.cleaner_offsets[ORDERS]
    async with leasing_broker(env) as broker:
        carried_out(env, plan).leave_manifest(env)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED
        assert offsets_in(served(broker).log) == list(range(4 * RECORDS - KEYS, 4 * RECORDS))
        assert broker.manager.table.cleaner_offsets[ORDERS] == 4 * RECORDS


async def test_a_lease_has_all_of_its_time_behind_a_restart_and_no_more(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker, ttl_seconds=60)
    env.advance_ms(3_600_000)
    async with leasing_broker(env) as broker:
        env.advance_ms(59_000)
        broker.leases.expire_due()
        assert broker.leases.table.find(plan.compaction_id).is_alive
        env.advance_ms(1_000)
        broker.leases.expire_due()
        assert not broker.leases.table.find(plan.compaction_id).is_alive


async def test_a_run_for_reading_goes_on_too_and_holds_nobody_off(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker, purpose=Purpose.READ)
    async with leasing_broker(env) as broker:
        assert broker.pool.in_progress.states() == {}
        assert broker.leases.table.authorize(plan.compaction_id, 0, plan.token).where == ORDERS


# --- what changed ---------------------------------------------------------------------------------


def truncated(env: MemoryEnv, broker: Broker) -> None:
    served(broker).log.truncate_to(RECORDS + 3, now_ms=env.wall_ms())


def cut_and_written_again(env: MemoryEnv, broker: Broker) -> None:
    """To the very same size, and later."""
    env.advance_ms(5)
    served(broker).log.truncate_to(2 * RECORDS - 1, now_ms=env.wall_ms())
    append(env, served(broker))
    served(broker).log.roll(env.wall_ms())


def end_lost(env: MemoryEnv, broker: Broker) -> None:
    """After what was leased: the last records of producers were there."""
    served(broker).log.truncate_to(2 * RECORDS + 1, now_ms=env.wall_ms())


def cleaned(env: MemoryEnv, broker: Broker) -> None:
    broker.pool.scanner.save_checkpoint(ORDERS, served(broker).log.generation, RECORDS)


def damaged_lease(env: MemoryEnv, broker: Broker) -> None:
    (compaction,) = broker.leases.table.alive()
    file = env.open(f"{compaction.parts[0].folder}/lease", write=True)
    file.pwrite(b"x", 100)
    file.close()


def lost_input(env: MemoryEnv, broker: Broker) -> None:
    (compaction,) = broker.leases.table.alive()
    env.unlink(f"{compaction.parts[0].folder}/in/{filenames.file_name(0, filenames.LOG)}")


@pytest.mark.parametrize(
    "change", [truncated, cut_and_written_again, end_lost, cleaned, damaged_lease, lost_input]
)
async def test_a_run_of_a_log_that_changed_is_not_taken_up(
    env: MemoryEnv,
    change: Callable[[MemoryEnv, Broker], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        for _ in range(3):
            append(env, served(broker))
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        await broker.leases.stop()  # nobody looks any more
        change(env, broker)
        files = log_files(env)
    async with leasing_broker(env) as broker:
        assert staged(env) == []
        assert not env.is_dir(f"{FOLDER}/varve.leases")
        assert broker.pool.in_progress.states() == {}
        with pytest.raises(LeaseError) as refused:
            await broker.leases.adoptions.adopt(plan.compaction_id, None)
        assert refused.value.status == 404
        logs = {name for name in files if name.endswith(".log")}
        assert {name for name in log_files(env) if name.endswith(".log")} == logs
        await opened(broker)


async def test_another_topic_of_that_name_gets_nothing_of_a_run(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        await broker.leases.stop()
        await broker.metadata_service.delete("orders")
        await broker.metadata_service.create("orders", 1, {"cleanup.policy": "compact"})
        fill(env, broker, 2)
    async with leasing_broker(env) as broker:
        assert staged(env) == []
        with pytest.raises(LeaseError):
            broker.leases.table.find(plan.compaction_id)


async def test_leftovers_without_a_lease_are_swept_at_the_start(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 1)
    env.mkdir(f"{FOLDER}/varve.leases/half/in")
    put(env, f"{FOLDER}/varve.leases/file", b"x")
    put(env, f"{FOLDER}/varve.leases/half/manifest", b"x")
    async with leasing_broker(env) as broker:
        assert not env.is_dir(f"{FOLDER}/varve.leases")
        assert served(broker).log.log_end_offset == RECORDS


async def test_an_adoption_under_way_at_the_stop_can_be_asked_for_again(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    from broker.leases.adoption import AdoptionFailedError

    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        verify = broker.leases.adoptions._adopter._verify
        begun = asyncio.Event()

        async def until_the_stop(*args: object) -> object:
            begun.set()
            while not broker.leases.table.is_stopping:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
            return await verify(*args)  # type: ignore[arg-type]

        runner = AsyncMock()  # the worker that starts while the broker stops
        adopter = broker.leases.adoptions._adopter
        monkeypatch.setattr(adopter, "_worker", lambda: nullcontext(runner))
        monkeypatch.setattr(adopter, "_verify", until_the_stop)
        waiting = asyncio.create_task(broker.leases.adoptions.adopt(plan.compaction_id, None))
        await begun.wait()
    with pytest.raises((LeaseError, AdoptionFailedError)):
        await waiting
    runner.verify.assert_not_awaited()
    async with leasing_broker(env) as broker:
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED


async def test_a_folder_that_cannot_be_looked_at_concerns_its_partition_alone(
    env: MemoryEnv,
) -> None:
    async with leasing_broker(env, partitions=2) as broker:
        fill(env, broker, 4)
        plan = await opened(broker)
    other = f"orders-1/{LEASES_FOLDER}"
    env.fail_on(lambda op, path: op == "exists" and path.endswith(other), errno.EIO)
    async with leasing_broker(env, partitions=2) as broker:
        (compaction,) = broker.leases.table.alive()
        assert compaction.compaction_id == plan.compaction_id
        env.mkdir(f"{FOLDER}/{LEASES_FOLDER}/stray")
        await broker.leases.sweep()
        assert staged(env) == [plan.compaction_id]


async def test_a_lease_whose_folder_cannot_be_looked_at_at_the_start_ends(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 4)
        await opened(broker)
    fault = env.fail_on(
        lambda op, path: op == "exists" and path == f"{FOLDER}/{LEASES_FOLDER}", errno.EIO
    )
    async with leasing_broker(env) as broker:
        assert list(broker.leases.table.alive()) == []
        await broker.leases.sweep()  # logged, and no other partition is left out
        fault.remove()
        await broker.leases.sweep()
        assert staged(env) == []
        await opened(broker)
