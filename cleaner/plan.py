"""What is to be cleaned, and why not the rest. Pure: facts in, verdicts and jobs out.

The arithmetic is Kafka's (LogCleanerManager, LogToClean, Cleaner.groupSegmentsBySize; KIP-58 for
the minimum lag, KIP-354 for the maximum): the dirty section ends at a segment's base, ratios count
bytes of log files, the lags look at segments. Two things differ: whoever is over its maximum lag
goes first, earliest deadline first, and segments wholly below the log start are left to retention.

A verdict is the whole chain of findings, not the first one that said no: it is what answers "why is
this not compacting?".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from cleaner.host import JobInputs, LogFacts
from cleaner.job import CleanJob, SourceSegment
from cleaner.states import Paused, Quarantined, State, held, past_of
from config.settings import CleanerSettings
from storage.compression import GZIP, LZ4, ZSTD
from storage.model import TopicPartition
from storage.retention import SegmentFacts

# Offsets inside a segment are stored as 32-bit differences to its base (offset index format).
RELATIVE_OFFSET_MAX: Final = (1 << 31) - 1


class Reason(Enum):
    """What a finding is about."""

    POLICY_UNKNOWN = "policy unknown"
    POLICY = "policy"
    OFFLINE = "offline"
    DAMAGED = "damaged"
    IN_PROGRESS = "in progress"
    PAUSED = "paused"
    QUARANTINED = "quarantined"
    ACTIVE_SEGMENT = "active segment"
    UNDECIDED = "high watermark or open transaction"
    MIN_LAG = "min.compaction.lag.ms"
    NOTHING_DIRTY = "nothing dirty"
    MAX_LAG = "max.compaction.lag.ms"
    RATIO = "min.cleanable.dirty.ratio"


Value: TypeAlias = int | float | str


class Finding(NamedTuple):
    """One link of the chain. `blocks`: as long as this holds, the partition is not cleaned."""

    reason: Reason
    blocks: bool
    values: tuple[tuple[str, Value], ...] = ()


class Moment(NamedTuple):
    """Now, on both clocks (ms)."""

    wall_ms: int
    monotonic_ms: int


class DirtySection(NamedTuple):
    """[first_dirty_offset, end_offset) can be cleaned; sizes in bytes of log files."""

    first_dirty_offset: int
    end_offset: int  # a segment's base; at or below the first dirty offset: nothing to clean
    bound: Reason  # why it ends there
    clean_bytes: int
    dirty_bytes: int
    deadline_ms: int | None  # wall time by which the oldest dirty batch has to be cleaned

    @property
    def ratio(self) -> float:
        """Dirty bytes of all bytes that a clean would touch."""
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done about one partition, and why."""

    partition: TopicPartition
    findings: tuple[Finding, ...]
    section: DirtySection | None = None  # None where there is nothing to compute it from
    over_lag_ms: int = 0
    checkpoint_offset: int | None = None  # to be saved now, whether cleaned or not

    @property
    def to_clean(self) -> bool:
        """Whether it is a candidate at this moment."""
        return not any(finding.blocks for finding in self.findings)

    @property
    def urgency(self) -> tuple[int, float, TopicPartition]:
        """Sorts candidates, most urgent first."""
        assert self.section is not None
        if self.over_lag_ms > 0:
            assert self.section.deadline_ms is not None
            return (0, self.section.deadline_ms, self.partition)
        return (1, -self.section.ratio, self.partition)


def assess(facts: LogFacts, state: State, now: Moment) -> Verdict:
    """Judge one partition."""
    findings = _standing(facts)
    if any(finding.blocks for finding in findings):
        return Verdict(facts.partition, (*findings, *_state_findings(state, now)))
    findings += _state_findings(state, now)
    corrected = corrected_checkpoint(facts)
    section = dirty_section(facts, facts.log_start_offset if corrected is None else corrected, now)
    over_lag_ms = 0
    if section.dirty_bytes > 0 and section.deadline_ms is not None:
        over_lag_ms = max(0, now.wall_ms - section.deadline_ms)
    findings += _dirt(facts, section, over_lag_ms)
    return Verdict(
        facts.partition,
        tuple(findings),
        section,
        over_lag_ms,
        None if held(state) or isinstance(state, Paused) else _to_save(facts, section),
    )


def ranked(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Those to be cleaned: over the maximum lag by deadline, then by ratio; names break ties."""
    candidates = [verdict for verdict in verdicts if verdict.to_clean]
    return sorted(candidates, key=lambda verdict: verdict.urgency)


def _standing(facts: LogFacts) -> list[Finding]:
    """What does not depend on how dirty the log is."""
    if not facts.config.policy_known:
        return [Finding(Reason.POLICY_UNKNOWN, True)]
    policy = ",".join(facts.config.cleanup_policy)
    findings = [Finding(Reason.POLICY, not facts.config.compacts, (("cleanup.policy", policy),))]
    if facts.offline is not None:
        findings.append(Finding(Reason.OFFLINE, True, (("why", facts.offline),)))
    elif not facts.segments:
        findings.append(Finding(Reason.OFFLINE, True, (("why", "its log is not open"),)))
    for one in facts.damaged:
        # What is damaged stays as it is, the rest is cleaned around it.
        where = (("file", one.path), ("position", one.position), ("reason", one.reason))
        findings.append(Finding(Reason.DAMAGED, False, where))
    return findings


def _state_findings(state: State, now: Moment) -> list[Finding]:
    findings = []
    if held(state):
        findings.append(Finding(Reason.IN_PROGRESS, True, (("state", type(state).__name__),)))
    if isinstance(state, Paused):
        findings.append(Finding(Reason.PAUSED, True, (("pauses", state.pauses),)))
    mark = past_of(state)
    if mark is not None:
        wait_ms = max(0, mark.until_ms - now.monotonic_ms)
        blocks = isinstance(state, Quarantined) and wait_ms > 0
        findings.append(
            Finding(
                Reason.QUARANTINED,
                blocks,
                (("reason", mark.reason), ("failures", mark.failures), ("wait_ms", wait_ms)),
            )
        )
    return findings


def corrected_checkpoint(facts: LogFacts) -> int | None:
    """The first dirty offset: the saved one if it lies in the log; None if there is none to use.

    Below the log start records were deleted; beyond the end the log was cut or replaced, and
    then all of it is dirty again.
    """
    saved = facts.checkpoint_offset
    if saved is None or not facts.log_start_offset <= saved <= facts.log_end_offset:
        return None
    return saved


def dirty_section(facts: LogFacts, first_dirty: int, now: Moment) -> DirtySection:
    """Where the dirty section begins and ends, and how large it and the clean one are."""
    live = _live(facts)
    active = live[-1]
    closed = live[:-1]
    dirty_closed = [segment for segment in closed if segment.next_base_offset > first_dirty]
    end, bound = _bound(facts, active, dirty_closed, now)
    # Rounded down to a segment: the one that holds the bound is excluded as a whole.
    end = max((s.base_offset for s in live if s.base_offset <= end), default=live[0].base_offset)
    dirty_bytes = sum(s.size_bytes for s in dirty_closed if s.base_offset < end)
    clean_bytes = sum(s.size_bytes for s in live if s.base_offset < first_dirty)
    stamps = [s.first_batch_timestamp_ms for s in dirty_closed if s.first_batch_timestamp_ms > 0]
    deadline = min(stamps) + facts.config.max_compaction_lag_ms if stamps else None
    return DirtySection(first_dirty, end, bound, clean_bytes, dirty_bytes, deadline)


def _live(facts: LogFacts) -> list[SegmentFacts]:
    """Segments without those that only wait for retention to unlink them; the active one stays."""
    *closed, active = facts.segments
    return [*(s for s in closed if s.next_base_offset > facts.log_start_offset), active]


def _bound(
    facts: LogFacts, active: SegmentFacts, dirty_closed: Sequence[SegmentFacts], now: Moment
) -> tuple[int, Reason]:
    """The first offset that may not be cleaned yet, before rounding, and what forbids it."""
    bounds = [
        (active.base_offset, Reason.ACTIVE_SEGMENT),
        (facts.undecided_offset, Reason.UNDECIDED),
    ]
    lag_ms = facts.config.min_compaction_lag_ms
    if lag_ms > 0:
        young = (s for s in dirty_closed if _newest_ms(s) > now.wall_ms - lag_ms)
        bounds += [(s.base_offset, Reason.MIN_LAG) for s in young][:1]
    return min(bounds, key=lambda bound: bound[0])


def _newest_ms(segment: SegmentFacts) -> int:
    stamp = segment.largest_timestamp_ms
    return stamp if stamp >= 0 else segment.last_modified_ms


def _dirt(facts: LogFacts, section: DirtySection, over_lag_ms: int) -> list[Finding]:
    """Whether the dirty section is worth a clean."""
    where = (("first_dirty_offset", section.first_dirty_offset), ("end_offset", section.end_offset))
    if section.dirty_bytes == 0:
        clean = section.first_dirty_offset >= facts.log_end_offset
        return [Finding(Reason.NOTHING_DIRTY if clean else section.bound, True, where)]
    findings = [Finding(section.bound, False, where)]
    limit = facts.config.min_cleanable_dirty_ratio
    late = over_lag_ms > 0
    if late:
        findings.append(Finding(Reason.MAX_LAG, False, (("over_ms", over_lag_ms),)))
    blocks = not late and section.ratio <= limit
    values = (("ratio", section.ratio), ("needs more than", limit))
    return [*findings, Finding(Reason.RATIO, blocks, values)]


def _to_save(facts: LogFacts, section: DirtySection) -> int | None:
    """The checkpoint that should stand on disk and does not."""
    offset = section.first_dirty_offset
    if section.dirty_bytes == 0 and section.end_offset > offset:
        offset = section.end_offset  # a hole, or empty segments: clean without any work
    saved = facts.checkpoint_offset
    if saved is None and offset == facts.log_start_offset:
        return None
    return None if offset == saved else offset


# From a verdict to a job ------------------------------------------------------


def plan_job(
    facts: LogFacts,
    verdict: Verdict,
    inputs: JobInputs,
    settings: CleanerSettings,
    *,
    run_id: str,
    now_ms: int,
) -> CleanJob | None:
    """The job that a verdict asks for; None if there is nothing to clean."""
    section = verdict.section
    if not verdict.to_clean or section is None:
        return None
    config = facts.config
    sources = [s for s in _live(facts) if s.base_offset < section.end_offset]
    groups = group_segments(sources, config.segment_bytes, config.segment_index_bytes)
    assert groups, verdict
    assert groups[-1][-1].next_base_offset == section.end_offset, verdict
    return CleanJob(
        partition=facts.partition,
        directory=facts.directory,
        generation=facts.generation,
        run_id=run_id,
        groups=tuple(tuple(_source(segment) for segment in group) for group in groups),
        first_dirty_offset=section.first_dirty_offset,
        end_offset=section.end_offset,
        log_start_offset=facts.log_start_offset,
        log_end_offset_is_end=section.end_offset == facts.log_end_offset,
        now_ms=now_ms,
        delete_retention_ms=config.delete_retention_ms,
        drop_expired_tombstones=facts.clock_trusted,
        hash_key=inputs.hash_key,
        dedupe_buffer_bytes=settings.dedupe_buffer_bytes,
        read_buffer_bytes=settings.read_buffer_bytes,
        decompressed_batch_bytes=config.varve_decompressed_batch_bytes,
        max_message_bytes=config.max_message_bytes,
        index_interval_bytes=config.index_interval_bytes,
        segment_bytes=config.segment_bytes,
        compression_levels=(
            (GZIP, config.compression_gzip_level),
            (LZ4, config.compression_lz4_level),
            (ZSTD, config.compression_zstd_level),
        ),
        last_records=inputs.last_records,
        aborted=inputs.aborted,
    )


def group_segments(
    sources: Sequence[SegmentFacts], segment_bytes: int, index_bytes: int
) -> list[list[SegmentFacts]]:
    """Neighbours that become one segment each, by their sizes before cleaning.

    A group never outgrows a segment's file, its indexes or the 32 bits of a relative offset; the
    first of a group is taken whatever its size.
    """
    groups: list[list[SegmentFacts]] = []
    log = index = time_index = 0
    for segment in sources:
        log += segment.size_bytes
        index += segment.index_bytes
        time_index += segment.time_index_bytes
        fits = log <= segment_bytes and index <= index_bytes and time_index <= index_bytes
        if groups and fits and _in_reach(groups[-1][0], segment):
            groups[-1].append(segment)
        else:
            groups.append([segment])
            log, index = segment.size_bytes, segment.index_bytes
            time_index = segment.time_index_bytes
    return groups


def _in_reach(first: SegmentFacts, segment: SegmentFacts) -> bool:
    """Whether the last offset can be stored relative to the first base. Nothing needs no storing.

    The last offset is taken from the base of the segment after it: an index may be stale or empty.
    """
    last_offset = segment.next_base_offset - 1
    return segment.size_bytes == 0 or last_offset - first.base_offset <= RELATIVE_OFFSET_MAX


def _source(segment: SegmentFacts) -> SourceSegment:
    return SourceSegment(
        base_offset=segment.base_offset,
        next_base_offset=segment.next_base_offset,
        size_bytes=segment.size_bytes,
        last_modified_ms=segment.last_modified_ms,
        largest_timestamp_ms=segment.largest_timestamp_ms,
    )
