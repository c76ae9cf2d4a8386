"""A whole broker over an in-memory disk with a topic that has a view, and clients of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as ClientPartition

from broker.app import Broker
from broker.cleaning.dedicated_workers import StartWorker
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_settings
from tests.support.broker.views.view_worker import thread_worker
from tests.support.storage.memory_env import MemoryEnv

WHERE = TopicPartition("orders", 0)
VIEW = ClientPartition("orders.compacted", 0)
ON = {"varve.view": "compacted", "varve.view.min.bytes": "-1"}
ANY_TIME = {
    "message.timestamp.after.max.ms": str(2**63 - 1)
}  # the disk's clock is not the client's
READ_SECONDS = 20  # for a consumer that hangs


@asynccontextmanager
async def broker_with_view(
    env: MemoryEnv,
    keys: dict[str, str] | None = None,
    worker: StartWorker | None = None,
    **settings: Any,
) -> AsyncIterator[Broker]:
    topics = {"orders": {"partitions": 1, "keys": {**ON, **ANY_TIME, **(keys or {})}}}
    broker = Broker(
        broker_settings(**{"topics": topics, **settings}),
        env,
        view_worker=worker or thread_worker(env),
    )
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


@asynccontextmanager
async def producing(broker: Broker) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(bootstrap_servers=str(broker.addresses[0]), linger_ms=0)
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


async def produce(broker: Broker, *records: tuple[bytes | None, bytes | None]) -> None:
    async with producing(broker) as producer:
        for key, value in records:
            await producer.send_and_wait("orders", key=key, value=value)


@asynccontextmanager
async def consuming(broker: Broker, **options: Any) -> AsyncIterator[AIOKafkaConsumer]:
    consumer = AIOKafkaConsumer(
        bootstrap_servers=str(broker.addresses[0]), enable_auto_commit=False, **options
    )
    await consumer.start()
    consumer.assign([VIEW])
    try:
        yield consumer
    finally:
        await consumer.stop()


async def read_on(consumer: AIOKafkaConsumer) -> list[tuple[int, bytes | None, bytes | None]]:
    """Everything from the position to the end, which has to be reached."""
    result = []
    async with asyncio.timeout(READ_SECONDS):
        end = (await consumer.end_offsets([VIEW]))[VIEW]
        while await consumer.position(VIEW) < end:
            for rows in (await consumer.getmany(timeout_ms=200)).values():
                result += [(row.offset, row.key, row.value) for row in rows]
    return result


async def read_all(
    broker: Broker, start: int | None = None, **options: Any
) -> list[tuple[int, bytes | None, bytes | None]]:
    async with consuming(broker, **options) as consumer:
        if start is None:
            await consumer.seek_to_beginning(VIEW)
        else:
            consumer.seek(VIEW, start)
        return await read_on(consumer)
