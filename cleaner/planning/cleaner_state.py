"""The state that the cleaner stores of a partition, beyond Kafka's cleaner checkpoint. Pure.

Rules
- The state may be lost or wrong: that costs work, never data. It includes an operator's pause,
  which is as durable as the file.
- The first dirty offset is stored here, too, because the cleaner checkpoint has no checksum. A
  start uses the lower one: a tombstone in a dirty section that counts as clean would expire before
  the older values of its key are removed.
- The state applies only to the log of its topic id and generation. Another topic id invalidates all
  of it; another generation invalidates the facts about the content. A fact about a segment applies
  to a segment with the same base offset and size.
- An interval counts as clean only if every segment in it is known.
- Below the checkpoint, the log is clean with respect to all older records. In a clean interval
  beyond the checkpoint, it is clean with respect to the older records that are readable. So a job
  invalidates the intervals that it did not reach: it may have indexed a record that is older than a
  tombstone in them.
- `cleaned_end` is the highest end of all cleans: they have removed records below it only, and only
  because of records below it. It falls only when the log is truncated. If the state of a log was
  lost, it is the end of the log at the start.
- A time in the future comes from a wrong clock. It counts as the present time, and all delete
  horizons become unknown, because the same clock may have set them.

cleaner_state_store.py writes the state to disk.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypedDict

from cleaner.host import LogFacts
from cleaner.job import (
    NO_HORIZON,
    UNKNOWN_HORIZON,
    UNKNOWN_RECORDS,
    CleanJob,
    CleanReport,
    RangeDigest,
)
from cleaner.planning.intervals import Interval, meets, merged, reach, without
from cleaner.planning.survivorship import observed, updated
from storage.model import SegmentFacts

# A marker whose horizon has passed cannot be removed while its transaction has a batch. Wait this
# long, or delete.retention.ms if that is longer, before the next attempt.
STUBBORN_MS: Final = 3_600_000
# Setting the clock back by less than this invalidates nothing.
CLOCK_STEP_MS: Final = 60_000

SegmentKey: TypeAlias = tuple[int, int]  # (base offset, size in bytes)


@dataclass(frozen=True, slots=True)
class PartitionCleanerState:
    """The state of one partition. Times in wall ms."""

    topic_id: bytes = b""
    generation: str = ""  # of the log; "" if it is from an earlier process
    first_seen_ms: int = 0  # of this content
    cleaned: tuple[Interval, ...] = ()  # clean beyond the checkpoint
    horizons: Mapping[SegmentKey, int] = field(default_factory=dict)
    expired_at_ms: int | None = None  # time of the last job without dirty data
    survivorship: float = 0.0
    observations: int = 0
    paused_since_ms: int | None = None  # an operator's pause
    damaged: frozenset[SegmentKey] = frozenset()  # segments whose damage was reported
    learned_at_ms: int = 0  # time of the last job
    start_offset: int = 0  # of the log, at the last job over dirty data
    tombstones: int | None = None  # in the clean section; None: unknown
    # Records that the last clean of the whole log left; None: unknown, or it was to be selective.
    records: int | None = None
    resolved_end: int = 0  # a selective clean has decided all keys below; 0: none since then
    live_bytes: int | None = None  # of the last records of these keys
    has_tombstones: bool = True  # below resolved_end; False only if a selective clean found none
    # How many bytes of a segment were alive when its keys were last decided; later records may have
    # superseded more of them since.
    live: Mapping[SegmentKey, int] = field(default_factory=dict)
    live_records: Mapping[SegmentKey, int] = field(default_factory=dict)  # likewise
    # Of the last records below `digest_end`, from a verified clean or a check; 0: there are none.
    digest_end: int = 0
    digests: tuple[RangeDigest, ...] = ()
    first_dirty_offset: int | None = None  # as in the cleaner checkpoint; None: unknown
    # A higher one from before the offset fell, which the checkpoint on the disk may still have; 0:
    # none. The file has it as `lowered_from`.
    earlier_first_dirty_offset: int = 0
    # Another broker, such as Kafka, has cleaned records below this offset; 0: none has. It may have
    # removed a tombstone that a view with a lower horizon has not applied.
    cleaned_elsewhere_end: int = 0
    # The highest end of all cleans, also of those that were aborted, and of cleans before a change
    # of the cleanup policy; None: an earlier release wrote the state.
    cleaned_end: int | None = 0

    def is_cleaned_elsewhere(self, checkpoint: int | None) -> bool:
        """Return whether a checkpoint was written by another broker, or is damaged."""
        if checkpoint is None or self.first_dirty_offset is None:
            return False
        return checkpoint > max(self.first_dirty_offset, self.earlier_first_dirty_offset)

    def with_first_dirty_offset(self, offset: int) -> "PartitionCleanerState":
        """Return the state with an offset that a checkpoint will have soon."""
        before = max(self.first_dirty_offset or 0, self.earlier_first_dirty_offset)
        earlier = before if offset < before else 0
        return replace(self, first_dirty_offset=offset, earlier_first_dirty_offset=earlier)

    def horizon(self, segment: SegmentFacts) -> int:
        """Return when the segment can next lose a tombstone; NO_HORIZON or UNKNOWN_HORIZON."""
        return self.horizons.get((segment.base_offset, segment.size_bytes), UNKNOWN_HORIZON)

    def clean_ranges(self, segments: Iterable[SegmentFacts]) -> tuple[Interval, ...]:
        """Return where the log is clean beyond the checkpoint, in known segments."""
        if not self.cleaned:
            return ()
        parts = []
        for segment in segments:
            if (segment.base_offset, segment.size_bytes) in self.horizons:
                first, end = segment.base_offset, segment.next_base_offset
                parts += [(max(first, low), min(end, high)) for low, high in self.cleaned]
        return merged(parts)

    def live_bytes_of(self, segment: SegmentFacts) -> int | None:
        """Return at most how many bytes of a segment are alive; None if unknown."""
        return self.live.get((segment.base_offset, segment.size_bytes))

    def live_records_of(self, segment: SegmentFacts) -> int | None:
        """Return at most how many records of a segment are alive; None if unknown."""
        return self.live_records.get((segment.base_offset, segment.size_bytes))

    # As JSON -----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON for the file."""
        return {
            "topic_id": self.topic_id.hex(),
            "first_seen_ms": self.first_seen_ms,
            "cleaned": [list(interval) for interval in self.cleaned],
            "horizons": [[*key, horizon] for key, horizon in self.horizons.items()],
            "expired_at_ms": self.expired_at_ms,
            "survivorship": self.survivorship,
            "observations": self.observations,
            "held_since_ms": self.paused_since_ms,
            "damaged": [list(key) for key in sorted(self.damaged)],
            "learned_at_ms": self.learned_at_ms,
            "start_offset": self.start_offset,
            "tombstones": self.tombstones,
            "records": self.records,
            "resolved_end": self.resolved_end,
            "live_bytes": self.live_bytes,
            "has_tombstones": self.has_tombstones,
            "live": [[*key, live_bytes] for key, live_bytes in self.live.items()],
            "live_records": [[*key, records] for key, records in self.live_records.items()],
            "digest_end": self.digest_end,
            "digests": [list(digest) for digest in self.digests],
            "first_dirty_offset": self.first_dirty_offset,
            "lowered_from": self.earlier_first_dirty_offset,
            "cleaned_elsewhere_end": self.cleaned_elsewhere_end,
            "cleaned_end": self.cleaned_end,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "PartitionCleanerState":
        """Read the state. Raises ValueError, KeyError or TypeError if it is malformed."""
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
            records=_optional(fields.get("records")),
            resolved_end=int(fields.get("resolved_end", 0)),
            live_bytes=_optional(fields.get("live_bytes")),
            has_tombstones=bool(fields.get("has_tombstones", True)),
            live=_by_segment(fields.get("live", ())),
            live_records=_by_segment(fields.get("live_records", ())),
            digest_end=int(fields.get("digest_end", 0)),
            digests=tuple(
                RangeDigest(int(first), int(end), int(records), str(digest))
                for first, end, records, digest in fields.get("digests", ())
            ),
            first_dirty_offset=_optional(fields.get("first_dirty_offset")),
            earlier_first_dirty_offset=int(fields.get("lowered_from", 0)),
            cleaned_elsewhere_end=int(fields.get("cleaned_elsewhere_end", 0)),
            cleaned_end=_optional(fields.get("cleaned_end")),
        )


def damaged_base(path: str) -> int:
    """Return the base offset in the name of a segment's log file."""
    return int(path.rpartition("/")[2].partition(".")[0])


def _by_segment(rows: Iterable[Sequence[Any]]) -> dict[SegmentKey, int]:
    return {(int(base), int(size)): int(value) for base, size, value in rows}


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)


FRESH: Final = PartitionCleanerState()


def state_of_log(
    cleaner_state: PartitionCleanerState | None, facts: LogFacts, now_ms: int
) -> PartitionCleanerState:
    """Return the part of the state that applies to this log; the same object if all does."""
    if cleaner_state is None or cleaner_state.topic_id != facts.topic_id:
        return PartitionCleanerState(facts.topic_id, facts.generation, first_seen_ms=now_ms)
    cleaner_state = _corrected(cleaner_state, now_ms)
    if cleaner_state.generation == facts.generation:
        return cleaner_state
    ends = [
        cleaner_state.resolved_end,
        cleaner_state.digest_end,
        *(end for _, end in cleaner_state.cleaned),
    ]
    is_truncated = max(ends) > facts.log_end_offset
    if cleaner_state.generation or is_truncated:
        cleaner_state = without_records(cleaner_state, now_ms)
    end = cleaner_state.cleaned_end
    if end is not None:
        end = min(end, facts.log_end_offset)
    return replace(cleaner_state, generation=facts.generation, cleaned_end=end)


def state_at_start(
    cleaner_state: PartitionCleanerState | None, facts: LogFacts, now_ms: int
) -> PartitionCleanerState:
    """Return `state_of_log` for a log that exists when the process starts.

    If the state was lost, cleans may have removed records anywhere in the log.
    """
    valid_state = state_of_log(cleaner_state, facts, now_ms)
    is_known = cleaner_state is not None and cleaner_state.topic_id == facts.topic_id
    end = valid_state.cleaned_end if is_known else None
    saved = facts.checkpoint_offset  # may be that of another broker
    if end is None and not is_known and not facts.config.compacts and saved is None:
        return valid_state  # no clean of this log was ever finished
    end = facts.log_end_offset if end is None else max(end, saved or 0)
    return replace(valid_state, cleaned_end=min(end, facts.log_end_offset))


def without_records(cleaner_state: PartitionCleanerState, now_ms: int) -> PartitionCleanerState:
    """Return the state without what is known of the records of the log."""
    return replace(
        cleaner_state,
        first_seen_ms=now_ms,
        cleaned=(),
        horizons={},
        expired_at_ms=None,
        damaged=frozenset(),
        tombstones=None,
        records=None,
        resolved_end=0,
        live_bytes=None,
        has_tombstones=True,
        live={},
        live_records={},
        digest_end=0,
        digests=(),
    )


def _corrected(cleaner_state: PartitionCleanerState, now_ms: int) -> PartitionCleanerState:
    """Correct times in the future; return the same object if there are none."""
    paused_ms, expired_ms = cleaner_state.paused_since_ms, cleaner_state.expired_at_ms
    latest_ms = max(
        cleaner_state.first_seen_ms, cleaner_state.learned_at_ms, paused_ms or 0, expired_ms or 0
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
        paused_since_ms=None if paused_ms is None else min(paused_ms, now_ms),
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
    """Return the state after a finished job, and the offset below which the log is clean.

    `after` are the facts of the log with the job's groups published.
    """
    checkpoint = min(after.first_dirty_offset, report.next_dirty_offset)
    if job.expired_only and not report.damaged:
        checkpoint = after.first_dirty_offset
    ranges = _clean_ranges_after(cleaner_state, job, report)
    clean_below = reach(checkpoint, ranges)
    cleaned = tuple((first, end) for first, end in ranges if end > clean_below)
    is_complete = report.next_dirty_offset >= job.end_offset and not report.damaged
    ratio, observations = cleaner_state.survivorship, cleaner_state.observations
    is_representative = is_complete and dirty_bytes > 0 and not job.expired_only
    if is_representative and not _input_shrank(cleaner_state, job, after):
        observation = observed(report.bytes_before, report.bytes_after, dirty_bytes)
        ratio = updated(ratio, observations, observation, alpha)
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
            live=_live(cleaner_state, report, after),
            live_records=_live_records(cleaner_state, report, after),
            **_digests(cleaner_state, job, report),
            **_whole_clean(cleaner_state, job, report, is_complete=is_complete),
        ),
        clean_below,
    )


class _Digests(TypedDict):
    """The fields of the state about digests."""

    digest_end: int
    digests: tuple[RangeDigest, ...]


def _digests(cleaner_state: PartitionCleanerState, job: CleanJob, report: CleanReport) -> _Digests:
    """Return the digests after a job: its own, or the earlier ones if they still apply.

    They do not cover tombstones, so a job that removes only what has expired keeps them.
    """
    if report.digests:
        return _Digests(digest_end=job.end_offset, digests=report.digests)
    if job.expired_only or report.groups == 0:
        return _Digests(digest_end=cleaner_state.digest_end, digests=cleaner_state.digests)
    return _Digests(digest_end=0, digests=())


class _WholeClean(TypedDict):
    """The fields of the state that a clean of the whole log sets."""

    records: int | None
    resolved_end: int
    live_bytes: int | None
    has_tombstones: bool


def _whole_clean(
    cleaner_state: PartitionCleanerState, job: CleanJob, report: CleanReport, *, is_complete: bool
) -> _WholeClean:
    """Return what is known since the last clean of the whole log."""
    records = cleaner_state.records
    has_tombstones = True
    if job.expired_only:
        resolved_end, live_bytes = cleaner_state.resolved_end, cleaner_state.live_bytes
        has_tombstones = cleaner_state.has_tombstones
    elif report.resolved_end is not None:
        resolved_end, live_bytes = report.resolved_end, report.live_bytes
        has_tombstones = report.has_tombstones
    else:
        resolved_end, live_bytes = 0, None
        # If a selective clean was not possible, the next clean does not read the log in vain.
        is_selective = job.slack is not None
        records = report.records_after if is_complete and not is_selective else None
    return _WholeClean(
        records=records,
        resolved_end=resolved_end,
        live_bytes=live_bytes,
        has_tombstones=has_tombstones,
    )


def _tombstones(
    cleaner_state: PartitionCleanerState, job: CleanJob, report: CleanReport
) -> int | None:
    """Return the tombstones left: a clean counts all, an expiry job those that it removed."""
    if report.resolved_end is not None:
        return cleaner_state.tombstones
    if not job.expired_only:
        return report.tombstones_kept
    if cleaner_state.tombstones is None:
        return None
    return max(0, cleaner_state.tombstones - report.tombstones_removed)


def _input_shrank(cleaner_state: PartitionCleanerState, job: CleanJob, after: LogFacts) -> bool:
    """Return whether retention or DeleteRecords removed a part of the job's input.

    The job's sizes then say nothing about how much of new data survives a clean. A segment that
    was cut before an earlier job counts as it is.
    """
    if after.log_start_offset > job.log_start_offset:
        return True
    is_cut = job.groups[0][0].base_offset < job.log_start_offset
    return is_cut and job.log_start_offset != cleaner_state.start_offset


def _clean_ranges_after(
    cleaner_state: PartitionCleanerState, job: CleanJob, report: CleanReport
) -> tuple[Interval, ...]:
    """Return where the log is clean after a job."""
    first_dirty = job.first_dirty_offset
    clean_below = first_dirty if job.clean_below is None else job.clean_below
    before = merged([(0, clean_below), *cleaner_state.cleaned])
    if not job.expired_only:
        before = tuple((first, min(end, first_dirty)) for first, end in before)
    # Unreadable segments are no longer clean.
    lost = [
        (source.base_offset, source.next_base_offset)
        for group in job.groups
        for source in group
        if report.next_dirty_offset <= source.base_offset < first_dirty
        and not meets(report.cleaned, source.base_offset, source.next_base_offset)
    ]
    remaining = [piece for interval in before for piece in without(interval, lost)]
    if job.expired_only:
        return merged(remaining)
    beyond = [(max(first, first_dirty), end) for first, end in report.cleaned]
    return merged([*remaining, *beyond, (first_dirty, report.next_dirty_offset)])


def _damaged(
    cleaner_state: PartitionCleanerState, report: CleanReport, after: LogFacts
) -> frozenset[SegmentKey]:
    """Return the reported damage of unchanged segments."""
    reported = {damaged_base(damage.path) for damage in report.damaged}
    present = {(s.base_offset, s.size_bytes) for s in after.segments}
    return frozenset(key for key in present if key in cleaner_state.damaged or key[0] in reported)


def _live(
    cleaner_state: PartitionCleanerState, report: CleanReport, after: LogFacts
) -> dict[SegmentKey, int]:
    """Return the live bytes of the closed segments, where they are known.

    A clean of the whole log leaves no superseded record in a segment that it could read.
    """
    live = dict(cleaner_state.live)
    if report.resolved_end is not None:
        live |= {(s.base_offset, s.size_bytes): s.live_bytes for s in report.liveness}
    elif not report.map_full:
        live |= {
            (s.base_offset, s.size_bytes): s.size_bytes
            for s in report.horizons
            if s.horizon_ms != UNKNOWN_HORIZON
        }
    return _of_segments(live, after)


def _live_records(
    cleaner_state: PartitionCleanerState, report: CleanReport, after: LogFacts
) -> dict[SegmentKey, int]:
    """Return the live records of the closed segments, where they are known."""
    live = dict(cleaner_state.live_records)
    if report.resolved_end is not None:
        live |= {(s.base_offset, s.size_bytes): s.live_records for s in report.liveness}
    elif not report.map_full:
        live |= {(s.base_offset, s.size_bytes): s.records for s in report.horizons}
    counted = {key: records for key, records in live.items() if records != UNKNOWN_RECORDS}
    return _of_segments(counted, after)


def _of_segments(values: Mapping[SegmentKey, int], after: LogFacts) -> dict[SegmentKey, int]:
    """Return the values of the closed segments."""
    keys = [(segment.base_offset, segment.size_bytes) for segment in after.segments[:-1]]
    return {key: values[key] for key in keys if key in values}


def _horizons(
    cleaner_state: PartitionCleanerState,
    job: CleanJob,
    report: CleanReport,
    after: LogFacts,
    clean: Iterable[Interval],
) -> dict[SegmentKey, int]:
    """Return the horizons of the closed segments that are at least partly clean."""
    reported = {
        (horizon.base_offset, horizon.size_bytes): horizon.horizon_ms for horizon in report.horizons
    }
    read = {source.base_offset for group in job.groups for source in group}
    ranges = merged(clean)
    damaged = {damage.base_offset for damage in after.damaged}
    results: dict[SegmentKey, int] = {}
    for segment in after.segments[:-1]:
        base, end = segment.base_offset, segment.next_base_offset
        if base in damaged or not meets(ranges, base, end):
            continue
        key = (base, segment.size_bytes)
        horizon = reported.get(key, cleaner_state.horizon(segment))
        if horizon == UNKNOWN_HORIZON and job.expired_only and base in read and key not in reported:
            horizon = NO_HORIZON  # scanned: once is enough
        # With a delete.retention.ms of 0, a clean stamps the present time: that has not passed. An
        # expiry job stamps nothing.
        end_ms = job.now_ms + 1 if job.expired_only else job.now_ms
        has_passed = 0 <= horizon < end_ms
        is_refused = key in reported and job.drop_expired_tombstones and has_passed
        if is_refused and report.resolved_end is None:
            horizon = job.now_ms + max(STUBBORN_MS, job.delete_retention_ms)
        results[key] = horizon
    return results
