"""One client connection: receives requests and sends responses, in order.

Rules. A connection handles one request at a time, as in Kafka: while a request waits (a long poll,
a join, an fsync) the connection is muted, and pipelined requests stay in the socket. It reads
nothing until the response has been sent, so a client that stops reading delays only itself. It also
reads nothing while the budget of all receive buffers has no room for a frame that has begun
(buffer_budget.py). Invalid bytes from a client close its connection and write one log line. An
idle connection is closed by the listener (listener.py).

A connection that has more requests after its turn queues for another turn. A round of the loop has
time for a few turns. When this time is used up, a connection that receives requests may handle one
of them, and queues for the others. All these single requests have as much time again; beyond that,
they queue, too, but not behind the connections with many. So clients that send many requests delay
one that sends few by the time of a round, however many connections they have.

A connection is unauthenticated until it has sent a complete request and, if the listener requires
it, has authenticated. Unauthenticated connections queue for each request, and in each round all of
them together have the time of one turn.

A request that has to wait continues in a task. In each round, the turns of tasks have as much time
as those of connections, and when it is used up, they queue as well (MeasuredTurns).
"""

import asyncio
import ssl
import weakref
from collections.abc import Awaitable, Hashable
from functools import partial
from time import perf_counter
from typing import Final, Protocol, cast

import structlog

from broker.event_loop.loop_turns import TURN_SECONDS, ConnectionTurns, TurnQueue
from broker.logging import RateLimitedLogger
from broker.network.buffer_budget import BufferBudget
from broker.network.framing import INITIAL_BYTES, FrameReader
from broker.network.late_parts import Part
from broker.network.request_context import RequestContext
from broker.network.response_memory import ResponseMemory
from broker.network.socket_writer import SocketWriter, TruncatedFileError
from broker.network.tls_channel import RECEIVE_BYTES, UNAUTHENTICATED_BYTES, TlsChannel, TlsWriter
from broker.topics.cold_reads import ColdReads
from config.settings import ListenerSettings
from protocol.api import ApiKey
from protocol.errors import ProtocolError
from protocol.limits import SMALL_FRAME_BYTES
from storage.env import File
from storage.segments.fetch_slice import FetchSlice

logger = RateLimitedLogger(structlog.get_logger("broker.connection"))

# A connection's turn on the loop ends after TURN_SECONDS, this many requests, or responses of this
# many bytes, which are sent together: a request of a hundred bytes may return megabytes.
REQUESTS_PER_TURN: Final = 256
GATHERED_BYTES_MAX: Final = 1 << 20
WAITING_APIS: Final = frozenset((ApiKey.FETCH, ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP))
# A longer pause ends early: the next request measures again. Nothing is read meanwhile, so the
# broker does not notice that the client is gone.
MUTE_SECONDS_MAX: Final = 600.0
STOPPING: Final = "the broker is stopping"
_NOT_TLS: Final = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST"))

# Parts are sent in order; None: no response (acks=0).
Response = bytes | list[bytes] | list[bytes | FetchSlice] | None
# The types of a response, to tell it from an awaitable of one: inspect.isawaitable takes 1.4 us.
RESPONSE_TYPES: Final = (bytes, list, type(None))


class CloseConnectionError(Exception):
    """The connection is closed, after `response` if there is one; the log gets the `fields`."""

    def __init__(self, reason: str, response: bytes = b"", **fields: object) -> None:
        super().__init__(reason)
        self.response = response
        self.fields = fields


class AuthenticationGate(Protocol):
    """Decides which requests a connection that must authenticate may send."""

    @property
    def expects_bare_token(self) -> bool:
        """Return whether the next frame is a secret of the client, without a request header."""
        ...

    def admit(self, connection: "Connection", frame: memoryview) -> Awaitable[bytes] | None:
        """Return the answer to a request of SASL; None if the request's own handler answers it.

        Raises CloseConnectionError and ProtocolError.
        """
        ...


class RequestHandler(Protocol):
    """The part of the dispatcher that connections use."""

    def handle(self, connection: "Connection", frame: memoryview) -> Response | Awaitable[Response]:
        """Return the response, or an awaitable of it."""
        ...


class ConnectionOwner(Protocol):
    """The part of the listener that connections use."""

    handler: RequestHandler
    budget: BufferBudget
    response_budget: BufferBudget
    turns: ConnectionTurns
    cold_reads: ColdReads | None

    @property
    def max_request_bytes(self) -> int:
        """Return the size limit of all frames."""
        ...

    def max_request_bytes_of(self, api_key: int) -> int:
        """Return the size limit of the frames of one API."""
        ...

    def admit(self, connection: "Connection") -> str | None:
        """Register a connection; return why it must be closed at once, None if it may stay."""
        ...

    def disconnected(self, connection: "Connection") -> None:
        """Forget a closed connection."""
        ...

    def tls_failed(self) -> None:
        """Count a connection that is closed because of an error of TLS."""
        ...

    def note_cut_file(self, path: str) -> None:
        """Note that a log file is shorter than what is known of it."""
        ...


class Connection(asyncio.BufferedProtocol):
    """The protocol object that uvloop calls. `_pump` handles the requests."""

    def __init__(
        self,
        owner: ConnectionOwner,
        listener: ListenerSettings,
        tls_context: ssl.SSLContext | None = None,
        gate: AuthenticationGate | None = None,
    ) -> None:
        """`gate` is None on a listener without SASL."""
        self._owner = owner
        self.gate = gate
        self.listener = listener
        self._tls = None if tls_context is None else TlsChannel(tls_context)
        self._handler = owner.handler
        max_bytes = owner.max_request_bytes if gate is None else SMALL_FRAME_BYTES
        self._reader = FrameReader(max_bytes, owner.max_request_bytes_of)
        self._transport: asyncio.Transport
        self._writer: SocketWriter | TlsWriter
        self._waiting: asyncio.Future[Response] | None = None
        self._is_queued = False  # for its next turn
        self._muted: asyncio.TimerHandle | None = None  # ends the pause of a throttled client
        self._only_waits = False  # the waiting request changes nothing (long poll, join)
        self._reading = True
        self._reserved_bytes = 0  # of the budget of all receive buffers
        connection = weakref.proxy(self)
        self.response_memory = ResponseMemory(owner.response_budget, lambda: connection.client)
        self.receiving_since = 0.0  # loop time of the first byte of the incomplete request
        self._open = False
        self._is_accepted = False  # it has a writer, and its owner knows it
        self._finishing = False  # the broker is stopping: ignore further requests
        self._loop = asyncio.get_running_loop()
        self.peer_host = ""
        self.peer_port = 0
        self.local_host = ""
        self.local_port = 0
        self.context: RequestContext | None = None  # made by the dispatcher at the first request
        self.opened_at = self.last_active = self._loop.time()
        # Until its first complete request is accepted, or it has authenticated.
        self.is_unauthenticated = True

    # Called by the transport ----------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection unless the listener refuses it."""
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername") or ("", 0)
        local = transport.get_extra_info("sockname") or ("", 0)
        self.peer_host, self.peer_port = str(peer[0]), int(peer[1])
        self.local_host, self.local_port = str(local[0]), int(local[1])
        try:
            self._writer = self._make_writer(transport.get_extra_info("socket").fileno())
        except OSError as error:  # the socket got the last descriptor
            logger.info(
                "connection closed", subject=self.peer_host, peer=self._peer(), reason=str(error)
            )
            self._transport.abort()
            return
        self._open = self._is_accepted = True
        refusal = self._owner.admit(self)
        if refusal is not None:
            self.close(refusal)

    def _make_writer(self, fd: int) -> SocketWriter | TlsWriter:
        if self._tls is None:
            return SocketWriter(self._loop, fd, self._drained, self._write_failed, self._warm)
        return TlsWriter(
            self._loop,
            fd,
            self._drained,
            self._write_failed,
            channel=self._tls,
            warm=self._warm,
        )

    async def _warm(self, part: FetchSlice) -> None:
        """Read a part of a response into the page cache."""
        if self._owner.cold_reads is not None:
            await self._owner.cold_reads.warm(self.client, (part,))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        if self._tls is None:
            return self._reader.get_buffer(sizehint)
        return self._tls.get_buffer(
            UNAUTHENTICATED_BYTES if self.is_unauthenticated else RECEIVE_BYTES
        )

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the requests that `nbytes` more bytes complete."""
        self.last_active = self._loop.time()
        if self._reader.is_empty:
            self.receiving_since = self.last_active
        if self._tls is None:
            self._reader.buffer_updated(nbytes)
            self._pump()
            return
        self._tls.receive(nbytes)
        began = perf_counter()
        self._pump()
        if perf_counter() - began >= TURN_SECONDS:
            self._wait_for_turn(self._turns)  # uvloop would read more in this round of the loop

    def eof_received(self) -> bool:
        """Close the connection when the client does."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything that belongs to this client.

        Its context refers to this connection: without it, reference counts free both, with the
        receive buffer. Garbage of frozen objects may stay for long (gc_pauses.py).
        """
        if not self._is_accepted:
            return
        self._open = False
        self._writer.close()
        if self.context is not None:
            self.context.cursors.clear()
        if self._muted is not None:
            self._muted.cancel()
        if self._waiting is not None:
            self._waiting.cancel()
        self._release()
        self._owner.disconnected(self)
        self.context = None

    @property
    def peer_certificate(self) -> bytes | None:
        """Return the verified certificate of the client in DER; None without one."""
        return None if self._tls is None else self._tls.peer_certificate

    # Called by the listener -----------------------------------------------------

    @property
    def idle_since(self) -> float:
        """Return the loop time of the last received byte.

        A waiting request and the pause of a throttled client count as activity.
        """
        is_paused = self._waiting is not None or self._muted is not None
        return self._loop.time() if is_paused else self.last_active

    @property
    def client(self) -> Hashable:
        """Return the client among which memory is shared: the address until the user is known."""
        return self.peer_host if self.context is None else self.context.client

    @property
    def bytes_sent(self) -> int:
        """Return the number of bytes sent."""
        return self._writer.bytes_sent

    @property
    def stalled(self) -> bool:
        """Return whether a response waits for the client to read."""
        return self._open and not self._writer.idle

    @property
    def unsent_files(self) -> list[File]:
        """Return the files of the response that waits for the client to read."""
        return self._writer.unsent_files

    @property
    def receives_with_reserved_memory(self) -> bool:
        """Return whether it has memory of the budget and waits for bytes from the client."""
        return self._open and self._reading and self._reserved_bytes > 0

    @property
    def busy(self) -> bool:
        """Return whether a request is being handled or its response being sent."""
        return self._open and (self._waiting is not None or not self._writer.idle)

    def client_has_left(self) -> bool:
        """Return whether the client has closed the connection.

        While a request waits, nothing is read, so the transport does not notice.
        """
        return not self._open or self._writer.peer_has_left

    def close(self, reason: str, **fields: object) -> None:
        """Close now; `reason` and `fields` are logged."""
        if self._open:
            logger.info(
                "connection closed",
                subject=self.peer_host,
                peer=self._peer(),
                reason=reason,
                **fields,
            )
            self._drop()

    def _drop(self) -> None:
        self._open = False
        self._writer.close()
        self._transport.abort()
        self._release()

    def mute(self, seconds: float) -> None:
        """Take no further request for a time; responses leave as usual.

        Memory for requests to come is released: a throttled client takes none from the others.
        """
        self.stop_reading_ahead()
        if self._muted is not None:
            self._muted.cancel()
        self._muted = self._loop.call_later(min(seconds, MUTE_SECONDS_MAX), self._unmute)

    def stop_reading_ahead(self) -> None:
        """Receive no bytes of later large requests: they would wait in memory during a pause."""
        self._reader.reads_ahead = False

    def _unmute(self) -> None:
        self._muted = None
        self._pump()

    def finish(self) -> None:
        """Ignore further requests, and close when the present one is answered.

        A long poll or join is cut off; its client repeats it on another connection.
        """
        self._finishing = True
        if not self.busy or (self._waiting is not None and self._only_waits):
            self.close(STOPPING)

    # Called by the handler of requests -------------------------------------------

    def find_task_turns(self) -> TurnQueue:
        """Return the queue for the turns of a request that waits."""
        turns = self._owner.turns
        return turns.unauthenticated_tasks if self.is_unauthenticated else turns.client_tasks

    # Called by the gate ----------------------------------------------------------

    def admitted(self, *, keeps_gate: bool) -> None:
        """Accept all requests from now on; `keeps_gate` if the client must authenticate again."""
        self.is_unauthenticated = False
        self._reader.allow(self._owner.max_request_bytes)
        if not keeps_gate:
            self.gate = None

    # Called by the budget of all receive buffers ---------------------------------

    def give_back(self) -> None:
        """Release the buffer kept for the next request, if none has begun."""
        if not self.busy and not self._is_queued:
            self._reader.give_back()
            self._note_shrunk()

    def memory_freed(self) -> None:
        """Continue to read if there is memory now."""
        if self._tls is None:
            self._mute_or_listen()
        else:
            self._pump()  # bytes that are not yet decrypted wait here, not in the socket

    def _release(self) -> None:
        self._reserved_bytes = 0
        self._owner.budget.forget(self)
        self.response_memory.release()

    def _has_room(self) -> bool:
        """Reserve memory for the next bytes; return False if there is none.

        While others wait, a connection keeps memory for one request only. Otherwise a connection
        with a buffer could use it for ever, and those in the queue would get none.
        """
        if self._owner.budget.is_short(self):
            self._reader.trim()
        growth = self._reader.growth()
        if self._reserved_bytes:
            self._note_shrunk()
        if not growth:
            if self._reserved_bytes and self._reader.is_empty:
                self._owner.budget.note_idle(self)
            return True
        if self._owner.budget.reserve(self, growth):
            self._reserved_bytes += growth
            return True
        return False

    def _note_shrunk(self) -> None:
        extra_bytes = max(0, self._reader.allocated_bytes - INITIAL_BYTES)
        if extra_bytes < self._reserved_bytes:
            self._reserved_bytes = extra_bytes
            self._owner.budget.set_reserved(self, extra_bytes)

    # Requests and responses -----------------------------------------------------

    def _pump(self) -> None:
        """Handle requests now, or when it is the turn of this connection."""
        turns = self._owner.turns
        if self.is_unauthenticated:
            self._wait_for_turn(turns.unauthenticated)
        elif not turns.clients.is_over:
            self._handle_requests(turns.clients, REQUESTS_PER_TURN)
        elif not turns.single_requests.is_busy:
            self._handle_requests(turns.single_requests, 1)
        else:
            self._wait_for_turn(turns.single_requests)

    def _wait_for_turn(self, turns: TurnQueue) -> None:
        """Receive nothing until the next turn."""
        if self._open:
            self._queue_turn(turns)
            self._mute_or_listen()

    def _queue_turn(self, turns: TurnQueue) -> None:
        if not self._is_queued:
            self._is_queued = True
            turns.add(partial(self._take_turn, turns))

    @property
    def _turns(self) -> TurnQueue:
        turns = self._owner.turns
        return turns.unauthenticated if self.is_unauthenticated else turns.clients

    def _take_turn(self, turns: TurnQueue) -> None:
        self._is_queued = False
        if self._open:
            takes_many = turns is self._owner.turns.clients
            self._handle_requests(turns, REQUESTS_PER_TURN if takes_many else 1)

    def _handle_requests(self, turns: TurnQueue, max_requests: int) -> None:
        began = perf_counter()
        self._take_requests(max_requests, began + TURN_SECONDS)
        turns.charge(perf_counter() - began)

    def _take_requests(self, max_requests: int, turn_end: float) -> None:
        out: list[Part] = []
        out_bytes = 0
        handled = 0
        try:
            while self._takes_requests():
                is_over = handled == max_requests or out_bytes > GATHERED_BYTES_MAX
                if is_over or (handled and perf_counter() >= turn_end):
                    if self._has_received():
                        self._queue_turn(self._turns)
                    break
                handled += 1
                frame = self._reader.next_frame()
                if frame is None and self._tls is not None:
                    frame = self._decrypt_frame(self._tls, turn_end)
                if frame is None:
                    break
                answer = self._handler.handle(self, frame)
                self.is_unauthenticated = self.is_unauthenticated and self.gate is not None
                self.receiving_since = self.last_active  # for the next request
                if not isinstance(answer, RESPONSE_TYPES):
                    # A bare token of SASL may be shorter than an API key.
                    self._only_waits = int.from_bytes(frame[:2]) in WAITING_APIS
                    self._wait_for(answer)
                else:
                    out_bytes += _collect(out, answer)
        except (CloseConnectionError, ProtocolError) as error:
            self._flush(out)
            self._refuse(error)
            return
        except EOFError:
            self._flush(out)
            self._drop()  # the client has left: no log line, as without TLS
            return
        except ssl.SSLError as error:
            self._refuse_tls(error)
            return
        except Exception as error:  # noqa: BLE001 - logged
            self._flush(out)
            self._fail(error)
            return
        self._flush(out)
        if self._finishing and not self.busy:
            self.close(STOPPING)
        self._mute_or_listen()

    def _decrypt_frame(self, tls: TlsChannel, turn_end: float) -> memoryview | None:
        """Decrypt the next frame, as far as there are bytes of it, memory for it, and time."""
        frame = None
        while frame is None and self._open and self._has_room():
            nbytes = tls.decrypt_into(self._reader.get_buffer(-1)) if tls.shake_hands() else 0
            if nbytes:
                self._reader.buffer_updated(nbytes)
                frame = self._reader.next_frame()
            elif tls.is_empty:
                break
            if frame is None and perf_counter() >= turn_end:
                self._queue_turn(self._turns)
                break
        if self._open and isinstance(self._writer, TlsWriter):
            self._writer.send_protocol_bytes()
        return frame

    def _refuse_tls(self, error: ssl.SSLError) -> None:
        """Send the alert that names the error, then close."""
        if self._open and isinstance(self._writer, TlsWriter):
            self._writer.send_protocol_bytes()
        self._owner.tls_failed()
        hint = "; does the client use TLS?" if error.reason in _NOT_TLS else ""
        self.close(f"TLS failed: {error.reason or error}{hint}")

    def _has_received(self) -> bool:
        """Return whether there are bytes of a request that was not handled."""
        return not (self._reader.is_empty and (self._tls is None or self._tls.is_empty))

    def _takes_requests(self) -> bool:
        idle = self._waiting is None and self._writer.idle and not self._is_queued
        return idle and self._muted is None and self._open and not self._finishing

    def _flush(self, out: list[Part]) -> None:
        try:
            if out and not self._writer.closed:
                self._write(out)
        except MemoryError as error:
            self._fail(error)

    def _write(self, out: list[Part]) -> None:
        if len(out) == 1 and isinstance(out[0], bytes):
            self._writer.write_bytes(out[0])
        elif _is_joined(out):
            self._writer.write_bytes(b"".join(cast("list[bytes]", out)))
        else:
            self._writer.write(out)

    def _wait_for(self, answer: Awaitable[Response]) -> None:
        self._waiting = asyncio.ensure_future(answer)
        self._waiting.add_done_callback(self._answered)

    def _answered(self, future: asyncio.Future[Response]) -> None:
        self._waiting = None
        self.last_active = self._loop.time()
        if not self._open or future.cancelled():
            return
        error = future.exception()
        if error is None:
            answer = future.result()
            if answer is not None:
                out: list[Part] = []
                began = perf_counter()
                _collect(out, answer)
                self._flush(out)
                self.find_task_turns().charge(perf_counter() - began)
                if self._writer.idle:
                    self.response_memory.release()
            self._pump()
        elif isinstance(error, CloseConnectionError | ProtocolError):
            self._refuse(error)
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        logger.error("request failed", subject=self.peer_host, peer=self._peer(), exc_info=error)
        self.close(f"internal error: {type(error).__name__}")

    def _refuse(self, error: CloseConnectionError | ProtocolError) -> None:
        if isinstance(error, CloseConnectionError):
            self._flush([error.response] if error.response else [])
            self.close(str(error), **error.fields)
        else:
            self.close(str(error))

    def _mute_or_listen(self) -> None:
        if not self._open:
            return
        listen = self._waiting is None and self._writer.idle and not self._is_queued
        if listen and self._muted is not None:
            self._reader.trim()
            self._note_shrunk()
            listen = False
        listen = listen and self._has_room() and self._open  # `_has_room` may close it
        if listen and not self._reading:
            # The client could not send while the connection was muted, so its silence starts now.
            self.last_active = self.receiving_since = self._loop.time()
            self._transport.resume_reading()
        elif not listen and self._reading:
            self._transport.pause_reading()
        self._reading = listen

    def _drained(self) -> None:
        self.response_memory.release()
        self._pump()

    def _write_failed(self, error: OSError) -> None:
        if isinstance(error, ssl.SSLError):
            self._owner.tls_failed()
        if isinstance(error, TruncatedFileError):
            self._owner.note_cut_file(error.path)
        if not isinstance(error, BrokenPipeError | ConnectionResetError):
            self.close(f"write failed: {error.strerror or error}")
        elif self._open:
            self._drop()  # the client has left: no log line, as when it leaves between requests

    def _peer(self) -> str:
        return f"{self.peer_host}:{self.peer_port}"


def _is_joined(out: list[Part]) -> bool:
    """Return whether parts are sent faster as one: without files, and not too long to copy."""
    return all(isinstance(part, bytes) for part in out) and (
        sum(map(len, cast("list[bytes]", out))) <= 2 * GATHERED_BYTES_MAX
    )


def _collect(out: list[Part], answer: Response) -> int:
    """Append an answer to the parts to send; return the bytes of memory that it uses."""
    if isinstance(answer, bytes):
        out.append(answer)
        return len(answer)
    if answer is None:
        return 0
    out.extend(answer)
    return sum(len(part) for part in answer if not isinstance(part, FetchSlice))
