"""Fetch a document from a server that the settings name, and from no other."""

import http.client
import io
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import Any


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        """Follow nothing: a redirection becomes an HTTPError."""
        return


class _ReaderUntil(io.RawIOBase):
    """Reads from a socket until a deadline. The socket's own timeout begins at each byte again."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self._file = connected.makefile("rb", buffering=0)
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        seconds = self._deadline - monotonic()
        if seconds <= 0:
            raise TimeoutError("the answer took too long")
        self._socket.settimeout(seconds)
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _AnswerUntil(http.client.HTTPResponse):
    def __init__(self, connected: socket.socket, *args: Any, deadline: float, **named: Any) -> None:
        super().__init__(connected, *args, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_ReaderUntil(connected, deadline))


class _UntilDeadline(urllib.request.AbstractHTTPHandler):
    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline

    def do_open(self, http_class: Any, req: urllib.request.Request, **arguments: Any) -> Any:
        """Open a connection whose answer must be complete at the deadline."""
        return super().do_open(partial(self._connection, http_class), req, **arguments)

    def _connection(self, http_class: Callable[..., Any], *args: Any, **named: Any) -> Any:
        connection = http_class(*args, **named)
        connection.response_class = partial(_AnswerUntil, deadline=self._deadline)
        return connection


class _Http(_UntilDeadline, urllib.request.HTTPHandler):
    pass


class _Https(_UntilDeadline, urllib.request.HTTPSHandler):
    pass


def fetch_document(
    url: str, *, timeout_seconds: float, bytes_max: int, headers: Mapping[str, str] | None = None
) -> bytes:
    """Return the body of the answer to a GET, which must be complete in `timeout_seconds`.

    Raises urllib.error.HTTPError, an OSError, for a status of failure or a redirection; OSError if
    the server does not answer in time or as HTTP requires, or with more than `bytes_max`;
    ValueError for a malformed URL.
    """
    deadline = monotonic() + timeout_seconds
    opener = urllib.request.build_opener(_NoRedirection, _Http(deadline), _Https(deadline))
    request = urllib.request.Request(url, headers=dict(headers or {}))
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            data: bytes = answer.read(bytes_max + 1)
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:  # its own text is `<urlopen error ...>`
        raise OSError(f"{error.reason}") from None
    except http.client.HTTPException as error:
        raise OSError(f"not an answer of HTTP: {error!r}") from None
    if len(data) > bytes_max:
        raise OSError(f"the answer is larger than {bytes_max} bytes")
    return data
