"""aiokafka (old request versions) against the running daemon."""

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.support.varve import VarveBroker

CODECS = [None, "gzip", "snappy", "lz4", "zstd"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


async def produce(
    broker: VarveBroker, topic: str, records: list[tuple[bytes, bytes | None]], **options: object
) -> None:
    async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap, **options) as producer:
        futures = [await producer.send(topic, value, key) for key, value in records]
        await asyncio.gather(*futures)


async def read(broker: VarveBroker, topic: str, count: int) -> list[tuple[int, bytes, bytes]]:
    consumer = AIOKafkaConsumer(bootstrap_servers=broker.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, 0)])
        await consumer.seek_to_beginning()
        results: list[tuple[int, bytes, bytes]] = []
        async with asyncio.timeout(60):
            while len(results) < count:
                for messages in (await consumer.getmany(timeout_ms=500)).values():
                    results += [(m.offset, m.key, m.value) for m in messages]
        return results
    finally:
        await consumer.stop()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("idempotent", [False, True])
async def test_records_of_every_codec_come_back_as_they_were(
    broker: VarveBroker, topic: str, codec: str | None, idempotent: bool
) -> None:
    records = [(b"key-%d" % n, b"value-%d" % n * 10) for n in range(500)]
    await produce(
        broker, topic, records, compression_type=codec, enable_idempotence=idempotent, acks="all"
    )
    results = await read(broker, topic, 500)
    assert [(key, value) for _, key, value in results] == records


async def test_a_group_commits_and_goes_on(broker: VarveBroker, topic: str) -> None:
    await produce(broker, topic, [(b"k", b"%d" % n) for n in range(50)])

    async def consume(count: int) -> list[bytes]:
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=broker.bootstrap,
            group_id=f"group-{topic}",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        await consumer.start()
        try:
            async with asyncio.timeout(60):
                results = [(await consumer.getone()).value for _ in range(count)]
            await consumer.commit()
            return results
        finally:
            await consumer.stop()

    assert await consume(50) == [b"%d" % n for n in range(50)]
    await produce(broker, topic, [(b"k", b"%d" % n) for n in range(50, 60)])
    assert await consume(10) == [b"%d" % n for n in range(50, 60)]


async def test_a_topic_is_created_described_grown_and_deleted(
    broker: VarveBroker, topic: str
) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    try:
        new = NewTopic(topic, 2, 1, topic_configs={"cleanup.policy": "compact"})
        await admin.create_topics([new])
        assert len((await admin.describe_topics([topic]))[0]["partitions"]) == 2
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        answer = await admin.describe_configs([resource])
        values = {entry[0]: entry[1] for entry in answer[0].resources[0][4]}
        assert values["cleanup.policy"] == "compact"
        altered = ConfigResource(ConfigResourceType.TOPIC, topic, {"cleanup.policy": "delete"})
        await admin.alter_configs([altered])
        answer = await admin.describe_configs([resource])
        values = {entry[0]: entry[1] for entry in answer[0].resources[0][4]}
        assert values["cleanup.policy"] == "delete"
        await admin.create_partitions({topic: NewPartitions(3)})
        assert len((await admin.describe_topics([topic]))[0]["partitions"]) == 3
        await admin.delete_topics([topic])
        assert topic not in await admin.list_topics()
    finally:
        await admin.close()


async def test_a_tombstone_is_read_as_a_null_value(broker: VarveBroker, topic: str) -> None:
    await produce(broker, topic, [(b"k", b"v"), (b"k", None)])
    assert [value for _, _, value in await read(broker, topic, 2)] == [b"v", None]
