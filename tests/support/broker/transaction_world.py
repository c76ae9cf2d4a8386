"""Broker lives for tests of transactions: files in memory, no sockets, virtual time."""

import asyncio
from dataclasses import dataclass
from typing import Any

from broker.app import Broker
from broker.groups.classic.model import CommitRequested
from broker.groups.offsets.offset_records import committed_offset
from broker.groups.offsets.offsets_store import OFFSETS_TOPIC
from broker.lifecycle.log_opening import open_logs
from broker.topics.producer_ids import Producer
from protocol.errors import ErrorCode
from storage.format.batch import (
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    control_type,
    decode_records,
    read_header,
    walk_headers,
)
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_settings
from tests.support.storage.memory_env import MemoryEnv

A, B = TopicPartition("a", 0), TopicPartition("b", 0)
OFFSETS = TopicPartition(OFFSETS_TOPIC, 0)
GROUP = "g"
KEY = ("a", 0)
TIMEOUT_MS = 60_000


async def begin_life(env: MemoryEnv, *, flush_on_ack: bool = False) -> Broker:
    """Open the logs and load both coordinators, as a start of the broker does."""
    defaults = {"varve.flush.on.ack": "true"} if flush_on_ack else {}
    settings: dict[str, Any] = {
        "topics": {"a": {}, "b": {}},
        "topic_defaults": {"keys": defaults},
        "groups": {"offsets_partitions": 1},
        "transactions": {"state_partitions": 1},
    }
    broker = Broker(broker_settings(**settings), env)
    await asyncio.to_thread(broker.manager.lock)
    await open_logs(broker.manager, broker.effective_settings.topic_config, broker.readiness)
    broker.metadata_service.load()
    broker._build_coordinators()
    await broker.metadata_service.finish_interrupted()
    await broker.metadata_service.apply_yaml()
    for topic in (broker.coordinators.offsets_topic, broker.coordinators.transaction_topic):
        topic.start()
        assert await topic.ensure() is ErrorCode.NONE
    while broker.coordinators.groups.is_loading or broker.coordinators.transactions.is_loading:  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # virtual
    return broker


@dataclass
class Client:
    """A transactional producer that uses the parts of a broker."""

    broker: Broker
    producer: Producer
    transactional_id: str = "tx"
    sequence: int = 0

    @classmethod
    async def start(cls, broker: Broker, transactional_id: str = "tx") -> "Client":
        answer = await broker.coordinators.transactions.init_producer(
            transactional_id, TIMEOUT_MS, None
        )
        assert answer.error is ErrorCode.NONE
        assert answer.producer is not None
        return cls(broker, answer.producer, transactional_id)

    async def add(self, *partitions: TopicPartition) -> ErrorCode:
        return await self.broker.coordinators.transactions.add_partitions(
            self.transactional_id, self.producer, frozenset(partitions)
        )

    async def produce(self, topic_partition: TopicPartition, value: bytes = b"v") -> None:
        partition = self.broker.topics.partition(topic_partition)
        assert partition is not None
        batch = build_batch(
            [Record(0, self.broker._env.wall_ms(), b"k", value)],
            producer_id=self.producer.producer_id,
            producer_epoch=self.producer.epoch,
            base_sequence=self.sequence,
            attributes=TRANSACTIONAL,
        )
        info = partition.append(
            memoryview(batch),
            read_header(batch),
            self.broker._env.wall_ms(),
            in_transaction=True,
        )
        if not partition.is_acked(info):
            await partition.wait_flushed(info.last_offset + 1)

    async def commit_offset(self, offset: int) -> ErrorCode:
        return await self.broker.coordinators.groups.offsets.commit_in_transaction(
            GROUP,
            CommitRequested(0, "", None, -1),
            {KEY: committed_offset(offset)},
            self.producer,
        )


def markers(broker: Broker, topic_partition: TopicPartition, producer_id: int) -> list[int]:
    """The kinds of a producer's markers on a partition, in order."""
    partition = broker.topics.partition(topic_partition)
    assert partition is not None
    log = partition.log
    data = log.reader.read(log.log_start_offset, 1 << 30, end_offset=log.log_end_offset).read()
    return [
        control_type(decode_records(data, header, position)[0])
        for position, header in walk_headers(data)
        if header.is_control and header.producer_id == producer_id
    ]


def is_open(broker: Broker, topic_partition: TopicPartition) -> bool:
    """Whether any transaction is open on a partition."""
    partition = broker.topics.partition(topic_partition)
    assert partition is not None
    return partition.log.producers.open_transaction() is not None


def offset_of_group(broker: Broker) -> int | None:
    """The group's committed offset."""
    error, offsets = broker.coordinators.groups.offsets.fetch(GROUP)
    assert error is ErrorCode.NONE
    committed = offsets.get(KEY)
    return None if committed is None else committed[0]


COMMIT, ABORT = int(ControlType.COMMIT), int(ControlType.ABORT)
