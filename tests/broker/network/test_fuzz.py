"""Random and mutated requests of every API and version: from a stranger who has not authenticated,
from a user without permissions, and from an administrator.

Each gets an answer or a closed connection. No handler fails, others are served meanwhile, and only
the administrator changes anything.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from broker.app import Broker
from broker.network import connection
from protocol import codec
from protocol import messages as m
from protocol.api import ApiKey
from storage.format.batch import read_header
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.messages import every_version, random_body
from tests.support.broker.sasl_client import SaslClient
from tests.support.draws import cases, seed_of_test
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv

PASSWORD = "secret"
OWNED = "topic-1"  # one of the strings in random requests
FRAMES = cases(few=3, many=20)  # of each version
ANSWER_SECONDS = 30.0


@dataclass
class Failures:
    """Stands in for the logger of connections; keeps the requests that failed."""

    lines: list[str] = field(default_factory=list)

    def error(self, event: str, **fields: Any) -> None:
        self.lines.append(f"{event}: {fields['exc_info']!r}")

    def info(self, event: str, **fields: Any) -> None: ...

    debug = warning = info


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Failures:
    failures = Failures()
    monkeypatch.setattr(connection, "logger", failures)
    return failures


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    users = {name: {"file": str(password)} for name in ("admin", "mallory")}
    async with broker_in_memory(
        MemoryEnv(seed=3),
        listeners=["SASL_PLAINTEXT://127.0.0.1:0"],
        sasl={"mechanisms": ["PLAIN"], "users": users, "failure_delay_ms": 0},
        authorization={"enabled": True, "super_users": ["User:admin"]},
    ) as broker:
        await broker.metadata_service.create(OWNED, 2, {"cleanup.policy": "compact"})
        partition = broker.topics.partition(TopicPartition(OWNED, 0))
        assert partition is not None
        data = batch_of(b"kept")
        partition.append(memoryview(data), read_header(data), 0)
        yield broker


def what_is_kept(broker: Broker) -> object:
    """Everything that a request might change, but not the producer ids that were given out."""
    metadata = broker.manager.metadata
    partition = broker.topics.partition(TopicPartition(OWNED, 0))
    assert partition is not None
    return (
        metadata.topics,
        metadata.acls,
        metadata.broker_dynamic,
        partition.log.log_start_offset,
        partition.log.log_end_offset,
    )


async def connect(broker: Broker, user: str | None, host: str = "127.0.0.1") -> SaslClient:
    client = await SaslClient.connect(broker, host)
    if user is not None:
        answer = await client.plain(user, PASSWORD)
        assert answer.error_code == 0
    return client


def mutated(rng: random.Random, frame: bytes) -> bytes:
    """A frame with the key and version of an API, and other bytes."""
    data = bytearray(frame)
    if rng.random() < 0.3:
        return frame
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(4, len(data))] = rng.choice((0, 0xFF, 0x7F, 0x80, rng.randrange(256)))
    if rng.random() < 0.2:
        del data[rng.randrange(4, len(data)) :]
    return bytes(data)


async def send_and_leave(client: SaslClient, frame: bytes) -> None:
    """Send a frame, and read until the broker closes, which it does after the answer or at once."""
    client.writer.write(len(frame).to_bytes(4) + frame)
    client.writer.write_eof()
    async with asyncio.timeout(ANSWER_SECONDS):
        try:
            while await client.reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
    client.close()


@pytest.mark.parametrize("user", [None, "mallory", "admin"])
async def test_requests_of_any_bytes_are_answered_or_closed(
    broker: Broker, failures: Failures, user: str | None
) -> None:
    rng = random.Random(seed_of_test(11))
    mistakes: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _loop, context: mistakes.append(repr(context.get("exception") or context))
    )
    kept, other = what_is_kept(broker), await connect(broker, "admin")
    for key, version in every_version():
        for _ in range(FRAMES):
            body = random_body(rng, key, version, "request", width=rng.choice((1, 3)))
            frame = mutated(rng, codec.encode_request(key, version, 1, "fuzz", body)[4:])
            # Addresses with failed logins wait for their answers.
            host = f"127.{rng.randrange(1, 255)}.{rng.randrange(255)}.1"
            client = await connect(broker, user, host)
            await send_and_leave(client, frame)
            assert failures.lines == [], (key, version, frame[:4000].hex())
        assert (await other.ask(ApiKey.METADATA, 9, m.MetadataRequest(topics=[]))).brokers
    assert mistakes == []
    if user != "admin":
        assert what_is_kept(broker) == kept
    other.close()
