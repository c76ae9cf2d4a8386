"""Decides which operations a client may perform, from the access control lists and the settings.

Rules. Super users may do everything. A denial prevails over every entry that allows. A resource
that no entry concerns is open to all if `allow_everyone_if_no_acl_found` is set, and otherwise
closed. Decisions are kept until the entries change, so that a check of Produce or Fetch is one look
into a dictionary.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

from broker.event_loop.loop_turns import FreedLater
from broker.security.acls import (
    CLUSTER_NAME,
    OPERATIONS,
    AclIndex,
    Operation,
    ResourceType,
)
from broker.security.principal import Principal
from config.settings import AuthorizationSettings
from storage.directory.security_entries import AclEntry

__all__ = [
    "CLUSTER_NAME",
    "Authorizer",
    "Operation",
    "ResourceType",
    "UnlimitedAuthorizer",
]

# Each takes about 400 bytes. If there are more, the oldest one is dropped, and looked up again when
# it is needed: to drop all at once takes 8 ms.
DECISIONS_MAX: Final = 50_000
# Decisions about some resource of a type are kept apart: they cost most, and a client has few of
# them, whatever names it invents.
SOME_DECISIONS_MAX: Final = 10_000
# Names of topics are shorter. Decisions about longer names, which other resources may have, are not
# kept: each could take 32 KB.
KEPT_NAME_CHARACTERS_MAX: Final = 249

_SomeKey = tuple[Principal, str, Operation, ResourceType]
_Key = tuple[Principal, str, Operation, ResourceType, str]


class Authorizer:
    """Answers whether a client may perform an operation; without `settings`, it always may."""

    def __init__(
        self, settings: AuthorizationSettings | None = None, acls: Iterable[AclEntry] = ()
    ) -> None:
        self.is_enabled = settings is not None and settings.enabled
        self._super_users = frozenset(settings.super_users if settings is not None else ())
        self._default = settings is not None and settings.allow_everyone_if_no_acl_found
        self._index = AclIndex(acls)
        # Both in the order in which they were made; a plain dict would search for its first entry.
        self._decisions = OrderedDict[_Key, bool]()
        self._some_decisions = OrderedDict[_SomeKey, bool]()
        self._freed_later = FreedLater()  # 50,000 decisions at once take 12 ms
        self.generation = 0  # rises when the entries change

    @property
    def entries(self) -> Mapping[AclEntry, None]:
        """Return the entries in effect, in their order."""
        return self._index.entries

    def use(self, index: AclIndex) -> None:
        """Decide by these entries from now on."""
        self._index = index
        self._freed_later.add(self._decisions, self._some_decisions)
        self._decisions = OrderedDict()
        self._some_decisions = OrderedDict()
        self.generation += 1

    def allows(
        self,
        principal: Principal,
        host: str,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
    ) -> bool:
        """Return whether a client at address `host` may perform an operation on a resource."""
        if not self.is_enabled:
            return True
        key = (principal, host, operation, resource_type, name)
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._decide(principal, host, operation, resource_type, name)
            if len(name) <= KEPT_NAME_CHARACTERS_MAX:
                self._keep(key, decision)
        return decision

    def allows_some(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType
    ) -> bool:
        """Return whether a client may perform an operation on at least one resource of a type."""
        if not self.is_enabled:
            return True
        key = (principal, host, operation, resource_type)
        decision = self._some_decisions.get(key)
        if decision is None:
            # Any name answers for super users, and for everyone if no entry exists.
            decision = self._decide(
                principal, host, operation, resource_type, "hardcode"
            ) or self._index.decide_some(principal, host, operation, resource_type)
            if len(self._some_decisions) >= SOME_DECISIONS_MAX:
                self._some_decisions.popitem(last=False)
            self._some_decisions[key] = decision
        return decision

    def allowed_operations(
        self, principal: Principal, host: str, resource_type: ResourceType, name: str
    ) -> int:
        """Return the operations that a client may perform, as bits of their codes."""
        return sum(
            1 << operation
            for operation in OPERATIONS[resource_type]
            if self.allows(principal, host, operation, resource_type, name)
        )

    def _decide(
        self,
        principal: Principal,
        host: str,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
    ) -> bool:
        if str(principal) in self._super_users:
            return True
        decision = self._index.decide(principal, host, operation, resource_type, name)
        return self._default if decision is None else decision

    def _keep(self, key: _Key, decision: bool) -> None:
        if len(self._decisions) >= DECISIONS_MAX:
            self._decisions.popitem(last=False)
        self._decisions[key] = decision


class UnlimitedAuthorizer(Authorizer):
    """Allows everything to its sender; the entries are those of another authorizer."""

    def __init__(self, authorizer: Authorizer) -> None:
        super().__init__()
        self.is_enabled = authorizer.is_enabled
        self._authorizer = authorizer

    @property
    def entries(self) -> Mapping[AclEntry, None]:
        """Return the entries of the other authorizer."""
        return self._authorizer.entries

    def use(self, index: AclIndex) -> None:
        """Let the other authorizer decide by these entries."""
        self._authorizer.use(index)

    def allows(
        self,
        principal: Principal,
        host: str,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
    ) -> bool:
        """Return True."""
        return True

    def allows_some(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType
    ) -> bool:
        """Return True."""
        return True
