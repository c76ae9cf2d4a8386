"""Documents from servers that the settings name: how long a server may take."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

import pytest

from broker import fetch_document as module
from broker.fetch_document import fetch_document
from tests.support.ports import free_port

BYTES_MAX = 4 << 20
OK = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def server(answer: bytes, repeated: bytes = b"") -> Iterator[str]:
    """Answer one request with `answer`, and `repeated` until the client leaves -> its URL."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(4096)
            connection.sendall(answer)
            while repeated:
                connection.sendall(repeated)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/keys"
        thread.join()


@pytest.mark.parametrize(
    ("answer", "repeated"),
    [
        (OK + b"X: ", b"a"),  # a header
        (OK + b"\r\n", b"a"),  # a body
        (OK + b"Content-Length: 4000000\r\n\r\n", b"a"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
    ],
)
def test_a_server_that_sends_slowly_must_be_done_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, repeated: bytes
) -> None:
    """A byte now and then would keep the fetch, and the stop of the broker, waiting for hours."""
    seconds = count(0, 60)  # each read takes a minute
    monkeypatch.setattr(module, "monotonic", lambda: next(seconds), raising=False)
    with server(answer, repeated) as url, pytest.raises(TimeoutError):
        fetch_document(url, timeout_seconds=90, bytes_max=BYTES_MAX)


def test_an_answer_in_time_is_returned() -> None:
    with server(OK + b"Content-Length: 4\r\n\r\nkeys") as url:
        assert fetch_document(url, timeout_seconds=20, bytes_max=4) == b"keys"


def test_an_answer_that_is_too_large_is_refused() -> None:
    with server(OK + b"\r\nkeys!") as url, pytest.raises(OSError, match="larger than 4 bytes"):
        fetch_document(url, timeout_seconds=20, bytes_max=4)


def test_the_reason_of_a_server_that_cannot_be_reached_is_that_of_the_system() -> None:
    url = f"http://127.0.0.1:{free_port()}/"
    with pytest.raises(OSError, match=r"^\[Errno 111\] Connection refused$"):
        fetch_document(url, timeout_seconds=5, bytes_max=100)
