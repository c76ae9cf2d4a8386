"""Offset index and time index of one segment, in memory, to and from Kafka's files; pure.

An offset index maps the last offset of a batch to the position where the batch starts (8 bytes an
entry). A time index maps the largest timestamp so far to the last offset of its batch (12 bytes an
entry). Both are sparse and strictly increasing. Offsets in the files are relative to the base
offset of the segment. A file is checked as a whole before use; an invalid index is rebuilt from the
log.
"""

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import lt
from struct import Struct
from typing import Final, NamedTuple

from storage.errors import StorageError

OFFSET_ENTRY_BYTES: Final = 8
TIME_ENTRY_BYTES: Final = 12
RELATIVE_OFFSET_MAX: Final = (1 << 31) - 1
# A search for an offset reads the headers of one interval on the event loop: 470 of the smallest
# batches, 2 ms.
INTERVAL_BYTES_MAX: Final = 32 << 10

_OFFSET_ENTRY = Struct(">ii")
_TIME_ENTRY = Struct(">qi")


class CorruptIndexError(StorageError):
    """The content of an index file is invalid. The caller rebuilds the index."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class IndexLimits(NamedTuple):
    """The topic configs of indexes: bytes between two entries, bytes of a full index."""

    interval_bytes: int
    max_bytes: int


def unpack_offset_entry(entry: bytes) -> tuple[int, int]:
    """Return relative offset and position of an entry of an offset index file."""
    relative, position = _OFFSET_ENTRY.unpack(entry)
    return relative, position


def is_increasing(values: "array[int]") -> bool:
    """Return whether each value is larger than the one before it."""
    return all(map(lt, values, values[1:]))


class OffsetIndex:
    """Relative offsets and file positions, both strictly increasing."""

    __slots__ = ("offsets", "positions")

    def __init__(self) -> None:
        self.offsets: array[int] = array("i")
        self.positions: array[int] = array("i")

    @classmethod
    def from_bytes(cls, raw: bytes, path: str, log_bytes: int) -> "OffsetIndex":
        """Read a whole `.index` file belonging to a log of `log_bytes`.

        Raises CorruptIndexError for a torn entry, entries that do not increase (such as the zeros
        of a preallocated file), or a position outside the log.
        """
        if len(raw) % OFFSET_ENTRY_BYTES:
            raise CorruptIndexError(path, f"{len(raw)} bytes are not a whole number of entries")
        words = array("i")
        words.frombytes(raw)
        if sys.byteorder == "little":
            words.byteswap()
        index = cls()
        index.offsets = words[0::2]
        index.positions = words[1::2]
        if not words:
            return index
        if index.offsets[0] < 0 or index.positions[0] < 0:
            raise CorruptIndexError(path, "negative entry")
        if not is_increasing(index.offsets) or not is_increasing(index.positions):
            raise CorruptIndexError(path, "entries do not increase")
        if index.positions[-1] >= log_bytes:
            raise CorruptIndexError(path, f"position {index.positions[-1]} of {log_bytes}")
        return index

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def size_bytes(self) -> int:
        """Return the size of the file that holds these entries."""
        return len(self.offsets) * OFFSET_ENTRY_BYTES

    @property
    def last(self) -> tuple[int, int]:
        """Return (relative offset, position) of the last entry, or (-1, 0)."""
        return (self.offsets[-1], self.positions[-1]) if self.offsets else (-1, 0)

    def append(self, relative_offset: int, position: int) -> bytes:
        """Add an entry and return its bytes for the end of the file.

        Raises CorruptIndexError if the last entry, which may come from a file, is not below it.
        """
        if self.offsets and (relative_offset <= self.offsets[-1] or position <= self.positions[-1]):
            raise CorruptIndexError("", f"{self.last} before ({relative_offset}, {position})")
        entry = _OFFSET_ENTRY.pack(relative_offset, position)
        self.offsets.append(relative_offset)
        self.positions.append(position)
        return entry

    def lookup(self, relative_offset: int) -> tuple[int, int]:
        """Return (relative offset, position) of the last entry up to the offset, or (-1, 0)."""
        at = bisect_right(self.offsets, relative_offset) - 1
        return (self.offsets[at], self.positions[at]) if at >= 0 else (-1, 0)

    def next_entry(self, position: int) -> tuple[int, int] | None:
        """Return (relative offset, position) of the first entry at or after `position`."""
        at = bisect_left(self.positions, position)
        return (self.offsets[at], self.positions[at]) if at < len(self.positions) else None

    def last_position_within(self, position: int) -> int:
        """Return the largest indexed batch position at or below `position`, else 0."""
        at = bisect_right(self.positions, position) - 1
        return self.positions[at] if at >= 0 else 0

    def positions_after(self, position: int, count: int) -> Sequence[int]:
        """Return the next indexed positions after `position`, at most `count`."""
        at = bisect_right(self.positions, position)
        return self.positions[at : at + count]

    def truncate(self, position: int) -> None:
        """Remove the entries of batches that start at `position` or after it."""
        keep = bisect_left(self.positions, position)
        del self.offsets[keep:]
        del self.positions[keep:]

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        words = array("i", bytes(self.size_bytes))
        words[0::2] = self.offsets
        words[1::2] = self.positions
        if sys.byteorder == "little":
            words.byteswap()
        return words.tobytes()


class TimeIndex:
    """Timestamps (ms) and the relative offsets that carry them, both increasing."""

    __slots__ = ("offsets", "timestamps")

    def __init__(self) -> None:
        self.timestamps: array[int] = array("q")
        self.offsets: array[int] = array("i")

    @classmethod
    def from_bytes(cls, raw: bytes, path: str) -> "TimeIndex":
        """Read a whole `.timeindex` file; raises CorruptIndexError as OffsetIndex does."""
        if len(raw) % TIME_ENTRY_BYTES:
            raise CorruptIndexError(path, f"{len(raw)} bytes are not a whole number of entries")
        index = cls()
        if not raw:
            return index
        timestamps, offsets = zip(*_TIME_ENTRY.iter_unpack(raw), strict=True)
        index.timestamps = array("q", timestamps)
        index.offsets = array("i", offsets)
        if offsets[0] < 0 or timestamps[0] < 0:
            raise CorruptIndexError(path, "negative entry")
        if not is_increasing(index.timestamps) or not is_increasing(index.offsets):
            raise CorruptIndexError(path, "entries do not increase")
        return index

    def __len__(self) -> int:
        return len(self.timestamps)

    @property
    def size_bytes(self) -> int:
        """Return the size of the file that holds these entries."""
        return len(self.timestamps) * TIME_ENTRY_BYTES

    @property
    def last(self) -> tuple[int, int]:
        """Return (timestamp ms, relative offset) of the last entry, or (-1, 0)."""
        return (self.timestamps[-1], self.offsets[-1]) if self.timestamps else (-1, 0)

    def maybe_append(self, timestamp_ms: int, relative_offset: int) -> bytes:
        """Add an entry if its timestamp is a new maximum; return its bytes, b"" if not added.

        Raises CorruptIndexError if the last entry, which may come from a file, is not below it.
        """
        if timestamp_ms <= self.last[0]:
            return b""
        if self.offsets and relative_offset <= self.offsets[-1]:
            raise CorruptIndexError("", f"{self.last} before ({timestamp_ms}, {relative_offset})")
        self.timestamps.append(timestamp_ms)
        self.offsets.append(relative_offset)
        return _TIME_ENTRY.pack(timestamp_ms, relative_offset)

    def last_before(self, timestamp_ms: int) -> tuple[int, int]:
        """Return (timestamp ms, relative offset) of the last entry below a time, or (-1, -1).

        All timestamps up to this offset are below `timestamp_ms`.
        """
        at = bisect_left(self.timestamps, timestamp_ms) - 1
        return (self.timestamps[at], self.offsets[at]) if at >= 0 else (-1, -1)

    def truncate(self, relative_offset: int) -> None:
        """Remove the entries at `relative_offset` and above it."""
        keep = bisect_left(self.offsets, relative_offset)
        del self.timestamps[keep:]
        del self.offsets[keep:]

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return b"".join(map(_TIME_ENTRY.pack, self.timestamps, self.offsets))
