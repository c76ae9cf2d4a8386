"""A schema registry on this machine, with the answers that a test gives it."""

import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class FakeRegistry:
    """Answers by path with query; None redirects to /moved, and what is missing is a 404.

    A text is sent as it is, without a status and headers.
    """

    url: str = ""
    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    authorization: list[str | None] = field(default_factory=list)


@contextmanager
def schema_registry() -> Iterator[FakeRegistry]:
    registry = FakeRegistry()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            registry.asked.append(self.path)
            registry.authorization.append(self.headers.get("Authorization"))
            answer = registry.answers.get(self.path, 404)
            if isinstance(answer, str):
                self.wfile.write(answer.encode())
                return
            is_moved = answer is None
            self.send_response(302 if is_moved else answer if isinstance(answer, int) else 200)
            if is_moved:
                self.send_header("Location", "/moved")
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        registry.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield registry
        server.shutdown()
        thread.join()


def add_avro(registry: FakeRegistry, number: int, schema: object) -> None:
    registry.answers[f"/schemas/ids/{number}"] = {"schema": json.dumps(schema)}


def add_protobuf(registry: FakeRegistry, number: int, descriptor: bytes) -> None:
    path = f"/schemas/ids/{number}"
    registry.answers[path] = {"schemaType": "PROTOBUF", "schema": 'syntax = "proto3";'}
    serialized = {"schemaType": "PROTOBUF", "schema": b64encode(descriptor).decode()}
    registry.answers[f"{path}?format=serialized"] = serialized


def framed(number: int, data: bytes) -> bytes:
    """The data of a serializer that uses a registry."""
    return b"\0" + number.to_bytes(4) + data
