"""Count and hash the committed records of segments, and say which of them are alive.

A digest is the sum of the hashes of records (kernels/passes/contents.py), each word on its own. So
it depends on neither the order of records nor on batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels.compile import Bools, Ints, Words
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.kernels.passes.contents import (
    ABORTED,
    CONTENT_WORDS,
    COUNTS,
    KEYLESS,
    TOMBSTONE,
    VALUE,
    list_contents,
    list_unpacked_contents,
)
from cleaner.engine.segment_scan import NoteBatches, PositionedConsumer, scan_segment
from cleaner.job import RangeDigest, SourceSegment

LISTED_RECORDS: Final = 1 << 18  # at a time: 14 MiB, or one batch where that has more
_WORD_VALUES: Final = 1 << 64


class Records(NamedTuple):
    """Some committed records of a segment, ascending by offset; valid until the next ones."""

    rows: Words  # (kernels/passes/shards.py)
    contents: Words  # (records, CONTENT_WORDS)

    @property
    def offsets(self) -> Ints:
        """Return the offset of each record."""
        offsets: Ints = self.rows[2::SLOT_WORDS].astype(np.int64) - 1
        return offsets

    @property
    def have_value(self) -> Bools:
        """Return which records are no tombstones."""
        have_value: Bools = self.contents[:, 3] == VALUE
        return have_value

    @property
    def must_stay(self) -> Bools:
        """Return which records no clean may remove while they are the last ones of their keys."""
        must_stay: Bools = self.contents[:, 3] <= TOMBSTONE
        return must_stay

    @property
    def sizes(self) -> Words:
        """Return the size of each record, unpacked."""
        return self.contents[:, 2]


ConsumeRecords: TypeAlias = Callable[[Records], None]


class Uncommitted(NamedTuple):
    """Records of a segment that are in no `Records`."""

    keyless: int
    aborted: int


def scan_records(
    context: CleanContext,
    source: SourceSegment,
    take: ConsumeRecords,
    note: NoteBatches | None = None,
) -> Uncommitted:
    """Pass all committed records of a segment with a key to `take`, and its batches to `note`.

    Raises DamagedSegmentError, CleanAbortedError, OSError. Before damage, records may have been
    passed on.
    """
    listing = _ContentListing(context, take)
    consumer = listing if note is None else PositionedConsumer(context, listing, note)
    scan_segment(context, source, consumer)
    listing.flush()
    context.release()
    return Uncommitted(int(listing.counts[KEYLESS]), int(listing.counts[ABORTED]))


class _ContentListing:
    """A BatchConsumer (segment_scan.py) that lists records with their contents."""

    def __init__(self, context: CleanContext, take: ConsumeRecords) -> None:
        self.counts: Ints = np.zeros(COUNTS, dtype=np.int64)
        self._context = context
        self._take = take
        self._listed = 0
        self._room = 0
        self._make(LISTED_RECORDS)

    def _make(self, records: int) -> None:
        self._rows: Words = np.empty(records * SLOT_WORDS, dtype=np.uint64)
        self._contents: Words = np.empty(records * CONTENT_WORDS, dtype=np.uint64)
        self._room = records

    def make_room(self, records: int) -> None:
        """See BatchConsumer."""
        if self._listed + records <= self._room:
            return
        self.flush()
        if records > self._room:
            self._make(records)

    def batches(self) -> tuple[int, int]:
        """See BatchConsumer."""
        reader = self._context.reader
        code, at, self._listed = list_contents(
            reader.buffer, reader.at, reader.end, self._rows, self._contents, self._listed,
            self.counts, self._context.space,
        )  # fmt: skip
        return code, at

    def unpacked(self, count: int) -> int:
        """See BatchConsumer."""
        context, reader = self._context, self._context.reader
        code, self._listed = list_unpacked_contents(
            context.unpacked, count, reader.buffer, reader.at, self._rows, self._contents,
            self._listed, self.counts, context.space,
        )  # fmt: skip
        return int(code)

    def flush(self) -> None:
        """Pass on the listed records."""
        listed, self._listed = self._listed, 0
        if listed:
            contents = self._contents[: listed * CONTENT_WORDS].reshape(listed, CONTENT_WORDS)
            self._take(Records(self._rows[: listed * SLOT_WORDS], contents))


@dataclass(slots=True)
class DigestSum:
    """The digest of the records added so far, and their number."""

    records: int = 0
    low: int = 0
    high: int = 0

    def add(self, records: Records, chosen: Bools) -> None:
        """Add the chosen ones of these records."""
        contents = records.contents[chosen]
        self.records += len(contents)
        self.low = (self.low + int(contents[:, 0].sum(dtype=np.uint64))) % _WORD_VALUES
        self.high = (self.high + int(contents[:, 1].sum(dtype=np.uint64))) % _WORD_VALUES

    @property
    def text(self) -> str:
        """Return the digest as hexadecimal digits."""
        return f"{self.high:016x}{self.low:016x}"


class RangeDigests:
    """Digests of ranges of offsets, ascending and apart."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._ranges = ranges
        self._firsts: Ints = np.array([first for first, _ in ranges], dtype=np.int64)
        self._sums = [DigestSum() for _ in ranges]

    def add(self, records: Records, chosen: Bools) -> None:
        """Add the chosen ones of these records to the ranges that have them."""
        offsets = records.offsets
        place = max(0, int(np.searchsorted(self._firsts, offsets[0], side="right")) - 1)
        while place < len(self._ranges) and self._ranges[place][0] <= offsets[-1]:
            first, end = self._ranges[place]
            self._sums[place].add(records, chosen & (first <= offsets) & (offsets < end))
            place += 1

    def digests(self) -> Iterator[RangeDigest]:
        """Yield the digest of each range."""
        for (first, end), total in zip(self._ranges, self._sums, strict=True):
            yield RangeDigest(first, end, total.records, total.text)
