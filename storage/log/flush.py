"""Flush a log to disk in three steps: plan, sync (in a thread), record the result.

The plan fixes what a flush covers; later appends belong to the next flush. A failed sync is never
repeated, because a second fsync would succeed without writing anything: the directory and all its
logs go offline. A folder that a deletion renamed, or that was removed by hand, is not a failed sync
and concerns this partition only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage.directory.log_directory import LogDirectory
from storage.env import Env, File
from storage.errors import (
    LogDirectoryError,
    NoRoomError,
    StorageError,
    is_out_of_descriptors,
)
from storage.log.log_state import LogState
from storage.segments.segment import Segment


@dataclass(frozen=True, slots=True)
class FlushedSegment:
    """The durable end of one segment after the flush."""

    segment: Segment
    size_bytes: int
    was_sealed: bool


@dataclass(frozen=True, slots=True)
class FlushTask:
    """A flush of everything below `end_offset`."""

    env: Env
    log_directory: LogDirectory
    directory: str  # the partition folder, synced if `with_names`
    end_offset: int
    files: tuple[File, ...]
    with_names: bool
    names: int  # the last change of names that it covers
    removals: int  # the number of segment removals that it covers
    segments: tuple[FlushedSegment, ...]
    history: int  # the number of truncations of the log when it was planned
    fail_log: Callable[[str, OSError], StorageError]  # of LogState

    def run(self) -> None:
        """Sync; may run in any thread.

        Raises LogDirectoryError, after which it must not run again; LogClosedError if the partition
        was deleted meanwhile; NoRoomError without file descriptors, after which it can run again.
        """
        if self.log_directory.offline_reason is not None:
            raise LogDirectoryError(self.log_directory.path, self.log_directory.offline_reason)
        try:
            for file in self.files:
                file.sync()
            if self.with_names:
                self.env.sync_dir(self.directory)
        except OSError as error:
            if is_out_of_descriptors(error):
                raise NoRoomError(error, self.directory) from error
            raise self.fail_log("sync of", error) from error


class LogFlusher:
    """The data of one log that is not durable yet, and the flushes that make it durable."""

    __slots__ = (
        "_flushed_ms",
        "_history",
        "_names",
        "_names_synced",
        "_removals",
        "_removals_synced",
        "_state",
        "_unsynced",
    )

    def __init__(self, state: LogState) -> None:
        self._state = state
        self._unsynced: list[Segment] = []  # those that may need a sync, and the active one
        self._flushed_ms = state.env.wall_ms()
        self._history = 0  # number of truncations; one makes earlier flushes void
        self._names = 1  # number of changes of file names; opening counts as one
        self._names_synced = 0  # changes that are durable
        self._removals = 0  # segment removals by retention; durable after a sync
        self._removals_synced = 0
        self._find_unsynced()

    def _find_unsynced(self) -> None:
        active = self._state.segments.active
        self._unsynced = [
            segment for segment in self._state.segments if segment is active or segment.needs_sync
        ]

    # Flushes

    @property
    def is_flushed(self) -> bool:
        """Return whether all appended data and the names of its files are durable.

        Segments recovered below the recovery point also need a sync.
        """
        state = self._state
        is_written = state.recovery_point >= state.log_end_offset
        return is_written and not (self.has_unsynced_data or self.has_unsynced_names)

    @property
    def has_unsynced_data(self) -> bool:
        """Return whether a segment needs a sync."""
        return any(segment.needs_sync for segment in self._unsynced)

    @property
    def has_unsynced_names(self) -> bool:
        """Return whether a crash could undo a change of names in the folder."""
        return self._names != self._names_synced

    def is_due(self, now_ms: int) -> bool:
        """Return whether flush.messages, flush.ms or a closed segment need a flush."""
        state = self._state
        self._flushed_ms = min(self._flushed_ms, now_ms)  # the clock may have been set back
        unflushed = state.log_end_offset - state.recovery_point
        if unflushed <= 0:
            return False
        return (
            unflushed >= state.config.flush_messages
            or now_ms - self._flushed_ms >= state.config.flush_ms
            or len(self._unsynced) > 1
        )

    def begin(self) -> FlushTask:
        """Plan a flush of everything appended so far.

        Run the task in any thread, then pass it to `done`. Raises LogDirectoryError.
        """
        state = self._state
        if state.log_directory.offline_reason is not None or state.folder_failure is not None:
            state.refuse()
        files, segments = _plan(self._unsynced)
        return FlushTask(
            env=state.env,
            log_directory=state.log_directory,
            directory=state.directory,
            end_offset=state.log_end_offset,
            files=files,
            with_names=self.has_unsynced_names or self.has_unsynced_removals,
            names=self._names,
            removals=self._removals,
            segments=segments,
            history=self._history,
            fail_log=state.fail_log,
        )

    def done(self, task: FlushTask) -> None:
        """Advance the recovery point and the high watermark after a successful flush."""
        state = self._state
        self._flushed_ms = state.env.wall_ms()
        if task.history != self._history:
            return  # the log was truncated meanwhile
        self._names_synced = max(self._names_synced, task.names)
        self._removals_synced = max(self._removals_synced, task.removals)
        for flushed in task.segments:
            flushed.segment.note_synced(flushed.size_bytes, was_sealed=flushed.was_sealed)
        active = state.segments.active
        self._unsynced = [
            segment for segment in self._unsynced if segment is active or segment.needs_sync
        ]
        state.recovery_point = max(state.recovery_point, task.end_offset)
        state.raise_high_watermark(task.end_offset)

    def flush(self) -> None:
        """Flush everything now."""
        task = self.begin()
        task.run()
        self.done(task)

    # Changes that the next flush covers

    def note_names(self) -> None:
        """Record that names in the folder changed."""
        self._names += 1

    def note_durable(self) -> None:
        """Record that all names in the folder are durable."""
        self._names_synced, self._removals_synced = self._names, self._removals

    def add(self, segment: Segment) -> None:
        """Record a new active segment."""
        self._names += 1
        self._unsynced.append(segment)

    def replace(self, gone: Sequence[Segment], new: Sequence[Segment]) -> None:
        """Record that closed segments were removed or replaced."""
        self._unsynced = [
            *(segment for segment in new if segment.needs_sync),
            *(segment for segment in self._unsynced if segment not in gone),
        ]

    def begin_truncation(self) -> None:
        """Make all flushes void that were planned before."""
        self._history += 1
        self._names += 1

    def end_truncation(self) -> None:
        """Record that the segments are those of the truncated log."""
        self._find_unsynced()

    def note_removal(self) -> None:
        """Record that retention removes segments."""
        self._removals += 1

    @property
    def has_unsynced_removals(self) -> bool:
        """Return whether a crash could restore segments that retention removed."""
        return self._removals != self._removals_synced

    def sync_names(self, *, with_removals: bool) -> None:
        """Sync the folder if names changed; `with_removals`, also if segments were removed.

        Raises OSError.
        """
        must_sync = with_removals and self.has_unsynced_removals
        if self.has_unsynced_names or must_sync:
            self._state.env.sync_dir(self._state.directory)
            self._names_synced, self._removals_synced = self._names, self._removals


def _plan(segments: Sequence[Segment]) -> tuple[tuple[File, ...], tuple[FlushedSegment, ...]]:
    """Return the files to sync, and what is durable then."""
    files: list[File] = []
    flushed: list[FlushedSegment] = []
    for segment in segments:
        if segment.needs_sync:
            files += segment.files_to_sync()
            flushed.append(FlushedSegment(segment, segment.size_bytes, segment.is_sealed))
    return tuple(files), tuple(flushed)
