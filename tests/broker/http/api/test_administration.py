"""Topics and groups changed over HTTP: the same answers as on the Kafka port, conflicts, forms."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.groups.classic.subscription import encode_assignment_sliced
from broker.http.api.kafka.client import VERSIONS
from broker.http.api.kafka.topic_changes import TopicChanges
from broker.inspection.record_reader import RecordReader
from broker.logging import recent_audit_events
from broker.security.authorizer import Authorizer
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.format.batch import read_header
from storage.format.checkpoints import encode_topic_id
from storage.model import TopicPartition
from storage.slices import run_at_once
from tests.support.broker.http_client import ask, basic
from tests.support.broker.http_users import OWNERS, broker_with_users, owner_rule, send
from tests.support.broker.principals import PrincipalClient
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.storage.logs import batch_of

TOPICS = "/api/v1/topics"
ORDERS = f"{TOPICS}/orders"
READERS = "/api/v1/groups/readers"
MANY = 5_000  # topics
CLOCK_RATE = 5
LINES_PER_TURN_MAX = 45_000  # 1,024 topics of an assignment are read in 30,000
HEADER = "varve.view.version.header"
LONG_SETTINGS = {HEADER: "\N{SNOWMAN}" * 700}  # 6 bytes each in the metadata


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    topics = {"orders": {"partitions": 2, "keys": {"cleanup.policy": "compact"}}, "other": {}}
    async with broker_with_users(
        tmp_path, OWNERS, owner_rule, seed=3, token=b"0123456789abcdef", topics=topics
    ) as broker:
        yield broker


async def find_state(broker: Broker) -> dict[str, Any]:
    status, answer = await send(broker, "GET", ORDERS)
    assert status == 200
    return {row["name"]: row for row in answer["settings"]} | {"answer": answer}


def fill(broker: Broker, count: int, partition: int = 0) -> None:
    target = broker.topics.partition(TopicPartition("orders", partition))
    assert target is not None
    for number in range(count):
        data = memoryview(batch_of(b"%d" % number))
        target.append(data, read_header(data), 1000 * number)


# --- the same answers as on the Kafka port --------------------------------------------------------


def requests() -> list[tuple[str, str, str, ApiKey, m.Message]]:
    """HTTP requests, and the Kafka requests of the same meaning. They fail, or change nothing."""
    create = m.CreateTopicsRequestTopic(name="other", num_partitions=1, replication_factor=-1)
    config = m.IncrementalAlterConfigsRequestConfig(name="retention.ms", value="-5")
    alter = m.IncrementalAlterConfigsRequestResource(
        resource_type=2, resource_name="orders", configs=[config]
    )
    grow = m.CreatePartitionsRequestTopic(name="orders", count=1, assignments=None)
    other = m.DescribeConfigsRequestResource(
        resource_type=2, resource_name="other", configuration_keys=None
    )
    return [
        (
            *("POST", TOPICS, '{"name": "other", "partitions": 1}'),
            *(ApiKey.CREATE_TOPICS, m.CreateTopicsRequest(topics=[create])),
        ),
        (
            *("PATCH", ORDERS, '{"set": {"retention.ms": "-5"}}'),
            *(
                ApiKey.INCREMENTAL_ALTER_CONFIGS,
                m.IncrementalAlterConfigsRequest(resources=[alter]),
            ),
        ),
        (
            *("PATCH", ORDERS, '{"partitions": 1}'),
            *(ApiKey.CREATE_PARTITIONS, m.CreatePartitionsRequest(topics=[grow])),
        ),
        (
            *("GET", f"{TOPICS}/other", ""),
            *(ApiKey.DESCRIBE_CONFIGS, m.DescribeConfigsRequest(resources=[other])),
        ),
        (
            *("DELETE", f"{TOPICS}/none", ""),
            ApiKey.DELETE_TOPICS,
            m.DeleteTopicsRequest(
                topics=[m.DeleteTopicsRequestTopic(name="none", topic_id=bytes(16))]
            ),
        ),
        (
            *("DELETE", READERS, ""),
            *(ApiKey.DELETE_GROUPS, m.DeleteGroupsRequest(groups_names=["readers"])),
        ),
    ]


STATUS = {
    ErrorCode.NONE: 200,
    ErrorCode.TOPIC_AUTHORIZATION_FAILED: 403,
    ErrorCode.GROUP_AUTHORIZATION_FAILED: 403,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: 404,
    ErrorCode.GROUP_ID_NOT_FOUND: 404,
    ErrorCode.TOPIC_ALREADY_EXISTS: 409,
    ErrorCode.INVALID_CONFIG: 422,
    ErrorCode.INVALID_PARTITIONS: 422,
    ErrorCode.COORDINATOR_NOT_AVAILABLE: 503,
}


@pytest.mark.parametrize("user", ["owner", "viewer", "nobody"])
async def test_http_gives_the_answer_of_the_kafka_port(broker: Broker, user: str) -> None:
    await broker.coordinators.offsets_topic.ensure()
    client = PrincipalClient(broker, user)
    for method, path, body, key, message in requests():
        answer = await client.request(key, VERSIONS[key], message)
        rows = next(
            getattr(answer, name)
            for name in ("topics", "responses", "results")
            if hasattr(answer, name)
        )
        code = ErrorCode(rows[0].error_code)
        text = getattr(rows[0], "error_message", None)
        status, document = await send(broker, method, path, user, body)
        assert status == STATUS[code], (path, code, document)
        if status == 403:
            assert document["detail"].startswith(f"User:{user} needs ")
        elif status != 200 and text is not None:
            assert document["detail"] == text


async def test_the_token_may_do_everything_and_its_changes_are_audited_once(
    broker: Broker,
) -> None:
    token = {"Authorization": "Bearer 0123456789abcdef"}
    with capture_logs() as lines:
        status, _ = await send(broker, "POST", TOPICS, json='{"name": "new"}', **token)
    assert status == 201
    changes = [line for line in lines if line["event"].startswith("administrative change")]
    assert [(line["change"], line["principal"], line["resource"]) for line in changes] == [
        ("CREATE_TOPICS", "Token:http", "new")
    ]
    with capture_logs() as lines:
        assert (await send(broker, "DELETE", f"{TOPICS}/new", "nobody"))[0] == 403
    denials = [line for line in lines if "denied" in line["event"]]
    assert [(line["principal"], line["resource"]) for line in denials] == [("User:nobody", "new")]


# --- topics ---------------------------------------------------------------------------------------


async def test_a_topic_is_created_described_changed_and_deleted(broker: Broker) -> None:
    body = '{"name": "new", "partitions": 3, "settings": {"cleanup.policy": "compact"}}'
    only = body.replace("{", '{"validate_only": true, ', 1)
    assert await send(broker, "POST", TOPICS, json=only) == (200, {"name": "new", "valid": True})
    assert "new" not in broker.topics
    status, created = await send(broker, "POST", TOPICS, json=body)
    assert (status, created["partitions"]) == (201, 3)
    assert created["topic_id"] == encode_topic_id(broker.topics.existing("new").topic_id)
    path = f"{TOPICS}/new"
    change = '{"set": {"retention.ms": 7000}, "unset": ["cleanup.policy"], "partitions": 4}'
    status, changed = await send(broker, "PATCH", path, json=change)
    assert (status, changed["partitions"]) == (200, 4)
    config = broker.topics.existing("new").config
    assert (config.retention_ms, config.cleanup_policy) == (7000, ("delete",))
    assert await send(broker, "DELETE", path) == (200, {"name": "new", "deleted": True})
    assert "new" not in broker.topics


async def test_a_setting_has_its_source_default_and_help(broker: Broker) -> None:
    row = (await find_state(broker))["retention.ms"]
    assert (row["value"], row["default"], row["source"]) == ("604800000", "604800000", "default")
    assert (row["type"], row["unit"], row["minimum"]) == ("long", "ms", -1)
    assert "older than this" in row["text"]
    status, _ = await send(broker, "PATCH", ORDERS, json='{"set": {"retention.ms": "5 ms"}}')
    assert status == 200
    row = (await find_state(broker))["retention.ms"]
    assert (row["value"], row["default"], row["source"]) == ("5", "604800000", "dynamic_topic")
    policy = (await find_state(broker))["cleanup.policy"]
    assert (policy["choices"], policy["source"]) == (["compact", "delete"], "static_broker")


async def test_a_wrong_unit_is_refused_with_the_units_that_there_are(broker: Broker) -> None:
    for name, value, expected in (
        ("retention.ms", "7dd", "expected milliseconds such as 60000, or with a unit: ms, s, min"),
        ("retention.bytes", "1 GB", "expected a size such as 67108864 or 64MiB"),
    ):
        settings = {"cleanup.policy": "compact", name: value}
        for method, path, body in (
            ("PATCH", ORDERS, {"set": settings}),
            ("POST", TOPICS, {"name": "new", "settings": settings}),
        ):
            status, answer = await send(broker, method, path, json=json.dumps(body))
            assert (status, answer["detail"].startswith(f"{name}: {expected}")) == (422, True), (
                answer
            )


async def test_an_unknown_setting_to_remove_is_refused_with_a_suggestion(broker: Broker) -> None:
    status, answer = await send(broker, "PATCH", ORDERS, json='{"unset": ["segment.mss"]}')
    assert (status, "did you mean segment.ms?" in answer["detail"]) == (422, True), answer


async def test_a_change_of_what_somebody_else_changed_names_the_changes(broker: Broker) -> None:
    headers = {"Content-Type": "application/json", "Authorization": basic("owner")}
    etag = (await ask(broker, "GET", ORDERS, **headers)).headers["ETag"]
    change = '{"set": {"retention.ms": "5"}}'
    match = {"If-Match": etag}
    assert (await send(broker, "PATCH", ORDERS, json=change, **match))[0] == 200
    status, answer = await send(broker, "PATCH", ORDERS, json=change, **match)
    assert status == 412
    assert answer["detail"] == (
        "orders has changed since you read it: retention.ms is 5, was 604800000. "
        "Read it again, then repeat"
    )
    status, answer = await send(broker, "PATCH", ORDERS, json=change, **{"If-Match": '"unknown"'})
    assert (status, "has changed since you read it. Read" in answer["detail"]) == (412, True)


async def test_one_of_two_changes_at_once_with_the_same_etag_is_refused(broker: Broker) -> None:
    headers = {"Content-Type": "application/json", "Authorization": basic("owner")}
    etag = (await ask(broker, "GET", ORDERS, **headers)).headers["ETag"]
    changes = (
        send(broker, "PATCH", ORDERS, json=body, **{"If-Match": etag})
        for body in ('{"set": {"retention.ms": "5"}}', '{"set": {"retention.bytes": "6"}}')
    )
    answers = await asyncio.gather(*changes)
    assert sorted(status for status, _ in answers) == [200, 412]


@pytest.mark.parametrize("body", ['{"set": {"retention.ms": "6"}}', '{"partitions": 3}', "{}"])
async def test_who_may_not_change_a_topic_does_not_wait_for_those_who_may(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def alter_slowly(*_: object, **__: object) -> None:
        begun.set()
        await may_end.wait()

    monkeypatch.setattr(TopicChanges, "_alter_settings", alter_slowly)
    change = asyncio.create_task(
        send(broker, "PATCH", ORDERS, json='{"set": {"retention.ms": "5"}}')
    )
    try:
        await begun.wait()
        status, answer = await send(broker, "PATCH", ORDERS, "nobody", body)
        assert (status, answer["detail"].startswith("User:nobody needs ")) == (403, True)
    finally:
        may_end.set()
    assert (await change)[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", TOPICS, {"name": "new", "settings": LONG_SETTINGS}),
        ("PATCH", ORDERS, {"set": LONG_SETTINGS}),
    ],
)
async def test_settings_that_take_more_bytes_than_a_topic_may_have_are_refused(
    broker: Broker, method: str, path: str, body: dict[str, Any]
) -> None:
    status, answer = await send(broker, method, path, json=json.dumps(body))
    assert status == 422
    assert answer["detail"].endswith(f"at most 4096 are allowed: shorten {HEADER}")


async def test_an_owner_needs_a_right_on_the_cluster_to_have_a_topic_cleaned_by_spark(
    broker: Broker,
) -> None:
    spark = '{"set": {"varve.cleaner.engine": "spark"}}'
    new = '{"name": "new", "settings": {"varve.cleaner.engine": "spark"}}'
    for method, path, body in (("PATCH", ORDERS, spark), ("POST", TOPICS, new)):
        status, answer = await send(broker, method, path, json=body)
        assert (status, answer["detail"]) == (
            422,
            "varve.cleaner.engine=spark needs ALTER_CONFIGS on the cluster",
        )
    token = {"Authorization": "Bearer 0123456789abcdef"}
    assert (await send(broker, "PATCH", ORDERS, json=spark, **token))[0] == 200
    owner = PrincipalClient(broker, "owner")
    present = [
        m.AlterConfigsRequestConfig(name=name, value=value)
        for name, value in (("varve.cleaner.engine", "spark"), ("retention.ms", "5"))
    ]
    resource = m.AlterConfigsRequestResource(
        resource_type=2, resource_name="orders", configs=present
    )
    request = m.AlterConfigsRequest(resources=[resource])
    (row,) = (await owner.request(ApiKey.ALTER_CONFIGS, 2, request)).responses
    assert row.error_code == ErrorCode.NONE, "it stays what an operator has set"


async def test_nothing_changes_if_a_part_of_a_change_is_invalid(broker: Broker) -> None:
    for body in (
        '{"set": {"retention.ms": "5"}, "partitions": 1}',
        '{"set": {"retention.ms": "x"}, "partitions": 5}',
    ):
        status, _ = await send(broker, "PATCH", ORDERS, json=body)
        assert status == 422
    topic = broker.topics.existing("orders")
    assert (topic.partition_count, topic.config.retention_ms) == (2, 604_800_000)
    valid = '{"set": {"retention.ms": "5"}, "partitions": 5, "validate_only": true}'
    assert (await send(broker, "PATCH", ORDERS, json=valid))[0] == 200
    assert broker.topics.existing("orders").partition_count == 2


async def test_a_topic_that_was_created_again_is_not_deleted(broker: Broker) -> None:
    before = encode_topic_id(broker.topics.existing("orders").topic_id)
    other = encode_topic_id(broker.topics.existing("other").topic_id)
    assert (await send(broker, "DELETE", f"{ORDERS}?topic_id={other}"))[0] == 409
    assert (await send(broker, "DELETE", f"{ORDERS}?topic_id=short"))[0] == 400
    assert (await send(broker, "DELETE", ORDERS))[0] == 200
    assert (await send(broker, "DELETE", f"{ORDERS}?topic_id={before}"))[0] == 404
    assert (await send(broker, "POST", TOPICS, json='{"name": "orders"}'))[0] == 201
    status, answer = await send(broker, "DELETE", f"{ORDERS}?topic_id={before}")
    assert (status, answer["detail"]) == (
        409,
        "orders was deleted and created again since you read it",
    )
    assert "orders" in broker.topics


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{}", "name is missing"),
        ('{"name": 5}', "name: expected a string"),
        ('{"name": "t", "partitions": true}', "partitions: expected a whole number"),
        ('{"name": "t", "settings": {"a": null}}', "a: expected a string, a number"),
        ('{"name": "t", "size": 1}', "unknown key 'size'"),
        ("[]", "expected a JSON object"),
    ],
)
async def test_a_malformed_body_is_refused_in_words(broker: Broker, body: str, words: str) -> None:
    status, answer = await send(broker, "POST", TOPICS, json=body)
    assert (status, words in answer["detail"]) == (400, True), answer


async def test_a_page_of_another_site_changes_nothing(broker: Broker) -> None:
    for method, path in (("POST", TOPICS), ("PATCH", ORDERS), ("DELETE", ORDERS)):
        evil = {"Origin": "http://evil.example"}
        assert (await send(broker, method, path, json='{"name": "t"}', **evil))[0] == 403
        form = {"Content-Type": "text/plain"}
        assert (await send(broker, method, path, json='{"name": "t"}', **form))[0] == 415
    assert len(broker.topics) == 2


async def test_a_quota_of_topic_changes_is_an_answer_with_the_time_to_wait(
    broker: Broker,
) -> None:
    token = {"Authorization": "Bearer 0123456789abcdef"}
    entity = [m.AlterClientQuotasRequestEntity(entity_type="user", entity_name=None)]
    op = m.AlterClientQuotasRequestOp(key="controller_mutation_rate", value=0.1, remove=False)
    entry = m.AlterClientQuotasRequestEntry(entity=entity, ops=[op])
    broker._services.authorizer = Authorizer()
    client = PrincipalClient(broker, "anybody")
    await client.request(ApiKey.ALTER_CLIENT_QUOTAS, 1, m.AlterClientQuotasRequest(entries=[entry]))
    statuses = [
        (await send(broker, "POST", TOPICS, json=f'{{"name": "t{number}"}}', **token))[0]
        for number in range(3)
    ]
    assert statuses[0] == 201
    assert statuses[-1] == 429


# --- groups ---------------------------------------------------------------------------------------


async def commit(broker: Broker, offset: int) -> None:
    client = PrincipalClient(broker, "owner")
    find = m.FindCoordinatorRequest(coordinator_keys=["readers"])
    await client.request(ApiKey.FIND_COORDINATOR, 4, find)
    row = m.OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    body = m.OffsetCommitRequest(group_id="readers", generation_id_or_member_epoch=-1)
    body.topics = [m.OffsetCommitRequestTopic(name="orders", partitions=[row])]
    answer = await client.request(ApiKey.OFFSET_COMMIT, 8, body)
    assert answer.topics[0].partitions[0].error_code == 0


async def test_a_group_has_its_offsets_and_lag_and_is_deleted(broker: Broker) -> None:
    assert (await send(broker, "GET", READERS))[0] in (404, 503)
    fill(broker, 5)
    await commit(broker, 2)
    status, group = await send(broker, "GET", READERS)
    assert (status, group["state"], group["type"], group["members"]) == (
        200,
        "Empty",
        "classic",
        [],
    )
    assert group["offsets"] == [
        {
            "topic": "orders",
            "partition": 0,
            "committed_offset": 2,
            "end_offset": 5,
            "lag": 3,
            "member_id": None,
        }
    ]
    assert (await send(broker, "GET", READERS, "nobody"))[0] == 403
    assert (await send(broker, "DELETE", READERS, "viewer"))[0] == 403
    assert (await send(broker, "DELETE", READERS))[0] == 200
    assert (await send(broker, "GET", READERS))[0] == 404


async def join(broker: Broker, assignment: bytes) -> None:
    """Join `readers` as its leader, which assigns this to itself."""
    client = PrincipalClient(broker, "owner")
    protocol = m.JoinGroupRequestProtocol(name="range", metadata=b"")
    body = m.JoinGroupRequest(
        group_id="readers",
        session_timeout_ms=30_000,
        rebalance_timeout_ms=30_000,
        protocol_type="consumer",
        protocols=[protocol],
    )
    joined = await client.request(ApiKey.JOIN_GROUP, 3, body)
    assert joined.error_code == 0
    member = joined.member_id
    row = m.SyncGroupRequestAssignment(member_id=member, assignment=assignment)
    sync = m.SyncGroupRequest(group_id="readers", generation_id=joined.generation_id)
    sync.member_id, sync.assignments = member, [row]
    assert (await client.request(ApiKey.SYNC_GROUP, 3, sync)).error_code == 0


async def test_an_assignment_shows_only_partitions_that_its_reader_may_describe(
    broker: Broker,
) -> None:
    fill(broker, 5)
    await commit(broker, 2)
    written = {"orders": [0, 1, 1, 2, -1], "other": [0], "none": list(range(1000))}
    written["other.compacted"] = [0]
    await join(broker, run_at_once(encode_assignment_sliced(0, written)))
    _, group = await send(broker, "GET", READERS)
    rows = [(row["topic"], row["partition"], row["end_offset"]) for row in group["offsets"]]
    assert rows == [("orders", 0, 5), ("orders", 1, 0)]
    (member,) = group["members"]
    assert (member["topics"], member["partitions"]) == (["orders"], 2)
    _, group = await send(broker, "GET", READERS, "viewer")
    topics = [row["topic"] for row in group["offsets"]]
    assert topics == ["orders", "orders", "other", "other.compacted"]


async def test_a_description_of_a_group_is_made_in_turns(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader of a classic group writes the assignments, with any names."""
    meter = LoopMeter(CLOCK_RATE)
    names = {f"none-{number}": [0] for number in range(MANY)}
    await commit(broker, 2)
    await join(broker, run_at_once(encode_assignment_sliced(0, names)))
    with meter.measuring(monkeypatch):
        status, group = await send(broker, "GET", READERS)
    assert (status, group["members"][0]["topics"]) == (200, [])
    assert meter.lines > 3 * LINES_PER_TURN_MAX
    assert meter.longest_turn < LINES_PER_TURN_MAX


@pytest.mark.parametrize(
    ("to", "after"),
    [
        ('"earliest"', [0, 0]),
        ('"latest"', [5, 0]),
        ("3", [3, 0]),
        ("99", [5, 0]),
        ('"1970-01-01T00:00:00Z"', [0, 0]),
        ('"2999-01-01T00:00:00"', [5, 0]),
    ],
)
async def test_offsets_are_previewed_then_reset(broker: Broker, to: str, after: list[int]) -> None:
    fill(broker, 5)
    await commit(broker, 2)
    body = f'{{"topic": "orders", "to": {to}, "dry_run": true}}'
    with capture_logs() as lines:
        status, preview = await send(broker, "POST", f"{READERS}/offsets", json=body)
    assert status == 200, preview
    assert not [line for line in lines if line["event"] == "administrative change"]
    assert [(row["before"], row["after"]) for row in preview["partitions"]] == [
        (2, after[0]),
        (None, after[1]),
    ]
    _, group = await send(broker, "GET", READERS)
    assert group["offsets"][0]["committed_offset"] == 2
    body = body.replace("true", "false")
    status, done = await send(broker, "POST", f"{READERS}/offsets", json=body)
    assert (status, done["partitions"]) == (200, preview["partitions"])
    _, group = await send(broker, "GET", READERS)
    assert [row["committed_offset"] for row in group["offsets"]] == after


async def test_offsets_are_not_reset_without_permission_or_sense(broker: Broker) -> None:
    fill(broker, 5)
    await commit(broker, 2)
    path = f"{READERS}/offsets"
    reset = '{"topic": "orders", "to": "latest"}'
    for user, body, expected in (
        ("viewer", reset, 403),
        ("nobody", reset, 403),
        ("owner", '{"topic": "orders", "to": "soon"}', 400),
        ("owner", '{"topic": "orders", "to": "11111111111111111111"}', 400),
        ("owner", '{"topic": "orders", "to": "11111111-1111111111"}', 400),
        ("owner", '{"topic": "orders"}', 400),
        ("owner", '{"topic": "orders", "to": 0, "partition": 9}', 404),
        ("owner", '{"topic": "orders", "to": 0, "partition": -1}', 400),
        ("owner", '{"topic": "other", "to": 0}', 403),
    ):
        status, answer = await send(broker, "POST", path, user, body)
        assert status == expected, (user, body, answer)
    _, group = await send(broker, "GET", READERS)
    assert group["offsets"][0]["committed_offset"] == 2


# --- the audit log --------------------------------------------------------------------------------


async def test_the_last_audit_events_are_for_who_may_alter_the_cluster(broker: Broker) -> None:
    recent_audit_events.add({"event": "operation denied", "principal": "User:a", "operation": "X"})
    recent_audit_events.add(
        {
            "timestamp": "2026-11-01T00:00:00Z",
            "event": "administrative change",
            "principal": "User:b",
            "change": "CREATE_TOPICS",
            "resource": "parcels",
            "partitions": 3,
        }
    )
    for user in ("viewer", "nobody"):
        status, answer = await send(broker, "GET", "/api/v1/audit", user)
        assert (status, answer["detail"]) == (403, f"User:{user} needs ALTER on the cluster")
    token = {"Authorization": "Bearer 0123456789abcdef"}
    status, answer = await send(broker, "GET", "/api/v1/audit?limit=1", **token)
    assert status == 200
    (event,) = answer["events"]
    assert (event["action"], event["resource"]) == ("CREATE_TOPICS", "parcels")
    assert event["details"] == {"partitions": 3}
    path = f"/api/v1/audit?limit=1&after={answer['next']}"
    status, answer = await send(broker, "GET", path, **token)
    assert (answer["events"][0]["principal"], answer["events"][0]["action"]) == ("User:a", "X")
    status, answer = await send(broker, "GET", "/api/v1/audit?contains=PARCELS", **token)
    assert [row["principal"] for row in answer["events"]] == ["User:b"]


async def test_the_audit_event_of_an_acl_names_the_operation_that_it_allows(
    broker: Broker,
) -> None:
    added = {"event": "administrative change", "change": "CREATE_ACLS", "operation": "READ"}
    recent_audit_events.add(added)
    token = {"Authorization": "Bearer 0123456789abcdef"}
    _, answer = await send(broker, "GET", "/api/v1/audit?limit=1", **token)
    (event,) = answer["events"]
    assert (event["action"], event["details"]) == ("CREATE_ACLS", {"operation": "READ"})


async def test_a_topic_id_tells_nothing_of_topics_that_the_sender_may_not_describe(
    broker: Broker,
) -> None:
    known = encode_topic_id(broker.topics.existing("other").topic_id)
    paths = [
        f"{TOPICS}/{name}?topic_id={topic_id}"
        for name in ("other", "missing")
        for topic_id in (known, encode_topic_id(bytes(range(16))))
    ]
    answers = [await send(broker, "DELETE", path, "nobody") for path in paths]
    assert {status for status, _ in answers} == {403}


# --- quotas ---------------------------------------------------------------------------------------


RECORDS = f"{ORDERS}/partitions/0/records"


@pytest.mark.parametrize("quota", ["producer_byte_rate", "consumer_byte_rate"])
async def test_a_user_over_a_byte_quota_is_refused_until_it_is_met_again(
    broker: Broker, quota: str
) -> None:
    fill(broker, 100)
    broker.quotas.update({(("user", "owner"),): {quota: 1.0}})

    async def ask_once(user: str) -> tuple[int, Any]:
        if quota == "producer_byte_rate":
            return await send(broker, "POST", RECORDS, user, '{"key": "k", "value": "v"}')
        return await send(broker, "GET", f"{RECORDS}?from=earliest", user)

    assert (await ask_once("owner"))[0] in {200, 201}
    with capture_logs() as lines:
        status, answer = await ask_once("owner")
    assert status == 429
    assert not [line for line in lines if "change" in line], "nothing changed: not for the audit"
    assert "quota" in answer["detail"]
    assert (await send(broker, "GET", ORDERS))[0] == 429, "every request of the user"
    assert (await send(broker, "GET", ORDERS, "viewer"))[0] == 200


async def test_pages_that_a_user_requests_at_the_same_time_count_together(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(broker, 100)
    limit, pages = 1.0, 4
    broker.quotas.update({(("user", "owner"),): {"consumer_byte_rate": limit}})
    scanned, all_wait = list[int](), asyncio.Barrier(pages)
    read_page = RecordReader.read_page

    async def read_together(self: RecordReader, *arguments: Any) -> Any:
        await all_wait.wait()
        page = await read_page(self, *arguments)
        scanned.append(page.scanned_bytes)
        return page

    monkeypatch.setattr(RecordReader, "read_page", read_together)
    answers = await asyncio.gather(*(send(broker, "GET", RECORDS) for _ in range(pages)))
    assert [status for status, _ in answers] == [200] * pages
    status, answer = await send(broker, "GET", RECORDS)
    assert status == 429
    seconds = float(answer["detail"].rpartition(" in ")[2].removesuffix(" s"))
    assert seconds > 0.9 * sum(scanned) / limit


async def test_the_time_of_every_http_request_counts_for_the_quota_of_its_user(
    broker: Broker,
) -> None:
    fill(broker, 100)
    broker.quotas.update({(("user", "owner"),): {"request_percentage": 1e-6}})
    segments = f"{ORDERS}/partitions/0/segments"
    assert [(await send(broker, "GET", segments))[0] for _ in range(2)] == [200, 429]
    assert (await send(broker, "GET", segments, "viewer"))[0] == 200


async def test_a_token_that_may_do_everything_is_not_limited_by_request_time(
    broker: Broker,
) -> None:
    token = "t" * 16
    broker.http.server.authentication.tokens = (token.encode(),)
    broker.quotas.update({(("user", None),): {"request_percentage": 1e-6}})
    bearer = {"Authorization": f"Bearer {token}"}
    assert [(await send(broker, "GET", "/metrics", **bearer))[0] for _ in range(3)] == [200] * 3


async def test_a_user_with_the_name_of_the_token_does_not_lock_it_out(tmp_path: Path) -> None:
    token = "t" * 16
    bearer = {"Authorization": f"Bearer {token}"}
    async with broker_with_users(tmp_path, ("http",), lambda *_: True, seed=1) as broker:
        broker.http.server.authentication.tokens = (token.encode(),)
        broker.quotas.update({(("user", None),): {"request_percentage": 1e-6}})
        assert [(await send(broker, "GET", TOPICS, "http"))[0] for _ in range(2)] == [200, 429]
        for _ in range(2):  # the second time after a handler of Kafka's protocol
            assert (await send(broker, "GET", f"{TOPICS}/none", **bearer))[0] == 404
