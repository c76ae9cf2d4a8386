"""The quotas of users over HTTP.

Rules
- The time of the event loop that requests of a user take counts for `request_percentage`, as that
  of requests on the Kafka port does. Senders that may do everything are not limited.
- Over a quota of either port, a user gets 429 for the throttle time, whatever the request is. The
  audit log has none of these requests: they change nothing.
- Of all requests of a user, one has a turn in each round of the event loop: a user may have half of
  the connections, each with a request of a thousand rows.
- A request goes on if its connection is closed. So a user may have REQUESTS_MAX in progress, as
  many as there are connections; the next ones get 429.
"""

import asyncio
from collections import Counter
from functools import partial
from math import ceil
from typing import Final, Protocol
from weakref import WeakValueDictionary

from aiohttp import web
from aiohttp.typedefs import Middleware

from broker.event_loop.loop_turns import MeasuredTurns, SharedTurns
from broker.http.api.requests import ApiError
from broker.http.audited import find_sender, note_no_change
from broker.http.observation import Handler
from broker.http.server import CONNECTIONS_MAX
from broker.quotas.muted_http_users import ThrottledError
from broker.security.principal import Principal

REQUESTS_MAX: Final = CONNECTIONS_MAX  # in progress, of one user


class UserQuotas(Protocol):
    """The quotas of senders (broker/handlers/administration.py)."""

    def check_muted(self, principal: Principal) -> None:
        """Raise ThrottledError while the sender is over a quota."""

    def charge_turn(self, principal: Principal, nanoseconds: int) -> None:
        """Count a turn of the event loop."""

    def check_request(self, principal: Principal) -> None:
        """Mute the sender if its requests take more time than its quota allows."""


def throttled(request: web.Request, error: ThrottledError) -> ApiError:
    """Return the error for a request that is refused before it changes anything."""
    note_no_change(request)
    return ApiError(429, str(error), {"Retry-After": str(ceil(error.seconds))})


def within_quotas(quotas: UserQuotas) -> Middleware:
    """Return the middleware that counts the time of requests and refuses muted users."""

    locks = WeakValueDictionary[Principal, asyncio.Lock]()
    in_progress = Counter[Principal]()

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        sender = find_sender(request)
        if sender is None:
            return await handler(request)
        principal = sender.principal
        try:
            quotas.check_muted(principal)
        except ThrottledError as error:
            raise throttled(request, error) from None
        if sender.is_unlimited:
            return await handler(request)
        if in_progress[principal] >= REQUESTS_MAX:
            note_no_change(request)
            reason = f"{REQUESTS_MAX} requests of this user are in progress: wait for their ends"
            raise ApiError(429, reason, {"Retry-After": "1"})
        in_progress[principal] += 1
        lock = locks.setdefault(principal, asyncio.Lock())
        turns = SharedTurns(handler(request), lock)
        try:
            return await MeasuredTurns(turns, partial(quotas.charge_turn, principal))
        finally:
            quotas.check_request(principal)
            in_progress[principal] -= 1
            if not in_progress[principal]:
                del in_progress[principal]

    return handle
