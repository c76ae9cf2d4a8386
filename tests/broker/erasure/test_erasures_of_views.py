"""Erasures of topics with a compacted view, in a whole broker over an in-memory disk."""

import asyncio
from typing import Any

import pytest

from broker.topics.partition import Partition
from storage.format.batch import Record, build_batch, read_header
from storage.view.view_log import ViewCursor
from tests.support.broker.erasure import (
    ADA,
    ORDERS,
    SECONDS,
    broker_of,
    bytes_on_disk,
    completed,
    erase,
    one,
    partition_of,
    reaches,
    waits_for,
    write,
)
from tests.support.storage.memory_env import MemoryEnv


def is_left_to_others(answer: dict[str, Any]) -> bool:
    """Whether old files have to be deleted, or a round of the views has just deleted them."""
    return "is deleted" in waits_for(answer) or answer["state"] == "complete"


async def test_a_compacted_view_loses_the_key_before_there_is_a_receipt() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env, {"varve.view": "compacted"}) as broker:
        write(broker, f"{ADA}=secret-1", "bob=bob-1")
        await broker.view_scheduler.compact(ORDERS)
        assert b"secret" in bytes_on_disk(env, "/disk1/orders-0/varve.view")
        erasure = await erase(broker)
        await reaches(broker, erasure["id"], is_left_to_others)
        await broker.view_scheduler.tidy()  # deletes the files of the earlier version
        answer = await completed(broker, erasure["id"])
        assert answer["state"] == "complete"
        content = bytes_on_disk(env)
        assert (b"secret" in content, b"bob-1" in content) == (False, True)


async def test_a_reader_that_stays_in_a_replaced_view_delays_no_erasure() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env, {"varve.view": "compacted"}) as broker:
        write(broker, f"{ADA}=secret-1", "bob=bob-1", "bob=bob-2")
        await broker.view_scheduler.compact(ORDERS)
        view = broker.views.partition(ORDERS)
        assert view is not None
        reader = ViewCursor(view.log)
        assert reader.read(0, 1, end_offset=3).length
        erasure = await erase(broker)
        await reaches(broker, erasure["id"], is_left_to_others)
        await broker.view_scheduler.tidy()
        assert (await completed(broker, erasure["id"]))["state"] == "complete"
        assert b"secret" not in bytes_on_disk(env)
        assert reader.read(1, 1 << 20, end_offset=3).length


@pytest.mark.parametrize("strategy", ["timestamp", "header"])
async def test_the_tombstone_ranks_above_every_value_in_a_view(strategy: str) -> None:
    env, future_ms = MemoryEnv(seed=5), 1_900_000_000_000
    keys = {"varve.view": "compacted", "varve.view.strategy": strategy}
    if strategy == "header":
        keys["varve.view.version.header"] = "version"
    async with broker_of(env, keys) as broker:
        log = partition_of(broker).log
        header = ("version", (9).to_bytes(8, "big"))
        batch = build_batch([Record(0, future_ms, ADA.encode(), b"secret-1", (header,))])
        log.append(batch, read_header(batch), now_ms=env.wall_ms())
        await broker.view_scheduler.compact(ORDERS)
        erasure = await erase(broker)
        await reaches(broker, erasure["id"], is_left_to_others)
        await broker.view_scheduler.tidy()
        await completed(broker, erasure["id"])
        assert b"secret" not in bytes_on_disk(env)


async def test_the_tombstone_ranks_above_values_from_before_the_clock_was_set_back() -> None:
    """With LogAppendTime, the log gives it the time of its append."""
    env, before_ms = MemoryEnv(seed=5), 1_900_000_000_000
    keys = {
        "varve.view": "compacted",
        "varve.view.strategy": "timestamp",
        "message.timestamp.type": "LogAppendTime",
    }
    async with broker_of(env, keys) as broker:
        log = partition_of(broker).log
        batch = build_batch([Record(0, 1, ADA.encode(), b"secret-1", ())])
        log.append(batch, read_header(batch), now_ms=before_ms)
        assert env.wall_ms() < before_ms
        await broker.view_scheduler.compact(ORDERS)
        erasure = await erase(broker)
        await reaches(broker, erasure["id"], is_left_to_others)
        await broker.view_scheduler.tidy()
        await completed(broker, erasure["id"])
        assert log.log_end_offset == 2
        assert b"secret" not in bytes_on_disk(env)


@pytest.mark.parametrize("strategy", ["timestamp", "header"])
async def test_a_second_tombstone_ranks_above_a_value_that_was_written_before_the_first(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, future_ms = MemoryEnv(seed=5), 1_900_000_000_000
    keys = {"varve.view": "compacted", "varve.view.strategy": strategy}
    if strategy == "header":
        keys["varve.view.version.header"] = "version"
    async with broker_of(env, keys) as broker:
        log, append = partition_of(broker).log, broker.erasures.eraser.append

        def write_ranked(rank: int) -> None:
            header = ("version", rank.to_bytes(8, "big"))
            batch = build_batch([Record(0, future_ms + rank, ADA.encode(), b"secret", (header,))])
            log.append(batch, read_header(batch), now_ms=env.wall_ms())

        async def append_later(served: Partition, record: Record, now_ms: int) -> int:
            if log.log_end_offset == 1:
                write_ranked(2)
            return await append(served, record, now_ms)

        monkeypatch.setattr(broker.erasures.eraser, "append", append_later)
        write_ranked(1)
        erasure = await erase(broker)
        async with asyncio.timeout(SECONDS):
            while (answer := await one(broker, erasure["id"]))["state"] == "open":
                await asyncio.sleep(0.01)
                await broker.view_scheduler.tidy()
        (part,) = answer["partitions"]
        assert (part["end_offset"], part["tombstone_offset"], log.log_end_offset) == (3, 3, 4)
        assert b"secret" not in bytes_on_disk(env)


async def test_a_tombstone_that_expired_before_the_view_has_read_it_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = MemoryEnv(seed=5)
    keys = {"cleanup.policy": "compact,delete", "file.delete.delay.ms": "0"}
    async with broker_of(env, keys | {"varve.view": "compacted"}) as broker:
        write(broker, f"{ADA}=secret-1")
        await broker.view_scheduler.compact(ORDERS)
        append = broker.erasures.eraser.append

        async def append_and_expire(served: Partition, record: Record, now_ms: int) -> int:
            offset = await append(served, record, now_ms)
            if offset == 1:
                served.log.delete_records(2)
            return offset

        monkeypatch.setattr(broker.erasures.eraser, "append", append_and_expire)
        erasure = await erase(broker)
        async with asyncio.timeout(SECONDS):
            while (answer := await one(broker, erasure["id"]))["state"] == "open":
                await asyncio.sleep(0.01)
                await broker.view_scheduler.tidy()
                await broker.log_maintenance.expire()
        (part,) = answer["partitions"]
        assert (part["end_offset"], part["tombstone_offset"]) == (2, 2)
        assert b"secret" not in bytes_on_disk(env)


async def test_a_view_that_cannot_be_offered_does_not_delay_an_erasure() -> None:
    """A topic that was taken over has the name of the view."""
    env, folder = MemoryEnv(seed=5), "/disk1/orders.compacted-0"
    async with broker_of(env):
        pass
    env.mkdir(folder)
    batch = build_batch([Record(0, env.wall_ms(), b"other", b"kept")])
    env.open(f"{folder}/{0:020d}.log", create=True).pwrite(bytes(batch), 0)
    async with broker_of(env):
        pass
    async with broker_of(env, {"varve.view": "compacted"}) as broker:
        write(broker, f"{ADA}=secret-1")
        answer = await completed(broker, (await erase(broker))["id"])
        assert (answer["state"], b"secret" in bytes_on_disk(env)) == ("complete", False)
