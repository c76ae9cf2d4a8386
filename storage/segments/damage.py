"""Damaged ranges of a log file, and the search for where a range begins and ends.

Rules
- A range begins where a batch begins and ends at the next whole batch, at the end of messages of an
  old format, or at the end of the file.
- A length that is wrong leads to the wrong place: damage begins with the batch before it if the
  checksum of that batch does not match.
- The search reads the log file and changes nothing; the segment takes the ranges it found.
"""

from contextlib import suppress
from typing import Final, NamedTuple

from crc32c import crc32c

from storage.env import File
from storage.errors import CorruptBatchError
from storage.format.batch import HEADER_BYTES, BatchHeader, read_header
from storage.format.index import RELATIVE_OFFSET_MAX, OffsetIndex
from storage.segments.batch_scan import (
    ScannedBatch,
    find_batch,
    intact_batch,
    read_batch,
    skip_old_messages,
    verify,
)
from storage.segments.verify import why_misplaced

CHECKSUM_BYTES_MAX: Final = 1 << 20  # of a damaged range
INDEXED_TRIED_MAX: Final = 1000  # index entries checked for the end of damage: 4 MB by default


class DamagedSegment(NamedTuple):
    """Bytes `[position, end_position)` of a log file that cannot be read or cannot be cleaned.

    They have the offsets `[first_offset, next_offset)`; -1 for the end of the segment.
    """

    path: str
    base_offset: int  # of the segment
    position: int
    end_position: int
    reason: str
    first_offset: int = -1
    next_offset: int = -1
    is_served: bool = False  # the bytes are intact, but the cleaner cannot use them

    def holds(self, position: int) -> bool:
        """Return whether the range contains `position`."""
        return self.position <= position < self.end_position


DamagedRanges = tuple[DamagedSegment, ...]  # of one segment, by position


def with_damage(damages: DamagedRanges, damage: DamagedSegment) -> DamagedRanges:
    """Return the ranges with one more; it replaces those that begin in it."""
    others = [other for other in damages if not damage.holds(other.position)]
    return tuple(sorted([*others, damage], key=lambda damage: damage.position))


def damage_checksum(file: File, positions: range) -> int:
    """Return the CRC-32C of a range of the log file, of CHECKSUM_BYTES_MAX at most."""
    length = min(len(positions), CHECKSUM_BYTES_MAX)
    return crc32c(file.pread(length, positions.start))


def why_contradicted(
    file: File, header: BatchHeader, position: int, *, next_offset: int, end: int
) -> str:
    """Return why later batches contradict the offsets of the one at `position`; or "".

    `next_offset` is the end of the batch before it; a batch that follows without a gap is valid. If
    the next batch is intact and begins before this one ends, one of them is wrong: the next one, if
    this one fits in front of the batch after both.
    """
    if (header.base_offset, header.record_count) == (next_offset, header.last_offset_delta + 1):
        return ""
    next_position = position + header.size_bytes
    following = _header_at(file, next_position)
    if following is None or not next_offset <= following.base_offset <= header.last_offset:
        return ""
    if intact_batch(file, next_position, end) is None:
        return ""
    last = _header_at(file, next_position + following.size_bytes)
    would_fit = (
        last is not None and header.next_offset + following.last_offset_delta < last.base_offset
    )
    if would_fit and intact_batch(file, position, end) is not None:
        return ""
    return f"offset {header.last_offset} in front of {following.base_offset}"


def _header_at(file: File, position: int) -> BatchHeader | None:
    try:
        return read_header(file.pread(HEADER_BYTES, position))
    except CorruptBatchError:
        return None


class DamageSearch:
    """One search for damage in a log file of `size_bytes`.

    `offsets` is the offset index if it is loaded; entries that lead to no batch are ignored.
    `damages` are the known ranges, and after a search also those that it found.
    """

    def __init__(
        self,
        file: File,
        *,
        path: str,
        base_offset: int,
        size_bytes: int,
        offsets: OffsetIndex | None,
        damages: DamagedRanges,
    ) -> None:
        self._file = file
        self._path = path
        self._base_offset = base_offset
        self._size_bytes = size_bytes
        self._offsets = offsets
        self.damages = damages

    def find(self, position: int, reason: str) -> DamagedSegment:
        """Return the damaged range at `position`; it ends at the next whole batch.

        The range begins earlier if the batch before it is damaged, because its length may be wrong.
        """
        first_offset, last_position = self._walk_to(position)
        if last_position >= 0 and self._intact_batch(last_position) is None:
            return self.find(last_position, f"CRC does not match; {reason} after it")
        end_position, _ = skip_old_messages(self._file, position, self._size_bytes)
        if end_position == position:
            end_position = self._end_of_damage(position, first_offset)
        next_offset = -1
        if end_position < self._size_bytes:
            head = self._file.pread(HEADER_BYTES, end_position)
            with suppress(CorruptBatchError):  # more damage follows; a later read adds it
                next_offset = read_header(head).base_offset
        damage = DamagedSegment(
            self._path,
            self._base_offset,
            position,
            end_position,
            reason,
            first_offset,
            next_offset,
        )
        self.damages = with_damage(self.damages, damage)
        return damage

    def examine(self, position: int, reason: str, end_offset: int) -> DamagedSegment:
        """Return the range of a batch at `position` that could not be used.

        An intact batch is only uncleanable (`is_served`). Everything else is damage, also a batch
        that reaches beyond `end_offset`, the end of the segment.
        """
        first_offset, _ = self._walk_to(position)
        batch = self._intact_batch(position) if self.is_border(position) else None
        if batch is None or why_misplaced(batch.header, range(first_offset, end_offset)):
            return self.find(position, reason)
        return DamagedSegment(
            self._path,
            self._base_offset,
            position,
            batch.end_position,
            reason,
            batch.header.base_offset,
            batch.header.next_offset,
            is_served=True,
        )

    def is_border(self, position: int) -> bool:
        """Return whether `position` is 0 or the end of a batch or a damaged range."""
        _, last_position = self._walk_to(position)
        ends = {damage.end_position for damage in self.damages}
        return position == 0 or last_position >= 0 or position in ends

    def _intact_batch(self, position: int) -> ScannedBatch | None:
        return intact_batch(self._file, position, self._size_bytes)

    def _walk_to(self, position: int) -> tuple[int, int]:
        """Return the offset after the batches before `position`, and the position of the last one.

        The position is -1 if no batch ends at `position`.
        """
        next_offset, at, last_position = self._base_offset, 0, -1
        if self._offsets is not None and position > 0:
            entry = self._offsets.last_position_within(position - 1)
            if self._intact_batch(entry) is not None:
                at = entry
        existing = {damage.position: damage.end_position for damage in self.damages}
        while at < position:
            if at in existing:
                at, last_position = existing[at], -1
                continue
            try:
                header = read_header(self._file.pread(HEADER_BYTES, at))
                if at + header.size_bytes > position:
                    batch = read_batch(self._file, at, self._size_bytes)
                    verify(batch, self._path)  # otherwise its length is wrong
                    return next_offset, -1
            except CorruptBatchError as error:
                at, last_position = self.find(at, error.reason).end_position, -1
                continue
            next_offset, last_position = header.next_offset, at
            at += header.size_bytes
        return next_offset, last_position if at == position else -1

    def _end_of_damage(self, position: int, first_offset: int) -> int:
        """Return the position of the next whole batch after the damage at `position`."""
        header = _header_at(self._file, position)
        if header is not None:
            # Most damage is in records; then the length in the header leads to the next batch.
            end = position + header.size_bytes
            if end == self._size_bytes or self._intact_batch(end) is not None:
                return end
        offsets = range(first_offset, self._base_offset + RELATIVE_OFFSET_MAX + 1)
        end = self._indexed_after(position)
        is_border = end < self._size_bytes
        return find_batch(self._file, position + 1, end, offsets, is_border=is_border)

    def _indexed_after(self, position: int) -> int:
        """Return the position of the next intact, indexed batch after `position`, else the end.

        It bounds the search, and distinguishes batches that lead to it from bytes in a record.
        """
        if self._offsets is not None:
            for at in self._offsets.positions_after(position, INDEXED_TRIED_MAX):
                if self._intact_batch(at) is not None:
                    return at
        return self._size_bytes
