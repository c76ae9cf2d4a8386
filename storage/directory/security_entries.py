"""Users, access control lists and quotas as the cluster metadata stores them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any


@dataclass(frozen=True, slots=True, repr=False)
class ScramEntry:
    """The salted password of a user for one mechanism (RFC 5802, section 3)."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


@dataclass(frozen=True, slots=True, order=True)
class AclEntry:
    """One access control list entry. The numbers are the codes of Kafka's AdminClient."""

    resource_type: int
    pattern_type: int  # 3 literal, 4 prefixed
    resource_name: str
    principal: str
    host: str
    operation: int
    permission: int  # 2 deny, 3 allow


_ACL_FIELDS = attrgetter(*(field.name for field in fields(AclEntry)))

# Entity types and names in order of type; name None is the default entity. -> quotas by key
QuotaEntity = tuple[tuple[str, str | None], ...]
QuotaEntries = Mapping[QuotaEntity, Mapping[str, float]]
ScramUsers = Mapping[str, Mapping[str, ScramEntry]]  # user -> mechanism -> salted password


def encode_scram_users(users: ScramUsers) -> dict[str, Any]:
    """Return the users as JSON values."""
    return {
        user: {
            mechanism: {
                "salt": entry.salt.hex(),
                "stored_key": entry.stored_key.hex(),
                "server_key": entry.server_key.hex(),
                "iterations": entry.iterations,
            }
            for mechanism, entry in mechanisms.items()
        }
        for user, mechanisms in users.items()
    }


def decode_scram_users(payload: Mapping[str, Any]) -> ScramUsers:
    """Read users. Raises KeyError, TypeError, ValueError and AttributeError."""
    return {
        str(user): {
            str(mechanism): ScramEntry(
                bytes.fromhex(entry["salt"]),
                bytes.fromhex(entry["stored_key"]),
                bytes.fromhex(entry["server_key"]),
                int(entry["iterations"]),
            )
            for mechanism, entry in mechanisms.items()
        }
        for user, mechanisms in payload.items()
    }


def encode_acls(acls: Iterable[AclEntry]) -> list[tuple[Any, ...]]:
    """Return access control lists as JSON values."""
    return [_ACL_FIELDS(acl) for acl in acls]


def decode_acls(payload: list[list[Any]]) -> tuple[AclEntry, ...]:
    """Read access control lists. Raises TypeError and ValueError."""
    return tuple(
        AclEntry(int(kind), int(pattern), str(name), str(who), str(host), int(operation), int(rule))
        for kind, pattern, name, who, host, operation, rule in payload
    )


def encode_quotas(quotas: QuotaEntries) -> list[dict[str, Any]]:
    """Return quotas as JSON values."""
    return [
        {"entity": [list(part) for part in entity], "values": dict(values)}
        for entity, values in quotas.items()
    ]


def decode_quotas(payload: list[dict[str, Any]]) -> QuotaEntries:
    """Read quotas. Raises KeyError, TypeError, ValueError and AttributeError."""
    return {
        tuple((str(kind), None if name is None else str(name)) for kind, name in row["entity"]): {
            str(key): float(value) for key, value in row["values"].items()
        }
        for row in payload
    }
