"""Quota entities and keys: what clients may set, and which entries a filter selects (KIP-546).

Pure functions. Checks and texts are those of Apache Kafka 4.3, except that values have to be finite
and the entity `ip` has to be an address: Kafka also resolves the names of hosts, once.
"""

import ipaddress
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.errors import ErrorCode
from storage.directory.security_entries import QuotaEntity

USER: Final = "user"
CLIENT_ID: Final = "client-id"
IP: Final = "ip"
ENTITY_TYPES: Final = (USER, CLIENT_ID, IP)

PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"
REQUEST_PERCENTAGE: Final = "request_percentage"
CONTROLLER_MUTATION_RATE: Final = "controller_mutation_rate"
CONNECTION_CREATION_RATE: Final = "connection_creation_rate"

EXACT, DEFAULT, ANY = range(3)  # match types of DescribeClientQuotas
# A key is a double, or an integer up to a maximum with this name.
_CLIENT_KEYS: Final[Mapping[str, str]] = {
    PRODUCER_BYTE_RATE: "LONG",
    CONSUMER_BYTE_RATE: "LONG",
    REQUEST_PERCENTAGE: "DOUBLE",
    CONTROLLER_MUTATION_RATE: "DOUBLE",
}
_IP_KEYS: Final[Mapping[str, str]] = {CONNECTION_CREATION_RATE: "INT"}
_MAXIMA: Final = {"INT": 2.0**31 - 1, "LONG": 2.0**63}
_ARTICLES: Final = {"INT": "an", "LONG": "a"}
_FRACTION_MAX: Final = 1e-6  # a double this close to an integer counts as one


class QuotaError(Exception):
    """A request that a client may not make, with the error code of its response."""

    def __init__(self, reason: str, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def make_entity(parts: Mapping[str, str | None]) -> QuotaEntity:
    """Return the entity of these types and names; the name None means the default."""
    return tuple(sorted(parts.items()))


def check_entity(entity: QuotaEntity) -> Mapping[str, str]:
    """Return the keys that this entity may have, with their kinds. Raises QuotaError."""
    if not entity:
        raise QuotaError("Invalid empty client quota entity")
    for kind, name in entity:
        if kind not in ENTITY_TYPES:
            raise QuotaError(f"Unhandled client quota entity type: {kind[:100]}")
        if name == "":
            raise QuotaError(f"Empty {kind} not supported")
    parts = dict(entity)
    if IP not in parts:
        return _CLIENT_KEYS
    if len(parts) > 1:
        raise QuotaError(  # in Kafka's words
            "Invalid quota entity combination, IP entity should"
            "not be combined with User or ClientId"
        )
    name = parts[IP]
    if name is not None and parse_ip(name) is None:
        raise QuotaError(f"{name[:100]} is not a valid IP or resolvable host.")
    return _IP_KEYS


def check_value(kinds: Mapping[str, str], key: str, value: float) -> None:
    """Refuse a key that the entity cannot have, and a value out of range. Raises QuotaError."""
    kind = kinds.get(key)
    if kind is None:
        raise QuotaError(f"Invalid configuration key {key[:100]}")
    if value <= 0:
        raise QuotaError(f"Quota {key} must be greater than 0")
    maximum = _MAXIMA.get(kind)
    if maximum is not None and value > maximum:
        raise QuotaError(f"Proposed value for {key} is too large for {_ARTICLES[kind]} {kind}.")
    if not math.isfinite(value):
        raise QuotaError(f"Quota {key} must be a finite number")
    if maximum is not None and abs(math.floor(value + _FRACTION_MAX) - value) > _FRACTION_MAX:
        raise QuotaError(f"{key} cannot be a fractional value.")


def parse_ip(text: str) -> str | None:
    """Return the canonical text of an address; None if it is none."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


@dataclass(frozen=True, slots=True)
class EntityFilter:
    """Selects entities that have all named types, with the names given for them."""

    exact: Mapping[str, str | None]
    any_name: frozenset[str]
    strict: bool  # only entities without further types

    def matches(self, entity: QuotaEntity) -> bool:
        """Return whether an entity is selected."""
        parts = dict(entity)
        if self.strict and len(parts) != len(self.exact) + len(self.any_name):
            return False
        return self.any_name <= parts.keys() and all(
            kind in parts and parts[kind] == name for kind, name in self.exact.items()
        )


def parse_filter(
    components: Sequence[tuple[str, int, str | None]], *, strict: bool
) -> EntityFilter:
    """Read the (entity type, match type, name) rows of a filter. Raises QuotaError."""
    exact: dict[str, str | None] = {}
    any_name: set[str] = set()
    for kind, match_type, name in components:
        if not kind:
            raise QuotaError("Invalid empty entity type.")
        if kind in exact or kind in any_name:
            raise QuotaError(f"Entity type {kind} cannot appear more than once in the filter.")
        if kind not in ENTITY_TYPES:
            raise QuotaError(f"Unsupported entity type {kind[:100]}", ErrorCode.UNSUPPORTED_VERSION)
        if match_type == EXACT:
            if name is None:
                raise QuotaError(
                    "Request specified MATCH_TYPE_EXACT, but set match string to null."
                )
            exact[kind] = name
        elif match_type in (DEFAULT, ANY):
            if name is not None:
                text = "DEFAULT" if match_type == DEFAULT else "SPECIFIED"
                raise QuotaError(
                    f"Request specified MATCH_TYPE_{text}, but also specified a match string."
                )
            if match_type == DEFAULT:
                exact[kind] = None
            else:
                any_name.add(kind)
        else:
            raise QuotaError(f"Unknown match type {match_type}")
    kinds = exact.keys() | any_name
    if IP in kinds and len(kinds) > 1:
        raise QuotaError(
            "Invalid entity filter component combination. IP filter component should not be used "
            "with user or clientId filter component."
        )
    return EntityFilter(exact, frozenset(any_name), strict)
