"""What can be said of a partition: the links of the chain that answers "why is it not cleaned?"."""

from enum import Enum
from typing import NamedTuple, TypeAlias


class Reason(Enum):
    """What a finding is about."""

    POLICY_UNKNOWN = "policy unknown"
    POLICY = "policy"
    OFFLINE = "offline"
    DAMAGED = "damaged"
    UNCLEANABLE = "batch that cannot be cleaned"
    IN_PROGRESS = "in progress"
    HELD = "paused by an operator"
    PAUSED = "paused by the broker"
    QUARANTINED = "quarantined"
    ACTIVE_SEGMENT = "active segment"
    HIGH_WATERMARK = "high watermark"
    OPEN_TRANSACTION = "open transaction"
    VIEW = "compacted view"
    VIEW_UNKNOWN = "compacted view not known"
    MIN_LAG = "min.compaction.lag.ms"
    NOTHING_DIRTY = "nothing dirty"
    MAX_LAG = "max.compaction.lag.ms"
    RUN_NOW = "asked for by an operator"
    RATIO = "min.cleanable.dirty.ratio"
    OFFLOADED = "offloaded"
    EXPIRED = "past delete.retention.ms"


Value: TypeAlias = int | float | str


class Finding(NamedTuple):
    """One link of the chain. `blocks`: as long as this holds, the partition is not cleaned."""

    reason: Reason
    blocks: bool
    values: tuple[tuple[str, Value], ...] = ()


class NextAttempt(NamedTuple):
    """When time alone may change what is found (wall ms), and what comes to its end then."""

    at_ms: int
    cause: Reason


class Moment(NamedTuple):
    """Now, on both clocks (ms)."""

    wall_ms: int
    monotonic_ms: int
