"""Search every file of a partition for the records of one key.

Rules
- The files are read, and nothing else is trusted: no index, no stored number, no kernel. A key is
  found by its bytes and their length, which every record has in front of its key. A producer may
  write that length with more bytes than it needs.
- Every file with batches counts, whatever its name is: segments, replaced segments,
  outputs of cleans, views, and the inputs and outputs of leases.
- If nothing is found, the folders are synced: no deleted name comes back after a power loss.
- Files come and go meanwhile. A file that is gone may have been copied before, so the folders are
  listed again until no file is new; a file that has changed is new.
- A file with an unreadable part is reported, because it may have records of the key.
- Memory: a chunk and its largest batch, unpacked.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

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
from storage.errors import StorageError
from storage.format.batch import (
    BatchHeader,
    Record,
    iterate_records,
    unpack_records,
    walk_headers,
    write_varint,
)
from storage.format.filenames import LOG

CHUNK_BYTES: Final = 4 << 20
FOUND_MAX: Final = 1000  # files that a result names
ROUNDS_MAX: Final = 20  # listings of the folders
DEPTH_MAX: Final = 8  # of folders in folders
VERSION_BYTES: Final = 8


class FilesChangeError(StorageError):
    """Files came and went during the whole search."""


def search_files(env: Env, search: KeySearch, control: JobControl) -> KeySearchResult:
    """Search all files. Raises FilesChangeError, CleanAbortedError, OSError."""
    return _Search(env, search, control).run()


class _Search:
    """One search."""

    def __init__(self, env: Env, search: KeySearch, control: JobControl) -> None:
        self._env = env
        self._search = search
        self._control = control
        shortest, *longer = _lengths(len(search.key))
        self._shortest = shortest + search.key
        self._longer = [length + search.key for length in longer]
        self._found: list[FoundFile] = []
        self._unreadable: list[UnreadableFile] = []
        self._tally = _Tally()
        self._folders: set[str] = set()
        self._files = self._bytes_read = 0

    def run(self) -> KeySearchResult:
        """Search until a listing of the folders has no file that was not searched."""
        started = self._env.monotonic()
        seen: set[FileState] = set()
        for _ in range(ROUNDS_MAX):
            new = [
                (state, folder)
                for folder in self._search.folders
                for state in self._list(folder)
                if state not in seen
            ]
            if not new:
                break
            self._total = sum(state.size_bytes for state, _ in new) + self._bytes_read
            for state, folder in new:
                if self._search_file(state, folder):
                    seen.add(state)
        else:
            raise FilesChangeError("files of the partition came and went during the whole search")
        if not self._found:
            self._sync_folders()
        tally = self._tally
        return KeySearchResult(
            files=self._files,
            bytes_read=self._bytes_read,
            seconds=self._env.monotonic() - started,
            found=tuple(self._found[:FOUND_MAX]),
            unreadable=tuple(self._unreadable[:FOUND_MAX]),
            records=sum(file.records for file in self._found),
            tombstones=tally.tombstones,
            latest_ms=tally.latest_ms,
            version=tally.version,
        )

    def _sync_folders(self) -> None:
        for path in sorted(self._folders):
            with suppress(FileNotFoundError):
                self._env.sync_dir(path)

    def _list(self, folder: SearchedFolder) -> Iterator[FileState]:
        """Yield the files with batches below a folder; the active segment without its length."""
        waiting = [(folder.path, 0)]
        while waiting:
            path, depth = waiting.pop()
            try:
                names = self._env.listdir(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            self._folders.add(path)
            for name in names:
                child = f"{path}/{name}"
                if self._env.is_dir(child):
                    if depth < DEPTH_MAX and not self._env.is_link(child):
                        waiting.append((child, depth + 1))
                elif LOG in name:
                    state = file_state(self._env, child)
                    if state is not None:
                        yield FileState(child, 0, 0) if child == folder.active else state

    def _search_file(self, state: FileState, folder: SearchedFolder) -> bool:
        """Search a file; return False if it is gone."""
        try:
            file = self._env.open(state.path)
        except FileNotFoundError:
            return False
        in_file = _InFile()
        try:
            self._read(file, in_file, folder, is_active=state.path == folder.active)
        except CleanAbortedError:
            raise
        except StorageError as error:
            self._unreadable.append(UnreadableFile(state, in_file.position, str(error)))
        finally:
            file.close()
        self._files += 1
        if in_file.records:
            self._found.append(
                FoundFile(state, in_file.records, in_file.first_offset, in_file.last_offset)
            )
        return True

    def _read(
        self, file: File, in_file: "_InFile", folder: SearchedFolder, *, is_active: bool
    ) -> None:
        size = file.size()  # of the active segment: later records do not count
        length = CHUNK_BYTES
        while in_file.position < size:
            length = min(length, size - in_file.position)
            if self._control.aborted():
                raise CleanAbortedError
            self._control.read_bytes(length)
            data = file.pread(length, in_file.position)
            self._bytes_read += len(data)
            end = 0
            for at, header in walk_headers(data):
                end = at + header.size_bytes
                if header.base_offset < folder.below:
                    self._search_batch(data, at, header, in_file, folder.below)
            in_file.position += end
            self._control.progress("search", self._bytes_read, self._total)
            if end:
                length = CHUNK_BYTES
            elif in_file.position + length < size:
                length *= 2  # a batch larger than the chunk
            elif is_active:
                return  # an append was under way
            else:
                raise StorageError("the last batch is cut short")

    def _search_batch(
        self, data: bytes, at: int, header: BatchHeader, in_file: "_InFile", below: int
    ) -> None:
        """Count the records of a batch if the bytes of the key are in it."""
        limit = self._search.decompressed_batch_bytes
        if header.is_control:
            return
        records, begin, end = data, at, at + header.size_bytes
        if header.codec:
            records = bytes(unpack_records(data, header, at, limit))
            begin, end = 0, len(records)
        if not self._may_have_key(records, begin, end):
            return
        for record in iterate_records(data, header, at, limit):
            if record.key == self._search.key and record.offset < below:
                self._count(record, in_file)

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

    def _count(self, record: Record, in_file: "_InFile") -> None:
        self._tally.add(record, self._search.version_header)
        if record.value is not None:
            in_file.add(record.offset)


@dataclass(slots=True)
class _Tally:
    """The records of the key in all files."""

    tombstones: int = 0
    latest_ms: int = -1
    version: int | None = None

    def add(self, record: Record, version_header: str) -> None:
        """Add a record."""
        self.tombstones += record.value is None
        self.latest_ms = max(self.latest_ms, record.timestamp)
        if version_header:
            version = _version_of(record, version_header)
            if version is not None and (self.version is None or version > self.version):
                self.version = version


def _lengths(key_bytes: int) -> tuple[bytes, bytes, bytes]:
    """Return the ends of all encodings of the length of a key.

    They are: the shortest varint, that with one byte more, and the end of those with two or more.
    """
    shortest = bytearray()
    write_varint(shortest, key_bytes)
    longer = (*shortest[:-1], shortest[-1] | 0x80, 0)
    return bytes(shortest), bytes(longer), b"\x80\x00"


def _version_of(record: Record, name: str) -> int | None:
    """Return the version of a record: the last header of the name, if it has 8 bytes."""
    versions = [value for header, value in record.headers if header == name]
    if not versions or versions[-1] is None or len(versions[-1]) != VERSION_BYTES:
        return None
    return int.from_bytes(versions[-1], "big", signed=True)


@dataclass(slots=True)
class _InFile:
    """The records of the key in one file, up to a position."""

    position: int = 0
    records: int = 0
    first_offset: int = field(default=-1)
    last_offset: int = field(default=-1)

    def add(self, offset: int) -> None:
        """Add a record with a value."""
        self.records += 1
        self.first_offset = offset if self.first_offset < 0 else min(self.first_offset, offset)
        self.last_offset = max(self.last_offset, offset)
