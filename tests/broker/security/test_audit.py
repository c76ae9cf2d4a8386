"""The audit log: who changed what, from where, with what result; and who was denied."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from broker.logging import LINES_PER_BURST, configure
from broker.security.acls import Operation, Permission, ResourceType
from protocol import messages as m
from protocol.api import ApiKey
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.principals import PrincipalClient
from tests.support.storage.memory_env import MemoryEnv

AUTHORIZATION = {"enabled": True, "super_users": ["User:root"]}


def events(lines: list[Any], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == event]


async def create_topics(client: PrincipalClient, *names: str, validate: bool = False) -> None:
    rows = [
        m.CreateTopicsRequestTopic(name=name, num_partitions=1, replication_factor=1)
        for name in names
    ]
    body = m.CreateTopicsRequest(topics=rows, timeout_ms=1_000, validate_only=validate)
    await client.request(ApiKey.CREATE_TOPICS, 7, body)


async def test_changes_and_failed_changes_name_the_principal_and_the_address() -> None:
    async with broker_in_memory(MemoryEnv(seed=1), authorization=AUTHORIZATION) as broker:
        root = PrincipalClient(broker, "root", host="10.0.0.7")
        with capture_logs() as lines:
            await create_topics(root, "orders", "bad name")
            await create_topics(root, "only-checked", validate=True)
    changed = events(lines, "administrative change")
    assert [(line["change"], line["resource"]) for line in changed] == [("CREATE_TOPICS", "orders")]
    assert (changed[0]["principal"], changed[0]["host"]) == ("User:root", "10.0.0.7")
    failed = events(lines, "administrative change failed")
    assert [(line["resource"], line["reason"]) for line in failed] == [
        ("bad name", "INVALID_TOPIC_EXCEPTION")
    ]


async def test_a_denial_is_one_event_and_not_a_failed_change() -> None:
    async with broker_in_memory(MemoryEnv(seed=2), authorization=AUTHORIZATION) as broker:
        with capture_logs() as lines:
            await create_topics(PrincipalClient(broker, "eve", host="10.0.0.9"), "orders")
    denied = events(lines, "operation denied")
    assert [(d["principal"], d["host"], d["operation"], d["resource"]) for d in denied] == [
        ("User:eve", "10.0.0.9", "CREATE", "orders")
    ]
    assert not events(lines, "administrative change failed")


async def test_denials_of_one_principal_do_not_hide_those_of_others() -> None:
    async with broker_in_memory(MemoryEnv(seed=3), authorization=AUTHORIZATION) as broker:
        with capture_logs() as lines:
            flood = PrincipalClient(broker, "flood")
            await create_topics(flood, *(f"t-{n}" for n in range(LINES_PER_BURST + 50)))
            await create_topics(PrincipalClient(broker, "quiet"), "orders")
    principals = [line["principal"] for line in events(lines, "operation denied")]
    assert principals.count("User:flood") <= LINES_PER_BURST + 5
    assert principals.count("User:quiet") == 1


async def test_values_of_secrets_are_masked() -> None:
    async with broker_in_memory(MemoryEnv(seed=4)) as broker:
        await broker.metadata_service.create("orders", 1, {})
        configs = [
            m.IncrementalAlterConfigsRequestConfig(name=name, config_operation=0, value="s3cret")
            for name in ("ssl.keystore.password", "sasl.jaas.config")
        ]
        row = m.IncrementalAlterConfigsRequestResource(
            resource_type=2, resource_name="orders", configs=configs
        )
        body = m.IncrementalAlterConfigsRequest(resources=[row])
        with capture_logs() as lines:
            await PrincipalClient(broker, "root").request(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, body)
    (failed,) = events(lines, "administrative change failed")
    assert set(failed["settings"]) == {"ssl.keystore.password", "sasl.jaas.config"}
    assert "s3cret" not in repr([line for line in lines if line.get("change")])


async def test_entries_are_logged_with_words() -> None:
    async with broker_in_memory(MemoryEnv(seed=5), authorization=AUTHORIZATION) as broker:
        root = PrincipalClient(broker, "root")
        row = m.CreateAclsRequestCreation(
            resource_type=ResourceType.TOPIC,
            resource_name="orders",
            principal="User:ann",
            host="*",
            operation=Operation.READ,
            permission_type=Permission.ALLOW,
        )
        with capture_logs() as lines:
            await root.request(ApiKey.CREATE_ACLS, 3, m.CreateAclsRequest(creations=[row]))
    (changed,) = events(lines, "administrative change")
    assert (changed["acl_principal"], changed["operation"], changed["permission"]) == (
        "User:ann",
        "READ",
        "ALLOW",
    )


@pytest.fixture
def restored_logging() -> Iterator[None]:
    saved = structlog.get_config()
    yield
    structlog.configure(**saved)


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("audits", [True, False])
def test_the_audit_log_has_its_own_stream_and_level(audits: bool) -> None:
    stream, audit_stream = io.StringIO(), io.StringIO()
    configure("error", "text", stream, audits=audits, audit_stream=audit_stream)
    structlog.get_logger("audit").info("operation denied", principal="User:eve")
    structlog.get_logger("broker").warning("too detailed")
    structlog.get_logger("broker").error("visible")
    assert "visible" in stream.getvalue()
    assert "denied" not in stream.getvalue()
    assert "too detailed" not in stream.getvalue()
    lines = [json.loads(line) for line in audit_stream.getvalue().splitlines()]
    assert [(line["event"], line["logger"]) for line in lines] == (
        [("operation denied", "audit")] if audits else []
    )
