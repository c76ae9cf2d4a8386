"""Asks a broker every question as every user.

The same questions go to Kafka (record_permissions.py) and to a broker in memory. An answer is the
part of a response that depends on permissions: error codes, names and permitted operations.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol

from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.messages import Message
from tests.broker.security.permissions import (
    access_control,
    cluster,
    configs,
    groups,
    produce_and_fetch,
    topics,
    transactions,
)
from tests.broker.security.permissions.groups import commit_of, modern_heartbeat
from tests.broker.security.permissions.question import (
    GROUP,
    MODERN_GROUP,
    MODERN_MEMBER,
    TOPIC,
    Asked,
    Question,
    victims,
)
from tests.broker.security.permissions.users import SUPER_USER, users

FAMILIES: Final = (
    produce_and_fetch,
    topics,
    configs,
    groups,
    transactions,
    access_control,
    cluster,
)


# Rows that depend on the broker, not on permissions.
NOT_COMPARED: Final = frozenset(
    {"brokers", "nodes", "node_endpoints", "configs", "api_keys", "credential_infos", "voters"}
)

NAMES: Final = frozenset(
    {"name", "topic_name", "topic", "group_id", "transactional_id", "resource_name", "key"}
)


def questions() -> tuple[Question, ...]:
    """Return all questions in the order in which each user asks them."""
    return tuple(chain.from_iterable(family.questions for family in FAMILIES))


def digest(message: Message) -> dict[str, Any]:
    """Return what depends on permissions, as JSON values."""
    result: dict[str, Any] = {}
    for field in type(message).__slots__:
        value = getattr(message, field)
        if field.endswith(("error_code", "authorized_operations")):
            result[field] = int(value)
        elif field in NAMES and isinstance(value, str) and value:
            result[field] = value
        elif isinstance(value, list) and field not in NOT_COMPARED:
            rows = [digest(row) for row in value if isinstance(row, Message)]
            if rows:
                result[field] = sorted(rows, key=repr)
    return result


class Broker(Protocol):
    """A broker that answers requests of users."""

    async def ask(self, user: str, key: ApiKey, version: int, body: Message) -> Any:
        """Return the response."""
        ...


async def record(broker: Broker) -> dict[str, list[list[Any]]]:
    """Ask all questions; return for each question its answers with the users that got them."""
    topic_ids = await _set_up(broker)
    answers: dict[str, list[list[Any]]] = {}
    for user, _ in users():
        await _join_modern_group(broker)
        for question in questions():
            body = question.make(Asked(user, topic_ids))
            response = await broker.ask(user, question.key, question.version, body)
            answer = _without_user(digest(response), user)
            rows = answers.setdefault(question.name, [])
            same = next((row for row in rows if row[0] == answer), None)
            if same is None:
                rows.append([answer, [user]])
            else:
                same[1].append(user)
    return answers


def _without_user(answer: dict[str, Any], user: str) -> dict[str, Any]:
    """Replace the user's name inside the names of its topics and groups."""
    text = json.dumps(answer).replace(f"-{user}", "-USER")
    result: dict[str, Any] = json.loads(text)
    return result


async def _set_up(broker: Broker) -> dict[str, bytes]:
    """Create entries, topics and groups; return the ids of the topics."""
    creations = [
        m.CreateAclsRequestCreation(
            resource_type=acl.resource_type,
            resource_name=acl.resource_name,
            resource_pattern_type=acl.pattern_type,
            principal=acl.principal,
            host=acl.host,
            operation=acl.operation,
            permission_type=acl.permission,
        )
        for _, acls in users()
        for acl in acls
    ]
    root = partial(broker.ask, SUPER_USER)
    created = await root(ApiKey.CREATE_ACLS, 3, m.CreateAclsRequest(creations=creations))
    assert {row.error_code for row in created.results} == {0}
    names = [TOPIC, *(name for user, _ in users() for name in victims(user))]
    rows = [
        m.CreateTopicsRequestTopic(
            name=name, num_partitions=2 if name == TOPIC else 1, replication_factor=1
        )
        for name in names
    ]
    topics = await root(
        ApiKey.CREATE_TOPICS, 7, m.CreateTopicsRequest(topics=rows, timeout_ms=30_000)
    )
    assert {row.error_code for row in topics.topics} == {0}
    for key_type, name in ((0, GROUP), (0, MODERN_GROUP), (1, "tx")):
        find = m.FindCoordinatorRequest(key_type=key_type, coordinator_keys=[name])
        await _until_done(lambda: root(ApiKey.FIND_COORDINATOR, 4, find), "coordinators")  # noqa: B023
    init = m.InitProducerIdRequest(
        transactional_id="tx", transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
    )
    await _until_done(lambda: root(ApiKey.INIT_PRODUCER_ID, 4, init))
    for partition in (0, 1):
        commit = m.OffsetCommitRequest(
            group_id=GROUP,
            generation_id_or_member_epoch=-1,
            topics=[commit_of(TOPIC, partition)],
        )
        await _until_done(lambda: root(ApiKey.OFFSET_COMMIT, 9, commit), "topics", "partitions")  # noqa: B023
    return {row.name: row.topic_id for row in topics.topics}


async def _join_modern_group(broker: Broker) -> None:
    body = modern_heartbeat(MODERN_GROUP, MODERN_MEMBER, topics=[TOPIC])
    await _until_done(lambda: broker.ask(SUPER_USER, ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, body))


async def _until_done(ask: Callable[[], Awaitable[Any]], *rows: str) -> None:
    """Repeat a request until its first row has no error: coordinators load for a while."""
    for _ in range(100):
        row = await ask()
        for name in rows:
            row = getattr(row, name)[0]
        if row.error_code == ErrorCode.NONE:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"still {ErrorCode(row.error_code).name}")
