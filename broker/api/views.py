"""/api/v1/view: compacted views, their compaction on demand. The paths: openapi.py.

Rules as those of the cleaner's API: 400 is the request, 404 no such partition, 409 it makes no
sense now. A compaction is begun and answered; how it ends is in the status.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web

from broker.api.requests import (
    ApiError,
    flags_of,
    json_response,
    partition_of,
    query_of,
    rows_response,
)
from broker.topics import Topics
from broker.view_making import ViewError
from broker.view_runs import ViewRuns
from broker.view_status import ViewStatus
from storage.model import TopicPartition

ROOT: Final = "/api/v1/view"


class ViewApi:
    """Answers for the views."""

    def __init__(self, topics: Topics, runs: ViewRuns) -> None:
        self._topics = topics
        self._runs = runs

    def routes(self) -> Iterator[web.RouteDef]:
        """Every route, for the server."""
        yield web.get(ROOT, self._all)
        yield web.get(f"{ROOT}/partitions/{{topic}}/{{partition}}", self._one)
        yield web.post(f"{ROOT}/partitions/{{topic}}/{{partition}}/compact", self._compact)
        yield web.post(f"{ROOT}/partitions/{{topic}}/{{partition}}/abort", self._abort)

    async def _all(self, request: web.Request) -> web.Response:
        query = query_of(request, ("topic",))
        wanted = query.get("topic")
        if wanted is not None and self._topics.get(wanted) is None:
            raise ApiError(404, f"there is no topic {wanted[:300]}")
        found = self._runs.status(wanted)
        return await rows_response("views", (status_json(one) for one in found))

    async def _one(self, request: web.Request) -> web.Response:
        query_of(request, ())
        return json_response(status_json(self._status_of(partition_of(request))))

    async def _compact(self, request: web.Request) -> web.Response:
        query_of(request, ())
        where = partition_of(request)
        flags = await flags_of(request, ("from_scratch",))
        self._status_of(where)
        try:
            self._runs.begin(where, from_scratch=flags.get("from_scratch", False))
        except ViewError as error:
            raise ApiError(409, str(error)) from error
        return json_response(status_json(self._status_of(where)))

    async def _abort(self, request: web.Request) -> web.Response:
        query_of(request, ())
        where = partition_of(request)
        await flags_of(request)
        self._status_of(where)
        changed = self._runs.abort(where)
        return json_response({**status_json(self._status_of(where)), "changed": changed})

    def _status_of(self, where: TopicPartition) -> ViewStatus:
        if self._topics.get(where.topic) is None:
            raise ApiError(404, f"there is no topic {where.topic[:300]}")
        try:
            return self._runs.status_of(where)
        except ViewError as error:
            raise ApiError(409, str(error)) from error


def status_json(status: ViewStatus) -> dict[str, Any]:
    """A view as the API tells it."""
    found = asdict(status)
    found["topic"], found["partition"] = status.partition
    return found
