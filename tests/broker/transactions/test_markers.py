"""The markers of a decided transaction, and partitions that are offline."""

import asyncio
from collections.abc import Sequence
from itertools import count

from broker.topics.internal_topic import KeyedLog, LogRecord
from broker.topics.producer_ids import Producer
from broker.transactions.coordinator import (
    LONG_LIST,
    LONG_LISTS_AT_ONCE,
    TransactionCoordinator,
)
from broker.transactions.model import Status
from broker.transactions.state_records import LoadedTransactions
from protocol.errors import ErrorCode
from storage.errors import StorageError
from storage.model import TopicPartition
from tests.support.clocks.virtual_loop import run_virtually

PARTITIONS = [TopicPartition("t", index) for index in range(4)]


class Partitions:
    """Writes markers, except to partitions that are offline."""

    def __init__(self, offline: Sequence[TopicPartition]) -> None:
        self.offline = set(offline)
        self.written: list[TopicPartition] = []

    async def write(
        self, partition: TopicPartition, producer: Producer, *, commit: bool, only_if_open: bool
    ) -> None:
        if partition in self.offline:
            raise StorageError(f"{partition} is offline")
        self.written.append(partition)


def test_a_partition_that_is_offline_delays_no_marker_of_another_one() -> None:
    async def scenario() -> None:
        markers = Partitions(PARTITIONS[:2])

        async def append(
            partition: int, records: Sequence[LogRecord], producer: Producer | None = None
        ) -> None:
            pass

        async def new_producer_id() -> int:
            return 7

        coordinator = TransactionCoordinator(
            KeyedLog(1, append), markers, new_producer_id=new_producer_id, wall_ms=lambda: 1
        )
        await coordinator.activate(0, LoadedTransactions())
        producer = (await coordinator.init_producer("x", 1_000, None)).producer
        assert producer is not None
        await coordinator.add_partitions("x", producer, frozenset(PARTITIONS))
        answer = await coordinator.end("x", producer, commit=True)
        assert answer.error is ErrorCode.NONE
        await asyncio.sleep(1)
        assert sorted(markers.written) == PARTITIONS[2:]
        (transaction,) = coordinator.transactions()
        assert transaction.status is Status.PREPARE_COMMIT
        markers.offline = {PARTITIONS[0]}
        await asyncio.sleep(20)
        assert sorted(markers.written) == PARTITIONS[1:]
        markers.offline = set()
        await asyncio.sleep(20)
        assert sorted(markers.written) == PARTITIONS
        (transaction,) = coordinator.transactions()
        assert transaction.status is Status.COMPLETE_COMMIT
        assert coordinator.stats.marker_retries > 2
        await coordinator.close()

    run_virtually(scenario())


class SlowPartitions(Partitions):
    """Partitions of a disk that takes no marker until `may_write`."""

    def __init__(self) -> None:
        super().__init__(())
        self.may_write = asyncio.Event()
        self.under_way: set[int] = set()

    async def write(
        self, partition: TopicPartition, producer: Producer, *, commit: bool, only_if_open: bool
    ) -> None:
        self.under_way.add(producer.producer_id)
        await self.may_write.wait()
        await super().write(partition, producer, commit=commit, only_if_open=only_if_open)


def test_one_client_has_a_few_long_lists_of_markers_under_way() -> None:
    """Otherwise a thousand transactions that time out at once take the loop from all others."""

    async def append(
        partition: int, records: Sequence[LogRecord], producer: Producer | None = None
    ) -> None:
        pass

    async def scenario() -> None:
        ids = count(1)
        markers = SlowPartitions()

        async def new_producer_id() -> int:
            return next(ids)

        coordinator = TransactionCoordinator(
            KeyedLog(1, append), markers, new_producer_id=new_producer_id, wall_ms=lambda: 1
        )
        await coordinator.activate(0, LoadedTransactions())
        names = [*(f"many {number}" for number in range(50)), "other"]
        long_list = frozenset(TopicPartition("t", index) for index in range(LONG_LIST + 1))
        for name in names:
            creator = name.split()[0]
            producer = (await coordinator.init_producer(name, 1_000, None, creator)).producer
            assert producer is not None
            await coordinator.add_partitions(name, producer, long_list)
        await asyncio.sleep(2)
        for _ in range(2):
            await coordinator.abort_timed_out()
        assert coordinator.stats.timed_out == len(names)
        await asyncio.sleep(1)
        assert len(markers.under_way) == LONG_LISTS_AT_ONCE // 2 + 1
        assert len(names) in markers.under_way  # of the other client
        markers.may_write.set()
        await asyncio.sleep(1)
        assert len(markers.written) == len(names) * len(long_list)
        assert {transaction.status for transaction in coordinator.transactions()} == {
            Status.COMPLETE_ABORT
        }
        await coordinator.close()

    run_virtually(scenario())
