"""Varve's own clients over TLS and SASL: blocking reads, sizes on disk, and writes by librdkafka.

Against our broker, and against Apache Kafka with every mechanism.
"""

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from config.security.clients import MECHANISMS, Cluster, parse_client_security
from pipeline.client.kafka_client import WireClient
from pipeline.client.producer import BulkProducer
from pipeline.client.topics import create_topic, fetch_settings
from protocol.client.administration import LogDirClient
from protocol.client.connection import SecurityRefusedError, WireError
from storage.model import TopicPartition
from tests.support.certificates import Authority
from tests.support.draws import only_in_ci
from tests.support.identity_provider import AUDIENCE, IdentityProvider
from tests.support.peers import kafka
from tests.support.ports import free_port
from tests.support.varve import running_varve
from tests.support.waiting import wait_until

SECURITY = "org.apache.kafka.common.security"


def cluster(address: str, **settings: str) -> Cluster:
    named = {name.replace("_", "."): value for name, value in settings.items()}
    return Cluster(address, parse_client_security(named))


def write_and_read(target: Cluster, topic: str) -> None:
    create_topic(target, topic, 1, {"cleanup.policy": "compact"})
    values = [bytes([index]) * 50_000 for index in range(100)]
    with BulkProducer(target) as producer:
        for value in values:
            producer.send(topic, b"k", value)
    with WireClient(target) as client:
        fetched = client.fetch(TopicPartition(topic, 0), 0, max_bytes=16 << 20).records
        assert all(value in fetched for value in values)
    with LogDirClient(target) as sizes:
        assert sizes.size_of(topic) >= len(values) * 50_000
    assert fetch_settings(target, topic)["cleanup.policy"] == "compact"


class Files:
    """An authority, and the settings of a client that trusts it."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.server = self.authority.write("server.pem", self.authority.leaf("broker").pem())
        self.trust = {"security_protocol": "SSL", "ssl_truststore_location": self.authority.path}

    def certificate(self) -> dict[str, str]:
        path = self.authority.write("client.p12", self.authority.leaf("alice").pkcs12("st0re"))
        return {"ssl_keystore_location": path, "ssl_keystore_password": "st0re"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Iterator[str]:
    """A daemon that requires client certificates."""
    port = free_port()
    tls = {
        "certificate_file": files.server,
        "ca_file": files.authority.path,
        "client_auth": "required",
    }
    settings = {"listeners": [f"SSL://0.0.0.0:{port}"], "tls": tls}
    with running_varve(tmp_path_factory.mktemp("varve"), settings):
        yield f"localhost:{port}"


def test_own_clients_write_and_read_with_a_certificate(mutual: str, files: Files) -> None:
    write_and_read(cluster(mutual, **files.trust, **files.certificate()), "mutual")


def test_a_client_without_a_certificate_is_refused_at_once(mutual: str, files: Files) -> None:
    started = time.monotonic()
    with (
        WireClient(cluster(mutual, **files.trust)) as client,
        pytest.raises(
            SecurityRefusedError,
            match=r"CERTIFICATE_REQUIRED; the client needs a certificate \(ssl.keystore.location\)",
        ),
    ):
        client.topics()
    assert time.monotonic() - started < 4, "it tried again"


def test_an_unknown_authority_and_another_host_are_refused(
    mutual: str, files: Files, tmp_path: Path
) -> None:
    certificate = files.certificate()
    other = Authority(tmp_path)
    wrong_authority = {**files.trust, "ssl_truststore_location": other.path}
    cases = [
        (mutual, wrong_authority, "is not trusted: .*; name its CA in ssl.truststore.location"),
        (
            mutual.replace("localhost", "127.0.0.2"),
            files.trust,
            r"IP address mismatch.*'127.0.0.2'\.$",
        ),
    ]
    for address, trust, reason in cases:
        with (
            WireClient(cluster(address, **trust, **certificate)) as client,
            pytest.raises(SecurityRefusedError, match=reason),
        ):
            client.topics()


def test_tls_to_a_port_without_tls_says_so(files: Files, tmp_path: Path) -> None:
    with running_varve(tmp_path) as broker:
        target = cluster(f"127.0.0.1:{broker.port}", **files.trust)
        with (
            WireClient(target, timeout_seconds=5) as client,
            pytest.raises(WireError, match=r"WRONG_VERSION_NUMBER|EOF|closed"),
        ):
            client.topics()


def unsigned_token() -> str:
    claims = {"sub": "alice", "iat": int(time.time()), "exp": int(time.time()) + 3600}
    parts = (json.dumps(part).encode() for part in ({"alg": "none"}, claims))
    encoded = (base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)
    return ".".join((*encoded, ""))


class Secured:
    """A broker with every mechanism that we support."""

    def __init__(self, address: str, files: Files, folder: Path, token: str) -> None:
        self.address = address
        self._trust = {**files.trust, "security_protocol": "SASL_SSL"}
        self.folder, self._token = folder, token

    def cluster(
        self, mechanism: str, password: str = "s3cret", *, token: str | None = None
    ) -> Cluster:
        file = self.folder / ("token" if token is None else "other-token")
        file.write_text(self._token if token is None else token)
        module = f"{SECURITY}.plain.PlainLoginModule"
        if mechanism.startswith("SCRAM"):
            module = f"{SECURITY}.scram.ScramLoginModule"
        return cluster(
            self.address,
            **self._trust,
            sasl_mechanism=mechanism,
            sasl_jaas_config=f'{module} required username="al,ice" password="{password}";',
            sasl_oauthbearer_token_endpoint_url=file.as_uri(),
        )


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Iterator[Secured]:
    missing = kafka.unavailable()
    if missing is not None:
        pytest.skip(missing)
    folder, port = tmp_path_factory.mktemp("kafka"), free_port()
    listener = "listener.name.sasl_ssl"
    oauth, scram = f"{SECURITY}.oauthbearer", f"{SECURITY}.scram.ScramLoginModule required;"
    settings = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": files.server,
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        f"{listener}.plain.sasl.jaas.config": f"{SECURITY}.plain.PlainLoginModule required "
        '"user_al,ice"="s3cret";',
        f"{listener}.scram-sha-256.sasl.jaas.config": scram,
        f"{listener}.scram-sha-512.sasl.jaas.config": scram,
        f"{listener}.oauthbearer.sasl.jaas.config": f"{oauth}.OAuthBearerLoginModule required "
        'unsecuredLoginStringClaim_sub="admin";',
        f"{listener}.oauthbearer.connections.max.reauth.ms": "3600000",
        f"{listener}.plain.connections.max.reauth.ms": "1500",
    }
    with kafka.running_kafka(folder, settings, listeners={"SASL_SSL": port}) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            change = UserScramCredentialUpsertion(
                "al,ice", ScramCredentialInfo(mechanism, 4096), b"s3cret"
            )
            (result,) = admin.alter_user_scram_credentials([change]).values()
            result.result(30)
        yield Secured(f"localhost:{port}", files, folder, unsigned_token())


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Iterator[Secured]:
    folder, port, provider = tmp_path_factory.mktemp("sasl"), free_port(), IdentityProvider()
    (folder / "password").write_text("s3cret")
    (folder / "keys.json").write_bytes(provider.jwks())
    sasl = {
        "mechanisms": list(MECHANISMS),
        "users": {"al,ice": {"file": str(folder / "password")}},
        "oauthbearer": {"jwks_file": str(folder / "keys.json"), "audience": [AUDIENCE]},
        "max_reauth_ms": 2_000,
    }
    tls = {"certificate_file": files.server}
    settings = {"listeners": [f"SASL_SSL://localhost:{port}"], "tls": tls, "sasl": sasl}
    with running_varve(folder, settings):
        token = provider.token(int(time.time()) + 3600)
        yield Secured(f"localhost:{port}", files, folder, token)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_own_clients_use_every_mechanism_of_our_broker(daemon: Secured, mechanism: str) -> None:
    write_and_read(daemon.cluster(mechanism), f"varve-{mechanism}")


def test_our_broker_refuses_a_wrong_password(daemon: Secured) -> None:
    with (
        WireClient(daemon.cluster("SCRAM-SHA-256", "guess")) as client,
        pytest.raises(SecurityRefusedError, match="uthentication failed"),
    ):
        client.topics()


def test_our_broker_logs_why_it_refuses_a_token(daemon: Secured) -> None:
    with (
        WireClient(daemon.cluster("OAUTHBEARER", token=unsigned_token())) as client,
        pytest.raises(SecurityRefusedError, match="refused the token: invalid_token"),
    ):
        client.topics()
    lines = (daemon.folder / "varve.log").read_text().splitlines()
    assert [line for line in lines if "authentication failed: " in line and "OAUTHBEARER" in line]


def ask_for(seconds: float, sizes: LogDirClient, topic: str) -> None:
    end = time.monotonic() + seconds

    def is_over() -> bool:
        sizes.size_of(topic)
        return time.monotonic() > end

    wait_until(is_over, "requests are answered all the time")


def test_a_connection_outlives_its_session_with_our_broker(daemon: Secured) -> None:
    with LogDirClient(daemon.cluster("SCRAM-SHA-512")) as sizes:
        ask_for(3, sizes, "varve-PLAIN")  # a session of 2 s, and more


@only_in_ci("Kafka is asked; the same clients ask our broker in tests above")
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_own_clients_write_and_read_with_every_mechanism(secured: Secured, mechanism: str) -> None:
    write_and_read(secured.cluster(mechanism), f"kafka-{mechanism}")


@only_in_ci("Kafka is asked; the same clients ask our broker in tests above")
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_wrong_password_is_refused_at_once(secured: Secured, mechanism: str) -> None:
    started = time.monotonic()
    with (
        WireClient(secured.cluster(mechanism, "guess")) as client,
        pytest.raises(SecurityRefusedError, match="uthentication failed") as error,
    ):
        client.topics()
    assert "guess" not in str(error.value)
    assert time.monotonic() - started < 4, "it tried again"


@only_in_ci("Kafka is asked; the same clients ask our broker in tests above")
def test_a_connection_outlives_its_session(secured: Secured) -> None:
    with LogDirClient(secured.cluster("PLAIN")) as sizes:
        ask_for(4, sizes, "kafka-PLAIN")  # two sessions of 1.5 s and more
