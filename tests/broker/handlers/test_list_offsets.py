"""ListOffsets by time: threads decode batches, clients share them, and quotas count their time."""

import asyncio
import socket
import threading

import pytest

from broker.app import Broker
from broker.quotas.client_quotas import ClientMeters
from broker.topics.partition import Partition
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.messages import (
    ListOffsetsRequest,
    ListOffsetsRequestPartition,
    ListOffsetsRequestTopic,
    ListOffsetsResponse,
)
from storage.format.batch import read_header
from storage.model import TimestampOffset
from storage.segments.batch_scan import ScannedBatch
from storage.segments.timestamp_lookup import HEADERS_AT_ONCE, TimestampScan
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.protocol.raw_client import TIMEOUT_SECONDS, RawClient
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv

TOPIC = "timed"


def append(partition: Partition, *timestamps: int) -> None:
    batch = memoryview(batch_of(*[b"v"] * len(timestamps), timestamps=list(timestamps)))
    partition.append(batch, read_header(batch), 0)


async def search(
    broker: Broker, *timestamps: int, host: str = "127.0.0.1"
) -> list[tuple[int, int]]:
    """Ask from an address for records by time; return error codes and offsets."""
    partitions = [
        ListOffsetsRequestPartition(partition_index=0, timestamp=timestamp)
        for timestamp in timestamps
    ]
    topics = [ListOffsetsRequestTopic(name=TOPIC, partitions=partitions)]
    port = broker.addresses[0].port

    def exchange() -> list[tuple[int, int]]:
        with RawClient(port) as client:
            client.socket.close()
            client.socket = socket.create_connection(
                ("127.0.0.1", port), TIMEOUT_SECONDS, source_address=(host, 0)
            )
            answer = client.request(ApiKey.LIST_OFFSETS, 7, ListOffsetsRequest(topics=topics))
            assert isinstance(answer, ListOffsetsResponse)
            return [(row.error_code, row.offset) for row in answer.topics[0].partitions]

    return await asyncio.to_thread(exchange)


async def test_a_search_in_a_batch_runs_in_the_threads_for_decompression(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []
    find = TimestampScan.find

    def noted(scan: TimestampScan, batch: ScannedBatch) -> TimestampOffset | None:
        threads.append(threading.current_thread().name.partition("_")[0])
        return find(scan, batch)

    monkeypatch.setattr(TimestampScan, "find", noted)
    async with broker_in_memory(MemoryEnv(seed=5)) as broker:
        partition = (await broker.metadata_service.create(TOPIC, 1, {})).partitions[0]
        append(partition, 10, 20)
        assert await search(broker, 11) == await search(broker, -3) == [(0, 1)]
        # As in Kafka: one request costs at most one search in a partition.
        assert await search(broker, 11, -3) == [(ErrorCode.INVALID_REQUEST, -1)] * 2
    assert threads == ["unpack", "unpack"]


async def test_a_long_search_of_one_client_delays_no_search_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[TimestampScan] = []
    has_begun, may_end = threading.Event(), threading.Event()
    find = TimestampScan.find

    def wait(scan: TimestampScan, batch: ScannedBatch) -> TimestampOffset | None:
        if scan.at_least_ms == 11:
            begun.append(scan)
            has_begun.set()
            assert may_end.wait(TIMEOUT_SECONDS)
        return find(scan, batch)

    monkeypatch.setattr(TimestampScan, "find", wait)
    async with broker_in_memory(MemoryEnv(seed=5)) as broker, asyncio.timeout(TIMEOUT_SECONDS):
        partition = (await broker.metadata_service.create(TOPIC, 1, {})).partitions[0]
        append(partition, 10, 20)
        long = [asyncio.create_task(search(broker, 11)) for _ in range(4)]
        assert await asyncio.to_thread(has_begun.wait, TIMEOUT_SECONDS)
        assert await search(broker, 12, host="127.0.0.2") == [(0, 1)]
        assert len(begun) == 1  # of one client, one batch at a time
        may_end.set()
        assert await asyncio.gather(*long) == [[(0, 1)]] * 4


async def test_the_processor_time_of_a_search_counts_as_request_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    charged: list[int] = []

    def note(_meters: ClientMeters | None, nanoseconds: int) -> None:
        charged.append(nanoseconds)

    async with broker_in_memory(MemoryEnv(seed=5)) as broker:
        partition = (await broker.metadata_service.create(TOPIC, 1, {})).partitions[0]
        append(partition, 1_000)
        for _ in range(HEADERS_AT_ONCE + 1):
            append(partition, 500)
        append(partition, 2_000)
        monkeypatch.setattr(broker.quotas, "charge_thread", note)
        assert await search(broker, 1_500) == [(0, HEADERS_AT_ONCE + 2)]
    headers_ns, records_ns = charged
    assert headers_ns > 0
    assert records_ns > 0
