"""A tombstone stays in the log until every view of the topic has a durable horizon above it."""

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.topics.partition import Partition
from broker.views import compaction as view_making
from broker.views.compaction import ViewError
from broker.views.status import ViewStatus
from broker.views.views import Views
from cleaner import states
from cleaner.engine.clean import run_clean
from cleaner.host import LogFacts, PublishOutcome, Undecided
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from cleaner.planning.grouping import plan_job
from cleaner.scheduler.cleaner_state_store import STATE_NAME
from config.settings import CleanerSettings
from storage.env import write_file_atomically
from storage.errors import InvalidViewError
from storage.format.batch import decode_records, walk_headers
from storage.format.filenames import DAMAGED_BYTES
from storage.view.ledger import Source, Staged, stage, sweep, view_path
from storage.view.view_log import ViewCursor
from tests.support.broker.views.view_broker import (
    ANY_TIME,
    ON,
    WHERE,
    broker_with_view,
    produce,
    producing,
    read_all,
)
from tests.support.broker.views.view_gate import Gate
from tests.support.cleaner.cleaning import Recorder
from tests.support.storage.memory_env import MemoryEnv

COMPACTED = {"cleanup.policy": "compact", "delete.retention.ms": "0"}
FOLDER = view_path(f"/disk1/{WHERE}")
FIRST_MS = 1_700_000_000_000
SETTINGS = CleanerSettings(dedupe_buffer_bytes=1 << 20)


def facts_of(broker: Broker) -> LogFacts:
    facts = broker.cleaning.facts_of(WHERE)
    assert facts is not None
    return facts


def bound(broker: Broker) -> tuple[int, Undecided]:
    facts = facts_of(broker)
    return facts.undecided_offset, facts.undecided_by


def dirty_job(broker: Broker, job_id: str = "dirty") -> CleanJob:
    job, _ = broker.pool.remote.plan(facts_of(broker), job_id)
    assert job is not None
    return job


def expiry_job(env: MemoryEnv, broker: Broker) -> CleanJob | None:
    """What the timer would clean: expired tombstones alone."""
    facts = facts_of(broker)
    verdict = broker.pool.scanner.assess(facts)
    assert verdict is not None
    if verdict.expired is None or not verdict.to_clean:
        return None
    inputs = broker.cleaning.job_inputs(WHERE, facts.log_start_offset, facts.log_end_offset)
    return plan_job(facts, verdict, inputs, SETTINGS, job_id="expiry", now_ms=env.wall_ms())


def carried_out(env: MemoryEnv, job: CleanJob) -> tuple[tuple[CleanedGroup, ...], CleanReport]:
    recorder = Recorder()
    report = run_clean(env, job, recorder)
    return tuple(recorder.groups), report


async def published(
    broker: Broker, job: CleanJob, groups: tuple[CleanedGroup, ...], report: CleanReport
) -> None:
    if groups:
        outcomes = await broker.cleaning.publish(job, groups)
        assert set(outcomes) == {PublishOutcome.PUBLISHED}
    offset = broker.pool.dispatcher.update_state(facts_of(broker), job, report, 1)
    broker.pool.scanner.save_checkpoint(WHERE, job.generation, offset)


async def clean(env: MemoryEnv, broker: Broker) -> None:
    """As `varve cleaner run --roll`, and then the timer until nothing more can go."""
    partition = broker.topics.partition(WHERE)
    assert partition is not None
    partition.log.roll(env.wall_ms())
    job: CleanJob | None
    job, _ = broker.pool.remote.plan(facts_of(broker), f"dirty-{env.wall_ms()}")
    while job is not None:
        await published(broker, job, *carried_out(env, job))
        env.advance_ms(1000)
        job = expiry_job(env, broker)


def keys_in_log(broker: Broker) -> list[bytes | None]:
    partition = broker.topics.partition(WHERE)
    assert partition is not None
    results: list[bytes | None] = []
    offset = partition.log.log_start_offset
    while data := partition.log.reader.read(
        offset, 1 << 20, end_offset=partition.log.log_end_offset
    ).read():
        for position, header in walk_headers(data):
            results += [record.key for record in decode_records(data, header, position)]
            offset = header.next_offset
    return results


async def begun(broker: Broker, gate: Gate) -> asyncio.Task[ViewStatus]:
    """A compaction whose worker waits at the gate."""
    compaction = asyncio.create_task(broker.view_scheduler.compact(WHERE))
    await gate.reached.wait()
    return compaction


@asynccontextmanager
async def gated(env: MemoryEnv, keys: dict[str, str]) -> AsyncIterator[tuple[Broker, Gate]]:
    """A broker whose view worker waits; also a test that fails lets it go on."""
    gate = Gate(env)
    async with broker_with_view(env, keys, worker=gate.worker) as broker:
        try:
            yield broker, gate
        finally:
            gate.let_go()


async def alter(broker: Broker, keys: dict[str, str]) -> None:
    await broker.metadata_service.alter("orders", lambda _: {**ON, **ANY_TIME, **COMPACTED, **keys})


async def test_a_first_compaction_keeps_tombstones_behind_its_coming_horizon() -> None:
    env = MemoryEnv()
    async with gated(env, COMPACTED) as (broker, gate):
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        compaction = await begun(broker, gate)
        await produce(broker, (b"a", None), (b"c", b"1"))
        await clean(env, broker)
        assert bound(broker) == (2, Undecided.VIEW)
        assert keys_in_log(broker).count(b"a") == 2
        gate.let_go()
        await compaction
        assert (b"a", None) in [(key, value) for _, key, value in await read_all(broker)]
        await broker.view_scheduler.compact(WHERE)
        await clean(env, broker)
        assert [key for _, key, _ in await read_all(broker)] == [b"b", b"c"]
        assert b"a" not in keys_in_log(broker)


async def test_a_first_compaction_that_was_given_up_holds_nothing() -> None:
    env = MemoryEnv()
    async with gated(env, COMPACTED) as (broker, gate):
        await produce(broker, (b"a", b"1"))
        compaction = await begun(broker, gate)
        await produce(broker, (b"a", None))
        assert bound(broker)[0] == 1
        broker.view_scheduler.abort(WHERE)
        gate.let_go()
        with pytest.raises(ViewError):
            await compaction
        assert bound(broker)[0] == 2


async def test_a_compaction_that_is_not_the_first_keeps_tombstones_behind_the_old_horizon() -> None:
    env = MemoryEnv()
    async with gated(env, COMPACTED) as (broker, gate):
        gate.let_go()
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        await broker.view_scheduler.compact(WHERE)
        gate.close()
        await produce(broker, (b"a", None))
        compaction = await begun(broker, gate)
        await produce(broker, (b"b", None), (b"c", b"1"))
        await clean(env, broker)
        assert bound(broker) == (2, Undecided.VIEW)
        gate.let_go()
        await compaction
        remaining = {key: value for _, key, value in await read_all(broker)}
        assert remaining == {b"b": None, b"c": b"1"}


async def test_what_expired_behind_the_horizon_of_a_view_waits_for_the_view() -> None:
    env = MemoryEnv()
    async with broker_with_view(env, {**COMPACTED, "varve.view": "none"}) as broker:
        await produce(broker, (b"a", b"1"), (b"a", None), (b"b", b"1"))
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        partition.log.roll(env.wall_ms())
        job = dirty_job(broker)
        await published(broker, job, *carried_out(env, job))
        env.advance_ms(1000)
        assert expiry_job(env, broker) is not None
        facts = replace(facts_of(broker), undecided_offset=1, undecided_by=Undecided.VIEW)
        verdict = broker.pool.scanner.assess(facts)
        assert verdict is not None
        assert verdict.expired is None


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES])
async def test_a_ledger_that_cannot_be_read_blocks_cleaning_and_is_read_again(code: int) -> None:
    env = MemoryEnv()
    async with broker_with_view(env, COMPACTED) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        await broker.view_scheduler.compact(WHERE)
        await produce(broker, (b"a", None))
    fault = env.fail_on(
        lambda operation, path: operation in ("open", "read_file") and path.startswith(FOLDER), code
    )
    async with broker_with_view(env, COMPACTED) as broker:
        assert bound(broker) == (0, Undecided.VIEW_UNKNOWN)
        view = broker.views.partition(WHERE)
        assert view is not None
        with pytest.raises(InvalidViewError):
            ViewCursor(view.log).read(0, 1, end_offset=2)
        await broker.view_scheduler.tidy()
        assert bound(broker) == (0, Undecided.VIEW_UNKNOWN)
        fault.remove()
        await broker.view_scheduler.tidy()
        assert bound(broker) == (2, Undecided.VIEW)
        await clean(env, broker)
        await broker.view_scheduler.compact(WHERE)
        assert [key for _, key, _ in await read_all(broker)] == [b"b"]


async def test_a_compaction_on_demand_reads_a_ledger_again_that_could_not_be_read() -> None:
    env = MemoryEnv()
    async with broker_with_view(env, COMPACTED) as broker:
        await produce(broker, (b"a", b"1"))
        await broker.view_scheduler.compact(WHERE)
    fault = env.fail_on(
        lambda operation, path: operation == "read_file" and path.startswith(FOLDER), errno.EMFILE
    )
    async with broker_with_view(env, COMPACTED) as broker:
        with pytest.raises(ViewError):
            await broker.view_scheduler.compact(WHERE)
        fault.remove()
        await produce(broker, (b"b", b"1"))
        status = await broker.view_scheduler.compact(WHERE)
        assert (status.horizon, status.ledger_records, status.is_usable) == (2, 2, True)


async def test_a_ledger_that_cannot_be_believed_blocks_cleaning() -> None:
    env = MemoryEnv()
    async with broker_with_view(env, COMPACTED) as broker:
        await produce(broker, (b"a", b"1"))
        await broker.view_scheduler.compact(WHERE)
    data = env.read_file(f"{FOLDER}/manifest")
    env.open(f"{FOLDER}/manifest", write=True).pwrite(bytes([data[-1] ^ 1]), len(data) - 1)
    async with broker_with_view(env, COMPACTED) as broker:
        assert bound(broker) == (0, Undecided.VIEW_UNKNOWN)
        await broker.view_scheduler.compact(WHERE, from_scratch=True)
        assert bound(broker)[0] == 1


@pytest.mark.parametrize("step", ["sync_dir", "read_file"])
async def test_a_publication_that_cannot_be_taken_over_blocks_cleaning_until_it_is_read(
    step: str,
) -> None:
    env = MemoryEnv()
    async with broker_with_view(env, COMPACTED) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        published_yet = False

        def fails(operation: str, path: str) -> bool:
            nonlocal published_yet
            published_yet |= operation == "rename" and path == f"{FOLDER}/manifest"
            return published_yet and operation == step and path.startswith(FOLDER)

        fault = env.fail_on(fails, errno.EMFILE)
        with pytest.raises(ViewError):
            await broker.view_scheduler.compact(WHERE)
        assert bound(broker) == (0, Undecided.VIEW_UNKNOWN)
        await broker.view_scheduler.tidy()
        assert bound(broker) == (0, Undecided.VIEW_UNKNOWN)
        fault.remove()
        await broker.view_scheduler.tidy()
        assert bound(broker)[0] == 2
        assert broker.view_scheduler.status()[0].horizon == 2
        await produce(broker, (b"a", None))
        await clean(env, broker)
        assert b"a" in keys_in_log(broker), "the view has not seen its delete"
        await broker.view_scheduler.compact(WHERE)
        assert [key for _, key, _ in await read_all(broker)] == [b"b"]


async def test_a_manifest_that_no_sync_confirmed_is_made_durable_before_it_is_believed() -> None:
    env = MemoryEnv(seed=3)
    async with broker_with_view(env, COMPACTED) as broker:
        await produce(broker, (b"a", b"1"))
        await broker.view_scheduler.compact(WHERE)
    # The process was killed between the rename of another manifest and its sync.
    env.rename(f"{FOLDER}/manifest", f"{FOLDER}/manifest.tmp")
    env.rename(f"{FOLDER}/manifest.tmp", f"{FOLDER}/manifest")
    before = len(env.history)
    async with broker_with_view(env, COMPACTED):
        pass
    done = [item for item in env.history[before:] if item[0] == "sync_dir"]
    assert ("sync_dir", FOLDER) in done


async def test_a_view_that_is_switched_off_blocks_cleaning_until_it_is_removed_durably() -> None:
    env = MemoryEnv()
    async with broker_with_view(env, COMPACTED) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        await broker.view_scheduler.compact(WHERE)
        await produce(broker, (b"a", None))
        await alter(broker, {"varve.view": "none"})
        fault = env.fail_on(
            lambda operation, path: operation == "unlink" and path == f"{FOLDER}/manifest",
            errno.EIO,
        )
        await broker.view_scheduler.tidy()
        assert bound(broker) == (0, Undecided.VIEW_UNKNOWN)
        await alter(broker, {})  # on again: the old ledger is as good as before
        await clean(env, broker)
        assert (b"a", None) in [(key, value) for _, key, value in await read_all(broker)]
        await alter(broker, {"varve.view": "none"})
        await broker.view_scheduler.tidy()
        assert bound(broker) == (0, Undecided.VIEW_UNKNOWN)
        fault.remove()
        await broker.view_scheduler.tidy()
        assert bound(broker)[0] == 3
        await clean(env, broker)
        assert keys_in_log(broker) == [b"b"]
        await alter(broker, {})
        assert [key for _, key, _ in await read_all(broker)] == [b"b"]


async def test_a_view_that_is_switched_off_while_it_is_compacted_is_not_published() -> None:
    env = MemoryEnv()
    async with gated(env, COMPACTED) as (broker, gate):
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        compaction = await begun(broker, gate)
        await alter(broker, {"varve.view": "none"})
        await produce(broker, (b"a", None), (b"c", b"1"))
        assert bound(broker)[0] <= 2
        await clean(env, broker)
        gate.let_go()
        with pytest.raises(ViewError, match="switched off"):
            await compaction
        assert not env.exists(f"{FOLDER}/manifest")
        await broker.view_scheduler.tidy()
        await clean(env, broker)
        await alter(broker, {})
        assert [key for _, key, _ in await read_all(broker)] == [b"b", b"c"]


def staging_beside(
    broker: Broker, in_between: Callable[[], Awaitable[Any]], *, times: int
) -> Callable[..., Staged]:
    """`stage`, with something done on the loop after its first source, so many times."""
    loop = asyncio.get_running_loop()
    remaining = times

    def staged(env: Any, directory: str, sources: Iterable[Source], charge: Any) -> Staged:
        nonlocal remaining
        first, *others = sources
        stage(env, directory, [first], charge)
        if remaining:
            remaining -= 1
            asyncio.run_coroutine_threadsafe(_awaited(in_between()), loop).result(10)
        return stage(env, directory, others, charge)

    return staged


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def over_present_segments(broker: Broker, job: CleanJob) -> CleanJob:
    """The same job over the segments as they stand now."""
    sizes = {s.base_offset: s.size_bytes for s in facts_of(broker).segments}
    groups = tuple(
        tuple(replace(s, size_bytes=sizes[s.base_offset]) for s in group) for group in job.groups
    )
    return replace(job, groups=groups)


async def test_a_swap_in_the_midst_of_the_staging_has_the_sources_staged_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = MemoryEnv()
    async with broker_with_view(env, COMPACTED) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        partition.log.roll(env.wall_ms())
        await produce(broker, (b"a", None), (b"c", b"1"))
        partition.log.roll(env.wall_ms())
        job = dirty_job(broker)
        alone = tuple((source,) for group in job.groups for source in group)
        job = replace(job, groups=alone)
        stamped, report = carried_out(env, job)
        await published(
            broker, job, stamped[1:], report
        )  # the tombstone is stamped, its value there
        env.advance_ms(1000)
        job = replace(over_present_segments(broker, job), job_id="again", now_ms=env.wall_ms())
        groups, _ = carried_out(env, job)
        swaps = 0

        async def swap() -> None:
            nonlocal swaps
            swaps += 1
            await broker.cleaning.publish(job, groups)

        monkeypatch.setattr(view_making, "stage", staging_beside(broker, swap, times=1))
        await broker.view_scheduler.compact(WHERE)
        assert swaps == 1
        assert [key for _, key, _ in await read_all(broker)] == [b"b", b"c"]


async def test_staging_a_view_does_not_abort_a_running_clean() -> None:
    env = MemoryEnv()
    async with broker_with_view(env, COMPACTED) as broker:
        await produce(broker, (b"a", b"1"))
        broker.pool.in_progress.apply(WHERE, states.JobStarted(0), 0)
        await broker.view_scheduler.compact(WHERE)
        assert isinstance(broker.pool.in_progress.state(WHERE), states.Cleaning)
        broker.pool.in_progress.apply(WHERE, states.Finished(None), 0)


async def test_a_clean_that_a_view_came_to_forbid_is_not_published() -> None:
    env = MemoryEnv()
    async with broker_with_view(env, {**COMPACTED, "varve.view": "none"}) as broker:
        await produce(broker, (b"a", b"1"), (b"a", b"2"))
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        partition.log.roll(env.wall_ms())
        job = dirty_job(broker)
        groups, _ = carried_out(env, job)
        await alter(broker, {"varve.view.strategy": "timestamp"})
        needed = (PublishOutcome.NEEDED_BY_VIEW,) * len(groups)
        assert await broker.cleaning.publish(job, groups) == needed
        await alter(broker, {})
        assert await broker.cleaning.publish(job, groups) == (PublishOutcome.PUBLISHED,)


async def test_a_sweep_never_removes_what_the_manifest_names() -> None:
    env = MemoryEnv()
    async with broker_with_view(env, COMPACTED) as broker:
        await produce(broker, (b"a", b"1"))
        await broker.view_scheduler.compact(WHERE)
        assert sweep(env, f"/disk1/{WHERE}", keep=[]) == ()


async def test_a_slow_topic_loses_neither_values_nor_deletes_of_its_view_to_retention() -> None:
    """Its segments would never be full, nor as old as segment.ms, before their records expire."""
    env = MemoryEnv()
    day = 86_400_000
    keys = {
        "varve.view.min.bytes": str(1 << 30),
        "retention.ms": str(day),
        "message.timestamp.type": "LogAppendTime",
    }
    async with broker_with_view(env, keys) as broker:
        for hour in range(0, 96, 2):
            if hour == 0:
                await produce(broker, (b"a", b"1"), (b"b", b"1"))
            if hour == 48:
                await produce(broker, (b"a", None))
            env.advance_ms(2 * 3_600_000)
            await broker.log_maintenance.expire()
            await broker.log_maintenance.roll()
            await broker.view_scheduler.tidy()
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        assert partition.log.log_start_offset == partition.log.log_end_offset == 3
        assert await read_all(broker) == [(1, b"b", b"1")]
        assert broker.view_scheduler.status()[0].missed == ()


async def test_a_changed_strategy_is_refused_also_after_the_topic_stopped_being_compacted() -> None:
    env = MemoryEnv()
    by_time = {**COMPACTED, "varve.view.strategy": "timestamp"}
    async with broker_with_view(env, by_time) as broker:
        async with producing(broker) as producer:
            for key, value, at in (
                (b"a", b"new", 9),
                (b"b", None, 9),
                (b"a", b"late", 5),
                (b"b", b"late", 5),
            ):
                await producer.send_and_wait(
                    "orders", key=key, value=value, timestamp_ms=FIRST_MS + at
                )
        await broker.view_scheduler.compact(WHERE)
        await clean(env, broker)
        assert keys_in_log(broker) == [b"a", b"b"], "the late values: the cleaner goes by offset"
        await alter(broker, {"cleanup.policy": "delete"})
    by_offset = {"cleanup.policy": "delete", "varve.view.strategy": "offset"}
    async with broker_with_view(env, {**by_time, **by_offset}) as broker:
        with pytest.raises(ViewError, match=r"from timestamp to offset.*was compacted"):
            await broker.view_scheduler.compact(WHERE)
        assert [row[1:] for row in await read_all(broker)] == [(b"a", b"new")]


async def test_a_topic_that_becomes_compacted_is_cleaned_once_the_manifest_says_so() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"), (b"a", b"2"))
        await broker.view_scheduler.compact(WHERE)
        await alter(broker, {})
        assert bound(broker) == (0, Undecided.VIEW)
        await broker.view_scheduler.tidy()
        assert bound(broker)[0] == 2
    async with broker_with_view(env.crash(), {"varve.view.strategy": "timestamp"}) as broker:
        with pytest.raises(ViewError, match="was compacted"):
            await broker.view_scheduler.compact(WHERE)


async def test_a_topic_is_not_cleaned_while_the_manifest_of_its_view_cannot_be_written() -> None:
    def is_manifest(operation: str, path: str) -> bool:
        return operation == "pwrite" and path.endswith("manifest.tmp")

    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"), (b"a", b"2"))
        await broker.view_scheduler.compact(WHERE)
        await alter(broker, {})
        fault = env.fail_on(is_manifest, errno.ENOSPC)
        for _ in range(2):
            await broker.view_scheduler.tidy()
            assert bound(broker) == (0, Undecided.VIEW)
        fault.remove()
        await broker.view_scheduler.tidy()
        assert bound(broker)[0] == 2


@asynccontextmanager
async def cleaned_by_another_broker(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, str]
) -> AsyncIterator[MemoryEnv]:
    """The view has a value; its tombstone was removed from the log beyond the horizon."""

    def unlimited(_: Views, base: Partition) -> tuple[int, Undecided]:
        return base.log.log_end_offset, Undecided.VIEW

    env, path = MemoryEnv(), f"/disk1/{STATE_NAME}"
    async with broker_with_view(env, keys) as broker:
        await produce(broker, (b"a", b"secret"), (b"b", b"1"))
        await broker.view_scheduler.compact(WHERE)
        await clean(env, broker)
        assert await broker.pool.state_store.saved(WHERE)
        own_state = env.read_file(path)
        await produce(broker, (b"a", None), (b"c", b"1"))
        with monkeypatch.context() as patch:
            patch.setattr(Views, "_published_limit", unlimited)
            await clean(env, broker)
            await clean(env, broker)
        assert b"a" not in keys_in_log(broker)
    write_file_atomically(env, path, own_state)
    yield env


async def test_a_view_whose_log_another_broker_cleaned_beyond_its_horizon_is_made_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cleaned_by_another_broker(monkeypatch, COMPACTED) as env:
        for _ in range(2):  # the second start finds a checkpoint that was lowered
            async with broker_with_view(env, COMPACTED) as broker:
                assert [key for _, key, _ in await read_all(broker)] == [b"b", b"c"]
            env = env.kill()
        async with broker_with_view(env, COMPACTED) as broker:
            await broker.view_scheduler.compact(WHERE)
        with capture_logs() as lines:
            async with broker_with_view(env, COMPACTED) as broker:
                assert [key for _, key, _ in await read_all(broker)] == [b"b", b"c"]
        assert not [line for line in lines if line["event"] == "view discarded"], "it is a new one"


@pytest.mark.parametrize("reason", ["strategy", "skipped records"])
async def test_a_view_that_a_log_cleaned_by_another_broker_cannot_replace_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    strategy = "timestamp" if reason == "strategy" else "offset"
    keys = {**COMPACTED, "varve.view.strategy": strategy}
    async with cleaned_by_another_broker(monkeypatch, keys) as env:
        if reason == "skipped records":  # the view may have them
            env.open(f"/disk1/{WHERE}/0.log.0-9.skip-1{DAMAGED_BYTES}", create=True).close()
        for _ in range(2):
            with capture_logs() as lines:
                async with broker_with_view(env, keys) as broker:
                    pass
            (line,) = [each for each in lines if each["event"] == "view may have deleted keys"]
            assert line["remedy"] == "varve view compact orders --from-scratch"
        async with broker_with_view(env, keys) as broker:
            await broker.view_scheduler.compact(WHERE, from_scratch=True)
            assert b"a" not in [key for _, key, _ in await read_all(broker)]
        with capture_logs() as lines:
            async with broker_with_view(env, keys):
                pass
        assert not [line for line in lines if line["event"] == "view may have deleted keys"]
