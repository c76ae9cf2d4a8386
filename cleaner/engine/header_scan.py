"""Find out from batch headers alone whether a segment can lose an expired tombstone or marker.

A batch whose tombstones or marker wait for removal has the delete horizon flag, and the horizon is
its base timestamp (KIP-534). So a segment in which no horizon has passed need not be read: this is
the common case after a data directory was taken over or the cleaner's state was lost, when the
horizons of all clean segments are unknown.

Rules
- A scan never decides that something is removed. Where a horizon has passed, or the headers do not
  form a whole chain, the segment is read and rewritten as before.
- Records and checksums are not read: the next clean that reads the batch finds damage in them.
- A horizon found here is a lower bound: its batch may have lost its tombstones since. Then the
  segment is read once in vain.
- Every byte is charged before it is read.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cleaner.engine.kernels.layout import (
    ATTR_DELETE_HORIZON,
    HEADER_BYTES,
    LENGTH_BYTES,
)
from cleaner.engine.source import offsets_end
from cleaner.job import NO_HORIZON, SourceSegment
from storage.env import Env, File
from storage.format import filenames
from storage.format.batch import MAGIC

# A read of one page after a jump; twice as much as long as batches follow each other closely.
_READ_BYTES_MIN: Final = 4096
_READ_BYTES_MAX: Final = 1 << 20
# Base offset, length, leader epoch, magic, CRC, attributes, last offset delta, base timestamp,
# largest timestamp, producer id, epoch and sequence, record count.
_HEADER: Final = struct.Struct(">qi4xb4xhiq8x8x2x4xi")


@dataclass(frozen=True, slots=True)
class SegmentScan:
    """What the headers of a whole segment say."""

    horizon_ms: int  # the earliest delete horizon; NO_HORIZON if no batch has one
    records: int


class HeaderScanner:
    """Reads the headers of the closed segments of one job."""

    def __init__(self, env: Env, directory: str, charge: Callable[[int], None]) -> None:
        """`charge` waits for the budget to read a number of bytes."""
        self._env = env
        self._directory = directory
        self._charge = charge
        self.bytes_read = 0

    def scan(self, source: SourceSegment, now_ms: int) -> SegmentScan | None:
        """Return what the headers say, or None if the segment has to be read.

        It has to be read if a horizon has passed at `now_ms`, if its file is missing, and if the
        headers cannot be right. Raises OSError, and what `charge` raises.
        """
        path = f"{self._directory}/{filenames.file_name(source.base_offset, filenames.LOG)}"
        try:
            file = self._env.open(path)
        except FileNotFoundError:
            return None
        try:
            if file.size() < source.size_bytes:
                return None
            return self._scan(file, source, now_ms)
        finally:
            file.close()

    def _scan(self, file: File, source: SourceSegment, now_ms: int) -> SegmentScan | None:
        size, offset_end = source.size_bytes, offsets_end(source)
        position = records = 0
        next_offset = source.base_offset
        horizon_ms = NO_HORIZON
        block, begin = b"", 0  # `block` holds the file from `begin` on
        want = _READ_BYTES_MIN
        while position < size:
            if position + HEADER_BYTES > size:
                return None
            if position + HEADER_BYTES > begin + len(block):
                follows = len(block) > 0 and position <= begin + len(block)
                want = min(want * 2, _READ_BYTES_MAX) if follows else _READ_BYTES_MIN
                block, begin = self._read(file, position, min(want, size - position)), position
                if len(block) < HEADER_BYTES:
                    return None
            base, length, magic, attributes, delta, base_ms, count = _HEADER.unpack_from(
                block, position - begin
            )
            if magic != MAGIC or length < HEADER_BYTES - LENGTH_BYTES:
                return None
            if not (next_offset <= base <= base + delta < offset_end and 0 <= count <= delta + 1):
                return None
            if attributes & ATTR_DELETE_HORIZON:
                batch_ms = max(base_ms, 0)
                if batch_ms <= now_ms:
                    return None
                horizon_ms = batch_ms if horizon_ms < 0 else min(horizon_ms, batch_ms)
            records += count
            next_offset = base + delta + 1
            position += LENGTH_BYTES + length
        return SegmentScan(horizon_ms, records) if position == size else None

    def _read(self, file: File, position: int, count: int) -> bytes:
        self._charge(count)
        self.bytes_read += count
        return file.pread(count, position)
