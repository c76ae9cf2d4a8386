"""Divide a large clean into parts that several workers share, and put the results together. Pure.

Rules
- Phases: index the dirty segments; then, unless the keys are likely to fit into one map, list the
  clean segments and merge the shards; then rewrite the groups. A phase begins when the one before
  is complete. The parts of a phase are independent of each other.
- Groups are delivered in the job's order. None is delivered before all earlier parts are complete.
- New damage makes all later groups unsound (two_pass/group_accounting.py): their results are
  dropped, and they are rewritten with the damage known.
- The state of a transaction crosses groups. If a part has seen one, or if there is no room for the
  scratch files, the clean cannot be shared: `refusal` says why, and no more groups are delivered.
- The result is that of one worker with a map for every key.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from cleaner.engine.key_map.map_size import (
    SHARDS_MAX,
    SLOT_BYTES,
    map_keys,
    may_not_fit,
    shards_for,
)
from cleaner.engine.outcome import CleanOutcome, RewriteTotals
from cleaner.engine.report import Indexed, make_report
from cleaner.engine.shared import parts
from cleaner.job import CleanedGroup, CleanJob, CleanReport, Damage, SourceSegment
from cleaner.planning.grouping import group_adjacent

# Below this a single worker takes a second or less.
SHARED_BYTES_MIN: Final = 1 << 30
# The input of one part: large enough to outweigh its files and messages, small enough that a worker
# is soon free for another partition.
PART_BYTES_MIN: Final = 128 << 20
PART_BYTES_MAX: Final = 1 << 30
PARTS_PER_WORKER: Final = 4
# Each part of the index has a row for each of its keys, so there are fewer.
INDEX_PARTS_PER_WORKER: Final = 2
# Up to this size of the dirty section, one pass is faster than half of two (0013).
ONE_PASS_BYTES: Final = 4 << 30
# If the clean section is this much larger than the dirty one, the one pass gains little.
CLEAN_SHARE: Final = 4
# If the parts have at most this many rows per key that the map holds, the keys may still fit.
ROWS_PER_KEY: Final = 4
# Numbers that describe the pieces of all files; the broker keeps them in memory.
PLACES_MAX: Final = 1 << 20
ROWS_PER_PIECE: Final = 1 << 18
WAIT_SECONDS: Final = 0.05
OFFSET_BYTES: Final = 8


class Phase(Enum):
    """What the parts of a clean do at present."""

    INDEX = "map"
    LIST = "list"
    MERGE = "merge"
    REWRITE = "rewrite"


@dataclass(frozen=True, slots=True)
class PartSizes:
    """The limits of parts in bytes; tests use smaller ones."""

    shared_min: int = SHARED_BYTES_MIN
    part_min: int = PART_BYTES_MIN
    part_max: int = PART_BYTES_MAX
    one_pass: int = ONE_PASS_BYTES

    def of_part(self, size_bytes: int, count: int) -> int:
        """Return the size of the parts if `size_bytes` should become `count` parts."""
        return max(self.part_min, min(self.part_max, -(-size_bytes // count)))


def can_share(job: CleanJob, workers: int, sizes: PartSizes | None = None) -> bool:
    """Return whether to divide the job among up to `workers` workers."""
    sizes = sizes or PartSizes()
    is_special = job.expired_only or job.view is not None or job.aborted
    if workers < 2 or is_special or job.slack is not None or job.spill_bytes_max == 0:
        return False
    dirty_bytes = _size(_dirty(job))
    clean_bytes = _size(_clean(job))
    if dirty_bytes == 0 or dirty_bytes + clean_bytes < sizes.shared_min:
        return False
    if job.by_index and clean_bytes > 0:
        return False  # one worker reads only what it rewrites
    if (
        dirty_bytes <= sizes.one_pass
        and not may_not_fit(job)
        and clean_bytes < CLEAN_SHARE * dirty_bytes
    ):
        return False
    offsets = job.end_offset - job.groups[0][0].base_offset
    files = sum(len(group) for group in job.groups)
    return (offsets // ROWS_PER_PIECE + files) * _shards(job, workers) <= PLACES_MAX


def _shards(job: CleanJob, workers: int) -> int:
    return min(SHARDS_MAX, max(shards_for(job), workers * PARTS_PER_WORKER))


@dataclass(slots=True)
class _Rewriting:
    """Some neighbouring groups, and the result of their last rewrite."""

    groups: tuple[int, ...]
    result: parts.RewritePartResult | None = None
    running: int | None = None  # the number of its part


@dataclass(slots=True)
class SharedClean:
    """The parts of one job: those that wait, those that run, and the results."""

    job: CleanJob
    workers: int
    sizes: PartSizes = field(default_factory=PartSizes)
    refusal: str = field(init=False, default="")  # why the clean cannot be shared
    phase: Phase = field(init=False, default=Phase.INDEX)
    dropped: int = field(init=False, default=0)  # groups that have to be rewritten again
    _number: int = field(init=False, default=0)
    _waiting: deque[parts.Part] = field(init=False, default_factory=deque)
    _running: dict[int, parts.Part] = field(init=False, default_factory=dict)
    _indexed: dict[int, parts.RowsResult] = field(init=False, default_factory=dict)
    _listed: dict[int, parts.RowsResult] = field(init=False, default_factory=dict)
    _merged: dict[int, parts.MergePartResult] = field(init=False, default_factory=dict)
    _rewriting: list[_Rewriting] = field(init=False, default_factory=list)
    _by_rows: bool = field(init=False, default=False)  # rewrite by a map of all keys
    _too_many_keys: bool = field(init=False, default=False)  # for that map
    _file_bytes: int = field(init=False, default=0)  # limit of each scratch file
    _delivered: int = field(init=False, default=0)  # parts of the rewrite
    _damaged: dict[int, Damage] = field(init=False, default_factory=dict)
    _keys: int = field(init=False, default=0)
    _bytes_read: int = field(init=False, default=0)
    _bytes_done: int = field(init=False, default=0)  # of the phase
    _started: float | None = field(init=False, default=None)
    _mapped: float = field(init=False, default=0.0)
    _ended: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        shards = _shards(self.job, self.workers)
        to_index = self._parts_of(_dirty(self.job))
        assert to_index, "can_share refuses a job without dirty bytes"
        files = len(to_index) + len(self._parts_of(_clean(self.job))) + shards
        self._file_bytes = self.job.spill_bytes_max // files
        for segments in to_index:
            self._waiting.append(
                parts.IndexPart(self._next_number(), segments, shards, self._file_bytes)
            )

    # Parts

    def next_part(self, now: float) -> parts.Part | None:
        """Return a part to run now; None if all that is left waits for running parts."""
        if self._started is None:
            self._started = now
        if self.refusal:
            return None
        if self.phase is Phase.REWRITE:
            return self._next_rewrite()
        if not self._waiting:
            return None
        part = self._waiting.popleft()
        self._running[part.number] = part
        return part

    def wait_part(self) -> parts.WaitPart:
        """Return a part that waits a moment."""
        return parts.WaitPart(self._next_number(), WAIT_SECONDS)

    def finished(self, number: int, result: parts.PartResult, now: float) -> None:
        """Take the result of a part."""
        if isinstance(result, parts.Waited):
            return
        part = self._running.pop(number)
        match result:
            case parts.NoSpace(reason):
                self.refusal = f"no room for its scratch files: {reason}"
            case parts.RowsResult():
                self._take_rows(part, result)
            case parts.MergePartResult():
                self._merged[number] = result
                self._keys += result.keys
            case parts.RewritePartResult():
                self._take_rewrite(part, result)
        self._bytes_done += self._input_bytes(part)
        if not self.refusal and not self._waiting and not self._running:
            self._end_phase(now)

    def _take_rows(self, part: parts.Part, result: parts.RowsResult) -> None:
        if result.transactions_seen:
            self.refusal = "its transactions need one worker"
        results = self._indexed if isinstance(part, parts.IndexPart) else self._listed
        results[part.number] = result
        for base, damage in result.damaged:
            self._damaged.setdefault(base, damage)
        self._bytes_read += result.bytes_read

    def _end_phase(self, now: float) -> None:
        """Begin the next phase that has parts."""
        if self.phase is Phase.INDEX:
            rows = sum(result.rows.rows for result in self._indexed.values())
            section = self.job.end_offset - self.job.first_dirty_offset
            few = rows <= ROWS_PER_KEY * map_keys(self.job, section)
            if few and _clean(self.job):
                self._by_rows = True
                self._begin_rewrite(now)
            else:
                self._begin_listing()
        elif self.phase is Phase.LIST:
            self._begin_merge()
        elif self.phase is Phase.MERGE:
            self._begin_rewrite(now)
        elif self.is_done:
            self._ended = now

    def _begin_listing(self) -> None:
        self.phase, self._bytes_done = Phase.LIST, 0
        shards = _shards(self.job, self.workers)
        for segments in self._parts_of(_clean(self.job)):
            self._waiting.append(
                parts.ListPart(self._next_number(), segments, shards, self._file_bytes)
            )
        if not self._waiting:
            self._begin_merge()

    def _begin_merge(self) -> None:
        self.phase, self._bytes_done = Phase.MERGE, 0
        dirty, below = (
            [results[number].rows for number in sorted(results)]
            for results in (self._indexed, self._listed)
        )
        for shard in range(_shards(self.job, self.workers)):
            part = parts.MergePart(
                self._next_number(),
                _with_rows(file.of_shard(shard) for file in dirty),
                _with_rows(file.of_shard(shard) for file in below),
                self._file_bytes,
            )
            self._waiting.append(part)

    def _begin_rewrite(self, now: float) -> None:
        self.phase, self._bytes_done, self._mapped = Phase.REWRITE, 0, now
        sizes = [(place, _size(group)) for place, group in enumerate(self.job.groups)]
        target = self.sizes.of_part(sum(size for _, size in sizes), self.workers * PARTS_PER_WORKER)
        self._rewriting = [_Rewriting(groups) for groups in group_adjacent(sizes, target)]

    def _next_rewrite(self) -> parts.Part | None:
        if self._by_rows and self._too_many_keys:
            return None
        for rewriting in self._rewriting:
            if rewriting.result is None and rewriting.running is None:
                offsets: tuple[parts.OffsetsFile, ...] | None = None
                if not self._by_rows:
                    offsets = tuple(result.offsets for result in self._merged.values())
                rows = [self._indexed[number].rows for number in sorted(self._indexed)]
                part = parts.RewritePart(
                    self._next_number(),
                    rewriting.groups,
                    tuple(file.as_one_shard() for file in rows) if self._by_rows else (),
                    offsets,
                    any(
                        result.keyless_seen
                        for result in (*self._indexed.values(), *self._listed.values())
                    ),
                    tuple(sorted(self._damaged.items())),
                )
                rewriting.running = part.number
                self._running[part.number] = part
                return part
        return None

    def _take_rewrite(self, part: parts.Part, result: parts.RewritePartResult) -> None:
        if not self._by_rows or result.fits:
            self._take_groups(part, result)
            return
        # Too many keys for one map after all. No part can have another result.
        assert all(rewriting.result is None for rewriting in self._rewriting)
        self._too_many_keys = True
        if not self._running:
            self._by_rows = False
            self._begin_listing()

    def _take_groups(self, part: parts.Part, result: parts.RewritePartResult) -> None:
        place = next(
            place
            for place, rewriting in enumerate(self._rewriting)
            if rewriting.running == part.number
        )
        rewriting = self._rewriting[place]
        rewriting.running = None
        self._bytes_read += result.bytes_read
        if result.transactions_seen:
            self.refusal = "its transactions need one worker"
            return
        earlier = self.job.groups[rewriting.groups[0]][0].base_offset
        assert isinstance(part, parts.RewritePart)
        unknown = self._damaged.keys() - dict(part.damaged).keys()
        if any(base < earlier for base in unknown):
            self.dropped += len(result.groups)  # it did not know of damage before it
            return
        rewriting.result = result
        damaged = dict(result.damaged)
        if damaged.keys() - self._damaged.keys():
            self._damaged.update(damaged)
            for later in self._rewriting[place + 1 :]:
                if later.result is not None:
                    self.dropped += len(later.result.groups)
                    later.result = None

    # Results

    @property
    def is_done(self) -> bool:
        """Return whether all groups are rewritten and no part runs."""
        return (
            self.phase is Phase.REWRITE
            and not self._running
            and all(rewriting.result is not None for rewriting in self._rewriting)
        )

    def take_groups(self) -> tuple[CleanedGroup, ...]:
        """Return the groups that can be published now, and have not been returned before."""
        groups: list[CleanedGroup] = []
        while not self.refusal and self._delivered < len(self._rewriting):
            result = self._rewriting[self._delivered].result
            if result is None:
                break
            groups += result.groups
            self._delivered += 1
        return tuple(groups)

    @property
    def progress(self) -> tuple[str, int, int]:
        """Return the phase, its bytes done and all its bytes."""
        total = {
            Phase.INDEX: _size(_dirty(self.job)),
            Phase.LIST: _size(_clean(self.job)),
            Phase.MERGE: _shards(self.job, self.workers),
            Phase.REWRITE: sum(_size(group) for group in self.job.groups),
        }
        return self.phase.value, min(self._bytes_done, total[self.phase]), total[self.phase]

    def report(self) -> CleanReport:
        """Return the report of the job, which is done."""
        assert self.is_done
        assert self._started is not None
        totals = RewriteTotals()
        keys = self._keys
        for rewriting in self._rewriting:
            assert rewriting.result is not None
            totals.add(rewriting.result.totals)
            keys = max(keys, rewriting.result.keys)
        outcome = CleanOutcome(
            totals=totals,
            damaged=dict(self._damaged),
            map_seconds=self._mapped - self._started,
            rewrite_seconds=self._ended - self._mapped,
        )
        capacity = map_keys(self.job, self.job.end_offset)
        indexed = Indexed(self.job.end_offset, keys, min(keys / capacity, 1.0))
        report = make_report(self.job, outcome, indexed, bytes_read=self._bytes_read)
        return replace(report, spilled_bytes=self._scratch_bytes())

    def _scratch_bytes(self) -> int:
        rows = sum(result.rows.rows for result in (*self._indexed.values(), *self._listed.values()))
        offsets = sum(count for result in self._merged.values() for _, count in result.offsets.runs)
        return rows * SLOT_BYTES + offsets * OFFSET_BYTES

    # Helpers

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _parts_of(self, sources: Sequence[SourceSegment]) -> tuple[tuple[int, ...], ...]:
        target = self.sizes.of_part(_size(sources), self.workers * INDEX_PARTS_PER_WORKER)
        return group_adjacent(((s.base_offset, s.size_bytes) for s in sources), target)

    def _input_bytes(self, part: parts.Part) -> int:
        match part:
            case parts.IndexPart() | parts.ListPart():
                bases = set(part.segments)
                sources = (source for group in self.job.groups for source in group)
                return _size(source for source in sources if source.base_offset in bases)
            case parts.RewritePart():
                return sum(_size(self.job.groups[place]) for place in part.groups)
            case _:
                return 1


def _dirty(job: CleanJob) -> list[SourceSegment]:
    """Return the segments with dirty records."""
    return [
        source
        for group in job.groups
        for source in group
        if source.next_base_offset > job.first_dirty_offset
    ]


def _clean(job: CleanJob) -> list[SourceSegment]:
    """Return the segments with records below the first dirty offset."""
    return [
        source
        for group in job.groups
        for source in group
        if source.base_offset < job.first_dirty_offset
    ]


def _size(sources: Iterable[SourceSegment]) -> int:
    return sum(source.size_bytes for source in sources)


def _with_rows(files: Iterable[parts.RowsFile]) -> tuple[parts.RowsFile, ...]:
    return tuple(file for file in files if file.pieces)
