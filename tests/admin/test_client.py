"""The client of the HTTP API: where its requests go."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from admin.client import ApiClient, ApiRefusedError, UnreachableError
from admin.command import refusal_text

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


@pytest.mark.parametrize("answer", [b"", b"\x15\x03\x01\x00\x02\x02\x46"])  # closed, a TLS alert
def test_an_http_address_that_speaks_tls_is_hinted_at(answer: bytes) -> None:
    def refuse(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=refuse, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UnreachableError, match="With http_tls, it begins with https://"):
            ApiClient(url).get("")
        thread.join()


@pytest.mark.parametrize(("token", "hint"), [(None, True), (TOKEN, False)])
def test_who_named_credentials_is_not_told_to_name_them(token: str | None, hint: bool) -> None:
    error = ApiRefusedError(401, "wrong token")
    text = refusal_text(error, ApiClient("http://127.0.0.1:9644", token))
    assert text == "wrong token" + (": name them with --command-config or --token-file" * hint)
