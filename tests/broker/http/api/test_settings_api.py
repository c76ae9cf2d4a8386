"""/api/v1/settings: what is in effect, who may change it, and the last reload."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.http.api.kafka import topic_changes
from config.settings_table import help_texts
from protocol.limits import SETTINGS_PER_RESOURCE_MAX
from tests.support.broker.broker_in_memory import broker_in_memory, broker_settings
from tests.support.broker.http_client import basic, call_api
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.storage.memory_env import MemoryEnv

PATH = "/api/v1/settings"
LINES_PER_TURN_MAX = 20_000
CLOCK_RATE = 10
CLEANER = {"enabled": False, "workers": 2}


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with broker_in_memory(MemoryEnv(seed=41), cleaner=CLEANER) as broker:
        yield broker


async def row_of(broker: Broker, name: str) -> dict[str, Any]:
    status, answer = await call_api(broker, "GET", PATH)
    assert status == 200
    (row,) = [row for row in answer["settings"] if row["name"] == name]
    return dict(row)


async def change(broker: Broker, body: str, **headers: str) -> tuple[int, Any]:
    named = {"Content-Type": "application/json", **headers}
    return await call_api(broker, "PATCH", PATH, body.encode(), **named)


async def test_a_change_is_in_effect_and_says_what_it_overrides(broker: Broker) -> None:
    row = await row_of(broker, "log.cleaner.threads")
    assert (row["value"], row["source"], row["read_only"]) == ("2", "static_broker", False)
    with capture_logs() as lines:
        status, _ = await change(broker, '{"set": {"log.cleaner.threads": 3}}')
    assert status == 200
    assert [line["change"] for line in lines if "change" in line] == ["INCREMENTAL_ALTER_CONFIGS"]
    assert broker.effective_settings.cleaner().workers == 3
    row = await row_of(broker, "log.cleaner.threads")
    assert (row["value"], row["default"], row["source"]) == ("3", "2", "dynamic_broker")
    assert (await change(broker, '{"unset": ["log.cleaner.threads"]}'))[0] == 200
    assert (await row_of(broker, "log.cleaner.threads"))["value"] == "2"


async def test_a_change_that_the_broker_refuses_says_why(broker: Broker) -> None:
    for body, text in (
        ('{"set": {"log.cleaner.threads": 0}}', "log.cleaner.threads"),
        ('{"set": {"listeners": "x"}}', "listeners"),
        ('{"set": {"no.such.setting": 1}}', "no.such.setting"),
    ):
        status, answer = await change(broker, body)
        assert (status, text in answer["detail"]) == (422, True), answer
    status, _ = await change(broker, '{"set": {"log.cleaner.threads": 9}, "validate_only": true}')
    assert status == 200
    assert (await row_of(broker, "log.cleaner.threads"))["value"] == "2"


async def test_the_settings_file_is_shown_with_help_and_without_secrets(tmp_path: Any) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cret:x")
    sasl = {"users": {"ada": {"file": str(secret)}}}
    async with broker_in_memory(MemoryEnv(seed=42), sasl=sasl, cleaner=CLEANER) as broker:
        _, answer = await call_api(broker, "GET", PATH)
    rows = {row["name"]: row for row in answer["file"]}
    workers = rows["cleaner.workers"]
    assert (workers["value"], workers["default"], workers["needs_restart"]) == ("2", "1", False)
    assert workers["text"].startswith("Number of worker processes")
    assert rows["listeners"]["needs_restart"]
    assert rows["sasl.users"]["value"] == "ada"
    assert "s3cret" not in str(answer)
    assert (answer["has_file"], answer["reload"]) == (False, None)


async def test_the_last_reload_is_shown() -> None:
    file = broker_settings(delete_topics=False, limits={"partitions": 9})
    broker = Broker(broker_settings(), MemoryEnv(seed=43), load=lambda: file)
    await broker.start()
    try:
        assert broker.reloader is not None
        await broker.reloader.reload()
        _, answer = await call_api(broker, "GET", PATH)
    finally:
        await broker.stop()
    last = answer["reload"]
    assert (last["failure"], last["changed"]) == (None, ["delete_topics"])
    assert last["needs_restart"] == ["limits.partitions"]


async def test_only_who_may_describe_configs_of_the_cluster_sees_them(tmp_path: Any) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cret:x")
    sasl = {"users": {"nobody": {"file": str(secret)}}, "failure_delay_ms": 10}
    async with broker_in_memory(
        MemoryEnv(seed=44),
        sasl=sasl,
        http_users=True,
        authorization={"enabled": True, "super_users": ["User:boss"]},
    ) as broker:
        credentials = {"Authorization": basic("nobody")}
        status, answer = await call_api(broker, "GET", PATH, **credentials)
        assert (status, answer["detail"]) == (
            403, "User:nobody needs DESCRIBE_CONFIGS on the cluster",
        )  # fmt: skip
        status, answer = await change(broker, '{"set": {"max.connections": 5}}', **credentials)
        assert (status, answer["detail"]) == (
            403, "User:nobody needs ALTER_CONFIGS on the cluster",
        )  # fmt: skip


async def test_the_answer_is_made_in_turns(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = LoopMeter(CLOCK_RATE)
    help_texts.cache_clear()
    with meter.measuring(monkeypatch):
        status, _ = await call_api(broker, "GET", PATH)
    assert status == 200
    assert meter.lines > LINES_PER_TURN_MAX
    assert meter.longest_turn < LINES_PER_TURN_MAX


async def test_more_settings_than_a_resource_can_have_are_refused_before_any_is_looked_at(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"name-{number}.ms" for number in range(SETTINGS_PER_RESOURCE_MAX + 1)]
    topics = "/api/v1/topics"
    requests: list[tuple[str, str, dict[str, Any]]] = [
        ("PATCH", PATH, {"set": dict.fromkeys(names, "1 h")}),
        ("PATCH", PATH, {"unset": names}),
        ("PATCH", f"{topics}/t", {"set": dict.fromkeys(names, "1 h")}),
        ("PATCH", f"{topics}/t", {"unset": names}),
        ("POST", topics, {"name": "t", "settings": dict.fromkeys(names, "1 h")}),
    ]
    monkeypatch.setattr(
        topic_changes, "parse_duration_ms", lambda _: pytest.fail("a value is read")
    )
    for method, path, body in requests:
        content, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        status, answer = await call_api(broker, method, path, content, **headers)
        reason = "1001 settings, at most 1000 are allowed"
        assert (status, answer["detail"]) == (400, reason), (method, path)
