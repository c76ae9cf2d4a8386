"""Cuts the bytes of a connection into request frames. Sans-IO: the connection owns the socket.

Rules. A frame is a 4-byte big-endian size and that many bytes (Kafka protocol guide). The reader
returns those bytes, without the size, as a writable memoryview of the receive buffer, so that a log
can stamp batches in place. The view is valid until the next call of `next_frame` or `get_buffer`:
while a request is handled the connection is muted, and bytes of later requests wait behind it.

The reader reuses one buffer. It begins with FIRST_BYTES, and grows to INITIAL_BYTES once a read
fills them. From there it grows to twice the received bytes, and at most to four times in the last
step: a client that announces 100 MB and sends nothing costs 4 KiB. A frame above SMALL_FRAME_BYTES
is refused as soon as its API key has arrived, if that API has no requests of this size. Growth
copies the received bytes, but never more than two megabytes, and zeroes nothing: both would hold
the event loop, for 150 ms in a frame of 90 MB. Otherwise a frame is moved at most once, to the
front. The buffer shrinks after a huge frame.
"""

import struct
from collections.abc import Callable
from typing import Final

import numpy as np

from protocol.errors import ProtocolError
from protocol.limits import SMALL_FRAME_BYTES

SIZE_BYTES: Final = 4
FIRST_BYTES: Final = 4 << 10  # until a read fills them: most of 5,000 connections are idle
INITIAL_BYTES: Final = 64 << 10  # the most that one read returns on Linux loopback and Ethernet
# Kept between frames: a request with a batch of max.message.bytes (1,048,588). Larger frames are
# rare, and idle clients may use this much memory for each connection.
RETAINED_BYTES: Final = 1_280 << 10
# Addresses that the buffer reserves, as a multiple of the received bytes: a frame of 100 MB is
# copied for the last time when 2 MiB have arrived. The kernel provides memory as bytes arrive.
RESERVED_MAX: Final = 512
MIN_READ_BYTES: Final = 16 << 10  # less room than this at the end: move to the front first
DEFAULT_MAX_FRAME_BYTES: Final = 100 << 20  # Kafka's socket.request.max.bytes

_SIZE: Final = struct.Struct(">i")
_SIZE_AND_KEY: Final = struct.Struct(">ih")
_TLS_HANDSHAKE: Final = 0x1603  # the first two bytes of a client that speaks TLS


class FrameReader:
    """The receive buffer of one connection, for `asyncio.BufferedProtocol`."""

    def __init__(
        self,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        limit_of: Callable[[int], int] | None = None,
    ) -> None:
        """`limit_of` returns the size limit of an API's frames, by API key."""
        assert max_frame_bytes > 0
        self._max_frame_bytes = max_frame_bytes
        self._limit_of = limit_of
        self._view = self._reserved = memoryview(bytearray(FIRST_BYTES))
        self._capacity = FIRST_BYTES
        self._start = 0  # first byte that was not returned
        self._end = 0  # end of the received bytes
        self.reads_ahead = True  # False: receive no more than a frame, or INITIAL_BYTES

    def allow(self, max_frame_bytes: int) -> None:
        """Change the size limit of all frames."""
        self._max_frame_bytes = max_frame_bytes

    @property
    def allocated_bytes(self) -> int:
        """Return the size of the receive buffer."""
        return self._capacity

    @property
    def is_empty(self) -> bool:
        """Return whether no frame has begun to arrive."""
        return self._start == self._end

    def growth(self) -> int:
        """Return by how many bytes the next `get_buffer` grows the buffer beyond INITIAL_BYTES.

        The buffer may shrink now.

        Earlier frames become invalid.
        """
        if self._start == self._end:
            self.give_back(RETAINED_BYTES)
            return 0
        return max(0, self._capacity_needed() - max(self._capacity, INITIAL_BYTES))

    def give_back(self, retained_bytes: int = INITIAL_BYTES) -> None:
        """Shrink a buffer above `retained_bytes` in which no frame has begun.

        A buffer of FIRST_BYTES that a read filled grows to INITIAL_BYTES.

        Earlier frames become invalid.
        """
        if self._start == self._end:
            is_full = self._end == self._capacity
            self._start = self._end = 0
            if self._capacity > retained_bytes or (is_full and self._capacity < INITIAL_BYTES):
                self._replace(INITIAL_BYTES)

    def trim(self) -> None:
        """Shrink the buffer to the received bytes of the next frame, after a frame was returned.

        Earlier frames become invalid. A frame that is being received keeps its room.
        """
        received = self._end - self._start
        if (self._start or not received) and self._capacity > max(INITIAL_BYTES, received):
            self._replace(max(INITIAL_BYTES, received))

    def get_buffer(self, _size_hint: int) -> memoryview:
        """Return the buffer for the next bytes, never empty. Earlier frames become invalid."""
        if self._start == self._end:
            self.give_back(RETAINED_BYTES)
        else:
            self._make_room()
        assert self._end < self._capacity
        if not self.reads_ahead:
            whole = self._start + self._frame_bytes(self._end - self._start)
            return self._view[self._end : max(whole, min(INITIAL_BYTES, self._capacity))]
        return self._view[self._end :]

    def buffer_updated(self, received_bytes: int) -> None:
        """Note that `received_bytes` were written into the buffer."""
        self._end += received_bytes
        assert self._end <= self._capacity

    def next_frame(self) -> memoryview | None:
        """Return the next whole frame, None until it has arrived.

        Raises ProtocolError at every call after a size that is negative or above the limit of its
        API, because the next frame cannot be found.
        """
        start = self._start + SIZE_BYTES
        if start > self._end:
            return None
        (size,) = _SIZE.unpack_from(self._view, self._start)
        if not 0 <= size <= self._max_frame_bytes:
            is_tls = size >> 16 == _TLS_HANDSHAKE
            hint = "; the client seems to use TLS" if is_tls else ""
            raise ProtocolError(f"frame of {size} bytes, allowed are {self._max_frame_bytes}{hint}")
        if size > SMALL_FRAME_BYTES:
            self._check_api(size)
        stop: int = start + size
        if stop > self._end:
            return None
        self._start = stop
        return self._view[start:stop]

    def _check_api(self, size: int) -> None:
        """Refuse a large frame of an API that has none, as soon as its key has arrived."""
        if self._limit_of is not None and self._end - self._start >= _SIZE_AND_KEY.size:
            _, api_key = _SIZE_AND_KEY.unpack_from(self._view, self._start)
            limit = self._limit_of(api_key)
            if size > limit:
                raise ProtocolError(f"frame of {size} bytes, API {api_key} has at most {limit}")

    def _make_room(self) -> None:
        """Make room for the rest, or a good part of it, of a frame that has begun."""
        needed = self._capacity_needed()
        if needed > self._capacity:
            self._replace(needed)
        elif needed:
            received = self._end - self._start
            self._view[:received] = self._view[self._start : self._end]
            self._start, self._end = 0, received

    def _capacity_needed(self) -> int:
        """Return the capacity needed for the frame that has begun; 0 if the buffer suffices."""
        room = self._capacity - self._end
        if self._start == 0 and room > 0:
            return 0
        received = self._end - self._start
        whole = self._frame_bytes(received)
        if room >= whole - received and room >= MIN_READ_BYTES:
            return 0
        if self._capacity < INITIAL_BYTES:
            return INITIAL_BYTES
        # A larger last step avoids a second copy of a frame just above a power of two.
        return whole if whole <= 4 * received else 2 * received

    def _frame_bytes(self, received: int) -> int:
        """Return the size of the frame that has begun, with its size field, as far as known."""
        if received < SIZE_BYTES:
            return SIZE_BYTES
        (size,) = _SIZE.unpack_from(self._view, self._start)
        return SIZE_BYTES + min(max(int(size), 0), self._max_frame_bytes)

    def _replace(self, capacity: int) -> None:
        """Continue with another capacity; a frame that is still used keeps the old memory alive."""
        received = self._end - self._start
        if self._start or not self._capacity < capacity <= len(self._reserved):
            whole = min(self._frame_bytes(received), RESERVED_MAX * received)
            reserved = np.empty(max(capacity, whole), dtype=np.uint8).data
            reserved[:received] = self._view[self._start : self._end]
            self._reserved = reserved
        self._view, self._capacity = self._reserved[:capacity], capacity
        self._start, self._end = 0, received
