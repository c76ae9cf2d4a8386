"""This broker allows and denies as Apache Kafka 4.3, whose answers record_permissions.py recorded.

VARVE_RECORD_PERMISSIONS=1 records them anew first, from a real Kafka.
"""

import asyncio
import json
import os
from typing import Any

import pytest

from broker.app import Broker
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.messages import Message
from tests.broker.security.permissions import record_permissions
from tests.broker.security.permissions.asking import questions, record
from tests.broker.security.permissions.users import SUPER_USER
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.principals import PrincipalClient
from tests.support.peers.kafka import unavailable
from tests.support.storage.memory_env import MemoryEnv

Answers = dict[str, list[list[Any]]]


class Varve:
    """A broker in memory with a connection for each user."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._clients: dict[str, PrincipalClient] = {}

    async def ask(self, user: str, key: ApiKey, version: int, body: Message) -> Any:
        if user not in self._clients:
            self._clients[user] = PrincipalClient(self._broker, user)
        return await self._clients[user].request(key, version, body)


async def record_varve() -> Answers:
    settings = {
        "authorization": {"enabled": True, "super_users": [f"User:{SUPER_USER}"]},
        "groups": {"offsets_partitions": 1},
        # Kafka refuses some APIs on a listener without authentication.
        "listeners": ["SASL_PLAINTEXT://127.0.0.1:0"],
        "transactions": {"state_partitions": 1},
    }
    async with broker_in_memory(MemoryEnv(seed=1), **settings) as broker:
        return await record(Varve(broker))


@pytest.fixture(scope="module")
def answers() -> Answers:
    return asyncio.run(record_varve())


@pytest.fixture(scope="module")
def kafka_answers() -> Answers:
    if os.environ.get("VARVE_RECORD_PERMISSIONS"):
        assert unavailable() is None, unavailable()
        record_permissions.write(record_permissions.record_kafka())
    table: Answers = json.loads(record_permissions.TABLE.read_text())
    return table


@pytest.mark.parametrize("name", [question.name for question in questions()])
def test_a_permission_has_the_answer_of_kafka(
    name: str, answers: Answers, kafka_answers: Answers
) -> None:
    assert _by_user(answers[name]) == _by_user(kafka_answers[name])


def _by_user(rows: list[list[Any]]) -> dict[str, Any]:
    return {user: _created(answer) for answer, users in rows for user in users}


def _created(answer: dict[str, Any]) -> dict[str, Any]:
    """Answer for a topic that Metadata creates as Kafka, which does not wait for the creation."""
    topics = answer.get("topics", ())
    if any(row.get("name") == "new-USER" and row["error_code"] == 0 for row in topics):
        row = {key: value for key, value in topics[0].items() if key != "partitions"}
        row["error_code"] = int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        return {**answer, "topics": [row]}
    return answer


def test_every_question_is_in_the_table(kafka_answers: Answers) -> None:
    assert [question.name for question in questions()] == list(kafka_answers)
