"""Internal topics are loaded beside the cleaner."""

import asyncio
import errno
import threading
from typing import Any

import pytest

from broker.app import Broker
from protocol.errors import ErrorCode
from storage.errors import NoRoomError, OffsetOutOfRangeError, StorageError
from storage.log.log_reader import LogReader
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.groups.group_machine import join_request
from tests.support.storage.memory_env import MemoryEnv


async def loaded(broker: Broker) -> None:
    async with asyncio.timeout(20):
        while broker.coordinators.groups.is_loading:  # noqa: ASYNC110 - threads read
            await asyncio.sleep(0.001)


async def test_only_the_event_loop_uses_the_segments_of_a_partition_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clean may replace them meanwhile: a thread could skip records between two segments."""
    env, threads = MemoryEnv(seed=5), set[int]()
    async with broker_in_memory(env, groups={"offsets_partitions": 2}) as broker:
        await broker.coordinators.offsets_topic.ensure()
        await broker.coordinators.offsets_topic.append(0, [(b"key", b"value")])
    original = LogReader.read

    def read(*arguments: Any, **named: Any) -> Any:
        threads.add(threading.get_ident())
        return original(*arguments, **named)

    monkeypatch.setattr(LogReader, "read", read)
    async with broker_in_memory(env) as broker:
        await loaded(broker)
        assert broker.coordinators.groups.stats.records_loaded == 1
    assert threads == {threading.get_ident()}


async def test_max_message_bytes_of_the_topic_bounds_the_record_of_a_group() -> None:
    settings = {"offsets_partitions": 1, "initial_rebalance_delay_ms": 0}
    async with broker_in_memory(MemoryEnv(seed=5), groups=settings) as broker:
        await broker.coordinators.offsets_topic.ensure()
        members = broker.coordinators.groups.members
        for instance_id, metadata_bytes, error in (
            ("a", 600_000, ErrorCode.NONE),
            ("b", 448_589, ErrorCode.UNKNOWN_SERVER_ERROR),
        ):
            protocols = (("range", bytes(metadata_bytes)),)
            request = join_request(instance_id=instance_id, protocols=protocols)
            assert (await members.join("g", request)).error is error


@pytest.mark.parametrize(
    "error", [OffsetOutOfRangeError(0, 1, 1), NoRoomError(OSError(errno.EMFILE, "no file"), "/")]
)
async def test_a_partition_is_loaded_again_after_an_error_that_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch, error: StorageError
) -> None:
    env, original, failures = MemoryEnv(seed=5), LogReader.read, [error]
    async with broker_in_memory(env, groups={"offsets_partitions": 1}) as broker:
        await broker.coordinators.offsets_topic.ensure()
        await broker.coordinators.offsets_topic.append(0, [(b"key", b"value")])

    def read(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*arguments, **named)

    monkeypatch.setattr(LogReader, "read", read)
    async with broker_in_memory(env) as broker:
        await loaded(broker)
        assert broker.coordinators.groups.stats.records_loaded == 1
