"""A worker of Kafka Connect in distributed mode, with connectors from and to files."""

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.peers.java_programs import quick_java
from tests.support.peers.maven import FOLDER
from tests.support.ports import free_port
from tests.support.waiting import wait_until

POM = Path(__file__).with_name("kafka-apps-pom.xml")
JARS = FOLDER / "apps"
MAIN = "org.apache.kafka.connect.cli.ConnectDistributed"
START_SECONDS = 90


class ConnectWorker:
    """The REST interface of a worker."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def create(self, name: str, config: Mapping[str, str]) -> None:
        self._ask("POST", "/connectors", {"name": name, "config": dict(config)})

    def answers(self) -> bool:
        try:
            self._ask("GET", "/connectors")
        except OSError:
            return False
        return True

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code in (404, 409, 503):  # it starts, or rebalances
                raise OSError(error.read().decode()) from error
            raise AssertionError(error.read().decode()) from error


@contextmanager
def running_connect(directory: Path, connection: Mapping[str, str]) -> Iterator[ConnectWorker]:
    """A worker whose sources write in transactions; killed at the end."""
    directory.mkdir()
    port = free_port()
    converter = "org.apache.kafka.connect.storage.StringConverter"
    topics = {
        f"{kind}.storage.{key}": value
        for kind in ("config", "offset", "status")
        for key, value in (
            ("topic", f"connect-{kind}-{port}"),
            ("replication.factor", "1"),
            *((("partitions", "1"),) if kind != "config" else ()),
        )
    }
    settings = {
        **connection,
        **{f"{kind}.{key}": value for kind in ("producer", "consumer", "admin")
           for key, value in connection.items()},
        **topics,
        "group.id": f"connect-{port}",
        "key.converter": converter,
        "value.converter": converter,
        "listeners": f"http://127.0.0.1:{port}",
        "exactly.once.source.support": "enabled",
        "offset.flush.interval.ms": "500",
        "scheduled.rebalance.max.delay.ms": "0",
    }  # fmt: skip
    path = directory / "worker.properties"
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    command = [*quick_java(JARS), MAIN, str(path)]
    with (directory / "connect.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=directory)
    try:
        worker = ConnectWorker(port)
        wait_until(worker.answers, "Connect's REST interface", START_SECONDS)
        yield worker
    finally:
        process.kill()
        process.wait(60)
