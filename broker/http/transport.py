"""The transport of a connection to the HTTP server: it bounds what the protocol parses at a time.

uvloop gives the protocol all that a socket has, up to 256 KiB. A request whose body comes in chunks
of one byte costs 40 ms then, without credentials. So the protocol gets slices, and connections take
turns with those of Kafka clients (broker/network/connection.py): a connection without an authorized
request queues for each turn, in the time of unauthenticated connections; another one queues only
when the time of a round is used up, or when its bytes have taken a whole turn.

Rules. A protocol that pauses reading gets no data until it resumes. While bytes wait for a turn,
nothing is read from the socket. What still waits when the client ends the connection is dropped:
there is nobody to answer.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Final, cast

from broker.event_loop.loop_turns import TURN_SECONDS, ConnectionTurns, TurnQueue

# Read at once. What the kernel still has when the broker closes the connection, after a malformed
# request, would reset it, and the client would not get the response.
RECEIVE_BYTES: Final = 256 << 10
SLICE_BYTES: Final = 5 << 10  # parsed at once: 900 chunks of one byte, or a millisecond

# Returns the queue of `ConnectionTurns` in which a protocol's bytes take turns; None: the protocol
# gets them at once.
FindTurns = Callable[[asyncio.Protocol], TurnQueue | None]

# One buffer serves all connections: the loop fills it and calls buffer_updated without a pause.
_RECEIVED: Final = memoryview(bytearray(RECEIVE_BYTES))


class HttpTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """One connection: the protocol of the socket, and the transport of the HTTP protocol."""

    def __init__(
        self, protocol: asyncio.BaseProtocol, turns: ConnectionTurns, find_turns: FindTurns
    ) -> None:
        super().__init__()
        self._protocol = cast(asyncio.Protocol, protocol)
        self._turns = turns
        self._find_turns = find_turns
        self._socket: asyncio.Transport
        self._data = bytearray()  # for the protocol
        self._is_paused = False  # by the protocol
        self._is_queued = False  # while it waits for its next turn

    # Called by the transport of the socket ----------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Tell the protocol."""
        self._join(transport)
        self._protocol.connection_made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        return _RECEIVED

    def buffer_updated(self, nbytes: int) -> None:
        """Pass `nbytes` more bytes on now, or when it is the turn of this connection."""
        self._data += _RECEIVED[:nbytes]
        self._handle_received()

    def eof_received(self) -> bool:
        """Close the connection when the client does."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the protocol."""
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Let the protocol write no more."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Let the protocol write again."""
        self._protocol.resume_writing()

    # Called by the protocol -------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the socket."""
        return self._socket.get_extra_info(name, default)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let another protocol take over."""
        self._protocol = cast(asyncio.Protocol, protocol)

    def unread(self, data: bytes) -> None:
        """Take back what a protocol has received, for the next protocol, before later bytes."""
        self._data[:0] = data

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or will be when all is sent."""
        return self._socket.is_closing()

    def is_reading(self) -> bool:
        """Return whether the protocol gets what arrives."""
        return not (self._is_paused or self.is_closing())

    def pause_reading(self) -> None:
        """Read nothing until `resume_reading`."""
        self._is_paused = True
        if not self._is_queued and not self.is_closing():
            self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Read again, after what has arrived already."""
        self._is_paused = False
        if self._is_queued or self.is_closing():
            return
        if self._has_received():
            self._wait_for_turn(self._own_turns() or self._turns.unauthenticated)
        else:
            self._socket.resume_reading()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send."""
        self._socket.write(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set how many bytes may wait for the socket before the protocol is to write no more."""
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return these limits, the lower one first."""
        return self._socket.get_write_buffer_limits()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes wait for the socket."""
        return self._socket.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        """Return False: a response ends the connection in both directions."""
        return False

    def close(self) -> None:
        """Close when all is sent."""
        self._socket.close()

    def abort(self) -> None:
        """Close now."""
        self._socket.abort()

    # ------------------------------------------------------------------------------

    def _join(self, transport: asyncio.BaseTransport) -> None:
        # Cast, because uvloop's transports are not subclasses of asyncio's.
        self._socket = cast(asyncio.Transport, transport)

    def _has_received(self) -> bool:
        """Return whether bytes wait for a turn."""
        return bool(self._data)

    def _own_turns(self) -> TurnQueue | None:
        """Return the queue of this connection; None if it gets its bytes at once."""
        return self._find_turns(self._protocol)

    def _handle_received(self) -> None:
        """Pass on what was received, now or in the next turn."""
        if self._is_queued or self.is_closing():
            return
        turns = self._own_turns()
        if turns is None:
            self._protocol.data_received(self._take_data(len(self._data)))
        elif turns is self._turns.clients and not turns.is_over:
            self._pass_on_in_turn(turns)
        elif self.is_reading():
            self._wait_for_turn(turns)

    def _wait_for_turn(self, turns: TurnQueue) -> None:
        """Read nothing until the next turn."""
        if self._is_queued:  # the protocol resumed reading within its turn
            return
        self._is_queued = True
        turns.add(partial(self._take_turn, turns))
        if not self._is_paused:
            self._socket.pause_reading()

    def _take_turn(self, turns: TurnQueue) -> None:
        self._is_queued = False
        if self.is_closing():
            return
        try:
            self._pass_on_in_turn(turns)
        except Exception:
            self.abort()  # as uvloop does if it calls the protocol
            raise
        if self.is_reading() and not self._is_queued:
            self._socket.resume_reading()

    def _pass_on_in_turn(self, turns: TurnQueue) -> None:
        """Pass on bytes for a turn, and charge the time; wait for another turn if it is over."""
        began = perf_counter()
        self._pass_on(began + TURN_SECONDS)
        ended = perf_counter()
        turns.charge(ended - began)
        if self.is_reading() and (self._has_received() or ended - began >= TURN_SECONDS):
            self._wait_for_turn(turns)

    def _pass_on(self, ends_at: float) -> None:
        """Give the protocol what was received, until this time of `perf_counter`."""
        while self._data and self.is_reading():
            self._protocol.data_received(self._take_data(SLICE_BYTES))
            if perf_counter() >= ends_at:
                break

    def _take_data(self, count: int) -> bytes:
        data = bytes(self._data[:count])
        del self._data[:count]
        return data
