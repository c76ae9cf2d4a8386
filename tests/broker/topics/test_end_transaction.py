"""A transaction that nobody will end: explained, and aborted by an operator's word."""

import pytest

from broker.app import Broker
from cleaner.host import Undecided
from protocol.errors import ErrorCode
from storage.format.batch import TRANSACTIONAL, Record, build_batch, read_header
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import call_api
from tests.support.storage.memory_env import MemoryEnv

ORDERS = TopicPartition("orders", 0)
TOPICS = {"orders": {"keys": {"cleanup.policy": "compact"}}}
ROOT = "/api/v1/cleaner"
PATH = f"{ROOT}/partitions/orders/0"


def begin(env: MemoryEnv, broker: Broker, producer_id: int, epoch: int = 3) -> None:
    """As a folder of Kafka's has it: data of a transaction, and no marker."""
    partition = broker.topics.partition(ORDERS)
    assert partition is not None
    batch = build_batch(
        [Record(0, env.wall_ms(), b"k", b"v")],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=0,
        attributes=TRANSACTIONAL,
    )
    header = read_header(batch)
    partition.log.append(memoryview(batch), header, now_ms=env.wall_ms(), in_transaction=True)


def bounds(broker: Broker) -> tuple[int, Undecided]:
    facts = broker.cleaning.facts_of(ORDERS)
    assert facts is not None
    return facts.undecided_offset, facts.undecided_by


async def test_an_open_transaction_is_aborted_and_no_longer_bounds_the_cleaner() -> None:
    env = MemoryEnv(seed=5)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        begin(env, broker, 77)
        begin(env, broker, 88)
        assert bounds(broker) == (0, Undecided.OPEN_TRANSACTION)
        status, result = await call_api(broker, "POST", f"{PATH}/transactions/77/abort")
        assert (status, result["marker_offset"]) == (200, 2)
        assert bounds(broker) == (1, Undecided.OPEN_TRANSACTION)
        log = broker.manager.table.logs[ORDERS]
        assert [
            (entry.producer_id, entry.first_offset)
            for entry in log.reader.aborted_transactions(0, 3)
        ] == [(77, 0)]
        assert log.recovery_point == 3, "durable before it is answered"
        await call_api(broker, "POST", f"{PATH}/transactions/88/abort")
        assert bounds(broker) == (4, Undecided.HIGH_WATERMARK)
        assert log.producers.last_records()[77][0] == 3, "the marker has the producer's epoch"
    async with broker_in_memory(env, topics=TOPICS) as broker:
        assert broker.manager.table.logs[ORDERS].producers.open_transaction() is None
        assert len(broker.manager.table.logs[ORDERS].reader.aborted_transactions(0, 4)) == 2


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("orders/0/transactions/78/abort", 409, "with an open transaction: 77"),
        ("orders/0/transactions/x/abort", 400, "producer id: expected"),
        ("orders/1/transactions/77/abort", 404, "its last one is 0"),
    ],
)
async def test_for_a_producer_that_is_not_open_it_is_refused(
    path: str, code: int, words: str
) -> None:
    env = MemoryEnv(seed=6)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        begin(env, broker, 77)
        end = broker.manager.table.logs[ORDERS].log_end_offset
        status, result = await call_api(broker, "POST", f"{ROOT}/partitions/{path}")
        assert status == code
        assert words in result["detail"]
        assert broker.manager.table.logs[ORDERS].log_end_offset == end


async def test_a_transaction_that_the_coordinator_will_end_is_refused() -> None:
    env = MemoryEnv(seed=8)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        assert await broker.coordinators.transaction_topic.ensure() is ErrorCode.NONE
        started = await broker.coordinators.transactions.init_producer("payments", 60_000, None)
        assert started.producer is not None
        producer_id, epoch = started.producer.producer_id, started.producer.epoch
        added = frozenset((ORDERS,))
        await broker.coordinators.transactions.add_partitions("payments", started.producer, added)
        begin(env, broker, producer_id, epoch)
        path = f"{PATH}/transactions/{producer_id}/abort"
        status, result = await call_api(broker, "POST", path)
        assert status == 409
        assert "'payments'" in result["detail"]
        for _ in range(2):  # the second answer waits for the markers
            ended = await broker.coordinators.transactions.end(
                "payments", started.producer, commit=True
            )
            assert ended.error is ErrorCode.NONE
        assert broker.manager.table.logs[ORDERS].producers.open_transaction() is None
        assert not broker.manager.table.logs[ORDERS].reader.aborted_transactions(0, 9)


async def test_what_bounds_the_cleaner_is_named_after_its_cause() -> None:
    env = MemoryEnv(seed=7)
    keys = {"cleanup.policy": "compact", "varve.flush.on.ack": "true"}
    async with broker_in_memory(env, topics={"orders": {"keys": keys}}) as broker:
        begin(env, broker, 77)
        # Not flushed yet: the transaction lies above the high watermark and bounds nothing.
        assert bounds(broker) == (0, Undecided.HIGH_WATERMARK)
