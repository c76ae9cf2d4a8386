"""The transaction index: the ranges of aborted transactions in a segment; pure.

The `.txnindex` of a segment has an entry for each abort marker in it, in the order of the markers.
`last_stable_offset` is the last stable offset at the time of the marker: a reader of a range below
it can ignore later entries.

Format: 34 bytes an entry: version int16, producer id, first offset, last offset (the marker's)
and last stable offset, int64 each, big-endian.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from storage.format.index import CorruptIndexError

ENTRY_VERSION: Final = 0
_ENTRY: Final = struct.Struct(">hqqqq")
ENTRY_BYTES: Final = _ENTRY.size


class TxnIndexEntry(NamedTuple):
    """One aborted transaction; `last_offset` is its marker's."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def encode_entries(entries: Iterable[TxnIndexEntry]) -> bytes:
    """Return the bytes to append to a `.txnindex`."""
    return b"".join(_ENTRY.pack(ENTRY_VERSION, *entry) for entry in entries)


def decode_entries(raw: bytes, path: str = "") -> list[TxnIndexEntry]:
    """Read a whole `.txnindex`.

    Raises CorruptIndexError for a torn entry, another version, markers that do not increase, or a
    transaction that ends before it begins.
    """
    if len(raw) % ENTRY_BYTES:
        raise CorruptIndexError(path, f"{len(raw)} bytes are not a whole number of entries")
    entries: list[TxnIndexEntry] = []
    previous = -1
    for version, *fields in _ENTRY.iter_unpack(raw):
        entry = TxnIndexEntry._make(fields)
        if version != ENTRY_VERSION:
            raise CorruptIndexError(path, f"entry of version {version}")
        if not 0 <= entry.first_offset <= entry.last_offset or entry.last_offset <= previous:
            raise CorruptIndexError(path, f"impossible {entry}")
        previous = entry.last_offset
        entries.append(entry)
    return entries


def aborted_in(
    segments: Iterable[Sequence[TxnIndexEntry]], first: int, end: int
) -> list[TxnIndexEntry]:
    """Return the aborted transactions that overlap `[first, end)`.

    `segments` holds the entries of the segment of `first` and of each segment after it, in order.
    The search skips the entries whose marker is below `first` and ends at the first entry behind
    which no transaction can begin before `end`: its cost does not grow with the rest of the index.
    """
    overlapping: list[TxnIndexEntry] = []
    for entries in segments:
        begin = bisect_left(entries, first, key=attrgetter("last_offset"))
        # Transactions that end below `end` began below it. One copy takes them: the cleaner asks
        # for the whole log, which may have 100,000 aborted transactions.
        decided = bisect_left(entries, end, lo=begin, key=attrgetter("last_offset"))
        overlapping.extend(entries[begin:decided])
        stop = bisect_left(entries, end, lo=decided, key=attrgetter("last_stable_offset"))
        overlapping += [entry for entry in entries[decided : stop + 1] if entry.first_offset < end]
        if stop < len(entries):
            break
    return overlapping
