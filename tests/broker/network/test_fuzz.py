"""Random and mutated requests of every API and version: from a client that has not authenticated,
from a user without permissions, and from an administrator.

Each gets an answer or a closed connection. No handler fails, others are served meanwhile, and only
the administrator changes anything.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
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
from tests.support.broker.sasl_client import SaslClient
from tests.support.draws import cases, seed_of_test
from tests.support.protocol import messages
from tests.support.protocol.messages import every_version, random_body
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv

PASSWORD = "secret"
OWNED, MISSING = "topic-1", "topic-9"  # the first is one of the strings in random requests
FRAMES = cases(few=1, many=20)  # of each version
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


def some_address(rng: random.Random) -> str:
    """One of many, because addresses with failed logins wait for their answers."""
    return f"127.{rng.randrange(1, 255)}.{rng.randrange(255)}.1"


async def answer_to(client: SaslClient, frame: bytes) -> bytes:
    """Send a frame, and read until the broker closes, which it does after the answer or at once."""
    client.writer.write(len(frame).to_bytes(4) + frame)
    client.writer.write_eof()
    answer = b""
    async with asyncio.timeout(ANSWER_SECONDS):
        with suppress(ConnectionError):
            while data := await client.reader.read(1 << 16):
                answer += data
    client.close()
    return answer


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
            client = await connect(broker, user, some_address(rng))
            await answer_to(client, frame)
            assert failures.lines == [], (key, version, frame[:4000].hex())
        assert (await other.ask(ApiKey.METADATA, 9, m.MetadataRequest(topics=[]))).brokers
    assert mistakes == []
    if user != "admin":
        assert what_is_kept(broker) == kept
    other.close()


async def test_a_user_without_permissions_cannot_tell_which_names_exist(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a topic, a group and a transactional id: both names get the same bytes."""
    rng = random.Random(seed_of_test(12))
    monkeypatch.setattr(messages, "_STRINGS", (OWNED,))
    monkeypatch.setattr(messages, "_LIMITS", dict.fromkeys(messages._LIMITS, 1))  # -2 to 1
    admin = await connect(broker, "admin")
    await own_a_group_and_a_transaction(admin)
    admin.close()
    for key, version in every_version():
        if key in (ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE):
            continue  # in an authenticated session an error
        for _ in range(FRAMES):
            body = random_body(rng, key, version, "request", width=1)
            if isinstance(body, m.FetchRequest):
                body.session_epoch = -1  # the id of a new session is random
            frame = codec.encode_request(key, version, 1, "fuzz", body)[4:]
            answers = []
            for data in (frame, frame.replace(OWNED.encode(), MISSING.encode())):
                client = await connect(broker, "mallory", some_address(rng))
                answer = await answer_to(client, data)
                answers.append(answer.replace(MISSING.encode(), OWNED.encode()))
            assert answers[0] == answers[1], (key, version, body)


async def own_a_group_and_a_transaction(admin: SaslClient) -> None:
    """Make both, named like the topic; their coordinators need a moment after a start."""
    partition = m.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    commit = m.OffsetCommitRequest(
        group_id=OWNED,
        generation_id_or_member_epoch=-1,
        topics=[m.OffsetCommitRequestTopic(name=OWNED, partitions=[partition])],
    )
    begin = m.InitProducerIdRequest(transactional_id=OWNED, transaction_timeout_ms=60_000)
    for kind in (0, 1):
        find = m.FindCoordinatorRequest(key_type=kind, coordinator_keys=[OWNED])
        while (await admin.ask(ApiKey.FIND_COORDINATOR, 4, find)).coordinators[0].error_code:
            pass
    while (await admin.ask(ApiKey.OFFSET_COMMIT, 8, commit)).topics[0].partitions[0].error_code:
        pass
    while (await admin.ask(ApiKey.INIT_PRODUCER_ID, 4, begin)).error_code:
        pass
