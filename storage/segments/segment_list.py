"""The segments of one log in offset order; the last one is active.

There is always at least one segment, and base offsets increase. A change makes a new tuple, so that
a reader in another thread continues with its segments.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from storage.model import SegmentFacts
from storage.segments.damage import DamagedSegment
from storage.segments.segment import Segment


class SegmentList:
    """Segments by base offset."""

    __slots__ = ("_segments", "active", "bases")

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._set(sorted(segments, key=lambda segment: segment.base_offset))

    def _set(self, segments: list[Segment]) -> None:
        assert segments
        bases = tuple(segment.base_offset for segment in segments)
        assert len(set(bases)) == len(bases)
        self._segments = tuple(segments)
        self.bases = bases
        self.active = segments[-1]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def __getitem__(self, index: int) -> Segment:
        return self._segments[index]

    @property
    def all(self) -> tuple[Segment, ...]:
        """Return the segments of this moment: the same tuple until the next change."""
        return self._segments

    def index_of(self, offset: int) -> int:
        """Return the index of the segment for `offset`; 0 for an offset below the first base."""
        index = bisect_right(self.bases, offset) - 1
        return index if index > 0 else 0

    def since(self, offset: int) -> tuple[Segment, ...]:
        """Return the segments that may have `offset` or later offsets."""
        return self._segments[self.index_of(offset) :]

    def find(self, base_offset: int) -> Segment | None:
        """Return the segment with this base offset."""
        index = self.index_of(base_offset)
        return self._segments[index] if self.bases[index] == base_offset else None

    def add(self, segment: Segment) -> None:
        """Append a new active segment."""
        assert segment.base_offset > self.bases[-1]
        self._set([*self._segments, segment])

    def replace(self, gone: Iterable[Segment], new: Iterable[Segment]) -> None:
        """Replace some segments with others."""
        scheduled = {segment.base_offset for segment in gone}
        segments = [segment for segment in self._segments if segment.base_offset not in scheduled]
        self._set(sorted([*segments, *new], key=lambda segment: segment.base_offset))

    @property
    def first_base_offset(self) -> int:
        """Return the base offset of the first segment; the log may start after it."""
        return self.bases[0]

    @property
    def closed(self) -> tuple[Segment, ...]:
        """Return the segments that change no more, except that retention or a swap removes them."""
        return self._segments[:-1]

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all log files."""
        return sum(segment.size_bytes for segment in self._segments)

    def facts(self, log_end_offset: int) -> tuple[SegmentFacts, ...]:
        """Return the facts of each segment that planning needs."""
        ends = (*self.bases[1:], log_end_offset)
        return tuple(segment.facts(end) for segment, end in zip(self._segments, ends, strict=True))

    @property
    def damages(self) -> tuple[DamagedSegment, ...]:
        """Return all damaged ranges with their last offsets."""
        return tuple(
            damage if damage.next_offset >= 0 else damage._replace(next_offset=end)
            for segment, end in zip(self._segments, (*self.bases[1:], -1), strict=True)
            for damage in segment.damages
        )

    @property
    def uncleanable(self) -> tuple[DamagedSegment, ...]:
        """Return all readable ranges that cannot be cleaned."""
        return tuple(damage for segment in self._segments for damage in segment.uncleanable)
