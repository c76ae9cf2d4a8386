"""Record the answers of Apache Kafka 4.3 with StandardAuthorizer to questions about permissions.

    python -m tests.broker.security.permissions.record_permissions

needs Java; it takes some minutes and replaces kafka_permissions.json, which
test_permissions.py compares with this broker.
"""

import asyncio
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from protocol import messages as m
from protocol.api import ApiKey
from protocol.messages import Message
from tests.broker.security.permissions.asking import record
from tests.broker.security.permissions.users import SUPER_USER, users
from tests.support.peers.kafka import running_kafka
from tests.support.ports import free_port
from tests.support.protocol.raw_client import RawClient

TABLE: Final = Path(__file__).with_name("kafka_permissions.json")
PASSWORD: Final = "secret"


def settings() -> dict[str, str]:
    """Return the settings of a Kafka with the users of all questions."""
    names = [SUPER_USER, *(user for user, _ in users())]
    accounts = " ".join(f'user_{name}="{PASSWORD}"' for name in names)
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    return {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:ANONYMOUS;User:{SUPER_USER}",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": f"{module} required {accounts};",
    }


class Kafka:
    """A running Kafka with a connection for each user."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._clients: dict[str, RawClient] = {}
        self._open = ExitStack()

    def __enter__(self) -> "Kafka":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    async def ask(self, user: str, key: ApiKey, version: int, body: Message) -> Any:
        """Return the response to a request of a user."""
        client = self._clients.get(user)
        if client is None:
            client = self._clients[user] = self._open.enter_context(RawClient(self._port))
            handshake = m.SaslHandshakeRequest(mechanism="PLAIN")
            client.request(ApiKey.SASL_HANDSHAKE, 1, handshake)
            token = f"\0{user}\0{PASSWORD}".encode()
            authenticate = m.SaslAuthenticateRequest(auth_bytes=token)
            answer = client.request(ApiKey.SASL_AUTHENTICATE, 2, authenticate)
            assert isinstance(answer, m.SaslAuthenticateResponse)
            assert answer.error_code == 0, user
        try:
            return client.request(key, version, body)
        except (ConnectionError, TimeoutError) as error:
            raise AssertionError(f"{error!r}: {key.name} {version} of {user}: {body}") from None


def record_kafka() -> dict[str, list[list[Any]]]:
    """Start Kafka, ask all questions and return the answers."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_kafka(Path(folder), settings(), listeners={"SASL_PLAINTEXT": port}),
        Kafka(port) as kafka,
    ):
        return asyncio.run(record(kafka))


def write(answers: dict[str, list[list[Any]]]) -> None:
    """Write the table; one line for each answer."""
    lines = []
    for name, rows in answers.items():
        texts = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        lines.append(f" {json.dumps(name)}: [\n{texts}\n ]")
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write(record_kafka())
