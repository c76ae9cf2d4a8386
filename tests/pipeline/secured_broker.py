"""A daemon that demands TLS, users and https."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from config.security.clients import Cluster, read_command_config
from pipeline.client.producer import BulkProducer
from pipeline.client.topics import create_topic
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.varve import VarveBroker, running_varve

PASSWORD = "s3cret-of-alice"
MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


class Secured:
    """A daemon, and the settings of a client."""

    def __init__(self, broker: VarveBroker, bootstrap: str, authority: Authority) -> None:
        self.broker, self.bootstrap = broker, bootstrap
        self.properties = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.jaas.config": f'{MODULE} required username="alice" password="{PASSWORD}";',
            "ssl.truststore.location": authority.path,
        }
        lines = [f"{name}={value}\n" for name, value in self.properties.items()]
        self.config = authority.write("client.properties", "".join(lines).encode())

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.bootstrap, read_command_config(self.config))

    def options(self, **more: str) -> dict[str, str]:
        named = {f"kafka.{name}": value for name, value in self.properties.items()}
        return {"kafka.bootstrap.servers": self.bootstrap, **named, **more}

    def fill(self, topic: str) -> None:
        create_topic(self.cluster, topic, 2, {"cleanup.policy": "compact"})
        with BulkProducer(self.cluster) as producer:
            for index in range(100):
                producer.send(topic, b"%d" % (index % 10), b"value %d" % index)


@contextmanager
def running_secured(folder: Path, settings: dict[str, object]) -> Iterator[Secured]:
    authority = Authority(folder)
    bootstrap = f"localhost:{free_port()}"
    secured = {
        **settings,
        "listeners": [f"SASL_SSL://{bootstrap}"],
        "advertise": bootstrap,
        "tls": {"certificate_file": authority.write("server.pem", authority.leaf("b").pem())},
        "sasl": {"users": {"alice": {"file": authority.write("password", PASSWORD.encode())}}},
        "authorization": {"enabled": True, "super_users": ["User:alice"]},
        "http_tls": True,
        "http_users": True,
    }
    with running_varve(folder / "varve", secured) as broker:
        yield Secured(broker, bootstrap, authority)
