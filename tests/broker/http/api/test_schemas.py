"""The schemas of a registry: what is asked of it, kept, and refused."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from broker.http.api import schemas
from broker.http.api.requests import ApiError
from broker.http.api.schemas import FETCHES_MAX, fetch_schema
from config.security.secrets import SecretReference
from config.settings import SchemaRegistrySettings
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import call_api
from tests.support.broker.http_users import broker_with_users, send
from tests.support.schema_registry import FakeRegistry, add_avro, schema_registry
from tests.support.storage.memory_env import MemoryEnv

TOPICS = {"orders": {"keys": {"cleanup.policy": "compact"}}}
PATH = "/api/v1/topics/orders/schemas/{}"
SECONDS = 30


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with schema_registry() as registry:
        yield registry


def fetched(registry: FakeRegistry, number: int, **settings: Any) -> Any:
    return fetch_schema(SchemaRegistrySettings(url=registry.url, **settings), number)


async def test_a_schema_is_fetched_once(registry: FakeRegistry) -> None:
    add_avro(registry, 7, {"type": "string"})
    settings = {"schema_registry": {"url": registry.url}}
    async with broker_in_memory(MemoryEnv(seed=3), topics=TOPICS, **settings) as broker:
        for _ in range(2):
            status, answer = await call_api(broker, "GET", PATH.format(7))
            assert (status, answer["type"]) == (200, "AVRO")
            assert json.loads(answer["schemas"][0]) == {"type": "string"}
        assert registry.asked == ["/schemas/ids/7"]
        assert (await call_api(broker, "GET", PATH.format(8)))[0] == 404
        assert (await call_api(broker, "GET", PATH.format("x")))[0] == 400


async def test_a_client_that_waits_for_the_registry_leaves_threads_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, begun = threading.Event(), threading.Semaphore(0)

    def fetch(_settings: SchemaRegistrySettings, number: int) -> dict[str, Any]:
        if number < FETCHES_MAX:
            begun.release()
            answers.wait(SECONDS)
        return {"id": number, "type": "AVRO", "schemas": []}

    monkeypatch.setattr(schemas, "fetch_schema", fetch)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4 * FETCHES_MAX))
    registry = {"url": "http://127.0.0.1:1"}
    async with broker_with_users(
        tmp_path, ("ada", "bob"), lambda *_: True, seed=3, topics=TOPICS, schema_registry=registry
    ) as broker:
        paths = map(PATH.format, range(FETCHES_MAX))
        waiting = [asyncio.create_task(send(broker, "GET", path, "ada")) for path in paths]
        assert await asyncio.to_thread(begun.acquire, timeout=SECONDS)
        async with asyncio.timeout(SECONDS / 2):
            assert (await send(broker, "GET", PATH.format(FETCHES_MAX), "bob"))[0] == 200
        answers.set()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * FETCHES_MAX


async def test_without_a_registry_the_answer_says_so() -> None:
    async with broker_in_memory(MemoryEnv(seed=3), topics=TOPICS) as broker:
        status, answer = await call_api(broker, "GET", PATH.format(7))
    assert status == 409
    assert "schema_registry.url" in answer["detail"]


def test_an_avro_schema_with_references_is_resolved_by_the_registry(registry: FakeRegistry) -> None:
    registry.answers["/schemas/ids/1"] = {"schema": '"Name"', "references": [{"name": "Name"}]}
    registry.answers["/schemas/ids/1?format=resolved"] = {"schema": '"string"'}
    assert fetched(registry, 1)["schemas"] == ['"string"']


def test_the_files_that_a_protobuf_schema_imports_come_each_once(registry: FakeRegistry) -> None:
    money = {"name": "money.proto", "subject": "a/b", "version": 2}
    registry.answers |= {
        "/schemas/ids/1": {"schemaType": "PROTOBUF", "schema": "text"},
        "/schemas/ids/1?format=serialized": {"schema": "Zmlyc3Q=", "references": [money, money]},
        "/subjects/a%2Fb/versions/2?format=serialized": {"schema": "bW9uZXk="},
    }
    assert fetched(registry, 1) == {
        "id": 1,
        "type": "PROTOBUF",
        "schemas": ["Zmlyc3Q=", "bW9uZXk="],
    }


def test_imports_are_bounded(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "REFERENCES_MAX", 2)
    registry.answers["/schemas/ids/1"] = {"schemaType": "PROTOBUF", "schema": ""}
    rows = [{"subject": "s", "version": number} for number in range(3)]
    registry.answers["/schemas/ids/1?format=serialized"] = {"schema": "", "references": rows}
    for number in range(3):
        registry.answers[f"/subjects/s/versions/{number}?format=serialized"] = {"schema": ""}
    with pytest.raises(ApiError, match="more than 2 files"):
        fetched(registry, 1)


def test_a_schema_and_its_imports_are_bounded_together(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "SCHEMA_BYTES_MAX", 100)
    registry.answers |= {
        "/schemas/ids/1": {"schemaType": "PROTOBUF", "schema": ""},
        "/schemas/ids/1?format=serialized": {
            "schema": "a" * 30, "references": [{"subject": "s", "version": 1}],
        },
        "/subjects/s/versions/1?format=serialized": {"schema": "b" * 80},
    }  # fmt: skip
    with pytest.raises(ApiError, match="larger than 100 bytes with its imports"):
        fetched(registry, 1)


async def test_the_schemas_that_are_kept_are_bounded_by_their_bytes(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "CACHED_BYTES_MAX", 20)
    for number in (1, 2, 3):
        add_avro(registry, number, "string")  # 8 bytes
    settings = {"schema_registry": {"url": registry.url}}
    async with broker_in_memory(MemoryEnv(seed=3), topics=TOPICS, **settings) as broker:
        for number in (1, 2, 1, 3, 1, 2):
            assert (await call_api(broker, "GET", PATH.format(number)))[0] == 200
    assert registry.asked == [f"/schemas/ids/{number}" for number in (1, 2, 3, 2)]


@pytest.mark.parametrize(
    "answer",
    [
        *(500, None, "220 mail.example.org\r\n\r\n"),
        *(b"", b"<html>", b"[]", b"{}", {"schema": 7}),
        *(b"[" * 100_000, b" " * (schemas.SCHEMA_BYTES_MAX + 1)),
    ],
)
def test_what_is_no_answer_of_a_registry_is_a_bad_gateway(
    registry: FakeRegistry, answer: object
) -> None:
    registry.answers["/schemas/ids/1"] = answer
    registry.answers["/moved"] = {"schema": '"string"'}
    with pytest.raises(ApiError) as refused:
        fetched(registry, 1)
    assert refused.value.status == 502


@pytest.mark.parametrize(
    "rows", [[{}], [{"subject": "s"}], [{"subject": "s", "version": "x"}], [7], 7]
)
def test_references_that_make_no_sense_are_refused(registry: FakeRegistry, rows: object) -> None:
    registry.answers["/schemas/ids/1"] = {"schemaType": "PROTOBUF", "schema": ""}
    registry.answers["/schemas/ids/1?format=serialized"] = {"schema": "", "references": rows}
    with pytest.raises(ApiError) as refused:
        fetched(registry, 1)
    assert refused.value.status == 502


def test_credentials_are_sent(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "secret")
    add_avro(registry, 1, "string")
    fetched(registry, 1, user="ada", password=SecretReference("env", "REGISTRY_PASSWORD"))
    assert registry.authorization == ["Basic YWRhOnNlY3JldA=="]
