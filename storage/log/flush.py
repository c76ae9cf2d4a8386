"""Making a log durable, in three steps so that the waiting can be done in a thread.

Rules: what a flush covers is fixed when it begins; whatever is appended meanwhile belongs to the
next one. A sync that failed is never repeated: the directory goes offline, and with it every log
in it (a second fsync would report success without having written anything). A folder that was
renamed by a deletion, or removed by hand, is no failed sync: it concerns this partition alone.
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
    """Up to where one segment is durable once the flush has run."""

    segment: Segment
    size_bytes: int
    was_sealed: bool


@dataclass(frozen=True, slots=True)
class FlushTask:
    """A flush of everything below `end_offset`."""

    env: Env
    home: LogDirectory
    directory: str  # the partition's folder, synced if `with_names`
    end_offset: int
    files: tuple[File, ...]
    with_names: bool
    names: int  # which change of names it covers
    removals: int  # how many removals of segments it covers
    segments: tuple[FlushedSegment, ...]
    history: int  # which truncation of the log it belongs to
    give_up: Callable[[str, OSError], StorageError]  # stops all writing to the log or directory

    def run(self) -> None:
        """Sync; may run in any thread.

        Raises LogDirectoryError, and then never again succeeds; LogClosedError if the partition
        was deleted meanwhile; NoRoomError if the folder could not be opened for want of file
        descriptors: then it can be run again.
        """
        if self.home.offline_reason is not None:
            raise LogDirectoryError(self.home.path, self.home.offline_reason)
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
    """Return the files to sync and what that makes durable."""
    files: list[File] = []
    flushed: list[FlushedSegment] = []
    for segment in segments:
        if segment.needs_sync:
            files += segment.files_to_sync()
            flushed.append(FlushedSegment(segment, segment.size_bytes, segment.is_sealed))
    return tuple(files), tuple(flushed)
