"""Split a segment into windows of whole batches, read from the newest to the oldest.

Rules
- The offset index names starts of batches, but may be wrong. So a window is valid only if the walk
  over its batches ends exactly at its end. The windows cover the whole segment, so valid windows
  have the same batches as a walk from its start.
- Where the index has too few entries, the lengths in the batch headers are used.
- Every byte is charged before it is read. Memory is bounded by the largest window.
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

# Fits into a second-level cache beside the often used lines of the map.
WINDOW_BYTES: Final = 512 << 10


class NoWindowsError(StorageError):
    """The segment cannot be split into windows; reading it from its start shows why."""


class Windows:
    """Splits segments of one partition into windows of at most `limit_bytes`."""

    def __init__(self, env: Env, directory: str, limit_bytes: int) -> None:
        self._env = env
        self._directory = directory
        self._limit_bytes = limit_bytes

    def of(
        self, source: SourceSegment, file: File, charge: Callable[[int], None]
    ) -> list[tuple[int, int]]:
        """Return (begin, end) of each window, the newest first. Raises NoWindowsError, OSError.

        `charge` is called before bytes are read; it may wait or raise.
        """
        if file.size() < source.size_bytes:
            raise NoWindowsError(file.path)
        target_bytes = min(WINDOW_BYTES, self._limit_bytes)
        hints = self._hints(source, charge)
        windows: list[tuple[int, int]] = []
        end, count = source.size_bytes, len(hints)
        while end > 0:
            count = bisect_left(hints, end, 0, count)  # of the hints before `end`
            first = bisect_left(hints, end - target_bytes, 0, count)
            if end <= target_bytes:
                windows.append((0, end))
            elif first < count:
                windows.append((hints[first], end))
            else:
                begin = hints[count - 1] if count else 0
                edges = [begin, *_walk(file, begin, end, charge), end]
                windows += self._between(edges, target_bytes, file.path)
            end = windows[-1][0]
        return windows

    def _between(self, edges: list[int], target_bytes: int, path: str) -> Iterator[tuple[int, int]]:
        """Yield windows that begin and end at `edges`, as few as possible."""
        last = len(edges) - 1
        while last > 0:
            first = min(bisect_left(edges, edges[last] - target_bytes), last - 1)
            if edges[last] - edges[first] > self._limit_bytes:
                raise NoWindowsError(path)
            yield edges[first], edges[last]
            last = first

    def _hints(self, source: SourceSegment, charge: Callable[[int], None]) -> Sequence[int]:
        """Return starts of batches according to the index."""
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
    """Yield the starts of batches in `[begin, end)` after the first, by their lengths."""
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
