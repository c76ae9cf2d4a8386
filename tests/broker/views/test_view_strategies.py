"""Views that go by timestamp or by a version in a header, in the whole broker."""

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from typing import Any

import pytest

from broker.app import Broker
from broker.topics.topics import TopicError
from broker.views.compaction import ViewError
from cleaner.job import CleanJob
from cleaner.workers.dedicated_worker import CleanedJob, JobRunner, OnProgress, ignore_progress
from storage.view.deleted_keys import DELETED_KEYS_NAME
from storage.view.ledger import view_path
from tests.support.broker.views.view_broker import (
    ANY_TIME,
    ON,
    WHERE,
    broker_with_view,
    produce,
    producing,
    read_all,
)
from tests.support.broker.views.view_worker import ThreadRunner
from tests.support.storage.memory_env import MemoryEnv

BY_TIME = {"varve.view.strategy": "timestamp"}
BY_VERSION = {"varve.view.strategy": "header", "varve.view.version.header": "version"}
FIRST_MS = 1_700_000_000_000
Timed = tuple[bytes, bytes | None, int]


async def send(broker: Broker, *records: Timed) -> None:
    """Records with times, and versions that are the same."""
    async with producing(broker) as producer:
        for key, value, at in records:
            await producer.send_and_wait(
                "orders",
                key=key,
                value=value,
                timestamp_ms=FIRST_MS + at,
                headers=[("version", struct.pack(">q", at))],
            )


def run_folder(env: MemoryEnv) -> PurePosixPath:
    folder = PurePosixPath(view_path(f"/disk1/{WHERE}"))
    (run,) = [name for name in env.listdir(str(folder)) if env.is_dir(str(folder / name))]
    return folder / run


async def expire(broker: Broker, env: MemoryEnv, offset: int) -> None:
    """As retention would: the originals below an offset go."""
    partition = broker.topics.partition(WHERE)
    assert partition is not None
    partition.log.roll(env.wall_ms())
    partition.log.delete_records(offset)
    partition.log.retention.expire(env.wall_ms())


@pytest.mark.parametrize("keys", [BY_TIME, BY_VERSION], ids=["timestamp", "header"])
async def test_the_largest_rank_wins_over_runs_restarts_and_expired_originals(
    keys: dict[str, str],
) -> None:
    env = MemoryEnv()
    async with broker_with_view(env, keys) as broker:
        await send(broker, (b"a", b"new", 9), (b"a", b"old", 1), (b"b", b"x", 5), (b"b", None, 7))
        status = await broker.view_scheduler.compact(WHERE)
        assert (status.strategy, status.deleted_keys) == (keys["varve.view.strategy"], 1)
        assert await read_all(broker) == [(0, b"a", b"new")]
        await expire(broker, env, 4)
    async with broker_with_view(env, keys) as broker:
        await send(broker, (b"b", b"late", 6), (b"a", b"late", 8))
        assert (await broker.view_scheduler.compact(WHERE)).deleted_keys == 1
        assert await read_all(broker) == [(0, b"a", b"new")]
        await send(broker, (b"b", b"back", 7), (b"a", b"newer", 9))
        assert (await broker.view_scheduler.compact(WHERE)).deleted_keys == 0
        assert await read_all(broker) == [(6, b"b", b"back"), (7, b"a", b"newer")]


async def test_a_deleted_key_outlives_an_empty_ledger() -> None:
    async with broker_with_view(MemoryEnv(), BY_TIME) as broker:
        await send(broker, (b"a", None, 5))
        assert (await broker.view_scheduler.compact(WHERE)).ledger_records == 0
        await send(broker, (b"a", b"late", 4))
        assert (await broker.view_scheduler.compact(WHERE)).deleted_keys == 1
        assert await read_all(broker) == []


async def test_a_delete_is_forgotten_after_its_retention() -> None:
    env = MemoryEnv()
    async with broker_with_view(env, {**BY_TIME, "delete.retention.ms": "1000"}) as broker:
        await send(broker, (b"a", None, 5))
        await broker.view_scheduler.compact(WHERE)
        env.advance_ms(2000)
        await send(broker, (b"b", b"1", 6))
        assert (await broker.view_scheduler.compact(WHERE)).deleted_keys == 0


async def test_records_without_a_version_are_counted_and_rank_below_all_others() -> None:
    async with broker_with_view(MemoryEnv(), BY_VERSION) as broker:
        await send(broker, (b"a", b"1", -3))
        await produce(broker, (b"a", b"2"), (b"b", b"3"))
        status = await broker.view_scheduler.compact(WHERE)
        assert status.records_without_version == 2
        assert await read_all(broker) == [(0, b"a", b"1"), (2, b"b", b"3")]


async def test_the_strategy_header_needs_the_name_of_one() -> None:
    async with broker_with_view(MemoryEnv()) as broker:
        with pytest.raises(TopicError, match="is required by varve"):
            await broker.metadata_service.create(
                "other", 1, {**ON, "varve.view.strategy": "header"}
            )


async def change(broker: Broker, keys: dict[str, str]) -> None:
    await broker.metadata_service.alter("orders", lambda _: {**ON, **ANY_TIME, **keys})


async def test_a_changed_strategy_makes_the_view_anew_of_the_log() -> None:
    async with broker_with_view(MemoryEnv(), {"varve.view.min.bytes": str(1 << 30)}) as broker:
        await send(broker, (b"a", b"new", 9), (b"a", b"old", 1))
        await broker.view_scheduler.compact(WHERE)
        assert await read_all(broker) == [(1, b"a", b"old")]
        await change(broker, {**BY_TIME, "varve.view.min.bytes": str(1 << 30)})
        await broker.view_scheduler.tidy()  # it is due
        assert await read_all(broker) == [(0, b"a", b"new")]
        await change(broker, {**BY_VERSION, "varve.view.min.bytes": str(1 << 30)})
        await broker.view_scheduler.tidy()
        assert await read_all(broker) == [(0, b"a", b"new")]
        await change(broker, {**BY_VERSION, "varve.view.version.header": "other"})
        await broker.view_scheduler.compact(WHERE)
        assert await read_all(broker) == [(1, b"a", b"old")], "nobody has a version"


@pytest.mark.parametrize("why", ["expired", "compacted"])
async def test_a_changed_strategy_is_refused_where_originals_are_gone(why: str) -> None:
    env = MemoryEnv()
    policy = {"cleanup.policy": "compact"} if why == "compacted" else {}
    async with broker_with_view(env, policy) as broker:
        await send(broker, (b"a", b"1", 9), (b"b", b"2", 1))
        await broker.view_scheduler.compact(WHERE)
        if why == "expired":
            await expire(broker, env, 1)
        await change(broker, {**BY_TIME, **policy})
        with pytest.raises(ViewError, match=rf"changed from offset to timestamp.*{why}"):
            await broker.view_scheduler.compact(WHERE)
        status = broker.view_scheduler.status()[0]
        assert (status.state, status.strategy) == ("failed", "offset")
        before = await read_all(broker)
        assert [key for _, key, _ in before] == [b"a", b"b"], "it is served as it was"
        await broker.view_scheduler.compact(WHERE, from_scratch=True)
        remaining = [b"b"] if why == "expired" else [b"a", b"b"]
        assert [key for _, key, _ in await read_all(broker)] == remaining
        assert broker.view_scheduler.status()[0].strategy == "timestamp"


async def damage_deleted_keys(env: MemoryEnv, how: str) -> None:
    path = str(run_folder(env) / DELETED_KEYS_NAME)
    data = env.read_file(path)
    if how == "missing":
        env.unlink(path)
    elif how == "short":
        env.open(path, write=True, truncate=True).pwrite(data[:-1], 0)
    else:
        env.open(path, write=True).pwrite(bytes([data[-9] ^ 1]), len(data) - 9)


@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
async def test_deleted_keys_that_are_damaged_are_refused_until_the_view_is_made_anew(
    how: str,
) -> None:
    env = MemoryEnv()
    async with broker_with_view(env, BY_TIME) as broker:
        await send(broker, (b"a", None, 5), (b"b", b"1", 6))
        await broker.view_scheduler.compact(WHERE)
    await damage_deleted_keys(env, how)
    async with broker_with_view(env, BY_TIME) as broker:
        assert await read_all(broker) == [(1, b"b", b"1")], "the ledger is as good as before"
        await send(broker, (b"a", b"late", 4))
        with pytest.raises(ViewError, match=r"deleted keys .* (missing|damaged).*--from-scratch"):
            await broker.view_scheduler.compact(WHERE)
        assert await read_all(broker) == [(1, b"b", b"1"), (2, b"a", b"late")]
        await broker.view_scheduler.compact(WHERE, from_scratch=True)
        assert await read_all(broker) == [(1, b"b", b"1")]


async def test_a_compacted_topic_is_not_cleaned_by_offset_before_its_view_has_seen_it() -> None:
    async with broker_with_view(MemoryEnv(), {**BY_TIME, "cleanup.policy": "compact"}) as broker:
        await send(broker, (b"a", b"new", 9), (b"a", b"old", 1))

        def cleanable() -> Any:
            facts = broker.cleaning.facts_of(WHERE)
            assert facts is not None
            return facts.undecided_offset

        assert cleanable() == 0
        await broker.view_scheduler.compact(WHERE)
        assert cleanable() == 2


class _Changing(ThreadRunner):
    """Has the topic's rule changed while a round of a run is under way."""

    def __init__(self, env: MemoryEnv, broker: Callable[[], Broker]) -> None:
        super().__init__(env)
        self._broker = broker

    async def run(self, job: CleanJob, on_progress: OnProgress = ignore_progress) -> CleanedJob:
        done = await super().run(job, on_progress)
        if len(self.jobs) == 1:
            await change(self._broker(), BY_TIME)
        return done


async def test_a_run_keeps_to_the_strategy_it_began_with() -> None:
    env = MemoryEnv()
    brokers: list[Broker] = []

    @asynccontextmanager
    async def worker() -> AsyncIterator[JobRunner]:
        yield _Changing(env, lambda: brokers[0])

    async with broker_with_view(env, worker=worker) as broker:
        brokers.append(broker)
        await send(broker, (b"a", b"new", 9), (b"a", b"old", 1))
        status = await broker.view_scheduler.compact(WHERE)
        assert status.strategy == "offset", "that is what it was made by"
        assert await read_all(broker) == [(1, b"a", b"old")]
        assert (await broker.view_scheduler.compact(WHERE)).strategy == "timestamp"
        assert await read_all(broker) == [(0, b"a", b"new")]
