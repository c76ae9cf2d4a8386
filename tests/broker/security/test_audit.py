"""The audit log: who changed what, from where, with what result; and who was denied."""

import io
import json
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from broker.app import Broker
from broker.handlers.security.audited import PARTITIONS_MAX, REMOVED_BY_ADMIN
from broker.http.api.compaction.leases import TRANSFERS
from broker.http.api.kafka.records import RECORDS
from broker.logging import LINES_PER_BURST, configure
from broker.security.acls import Operation, Permission, ResourceType
from broker.security.audit import HIDDEN, TEXT_CHARACTERS_MAX
from cleaner.remote_compaction import COMPACTIONS_PATH
from protocol import messages as m
from protocol.api import ApiKey
from tests.support.broker import http_client
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import basic
from tests.support.broker.http_users import sasl_users
from tests.support.broker.principals import PrincipalClient
from tests.support.storage.memory_env import MemoryEnv

TOKEN = "0123456789abcdef"
CLEANER = "/api/v1/cleaner/partitions/orders/0"
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


async def test_a_flood_of_equal_denials_does_not_hide_another_one_of_the_same_principal() -> None:
    with capture_logs() as lines:
        async with broker_in_memory(MemoryEnv(seed=16), authorization=AUTHORIZATION) as broker:
            eve = PrincipalClient(broker, "eve")
            for _ in range(LINES_PER_BURST + 50):
                await create_topics(eve, "flood")
            await create_topics(eve, "orders")
    denied = [
        (line["resource"], line.get("repeated")) for line in events(lines, "operation denied")
    ]
    assert denied[:2] == [("flood", None), ("orders", None)]
    assert sum(count or 0 for name, count in denied if name == "flood") == LINES_PER_BURST + 49


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
    assert failed["resource_type"] == "TOPIC"
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


async def ask(
    broker: Broker, method: str, path: str, body: str = "{}", **headers: str
) -> tuple[int, str]:
    answer = await http_client.ask(broker, method, path, body.encode(), **headers)
    return answer.status, answer.text


def http_broker(seed: int, **settings: Any) -> AbstractAsyncContextManager[Broker]:
    topics = {"orders": {"keys": {"cleanup.policy": "compact"}}}
    return broker_in_memory(MemoryEnv(seed=seed), topics=topics, **settings)


async def test_every_http_route_that_changes_something_leaves_one_event() -> None:
    token = {"Authorization": f"Bearer {TOKEN}"}
    async with http_broker(6, token=TOKEN.encode()) as broker:
        routes = [
            (route.method, route.resource.canonical)
            for route in broker.http.server.application.router.routes()
            if route.resource is not None and route.method not in ("GET", "HEAD")
        ]
        changes = [
            (method, path)
            for method, path in routes
            if path not in {*TRANSFERS, RECORDS} and not path.endswith("/verify")  # it reads
        ]
        assert len(changes) > 12
        for method, path in changes:
            with capture_logs() as lines:
                filled = path.format(
                    topic="orders",
                    partition="0",
                    producer_id="7",
                    compaction_id="none",
                    erasure_id="none",
                    group="g",
                    user="u",
                )
                status, _ = await ask(broker, method, f"{filled}?x-secret=1&x=2", **token)
            audited = [line for line in lines if line.get("change")]
            assert [line["change"] for line in audited] == [f"{method} {path}"], audited
            (event,) = audited
            assert (event["principal"], event["host"]) == ("Token:http", "127.0.0.1")
            assert event["event"] == "administrative change failed"
            assert (status, event["reason"][:30]) == (400, "unknown parameter 'x-secret'; ")
            assert event["parameters"] == {"x-secret": HIDDEN, "x": "2"}


async def test_an_http_change_names_its_target_its_parameters_and_its_result() -> None:
    async with http_broker(7) as broker:
        with capture_logs() as lines:
            assert (await ask(broker, "POST", f"{CLEANER}/pause"))[0] == 200
            assert (await ask(broker, "POST", f"{CLEANER}/transactions/7/abort"))[0] == 409
            path = "/api/v1/log/partitions/orders/0/truncate?to=0"
            assert (await ask(broker, "POST", path, '{"force": true}'))[0] == 409
            await ask(broker, "GET", CLEANER)
    (paused,) = events(lines, "administrative change")
    assert (paused["principal"], paused["resource"]) == ("User:ANONYMOUS", "orders-0")
    aborted, truncated = events(lines, "administrative change failed")
    assert (aborted["resource"], "transaction" in aborted["reason"]) == ("orders-0-7", True)
    assert truncated["parameters"] == {"to": "0", "force": "true"}


async def test_secrets_inside_the_body_of_an_http_request_are_hidden() -> None:
    body = {
        "name": "t",
        "settings": {"ssl.keystore.password": "s3cret", "a": [{"token": "s3cret"}]},
    }
    async with http_broker(12) as broker:
        with capture_logs() as lines:
            for text in (json.dumps({**body, "wrong": 1}), "[" * 60_000):
                assert (await ask(broker, "POST", "/api/v1/topics", text))[0] == 400
    failed, unreadable = events(lines, "administrative change failed")
    assert failed["parameters"]["name"] == "t"
    assert failed["parameters"]["settings"].count(HIDDEN) == 2
    assert unreadable["parameters"] == {}
    assert "s3cret" not in repr(lines)


async def test_a_denied_http_request_leaves_one_event_and_is_no_failed_change(
    tmp_path: Path,
) -> None:
    sasl = sasl_users(tmp_path, ["eve"])
    settings = {"http_users": True, "sasl": sasl, "authorization": AUTHORIZATION}
    eve, wrong = basic("eve"), basic("eve", "guess")
    async with http_broker(8, **settings) as broker:
        with capture_logs() as lines:
            assert (await ask(broker, "POST", f"{CLEANER}/pause", Authorization=eve))[0] == 403
            assert (await ask(broker, "GET", "/metrics", Authorization=eve))[0] == 403
            assert (await ask(broker, "GET", CLEANER, Authorization=wrong))[0] == 401
            assert (await ask(broker, "GET", CLEANER, Host="elsewhere.example"))[0] == 403
            output = f"{COMPACTIONS_PATH}/none/partitions/0/inputs/file"
            status, _ = await ask(broker, "GET", output, Authorization="Bearer guess")
    denied = [
        (line["principal"], line["action"].split("/")[-1], line["resource"], line["reason"])
        for line in events(lines, "request denied")
    ]
    path = "{partition}"
    assert denied[:4] == [
        ("User:eve", "pause", "orders-0", "User:eve needs ALTER on topic orders or the cluster"),
        ("User:eve", "metrics", "cluster", "User:eve needs DESCRIBE on the cluster"),
        ("User:ANONYMOUS", path, "orders-0", "wrong user or password"),
        ("User:ANONYMOUS", path, "orders-0", "unknown Host header"),
    ]
    assert len(denied) == 4 + (status in (401, 403)), "transfers have tokens of their own"
    assert not [line for line in lines if line.get("change")]
    assert "s3cret" not in repr(lines)
    assert "guess" not in repr(lines)


async def coordinated(client: PrincipalClient) -> None:
    """Wait until the group `g` has a coordinator, as clients do."""
    body = m.FindCoordinatorRequest(key_type=0, coordinator_keys=["g"])
    await client.request(ApiKey.FIND_COORDINATOR, 4, body)


async def joined(client: PrincipalClient, instance_id: str) -> str:
    """Let a static member join the group `g`; return its member id."""
    protocol = m.JoinGroupRequestProtocol(name="range", metadata=b"")
    body = m.JoinGroupRequest(
        group_id="g",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        member_id="",
        group_instance_id=instance_id,
        protocol_type="consumer",
        protocols=[protocol],
    )
    return str((await client.request(ApiKey.JOIN_GROUP, 9, body)).member_id)


async def leave(client: PrincipalClient, **member: Any) -> None:
    row = m.LeaveGroupRequestMember(**{"group_instance_id": None, "reason": None, **member})
    await client.request(ApiKey.LEAVE_GROUP, 5, m.LeaveGroupRequest(group_id="g", members=[row]))


async def commit(
    client: PrincipalClient,
    group_id: str,
    offset: int,
    *,
    partitions: int = 1,
    topics: Sequence[str] = ("orders",),
) -> None:
    rows = [
        m.OffsetCommitRequestPartition(
            partition_index=index, committed_offset=offset, committed_metadata=None
        )
        for index in range(partitions)
    ]
    body = m.OffsetCommitRequest(
        group_id=group_id,
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=[m.OffsetCommitRequestTopic(name=name, partitions=rows) for name in topics],
    )
    await client.request(ApiKey.OFFSET_COMMIT, 9, body)


async def test_a_removal_of_members_is_a_change_and_a_member_that_leaves_is_none() -> None:
    async with http_broker(9) as broker:
        root = PrincipalClient(broker, "root")
        await coordinated(root)
        with capture_logs() as lines:
            await leave(root, member_id=await joined(root, "first"))
            await joined(root, "second")
            await leave(root, member_id="", group_instance_id="second")
            reason = f"{REMOVED_BY_ADMIN}: it hangs"
            await leave(root, member_id=await joined(root, "third"), reason=reason)
    changed = events(lines, "administrative change")
    assert [(line["change"], line["resource"]) for line in changed] == [("LEAVE_GROUP", "g")] * 2
    assert changed[0]["member"] == "second"


async def test_a_reset_of_offsets_is_a_change_and_a_commit_of_a_consumer_is_none() -> None:
    async with http_broker(10) as broker:
        root = PrincipalClient(broker, "root", host="10.0.0.7")
        await coordinated(root)
        with capture_logs() as lines:
            await commit(root, "of-a-consumer-without-members", 3)
            await leave(root, member_id=await joined(root, "first"))
            await commit(root, "g", 4)
    (reset,) = events(lines, "administrative change")
    assert (reset["change"], reset["resource"], reset["host"]) == ("OFFSET_COMMIT", "g", "10.0.0.7")
    assert (reset["offsets"], reset["partitions"]) == ({"orders": {0: 4}}, 1)


async def lines_of_reset(seed: int, **offsets: Any) -> list[MutableMapping[str, Any]]:
    """The log of a reset of a group that has had a member; `offsets` are those of `commit`."""
    async with http_broker(seed) as broker:
        root = PrincipalClient(broker, "root")
        await coordinated(root)
        await leave(root, member_id=await joined(root, "first"))
        with capture_logs() as lines:
            await commit(root, "g", 4, **offsets)
    return lines


async def test_a_reset_of_many_partitions_is_one_event_for_each_result() -> None:
    lines = await lines_of_reset(13, partitions=3)
    (reset,) = events(lines, "administrative change")
    assert (reset["offsets"], reset["partitions"]) == ({"orders": {0: 4}}, 1)
    (failed,) = events(lines, "administrative change failed")
    assert (failed["offsets"], failed["partitions"]) == ({"orders": {1: 4, 2: 4}}, 2)


async def test_a_reset_names_a_hundred_partitions_of_all_topics_together() -> None:
    lines = await lines_of_reset(14, topics=[f"t{number}" for number in range(300)])
    (failed,) = events(lines, "administrative change failed")
    assert sum(map(len, failed["offsets"].values())) == PARTITIONS_MAX
    assert failed["partitions"] == 300


async def test_a_reset_shortens_the_names_of_topics() -> None:
    lines = await lines_of_reset(16, topics=["t" * 30_000])
    (failed,) = events(lines, "administrative change failed")
    assert failed["offsets"] == {"t" * TEXT_CHARACTERS_MAX: {0: 4}}


async def test_a_client_that_resets_offsets_all_the_time_writes_few_lines() -> None:
    async with http_broker(15) as broker:
        root = PrincipalClient(broker, "root")
        await coordinated(root)
        await leave(root, member_id=await joined(root, "first"))
        with capture_logs() as lines:
            for offset in range(3 * LINES_PER_BURST):
                await commit(root, "g", offset)
    resets = events(lines, "administrative change")
    assert resets[0]["offsets"] == {"orders": {0: 0}}
    assert LINES_PER_BURST <= len(resets) < 2 * LINES_PER_BURST


async def test_partitions_that_a_request_repeats_leave_one_event_for_each_topic_and_result() -> (
    None
):
    """One user could write 12 MB to the audit log with one request, as often as it liked."""
    async with broker_in_memory(MemoryEnv(seed=15), authorization=AUTHORIZATION) as broker:
        root = PrincipalClient(broker, "root")
        await create_topics(root, "orders")
        row = m.DeleteRecordsRequestPartition(partition_index=0, offset=0)
        unknown = m.DeleteRecordsRequestPartition(partition_index=7, offset=0)
        topic = m.DeleteRecordsRequestTopic(name="orders", partitions=[row, unknown] * 100)
        body = m.DeleteRecordsRequest(topics=[topic] * 10, timeout_ms=1_000)
        with capture_logs() as lines:
            await root.request(ApiKey.DELETE_RECORDS, 2, body)
    (changed,) = events(lines, "administrative change")
    assert (changed["resource"], changed["log_start_offsets"]) == ("orders", {0: 0})
    (failed,) = events(lines, "administrative change failed")
    assert (failed["log_start_offsets"], failed["partitions"]) == ({7: -1}, 1)


async def test_an_action_without_effect_is_no_change() -> None:
    async with http_broker(14) as broker:
        with capture_logs() as lines:
            for action in ("resume", "abort", "retry", "verify/abort", "pause", "pause"):
                assert (await ask(broker, "POST", f"{CLEANER}/{action}"))[0] == 200
    changes = [line["change"] for line in events(lines, "administrative change")]
    assert changes == ["POST /api/v1/cleaner/partitions/{topic}/{partition}/pause"]


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
