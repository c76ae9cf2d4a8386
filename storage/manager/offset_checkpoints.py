"""Checkpoints of a data directory: what they said when it was opened, and writing them anew.

Rules
- What is written was captured on the event loop; the writing may be done in a thread.
- A file that is missing or damaged costs time and no record. Without recovery points nothing is
  known to be flushed and nothing is known not to be (None): all is verified, and only the end of
  the last segment can be torn. The same holds of a folder that was moved or copied into the
  directory. Without log starts a log begins at its first segment. Without cleaner offsets it is
  cleaned from its start.
- The files are there before the first partition. So a directory that has partitions and none of the
  files has lost them. Kafka assumes recovery point 0 there: it verifies all segments, truncates the
  first damaged one at its first damaged batch, and deletes the segments that follow.
- Kafka's formats name a partition and not its topic's id. So nothing may be left that was said of
  a deleted partition when another one of that name is created: a start after a kill would take
  the offsets for the new one's, and cut or hide its records.
"""

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from storage.directory.directory_identity import partitions_in
from storage.directory.log_directory import LogDirectory
from storage.env import Env
from storage.errors import (
    CorruptCheckpointError,
    LogDirectoryError,
    NoRoomError,
    is_out_of_descriptors,
)
from storage.format import filenames
from storage.format.checkpoints import decode_offsets, write_offsets
from storage.log.log import Log
from storage.model import TopicPartition

Offsets = dict[TopicPartition, int]

CONSEQUENCES: Final = {  # of losing a file
    filenames.RECOVERY_POINT_CHECKPOINT: "every log is verified from its first segment on",
    filenames.LOG_START_CHECKPOINT: "each log begins at its first segment",
    filenames.CLEANER_CHECKPOINT: "each log is cleaned from its start",
}


@dataclass(slots=True)
class FoundCheckpoints:
    """What a directory's checkpoints said when it was opened."""

    recovery_points: Offsets | None = field(default_factory=dict)  # None: lost
    log_starts: Offsets = field(default_factory=dict)
    cleaner: Offsets = field(default_factory=dict)
    adopted: set[TopicPartition] = field(default_factory=set)  # folders that came from elsewhere

    @property
    def partitions(self) -> set[TopicPartition]:
        """Of which they say anything."""
        return {*(self.recovery_points or ()), *self.log_starts, *self.cleaner}

    def recovery_point_of(self, partition: TopicPartition) -> int | None:
        """Below which a partition was flushed; None if that is not known."""
        if self.recovery_points is None:
            return None
        absent = None if partition in self.adopted else 0
        return self.recovery_points.get(partition, absent)

    def kept(self, partition: TopicPartition) -> "KeptOffsets":
        """Return what they say of one partition."""
        return KeptOffsets(
            None if self.recovery_points is None else self.recovery_points.get(partition),
            self.log_starts.get(partition),
            self.cleaner.get(partition),
        )


def read_checkpoints(env: Env, directory: LogDirectory) -> FoundCheckpoints:
    """Read the checkpoints of a directory; what is lost is told to `directory.notes`.

    A directory without partitions gets the files at once. OSError as it comes.
    """
    names = (*CONSEQUENCES, filenames.REPLICATION_CHECKPOINT)
    is_there = any(env.exists(directory.file(name)) for name in names)
    if not is_there and not partitions_in(env, directory.path):
        _write_empty(env, directory, names)
        return FoundCheckpoints()
    results: dict[str, Offsets | None] = {}
    for name, consequence in CONSEQUENCES.items():
        path = directory.file(name)
        results[name], problem = _read(env, path)
        if results[name] is None:
            directory.notes.append(f"{problem or f'{path}: it is missing'}; {consequence}")
    points = results[filenames.RECOVERY_POINT_CHECKPOINT]
    starts = results[filenames.LOG_START_CHECKPOINT]
    cleaner = results[filenames.CLEANER_CHECKPOINT]
    return FoundCheckpoints(points, starts or {}, cleaner or {})


def _write_empty(env: Env, directory: LogDirectory, names: Iterable[str]) -> None:
    # Without room none is written. If a later start finds partitions and none of the files, it
    # verifies all of their batches and cuts less: that is slower, and safe.
    with suppress(NoRoomError):
        for name in names:
            write_offsets(env, directory.file(name), {})


def _read(env: Env, path: str) -> tuple[Offsets | None, str]:
    """An offset checkpoint, or None and what is wrong with it; no problem if it is missing."""
    try:
        data = env.read_file(path)
        if not data:
            return None, f"{path}: it is empty"  # one without entries has two lines
        return decode_offsets(data, path), ""
    except FileNotFoundError:
        return None, ""
    except CorruptCheckpointError as error:
        return None, str(error)


@dataclass(frozen=True, slots=True)
class KeptOffsets:
    """What the checkpoints say of a partition that is offline; None: nothing."""

    recovery_point: int | None
    log_start: int | None
    cleaner: int | None

    def add_to(
        self, partition: TopicPartition, recovery: Offsets, starts: Offsets, cleaner: Offsets
    ) -> None:
        """Enter the offsets into what the next checkpoint writes."""
        for offset, offsets in (
            (self.recovery_point, recovery),
            (self.log_start, starts),
            (self.cleaner, cleaner),
        ):
            if offset is not None:
                offsets[partition] = offset


@dataclass(slots=True)
class WrittenCheckpoints:
    """Which partitions the checkpoint files of each directory may speak of.

    One writer at a time: rounds and creations come from different threads.
    """

    writing: threading.Lock = field(default_factory=threading.Lock)
    partitions: dict[str, set[TopicPartition]] = field(default_factory=dict)  # by directory
    numbers: dict[str, int] = field(default_factory=dict)  # of the last capture, by directory


@dataclass(frozen=True, slots=True)
class CheckpointTask:
    """The checkpoints of all online directories, captured; `run` writes them."""

    env: Env
    files: tuple[tuple[LogDirectory, str, Mapping[TopicPartition, int]], ...]
    captured: Mapping[TopicPartition, Log]
    live: Mapping[TopicPartition, Log]
    written: WrittenCheckpoints
    number: int  # of the capture; they only grow

    def run(self) -> None:
        """Write every file; may run in a thread. Raises LogDirectoryError after trying all, and
        NoRoomError where a file is still as it was: then its directory is as good as before.

        Partitions that were deleted since the capture are left out: the next one of that name may
        exist already. A directory of which a later capture was written is left as it is.
        """
        with self.written.writing:
            self._write()

    def _write(self) -> None:
        failures: list[LogDirectoryError] = []
        refusals: list[NoRoomError] = []
        gone = {
            partition
            for partition, log in self.captured.items()
            if self.live.get(partition) is not log
        }
        spoken: dict[str, set[TopicPartition]] = {}
        last = dict(self.written.numbers)
        for directory, name, offsets in self.files:
            if not directory.is_online or last.get(directory.path, 0) > self.number:
                continue
            self.written.numbers[directory.path] = self.number
            remaining = {
                partition: offset for partition, offset in offsets.items() if partition not in gone
            }
            spoken.setdefault(directory.path, set()).update(remaining)
            try:
                write_offsets(self.env, directory.file(name), remaining)
            except NoRoomError as error:
                refusals.append(error)
                # The file speaks of whatever it spoke of before.
                before = self.written.partitions.get(directory.path, set())
                spoken[directory.path].update(before)
            except OSError as error:
                if is_out_of_descriptors(error):  # it is in place, and durable the next time
                    refusals.append(NoRoomError(error, directory.file(name)))
                    continue
                directory.fail(f"{name}: {error}")
                failures.append(LogDirectoryError(directory.path, f"{name}: {error}"))
        self.written.partitions.update(spoken)
        if failures:
            raise failures[0]
        if refusals:
            raise refusals[0]
