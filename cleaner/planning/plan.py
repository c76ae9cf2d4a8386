"""Decide whether a partition is to be cleaned, and why. Pure: facts in, verdicts out.

A verdict lists all findings, not only the first obstacle: they explain why a partition is not
cleaned. `_dirty_findings` compares the dirty ratio with min.cleanable.dirty.ratio.
scheduling_order.py decides in which order candidates start.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from cleaner.engine.selective.index_size import worth_indexing
from cleaner.host import LogFacts
from cleaner.planning.cleaner_state import FRESH, PartitionCleanerState
from cleaner.planning.content_bytes import ContentBytes, content_bytes
from cleaner.planning.dirty_section import (
    DirtySection,
    ExpiredSection,
    dirty_section,
    expired_section,
    live_segments,
    newest_ms,
)
from cleaner.planning.findings import ClockReading, Finding, NextAttempt, Reason, Value
from cleaner.planning.survivorship import gain_per_byte, garbage_bytes
from cleaner.states import Paused, Quarantined, State, is_busy, past_of
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.model import SegmentFacts, TopicPartition

# "dirty-ratio" is Kafka's: all dirty bytes count as garbage. "survivorship" counts the bytes that
# are expected to be removed, judging by earlier cleans of the partition. "generational" counts the
# bytes that no clean has read, against `unread_ratio`, and rewrites only the segments with the most
# garbage; a log that it cannot clean by key indexes (`index_obstacle`) is cleaned as with
# "dirty-ratio".
Strategy: TypeAlias = Literal["dirty-ratio", "survivorship", "generational"]
_STRATEGIES: Final[dict[str, Strategy]] = {
    "dirty-ratio": "dirty-ratio",
    "survivorship": "survivorship",
    "generational": "generational",
}
# A selective clean removes no tombstones and leaves some garbage. The whole log is cleaned again if
# it has tombstones, and this many times the records that the last such clean left were written.
# With "dirty-ratio" and a ratio of 0.5 it is once. By simulation, 1 may move more bytes than that.
WHOLE_AFTER: Final = 2
# With "generational", at least this share of min.cleanable.dirty.ratio is for bytes that no clean
# has read, and the rest for garbage that the last one left. By simulation: garbage that stays makes
# later victims emptier, and bytes that no clean has read bring no benefit.
UNREAD_SHARE_MIN: Final = 0.25


def strategy_of(topic: str, cleaner: Strategy) -> Strategy:
    """Return the topic's strategy (varve.cleaner.strategy), or the cleaner's."""
    return _STRATEGIES.get(topic, cleaner)


def default_strategy(settings: CleanerSettings) -> Strategy:
    """Return the strategy of topics that name none: key indexes need space for scratch files."""
    if settings.strategy == "generational" and settings.spill_bytes_max == 0:
        return "dirty-ratio"
    return settings.strategy


def slack_of(config: TopicConfig) -> float:
    """Return the garbage that a selective clean leaves, as a share of the live bytes.

    It is varve.compaction.slack, unless that leaves too few bytes for `unread_ratio`.
    """
    ratio = config.min_cleanable_dirty_ratio
    if ratio >= 1:
        return config.varve_compaction_slack
    return min(config.varve_compaction_slack, (1 - UNREAD_SHARE_MIN) * ratio / (1 - ratio))


def unread_ratio(config: TopicConfig) -> float:
    """Return the share of a log that no clean may have read before the next selective clean.

    With the slack, it lets the log grow to 1 / (1 - min.cleanable.dirty.ratio) times its live
    bytes, as far as with every strategy.
    """
    ratio = config.min_cleanable_dirty_ratio
    return ratio - slack_of(config) * (1 - ratio)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one partition is to be cleaned, and why. Times in wall ms."""

    partition: TopicPartition
    findings: tuple[Finding, ...]
    section: DirtySection | None = None  # None without an open, compacted log
    dirty_ratio: float = 0.0  # share of the cleanable bytes that no clean has read
    over_lag_ms: int = 0
    checkpoint_offset: int | None = None  # to be saved now, regardless of a clean
    expired: ExpiredSection | None = None  # set if only expired tombstones are to be removed
    strategy: Strategy = "dirty-ratio"  # that applies: see `index_obstacle`
    survivorship: float = 0.0  # used by the strategy: 0 for dirty-ratio
    # Expected size of the cleanable part after a clean; None before the first clean.
    live_bytes: int | None = None
    run_now: bool = False
    is_selective: bool = False  # rewrite only the segments with the most garbage
    victims: tuple[int, ...] = ()  # rewrite these segments, because an erasure needs it
    next_attempt: NextAttempt | None = None  # when time alone may change this verdict
    bytes_per_second_max: int | None = None  # the topic's limit for cleaning
    content: ContentBytes | None = None  # likewise None without an open, compacted log

    @property
    def to_clean(self) -> bool:
        """Return whether the partition is a candidate now."""
        return not any(finding.blocks for finding in self.findings)

    @property
    def is_limited(self) -> bool:
        """Return whether the topic's rate limit applies: not to cleans that were requested."""
        return self.bytes_per_second_max is not None and not self.run_now

    @property
    def next_ms(self) -> int | None:
        """Return when time alone may change this verdict; None if unknown."""
        return None if self.next_attempt is None else self.next_attempt.at_ms

    @property
    def is_damaged(self) -> bool:
        """Return whether a segment cannot be read."""
        return any(finding.reason is Reason.DAMAGED for finding in self.findings)

    @property
    def score(self) -> float:
        """Return the expected gain of a clean per byte of I/O, 0..0.5."""
        if self.section is None or self.expired is not None:
            return 0.0  # unknown, and small
        section = self.section
        return gain_per_byte(section.clean_bytes, section.dirty_bytes, self.survivorship)

    @property
    def deadline_ms(self) -> int | None:
        """Return when the dirty section or the expired tombstones must have been cleaned."""
        if self.expired is not None:
            return self.expired.deadline_ms
        if self.section is None or self.section.dirty_bytes == 0:
            return None
        return self.section.deadline_ms

    @property
    def input_bytes(self) -> int:
        """Return how much a clean reads: the clean section once, the dirty one twice."""
        if self.expired is not None:
            return self.expired.size_bytes
        if self.section is None:
            return 0
        return self.section.clean_bytes + 2 * self.section.dirty_bytes


def assess(
    facts: LogFacts,
    state: State,
    now: ClockReading,
    cleaner_state: PartitionCleanerState = FRESH,
    *,
    strategy: Strategy = "dirty-ratio",
    run_now: bool = False,
    victims: tuple[int, ...] = (),
) -> Verdict:
    """Assess one partition. With `run_now` and `victims`, only these segments are rewritten."""
    log_findings = _log_findings(facts)
    findings = log_findings + _state_findings(state, now, cleaner_state)
    if any(finding.blocks for finding in log_findings):
        return Verdict(facts.partition, tuple(findings))
    strategy = strategy_of(facts.config.varve_cleaner_strategy, strategy)
    obstacle = index_obstacle(facts, cleaner_state) if strategy == "generational" else None
    if obstacle is not None:
        strategy = "dirty-ratio"
    section = dirty_section(facts, now, cleaner_state)
    over_lag_ms = 0
    if section.dirty_bytes > 0 and section.deadline_ms is not None:
        over_lag_ms = max(0, now.wall_ms - section.deadline_ms)
    expired, next_expiry_ms = expired_section(facts, section.clean_below, now, cleaner_state)
    ratio = _dirty_ratio(facts, section, cleaner_state, strategy)
    dirty_findings = _dirty_findings(
        facts,
        section,
        over_lag_ms,
        cleaner_state,
        strategy,
        ratio=ratio,
        obstacle=obstacle,
        run_now=run_now,
    )
    if not any(finding.blocks for finding in dirty_findings):
        expired = None  # the clean removes it
    elif expired is not None:
        dirty_findings = [finding._replace(blocks=False) for finding in dirty_findings]
        values = (("segments", len(expired.base_offsets)), ("since_ms", expired.since_ms))
        dirty_findings.append(Finding(Reason.EXPIRED, False, values))
    is_selective = (
        strategy == "generational"
        and expired is None
        and not (run_now or over_lag_ms > 0)
        and _may_be_selective(section, cleaner_state)
    )
    may_save = not (is_busy(state) or isinstance(state, Paused))
    return Verdict(
        partition=facts.partition,
        findings=(*findings, *dirty_findings),
        section=section,
        dirty_ratio=ratio,
        over_lag_ms=over_lag_ms,
        checkpoint_offset=_outdated_checkpoint(facts, section) if may_save else None,
        expired=expired,
        strategy=strategy,
        survivorship=_survivorship(cleaner_state, strategy),
        live_bytes=_live_bytes(facts, section, cleaner_state),
        run_now=run_now,
        is_selective=is_selective,
        victims=_victims(facts, section, victims) if expired is None else (),
        next_attempt=_next_attempt(facts, section, next_expiry_ms, now),
        bytes_per_second_max=facts.config.cleaner_bytes_per_second_max,
        content=content_bytes(facts, cleaner_state),
    )


def _may_be_selective(section: DirtySection, cleaner_state: PartitionCleanerState) -> bool:
    """Return whether nothing makes a clean of the whole log necessary now."""
    if cleaner_state.records is None or cleaner_state.cleaned:
        return False
    if not cleaner_state.has_tombstones:
        return True
    written = section.end_offset - section.first_dirty_offset
    return written < WHOLE_AFTER * max(cleaner_state.records, 1)


def decides_by_index(facts: LogFacts) -> bool:
    """Return whether a clean can decide the keys of this log by key indexes.

    They have no records of transactions, and none of damaged segments.
    """
    return not facts.damaged and not any(s.has_transactions for s in live_segments(facts))


def index_obstacle(facts: LogFacts, cleaner_state: PartitionCleanerState) -> str | None:
    """Return why the log is not cleaned by key indexes; None if it can be, and they are small."""
    if not decides_by_index(facts):
        return "damage" if facts.damaged else "transactions"
    closed = live_segments(facts)[:-1]
    records = sum(_records_max(segment, cleaner_state) for segment in closed)
    if worth_indexing(sum(segment.size_bytes for segment in closed), records):
        return None
    return "small records"


def _records_max(segment: SegmentFacts, cleaner_state: PartitionCleanerState) -> int:
    """Return how many records a segment has: as a clean counted them, or at most."""
    counted = cleaner_state.live_records_of(segment)
    return segment.next_base_offset - segment.base_offset if counted is None else counted


def _victims(facts: LogFacts, section: DirtySection, victims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the victims that a clean can rewrite; none if it has to clean the whole log."""
    if not victims or not decides_by_index(facts):
        return ()
    bases = {s.base_offset for s in live_segments(facts) if s.base_offset < section.end_offset}
    return tuple(base for base in victims if base in bases)


def _unresolved_bytes(facts: LogFacts, section: DirtySection, resolved_end: int) -> int:
    """Return the cleanable bytes that no clean has read yet."""
    first = max(section.first_dirty_offset, resolved_end)
    return sum(
        segment.size_bytes
        for segment in live_segments(facts)
        if first < segment.next_base_offset and segment.base_offset < section.end_offset
    )


def _dirty_ratio(
    facts: LogFacts,
    section: DirtySection,
    cleaner_state: PartitionCleanerState,
    strategy: Strategy,
) -> float:
    """Return the share of the cleanable bytes that is dirty; selective cleans leave the rest."""
    resolved_end = cleaner_state.resolved_end
    if strategy != "generational" or resolved_end <= section.first_dirty_offset:
        return section.ratio
    total = section.clean_bytes + section.dirty_bytes
    return min(1.0, _unresolved_bytes(facts, section, resolved_end) / total) if total else 0.0


def _live_bytes(
    facts: LogFacts, section: DirtySection, cleaner_state: PartitionCleanerState
) -> int | None:
    """Return the expected size of the cleanable part after a clean of the whole log.

    A selective clean counted the live bytes of the part that it read; earlier cleans say which
    share of the later bytes survives.
    """
    if cleaner_state.observations == 0:
        return None
    counted_bytes, later_bytes = section.clean_bytes, section.dirty_bytes
    if cleaner_state.resolved_end > section.first_dirty_offset and cleaner_state.live_bytes:
        counted_bytes = cleaner_state.live_bytes
        later_bytes = _unresolved_bytes(facts, section, cleaner_state.resolved_end)
    return counted_bytes + int(later_bytes - garbage_bytes(later_bytes, cleaner_state.survivorship))


def _log_findings(facts: LogFacts) -> list[Finding]:
    """Return the findings that do not depend on the dirty section."""
    if not facts.config.policy_known:
        return [Finding(Reason.POLICY_UNKNOWN, True)]
    policy = ",".join(facts.config.cleanup_policy)
    findings = [Finding(Reason.POLICY, not facts.config.compacts, (("cleanup.policy", policy),))]
    if facts.offline is not None:
        findings.append(Finding(Reason.OFFLINE, True, (("why", facts.offline),)))
    elif not facts.segments:
        findings.append(Finding(Reason.OFFLINE, True, (("why", "its log is not open"),)))
    for damage in facts.damaged:
        where = (
            ("file", damage.path),
            ("position", damage.position),
            ("reason", damage.reason),
            ("first_offset", damage.first_offset),
            ("next_offset", damage.next_offset),
        )
        reason = Reason.UNCLEANABLE if damage.is_served else Reason.DAMAGED
        findings.append(Finding(reason, False, where))
    return findings


def _state_findings(
    state: State, now: ClockReading, cleaner_state: PartitionCleanerState
) -> list[Finding]:
    findings = []
    if is_busy(state):
        findings.append(Finding(Reason.IN_PROGRESS, True, (("state", type(state).__name__),)))
    operator_pauses = 0
    if cleaner_state.paused_since_ms is not None:
        operator_pauses = 1
        findings.append(
            Finding(Reason.PAUSED_BY_OPERATOR, True, (("since_ms", cleaner_state.paused_since_ms),))
        )
    if isinstance(state, Paused) and state.pauses > operator_pauses:
        findings.append(
            Finding(Reason.PAUSED_BY_BROKER, True, (("pauses", state.pauses - operator_pauses),))
        )
    quarantine = past_of(state)
    if quarantine is not None:
        wait_ms = max(0, quarantine.until_ms - now.monotonic_ms)
        blocks = isinstance(state, Quarantined) and wait_ms > 0
        findings.append(
            Finding(
                Reason.QUARANTINED,
                blocks,
                (
                    ("reason", quarantine.reason),
                    ("failures", quarantine.failures),
                    ("wait_ms", wait_ms),
                ),
            )
        )
    return findings


def _dirty_findings(
    facts: LogFacts,
    section: DirtySection,
    over_lag_ms: int,
    cleaner_state: PartitionCleanerState,
    strategy: Strategy,
    *,
    ratio: float,
    obstacle: str | None,
    run_now: bool,
) -> list[Finding]:
    """Return the findings on whether the dirty section is worth a clean."""
    where = _bound_values(facts, section)
    if section.dirty_bytes == 0:
        clean = max(section.clean_below, section.end_offset) >= facts.log_end_offset
        return [Finding(Reason.NOTHING_DIRTY if clean else section.bound, True, where)]
    findings = [Finding(section.bound, False, where)]
    limit = facts.config.min_cleanable_dirty_ratio
    late = over_lag_ms > 0
    if late:
        findings.append(Finding(Reason.MAX_LAG, False, (("over_ms", over_lag_ms),)))
    if run_now:
        findings.append(Finding(Reason.RUN_NOW, False))
    # The survivorship affects only the order (gain_per_byte): otherwise a topic that survived
    # completely once would never be cleaned again.
    if strategy == "generational":
        limit = unread_ratio(facts.config)
    survivorship = _survivorship(cleaner_state, strategy)
    values: list[tuple[str, Value]] = [
        ("ratio", ratio),
        ("limit", limit),
        ("min.cleanable.dirty.ratio", facts.config.min_cleanable_dirty_ratio),
        ("survivorship", survivorship),
    ]
    if obstacle is not None:
        values.append(("not_indexed", obstacle))
    blocks = not (late or run_now) and ratio <= limit
    return [*findings, Finding(Reason.RATIO, blocks, tuple(values))]


def _survivorship(cleaner_state: PartitionCleanerState, strategy: Strategy) -> float:
    """Return the expected surviving share of dirty bytes that the strategy counts with."""
    return cleaner_state.survivorship if strategy == "survivorship" else 0.0


def _bound_values(facts: LogFacts, section: DirtySection) -> tuple[tuple[str, Value], ...]:
    values: list[tuple[str, Value]] = [
        ("first_dirty_offset", section.first_dirty_offset),
        ("end_offset", section.end_offset),
    ]
    if section.bound in (Reason.HIGH_WATERMARK, Reason.OPEN_TRANSACTION, Reason.VIEW):
        values.append(("undecided_offset", facts.undecided_offset))
    pending = facts.open_transaction
    if section.bound is Reason.OPEN_TRANSACTION and pending is not None:
        values += [
            ("producer_id", pending.producer_id),
            ("transaction_first_offset", pending.first_offset),
            ("since_ms", pending.since_ms),
        ]
    if section.ripe_ms is not None:
        values.append(("until_ms", section.ripe_ms))
    lag_ms = facts.config.min_compaction_lag_ms
    if lag_ms > 0 and section.bound in (Reason.ACTIVE_SEGMENT, Reason.MIN_LAG):
        values.append(("min.compaction.lag.ms", lag_ms))
    if section.bound is Reason.ACTIVE_SEGMENT:
        values.append(("active_bytes", section.active_bytes))
        values.append(("segment.bytes", facts.config.segment_bytes))
        if facts.active_closes_ms is not None:
            values.append(("closes_ms", facts.active_closes_ms))
    return tuple(values)


def _outdated_checkpoint(facts: LogFacts, section: DirtySection) -> int | None:
    """Return the checkpoint that should be on disk but is not."""
    saved = facts.checkpoint_offset
    if saved is None and section.clean_below == facts.log_start_offset:
        return None
    return None if section.clean_below == saved else section.clean_below


def _next_attempt(
    facts: LogFacts, section: DirtySection, next_expiry_ms: int | None, now: ClockReading
) -> NextAttempt | None:
    """Return the earliest time at which a segment becomes cleanable.

    The active one becomes cleanable by its roll only if nothing before it bounds the section.
    """
    times = [(section.ripe_ms, Reason.MIN_LAG), (next_expiry_ms, Reason.EXPIRED)]
    closes_ms = facts.active_closes_ms
    if (
        section.bound is Reason.ACTIVE_SEGMENT
        and section.active_bytes > 0
        and closes_ms is not None
    ):
        ripe_ms = newest_ms(facts.segments[-1]) + facts.config.min_compaction_lag_ms
        cause = Reason.MIN_LAG if ripe_ms > closes_ms else Reason.ACTIVE_SEGMENT
        times.append((max(closes_ms, ripe_ms), cause))
    if section.dirty_bytes > 0:
        times.append((section.deadline_ms, Reason.MAX_LAG))
    attempts = [
        NextAttempt(at_ms, cause)
        for at_ms, cause in times
        if at_ms is not None and at_ms >= now.wall_ms
    ]
    return min(attempts, key=lambda attempt: attempt.at_ms, default=None)
