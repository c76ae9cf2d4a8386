"""Damaged and uncleanable ranges of an open log: record them, check them again, look for them.

Damaged bytes are never changed or served here; storage/swap/remove_damage.py removes a range.
"""

from contextlib import suppress
from typing import NamedTuple

from storage.errors import CorruptBatchError, DamagedSegmentError
from storage.format.batch import HEADER_BYTES, read_header
from storage.format.index import CorruptIndexError
from storage.log.log_state import LogState
from storage.segments.damage import DamagedSegment, damage_checksum
from storage.segments.offset_lookup import locate_readable
from storage.segments.segment import Segment
from storage.segments.txn_index_repair import repair_txn_indexes
from storage.segments.verify import VerifiedPart, verify_part


class VerifyStep(NamedTuple):
    """Bytes `[position, end_position)` of a segment to verify, with the offsets allowed there.

    `damage`: a known damaged range at the first offset, or at the position of the next batch; then
    there are no bytes to verify.
    """

    segment: Segment
    position: int
    end_position: int
    offsets: range
    damage: DamagedSegment | None

    def run(self, max_bytes: int) -> VerifiedPart:
        """Verify about `max_bytes`; may run in a thread. Raises OSError."""
        return verify_part(
            self.segment.file, self.position, self.end_position, self.offsets, max_bytes
        )


class LogDamage:
    """The damage of one log. Methods raise OSError if the disk fails."""

    __slots__ = ("_state",)

    def __init__(self, state: LogState) -> None:
        self._state = state

    @property
    def ranges(self) -> tuple[DamagedSegment, ...]:
        """Return the known damaged ranges in offset order."""
        end_offset = self._state.log_end_offset
        return tuple(_with_end(damage, end_offset) for damage in self._state.segments.damages)

    @property
    def uncleanable(self) -> tuple[DamagedSegment, ...]:
        """Return the known ranges that are readable, but cannot be cleaned."""
        return self._state.segments.uncleanable

    @property
    def left_by_cleaner(self) -> tuple[DamagedSegment, ...]:
        """Return the damaged and uncleanable ranges, which the cleaner does not change."""
        return (*self.ranges, *self.uncleanable)

    def forget_uncleanable(self) -> None:
        """Let the next clean find the uncleanable ranges again."""
        for segment in self._state.segments:
            segment.uncleanable = ()

    def mark(self, path: str, position: int, reason: str) -> DamagedSegment | None:
        """Record bytes that the cleaner could not use; None if the file is not part of the log.

        Intact batches stay readable, see `Segment.note_finding`.
        """
        for segment in self._state.segments:
            if segment.path == path and position < segment.size_bytes:
                return self.note_finding(segment, position, reason)
        return None

    def mark_batch(self, offset: int, reason: str) -> DamagedSegment | None:
        """Like `mark`, for the batch with this base offset; None if the log has none."""
        segments = self._state.segments
        segment = segments[segments.index_of(offset)]
        with suppress(DamagedSegmentError, CorruptIndexError, CorruptBatchError):
            batch = segment.lookup.batch_at(offset)
            if batch is not None and batch.header.base_offset == offset:
                return self.note_finding(segment, batch.position, reason)
        return None

    def note_finding(self, segment: Segment, position: int, reason: str) -> DamagedSegment | None:
        """Like `mark`; None if the segment was removed or replaced meanwhile."""
        if self._state.segments.find(segment.base_offset) is not segment:
            return None
        end_offset = self._state.end_of(segment)
        return _with_end(segment.note_finding(position, reason, end_offset), end_offset)

    def examine(self, damage: DamagedSegment) -> DamagedSegment | None:
        """Check a damaged or uncleanable range again; return its current range, None without one.

        A damaged range that is intact by now is none.
        """
        segment = self._segment_of(damage)
        if segment is None or damage not in self.left_by_cleaner:
            return None
        current = segment.note_finding(damage.position, damage.reason, self._state.end_of(segment))
        if current.is_served and damage.is_served:
            return current
        if current.is_served:
            segment.damages = tuple(
                other for other in segment.damages if other.position != damage.position
            )
            return None
        return next((other for other in self.ranges if other.position == current.position), None)

    def checksum_of(self, damage: DamagedSegment) -> int | None:
        """Return a checksum of the damaged bytes; None if the segment was removed or replaced."""
        segment = self._segment_of(damage)
        if segment is None:
            return None
        return damage_checksum(segment.file, range(damage.position, damage.end_position))

    def _segment_of(self, damage: DamagedSegment) -> Segment | None:
        segment = self._state.segments.find(damage.base_offset)
        return segment if segment is not None and segment.path == damage.path else None

    def restore(
        self, *, base_offset: int, positions: range, offsets: range, checksum: int, reason: str
    ) -> None:
        """Add a range that was known before a restart, if the log has the same bytes there.

        Ranges that recovery found take precedence.
        """
        segment = self._state.segments.find(base_offset)
        if segment is None or positions.stop > segment.size_bytes:
            return
        overlaps = any(
            damage.position < positions.stop and positions.start < damage.end_position
            for damage in segment.damages
        )
        if overlaps or damage_checksum(segment.file, positions) != checksum:
            return
        segment.add_damage(
            DamagedSegment(
                segment.path,
                base_offset,
                positions.start,
                positions.stop,
                reason,
                offsets.start,
                offsets.stop,
            )
        )

    def verify_step(self, offset: int, *, is_border: bool) -> VerifyStep:
        """Return the next step of a verification from `offset` on.

        `is_border`: a batch ends there; otherwise `offset` may be inside a batch.
        """
        segments = self._state.segments
        segment = segments[segments.index_of(offset)]
        end_offset = self._state.end_of(segment)
        for known in segment.damages:
            damage = _with_end(known, end_offset)
            if damage.first_offset <= offset < damage.next_offset:
                return VerifyStep(segment, 0, 0, range(offset, end_offset), damage)
        position = locate_readable(segment, offset)
        for known in segment.damages:  # of later offsets, at the end of the range before
            if known.position == position:
                damage = _with_end(known, end_offset)
                return VerifyStep(segment, 0, 0, range(offset, end_offset), damage)
        starts = (damage.position for damage in segment.damages if damage.position >= position)
        end = min(starts, default=segment.size_bytes)
        first_offset = max(segment.base_offset, min(offset, end_offset))
        if not is_border and position < end:
            with suppress(CorruptBatchError):
                header = read_header(segment.file.pread(HEADER_BYTES, position))
                if segment.base_offset <= header.base_offset < offset <= header.last_offset:
                    first_offset = header.base_offset
        return VerifyStep(segment, position, end, range(first_offset, end_offset), None)

    def repair_txn_indexes(self) -> list[str]:
        """Rebuild transaction indexes of closed segments that contradict the log; return paths.

        Reads all headers of the log; call it in a thread.
        """
        return repair_txn_indexes(self._state.segments.closed)


def _with_end(damage: DamagedSegment, end_offset: int) -> DamagedSegment:
    """Return a range with its last offset; `end_offset` is that of its segment.

    The batch after the range may claim an offset in front of it, which no checksum covers. A range
    has at least one offset, by which a verification passes over it and an operator skips it.
    """
    next_offset = end_offset if damage.next_offset < 0 else damage.next_offset
    return damage._replace(next_offset=max(next_offset, damage.first_offset + 1))
