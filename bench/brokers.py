"""Varve and Apache Kafka as processes for the benchmarks, started the same way."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.certificates import Authority
from tests.support.peers import kafka
from tests.support.ports import free_port

READY_SECONDS = 60


@dataclass
class Broker:
    """A running broker under test."""

    name: str
    bootstrap: str
    pid: int
    data: Path
    client: dict[str, str] = field(default_factory=dict)  # settings to connect with TLS

    @property
    def connection(self) -> dict[str, str]:
        """The settings of a client of librdkafka."""
        return {"bootstrap.servers": self.bootstrap, **self.client}

    @property
    def port(self) -> int:
        return int(self.bootstrap.rpartition(":")[2])

    def resident_mb(self) -> float:
        """Resident memory of the broker process itself, workers apart."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * 4096 / 1e6

    def create_topic(self, name: str, *, partitions: int = 1, **config: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
        for future in admin.create_topics([topic]).values():
            future.result(30)

    def delete_topic(self, name: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        for future in admin.delete_topics([name]).values():
            future.result(30)


@dataclass(frozen=True)
class Tls:
    """The certificate of both brokers, and the settings of clients. TLS 1.3 has one cipher here."""

    folder: Path

    CIPHER = "TLS_AES_256_GCM_SHA384"

    def client(self, port: int) -> dict[str, str]:
        return {
            "bootstrap.servers": f"localhost:{port}",
            "security.protocol": "SSL",
            "ssl.ca.location": str(self.folder / "ca.pem"),
        }

    def varve_config(self, port: int, secure: int) -> Path:
        path = self.folder / "varve.yaml"
        settings = {
            "listeners": [f"127.0.0.1:{port}", f"SSL://127.0.0.1:{secure}"],
            "tls": {"certificate_file": str(self.folder / "server.pem"), "min_version": "TLSv1.3"},
        }
        path.write_text(json.dumps(settings))
        return path

    def kafka_settings(self) -> dict[str, str]:
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.folder / "server.pem"),
            "ssl.enabled.protocols": "TLSv1.3",
            "ssl.cipher.suites": self.CIPHER,
        }


@contextmanager
def certificates() -> Iterator[Tls]:
    """Certificates in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench-tls-") as folder:
        authority = Authority(Path(folder))
        authority.write("server.pem", authority.leaf("broker").pem())
        yield Tls(Path(folder))


@contextmanager
def both_with_tls() -> Iterator[list[Broker]]:
    """As `both`, with clients that connect with TLS."""
    with certificates() as tls:
        port, secure = free_port(), free_port()
        config = tls.varve_config(port, secure)
        with varve(config=config, port=port) as broker:
            broker.client = tls.client(secure)
            reason = kafka.unavailable()
            if reason is not None:
                print(f"Apache Kafka is not measured: {reason}")
                yield [broker]
                return
            secure = free_port()
            with apache_kafka(tls.kafka_settings(), listeners={"SSL": secure}) as remote:
                remote.client = tls.client(secure)
                yield [broker, remote]


@contextmanager
def varve(
    data: Path | None = None, config: Path | None = None, port: int | None = None
) -> Iterator[Broker]:
    """A Varve broker on a free port with the defaults of a new user."""
    directory = Path(tempfile.mkdtemp(prefix="varve-bench-"))
    listen = [] if port else ["--listen", f"127.0.0.1:{(port := free_port())}"]
    http = free_port()
    command = [sys.executable, "-m", "broker.cli", "serve", *listen]
    command += ["--http", f"127.0.0.1:{http}", "--data", str(data or directory / "data")]
    command += ["--config", str(config)] if config else []
    with (directory / "log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until_ready(f"127.0.0.1:{port}", process, directory / "log")
        yield Broker("varve", f"127.0.0.1:{port}", process.pid, data or directory / "data")
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def apache_kafka(
    settings: dict[str, str] | None = None, listeners: dict[str, int] | None = None
) -> Iterator[Broker]:
    """Apache Kafka 4.3.0 in KRaft mode, heap 1 GB."""
    directory = Path(tempfile.mkdtemp(prefix="kafka-bench-"))
    server = kafka.start_kafka(directory, settings, jvm=(), listeners=listeners)
    try:
        yield Broker("kafka", server.bootstrap, server.process.pid, server.data)
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def both() -> Iterator[list[Broker]]:
    """Varve, and Kafka beside it where it can be had; says so where it cannot."""
    with varve() as broker:
        reason = kafka.unavailable()
        if reason is not None:
            print(f"Apache Kafka is not measured: {reason}")
            yield [broker]
            return
        with apache_kafka() as remote:
            yield [broker, remote]


def wait_until_ready(bootstrap: str, process: subprocess.Popen[bytes], output: Path) -> None:
    """Until the broker answers a metadata request; `output` is the file that it writes its log to.

    Raises RuntimeError if the process ends, TimeoutError if it takes longer than READY_SECONDS.
    """
    host, _, port = bootstrap.rpartition(":")
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if kafka.answers(host, int(port)):
            return
        if process.poll() is not None:
            raise RuntimeError(f"the broker ended:\n{output.read_text()}")
        time.sleep(0.02)
    raise TimeoutError(f"{bootstrap} was not ready in {READY_SECONDS} s:\n{output.read_text()}")
