"""`varve acls`: list, add and remove access control lists, over the Kafka protocol."""

from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import click

from admin.client import Json
from admin.command import fail, json_option, show, with_command_config
from admin.kafka.client import bootstrap_option, connected
from admin.watch import watched
from config.printable import printable

if TYPE_CHECKING:
    from protocol.client.administration import Acl

CLUSTER: Final = "kafka-cluster"
RESOURCES: Final = ("topic", "group", "cluster", "transactional-id", "user")
OPERATIONS: Final = (
    "all",
    "read",
    "write",
    "create",
    "delete",
    "alter",
    "describe",
    "cluster-action",
    "describe-configs",
    "alter-configs",
    "idempotent-write",
    "two-phase-commit",
)


def entry_arguments(function: "Callable[[list[Acl], str], None]") -> Callable[..., None]:
    """Add the arguments that describe entries; the command gets the entries and the bootstrap."""

    @click.argument("principal")
    @click.argument(
        "operations", nargs=-1, required=True, type=click.Choice(OPERATIONS), metavar="OPERATION..."
    )
    @click.argument("resource", metavar="TYPE[:NAME]")
    @click.option("--prefix", is_flag=True, help="Take NAME as a prefix of the names of resources.")
    @click.option(
        "--host",
        default="*",
        show_default=True,
        metavar="ADDRESS",
        help="Address of the client.",
    )
    @click.option("--deny", is_flag=True, help="Deny the operations instead of allowing them.")
    @bootstrap_option
    @with_command_config
    @wraps(function)
    def command(*, bootstrap: str, **entries: Any) -> None:
        function(_entries(**entries), bootstrap)

    return command


@click.group(short_help="List, add and remove access control lists.")
def acls() -> None:
    """List, add and remove access control lists (ACLs).

    TYPE is topic, group, cluster, transactional-id or user. NAME "*" means every resource of the
    type; the cluster needs no name. PRINCIPAL is User:NAME, and "User:*" means every client.
    """


@acls.command("list", short_help="List ACLs.")
@click.option("--principal", metavar="PRINCIPAL", help="Only ACLs of this principal.")
@click.option("--resource", metavar="TYPE[:NAME]", help="Only ACLs that concern this resource.")
@json_option
@bootstrap_option
@with_command_config
@watched
def list_acls(
    *, principal: str | None, resource: str | None, as_json: bool, bootstrap: str
) -> None:
    """List ACLs, one a line: permission, principal, host, operation, resource."""
    from protocol.client.administration import AclsClient

    kind, name = (None, None) if resource is None else _resource(resource, needs_name=False)
    with connected(bootstrap, AclsClient, needs="DESCRIBE on the cluster") as client:
        entries = client.describe(principal=principal, resource_type=kind, name=name)
    entries = sorted(entries)
    none = "No ACL matches." if principal or resource else "The broker has no ACLs."
    answer = {"acls": [_row(acl) for acl in entries]}
    show(answer, as_json, lambda _: [_line(acl) for acl in entries] or [none])


@acls.command("add", short_help="Allow or deny operations.")
@entry_arguments
def add_acls(entries: list["Acl"], bootstrap: str) -> None:
    """Allow PRINCIPAL the OPERATIONs on a resource, for example:

    varve acls add User:alice read describe-configs topic:orders
    """
    from protocol.client.administration import AclsClient

    with connected(bootstrap, AclsClient, needs="ALTER on the cluster") as client:
        client.create(entries)
    for acl in entries:
        click.echo(f"added: {_line(acl)}")


@acls.command("remove", short_help="Remove ACLs.")
@entry_arguments
def remove_acls(entries: list["Acl"], bootstrap: str) -> None:
    """Remove the ACLs that `varve acls add` added with the same arguments."""
    from protocol.client.administration import AclsClient

    with connected(bootstrap, AclsClient, needs="ALTER on the cluster") as client:
        removed = client.delete(entries)
    for acl in removed:
        click.echo(f"removed: {_line(acl)}")
    if not removed:
        fail("no such ACL exists; `varve acls list` shows all")


def _entries(
    *,
    principal: str,
    operations: tuple[str, ...],
    resource: str,
    prefix: bool,
    host: str,
    deny: bool,
) -> list["Acl"]:
    from protocol.acl_codes import Operation, PatternType, Permission
    from protocol.client.administration import Acl

    kind, name = _resource(resource, needs_name=True)
    assert name is not None
    return [
        Acl(
            resource_type=kind,
            resource_name=name,
            pattern_type=PatternType.PREFIXED if prefix else PatternType.LITERAL,
            principal=principal,
            host=host,
            operation=Operation[operation.replace("-", "_").upper()],
            permission=Permission.DENY if deny else Permission.ALLOW,
        )
        for operation in operations
    ]


def _resource(text: str, *, needs_name: bool) -> tuple[int, str | None]:
    """Read TYPE or TYPE:NAME."""
    from protocol.acl_codes import ResourceType

    kind, colon, name = text.partition(":")
    if kind not in RESOURCES:
        raise click.BadParameter(f"expected TYPE:NAME; types: {', '.join(RESOURCES)}")
    if kind == "cluster":
        name = CLUSTER
    elif (colon or needs_name) and not name:
        raise click.BadParameter(f"expected {kind}:NAME")
    return ResourceType[kind.replace("-", "_").upper()], name or None


def _row(acl: "Acl") -> Json:
    from protocol.acl_codes import Operation, PatternType, Permission, ResourceType

    return {
        "permission": _name(Permission(acl.permission)),
        "principal": acl.principal,
        "host": acl.host,
        "operation": _name(Operation(acl.operation)),
        "resource_type": _name(ResourceType(acl.resource_type)),
        "resource_name": acl.resource_name,
        "pattern_type": _name(PatternType(acl.pattern_type)),
    }


def _name(code: IntEnum) -> str:
    return code.name.lower().replace("_", "-")


def _line(acl: "Acl") -> str:
    row = _row(acl)
    prefix = " (prefix)" if row["pattern_type"] == "prefixed" else ""
    return printable(
        f"{row['permission']} {row['principal']} from {row['host']}: "
        f"{row['operation']} {row['resource_type']}:{row['resource_name']}{prefix}"
    )
