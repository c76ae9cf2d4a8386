"""Refuses HTTP requests by their headers: Host, Origin, Content-Type. Pure.

Who sent a request, and what the sender may do: authentication.py.

Rules
- Host (RFC 9110, 7.2): on a loopback address only names of this machine are accepted, so that a web
  page opened here cannot reach the broker under its own name (DNS rebinding). On another address
  where no credentials are needed, browsers must use a name that no attacker can redirect: an IP
  address, or a name without a dot. If credentials are needed, the page of another site does not
  have them. Browsers always send Accept-Language (Fetch standard), and no page can prevent it.
- Origin (RFC 6454): a browser names the page that sends a change. Only pages from this server are
  accepted; `null` and all other sites are refused.
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
BY_ADDRESS: Final = (
    "without credentials, a browser has to use the IP address of the broker; to use its name, set "
    "http_token_file or http_users in the settings file"
)
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The parts of a request that the guard checks. A missing header is empty or None.

    `content_type` is the header as it was sent: aiohttp parses it with Python's library for mail,
    which takes a second for 8 KB of semicolons.
    """

    method: str
    path: str
    host: str
    origin: str | None = None
    content_type: str = ""
    is_from_browser: bool = False
    is_transfer: bool = False  # of leased files, which have their own token


@dataclass(frozen=True, slots=True)
class Refusal:
    """The response to a refused request."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Guard:
    """The guard of a listener. `names`: accepted Host names, empty for any."""

    names: frozenset[str]
    scheme: str = "http"

    @classmethod
    def of(cls, address: Address, scheme: str = "http") -> "Guard":
        """Return the guard of a listener."""
        names = LOOPBACK_NAMES | {address.host.lower()} if address.is_loopback else frozenset()
        return cls(names, scheme)

    def refusal(self, request: RequestFacts, *, needs_credentials: bool = False) -> Refusal | None:
        """Return the refusal of a request; None if it is allowed, perhaps with credentials."""
        name = host_name(request.host)
        if self.names and name not in self.names:
            return Refusal(403, "unknown Host header")
        if request.origin is not None and not self._is_ours(request.origin, request.host):
            return Refusal(403, "requests of other web pages are refused")
        is_from_browser = request.is_from_browser or request.origin is not None
        if is_from_browser and not (needs_credentials or _is_safe(name)):
            return Refusal(403, BY_ADDRESS)
        if request.is_transfer:
            return None
        if request.method not in SAFE_METHODS and _media_type(request) != "application/json":
            return Refusal(415, "expected Content-Type: application/json")
        return None

    def _is_ours(self, origin: str, host: str) -> bool:
        """Return whether a page came from this server."""
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme == self.scheme and parts.netloc.lower() == host.lower() != ""


def _media_type(request: RequestFacts) -> str:
    """Return the type of the body, without the parameters that may follow it."""
    return request.content_type.partition(";")[0].strip().lower()


def host_name(host: str) -> str:
    """Return the name in a Host header without port, and without the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_safe(name: str) -> bool:
    """Return whether no attacker can point a name at this server: nobody registers one label."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name
    return True
