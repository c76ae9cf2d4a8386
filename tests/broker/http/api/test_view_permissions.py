"""The name of a compacted view over HTTP: no other permissions than those of its topic."""

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from broker.app import Broker
from broker.security.authorizer import Operation, ResourceType
from tests.support.broker.http_users import broker_with_users, send

VIEW = "orders.compacted"
TOPICS = {"orders": {"keys": {"varve.view": "compacted"}}}
DENIED = ("all-but-the-topic", "only-the-view")


def rule(user: str, operation: Operation, kind: ResourceType, name: str) -> bool:
    is_permitted = {
        "all-but-the-topic": name != "orders",
        "only-the-view": name == VIEW,
        "only-the-topic": name == "orders",
    }
    return kind is ResourceType.TOPIC and is_permitted[user]


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    users = (*DENIED, "only-the-topic")
    async with broker_with_users(tmp_path, users, rule, seed=7, topics=TOPICS) as broker:
        yield broker


def requests(broker: Broker) -> Iterator[tuple[str, str]]:
    """Method and path of each route about one topic, with the name of the view."""
    values = {"topic": VIEW, "partition": "0"}
    for route in broker.http.server.application.router.routes():
        pattern = "" if route.resource is None else route.resource.canonical
        if "{topic}" in pattern and route.method != "HEAD":
            path = re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], "1"), pattern)
            yield route.method, path


async def test_what_is_denied_for_a_topic_is_denied_for_its_view_on_every_route(
    broker: Broker,
) -> None:
    table = list(requests(broker))
    assert len(table) > 25
    for method, path in table:
        json = "" if method == "GET" else "{}"
        for user in DENIED:
            status, answer = await send(broker, method, path, user, json)
            assert status == 403, (user, method, path, answer)


async def test_what_is_allowed_for_a_topic_is_allowed_for_its_view_on_every_route(
    broker: Broker,
) -> None:
    denied = []
    for method, path in requests(broker):
        if path.endswith("/events"):  # a stream without an end
            continue
        json = "" if method == "GET" else "{}"
        status, answer = await send(broker, method, path, "only-the-topic", json)
        if status == 403 and not answer["detail"].endswith("on the cluster"):
            denied.append((method, path))
    assert denied == [("POST", f"/api/v1/topics/{VIEW}/partitions/0/records")]  # it is read only


async def test_a_page_of_a_view_needs_read_on_its_topic(broker: Broker) -> None:
    path = f"/api/v1/topics/{VIEW}/partitions/0/records"
    status, page = await send(broker, "GET", path, "only-the-topic")
    assert (status, page["records"]) == (200, [])
    for user in DENIED:
        status, answer = await send(broker, "GET", path, user)
        assert (status, answer["detail"]) == (403, f"User:{user} needs READ on the topic")
