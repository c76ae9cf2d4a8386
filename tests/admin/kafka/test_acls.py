"""`varve acls` against a daemon."""

from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from broker.cli import main
from tests.support.ports import free_port
from tests.support.varve import VarveBroker, running_varve


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    port = free_port()
    authorization = {"enabled": True, "super_users": ["User:ANONYMOUS"]}
    settings = {"listeners": [f"127.0.0.1:{port}"], "authorization": authorization}
    with running_varve(tmp_path_factory.mktemp("acls"), settings, port=port) as running:
        yield running


def run(broker: VarveBroker, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["acls", *arguments, "--bootstrap", broker.bootstrap])


def test_entries_are_added_listed_and_removed(broker: VarveBroker) -> None:
    assert run(broker, "list").output == "The broker has no ACLs.\n"
    line = "allow User:alice from *: read topic:orders"
    added = run(broker, "add", "User:alice", "read", "topic:orders")
    assert (added.exit_code, added.output) == (0, f"added: {line}\n")
    prefixed = "deny User:bob from 10.0.0.1: write topic:or (prefix)"
    arguments = ("User:bob", "write", "topic:or", "--prefix", "--host", "10.0.0.1", "--deny")
    assert run(broker, "add", *arguments).output == f"added: {prefixed}\n"
    assert run(broker, "list", "--resource", "topic:orders").output == f"{prefixed}\n{line}\n"
    assert run(broker, "list", "--principal", "User:bob").output == f"{prefixed}\n"
    assert run(broker, "list", "--resource", "cluster").output == "No ACL matches.\n"
    assert run(broker, "remove", *arguments).output == f"removed: {prefixed}\n"
    missing = run(broker, "remove", *arguments)
    assert missing.exit_code != 0
    assert "no such ACL" in missing.output
    assert run(broker, "list").output == f"{line}\n"


@pytest.mark.parametrize("resource", ["table:orders", "topic", "topic:"])
def test_a_wrong_resource_is_refused(broker: VarveBroker, resource: str) -> None:
    assert run(broker, "add", "User:alice", "read", resource).exit_code != 0
    assert run(broker, "list", "--principal", "User:nobody").output == "No ACL matches.\n"


def test_an_invalid_principal_is_refused_with_the_reason(broker: VarveBroker) -> None:
    result = run(broker, "add", "alice", "read", "topic:orders")
    assert result.exit_code != 0
    assert "User:alice" in result.output
