"""What the cleaner remembers of a partition between two cleans, beside Kafka's checkpoint.

Rules
- All of it can be lost or be wrong: that costs work, never data. An operator's hold is kept here,
  too, because it belongs to the partition; it is as durable as the file.
- It is believed only of the log it was learned from: another topic id voids it, another generation
  voids what it says of the content, and what it says of a segment holds for a segment of that base
  offset and that size in bytes alone.
- A stretch is known to be clean only where each of its segments is known.
- The log is clean below the checkpoint with respect to all that is older, and in a stretch beyond
  with respect to what could be read. So a clean voids the stretches it did not reach: what it
  indexed may have a record older than a tombstone in there.
- A time that lies ahead is by a clock that was wrong: it counts as now, and the horizons, which the
  same clock may have set, are not known any more.

Pure; cleaner_state_store.py puts it on the disk.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from cleaner.host import LogFacts
from cleaner.job import NO_HORIZON, UNKNOWN_HORIZON, CleanJob, CleanReport
from cleaner.planning.intervals import Interval, meets, merged, reach, without
from cleaner.planning.survival import observed, updated
from storage.segments.retention import SegmentFacts

# What could not go although its horizon had passed (a marker whose transaction still has a batch)
# is not asked for again before this, or delete.retention.ms where that is longer.
STUBBORN_MS: Final = 3_600_000
# A clock may be set back by less than this without anything being forgotten for it.
CLOCK_STEP_MS: Final = 60_000

SegmentKey: TypeAlias = tuple[int, int]  # (base offset, size in bytes)


@dataclass(frozen=True, slots=True)
class PartitionCleanerState:
    """One partition. Times in wall ms; `horizons` by (base offset, bytes) of a closed segment."""

    topic_id: bytes = b""
    generation: str = ""  # of the log it was learned from; "": of an earlier process
    first_seen_ms: int = 0  # this content
    cleaned: tuple[Interval, ...] = ()  # clean beyond the checkpoint
    horizons: Mapping[SegmentKey, int] = field(default_factory=dict)
    expired_at_ms: int | None = None  # when tombstones were last looked for without new data
    survivorship: float = 0.0
    observations: int = 0
    paused_since_ms: int | None = None  # an operator's pause
    damaged: frozenset[SegmentKey] = frozenset()  # segments whose damage was told
    learned_at_ms: int = 0  # from the last job
    start_offset: int = 0  # of the log, at the last job over dirty data
    tombstones: int | None = None  # that the last jobs left in what is clean; None: not known

    def horizon(self, segment: SegmentFacts) -> int:
        """When the segment can next lose a tombstone or marker; NO_ or UNKNOWN_HORIZON."""
        return self.horizons.get((segment.base_offset, segment.size_bytes), UNKNOWN_HORIZON)

    def clean_stretches(self, segments: Iterable[SegmentFacts]) -> tuple[Interval, ...]:
        """Where the log is clean beyond the checkpoint, as far as that can be believed."""
        if not self.cleaned:
            return ()
        parts = []
        for segment in segments:
            if (segment.base_offset, segment.size_bytes) in self.horizons:
                first, end = segment.base_offset, segment.next_base_offset
                parts += [(max(first, low), min(end, high)) for low, high in self.cleaned]
        return merged(parts)

    # As JSON -----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """For the file."""
        return {
            "topic_id": self.topic_id.hex(),
            "first_seen_ms": self.first_seen_ms,
            "cleaned": [list(stretch) for stretch in self.cleaned],
            "horizons": [[*key, horizon] for key, horizon in self.horizons.items()],
            "expired_at_ms": self.expired_at_ms,
            "survivorship": self.survivorship,
            "observations": self.observations,
            "held_since_ms": self.paused_since_ms,
            "damaged": [list(key) for key in sorted(self.damaged)],
            "learned_at_ms": self.learned_at_ms,
            "start_offset": self.start_offset,
            "tombstones": self.tombstones,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "PartitionCleanerState":
        """Raises ValueError, KeyError or TypeError for what is not ours."""
        ratio = float(fields["survivorship"])
        if not 0 <= ratio <= 1:
            raise ValueError(f"a survivorship of {ratio}")
        return cls(
            topic_id=bytes.fromhex(fields["topic_id"]),
            first_seen_ms=int(fields["first_seen_ms"]),
            cleaned=merged((int(first), int(end)) for first, end in fields["cleaned"]),
            horizons={(int(b), int(size)): int(at) for b, size, at in fields["horizons"]},
            expired_at_ms=_optional(fields["expired_at_ms"]),
            survivorship=ratio,
            observations=int(fields["observations"]),
            paused_since_ms=_optional(fields["held_since_ms"]),
            damaged=frozenset((int(b), int(size)) for b, size in fields.get("damaged", ())),
            learned_at_ms=int(fields.get("learned_at_ms", 0)),
            start_offset=int(fields.get("start_offset", 0)),
            tombstones=_optional(fields.get("tombstones")),
        )


def damaged_base(path: str) -> int:
    """The base offset in the name of a segment's log file."""
    return int(path.rpartition("/")[2].partition(".")[0])


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)


FRESH: Final = PartitionCleanerState()


def state_of_log(
    cleaner_state: PartitionCleanerState | None, facts: LogFacts, now_ms: int
) -> PartitionCleanerState:
    """What may be believed of this log; `cleaner_state` itself where nothing changed."""
    if cleaner_state is None or cleaner_state.topic_id != facts.topic_id:
        return PartitionCleanerState(facts.topic_id, facts.generation, first_seen_ms=now_ms)
    cleaner_state = _corrected(cleaner_state, now_ms)
    if cleaner_state.generation == facts.generation:
        return cleaner_state
    cut = any(end > facts.log_end_offset for _, end in cleaner_state.cleaned)
    if cleaner_state.generation or cut:
        cleaner_state = replace(
            cleaner_state,
            first_seen_ms=now_ms,
            cleaned=(),
            horizons={},
            expired_at_ms=None,
            damaged=frozenset(),
            tombstones=None,
        )
    return replace(cleaner_state, generation=facts.generation)


def _corrected(cleaner_state: PartitionCleanerState, now_ms: int) -> PartitionCleanerState:
    """Without the times of a clock that was ahead; `cleaner_state` itself where there are none."""
    held_ms, expired_ms = cleaner_state.paused_since_ms, cleaner_state.expired_at_ms
    latest_ms = max(
        cleaner_state.first_seen_ms, cleaner_state.learned_at_ms, held_ms or 0, expired_ms or 0
    )
    if latest_ms <= now_ms:
        return cleaner_state
    if (
        max(cleaner_state.first_seen_ms, cleaner_state.learned_at_ms, expired_ms or 0)
        > now_ms + CLOCK_STEP_MS
    ):
        unknown = dict.fromkeys(cleaner_state.horizons, UNKNOWN_HORIZON)
        cleaner_state = replace(cleaner_state, horizons=unknown, first_seen_ms=now_ms)
    return replace(
        cleaner_state,
        first_seen_ms=min(cleaner_state.first_seen_ms, now_ms),
        learned_at_ms=min(cleaner_state.learned_at_ms, now_ms),
        paused_since_ms=None if held_ms is None else min(held_ms, now_ms),
        expired_at_ms=None if expired_ms is None else min(expired_ms, now_ms),
    )


def state_after_job(
    cleaner_state: PartitionCleanerState,
    job: CleanJob,
    report: CleanReport,
    after: LogFacts,
    *,
    dirty_bytes: int,
    alpha: float,
) -> tuple[PartitionCleanerState, int]:
    """What a finished job teaches, and how far the log is clean without a gap from the checkpoint.

    `after`: the log's facts now that its groups are published.
    """
    checkpoint = min(after.first_dirty_offset, report.next_dirty_offset)
    if job.expired_only and not report.damaged:
        checkpoint = after.first_dirty_offset
    stretches = _stretches(cleaner_state, job, report)
    clean_below = reach(checkpoint, stretches)
    cleaned = tuple((first, end) for first, end in stretches if end > clean_below)
    complete = report.next_dirty_offset >= job.end_offset and not report.damaged
    ratio, observations = cleaner_state.survivorship, cleaner_state.observations
    teaches = complete and dirty_bytes > 0 and not job.expired_only
    if teaches and not _lost_a_front(cleaner_state, job, after):
        seen = observed(report.bytes_before, report.bytes_after, dirty_bytes)
        ratio = updated(ratio, observations, seen, alpha)
        observations += 1
    return (
        replace(
            cleaner_state,
            cleaned=cleaned,
            horizons=_horizons(cleaner_state, job, report, after, (*cleaned, (0, clean_below))),
            expired_at_ms=job.now_ms if job.expired_only else cleaner_state.expired_at_ms,
            survivorship=ratio,
            observations=observations,
            damaged=_damaged(cleaner_state, report, after),
            learned_at_ms=job.now_ms,
            start_offset=cleaner_state.start_offset if job.expired_only else job.log_start_offset,
            tombstones=_tombstones(cleaner_state, job, report),
        ),
        clean_below,
    )


def _tombstones(
    cleaner_state: PartitionCleanerState, job: CleanJob, report: CleanReport
) -> int | None:
    """How many tombstones are left: a clean counts all, an expiry job those that it removes."""
    if not job.expired_only:
        return report.tombstones_kept
    if cleaner_state.tombstones is None:
        return None
    return max(0, cleaner_state.tombstones - report.tombstones_removed)


def _lost_a_front(cleaner_state: PartitionCleanerState, job: CleanJob, after: LogFacts) -> bool:
    """Whether retention or deleted records took part of what the job read.

    What went that way says nothing about how much of new data survives a clean: the job's sizes
    are not learned from. A segment that was cut before an earlier job counts as it is.
    """
    if after.log_start_offset > job.log_start_offset:
        return True
    is_cut = job.groups[0][0].base_offset < job.log_start_offset
    return is_cut and job.log_start_offset != cleaner_state.start_offset


def _stretches(
    cleaner_state: PartitionCleanerState, job: CleanJob, report: CleanReport
) -> tuple[Interval, ...]:
    """Where the log is clean after a job: what was, as far as it stands, and what it added."""
    first_dirty = job.first_dirty_offset
    clean_below = first_dirty if job.clean_below is None else job.clean_below
    before = merged([(0, clean_below), *cleaner_state.cleaned])
    if not job.expired_only:
        before = tuple((first, min(end, first_dirty)) for first, end in before)
    # What could not be read is not clean any more.
    lost = [
        (source.base_offset, source.next_base_offset)
        for group in job.groups
        for source in group
        if report.next_dirty_offset <= source.base_offset < first_dirty
        and not meets(report.cleaned, source.base_offset, source.next_base_offset)
    ]
    remaining = [piece for stretch in before for piece in without(stretch, lost)]
    if job.expired_only:
        return merged(remaining)
    beyond = [(max(first, first_dirty), end) for first, end in report.cleaned]
    return merged([*remaining, *beyond, (first_dirty, report.next_dirty_offset)])


def _damaged(
    cleaner_state: PartitionCleanerState, report: CleanReport, after: LogFacts
) -> frozenset[SegmentKey]:
    """Known damage of segments that stand as they stood."""
    reported = {damaged_base(path) for path, _, _ in report.damaged}
    present = {(s.base_offset, s.size_bytes) for s in after.segments}
    return frozenset(key for key in present if key in cleaner_state.damaged or key[0] in reported)


def _horizons(
    cleaner_state: PartitionCleanerState,
    job: CleanJob,
    report: CleanReport,
    after: LogFacts,
    clean: Iterable[Interval],
) -> dict[SegmentKey, int]:
    """Horizons of the closed segments that exist now and are clean, at least in part."""
    reported = {
        (horizon.base_offset, horizon.size_bytes): horizon.horizon_ms for horizon in report.horizons
    }
    read = {source.base_offset for group in job.groups for source in group}
    stretches = merged(clean)
    damaged = {damage.base_offset for damage in after.damaged}
    results: dict[SegmentKey, int] = {}
    for segment in after.segments[:-1]:
        base, end = segment.base_offset, segment.next_base_offset
        if base in damaged or not meets(stretches, base, end):
            continue
        key = (base, segment.size_bytes)
        horizon = reported.get(key, cleaner_state.horizon(segment))
        if horizon == UNKNOWN_HORIZON and job.expired_only and base in read and key not in reported:
            horizon = NO_HORIZON  # it was looked at: once is enough
        # One that was stamped by this very job is no refusal, also with a retention of nothing.
        passed = 0 <= horizon < job.now_ms + job.expired_only
        if key in reported and job.drop_expired_tombstones and passed:
            horizon = job.now_ms + max(STUBBORN_MS, job.delete_retention_ms)
        results[key] = horizon
    return results
