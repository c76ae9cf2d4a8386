"""Every API and version as Kafka's own Java classes read and write it: byte for byte."""

import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import codec
from protocol.api import APIS, ApiKey
from protocol.schema import Direction
from tests.support.draws import cases
from tests.support.peers import maven
from tests.support.peers.java_programs import java_command
from tests.support.protocol.messages import api_name, random_body, versions_of

KAFKA_VERSION = "4.3.0"
POM = Path(__file__).parents[1] / "support" / "peers" / "kafka-clients-pom.xml"
JARS = f"clients-{KAFKA_VERSION}"
MESSAGES = cases(few=3, many=8)  # of each version


class KafkaClients:
    """Kafka's classes in a process of their own."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def rewrite(self, case: tuple[int, int], direction: Direction, body: bytes) -> bytes:
        """Return what they write after they read a body."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        head = struct.pack(">hh?i", *case, direction == "request", len(body))
        requests.write(head + body)
        requests.flush()
        is_read, size = struct.unpack(">?i", answers.read(5))
        answer = answers.read(size)
        assert is_read, answer.decode()
        return answer


@pytest.fixture(scope="module")
def kafka_clients() -> Iterator[KafkaClients]:
    reason = maven.unavailable(POM, JARS, (f"kafka.version={KAFKA_VERSION}",))
    if reason is not None:
        pytest.skip(f"Kafka's Java classes cannot be run here: {reason}")
    command = java_command(maven.FOLDER / JARS, "RewriteMessages")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield KafkaClients(process)
        process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize("direction", ["request", "response"])
@pytest.mark.parametrize("key", sorted(APIS), ids=api_name)
def test_a_message_has_the_bytes_that_kafka_gives_it(
    key: int, direction: Direction, kafka_clients: KafkaClients
) -> None:
    for case in versions_of(key):
        version = case[1]
        rng = random.Random(f"{case} {direction}")
        flexible = APIS[key].is_flexible(version)
        for _ in range(MESSAGES):
            message = random_body(rng, key, version, direction)
            if direction == "request":
                frame = codec.encode_request(key, version, 7, "me", message)[4 + 12 + flexible :]
            else:
                has_tags = flexible and key != ApiKey.API_VERSIONS
                frame = codec.encode_response(key, version, 7, message)[4 + 4 + has_tags :]
            assert kafka_clients.rewrite(case, direction, frame) == frame, version
