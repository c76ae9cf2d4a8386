"""Internal topics are loaded beside the cleaner."""

import asyncio
import errno
import threading
from typing import Any

import pytest

from broker.app import Broker
from storage.errors import NoRoomError, OffsetOutOfRangeError, StorageError
from storage.log.log_reader import LogReader
from tests.support.broker.broker_in_memory import broker_in_memory
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
