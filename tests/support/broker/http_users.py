"""A broker in memory whose HTTP users have the permissions of a rule, and requests of users."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from broker.app import Broker
from broker.security.authorizer import Authorizer, Operation, ResourceType
from broker.security.principal import Principal
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import JSON, PASSWORD, basic, call_api
from tests.support.storage.memory_env import MemoryEnv

# Whether a user may perform an operation on a resource.
Rule: TypeAlias = Callable[[str, Operation, ResourceType, str], bool]

OWNERS: Final = ("owner", "viewer", "nobody")  # the users of `owner_rule`
OWNED: Final = {
    ResourceType.TOPIC: {"orders", "new"},
    ResourceType.GROUP: {"readers"},
    ResourceType.CLUSTER: set[str](),
}


def owner_rule(user: str, operation: Operation, kind: ResourceType, name: str) -> bool:
    """`owner` may do everything with some topics and groups, `viewer` may describe."""
    if user == "viewer":
        return operation in (Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
    return user == "owner" and name in OWNED[kind]


class RuleAuthorizer(Authorizer):
    """Decides by a rule instead of entries."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.is_enabled = True
        self._rule = rule

    def allows(
        self,
        principal: Principal,
        host: str,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
    ) -> bool:
        return self._rule(principal.name, operation, resource_type, name)


def sasl_users(directory: Path, names: Iterable[str]) -> dict[str, Any]:
    """The `sasl` settings of users with PASSWORD, whose wrong passwords wait briefly."""
    secret = directory / "password"
    secret.write_text(PASSWORD)
    return {"users": {name: {"file": str(secret)} for name in names}, "failure_delay_ms": 10}


@asynccontextmanager
async def broker_with_users(
    directory: Path, users: Iterable[str], rule: Rule, *, seed: int, **settings: Any
) -> AsyncIterator[Broker]:
    """A broker whose users have the permissions of a rule."""
    sasl = sasl_users(directory, users)
    async with broker_in_memory(
        MemoryEnv(seed=seed), http_users=True, sasl=sasl, **settings
    ) as broker:
        broker._services.authorizer = RuleAuthorizer(rule)
        yield broker


async def send(
    broker: Broker, method: str, path: str, user: str = "owner", json: str = "", **headers: str
) -> tuple[int, Any]:
    """Send a request of a user -> (status, document)."""
    named = {"Content-Type": JSON, "Authorization": basic(user), **headers}
    return await call_api(broker, method, path, json.encode() or None, **named)
