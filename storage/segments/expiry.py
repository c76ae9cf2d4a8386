"""Retention: which segments a topic's cleanup policy deletes; pure.

Retention deletes a prefix of whole segments, but no segment with records at or above the high
watermark and no empty active segment. `delete` expires segments by time, by size and by log start
offset; `compact` alone by log start offset only. An unknown policy expires nothing. Nothing expires
by time while the clock is not trusted.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from config.topics.keys import TopicConfig
from storage.model import SegmentFacts

NO_LIMIT: Final = -1


class ExpiryReason(Enum):
    """Why retention deletes a segment."""

    LOG_START_OFFSET = "log start offset"
    SIZE = "retention.bytes"
    TIME = "retention.ms"


class ExpiredSegment(NamedTuple):
    """A segment that retention may delete."""

    facts: SegmentFacts
    reason: ExpiryReason


def plan_expiry(
    segments: Sequence[SegmentFacts],
    config: TopicConfig,
    *,
    log_start_offset: int,
    high_watermark: int,
    now_ms: int,
    clock_trusted: bool = True,
) -> tuple[ExpiredSegment, ...]:
    """Return the segments to delete, oldest first (Kafka's UnifiedLog.deleteOldSegments).

    One of the three reasons is enough; the first segment without a reason ends the prefix.
    """
    if not config.policy_known:
        return ()
    excess_bytes = sum(facts.size_bytes for facts in segments) - config.retention_bytes
    by_size = config.deletes and config.retention_bytes != NO_LIMIT
    by_time = config.deletes and config.retention_ms != NO_LIMIT and clock_trusted
    going: list[ExpiredSegment] = []
    for at, facts in enumerate(segments):
        is_active = at == len(segments) - 1
        if facts.next_base_offset > high_watermark or (is_active and facts.size_bytes == 0):
            break
        timestamp_ms = facts.largest_timestamp_ms
        if timestamp_ms < 0:
            timestamp_ms = facts.last_modified_ms
        if not is_active and facts.next_base_offset <= log_start_offset:
            reason = ExpiryReason.LOG_START_OFFSET
        elif by_size and excess_bytes >= facts.size_bytes:
            reason = ExpiryReason.SIZE
        elif by_time and now_ms - timestamp_ms > config.retention_ms:
            reason = ExpiryReason.TIME
        else:
            break
        excess_bytes -= facts.size_bytes
        going.append(ExpiredSegment(facts, reason))
    return tuple(going)
