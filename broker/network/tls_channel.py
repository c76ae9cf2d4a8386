"""TLS between a connection's socket and its frames, without blocking.

Rules. The connection is accepted, counted and limited before the handshake begins. Encrypted bytes
that are not yet decrypted fill at most one receive buffer: a muted connection reads no more. The
writer encrypts a response in pieces, and the next piece when the socket has accepted the previous
one, so a client that does not read makes the broker buffer one piece only.

Messages of TLS itself, such as key updates, cost time without a request: one takes 27 bytes and
9 us, or 25 us if the client asks for one in return. The certificates of a handshake cost more. Too
many such bytes in a row are an error. OpenSSL handles all messages that it has before it returns,
so it gets some records at a time: a client may send a byte of data from time to time.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from broker.network.late_parts import LateParts, Part, Warm
from broker.network.socket_writer import (
    SocketWriter,
    TruncatedFileError,
    files_of,
    ignore,
)
from storage.env import File
from storage.segments.fetch_slice import FetchSlice

RECEIVE_BYTES: Final = 64 << 10
UNAUTHENTICATED_BYTES: Final = 4 << 10  # per turn, of a client without credentials
# In a row. An incomplete record has up to 16.3 KiB.
BYTES_WITHOUT_DATA_MAX: Final = 32 << 10
# A certificate with those of its authorities has up to 10 KB. OpenSSL looks for the issuer of each
# among all others before it checks a signature.
HANDSHAKE_BYTES_MAX: Final = 16 << 10
# That OpenSSL gets at once: up to 2 ms of key updates, 0.1 ms of records with a byte of data each.
RECORDS_AT_ONCE: Final = 32
RECORD_HEADER_BYTES: Final = 5  # the last two are the length of what follows
PIECE_BYTES: Final = 128 << 10  # of a response, encrypted at once: about 0.1 ms
TURN_BYTES: Final = 1 << 20  # encrypted per turn on the loop

# One buffer serves all connections: the loop fills it and calls buffer_updated without a pause, and
# `receive` copies the bytes out.
_RECEIVED: Final = memoryview(bytearray(RECEIVE_BYTES))


class BytesWithoutDataError(ssl.SSLError):
    """The client sent more than BYTES_WITHOUT_DATA_MAX, or HANDSHAKE_BYTES_MAX."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__()
        self.reason = f"more than {bytes_max} bytes without data"


class TlsChannel:
    """The TLS state of one connection. Its methods raise ssl.SSLError for invalid bytes."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.is_established = False
        self._bytes_without_data = 0
        self._received = bytearray()  # what OpenSSL has not got yet
        self._record_end = 0  # in `_received`, of the record that OpenSSL has a part of

    @property
    def peer_certificate(self) -> bytes | None:
        """Return the verified certificate of the client in DER; None if it sent none."""
        return self._tls.getpeercert(binary_form=True)

    @property
    def is_empty(self) -> bool:
        """Return whether all received bytes were decrypted and taken, as far as is possible."""
        return not (self._incoming.pending or self._tls.pending() or self._has_records)

    @property
    def _has_records(self) -> bool:
        """Return whether OpenSSL can use more of what was received."""
        has_header = len(self._received) >= RECORD_HEADER_BYTES
        return has_header or bool(self._record_end and self._received)

    def get_buffer(self, nbytes: int = RECEIVE_BYTES) -> memoryview:
        """Return the buffer for the next `nbytes` encrypted bytes."""
        return _RECEIVED[:nbytes]

    def receive(self, nbytes: int) -> None:
        """Take `nbytes` encrypted bytes from the buffer."""
        self._received += _RECEIVED[:nbytes]

    def _pass_on(self) -> None:
        """Give OpenSSL the bytes of the next records, unless it has some."""
        if self._incoming.pending or not self._has_records:
            return
        end, size = self._record_end, len(self._received)
        for _ in range(RECORDS_AT_ONCE):
            if size - end < RECORD_HEADER_BYTES:
                break
            length = self._received[end + 3 : end + RECORD_HEADER_BYTES]
            end += RECORD_HEADER_BYTES + int.from_bytes(length)
        passed_on = min(end, size)
        self._incoming.write(self._received[:passed_on])
        del self._received[:passed_on]
        self._record_end = end - passed_on
        self._bytes_without_data += passed_on

    def shake_hands(self) -> bool:
        """Continue the handshake with some records; return whether it is complete."""
        if not self.is_established:
            self._pass_on()
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._check_bytes_without_data(HANDSHAKE_BYTES_MAX)
                return False
            self.is_established = True
            self._bytes_without_data = 0
        return True

    def decrypt_into(self, buffer: memoryview) -> int:
        """Fill the buffer from some records; return the number of decrypted bytes.

        If it is 0 and `is_empty`, more must arrive. A read returns at most one TLS record, and
        librdkafka sends each value of a produce request as a record of its own. Raises EOFError
        when the client has closed the channel.
        """
        self._pass_on()
        position, end = 0, len(buffer)
        try:
            while position < end:
                nbytes = int(self._tls.read(end - position, buffer[position:]))
                if not nbytes:  # the usual sign of the end
                    raise ssl.SSLZeroReturnError
                position += nbytes
                self._bytes_without_data = 0
        except ssl.SSLWantReadError:
            self._check_bytes_without_data(BYTES_WITHOUT_DATA_MAX)
            return position
        except ssl.SSLZeroReturnError:  # occurs by itself if the broker has closed it, too
            if not position:
                raise EOFError from None
        return position

    def _check_bytes_without_data(self, bytes_max: int) -> None:
        if self._bytes_without_data > bytes_max:
            raise BytesWithoutDataError(bytes_max) from None

    def end(self) -> bytes:
        """Return the last encrypted bytes, which tell the client that nothing follows."""
        with suppress(ssl.SSLError):
            self._tls.unwrap()
        return self._outgoing.read()

    def encrypt(self, data: bytes | bytearray | memoryview) -> bytes:
        """Return the encrypted bytes, with those that the protocol itself has to send."""
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        return self._outgoing.read()


class TlsWriter:
    """Encrypts responses for a SocketWriter; has the same interface."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        on_drained: Callable[[], None],
        on_error: Callable[[OSError], None],
        *,
        channel: TlsChannel,
        warm: Warm | None = None,
    ) -> None:
        """`warm`: see LateParts."""
        self._loop = loop
        self._socket = SocketWriter(loop, fd, self._socket_drained, on_error)
        self._channel = channel
        self._late = LateParts(loop, warm, self._socket_drained, self._fail)
        self._parts: deque[memoryview | FetchSlice] = deque()
        self._next_turn: asyncio.Handle | None = None
        self._on_drained = on_drained
        self._on_error = on_error

    @property
    def idle(self) -> bool:
        """Return whether all parts have been sent."""
        return not self._parts and self._socket.idle

    @property
    def closed(self) -> bool:
        """Return whether the writer is closed."""
        return self._socket.closed

    @property
    def unsent_files(self) -> list[File]:
        """Return the files of the pending parts."""
        return files_of(self._parts)

    @property
    def peer_has_left(self) -> bool:
        """Return whether the peer has closed its end."""
        return self._socket.peer_has_left

    @property
    def bytes_sent(self) -> int:
        """Return the number of encrypted bytes sent."""
        return self._socket.bytes_sent

    def write(self, parts: Iterable[Part]) -> None:
        """Send parts, as many now as the socket accepts."""
        for part in parts:
            if isinstance(part, FetchSlice):
                if part.length:
                    self._parts.append(part)
            elif len(part):
                self._parts.append(memoryview(part))
        self._send()

    def write_bytes(self, data: bytes) -> None:
        """Send one response."""
        self.write((data,))

    def send_protocol_bytes(self) -> None:
        """Send what the protocol itself has to send: handshakes, alerts, key updates."""
        data = self._channel.encrypt(b"")
        if data:
            self._socket.write_bytes(data)

    def close(self) -> None:
        """Stop and drop pending parts. The transport closes the original descriptor."""
        self._parts.clear()
        self._late.close()
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._socket.close()
        self._on_drained = self._on_error = ignore

    def _send(self, *, is_late: bool = False) -> None:
        turn_bytes = 0
        try:
            while self._may_send():
                if turn_bytes >= TURN_BYTES:
                    self._next_turn = self._loop.call_soon(self._take_turn)
                    return
                if is_late and self._late.begin(self._parts[0]):
                    return
                piece = self._next_piece()
                turn_bytes += len(piece)
                self._socket.write_bytes(self._channel.encrypt(piece))
        except OSError as error:  # of the file, or of TLS
            self._fail(error)

    def _may_send(self) -> bool:
        is_free = self._next_turn is None and not self._late.is_reading
        return is_free and bool(self._parts) and self._socket.idle

    def _fail(self, error: OSError) -> None:
        on_error = self._on_error
        self.close()
        on_error(error)

    def _next_piece(self) -> bytes | memoryview:
        """Remove up to PIECE_BYTES from the queue; small parts share a piece."""
        head = self._parts.popleft()
        if isinstance(head, FetchSlice):
            count = min(head.length, PIECE_BYTES)
            piece = head._replace(length=count).read()
            if len(piece) < count:
                assert head.file is not None
                raise TruncatedFileError(head.file, head.position + len(piece))
            if count < head.length:
                rest = head._replace(position=head.position + count, length=head.length - count)
                self._parts.appendleft(rest)
            return piece
        if len(head) >= PIECE_BYTES:
            if len(head) > PIECE_BYTES:
                self._parts.appendleft(head[PIECE_BYTES:])
            return head[:PIECE_BYTES]
        joined = bytearray(head)
        while self._parts and not isinstance(self._parts[0], FetchSlice):
            if len(joined) + len(self._parts[0]) > PIECE_BYTES:
                break
            joined += self._parts.popleft()  # type: ignore[arg-type]
        return memoryview(joined)

    def _take_turn(self) -> None:
        self._next_turn = None
        self._socket_drained()

    def _socket_drained(self) -> None:
        self._send(is_late=True)
        if self.idle and not self.closed:
            self._on_drained()
