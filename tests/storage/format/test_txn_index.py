"""The transaction index: Kafka's bytes, corruption, and the range query."""

import struct
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.format import txn_index
from storage.format.index import CorruptIndexError
from storage.format.txn_index import (
    ENTRY_BYTES,
    TxnIndexEntries,
    TxnIndexEntry,
    aborted_in,
    decode_entries,
    encode_entries,
)
from tests.support.formats import golden_bytes

ENTRIES = [TxnIndexEntry(1, 0, 29, 8), TxnIndexEntry(2, 8, 74, 36)]


def test_kafkas_index_is_read_and_written_byte_for_byte() -> None:
    raw = golden_bytes("00000000000000000000.txnindex")
    assert decode_entries(raw) == ENTRIES
    assert encode_entries(ENTRIES) == raw
    assert len(raw) == 2 * ENTRY_BYTES == 68


def test_no_bytes_are_no_entries() -> None:
    assert decode_entries(b"") == []


@pytest.mark.parametrize(
    "raw",
    [
        encode_entries(ENTRIES)[:-1],
        struct.pack(">hqqqq", 1, 1, 0, 1, 2),  # version
        encode_entries([TxnIndexEntry(1, 5, 4, 5)]),  # ends before it begins
        encode_entries([TxnIndexEntry(1, -1, 4, 5)]),
        encode_entries([ENTRIES[1], ENTRIES[0]]),  # markers do not increase
        encode_entries([ENTRIES[0], ENTRIES[0]]),
        bytes(2 * ENTRY_BYTES),  # zeros of a file that was never written
    ],
)
def test_an_index_that_cannot_be_believed_is_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptIndexError) as caught:
        decode_entries(raw, "a.txnindex")
    assert caught.value.path == "a.txnindex"


@given(st.binary(max_size=3 * ENTRY_BYTES))
def test_any_bytes_give_entries_or_an_error_of_ours(raw: bytes) -> None:
    try:
        entries = decode_entries(raw)
    except CorruptIndexError:
        return
    assert encode_entries(entries) == raw


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [
        (0, 100, ENTRIES),
        (30, 100, ENTRIES[1:]),
        (29, 100, ENTRIES),
        (75, 100, []),
        (0, 8, ENTRIES[:1]),
        (0, 9, ENTRIES),
        (9, 10, ENTRIES),
    ],
)
def test_the_aborted_transactions_that_overlap_a_range(
    first: int, end: int, expected: list[TxnIndexEntry]
) -> None:
    entries = TxnIndexEntries(ENTRIES)
    assert aborted_in([entries], first, end) == expected
    assert aborted_in([entries[:1], TxnIndexEntries(), entries[1:]], first, end) == expected


class CountedEntries(TxnIndexEntries):
    """Counts how often an entry is read."""

    reads = 0

    def last_offset(self, row: int) -> int:
        self.reads += 1
        return super().last_offset(row)

    def last_stable_offset(self, row: int) -> int:
        self.reads += 1
        return super().last_stable_offset(row)

    def begun_before(self, end: int, rows: range) -> TxnIndexEntries:
        self.reads += len(rows)
        return super().begun_before(end, rows)

    def __iter__(self) -> Iterator[TxnIndexEntry]:
        self.reads += len(self)
        return super().__iter__()


@pytest.mark.parametrize("first", [0, 5 * 10_000, 5 * 99_990])
def test_the_search_reads_few_entries_outside_the_range(first: int) -> None:
    entries = CountedEntries(
        TxnIndexEntry(1, 5 * number, 5 * number + 4, 5 * number) for number in range(100_000)
    )
    end = first + 20
    overlapping = aborted_in([entries], first, end)
    assert 0 < entries.reads < 60
    assert [entry.first_offset for entry in overlapping] == [
        first,
        first + 5,
        first + 10,
        first + 15,
    ]


def test_a_range_of_the_whole_log_is_copied_without_a_look_at_each_entry() -> None:
    entries = CountedEntries(
        TxnIndexEntry(1, 5 * number, 5 * number + 4, 5 * number) for number in range(100_000)
    )
    overlapping = aborted_in([entries], 0, 500_000)
    assert 0 < entries.reads < 60
    assert overlapping == list(entries)


def test_the_search_opens_no_segment_behind_the_range() -> None:
    def segments() -> Iterator[TxnIndexEntries]:
        yield TxnIndexEntries(ENTRIES[:1])
        raise AssertionError("nothing can begin before the end of the range here")

    assert aborted_in(segments(), 0, 8) == ENTRIES[:1]


def test_a_thread_may_append_during_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a disk hangs, the event loop goes on while a thread finishes the append of a marker."""
    entries, as_array = TxnIndexEntries(ENTRIES), txn_index._as_array

    def append_meanwhile(raw: bytearray) -> object:
        array = as_array(raw)
        entries.append(TxnIndexEntry(3, 80, 90, 80))
        return array

    monkeypatch.setattr(txn_index, "_as_array", append_meanwhile)
    assert aborted_in([entries], 0, 10) == ENTRIES
    assert len(entries) == 3


def test_entries_are_a_sequence_like_their_list() -> None:
    entries = TxnIndexEntries(ENTRIES[:1])
    entries.append(ENTRIES[1])
    assert entries == ENTRIES
    assert (len(entries), entries[0], entries[-1], list(entries[1:])) == (2, *ENTRIES, ENTRIES[1:])
    assert entries[2:] == entries[1:1] == []
    with pytest.raises(IndexError):
        entries[2]


def test_entries_take_the_memory_of_their_bytes() -> None:
    """Millions of objects took seven times as much, and each collection of garbage seconds."""
    raw = encode_entries(TxnIndexEntry(1, 5 * n, 5 * n + 4, 5 * n) for n in range(100_000))
    tracemalloc.start()
    try:
        entries = decode_entries(raw)
        assert entries[99_999].last_offset == 499_999
        assert tracemalloc.get_traced_memory()[0] < 1.1 * len(raw)
    finally:
        tracemalloc.stop()
