"""The identity of a client: a kind and a name, written `User:alice`."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

USER: Final = "User"


@dataclass(frozen=True, slots=True)
class Principal:
    """One client as authentication identified it (Kafka's KafkaPrincipal)."""

    name: str
    kind: str = USER

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


ANONYMOUS: Final = Principal("ANONYMOUS")  # of a listener without authentication


def client_of(principal: Principal, host: str) -> Hashable:
    """Return the client among which places are shared: a user, or else an address.

    A user has one share from however many addresses: IPv6 gives each machine billions of them.
    """
    return host if principal == ANONYMOUS else principal


def parse_principal(text: str) -> Principal:
    """Read `User:NAME`; the name may contain colons. Raises ValueError."""
    kind, colon, name = text.partition(":")
    if not colon or not kind or not name:
        raise ValueError(f"expected KIND:NAME, for example User:alice, not {text[:80]!r}")
    return Principal(name, kind)
