"""What is to be cleaned, and why not the rest. Pure: facts in, verdicts out.

A verdict is the whole chain of findings, not the first one that said no: it is what answers "why is
this not compacting?". In which order candidates are started is decided in order.py.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from cleaner.host import LogFacts
from cleaner.planning.cleaner_state import FRESH, PartitionCleanerState
from cleaner.planning.dirty_section import (
    DirtySection,
    ExpiredSection,
    dirty_section,
    expired_section,
)
from cleaner.planning.findings import Finding, Moment, NextAttempt, Reason, Value
from cleaner.planning.survival import gain_per_byte, garbage_bytes
from cleaner.states import Paused, Quarantined, State, is_busy, past_of
from storage.model import TopicPartition

# "dirty-ratio" is Kafka's: all that is dirty counts as garbage. "survivorship" counts what is
# expected not to survive, as far as earlier cleans of the partition allow to say.
Strategy: TypeAlias = Literal["dirty-ratio", "survivorship"]
_STRATEGIES: Final[dict[str, Strategy]] = {
    "dirty-ratio": "dirty-ratio",
    "survivorship": "survivorship",
}


def strategy_of(topic: str, cleaner: Strategy) -> Strategy:
    """A topic's own strategy (varve.cleaner.strategy), or the cleaner's."""
    return _STRATEGIES.get(topic, cleaner)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done about one partition, and why. Times in wall ms."""

    partition: TopicPartition
    findings: tuple[Finding, ...]
    section: DirtySection | None = None  # None where there is nothing to compute it from
    over_lag_ms: int = 0
    checkpoint_offset: int | None = None  # to be saved now, whether cleaned or not
    expired: ExpiredSection | None = None  # set where only what has expired is to be removed
    strategy: Strategy = "dirty-ratio"
    survivorship: float = 0.0  # used by the strategy: 0 for dirty-ratio
    # Expected size of the cleanable part after a clean; None before the first one taught it.
    live_bytes: int | None = None
    run_now: bool = False
    next_attempt: NextAttempt | None = None  # when time alone may change this verdict
    bytes_per_second_max: int | None = None  # the topic's limit for cleaning

    @property
    def to_clean(self) -> bool:
        """Whether it is a candidate at this moment."""
        return not any(finding.blocks for finding in self.findings)

    @property
    def next_ms(self) -> int | None:
        """When time alone may change this verdict; None: no time is known."""
        return None if self.next_attempt is None else self.next_attempt.at_ms

    @property
    def is_damaged(self) -> bool:
        """Whether part of it is left as it is, because it cannot be read."""
        return any(finding.reason is Reason.DAMAGED for finding in self.findings)

    @property
    def score(self) -> float:
        """What a clean is expected to gain per byte of I/O, 0..0.5."""
        if self.section is None or self.expired is not None:
            return 0.0  # what can go is not known, and it is little
        section = self.section
        return gain_per_byte(section.clean_bytes, section.dirty_bytes, self.survivorship)

    @property
    def deadline_ms(self) -> int | None:
        """When its dirty section, or what has expired, must have been cleaned."""
        if self.expired is not None:
            return self.expired.deadline_ms
        if self.section is None or self.section.dirty_bytes == 0:
            return None
        return self.section.deadline_ms

    @property
    def input_bytes(self) -> int:
        """How much a clean reads: the clean section once, the dirty one twice."""
        if self.expired is not None:
            return self.expired.size_bytes
        if self.section is None:
            return 0
        return self.section.clean_bytes + 2 * self.section.dirty_bytes


def assess(
    facts: LogFacts,
    state: State,
    now: Moment,
    cleaner_state: PartitionCleanerState = FRESH,
    *,
    strategy: Strategy = "dirty-ratio",
    run_now: bool = False,
) -> Verdict:
    """Judge one partition."""
    standing = _log_findings(facts)
    findings = standing + _state_findings(state, now, cleaner_state)
    if any(finding.blocks for finding in standing):
        return Verdict(facts.partition, tuple(findings))
    strategy = strategy_of(facts.config.varve_cleaner_strategy, strategy)
    ratio = cleaner_state.survivorship if strategy == "survivorship" else 0.0
    section = dirty_section(facts, now, cleaner_state)
    over_lag_ms = 0
    if section.dirty_bytes > 0 and section.deadline_ms is not None:
        over_lag_ms = max(0, now.wall_ms - section.deadline_ms)
    expired, next_expiry_ms = expired_section(facts, section.clean_below, now, cleaner_state)
    dirt = _dirty_findings(facts, section, over_lag_ms, ratio, run_now)
    if not any(finding.blocks for finding in dirt):
        expired = None  # the clean sees to it
    elif expired is not None:
        dirt = [finding._replace(blocks=False) for finding in dirt]
        values = (("segments", len(expired.base_offsets)), ("since_ms", expired.since_ms))
        dirt.append(Finding(Reason.EXPIRED, False, values))
    live_bytes = None
    if cleaner_state.observations > 0:
        garbage = garbage_bytes(section.dirty_bytes, cleaner_state.survivorship)
        live_bytes = section.clean_bytes + int(section.dirty_bytes - garbage)
    return Verdict(
        facts.partition,
        (*findings, *dirt),
        section,
        over_lag_ms,
        None if is_busy(state) or isinstance(state, Paused) else _to_save(facts, section),
        expired,
        strategy,
        ratio,
        live_bytes,
        run_now,
        _next_attempt(facts, section, next_expiry_ms, now),
        facts.config.cleaner_bytes_per_second_max,
    )


def _log_findings(facts: LogFacts) -> list[Finding]:
    """What does not depend on how dirty the log is."""
    if not facts.config.policy_known:
        return [Finding(Reason.POLICY_UNKNOWN, True)]
    policy = ",".join(facts.config.cleanup_policy)
    findings = [Finding(Reason.POLICY, not facts.config.compacts, (("cleanup.policy", policy),))]
    if facts.offline is not None:
        findings.append(Finding(Reason.OFFLINE, True, (("why", facts.offline),)))
    elif not facts.segments:
        findings.append(Finding(Reason.OFFLINE, True, (("why", "its log is not open"),)))
    for damage in facts.damaged:
        # The segment stays as it is, the rest is cleaned around it.
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
    state: State, now: Moment, cleaner_state: PartitionCleanerState
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


def _dirty_findings(
    facts: LogFacts, section: DirtySection, over_lag_ms: int, survivorship: float, run_now: bool
) -> list[Finding]:
    """Whether the dirty section is worth a clean."""
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
    # What is expected to survive decides the order alone (gain_per_byte): a topic that survived
    # whole once would otherwise never be cleaned, and never show that it has changed.
    ratio = section.ratio
    values = (("ratio", ratio), ("needs more than", limit), ("survivorship", survivorship))
    return [*findings, Finding(Reason.RATIO, not (late or run_now) and ratio <= limit, values)]


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
    if section.bound is Reason.ACTIVE_SEGMENT:
        values.append(("active_bytes", section.active_bytes))
        values.append(("segment.bytes", facts.config.segment_bytes))
        if facts.active_closes_ms is not None:
            values.append(("closes_ms", facts.active_closes_ms))
    return tuple(values)


def _to_save(facts: LogFacts, section: DirtySection) -> int | None:
    """The checkpoint that should stand on disk and does not."""
    saved = facts.checkpoint_offset
    if saved is None and section.clean_below == facts.log_start_offset:
        return None
    return None if section.clean_below == saved else section.clean_below


def _next_attempt(
    facts: LogFacts, section: DirtySection, next_expiry_ms: int | None, now: Moment
) -> NextAttempt | None:
    """The nearest of: a segment is old enough, or closes, the maximum lag is over, one expires."""
    times = [(section.ripe_ms, Reason.MIN_LAG), (next_expiry_ms, Reason.EXPIRED)]
    if section.active_bytes > 0:
        times.append((facts.active_closes_ms, Reason.ACTIVE_SEGMENT))
    if section.dirty_bytes > 0:
        times.append((section.deadline_ms, Reason.MAX_LAG))
    looks = [NextAttempt(at, cause) for at, cause in times if at is not None and at >= now.wall_ms]
    return min(looks, key=lambda look: look.at_ms, default=None)
