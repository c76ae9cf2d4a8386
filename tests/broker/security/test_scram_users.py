"""Stored users: requests 50 and 51 as Kafka answers them, and what a crash leaves of a change."""

import asyncio
import hashlib
import itertools
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.handlers.security.scram_users import USERS_MAX
from broker.security.credentials import Credentials
from broker.security.scram import ITERATIONS, make_entry
from config.settings import SaslSettings
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.directory.cluster_metadata import ClusterMetadata, new_metadata
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.sasl_client import SaslClient
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

LISTENERS = ["127.0.0.1:0", "SASL_PLAINTEXT://127.0.0.1:0"]
SASL = {"mechanisms": ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"], "failure_delay_ms": 0}
LINES_BY_USER_MAX = 3  # to see which users have changed; to count an entry takes eight
CODES = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}


def upsertion(
    name: str,
    password: str,
    mechanism: str = "SCRAM-SHA-256",
    iterations: int = 4096,
    **fields: Any,
) -> m.AlterUserScramCredentialsRequestUpsertion:
    salt = b"salt of " + name.encode()
    digest = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}[mechanism]
    salted = hashlib.pbkdf2_hmac(digest, password.encode(), salt, iterations)
    row = m.AlterUserScramCredentialsRequestUpsertion(
        name=name,
        mechanism=CODES[mechanism],
        iterations=iterations,
        salt=salt,
        salted_password=salted,
    )
    for field, value in fields.items():
        setattr(row, field, value)
    return row


def deletion(name: str, mechanism: int = 1) -> m.AlterUserScramCredentialsRequestDeletion:
    return m.AlterUserScramCredentialsRequestDeletion(name=name, mechanism=mechanism)


async def alter(client: SaslClient, *rows: Any) -> dict[str, tuple[int, str | None]]:
    kind = m.AlterUserScramCredentialsRequestUpsertion
    request = m.AlterUserScramCredentialsRequest(
        upsertions=[row for row in rows if isinstance(row, kind)],
        deletions=[row for row in rows if not isinstance(row, kind)],
    )
    answer = await client.ask(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, request)
    return {row.user: (row.error_code, row.error_message) for row in answer.results}


async def describe(client: SaslClient, *names: str) -> dict[str, Any]:
    users = [m.DescribeUserScramCredentialsRequestUser(name=name) for name in names]
    answer = await client.ask(
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
        0,
        m.DescribeUserScramCredentialsRequest(users=users or None),
    )
    return {
        row.user: row.error_code
        or [(info.mechanism, info.iterations) for info in row.credential_infos]
        for row in answer.results
    }


async def logs_in(broker: Any, user: str, password: str, mechanism: str) -> bool:
    client = await SaslClient.connect(broker, index=1)
    try:
        if mechanism == "PLAIN":
            return (await client.plain(user, password)).error_code == 0
        return (await client.scram(user, password, mechanism)).error_code == 0
    finally:
        client.close()


async def test_stored_users_log_in_until_they_are_deleted() -> None:
    async with broker_in_memory(MemoryEnv(seed=1), listeners=LISTENERS, sasl=SASL) as broker:
        admin = await SaslClient.connect(broker)
        assert await alter(admin, upsertion("alice", "one", iterations=8192)) == {
            "alice": (0, None)
        }
        await alter(admin, upsertion("alice", "one", "SCRAM-SHA-512"))
        assert await describe(admin) == {"alice": [(1, 8192), (2, 4096)]}
        for mechanism in SASL["mechanisms"]:  # type: ignore[attr-defined]
            assert await logs_in(broker, "alice", "one", mechanism)
            assert not await logs_in(broker, "alice", "two", mechanism)
        await alter(admin, upsertion("alice", "two"))
        assert await logs_in(broker, "alice", "two", "SCRAM-SHA-256")
        assert await logs_in(broker, "alice", "two", "PLAIN")
        assert not await logs_in(broker, "alice", "one", "PLAIN"), "it was accepted before"
        assert await logs_in(broker, "alice", "one", "SCRAM-SHA-512")
        await alter(admin, deletion("alice"))
        assert await describe(admin) == {"alice": [(2, 4096)]}
        assert not await logs_in(broker, "alice", "two", "SCRAM-SHA-256")
        await alter(admin, deletion("alice", 2))
        assert await describe(admin) == {}
        assert await describe(admin, "alice") == {"alice": ErrorCode.RESOURCE_NOT_FOUND}
        assert not await logs_in(broker, "alice", "one", "PLAIN")
        admin.close()


async def test_invalid_changes_get_kafkas_errors_and_change_nothing() -> None:
    async with broker_in_memory(MemoryEnv(seed=1), listeners=LISTENERS, sasl=SASL) as broker:
        admin = await SaslClient.connect(broker)
        await alter(admin, upsertion("kept", "p"))
        code_7 = upsertion("mechanism", "p")
        code_7.mechanism = 7
        answers = await alter(
            admin,
            upsertion("", "p"),
            upsertion("few", "p", iterations=4095),
            upsertion("many", "p", iterations=16_385),
            code_7,
            deletion("unknown", 3),
            deletion("missing"),
            upsertion("length", "p", salted_password=b"x"),
            upsertion("salt", "p", salt=b""),
            upsertion("twice", "p"),
            upsertion("twice", "p", "SCRAM-SHA-512"),
            deletion("kept"),
            upsertion("kept", "q"),
        )
        twice = "A user credential cannot be altered twice in the same request"
        missing = "Attempt to delete a user credential that does not exist"
        assert answers.pop("length")[0] == ErrorCode.UNACCEPTABLE_CREDENTIAL
        assert answers.pop("salt")[0] == ErrorCode.UNACCEPTABLE_CREDENTIAL
        assert answers == {
            "": (ErrorCode.UNACCEPTABLE_CREDENTIAL, "Username must not be empty"),
            "few": (ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too few iterations"),
            "many": (ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too many iterations"),
            "mechanism": (ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"),
            "unknown": (ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"),
            "missing": (ErrorCode.RESOURCE_NOT_FOUND, missing),
            "twice": (ErrorCode.DUPLICATE_RESOURCE, twice),
            "kept": (ErrorCode.DUPLICATE_RESOURCE, twice),
        }
        assert set(await describe(admin)) == {"kept"}
        assert await describe(admin, "kept", "kept", "missing") == {
            "kept": ErrorCode.DUPLICATE_RESOURCE,
            "missing": ErrorCode.RESOURCE_NOT_FOUND,
        }
        assert await logs_in(broker, "kept", "p", "SCRAM-SHA-256")
        admin.close()


async def test_a_user_of_the_settings_file_cannot_be_changed_by_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALICE_PASSWORD", "of the file")
    sasl = {**SASL, "users": {"alice": {"env": "ALICE_PASSWORD"}}}
    async with broker_in_memory(MemoryEnv(seed=1), listeners=LISTENERS, sasl=sasl) as broker:
        admin = await SaslClient.connect(broker)
        answer = await alter(admin, upsertion("alice", "stored"))
        assert answer["alice"][0] == ErrorCode.UNACCEPTABLE_CREDENTIAL
        assert await logs_in(broker, "alice", "of the file", "SCRAM-SHA-512")
        admin.close()


async def test_a_change_of_users_is_durable_when_it_is_answered() -> None:
    env = MemoryEnv(seed=1)
    with suppress(SimulatedCrash):
        async with broker_in_memory(env, listeners=LISTENERS, sasl=SASL) as broker:
            admin = await SaslClient.connect(broker)
            await alter(admin, upsertion("alice", "one"), upsertion("bob", "p"))
            await alter(admin, upsertion("alice", "two"), deletion("bob"))
            crashed = env.crash()
            admin.close()
    async with broker_in_memory(crashed, listeners=LISTENERS, sasl=SASL) as broker:
        assert await logs_in(broker, "alice", "two", "SCRAM-SHA-256")
        assert not await logs_in(broker, "alice", "one", "SCRAM-SHA-256")
        assert not await logs_in(broker, "bob", "p", "SCRAM-SHA-256")


async def test_a_crash_leaves_all_of_a_change_or_nothing() -> None:
    outcomes = []
    for step in itertools.count(1):
        env, is_answered = MemoryEnv(seed=step), True
        with suppress(SimulatedCrash), capture_logs():  # to print a traceback takes seconds
            async with broker_in_memory(env, listeners=LISTENERS, sasl=SASL) as broker:
                admin = await SaslClient.connect(broker)
                await alter(admin, upsertion("alice", "one"), upsertion("bob", "p"))
                env.crash_at = env.operations + step
                try:
                    await alter(admin, upsertion("alice", "two"), deletion("bob"))
                except (ConnectionError, asyncio.IncompleteReadError):
                    is_answered = False
                admin.close()
        async with broker_in_memory(env.crash(), listeners=LISTENERS, sasl=SASL) as broker:
            admin = await SaslClient.connect(broker)
            names = set(await describe(admin))
            is_new = await logs_in(broker, "alice", "two", "SCRAM-SHA-256")
            assert is_new != await logs_in(broker, "alice", "one", "SCRAM-SHA-256")
            assert names == ({"alice"} if is_new else {"alice", "bob"})
            admin.close()
        outcomes.append(is_new)
        if is_answered:
            break
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert len(outcomes) > 3


async def test_the_number_of_stored_users_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert USERS_MAX == 10_000
    monkeypatch.setattr("broker.handlers.security.scram_users.USERS_MAX", 2)
    async with broker_in_memory(MemoryEnv(seed=1), listeners=LISTENERS, sasl=SASL) as broker:
        admin = await SaslClient.connect(broker)
        answers = await alter(admin, *(upsertion(name, "p") for name in "abc"))
        assert [code for code, _ in answers.values()] == [0, 0, ErrorCode.POLICY_VIOLATION]
        assert await alter(admin, upsertion("a", "q")) == {"a": (0, None)}
        admin.close()


def metadata() -> ClusterMetadata:
    return new_metadata(MemoryEnv(seed=3), "cluster", 1)


async def test_unknown_users_look_like_known_ones() -> None:
    """The same salt at each attempt and after a restart, and the usual number of iterations."""
    stored = metadata()
    entries = []
    for _ in range(2):
        credentials = Credentials(lambda: stored)
        await credentials.load({"alice": "p"}, ("SCRAM-SHA-512",))
        for user in ("alice", "nobody"):
            entry, exists = credentials.find_entry("SCRAM-SHA-512", user)
            assert exists == (user == "alice")
            assert (len(entry.salt), len(entry.stored_key), entry.iterations) == (20, 64, 4096)
            entries.append((user, entry.salt))
        assert await credentials.check_password("nobody", "") is None
        assert await credentials.check_password("alice", "p" * 5000) is None
        principal = await credentials.check_password("alice", "p")
        assert str(principal) == "User:alice"
        credentials.close()
    assert len(set(entries)) == 2


async def test_wrong_passwords_of_each_address_delay_a_user_elsewhere_by_one_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored, checked = metadata(), list[str]()

    def note_address(_mechanism: str, password: str, _entry: object) -> bool:
        checked.append(password.partition(" ")[0])
        return False

    monkeypatch.setattr("broker.security.credentials.matches", note_address)
    credentials = Credentials(lambda: stored)
    addresses = ["10.0.0.1"] * 20 + ["10.0.0.2"] * 20 + ["10.0.0.3"]
    await asyncio.gather(
        *(
            credentials.check_password("alice", f"{address} {number}", address)
            for number, address in enumerate(addresses)
        )
    )
    credentials.close()
    assert len(checked) == len(addresses)
    assert checked.index("10.0.0.3") <= 3


def test_salts_of_unknown_users_have_the_forms_of_those_of_known_ones() -> None:
    java_salts = (b"1pdd2mrl5p6ew8vqctjvt4l3mn", b"9pdd2mrl5p6ew8vqctjvt4l3m")
    salts = {f"j{number}": java_salts[number % 2] for number in range(30)}
    salts |= {f"r{number}": bytes([200, number]) * 32 for number in range(10)}
    users = {
        name: {"SCRAM-SHA-256": make_entry("SCRAM-SHA-256", b"p", salt, 8_192)}
        for name, salt in salts.items()
    }
    stored = replace(metadata(), scram_users=users, hash_key=bytes(16))
    credentials = Credentials(lambda: stored)
    entries = [credentials.find_entry("SCRAM-SHA-256", f"u{n}")[0] for n in range(400)]
    assert {entry.iterations for entry in entries} == {8_192}
    lengths = Counter(len(entry.salt) for entry in entries)
    assert set(lengths) <= {23, 24, 25, 26, 64}
    assert 70 <= lengths[64] <= 130
    assert min(lengths[25], lengths[26]) >= 80
    for entry in entries:
        assert len(entry.salt) == 64 or re.fullmatch(rb"[0-9a-z]+", entry.salt)
        assert len(entry.salt) != 26 or entry.salt[:1] == b"1"
    assert credentials.find_entry("SCRAM-SHA-512", "u1")[0].iterations == ITERATIONS
    again = Credentials(lambda: stored)
    assert again.find_entry("SCRAM-SHA-256", "u1")[0] == entries[1]
    for each in (credentials, again):
        each.close()


async def test_a_login_as_an_unknown_user_does_not_count_all_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither after the start nor after a change of users."""
    entry, meter = make_entry("SCRAM-SHA-256", b"p", bytes(32), ITERATIONS), LoopMeter()
    users = {f"u{number}": {"SCRAM-SHA-256": entry} for number in range(USERS_MAX)}
    stored = replace(metadata(), scram_users=users)
    credentials = Credentials(lambda: stored)
    await credentials.load({}, ("SCRAM-SHA-256",))
    with meter.measuring(monkeypatch):
        assert len(credentials.find_entry("SCRAM-SHA-256", "nobody")[0].salt) == 32
    assert meter.lines < LINES_BY_USER_MAX * USERS_MAX
    new = make_entry("SCRAM-SHA-256", b"p", bytes(64), ITERATIONS)
    stored = replace(stored, scram_users={**users, "u0": {"SCRAM-SHA-256": new}})
    with meter.measuring(monkeypatch):
        credentials.find_entry("SCRAM-SHA-256", "nobody")
    assert meter.lines < LINES_BY_USER_MAX * USERS_MAX
    credentials.close()


async def test_formats_are_those_of_the_present_users_after_each_change() -> None:
    stored = metadata()
    credentials = Credentials(lambda: stored)
    await credentials.load({}, ("SCRAM-SHA-256",))
    for salts in ([30, 40], [40], [40, 50, 60], [], [20]):
        users = {
            f"u{size}": {"SCRAM-SHA-256": make_entry("SCRAM-SHA-256", b"p", bytes(size), 5_000)}
            for size in salts
        }
        stored = replace(stored, scram_users=users)
        if len(salts) > 2:
            await credentials.count_formats()
        drawn = {
            (len(entry.salt), entry.iterations)
            for number in range(60)
            for entry, _ in (credentials.find_entry("SCRAM-SHA-256", f"n{number}"),)
        }
        assert drawn == ({(size, 5_000) for size in salts} or {(20, ITERATIONS)})
    credentials.close()


def test_no_text_shows_a_secret() -> None:
    row = upsertion("alice", "open sesame")
    texts = [
        repr(row),
        repr(m.SaslAuthenticateRequest(auth_bytes=b"open sesame")),
        repr(SaslSettings.model_validate({"users": {"alice": {"env": "ALICE"}}})),
    ]
    for text in texts:
        assert "sesame" not in text
        assert repr(row.salted_password)[2:-1] not in text
