"""A search for the records of one key in all files of a partition. Frozen, picklable.

A worker process runs it (cleaner/engine/search/search_files.py), for an erasure (broker/erasure).
"""

import math
from dataclasses import dataclass

from storage.env import Env


@dataclass(frozen=True, slots=True)
class SearchedFolder:
    """A folder to search with everything below it."""

    path: str
    below: int  # records from this offset on do not count
    active: str = ""  # path of the active segment's log file, which may grow


@dataclass(frozen=True, slots=True)
class KeySearch:
    """Which records to find: those of one key, with a value, below an offset."""

    key: bytes
    folders: tuple[SearchedFolder, ...]
    decompressed_batch_bytes: int  # limit per batch
    version_header: str = ""  # of a compacted view by version: its name
    slice_seconds: float = math.inf  # then the search pauses at the end of a batch
    position: bytes = b""  # of a PausedSearch, from which it goes on; empty: from the beginning


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as it was read. A file whose state differs may have other content."""

    path: str
    size_bytes: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file with records of the key that have a value."""

    state: FileState
    records: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class UnreadableFile:
    """A file that could not be read to its end, so it may have records of the key."""

    state: FileState
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class KeySearchResult:
    """The result of a search. `found` has the first files only if there are very many."""

    files: int  # read
    bytes_read: int
    seconds: float
    found: tuple[FoundFile, ...] = ()
    unreadable: tuple[UnreadableFile, ...] = ()
    records: int = 0  # with a value, in all files
    tombstones: int = 0  # below the end of the search, in all files
    latest_ms: int = -1  # the largest timestamp of a record of the key
    latest_offset: int = -1  # the last record with this timestamp
    version: int | None = None  # the largest version of a record of the key
    version_offset: int = -1  # the last record with this version


@dataclass(frozen=True, slots=True)
class PausedSearch:
    """A search whose slice is over. It has no result yet, whatever it found so far."""

    position: bytes  # for KeySearch; only a worker reads it


def file_state(env: Env, path: str) -> FileState | None:
    """Return the present state of a file; None if it is gone."""
    try:
        return FileState(path, env.size(path), env.mtime_ms(path))
    except FileNotFoundError:
        return None
