"""Decode a range of a log for people: previews of records, and what cannot be read.

Pure; run it in a thread. Every bound is a limit of one page, not of the log: a page ends at the
first limit, and says where the next one begins.
"""

import codecs
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from storage.errors import (
    CorruptBatchError,
    DecompressionLimitError,
    UnsupportedCompressionError,
)
from storage.format.batch import (
    BatchHeader,
    Buffer,
    Record,
    RecordView,
    iterate_views,
    read_headers,
    unpack_records,
    verify_crc,
    walk_headers,
)

PREVIEW_BYTES: Final = 4096  # of a key, a value, or the value of a header
PREVIEWS_BYTES_MAX: Final = 1 << 20  # of a page: its JSON may take six times as much
HEADERS_MAX: Final = 20  # of a record in its preview
PAGE_BYTES: Final = 8 << 20  # scanned for a page
RECORDS_PER_LOOK: Final = 64  # between two looks at the clock
# Records of a batch before the first one of a page. They take about 5 us each, and a batch of 64 MB
# may have ten million.
SKIPPED_MAX: Final = 100_000
# Bytes that one call searches for a key. The call holds the interpreter lock, and its time may grow
# with the product of both lengths.
_SEARCHED_BYTES: Final = 64 << 10

Aborted = Mapping[int, Collection[tuple[int, int]]]  # producer id -> first and last offsets


class Gap(NamedTuple):
    """Offsets that cannot be read. `next_offset` is None if the end is unknown."""

    first_offset: int
    next_offset: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class RecordPreview:
    """One record. Keys, values and headers are cut to PREVIEW_BYTES; sizes are those before."""

    record: Record
    key_bytes: int
    value_bytes: int
    header_count: int
    delete_horizon_ms: int | None  # a tombstone with it is removed by a clean after this time


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """What a scan looks for. `key` None: every record."""

    end_offset: int
    limit: int
    key: bytes | None = None
    limit_bytes: int = 1 << 20  # of one batch, decompressed


@dataclass(slots=True)
class RecordPage:
    """The records found up to `next_offset`."""

    next_offset: int
    records: list[RecordPreview] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    scanned_bytes: int = 0  # of batches, decompressed
    preview_bytes: int = 0

    def is_full(self, request: ScanRequest) -> bool:
        """Return whether no further record fits."""
        return len(self.records) >= request.limit or self.preview_bytes >= PREVIEWS_BYTES_MAX


class Scan:
    """Adds the records of batches to a page."""

    def __init__(self, page: RecordPage, request: ScanRequest, is_late: Callable[[], bool]) -> None:
        self._page = page
        self._request = request
        self._is_late = is_late

    def add(self, data: bytes, aborted: Aborted) -> None:
        """Add the records of whole batches, until the page is full or it is late.

        Records of aborted transactions and markers are left out. A page that makes no progress gets
        a gap without an end.
        """
        page, begin = self._page, self._page.next_offset
        try:
            for position, header in walk_headers(data):
                if header.next_offset <= page.next_offset:
                    continue
                if header.base_offset >= self._request.end_offset:
                    break
                if header.is_control or _is_aborted(header, aborted):
                    page.scanned_bytes += header.size_bytes
                elif not self._add_batch(data, position, header):
                    return
                page.next_offset = min(header.next_offset, self._request.end_offset)
                if self.is_over():
                    return
        except CorruptBatchError as error:
            page.gaps.append(Gap(page.next_offset, None, error.reason))
            return
        if page.next_offset == begin:
            page.gaps.append(Gap(begin, None, "no batch begins here"))

    def is_over(self) -> bool:
        """Return whether the page ends here."""
        page = self._page
        is_full = page.is_full(self._request) or page.scanned_bytes >= PAGE_BYTES
        return is_full or self._is_late()

    def _add_batch(self, data: bytes, position: int, header: BatchHeader) -> bool:
        """Add the records of one batch; return whether its last one was looked at."""
        page, request = self._page, self._request
        key = None if request.key is None else memoryview(request.key)
        first, looked_at, skipped = max(page.next_offset, header.base_offset), 0, 0
        try:
            for record in self._records(data, position, header):
                if record.offset < first:
                    skipped += 1
                    if skipped > SKIPPED_MAX:
                        reason = f"its batch has more than {SKIPPED_MAX} records before it"
                        page.gaps.append(Gap(first, header.next_offset, reason))
                        break
                    continue
                if record.offset >= request.end_offset:
                    break
                if key is None or record.key == key:
                    _add(page, record, header)
                page.next_offset = record.offset + 1
                looked_at += 1
                is_late = looked_at % RECORDS_PER_LOOK == 0 and self._is_late()
                if page.is_full(request) or is_late:
                    return False
        except (CorruptBatchError, DecompressionLimitError, UnsupportedCompressionError) as error:
            reason = error.reason if isinstance(error, CorruptBatchError) else str(error)
            gap_offset = max(first, page.next_offset)
            page.gaps.append(Gap(gap_offset, header.next_offset, reason))
        return True

    def _records(self, data: bytes, position: int, header: BatchHeader) -> Iterator[RecordView]:
        """Return the records of a batch; none if the bytes of the key are nowhere in it."""
        page, key = self._page, self._request.key
        page.scanned_bytes += header.size_bytes
        if not verify_crc(data, position, header):
            raise CorruptBatchError("the checksum is wrong")
        body = unpack_records(data, header, position, self._request.limit_bytes)
        page.scanned_bytes += max(0, len(body) - header.batch_length)
        if key is not None and not _contains(body, key):
            return iter(())
        return iterate_views(body, header, position)


def _contains(body: Buffer, key: bytes) -> bool:
    """Return whether the key is anywhere in `body`."""
    with memoryview(body) as view:
        return any(
            key in bytes(view[begin : begin + _SEARCHED_BYTES + len(key)])
            for begin in range(0, len(view), _SEARCHED_BYTES)
        )


def _is_aborted(header: BatchHeader, aborted: Aborted) -> bool:
    return header.is_transactional and any(
        first <= header.base_offset <= last for first, last in aborted.get(header.producer_id, ())
    )


def _add(page: RecordPage, record: RecordView, header: BatchHeader) -> None:
    header_count, headers = read_headers(record.headers, HEADERS_MAX)
    preview = Record(
        record.offset,
        record.timestamp,
        _cut(record.key),
        _cut(record.value),
        tuple((_cut_name(name), _cut(value)) for name, value in headers),
    )
    page.preview_bytes += sum(
        map(len, (preview.key or b"", preview.value or b"", *_flat(preview.headers)))
    )
    page.records.append(
        RecordPreview(
            preview,
            key_bytes=len(record.key or b""),
            value_bytes=len(record.value or b""),
            header_count=header_count,
            delete_horizon_ms=header.base_timestamp if header.has_delete_horizon else None,
        )
    )


def _cut(data: memoryview | None) -> bytes | None:
    return None if data is None else bytes(data[:PREVIEW_BYTES])


def _cut_name(name: memoryview) -> str | bytes:
    """Return the start of a name as text, without a character that is cut in two.

    Return bytes if the name is not UTF-8.
    """
    raw = bytes(name[:PREVIEW_BYTES])
    try:
        return codecs.utf_8_decode(raw, "strict", len(raw) == len(name))[0]
    except UnicodeDecodeError:
        return raw


def _flat(headers: Sequence[tuple[str | bytes, bytes | None]]) -> list[str | bytes]:
    return [part for name, value in headers for part in (name, value or b"")]
