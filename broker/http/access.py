"""Who may ask what over HTTP. Pure: headers in, a refusal or nothing out.

Rules
- Host (RFC 9110, 7.2): on a loopback address only names of this machine. A web page that is opened
  here cannot reach the broker under a name of its own (DNS rebinding).
- Origin (RFC 6454): a browser says by it which page asks. Only pages that came from this very
  server may; `null` and every other site are refused, whatever they ask for.
- A change is a POST with JSON, which no page of another site can send without asking first.
- Where a token is configured it is asked for everywhere but in the health checks, whose callers
  (systemd, Kubernetes, load balancers) have none, and where files of a run are moved: there whoever
  answers asks for the token of that run, always, and it is a header that no page can send unasked.
"""

import hmac
import ipaddress
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from config.address import Address

HEALTH_PATH: Final = "/healthz"
READY_PATH: Final = "/readyz"
OPEN_PATHS: Final = frozenset({HEALTH_PATH, READY_PATH})
SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
BEARER: Final = "bearer "


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What of a request the guard looks at; a header that is absent is empty or None."""

    method: str
    path: str
    host: str
    origin: str | None = None
    authorization: str = ""
    content_type: str = ""
    is_transfer: bool = False  # of files, which have a token of their own


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a request that is not let through."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Guard:
    """`names`: of the Host header; empty where any will do. `token`: None where none is needed."""

    names: frozenset[str]
    token: bytes | None = None

    @classmethod
    def of(cls, address: Address, token: bytes | None) -> "Guard":
        """Return the guard of a listener."""
        names = LOOPBACK_NAMES | {address.host.lower()} if address.is_loopback else frozenset()
        return cls(names, token)

    def refusal(self, request: RequestFacts) -> Refusal | None:
        """Return why a request is not let through; None if it is."""
        if self.names and host_name(request.host) not in self.names:
            return Refusal(403, "unknown Host header")
        if request.origin is not None and not self._is_ours(request.origin, request.host):
            return Refusal(403, "requests of other web pages are refused")
        if request.is_transfer:
            return None
        if self.token is not None and request.path not in OPEN_PATHS:
            value = request.authorization
            if value[: len(BEARER)].lower() != BEARER:
                return Refusal(401, "a token is needed: Authorization: Bearer ...")
            secret = value[len(BEARER) :].strip().encode(errors="surrogateescape")
            if not hmac.compare_digest(secret, self.token):
                return Refusal(401, "wrong token")
        if request.method not in SAFE_METHODS and request.content_type != "application/json":
            return Refusal(415, "expected Content-Type: application/json")
        return None

    def _is_ours(self, origin: str, host: str) -> bool:
        """Whether a page came from here: by the name and port of this request, and by a name that
        cannot have been pointed at us by a stranger.
        """
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        name = host_name(host)
        is_same = parts.scheme == "http" and parts.netloc.lower() == host.lower() != ""
        return is_same and (name in self.names or name == "localhost" or _is_literal(name))


def host_name(host: str) -> str:
    """Return the name in a Host header, without the port; IPv6 literals keep their brackets off."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_literal(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
