"""What a view makes of transactions that the cleaner of its topic removes beside it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from broker.app import Broker
from broker.topics.partition import Partition
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    marker_record,
    read_header,
)
from tests.broker.views.test_view_tombstones import COMPACTED, carried_out, facts_of, published
from tests.support.broker.views.view_broker import WHERE, broker_with_view, produce, read_all
from tests.support.broker.views.view_worker import ThreadRunner
from tests.support.storage.memory_env import MemoryEnv

PRODUCER = 7


def served(broker: Broker) -> Partition:
    partition = broker.topics.partition(WHERE)
    assert partition is not None
    return partition


def append(env: MemoryEnv, broker: Broker, record: Record, attributes: int, epoch: int = 0) -> None:
    batch = memoryview(
        build_batch(
            [record],
            producer_id=PRODUCER,
            producer_epoch=epoch,
            base_sequence=-1 if attributes & CONTROL else 0,
            attributes=attributes,
        )
    )
    is_data = not attributes & CONTROL
    served(broker).append(batch, read_header(batch), env.wall_ms(), in_transaction=is_data)


async def test_a_view_knows_a_transaction_that_the_cleaner_removed_meanwhile() -> None:
    """The sources of the view were linked before; they still have its record and its marker."""
    env = MemoryEnv()
    cleaned: list[bool] = []

    @asynccontextmanager
    async def worker_that_starts_slowly() -> AsyncIterator[ThreadRunner]:
        if not cleaned:
            cleaned.append(True)
            log = served(broker).log
            bases = log.segments.bases[1:]
            for end_offset in bases:  # removes the record, stamps the marker, removes the marker
                facts = replace(facts_of(broker), undecided_offset=end_offset)
                job, _ = broker.pool.remote.plan(facts, f"clean-{end_offset}")
                assert job is not None
                await published(broker, job, *carried_out(env, job))
                env.advance_ms(1000)
            assert log.reader.aborted_transactions(0, log.log_end_offset) == []
        yield ThreadRunner(env)

    async with broker_with_view(env, COMPACTED, worker=worker_that_starts_slowly) as broker:
        now_ms = env.wall_ms()
        append(env, broker, Record(0, now_ms, b"a", b"aborted"), TRANSACTIONAL)
        append(env, broker, marker_record(ControlType.ABORT, 0, now_ms), TRANSACTIONAL | CONTROL)
        served(broker).log.roll(now_ms)
        append(env, broker, Record(0, now_ms, b"b", b"1"), TRANSACTIONAL, epoch=1)
        append(
            env, broker, marker_record(ControlType.COMMIT, 0, now_ms), TRANSACTIONAL | CONTROL, 1
        )
        served(broker).log.roll(now_ms)
        await produce(broker, (b"c", b"1"))
        await broker.view_scheduler.compact(WHERE)
        assert cleaned
        assert [(key, value) for _, key, value in await read_all(broker)] == [
            (b"b", b"1"), (b"c", b"1"),
        ]  # fmt: skip
