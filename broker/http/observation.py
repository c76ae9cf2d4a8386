"""What HTTP requests cost the event loop, and their traces.

Rules
- A route is the pattern of a path, such as `/api/v1/topics/{topic}`, so there are as many as the
  server has. Requests without a route share one.
- A request is charged for its turns of the event loop, not for the time between them: a stream of
  events that waits costs nothing. The turns count towards the time that the tasks of all requests
  share in each round of the loop.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeAlias

from aiohttp import web
from aiohttp.typedefs import Middleware

from broker.counters import HttpRouteStats
from broker.event_loop.loop_turns import MeasuredTurns, TurnQueue

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

UNKNOWN: Final = "unknown"  # the label of requests without a route


@dataclass(frozen=True, slots=True)
class HttpRequestFacts:
    """The attributes of an HTTP request that a span has."""

    method: str
    route: str
    status: int | None  # None if the connection ended before there was one
    peer: str
    headers: Mapping[str, str]
    began_ns: int  # since 1970


class HttpTracer(Protocol):
    """Records spans of HTTP requests."""

    def is_sampled(self) -> bool:
        """Return whether the next request gets a span."""
        ...

    def http_request_ended(self, facts: HttpRequestFacts, error: BaseException | None) -> None:
        """Record a request that has been answered, or has failed."""
        ...


class HttpObserver:
    """Counts requests by route, and passes a share of them to the tracer."""

    def __init__(
        self, stats: Mapping[tuple[str, str], HttpRouteStats], tracer: HttpTracer | None
    ) -> None:
        """`stats` makes the counters of a method and route that it does not have yet."""
        self._stats = stats
        self._tracer = tracer

    def observe(self, find_turns: Callable[[web.Request], TurnQueue]) -> Middleware:
        """Return the middleware; `find_turns` returns the queue of turns of a request."""

        @web.middleware
        async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._handle(request, handler, partial(find_turns, request))

        return handle

    async def _handle(
        self, request: web.Request, handler: Handler, find_turns: Callable[[], TurnQueue]
    ) -> web.StreamResponse:
        method, route = _method_and_route(request)
        stats = self._stats[method, route]
        if self._tracer is None or not self._tracer.is_sampled():
            try:
                return await MeasuredTurns(handler(request), stats.note_turn, find_turns)
            finally:
                stats.requests += 1
        began_ns = time.time_ns()
        status: int | None = None
        failure: BaseException | None = None
        try:
            response = await MeasuredTurns(handler(request), stats.note_turn, find_turns)
            status = response.status
        except web.HTTPException as answer:
            status = answer.status
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            stats.requests += 1
            peer = request.remote or ""
            facts = HttpRequestFacts(method, route, status, peer, request.headers, began_ns)
            self._tracer.http_request_ended(facts, failure)
        return response


def _method_and_route(request: web.Request) -> tuple[str, str]:
    resource = request.match_info.route.resource
    if resource is None:
        return UNKNOWN, UNKNOWN  # also the method: any client can invent one
    return request.method, resource.canonical
