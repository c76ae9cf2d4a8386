"""Access control lists: which entries are valid, which a filter selects, what an operation implies.

Pure. The rules are those of Apache Kafka 4.3 (StandardAuthorizer, AclControlManager). An entry
allows or denies one operation to one principal from one host, on the resources of one type whose
name equals the entry's (literal) or begins with it (prefixed). The name `*`, the principal `User:*`
and the host `*` mean any.
"""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from broker.security.principal import Principal, parse_principal
from protocol.acl_codes import Operation, PatternType, Permission, ResourceType
from protocol.limits import STRING_BYTES_MAX
from storage.directory.security_entries import AclEntry

__all__ = [
    "ANY_PRINCIPAL",
    "CLUSTER_NAME",
    "IMPLIED_BY",
    "OPERATIONS",
    "WILDCARD",
    "AclFilter",
    "AclIndex",
    "InvalidAclError",
    "Operation",
    "PatternType",
    "Permission",
    "ResourceType",
    "canonical_host",
    "check_entry",
    "check_filter",
]

CLUSTER_NAME: Final = "kafka-cluster"  # the only resource of type CLUSTER
WILDCARD: Final = "*"
SENDERS_MAX: Final = 1000  # clients in memory, 1 KB each
ANY_PRINCIPAL: Final = "User:*"
# The operations that exist for a type of resource; responses list those that a client may perform.
OPERATIONS: Final[Mapping[ResourceType, tuple[Operation, ...]]] = {
    ResourceType.TOPIC: (
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    ResourceType.GROUP: (
        Operation.READ,
        Operation.DELETE,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    ResourceType.CLUSTER: (
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.CLUSTER_ACTION,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.IDEMPOTENT_WRITE,
    ),
}
# Operations that an entry for another operation allows too. Denials imply nothing.
IMPLIED_BY: Final[Mapping[Operation, frozenset[Operation]]] = {
    Operation.DESCRIBE: frozenset(
        (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER)
    ),
    Operation.DESCRIBE_CONFIGS: frozenset((Operation.ALTER_CONFIGS,)),
}


_Name = tuple[int, str]  # pattern type, name
_Pattern = tuple[int, int, str]  # resource type, pattern type, name
_Sender = tuple[str, str]  # principal, host
_Rule = tuple[int, int, int, str, str]  # resource type, permission, operation, principal, host


class InvalidAclError(Exception):
    """An entry or a filter is invalid; the text says why."""


@dataclass(frozen=True, slots=True)
class AclFilter:
    """A selection of entries; None, and the code 1 (ANY), match everything."""

    resource_type: int = ResourceType.ANY
    resource_name: str | None = None
    pattern_type: int = PatternType.ANY
    principal: str | None = None
    host: str | None = None
    operation: int = Operation.ANY
    permission: int = Permission.ANY

    def matches(self, acl: AclEntry) -> bool:
        """Return whether the filter selects an entry."""
        return (
            self.resource_type in (ResourceType.ANY, acl.resource_type)
            and self._matches_name(acl)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self.operation in (Operation.ANY, acl.operation)
            and self.permission in (Permission.ANY, acl.permission)
        )

    @property
    def entry(self) -> AclEntry | None:
        """Return the only entry that the filter can select; None if it may select several."""
        if (
            self.resource_name is None
            or self.principal is None
            or self.host is None
            or self.resource_type == ResourceType.ANY
            or self.pattern_type in (PatternType.ANY, PatternType.MATCH)
            or self.operation == Operation.ANY
            or self.permission == Permission.ANY
        ):
            return None
        return AclEntry(
            resource_type=self.resource_type,
            pattern_type=self.pattern_type,
            resource_name=self.resource_name,
            principal=self.principal,
            host=self.host,
            operation=self.operation,
            permission=self.permission,
        )

    def _matches_name(self, acl: AclEntry) -> bool:
        if self.pattern_type not in (PatternType.ANY, PatternType.MATCH, acl.pattern_type):
            return False
        name = self.resource_name
        if name is None:
            return True
        if self.pattern_type != PatternType.MATCH:
            return name == acl.resource_name
        if acl.pattern_type == PatternType.PREFIXED:
            return name.startswith(acl.resource_name)
        return acl.resource_name in (name, WILDCARD)


def check_entry(acl: AclEntry) -> None:
    """Refuse an entry that Kafka refuses. Raises InvalidAclError."""
    if acl.resource_type not in _RESOURCE_TYPES:
        raise InvalidAclError(f"Invalid resourceType {acl.resource_type}")
    if not acl.resource_name:
        raise InvalidAclError("Invalid empty resource name")
    if acl.resource_type == ResourceType.CLUSTER and acl.resource_name != CLUSTER_NAME:
        raise InvalidAclError(f"The only valid name for the CLUSTER resource is {CLUSTER_NAME}")
    if acl.pattern_type not in (PatternType.LITERAL, PatternType.PREFIXED):
        raise InvalidAclError(f"Invalid patternType {acl.pattern_type}")
    if acl.operation not in _OPERATIONS:
        raise InvalidAclError(f"Invalid operation {acl.operation}")
    if acl.permission not in (Permission.DENY, Permission.ALLOW):
        raise InvalidAclError(f"Invalid permissionType {acl.permission}")
    try:
        parse_principal(acl.principal)
    except ValueError as error:
        raise InvalidAclError(f"Invalid principal: {error}") from None
    for text in (acl.resource_name, acl.principal, acl.host):
        if len(text.encode()) > STRING_BYTES_MAX:  # more than a response can hold
            raise InvalidAclError(f"A name is longer than {STRING_BYTES_MAX} bytes")


_RESOURCE_TYPES: Final = frozenset(ResourceType) - {ResourceType.ANY}
_OPERATIONS: Final = frozenset(Operation) - {Operation.ANY}


def check_filter(selection: AclFilter) -> None:
    """Refuse a filter with a code that does not exist. Raises InvalidAclError."""
    if selection.resource_type not in frozenset(
        ResourceType
    ) or selection.pattern_type not in frozenset(PatternType):
        raise InvalidAclError("Unknown patternFilter.")
    if selection.operation not in frozenset(Operation) or selection.permission not in frozenset(
        Permission
    ):
        raise InvalidAclError("Unknown entryFilter.")


def canonical_host(host: str) -> str:
    """Return one spelling of an address; an IPv4 address in an IPv6 one becomes IPv4, as in Java.

    Kafka compares the text of Java, which writes `0:0:0:0:0:0:0:1` where others write `::1`.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)


class AclIndex:
    """The entries by resource pattern, principal and host.

    A decision about a resource looks at the entries of its principal and host with the resource's
    name, with `*`, and with each prefix of the name that is as long as the prefix of some entry. A
    decision about all resources looks at the patterns of its principal only. So the entries of
    others cost nothing, however many there are.
    """

    def __init__(self, acls: Iterable[AclEntry]) -> None:
        self.entries = dict.fromkeys(acls)  # without duplicates, in their order
        self._rules: dict[_Pattern, dict[_Sender, list[AclEntry]]] = {}
        self._named: dict[_Rule, dict[_Name, None]] = {}
        lengths: dict[int, set[int]] = {}
        hosts = {host: canonical_host(host) for host in {acl.host for acl in self.entries}}
        for acl in self.entries:
            pattern = (acl.resource_type, acl.pattern_type, acl.resource_name)
            sender = (acl.principal, hosts[acl.host])
            self._rules.setdefault(pattern, {}).setdefault(sender, []).append(acl)
            rule = (acl.resource_type, acl.permission, acl.operation, *sender)
            self._named.setdefault(rule, {})[acl.pattern_type, acl.resource_name] = None
            if acl.pattern_type == PatternType.PREFIXED:
                lengths.setdefault(acl.resource_type, set()).add(len(acl.resource_name))
        self._prefix_lengths = {kind: sorted(values) for kind, values in lengths.items()}

    def decide(
        self,
        principal: Principal,
        host: str,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
    ) -> bool | None:
        """Return whether the entries allow an operation; None if none concerns the resource.

        A denial prevails over every entry that allows. Without an entry for the principal, the host
        and the operation, the answer is False.
        """
        senders = _senders(principal, host)
        concerned, allowed = False, False
        for pattern in self._patterns_of(resource_type, name):
            by_sender = self._rules.get(pattern)
            if by_sender is None:
                continue
            concerned = True
            for sender in senders:
                for acl in by_sender.get(sender, ()):
                    if _concerns(acl, operation):
                        if acl.permission == Permission.DENY:
                            return False
                        allowed = True
        return allowed if concerned else None

    def _patterns_of(self, resource_type: ResourceType, name: str) -> Iterator[_Pattern]:
        yield resource_type, PatternType.LITERAL, name
        if name != WILDCARD:
            yield resource_type, PatternType.LITERAL, WILDCARD
        for prefix in self._prefixes_of(resource_type, name):
            yield resource_type, PatternType.PREFIXED, prefix

    def _prefixes_of(self, resource_type: ResourceType, name: str) -> Iterator[str]:
        for length in self._prefix_lengths.get(resource_type, ()):
            if length > len(name):
                break
            yield name[:length]

    def decide_some(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType
    ) -> bool:
        """Return whether the entries allow an operation on at least one possible resource name.

        As in Kafka, only entries for the operation itself or for ALL count.
        """

        def named(permission: Permission) -> list[dict[_Name, None]]:
            rules = (
                (resource_type, permission, code, *sender)
                for code in (Operation.ALL, operation)
                for sender in _senders(principal, host)
            )
            return [self._named[rule] for rule in rules if rule in self._named]

        denied = named(Permission.DENY)

        def is_denied(*pattern: int | str) -> bool:
            return any(pattern in patterns for patterns in denied)

        if is_denied(PatternType.LITERAL, WILDCARD):
            return False
        return any(
            (pattern_type, name) == (PatternType.LITERAL, WILDCARD)
            or not (
                is_denied(pattern_type, name)
                or any(
                    is_denied(PatternType.PREFIXED, prefix)
                    for prefix in self._prefixes_of(resource_type, name)
                )
            )
            for patterns in named(Permission.ALLOW)
            for pattern_type, name in patterns
        )


@lru_cache(SENDERS_MAX)  # parsing the address takes longer than the rest of a decision
def _senders(principal: Principal, host: str) -> tuple[_Sender, ...]:
    """Return the principals and hosts of the entries that concern a client."""
    host, name = canonical_host(host), str(principal)
    return (name, host), (name, WILDCARD), (ANY_PRINCIPAL, host), (ANY_PRINCIPAL, WILDCARD)


def _concerns(acl: AclEntry, operation: Operation) -> bool:
    is_implied = acl.permission == Permission.ALLOW and acl.operation in IMPLIED_BY.get(
        operation, ()
    )
    return is_implied or acl.operation in (Operation.ALL, operation)
