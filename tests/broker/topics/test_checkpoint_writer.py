"""Records that a client deleted do not return, and checkpoints are written no more than needed."""

import asyncio
import errno
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from broker.app import Broker
from broker.event_loop.loop_turns import yield_to_loop
from broker.topics.partition import Partition
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.format.filenames import LOG_START_CHECKPOINT
from storage.log.log import Log
from storage.manager import offset_checkpoints
from storage.manager.offset_checkpoints import (
    LOGS_PER_SLICE,
    CheckpointTask,
    Offsets,
    add_entries,
)
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.protocol.raw_client import RawClient
from tests.support.storage.logs import append
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

PARTITIONS = 3
RECORDS = 4


async def created(broker: Broker) -> list[Partition]:
    """A topic with records that are not flushed."""
    await broker.metadata_service.create("t", PARTITIONS, {})
    partitions = [broker.topics.partition(TopicPartition("t", i)) for i in range(PARTITIONS)]
    served = [partition for partition in partitions if partition is not None]
    assert len(served) == PARTITIONS
    for partition in served:
        append(partition.log, *[b"value"] * RECORDS)
    return served


async def delete(broker: Broker, *offsets: int) -> list[tuple[int, int]]:
    """Send DeleteRecords for the first partitions; return error codes and low watermarks."""
    rows = [
        m.DeleteRecordsRequestPartition(partition_index=index, offset=offset)
        for index, offset in enumerate(offsets)
    ]
    topic = m.DeleteRecordsRequestTopic(name="t", partitions=rows)

    def exchange() -> Any:
        with RawClient(broker.addresses[0].port) as client:
            return client.request(ApiKey.DELETE_RECORDS, 2, m.DeleteRecordsRequest(topics=[topic]))

    answer = await asyncio.to_thread(exchange)
    return [(row.error_code, row.low_watermark) for row in answer.topics[0].partitions]


def starts(broker: Broker) -> list[int]:
    found = [broker.topics.partition(TopicPartition("t", index)) for index in range(PARTITIONS)]
    return [partition.log.log_start_offset for partition in found if partition is not None]


@pytest.mark.parametrize("seed", range(6))
async def test_acknowledged_deletions_of_records_survive_a_loss_of_power(seed: int) -> None:
    print(f"seed {seed}")
    env = MemoryEnv(seed)
    with suppress(SimulatedCrash):
        async with broker_in_memory(env) as broker:
            await created(broker)
            assert await delete(broker, 2, RECORDS, 0) == [(0, 2), (0, RECORDS), (0, 0)]
            after = env.crash()
    async with broker_in_memory(after) as broker:
        assert starts(broker)[:2] == [2, RECORDS]


async def test_a_deletion_that_is_not_durable_is_refused_until_it_is() -> None:
    env = MemoryEnv(seed=1)
    with suppress(SimulatedCrash):
        async with broker_in_memory(env) as broker:
            await created(broker)
            refused = [(ErrorCode.KAFKA_STORAGE_ERROR, -1)]
            fault = env.fail_on(
                lambda operation, path: operation == "open" and LOG_START_CHECKPOINT in path,
                errno.ENOSPC,
            )
            assert await delete(broker, 2) == refused
            assert await delete(broker, 2) == refused
            fault.remove()
            assert await delete(broker, 2) == [(0, 2)]
            after = env.kill()
    async with broker_in_memory(after) as broker:
        assert starts(broker)[0] == 2


async def test_no_deletion_counts_as_durable_once_its_directory_failed() -> None:
    """The second one waits for the checkpoint of the first one, at which the disk fails."""
    env = MemoryEnv(seed=1)
    async with broker_in_memory(env) as broker:
        partitions = await created(broker)
        for partition in partitions:
            await partition.flush()
            partition.log.delete_records(2)
        env.fail_on(lambda op, path: op == "pwrite" and LOG_START_CHECKPOINT in path, errno.EIO)
        make_durable = broker.checkpoint_writer.make_durable
        failed = await asyncio.gather(*(make_durable([partition]) for partition in partitions))
        assert failed == [{partition} for partition in partitions]


async def test_deletions_that_come_together_share_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []
    run = CheckpointTask.run

    def count(task: CheckpointTask) -> None:
        written.append(task.number)
        run(task)

    monkeypatch.setattr(CheckpointTask, "run", count)
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        partitions = await created(broker)
        written.clear()
        for offset in range(1, RECORDS + 1):
            for partition in partitions:
                partition.log.delete_records(offset)
        make_durable = broker.checkpoint_writer.make_durable
        assert not any(await asyncio.gather(*(make_durable(partitions) for _ in range(50))))
        assert 1 <= len(written) <= 2
        written.clear()
        assert not await make_durable(partitions)
        assert written == []  # nothing changed


async def test_the_offsets_of_many_logs_are_captured_in_several_rounds_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client may delete records of its only partition without end."""
    captured, rounds = Counter[int](), 0

    async def count_rounds() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await yield_to_loop()

    def count(files: Mapping[str, Offsets], log: Log, cleaner: int | None) -> None:
        captured[rounds] += 1
        add_entries(files, log, cleaner)

    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        [first, *_] = await created(broker)
        await broker.metadata_service.create("many", 2 * LOGS_PER_SLICE, {})
        counting = asyncio.ensure_future(count_rounds())
        await first.flush()
        first.log.delete_records(1)
        monkeypatch.setattr(offset_checkpoints, "add_entries", count)
        assert not await broker.checkpoint_writer.make_durable([first])
        counting.cancel()
        assert captured.total() >= 2 * LOGS_PER_SLICE + PARTITIONS
        assert max(captured.values()) <= LOGS_PER_SLICE
