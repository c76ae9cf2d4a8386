"""One segment: a log file with its indexes.

Rules
- The log file is opened once and stays open, so that renames never change what a reader sees. The
  indexes of a closed segment are loaded on first use and may be dropped again, except while the
  segment is pinned: then its file names may already belong to other files.
- An index that contradicts the log is rebuilt. Unreadable bytes are a damaged range, which is never
  changed or served. It ends at the next whole batch, so that all other batches are served.
- A whole batch is served even if the cleaner cannot use it (`uncleanable`).
- `append` writes everything or raises; then `cut_back` restores the files.
- The first parts of a large batch may be written after the end before its append. They belong to
  no batch until then, and any other change removes them. A crash leaves them as a torn write.
- A segment does not know other segments, high watermarks, configs or readers.

The segment changes its files and its state. Its parts read or hold one thing each: the indexes
(segment_indexes.py), their comparison with the log at a start (sanity_check.py), the transaction
index (segment_txn_index.py), the search for the batch of an offset (batch_lookup.py) and the search
for damage (damage.py). Readers find the position of an offset with offset_lookup.py.
"""

import errno
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from itertools import count
from typing import Final, NamedTuple

from storage.env import Env, File, FileStamp, ReadBuffer, remove_if_there
from storage.errors import (
    CorruptBatchError,
    DamagedSegmentError,
    NoRoomError,
    StorageError,
    is_scarcity,
)
from storage.format import filenames
from storage.format.batch import HEADER_BYTES, BatchHeader, read_header
from storage.format.index import RELATIVE_OFFSET_MAX, CorruptIndexError, IndexLimits
from storage.format.txn_index import TxnIndexEntries, TxnIndexEntry
from storage.model import SegmentFacts
from storage.segments.batch_lookup import BatchLookup, undamaged_batches
from storage.segments.batch_scan import ScannedBatch, scan
from storage.segments.damage import (
    DamagedRanges,
    DamagedSegment,
    DamageSearch,
    why_contradicted,
    with_damage,
)
from storage.segments.sanity_check import SanityCheck
from storage.segments.segment_indexes import SegmentIndexes
from storage.segments.segment_txn_index import SegmentTxnIndex

# No other start has chosen the same: a key index may be older than the process.
_CONTENT_IDS: Final = count(1 + secrets.randbits(62))
NO_TIMESTAMP: Final = -1
PART_BYTES: Final = 1 << 20  # of a large batch that is written in parts: 0.3 to 0.6 ms each
DROPPED_BYTES: Final = 16 << 20  # of parts that are removed at once: 1.6 ms
FILE_POSITION_MAX: Final = (1 << 31) - 1  # the largest position in an offset index entry


class IndexNotReadyError(StorageError):
    """A thread has to load an index, rebuild it, look for damage or read pages first.

    See `index_load.py`.
    """

    def __init__(
        self,
        segment: "Segment",
        repair: "Callable[[Segment], object] | None",
        position: int | None = None,
    ) -> None:
        super().__init__(f"{segment.path}: a thread has to read it first")
        self.segment = segment
        self.repair = repair  # what to do with a clone of the segment; None: load the index
        self.position = position  # of the pages to read, if the index is usable


class _Parts(NamedTuple):
    """The parts of a large batch that are after the end of the segment."""

    records: memoryview
    header: bytes  # of the batch, as it was written
    size_bytes: int = 0

    def begin(self, records: ReadBuffer) -> bool:
        """Return whether this batch begins with these parts."""
        return records is self.records and records[:HEADER_BYTES] == self.header


class Segment:
    """A segment on disk. Offsets are absolute, positions are bytes in the log file.

    Methods raise the OSError of the system; the caller decides what it means for the directory.
    """

    __slots__ = (
        "_bytes_since_entry",
        "_content_id",
        "_env",
        "_facts",
        "_first_timestamp_ms",
        "_indexes",
        "_is_synced",
        "_is_truncated",
        "_parts",
        "_stamp",
        "_was_used",
        "base_offset",
        "damages",
        "directory",
        "file",
        "has_transactions",
        "is_sealed",
        "last_epoch",
        "last_epoch_offset",
        "last_modified_ms",
        "max_timestamp_ms",
        "max_timestamp_offset",
        "position_hints",
        "size_bytes",
        "synced_bytes",
        "txn_index",
        "uncleanable",
    )

    def __init__(
        self,
        env: Env,
        directory: str,
        base_offset: int,
        limits: IndexLimits,
        *,
        create: bool,
        content_id: int | None = None,
    ) -> None:
        """`content_id`: of a segment that a clean wrote (`cleaned_content_id`)."""
        self._env = env
        self._indexes = SegmentIndexes(env, directory, base_offset, limits)
        self.txn_index = SegmentTxnIndex(env, directory, base_offset)
        self.directory = directory
        self.base_offset = base_offset
        self.file: File = env.open(self.path, create=create, write=True, truncate=create)
        self.size_bytes = self.file.size()
        self.synced_bytes = self.size_bytes
        self.last_modified_ms = env.mtime_ms(self.path)
        self.is_sealed = True
        self.has_transactions = False
        self.damages: DamagedRanges = ()
        self.uncleanable: DamagedRanges = ()
        self.max_timestamp_ms = NO_TIMESTAMP
        self.max_timestamp_offset = base_offset
        self.last_epoch = -1  # leader epoch of the last batch that was read while loading
        self.last_epoch_offset = base_offset  # last offset of that batch
        self._first_timestamp_ms: int | None = None
        self._is_truncated = False  # by `cut_back`, since the last `sync_truncation`
        self._facts: SegmentFacts | None = None  # of a closed segment
        self._content_id = next(_CONTENT_IDS) if content_id is None else content_id
        self._stamp: FileStamp | None = self.file.stamp()  # of the closed file
        self._bytes_since_entry = 0
        self.position_hints: dict[int, int] = {}  # offset_lookup.py fills it
        self._is_synced = True
        self._was_used = False
        self._parts: _Parts | None = None
        if create:
            self._indexes.start()
            self.open_for_append()

    @classmethod
    def begin(
        cls,
        env: Env,
        directory: str,
        base_offset: int,
        limits: IndexLimits,
        *,
        is_first: bool = False,
    ) -> "Segment":
        """Return a new, empty segment. Raises NoRoomError (without leaving files), OSError."""
        if not env.has_spare_descriptors(for_new_log=is_first):
            raise NoRoomError(OSError(errno.EMFILE, "too many open files"), directory)
        try:
            return cls(env, directory, base_offset, limits, create=True)
        except OSError as error:
            if not is_scarcity(error):
                raise
            for kind in (filenames.LOG, filenames.INDEX, filenames.TIME_INDEX):
                remove_if_there(env, f"{directory}/{filenames.file_name(base_offset, kind)}")
            raise NoRoomError(error, directory) from error

    @property
    def path(self) -> str:
        """Return the log file's path."""
        return self._path(filenames.LOG)

    def _path(self, kind: str) -> str:
        return f"{self.directory}/{filenames.file_name(self.base_offset, kind)}"

    def relocate(self, directory: str) -> None:
        """Use the new name of the folder; open files stay open."""
        self.directory = directory
        self._indexes.relocate(directory)
        self.txn_index.directory = directory
        self.damages = tuple(damage._replace(path=self.path) for damage in self.damages)
        self.uncleanable = ()  # the next clean finds them again

    # Loading

    def load(self, *, has_txn_index: bool) -> int:
        """Compare the files with each other; return the next offset of the last batch.

        Raises CorruptIndexError for an invalid index, CorruptBatchError if the log file does not
        end with a whole batch.
        """
        assert self.is_sealed
        if has_txn_index:
            self.has_transactions = True
            self.txn_index.load()
        check = SanityCheck(self.file, self.size_bytes, self._indexes)
        self.max_timestamp_ms = check.timestamp_ms
        self.max_timestamp_offset = check.timestamp_offset
        self._bytes_since_entry = check.tail_bytes
        for header in check.tail():
            self._note_batch(header)
        check.check_entries()
        if self.txn_index.entries:
            self.txn_index.check(self.lookup.ascending())
        return check.next_offset

    def load_or_rebuild(self) -> None:
        """Like `load`, for a closed segment; rebuild invalid indexes."""
        try:
            self.load(has_txn_index=self.txn_index.exists)
        except (CorruptIndexError, CorruptBatchError):
            self.rebuild()

    def _note_batch(self, header: BatchHeader) -> None:
        self._note_timestamp(header.max_timestamp, header.next_offset - 1)
        self.last_epoch = header.partition_leader_epoch
        self.last_epoch_offset = header.next_offset - 1
        if header.is_transactional:
            self.has_transactions = True

    def open_for_append(self) -> None:
        """Prepare for appends: load the indexes, open their files and trim them."""
        assert self.txn_index.is_loaded
        self._facts = None
        self._content_id = next(_CONTENT_IDS)
        self._stamp = None
        if not self._indexes.is_loaded:
            self._load_indexes()
            if self.has_sparse_index:
                self.rebuild()
        self._indexes.trim()
        self.is_sealed = False
        self._is_synced = False

    # Indexes

    @property
    def indexes(self) -> SegmentIndexes:
        """Return the indexes; load or rebuild them if necessary."""
        return self.indexes_for(in_place=True)

    @property
    def has_indexes(self) -> bool:
        """Return whether the indexes are in memory."""
        return self._indexes.is_loaded

    @property
    def has_sparse_index(self) -> bool:
        """Return whether the loaded index has fewer entries than its limit demands.

        Another broker wrote it, or an earlier version.
        """
        return self._indexes.is_sparse(self.file, self.size_bytes)

    def indexes_for(self, *, in_place: bool) -> SegmentIndexes:
        """Like `indexes`; without `in_place`, raise IndexNotReadyError instead of loading them."""
        indexes = self._indexes
        if not indexes.is_loaded:
            if not in_place:
                raise IndexNotReadyError(self, None)
            self._load_indexes()
        self._was_used = True
        return indexes

    def clone(self) -> "Segment":
        """Return a copy with the same log file and indexes, for another thread.

        A rebuild gives it indexes of its own, and writes no files.
        """
        clone = copy(self)
        clone.txn_index = copy(self.txn_index)
        clone._indexes = SegmentIndexes(
            self._env, self.directory, self.base_offset, self._indexes.limits
        )
        if self._indexes.is_loaded:
            clone._indexes.take(self._indexes)
        clone.position_hints = {}
        clone._facts = None
        return clone

    def load_index_files(self) -> None:
        """Load the indexes. Raises CorruptIndexError, OSError."""
        self._indexes.load(self.size_bytes)

    def work_in_memory(self, repair: "Callable[[Segment], object]") -> bool:
        """Repair a clone; return whether that rebuilt the indexes."""
        self._indexes.is_pinned = True  # the file names are not its own
        before = self._indexes.offsets if self._indexes.is_loaded else None
        with suppress(DamagedSegmentError, CorruptBatchError, CorruptIndexError):
            repair(self)
        if not self._indexes.is_loaded or self._indexes.offsets is before:
            return False
        self._indexes.encode()
        return True

    def take_indexes(self, clone: "Segment", *, are_rebuilt: bool) -> bool:
        """Use the indexes that a thread loaded or rebuilt; return whether there are indexes now.

        Batches that were appended meanwhile are added.
        """
        is_outdated = self._content_id != clone._content_id or self.is_sealed != clone.is_sealed
        if is_outdated:
            return self._indexes.is_loaded
        known = {damage.position for damage in self.damages}
        for damage in clone.damages:
            if damage.position not in known:
                self.add_damage(damage)
        if are_rebuilt:
            self._take_rebuilt(clone)
        elif not self._indexes.is_loaded:
            self._indexes.take(clone._indexes)
        if self.txn_index.take(clone.txn_index):
            self._facts = None
            self._is_synced = False
        self._was_used = True
        return True

    def _take_rebuilt(self, clone: "Segment") -> None:
        if clone.size_bytes < self.size_bytes:
            clone._indexes.content = None
            for batch in scan(self.file, clone.size_bytes, self.size_bytes, whole=False):
                clone.index_batch(batch.header, batch.position)
        self._facts = None
        self.position_hints.clear()
        self._first_timestamp_ms = None
        self._bytes_since_entry = clone._bytes_since_entry
        self.max_timestamp_ms = clone.max_timestamp_ms
        self.max_timestamp_offset = clone.max_timestamp_offset
        self._indexes.take(clone._indexes)
        self._write_indexes()

    @property
    def is_full(self) -> bool:
        """Return whether an index has no room for more entries."""
        return self._indexes.is_full

    def set_limits(self, limits: IndexLimits) -> None:
        """Apply new topic configs."""
        self._indexes.set_limits(limits)

    def drop_idle_indexes(self) -> None:
        """Drop the indexes of a closed segment from memory if unused since the last call.

        They are loaded again when needed.
        """
        if self._was_used or not self.is_sealed or not self._is_synced or self.is_pinned:
            self._was_used = False
        else:
            self._indexes.drop()
            self.txn_index.drop()

    def use_txn_entries(self) -> TxnIndexEntries:
        """Return the entries of the loaded transaction index, which stays in memory for a while."""
        self._was_used = True
        return self.txn_index.entries

    @property
    def is_pinned(self) -> bool:
        """Return whether its file names may belong to other files."""
        return self._indexes.is_pinned

    def pin(self) -> None:
        """Load everything that is read by name, before other files get these names.

        The transaction index must be loaded already: it may have to be rebuilt from the whole log.
        """
        assert self.txn_index.is_loaded
        self._load_indexes()
        self._indexes.is_pinned = True

    def unpin(self) -> None:
        """Undo `pin`: the files kept their names."""
        self._indexes.is_pinned = False

    def _load_indexes(self) -> None:
        if self._indexes.is_loaded:
            return
        try:
            self._indexes.load(self.size_bytes)
        except CorruptIndexError:
            self.rebuild()

    def rebuild(self) -> int:
        """Rebuild both indexes from the headers of the log file; return the next offset.

        Unreadable bytes become damaged ranges; known ranges stay.
        """
        damages = self.damages
        self.start_rebuild()
        self.damages = damages
        next_offset = self._index_all()
        self.finish_rebuild()
        return next_offset

    def _index_all(self) -> int:
        next_offset = self.base_offset
        for batch in self.readable_batches(0):
            header, position = batch.header, batch.position
            reason = self.why_misplaced(header, position, next_offset) or why_contradicted(
                self.file, header, position, next_offset=next_offset, end=self.size_bytes
            )
            if reason:
                self.note_damage(position, reason)
                continue
            self.index_batch(header, position)
            next_offset = header.next_offset
        return next_offset

    def why_misplaced(self, header: BatchHeader, position: int, next_offset: int) -> str:
        """Return why the batch at `position` cannot follow `next_offset`; or "".

        The checksum of a batch does not cover its offset.
        """
        if header.base_offset < next_offset:
            return f"offset {header.base_offset} after {next_offset - 1}"
        if header.last_offset - self.base_offset > RELATIVE_OFFSET_MAX:
            return f"offset {header.last_offset} is too far from the base"
        if position > FILE_POSITION_MAX:
            return f"byte {position} is after the largest position of an index"
        return ""

    def start_rebuild(self) -> None:
        """Clear the indexes. Call `index_batch` for each batch, then `finish_rebuild`."""
        self._facts = None
        self._indexes.start()
        self.position_hints.clear()
        self._bytes_since_entry = 0
        self._first_timestamp_ms = None
        self.max_timestamp_ms = NO_TIMESTAMP
        self.max_timestamp_offset = self.base_offset
        self.damages = ()

    def index_batch(self, header: BatchHeader, position: int) -> None:
        """Add a batch of the log file to the indexes, like its append."""
        self._note_batch(header)
        indexes = self._indexes
        if self._bytes_since_entry > indexes.limits.interval_bytes:
            relative = self.max_timestamp_offset - self.base_offset
            indexes.offsets.append(header.next_offset - 1 - self.base_offset, position)
            indexes.times.maybe_append(self.max_timestamp_ms, relative)
            self._bytes_since_entry = 0
        self._bytes_since_entry += header.size_bytes

    def finish_rebuild(self) -> None:
        """Write the rebuilt indexes to their files."""
        if self.is_sealed:
            relative = self.max_timestamp_offset - self.base_offset
            self._indexes.times.maybe_append(self.max_timestamp_ms, relative)
        self._write_indexes()

    def _write_indexes(self) -> None:
        """Write all entries, unless the file names may belong to another segment.

        Without room they are in memory only: reads go on, and an append writes them or fails.
        """
        if not self._indexes.is_pinned:
            self._is_synced = False
            with suppress(NoRoomError):
                self._indexes.write()

    # Damage

    def note_damage(self, position: int, reason: str) -> DamagedSegment:
        """Add the damaged range at `position` and return it; see `DamageSearch.find`."""
        search = self._damage_search()
        damage = search.find(position, reason)
        self._set_damages(search.damages)
        return damage

    def note_cut(self) -> None:
        """Add the damage at the end of the log file if the file is shorter than the segment."""
        file_end = self.file.size()
        if file_end >= self.size_bytes:
            return
        is_loaded = self._indexes.is_loaded
        position = self._indexes.offsets.last_position_within(file_end) if is_loaded else 0
        while position < self.size_bytes:
            try:
                for batch in scan(self.file, position, self.size_bytes, whole=False):
                    if batch.end_position > file_end:
                        self.note_damage(batch.position, f"the file ends at {file_end}")
                        return
            except CorruptBatchError as error:
                known = (damage for damage in self.damages if damage.holds(error.position))
                damage = next(known, None) or self.note_damage(error.position, error.reason)
                position = max(error.position + 1, damage.end_position)
            else:
                return

    def note_finding(self, position: int, reason: str, end_offset: int) -> DamagedSegment:
        """Record a batch at `position` that could not be used.

        An intact batch stays readable and becomes uncleanable; see `DamageSearch.examine`.
        """
        search = self._damage_search()
        damage = search.examine(position, reason, end_offset)
        self._set_damages(search.damages)
        if damage.is_served:
            others = [other for other in self.uncleanable if other.position != position]
            self.uncleanable = (*others, damage)
        return damage

    def add_damage(self, damage: DamagedSegment) -> None:
        """Add a damaged range; it replaces one with the same start."""
        self._set_damages(with_damage(self.damages, damage))

    def note_damage_met(self, error: CorruptBatchError) -> bool:
        """Add the damage that a search met; return False if the search met no border of batches."""
        search = self._damage_search()
        is_border = search.is_border(error.position)
        if is_border:
            search.find(error.position, error.reason)
        self._set_damages(search.damages)
        return is_border

    def _damage_search(self) -> DamageSearch:
        return DamageSearch(
            self.file,
            path=self.path,
            base_offset=self.base_offset,
            size_bytes=self.size_bytes,
            offsets=self._indexes.offsets if self._indexes.is_loaded else None,
            damages=self.damages,
        )

    def _set_damages(self, damages: DamagedRanges) -> None:
        if damages != self.damages:
            self.damages = damages
            self.position_hints.clear()

    # Appending

    def append(
        self, records: ReadBuffer, size_bytes: int, last_offset: int, max_timestamp_ms: int
    ) -> None:
        """Write one batch at the end. After an OSError call `cut_back`."""
        position = self.size_bytes
        if self._parts is None:
            self.file.pwrite(records, position)
        else:
            self._append_rest(records)
        self._note_timestamp(max_timestamp_ms, last_offset)
        if self._bytes_since_entry > self._indexes.limits.interval_bytes:
            try:
                self._append_entries(last_offset, position)
            except CorruptIndexError:  # the index files contradict the log
                self.rebuild()
                self._note_timestamp(max_timestamp_ms, last_offset)
                self._append_entries(last_offset, position)
            self._bytes_since_entry = 0
        self._bytes_since_entry += size_bytes
        self.size_bytes = position + size_bytes

    def append_part(self, records: memoryview) -> bool:
        """Write the next part of a large batch; return whether `append` has one part left to write.

        It begins anew if there was another change. After an OSError call `cut_back`.
        """
        parts = self._parts
        if parts is None or not parts.begin(records):
            self.drop_parts()
            parts = _Parts(records, bytes(records[:HEADER_BYTES]))
        end = parts.size_bytes + PART_BYTES
        if end >= len(records):
            return True
        self._parts = parts._replace(size_bytes=end)
        part = records[parts.size_bytes : end]
        self.file.pwrite(part, self.size_bytes + parts.size_bytes)
        return False

    @property
    def has_parts(self) -> bool:
        """Return whether parts of a batch are after the end."""
        return self._parts is not None

    def drop_parts(self) -> None:
        """Remove the parts of a batch that is not appended."""
        if self._parts is not None:
            self.file.truncate(self.size_bytes)
            self._parts = None

    def drop_last_parts(self) -> bool:
        """Remove the last DROPPED_BYTES of parts; return whether some are left."""
        if self._parts is not None and self._parts.size_bytes > DROPPED_BYTES:
            size_bytes = self._parts.size_bytes - DROPPED_BYTES
            self.file.truncate(self.size_bytes + size_bytes)
            self._parts = self._parts._replace(size_bytes=size_bytes)
        else:
            self.drop_parts()
        return self.has_parts

    def _append_rest(self, records: ReadBuffer) -> None:
        assert self._parts is not None
        written = 0
        if self._parts.begin(records):
            written = self._parts.size_bytes
            self._parts = None
        self.drop_parts()
        self.file.pwrite(memoryview(records)[written:], self.size_bytes + written)

    def _note_timestamp(self, timestamp_ms: int, last_offset: int) -> None:
        if timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = timestamp_ms
            self.max_timestamp_offset = last_offset

    def _append_entries(self, last_offset: int, position: int) -> None:
        self._indexes.append(
            last_offset, position, self.max_timestamp_ms, self.max_timestamp_offset
        )

    def write_txn_entries(self, entries: Sequence[TxnIndexEntry]) -> None:
        """Replace the transaction index. Without entries there is no file."""
        self._facts = None
        self.txn_index.replace(entries)
        self._is_synced = self._is_synced and not entries

    def cut_back(self, position: int) -> None:
        """Truncate log file and indexes to the batches that begin before `position`."""
        self.uncleanable = tuple(
            damage for damage in self.uncleanable if damage.position < position
        )
        self._facts = None
        self._content_id = next(_CONTENT_IDS)
        self._stamp = None
        self._load_indexes()
        self.file.truncate(position)
        self._is_truncated = True
        self._parts = None
        self.size_bytes = position
        self.synced_bytes = min(self.synced_bytes, position)
        self.damages = tuple(damage for damage in self.damages if damage.position < position)
        self._is_synced = False
        self.position_hints.clear()
        self._first_timestamp_ms = None
        self._indexes.cut(position)
        _, indexed = self._indexes.offsets.last
        timestamp_ms, timestamp_offset = self._indexes.times.last
        self.max_timestamp_ms = timestamp_ms
        self.max_timestamp_offset = self.base_offset + timestamp_offset
        self._bytes_since_entry = position - indexed
        for batch in self.batches(indexed):
            self._note_batch(batch.header)

    def sync_truncation(self) -> None:
        """Make it durable that batches were removed from the end, if any were."""
        if self._is_truncated:
            self.file.sync()
            self._is_truncated = False

    def is_cut(self) -> bool:
        """Return whether the length of the log file matches the segment."""
        return self.file.size() == self.size_bytes

    def remove(self) -> None:
        """Delete the files of an empty segment."""
        assert not self.size_bytes
        for kind in (filenames.LOG, filenames.INDEX, filenames.TIME_INDEX):
            remove_if_there(self._env, self._path(kind))

    def seal(self) -> None:
        """Close it for appends: write the last time entry and trim the index files."""
        self.drop_parts()
        self.txn_index.write_missing()
        try:
            self._indexes.append_time(self.max_timestamp_ms, self.max_timestamp_offset)
        except CorruptIndexError:  # the index files contradict the log
            self.rebuild()
            self._indexes.append_time(self.max_timestamp_ms, self.max_timestamp_offset)
        self._indexes.trim()
        self._stamp = self.file.stamp()
        self.is_sealed = True

    # Durability

    @property
    def needs_sync(self) -> bool:
        """Return whether unsynced data was written. Indexes count when they are complete."""
        return self.synced_bytes < self.size_bytes or (self.is_sealed and not self._is_synced)

    def files_to_sync(self) -> list[File]:
        """Return the files to sync."""
        if not self.is_sealed or self._is_synced:
            return [self.file]
        files = [self.file, *self._indexes.open_files]
        if self.txn_index.open_file is not None:
            files.append(self.txn_index.open_file)
        return files

    def note_synced(self, size_bytes: int, *, was_sealed: bool) -> None:
        """Record that the first `size_bytes` are durable, and the indexes if sealed before."""
        self.synced_bytes = max(self.synced_bytes, min(size_bytes, self.size_bytes))
        if was_sealed and self.is_sealed:
            self._is_synced = True
            self._indexes.close_files()
            self.txn_index.close_file()

    # Reading

    @property
    def first_timestamp_ms(self) -> int:
        """Return the maximum timestamp of the first batch, as Kafka does, or -1."""
        if self._first_timestamp_ms is None:
            if self.size_bytes < HEADER_BYTES:
                return NO_TIMESTAMP
            try:
                header = read_header(self.file.pread(HEADER_BYTES, 0))
            except CorruptBatchError:
                self._first_timestamp_ms = NO_TIMESTAMP
            else:
                self._first_timestamp_ms = header.max_timestamp
        return self._first_timestamp_ms

    def is_cached(self, position: int, length: int) -> bool:
        """Return whether these bytes of the log, as far as they exist, are in the page cache."""
        length = min(length, self.size_bytes - position)
        return length <= 0 or self.file.is_cached(position, length)

    def check_cached(self, position: int, length: int) -> None:
        """Raise IndexNotReadyError if the bytes have to be read from the disk."""
        if not self.is_cached(position, length):
            length = min(length, self.size_bytes - position)
            raise IndexNotReadyError(
                self, lambda clone: clone.file.warm(position, length), position
            )

    @property
    def lookup(self) -> BatchLookup:
        """Return the lookups in the segment as it is now; load or rebuild the indexes for them."""
        indexes = self.indexes
        return BatchLookup(self.file, self.size_bytes, indexes=indexes, damages=self.damages)

    def batches(self, position: int) -> Iterator[ScannedBatch]:
        """Yield batches from `position` on, without damaged ranges. Raises CorruptBatchError."""
        return undamaged_batches(self.file, position, self.size_bytes, self.damages)

    def readable_batches(self, position: int) -> Iterator[ScannedBatch]:
        """Like `batches`; record unreadable bytes as damage and skip them."""
        while True:
            try:
                for batch in self.batches(position):
                    yield batch
                    position = batch.end_position
            except CorruptBatchError as error:
                position = self.note_damage(error.position, error.reason).end_position
            else:
                return

    def facts(self, next_base_offset: int) -> SegmentFacts:
        """Return the facts for planning; `next_base_offset` of the last is the log end offset."""
        segment_facts = self._facts
        if segment_facts is not None and segment_facts.next_base_offset == next_base_offset:
            return segment_facts
        index_bytes, time_index_bytes = self._indexes.sizes()
        facts = SegmentFacts(
            base_offset=self.base_offset,
            next_base_offset=next_base_offset,
            size_bytes=self.size_bytes,
            index_bytes=index_bytes,
            time_index_bytes=time_index_bytes,
            largest_timestamp_ms=self.max_timestamp_ms,
            first_batch_timestamp_ms=self.first_timestamp_ms,
            last_modified_ms=self.last_modified_ms,
            has_transactions=self.has_transactions,
            files=self.file_names(),
            content_id=self._content_id,
        )
        if self.is_sealed:
            self._facts = facts
        return facts

    @property
    def content_id(self) -> int:
        """Return the number of its present content (SegmentFacts)."""
        return self._content_id

    @property
    def stamp(self) -> FileStamp | None:
        """Return the stamp of its file; None if it was changed since it was opened or closed."""
        return self._stamp if self.file.stamp() == self._stamp else None

    def restore_content_id(self, content_id: int) -> None:
        """Give its content the id that it had before the start (content_ids.py)."""
        self._facts = None
        self._content_id = content_id

    def file_names(self) -> tuple[str, ...]:
        """Return its file names: log, indexes, and the transaction index if it has entries."""
        kinds: tuple[str, ...] = (filenames.LOG, filenames.INDEX, filenames.TIME_INDEX)
        if self.txn_index.has_entries:
            kinds = filenames.SEGMENT_KINDS
        return tuple(filenames.file_name(self.base_offset, kind) for kind in kinds)
