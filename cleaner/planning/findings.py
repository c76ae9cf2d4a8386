"""Findings: the facts that explain why a partition is or is not cleaned."""

from enum import Enum
from typing import NamedTuple, TypeAlias


class Reason(Enum):
    """The subject of a finding."""

    POLICY_UNKNOWN = "policy unknown"
    POLICY = "policy"
    OFFLINE = "offline"
    DAMAGED = "damaged"
    UNCLEANABLE = "batch that cannot be cleaned"
    IN_PROGRESS = "in progress"
    PAUSED_BY_OPERATOR = "paused by an operator"
    PAUSED_BY_BROKER = "paused by the broker"
    QUARANTINED = "quarantined"
    ACTIVE_SEGMENT = "active segment"
    HIGH_WATERMARK = "high watermark"
    OPEN_TRANSACTION = "open transaction"
    VIEW = "compacted view"
    VIEW_UNKNOWN = "compacted view unreadable"
    MIN_LAG = "min.compaction.lag.ms"
    NOTHING_DIRTY = "nothing dirty"
    MAX_LAG = "max.compaction.lag.ms"
    RUN_NOW = "requested by an operator"
    RATIO = "min.cleanable.dirty.ratio"
    OFFLOADED = "offloaded"
    TOPIC_LIMIT = "rate limit of the topic"
    EXPIRED = "past delete.retention.ms"


Value: TypeAlias = int | float | str


class Finding(NamedTuple):
    """One fact about a partition. If `blocks`, the partition is not cleaned because of it."""

    reason: Reason
    blocks: bool
    values: tuple[tuple[str, Value], ...] = ()


class NextAttempt(NamedTuple):
    """The wall time (ms) at which a finding ends by itself, and the subject of that finding."""

    at_ms: int
    cause: Reason


class ClockReading(NamedTuple):
    """The present time on both clocks, in ms."""

    wall_ms: int
    monotonic_ms: int
