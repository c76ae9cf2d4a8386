"""SASL listeners: what is answered before authentication, failures, sessions, limits."""

import asyncio
import random
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.handlers.security.sasl import UNAUTHENTICATED_REQUESTS_MAX
from broker.lifecycle.reload import read_secrets
from broker.security.scram import matches
from config.security.secrets import SecretError
from config.settings import SaslSettings
from protocol import codec
from protocol import messages as m
from protocol.api import APIS, ApiKey
from protocol.errors import ErrorCode
from protocol.limits import SMALL_FRAME_BYTES
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.sasl_client import SaslClient, scram_final, scram_first
from tests.support.identity_provider import AUDIENCE, ISSUER, IdentityProvider
from tests.support.storage.memory_env import MemoryEnv

PASSWORD = "open sesame 1"
MECHANISMS = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


@pytest.fixture
def password_file(tmp_path: Path) -> str:
    path = tmp_path / "alice.password"
    path.write_text(PASSWORD + "\n")
    return str(path)


@asynccontextmanager
async def running(
    password_file: str, env: MemoryEnv | None = None, limits: dict[str, Any] | None = None,
    **sasl: Any,
) -> AsyncIterator[Broker]:  # fmt: skip
    async with broker_in_memory(
        env or MemoryEnv(seed=1),
        listeners=["SASL_PLAINTEXT://127.0.0.1:0"],
        limits=limits or {},
        sasl={
            "mechanisms": MECHANISMS,
            "users": {"alice": {"file": password_file}},
            "failure_delay_ms": 0,
            **sasl,
        },
    ) as broker:
        yield broker


def counts(broker: Broker, mechanism: str) -> tuple[int, int]:
    """Successes and failures."""
    entry = broker.stats.authentications.by_mechanism["SASL_PLAINTEXT", mechanism]
    return entry.successes, entry.failures


async def test_a_user_of_the_settings_file_authenticates_with_each_mechanism(
    password_file: str,
) -> None:
    async with running(password_file) as broker:
        for mechanism in MECHANISMS:
            client = await SaslClient.connect(broker)
            assert (await client.ask(ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest())).api_keys
            if mechanism == "PLAIN":
                answer = await client.plain("alice", PASSWORD)
            else:
                answer = await client.scram("alice", PASSWORD, mechanism)
            assert (answer.error_code, answer.session_lifetime_ms) == (0, 0)
            assert await client.is_served()
            (connection,) = broker.listener.connections
            assert connection.context is not None
            assert str(connection.context.principal) == "User:alice"
            assert not connection.is_unauthenticated
            assert counts(broker, mechanism) == (1, 0)
            client.close()
            while broker.listener.connections:  # noqa: ASYNC110 - closing has no event
                await asyncio.sleep(0.001)


async def test_an_old_client_sends_tokens_without_headers(password_file: str) -> None:
    async with running(password_file) as broker:
        client = await SaslClient.connect(broker)
        assert (await client.shake_hands("PLAIN", version=0)).mechanisms == MECHANISMS
        assert await client.send_frame(f"\0alice\0{PASSWORD}".encode()) == b""
        assert await client.is_served()
        client.close()
        client = await SaslClient.connect(broker)
        await client.shake_hands("SCRAM-SHA-256", version=0)
        challenge = await client.send_frame(scram_first("alice"))
        final = scram_final("alice", PASSWORD, challenge, "SCRAM-SHA-256")
        assert (await client.send_frame(final)).startswith(b"v=")
        assert await client.is_served()
        client.close()
        for token in (b"\0alice\0bad", b"", b"\0"):
            client = await SaslClient.connect(broker)
            await client.shake_hands("PLAIN", version=0)
            client.writer.write(struct.pack(">i", len(token)) + token)
            assert await client.is_closed()
        assert counts(broker, "PLAIN") == (1, 3)


async def test_requests_before_the_authentication_use_no_quota(password_file: str) -> None:
    async with running(password_file) as broker:
        broker.quotas.update({(("user", None),): {"request_percentage": 0.0001}})
        client = await SaslClient.connect(broker)
        software = m.ApiVersionsRequest(client_software_name="a", client_software_version="1")

        async def throttle_ms() -> int:
            answer = await client.ask(ApiKey.API_VERSIONS, 3, software)
            return int(answer.throttle_time_ms)

        assert [await throttle_ms() for _ in range(3)] == [0, 0, 0]
        assert (await client.scram("alice", PASSWORD)).error_code == 0
        assert [await throttle_ms() for _ in range(2)] == [0, 1_000]
        client.close()


@pytest.mark.parametrize("user", ["alice", "nobody"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_wrong_credentials_get_kafkas_error_and_one_log_line(
    password_file: str, mechanism: str, user: str
) -> None:
    async with running(password_file) as broker:
        client = await SaslClient.connect(broker, host="127.0.0.4")  # with log lines of its own
        with capture_logs() as lines:
            if mechanism == "PLAIN":
                answer = await client.plain(user, "wrong password")
                message = "Authentication failed: Invalid username or password"
            else:
                answer = await client.scram(user, "wrong password", mechanism)
                message = (
                    "Authentication failed during authentication due to invalid credentials with "
                    f"SASL mechanism {mechanism}"
                )
            assert await client.is_closed()
        assert (answer.error_code, answer.error_message) == (
            ErrorCode.SASL_AUTHENTICATION_FAILED,
            message,
        )
        (line,) = lines
        assert line["reason"] == "authentication failed: wrong user or password"
        assert (line["user"], line["mechanism"]) == (user, mechanism)
        assert line["peer"].startswith("127.0.0.4:")
        assert "wrong password" not in str(lines)
        assert counts(broker, mechanism) == (0, 1)


async def test_no_other_request_is_answered_before_authentication(password_file: str) -> None:
    async with running(password_file) as broker:
        for begun, allowed in ((False, ApiKey.SASL_HANDSHAKE), (True, ApiKey.SASL_AUTHENTICATE)):
            for key in set(APIS) - {ApiKey.API_VERSIONS, allowed}:
                client = await SaslClient.connect(broker)
                if begun:
                    await client.shake_hands("SCRAM-SHA-256")
                version = APIS[key].versions.last
                client.writer.write(struct.pack(">ihhih", 10, key, version, 1, -1))
                assert await client.is_closed(), (key, begun)


async def test_a_mechanism_that_is_not_enabled_is_refused_with_the_enabled_ones(
    password_file: str,
) -> None:
    async with running(password_file, mechanisms=["SCRAM-SHA-512"]) as broker:
        for mechanism in ("PLAIN", "GSSAPI", ""):
            client = await SaslClient.connect(broker)
            answer = await client.shake_hands(mechanism)
            assert answer.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM
            assert answer.mechanisms == ["SCRAM-SHA-512"]
            assert await client.is_closed()
        assert counts(broker, "other") == (0, 3)


async def test_a_connection_is_limited_until_it_has_authenticated(password_file: str) -> None:
    async with running(password_file, limits={"first_request_ms": 5_000}) as broker:
        half, whole = await SaslClient.connect(broker), await SaslClient.connect(broker)
        for client in (half, whole):
            await client.ask(ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest())
        await half.shake_hands("SCRAM-SHA-256")
        await half.send_token(scram_first("alice"))
        await whole.plain("alice", PASSWORD)
        now = asyncio.get_running_loop().time()
        await broker.listener.sweep(now + 6.0)
        assert await half.is_closed()
        assert await whole.is_served()
        assert broker.listener.stats.closed_silent == 1
        whole.close()


async def test_an_unauthenticated_connection_cannot_announce_a_large_frame(
    password_file: str,
) -> None:
    async with running(password_file) as broker:
        client = await SaslClient.connect(broker)
        header = struct.pack(">ihh", SMALL_FRAME_BYTES + 1, ApiKey.PRODUCE, 9)
        client.writer.write(header)
        assert await client.is_closed()
        client = await SaslClient.connect(broker)
        await client.plain("alice", PASSWORD)
        client.writer.write(header)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reader.read(1), 0.05)
        client.close()


async def test_an_unauthenticated_connection_has_few_requests(password_file: str) -> None:
    env = MemoryEnv(seed=1)
    async with running(password_file, env, max_reauth_ms=10_000) as broker:
        client = await SaslClient.connect(broker, host="127.0.0.5")  # with log lines of its own
        for _ in range(UNAUTHENTICATED_REQUESTS_MAX):
            await client.ask(ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest())
        with capture_logs() as lines:
            client.writer.write(encode_handshake("PLAIN"))
            assert await client.is_closed()
        assert [line["reason"] for line in lines] == [
            f"more than {UNAUTHENTICATED_REQUESTS_MAX} requests before the authentication"
        ]
        client = await SaslClient.connect(broker)
        for _ in range(UNAUTHENTICATED_REQUESTS_MAX - 2):
            await client.ask(ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest())
        await client.plain("alice", PASSWORD)
        env.advance_ms(1_000)
        await client.plain("alice", PASSWORD)
        for _ in range(UNAUTHENTICATED_REQUESTS_MAX):
            assert await client.is_served()
        client.close()


async def test_sasl_requests_after_authentication_are_refused(password_file: str) -> None:
    async with running(password_file) as broker:
        client = await SaslClient.connect(broker)
        await client.plain("alice", PASSWORD)
        assert (await client.shake_hands("PLAIN")).error_code == ErrorCode.ILLEGAL_SASL_STATE
        answer = await client.send_token(b"\0bob\0x")
        assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE
        assert await client.is_served()
        client.close()


async def test_a_session_ends_unless_the_client_authenticates_again(password_file: str) -> None:
    env = MemoryEnv(seed=1)
    async with running(password_file, env, max_reauth_ms=10_000) as broker:
        client = await SaslClient.connect(broker)
        assert (await client.scram("alice", PASSWORD)).session_lifetime_ms == 10_000
        env.advance_ms(9_999)
        assert await client.is_served()
        assert (await client.scram("alice", PASSWORD)).session_lifetime_ms == 10_000
        env.advance_ms(10_000)
        assert await client.is_served()
        # After the end of the session only a new authentication is possible.
        env.advance_ms(1)
        assert (await client.scram("alice", PASSWORD)).error_code == 0
        assert await client.is_served()
        entry = broker.stats.authentications.by_mechanism["SASL_PLAINTEXT", "SCRAM-SHA-256"]
        assert (entry.successes, entry.reauthentications) == (1, 2)
        env.advance_ms(10_001)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.is_served()
        assert broker.stats.authentications.expired_connections == 1
        client.close()


async def test_a_client_cannot_authenticate_again_as_another_user(
    password_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOB", PASSWORD)
    users = {"alice": {"file": password_file}, "bob": {"env": "BOB"}}
    env = MemoryEnv(seed=1)
    async with running(password_file, env, max_reauth_ms=10_000, users=users) as broker:
        client = await SaslClient.connect(broker)
        await client.plain("alice", PASSWORD)
        answer = await client.plain("bob", PASSWORD)
        assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert answer.error_message == (
            "Cannot change principals during re-authentication from User.alice: User.bob"
        )
        assert await client.is_closed()
        client = await SaslClient.connect(broker)
        await client.plain("alice", PASSWORD)
        answer = await client.plain("alice", "wrong")
        assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert await client.is_closed()
        entry = broker.stats.authentications.by_mechanism["SASL_PLAINTEXT", "PLAIN"]
        assert (entry.failures, entry.reauthentication_failures) == (0, 2)


async def test_a_second_authentication_keeps_its_mechanism_and_its_distance(
    password_file: str,
) -> None:
    env = MemoryEnv(seed=1)
    async with running(password_file, env, max_reauth_ms=10_000) as broker:
        client = await SaslClient.connect(broker)
        await client.plain("alice", PASSWORD)
        assert (await client.shake_hands("PLAIN")).error_code == 0
        assert (await client.send_token(f"\0alice\0{PASSWORD}".encode())).error_code == 0
        # At most once a second, as in Kafka.
        assert (await client.shake_hands("PLAIN")).error_code == ErrorCode.ILLEGAL_SASL_STATE
        env.advance_ms(1_000)
        client.writer.write(encode_handshake("SCRAM-SHA-256"))
        assert await client.is_closed()


async def test_requests_between_the_messages_of_an_exchange_close_the_connection(
    password_file: str,
) -> None:
    env = MemoryEnv(seed=1)
    async with running(password_file, env, max_reauth_ms=10_000) as broker:
        for is_second in (False, True):
            client = await SaslClient.connect(broker)
            if is_second:
                await client.scram("alice", PASSWORD)
            await client.shake_hands("SCRAM-SHA-256")
            client.writer.write(
                codec.encode_request(ApiKey.METADATA, 9, 1, "c", m.MetadataRequest(topics=[]))
            )
            assert await client.is_closed()


def encode_handshake(mechanism: str) -> bytes:
    body = m.SaslHandshakeRequest(mechanism=mechanism)
    return codec.encode_request(ApiKey.SASL_HANDSHAKE, 1, 1, "c", body)


async def test_a_session_ends_with_the_token(password_file: str, tmp_path: Path) -> None:
    provider, env = IdentityProvider(), MemoryEnv(seed=1)
    keys = tmp_path / "jwks.json"
    keys.write_bytes(provider.jwks())
    oauth = {"jwks_file": str(keys), "issuer": ISSUER, "audience": [AUDIENCE]}
    sasl = {"mechanisms": ["OAUTHBEARER"], "oauthbearer": oauth}
    async with running(password_file, env, **sasl) as broker:
        client = await SaslClient.connect(broker)
        await client.shake_hands("OAUTHBEARER")
        token = provider.token(env.wall_ms() / 1000 + 60)
        answer = await client.send_token(f"n,,\x01auth=Bearer {token}\x01\x01".encode())
        assert (answer.error_code, answer.session_lifetime_ms) == (0, 60_000)
        assert await client.is_served()
        env.advance_ms(60_001)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.is_served()
        client.close()
        client = await SaslClient.connect(broker, host="127.0.0.3")  # with log lines of its own
        await client.shake_hands("OAUTHBEARER")
        with capture_logs() as lines:
            env.advance_ms(30_000)  # the clock skew
            refusal = await client.send_token(f"n,,\x01auth=Bearer {token}\x01\x01".encode())
            assert (refusal.error_code, refusal.auth_bytes) == (0, b'{"status":"invalid_token"}')
            answer = await client.send_token(b"\x01")
            assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
            assert answer.error_message == '{"status":"invalid_token"}'
            assert await client.is_closed()
        failed = [line for line in lines if "authentication failed" in line["reason"]]
        assert [line["reason"] for line in failed] == [
            "authentication failed: the token has expired"
        ]
        assert counts(broker, "OAUTHBEARER") == (1, 1)
        assert token not in str(lines)


async def test_a_refused_token_counts_even_if_the_client_sends_nothing_more(
    password_file: str, tmp_path: Path
) -> None:
    provider, env = IdentityProvider(), MemoryEnv(seed=1)
    keys = tmp_path / "jwks.json"
    keys.write_bytes(provider.jwks())
    oauth = {"jwks_file": str(keys), "issuer": ISSUER, "audience": [AUDIENCE]}
    sasl: dict[str, Any] = {
        "mechanisms": ["OAUTHBEARER"],
        "oauthbearer": oauth,
        "max_reauth_ms": 10_000,
    }
    expired = b"n,,\x01auth=Bearer " + provider.token(env.wall_ms() / 1000 - 60).encode()
    valid = b"n,,\x01auth=Bearer " + provider.token(env.wall_ms() / 1000 + 60).encode()
    async with running(password_file, env, **sasl) as broker:
        attempts = broker.authentication.failed_attempts
        for is_second in (False, True):
            client = await SaslClient.connect(broker, host="127.0.0.5")
            if is_second:
                await client.shake_hands("OAUTHBEARER")
                assert (await client.send_token(valid + b"\x01\x01")).error_code == 0
                env.advance_ms(1_000)
            await client.shake_hands("OAUTHBEARER")
            with capture_logs() as lines:
                refusal = await client.send_token(expired + b"\x01\x01")
            assert refusal.auth_bytes == b'{"status":"invalid_token"}'
            (line,) = lines
            assert line["reason"] == "authentication failed: the token has expired"
            assert (line["mechanism"], line["listener"]) == ("OAUTHBEARER", "SASL_PLAINTEXT")
            client.close()
        entry = broker.stats.authentications.by_mechanism["SASL_PLAINTEXT", "OAUTHBEARER"]
        assert (entry.failures, entry.reauthentication_failures) == (1, 1)
        assert attempts._addresses["127.0.0.5"].failures > 1


async def test_a_reload_replaces_users_mechanisms_and_keys(
    password_file: str, tmp_path: Path
) -> None:
    async with running(password_file) as broker:
        before = await SaslClient.connect(broker)
        await before.plain("alice", PASSWORD)
        other = tmp_path / "bob.password"
        other.write_text("of bob")
        sasl = SaslSettings.model_validate(
            {
                "mechanisms": ["SCRAM-SHA-512"],
                "users": {"bob": {"file": str(other)}},
                "failure_delay_ms": 0,
            }
        )
        settings = broker.settings.model_copy(update={"sasl": sasl})
        await broker._reload(settings, read_secrets(settings))
        client = await SaslClient.connect(broker)
        assert (await client.shake_hands("PLAIN")).mechanisms == ["SCRAM-SHA-512"]
        assert await client.is_closed()
        for user, password, code in (("alice", PASSWORD, 58), ("bob", "of bob", 0)):
            client = await SaslClient.connect(broker)
            assert (await client.scram(user, password, "SCRAM-SHA-512")).error_code == code
            client.close()
        assert await before.is_served()
        before.close()
        other.unlink()
        with pytest.raises(SecretError, match=r"sasl\.users\.bob"):
            read_secrets(settings)


async def test_any_bytes_before_authentication_get_an_answer_or_a_closed_connection(
    password_file: str,
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    async with running(password_file, limits={"first_request_ms": 1_000}) as broker:
        good = await SaslClient.connect(broker)
        await good.plain("alice", PASSWORD)
        for number in range(120):
            client = await SaslClient.connect(broker, host=f"127.0.0.{2 + number % 50}")
            mechanism = draw.choice([*MECHANISMS, None])
            if mechanism is not None:
                await client.shake_hands(mechanism, draw.randrange(2))
            frame = draw_frame(draw)
            client.writer.write(struct.pack(">i", len(frame)) + frame)
            client.writer.write_eof()
            with suppress(ConnectionError):
                await asyncio.wait_for(client.reader.read(), 20)
            client.close()
        assert await good.is_served()
        good.close()


def draw_frame(draw: random.Random) -> bytes:
    """Random bytes, or a valid message with random changes."""
    scram = scram_first("alice")
    plain = f"\0alice\0{PASSWORD}x".encode()
    bodies = [m.SaslAuthenticateRequest(auth_bytes=token) for token in (scram, plain, b"\x01")]
    version = draw.randrange(3)
    frame = bytearray(
        draw.choice(
            [
                draw.randbytes(draw.choice([0, 1, 7, 300, SMALL_FRAME_BYTES])),
                scram,
                plain,
                encode_handshake(draw.choice(["PLAIN", "x" * 5_000]))[4:],
                *(
                    codec.encode_request(ApiKey.SASL_AUTHENTICATE, version, 1, "c", body)[4:]
                    for body in bodies
                ),
            ]
        )
    )
    for _ in range(draw.randrange(4)):
        if frame:
            frame[draw.randrange(len(frame))] = draw.randrange(256)
    return bytes(frame)


async def test_passwords_are_salted_outside_the_loop_and_accepted_ones_only_once(
    password_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    salted_in: list[threading.Thread] = []

    def note_thread(*args: Any) -> bool:
        salted_in.append(threading.current_thread())
        return matches(*args)

    monkeypatch.setattr("broker.security.credentials.matches", note_thread)
    async with running(password_file) as broker:
        for password in ("wrong", PASSWORD, PASSWORD, "wrong"):
            client = await SaslClient.connect(broker, host="127.0.0.9")
            answer = await client.plain("alice", password)
            assert (answer.error_code == 0) == (password == PASSWORD)
            client.close()
    assert len(salted_in) == 3
    assert threading.main_thread() not in salted_in
