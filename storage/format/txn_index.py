"""The transaction index: the ranges of aborted transactions in a segment; pure.

The `.txnindex` of a segment has an entry for each abort marker in it, in the order of the markers.
`last_stable_offset` is the last stable offset at the time of the marker: a reader of a range below
it can ignore later entries.

Format: 34 bytes an entry: version int16, producer id, first offset, last offset (the marker's)
and last stable offset, int64 each, big-endian.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, overload

from storage.format.index import CorruptIndexError

if TYPE_CHECKING:
    import numpy as np

ENTRY_VERSION: Final = 0
_ENTRY: Final = struct.Struct(">hqqqq")
ENTRY_BYTES: Final = _ENTRY.size
_OFFSET: Final = struct.Struct(">q")
_LAST_OFFSET_AT: Final = 18  # in an entry
_LAST_STABLE_AT: Final = 26


class TxnIndexEntry(NamedTuple):
    """One aborted transaction; `last_offset` is its marker's."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def encode_entries(entries: Iterable[TxnIndexEntry]) -> bytes:
    """Return the bytes to append to a `.txnindex`."""
    return b"".join(_ENTRY.pack(ENTRY_VERSION, *entry) for entry in entries)


class TxnIndexEntries(Sequence[TxnIndexEntry]):
    """Entries as the bytes of their file.

    A log may have millions. As objects they take seven times as much memory, and each collection of
    garbage visits all of them.
    """

    __slots__ = ("_rows",)

    def __init__(self, entries: Iterable[TxnIndexEntry] = ()) -> None:
        # Bytes of a file are not copied: nothing is appended to the index of a closed segment.
        self._rows: bytearray | bytes = bytearray(encode_entries(entries) if entries else b"")

    def __len__(self) -> int:
        return len(self._rows) // ENTRY_BYTES

    def __iter__(self) -> Iterator[TxnIndexEntry]:
        for _, *fields in _ENTRY.iter_unpack(bytes(self._rows)):
            yield TxnIndexEntry._make(fields)

    @overload
    def __getitem__(self, index: int) -> TxnIndexEntry: ...

    @overload
    def __getitem__(self, index: slice) -> "TxnIndexEntries": ...

    def __getitem__(self, index: int | slice) -> "TxnIndexEntry | TxnIndexEntries":
        if isinstance(index, int):
            row = range(len(self))[index]
            _, *fields = _ENTRY.unpack_from(self._rows, row * ENTRY_BYTES)
            return TxnIndexEntry._make(fields)
        first, end, step = index.indices(len(self))
        assert step == 1, step
        return self._of(self._rows[first * ENTRY_BYTES : max(first, end) * ENTRY_BYTES])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def append(self, entry: TxnIndexEntry) -> None:
        """Add an entry at the end."""
        if isinstance(self._rows, bytes):
            self._rows = bytearray(self._rows)
        self._rows += encode_entries((entry,))

    def extend(self, entries: "TxnIndexEntries") -> None:
        """Add the entries of another index."""
        self._rows += entries._rows

    def last_offset(self, row: int) -> int:
        """Return the offset of the marker of one entry."""
        offset: int = _OFFSET.unpack_from(self._rows, row * ENTRY_BYTES + _LAST_OFFSET_AT)[0]
        return offset

    def last_stable_offset(self, row: int) -> int:
        """Return the last stable offset of one entry."""
        offset: int = _OFFSET.unpack_from(self._rows, row * ENTRY_BYTES + _LAST_STABLE_AT)[0]
        return offset

    def begun_before(self, end: int, rows: range) -> "TxnIndexEntries":
        """Return the entries, of some rows, of transactions that began before an offset."""
        if not rows:
            return TxnIndexEntries()
        # A copy, because a thread may append meanwhile, and no array may refer to the bytes then.
        entries = _as_array(self._rows[rows.start * ENTRY_BYTES : rows.stop * ENTRY_BYTES])
        return self._of(entries[entries["first_offset"] < end].tobytes())

    @classmethod
    def decode(cls, raw: bytes, path: str) -> "TxnIndexEntries":
        """See `decode_entries`."""
        if len(raw) % ENTRY_BYTES:
            raise CorruptIndexError(path, f"{len(raw)} bytes are not a whole number of entries")
        previous = -1
        for version, *fields in _ENTRY.iter_unpack(raw):
            _, first_offset, last_offset, _ = fields
            if version != ENTRY_VERSION:
                raise CorruptIndexError(path, f"entry of version {version}")
            if not 0 <= first_offset <= last_offset or last_offset <= previous:
                raise CorruptIndexError(path, f"impossible {TxnIndexEntry._make(fields)}")
            previous = last_offset
        return cls._of(raw)

    def to_bytes(self) -> bytes:
        """Return the content of their file."""
        return bytes(self._rows)

    @classmethod
    def of_bytes(cls, raw: bytes) -> "TxnIndexEntries":
        """Return the entries of a file whose content is known to be valid."""
        return cls._of(raw)

    @classmethod
    def _of(cls, rows: bytearray | bytes) -> "TxnIndexEntries":
        entries = cls()
        entries._rows = rows
        return entries


def _as_array(raw: bytearray | bytes) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
    import numpy as np  # not loaded by commands that only import this module

    layout = [("version", ">i2"), *((name, ">i8") for name in TxnIndexEntry._fields)]
    return np.frombuffer(raw, dtype=np.dtype(layout))


def decode_entries(raw: bytes, path: str = "") -> TxnIndexEntries:
    """Read a whole `.txnindex`.

    Raises CorruptIndexError for a torn entry, another version, markers that do not increase, or a
    transaction that ends before it begins.
    """
    return TxnIndexEntries.decode(raw, path)


def aborted_in(segments: Iterable[TxnIndexEntries], first: int, end: int) -> TxnIndexEntries:
    """Return the aborted transactions that overlap `[first, end)`.

    `segments` holds the entries of the segment of `first` and of each segment after it, in order.
    The search skips the entries whose marker is below `first` and ends at the first entry after
    which no transaction can begin before `end`: its cost does not grow with the rest of the index.
    """
    overlapping = TxnIndexEntries()
    for entries in segments:
        if not entries:
            continue
        rows = range(len(entries))
        begin = bisect_left(rows, first, key=entries.last_offset)
        # Transactions that end below `end` began below it. One copy takes them: the cleaner asks
        # for the whole log, which may have 100,000 aborted transactions.
        decided = bisect_left(rows, end, lo=begin, key=entries.last_offset)
        overlapping.extend(entries[begin:decided])
        stop = bisect_left(rows, end, lo=decided, key=entries.last_stable_offset)
        overlapping.extend(entries.begun_before(end, rows[decided : stop + 1]))
        if stop < len(entries):
            break
    return overlapping
