"""Bound the memory of responses that clients do not read.

A handler makes a response as a whole: a page of records has up to 6 MB, and it is in memory twice
until the socket has taken it.

Rules. An authorized request to read something has a slot from the call of its handler until the
socket has taken the response, except for a last part of 64 KiB. Clients share the slots fairly
(event_loop/fair_slots.py). A connection whose client does not read its response within
SEND_SECONDS is closed.
"""

import asyncio
from typing import Final

import structlog
from aiohttp import web

from broker.event_loop.fair_slots import FairSlots
from broker.http.audited import client_of
from broker.http.observation import Handler
from broker.logging import RateLimitedLogger

RESPONSES_AT_ONCE: Final = 16
SEND_SECONDS: Final = 60.0

logger = RateLimitedLogger(structlog.get_logger("broker.http"))


class ResponseSlots:
    """The slots of all requests that read something."""

    def __init__(self) -> None:
        self._slots = FairSlots(RESPONSES_AT_ONCE)

    async def respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Call a handler and send its response. Raises ConnectionError, and as the handler does."""
        host = request.remote or ""
        async with self._slots.slot(client_of(request)):
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the client has left")
            response = await handler(request)
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await response.prepare(request)
                    await response.write_eof()
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
                reason = f"the client did not read its response within {SEND_SECONDS:g} s"
                logger.info("connection closed", subject=host, peer=host, reason=reason)
                raise ConnectionResetError(reason) from None
        return response
