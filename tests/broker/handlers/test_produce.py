"""Refused batches, counted by reason; malformed records on every kind of topic."""

import asyncio
import errno
import itertools
import struct
import threading
from dataclasses import asdict
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.handlers import produce
from protocol.errors import ErrorCode
from storage.format.batch import CONTROL, Record, build_batch, crc_of, read_header
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory, client_of
from tests.support.protocol.raw_client import RawClient
from tests.support.storage.hostile_batches import (
    CODECS,
    PACKERS,
    record_bytes,
    sealed,
    with_body,
)
from tests.support.storage.memory_env import MemoryEnv

COMPACT = {"keys": {"cleanup.policy": "compact", "message.timestamp.after.max.ms": "1"}}
NOW_MS = MemoryEnv(seed=1).wall_ms()


def batch(*, key: bytes | None = b"k", time_ms: int = NOW_MS, count: int = 1) -> bytearray:
    return build_batch([Record(n, time_ms, key, b"v", ()) for n in range(count)])


def patched(position: int, layout: str, value: int) -> bytes:
    data = batch()
    struct.pack_into(layout, data, position, value)
    return sealed(data)


# As Kafka's LogValidator counts them; None: Kafka has no counter for the reason.
REFUSED = {
    "no key": (batch(key=None, count=3), "no_key_compacted_topic"),
    "a timestamp outside the window": (batch(time_ms=NOW_MS + 86_400_000), None),
    "a malformed record": (with_body(record_bytes(-5, 0, 0, 0, tail=b"k" * 10)), None),
    "offset deltas out of order": (
        with_body(record_bytes(7, 0, 0, 5, 1, tail=b"k") + record_bytes(0, 0), count=1),
        "invalid_offset_or_sequence",
    ),
    "a wrong count": (patched(57, ">i", 4), "invalid_offset_or_sequence"),
    "a control batch": (patched(21, ">h", CONTROL), "invalid_offset_or_sequence"),
    "a producer without sequence": (patched(43, ">q", 7), "invalid_offset_or_sequence"),
    "a wrong CRC": (batch()[:-1] + b"\xff", "invalid_message_crc"),
}


async def test_the_log_says_that_a_full_disk_refuses_records() -> None:
    env = MemoryEnv(seed=1)
    async with broker_in_memory(env, topics={"orders": COMPACT}) as broker:
        full = env.fail_on(lambda operation, path: operation == "pwrite", errno.ENOSPC)
        with capture_logs() as lines, client_of(broker) as client:
            answer = await asyncio.to_thread(client.produce, "orders", bytes(batch()))
        full.remove()
    assert answer.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    (line,) = (line for line in lines if line["event"] == "records not written")
    assert (line["log_level"], line["partition"]) == ("error", "orders-0")
    assert "No space left" in line["reason"]


@pytest.mark.parametrize("reason", REFUSED)
async def test_a_refused_batch_counts_for_its_reason_only(reason: str) -> None:
    data, counter = REFUSED[reason]
    async with broker_in_memory(MemoryEnv(seed=1), topics={"table": COMPACT}) as broker:
        with RawClient(broker.addresses[0].port) as client:
            answer = await asyncio.to_thread(client.produce, "table", bytes(data))
        assert answer.error_code != 0
        counts = {name: count for name, count in asdict(broker.stats.rejects).items() if count}
        assert counts == ({} if counter is None else {counter: 1})


# Bodies of batches of two records with a right CRC, as a producer that corrupts memory sends them.
GOOD_RECORDS = record_bytes(7, 0, 0, 0, 1, tail=b"k") + record_bytes(0, 0)
GOOD_RECORDS += record_bytes(7, 0, 0, 1, 1, tail=b"k") + record_bytes(0, 0)
MALFORMED = {
    "garbage": b"\xff" * 40,
    "offset deltas of 0 and 5": GOOD_RECORDS[:11] + b"\x0a" + GOOD_RECORDS[12:],
    "a key longer than its record": GOOD_RECORDS[:4] + b"\x64" + GOOD_RECORDS[5:],
    "one record only": GOOD_RECORDS[: len(GOOD_RECORDS) // 2],
    "bytes after the last record": GOOD_RECORDS + b"\0",
    "garbage after many records": bytes(200_000),
    "garbage of a large batch": b"\xff" * (3 << 20),
}
LARGE = {"max.message.bytes": "4194304"}
KINDS = {
    "delete": {"cleanup.policy": "delete"},
    "stamped": {"cleanup.policy": "delete", "message.timestamp.type": "LogAppendTime"},
    "recompressed": {"cleanup.policy": "delete", "compression.type": "zstd"},
    "viewed": {"cleanup.policy": "delete", "varve.view": "compacted"},
    "compact": {"cleanup.policy": "compact"},
    "both": {"cleanup.policy": "compact,delete"},
}


@pytest.mark.parametrize("codec", CODECS)
async def test_no_topic_takes_malformed_records_in_any_codec(codec: str) -> None:
    def body(records: bytes) -> bytes:
        return with_body(PACKERS[codec](records), codec=CODECS[codec], count=2, now_ms=NOW_MS)

    topics = {name: {"keys": {**keys, **LARGE}} for name, keys in KINDS.items()}
    async with broker_in_memory(MemoryEnv(seed=1), topics=topics) as broker:
        with RawClient(broker.addresses[0].port) as client:
            for topic in KINDS:
                for name, records in MALFORMED.items():
                    answer = await asyncio.to_thread(client.produce, topic, body(records))
                    assert answer.error_code == ErrorCode.INVALID_RECORD, (topic, name)
                answer = await asyncio.to_thread(client.produce, topic, body(GOOD_RECORDS))
                assert (answer.error_code, answer.base_offset) == (0, 0), topic


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("claimed_ms", [-1, 1000, NOW_MS + 1, 1 << 62])
async def test_the_largest_timestamp_of_a_batch_is_that_of_its_records(
    codec: str, claimed_ms: int
) -> None:
    """As in Kafka: retention and lags do not depend on what a client writes into a header."""
    topics = {name: {"keys": {**keys, **LARGE}} for name, keys in KINDS.items()}
    records = [Record(n, NOW_MS - abs(5 - n), b"k", b"v" * 9, ()) for n in range(10)]
    large = [records[0]._replace(value=bytes(3 << 20)), *records[1:]]
    async with broker_in_memory(MemoryEnv(seed=1), topics=topics) as broker:
        with RawClient(broker.addresses[0].port) as client:
            for topic, kept in itertools.product(KINDS, (records, large)):
                lying = build_batch(kept, codec=CODECS[codec], max_timestamp=claimed_ms)
                answer = await asyncio.to_thread(client.produce, topic, bytes(lying))
                assert answer.error_code == ErrorCode.NONE
                log = broker.topics.partition(TopicPartition(topic, 0)).log
                assert log.segments.active.max_timestamp_ms == NOW_MS, topic
                read = log.reader.read(answer.base_offset, 8 << 20, end_offset=log.log_end_offset)
                data = read.read()
                header = read_header(data)
                assert header.max_timestamp == NOW_MS, topic
                assert header.crc == crc_of(data, 0, header.size_bytes), topic


async def test_small_compressed_batches_are_checked_without_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread costs more than they do; batches that unpack to more go to one."""
    checked_in: list[threading.Thread] = []
    check = produce.check_records

    def note(*batch: Any, **limits: Any) -> memoryview:
        checked_in.append(threading.current_thread())
        return check(*batch, **limits)

    monkeypatch.setattr(produce, "check_records", note)
    async with broker_in_memory(MemoryEnv(seed=1), topics={"events": {}}) as broker:
        with RawClient(broker.addresses[0].port) as client:
            for value_bytes, threads in ((60_000, 0), (70_000, 1)):
                record = Record(0, NOW_MS, b"k", bytes(value_bytes), ())
                data = bytes(build_batch([record], codec=CODECS["lz4"]))
                checked_in.clear()
                answer = await asyncio.to_thread(client.produce, "events", data)
                assert answer.error_code == 0
                loop_thread = threading.main_thread()
                assert len([t for t in checked_in if t is not loop_thread]) == threads
