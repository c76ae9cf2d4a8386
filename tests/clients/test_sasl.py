"""Real clients over SASL_PLAINTEXT and SASL_SSL, with each mechanism, against one daemon."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiokafka
import kafka
import pytest
from aiokafka.abc import AbstractTokenProvider
from aiokafka.helpers import create_ssl_context
from click.testing import CliRunner
from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka.admin import AdminClient

from broker.cli import main
from tests.support.certificates import Authority
from tests.support.identity_provider import AUDIENCE, ISSUER, IdentityProvider
from tests.support.ports import free_port
from tests.support.varve import VarveBroker, running_varve
from tests.support.waiting import wait_until

PASSWORD = "correct horse, battery=staple"
PASSWORD_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
PROTOCOLS = ("SASL_PLAINTEXT", "SASL_SSL")
CASES = [(protocol, mechanism) for protocol in PROTOCOLS for mechanism in PASSWORD_MECHANISMS]


@dataclass
class Secured:
    """A daemon with both kinds of listeners."""

    broker: VarveBroker
    addresses: dict[str, str]  # by protocol
    ca: str
    provider: IdentityProvider

    def token(self) -> str:
        return self.provider.token(time.time() + 300)

    def librdkafka(
        self, protocol: str, mechanism: str, password: str = PASSWORD, **options: str
    ) -> dict[str, str]:
        return {
            "bootstrap.servers": self.addresses[protocol],
            "security.protocol": protocol,
            "sasl.mechanism": mechanism,
            "sasl.username": "alice",
            "sasl.password": password,
            "ssl.ca.location": self.ca,
            **options,
        }


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("sasl")
    authority, provider = Authority(folder), IdentityProvider()
    addresses = {protocol: f"localhost:{free_port()}" for protocol in PROTOCOLS}
    settings = {
        "listeners": [f"{protocol}://{address}" for protocol, address in addresses.items()],
        "tls": {
            "certificate_file": authority.write("server.pem", authority.leaf("broker").pem()),
            "ca_file": authority.path,
            "client_auth": "required",  # of SSL listeners, not of SASL_SSL
        },
        "sasl": {
            "mechanisms": [*PASSWORD_MECHANISMS, "OAUTHBEARER"],
            "users": {"alice": {"file": authority.write("alice.password", PASSWORD.encode())}},
            "failure_delay_ms": 10,
            "max_reauth_ms": 2_000,
            "oauthbearer": {
                "jwks_file": authority.write("jwks.json", provider.jwks()),
                "issuer": ISSUER,
                "audience": [AUDIENCE],
            },
        },
    }
    with running_varve(folder, settings) as broker:
        yield Secured(broker, addresses, authority.path, provider)
        assert PASSWORD not in broker.log_text


@pytest.mark.parametrize(("protocol", "mechanism"), CASES)
def test_confluent_kafka_writes_and_reads(secured: Secured, protocol: str, mechanism: str) -> None:
    topic = f"confluent-{protocol}-{mechanism}"
    producer = Producer(secured.librdkafka(protocol, mechanism))
    producer.produce(topic, b"value")
    assert producer.flush(30) == 0
    consumer = Consumer(
        secured.librdkafka(
            protocol, mechanism, **{"group.id": topic, "auto.offset.reset": "earliest"}
        )
    )
    consumer.subscribe([topic])
    (message,) = consumer.consume(1, 30)
    assert message.value() == b"value"
    consumer.close()


@pytest.mark.parametrize("mechanism", PASSWORD_MECHANISMS)
def test_confluent_kafka_reports_a_wrong_password(secured: Secured, mechanism: str) -> None:
    errors: list[KafkaError] = []
    config = {
        **secured.librdkafka("SASL_PLAINTEXT", mechanism, password="wrong"),
        "error_cb": errors.append,
        "log_level": 0,
    }
    admin = AdminClient(config)
    while not errors:
        admin.poll(1)
    assert errors[0].code() == KafkaError._AUTHENTICATION
    assert "Authentication failed" in errors[0].str()


@pytest.mark.parametrize(("protocol", "mechanism"), CASES)
def test_kafka_python_writes(secured: Secured, protocol: str, mechanism: str) -> None:
    options = {
        "bootstrap_servers": secured.addresses[protocol],
        "security_protocol": protocol,
        "sasl_mechanism": mechanism,
        "sasl_plain_username": "alice",
        "ssl_cafile": secured.ca,
    }
    producer = kafka.KafkaProducer(**options, sasl_plain_password=PASSWORD)
    assert producer.send("python", b"value").get(30).topic == "python"
    producer.close()


@pytest.mark.parametrize(("protocol", "mechanism"), CASES)
async def test_aiokafka_writes(secured: Secured, protocol: str, mechanism: str) -> None:
    options = {
        "bootstrap_servers": secured.addresses[protocol],
        "security_protocol": protocol,
        "sasl_mechanism": mechanism,
        "sasl_plain_username": "alice",
        "ssl_context": create_ssl_context(cafile=secured.ca) if protocol == "SASL_SSL" else None,
    }
    producer = aiokafka.AIOKafkaProducer(**options, sasl_plain_password=PASSWORD)
    await asyncio.wait_for(producer.start(), 30)
    try:
        assert (await producer.send_and_wait("aio", b"value")).topic == "aio"
    finally:
        await producer.stop()


def test_confluent_kafka_authenticates_again_before_its_session_ends(secured: Secured) -> None:
    config = secured.librdkafka("SASL_PLAINTEXT", "SCRAM-SHA-256", **{"linger.ms": "0"})
    errors: list[KafkaError] = []
    producer = Producer({**config, "error_cb": errors.append})
    name = "kafka_server_socket_server_metrics_successful_reauthentication_total"

    def has_authenticated_again() -> bool:
        producer.produce("sessions", b"value")
        assert producer.flush(30) == 0
        return secured.broker.metric(name, mechanism="SCRAM-SHA-256") > 0

    wait_until(has_authenticated_again, "a session has ended", 30)
    producer.produce("sessions", b"after it")
    assert producer.flush(30) == 0
    assert errors == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_confluent_kafka_writes_with_a_token(secured: Secured, protocol: str) -> None:
    config = secured.librdkafka(protocol, "OAUTHBEARER")
    for name in ("sasl.username", "sasl.password"):
        del config[name]
    producer = Producer(
        {**config, "oauth_cb": lambda _: (secured.token(), time.time() + 300)}  # type: ignore[dict-item]
    )
    producer.produce("tokens", b"value")
    assert producer.flush(30) == 0


class AioTokens(AbstractTokenProvider):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._token = token

    async def token(self) -> str:
        return self._token


async def test_aiokafka_writes_with_a_token(secured: Secured) -> None:
    producer = aiokafka.AIOKafkaProducer(
        bootstrap_servers=secured.addresses["SASL_PLAINTEXT"],
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_provider=AioTokens(secured.token()),
    )
    await asyncio.wait_for(producer.start(), 30)
    try:
        assert (await producer.send_and_wait("tokens", b"value")).topic == "tokens"
    finally:
        await producer.stop()


async def test_aiokafka_reports_a_refused_token(secured: Secured) -> None:
    producer = aiokafka.AIOKafkaProducer(
        bootstrap_servers=secured.addresses["SASL_PLAINTEXT"],
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_provider=AioTokens(secured.provider.token(1.0)),
    )
    with pytest.raises(aiokafka.errors.KafkaError):
        await asyncio.wait_for(producer.start(), 30)
    await producer.stop()


def test_varves_own_client_lists_users_with_a_token(secured: Secured, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(secured.token())
    properties = tmp_path / "client.properties"
    properties.write_text(
        "security.protocol=SASL_PLAINTEXT\n"
        "sasl.mechanism=OAUTHBEARER\n"
        f"sasl.oauthbearer.token.endpoint.url=file://{token}\n"
        "sasl.jaas.config=org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule "
        "required;\n"
    )
    address = secured.addresses["SASL_PLAINTEXT"]
    arguments = ["users", "list", "--bootstrap", address, "--command-config", str(properties)]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.output) == (0, "The broker stores no users.\n")
