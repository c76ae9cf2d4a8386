"""Refused batches, counted by reason."""

import asyncio
import struct
from dataclasses import asdict

import pytest

from storage.format.batch import CONTROL, Record, build_batch
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.protocol.raw_client import RawClient
from tests.support.storage.hostile_batches import record_bytes, sealed, with_body
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


@pytest.mark.parametrize("reason", REFUSED)
async def test_a_refused_batch_counts_for_its_reason_only(reason: str) -> None:
    data, counter = REFUSED[reason]
    async with broker_in_memory(MemoryEnv(seed=1), topics={"table": COMPACT}) as broker:
        with RawClient(broker.addresses[0].port) as client:
            answer = await asyncio.to_thread(client.produce, "table", bytes(data))
        assert answer.error_code != 0
        counts = {name: count for name, count in asdict(broker.stats.rejects).items() if count}
        assert counts == ({} if counter is None else {counter: 1})
