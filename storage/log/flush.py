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
    give_up: Callable[[str, OSError], StorageError]  # stops all writing to the log or directory

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
            raise self.give_up("sync of", error) from error


def plan_flush(segments: Sequence[Segment]) -> tuple[tuple[File, ...], tuple[FlushedSegment, ...]]:
    """Return the flush of everything up to `end_offset`: the files to sync."""
    files: list[File] = []
    flushed: list[FlushedSegment] = []
    for segment in segments:
        if segment.needs_sync:
            files += segment.files_to_sync()
            flushed.append(FlushedSegment(segment, segment.size_bytes, segment.is_sealed))
    return tuple(files), tuple(flushed)
