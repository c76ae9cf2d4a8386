"""SASL beside Apache Kafka: the same answers to the same messages, and Kafka's tools."""

import base64
import hashlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol import messages as m
from protocol.api import ApiKey
from tests.support.broker.sasl_client import scram_final, scram_first
from tests.support.draws import only_in_ci
from tests.support.identity_provider import AUDIENCE, ISSUER, IdentityProvider
from tests.support.peers.java_programs import quick_java
from tests.support.peers.kafka import LIB, running_kafka
from tests.support.ports import free_port
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker, running_varve

PASSWORD = "plain and simple"
MODULES = "org.apache.kafka.common.security"
JAAS = {
    "PLAIN": f"{MODULES}.plain.PlainLoginModule",
    "SCRAM-SHA-256": f"{MODULES}.scram.ScramLoginModule",
    "SCRAM-SHA-512": f"{MODULES}.scram.ScramLoginModule",
}
MAX_REAUTH_MS = 60_000
Answers = dict[str, list[Any]]


@only_in_ci("tests/broker/security has the answers; Kafka delays each wrong password")
def test_the_answers_are_kafkas(real_kafka: None, tmp_path: Path) -> None:
    prefix, port = "listener.name.sasl_plaintext", free_port()
    users = f'user_alice="{PASSWORD}" user_bob="{PASSWORD}"'
    settings = {
        "sasl.enabled.mechanisms": ",".join(JAAS),
        "connections.max.reauth.ms": str(MAX_REAUTH_MS),
        **{
            f"{prefix}.{mechanism.lower()}.sasl.jaas.config": f"{module} required"
            + (f" {users};" if mechanism == "PLAIN" else ";")
            for mechanism, module in JAAS.items()
        },
    }
    with running_kafka(tmp_path / "kafka", settings, listeners={"SASL_PLAINTEXT": port}) as kafka:
        expected = converse(kafka.port, port)
    with running_sasl(tmp_path, max_reauth_ms=MAX_REAUTH_MS) as running:
        answers = converse(running.broker.port, running.port)
    assert answers == expected


@dataclass
class Running:
    broker: VarveBroker
    port: int  # of SASL_PLAINTEXT
    provider: IdentityProvider

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"


class running_sasl:
    """A daemon with a PLAINTEXT and a SASL_PLAINTEXT listener."""

    def __init__(self, folder: Path, **sasl: Any) -> None:
        provider, port, sasl_port = IdentityProvider(), free_port(), free_port()
        (folder / "password").write_text(PASSWORD)
        (folder / "jwks.json").write_bytes(provider.jwks())
        settings = {
            "listeners": [f"127.0.0.1:{port}", f"SASL_PLAINTEXT://127.0.0.1:{sasl_port}"],
            "sasl": {
                "mechanisms": list(JAAS),
                "users": {user: {"file": str(folder / "password")} for user in ("alice", "bob")},
                "oauthbearer": {
                    "jwks_file": str(folder / "jwks.json"),
                    "issuer": ISSUER,
                    "audience": [AUDIENCE],
                },
                **sasl,
            },
        }
        self._manager = running_varve(folder / "varve", settings, port=port)
        self._rest = sasl_port, provider

    def __enter__(self) -> Running:
        return Running(self._manager.__enter__(), *self._rest)

    def __exit__(self, *error: Any) -> None:
        self._manager.__exit__(*error)


def converse(port: int, sasl_port: int) -> Answers:
    """What a broker answers to administrators and to clients that authenticate."""
    answers: Answers = {}
    with RawClient(port) as admin:
        answers["users"] = list(change_users(admin))
        answers["without SASL"] = [
            shake_hands(admin, "PLAIN"),
            shake_hands(admin, "PLAIN", version=0),
            send_token(admin, b"\0alice\0x"),
        ]
    for name, conversation in CONVERSATIONS.items():
        answers[name] = []
        with RawClient(sasl_port) as client:
            try:
                for step in conversation:
                    answers[name].append(step(client))
            except ConnectionError:
                answers[name].append("closed")
            else:
                if conversation[-1] is not metadata:  # which shows that the connection is open
                    answers[name].append(("closed", client.wait_closed()))
    return answers


def change_users(client: RawClient) -> Iterator[Any]:
    """Valid and invalid changes of users; the answers in the order of users."""
    row = m.AlterUserScramCredentialsRequestUpsertion
    delete = m.AlterUserScramCredentialsRequestDeletion

    def upsert(name: str, mechanism: int = 1, iterations: int = 4096) -> Any:
        salted = hashlib.pbkdf2_hmac("sha256", PASSWORD.encode(), b"salt", iterations)
        return row(
            name=name,
            mechanism=mechanism,
            iterations=iterations,
            salt=b"salt",
            salted_password=salted,
        )

    changes: list[tuple[list[Any], list[Any]]] = [
        ([upsert("carol", iterations=8192), upsert("dave")], []),
        ([upsert(""), upsert("few", iterations=4095), upsert("many", iterations=16_385)], []),
        ([upsert("code", 0), upsert("code 3", 3), upsert("code -1", -1)], []),
        ([upsert("twice"), upsert("twice"), upsert("few", iterations=1), upsert("few")], []),
        ([upsert("carol")], [delete(name="carol", mechanism=1)]),
        ([], [delete(name="nobody", mechanism=1), delete(name="carol", mechanism=2)]),
        ([], [delete(name="", mechanism=1), delete(name="code", mechanism=9)]),
        ([], [delete(name="dave", mechanism=1)]),
    ]
    for upsertions, deletions in changes:
        request = m.AlterUserScramCredentialsRequest(upsertions=upsertions, deletions=deletions)
        answer: Any = client.request(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, request)
        yield sorted((r.user, r.error_code, r.error_message) for r in answer.results)
        time.sleep(0.3)  # Kafka shows a change when its broker has read it
    for names in (None, [], ["carol"], ["carol", "carol", "nobody", ""]):
        users = names and [m.DescribeUserScramCredentialsRequestUser(name=name) for name in names]
        described: Any = client.request(
            ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
            0,
            m.DescribeUserScramCredentialsRequest(users=users),
        )
        yield described.error_code, described.error_message
        yield sorted(
            (
                r.user,
                r.error_code,
                r.error_message,
                [(info.mechanism, info.iterations) for info in r.credential_infos],
            )
            for r in described.results
        )


def shake_hands(client: RawClient, mechanism: str, version: int = 1) -> Any:
    body = m.SaslHandshakeRequest(mechanism=mechanism)
    answer: Any = client.request(ApiKey.SASL_HANDSHAKE, version, body)
    return answer.error_code, sorted(answer.mechanisms)


def send_token(client: RawClient, token: bytes, version: int = 2) -> Any:
    body = m.SaslAuthenticateRequest(auth_bytes=token)
    answer: Any = client.request(ApiKey.SASL_AUTHENTICATE, version, body)
    return answer.error_code, answer.error_message, answer.auth_bytes, answer.session_lifetime_ms


Step = Callable[[RawClient], Any]


def handshake(mechanism: str, version: int = 1) -> Step:
    return lambda client: shake_hands(client, mechanism, version)


def token(data: bytes, version: int = 2) -> Step:
    return lambda client: send_token(client, data, version)


def bare_token(data: bytes) -> Step:
    def send(client: RawClient) -> bytes:
        client.send_frame(data)
        return client.receive_frame()

    return send


def scram(password: str, user: str = "carol", header: str = "") -> Step:
    """Both messages; the parts of the answers that are not random."""

    def exchange(client: RawClient) -> Any:
        first = scram_first(user).replace(b"n,,", f"n,{header},".encode())
        code, message, challenge, lifetime_ms = send_token(client, first)
        if code:
            return code, message, challenge, lifetime_ms
        fields = dict(field.split(b"=", 1) for field in challenge.split(b","))
        final = scram_final(user, password, challenge, "SCRAM-SHA-256")
        code, message, verifier, lifetime_ms = send_token(client, final)
        shown = verifier[:2], len(base64.b64decode(verifier[2:]))
        return fields[b"s"], fields[b"i"], code, message, shown, lifetime_ms

    return exchange


def metadata(client: RawClient) -> int:
    answer: Any = client.request(ApiKey.METADATA, 9, m.MetadataRequest(topics=[]))
    return len(answer.brokers)


def versions(client: RawClient) -> int:
    answer: Any = client.request(ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest())
    return int(answer.error_code)


RIGHT = f"\0alice\0{PASSWORD}".encode()
PLAIN = handshake("PLAIN")
SCRAM = handshake("SCRAM-SHA-256")
CONVERSATIONS: dict[str, list[Step]] = {
    "PLAIN": [versions, PLAIN, token(RIGHT), versions, metadata],
    "PLAIN, version 0": [PLAIN, token(RIGHT, 0), metadata],
    "PLAIN, authorization id": [PLAIN, token(b"alice" + RIGHT), metadata],
    "PLAIN, other authorization id": [PLAIN, token(b"bob" + RIGHT), metadata],
    "PLAIN, wrong password": [PLAIN, token(b"\0alice\0x"), metadata],
    "PLAIN, unknown user": [PLAIN, token(b"\0nobody\0x")],
    "PLAIN, no user": [PLAIN, token(b"\0\0x")],
    "PLAIN, no password": [PLAIN, token(b"\0alice\0")],
    "PLAIN, two fields": [PLAIN, token(b"alice\0x")],
    "PLAIN, empty": [PLAIN, token(b"")],
    "bare PLAIN": [handshake("PLAIN", 0), bare_token(RIGHT), metadata],
    "bare PLAIN, wrong": [handshake("PLAIN", 0), bare_token(b"\0alice\0x"), metadata],
    "SCRAM": [SCRAM, scram(PASSWORD), metadata],
    "SCRAM, wrong password": [SCRAM, scram("x"), metadata],
    "SCRAM, other authorization id": [SCRAM, scram(PASSWORD, header="a=bob")],
    "SCRAM, malformed": [SCRAM, token(b"n,,x")],
    "SCRAM, channel binding": [SCRAM, token(b"p=tls-unique,,n=carol,r=abc")],
    "unknown mechanism": [handshake("GSSAPI"), metadata],
    "unknown mechanism, version 0": [handshake("", 0), metadata],
    "metadata first": [metadata],
    "token first": [token(RIGHT)],
    "again": [PLAIN, token(RIGHT), PLAIN, token(RIGHT), metadata, PLAIN, token(RIGHT), metadata],
    "again as another user": [PLAIN, token(RIGHT), PLAIN, token(RIGHT.replace(b"alice", b"bob"))],
    "again, wrong password": [PLAIN, token(RIGHT), PLAIN, token(b"\0alice\0x")],
    "again, two fields": [PLAIN, token(RIGHT), PLAIN, token(b"x")],
}


@only_in_ci("tests/clients/test_sasl.py logs in by each mechanism; three JVMs")
def test_kafkas_tools_create_a_user_and_log_in(real_kafka: None, tmp_path: Path) -> None:
    with running_sasl(tmp_path, mechanisms=[*JAAS, "OAUTHBEARER"]) as running:
        done = run_java(
            "kafka.admin.ConfigCommand",
            *["--bootstrap-server", running.broker.bootstrap, "--alter"],
            *["--entity-type", "users", "--entity-name", "erin"],
            *["--add-config", f"SCRAM-SHA-256=[iterations=8192,password={PASSWORD}]"],
        )
        assert "Completed updating config for user erin." in done.stdout, done.stderr
        produce(running, tmp_path, login("SCRAM-SHA-256", "erin"))
        jwt = tmp_path / "token"
        jwt.write_text(running.provider.token(time.time() + 300))
        handler = f"{MODULES}.oauthbearer.OAuthBearerLoginCallbackHandler"
        settings = {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": f"{MODULES}.oauthbearer.OAuthBearerLoginModule required;",
            "sasl.oauthbearer.token.endpoint.url": f"file://{jwt}",
            "sasl.login.callback.handler.class": handler,
        }
        # Java opens no file that this property does not allow.
        produce(running, tmp_path, settings, "allowed.urls", f"file://{jwt}")
        with RawClient(running.broker.port) as client:
            records = bytes(client.fetch("tools").records or b"")
        for mechanism in ("SCRAM-SHA-256", "OAUTHBEARER"):
            assert mechanism.encode() in records, mechanism
        wrong = login("PLAIN", "alice", "wrong password")
        done = run_java(
            "org.apache.kafka.tools.GetOffsetShell",
            *["--bootstrap-server", running.bootstrap],
            *["--command-config", write_properties(tmp_path, wrong)],
        )
        text = done.stdout + done.stderr
        assert "SaslAuthenticationException: Authentication failed: Invalid username" in text


def login(mechanism: str, user: str, password: str = PASSWORD) -> dict[str, str]:
    config = f'{JAAS[mechanism]} required username="{user}" password="{password}";'
    return {"sasl.mechanism": mechanism, "sasl.jaas.config": config}


def write_properties(folder: Path, settings: dict[str, str]) -> str:
    path = folder / "client.properties"
    settings = {"security.protocol": "SASL_PLAINTEXT", **settings}
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return str(path)


def produce(
    running: Running, folder: Path, settings: dict[str, str], option: str = "", value: str = ""
) -> None:
    """Write the name of the mechanism with the console producer."""
    done = run_java(
        "org.apache.kafka.tools.ConsoleProducer",
        *["--bootstrap-server", running.bootstrap, "--topic", "tools", "--sync"],
        *["--command-config", write_properties(folder, settings)],
        stdin=settings["sasl.mechanism"],
        options=[f"-Dorg.apache.kafka.sasl.oauthbearer.{option}={value}"] if option else [],
    )
    assert done.returncode == 0, done.stderr


def run_java(
    main_class: str, *arguments: str, stdin: str = "", options: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*quick_java(LIB, *(options or [])), main_class, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
