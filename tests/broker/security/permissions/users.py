"""The users that ask: with one permission, with all but one, by prefix and by host."""

from collections.abc import Iterator, Mapping
from typing import Final

from broker.security.acls import Operation, PatternType, Permission, ResourceType
from storage.directory.security_entries import AclEntry

# Entries of these operations are possible for a resource; Kafka's tools offer the same.
PERMISSIONS: Final[Mapping[ResourceType, tuple[Operation, ...]]] = {
    ResourceType.TOPIC: (
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.ALL,
    ),
    ResourceType.GROUP: (
        Operation.READ,
        Operation.DELETE,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.ALL,
    ),
    ResourceType.CLUSTER: (
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.CLUSTER_ACTION,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.IDEMPOTENT_WRITE,
        Operation.ALL,
    ),
    ResourceType.TRANSACTIONAL_ID: (
        Operation.WRITE,
        Operation.DESCRIBE,
        Operation.TWO_PHASE_COMMIT,
        Operation.ALL,
    ),
}

SUPER_USER: Final = "root"

EVERY_RESOURCE: Final = dict.fromkeys(PERMISSIONS, "*") | {ResourceType.CLUSTER: "kafka-cluster"}

PREFIXES: Final = {
    ResourceType.TOPIC: "ord",
    ResourceType.GROUP: "billing",
    ResourceType.TRANSACTIONAL_ID: "tx-",
}

OTHER_PREFIXES: Final = dict.fromkeys(PREFIXES, "orders-of-others")  # longer than the names


def users() -> Iterator[tuple[str, list[AclEntry]]]:
    """Yield each user with its entries."""
    everything = [(kind, Operation.ALL) for kind in PERMISSIONS]
    yield "none", []
    yield "all", [_entry("all", kind, operation) for kind, operation in everything]
    for kind, operations in PERMISSIONS.items():
        for operation in operations:
            name = f"only-{kind.name}-{operation.name}"
            yield name, [_entry(name, kind, operation)]
            name = f"not-{kind.name}-{operation.name}"
            yield (
                name,
                [
                    *(_entry(name, *permission) for permission in everything),
                    _entry(name, kind, operation, Permission.DENY),
                ],
            )

    yield from _users_of_prefixes()
    yield from _users_of_hosts()


def _users_of_prefixes() -> Iterator[tuple[str, list[AclEntry]]]:
    """Yield users with entries for prefixes of the names in questions, or of other names."""
    everything = [(kind, Operation.ALL) for kind in PERMISSIONS]
    asked = [kind for kind in PERMISSIONS if kind is not ResourceType.CLUSTER]
    for name, prefixes in (("prefixes", PREFIXES), ("other-prefixes", OTHER_PREFIXES)):
        yield name, [_entry(name, kind, Operation.ALL, prefix=prefixes[kind]) for kind in asked]
        name = f"not-{name}"
        denials = [
            _entry(name, kind, Operation.ALL, Permission.DENY, prefix=prefixes[kind])
            for kind in asked
        ]
        yield name, [*(_entry(name, *permission) for permission in everything), *denials]


def _users_of_hosts() -> Iterator[tuple[str, list[AclEntry]]]:
    """Yield users whose entries are for the address that they ask from, or for another one."""
    everything = [(kind, Operation.ALL) for kind in PERMISSIONS]
    for name, host in (("host", "127.0.0.1"), ("other-host", "10.9.9.9")):
        yield name, [_entry(name, *permission, host=host) for permission in everything]
        name = f"not-{name}"
        denials = [_entry(name, *p, Permission.DENY, host=host) for p in everything]
        yield name, [*(_entry(name, *permission) for permission in everything), *denials]


def _entry(
    user: str,
    kind: ResourceType,
    operation: Operation,
    permission: Permission = Permission.ALLOW,
    *,
    prefix: str | None = None,
    host: str = "*",
) -> AclEntry:
    return AclEntry(
        resource_type=kind,
        pattern_type=PatternType.LITERAL if prefix is None else PatternType.PREFIXED,
        resource_name=EVERY_RESOURCE[kind] if prefix is None else prefix,
        principal=f"User:{user}",
        host=host,
        operation=operation,
        permission=permission,
    )
