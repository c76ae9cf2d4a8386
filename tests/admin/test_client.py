"""The client of the HTTP API: where its requests go."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from admin.client import ApiClient

TOKEN = "0123456789abcdef"


@contextmanager
def answering(document: object) -> Iterator[tuple[str, list[str]]]:
    """A server that answers every GET with this document; yields its URL and what was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_request_to_this_machine_never_goes_to_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering({"from": "broker"}) as (url, _), answering({"from": "proxy"}) as (proxy, asked):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        assert ApiClient(url, TOKEN).get("") == {"from": "broker"}
        assert asked == []
        # Another machine may be behind the proxy.
        assert ApiClient("http://broker.example:9644").get("") == {"from": "proxy"}
