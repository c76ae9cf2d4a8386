"""Reads the rest of a response from the disk again before the event loop sends it.

A fetch reads its records into the page cache before it answers (broker/topics/cold_reads.py). A
client that reads slowly takes them a minute later, when other reads may have displaced them: then
each part would be read from the disk on the event loop, and a disk that hangs would stop the
broker. So a writer that had to wait for its client looks again before it sends more of a file.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from broker.topics.cold_reads import is_cached
from storage.segments.fetch_slice import FetchSlice

# Looked at, and read, at once: a client that reads slowly displaces little, and its next parts are
# ready. A look takes 3 us, and a fast client takes 64 KiB in 60 us, so its result is kept.
READ_BYTES: Final = 4 << 20
KEPT_SECONDS: Final = 1.0

Part = bytes | bytearray | memoryview | FetchSlice
Warm = Callable[[FetchSlice], Coroutine[Any, Any, None]]


class LateParts:
    """The read for the first part that waits, if one is needed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        warm: Warm | None,
        on_ready: Callable[[], None],
        on_error: Callable[[OSError], None],
    ) -> None:
        """`warm` reads a range into the page cache; None if the loop reads what it sends."""
        self._loop = loop
        self._warm = warm
        self._on_ready: Callable[[], None] | None = on_ready
        self._on_error: Callable[[OSError], None] | None = on_error
        self._reading: asyncio.Task[None] | None = None
        # The last range that was in the page cache, and until when it counts as such. It must not
        # refer to the file: an idle connection would keep a deleted one on the disk.
        self._path, self._positions, self._cached_until = "", range(0), 0.0

    @property
    def is_reading(self) -> bool:
        """Return whether the first part is being read."""
        return self._reading is not None

    def begin(self, first: Part) -> bool:
        """Return whether the first part has to be read; `on_ready` is called afterwards."""
        if self._warm is None or not isinstance(first, FetchSlice) or self._is_known(first):
            return False
        part = first._replace(length=min(first.length, READ_BYTES))
        if is_cached(part):
            self._keep(part)
            return False
        self._reading = self._loop.create_task(self._warm(part), name="read late records")
        self._reading.add_done_callback(partial(self._end, part))
        return True

    def _is_known(self, first: FetchSlice) -> bool:
        assert first.file is not None
        return (
            first.position in self._positions
            and first.file.path == self._path
            and self._loop.time() < self._cached_until
        )

    def _keep(self, part: FetchSlice) -> None:
        assert part.file is not None
        self._path = part.file.path
        self._positions = range(part.position, part.position + part.length)
        self._cached_until = self._loop.time() + KEPT_SECONDS

    def _end(self, part: FetchSlice, reading: asyncio.Task[None]) -> None:
        self._reading = None
        error = None if reading.cancelled() else reading.exception()
        if self._on_ready is None or self._on_error is None:
            return
        if error is None:
            self._keep(part)
            self._on_ready()
        else:
            self._on_error(error if isinstance(error, OSError) else OSError(str(error)))

    def close(self) -> None:
        """End the wait. The functions refer to the owner of the writer."""
        if self._reading is not None:
            self._reading.cancel()
        self._warm = self._on_ready = self._on_error = None
