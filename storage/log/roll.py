"""When and how the active segment is closed and a new one begun.

Rules (Kafka's LogSegment.shouldRoll): a segment rolls when a batch would not fit `segment.bytes`,
when its indexes are full, when an offset would be too far from the base, and by age. Age is the
batch's timestamp against the first one's, or wall time where the first batch has no timestamp;
never of an empty segment. On compacted topics the age is at most `max.compaction.lag.ms`.

What Kafka does not have: a topic with a compacted view closes its segments long before
`retention.ms`. A view takes closed segments only; what expired in the active one would never be in
it, neither values nor deletes.

Kafka rolls on append only; `is_idle_due` lets a timer close segments that nobody writes to any
more. It counts wall time since the first append alone: a backfill of old records is no reason to
make many small segments.
"""

from typing import Final

from config.topic_keys import TopicConfig
from storage.env import Env
from storage.errors import NoRoomError, is_scarcity
from storage.format.index import RELATIVE_OFFSET_MAX, IndexLimits
from storage.format.producer_state import ProducerStates
from storage.segments.producer_snapshots import write_snapshot
from storage.segments.retention import NO_LIMIT
from storage.segments.segment import Segment

NEVER_MS: Final = 1 << 63
VIEW_SHARE: Final = 4  # of retention.ms: a view takes a closed segment when half of it is over


class RollRule:
    """The limits of the present active segment."""

    __slots__ = (
        "_age_ms",
        "_at_timestamp_ms",
        "_at_wall_ms",
        "_end_offset",
        "_max_bytes",
        "begun_ms",
        "is_begun",
    )

    def __init__(self, config: TopicConfig, base_offset: int, jitter: float) -> None:
        """For an empty segment. `jitter` in [0, 1) is the share of segment.jitter.ms it gets."""
        self._max_bytes = config.segment_bytes
        age_ms = config.segment_ms
        if config.compacts:
            age_ms = min(age_ms, config.max_compaction_lag_ms)
        is_kept_by_view = config.has_view and config.varve_view_min_bytes >= 0
        if is_kept_by_view and config.deletes and config.retention_ms != NO_LIMIT:
            age_ms = min(age_ms, config.retention_ms // VIEW_SHARE)
        self._age_ms = age_ms - int(min(config.segment_jitter_ms, age_ms) * jitter)
        self._end_offset = base_offset + RELATIVE_OFFSET_MAX + 1
        self._at_timestamp_ms = self._at_wall_ms = NEVER_MS
        self.is_begun = False
        self.begun_ms = NEVER_MS

    def begin(self, first_timestamp_ms: int, now_ms: int) -> None:
        """Its first batch was appended at `now_ms` (wall time); timestamp -1 if it has none."""
        self.is_begun = True
        self.begun_ms = now_ms
        if first_timestamp_ms >= 0:
            self._at_timestamp_ms = first_timestamp_ms + self._age_ms
        else:
            self._at_wall_ms = now_ms + self._age_ms

    def is_due(self, end_bytes: int, timestamp_ms: int, now_ms: int, next_offset: int) -> bool:
        """Whether a batch that would end at `end_bytes` and `next_offset` needs a new segment."""
        if next_offset > self._end_offset:
            return True
        return self.is_begun and (
            end_bytes > self._max_bytes
            or timestamp_ms > self._at_timestamp_ms
            or now_ms > self._at_wall_ms
        )

    def is_idle_due(self, now_ms: int) -> bool:
        """Return whether it is old enough without another append."""
        return self.is_begun and now_ms - self.begun_ms > self._age_ms

    @property
    def idle_due_ms(self) -> int | None:
        """Wall time after which it is old enough without another append; None: it is empty."""
        return self.begun_ms + self._age_ms if self.is_begun else None


def create_next_segment(
    old: Segment, env: Env, base_offset: int, limits: IndexLimits, states: ProducerStates
) -> Segment:
    """Make the files of a segment at `base_offset`, write the state there, seal the one before.

    Raises NoRoomError with `old` as it was; a snapshot of the state here is true without a roll,
    too. After an OSError only opening the log anew tells what was done.
    """
    new = Segment.begin(env, old.directory, base_offset, limits)
    try:
        write_snapshot(env, old.directory, base_offset, states)
        old.seal()
    except OSError as error:
        if not is_scarcity(error):
            raise
        new.remove()
        old.cut_back(old.size_bytes)
        raise NoRoomError(error, old.directory) from error
    return new
