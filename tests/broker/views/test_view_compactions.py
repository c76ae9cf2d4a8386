"""Compactions of views: who waits for whom, what is due, and what a run costs."""

import asyncio
import errno
import gc
from contextlib import suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from admin.http.view_text import compacted_text, view_lines
from broker.app import Broker
from broker.http.api.compaction.views import status_json
from broker.topics.partition import Partition
from broker.views.compaction import ViewError
from broker.views.maintenance import RETIRED_MAX
from broker.views.scheduler import RETRY_MS, RETRY_MS_MAX
from broker.views.status import LastCompaction, ViewState, ViewStatus
from cleaner.scheduler.clean_attempt import backoff_ms
from storage.format.batch import HEADER_BYTES, Record, build_batch, read_header, with_crc
from storage.format.filenames import LOG, file_name
from storage.model import TopicPartition
from storage.view.ledger import view_path
from tests.support.broker.broker_in_memory import log_repair_of
from tests.support.broker.views.view_broker import (
    ANY_TIME,
    ON,
    READ_SECONDS,
    VIEW,
    WHERE,
    broker_with_view,
    consuming,
    produce,
    read_all,
    read_on,
)
from tests.support.broker.views.view_gate import Gate
from tests.support.storage.logs import append
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

OTHERS = [TopicPartition("orders", index) for index in (1, 2)]
THREE = {"orders": {"partitions": 3, "keys": {**ON, **ANY_TIME}}}


async def request_compaction(broker: Broker, partition: TopicPartition) -> asyncio.Task[ViewStatus]:
    """Request a compaction, which is queued or running."""
    task = asyncio.create_task(broker.view_scheduler.compact(partition))
    await asyncio.sleep(0)
    return task


async def test_compactions_wait_in_line_and_say_at_which_place() -> None:
    env = MemoryEnv()
    gate = Gate(env)
    async with broker_with_view(env, worker=gate.worker, topics=THREE) as broker:
        await produce(broker, *((b"%d" % n, b"1") for n in range(50)))
        compactions = broker.view_scheduler
        tasks = [await request_compaction(broker, WHERE)]
        await gate.reached.wait()
        # The third waits already, and is not put in twice.
        tasks += [
            await request_compaction(broker, partition) for partition in (*OTHERS, OTHERS[0], WHERE)
        ]
        rows = {row.partition: row for row in compactions.status()}
        assert [(rows[w].state, rows[w].place) for w in (WHERE, *OTHERS)] == [
            ("running", 3), ("waiting", 1), ("waiting", 2),
        ]  # fmt: skip
        texts = [compacted_text(status_json(rows[w])) for w in (WHERE, OTHERS[1])]
        assert texts == [
            "the view of orders-0 is being compacted; another compaction is queued (position 3)",
            "view compaction of orders-2 is queued (position 2)",
        ]
        assert compactions.abort(OTHERS[0])
        rows = {row.partition: row for row in compactions.status()}
        assert (rows[OTHERS[0]].state, rows[OTHERS[1]].place) == ("aborted", 1)
        gate.let_go()
        async with asyncio.timeout(READ_SECONDS):
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(item, ViewError) for item in ended] == [False, True, False, True, False]
        assert [row.compactions for row in compactions.status()] == [2, 0, 1]


async def test_clients_that_request_compactions_take_turns() -> None:
    env = MemoryEnv()
    gate = Gate(env)
    topics = {"orders": {"partitions": 5, "keys": {**ON, **ANY_TIME}}}
    async with broker_with_view(env, worker=gate.worker, topics=topics) as broker:
        await produce(broker, *((b"%d" % n, b"1") for n in range(100)))
        compactions, done = broker.view_scheduler, list[int]()

        async def compact(index: int, client: str) -> None:
            await compactions.compact(TopicPartition("orders", index), client=client)
            done.append(index)

        clients = ["many", "many", "many", "one", "other"]
        tasks = [asyncio.create_task(compact(*each)) for each in enumerate(clients)]
        await gate.reached.wait()
        places = [row.place for row in compactions.status()]
        gate.let_go()
        async with asyncio.timeout(READ_SECONDS):
            await asyncio.gather(*tasks)
    assert (places, done) == ([0, 3, 4, 1, 2], [0, 3, 4, 1, 2])


async def test_a_replica_moves_while_the_view_of_another_one_is_compacted() -> None:
    env, disks = MemoryEnv(), ["/disk1", "/disk2"]
    gate = Gate(env)
    async with broker_with_view(env, worker=gate.worker, topics=THREE, log_dirs=disks) as broker:
        await produce(broker, *((b"%d" % n, b"1") for n in range(50)))
        running = await request_compaction(broker, WHERE)
        await gate.reached.wait()
        replica = broker.topics.partition(OTHERS[0])
        assert replica is not None
        here = broker.manager.table.find_directory(OTHERS[0])
        target = next(d for d in broker.manager.table.directories if d is not here)
        broker.moves.request(replica, target)
        async with asyncio.timeout(READ_SECONDS):
            await asyncio.gather(*broker.moves._tasks.values())
        assert broker.manager.table.find_directory(OTHERS[0]) is target
        gate.let_go()
        assert (await running).compactions == 1


async def test_a_second_request_sees_what_was_produced_after_the_first() -> None:
    env = MemoryEnv()
    gate = Gate(env)
    async with broker_with_view(env, worker=gate.worker) as broker:
        await produce(broker, (b"a", b"1"))
        broker.view_scheduler.begin(WHERE)
        await gate.reached.wait()
        await produce(broker, (b"a", b"2"))
        second = await request_compaction(broker, WHERE)
        gate.let_go()
        assert (await second).horizon == 2


async def test_who_waits_when_the_broker_stops_is_told() -> None:
    env = MemoryEnv()
    gate = Gate(env)
    async with broker_with_view(env, worker=gate.worker, topics=THREE) as broker:
        await produce(broker, *((b"%d" % n, b"1") for n in range(50)))
        broker.view_scheduler.begin(WHERE)
        await gate.reached.wait()
        waiting = await request_compaction(broker, OTHERS[0])
        stopping = asyncio.create_task(broker.view_scheduler.stop())
        await asyncio.sleep(0)
        gate.let_go()
        with pytest.raises(ViewError, match="stopping"):
            await waiting
        await stopping


async def test_a_compaction_that_fails_after_its_caller_left_is_no_unhandled_error() -> None:
    env = MemoryEnv()
    gate = Gate(env)
    unhandled: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: unhandled.append(context))
    async with broker_with_view(env, worker=gate.worker) as broker:
        await produce(broker, *((b"%d" % n, b"1") for n in range(50)))
        task = await request_compaction(broker, WHERE)
        await gate.reached.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert broker.view_scheduler.abort(WHERE)
        gate.let_go()
        del task
        await broker.view_scheduler.compact(WHERE)  # this one waits for the first to end
        gc.collect()
    assert unhandled == []


async def test_the_status_tells_how_far_a_run_is() -> None:
    env = MemoryEnv()
    gate = Gate(env)
    async with broker_with_view(env, worker=gate.worker) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        task = await request_compaction(broker, WHERE)
        await gate.reached.wait()
        row = broker.view_scheduler.status()[0]
        size = row.backlog_bytes
        assert (row.state, row.stage, row.round) == ("running", "rewrite", 1)
        assert (row.done_bytes, row.total_bytes) == (size + 5, size + 10)
        share = (size + 5) * 100 // (size + 10)
        head, line = view_lines([status_json(row)])
        assert head.split("  ")[-1] == "COMPACTED"
        assert f"running {share}%" in line
        assert line.split()[4:7] == ["2", str(size), "B"], "it is two offsets behind"
        gate.let_go()
        await task
        row = broker.view_scheduler.status()[0]
        assert (row.state, row.stage, row.done_bytes, row.total_bytes) == ("done", "", 0, 0)


async def test_a_view_is_compacted_before_its_backlog_goes_by_size() -> None:
    env = MemoryEnv()
    keys = {"varve.view.min.bytes": str(1 << 30), "retention.bytes": "2000", "retention.ms": "-1"}
    async with broker_with_view(env, keys) as broker:
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        await produce(broker, (b"a", b"1"))
        partition.log.roll(env.wall_ms())
        await produce(broker, (b"b", b"x" * 500))
        await broker.view_scheduler.tidy()
        assert broker.view_scheduler.status()[0].horizon == 0
        await produce(broker, (b"b", b"x" * 500))
        await broker.view_scheduler.tidy()
        assert broker.view_scheduler.status()[0].horizon == 1


async def test_topics_whose_views_are_due_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    env, begun = MemoryEnv(), list[str]()
    keys = {**ON, "varve.view.min.bytes": "0"}
    topics = {"many": {"partitions": 3, "keys": keys}, "one": {"keys": keys}}
    async with broker_with_view(env, topics=topics) as broker:
        for partition in broker.topics.partitions():
            append(partition.log, b"value")
            partition.log.roll(env.wall_ms())

        async def compact(partition: TopicPartition) -> None:
            """Take three seconds; the view is due again at once."""
            begun.append(str(partition))
            env.advance_ms(3000)
            served = broker.topics.partition(partition)
            assert served is not None
            last = broker.view_scheduler._last.setdefault(served, LastCompaction())
            last.ended_ms = env.wall_ms()

        watcher = broker.view_scheduler._watcher
        assert watcher is not None
        watcher.cancel()  # the rounds are those of the test
        monkeypatch.setattr(broker.view_scheduler._maintenance, "_compact", compact)
        for _ in range(3):
            assert await broker.view_scheduler.tidy(), "more are due"
    assert begun == ["many-0", "one-0", "many-1", "one-0", "many-2", "one-0"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP])
async def test_where_nothing_can_be_linked_sources_are_copied_and_that_is_said_once(
    code: int,
) -> None:
    env = MemoryEnv()
    fault = env.fail_on(lambda operation, _: operation == "link", code)
    async with broker_with_view(env, {"varve.view.strategy": "timestamp"}) as broker:
        with capture_logs() as lines:
            for value in (b"1", None, b"3"):
                await produce(broker, (b"a", value), (b"b", b"1"))
                await broker.view_scheduler.compact(WHERE)
        assert [key for _, key, _ in await read_all(broker)] == [b"a", b"b"]
        status = broker.view_scheduler.status()[0]
        assert status.bytes_copied > 0
        reported = [line for line in lines if "copied" in line["event"]]
        assert len(reported) == 1
        assert "link" in reported[0]["reason"] or code != errno.EMLINK
    fault.remove()
    async with broker_with_view(env.crash()) as broker:
        assert [key for _, key, _ in await read_all(broker)] == [b"a", b"b"]


async def test_a_run_that_a_restart_cuts_off_leaves_the_view_and_nothing_else() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"))
        await broker.view_scheduler.compact(WHERE)
    gate = Gate(env)
    with suppress(SimulatedCrash):
        async with broker_with_view(env, worker=gate.worker) as broker:
            await produce(broker, (b"a", b"2"))
            broker.view_scheduler.begin(WHERE)
            await gate.reached.wait()
            after = env.crash()  # in the midst of the run: what still goes on reaches no disk
            gate.let_go()
    async with broker_with_view(after) as broker:
        assert broker.view_scheduler.status()[0].horizon == 1
        await broker.view_scheduler.tidy()
        assert len(after.listdir(view_path(f"/disk1/{WHERE}"))) == 2, "manifest and ledger"
        assert await read_all(broker) == [(0, b"a", b"1"), (1, b"a", b"2")]
        await broker.view_scheduler.compact(WHERE)
        assert await read_all(broker) == [(1, b"a", b"2")]


async def test_a_slow_reader_comes_to_the_end_over_many_publications_and_expired_originals() -> (
    None
):
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        latest: dict[bytes | None, bytes | None] = {}
        rows = [(b"%d" % n, b"0") for n in range(8)]
        await produce(broker, *rows)
        latest.update(rows)
        await broker.view_scheduler.compact(WHERE)
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        seen: dict[bytes | None, bytes | None] = {}
        async with consuming(broker, max_partition_fetch_bytes=1) as consumer:
            consumer.seek(VIEW, 0)
            for number in range(8):  # more than replaced ledgers are kept
                row = await consumer.getone()
                seen[row.key] = row.value
                change = [(b"%d" % number, b"%d" % (number + 1)), (b"x", b"%d" % number)]
                await produce(broker, *change)
                latest.update(change)
                status = await broker.view_scheduler.compact(WHERE)
                partition.log.delete_records(status.horizon)
                partition.log.retention.expire(env.wall_ms())
                await broker.view_scheduler.tidy()
            seen.update({key: value for _, key, value in await read_on(consumer)})
        assert seen == latest


async def test_a_disk_that_fails_when_a_segment_is_closed_takes_its_partitions_offline() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"))
        env.fail_on(lambda op, path: op == "open" and "/orders-0/" in path, errno.EIO)
        with pytest.raises(ViewError, match="roll of /disk1/orders-0"):
            await broker.view_scheduler.compact(WHERE)
        assert broker.topics.partition(WHERE) is None
        assert "roll of /disk1/orders-0" in broker.topics.existing("orders").offline[0]


async def test_few_replaced_ledgers_wait_for_readers_that_read_no_more() -> None:
    async with broker_with_view(MemoryEnv()) as broker:
        await produce(broker, (b"a", b"1"))
        held = []
        for _ in range(RETIRED_MAX + 3):
            await broker.view_scheduler.compact(WHERE, from_scratch=True)
            await broker.view_scheduler.tidy()
            view = broker.views.partition(WHERE)
            assert view is not None
            held.append(view.log.ledger)
        revoked = [ledger.is_revoked for ledger in held if ledger is not None]
    assert revoked == [True, True] + [False] * (RETIRED_MAX + 1)


async def test_a_full_disk_at_the_publication_leaves_the_view_and_nothing_else() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"))
        await broker.view_scheduler.compact(WHERE)
        await produce(broker, (b"a", b"2"))
        fault = env.fail_on(
            lambda operation, path: operation == "pwrite" and "manifest" in path, errno.ENOSPC
        )
        folder = view_path(f"/disk1/{WHERE}")
        before = set(env.listdir(folder))
        with pytest.raises(ViewError, match="No space"):
            await broker.view_scheduler.compact(WHERE)
        assert set(env.listdir(folder)) == before
        assert await read_all(broker) == [(0, b"a", b"1"), (1, b"a", b"2")]
        fault.remove()
        await broker.view_scheduler.compact(WHERE)
        assert await read_all(broker) == [(1, b"a", b"2")]


async def test_a_topic_that_was_created_again_has_no_failures_of_its_predecessor() -> None:
    """They would delay the first compaction of its view, by up to an hour."""
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"))
        fault = env.fail_on(
            lambda operation, path: operation == "pwrite" and "manifest" in path, errno.ENOSPC
        )
        with pytest.raises(ViewError, match="No space"):
            await broker.view_scheduler.compact(WHERE)
        fault.remove()
        await broker.metadata_service.delete(WHERE.topic)
        await broker.metadata_service.create(WHERE.topic, 1, ON)
        (status,) = broker.view_scheduler.status()
        assert (status.state, status.failed, status.error) == (ViewState.NEVER.value, 0, "")


async def test_a_compaction_whose_topic_is_deleted_is_given_up_without_an_error() -> None:
    env = MemoryEnv()
    gate = Gate(env)
    with capture_logs() as lines:
        async with broker_with_view(env, worker=gate.worker) as broker:
            await produce(broker, (b"a", b"1"))
            running = await request_compaction(broker, WHERE)
            await gate.reached.wait()
            await broker.metadata_service.delete(WHERE.topic)
            gate.let_go()
            with pytest.raises(ViewError, match="given up"):
                await running
    assert [line for line in lines if line["log_level"] == "error"] == []


def test_a_view_that_fails_for_months_is_still_tried_every_hour() -> None:
    failures = (1, 2, 3, 6, 7, 101, 1101, 1 << 40)
    delays = [backoff_ms(count, RETRY_MS, RETRY_MS_MAX) // 1000 for count in failures]
    assert delays == [60, 120, 240, 1920, 3600, 3600, 3600, 3600]


async def test_a_view_is_not_ahead_of_what_is_flushed_of_its_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A segment that is closed while the compaction waits for a swap is not flushed."""
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"))
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        wait_for_swap = broker.cleaning.wait_for_swap

        async def wait(base: Partition) -> bool:
            await produce(broker, (b"a", b"2"))
            base.log.roll(env.wall_ms())
            return await wait_for_swap(base)

        monkeypatch.setattr(broker.cleaning, "wait_for_swap", wait)
        flushed = []
        stage = broker.views.stage

        def staged(where: TopicPartition, horizon: int) -> None:
            flushed.append((horizon, partition.log.recovery_point))
            stage(where, horizon)

        monkeypatch.setattr(broker.views, "stage", staged)
        await broker.view_scheduler.compact(WHERE)
        assert flushed
        assert all(horizon <= recovery_point for horizon, recovery_point in flushed)


def malformed(key: bytes) -> bytearray:
    """A batch whose checksum is right and whose record has a length that is wrong."""
    batch = build_batch([Record(0, 0, key, b"1")])
    batch[HEADER_BYTES] += 2
    return with_crc(read_header(batch), batch[HEADER_BYTES:])


async def test_a_view_names_a_malformed_batch_and_goes_past_it_when_it_is_skipped() -> None:
    """A release that did not check every record has accepted it."""
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"))
        partition, batch = broker.topics.partition(WHERE), malformed(b"a")
        assert partition is not None
        partition.append(memoryview(batch), read_header(batch), 0)
        await produce(broker, (b"b", b"2"))
        for _ in range(2):
            with pytest.raises(ViewError, match="`varve log skip orders 0 --offset 1`"):
                await broker.view_scheduler.compact(WHERE)
        (status,) = broker.view_scheduler.status()
        assert "cannot tell which keys the batch has, offsets 1 to 1: " in status.error
        (uncleanable,) = partition.log.damage.uncleanable
        assert (uncleanable.first_offset, uncleanable.next_offset) == (1, 2)
        assert partition.log.damage.ranges == ()
        await log_repair_of(env, broker).skip(partition, 1)
        await broker.view_scheduler.compact(WHERE)
        assert await read_all(broker) == [(0, b"a", b"1"), (2, b"b", b"2")]
        (status,) = broker.view_scheduler.status()
        assert (status.horizon, status.error) == (3, "")


async def test_a_view_names_the_damage_of_its_log() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        for key in (b"a", b"b", b"c"):
            await produce(broker, (key, b"1"))
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        file = env.open(f"{partition.log.directory}/{file_name(0, LOG)}", write=True)
        size = partition.log.segments.size_bytes // 3
        file.pwrite(bytes([file.pread(1, 2 * size - 1)[0] ^ 1]), 2 * size - 1)
        with pytest.raises(ViewError, match="the log is damaged, offsets 1 to 1"):
            await broker.view_scheduler.compact(WHERE)
        await log_repair_of(env, broker).skip(partition, 1)
        await broker.view_scheduler.compact(WHERE)
        assert await read_all(broker) == [(0, b"a", b"1"), (2, b"c", b"1")]
