"""The transaction coordinator's own tables."""

import asyncio
from collections.abc import Sequence

import pytest

from broker.topics.internal_topic import KeyedLog, LogRecord, PartitionState
from broker.topics.producer_ids import Producer
from broker.transactions.coordinator import TransactionCoordinator
from broker.transactions.state_records import LoadedTransactions, TransactionLoader
from protocol.errors import ErrorCode
from storage.model import TopicPartition

PARTITIONS = 8


class NoMarkers:
    async def write(
        self, partition: TopicPartition, producer: Producer, *, commit: bool, only_if_open: bool
    ) -> None:
        raise AssertionError(partition)


def append(
    _partition: int, _records: Sequence[LogRecord], _producer: Producer | None = None
) -> "asyncio.Future[object]":
    done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


def nothing() -> LoadedTransactions:
    return TransactionLoader().finish()


async def new_producer_id() -> int:
    return 1


async def test_a_partition_is_deactivated_without_a_look_at_the_ids_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = TransactionCoordinator(
        KeyedLog(PARTITIONS, append),
        NoMarkers(),
        new_producer_id=new_producer_id,
        wall_ms=lambda: 0,
    )
    for partition in range(PARTITIONS):
        coordinator.activate(partition, nothing())
    ids = [f"id{index}" for index in range(50)]
    for transactional_id in ids:
        answer = await coordinator.init_producer(transactional_id, 1_000, None)
        assert answer.error is ErrorCode.NONE
    hashed: list[str] = []
    partition_of = KeyedLog.partition_of

    def counted(log: KeyedLog, key: str) -> int:
        hashed.append(key)
        return partition_of(log, key)

    monkeypatch.setattr(KeyedLog, "partition_of", counted)
    for partition in range(PARTITIONS):
        coordinator.deactivate(partition, PartitionState.OFFLINE)
    assert len(hashed) <= len(ids)
    assert list(coordinator.transactions()) == []
