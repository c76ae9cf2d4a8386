"""Passes each request frame to the handler of its API, and encodes the response.

Produce and Fetch decode and encode their own messages (handlers/produce.py, handlers/fetch.py); the
tables do it for all other APIs. A handler is a function of (context, header, body) that returns the
response body, or an awaitable of it. If a request or response may have many rows, the handler is a
coroutine that takes turns on the loop (broker/event_loop/loop_turns.py); decoding and encoding take
turns too. If several requests of a client need more than one turn, only one of them has a turn in
each round of the loop: a list of thousands of groups takes many turns, and a client can ask for it
on each of its connections. A handler returns expected errors as codes in the body. An exception
closes the connection, which logs it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from broker.counters import UNSUPPORTED, RequestStats
from broker.event_loop.client_presence import ClientLeftError
from broker.event_loop.fair_slots import FairSlots
from broker.event_loop.loop_turns import (
    MeasuredTurns,
    SharedTurns,
    free_in_turns,
    run_in_turns,
)
from broker.network.connection import (
    RESPONSE_TYPES,
    WAITING_APIS,
    CloseConnectionError,
    Connection,
    Response,
)
from broker.network.request_context import RequestContext, Services
from broker.network.response_memory import RESPONSE_BYTES_MAX
from broker.security.certificate_name import distinguished_name
from broker.security.principal import ANONYMOUS, Principal
from broker.topics.change_pauses import METADATA_CHANGES
from config.address import Address
from config.security.principal_rules import map_principal
from protocol.api import ApiKey, is_supported
from protocol.codec import (
    RequestHeader,
    decode_body,
    decode_body_sliced,
    encode_error,
    encode_response,
    encode_response_sliced,
    encode_unsupported_version,
    read_header,
    release_rows,
)
from protocol.errors import ErrorCode, ProtocolError, RowLimitError, UnsupportedVersionError
from protocol.messages import Message, MetadataRequest, OffsetFetchRequest

Body = Any  # a class of protocol/messages.py; each handler names its own
Handler = Callable[[RequestContext, RequestHeader, Body], Message | Awaitable[Message]]
FastPath = Callable[
    [RequestContext, int, memoryview], Response | Awaitable[Response]
]  # context, version, frame

SASL_APIS: Final = frozenset((ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE))
# A larger request is decoded in slices: some hundred rows, or four thousand empty names (2 ms).
WHOLE_BYTES_MAX: Final = 4 << 10
# Larger requests that are handled at a time, over all connections. Each may have rows of tens of
# megabytes, from before its handler begins until its response is encoded. The others wait in a
# queue; small requests, Produce and Fetch do not.
LARGE_REQUESTS_AT_ONCE: Final = 8
# The same for small requests that ask for a list. They have a limit of their own, because large
# requests may wait for a disk: if it hangs, clients still get the list of all topics.
LISTS_AT_ONCE: Final = 8
# A few bytes of a request of these APIs can ask for megabytes of rows. Their handlers wait neither
# for a disk nor for another client.
LISTS: Final = frozenset(
    (
        ApiKey.LIST_GROUPS,
        ApiKey.DESCRIBE_GROUPS,
        ApiKey.CONSUMER_GROUP_DESCRIBE,
        ApiKey.LIST_TRANSACTIONS,
        ApiKey.DESCRIBE_CONFIGS,
        ApiKey.DESCRIBE_ACLS,
    )
)
# Changes of topics wait for the disk. Each client has one at a time, and the metadata service makes
# those of several clients in turns. They have a limit of their own, so that they never block other
# large requests.
TOPIC_CHANGES_AT_ONCE: Final = 4
TOPIC_CHANGES: Final = frozenset(
    (
        ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_TOPICS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
    )
)

# Kafka exempts the requests of brokers from request quotas, unless the sender lacks the permission.
EXEMPT_APIS: Final = frozenset((ApiKey.WRITE_TXN_MARKERS,))


class Dispatcher:
    """Handles the frames of all connections."""

    def __init__(
        self,
        services: Services,
        fast: Mapping[int, FastPath],
        handlers: Mapping[int, Handler],
    ) -> None:
        self._services = services
        self._fast: Final = dict(fast)
        self._handlers: Final = dict(handlers)
        self._keys: Final = frozenset(self._fast) | frozenset(self._handlers)
        self._names: Final = {key: ApiKey(key).name for key in self._keys}
        self._large = FairSlots(LARGE_REQUESTS_AT_ONCE)
        self._lists = FairSlots(LISTS_AT_ONCE)
        self._topic_changes = FairSlots(TOPIC_CHANGES_AT_ONCE)
        self._turns = WeakValueDictionary[Hashable, asyncio.Lock]()  # of each client
        self._labels: Final = {k: n.title().replace("_", "") for k, n in self._names.items()}
        self._stats: Final = {k: services.stats.requests[n] for k, n in self._labels.items()}

    def handle(self, connection: Connection, frame: memoryview) -> Response | Awaitable[Response]:
        """Answer one request. Raises CloseConnectionError and ProtocolError."""
        started = time.perf_counter_ns()
        quotas = self._services.quotas
        key = frame[0] << 8 | frame[1] if len(frame) > 1 else -1
        version = frame[2] << 8 | frame[3] if len(frame) > 3 else -1
        if connection.gate is not None:
            make_context(connection, self._services)
            admission = connection.gate.admit(connection, frame)
            if admission is not None:
                if key not in SASL_APIS:  # the token of an old client, without a header
                    key, version = ApiKey.SASL_AUTHENTICATE, 0
                elif not is_supported(key, version, self._keys):
                    version = UNSUPPORTED
                return self._timed(
                    key, version, -1, started, admission, connection=connection, context=None
                )
        fast = self._fast.get(key)
        if fast is not None:
            if not is_supported(key, version, self._keys):
                raise CloseConnectionError(f"{self._names[key]} version {version} is not supported")
            answer = fast(make_context(connection, self._services), version, frame)
        else:
            answer = self._handle(connection, frame)
            if not is_supported(key, version, self._keys):
                version = UNSUPPORTED  # only ApiVersions has an answer then
        if not isinstance(answer, RESPONSE_TYPES):
            context = make_context(connection, self._services)
            if fast is None:  # those of Produce and Fetch have limits of their own
                lock = self._turns.setdefault(context.client, asyncio.Lock())
                answer = SharedTurns(answer, lock, if_yielded=True)
            correlation_id = int.from_bytes(frame[4:8])
            measured = context if quotas.enforced else None
            return self._timed(
                key,
                version,
                correlation_id,
                started,
                answer,
                connection=connection,
                context=measured,
            )
        stats, elapsed_ns = self._stats[key], time.perf_counter_ns() - started
        stats.count(version, elapsed_ns)
        if quotas.enforced:
            self._charge_time(connection.context, elapsed_ns)
        if elapsed_ns > stats.longest_turn_ns:  # noqa: PLR1730 - max() costs twice, at each request
            stats.longest_turn_ns = elapsed_ns
        return answer

    async def call(self, context: RequestContext, header: RequestHeader, body: Body) -> Any:
        """Answer a request that came without a frame, within the quotas of its client.

        Its sender counts the time: it also has other work for the request.
        """
        if self._services.quotas.enforced:
            context.find_meters(header.client_id)
        answer = self._handlers[header.api_key](context, header, body)
        if not isinstance(answer, Message):
            answer = await answer
        self._throttle(context, answer)
        return answer

    def _handle(self, connection: Connection, frame: memoryview) -> Response | Awaitable[Response]:
        try:
            header = read_header(frame)
        except UnsupportedVersionError as error:
            if error.api_key == ApiKey.API_VERSIONS:
                return encode_unsupported_version(error.correlation_id)
            raise
        key, version = header.api_key, header.api_version
        handler = self._handlers.get(key)
        if handler is None or not is_supported(key, version, self._keys):
            raise CloseConnectionError(f"API {key} version {version} is not supported")
        context = make_context(connection, self._services)
        # Before the authentication, all clients would share the quota of one user.
        is_exempt = (key in EXEMPT_APIS and context.may_write_markers(is_filter=True)) or (
            connection.gate is not None and connection.is_unauthenticated
        )
        if self._services.quotas.enforced and not is_exempt:
            context.find_meters(header.client_id)
        else:
            context.meters = None
        if key in METADATA_CHANGES:
            return self._handle_change(handler, context, header, frame)
        if len(frame) > WHOLE_BYTES_MAX:
            return self._handle_large(handler, context, header, frame)
        request = decode_body(header, frame)
        if _asks_for_list(header, request):
            return self._handle_list(handler, context, header, request)
        answer = handler(context, header, request)
        if isinstance(answer, Message):
            self._throttle(context, answer)
            return encode_response(key, version, header.correlation_id, answer)
        return self._encode_later(context, header, answer)

    async def _handle_change(
        self, handler: Handler, context: RequestContext, header: RequestHeader, frame: memoryview
    ) -> Response:
        """Answer a request when it is the client's turn to change the metadata."""
        turn = self._services.metadata_writer.pauses.turn(context.client, context.has_left)
        try:
            async with turn:
                if len(frame) > WHOLE_BYTES_MAX:
                    return await self._handle_large(handler, context, header, frame)
                answer = handler(context, header, decode_body(header, frame))
                body = answer if isinstance(answer, Message) else await answer
                return await self._encode(context, header, body)
        except ClientLeftError as error:
            raise CloseConnectionError(str(error)) from error

    async def _handle_large(
        self, handler: Handler, context: RequestContext, header: RequestHeader, frame: memoryview
    ) -> Response:
        if header.api_key in WAITING_APIS:
            return await self._handle_sliced(handler, context, header, frame)
        slots = self._topic_changes if header.api_key in TOPIC_CHANGES else self._large
        async with self._slot(slots, context):
            return await self._handle_sliced(handler, context, header, frame)

    async def _handle_list(
        self, handler: Handler, context: RequestContext, header: RequestHeader, request: Message
    ) -> Response:
        async with self._slot(self._lists, context):
            answer = handler(context, header, request)
            body = answer if isinstance(answer, Message) else await answer
            del answer
            return await self._encode(context, header, body)

    @asynccontextmanager
    async def _slot(self, slots: FairSlots, context: RequestContext) -> AsyncIterator[None]:
        async with slots.slot(context.client):
            self._services.stats.large_requests += 1
            try:
                yield
            finally:
                self._services.stats.large_requests -= 1

    async def _handle_sliced(
        self, handler: Handler, context: RequestContext, header: RequestHeader, frame: memoryview
    ) -> Response:
        max_rows = self._services.limits.of(header.api_key).rows
        request = await run_in_turns(decode_body_sliced(header, frame, max_rows))
        try:
            answer = handler(context, header, request)
            body = answer if isinstance(answer, Message) else await answer
            del answer
        except ProtocolError:
            await free_in_turns(release_rows(request))  # a refusal half-way frees as many rows
            raise
        await free_in_turns(release_rows(request))
        return await self._encode(context, header, body)

    async def _encode_later(
        self, context: RequestContext, header: RequestHeader, answer: Awaitable[Message]
    ) -> Response:
        return await self._encode(context, header, await answer)

    async def _encode(
        self, context: RequestContext, header: RequestHeader, body: Message
    ) -> Response:
        """Encode in slices, because a small request may have a response of thousands of rows."""
        self._throttle(context, body)
        key, version = header.api_key, header.api_version
        parts = await run_in_turns(
            encode_response_sliced(key, version, header.correlation_id, body),
            partial(self._wait_for_room, context, key),
        )
        await free_in_turns(release_rows(body))
        return parts

    async def _wait_for_room(self, context: RequestContext, key: int, encoded_bytes: int) -> None:
        """Reserve memory for what is encoded of a response. Raises CloseConnectionError."""
        if encoded_bytes > RESPONSE_BYTES_MAX:
            reason = f"the response to {self._labels[key]} has more than {RESPONSE_BYTES_MAX} bytes"
            raise CloseConnectionError(reason)
        if context.response_memory is not None:
            await context.response_memory.grow_to(encoded_bytes)

    def _timed(
        self,
        key: int,
        version: int,
        correlation_id: int,
        started: int,
        answer: Awaitable[Response],
        *,
        connection: Connection,
        context: RequestContext | None,
    ) -> Awaitable[Response]:
        """Count a request that waits, and the time of each of its turns.

        The first turn ends here. The next one begins in another round of the loop, after turns of
        other requests. The time of all turns counts for the connection.
        """
        stats = self._stats[key]
        note_turn = stats.note_turn
        if context is not None:
            note_turn = partial(self._note_and_charge, stats, context)
        note_turn(time.perf_counter_ns() - started)
        turns = MeasuredTurns(answer, note_turn, connection.find_task_turns)
        return self._count_when_answered(key, version, correlation_id, started, turns)

    async def _count_when_answered(
        self,
        key: int,
        version: int,
        correlation_id: int,
        started: int,
        answer: Awaitable[Response],
    ) -> Response:
        stats = self._stats[key]
        try:
            return await answer
        except RowLimitError:
            refusal = encode_error(key, version, correlation_id, ErrorCode.INVALID_REQUEST)
            if refusal is None:
                raise  # the API has no field for an error, so the connection is closed
            self._services.stats.errors[self._labels[key], "INVALID_REQUEST"] += 1
            return refusal
        finally:
            stats.count(version, time.perf_counter_ns() - started)

    def _throttle(self, context: RequestContext, body: Message) -> None:
        """Throttle the client if the time of its requests is above its quota."""
        if context.meters is not None:
            throttle_ms = self._services.quotas.check_request(context.meters)
            if throttle_ms and hasattr(body, "throttle_time_ms"):
                throttle_ms = body.throttle_time_ms = max(throttle_ms, body.throttle_time_ms)
            context.throttle(throttle_ms)

    def _note_and_charge(
        self, stats: RequestStats, context: RequestContext, nanoseconds: int
    ) -> None:
        stats.note_turn(nanoseconds)
        self._charge_time(context, nanoseconds)

    def _charge_time(self, context: RequestContext | None, nanoseconds: int) -> None:
        if context is not None and context.meters is not None:
            self._services.quotas.charge_request(context.meters, nanoseconds)


def _asks_for_list(header: RequestHeader, request: Message) -> bool:
    """Return whether a small request may have a large response."""
    match request:
        case MetadataRequest(topics=topics):
            return topics is None or (header.api_version == 0 and not topics)
        case OffsetFetchRequest(topics=topics, groups=groups):
            return topics is None or any(group.topics is None for group in groups)
    return header.api_key in LISTS


def make_context(connection: Connection, services: Services) -> RequestContext:
    """Return the context of a connection, which is made at its first request."""
    context = connection.context
    if context is None:
        context = connection.context = RequestContext(
            services,
            client_host=connection.peer_host,
            reached_at=Address(connection.local_host, connection.local_port),
            listener=connection.listener,
            mute=connection.mute,
            has_left=connection.client_has_left,
            response_memory=connection.response_memory,
            principal=_principal_of(connection, services),
        )
        if services.quotas.enforced:
            connection.stop_reading_ahead()
    return context


def _principal_of(connection: Connection, services: Services) -> Principal:
    """Return the principal of a client certificate. Raises CloseConnectionError."""
    certificate = connection.peer_certificate
    if certificate is None:
        return ANONYMOUS
    try:
        name = distinguished_name(certificate)
    except ValueError as error:
        raise CloseConnectionError(f"the client certificate is invalid: {error}") from None
    principal = map_principal(services.settings.tls.principal_mapping_rules, name)
    if not principal:
        raise CloseConnectionError(f"no rule of tls.principal_mapping_rules matches {name!r}")
    return Principal(principal)
