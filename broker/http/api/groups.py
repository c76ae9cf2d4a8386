"""/api/v1/groups: consumer groups, and how far they are behind. openapi/ lists the path.

Lag counts offsets, as Kafka's tools do: in a compacted topic fewer records may be left to read.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from aiohttp import web

from broker.event_loop.loop_turns import Turns
from broker.groups.summary import GroupSummary
from broker.http.api.json_shapes import Json
from broker.http.api.requests import first_page, page_limit, query_parameters, rows_response
from broker.network.request_context import Services

ROOT: Final = "/api/v1/groups"
GROUPS: Final = 500
GROUPS_MAX: Final = 2000
TOPICS_PER_GROUP: Final = 100  # listed; the lag is that of all


class GroupsApi:
    """The handler of /api/v1/groups."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield the route, for the server."""
        yield web.get(ROOT, self._all)

    async def _all(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("after", "limit", "contains"))
        limit = page_limit(query, GROUPS, GROUPS_MAX)
        turns, after, part = Turns(), query.get("after", ""), query.get("contains", "")
        summaries = (
            summary
            async for summary in turns.over(self._services.coordinators.groups.groups())
            if summary.group_id > after and part in summary.group_id
        )
        page, last = await first_page(summaries, limit, attrgetter("group_id"))
        rows = [await self._group_json(summary, turns) for summary in page]
        cursor = None if last is None else last.group_id
        return await rows_response("groups", rows, {"next": cursor})

    async def _group_json(self, summary: GroupSummary, turns: Turns) -> Json:
        _, committed = self._services.coordinators.groups.offsets.fetch(summary.group_id)
        lags: dict[str, int] = {}
        async for (topic, index), (offset, *_) in turns.over(tuple(committed.items())):
            end = self._services.topics.readable_end(topic, index)
            if end is not None:
                lags[topic] = lags.get(topic, 0) + max(0, end - offset)
        return {
            "group": summary.group_id,
            "type": summary.type.value,
            "protocol_type": summary.protocol_type,
            "state": summary.state,
            "members": summary.members,
            "lag": sum(lags.values()) if lags else None,
            "topics": [
                {"topic": topic, "lag": lags[topic]} for topic in sorted(lags)[:TOPICS_PER_GROUP]
            ],
            "topics_left_out": max(0, len(lags) - TOPICS_PER_GROUP),
        }
