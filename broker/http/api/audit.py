"""/api/v1/audit: the last events of the audit log, from memory. They need ALTER on the cluster.

Names of users, groups and topics are in them, so it is no right of a viewer.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from aiohttp import web

from broker.http.api.permissions import Permissions
from broker.http.api.requests import parse_integer, query_parameters, rows_response
from broker.http.authentication import Allows
from broker.logging import RecentEvents
from broker.security.acls import CLUSTER_NAME, Operation, ResourceType

PATH: Final = "/api/v1/audit"
ADMINISTRATIVE: Final = (("GET", PATH),)
EVENTS: Final = 100
EVENTS_MAX: Final = 1000
# The names of fields that every event may have; all others are its details.
FIELDS: Final = ("timestamp", "event", "principal", "host", "resource", "reason")
_NO_DETAILS: Final = frozenset((*FIELDS, "level", "logger", "change", "action", "operation"))


class AuditApi:
    """The handler of /api/v1/audit."""

    def __init__(self, events: RecentEvents, allows: Allows) -> None:
        self._events = events
        self._permissions = Permissions(allows)

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield the route, for the server."""
        yield web.get(PATH, self._list)

    async def _list(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("contains", "after", "limit"))
        limit = parse_integer(query.get("limit", str(EVENTS)), "limit", 1, EVENTS_MAX)
        before = None
        if "after" in query:
            before = parse_integer(query["after"], "after", 0, (1 << 63) - 1)
        self._permissions.check(request, Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME)
        part = query.get("contains", "")
        found = [
            (number, text)
            for number, text in self._events.newest(before)
            if part.lower() in text.lower()
        ]
        page = found[:limit]
        rows = (_event_json(number, json.loads(text)) for number, text in page)
        following = page[-1][0] if len(found) > limit else None
        return await rows_response("events", rows, {"next": following})


def _event_json(number: int, event: dict[str, Any]) -> dict[str, Any]:
    action = next((event[name] for name in ("change", "action", "operation") if name in event), "")
    return {
        "number": number,
        **{name: event.get(name) for name in FIELDS},
        "action": action,
        "details": {name: value for name, value in event.items() if name not in _NO_DETAILS},
    }
