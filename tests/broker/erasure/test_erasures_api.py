"""Who may request, see and cancel erasures, and that no key gets into the audit log."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.http.api.compaction.erasures import ROOT
from tests.support.broker.http_users import OWNERS, broker_with_users, owner_rule, send

PATH = ROOT.format(topic="orders")
TOPICS = {
    "orders": {"keys": {"cleanup.policy": "compact"}},
    "other": {"keys": {"cleanup.policy": "compact"}},
}
KEY = "ada@example.org"
BODY = json.dumps({"key": KEY})


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with broker_with_users(tmp_path, OWNERS, owner_rule, seed=5, topics=TOPICS) as broker:
        yield broker


@pytest.mark.parametrize(
    ("user", "path", "body", "status"),
    [
        ("owner", PATH, BODY, 201),
        ("viewer", PATH, BODY, 403),
        ("nobody", PATH, BODY, 403),
        ("owner", ROOT.format(topic="other"), BODY, 403),
        ("owner", PATH, json.dumps({"key": KEY, "unknown": 1}), 400),
        ("owner", PATH, json.dumps({"key": KEY, "partitions": [7]}), 400),
        ("owner", PATH, json.dumps({"kye": KEY}), 400),
        ("owner", f"{PATH}?key={KEY}", "{}", 400),
        ("owner", PATH, f'{{"key": "{KEY}', 400),
        ("owner", ROOT.format(topic="new"), BODY, 404),
    ],
)
async def test_a_request_needs_write_and_never_leaves_the_key_in_the_log(
    broker: Broker, user: str, path: str, body: str, status: int
) -> None:
    with capture_logs() as lines:
        answer = await send(broker, "POST", path, user, json=body)
    assert answer[0] == status, answer
    assert KEY not in str(lines)
    changes = [line for line in lines if line["event"] == "administrative change"]
    assert len(changes) == (status == 201)
    failures = [line for line in lines if line["event"] == "administrative change failed"]
    assert len(failures) == (status in (400, 404))
    denials = [line for line in lines if "denied" in line["event"]]
    assert len(denials) == (status == 403)


async def test_a_viewer_sees_erasures_and_cannot_cancel_them(broker: Broker) -> None:
    _, erasure = await send(broker, "POST", PATH, json=BODY)
    one = f"{PATH}/{erasure['id']}"
    seen: list[tuple[int, Any]] = [
        await send(broker, "GET", path, "viewer") for path in (PATH, one)
    ]
    assert [status for status, _ in seen] == [200, 200]
    assert KEY not in str(seen)
    assert (await send(broker, "GET", one, "nobody"))[0] == 403
    assert (await send(broker, "DELETE", one, "viewer"))[0] == 403
    with capture_logs() as lines:
        status, answer = await send(broker, "DELETE", one)
    assert (status, answer["state"]) == (200, "cancelled")
    assert answer["reason"] == "User:owner cancelled it"
    assert [line["event"] for line in lines].count("administrative change") == 2


async def test_an_erasure_is_found_only_below_its_topic(broker: Broker) -> None:
    _, erasure = await send(broker, "POST", PATH, json=BODY)
    status, answer = await send(broker, "GET", f"{ROOT.format(topic='new')}/{erasure['id']}")
    assert (status, answer["detail"]) == (404, f"topic new has no erasure {erasure['id']}")
