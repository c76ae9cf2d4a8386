"""The transaction index: the ranges of aborted transactions in a segment; pure.

The `.txnindex` of a segment has an entry for each abort marker in it, in the order of the markers.
`last_stable_offset` is the last stable offset at the time of the marker: a reader of a range below
it can ignore later entries.

Format: 34 bytes an entry: version int16, producer id, first offset, last offset (the marker's)
and last stable offset, int64 each, big-endian.
"""

import struct
from collections.abc import Iterable
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


def aborted_in(entries: Iterable[TxnIndexEntry], first: int, end: int) -> list[TxnIndexEntry]:
    """Return the aborted transactions that overlap `[first, end)`.

    `entries` come from the segment of `first` and later segments, in order. The search stops at
    the first entry behind which no transaction can begin before `end`.
    """
    txn_index_entries: list[TxnIndexEntry] = []
    for entry in entries:
        if entry.last_offset >= first and entry.first_offset < end:
            txn_index_entries.append(entry)
        if entry.last_stable_offset >= end:
            break
    return txn_index_entries
