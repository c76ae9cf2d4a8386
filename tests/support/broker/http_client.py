"""HTTP requests to a broker in this process, sent by a thread while the broker's loop runs."""

import asyncio
import base64
import http.client
import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from broker.app import Broker
from broker.http.access import SAFE_METHODS
from broker.http.server import PROBLEM_TYPE

PASSWORD: Final = "s3cret:x"  # of all users of the tests
JSON: Final = "application/json"
TIMEOUT_SECONDS: Final = 20


class HttpAnswer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def document(self) -> Any:
        """The JSON value of the body; its text if it is not JSON."""
        is_json = self.headers.get_content_type() in (JSON, PROBLEM_TYPE)
        return json.loads(self.body) if is_json else self.text


def basic(user: str, password: str = PASSWORD) -> str:
    """The Authorization header of a user."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


async def exchange(
    broker: Broker, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
) -> HttpAnswer:
    """Send exactly these headers."""

    def send() -> HttpAnswer:
        address = broker.http.address
        connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return HttpAnswer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    return await asyncio.to_thread(send)


async def ask(
    broker: Broker, method: str, path: str, body: bytes | None = None, **headers: str
) -> HttpAnswer:
    """Send a request; a change is of type JSON by default. `_` in a name stands for `-`."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    if method not in SAFE_METHODS:
        named = {"Content-Type": JSON, **named}
    return await exchange(broker, method, path, body, named)


async def call_api(
    broker: Broker, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, Any]:
    """-> (status, document); see `ask`."""
    answer = await ask(broker, method, path, body, **headers)
    return answer.status, answer.document


async def get(broker: Broker, path: str, **headers: str) -> tuple[int, str]:
    """-> (status, text)"""
    answer = await ask(broker, "GET", path, **headers)
    return answer.status, answer.text


async def scraped(broker: Broker, accept: str = "text/plain") -> str:
    """The metrics page."""
    _, text = await get(broker, "/metrics", Accept=accept)
    return text
