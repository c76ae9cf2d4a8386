"""The transaction index of one segment: its entries in memory, and its file.

Rules
- Without entries there is no file.
- An entry that could not be written stays in memory and is written with the next one, or when the
  segment is sealed. After a kill, recovery finds its marker in the log.
- The format has no checksum: `check` compares the entries with the log.
- The entries of a closed segment may be dropped from memory; their checksum stays. What is read
  again are the same entries, or else the file is invalid and the index has to be rebuilt.
"""

from collections.abc import Callable, Sequence
from zlib import crc32

from storage.env import Env, File
from storage.errors import DamagedSegmentError
from storage.format import filenames
from storage.format.index import CorruptIndexError
from storage.format.txn_index import (
    ENTRY_BYTES,
    TxnIndexEntries,
    TxnIndexEntry,
    decode_entries,
    encode_entries,
)
from storage.segments.batch_scan import ScannedBatch


class SegmentTxnIndex:
    """The aborted transactions whose markers are in the segment, in the order of the markers."""

    __slots__ = (
        "_checksum",
        "_entries",
        "_env",
        "_file",
        "_is_rebuilt",
        "_unwritten",
        "base_offset",
        "directory",
    )

    def __init__(self, env: Env, directory: str, base_offset: int) -> None:
        self._env = env
        self.directory = directory
        self.base_offset = base_offset
        self._entries: TxnIndexEntries | None = TxnIndexEntries()  # None: dropped from memory
        self._checksum = 0  # of the entries, also while they are dropped
        self._is_rebuilt = False  # the entries are not those of the file; only of a clone
        self._file: File | None = None
        self._unwritten = 0  # entries at the end that are not in the file

    @property
    def path(self) -> str:
        """Return the path of the file, which may not exist."""
        return self._path(filenames.TXN_INDEX)

    def _path(self, kind: str) -> str:
        return f"{self.directory}/{filenames.file_name(self.base_offset, kind)}"

    @property
    def is_loaded(self) -> bool:
        """Return whether the entries are in memory."""
        return self._entries is not None

    @property
    def entries(self) -> TxnIndexEntries:
        """Return the loaded entries."""
        assert self._entries is not None
        return self._entries

    @property
    def has_entries(self) -> bool:
        """Return whether there are entries, in memory or not."""
        return self._entries is None or len(self._entries) > 0

    @property
    def exists(self) -> bool:
        """Return whether there is a file."""
        return self._env.exists(self.path)

    def read(self) -> TxnIndexEntries:
        """Return the entries of the file; none if it is absent or invalid. Raises OSError."""
        try:
            return decode_entries(self._env.read_file(self.path), self.path)
        except (FileNotFoundError, CorruptIndexError):
            return TxnIndexEntries()

    def loaded_or_read(self) -> TxnIndexEntries:
        """Like `read`, without reading the file if the entries are in memory."""
        entries = self._entries  # the event loop may drop them meanwhile
        return self.read() if entries is None else entries

    def load(self) -> None:
        """Read the file. Raises CorruptIndexError, OSError."""
        raw = self._env.read_file(self.path)
        self._entries, self._checksum = decode_entries(raw, self.path), crc32(raw)
        if not self._entries:
            raise CorruptIndexError(self.path, "empty")  # without entries there is no file

    # Dropping the entries

    def drop(self) -> None:
        """Drop the entries from memory if the file has them. See `load_dropped`."""
        if self._entries and not self._unwritten:
            self._entries = None

    def load_dropped(self) -> None:
        """Read the entries that were dropped.

        Raises CorruptIndexError if the file is not the same any more; OSError, also if the segment
        was removed or has another folder now.
        """
        try:
            raw = self._env.read_file(self.path)
        except FileNotFoundError as error:
            if not self._env.exists(self._path(filenames.LOG)):
                raise
            raise CorruptIndexError(self.path, "missing") from error
        if crc32(raw) != self._checksum:
            raise CorruptIndexError(self.path, "its entries are not those that were dropped")
        self._entries = TxnIndexEntries.of_bytes(raw)

    def set_rebuilt(self, entries: Sequence[TxnIndexEntry]) -> None:
        """Use other entries for a clone, without a change of the file."""
        self._entries, self._is_rebuilt = TxnIndexEntries(entries), True

    def take(self, clone: "SegmentTxnIndex") -> bool:
        """Use the entries that a thread has read for a clone; return whether the file was changed.

        If the thread has rebuilt them, they are written. Raises OSError.
        """
        is_outdated = clone._entries is None or clone._checksum != self._checksum
        if self._entries is not None or is_outdated:
            return False
        if clone._is_rebuilt:
            self.replace(clone.entries)
        else:
            self._entries = clone.entries
        return clone._is_rebuilt

    def check(self, batch_at: Callable[[int], ScannedBatch | None]) -> None:
        """Compare the entries with the log: an entry ends at a marker of its producer.

        `batch_at` returns the batch with an offset, or the next one. An entry whose marker may be
        in damage counts as valid. Raises CorruptIndexError, CorruptBatchError.
        """
        for entry in self.entries:
            try:
                batch = batch_at(entry.last_offset)
            except DamagedSegmentError:
                continue
            header = batch.header if batch is not None else None
            if (
                header is None
                or not header.is_control
                or header.producer_id != entry.producer_id
                or header.base_offset > entry.last_offset
            ):
                raise CorruptIndexError(self.path, f"no marker for {entry}")

    def append(self, entry: TxnIndexEntry) -> None:
        """Add an aborted transaction whose marker was just appended.

        After an OSError the entry is in memory; call `write_missing` later.
        """
        self.entries.append(entry)
        self._checksum = crc32(encode_entries((entry,)), self._checksum)
        self._unwritten += 1
        self.write_missing()

    def write_missing(self) -> None:
        """Write the entries that an earlier call failed to write. Raises OSError."""
        if not self._unwritten:
            return
        if self._file is None:
            self._file = self._env.open(self.path, create=True)
        missing = self.entries[-self._unwritten :]
        written = len(self.entries) - len(missing)
        self._file.pwrite(missing.to_bytes(), written * ENTRY_BYTES)
        self._unwritten = 0

    def replace(self, entries: Sequence[TxnIndexEntry]) -> None:
        """Replace all entries and the content of the file. Raises OSError."""
        raw = encode_entries(entries)
        if not raw:
            self._file = None
            if self.exists:
                self._env.unlink(self.path)
        else:
            self._file = self._env.open(self.path, create=True, truncate=True)
            self._file.pwrite(raw, 0)
        self._entries, self._checksum = TxnIndexEntries.of_bytes(raw), crc32(raw)
        self._unwritten = 0

    @property
    def open_file(self) -> File | None:
        """Return the file if it may have unsynced entries."""
        return self._file

    def close_file(self) -> None:
        """Close the file once it is complete and synced."""
        self._file = None
