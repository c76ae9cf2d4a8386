"""/api/v1/view: compacted views, and their compaction on demand. openapi/ lists the paths.

Status codes are those of the cleaner's API. A request starts a compaction and returns at once; the
status has the result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web

from broker.event_loop.loop_turns import Turns
from broker.http.api.lookup import find_topic
from broker.http.api.requests import (
    ApiError,
    action_response,
    cursor_of,
    first_page,
    json_response,
    page_limit,
    parse_cursor,
    parse_partition,
    query_flags,
    query_parameters,
    rows_response,
)
from broker.http.audited import sender_of
from broker.topics.topics import Topics
from broker.views.compaction import ViewError
from broker.views.scheduler import ViewScheduler
from broker.views.status import ViewStatus
from storage.model import TopicPartition

ROOT: Final = "/api/v1/view"
VIEWS: Final = 1000  # a page
VIEWS_MAX: Final = 5000


class ViewApi:
    """Handlers of the requests under /api/v1/view."""

    def __init__(self, topics: Topics, compactions: ViewScheduler) -> None:
        self._topics = topics
        self._compactions = compactions

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.get(ROOT, self._all)
        yield web.get(f"{ROOT}/partitions/{{topic}}/{{partition}}", self._get)
        yield web.post(f"{ROOT}/partitions/{{topic}}/{{partition}}/compact", self._compact)
        yield web.post(f"{ROOT}/partitions/{{topic}}/{{partition}}/abort", self._abort)

    async def _all(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("topic", "contains", "after", "limit"))
        limit, part = page_limit(query, VIEWS, VIEWS_MAX), query.get("contains", "")
        after = parse_cursor(query["after"]) if "after" in query else None
        requested = query.get("topic")
        if requested is not None:
            find_topic(self._topics, requested)
        partitions = (
            partition
            async for partition in Turns().over(self._compactions.partitions(requested))
            if part in partition.topic and (after is None or partition > after)
        )
        page, last = await first_page(partitions, limit, key=tuple)
        cursor = None if last is None else cursor_of(last)
        return await rows_response("views", self._rows(page), {"next": cursor})

    def _rows(self, partitions: Sequence[TopicPartition]) -> Iterator[dict[str, Any]]:
        for partition in partitions:
            try:
                status = self._compactions.status_of(partition)
            except ViewError:
                continue  # it was removed in an earlier turn
            yield status_json(status)

    async def _get(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        return json_response(status_json(self._status_of(parse_partition(request))))

    async def _compact(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        partition = parse_partition(request)
        flags = await query_flags(request, ("from_scratch",))
        self._status_of(partition)
        try:
            self._compactions.begin(
                partition,
                from_scratch=flags.get("from_scratch", False),
                client=sender_of(request).principal,
            )
        except ViewError as error:
            raise ApiError(409, str(error)) from error
        return json_response(status_json(self._status_of(partition)))

    async def _abort(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        partition = parse_partition(request)
        await query_flags(request)
        self._status_of(partition)
        changed = self._compactions.abort(partition)
        return action_response(
            request, {**status_json(self._status_of(partition)), "changed": changed}
        )

    def _status_of(self, partition: TopicPartition) -> ViewStatus:
        find_topic(self._topics, partition.topic)
        try:
            return self._compactions.status_of(partition)
        except ViewError as error:
            raise ApiError(409, str(error)) from error


def status_json(status: ViewStatus) -> dict[str, Any]:
    """Return the status of a view as JSON."""
    fields = asdict(status)
    fields["topic"], fields["partition"] = status.partition
    return fields
