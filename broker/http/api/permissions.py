"""Permissions of the sender of a request, for routes that authorize their sender themselves."""

from dataclasses import dataclass

from aiohttp import web

from broker.http.api.requests import ApiError
from broker.http.audited import sender_of
from broker.http.authentication import Allows
from broker.security.acls import CLUSTER_NAME, Operation, ResourceType


@dataclass(frozen=True, slots=True)
class Permissions:
    """Decides by the ACLs; the token of the settings permits everything."""

    allows: Allows

    def has(
        self, request: web.Request, operation: Operation, kind: ResourceType, name: str
    ) -> bool:
        """Return whether the sender may perform an operation on a resource."""
        sender, host = sender_of(request), request.remote or ""
        return sender.is_unlimited or self.allows(sender.principal, host, operation, kind, name)

    def sees_group(self, request: web.Request, group_id: str) -> bool:
        """Return whether ListGroups shows a group to the sender."""
        return self.has(request, Operation.DESCRIBE, ResourceType.GROUP, group_id) or self.has(
            request, Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME
        )

    def check(
        self, request: web.Request, operation: Operation, kind: ResourceType, name: str
    ) -> None:
        """Raise ApiError 403 unless the sender may perform an operation on a resource."""
        if not self.has(request, operation, kind, name):
            principal, resource = sender_of(request).principal, kind.name.lower()
            raise ApiError(403, f"{principal} needs {operation.name} on the {resource}")
