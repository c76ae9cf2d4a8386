"""The rules of access control lists, against a naive model that looks at every entry."""

import random
from collections.abc import Sequence

import pytest

from broker.security.acls import (
    ANY_PRINCIPAL,
    CLUSTER_NAME,
    WILDCARD,
    AclFilter,
    AclIndex,
    InvalidAclError,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    canonical_host,
    check_entry,
    check_filter,
)
from broker.security.authorizer import DECISIONS_MAX, Authorizer
from broker.security.principal import Principal, parse_principal
from config.settings import AuthorizationSettings
from storage.directory.security_entries import AclEntry
from tests.support.draws import seeds_of_tests

NAMES = ("a", "ab", "abc", "b", WILDCARD)
PRINCIPALS = ("User:ann", "User:bob", "Group:ann", ANY_PRINCIPAL)
HOSTS = ("10.0.0.1", "10.0.0.2", "::1", WILDCARD)
ASKED_OPERATIONS = tuple(Operation)[2:]
IMPLIES_DESCRIBE = (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER)
SEEDS = seeds_of_tests("VARVE_ACL_SEEDS", few=20, many=400)
ANN = Principal("ann")


def draw_acl(rng: random.Random) -> AclEntry:
    return AclEntry(
        resource_type=rng.choice((ResourceType.TOPIC, ResourceType.GROUP)),
        pattern_type=rng.choice((PatternType.LITERAL, PatternType.PREFIXED)),
        resource_name=rng.choice(NAMES),
        principal=rng.choice(PRINCIPALS),
        host=rng.choice(HOSTS),
        operation=rng.choice(tuple(Operation)[1:]),
        permission=rng.choice((Permission.ALLOW, Permission.ALLOW, Permission.DENY)),
    )


def concerns_name(acl: AclEntry, name: str) -> bool:
    if acl.pattern_type == PatternType.PREFIXED:
        return name.startswith(acl.resource_name)
    return acl.resource_name in (name, WILDCARD)


def applies(acl: AclEntry, principal: str, host: str, operation: Operation) -> bool:
    implied = acl.permission == Permission.ALLOW and (
        (operation is Operation.DESCRIBE and acl.operation in IMPLIES_DESCRIBE)
        or (operation is Operation.DESCRIBE_CONFIGS and acl.operation == Operation.ALTER_CONFIGS)
    )
    return (
        acl.principal in (principal, ANY_PRINCIPAL)
        and acl.host in (host, WILDCARD)
        and (implied or acl.operation in (operation, Operation.ALL))
    )


def naive_decision(
    acls: Sequence[AclEntry],
    client: tuple[str, str],  # principal, host
    operation: Operation,
    resource_type: ResourceType,
    name: str,
) -> bool | None:
    concerned = [
        acl for acl in acls if acl.resource_type == resource_type and concerns_name(acl, name)
    ]
    if not concerned:
        return None
    permissions = {acl.permission for acl in concerned if applies(acl, *client, operation)}
    return Permission.DENY not in permissions and Permission.ALLOW in permissions


@pytest.mark.parametrize("seed", SEEDS)
def test_the_index_decides_as_the_naive_model(seed: int) -> None:
    rng = random.Random(seed)
    acls = [draw_acl(rng) for _ in range(rng.randrange(12))]
    index = AclIndex(acls)
    for _ in range(200):
        principal = rng.choice(PRINCIPALS[:3])
        host = rng.choice(HOSTS[:3])
        operation = rng.choice(ASKED_OPERATIONS)
        kind, name = rng.choice((ResourceType.TOPIC, ResourceType.GROUP)), rng.choice(NAMES)
        decision = index.decide(parse_principal(principal), host, operation, kind, name)
        expected = naive_decision(acls, (principal, host), operation, kind, name)
        assert decision == expected, (seed, acls, principal, host, operation, kind, name)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_operation_is_allowed_on_some_resource_if_a_name_exists_that_it_is_allowed_on(
    seed: int,
) -> None:
    """As in Kafka, implied operations do not count here."""
    rng = random.Random(seed)
    acls = [draw_acl(rng) for _ in range(rng.randrange(8))]
    operation = Operation.WRITE
    names = [name + end for name in NAMES if name != WILDCARD for end in ("", "-", "bc")] + ["?"]
    expected = any(
        naive_decision(acls, ("User:ann", "10.0.0.1"), operation, ResourceType.TOPIC, name)
        for name in names
    )
    decision = AclIndex(acls).decide_some(ANN, "10.0.0.1", operation, ResourceType.TOPIC)
    # Kafka ignores denied prefixes beside an allowed wildcard, and longer denied prefixes.
    assert decision or not expected, (seed, acls)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_filter_finds_its_entries(seed: int) -> None:
    rng = random.Random(seed)
    acls = [draw_acl(rng) for _ in range(12)]
    for acl in acls:
        exact = AclFilter(
            acl.resource_type,
            acl.resource_name,
            acl.pattern_type,
            acl.principal,
            acl.host,
            acl.operation,
            acl.permission,
        )
        assert exact.entry == acl
        assert {other for other in acls if exact.matches(other)} == {acl}
        assert AclFilter().matches(acl)
        by_name = AclFilter(resource_name=acl.resource_name)
        assert {o for o in acls if by_name.matches(o)} == {
            o for o in acls if o.resource_name == acl.resource_name
        }
    for name in ("abc", "b", "z"):
        matching = AclFilter(resource_name=name, pattern_type=PatternType.MATCH)
        assert {o for o in acls if matching.matches(o)} == {
            o for o in acls if concerns_name(o, name)
        }


VALID = AclEntry(
    ResourceType.TOPIC,
    PatternType.LITERAL,
    "orders",
    "User:ann",
    WILDCARD,
    Operation.READ,
    Permission.ALLOW,
)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("resource_type", ResourceType.ANY, "resourceType"),
        ("resource_type", 99, "resourceType"),
        ("resource_type", ResourceType.CLUSTER, CLUSTER_NAME),
        ("pattern_type", PatternType.MATCH, "patternType"),
        ("resource_name", "", "empty"),
        ("resource_name", "n" * 40_000, "longer"),
        ("operation", Operation.ANY, "operation"),
        ("operation", 0, "operation"),
        ("permission", Permission.ANY, "permissionType"),
        ("principal", "ann", "principal"),
    ],
)
def test_an_entry_that_kafka_refuses_is_refused(field: str, value: object, reason: str) -> None:
    check_entry(VALID)
    values = {name: getattr(VALID, name) for name in AclEntry.__slots__}
    with pytest.raises(InvalidAclError, match=reason):
        check_entry(AclEntry(**{**values, field: value}))


@pytest.mark.parametrize("field", ["resource_type", "pattern_type", "operation", "permission"])
def test_a_filter_with_an_unknown_code_is_refused(field: str) -> None:
    check_filter(AclFilter())
    with pytest.raises(InvalidAclError, match="Unknown"):
        check_filter(AclFilter(**{field: 0}))


def test_spellings_of_an_address_are_equal() -> None:
    assert canonical_host("0:0:0:0:0:0:0:1") == canonical_host("::1")
    assert canonical_host("::ffff:10.0.0.1") == "10.0.0.1"
    assert canonical_host("client.lan") == "client.lan"


def allows(authorizer: Authorizer, name: str, principal: Principal = ANN) -> bool:
    return authorizer.allows(principal, "10.0.0.1", Operation.READ, ResourceType.TOPIC, name)


def test_a_resource_without_acls_follows_the_setting() -> None:
    for is_open in (False, True):
        settings = AuthorizationSettings(
            enabled=True,
            super_users=("User:root",),
            allow_everyone_if_no_acl_found=is_open,
        )
        authorizer = Authorizer(settings, [VALID])
        assert allows(authorizer, "other") is is_open
        assert allows(authorizer, "orders")
        assert not allows(authorizer, "orders", Principal("bob"))
        assert allows(authorizer, "orders", Principal("root"))


def test_a_changed_entry_counts_at_once_and_kept_decisions_are_bounded() -> None:
    authorizer = Authorizer(AuthorizationSettings(enabled=True, super_users=("User:root",)))
    assert not allows(authorizer, "orders")
    authorizer.use(AclIndex([VALID]))
    assert allows(authorizer, "orders")
    for number in range(DECISIONS_MAX + 10):
        allows(authorizer, str(number))
        assert number < DECISIONS_MAX or len(authorizer._decisions) == DECISIONS_MAX
    assert allows(authorizer, "orders"), "the oldest was dropped, and is decided again"
