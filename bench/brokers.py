"""Varve and Apache Kafka as processes for the benchmarks, started the same way."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic

from tests.support import kafka
from tests.support.ports import free_port

READY_SECONDS = 60


@dataclass
class Broker:
    """A running broker under test."""

    name: str
    bootstrap: str
    pid: int
    data: Path

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


@contextmanager
def varve(data: Path | None = None, config: Path | None = None) -> Iterator[Broker]:
    """A Varve broker on a free port with the defaults of a new user."""
    directory = Path(tempfile.mkdtemp(prefix="varve-bench-"))
    port, http = free_port(), free_port()
    command = [sys.executable, "-m", "broker.cli", "serve", "--listen", f"127.0.0.1:{port}"]
    command += ["--http", f"127.0.0.1:{http}", "--data", str(data or directory / "data")]
    command += ["--config", str(config)] if config else []
    with (directory / "log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until_ready(f"127.0.0.1:{port}")
        yield Broker("varve", f"127.0.0.1:{port}", process.pid, data or directory / "data")
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def apache_kafka() -> Iterator[Broker]:
    """Apache Kafka 4.3.0 in KRaft mode, heap 1 GB."""
    directory = Path(tempfile.mkdtemp(prefix="kafka-bench-"))
    server = kafka.start_kafka(directory, jvm=())
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


def wait_until_ready(bootstrap: str) -> None:
    """Until the broker answers a metadata request. Raises TimeoutError."""
    host, _, port = bootstrap.rpartition(":")
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if kafka.answers(host, int(port)):
            return
        time.sleep(0.02)
    raise TimeoutError(f"{bootstrap} was not ready in {READY_SECONDS} s")
