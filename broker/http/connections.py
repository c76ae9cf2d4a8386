"""Which connection of the HTTP server gives way to a new one, if there are too many.

Rules. First goes the oldest connection that has not had an authorized request; then the oldest one
that waits for its next request, whose client connects again. So clients without permissions cannot
keep the others out, and a client with permissions can do so only with requests in progress.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

_AUTHORIZED: Final = web.RequestKey("authorized", bool)


def mark_authorized(request: web.Request) -> None:
    """Note that the sender of a request has the permission for it."""
    request[_AUTHORIZED] = True


class HttpConnections:
    """The state of the open connections."""

    def __init__(self) -> None:
        self._authorized: set[RequestHandler] = set()
        self._requests: dict[RequestHandler, web.Request] = {}  # in progress
        self._closing: set[RequestHandler] = set()

    @contextmanager
    def handling(self, request: web.Request) -> Iterator[None]:
        """Note that a connection has a request in progress."""
        self._requests[request.protocol] = request
        try:
            yield
        finally:
            del self._requests[request.protocol]
            if request.get(_AUTHORIZED):
                self._authorized.add(request.protocol)

    def make_room(self, connections: Collection[RequestHandler], limit: int) -> bool:
        """Close one of the open connections if there are `limit`; return False if none may go.

        `connections` are in the order in which they were made.
        """
        self._authorized.intersection_update(connections)
        self._closing.intersection_update(connections)
        candidates = [item for item in connections if item not in self._closing]
        if len(candidates) < limit:
            return True
        victim = next(
            (item for item in candidates if not self._is_authorized(item)),
            next((item for item in candidates if item not in self._requests), None),
        )
        if victim is None:
            return False
        self._closing.add(victim)
        if victim.transport is not None:
            victim.transport.abort()
        return True

    def _is_authorized(self, connection: RequestHandler) -> bool:
        request = self._requests.get(connection)
        is_present = request is not None and request.get(_AUTHORIZED, False)
        return connection in self._authorized or is_present
