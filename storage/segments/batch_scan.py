"""Read the batches of a log file, block by block.

Headers are checked before use, positions stay in `[position, end)`, and every error has its
position in the file. A partial batch at the end is an error as well: only the caller knows whether
it is a torn write.
"""

import zlib
from collections.abc import Iterator
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from storage.env import File
from storage.errors import CorruptBatchError, UnsupportedMagicError
from storage.format.batch import (
    BATCH_LENGTH_MIN,
    HEADER_BYTES,
    LENGTH_END,
    MAGIC,
    MAGIC_POSITION,
    BatchHeader,
    read_header,
    unpack_header,
    verify_crc,
)
from storage.format.old_messages import is_old, old_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# A search for an offset reads about one index interval (4 KiB by default) of headers.
HEADER_BLOCK_BYTES: Final = 16 << 10
# Verification reads everything; larger blocks were not faster from the page cache.
WHOLE_BLOCK_BYTES: Final = 1 << 20

# Bytes that a search for the next batch may compute checksums over.
SEARCH_SHARE: Final = 4
SEARCH_BYTES_MIN: Final = 64 << 20
# Possible headers whose batch a search reads, 25 us each. Produced records may contain any number
# of bytes that look like a header.
SEARCH_CANDIDATES_MAX: Final = 4_000
LED_MAX: Final = 100  # headers; between two entries of an index there are no more than 68

LENGTH_POSITION: Final = 8  # in a header, as the two below
LAST_OFFSET_DELTA_POSITION: Final = 23
RECORD_COUNT_POSITION: Final = 57

_OFFSET = Struct(">q")
_OLD_ENTRY = Struct(">qiI")  # offset, size, CRC-32: the first fields of formats 0 and 1


class ScannedBatch(NamedTuple):
    """A batch at `position` of the file and at `at` of `buffer`."""

    position: int
    header: BatchHeader
    buffer: bytes
    at: int

    @property
    def end_position(self) -> int:
        """Return the position of the next batch."""
        return self.position + self.header.batch_length + LENGTH_END


def scan(file: File, position: int, end: int, *, whole: bool) -> Iterator[ScannedBatch]:
    """Yield the batches in `[position, end)`; with `whole`, each buffer has the whole batch.

    Raises CorruptBatchError or UnsupportedMagicError with path and position at the first bytes that
    are not a whole batch.
    """
    block_bytes = WHOLE_BLOCK_BYTES if whole else HEADER_BLOCK_BYTES
    block = b""
    block_position = position
    while position < end:
        at = position - block_position
        if at + HEADER_BYTES > len(block):
            block = file.pread(min(block_bytes, end - position), position)
            block_position = position
            at = 0
        header = _header_at(block, at, position, file.path)
        size_bytes = header.batch_length + LENGTH_END
        if position + size_bytes > end:
            raise CorruptBatchError(f"{size_bytes} bytes, cut short", position, file.path)
        if whole and at + size_bytes > len(block):
            block = file.pread(min(max(block_bytes, size_bytes), end - position), position)
            block_position = position
            at = 0
            if len(block) < size_bytes:
                raise CorruptBatchError(f"{size_bytes} bytes, cut short", position, file.path)
        yield ScannedBatch(position, header, block, at)
        position += size_bytes


def verify(batch: ScannedBatch, path: str) -> None:
    """Raise CorruptBatchError if the CRC of a batch does not match."""
    if not verify_crc(batch.buffer, batch.at, batch.header):
        raise CorruptBatchError("CRC does not match", batch.position, path)


def skip_old_messages(file: File, position: int, end: int) -> tuple[int, int]:
    """Return the position after messages of formats 0 and 1, and the offset after them or -1.

    Only messages with a valid CRC-32 count; it covers the magic byte to the end.
    """
    next_offset = -1
    while True:
        head = file.pread(MAGIC_POSITION + 1, position)
        if not is_old(head):
            break
        offset, _, crc = _OLD_ENTRY.unpack_from(head)
        message_end = position + old_size(head)
        if message_end > end:
            break
        covered = file.pread(message_end - position - MAGIC_POSITION, position + MAGIC_POSITION)
        if zlib.crc32(covered) != crc:
            break
        position = message_end
        next_offset = offset + 1
    return position, next_offset


def find_batch(
    file: File, position: int, end: int, offsets: range, *, is_border: bool = False
) -> int:
    """Return the position of the next whole batch of `offsets` from `position` on, else `end`.

    The search checks every byte, because lengths in front of it may be wrong. A batch counts if its
    header is possible, its CRC matches, and the end or a possible header follows it: a record may
    contain bytes that look like a batch. If a batch begins at `end` (`is_border`), the following
    headers must lead there. The search reads a limited number of batches and bytes.
    """
    budget_bytes = SEARCH_BYTES_MIN + SEARCH_SHARE * (end - position)
    candidates_left = SEARCH_CANDIDATES_MAX
    while position + HEADER_BYTES <= end:
        block = file.pread(min(WHOLE_BLOCK_BYTES, end - position), position)
        for at in _headers_in(block, offsets, end - position):
            budget_bytes -= unpack_header(block, at).size_bytes
            candidates_left -= 1
            if budget_bytes < 0 or candidates_left < 0:
                return end
            if _is_batch(file, position + at, end) and (
                not is_border or _leads_to(file, position + at, end)
            ):
                return position + at
        if len(block) < WHOLE_BLOCK_BYTES:
            break
        position += len(block) - HEADER_BYTES + 1
    return end


def _headers_in(block: bytes, offsets: range, bytes_left: int) -> Iterator[int]:
    """Yield the positions in a block where headers of batches of `offsets` may begin.

    `bytes_left` counts from the start of the block.
    """
    import numpy as np  # not loaded by commands that only import this module

    count = len(block) - HEADER_BYTES + 1
    cells = np.frombuffer(block, dtype=np.uint8)
    begins = np.flatnonzero(cells[MAGIC_POSITION : MAGIC_POSITION + count] == MAGIC)
    # All offsets share their first bytes. Check the positions with these bytes one by one.
    first, last = _OFFSET.pack(offsets.start), _OFFSET.pack(offsets.stop - 1)
    for at, byte in enumerate(first):
        if byte != last[at]:
            break
        begins = begins[cells[begins + at] == byte]

    def numbers(at: int) -> "NDArray[np.int64]":
        raw = cells[begins[:, None] + np.arange(at, at + 4)]  # big-endian
        result: NDArray[np.int64] = raw.view(">i4")[:, 0].astype(np.int64)
        return result

    lengths = numbers(LENGTH_POSITION)
    is_possible = (lengths >= BATCH_LENGTH_MIN) & (begins + LENGTH_END + lengths <= bytes_left)
    begins = begins[is_possible]
    deltas, counts = numbers(LAST_OFFSET_DELTA_POSITION), numbers(RECORD_COUNT_POSITION)
    begins = begins[(deltas >= 0) & (counts >= 0) & (counts <= deltas + 1)]
    for begin in begins.tolist():
        try:
            header = read_header(block, begin)
        except CorruptBatchError:
            continue
        if header.base_offset in offsets and header.last_offset in offsets:
            yield begin


def _is_batch(file: File, position: int, end: int) -> bool:
    batch = intact_batch(file, position, end)
    if batch is None:
        return False
    if batch.end_position < end:
        try:
            read_header(file.pread(HEADER_BYTES, batch.end_position))
        except CorruptBatchError:
            return False
    return True


def _leads_to(file: File, position: int, end: int) -> bool:
    """Return whether the headers from `position` on lead to `end`, if it is near."""
    for _ in range(LED_MAX):
        if position >= end:
            return position == end
        try:
            position += read_header(file.pread(HEADER_BYTES, position)).size_bytes
        except CorruptBatchError:
            return False
    return True


def read_batch(file: File, position: int, end: int | None = None) -> ScannedBatch:
    """Return the whole batch at `position`. Raises CorruptBatchError like `scan`."""
    head = file.pread(HEADER_BYTES, position)
    header = _header_at(head, 0, position, file.path)
    # Do not read a batch that does not fit: its length may be wrong.
    fits = end is None or position + header.size_bytes <= end
    buffer = file.pread(header.size_bytes, position) if fits else b""
    if len(buffer) < header.size_bytes:
        raise CorruptBatchError(f"{header.size_bytes} bytes, cut short", position, file.path)
    return ScannedBatch(position, header, buffer, 0)


def intact_batch(file: File, position: int, end: int) -> ScannedBatch | None:
    """Return the batch at `position` if it is whole and its CRC matches."""
    try:
        batch = read_batch(file, position, end)
        verify(batch, file.path)
    except CorruptBatchError:
        return None
    return batch


def _header_at(block: bytes, at: int, position: int, path: str) -> BatchHeader:
    if (
        len(block) - at > MAGIC_POSITION
        and block[at + MAGIC_POSITION] != MAGIC
        and is_old(block, at)
    ):
        raise UnsupportedMagicError(block[at + MAGIC_POSITION], position, path)
    try:
        return read_header(block, at)
    except CorruptBatchError as error:
        raise CorruptBatchError(error.reason, position, path) from error
