"""Users and access control lists changed over HTTP, by the handlers of the Kafka protocol."""

from collections.abc import AsyncIterator, Mapping
from json import dumps
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.http.api.kafka import users
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import basic, call_api
from tests.support.broker.http_users import sasl_users
from tests.support.storage.memory_env import MemoryEnv

USERS = "/api/v1/users"
ACLS = "/api/v1/acls"
ENTRY = {
    "principal": "User:ada",
    "host": "*",
    "permission": "allow",
    "operation": "describe_configs",
    "resource_type": "topic",
    "pattern_type": "prefixed",
    "resource_name": "orders-",
}


@pytest.fixture
async def broker(tmp_path: Any) -> AsyncIterator[Broker]:
    async with broker_in_memory(
        MemoryEnv(seed=31),
        http_users=True,
        sasl=sasl_users(tmp_path, ("boss", "nobody")),
        authorization={"enabled": True, "super_users": ["User:boss"]},
    ) as broker:
        yield broker


async def send(
    broker: Broker, method: str, path: str, json: str = "", *, user: str = "boss"
) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "Authorization": basic(user)}
    return await call_api(broker, method, path, json.encode() or None, **headers)


def path_of(entry: Mapping[str, str]) -> str:
    return f"{ACLS}?{urlencode(entry)}"


async def test_a_created_user_signs_in_until_it_is_deleted(broker: Broker) -> None:
    body = '{"password": "correct horse", "mechanism": "SCRAM-SHA-256"}'
    with capture_logs() as lines:
        status, _ = await send(broker, "PUT", f"{USERS}/ada", body)
    assert status == 200
    assert "correct horse" not in str(lines)
    (change,) = [line for line in lines if line["event"] == "administrative change"]
    assert (change["change"], change["principal"]) == (
        "ALTER_USER_SCRAM_CREDENTIALS", "User:boss",
    )  # fmt: skip
    assert await broker.authentication.credentials.check_password("ada", "correct horse")
    assert (await send(broker, "PUT", f"{USERS}/ada", '{"password": "other"}'))[0] == 200
    _, answer = await send(broker, "GET", USERS)
    (user,) = answer["users"]
    assert [row["mechanism"] for row in user["mechanisms"]] == ["SCRAM-SHA-256", "SCRAM-SHA-512"]
    status, deleted = await send(broker, "DELETE", f"{USERS}/ada?mechanism=SCRAM-SHA-256")
    assert deleted == {"user": "ada", "deleted": ["SCRAM-SHA-256"]}
    assert (await send(broker, "DELETE", f"{USERS}/ada"))[0] == 200
    assert (await send(broker, "GET", USERS))[1] == {"users": [], "next": None}
    assert (await send(broker, "DELETE", f"{USERS}/ada"))[0] == 404


async def test_a_wrong_user_is_refused_in_words(broker: Broker) -> None:
    for name, body, status, text in (
        ("ada", "{}", 422, "password"),
        ("ada", '{"password": 5}', 400, "password"),
        ("ada", '{"password": "\\ud800"}', 400, "Unicode"),
        ("ada", '{"password": "x", "mechanism": "PLAIN"}', 400, "SCRAM-SHA-512"),
        ("boss", '{"password": "x"}', 422, "settings file"),
    ):
        answer = await send(broker, "PUT", f"{USERS}/{name}", body)
        assert (answer[0], text in answer[1]["detail"]) == (status, True), answer


async def test_a_password_under_another_name_is_in_no_log(broker: Broker) -> None:
    for body in ('{"passwort": "hunter2"}', '{"password": "x", "pwd": "hunter2"}', '"hunter2"'):
        with capture_logs() as lines:
            assert (await send(broker, "PUT", f"{USERS}/ada", body))[0] == 400
        assert [line["event"] for line in lines] == ["administrative change failed"]
        assert "hunter2" not in str(lines)


async def test_users_come_a_page_at_a_time(broker: Broker) -> None:
    for name in ("ada", "bob", "cy"):
        await send(broker, "PUT", f"{USERS}/{name}", '{"password": "x"}')
    _, first = await send(broker, "GET", f"{USERS}?limit=2")
    _, rest = await send(broker, "GET", f"{USERS}?limit=2&after={first['next']}")
    assert [row["user"] for row in first["users"] + rest["users"]] == ["ada", "bob", "cy"]
    assert rest["next"] is None


async def test_an_entry_is_added_listed_and_removed(broker: Broker) -> None:
    as_json = str(ENTRY).replace("'", '"')
    assert await send(broker, "POST", ACLS, as_json) == (201, ENTRY)
    assert await send(broker, "GET", ACLS) == (200, {"acls": [ENTRY], "next": None})
    assert (await send(broker, "GET", f"{ACLS}?contains=other"))[1]["acls"] == []
    other = {**ENTRY, "operation": "read"}
    assert (await send(broker, "DELETE", path_of(other)))[0] == 404
    with capture_logs() as lines:
        assert (await send(broker, "DELETE", path_of(ENTRY)))[0] == 200
    assert [line["change"] for line in lines if "change" in line] == ["DELETE_ACLS"]
    assert (await send(broker, "GET", ACLS))[1]["acls"] == []


async def test_a_page_of_entries_misses_none_when_another_one_goes(broker: Broker) -> None:
    names = ("ada", "bob", "cy")
    entries = [{**ENTRY, "principal": f"User:{name}"} for name in names]
    for entry in entries:
        assert (await send(broker, "POST", ACLS, dumps(entry)))[0] == 201
    _, first = await send(broker, "GET", f"{ACLS}?limit=2")
    assert (await send(broker, "DELETE", path_of(entries[0])))[0] == 200
    after = quote(first["next"])
    _, rest = await send(broker, "GET", f"{ACLS}?limit=2&after={after}")
    assert (first["acls"] + rest["acls"], rest["next"]) == (entries, None)
    for wrong in ("2", "[", "[" * 5000, '["a"]'):
        assert (await send(broker, "GET", f"{ACLS}?after={quote(wrong)}"))[0] == 400


async def test_a_removal_that_names_no_single_entry_is_refused(broker: Broker) -> None:
    await send(broker, "POST", ACLS, str(ENTRY).replace("'", '"'))
    for name in ENTRY:
        rest = {key: value for key, value in ENTRY.items() if key != name}
        assert (await send(broker, "DELETE", path_of(rest)))[0] == 400
    assert (await send(broker, "DELETE", path_of({**ENTRY, "operation": "any"})))[0] == 400
    assert len((await send(broker, "GET", ACLS))[1]["acls"]) == 1


async def test_an_entry_that_kafka_refuses_is_refused_with_its_words(broker: Broker) -> None:
    status, answer = await send(
        broker, "POST", ACLS, str({**ENTRY, "principal": "ada"}).replace("'", '"')
    )
    assert (status, "principal" in answer["detail"]) == (422, True)
    status, answer = await send(broker, "POST", ACLS, '{"operation": "READ"}')
    assert (status, "describe_configs" in answer["detail"]) == (400, True)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", USERS, ""),
        ("PUT", f"{USERS}/ada", '{"password": "x"}'),
        ("DELETE", f"{USERS}/ada?mechanism=SCRAM-SHA-256", ""),
        ("GET", ACLS, ""),
        ("POST", ACLS, str(ENTRY).replace("'", '"')),
        ("DELETE", path_of(ENTRY), ""),
    ],
)
async def test_only_who_administers_the_cluster_sees_and_changes_them(
    broker: Broker, method: str, path: str, body: str
) -> None:
    status, answer = await send(broker, method, path, body, user="nobody")
    assert status == 403
    assert answer["detail"].startswith("User:nobody needs ")


async def test_the_token_changes_the_entries_by_which_others_are_judged(broker: Broker) -> None:
    broker.http.server.authentication.tokens = (b"0123456789abcdef",)
    cluster = {**ENTRY, "principal": "User:nobody", "resource_type": "cluster"}
    cluster |= {"pattern_type": "literal", "resource_name": "kafka-cluster"}
    entry = str({**cluster, "operation": "describe"}).replace("'", '"').encode()
    token = {"Content-Type": "application/json", "Authorization": "Bearer 0123456789abcdef"}
    assert (await send(broker, "GET", USERS, user="nobody"))[0] == 403
    assert (await call_api(broker, "POST", ACLS, entry, **token))[0] == 201
    assert (await send(broker, "GET", USERS, user="nobody"))[0] == 200


async def test_without_access_control_the_answer_says_how_to_enable_it() -> None:
    async with broker_in_memory(MemoryEnv(seed=32)) as broker:
        status, answer = await call_api(broker, "GET", ACLS)
    assert (status, "authorization.enabled" in answer["detail"]) == (409, True)


async def test_no_password_is_salted_for_a_user_who_may_not_set_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Salting takes milliseconds of a thread that others need."""
    salted: list[str] = []
    monkeypatch.setattr(users, "salt_password", lambda _mechanism, text, _salt: salted.append(text))
    status, answer = await call_api(
        broker, "PUT", f"{USERS}/ada", b'{"password": "x"}', Authorization=basic("nobody")
    )
    assert (status, answer["detail"]) == (403, "User:nobody needs ALTER on the cluster")
    assert salted == []
