"""Earlier lists of segments, for the console's picture of a partition (static/parts/strata.js).

Rules
- Every OBSERVE_SECONDS, and before segments are replaced, the list of a partition is compared with
  the one before: so the largest list of a log is stored. A list that has not changed is the same
  tuple, so this takes 2 us for each partition.
- A change is stored as the data that undoes it: the segments that it removed, the base offsets of
  those that it added, and the active segment. Nothing is stored while a partition has the same
  segments and the same dirty section.
- Changes are kept for KEPT_MS, and at most UNITS_MAX segments in them over all partitions; the
  oldest go first. That is at most 12 MB. They are lost at a restart.
- How much of a segment was alive is not stored.
- A change has the clean that ran at that time: between the swaps of one clean, a list has some of
  its outputs and some of its sources, so that values which others supersede are missing in it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from broker.event_loop.loop_turns import Turns
from broker.topics.partition import Partition
from cleaner.planning.dirty_section import DirtySection
from storage.log.log import Log
from storage.model import TopicPartition
from storage.segments.segment import Segment

OBSERVE_SECONDS: Final = 10.0
KEPT_MS: Final = 6 * 3_600_000
UNITS_MAX: Final = 50_000  # segments in changes, and two for each change; 240 bytes each


class SegmentRow(NamedTuple):
    """One segment of a past list."""

    base_offset: int
    next_offset: int
    size_bytes: int
    largest_timestamp_ms: int


class Observation(NamedTuple):
    """The state of a partition, beside its closed segments, when they were observed."""

    at_ms: int
    first_dirty_offset: int | None  # None: not compacted
    end_offset: int | None  # of the dirty section
    active: SegmentRow
    job_id: str | None  # of the clean that runs

    def has_section_of(self, other: "Observation") -> bool:
        """Return whether both have the same dirty section."""
        return (
            self.first_dirty_offset == other.first_dirty_offset
            and self.end_offset == other.end_offset
        )


@dataclass(frozen=True, slots=True)
class SegmentChange:
    """What undoes one change of a list or of its dirty section."""

    before: Observation  # the last one of the list before the change
    removed: tuple[SegmentRow, ...]
    added: tuple[int, ...]  # base offsets

    @property
    def units(self) -> int:
        """Return its size."""
        return 2 + len(self.removed) + len(self.added)


@dataclass(slots=True)
class _Observed:
    """A partition as it was observed last."""

    log: Log
    segments: tuple[Segment, ...]
    last: Observation
    since_ms: int  # the lists from then on are known
    changes: deque[SegmentChange] | None = None  # most partitions have none


@dataclass(frozen=True, slots=True)
class PastSegments:
    """The changes of one partition, the oldest first."""

    since_ms: int
    changes: tuple[SegmentChange, ...]


@dataclass(slots=True)
class SegmentHistory:
    """The changes of the segment lists of all partitions."""

    partitions: Callable[[], Iterable[Partition]]
    dirty_section: Callable[[TopicPartition], DirtySection | None]
    job_id: Callable[[TopicPartition], str | None]  # of the clean that runs
    wall_ms: Callable[[], int]
    units: int = 0
    _observed: dict[TopicPartition, _Observed] = field(default_factory=dict)
    _order: deque[TopicPartition] = field(default_factory=deque)  # of changes, the oldest first

    async def observe(self) -> None:
        """Compare every list with the one before; forget partitions that are gone."""
        turns, present = Turns(), set[TopicPartition]()
        async for partition in turns.over(self.partitions()):
            present.add(partition.partition)
            self.observe_partition(partition)
        forgotten = self._forget(self._observed.keys() - present)
        self._drop_old()
        while forgotten:  # a log closes its files with its last reference
            forgotten.pop()
            await turns.take()

    def of(self, partition: Partition) -> PastSegments:
        """Return the changes up to the present list."""
        self.observe_partition(partition)
        observed = self._observed[partition.partition]
        return PastSegments(observed.since_ms, tuple(observed.changes or ()))

    def observe_partition(self, partition: Partition) -> None:
        """Compare the list of a partition with the one before."""
        name, log = partition.partition, partition.log
        segments, now = log.segments.all, self._look_at(partition)
        before = self._observed.get(name)
        if before is None or before.log is not log:  # a new partition, or it has been reopened
            self._forget({name})
            self._observed[name] = _Observed(log, segments, now, since_ms=now.at_ms)
            return
        if before.segments is not segments or not before.last.has_section_of(now):
            self._add(name, before, segments)
        before.segments, before.last = segments, now

    def _look_at(self, partition: Partition) -> Observation:
        name, log = partition.partition, partition.log
        section = self.dirty_section(name)
        return Observation(
            self.wall_ms(),
            None if section is None else section.first_dirty_offset,
            None if section is None else section.end_offset,
            _row(log.segments.active, log.log_end_offset),
            self.job_id(name),
        )

    def _add(self, name: TopicPartition, before: _Observed, after: tuple[Segment, ...]) -> None:
        """Store a change of the list or of the dirty section."""
        change = SegmentChange(before.last, *_difference(before.segments, after))
        if before.changes is None:
            before.changes = deque()
        before.changes.append(change)
        self._order.append(name)
        self.units += change.units
        while self.units > UNITS_MAX:
            self._drop_oldest()

    def _drop_old(self) -> None:
        """Drop changes that are older than KEPT_MS."""
        limit_ms = self.wall_ms() - KEPT_MS
        while self._order:
            changes = self._observed[self._order[0]].changes
            assert changes
            if changes[0].before.at_ms >= limit_ms:
                return
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        observed = self._observed[self._order.popleft()]
        assert observed.changes
        change = observed.changes.popleft()
        self.units -= change.units
        observed.since_ms = change.before.at_ms

    def _forget(self, names: Set[TopicPartition]) -> list[_Observed]:
        """Forget partitions and return them.

        `_order` is read once for all of them, as it may be long.
        """
        forgotten = [self._observed.pop(name) for name in names if name in self._observed]
        units = sum(change.units for each in forgotten for change in each.changes or ())
        if units:
            self.units -= units
            self._order = deque(name for name in self._order if name not in names)
        return forgotten


def _difference(
    before: tuple[Segment, ...], after: tuple[Segment, ...]
) -> tuple[tuple[SegmentRow, ...], tuple[int, ...]]:
    """Return the rows of the segments that are gone, and the base offsets of the new ones."""
    old, new = set(map(id, before)), set(map(id, after))
    ends = (*(segment.base_offset for segment in before[1:]), before[-1].base_offset)
    removed = tuple(
        _row(segment, end)
        for segment, end in zip(before, ends, strict=True)
        if id(segment) not in new
    )
    return removed, tuple(segment.base_offset for segment in after if id(segment) not in old)


def _row(segment: Segment, next_offset: int) -> SegmentRow:
    return SegmentRow(
        segment.base_offset, next_offset, segment.size_bytes, segment.max_timestamp_ms
    )
