"""Users and the token over HTTP: roles from permissions, wrong passwords, what stays open."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from structlog.testing import capture_logs

from broker.app import Broker
from broker.event_loop import client_presence
from broker.event_loop.loop_turns import UNAUTHENTICATED_ROUND_SECONDS
from broker.http.access import Guard
from broker.http.authentication import HttpAuthentication, Sender
from broker.security.authorizer import Authorizer, Operation, ResourceType
from broker.security.credentials import Credentials
from broker.security.failed_attempts import ATTEMPTS_AT_ONCE
from broker.security.sasl import Authentication
from config.address import Address
from config.settings import SaslSettings
from tests.support.broker import http_client
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import basic
from tests.support.broker.http_users import RuleAuthorizer, broker_with_users
from tests.support.identity_provider import AUDIENCE, ISSUER, IdentityProvider
from tests.support.storage.memory_env import MemoryEnv

TOKEN = "0123456789abcdef"
STATUS = "/api/v1/cleaner"
PARTITION = "/api/v1/cleaner/partitions/t/0"
PERMISSIONS = {
    ("viewer", Operation.DESCRIBE, ResourceType.CLUSTER, "kafka-cluster"),
    ("operator", Operation.DESCRIBE, ResourceType.CLUSTER, "kafka-cluster"),
    ("operator", Operation.ALTER, ResourceType.CLUSTER, "kafka-cluster"),
    ("owner", Operation.DESCRIBE, ResourceType.TOPIC, "t"),
    ("owner", Operation.ALTER, ResourceType.TOPIC, "t"),
}


def may(user: str, operation: Operation, kind: ResourceType, name: str) -> bool:
    return (user, operation, kind, name) in PERMISSIONS


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    users = ("viewer", "operator", "owner", "nobody")
    topics = {"t": {"keys": {"cleanup.policy": "compact"}}, "other": {}}
    async with broker_with_users(
        tmp_path, users, may, seed=1, token=TOKEN.encode(), topics=topics
    ) as broker:
        yield broker


async def ask(
    broker: Broker, path: str, authorization: str = "", method: str = "GET"
) -> tuple[int, str, list[str]]:
    """-> (status, text, challenges)"""
    headers = {"Authorization": authorization} if authorization else {}
    body = None if method == "GET" else b"{}"
    answer = await http_client.ask(broker, method, path, body, **headers)
    return answer.status, answer.text, answer.headers.get_all("WWW-Authenticate") or []


EVERYTHING = [
    ("GET", STATUS),
    ("GET", "/metrics"),
    ("GET", PARTITION),
    ("POST", f"{STATUS}/pause"),
    ("POST", f"{PARTITION}/pause"),
    ("POST", "/api/v1/log/partitions/t/0/truncate?to=0"),
    ("POST", f"{PARTITION}/transactions/1/abort"),
]


@pytest.mark.parametrize(
    ("sender", "allowed"),
    [
        ("viewer", EVERYTHING[:3]),
        ("operator", EVERYTHING),
        ("owner", [EVERYTHING[2], EVERYTHING[4]]),
        ("nobody", []),
        ("token", EVERYTHING),
    ],
)
async def test_permissions_of_the_cluster_and_of_topics_are_roles(
    broker: Broker, sender: str, allowed: list[tuple[str, str]]
) -> None:
    authorization = f"Bearer {TOKEN}" if sender == "token" else basic(sender)
    for method, path in EVERYTHING:
        status, text, _ = await ask(broker, path, authorization, method)
        assert (status != 403) == ((method, path) in allowed), (path, text)
        if status == 403:
            assert f"User:{sender} needs " in text
    status, text, _ = await ask(broker, STATUS, basic("nobody"))
    assert json.loads(text)["detail"] == "User:nobody needs DESCRIBE on the cluster"


@pytest.mark.parametrize("path", [f"{STATUS}/partitions", f"{STATUS}/history", "/api/v1/view"])
async def test_a_list_that_the_query_limits_to_one_topic_needs_the_permission_on_it_alone(
    broker: Broker, path: str
) -> None:
    for query, expected in (
        ("topic=t", 200),
        ("limit=5", 403),
        ("topic=other", 403),
        ("topic=t&topic=other", 403),
        ("topic=t&topic=t", 403),
        ("topic=", 403),
    ):
        status, text, _ = await ask(broker, f"{path}?{query}", basic("owner"))
        assert status == expected, (query, text)
    status, text, _ = await ask(broker, f"{path}?topic=t&topic=t", basic("viewer"))
    assert (status, json.loads(text)["detail"]) == (400, "parameter topic is given twice")


async def test_a_topic_in_the_query_permits_nothing_on_other_routes(broker: Broker) -> None:
    for path in (STATUS, f"{STATUS}/queue", "/metrics", "/api/v1/overview", "/api/v1/groups"):
        status, _, _ = await ask(broker, f"{path}?topic=t", basic("owner"))
        assert status == 403, path


async def test_the_list_of_topics_has_those_that_the_user_may_describe(broker: Broker) -> None:
    async def listed(user: str, query: str = "") -> list[str]:
        status, text, _ = await ask(broker, f"/api/v1/topics{query}", basic(user))
        assert status == 200, text
        return [row["name"] for row in json.loads(text)["topics"]]

    assert await listed("owner") == ["t"]
    assert await listed("owner", "?contains=other") == []
    assert await listed("viewer") == ["other", "t"]
    status, text, _ = await ask(broker, "/api/v1/topics", basic("nobody"))
    reason = "User:nobody needs DESCRIBE on the cluster or on a topic"
    assert (status, json.loads(text)["detail"]) == (403, reason)


async def test_health_checks_and_the_consoles_files_need_no_credentials_and_all_else_does(
    broker: Broker,
) -> None:
    for path in ("/healthz", "/readyz", "/", "/console/app.js"):
        assert (await ask(broker, path))[0] == 200
    for path in (STATUS, "/metrics", "/api/v1/openapi.json", "/no/such/path"):
        status, _, challenges = await ask(broker, path)
        assert (status, challenges) == (
            401,
            ['Basic realm="varve", charset="UTF-8"', 'Bearer realm="varve"'],
        )


@pytest.mark.parametrize(
    ("authorization", "reason"),
    [
        (basic("viewer", "guess"), "wrong user or password"),
        (basic("unknown"), "wrong user or password"),
        (basic("viewer", ""), "expected a user and a password"),
        ("Basic", "expected a user and a password"),
        ("Basic !", "base64 of USER:PASSWORD"),
        ("Basic /w==", "base64 of USER:PASSWORD"),
        ("Bearer wrong", "wrong token"),
        ("Digest x", "expected a user and a password or a token"),
    ],
)
async def test_wrong_credentials_are_refused_and_named_without_secrets(
    broker: Broker, authorization: str, reason: str
) -> None:
    with capture_logs() as lines:
        status, text, challenges = await ask(broker, STATUS, authorization)
    assert (status, len(challenges), reason in text) == (401, 2, True)
    if reason.startswith("wrong"):
        (line,) = [line for line in lines if line["event"] == "authentication failed"]
        assert (line["peer"], line["reason"]) == ("127.0.0.1", reason)
        assert "guess" not in str(line)


@pytest.mark.parametrize(
    ("authorization", "is_right"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer  {TOKEN} ", True),
        (f"Bearer {TOKEN[:-1]}F", False),
        ("Bearer", False),
        (f"Basic {TOKEN}", False),
        ("Bearer \udcff\udcfe", False),  # bytes that are no text
        ("", False),
    ],
)
async def test_the_token_must_be_right(authorization: str, is_right: bool) -> None:
    settings = SaslSettings(failure_delay_ms=0)
    shared = Authentication(
        settings, Credentials(lambda: pytest.fail("no users")), clock=lambda: 0.0, wall_ms=int
    )
    sut = HttpAuthentication(shared, Authorizer().allows, (TOKEN.encode(),))
    sender = await sut.authenticate(authorization, "127.0.0.1")
    assert isinstance(sender, Sender) == is_right
    shared.credentials.close()


async def test_permissions_count_for_requests_without_credentials() -> None:
    """Also on loopback, where an HTTP API without users and token is open otherwise."""
    for is_enabled in (False, True):
        env = MemoryEnv(seed=2)
        async with broker_in_memory(
            env, authorization={"enabled": is_enabled, "super_users": ["User:admin"]}
        ) as broker:
            status, text, _ = await ask(broker, STATUS)
            assert status == (403 if is_enabled else 200)
            refusal = (
                "User:ANONYMOUS needs DESCRIBE on the cluster; set http_users or http_token_file"
            )
            assert (refusal in text) == is_enabled


async def test_a_signed_token_names_a_user(tmp_path: Path) -> None:
    provider, keys = IdentityProvider(), tmp_path / "keys.json"
    keys.write_bytes(provider.jwks())
    provided = {"jwks_file": str(keys), "issuer": ISSUER, "audience": [AUDIENCE]}
    sasl = {"mechanisms": ["OAUTHBEARER"], "oauthbearer": provided, "failure_delay_ms": 0}
    env = MemoryEnv(seed=1)
    async with broker_in_memory(env, http_users=True, sasl=sasl) as broker:
        now = env.wall_ms() // 1000
        broker._services.authorizer = RuleAuthorizer(may)
        status, text, _ = await ask(broker, STATUS, f"Bearer {provider.token(now + 60)}")
        assert (status, "User:alice needs DESCRIBE" in text) == (403, True)
        status, text, _ = await ask(broker, STATUS, f"Bearer {provider.token(now - 60)}")
        assert (status, "expired" in text) == (401, True)


async def test_a_user_is_asked_to_wait_until_the_broker_has_started(
    tmp_path: Path, broker: Broker
) -> None:
    """Neither users nor the keys of signed tokens are known before."""
    broker.http.server._is_open = False
    mechanisms = ("OAUTHBEARER", *broker.authentication.settings.mechanisms)
    settings = broker.authentication.settings.model_copy(update={"mechanisms": mechanisms})
    broker.authentication.settings = settings
    for authorization in (basic("viewer"), "Bearer signed.by.nobody"):
        assert (await ask(broker, "/metrics", authorization))[0] == 503
    assert (await ask(broker, "/metrics", f"Bearer {TOKEN}"))[0] == 200


async def test_pages_by_name_are_refused_once_a_reload_has_removed_the_token() -> None:
    env = MemoryEnv(seed=1)
    async with broker_in_memory(env, token=TOKEN.encode(), allow_insecure=True) as broker:
        broker.http.server.guard = Guard.of(Address("0.0.0.0", 9644))
        by_name = {"Host": "rebound.example", "Accept_Language": "en"}
        answer = await http_client.ask(
            broker, "GET", STATUS, Authorization=f"Bearer {TOKEN}", **by_name
        )
        assert answer.status == 200
        broker.http.reload(token=None, tls=None)
        answer = await http_client.ask(broker, "GET", STATUS, **by_name)
        assert (answer.status, "IP address" in answer.text) == (403, True)
        assert (await http_client.ask(broker, "GET", STATUS, Host="rebound.example")).status == 200


async def test_many_wrong_passwords_of_one_address_wait_longer(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    note_failure = broker.authentication.failed_attempts.note_failure

    def noted(address: str, delay_seconds: float) -> float:
        waits.append(note_failure(address, delay_seconds))
        return 0.0

    monkeypatch.setattr(broker.authentication.failed_attempts, "note_failure", noted)
    for _ in range(13):
        assert (await ask(broker, STATUS, basic("viewer", "guess")))[0] == 401
    assert waits[0] == pytest.approx(0.01)
    assert waits[-1] > 10 * waits[0]


async def test_a_client_that_stays_connected_does_not_queue_behind_wrong_passwords(
    broker: Broker,
) -> None:
    attempts = broker.authentication.failed_attempts

    async with ClientSession(f"http://{broker.http.address}") as session, AsyncExitStack() as stack:

        async def status(user: str) -> int:
            async with session.get(STATUS, headers={"Authorization": basic(user)}) as response:
                return response.status

        assert await status("viewer") == 200
        for number in range(ATTEMPTS_AT_ONCE):
            await stack.enter_async_context(attempts.attempt("127.0.0.1", number))
        async with asyncio.timeout(60):
            assert await status("viewer") == 200
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await status("operator")


async def test_a_password_that_comes_during_the_stop_is_no_error_in_the_log(broker: Broker) -> None:
    await broker.authentication.stop()
    with capture_logs() as lines:
        assert (await ask(broker, STATUS, basic("viewer", "guess")))[0] == 400
    assert [line for line in lines if line["log_level"] == "error"] == []


async def test_an_attempt_ends_with_its_connection(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_presence, "WAIT_SECONDS", 0.001)
    attempts, address = broker.authentication.failed_attempts, broker.http.address
    fields = {"Host": "localhost", "Authorization": basic("viewer")}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    request = f"GET {STATUS} HTTP/1.1\r\n{head}\r\n"
    async with AsyncExitStack() as stack:
        for number in range(ATTEMPTS_AT_ONCE):
            await stack.enter_async_context(attempts.attempt("127.0.0.1", number))
        entry = attempts._addresses["127.0.0.1"]
        writers = []
        for _ in range(20):
            _, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(request.encode())
            writers.append(writer)
        async with asyncio.timeout(20):
            while entry.attempts < ATTEMPTS_AT_ONCE + len(writers):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            for writer in writers:
                writer.close()
            while entry.attempts > ATTEMPTS_AT_ONCE:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_unauthenticated_requests_have_the_time_of_one_turn_in_a_round_of_the_loop(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns, turn, by_turn = 0, 0, Counter[int]()
    authenticate = HttpAuthentication.authenticate

    async def authenticate_slowly(*args: Any) -> Any:
        nonlocal now_ns
        now_ns += 1_000_000
        by_turn[turn] += 1
        return await authenticate(*args)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    address = broker.http.address
    request = b"GET /api/v1/cleaner HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % address.port
    peers = [await asyncio.open_connection(address.host, address.port) for _ in range(30)]

    async def ask_all() -> None:
        for _, writer in peers:
            writer.write(request)
        for reader, _ in peers:
            async with asyncio.timeout(20):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 401 ")
                await reader.readuntil(b"}")

    await ask_all()
    monkeypatch.setattr(HttpAuthentication, "authenticate", authenticate_slowly)
    monkeypatch.setattr("broker.event_loop.loop_turns.perf_counter_ns", lambda: now_ns)
    ticker = asyncio.create_task(count_turns())
    await ask_all()
    ticker.cancel()
    assert by_turn.total() == 30
    assert max(by_turn.values()) <= UNAUTHENTICATED_ROUND_SECONDS * 1000
    for _, writer in peers:
        writer.close()
