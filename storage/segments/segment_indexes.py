"""The index files of one segment, loaded on demand and appended to while the segment is active.

The files have the base offset of the segment in their names and belong to it until it is pinned;
then only the entries in memory are used. Indexes may be wrong: the caller compares entries with the
log and rebuilds wrong indexes.
"""

from heapq import nlargest
from itertools import pairwise
from typing import Final

from storage.env import Env, File
from storage.errors import CorruptBatchError, NoRoomError, is_scarcity
from storage.format import filenames
from storage.format.batch import HEADER_BYTES, BatchHeader, read_header
from storage.format.index import (
    INTERVAL_BYTES_MAX,
    OFFSET_ENTRY_BYTES,
    TIME_ENTRY_BYTES,
    CorruptIndexError,
    IndexLimits,
    OffsetIndex,
    TimeIndex,
    unpack_offset_entry,
)
from storage.segments.batch_scan import scan

# Entries read from the end of a file without loading all of it; two reveal the zeros of a
# preallocated file.
TAIL_ENTRIES: Final = 2
GAPS_CHECKED: Final = 8  # each 470 headers at most


class SegmentIndexes:
    """Offset index and time index of a segment, in memory and on disk."""

    __slots__ = (
        "_env",
        "_index_file",
        "_is_written",
        "_offsets",
        "_time_file",
        "_times",
        "base_offset",
        "content",
        "index_path",
        "is_full",
        "is_pinned",
        "limits",
        "time_path",
    )

    def __init__(self, env: Env, directory: str, base_offset: int, limits: IndexLimits) -> None:
        self._env = env
        self.base_offset = base_offset
        self.relocate(directory)
        self.limits = limits
        self.is_full = False
        self.is_pinned = False
        self._offsets: OffsetIndex | None = None
        self._times: TimeIndex | None = None
        self.content: tuple[bytes, bytes] | None = None  # of both files, if `encode` made it
        self._index_file: File | None = None
        self._time_file: File | None = None
        self._is_written = True  # the files have the entries; otherwise they are empty

    def relocate(self, directory: str) -> None:
        """Use the new name of the folder."""
        name = filenames.file_name
        self.index_path = f"{directory}/{name(self.base_offset, filenames.INDEX)}"
        self.time_path = f"{directory}/{name(self.base_offset, filenames.TIME_INDEX)}"

    @property
    def is_loaded(self) -> bool:
        """Return whether they are in memory."""
        return self._offsets is not None

    @property
    def offsets(self) -> OffsetIndex:
        """Return the loaded offset index."""
        assert self._offsets is not None
        return self._offsets

    @property
    def times(self) -> TimeIndex:
        """Return the loaded time index."""
        assert self._times is not None
        return self._times

    def load(self, log_bytes: int) -> None:
        """Load both files. Raises CorruptIndexError, also for a missing file."""
        assert not self.is_pinned
        try:
            raw_offsets = self._env.read_file(self.index_path)
            raw_times = self._env.read_file(self.time_path)
        except FileNotFoundError as error:
            raise CorruptIndexError(str(error.filename), "missing") from error
        offsets = OffsetIndex.from_bytes(raw_offsets, self.index_path, log_bytes)
        self._times = TimeIndex.from_bytes(raw_times, self.time_path)
        self._offsets = offsets
        self._is_written = True

    def drop(self) -> None:
        """Drop the indexes from memory."""
        assert not self.is_pinned
        self._offsets = None
        self._times = None

    def start(self) -> None:
        """Start with empty indexes; `write` replaces the content of the files."""
        self._offsets, self._times = OffsetIndex(), TimeIndex()
        self.is_full = False

    def encode(self) -> None:
        """Make the content of both files, for the next `write`; this takes 20 ms for 1 GiB."""
        self.content = self.offsets.to_bytes(), self.times.to_bytes()

    def take(self, other: "SegmentIndexes") -> None:
        """Use the entries that another instance loaded."""
        self._offsets, self._times, self.content = other._offsets, other._times, other.content

    def is_sparse(self, log: File, log_bytes: int) -> bool:
        """Return whether one of the largest gaps between entries should have an entry."""
        borders = [0, *self.offsets.positions, log_bytes]
        wide = [gap for gap in pairwise(borders) if gap[1] - gap[0] > 2 * INTERVAL_BYTES_MAX]
        largest = nlargest(GAPS_CHECKED, wide, key=lambda gap: gap[1] - gap[0])
        return any(_lacks_entry(log, *gap) for gap in largest)

    def last_entries(self, log_bytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the last (relative offset, position) and (timestamp ms, relative offset).

        This reads the ends of the files only. Raises CorruptIndexError.
        """
        if self._offsets is not None and self._times is not None:
            return self._offsets.last, self._times.last
        tail = self._tail_of(self.index_path, OFFSET_ENTRY_BYTES)
        offsets = OffsetIndex.from_bytes(tail, self.index_path, log_bytes)
        tail = self._tail_of(self.time_path, TIME_ENTRY_BYTES)
        return offsets.last, TimeIndex.from_bytes(tail, self.time_path).last

    def find_position(self, relative: int) -> int:
        """Return the position of the last entry up to a relative offset, 0 if there is none.

        This reads some entries of the file only, and checks none of them. Raises OSError.
        """
        if self._offsets is not None:
            return self._offsets.lookup(relative)[1]
        file = self._env.open(self.index_path)
        position, low, high = 0, 0, file.size() // OFFSET_ENTRY_BYTES
        while low < high:
            middle = (low + high) // 2
            entry = file.pread(OFFSET_ENTRY_BYTES, middle * OFFSET_ENTRY_BYTES)
            entry_offset, entry_position = unpack_offset_entry(entry)
            if entry_offset <= relative:
                position, low = entry_position, middle + 1
            else:
                high = middle
        file.close()
        return position

    def _tail_of(self, path: str, entry_bytes: int) -> bytes:
        try:
            file = self._env.open(path)
        except FileNotFoundError:
            raise CorruptIndexError(path, "missing") from None
        size_bytes = file.size()
        if size_bytes % entry_bytes:
            raise CorruptIndexError(path, f"{size_bytes} bytes are not a whole number of entries")
        start = max(0, size_bytes - TAIL_ENTRIES * entry_bytes)
        tail = file.pread(size_bytes - start, start)
        file.close()
        return tail

    def check_entry(self, header: BatchHeader, relative: int) -> None:
        """Check that the batch at the position of an entry can have the entry's last offset.

        Raises CorruptIndexError.
        """
        if not self.base_offset <= header.base_offset <= self.base_offset + relative:
            reason = f"entry {relative} points to offset {header.base_offset}"
            raise CorruptIndexError(self.index_path, reason)

    def offset_behind(self, position: int, log: File) -> int | None:
        """Return an offset above all batches in front of `position`; None if there is none.

        It is that of the next index entry, if the log has a batch there.
        """
        entry = self.offsets.next_entry(position)
        if entry is None:
            return None
        relative, indexed = entry
        try:
            self.check_entry(read_header(log.pread(HEADER_BYTES, indexed)), relative)
        except (CorruptBatchError, CorruptIndexError):
            return None  # a later read rebuilds the index
        return self.base_offset + relative

    def sizes(self) -> tuple[int, int]:
        """Return the sizes of the two files in bytes; 0 for a missing file."""
        if self._offsets is not None and self._times is not None:
            return self._offsets.size_bytes, self._times.size_bytes
        return self._size_of(self.index_path), self._size_of(self.time_path)

    def _size_of(self, path: str) -> int:
        try:
            return self._env.size(path)
        except FileNotFoundError:
            return 0

    # Writing

    def files(self) -> tuple[File, File]:
        """Return both files, open for writing."""
        assert not self.is_pinned
        if self._index_file is None:
            self._index_file = self._env.open(self.index_path, create=True)
        if self._time_file is None:
            self._time_file = self._env.open(self.time_path, create=True)
        return self._index_file, self._time_file

    @property
    def open_files(self) -> tuple[File, ...]:
        """Return the open files, which have unsynced entries."""
        return tuple(file for file in (self._index_file, self._time_file) if file is not None)

    def close_files(self) -> None:
        """Close the files once they are complete and synced."""
        self._index_file = self._time_file = None

    def trim(self) -> None:
        """Truncate the files to the entries in memory."""
        if self._is_written:
            index_file, time_file = self.files()
            sizes = self.offsets.size_bytes, self.times.size_bytes
            for file, size_bytes in zip((index_file, time_file), sizes, strict=True):
                if file.size() != size_bytes:  # truncating it all the same would change its stamp
                    file.truncate(size_bytes)
        self._see_if_full()

    def write(self) -> None:
        """Replace the content of the files with the entries in memory.

        Without room the files are empty: a later start rebuilds them, and the next append writes
        them first. Raises NoRoomError, OSError.
        """
        self._see_if_full()
        self._is_written = False
        index_file, time_file = files = self.files()
        offsets, times = self.content or (self.offsets.to_bytes(), self.times.to_bytes())
        self.content = None
        try:
            for file, data in ((index_file, offsets), (time_file, times)):
                file.truncate(0)
                file.pwrite(data, 0)
        except OSError as error:
            if not is_scarcity(error):
                raise
            for file in files:
                file.truncate(0)
            raise NoRoomError(error, self.index_path) from error
        self._is_written = True

    def _write_missing(self) -> None:
        if not self._is_written:
            self.write()

    def append(
        self, last_offset: int, position: int, max_timestamp_ms: int, max_timestamp_offset: int
    ) -> None:
        """Add and write the entries that the batch at `position` needs."""
        self._write_missing()
        index_file, _ = self.files()
        end = self.offsets.size_bytes
        index_file.pwrite(self.offsets.append(last_offset - self.base_offset, position), end)
        self.append_time(max_timestamp_ms, max_timestamp_offset)
        self._see_if_full()

    def append_time(self, max_timestamp_ms: int, max_timestamp_offset: int) -> None:
        """Add and write a time entry, if its timestamp is a new maximum."""
        self._write_missing()
        _, time_file = self.files()
        end = self.times.size_bytes
        entry = self.times.maybe_append(max_timestamp_ms, max_timestamp_offset - self.base_offset)
        if entry:
            time_file.pwrite(entry, end)

    def cut(self, position: int) -> None:
        """Remove the entries of batches that begin at `position` or after it."""
        self.offsets.truncate(position)
        # A time entry after the last offset entry was written by `seal`.
        relative, _ = self.offsets.last
        self.times.truncate(relative + 1)
        self.trim()

    def set_limits(self, limits: IndexLimits) -> None:
        """Apply new topic configs."""
        self.limits = limits
        if self._offsets is not None:
            self._see_if_full()

    def _see_if_full(self) -> None:
        # One slot of the time index stays free for the entry that seals the segment.
        max_bytes = self.limits.max_bytes
        self.is_full = (
            len(self.offsets) >= max_bytes // OFFSET_ENTRY_BYTES
            or len(self.times) >= max_bytes // TIME_ENTRY_BYTES - 1
        )


def _lacks_entry(log: File, start: int, end: int) -> bool:
    """Return whether a batch after the largest interval begins before `end`."""
    try:
        for batch in scan(log, start, end, whole=False):
            if batch.position - start > INTERVAL_BYTES_MAX:
                return True
    except CorruptBatchError:
        pass  # damage; a search finds it
    return False
