"""Which segments a topic's policy lets go of; pure.

Rules: only a prefix of whole segments goes, and never one that holds records at or above the high
watermark, and never an empty active one. `delete` expires by time, by size and by log start
offset; `compact` alone by log start offset only; a policy that nobody gave expires nothing, and
neither does a clock that cannot be trusted by time.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from config.topic_keys import TopicConfig

NO_LIMIT: Final = -1


class SegmentFacts(NamedTuple):
    """What is known of a segment without reading it. Sizes in bytes; the last one is active.

    `largest_timestamp_ms` and `first_batch_timestamp_ms` are -1 where there is no timestamp;
    `last_modified_ms` is the log file's own time.
    """

    base_offset: int
    next_base_offset: int  # of the segment after it; of the last one the log end offset
    size_bytes: int
    index_bytes: int
    time_index_bytes: int
    largest_timestamp_ms: int
    first_batch_timestamp_ms: int
    last_modified_ms: int
    has_transactions: bool
    files: tuple[str, ...]


class ExpiryReason(Enum):
    """Why a segment goes."""

    LOG_START_OFFSET = "log start offset"
    SIZE = "retention.bytes"
    TIME = "retention.ms"


class ExpiredSegment(NamedTuple):
    """A segment that may go."""

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
    """Return the segments that go, oldest first (Kafka's UnifiedLog.deleteOldSegments).

    A segment with any of the three reasons goes; the first without one ends the prefix.
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
