"""One client connection: frames in, responses out, strictly in order.

Rules. One request of a connection is worked on at a time, as in Kafka: while one waits (a long
poll, a join, an fsync) the connection is muted and what the client pipelines stays in the socket.
While a response has not left, nothing further is read: a client that stops reading stops only
itself. Nothing is read either while the budget over all receive buffers has no room for a frame
that has begun (receive_budget.py). Whatever goes wrong with the bytes of a client closes that
connection and is one log line.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Sequence
from time import perf_counter
from typing import Final, Protocol, cast

import structlog

from broker.logging import RateLimitedLogger
from broker.loop_turns import TURN_SECONDS
from broker.network.framing import INITIAL_BYTES, FrameReader
from broker.network.receive_budget import ReceiveBudget
from broker.network.request_context import RequestContext
from broker.network.socket_writer import Part, SocketWriter
from protocol.api import ApiKey
from protocol.errors import ProtocolError
from storage.log.log import FetchSlice

logger = RateLimitedLogger(structlog.get_logger("broker.connection"))

# One client's turn on the loop, before others have theirs: TURN_SECONDS, so many requests, and
# answers of so many bytes, which are gathered and sent together. A hundred bytes of requests may
# ask for megabytes of metadata.
REQUESTS_PER_TURN: Final = 256
GATHERED_BYTES_MAX: Final = 1 << 20
WAITING_APIS: Final = frozenset((ApiKey.FETCH, ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP))
STOPPING: Final = "the broker is stopping"

Response = bytes | Sequence[Part] | None  # None: nothing is sent (acks=0)


class CloseConnectionError(Exception):
    """The request cannot be answered; the client is told by closing the connection."""


class RequestHandler(Protocol):
    """What a connection needs of the dispatcher."""

    def handle(self, connection: "Connection", frame: memoryview) -> Response | Awaitable[Response]:
        """Answer at once, or return something to wait for."""
        ...


class ConnectionOwner(Protocol):
    """What a connection needs of its listener."""

    handler: RequestHandler
    budget: ReceiveBudget

    @property
    def max_request_bytes(self) -> int:
        """Largest frame that is accepted."""
        ...

    def max_request_bytes_of(self, api_key: int) -> int:
        """Largest frame of one API."""
        ...

    def connected(self, connection: "Connection") -> str | None:
        """Take a connection in. -> why it is to be closed at once, None if it may stay"""
        ...

    def disconnected(self, connection: "Connection") -> None:
        """The connection is gone."""
        ...


class Connection(asyncio.BufferedProtocol):
    """The protocol object that uvloop calls. All of its work is done in `_pump`."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._handler = owner.handler
        self._reader = FrameReader(owner.max_request_bytes, owner.max_request_bytes_of)
        self._transport: asyncio.Transport
        self._writer: SocketWriter
        self._waiting: asyncio.Future[Response] | None = None
        self._next_turn: asyncio.Handle | None = None  # others have theirs first
        self._only_waits = False  # the request that is waited for changes nothing
        self._reading = True
        self._reserved_bytes = 0  # of the budget over all receive buffers
        self.receiving_since = 0.0  # loop time of the first byte of the request that is incomplete
        self._open = False
        self._finishing = False  # the broker is stopping: no further request is taken
        self._loop = asyncio.get_running_loop()
        self.peer_host = ""
        self.peer_port = 0
        self.local_host = ""
        self.local_port = 0
        self.context: RequestContext | None = None  # made by the dispatcher at the first request
        self.opened_at = self.last_active = self._loop.time()
        self.is_stranger = True  # until its first complete request is accepted

    # What the transport calls -------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept, unless the listener has enough."""
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername") or ("", 0)
        local = transport.get_extra_info("sockname") or ("", 0)
        self.peer_host, self.peer_port = str(peer[0]), int(peer[1])
        self.local_host, self.local_port = str(local[0]), int(local[1])
        fd = transport.get_extra_info("socket").fileno()
        self._writer = SocketWriter(self._loop, fd, self._drained, self._write_failed)
        self._open = True
        refusal = self._owner.connected(self)
        if refusal is not None:
            self.close(refusal)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` more have come."""
        self.last_active = self._loop.time()
        if self._reader.is_empty:
            self.receiving_since = self.last_active
        self._reader.buffer_updated(nbytes)
        self._pump()

    def eof_received(self) -> bool:
        """The client is done; so are we."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything that belongs to this client."""
        self._open = False
        self._writer.close()
        if self.context is not None:
            self.context.cursors.clear()  # what it read may go from the disk now
        if self._next_turn is not None:
            self._next_turn.cancel()
        if self._waiting is not None:
            self._waiting.cancel()
        self._release()
        self._owner.disconnected(self)

    # What the listener asks -----------------------------------------------------

    @property
    def idle_since(self) -> float:
        """Loop time of the last byte received; a waiting request counts as activity."""
        return self._loop.time() if self._waiting is not None else self.last_active

    @property
    def bytes_sent(self) -> int:
        """Bytes that have left, since the connection was made."""
        return self._writer.bytes_sent

    @property
    def stalled(self) -> bool:
        """A response is waiting for a client that does not read."""
        return self._open and not self._writer.idle

    @property
    def receives_with_reserved_memory(self) -> bool:
        """It holds memory of the budget, and the next bytes are up to the client."""
        return self._open and self._reading and self._reserved_bytes > 0

    @property
    def busy(self) -> bool:
        """A request is being worked on, or its response has not left yet."""
        return self._open and (self._waiting is not None or not self._writer.idle)

    def close(self, reason: str) -> None:
        """Close now; `reason` is logged."""
        if self._open:
            self._open = False
            logger.info(
                "connection closed", subject=self.peer_host, peer=self._peer(), reason=reason
            )
            self._writer.close()
            self._transport.abort()
            self._release()

    def finish(self) -> None:
        """Take no further request, and close as soon as the present one is answered.

        What only waits for news (a long poll, a join) is cut off: its client asks again elsewhere.
        """
        self._finishing = True
        if not self.busy or (self._waiting is not None and self._only_waits):
            self.close(STOPPING)

    # What the budget over all receive buffers asks ------------------------------

    def give_back(self) -> None:
        """Release the buffer that is kept for the next request, if none has begun."""
        if not self.busy and self._next_turn is None:
            self._reader.give_back()
            self._note_shrunk()

    def memory_freed(self) -> None:
        """Go on reading if there is memory now."""
        self._mute_or_listen()

    def _release(self) -> None:
        self._reserved_bytes = 0
        self._owner.budget.forget(self)

    def _has_room(self) -> bool:
        """Whether the next bytes may be received; memory for them is reserved then.

        While others wait, memory is kept for one request only: else who has a buffer would go on
        with it for ever, and those in line would get none.
        """
        if self._owner.budget.waiting:
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
        extra_bytes = self._reader.allocated_bytes - INITIAL_BYTES
        if extra_bytes < self._reserved_bytes:
            self._reserved_bytes = extra_bytes
            self._owner.budget.set_reserved(self, extra_bytes)

    # The one place where requests are worked on ---------------------------------

    def _pump(self) -> None:
        out: list[Part] = []
        out_bytes = 0
        handled = 0
        turn_end = perf_counter() + TURN_SECONDS
        try:
            while self._takes_requests():
                is_over = handled == REQUESTS_PER_TURN or out_bytes > GATHERED_BYTES_MAX
                if is_over or (handled and perf_counter() >= turn_end):
                    self._next_turn = self._loop.call_soon(self._take_turn)
                    break
                handled += 1
                frame = self._reader.next_frame()
                if frame is None:
                    break
                answer = self._handler.handle(self, frame)
                self.is_stranger = False
                self.receiving_since = self.last_active  # of the next request
                if inspect.isawaitable(answer):
                    self._only_waits = frame[0] == 0 and frame[1] in WAITING_APIS
                    self._wait_for(answer)
                elif answer is not None:
                    out_bytes += _collect(out, answer)
        except (CloseConnectionError, ProtocolError) as error:
            self._flush(out)
            self.close(str(error))
            return
        except Exception as error:
            logger.error(
                "request failed", subject=self.peer_host, peer=self._peer(), exc_info=error
            )
            self._flush(out)
            self.close(f"internal error: {type(error).__name__}")
            return
        self._flush(out)
        if self._finishing and not self.busy:
            self.close(STOPPING)
        self._mute_or_listen()

    def _takes_requests(self) -> bool:
        idle = self._waiting is None and self._writer.idle and self._next_turn is None
        return idle and self._open and not self._finishing

    def _take_turn(self) -> None:
        self._next_turn = None
        self._pump()

    def _flush(self, out: list[Part]) -> None:
        if out and not self._writer.closed:
            if len(out) == 1 and isinstance(out[0], bytes):
                self._writer.write_bytes(out[0])
            elif all(isinstance(part, bytes) for part in out):
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
                _collect(out, answer)
                self._flush(out)
            self._pump()
        elif isinstance(error, CloseConnectionError | ProtocolError):
            self.close(str(error))
        else:
            logger.error(
                "request failed", subject=self.peer_host, peer=self._peer(), exc_info=error
            )
            self.close(f"internal error: {type(error).__name__}")

    def _mute_or_listen(self) -> None:
        if not self._open:
            return
        listen = self._waiting is None and self._writer.idle and self._next_turn is None
        listen = listen and self._has_room() and self._open  # making room may close it
        if listen and not self._reading:
            # Its client could not send before.
            self.last_active = self.receiving_since = self._loop.time()
            self._transport.resume_reading()
        elif not listen and self._reading:
            self._transport.pause_reading()
        self._reading = listen

    def _drained(self) -> None:
        self._pump()

    def _write_failed(self, error: OSError) -> None:
        self.close(f"write failed: {error.strerror or error}")

    def _peer(self) -> str:
        return f"{self.peer_host}:{self.peer_port}"


def _collect(out: list[Part], answer: Response) -> int:
    """Add an answer to what is to be sent. -> bytes of memory that it holds"""
    if isinstance(answer, bytes):
        out.append(answer)
        return len(answer)
    if answer is None:
        return 0
    out.extend(answer)
    return sum(len(part) for part in answer if not isinstance(part, FetchSlice))
