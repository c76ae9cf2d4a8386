"""/api/v1/audit: the last events of the audit log, from memory. They need ALTER on the cluster.

The events name users, groups and topics, so DESCRIBE on the cluster is not enough.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from aiohttp import web

from broker.event_loop.loop_turns import Turns
from broker.http.api.permissions import Permissions
from broker.http.api.requests import (
    cut_page,
    page_limit,
    parse_integer,
    query_parameters,
    rows_response,
)
from broker.http.authentication import Allows
from broker.logging import RecentEvents
from broker.security.acls import CLUSTER_NAME, Operation, ResourceType

PATH: Final = "/api/v1/audit"
ADMINISTRATIVE: Final = (("GET", PATH),)
EVENTS: Final = 100
EVENTS_MAX: Final = 1000
# The names of fields that every event may have; all others are its details.
FIELDS: Final = ("timestamp", "event", "principal", "host", "resource", "reason")
# The field that says what happened: the first of these that an event has.
ACTIONS: Final = ("change", "action", "operation")
_NO_DETAILS: Final = frozenset((*FIELDS, "level", "logger"))


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
        limit = page_limit(query, EVENTS, EVENTS_MAX)
        before = None
        if "after" in query:
            before = parse_integer(query["after"], "after", 0, (1 << 63) - 1)
        self._permissions.check(request, Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME)
        part = query.get("contains", "").lower()
        events: list[tuple[int, str]] = []
        async for number, text in Turns().over(self._events.newest(before)):
            if part in text.lower():
                events.append((number, text))
                if len(events) > limit:
                    break
        page, last = cut_page(events, limit)
        rows = (_event_json(number, json.loads(text)) for number, text in page)
        return await rows_response("events", rows, {"next": None if last is None else last[0]})


def _event_json(number: int, event: dict[str, Any]) -> dict[str, Any]:
    action = next((name for name in ACTIONS if name in event), "")
    no_details = _NO_DETAILS | {action}
    return {
        "number": number,
        **{name: event.get(name) for name in FIELDS},
        "action": event.get(action, ""),
        "details": {name: value for name, value in event.items() if name not in no_details},
    }
