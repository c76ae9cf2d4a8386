"""Read the closed segments of a job through one buffer, and report damage.

Rules
- An incomplete batch at the end of the buffer is moved to its front and completed by the next read,
  so no byte is read twice.
- A batch larger than the buffer is read through it once to verify its checksum before memory is
  allocated for it: a wrong length costs no memory.
- Every byte is charged before it is read.
- A caller that knows where batches begin can read ranges of a segment and skip the rest.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from cleaner.engine.kernels.codecs.crc import crc32c_extended
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES, load_be32
from cleaner.engine.kernels.compile import Bytes
from cleaner.engine.kernels.layout import (
    ATTRIBUTES_POSITION,
    CRC_POSITION,
    HEADER_BYTES,
    LARGEST_INT32,
    LENGTH_BYTES,
    LENGTH_POSITION,
    REASONS,
    Code,
)
from cleaner.job import SourceSegment
from storage.env import Env, File
from storage.errors import DamagedSegmentError
from storage.format import filenames

# An index stores offsets relative to its segment's base, in 31 bits.
OFFSETS_MAX: Final = LARGEST_INT32 + 1
BUFFER_BYTES_MIN: Final = 1024  # a header, and room to verify an oversize batch through


def offsets_end(source: SourceSegment) -> int:
    """Return the end of the segment's possible offsets.

    Old Kafka versions wrote segments whose offsets exceed an index; such a batch counts as damage,
    as when a folder is taken over.
    """
    return min(source.next_base_offset, source.base_offset + OFFSETS_MAX)


def _log_name(base_offset: int) -> str:
    return filenames.file_name(base_offset, filenames.LOG)


class SourceReader:
    """Reads a segment piece by piece: `buffer[at:end]` is the unprocessed part."""

    def __init__(
        self,
        env: Env,
        directory: str,
        buffer_bytes: int,
        *,
        name_of: Callable[[int], str] = _log_name,
    ) -> None:
        """`name_of` returns the name of the file of a segment, by its base offset."""
        self._env = env
        self._directory = directory
        self._name_of = name_of
        self._base_bytes = max(buffer_bytes, BUFFER_BYTES_MIN)
        self.buffer: Bytes = _buffer(self._base_bytes)
        self.at = 0
        self.end = 0
        self.path = ""
        self.bytes_read = 0
        self._file: File | None = None
        self._next_position = 0  # in the file, of the byte at buffer[end]
        self._range_end = 0  # in the file, of the present range
        self._ranges: deque[tuple[int, int]] = deque()  # those after it

    def open(
        self,
        source: SourceSegment,
        position: int = 0,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Open a segment at a batch. Raises DamagedSegmentError, OSError.

        `ranges` are ascending (begin, end) in bytes of the file, of whole batches; None: from
        `position` to the end of the segment.
        A missing file counts as empty: only retention removes segments during a clean, from the
        front, and the rest does not depend on them.
        """
        self.close()
        self.path = f"{self._directory}/{self._name_of(source.base_offset)}"
        self._next_position = self._range_end = 0
        self._ranges.clear()
        self.at = self.end = 0
        try:
            self._file = self._env.open(self.path)
        except FileNotFoundError:
            return
        if len(self.buffer) > self._base_bytes + SLACK_BYTES:
            self.buffer = _buffer(self._base_bytes)
        if self._file.size() < source.size_bytes:
            raise self.damaged(f"the file is shorter than {source.size_bytes} bytes")
        assert 0 <= position <= source.size_bytes
        self._ranges.extend([(position, source.size_bytes)] if ranges is None else ranges)
        self._next_range()

    def _next_range(self) -> None:
        if self._ranges:
            self._next_position, self._range_end = self._ranges.popleft()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def is_gone(self) -> bool:
        """Return whether the segment's file is missing."""
        return self._file is None

    @property
    def position(self) -> int:
        """Return the position of `buffer[at]` in the file."""
        return self._next_position - (self.end - self.at)

    @property
    def exhausted(self) -> bool:
        """Return whether the whole segment, or each of its ranges, was processed."""
        return self.position == self._range_end and not self._ranges

    def refill(self, charge: Callable[[int], None]) -> None:
        """Read more of the segment, which is not exhausted.

        Raises DamagedSegmentError if the last batch is incomplete, OSError.
        """
        kept = self.end - self.at
        if kept == 0 and self._next_position == self._range_end:
            self._next_range()
        if self.at > 0:
            self.buffer[:kept] = self.buffer[self.at : self.end].copy()
            self.at, self.end = 0, kept
        if kept >= HEADER_BYTES:
            size = int(load_be32(self.buffer, LENGTH_POSITION)) + LENGTH_BYTES
            if size > len(self.buffer) - SLACK_BYTES:
                self._make_room(size, charge)
        wanted = min(len(self.buffer) - SLACK_BYTES - kept, self._range_end - self._next_position)
        if wanted == 0:
            raise self.damaged("the last batch is cut short")
        self._read(kept, wanted, charge)
        self.end = kept + wanted

    def _read(self, at: int, count: int, charge: Callable[[int], None]) -> None:
        assert self._file is not None
        charge(count)
        actual = self._file.pread_into(self.buffer.data[at : at + count], self._next_position)
        if actual != count:
            raise self.damaged("the file ends before its size")
        self._next_position += count
        self.bytes_read += count

    def _make_room(self, size: int, charge: Callable[[int], None]) -> None:
        """Grow the buffer to `size` for the batch at its front, if that batch is sound."""
        begin = self.position
        if begin + size > self._range_end:
            raise self.damaged("the batch is longer than the file")
        expected = int(load_be32(self.buffer, CRC_POSITION))
        head = self.buffer[: self.end].copy()
        crc = int(crc32c_extended(0, self.buffer, ATTRIBUTES_POSITION, self.end))
        remaining = size - self.end
        while remaining > 0:
            count = min(remaining, len(self.buffer) - SLACK_BYTES)
            self._read(0, count, charge)
            crc = int(crc32c_extended(crc, self.buffer, 0, count))
            remaining -= count
        self._next_position = begin + len(head)
        self.buffer[: len(head)] = head
        if crc != expected:
            raise self.damaged(REASONS[Code.BAD_CRC])
        larger = _buffer(size)
        larger[: len(head)] = head
        self.buffer = larger

    def damaged(self, reason: str) -> DamagedSegmentError:
        """Return the error for damage at the present position."""
        return DamagedSegmentError(self.path, self.position, reason)

    def stopped(self, code: int) -> DamagedSegmentError:
        """Return the error for a kernel's code at the present position."""
        return self.damaged(REASONS[Code(code)])


def _buffer(size_bytes: int) -> Bytes:
    return np.empty(size_bytes + SLACK_BYTES, dtype=np.uint8)
