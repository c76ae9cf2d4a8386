"""A client of the HTTP API: one request at a time, with urllib.

ApiRefusedError means that the broker refused a request, UnreachableError that no broker answered.
Redirects are not followed, because they would send the token to another server. For this reason,
requests to this machine do not use a proxy that the environment names either.
"""

import json
import ssl
from base64 import b64encode
from collections.abc import Iterator, Mapping
from copy import copy
from http.client import HTTPException, HTTPMessage, RemoteDisconnected
from typing import Any, BinaryIO, Final, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import (
    BaseHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    ProxyHandler,
    Request,
    build_opener,
)

from config.address import Address
from config.security.clients import (
    OAUTHBEARER,
    PLAINTEXT,
    ClientSasl,
    ClientSecurity,
    ClientSecurityError,
    ClientTls,
    untrusted_text,
)

TIMEOUT_SECONDS: Final = 30.0
ANSWER_BYTES_MAX: Final = 64 << 20  # a page of the longest answer is 2 MB
ROOT: Final = "/api/v1/cleaner"

Json = dict[str, Any]


class ApiRefusedError(Exception):
    """The broker refused the request with this HTTP `status`."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class UnreachableError(Exception):
    """No broker answered at that address."""


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        return None


class ApiClient:
    """Sends requests to one broker."""

    def __init__(
        self, url: str, token: str | None = None, security: ClientSecurity = PLAINTEXT
    ) -> None:
        """`url` is http://HOST:PORT or https://HOST:PORT.

        `security` contributes TLS and, without a `token`, the user and password or the token of
        OAUTHBEARER. Raises ValueError for another kind of URL, and for a password over http:// to
        another machine; ClientSecurityError for certificates that cannot be used.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(f"expected http://HOST:PORT, not {url[:80]!r}")
        if parts.path not in ("", "/") or parts.query or parts.username:
            raise ValueError(f"expected http://HOST:PORT and nothing more, not {url[:80]!r}")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.tls = security.tls if parts.scheme == "https" else None
        handlers: list[BaseHandler] = []
        if self.tls is not None:
            handlers.append(HTTPSHandler(context=self.tls.context()))
        if _is_loopback(parts.hostname):
            handlers.append(ProxyHandler({}))
        self._opener = build_opener(_NoRedirect, *handlers)
        self._headers = {"Accept": "application/json"}
        self._sasl = security.sasl if token is None else None
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        elif self._sasl is not None and self.tls is None and not _is_loopback(parts.hostname):
            raise ValueError(
                f"credentials are not sent without TLS to another machine: use https:// instead of "
                f"{self.url}"
            )
        self._root = ROOT

    @property
    def sends_credentials(self) -> bool:
        """Return whether requests have a token, or a user and password."""
        return self._sasl is not None or "Authorization" in self._headers

    def with_token(self, token: str) -> "ApiClient":
        """Return a client of the same broker that sends another token."""
        return ApiClient(self.url, token, ClientSecurity(tls=self.tls or ClientTls()))

    def below(self, root: str) -> "ApiClient":
        """Return a client of the same broker for paths below another root."""
        other = copy(self)
        other._root = root
        return other

    def get(self, path: str, **query: str | int | None) -> Json:
        """GET a path below the root. Raises ApiRefusedError, UnreachableError."""
        parameters = {key: value for key, value in query.items() if value is not None}
        return self._ask(f"{path}?{urlencode(parameters)}" if parameters else path, None)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Json:
        """POST to a path below the root. Raises ApiRefusedError, UnreachableError."""
        return self._ask(path, json.dumps(dict(body or {})).encode())

    def delete(self, path: str) -> Json:
        """DELETE a path below the root. Raises ApiRefusedError, UnreachableError."""
        return self._ask(path, b"{}", "DELETE")

    def download(self, path: str, first: int, count: int) -> tuple[bytes, HTTPMessage]:
        """Return bytes `[first, first + count)` of a file, fewer at its end, and the headers.

        Raises ApiRefusedError, UnreachableError.
        """
        headers = {"Range": f"bytes={first}-{first + count - 1}"}
        request = Request(f"{self.url}{self._root}{path}", headers=headers)
        return self._exchange(request, count)

    def upload(
        self, path: str, content: bytes | BinaryIO, size_bytes: int, headers: Mapping[str, str]
    ) -> Json:
        """PUT a file of this size, reading it while it is sent.

        Raises ApiRefusedError, UnreachableError.
        """
        reported = {
            **headers,
            "Content-Type": "application/octet-stream",
            "Content-Length": str(size_bytes),
        }
        request = Request(f"{self.url}{self._root}{path}", content, reported, method="PUT")
        return self._decoded(self._exchange(request, ANSWER_BYTES_MAX + 1)[0])

    def pages(self, path: str, key: str, **query: str | None) -> Iterator[Json]:
        """Yield all rows of a paged answer."""
        after: str | None = None
        while True:
            page = self.get(path, after=after, **query)
            yield from page[key]
            after = page["next"]
            if after is None:
                return

    def _ask(self, path: str, body: bytes | None, method: str | None = None) -> Json:
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = Request(f"{self.url}{self._root}{path}", body, headers, method=method)
        return self._decoded(self._exchange(request, ANSWER_BYTES_MAX + 1)[0])

    def _exchange(self, request: Request, bytes_max: int) -> tuple[bytes, HTTPMessage]:
        for name, value in self._headers.items():
            request.add_header(name, value)
        if self._sasl is not None:
            request.add_header("Authorization", _authorization(self._sasl))
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                return answer.read(bytes_max), answer.headers
        except HTTPError as error:
            with error:
                self._refused(error)
        except URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise UnreachableError(untrusted_text(self.url, error.reason)) from error
            raise UnreachableError(
                f"cannot reach {self.url}: {reason_of(error.reason)}. Is the broker running, and "
                "is this its HTTP address (--http)?"
            ) from error
        except (OSError, HTTPException) as error:
            secure = " With http_tls, it begins with https://." if self.tls is None else ""
            hint = "Is this the broker's HTTP address (--http)?"
            if isinstance(error, RemoteDisconnected):  # as Kafka's protocol does
                hint = (
                    "It may be an address for Kafka clients: give the broker's HTTP address "
                    "(--http)."
                )
            raise UnreachableError(f"{self.url} did not answer: {error}. {hint}{secure}") from error

    def _refused(self, error: HTTPError) -> NoReturn:
        try:
            reason = str(json.loads(error.read(1 << 16))["detail"])
        except (ValueError, KeyError, TypeError, OSError, HTTPException):
            raise UnreachableError(
                f"{self.url} answered {error.code} and is not a Varve broker with this API"
            ) from error
        raise ApiRefusedError(error.code, reason) from error

    def _decoded(self, data: bytes) -> Json:
        try:
            document = json.loads(data) if len(data) <= ANSWER_BYTES_MAX else None
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise UnreachableError(f"{self.url} did not answer like a Varve broker")
        return document


def reason_of(error: object) -> str:
    """Return what went wrong, without the number of the operating system's error."""
    text = error.strerror if isinstance(error, OSError) else None
    return text or str(error)


def _authorization(sasl: ClientSasl) -> str:
    """Return the header for a user and password or a token. Raises UnreachableError."""
    if sasl.mechanism == OAUTHBEARER:
        try:
            return f"Bearer {sasl.read_token()}"
        except ClientSecurityError as error:
            raise UnreachableError(str(error)) from None
    pair = f"{sasl.username}:{sasl.password}".encode()
    return f"Basic {b64encode(pair).decode()}"


def _is_loopback(host: str) -> bool:
    return Address(host, 0).is_loopback


def partition_path(topic: str, partition: int) -> str:
    """Return the path of a partition below a root."""
    return f"/partitions/{quote(topic, safe='')}/{partition}"
