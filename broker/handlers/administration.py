"""Kafka requests that come over HTTP, answered by the handlers of the Kafka protocol.

The HTTP API authenticates a sender and translates its request. Permissions, quotas, validation and
the audit log are those of the handler, so both ports give the same answer.
"""

from collections.abc import Awaitable, Callable
from copy import copy
from functools import partial
from typing import Any, Final

from broker.handlers.dispatch import Dispatcher
from broker.handlers.produce import produce
from broker.network.request_context import RequestContext, Services
from broker.quotas.muted_http_users import MutedHttpUsers, ThrottledError
from broker.security.authorizer import UnlimitedAuthorizer
from broker.security.principal import USER, Principal, client_of
from protocol.api import ApiKey
from protocol.codec import RequestHeader, decode_response, encode_request
from protocol.messages import Message
from storage.segments.fetch_slice import FetchSlice

CLIENT_ID: Final = "varve-http"  # by which quotas know these requests
_SIZE_BYTES: Final = 4  # before the frame


class Administration:
    """Answers Kafka requests of senders that HTTP authenticated."""

    def __init__(
        self,
        services: Services,
        dispatcher: Dispatcher,
        clock: Callable[[], float],
    ) -> None:
        """`clock` returns monotonic seconds."""
        self._services = services
        self._dispatcher = dispatcher
        self._muted = MutedHttpUsers(clock)

    async def call(
        self,
        principal: Principal,
        host: str,
        key: ApiKey,
        version: int,
        body: Message,
        *,
        is_unlimited: bool = False,
    ) -> Any:
        """Return the response to a request. `is_unlimited`: the sender may do everything."""
        context = self._context(principal, host, is_unlimited=is_unlimited)
        if key is ApiKey.PRODUCE:
            return await self._produce(context, version, body)
        header = RequestHeader(key, version, 0, CLIENT_ID, 0)
        return await self._dispatcher.call(context, header, body)

    def check_muted(self, principal: Principal) -> None:
        """Raise ThrottledError while the sender is over a quota. Those of users limit no token."""
        if principal.kind == USER:
            self._muted.check(principal.name)

    def check_changes(self, principal: Principal, host: str) -> None:
        """Raise ThrottledError while the sender's next change of the metadata has to wait."""
        pauses = self._services.metadata_writer.pauses
        if seconds := pauses.pause_of(client_of(principal, host)):
            raise ThrottledError(seconds, "this user makes too many changes")

    def charge_turn(self, principal: Principal, nanoseconds: int) -> None:
        """Count a turn of the event loop that a request of the sender took."""
        quotas = self._services.quotas
        if quotas.enforced:
            quotas.charge_request(quotas.meters(principal.name, CLIENT_ID), nanoseconds)

    def check_request(self, principal: Principal) -> None:
        """Mute the sender if its requests take more time than its quota allows."""
        quotas = self._services.quotas
        if quotas.enforced:
            throttle_ms = quotas.check_request(quotas.meters(principal.name, CLIENT_ID))
            if throttle_ms:
                self._muted.mute(principal.name, throttle_ms / 1000)

    def charge_read(self, principal: Principal, record_bytes: int) -> None:
        """Count bytes of records that the sender has read, for its quota of fetched bytes."""
        quotas = self._services.quotas
        meters = quotas.meters(principal.name, CLIENT_ID)
        throttle_ms = quotas.charge_fetch(meters, record_bytes, is_sent=True)
        if throttle_ms:
            self._muted.mute(principal.name, throttle_ms / 1000)

    async def _produce(self, context: RequestContext, version: int, body: Message) -> Message:
        """Return the response of Produce, whose handler takes and returns bytes."""
        frame = encode_request(ApiKey.PRODUCE, version, 0, CLIENT_ID, body)[_SIZE_BYTES:]
        waiting = produce(context, version, memoryview(bytearray(frame)))
        answer = await waiting if isinstance(waiting, Awaitable) else waiting
        assert answer is not None, "acks=0 has no response"
        parts = [answer] if isinstance(answer, bytes) else answer
        # There is no slice of a file in it, as in the response of Fetch.
        data = b"".join(bytes(part) for part in parts if not isinstance(part, FetchSlice))
        return decode_response(ApiKey.PRODUCE, version, data[_SIZE_BYTES:])[1]

    def _context(self, principal: Principal, host: str, *, is_unlimited: bool) -> RequestContext:
        services = self._services
        if is_unlimited and services.authorizer.is_enabled:
            services = copy(services)
            services.authorizer = UnlimitedAuthorizer(services.authorizer)
        listener = services.settings.listeners[0]
        return RequestContext(
            services,
            client_host=host,
            reached_at=listener.address,
            listener=listener,
            mute=partial(self._muted.mute, principal.name),
            principal=principal,
        )
