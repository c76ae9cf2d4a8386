"""Power fails, or the process is killed, at every disk operation of a move.

The next start serves the replica from one directory, with every acknowledged record, and removes
what is left in the other one.
"""

import asyncio
import copy
from collections import Counter
from contextlib import suppress
from typing import Literal

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from storage.errors import StorageError
from storage.format.batch import read_header
from tests.broker.topics.test_replica_moves import (
    DISKS,
    NAME,
    append,
    directory_of,
    fill,
    folders,
    other,
    served,
    values_in,
)
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.draws import cases, seed_of_test
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

Fate = Literal["power", "kill"]
CONFIG = {"varve.flush.on.ack": "true"}


def remains(env: MemoryEnv, fate: Fate) -> MemoryEnv:
    """What is left, whatever the broker that is gone does with its memory of the disks."""
    after = env.crash() if fate == "power" else env.kill()
    if fate == "kill":
        after._root = copy.deepcopy(env._root)
    env._dead, env.crash_at = False, None  # so that its sockets and tasks end in order
    return after


async def produce(broker: Broker, value: bytes) -> None:
    """Append a record and wait until it is acknowledged."""
    partition, batch = served(broker), memoryview(batch_of(value))
    info = partition.append(batch, read_header(batch), 0)
    await partition.wait_flushed(info.last_offset + 1)


async def cut_off(seed: int, crash_at: int, fate: Fate) -> tuple[MemoryEnv, list[bytes], bool]:
    """Crash at one operation; return the disks, the acknowledged records, whether it had moved."""
    env = MemoryEnv(seed)
    async with broker_in_memory(env, *DISKS) as broker:
        await broker.metadata_service.create(NAME.topic, 1, CONFIG)
        values = fill(broker)
        await served(broker).flush()
        env.settle()
        env.operations, env.crash_at = 0, crash_at
        broker.moves.request(served(broker), other(broker))
        task = broker.moves._tasks[served(broker)]
        with suppress(SimulatedCrash, StorageError, AssertionError), capture_logs():
            while not task.done():
                value = b"new %d" % len(values)
                producing = asyncio.ensure_future(produce(broker, value))
                await asyncio.wait([producing, task], return_when=asyncio.FIRST_COMPLETED)
                if not producing.done():
                    await asyncio.wait([producing], timeout=1)
                await producing
                values.append(value)
        await asyncio.wait([task])
        with suppress(SimulatedCrash):
            task.result()
        finished = broker.moves.finished == 1 and not env._dead
        return remains(env, fate), values, finished


async def check(env: MemoryEnv, values: list[bytes]) -> str:
    """Start on what is left; return the directory of the replica."""
    async with broker_in_memory(env, *DISKS) as broker:
        log = served(broker).log
        survived = values_in(log)
        assert survived[: len(values)] == values
        assert len(survived) <= len(values) + 1  # one append may have been under way
        assert broker.manager.metadata.topics[NAME.topic].moves == {}
        assert broker.manager.metadata.topics[NAME.topic].partitions == {
            0: broker.manager.table.directory_id_of(NAME)
        }
        append(broker, b"after")
        assert values_in(log)[-1] == b"after" or log.high_watermark < log.log_end_offset
        broker.manager.purge_deleted(1 << 60)
        assert folders(env) == [log.directory]
        return directory_of(log)


@pytest.mark.parametrize("fate", ["power", "kill"])
async def test_a_move_that_is_cut_off_leaves_one_replica_with_every_record(fate: Fate) -> None:
    seed = seed_of_test(7)
    directories = Counter[str]()
    crash_at, finished = 0, False
    while not finished:
        crash_at += cases(few=6, many=1)
        env, values, finished = await cut_off(seed + crash_at, crash_at, fate)
        directories[await check(env, values)] += 1
    print(crash_at, directories)
    assert crash_at > 60
    assert min(directories.values()) > 5
    assert len(directories) == 2
