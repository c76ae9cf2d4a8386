"""No secret leaves the broker: not in its log, metrics, settings, answers, files or processes.

One secured daemon gets every kind of secret, then requests that succeed and that fail; after that
the test searches for the secrets in everything that others can read.
"""

import base64
import os
import signal
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from broker.cli import main
from tests.support.certificates import Authority
from tests.support.identity_provider import AUDIENCE, ISSUER, IdentityProvider
from tests.support.ports import free_port
from tests.support.varve import VarveBroker, start_varve
from tests.support.waiting import wait_until

OF_THE_KEY = "s3cret-of-the-key"
OF_ALICE = "s3cret-of-alice"
OF_BOB = "s3cret-of-bob"  # in a variable of the environment, which an operator chose
OF_CAROL = "s3cret-of-carol"  # created over the Kafka protocol
OF_HTTP = "s3cret-token-of-http"
WRONG = "s3cret-of-a-wrong-guess"
OF_A_SETTING = "s3cret-in-a-setting"
SECRETS = (OF_THE_KEY, OF_ALICE, OF_BOB, OF_CAROL, OF_HTTP, WRONG, OF_A_SETTING)
BOB_VARIABLE = "BOB_PASSWORD"
PATHS = ("/metrics", "/api/v1/overview", "/api/v1/cleaner", "/api/v1/topics", "/api/v1/groups")


def findings(text: str | bytes) -> list[str]:
    """Return the secrets in a text, as they are or in base64."""
    data = text.encode() if isinstance(text, str) else text
    return [
        secret
        for secret in SECRETS
        if secret.encode() in data or base64.b64encode(secret.encode()).rstrip(b"=") in data
    ]


class Daemon:
    """A daemon with every kind of secret, and what its clients received."""

    def __init__(self, folder: Path) -> None:
        authority, self.provider = Authority(folder), IdentityProvider()
        self.address, self.ca = f"localhost:{free_port()}", authority.path
        self.token = self.provider.token(time.time() + 3600)
        self.audit_log = folder / "audit.log"

        def secret(name: str, text: str) -> dict[str, str]:
            return {"file": authority.write(name, text.encode())}

        settings = {
            "listeners": [f"SASL_SSL://{self.address}"],
            "tls": {
                "certificate_file": authority.write(
                    "server.pem", authority.leaf("broker").pem(OF_THE_KEY)
                ),
                "key_password": secret("key.password", OF_THE_KEY),
            },
            "sasl": {
                "mechanisms": ["PLAIN", "SCRAM-SHA-256", "OAUTHBEARER"],
                "users": {
                    "alice": secret("alice.password", OF_ALICE),
                    "bob": {"env": BOB_VARIABLE},
                },
                "failure_delay_ms": 1,
                "oauthbearer": {
                    "jwks_file": authority.write("jwks.json", self.provider.jwks()),
                    "issuer": ISSUER,
                    "audience": [AUDIENCE],
                },
            },
            "authorization": {"enabled": True, "super_users": ["User:alice"]},
            "http_tls": True,
            "http_users": True,
            "http_token_file": secret("http.token", OF_HTTP)["file"],
            "logging": {"level": "debug", "audit_file": str(self.audit_log)},
            "cleaner": {"workers": 2, "dedupe_buffer_bytes": "16MiB"},
        }
        environment = {**os.environ, BOB_VARIABLE: OF_BOB}
        self.broker: VarveBroker = start_varve(folder / "varve", settings, environment=environment)

    def client(self, user: str, password: str, mechanism: str = "PLAIN") -> dict[str, str]:
        return {
            "bootstrap.servers": self.address,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": password,
            "ssl.ca.location": self.ca,
        }

    def http(self, path: str, authorization: str, method: str = "GET") -> tuple[int, str]:
        request = urllib.request.Request(f"{self.broker.url}{path}", method=method)
        request.add_header("Authorization", authorization)
        if method != "GET":
            request.data = b"{}"
            request.add_header("Content-Type", "application/json")
        context = ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def send_requests(self) -> list[str]:
        """Send requests with right and with wrong credentials; return the answers over HTTP."""
        for user, password, mechanism in (
            ("alice", OF_ALICE, "PLAIN"),
            ("alice", OF_ALICE, "SCRAM-SHA-256"),
            ("bob", OF_BOB, "SCRAM-SHA-256"),
            ("bob", WRONG, "PLAIN"),
            (WRONG[::-1], WRONG, "SCRAM-SHA-256"),
        ):
            config = {**self.client(user, password, mechanism), "log_level": "0"}
            producer = Producer({**config, "message.timeout.ms": "2000"})
            producer.produce("orders", b"value")
            producer.flush(0.5 if password == WRONG else 20)
            producer.purge()
        tokens = (OF_HTTP, self.token, WRONG)
        users = (f"alice:{OF_ALICE}", f"bob:{OF_BOB}", f"alice:{WRONG}")
        basics = [base64.b64encode(user.encode()).decode() for user in users]
        answers = []
        for header in (*(f"Bearer {t}" for t in tokens), *(f"Basic {b}" for b in basics)):
            status, text = self.http("/api/v1/cleaner/pause", header, "POST")
            answers.append(text)
            if status != 401:  # the answers to wrong credentials wait longer and longer
                answers += [self.http(path, header)[1] for path in PATHS]
        return answers

    def administer(self) -> list[str]:
        """Create a user, change and describe settings; return what the broker answered."""
        admin = AdminClient(self.client("alice", OF_ALICE))
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        change = UserScramCredentialUpsertion("carol", info, OF_CAROL.encode())
        for future in admin.alter_user_scram_credentials([change]).values():
            future.result(20)
        resource = ConfigResource(
            ResourceType.TOPIC,
            "orders",
            incremental_configs=[
                ConfigEntry(
                    "ssl.keystore.password",
                    OF_A_SETTING,
                    incremental_operation=AlterConfigOpType.SET,
                )
            ],
        )
        answers = []
        for refused in admin.incremental_alter_configs([resource]).values():
            with pytest.raises(KafkaException) as error:
                refused.result(20)
            answers.append(str(error.value))
        resources = [ConfigResource(ResourceType.BROKER, "1"), ConfigResource(2, "orders")]
        for described in admin.describe_configs(resources).values():
            answers += [f"{e.name}={e.value}" for e in described.result(20).values()]
        for users in admin.describe_user_scram_credentials(["carol"]).values():
            answers.append(repr(vars(users.result(20))))
        return answers


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("secrets"))
    yield daemon
    daemon.broker.stop()


def processes(pid: int) -> Iterator[Path]:
    """Yield the folders in /proc of a process and of those that it started."""
    yield Path(f"/proc/{pid}")
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from processes(int(child))


def test_no_secret_is_in_what_others_can_read(daemon: Daemon) -> None:
    broker = daemon.broker
    answers = daemon.send_requests() + daemon.administer()
    broker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "settings reloaded" in broker.log_text, "a reload")
    checked = CliRunner().invoke(
        main, ["check-config", str(broker.directory / "varve.yaml")], env={BOB_VARIABLE: OF_BOB}
    )
    assert checked.exit_code == 0, checked.output
    assert len(answers) > 50
    assert "authentication failed" in broker.log_text
    for text in (*answers, checked.output, broker.log_text, daemon.audit_log.read_text()):
        assert findings(text) == []
        assert daemon.token not in text
    files = [path for path in broker.data.rglob("*") if path.is_file()]
    assert any(path.name == "varve.metadata" for path in files)
    for path in files:
        assert findings(path.read_bytes()) == [], path


def test_no_secret_is_in_the_command_line_or_environment_of_a_process(daemon: Daemon) -> None:
    """Except in the broker's own environment, where the operator put one of them."""
    folders = list(processes(daemon.broker.process.pid))
    assert len(folders) >= 3, "the broker and its workers"
    for folder in folders:
        assert findings((folder / "cmdline").read_bytes()) == []
    own, *workers = [findings((folder / "environ").read_bytes()) for folder in folders]
    assert own == [OF_BOB]
    assert not any(workers)
