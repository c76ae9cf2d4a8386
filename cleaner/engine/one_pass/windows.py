"""The windows of a segment: stretches of whole batches that are read from the newest to the oldest.

Rules
- Where a batch begins is told by the offset index, which may be wrong. So a window counts only if
  the walk over its batches arrives exactly at its end; as the windows of a segment reach from its
  first byte to its last, they then hold the batches that a walk from its start would find.
- Where the index tells too little, the lengths in the batch headers are followed.
- Every byte is charged before it is read. No memory is taken for more than the largest window.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from cleaner.engine.kernels.layout import HEADER_BYTES, LENGTH_BYTES
from cleaner.job import SourceSegment
from storage.env import Env, File
from storage.errors import StorageError
from storage.format import filenames
from storage.format.index import OFFSET_ENTRY_BYTES, CorruptIndexError, OffsetIndex

# What fits into a processor's second-level cache beside the map's hot lines.
WINDOW_BYTES: Final = 512 << 10


class NoWindowsError(StorageError):
    """The segment cannot be cut into windows; reading it from its start tells why."""


class Windows:
    """Cuts segments of one partition into windows of at most `limit_bytes`."""

    def __init__(self, env: Env, directory: str, limit_bytes: int) -> None:
        self._env = env
        self._directory = directory
        self._limit_bytes = limit_bytes

    def of(
        self, source: SourceSegment, file: File, charge: Callable[[int], None]
    ) -> list[tuple[int, int]]:
        """(begin, end) of each window, the newest first. Raises NoWindowsError, OSError.

        `charge` is told of bytes before they are read; it may wait, or raise.
        """
        if file.size() < source.size_bytes:
            raise NoWindowsError(file.path)
        requested = min(WINDOW_BYTES, self._limit_bytes)
        hints = self._hints(source, charge)
        windows: list[tuple[int, int]] = []
        end, count = source.size_bytes, len(hints)
        while end > 0:
            count = bisect_left(hints, end, 0, count)  # of the hints before `end`
            first = bisect_left(hints, end - requested, 0, count)
            if end <= requested:
                windows.append((0, end))
            elif first < count:
                windows.append((hints[first], end))
            else:
                begin = hints[count - 1] if count else 0
                edges = [begin, *_walk(file, begin, end, charge), end]
                windows += self._between(edges, requested, file.path)
            end = windows[-1][0]
        return windows

    def _between(self, edges: list[int], requested: int, path: str) -> Iterator[tuple[int, int]]:
        """Windows that begin and end at `edges`, as few as fit."""
        last = len(edges) - 1
        while last > 0:
            first = min(bisect_left(edges, edges[last] - requested), last - 1)
            if edges[last] - edges[first] > self._limit_bytes:
                raise NoWindowsError(path)
            yield edges[first], edges[last]
            last = first

    def _hints(self, source: SourceSegment, charge: Callable[[int], None]) -> Sequence[int]:
        """Where batches begin, if the index is right."""
        name = filenames.file_name(source.base_offset, filenames.INDEX)
        path = f"{self._directory}/{name}"
        entries_max = source.size_bytes // HEADER_BYTES + 1
        if not self._env.exists(path) or self._env.size(path) > entries_max * OFFSET_ENTRY_BYTES:
            return ()
        charge(self._env.size(path))
        try:
            return OffsetIndex.from_bytes(
                self._env.read_file(path), path, source.size_bytes
            ).positions
        except CorruptIndexError:
            return ()


def _walk(file: File, begin: int, end: int, charge: Callable[[int], None]) -> Iterator[int]:
    """Where the batches of `[begin, end)` begin behind the first, by the lengths in them."""
    at = begin
    while end - at >= HEADER_BYTES:
        if at > begin:
            yield at
        charge(LENGTH_BYTES)
        size = int.from_bytes(file.pread(LENGTH_BYTES, at)[8:], "big") + LENGTH_BYTES
        if size < HEADER_BYTES or size > end - at:
            raise NoWindowsError(file.path)
        at += size
    if at != end:
        raise NoWindowsError(file.path)
