"""Rolling: when the active segment is closed, and how the next one is created.

As in Kafka's LogSegment.shouldRoll, a segment rolls when a batch does not fit into `segment.bytes`,
when its indexes are full, when an offset is too far from the base offset, and by age. The age is
the timestamp of the batch minus that of the first batch, or wall time if the first batch has none.
An empty segment never rolls. The maximum age is `segment.ms`, on compacted topics the smaller of
`segment.ms` and `max.compaction.lag.ms` (Kafka's maxSegmentMs).

Unlike Kafka, a topic with a compacted view rolls long before `retention.ms`: a view reads closed
segments only, and would never get records that expire in the active segment.

If no file descriptor is left, the active segment grows on: producers go on, and one file fewer is
open. Only where it cannot take the batch does the append fail.

Unlike Kafka, a log rolls small segments by age ten times at once and then once in ten seconds. With
`segment.ms=1`, or with timestamps far apart, each batch of a client would need a new segment, whose
files the event loop creates. If half of the file descriptors are in use, only a log with few
segments rolls small ones.

Kafka rolls on append only. `is_idle_due` lets a timer close idle segments. It uses wall time since
the first append only, so that a backfill of old records does not make many small segments.
"""

from collections.abc import Callable
from typing import Final

from config.topics.keys import TopicConfig
from storage.env import Env
from storage.errors import NoRoomError, is_out_of_descriptors, is_scarcity
from storage.format.index import RELATIVE_OFFSET_MAX, IndexLimits
from storage.format.producer_state import ProducerStates
from storage.log.flush import LogFlusher
from storage.log.log_state import LogState, index_limits
from storage.segments.expiry import NO_LIMIT
from storage.segments.producer_snapshots import write_snapshot
from storage.segments.segment import FILE_POSITION_MAX, Segment

NEVER_MS: Final = 1 << 63
INDEX_IDLE_MS: Final = 30_000
SMALL_SEGMENT_BYTES: Final = 1 << 20  # the minimum of segment.bytes: a larger one may roll freely
SMALL_ROLLS: Final = 10  # of small segments by age, one after the other
SMALL_ROLL_MS: Final = 10_000  # from then on, the time between two
SMALL_SEGMENTS: Final = 3  # of a log, while half of the file descriptors are in use
# A topic with a view rolls after this part of retention.ms, so that the view reads records in time.
VIEW_SHARE: Final = 4


class RollRule:
    """The limits of the active segment."""

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
        """Create the rule of an empty segment. `jitter` in [0, 1) scales segment.jitter.ms."""
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
        """Record the first append at `now_ms` (wall time); timestamp -1 for a batch without."""
        self.is_begun = True
        self.begun_ms = now_ms
        if first_timestamp_ms >= 0:
            self._at_timestamp_ms = first_timestamp_ms + self._age_ms
        else:
            self._at_wall_ms = now_ms + self._age_ms

    def is_due(self, end_bytes: int, timestamp_ms: int, now_ms: int, next_offset: int) -> bool:
        """Return whether a batch up to `end_bytes` and `next_offset` needs a new segment."""
        return not self.fits(end_bytes, next_offset) or (
            self.is_begun and (timestamp_ms > self._at_timestamp_ms or now_ms > self._at_wall_ms)
        )

    def fits(self, end_bytes: int, next_offset: int) -> bool:
        """Return whether a batch up to `end_bytes` and `next_offset` is within the limits."""
        return next_offset <= self._end_offset and (
            not self.is_begun or end_bytes <= self._max_bytes
        )

    def can_grow_to(self, end_bytes: int, next_offset: int) -> bool:
        """Return whether the segment can take the batch although it is above segment.bytes."""
        return end_bytes <= FILE_POSITION_MAX and next_offset <= self._end_offset

    def is_idle_due(self, now_ms: int) -> bool:
        """Return whether the segment is old enough to roll without an append.

        If the clock was set back to before its first append, its age begins again.
        """
        if self.is_begun:
            self.begun_ms = min(self.begun_ms, now_ms)
        return self.is_begun and now_ms - self.begun_ms > self._age_ms

    @property
    def idle_due_ms(self) -> int | None:
        """Return the wall time at which it rolls without an append; None if empty."""
        return self.begun_ms + self._age_ms if self.is_begun else None


def _rule_of(segment: Segment, config: TopicConfig, env: Env) -> RollRule:
    """Return the roll rule of a segment that may have batches."""
    jitter = 0.0
    if config.segment_jitter_ms:
        jitter = int.from_bytes(env.random_bytes(4), "big") / (1 << 32)
    rule = RollRule(config, segment.base_offset, jitter)
    if segment.size_bytes:
        first_ms = segment.first_timestamp_ms
        # The time of its first append is unknown. The segment may be older than its last change and
        # its timestamps show; closing it too early costs one small segment.
        begun_ms = segment.last_modified_ms
        rule.begin(first_ms, min(first_ms, begun_ms) if first_ms >= 0 else begun_ms)
    return rule


def create_next_segment(
    old: Segment, env: Env, base_offset: int, limits: IndexLimits, states: ProducerStates
) -> Segment:
    """Create a segment at `base_offset`, write the producer snapshot, seal the old segment.

    Raises NoRoomError without a change to `old`; the snapshot is valid without a roll as well.
    After an OSError only recovery can find out what was done.
    """
    # A power failure must not restore a batch that was not appended, in front of the new segment.
    old.sync_truncation()
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


class LogRoller:
    """The roll rule of one log, and its rolls."""

    __slots__ = ("_flusher", "_indexes_checked_ms", "_small_ms", "_state", "on_roll", "rule")

    def __init__(self, state: LogState, flusher: LogFlusher) -> None:
        self._state = state
        self._flusher = flusher
        self.rule = _rule_of(state.segments.active, state.config, state.env)
        self.on_roll: Callable[[], None] | None = None  # called after a roll
        self._indexes_checked_ms = 0
        # A leaky bucket as a wall time: a roll of a small segment by age adds SMALL_ROLL_MS, and it
        # is full SMALL_ROLLS of these ahead of the clock.
        self._small_ms = 0

    def begin_rule(self) -> None:
        """Take the rule of an active segment that is new or was cut."""
        state = self._state
        self.rule = _rule_of(state.segments.active, state.config, state.env)

    def apply_config(self) -> None:
        """Use the new config for the active segment, which keeps its age."""
        begun_ms = self.rule.begun_ms
        self.begin_rule()
        self.rule.begun_ms = begun_ms

    def roll(self, now_ms: int) -> None:
        """Close the active segment and start a new one at the log end offset.

        An empty active segment stays. Raises NoRoomError if nothing was changed.
        """
        state = self._state
        old, base_offset = state.segments.active, state.log_end_offset
        if base_offset == old.base_offset:
            return
        try:
            new = create_next_segment(
                old, state.env, base_offset, index_limits(state.config), state.producers.states
            )
        except NoRoomError:
            raise
        except OSError as error:
            # A part may be done; only recovery can find out which.
            raise state.fail_log("roll of", error) from error
        new.last_modified_ms = now_ms
        state.segments.add(new)
        self._flusher.add(new)
        self.begin_rule()
        if self.on_roll is not None:
            self.on_roll()

    def roll_for(self, end_bytes: int, next_offset: int, now_ms: int) -> None:
        """Roll for a batch up to `end_bytes` and `next_offset` of the present segment.

        If it is due by its age only, and small segments rolled too often, it grows on. Without a
        file descriptor, it grows on if it can. Raises NoRoomError.
        """
        is_full = self._state.segments.active.is_full
        fits = not is_full and self.rule.fits(end_bytes, next_offset)
        if fits and not self._take_roll_by_age(now_ms):
            return
        try:
            self.roll(now_ms)
        except NoRoomError as error:
            can_grow = not is_full and self.rule.can_grow_to(end_bytes, next_offset)
            if not (can_grow and is_out_of_descriptors(error)):
                raise

    def _take_roll_by_age(self, now_ms: int) -> bool:
        """Return whether the active segment may roll because of its age; count it if it is small.

        Otherwise it is small, and too many small ones rolled by age.
        """
        segments = self._state.segments
        if segments.active.size_bytes >= SMALL_SEGMENT_BYTES:
            return True
        none_left_ms = now_ms + SMALL_ROLLS * SMALL_ROLL_MS
        self._small_ms = min(max(self._small_ms, now_ms), none_left_ms)  # the clock may be set back
        if self._small_ms > none_left_ms - SMALL_ROLL_MS:
            return False
        if len(segments) > SMALL_SEGMENTS and not self._state.env.has_spare_descriptors(
            for_small_segment=True
        ):
            self._small_ms = none_left_ms  # look again later, not at each append
            return False
        self._small_ms += SMALL_ROLL_MS
        return True

    def roll_if_due(self, now_ms: int, roll: Callable[[int], None] | None = None) -> bool:
        """Roll the active segment if it is old enough; called periodically.

        Also drop the indexes of closed segments from memory that were idle for INDEX_IDLE_MS.
        `roll` replaces the method `roll`.
        """
        state = self._state
        if not state.accepts_changes:
            return False
        self._indexes_checked_ms = min(self._indexes_checked_ms, now_ms)  # a clock set back
        if now_ms - self._indexes_checked_ms >= INDEX_IDLE_MS:
            self._indexes_checked_ms = now_ms
            for segment in state.segments:
                segment.drop_idle_indexes()
        if not (state.config.compacts or state.config.deletes):
            return False  # nothing needs the segment to be closed
        if not self.rule.is_idle_due(now_ms) or not self._take_roll_by_age(now_ms):
            return False
        (roll or self.roll)(now_ms)
        return True

    @property
    def due_ms(self) -> int | None:
        """Return the wall time of the next `roll_if_due`; None for an empty segment."""
        due_ms = self.rule.idle_due_ms
        if due_ms is None or self._state.segments.active.size_bytes >= SMALL_SEGMENT_BYTES:
            return due_ms
        return max(due_ms, self._small_ms - (SMALL_ROLLS - 1) * SMALL_ROLL_MS)
