"""Choose the HTTP connection that gives way to a new one, if there are too many.

Rules. If one user has more than half of the connections, one of them gives way: the oldest one that
waits for its next request, or else the oldest one. Otherwise the oldest connection without an
authorized request gives way, or else the oldest one that waits; its client connects again. So
neither clients without permissions nor one user can keep the others out. Several users can do so
only with requests in progress. Senders that may do everything count as no user.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from broker.http.authentication import Sender

_AUTHORIZED: Final = web.RequestKey("authorized", Sender)


def mark_authorized(request: web.Request, sender: Sender) -> None:
    """Note that the sender of a request has the permission for it."""
    request[_AUTHORIZED] = sender


class HttpConnections:
    """The state of the open connections."""

    def __init__(self) -> None:
        self._authorized: dict[RequestHandler, Sender] = {}  # of the last request
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
            if (sender := request.get(_AUTHORIZED)) is not None:
                self._authorized[request.protocol] = sender

    def last_sender(self, request: web.Request) -> Sender | None:
        """Return who sent the last authorized request of the connection of a request."""
        return self._authorized.get(request.protocol)

    def make_room(self, connections: Collection[RequestHandler], limit: int) -> bool:
        """Close one of the open connections if there are `limit`; return False if none may go.

        `connections` are in the order in which they were made.
        """
        for closed in self._authorized.keys() - set(connections):
            del self._authorized[closed]
        self._closing.intersection_update(connections)
        candidates = [item for item in connections if item not in self._closing]
        if len(candidates) < limit:
            return True
        senders = {item: self.sender(item) for item in candidates}
        share = self._largest_share(candidates, senders, limit)
        victim = next(
            (item for item in share if item not in self._requests), share[0] if share else None
        )
        victim = victim or next(
            (item for item in candidates if senders[item] is None),
            next((item for item in candidates if item not in self._requests), None),
        )
        if victim is None:
            return False
        self._closing.add(victim)
        if victim.transport is not None:
            victim.transport.abort()
        return True

    def is_authorized(self, connection: RequestHandler) -> bool:
        """Return whether the present or an earlier request of a connection was authorized."""
        return self.sender(connection) is not None

    def sender(self, connection: RequestHandler) -> Sender | None:
        """Return the sender of the present or the last authorized request; None without one."""
        request = self._requests.get(connection)
        present = None if request is None else request.get(_AUTHORIZED)
        return present or self._authorized.get(connection)

    @staticmethod
    def _largest_share(
        connections: Sequence[RequestHandler],
        senders: Mapping[RequestHandler, Sender | None],
        limit: int,
    ) -> list[RequestHandler]:
        """Return the connections of the user that has more than half of the limit, if any."""
        users = [item for item in senders.values() if item is not None and not item.is_unlimited]
        for user, count in Counter(users).most_common(1):
            if count > limit // 2:
                return [item for item in connections if senders[item] == user]
        return []
