"""The transport of https: TLS between a socket and the protocol of HTTP.

uvloop's own transport decrypts all that a client sends at once, so messages of TLS itself could
hold the event loop for seconds, without credentials. Here the bounds of TlsChannel apply, and
connections of https take turns with those of Kafka clients (broker/network/connection.py). During
the handshake, a connection queues for each turn, in the time of strangers. After it, a connection
queues only when the time of a round is used up, or when its bytes have taken a whole turn.

Rules. The protocol is called after the handshake only. A protocol that pauses reading gets no data
until it resumes. Errors of TLS close the connection, after the alert that names them.
"""

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Final, cast

from broker.event_loop.loop_turns import TURN_SECONDS, ConnectionTurns, TurnQueue
from broker.network.tls_channel import STRANGER_BYTES, TlsChannel

RECEIVE_BYTES: Final = 16 << 10  # of messages without data: 5 ms

# One buffer serves all connections: its bytes are copied out before another one decrypts.
_DECRYPTED: Final = memoryview(bytearray(RECEIVE_BYTES))


class TlsTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """One connection: the protocol of the socket, and the transport of the HTTP protocol."""

    def __init__(
        self,
        protocol: asyncio.BaseProtocol,
        context: ssl.SSLContext,
        on_error: Callable[[OSError], None],
        turns: ConnectionTurns,
    ) -> None:
        """`on_error` is called if TLS fails, or the client leaves during the handshake."""
        super().__init__({"sslcontext": context})
        self._loop = asyncio.get_running_loop()
        self._protocol = cast(asyncio.Protocol, protocol)
        self._channel = TlsChannel(context)
        self._on_error = on_error
        self._socket: asyncio.Transport
        self._is_established = False
        self._is_paused = False  # by the protocol
        self._is_closing = False
        self._is_queued = False  # while it waits for its next turn; it reads nothing meanwhile
        self._turns = turns
        self.handshake_end: asyncio.Future[None] = self._loop.create_future()

    # Called by the transport of the socket ----------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the handshake."""
        # Cast, because uvloop's transports are not subclasses of asyncio's.
        self._socket = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next encrypted bytes."""
        return self._channel.get_buffer(RECEIVE_BYTES if self._is_established else STRANGER_BYTES)

    def buffer_updated(self, nbytes: int) -> None:
        """Decrypt `nbytes` more bytes now, or when it is the turn of this connection."""
        self._channel.receive(nbytes)
        if self._is_closing or self._is_queued:
            return
        if not self._is_established:
            self._wait_for_turn(self._turns.strangers)
            return
        turns = self._turns.clients
        waits = turns.is_over or self._decrypt_in_turn(turns) >= TURN_SECONDS
        if waits and self.is_reading():
            self._wait_for_turn(turns)

    def eof_received(self) -> bool:
        """Close the connection when the client does."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the protocol, which knows the connection if the handshake was complete."""
        if self._is_established:
            self._protocol.connection_lost(exc)
        elif not self._is_closing:
            self._on_error(ConnectionResetError("the client left during the handshake"))
        self._is_closing = True
        self._end_handshake()

    def pause_writing(self) -> None:
        """Let the protocol write no more."""
        if self._is_established:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Let the protocol write again."""
        if self._is_established:
            self._protocol.resume_writing()

    # Called by the protocol -------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the context of TLS, or information about the socket."""
        value = super().get_extra_info(name)
        return self._socket.get_extra_info(name, default) if value is None else value

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let another protocol take over."""
        self._protocol = cast(asyncio.Protocol, protocol)

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or will be when all is sent."""
        return self._is_closing or self._socket.is_closing()

    def is_reading(self) -> bool:
        """Return whether the protocol gets what arrives."""
        return not (self._is_paused or self.is_closing())

    def pause_reading(self) -> None:
        """Read nothing until `resume_reading`."""
        self._is_paused = True
        if not self._is_queued and not self.is_closing():
            self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._is_paused = False
        if not self._is_queued and not self.is_closing():
            self._socket.resume_reading()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send."""
        if self.is_closing() or not data:
            return
        try:
            self._socket.write(self._channel.encrypt(data))
        except ssl.SSLError as error:
            self._fail(error)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set how many encrypted bytes may wait before the protocol is to write no more."""
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return these limits, the lower one first."""
        return self._socket.get_write_buffer_limits()

    def get_write_buffer_size(self) -> int:
        """Return how many encrypted bytes wait for the socket."""
        return self._socket.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        """Return False: TLS closes both directions."""
        return False

    def close(self) -> None:
        """Close when all is sent, with the sign of TLS for the end."""
        if not self.is_closing():
            self._is_closing = True
            self._socket.write(self._channel.end())
            self._socket.close()

    def abort(self) -> None:
        """Close now."""
        self._is_closing = True
        self._socket.abort()

    # ------------------------------------------------------------------------------

    def _wait_for_turn(self, turns: TurnQueue) -> None:
        """Read nothing until the next turn."""
        self._is_queued = True
        turns.add(partial(self._take_turn, turns))
        if not self._is_paused:
            self._socket.pause_reading()

    def _take_turn(self, turns: TurnQueue) -> None:
        self._is_queued = False
        if self.is_closing():
            return
        self._decrypt_in_turn(turns)
        if self.is_reading():
            self._socket.resume_reading()

    def _decrypt_in_turn(self, turns: TurnQueue) -> float:
        """Decrypt what was received, and charge the time; return the seconds."""
        began = perf_counter()
        try:
            self._decrypt()
        except ssl.SSLError as error:
            self._fail(error)
        seconds = perf_counter() - began
        turns.charge(seconds)
        return seconds

    def _decrypt(self) -> None:
        is_complete = self._channel.shake_hands()
        if is_complete and not self._is_established:
            self._is_established = True
            self._protocol.connection_made(self)
            self._end_handshake()
        data = bytearray()
        is_end = False
        try:
            while is_complete and (count := self._channel.decrypt_into(_DECRYPTED)):
                data += _DECRYPTED[:count]
        except EOFError:
            is_end = True
        self._send_protocol_bytes()
        if data and not self.is_closing():
            self._protocol.data_received(bytes(data))
        if is_end and not self.is_closing():
            self._protocol.eof_received()
            self.close()

    def _send_protocol_bytes(self) -> None:
        data = self._channel.encrypt(b"")
        if data and not self._socket.is_closing():
            self._socket.write(data)

    def _fail(self, error: ssl.SSLError) -> None:
        self._send_protocol_bytes()
        self._is_closing = True
        self._socket.close()
        self._on_error(error)

    def _end_handshake(self) -> None:
        if not self.handshake_end.done():
            self.handshake_end.set_result(None)
