"""Real clients over TLS, against a daemon that requires client certificates."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiokafka
import kafka
import pytest
from aiokafka.helpers import create_ssl_context
from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from tests.support.certificates import Authority
from tests.support.draws import cases
from tests.support.peers import kafka as java
from tests.support.ports import free_port
from tests.support.varve import running_varve


class Secured:
    """A daemon with TLS, and the files of a client."""

    def __init__(self, folder: Path, bootstrap: str, authority: Authority) -> None:
        self.bootstrap = bootstrap
        self.authority = authority
        self.ca = authority.path
        self.certificate = authority.write("client.pem", authority.leaf("alice").pem())

    def librdkafka(self, **options: str) -> dict[str, str]:
        return {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": "SSL",
            "ssl.ca.location": self.ca,
            "ssl.certificate.location": self.certificate,
            "ssl.key.location": self.certificate,
            **options,
        }


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    bootstrap = f"localhost:{free_port()}"
    tls = {
        "certificate_file": authority.write("server.pem", authority.leaf("broker").pem()),
        "ca_file": authority.path,
        "client_auth": "required",
    }
    settings = {"listeners": [f"SSL://{bootstrap}"], "advertise": bootstrap, "tls": tls}
    with running_varve(folder, settings):
        yield Secured(folder, bootstrap, authority)


@pytest.fixture(scope="module")
def authorized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A daemon that knows its users by their certificates, and allows what its ACLs allow."""
    folder = tmp_path_factory.mktemp("authorized")
    authority = Authority(folder)
    bootstrap = f"localhost:{free_port()}"
    settings = {
        "listeners": [f"SSL://{bootstrap}"],
        "advertise": bootstrap,
        "tls": {
            "certificate_file": authority.write("server.pem", authority.leaf("broker").pem()),
            "ca_file": authority.path,
            "client_auth": "required",
            "principal_mapping_rules": ["RULE:^CN=(.*)$/$1/L"],
        },
        "authorization": {"enabled": True, "super_users": ["User:root"]},
    }
    with running_varve(folder, settings):
        yield Secured(folder, bootstrap, authority)


VALUES = [bytes([index]) * 5_000 for index in range(200)]


def test_confluent_kafka_writes_and_reads_over_tls(secured: Secured) -> None:
    producer = Producer(secured.librdkafka())
    for value in VALUES:
        producer.produce("confluent", value)
    assert producer.flush(30) == 0
    consumer = Consumer(secured.librdkafka(**{"group.id": "g", "auto.offset.reset": "earliest"}))
    consumer.subscribe(["confluent"])
    received: list[bytes | None] = []
    while len(received) < len(VALUES):
        messages = consumer.consume(200, 30)
        assert messages, len(received)
        received += [message.value() for message in messages]
    consumer.close()
    assert received == VALUES


def test_a_client_without_a_certificate_cannot_produce(secured: Secured) -> None:
    config = {
        "bootstrap.servers": secured.bootstrap,
        "security.protocol": "SSL",
        "ssl.ca.location": secured.ca,
        "message.timeout.ms": 2_000,
    }
    errors: list[object] = []
    producer = Producer(config)
    producer.produce("refused", b"x", on_delivery=lambda error, _: errors.append(error))
    producer.flush(20)
    assert errors
    assert errors[0] is not None


def test_kafka_python_writes_over_tls(secured: Secured) -> None:
    producer = kafka.KafkaProducer(
        bootstrap_servers=secured.bootstrap,
        security_protocol="SSL",
        ssl_cafile=secured.ca,
        ssl_certfile=secured.certificate,
        ssl_keyfile=secured.certificate,
    )
    assert producer.send("python", b"v").get(30).offset == 0
    producer.close()


async def test_aiokafka_writes_over_tls(secured: Secured) -> None:
    context = create_ssl_context(
        cafile=secured.ca, certfile=secured.certificate, keyfile=secured.certificate
    )
    async with (
        asyncio.timeout(60),
        aiokafka.AIOKafkaProducer(
            bootstrap_servers=secured.bootstrap, security_protocol="SSL", ssl_context=context
        ) as producer,
    ):
        assert (await producer.send_and_wait("aio", b"v")).offset == 0


# The kind of key store is a matter of the Java client.
@pytest.mark.parametrize("store", cases(few=["PEM"], many=["PEM", "PKCS12"]))
def test_java_writes_and_reads_over_tls(secured: Secured, tmp_path: Path, store: str) -> None:
    missing = java.unavailable()
    if missing is not None:
        pytest.skip(missing)
    leaf = secured.authority.leaf("java")
    suffix, data = ("pem", leaf.pem()) if store == "PEM" else ("p12", leaf.pkcs12("st0re"))
    properties = {
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": secured.ca,
        "ssl.keystore.type": store,
        "ssl.keystore.location": secured.authority.write(f"java.{suffix}", data),
    }
    if store == "PKCS12":
        properties |= {"ssl.keystore.password": "st0re", "ssl.key.password": "st0re"}
    config = tmp_path / "client.properties"
    config.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    topic = f"java-{store}"
    address = ("--bootstrap-server", secured.bootstrap, "--topic", topic)
    done = java.run_program(
        "org.apache.kafka.tools.VerifiableProducer", *address, "--max-messages", "1000",
        "--command-config", str(config),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    done = java.run_tool(
        "org.apache.kafka.tools.consumer.ConsoleConsumer", *address, "--from-beginning",
        "--max-messages", "1000", "--timeout-ms", "30000", "--command-config", str(config),
    )  # fmt: skip
    assert sorted(map(int, done.stdout.split())) == list(range(1000)), done.stderr[-2000:]


def test_a_certificate_names_the_user_whose_permissions_count(authorized: Secured) -> None:
    def config(common_name: str) -> dict[str, str]:
        leaf = authorized.authority.leaf(common_name)
        path = authorized.authority.write(f"{common_name}.pem", leaf.pem())
        files = {"ssl.certificate.location": path, "ssl.key.location": path}
        return authorized.librdkafka() | files

    admin = AdminClient(config("Root"))  # the rule turns names into lower case
    admin.create_topics([NewTopic("hers", 1, 1)])["hers"].result(30)
    acl = AclBinding(
        ResourceType.TOPIC, "hers", ResourcePatternType.LITERAL,
        "User:alice", "*", AclOperation.WRITE, AclPermissionType.ALLOW,
    )  # fmt: skip
    admin.create_acls([acl])[acl].result(30)

    def produce(common_name: str) -> KafkaError | None:
        errors: list[KafkaError | None] = []
        producer = Producer(config(common_name))
        producer.produce("hers", b"v", on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(30) == 0
        return errors[0]

    assert produce("Alice") is None
    error = produce("Bob")
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
