"""The sending half of a connection: sends bytes and ranges of files, in order, without copying.

Rules. Nothing is written through the transport, so that sendfile can send a file range after its
header (1.2-1.4 GB/s, against 1.06 with pread and writelines). The writer uses a duplicate of the
descriptor, because uvloop owns the original. Callers bound the pending parts: `idle` says that all
bytes have been sent.
"""

import asyncio
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable

from broker.network.late_parts import LateParts, Part, Warm
from storage.env import File
from storage.segments.fetch_slice import FetchSlice

MAX_BUFFERS = 64  # per writev: enough for a pipelined burst, far below IOV_MAX (1024)
# Per call and per turn, so that a fast reader cannot block the loop: about a millisecond. A socket
# accepts no more at once (net.ipv4.tcp_wmem), so a response of that size needs no second turn.
MAX_SENDFILE_BYTES = 4 << 20
# Per turn, for a client that reads small parts as fast as they are sent: about 4 us each.
CALLS_PER_TURN = 256
# Bytes that the kernel queues beyond the peer's window. Without a bound it queues 4 MiB, and the
# side that processes the acknowledgements transmits them: over loopback that is the client, which
# copies and transmits alternately while the broker sleeps. With a small queue the broker transmits
# while the client copies.
UNSENT_BYTES_MAX = 64 << 10


class TruncatedFileError(OSError):
    """A file ended before the end of the range to send."""

    def __init__(self, file: File, position: int) -> None:
        super().__init__(f"{file.path} ends at {position}")
        self.path = file.path


class SocketWriter:
    """Writes to a non-blocking socket, and continues when the socket becomes writable."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        on_drained: Callable[[], None],
        on_error: Callable[[OSError], None],
        warm: Warm | None = None,
    ) -> None:
        """`warm`: see LateParts."""
        self._loop = loop
        self._late = LateParts(loop, warm, self._on_writable, self._fail)
        self._socket = socket.socket(fileno=os.dup(fd))
        self._socket.setblocking(False)
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        self._armed = False
        self._parts: deque[memoryview | FetchSlice] = deque()
        self._on_drained = on_drained
        self._on_error = on_error
        self.bytes_sent = 0
        self.closed = False

    @property
    def idle(self) -> bool:
        """Return whether all parts have been sent."""
        return not self._parts

    @property
    def unsent_files(self) -> list[File]:
        """Return the files of the pending parts."""
        return files_of(self._parts)

    @property
    def peer_has_left(self) -> bool:
        """Return whether the peer has closed its end, also if bytes from it are still unread."""
        if self.closed:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def write(self, parts: Iterable[Part]) -> None:
        """Send parts, as many now as the socket accepts."""
        if self.closed:
            return
        for part in parts:
            if isinstance(part, FetchSlice):
                if part.length:
                    self._parts.append(_sendable(part))
            elif len(part):
                self._parts.append(memoryview(part))
        if not self._armed and not self._late.is_reading:
            self._send()

    def write_bytes(self, data: bytes) -> None:
        """Send one small response; the common case without pending parts is fast."""
        if self.closed:
            return
        if not self._parts:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._fail(error)
                return
            self.bytes_sent += sent
            if sent == len(data):
                return
            self._parts.append(memoryview(data)[sent:])
            self._arm()
            return
        self._parts.append(memoryview(data))

    def close(self) -> None:
        """Stop and drop pending parts. The transport closes the original descriptor."""
        self.closed = True
        self._parts.clear()
        self._late.close()
        self._disarm()
        self._socket.close()
        self._on_drained = self._on_error = ignore  # they refer to the owner of this writer

    def _send(self, *, is_late: bool = False) -> None:
        """Send for a turn; `is_late` if the parts have waited for the client."""
        calls, turn_end = 0, self.bytes_sent + MAX_SENDFILE_BYTES
        try:
            while self._parts:
                if calls == CALLS_PER_TURN or self.bytes_sent >= turn_end:
                    self._arm()
                    return
                if is_late and self._late.begin(self._parts[0]):
                    break
                calls += 1
                self._send_some()
        except BlockingIOError:
            self._arm()
            return
        except OSError as error:
            self._fail(error)
            return
        self._disarm()

    def _send_some(self) -> None:
        """Send from the head of the queue. Raises BlockingIOError when the socket is full."""
        head = self._parts[0]
        if isinstance(head, FetchSlice):
            self._send_file(head)
            return
        buffers: list[memoryview] = []
        for part in self._parts:
            if isinstance(part, FetchSlice) or len(buffers) == MAX_BUFFERS:
                break
            buffers.append(part)
        # MSG_MORE keeps the header of a response in one segment with the file range after it.
        flags = socket.MSG_MORE if len(buffers) < len(self._parts) else 0
        sent = self._socket.sendmsg(buffers, [], flags)
        self.bytes_sent += sent
        for buffer in buffers:
            if sent < len(buffer):
                self._parts[0] = buffer[sent:]
                raise BlockingIOError
            sent -= len(buffer)
            self._parts.popleft()

    def _send_file(self, part: FetchSlice) -> None:
        assert part.file is not None
        count = min(part.length, MAX_SENDFILE_BYTES)
        sent = os.sendfile(self._socket.fileno(), part.file.fileno(), part.position, count)
        if sent == 0:
            raise TruncatedFileError(part.file, part.position)
        self.bytes_sent += sent
        if sent == part.length:
            self._parts.popleft()
            return
        self._parts[0] = part._replace(position=part.position + sent, length=part.length - sent)
        if sent < count:
            raise BlockingIOError

    def _arm(self) -> None:
        if not self._armed:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)
            self._armed = True

    def _disarm(self) -> None:
        if self._armed:
            self._loop.remove_writer(self._socket.fileno())
            self._armed = False

    def _on_writable(self) -> None:
        self._send(is_late=True)
        if not self._parts and not self.closed:
            self._on_drained()

    def _fail(self, error: OSError) -> None:
        on_error = self._on_error
        self.close()
        on_error(error)


def files_of(parts: Iterable[Part]) -> list[File]:
    """Return the files that parts of a response are in."""
    return [part.file for part in parts if isinstance(part, FetchSlice) and part.file is not None]


def ignore(*_: object) -> None:
    """Do nothing: the callback of a closed writer."""


def _sendable(part: FetchSlice) -> memoryview | FetchSlice:
    """Return the part, or its bytes if its file has no descriptor (in-memory files of tests)."""
    assert part.file is not None
    return part if part.file.fileno() >= 0 else memoryview(part.read())
