"""The broker's side of a clean: publication beside retention, checkpoints, who wakes it."""

import asyncio
import errno
import os.path
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.topics.partition import Partition
from cleaner.engine.clean import run_clean
from cleaner.host import PublishOutcome
from cleaner.job import CleanedGroup, CleanJob, CleanReport, Damage
from cleaner.planning.grouping import plan_job
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.scheduler.cleaner_state_store import STATE_NAME
from config.settings import CleanerSettings
from protocol.errors import ErrorCode, code_of
from storage.errors import (
    LogDirectoryError,
    NoRoomError,
    PartitionFolderError,
    SwapRefusedError,
    TransactionIndexError,
)
from storage.format import filenames
from storage.format.batch import read_header
from storage.format.producer_state import LastRecords
from storage.format.txn_index import TxnIndexEntry
from storage.log.log_state import index_limits
from storage.model import TopicPartition
from storage.segments.content_ids import restore_content_ids
from storage.segments.segment import Segment
from storage.swap.swap_journal import SwapPlan, execute_swap
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import call_api
from tests.support.cleaner.cleaning import Recorder
from tests.support.cleaner.key_indexes import small_records_are_indexed
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.storage.logs import batch_of, offsets_in, read_offsets
from tests.support.storage.memory_env import MemoryEnv

ORDERS, OTHERS = TopicPartition("orders", 0), TopicPartition("others", 0)
BOTH = {"orders": {"keys": {"cleanup.policy": "compact,delete", "retention.ms": "-1"}}}
KEYS = 5
RECORDS = 10  # of each segment


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=21)


def fill(
    env: MemoryEnv, broker: Broker, segments: int, where: TopicPartition = ORDERS
) -> Partition:
    """Closed segments of one record a batch, over five keys, and an empty active one."""
    partition = broker.topics.partition(where)
    assert partition is not None
    for _ in range(segments):
        for _ in range(RECORDS):
            end = partition.log.log_end_offset
            batch = memoryview(
                batch_of(b"v%d" % end, key=b"k%d" % (end % KEYS), timestamps=[env.wall_ms()])
            )
            partition.append(batch, read_header(batch), env.wall_ms())
        partition.log.roll(env.wall_ms())
    return partition


def cleaned(
    env: MemoryEnv, broker: Broker, *, group_size: int | None = None, **config: Any
) -> tuple[CleanJob, tuple[CleanedGroup, ...], CleanReport]:
    """What a worker makes of the partition as it stands, in groups of `group_size` segments."""
    facts = broker.cleaning.facts_of(ORDERS)
    assert facts is not None
    verdict = broker.pool.scanner.assess(facts)
    assert verdict is not None
    inputs = broker.cleaning.job_inputs(ORDERS, facts.log_start_offset, facts.log_end_offset)
    settings = CleanerSettings(dedupe_buffer_bytes=1 << 20, **config)
    job = plan_job(facts, verdict, inputs, settings, job_id="r1", now_ms=env.wall_ms())
    assert job is not None
    if group_size is not None:
        sources = [source for group in job.groups for source in group]
        firsts = range(0, len(sources), group_size)
        groups = tuple(tuple(sources[first : first + group_size]) for first in firsts)
        job = replace(job, groups=groups)
    recorder = Recorder()
    report = run_clean(env, job, recorder)
    return job, tuple(recorder.groups), report


def take_front(env: MemoryEnv, partition: Partition, offset: int) -> None:
    """Retention, as it runs beside a clean."""
    partition.log.delete_records(offset)
    partition.log.retention.expire(env.wall_ms())
    assert partition.log.log_start_offset == offset


# --- facts ----------------------------------------------------------------------------------------


async def test_the_inputs_of_a_clean_take_little_time_for_each_producer(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop gathers them and sends them to a worker: 20,000 producers took 10 ms."""
    count, meter = 1_000, LoopMeter()
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 1)
        for producer_id in range(count):
            batch = batch_of(
                b"v",
                key=b"k",
                timestamps=[env.wall_ms()],
                producer_id=producer_id,
                base_sequence=0,
                producer_epoch=0,
            )
            partition.append(memoryview(batch), read_header(batch), env.wall_ms())
        with meter.measuring(monkeypatch):
            inputs = broker.cleaning.job_inputs(ORDERS, 0, partition.log.log_end_offset)
    assert len(inputs.last_records) == count
    assert meter.lines < 2 * count
    assert isinstance(inputs.last_records, LastRecords), "which is pickled as bytes"


async def test_a_log_that_finds_no_file_descriptor_keeps_no_other_from_being_scanned(
    env: MemoryEnv,
) -> None:
    topics = BOTH | {"others": BOTH["orders"]}
    async with broker_in_memory(env, topics=topics) as broker:
        fill(env, broker, 2)
        fill(env, broker, 2, OTHERS)
        scanner = broker.pool.scanner
        unread = env.fail_on(lambda op, path: "/orders-0/" in path, errno.EMFILE)
        candidates = [verdict.partition for verdict, _ in await scanner.scan()]
        assert candidates == [OTHERS]
        assert ORDERS in scanner.existing, "its requests and failures are kept"
        assert "Too many open files" in str(scanner.verdicts[ORDERS].findings)
        unread.remove()
        assert ORDERS in [verdict.partition for verdict, _ in await scanner.scan()]


# --- transaction indexes --------------------------------------------------------------------------


async def test_an_index_that_contradicts_the_log_is_made_anew_for_the_next_attempt(
    env: MemoryEnv,
) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 2)
        first = partition.log.segments[0]
        first.write_txn_entries([TxnIndexEntry(1, 0, 5, 6)])
        with pytest.raises(TransactionIndexError):
            cleaned(env, broker)
        broker.cleaning.repair_transaction_indexes(ORDERS)
        await asyncio.gather(*broker.cleaning._tasks)
        assert first.txn_index.entries == []
        assert not env.exists(first.path.replace(filenames.LOG, filenames.TXN_INDEX))
        cleaned(env, broker)


# --- files that cannot be read --------------------------------------------------------------------


@pytest.mark.parametrize("find", ["scan", "retention"])
async def test_a_segment_that_cannot_be_read_stops_the_partitions_of_its_directory_only(
    env: MemoryEnv, find: str
) -> None:
    topics = {**BOTH, "others": {"keys": {"cleanup.policy": "delete", "retention.bytes": 0}}}
    async with broker_in_memory(env, "/disk1", "/disk2", topics=topics) as broker:
        orders, others = fill(env, broker, 1), fill(env, broker, 1, OTHERS)
        assert os.path.dirname(orders.log.directory) != os.path.dirname(others.log.directory)
        env.fail_on(
            lambda operation, path: (
                operation == "pread" and path.startswith(f"{orders.log.directory}/")
            ),
            errno.EIO,
        )
        if find == "scan":
            assert [facts.partition for facts in broker.cleaning.facts()] == [OTHERS]
        else:
            await broker.log_maintenance.expire()
            assert others.log.log_start_offset == RECORDS
        assert broker.topics.partition(ORDERS) is None
        assert broker.cleaning.facts_of(ORDERS) is None
        assert "Input/output error" in broker.manager.table.offline[ORDERS]
        assert broker.topics.partition(OTHERS) is others


# --- publication beside retention -----------------------------------------------------------------


async def test_the_past_of_a_log_has_its_size_before_each_publication(env: MemoryEnv) -> None:
    history = "/api/v1/topics/orders/partitions/0/history"
    async with broker_in_memory(env, topics=BOTH) as broker:
        await call_api(broker, "GET", history)  # of the empty log
        log = fill(env, broker, 4).log
        job, groups, _ = cleaned(env, broker, group_size=2)
        sizes = []
        for group in groups:
            sizes.append(log.segments.size_bytes)
            assert await broker.cleaning.publish(job, (group,)) == (PublishOutcome.PUBLISHED,)
        _, answer = await call_api(broker, "GET", history)
        present, *changes = answer["steps"]
        rows, past = {row[0]: row[2] for row in present["present"]}, []
        for change in changes:  # the newest first
            for base_offset in change["added"]:
                del rows[base_offset]
            rows |= {row[0]: row[2] for row in [*change["removed"], change["active"]]}
            past.append(sum(rows.values()))
        assert past == [*reversed(sizes), 0]


@pytest.mark.parametrize("fate", ["restart", "kill", "power"])
async def test_a_group_whose_first_sources_went_replaces_what_is_left(
    env: MemoryEnv, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 4)
        job, groups, _ = cleaned(env, broker)
        take_front(env, partition, 2 * RECORDS)
        assert await broker.cleaning.publish(job, groups) == (PublishOutcome.PUBLISHED,)
        survivors = list(range(4 * RECORDS - KEYS, 4 * RECORDS))
        assert offsets_in(partition.log, start=2 * RECORDS) == survivors
        assert partition.log.log_start_offset == 2 * RECORDS
        assert len(partition.log.segments) == 2
        if fate != "restart":
            monkeypatch.setattr(broker.manager, "close", lambda **_: None)
    env_after = env if fate == "restart" else env.kill() if fate == "kill" else env.crash()
    async with broker_in_memory(env_after, topics=BOTH) as broker:
        again = broker.topics.partition(ORDERS)
        assert again is not None
        assert again.log.log_start_offset == 2 * RECORDS  # what went does not come back
        assert offsets_in(again.log, start=2 * RECORDS) == survivors
        assert again.log.log_end_offset == 4 * RECORDS


async def test_what_retention_took_stays_hidden_though_it_is_in_the_output(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 2)
        batch = memoryview(batch_of(b"only once", key=b"rare"))
        rare = partition.append(batch, read_header(batch), env.wall_ms()).first_offset
        partition.log.roll(env.wall_ms())
        fill(env, broker, 1)
        job, groups, _ = cleaned(env, broker)
        take_front(env, partition, rare + 1)
        assert await broker.cleaning.publish(job, groups) == (PublishOutcome.PUBLISHED,)
        assert partition.log.segments.first_base_offset < partition.log.log_start_offset
        assert rare not in offsets_in(partition.log, start=partition.log.log_start_offset)
        # Retention goes on from there.
        partition.log.delete_records(partition.log.log_end_offset)
        assert partition.log.retention.expire(env.wall_ms())
        assert len(partition.log.segments) == 1


async def test_a_group_of_which_nothing_is_left_is_dropped(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 3)
        job, groups, _ = cleaned(env, broker)
        take_front(env, partition, 3 * RECORDS)
        assert await broker.cleaning.publish(job, groups) == (PublishOutcome.SOURCES_GONE,)
        assert len(partition.log.segments) == 1


@pytest.mark.parametrize("fate", ["restart", "kill", "power"])
async def test_of_groups_in_one_journal_each_keeps_its_own_rule(
    env: MemoryEnv, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 6)
        job, groups, _ = cleaned(env, broker, group_size=2)
        assert [len(group.source_base_offsets) for group in groups] == [2, 2, 2]
        take_front(env, partition, 3 * RECORDS)  # the first group, and half of the second
        gone, done = PublishOutcome.SOURCES_GONE, PublishOutcome.PUBLISHED
        assert await broker.cleaning.publish(job, groups) == (gone, done, done)
        survivors = list(range(6 * RECORDS - KEYS, 6 * RECORDS))
        assert offsets_in(partition.log, start=3 * RECORDS) == survivors
        if fate != "restart":
            monkeypatch.setattr(broker.manager, "close", lambda **_: None)
    env_after = env if fate == "restart" else env.kill() if fate == "kill" else env.crash()
    async with broker_in_memory(env_after, topics=BOTH) as broker:
        again = broker.topics.partition(ORDERS)
        assert again is not None
        assert again.log.log_start_offset == 3 * RECORDS  # what went does not come back
        assert offsets_in(again.log, start=3 * RECORDS) == survivors


@pytest.mark.parametrize("fate", ["restart", "kill", "power"])
async def test_a_clean_that_empties_the_first_segment_does_not_raise_the_log_start(
    env: MemoryEnv, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumers at its offsets read on at the next record; they get no OFFSET_OUT_OF_RANGE."""
    async with broker_in_memory(env, topics=BOTH) as broker:
        for segments in (3, 2):  # the second clean finds a start below the first segment
            partition = fill(env, broker, segments)
            job, groups, _ = cleaned(env, broker, group_size=1)
            assert groups[0].output is None
            outcomes = await broker.cleaning.publish(job, groups)
            assert set(outcomes) == {PublishOutcome.PUBLISHED}
        survivors = list(range(5 * RECORDS - KEYS, 5 * RECORDS))
        assert offsets_in(partition.log, start=0) == survivors
        assert (partition.log.log_start_offset, partition.log.segments.first_base_offset) == (0, 40)
        if fate != "restart":
            monkeypatch.setattr(broker.manager, "close", lambda **_: None)
    env_after = env if fate == "restart" else env.kill() if fate == "kill" else env.crash()
    async with broker_in_memory(env_after, topics=BOTH) as broker:
        again = broker.topics.partition(ORDERS)
        assert again is not None
        assert again.log.log_start_offset == 0
        assert offsets_in(again.log, start=0) == survivors


async def test_the_log_start_is_on_the_disk_before_the_first_segment_goes(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        fill(env, broker, 3)
        job, groups, _ = cleaned(env, broker, group_size=1)
        log_directory = broker.manager.table.find_directory(ORDERS)
        assert log_directory is not None
        starts = []

        def execute(env: MemoryEnv, plan: SwapPlan) -> None:
            starts.append(read_offsets(env, log_directory.file(filenames.LOG_START_CHECKPOINT)))
            execute_swap(env, plan)

        monkeypatch.setattr("broker.cleaning.cleaner_host.execute_swap", execute)
        await broker.cleaning.publish(job, groups)
        assert starts == [{ORDERS: 0}]


async def test_what_a_job_went_by_is_durable_before_its_first_group_is(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 2)
        await partition.flush()
        batch = memoryview(batch_of(b"a marker, perhaps", key=b"k0"))
        partition.append(batch, read_header(batch), env.wall_ms())
        job, groups, _ = cleaned(env, broker)
        assert partition.log.recovery_point < partition.log.log_end_offset
        assert await broker.cleaning.publish(job, groups) == (PublishOutcome.PUBLISHED,)
        assert partition.log.recovery_point == partition.log.log_end_offset


async def test_records_below_the_log_start_do_not_come_back_without_their_tombstones(
    env: MemoryEnv,
) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 4)
        partition.log.delete_records(RECORDS + 2)
        job, groups, _ = cleaned(env, broker)
        assert job.log_start_offset > partition.log.segments.first_base_offset
        assert await broker.cleaning.publish(job, groups) == (PublishOutcome.PUBLISHED,)
        log_directory = broker.manager.table.find_directory(ORDERS)
        assert log_directory is not None
        messages = read_offsets(env, log_directory.file(filenames.LOG_START_CHECKPOINT))
        assert messages == {ORDERS: RECORDS + 2}


async def test_a_change_of_policy_makes_a_job_void(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        fill(env, broker, 2)
        job, groups, _ = cleaned(env, broker)
        for policy in ("delete", "compact,delete"):
            await broker.metadata_service.alter(
                "orders", lambda now, to=policy: {**now, "cleanup.policy": to}
            )
        assert await broker.cleaning.publish(job, groups) == (PublishOutcome.STALE,)


async def test_a_partition_that_was_made_anew_gets_nothing_of_the_old_one(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        fill(env, broker, 2)
        job, groups, _ = cleaned(env, broker)
        await broker.metadata_service.delete("orders")
        await broker.metadata_service.create("orders", 1, {"cleanup.policy": "compact"})
        partition = fill(env, broker, 2)
        assert await broker.cleaning.publish(job, groups) == (PublishOutcome.STALE,)
        broker.cleaning.checkpoint(ORDERS, job.generation, 20)
        assert ORDERS not in broker.manager.table.cleaner_offsets
        assert offsets_in(partition.log, start=0) == list(range(2 * RECORDS))


async def test_work_longer_than_delete_retention_publishes_no_expired_tombstone(
    env: MemoryEnv,
) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        fill(env, broker, 4)
        job, groups, _ = cleaned(env, broker)
        before = env.listdir("/disk1/orders-0")
        env.advance_ms(job.delete_retention_ms + 1)
        assert await broker.cleaning.publish(job, groups) == (PublishOutcome.LATE,) * len(groups)
        assert env.listdir("/disk1/orders-0") == before
        in_time = replace(job, published_by_ms=env.wall_ms())
        assert await broker.cleaning.publish(in_time, groups) == (PublishOutcome.PUBLISHED,)


# --- checkpoints and failures ---------------------------------------------------------------------


async def test_what_is_clean_is_on_the_disk_soon(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.cleaning.cleaner_host.CHECKPOINT_SECONDS", 0)
    path = f"/disk1/{filenames.CLEANER_CHECKPOINT}"
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 2)
        generation = partition.log.generation
        broker.pool.scanner.save_checkpoint(ORDERS, generation, RECORDS)
        broker.pool.scanner.save_checkpoint(ORDERS, generation, 2 * RECORDS)
        assert await broker.pool.state_store.saved(ORDERS)
        written = {ORDERS: 2 * RECORDS}
        async with asyncio.timeout(10):
            while not env.exists(path) or read_offsets(env, path) != written:  # noqa: ASYNC110
                await asyncio.sleep(0.001)  # a thread writes it


async def test_a_checkpoint_is_never_above_the_cleaner_state_on_the_disk(env: MemoryEnv) -> None:
    path = f"/disk1/{filenames.CLEANER_CHECKPOINT}"
    async with broker_in_memory(env, topics=BOTH) as broker:
        generation = fill(env, broker, 4).log.generation
        assert await broker.pool.state_store.saved(ORDERS)
        for offset, before in ((RECORDS, 0), (2 * RECORDS, RECORDS)):
            broker.pool.scanner.save_checkpoint(ORDERS, generation, offset)
            broker.manager.table.checkpoint()
            assert read_offsets(env, path) == {ORDERS: before}
            assert await broker.pool.state_store.saved(ORDERS)
            broker.manager.table.checkpoint()
            assert read_offsets(env, path) == {ORDERS: offset}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EMFILE])
@pytest.mark.parametrize("file", ["journal.tmp", "log-start-offset-checkpoint.tmp"])
async def test_a_group_that_finds_no_room_is_refused_and_the_directory_stays(
    env: MemoryEnv, error: int, file: str
) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 4)
        partition.log.delete_records(1)  # so that the log start is written first
        job, (group,), _ = cleaned(env, broker)
        full = env.fail_on(lambda op, path: op == "open" and path.endswith(file), error)
        with pytest.raises(SwapRefusedError):
            await broker.cleaning.publish(job, (group,))
        full.remove()
        assert all(directory.is_online for directory in broker.manager.table.directories)
        assert fill(env, broker, 1) is partition
        assert await broker.cleaning.publish(job, (group,)) == (PublishOutcome.PUBLISHED,)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO])
async def test_a_publication_whose_sources_cannot_be_pinned_begins_no_swap(
    env: MemoryEnv, error: int
) -> None:
    """Only SwapRefusedError says that no journal names the outputs, so that they are removed."""
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 4)
        await partition.flush()
        job, (group,), _ = cleaned(env, broker)
        for segment in partition.log.segments.closed * 2:
            segment.drop_idle_indexes()
        unreadable = env.fail_on(lambda op, path: path.endswith(".index"), error)
        with pytest.raises(SwapRefusedError if error == errno.EMFILE else LogDirectoryError):
            await broker.cleaning.publish(job, (group,))
        unreadable.remove()
        is_online = all(directory.is_online for directory in broker.manager.table.directories)
        assert is_online is (error == errno.EMFILE)
        if is_online:
            assert await broker.cleaning.publish(job, (group,)) == (PublishOutcome.PUBLISHED,)


@pytest.mark.parametrize(("operation", "part"), [("sync_dir", "orders-0"), ("open", ".log")])
@pytest.mark.parametrize("is_short_for_long", [False, True])
async def test_a_swap_waits_for_descriptors_and_else_fails_its_partition_alone(
    env: MemoryEnv,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    part: str,
    is_short_for_long: bool,
) -> None:
    monkeypatch.setattr("broker.cleaning.descriptors.RETRY_SECONDS", 0)
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 4)
        await partition.flush()
        job, (group,), _ = cleaned(env, broker)

        def fails(op: str, path: str) -> bool:
            return (
                op == operation
                and path.endswith(part)
                and any(name.endswith(".journal") for name in env.listdir("/disk1/orders-0"))
            )

        def fails_behind(op: str, path: str) -> bool:
            names = env.listdir("/disk1/orders-0") if op == "open" else []
            is_done = not any(name.endswith(".cleaned") for name in names)
            return op == "open" and path.endswith(part) and is_done

        predicate = fails if operation == "sync_dir" else fails_behind
        short = env.fail_on(
            lambda op, path: (is_short_for_long or short.hits < 3) and predicate(op, path),
            errno.EMFILE,
        )
        if is_short_for_long:
            with pytest.raises(PartitionFolderError):
                await broker.cleaning.publish(job, (group,))
            assert broker.topics.partition(ORDERS) is None
        else:
            assert await broker.cleaning.publish(job, (group,)) == (PublishOutcome.PUBLISHED,)
            assert fill(env, broker, 1) is partition
        assert short.hits
        short.remove()
        assert all(directory.is_online for directory in broker.manager.table.directories)
    async with broker_in_memory(env, topics=BOTH) as broker:
        again = broker.topics.partition(ORDERS)
        assert again is not None
        assert again.log.segment_facts()[0].next_base_offset == 4 * RECORDS


async def test_a_checkpoint_that_finds_no_room_is_written_later(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        fill(env, broker, 1)
        full = env.fail_on(lambda op, path: op == "pwrite" and path.endswith(".tmp"), errno.ENOSPC)
        with pytest.raises(NoRoomError):
            await broker.log_maintenance.checkpoint()
        full.remove()
        assert all(directory.is_online for directory in broker.manager.table.directories)
        await broker.log_maintenance.checkpoint()
        recovery = env.read_file("/disk1/replication-offset-checkpoint")
        assert f"orders 0 {RECORDS}".encode() in recovery


async def test_a_producer_on_a_full_disk_is_refused_and_the_directory_stays(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 1)
        full = env.fail_on(lambda op, path: op == "pwrite", errno.ENOSPC)
        with pytest.raises(NoRoomError) as caught:
            fill(env, broker, 1)
        full.remove()
        assert code_of(caught.value) is ErrorCode.KAFKA_STORAGE_ERROR
        assert broker.readiness.unhealthy_because() is None
        assert fill(env, broker, 1) is partition


async def test_a_directory_that_fails_takes_its_partitions_from_the_workers(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[TopicPartition] = []
    async with broker_in_memory(env, topics=BOTH) as broker:
        fill(env, broker, 2)
        job, groups, _ = cleaned(env, broker)
        monkeypatch.setattr(
            broker.pool.operator, "abort", lambda where, _reason: given_up.append(where)
        )
        env.fail_on(lambda op, path: op == "rename" and "journal" in path, errno.EIO)
        with pytest.raises(Exception, match="orders-0"):
            await broker.cleaning.publish(job, groups)
        assert ORDERS in given_up
        assert await broker.cleaning.publish(job, groups) == (PublishOutcome.STALE,)


async def test_a_finished_job_is_one_line_with_kafkas_numbers_and_ours(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=BOTH) as broker:
        fill(env, broker, 4)
        job, _, report = cleaned(env, broker)
        with capture_logs() as lines:
            broker.cleaning.finished(job, report, damage="")
        bad = replace(report, damaged=(Damage("/d/orders-0/0.log", 61, "bad CRC"),))
        with capture_logs() as of_damage:
            broker.cleaning.finished(job, bad, damage="0.log is damaged")
    (line,), (other,) = lines, of_damage
    assert (other["event"], other["log_level"]) == ("clean finished with damage", "error")
    assert (other["reason"], other["damaged"]) == ("0.log is damaged", 1)
    assert line["event"] == "clean finished"
    assert (line["records_before"], line["records_after"]) == (4 * RECORDS, KEYS)
    assert line["fewer_records_percent"] == 87.5
    assert line["bytes_before"] > line["bytes_after"] > 0
    assert line["buffer_utilization_percent"] == round(100 * report.map_utilization, 1)
    assert (line["first_dirty_offset"], line["next_dirty_offset"]) == (0, 4 * RECORDS)
    assert line["keys"] == KEYS
    assert line["job_id"] == "r1"


@pytest.fixture
def indexes_of_small_logs() -> Iterator[None]:
    with small_records_are_indexed():
        yield


async def test_a_clean_by_key_indexes_notes_the_contents_for_a_start_after_a_kill(
    env: MemoryEnv, indexes_of_small_logs: None
) -> None:
    keys = {**BOTH["orders"]["keys"], "varve.cleaner.strategy": "generational"}
    async with broker_in_memory(env, topics={"orders": {"keys": keys}}) as broker:
        log = fill(env, broker, 4).log
        job, groups, report = cleaned(env, broker, group_size=1)
        assert job.by_index
        for group in groups:
            await broker.cleaning.publish(job, (group,))
        broker.cleaning.finished(job, report, damage="")
        await asyncio.gather(*broker.cleaning._tasks)
        bases = [segment.base_offset for segment in log.segments.closed]
        limits = index_limits(log.config)
        found = [Segment(env, log.directory, base, limits, create=False) for base in bases]
        assert restore_content_ids(env, log.directory, found) == frozenset(bases) != frozenset()
        assert [segment.content_id for segment in found] == [
            segment.content_id for segment in log.segments.closed
        ]


async def test_content_ids_that_cannot_be_written_disturb_nothing(
    env: MemoryEnv, indexes_of_small_logs: None
) -> None:
    keys = {**BOTH["orders"]["keys"], "varve.cleaner.strategy": "generational"}
    async with broker_in_memory(env, topics={"orders": {"keys": keys}}) as broker:
        fill(env, broker, 4)
        job, _, report = cleaned(env, broker)
        fault = env.fail_on(
            lambda op, path: op == "open" and path.endswith(filenames.CONTENT_IDS), errno.EIO
        )
        with capture_logs() as lines:
            broker.cleaning.finished(job, report, damage="")
            await asyncio.gather(*broker.cleaning._tasks)
        fault.remove()
        assert [line["event"] for line in lines] == ["clean finished", "content ids not written"]
        assert broker.manager.table.directories[0].is_online


# --- what wakes the cleaner, and which facts it gets -------------------------------------------


async def test_a_closed_segment_wakes_the_cleaner_of_a_compacted_topic(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes: list[str] = []
    monkeypatch.setattr(CleanerPool, "wake", lambda _: wakes.append("woken"))
    topics = {"orders": {"keys": {"cleanup.policy": "compact", "segment.ms": "1000"}}}
    async with broker_in_memory(env, topics=topics) as broker:
        fill(env, broker, 1)
        partition = broker.topics.partition(ORDERS)
        assert partition is not None
        batch = memoryview(batch_of(b"x", key=b"k", timestamps=[env.wall_ms()]))
        partition.append(batch, read_header(batch), env.wall_ms())
        wakes.clear()
        env.advance_ms(2000)
        await broker.log_maintenance.roll()
        assert wakes == ["woken"]
        await broker.metadata_service.alter(
            "orders", lambda now: {**now, "cleanup.policy": "delete"}
        )
        wakes.clear()
        partition.append(batch, read_header(batch), env.wall_ms())
        partition.log.roll(env.wall_ms())
        assert wakes == []


async def test_dynamic_settings_of_the_cleaner_hold_after_a_restart(env: MemoryEnv) -> None:
    dynamic = {"log.cleaner.threads": "3", "log.cleaner.io.max.bytes.per.second": "20000000.0"}
    async with broker_in_memory(env) as broker:
        await broker.metadata_service.alter_broker(lambda now: {**now, **dynamic})
        assert broker.pool.status().rates == (10_000_000, 10_000_000)
    async with broker_in_memory(env) as broker:
        assert broker.pool.status().rates == (10_000_000, 10_000_000)
        assert broker.effective_settings.cleaner().workers == 3
    # The file contradicts them by now: then it holds, and the broker starts.
    env_settings = {"workers": 64, "enabled": False}
    async with broker_in_memory(env) as broker:
        await broker.metadata_service.alter_broker(
            lambda _: {"log.cleaner.dedupe.buffer.size": str(4 << 20)}
        )
    async with broker_in_memory(env, cleaner=env_settings) as broker:
        assert broker.effective_settings.cleaner().workers == 64


async def test_a_quarantine_ends_when_retention_took_the_damage(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgiven: list[TopicPartition] = []
    async with broker_in_memory(env, topics=BOTH) as broker:
        partition = fill(env, broker, 3)
        monkeypatch.setattr(broker.pool, "forget_failures", forgiven.append)
        first = f"{partition.log.directory}/{filenames.file_name(0, filenames.LOG)}"
        assert partition.log.damage.mark(first, 10, "a bit has flipped")
        await broker.log_maintenance.expire()
        assert forgiven == []
        partition.log.delete_records(RECORDS)
        await broker.log_maintenance.expire()
        assert forgiven == [ORDERS]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
async def test_a_start_that_cannot_read_the_cleaner_state_forgets_no_pause(
    env: MemoryEnv, code: int
) -> None:
    """The file is intact: the next write would replace it. Its directory is offline instead."""
    path = f"/disk1/{STATE_NAME}"
    async with broker_in_memory(env, "/disk1", "/disk2", topics=BOTH) as broker:
        broker.pool.operator.pause(ORDERS)
        assert await broker.pool.state_store.saved(ORDERS)
        assert env.exists(path)
    fault = env.fail_on(lambda op, where: op == "read_file" and where == path, code)
    async with broker_in_memory(env, "/disk1", "/disk2", topics=BOTH) as broker:
        fault.remove()
        assert path in broker.manager.table.offline[ORDERS]
    async with broker_in_memory(env, "/disk1", "/disk2", topics=BOTH) as broker:
        assert broker.topics.partition(ORDERS) is not None
        assert ORDERS in broker.pool.state_store.paused_partitions()
