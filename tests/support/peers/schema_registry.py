"""Apicurio Registry, which keeps its schemas in a topic, with the API of Confluent's registry."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.peers import maven
from tests.support.peers.maven import QUICK_JVM
from tests.support.ports import free_port
from tests.support.waiting import wait_until

POM = Path(__file__).with_name("schema-registry-pom.xml")
FOLDER = maven.FOLDER / "schema-registry"
START_SECONDS = 90
PREFIX = "apicurio.kafka.common"  # of settings that every Kafka client of the registry gets


class SchemaRegistry:
    """The REST interface of a registry."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def register(self, subject: str, schema: object) -> int:
        """Add a schema; return its id."""
        body = {"schema": json.dumps(schema)}
        answer = self._ask("POST", f"/apis/ccompat/v7/subjects/{subject}/versions", body)
        return int(answer["id"])

    def schema(self, number: int) -> object:
        return json.loads(self._ask("GET", f"/apis/ccompat/v7/schemas/ids/{number}")["schema"])

    def is_ready(self) -> bool:
        try:
            self._ask("GET", "/health/ready")
        except OSError:
            return False
        return True

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)


def unavailable() -> str | None:
    """Why the registry cannot be run here, or None."""
    return maven.unavailable(POM, FOLDER.name, unpacked=True)


@contextmanager
def running_registry(
    directory: Path, connection: Mapping[str, str], journal: str
) -> Iterator[SchemaRegistry]:
    """A registry with its state in the topic `journal`; killed at the end."""
    directory.mkdir()
    port = free_port()
    settings = {
        "apicurio.storage.kind": "kafkasql",
        "apicurio.kafkasql.bootstrap.servers": connection["bootstrap.servers"],
        "apicurio.kafkasql.topic": journal,
        "apicurio.kafkasql.snapshots.topic": f"{journal}-snapshots",
        "apicurio.events.kafka.topic": f"{journal}-events",
        "quarkus.http.host": "127.0.0.1",
        "quarkus.http.port": str(port),
        **{f"{PREFIX}.{key}": value for key, value in connection.items()},
    }
    path = directory / "registry.properties"
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    (jar,) = FOLDER.glob("*-runner.jar")
    command = ["java", *QUICK_JVM, "-Xmx512m", f"-Dsmallrye.config.locations={path}"]
    with (directory / "registry.log").open("wb") as output:
        process = subprocess.Popen(
            [*command, "-jar", str(jar)], stdout=output, stderr=output, cwd=directory
        )
    try:
        registry = SchemaRegistry(port)
        wait_until(registry.is_ready, "the schema registry is ready", START_SECONDS)
        yield registry
    finally:
        process.kill()
        process.wait(60)
