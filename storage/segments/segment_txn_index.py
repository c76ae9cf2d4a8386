"""The transaction index of one segment: its entries in memory, and its file.

Rules
- Without entries there is no file.
- An entry that could not be written stays in memory and is written with the next one, or when the
  segment is sealed. After a kill, recovery finds its marker in the log.
- The format has no checksum: `check` compares the entries with the log.
"""

from collections.abc import Callable, Sequence

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

    __slots__ = ("_env", "_file", "_unwritten", "base_offset", "directory", "entries")

    def __init__(self, env: Env, directory: str, base_offset: int) -> None:
        self._env = env
        self.directory = directory
        self.base_offset = base_offset
        self.entries = TxnIndexEntries()
        self._file: File | None = None
        self._unwritten = 0  # entries at the end that are not in the file

    @property
    def path(self) -> str:
        """Return the path of the file, which may not exist."""
        name = filenames.file_name(self.base_offset, filenames.TXN_INDEX)
        return f"{self.directory}/{name}"

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

    def load(self) -> None:
        """Read the file. Raises CorruptIndexError, OSError."""
        self.entries = decode_entries(self._env.read_file(self.path), self.path)
        if not self.entries:
            raise CorruptIndexError(self.path, "empty")  # without entries there is no file

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
        self._file.pwrite(encode_entries(missing), written * ENTRY_BYTES)
        self._unwritten = 0

    def replace(self, entries: Sequence[TxnIndexEntry]) -> None:
        """Replace all entries and the content of the file. Raises OSError."""
        if not entries:
            self._file = None
            if self.exists:
                self._env.unlink(self.path)
        else:
            self._file = self._env.open(self.path, create=True, truncate=True)
            self._file.pwrite(encode_entries(entries), 0)
        self.entries = TxnIndexEntries(entries)
        self._unwritten = 0

    @property
    def open_file(self) -> File | None:
        """Return the file if it may have unsynced entries."""
        return self._file

    def close_file(self) -> None:
        """Close the file once it is complete and synced."""
        self._file = None
