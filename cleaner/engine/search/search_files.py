"""Search every file of a partition for the records of one key.

Rules
- The files are read, and nothing else is trusted: no index, no stored number, nothing that cleans.
  A key is found by its bytes and their length, which every record has in front of its key. A
  producer may write that length with more bytes than it needs.
- A batch of a few kilobytes may have a million records of the key, or a million values that look
  like it. So the records of a batch with the bytes of the key are walked by a kernel, which only
  counts them (kernels/passes/key_search.py).
- Every file with batches counts, whatever its name is: segments, replaced segments,
  outputs of cleans, views, and the inputs and outputs of leases.
- If nothing is found, the folders are synced: no deleted name comes back after a power loss.
- Files come and go meanwhile. A file that is gone may have been copied before, so the folders are
  listed again until no file is new; a file that has changed is new.
- A busy partition closes segments all the time. Those that begin at or after the end of the search
  only have later records, whatever happens to them, so they are searched once and no other listing
  follows for them.
- A file with an unreadable part is reported, because it may have records of the key: a batch with a
  wrong checksum, and one whose offset does not fit between its neighbours, because no checksum
  covers it. So are the bytes that an operator removed from the log as damaged. A file that was gone
  or replaced in the end is not reported.
- Memory: a chunk and its largest batch, unpacked.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np

from cleaner.engine.kernels.passes.key_search import KeyMatches, KeyTarget, find_key
from cleaner.job import CleanAbortedError, JobControl
from cleaner.key_search import (
    FileState,
    FoundFile,
    KeySearch,
    KeySearchResult,
    SearchedFolder,
    UnreadableFile,
    file_state,
)
from storage.env import Env, File
from storage.errors import CorruptBatchError, StorageError
from storage.format import filenames
from storage.format.batch import (
    HEADER_BYTES,
    BatchHeader,
    unpack_records,
    verify_crc,
    walk_headers,
    write_varint,
)
from storage.segments.verify import why_misplaced

CHUNK_BYTES: Final = 4 << 20
FOUND_MAX: Final = 1000  # files that a result names
ROUNDS_MAX: Final = 20  # listings of the folders
DEPTH_MAX: Final = 8  # of folders in folders


class FilesChangeError(StorageError):
    """Files came and went during the whole search."""


def search_files(env: Env, search: KeySearch, control: JobControl) -> KeySearchResult:
    """Search all files. Raises FilesChangeError, CleanAbortedError, OSError."""
    return _Search(env, search, control).run()


@dataclass(frozen=True, slots=True)
class _ListedFile:
    """A file as the last listing had it. `offsets` are those that its batches may have."""

    state: FileState
    folder: SearchedFolder
    offsets: range

    @property
    def is_late(self) -> bool:
        """Return whether no batch below the end of the search belongs into it."""
        return self.offsets.start >= self.folder.below

    @property
    def may_grow(self) -> bool:
        """Return whether it is, or may be, the active segment."""
        return self.is_late or self.state.path == self.folder.active


class _Search:
    """One search."""

    def __init__(self, env: Env, search: KeySearch, control: JobControl) -> None:
        self._env = env
        self._search = search
        self._control = control
        shortest, *longer = _lengths(len(search.key))
        self._shortest = shortest + search.key
        self._longer = [length + search.key for length in longer]
        self._key = np.frombuffer(search.key, dtype=np.uint8)
        self._version_header = np.frombuffer(search.version_header.encode(), dtype=np.uint8)
        self._found: dict[FileState, FoundFile] = {}
        self._unreadable: dict[_ListedFile, UnreadableFile] = {}
        self._tally = _Tally()
        self._folders: set[str] = set()
        self._files = self._bytes_read = 0

    def run(self) -> KeySearchResult:
        """Search until a listing of the folders has no file that has to be searched."""
        started = self._env.monotonic()
        seen: set[_ListedFile] = set()
        for _ in range(ROUNDS_MAX):
            listed = [file for folder in self._search.folders for file in self._list(folder)]
            new = [file for file in listed if file not in seen]
            self._total = sum(file.state.size_bytes for file in new) + self._bytes_read
            seen.update(file for file in new if self._search_file(file))
            if all(file.is_late for file in new):
                break
        else:
            raise FilesChangeError("files of the partition came and went during the whole search")
        if not self._found:
            self._sync_folders()
        tally, found = self._tally, tuple(self._found.values())
        unreadable = [self._unreadable[file] for file in listed if file in self._unreadable]
        return KeySearchResult(
            files=self._files,
            bytes_read=self._bytes_read,
            seconds=self._env.monotonic() - started,
            found=found[:FOUND_MAX],
            unreadable=tuple(unreadable[:FOUND_MAX]),
            records=sum(file.records for file in found),
            tombstones=tally.tombstones,
            latest_ms=tally.latest[0],
            latest_offset=tally.latest[1],
            version=None if tally.version is None else tally.version[0],
            version_offset=-1 if tally.version is None else tally.version[1],
        )

    def _sync_folders(self) -> None:
        for path in sorted(self._folders):
            with suppress(FileNotFoundError):
                self._env.sync_dir(path)

    def _list(self, folder: SearchedFolder) -> Iterator[_ListedFile]:
        """Yield the files with batches below a folder; those that may grow without their length."""
        waiting = [(folder.path, 0)]
        while waiting:
            path, depth = waiting.pop()
            try:
                names = self._env.listdir(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            self._folders.add(path)
            offsets_of = {} if depth else _offsets_of_segments(names)
            for name in names:
                child = f"{path}/{name}"
                if self._env.is_dir(child):
                    if depth < DEPTH_MAX and not self._env.is_link(child):
                        waiting.append((child, depth + 1))
                elif filenames.LOG in name:
                    state = file_state(self._env, child)
                    if state is not None:
                        offsets = offsets_of.get(name, range(filenames.LARGEST_OFFSET))
                        file = _ListedFile(state, folder, offsets)
                        if file.may_grow:
                            file = replace(file, state=FileState(child, 0, 0))
                        yield file

    def _search_file(self, listed: _ListedFile) -> bool:
        """Search a file; return False if it is gone."""
        state = listed.state
        try:
            file = self._env.open(state.path)
        except FileNotFoundError:
            return False
        in_file = _InFile(next_offset=listed.offsets.start)
        try:
            if state.path.endswith(filenames.DAMAGED_BYTES):
                raise StorageError("an operator removed these bytes from the log as damaged")
            self._read(file, in_file, listed)
        except CleanAbortedError:
            raise
        except StorageError as error:
            reason = error.reason if isinstance(error, CorruptBatchError) else str(error)
            self._unreadable[listed] = UnreadableFile(state, in_file.position, reason)
        finally:
            file.close()
        self._files += 1
        if in_file.records:
            self._found[state] = FoundFile(
                state, in_file.records, in_file.first_offset, in_file.last_offset
            )
        return True

    def _read(self, file: File, in_file: "_InFile", listed: _ListedFile) -> None:
        size = file.size()  # of the active segment: later records do not count
        length = CHUNK_BYTES
        while in_file.position < size:
            length = min(length, size - in_file.position)
            self._control.read_bytes(length)
            begin = in_file.position
            data = file.pread(length, begin)
            before = self._bytes_read
            for at, header in walk_headers(data):
                if self._control.aborted():
                    raise CleanAbortedError
                self._search_batch(data, at, header, in_file, listed)
                in_file.position = begin + at + header.size_bytes
                done = before + at + header.size_bytes
                self._control.progress("search", done, self._total)
            self._bytes_read += len(data)
            if in_file.position > begin:
                length = CHUNK_BYTES
            elif begin + length < size:
                length *= 2  # a batch larger than the chunk
            elif listed.may_grow:
                return  # an append was under way
            else:
                raise StorageError("the last batch is cut short")

    def _search_batch(
        self, data: bytes, at: int, header: BatchHeader, in_file: "_InFile", listed: _ListedFile
    ) -> None:
        """Count the records of a batch if the bytes of the key are in it."""
        limit, below = self._search.decompressed_batch_bytes, listed.folder.below
        if reason := why_misplaced(header, range(in_file.next_offset, listed.offsets.stop)):
            raise CorruptBatchError(reason)
        in_file.next_offset = header.next_offset
        if header.base_offset >= below:
            return
        if not verify_crc(data, at, header):
            raise CorruptBatchError("CRC does not match")
        if header.is_control:
            return
        records, begin, end = data, at + HEADER_BYTES, at + header.size_bytes
        if header.codec:
            records = bytes(unpack_records(data, header, at, limit))
            begin, end = 0, len(records)
        if not self._may_have_key(records, begin, end):
            return
        target = KeyTarget(
            header.max_timestamp if header.is_log_append_time else header.base_timestamp,
            has_one_timestamp=header.is_log_append_time,
            last_delta=header.last_offset_delta,
            end_delta=below - header.base_offset,
        )
        buf = np.frombuffer(records, dtype=np.uint8)[begin:end]
        matches = find_key(buf, header.record_count, target, self._key, self._version_header)
        if not matches.is_valid:
            raise CorruptBatchError("a record is malformed")
        self._tally.add(header.base_offset, matches)
        in_file.add(header.base_offset, matches)

    def _may_have_key(self, records: bytes, begin: int, end: int) -> bool:
        """Return whether the key is there with its length in front.

        Most batches do not have the bytes of the key at all: one pass is enough for them.
        """

        def has(pattern: bytes) -> bool:
            return records.find(pattern, begin, end) >= 0

        key = self._search.key
        return has(key) and (
            has(self._shortest) or (has(b"\0" + key) and any(map(has, self._longer)))
        )


@dataclass(slots=True)
class _Tally:
    """The records of the key in all files."""

    tombstones: int = 0
    latest: tuple[int, int] = (-1, -1)  # the largest timestamp, and the last offset that has it
    version: tuple[int, int] | None = None  # likewise

    def add(self, base_offset: int, matches: KeyMatches) -> None:
        """Add the records of a batch."""
        self.tombstones += matches.tombstones
        if matches.latest_delta >= 0:
            latest = (matches.latest_ms, base_offset + matches.latest_delta)
            self.latest = max(self.latest, latest)
        if matches.version_delta >= 0:
            ranked = (matches.version, base_offset + matches.version_delta)
            self.version = ranked if self.version is None else max(self.version, ranked)


def _offsets_of_segments(names: Sequence[str]) -> dict[str, range]:
    """Return the offsets of each file of a log, by name.

    A segment ends at the base offset of the next one. Where one that was deleted, or is not
    published, ends is unknown.
    """
    bases = filenames.classify(names).logs
    ends = dict(pairwise((*bases, filenames.LARGEST_OFFSET)))
    parsed = filter(None, map(filenames.parse_file_name, names))
    return {
        file.name: range(
            file.base_offset,
            filenames.LARGEST_OFFSET if file.temporary else ends[file.base_offset],
        )
        for file in parsed
        if file.kind == filenames.LOG
    }


def _lengths(key_bytes: int) -> tuple[bytes, bytes, bytes]:
    """Return the ends of all encodings of the length of a key.

    They are: the shortest varint, that with one byte more, and the end of those with two or more.
    """
    shortest = bytearray()
    write_varint(shortest, key_bytes)
    longer = (*shortest[:-1], shortest[-1] | 0x80, 0)
    return bytes(shortest), bytes(longer), b"\x80\x00"


@dataclass(slots=True)
class _InFile:
    """The records of the key in one file, up to a position."""

    next_offset: int  # after the last batch
    position: int = 0
    records: int = 0
    first_offset: int = field(default=-1)
    last_offset: int = field(default=-1)

    def add(self, base_offset: int, matches: KeyMatches) -> None:
        """Add the records of a batch that have a value."""
        if matches.values:
            first, last = matches.first_value_delta, matches.last_value_delta
            if self.first_offset < 0:
                self.first_offset = base_offset + first
            self.last_offset = base_offset + last
            self.records += matches.values
