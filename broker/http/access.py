"""Refuses HTTP requests by their headers: Host, Origin, Content-Type. Pure.

Who sent a request, and what the sender may do: authentication.py.

Rules
- Host (RFC 9110, 7.2): on a loopback address only names of this machine are accepted, so that a web
  page opened here cannot reach the broker under its own name (DNS rebinding).
- Origin (RFC 6454): a browser names the page that sends the request. Only pages from this server
  are accepted; `null` and all other sites are refused. Where no credentials are needed, the page
  must have come by a name that strangers cannot redirect (DNS rebinding), such as an IP address.
  If credentials are needed, the page of another site does not have them.
- A change is a POST with JSON, which a page of another site cannot send without a preflight
  request.
- Health checks need no credentials, because their callers (systemd, Kubernetes, load balancers)
  have none. Transfers of leased files are checked by their handlers, which require the token of the
  lease in a header.
"""

import ipaddress
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from config.address import Address

HEALTH_PATH: Final = "/healthz"
READY_PATH: Final = "/readyz"
OPEN_PATHS: Final = frozenset({HEALTH_PATH, READY_PATH})
SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
BEARER: Final = "bearer "
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The parts of a request that the guard checks. A missing header is empty or None."""

    method: str
    path: str
    host: str
    origin: str | None = None
    content_type: str = ""
    is_transfer: bool = False  # of leased files, which have their own token


@dataclass(frozen=True, slots=True)
class Refusal:
    """The response to a refused request."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Guard:
    """`names`: accepted Host names, empty for any. `has_credentials`: requests need some."""

    names: frozenset[str]
    scheme: str = "http"
    has_credentials: bool = False

    @classmethod
    def of(
        cls, address: Address, scheme: str = "http", *, has_credentials: bool = False
    ) -> "Guard":
        """Return the guard of a listener."""
        names = LOOPBACK_NAMES | {address.host.lower()} if address.is_loopback else frozenset()
        return cls(names, scheme, has_credentials)

    def refusal(self, request: RequestFacts) -> Refusal | None:
        """Return the refusal of a request; None if it is allowed."""
        if self.names and host_name(request.host) not in self.names:
            return Refusal(403, "unknown Host header")
        if request.origin is not None and not self._is_ours(request.origin, request.host):
            return Refusal(403, "requests of other web pages are refused")
        if request.is_transfer:
            return None
        if request.method not in SAFE_METHODS and request.content_type != "application/json":
            return Refusal(415, "expected Content-Type: application/json")
        return None

    def _is_ours(self, origin: str, host: str) -> bool:
        """Return whether a page came from this server, and not under a name of another site."""
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        name = host_name(host)
        is_same = parts.scheme == self.scheme and parts.netloc.lower() == host.lower() != ""
        is_safe = self.has_credentials or name in self.names | {"localhost"} or _is_literal(name)
        return is_same and is_safe


def host_name(host: str) -> str:
    """Return the name in a Host header without port, and without the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_literal(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
