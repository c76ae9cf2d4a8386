"""Retention of an open log: which segments expire, and the delayed removal of their files.

Rules
- Retention removes segments from the front only. After a crash, no reader sees an older removed
  segment without the newer ones: a deleted value would return without its tombstone. So either the
  new log start offset is durable first, or each removal is durable before the next one.
- The log start moves first: readers do not see segments whose files are still being removed.
- Segments in a swap, and all after them, wait for the next round.
"""

from collections.abc import Sequence

from storage.errors import NoRoomError
from storage.log.deletion import Delay, ScheduledDeletions
from storage.log.flush import LogFlusher
from storage.log.log_epochs import LogEpochs
from storage.log.log_state import LogState
from storage.log.roll import LogRoller
from storage.segments.expiry import ExpiredSegment, plan_expiry
from storage.segments.segment import Segment


class LogRetention:
    """The retention of one log. Every method that uses the disk raises LogDirectoryError."""

    __slots__ = ("_deletions", "_epochs", "_flusher", "_roller", "_state")

    def __init__(
        self,
        state: LogState,
        flusher: LogFlusher,
        roller: LogRoller,
        epochs: LogEpochs,
        deletions: ScheduledDeletions,
    ) -> None:
        self._state = state
        self._flusher = flusher
        self._epochs = epochs
        self._deletions = deletions
        self._roller = roller

    def raise_log_start(self, offset: int) -> None:
        """Hide all records below `offset` from readers."""
        if offset > self._state.log_start_offset:
            self._state.log_start_offset = offset
            self._epochs.note_log_start(offset)

    def begin(self, now_ms: int, *, clock_trusted: bool = True) -> list[ExpiredSegment]:
        """Plan retention (storage/segments/expiry.py) and move the log start after it.

        The files of the segments stay until `finish`.
        """
        state = self._state
        if not state.accepts_changes:
            return []
        expired = list(
            plan_expiry(
                state.segment_facts(),
                state.config,
                log_start_offset=state.log_start_offset,
                high_watermark=state.high_watermark,
                now_ms=now_ms,
                clock_trusted=clock_trusted,
            )
        )
        going = state.segments.since(0)[: len(expired)]
        pinned = next((i for i, segment in enumerate(going) if segment.is_pinned), len(going))
        expired = expired[:pinned]
        if expired and len(expired) == len(state.segments):
            try:
                self._roller.roll(now_ms)
            except NoRoomError:  # the others are removed all the same and make room
                expired.pop()
        if expired:
            self.raise_log_start(expired[-1].facts.next_base_offset)
        return expired

    def finish(
        self, now_ms: int, noted_start_offset: int, *, segments_max: int | None = None
    ) -> int:
        """Remove at most `segments_max` segments entirely below an offset; return how many.

        The checkpoint of the directory has `noted_start_offset` as log start, durably. So they can
        be removed in one step: a crash may restore any of them, but no reader sees them.
        """
        state = self._state
        if not state.accepts_changes:
            return 0
        going = self._segments_below(min(noted_start_offset, state.log_start_offset))[:segments_max]
        if going:
            self._remove_front(going, now_ms, start_is_noted=True)
        return len(going)

    def expire(
        self, now_ms: int, *, clock_trusted: bool = True, segments_max: int | None = None
    ) -> list[ExpiredSegment]:
        """Run retention without a log start in the checkpoint.

        Each segment is removed durably before the next one, oldest first. At most `segments_max`
        are removed; the others are hidden until the next round.
        """
        expired = self.begin(now_ms, clock_trusted=clock_trusted)
        going = self._segments_below(self._state.log_start_offset) if expired else []
        for segment in going[:segments_max]:
            self._remove_front([segment], now_ms, start_is_noted=False)
        return expired

    def _segments_below(self, offset: int) -> list[Segment]:
        """Return the closed segments entirely below an offset, up to a pinned one."""
        going: list[Segment] = []
        segments = self._state.segments
        for segment, end in zip(segments, segments.bases[1:], strict=False):
            if end > offset or segment.is_pinned:
                break
            going.append(segment)
        return going

    def _remove_front(self, going: Sequence[Segment], now_ms: int, *, start_is_noted: bool) -> None:
        """Rename the files of segments at the front.

        Earlier removals are synced first, unless the log start offset is durable.
        """
        state = self._state
        try:
            # Sync the names: otherwise a crash may leave no active segment.
            self._flusher.sync_names(with_removals=not start_is_noted)
            self._flusher.note_removal()
            self._deletions.schedule(
                [segment.base_offset for segment in going],
                Delay(now_ms, state.config.file_delete_delay_ms),
            )
        except OSError as error:
            raise state.failed("retention of", error) from error
        state.segments.replace(going, ())
        self._flusher.replace(going, ())

    def purge_deleted(self, now_ms: int) -> int:
        """Unlink the files whose delay is over; return how many."""
        due = self.take_deleted(now_ms)
        self.unlink_deleted(due)
        return len(due)

    def take_deleted(self, now_ms: int) -> list[str]:
        """Remove and return the files whose delay is over, for `unlink_deleted`."""
        return self._deletions.take_due(now_ms)

    def unlink_deleted(self, paths: Sequence[str]) -> None:
        """Unlink these files. May run in a thread: a cached file takes 0.3 ms a megabyte."""
        try:
            self._deletions.unlink(paths)
        except OSError as error:
            raise self._state.failed("retention of", error) from error
