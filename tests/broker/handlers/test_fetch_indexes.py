"""Fetch where an index is not in memory, is lost, is wrong or has too few entries."""

import asyncio
import inspect
import threading
from collections.abc import Callable

import pytest

from broker.app import Broker
from broker.handlers.fetch import fetch
from protocol import codec
from protocol.api import ApiKey
from protocol.messages import (
    FetchRequest,
    FetchRequestPartition,
    FetchRequestTopic,
    FetchResponse,
    FetchResponsePartition,
)
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    build_batch,
    marker_record,
    walk_headers,
)
from storage.format.filenames import INDEX
from storage.log.log import Log
from storage.segments.fetch_slice import FetchSlice
from storage.segments.segment import Segment
from storage.segments.segment_txn_index import SegmentTxnIndex
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.principals import make_context
from tests.support.storage.logs import NOW_MS, append, append_batch, batch_of, value_at
from tests.support.storage.memory_env import MemoryEnv

VERSION = 11
CONFIG = {"segment.bytes": "60000", "index.interval.bytes": "1024"}
BATCHES = 1_000


async def answered(broker: Broker, offset: int, max_bytes: int = 2_000) -> list[int]:
    """The base offsets of the batches of one answer."""
    row = await fetched(broker, offset, max_bytes)
    return [header.base_offset for _, header in walk_headers(row.records or b"")]


async def aborted(broker: Broker, offset: int) -> list[tuple[int, int]]:
    """Producer id and first offset of the aborted transactions of one answer."""
    rows = (await fetched(broker, offset, 2_000)).aborted_transactions
    return [(row.producer_id, row.first_offset) for row in rows or ()]


async def fetched(broker: Broker, offset: int, max_bytes: int) -> FetchResponsePartition:
    part = FetchRequestPartition(fetch_offset=offset, partition_max_bytes=max_bytes)
    topics = [FetchRequestTopic(topic="orders", partitions=[part])]
    body = FetchRequest(max_bytes=1 << 20, session_epoch=-1, isolation_level=1, topics=topics)
    frame = memoryview(codec.encode_request(ApiKey.FETCH, VERSION, 1, "c", body)[4:])
    parts = fetch(make_context(broker), VERSION, frame)
    if inspect.isawaitable(parts):
        parts = await parts
    assert isinstance(parts, list)
    raw = b"".join(part.read() if isinstance(part, FetchSlice) else bytes(part) for part in parts)
    _, response = codec.decode_response(ApiKey.FETCH, VERSION, raw[4:])
    assert isinstance(response, FetchResponse)
    (row,) = response.responses[0].partitions
    assert row.error_code == 0
    return row


def drop(segment: Segment) -> None:
    segment.drop_idle_indexes()
    segment.drop_idle_indexes()
    assert not segment.has_indexes


def lose(env: MemoryEnv, segment: Segment) -> None:
    drop(segment)
    env.unlink(segment.path.replace(".log", INDEX))


def thin(env: MemoryEnv, segment: Segment) -> None:
    """Leave one entry, as another setting of index.interval.bytes would."""
    drop(segment)
    path = segment.path.replace(".log", INDEX)
    file = env.open(path, write=True)
    file.truncate(8)
    file.close()


def distort(_env: MemoryEnv, segment: Segment) -> None:
    """Let each entry point at bytes that are not a batch."""
    positions = segment.indexes.offsets.positions
    for at in range(len(positions)):
        positions[at] += 3


DAMAGE: dict[str, Callable[[MemoryEnv, Segment], None]] = {
    "dropped": lambda _, segment: drop(segment),
    "lost": lose,
    "distorted": distort,
}


async def filled(broker: Broker) -> Log:
    topic = await broker.metadata_service.create("orders", 1, CONFIG)
    log = topic.partitions[0].log
    assert isinstance(log, Log)
    for _ in range(BATCHES):
        append(log, value_at(log.log_end_offset))
    log.flush()
    return log


@pytest.mark.parametrize("how", DAMAGE)
async def test_an_index_is_loaded_and_rebuilt_in_a_thread(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = MemoryEnv(seed=4)
    async with broker_in_memory(env) as broker:
        log = await filled(broker)
        segment = log.segments[1]
        wanted = segment.base_offset + 300
        DAMAGE[how](env, segment)
        loop_thread = threading.get_ident()
        threads = []
        for name in ("load_index_files", "rebuild"):
            was = getattr(Segment, name)

            def watched(self: Segment, was: Callable[..., object] = was) -> object:
                threads.append(threading.get_ident())
                return was(self)

            monkeypatch.setattr(Segment, name, watched)
        monkeypatch.setattr(Segment, "_load_indexes", lambda _: pytest.fail("on the loop"))
        together = await asyncio.gather(*[answered(broker, wanted) for _ in range(5)])
        assert [found[0] for found in together] == [wanted] * 5
        assert threads
        assert loop_thread not in threads
        assert len(threads) <= 2  # a load and a rebuild, for all five
        assert segment.has_indexes
        assert (await answered(broker, wanted))[0] == wanted
        assert len(threads) <= 2
        assert not broker._services.index_loads._running


async def test_an_index_with_too_few_entries_is_rebuilt() -> None:
    env = MemoryEnv(seed=4)
    async with broker_in_memory(env) as broker:
        topic = await broker.metadata_service.create("orders", 1, {"segment.bytes": "200000"})
        log = topic.partitions[0].log
        while len(log.segments) < 2:
            append(log, value_at(log.log_end_offset))
        log.flush()
        segment = log.segments[0]
        entries = len(segment.indexes.offsets)
        assert entries > 30
        thin(env, segment)
        assert await answered(broker, 900)
        assert len(segment.indexes.offsets) == entries


async def test_a_rebuilt_index_contains_what_was_appended_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = MemoryEnv(seed=4)
    async with broker_in_memory(env) as broker:
        log = await filled(broker)
        active = log.segments.active
        offset = active.base_offset + 5
        distort(env, active)
        active.position_hints.clear()
        begun, go_on = threading.Event(), threading.Event()
        rebuild = Segment.rebuild

        def slow(self: Segment) -> int:
            begun.set()
            assert go_on.wait(10)
            return rebuild(self)

        monkeypatch.setattr(Segment, "rebuild", slow)
        fetching = asyncio.create_task(answered(broker, offset, 200))
        await asyncio.to_thread(begun.wait)
        for _ in range(60):
            append(log, value_at(log.log_end_offset))
        go_on.set()
        assert (await fetching)[0] == offset
        at_end = log.log_end_offset - 3
        active.position_hints.clear()
        assert (await answered(broker, at_end))[0] == at_end
        assert active.indexes.offsets.last[1] > active.size_bytes - 1_500


async def test_a_segment_that_is_replaced_during_the_load_keeps_its_own_indexes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = MemoryEnv(seed=4)
    async with broker_in_memory(env) as broker:
        log = await filled(broker)
        segment = log.segments[1]
        drop(segment)
        load = Segment.load_index_files

        def pinned(self: Segment) -> None:
            load(self)
            segment.pin()  # now its names may be those of other files

        monkeypatch.setattr(Segment, "load_index_files", pinned)
        wanted = segment.base_offset + 300
        assert (await answered(broker, wanted))[0] == wanted
        assert segment.is_pinned


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_dropped_transaction_index_is_read_in_a_thread(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = MemoryEnv(seed=4)
    async with broker_in_memory(env) as broker:
        topic = await broker.metadata_service.create("orders", 1, CONFIG)
        log = topic.partitions[0].log
        for producer_id in (1, 2):
            fields = {"producer_id": producer_id, "producer_epoch": 0}
            batch = batch_of(b"v", attributes=TRANSACTIONAL, base_sequence=0, **fields)
            append_batch(log, batch, in_transaction=True)
            marker = [marker_record(ControlType.ABORT, 0, NOW_MS)]
            append_batch(log, build_batch(marker, attributes=TRANSACTIONAL | CONTROL, **fields))
        log.roll(NOW_MS)
        log.flush()
        drop(log.segments[0])
        assert not log.segments[0].txn_index.is_loaded
        if is_lost:
            env.unlink(log.segments[0].txn_index.path)
        threads = []
        was = SegmentTxnIndex.load_dropped

        def watched(self: SegmentTxnIndex) -> None:
            threads.append(threading.get_ident())
            was(self)

        monkeypatch.setattr(SegmentTxnIndex, "load_dropped", watched)
        together = await asyncio.gather(*[aborted(broker, 2) for _ in range(5)])
        assert together == [[(2, 2)]] * 5
        assert len(threads) == 1
        assert threading.get_ident() not in threads
        assert env.exists(log.segments[0].txn_index.path)
