"""Requests of named principals to a broker in memory, as if authentication had identified them."""

import inspect
from types import SimpleNamespace
from typing import Any, cast

from broker.app import Broker
from broker.event_loop.loop_turns import ROUND_SECONDS, TurnQueue
from broker.handlers.dispatch import Dispatcher
from broker.handlers.routes import make_dispatcher
from broker.network.connection import Connection
from broker.network.request_context import RequestContext
from broker.security.principal import ANONYMOUS, Principal
from config.settings import Settings
from protocol.codec import decode_response, encode_request
from protocol.messages import Message
from storage.segments.fetch_slice import FetchSlice

_LISTENER = Settings().listeners[0]


def make_context(
    broker: Broker, principal: Principal = ANONYMOUS, host: str = "127.0.0.1"
) -> RequestContext:
    """The context of a connection to the first listener."""
    listener = broker.settings.listeners[0]
    return RequestContext(
        broker._services,
        client_host=host,
        reached_at=listener.address,
        listener=listener,
        mute=lambda _seconds: None,
        principal=principal,
    )


def fake_connection(context: RequestContext | None = None) -> Connection:
    """What the dispatcher asks of a connection; without a context it makes one."""
    turns = TurnQueue(ROUND_SECONDS)
    peer = SimpleNamespace(
        find_task_turns=lambda: turns,
        peer_host="h",
        local_host="h",
        local_port=1,
        listener=_LISTENER,
        context=context,
        gate=None,
        peer_certificate=None,
        mute=lambda _seconds: None,
        stop_reading_ahead=lambda: None,
        client_has_left=lambda: False,
        response_memory=None,
    )
    return cast(Connection, peer)


class PrincipalClient:
    """One connection of a principal; frames pass the dispatcher, not a socket.

    Connections share slots only if they have the same `dispatcher`.
    """

    def __init__(
        self,
        broker: Broker,
        principal: str,
        host: str = "127.0.0.1",
        *,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        self.context = make_context(broker, Principal(principal), host)
        self._dispatcher = dispatcher or make_dispatcher(broker._services)
        self._connection = fake_connection(self.context)

    async def request(self, key: int, version: int, body: Message) -> Any:
        """Return the decoded response."""
        return decode_response(key, version, await self.exchange(key, version, body))[1]

    async def exchange(self, key: int, version: int, body: Message) -> bytes:
        """Return the response as bytes, without its length."""
        frame = memoryview(bytearray(encode_request(key, version, 1, "client", body)))[4:]
        response = self._dispatcher.handle(self._connection, frame)
        if inspect.isawaitable(response):
            response = await response
        assert response is not None
        parts = [response] if isinstance(response, bytes) else response
        data = b"".join(
            part.read() if isinstance(part, FetchSlice) else bytes(part) for part in parts
        )
        return data[4:]
