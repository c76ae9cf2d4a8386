"""A large batch is checked in a thread and written in parts, and its partition keeps its order."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker.app import Broker
from broker.handlers import produce
from broker.handlers.produce import _produce_one
from broker.topics import partition as partition_module
from broker.topics.end_transaction import append_marker
from broker.topics.partition import LARGE_BATCH_BYTES, STARTS_MAX, Partition
from broker.topics.producer_ids import Producer
from cleaner.engine.selective.appended_keys import list_keys
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode
from protocol.produce_codec import ProducedPartition
from storage.env import ReadBuffer
from storage.format.batch import HEADER_BYTES, LOG_APPEND_TIME, ControlType, read_header, stamp
from storage.format.filenames import LOG
from storage.segments import segment as segment_module
from storage.segments.segment import PART_BYTES
from tests.support.broker.broker_in_memory import broker_in_memory, client_of, log_repair_of
from tests.support.broker.large_batches import large_batches
from tests.support.broker.principals import make_context
from tests.support.storage.log_managers import ONE, TWO
from tests.support.storage.logs import batch_of, offsets_in, read_records
from tests.support.storage.memory_env import MemoryEnv, MemoryFile

KEYS = {"max.message.bytes": "20000000", "segment.bytes": "104857600"}
VALUE = bytes(range(256)) * 8
NOW_MS = MemoryEnv(seed=1).wall_ms()


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Event]:
    """A batch above 500 bytes is large, and written in parts of 100; the first one waits for it."""
    event = asyncio.Event()

    async def wait() -> None:
        await event.wait()
        await asyncio.sleep(0)

    monkeypatch.setattr(partition_module, "yield_to_loop", wait)
    with large_batches(500, 100):
        yield event


@asynccontextmanager
async def topic(*directories: str, **keys: str) -> AsyncIterator[tuple[Broker, Partition]]:
    """A broker with one partition, t-0."""
    env = MemoryEnv(seed=1)
    settings = {"topics": {"t": {"keys": {**KEYS, **keys}}}}
    async with broker_in_memory(env, *directories, **settings) as broker, asyncio.timeout(60):
        served = broker.topics.get("t")
        assert served is not None
        yield broker, served.partitions[0]


def sends(
    broker: Broker, value: bytes = VALUE, name: str = "t", **fields: Any
) -> "asyncio.Task[ProducedPartition]":
    """A produce request of one record from a connection of its own."""
    data = memoryview(batch_of(value, timestamp=NOW_MS, **fields))

    async def produced() -> ProducedPartition:
        header = RequestHeader(0, 9, 1, "test", 0)
        answer = _produce_one(make_context(broker), header, -1, name, (0, data))
        return answer if isinstance(answer, ProducedPartition) else await answer

    return asyncio.create_task(produced())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)


async def in_parts(broker: Broker, partition: Partition, **fields: Any) -> asyncio.Task[Any]:
    """A large batch of which the first part is written."""
    sending = sends(broker, **fields)
    await until(lambda: partition.log.has_parts)
    return sending


def values(partition: Partition) -> list[bytes | None]:
    return [record.value for record in read_records(partition.log)]


def check_files(partition: Partition) -> None:
    assert all(segment.is_cut() for segment in partition.log.segments)


# The event loop -------------------------------------------------------------------------------


async def test_a_turn_of_the_loop_writes_one_part_and_checks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the broker is: a batch of 10 MB, of which the loop writes a megabyte at a time."""
    turns = [0]
    pwrite = MemoryFile.pwrite

    def note(file: MemoryFile, data: ReadBuffer, position: int) -> None:
        turns[-1] += len(data) if file.path.endswith(LOG) else 0
        pwrite(file, data, position)

    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            turns.append(0)

    checked_in: list[threading.Thread] = []

    def noted(check: Any) -> Any:
        def note(*args: Any, **fields: Any) -> Any:
            checked_in.append(threading.current_thread())
            return check(*args, **fields)

        return note

    for name in ("check_produced", "check_records", "stamp_log_append_time"):
        monkeypatch.setattr(produce, name, noted(getattr(produce, name)))
    monkeypatch.setattr(MemoryFile, "pwrite", note)
    keys = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}
    async with topic(**keys) as (broker, partition):
        counting = asyncio.create_task(count_turns())
        value = bytes(10_000_000)
        assert (await sends(broker, value)).error_code == 0
        counting.cancel()
        assert values(partition) == [value]
        assert read_header(partition.log.reader.read(0, 100, end_offset=1).read()).attributes == (
            LOG_APPEND_TIME
        )
    assert sum(turns) > 10_000_000
    assert max(turns) == PART_BYTES
    assert len(checked_in) == 3
    assert threading.main_thread() not in checked_in
    assert LARGE_BATCH_BYTES > PART_BYTES


# Order ----------------------------------------------------------------------------------------


async def test_batches_behind_a_large_one_wait_in_order(go_on: asyncio.Event) -> None:
    async with topic() as (broker, partition):
        await broker.metadata_service.create("other", 1, {})
        large = await in_parts(broker, partition)
        behind = [sends(broker, b"%d" % number) for number in range(5)]
        behind.insert(2, sends(broker, VALUE[::-1]))
        other = sends(broker, b"small", name="other")
        await until(other.done)
        assert not any(task.done() for task in (large, *behind))
        go_on.set()
        answers = await asyncio.gather(large, *behind)
        assert [answer.error_code for answer in answers] == [0] * 7
        assert sorted(answer.base_offset for answer in answers) == list(range(7))
        assert large.result().base_offset == 0
        written = values(partition)
        assert [written[answer.base_offset] for answer in answers] == [
            VALUE, b"0", b"1", VALUE[::-1], b"2", b"3", b"4",
        ]  # fmt: skip
        check_files(partition)


async def test_sequences_are_checked_when_a_large_batch_is_appended(go_on: asyncio.Event) -> None:
    async with topic() as (broker, partition):
        producer = {"producer_id": 7, "producer_epoch": 0}
        first = await in_parts(broker, partition, base_sequence=0, **producer)
        second = sends(broker, base_sequence=1, **producer)
        again = sends(broker, base_sequence=0, **producer)
        early = sends(broker, base_sequence=5, **producer)
        go_on.set()
        assert [(await task).error_code for task in (first, second, again, early)] == [
            0, 0, 0, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        ]  # fmt: skip
        assert again.result().base_offset == 0
        assert offsets_in(partition.log) == [0, 1]
        check_files(partition)


async def test_a_large_batch_is_acknowledged_when_it_is_synced(go_on: asyncio.Event) -> None:
    async with topic(**{"varve.flush.on.ack": "true"}) as (broker, partition):
        large = await in_parts(broker, partition)
        go_on.set()
        answers = await asyncio.gather(large, sends(broker, b"behind"))
        assert [answer.error_code for answer in answers] == [0, 0]
        assert partition.log.recovery_point == partition.log.high_watermark == 2


# Other changes meanwhile ----------------------------------------------------------------------


async def test_a_marker_or_a_roll_makes_a_large_batch_begin_anew(go_on: asyncio.Event) -> None:
    async with topic() as (broker, partition):
        large = await in_parts(broker, partition)
        await append_marker(partition, Producer(7, 0), ControlType.ABORT, NOW_MS)
        check_files(partition)
        go_on.set()
        await until(lambda: partition.log.has_parts)
        partition.roll(NOW_MS)
        check_files(partition)
        assert (await large).base_offset == 1
        assert [segment.base_offset for segment in partition.log.segments] == [0, 1]
        assert values(partition)[-1] == VALUE
        check_files(partition)


async def test_a_batch_that_is_disturbed_all_the_time_is_written_at_once(
    go_on: asyncio.Event,
) -> None:
    async with topic() as (broker, partition):
        large = await in_parts(broker, partition)
        parts = len(VALUE) // 100
        disturbances = 0
        go_on.set()
        while not large.done():
            await append_marker(partition, Producer(7, 0), ControlType.ABORT, NOW_MS)
            disturbances += 1
            await asyncio.sleep(0)
        assert disturbances <= STARTS_MAX * (parts + 2)
        assert large.result().error_code == 0
        assert VALUE in values(partition)
        check_files(partition)


async def test_a_topic_deleted_meanwhile_stays_deleted(go_on: asyncio.Event) -> None:
    async with topic() as (broker, partition):
        large = await in_parts(broker, partition)
        behind = sends(broker, b"behind")
        await broker.metadata_service.delete("t")
        go_on.set()
        assert (await large).error_code != 0
        assert (await behind).error_code != 0
        assert broker.topics.get("t") is None


async def test_a_truncation_meanwhile_moves_a_large_batch_down(go_on: asyncio.Event) -> None:
    async with topic() as (broker, partition):
        await asyncio.gather(*(sends(broker, b"%d" % number) for number in range(3)))
        large = await in_parts(broker, partition)
        env = broker._services.env
        assert isinstance(env, MemoryEnv)
        await log_repair_of(env, broker).truncate(partition, 1, force=True)
        go_on.set()
        assert (await large).base_offset == 1
        assert values(partition) == [b"0", VALUE]
        check_files(partition)


async def test_a_topic_that_becomes_compacted_meanwhile_refuses_a_large_batch_without_key(
    go_on: asyncio.Event,
) -> None:
    async with topic(**{"cleanup.policy": "delete"}) as (broker, partition):
        large = await in_parts(broker, partition, key=None)
        behind = sends(broker, b"behind", key=None)
        await broker.metadata_service.alter("t", lambda keys: {**keys, "cleanup.policy": "compact"})
        go_on.set()
        assert (await large).error_code == ErrorCode.INVALID_RECORD
        assert (await behind).error_code == ErrorCode.INVALID_RECORD
        assert values(partition) == []
        check_files(partition)


async def test_a_client_that_leaves_meanwhile_leaves_no_parts(go_on: asyncio.Event) -> None:
    async with topic() as (broker, partition):
        large = await in_parts(broker, partition)
        behind = sends(broker, b"behind")
        large.cancel()
        assert (await behind).base_offset == 0
        check_files(partition)
        assert values(partition) == [b"behind"]


async def test_the_parts_of_a_batch_that_is_not_appended_are_removed_in_turns(
    go_on: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[int] = []
    truncate = MemoryFile.truncate

    def note(file: MemoryFile, size: int) -> None:
        if file.path.endswith(LOG):
            removed.append(file.size() - size)
        truncate(file, size)

    monkeypatch.setattr(MemoryFile, "truncate", note)
    monkeypatch.setattr(segment_module, "DROPPED_BYTES", 300)
    async with topic() as (broker, partition):
        go_on.set()
        large = await in_parts(broker, partition)
        active = partition.log.segments.active
        await until(lambda: active.file.size() >= active.size_bytes + 1_000)
        large.cancel()
        await asyncio.wait([large])
        assert sum(removed) >= 1_000
        assert max(removed) <= 300
        check_files(partition)


async def test_a_replica_that_moves_meanwhile_has_the_batch_once(go_on: asyncio.Event) -> None:
    async with topic(ONE, TWO) as (broker, partition):
        here = broker.manager.table.find_directory(partition.partition)
        target = next(each for each in broker.manager.table.directories if each is not here)
        await sends(broker, b"first")
        old = partition.log
        go_on.set()
        sending = [sends(broker) for _ in range(30)]
        assert broker.moves.request(partition, target)
        await asyncio.gather(*broker.moves._unfinished)
        assert partition.log is not old
        assert [(await each).error_code for each in sending] == [0] * 30
        assert values(partition) == [b"first", *[VALUE] * 30]
        check_files(partition)


async def test_a_stop_meanwhile_leaves_no_parts(go_on: asyncio.Event) -> None:
    async with topic() as (broker, partition):
        env = broker._services.env
        assert isinstance(env, MemoryEnv)
        await sends(broker, b"first")
        large = await in_parts(broker, partition)
        log = partition.log
    go_on.set()
    assert (await large).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    check_files(partition)
    for segment in log.segments:
        assert len(env.read_file(segment.path)) == segment.size_bytes
    async with broker_in_memory(env.crash()) as again:
        served = again.topics.get("t")
        assert served is not None
        assert values(served.partitions[0]) == [b"first"]
        assert not served.partitions[0].log.damage.ranges


# Real sockets ---------------------------------------------------------------------------------


async def test_a_client_produces_a_large_batch_and_a_wrong_one() -> None:
    async with topic() as (broker, partition):
        good = bytes(batch_of(bytes(5_000_000), timestamp=NOW_MS))

        def exchange() -> list[int]:
            with client_of(broker) as client:
                return [
                    client.produce("t", data).error_code
                    for data in (good, good[:-1] + b"\x01", good + b"\x00", good)
                ]

        codes = await asyncio.to_thread(exchange)
        assert codes == [0, ErrorCode.CORRUPT_MESSAGE, ErrorCode.INVALID_RECORD, 0]
        assert offsets_in(partition.log) == [0, 1]


def test_the_keys_of_a_batch_do_not_depend_on_where_its_parts_were() -> None:
    key = bytes(16)
    first, later = batch_of(VALUE), batch_of(VALUE)
    stamp(later, 0, 5, 1)
    rows = [list_keys(batch, batch[HEADER_BYTES:], key) for batch in (first, later)]
    assert rows[0] is not None
    assert rows[1] is not None
    assert rows[0].rows.tolist() == rows[1].rows.tolist()
