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
- After `slice_seconds` a search pauses: at the end of a batch, so each slice has at least one. Its
  state is the position, from which another slice goes on as if there had been no pause. Only the
  file that was open may have been replaced meanwhile. It is searched from its beginning if its
  state is another one, or if the last batch that was searched is no longer where it was.
- Memory: a chunk and its largest batch, unpacked.
"""

import pickle
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
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
    PausedSearch,
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
    unpack_header,
    unpack_records,
    verify_crc,
    walk_headers,
    write_varint,
)
from storage.segments.verify import why_misplaced

CHUNK_BYTES: Final = 4 << 20
FOUND_MAX: Final = 1000  # files that a result names
LISTINGS_MAX: Final = 20  # of the folders
DEPTH_MAX: Final = 8  # of folders in folders


class FilesChangeError(StorageError):
    """Files came and went during the whole search."""


class _SliceOverError(Exception):
    """The time of the slice is over."""


def search_files(
    env: Env, search: KeySearch, control: JobControl
) -> KeySearchResult | PausedSearch:
    """Search all files, for one slice. Raises FilesChangeError, CleanAbortedError, OSError."""
    state: _State = (
        pickle.loads(zlib.decompress(search.position))  # noqa: S301 - made by the line below
        if search.position
        else _State()
    )
    try:
        return _Search(env, search, control, state).run()
    except _SliceOverError:
        return PausedSearch(zlib.compress(pickle.dumps(state), level=1))


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


@dataclass(slots=True)
class _InFile:
    """The records of the key in one file, up to a position."""

    opened: FileState  # before it was opened for the first time
    next_offset: int  # after the last batch
    size_bytes: int = 0  # when it was opened for this slice; it may grow
    position: int = 0
    last_batch: BatchHeader | None = None  # in front of the position
    records: int = 0
    first_offset: int = -1
    last_offset: int = -1

    def add(self, base_offset: int, matches: KeyMatches) -> None:
        """Add the records of a batch that have a value."""
        if matches.values:
            first, last = matches.first_value_delta, matches.last_value_delta
            if self.first_offset < 0:
                self.first_offset = base_offset + first
            self.last_offset = base_offset + last
            self.records += matches.values


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


@dataclass(slots=True)
class _State:
    """How far a search is, and what it found so far. Picklable."""

    listings: int = 0
    listed: list[_ListedFile] = field(default_factory=list)  # by the last listing
    seen: set[_ListedFile] = field(default_factory=set)
    waiting: deque[_ListedFile] = field(default_factory=deque)  # to be searched before the next one
    is_last: bool = False  # no other listing follows
    in_file: _InFile | None = None  # in the first that waits
    found: dict[FileState, FoundFile] = field(default_factory=dict)
    unreadable: dict[_ListedFile, UnreadableFile] = field(default_factory=dict)
    tally: _Tally = field(default_factory=_Tally)
    folders: set[str] = field(default_factory=set)
    files: int = 0
    bytes_read: int = 0
    passed_bytes: int = 0  # of the files before the present one
    total_bytes: int = 0
    seconds: float = 0.0  # in earlier slices


class _Search:
    """One slice of a search."""

    def __init__(self, env: Env, search: KeySearch, control: JobControl, state: _State) -> None:
        self._env = env
        self._search = search
        self._control = control
        self._state = state
        self._began = env.monotonic()
        shortest, *longer = _lengths(len(search.key))
        self._shortest = shortest + search.key
        self._longer = [length + search.key for length in longer]
        self._key = np.frombuffer(search.key, dtype=np.uint8)
        self._version_header = np.frombuffer(search.version_header.encode(), dtype=np.uint8)

    def run(self) -> KeySearchResult:
        """Search until a listing of the folders has no file that has to be searched.

        Raises _SliceOverError.
        """
        state = self._state
        while True:
            while state.waiting:
                listed = state.waiting[0]
                if self._search_file(listed):
                    state.seen.add(listed)
                state.waiting.popleft()
                state.in_file = None
                self._end_slice()
            if state.is_last:
                return self._result()
            self._list_new_files()

    def _end_slice(self) -> None:
        """Raise _SliceOverError if the time of the slice is over."""
        seconds = self._env.monotonic() - self._began
        if seconds >= self._search.slice_seconds:
            self._state.seconds += seconds
            raise _SliceOverError

    def _list_new_files(self) -> None:
        state = self._state
        if state.listings == LISTINGS_MAX:
            raise FilesChangeError("files of the partition came and went during the whole search")
        state.listings += 1
        state.listed = [file for folder in self._search.folders for file in self._list(folder)]
        state.waiting.extend(file for file in state.listed if file not in state.seen)
        state.total_bytes = state.passed_bytes + sum(f.state.size_bytes for f in state.waiting)
        state.is_last = all(file.is_late for file in state.waiting)

    def _result(self) -> KeySearchResult:
        state = self._state
        if not state.found:
            self._sync_folders()
        tally, found = state.tally, tuple(state.found.values())
        unreadable = [state.unreadable[file] for file in state.listed if file in state.unreadable]
        return KeySearchResult(
            files=state.files,
            bytes_read=state.bytes_read,
            seconds=state.seconds + self._env.monotonic() - self._began,
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
        for path in sorted(self._state.folders):
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
            self._state.folders.add(path)
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
                        if file.may_grow:  # or be merged with later ones
                            offsets = range(offsets.start, filenames.LARGEST_OFFSET)
                            file = replace(file, state=FileState(child, 0, 0), offsets=offsets)
                        yield file

    def _search_file(self, listed: _ListedFile) -> bool:
        """Search a file; return False if it is gone."""
        state, search = listed.state, self._state
        present = file_state(self._env, state.path)
        if present is None:
            return False
        try:
            file = self._env.open(state.path)
        except FileNotFoundError:
            return False
        with closing(file):
            in_file = self._begin_or_go_on(file, listed, present)
            try:
                if state.path.endswith(filenames.DAMAGED_BYTES):
                    raise StorageError("an operator removed these bytes from the log as damaged")
                self._read(file, in_file, listed)
            except StorageError as error:
                reason = error.reason if isinstance(error, CorruptBatchError) else str(error)
                search.unreadable[listed] = UnreadableFile(state, in_file.position, reason)
        search.files += 1
        search.passed_bytes += in_file.size_bytes
        if in_file.records:
            search.found[state] = FoundFile(
                state, in_file.records, in_file.first_offset, in_file.last_offset
            )
        return True

    def _begin_or_go_on(self, file: File, listed: _ListedFile, present: FileState) -> _InFile:
        in_file = self._state.in_file
        if in_file is None or not _may_go_on(file, in_file, None if listed.may_grow else present):
            in_file = self._state.in_file = _InFile(present, listed.offsets.start)
        in_file.size_bytes = file.size()  # of the active segment: later records do not count
        return in_file

    def _read(self, file: File, in_file: _InFile, listed: _ListedFile) -> None:
        length = CHUNK_BYTES
        while in_file.position < in_file.size_bytes:
            length = min(length, in_file.size_bytes - in_file.position)
            self._control.read_bytes(length)
            begin = in_file.position
            data = file.pread(length, begin)
            self._state.bytes_read += len(data)
            for at, header in walk_headers(data):
                self._search_batch(data, at, header, in_file, listed)
                in_file.position = begin + at + header.size_bytes
                in_file.last_batch = header
                self._report(in_file)
                self._end_slice()
            if in_file.position > begin:
                length = CHUNK_BYTES
                continue
            self._report(in_file)
            if begin + length < in_file.size_bytes:
                length *= 2  # a batch larger than the chunk
            elif listed.may_grow:
                return  # an append was under way
            else:
                raise StorageError("the last batch is cut short")

    def _report(self, in_file: _InFile) -> None:
        """Report the progress. Raises CleanAbortedError."""
        if self._control.aborted():
            raise CleanAbortedError
        state = self._state
        done = state.passed_bytes + in_file.position
        self._control.progress("search", done, state.total_bytes)

    def _search_batch(
        self, data: bytes, at: int, header: BatchHeader, in_file: _InFile, listed: _ListedFile
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
        self._state.tally.add(header.base_offset, matches)
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


def _may_go_on(file: File, in_file: _InFile, present: FileState | None) -> bool:
    """Return whether everything in front of the position was searched before the pause.

    `present` is None for a file that may grow. A clean may have replaced it since it was closed; a
    clean keeps the order of the batches, so what is in front of the last one was in front before.
    """
    if present is not None and present != in_file.opened:
        return False
    last = in_file.last_batch
    if last is None:
        return in_file.position == 0
    header = file.pread(HEADER_BYTES, in_file.position - last.size_bytes)
    return len(header) == HEADER_BYTES and unpack_header(header) == last


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
