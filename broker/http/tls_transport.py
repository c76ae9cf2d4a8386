"""The transport of https: TLS between a socket and the protocol of HTTP.

uvloop's own transport decrypts all that a client sends at once, so messages of TLS itself could
hold the event loop for seconds, without credentials. Here the bounds of TlsChannel apply, and the
turns of HttpTransport include the decryption. During the handshake, a connection queues for each
turn, in the time of unauthenticated connections.

Rules. The protocol is called after the handshake only. Errors of TLS close the connection, after
the alert that names them. While the socket has more to send than its limit, nothing is decrypted:
TLS itself answers some messages, so a client that reads nothing would fill the memory.
"""

import asyncio
import ssl
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

from broker.event_loop.loop_turns import ConnectionTurns, TurnQueue
from broker.http.transport import FindTurns, HttpTransport
from broker.network.tls_channel import UNAUTHENTICATED_BYTES, TlsChannel

RECEIVE_BYTES: Final = 16 << 10  # of messages without data: 5 ms

# One buffer serves all connections: its bytes are copied out before another one decrypts.
_DECRYPTED: Final = memoryview(bytearray(RECEIVE_BYTES))


class TlsTransport(HttpTransport):
    """One connection: the protocol of the socket, and the transport of the HTTP protocol."""

    def __init__(
        self,
        protocol: asyncio.BaseProtocol,
        context: ssl.SSLContext,
        on_error: Callable[[OSError], None],
        turns: ConnectionTurns,
        find_turns: FindTurns,
    ) -> None:
        """`on_error` is called if TLS fails, or the client leaves during the handshake."""
        super().__init__(protocol, turns, find_turns)
        self._context = context
        self._channel = TlsChannel(context)
        self._on_error = on_error
        self._is_established = False
        self._is_ended = False  # by the client, with the sign of TLS
        self._is_closing = False
        self._is_full = False  # the socket: it has more to send than its limit
        self.handshake_end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # Called by the transport of the socket ----------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the handshake."""
        self._join(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next encrypted bytes."""
        return self._channel.get_buffer(
            RECEIVE_BYTES if self._is_established else UNAUTHENTICATED_BYTES
        )

    def buffer_updated(self, nbytes: int) -> None:
        """Decrypt `nbytes` more bytes now, or when it is the turn of this connection."""
        self._channel.receive(nbytes)
        self._handle_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the protocol, which knows the connection if the handshake was complete."""
        if self._is_established:
            super().connection_lost(exc)
        elif not self._is_closing:
            self._on_error(ConnectionResetError("the client left during the handshake"))
        self._is_closing = True
        self._end_handshake()

    def pause_writing(self) -> None:
        """Let the protocol write no more, and decrypt nothing."""
        self._is_full = True
        if not self._is_queued and not self.is_closing():
            self._socket.pause_reading()
        if self._is_established:
            super().pause_writing()

    def resume_writing(self) -> None:
        """Let the protocol write again, and decrypt what has arrived."""
        self._is_full = False
        if self._is_established:
            super().resume_writing()
        if not self._is_paused:
            self.resume_reading()

    # Called by the protocol -------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the context of TLS, or information about the socket."""
        return self._context if name == "sslcontext" else super().get_extra_info(name, default)

    def is_reading(self) -> bool:
        """Return whether the protocol gets what arrives."""
        return super().is_reading() and not self._is_full

    def resume_reading(self) -> None:
        """Read again, as soon as the socket has sent enough."""
        if self._is_full:
            self._is_paused = False
        else:
            super().resume_reading()

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or will be when all is sent."""
        return self._is_closing or super().is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send."""
        if self.is_closing() or not data:
            return
        try:
            super().write(self._channel.encrypt(data))
        except ssl.SSLError as error:
            self._fail(error)

    def close(self) -> None:
        """Close when all is sent, with the sign of TLS for the end."""
        if not self.is_closing():
            self._is_closing = True
            super().write(self._channel.end())
            super().close()

    def abort(self) -> None:
        """Close now."""
        self._is_closing = True
        super().abort()

    # ------------------------------------------------------------------------------

    def _own_turns(self) -> TurnQueue | None:
        if not self._is_established:
            return self._turns.unauthenticated
        return super()._own_turns() or self._turns.clients  # to decrypt takes time as well

    def _pass_on(self, ends_at: float) -> None:
        try:
            self._decrypt(ends_at)
        except ssl.SSLError as error:
            self._fail(error)
            return
        super()._pass_on(ends_at)
        if self._is_ended and not self._data and not self.is_closing():
            self._protocol.eof_received()
            self.close()

    def _has_received(self) -> bool:
        return super()._has_received() or not self._channel.is_empty

    def _decrypt(self, ends_at: float) -> None:
        """Decrypt what was received, until this time of `perf_counter`."""
        try:
            while True:
                count = self._channel.decrypt_into(_DECRYPTED) if self._continue_handshake() else 0
                self._data += _DECRYPTED[:count]
                is_done = not count and self._channel.is_empty
                if is_done or perf_counter() >= ends_at:
                    break
        except EOFError:
            self._is_ended = True
        self._send_protocol_bytes()

    def _continue_handshake(self) -> bool:
        """Return whether the handshake is complete; tell the protocol if it is so now."""
        is_complete = self._channel.shake_hands()
        if is_complete and not self._is_established:
            self._is_established = True
            self._protocol.connection_made(self)
            self._end_handshake()
        return is_complete

    def _send_protocol_bytes(self) -> None:
        data = self._channel.encrypt(b"")
        if data and not super().is_closing():
            super().write(data)

    def _fail(self, error: ssl.SSLError) -> None:
        self._send_protocol_bytes()
        self._is_closing = True
        super().close()
        self._on_error(error)

    def _end_handshake(self) -> None:
        if not self.handshake_end.done():
            self.handshake_end.set_result(None)
