"""The offset checkpoints of a log directory: recovery points, log start offsets, cleaner offsets.

Rules
- The event loop captures the values, those of a log at one moment; a thread may write them.
- A missing or damaged file costs time, but no record. Without a recovery point (None) it is unknown
  what is flushed: all batches are verified, and only the end of the last segment can be torn. The
  same applies to a folder that was moved or copied into the directory. Without a log start offset a
  log begins at its first segment. Without a cleaner offset it is cleaned from its start.
- The files exist before the first partition, so a directory with partitions and without the files
  has lost them. Kafka assumes recovery point 0 then: it verifies all segments, truncates the first
  damaged one at its first damaged batch, and deletes the segments after it.
- Kafka's formats name a partition without its topic id. Therefore no entry of a deleted partition
  may remain when another one with its name is created: after a kill, the next start would apply the
  offsets to the new partition and truncate or hide its records.
"""

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
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
from storage.manager.known_damage import KnownDamage
from storage.model import TopicPartition

Offsets = dict[TopicPartition, int]

LOGS_PER_SLICE: Final = 200  # 1 ms

CONSEQUENCES: Final = {  # of a lost file
    filenames.RECOVERY_POINT_CHECKPOINT: "every log is verified from its first segment on",
    filenames.LOG_START_CHECKPOINT: "each log begins at its first segment",
    filenames.CLEANER_CHECKPOINT: "each log is cleaned from its start",
}
FILES: Final = (*CONSEQUENCES, filenames.REPLICATION_CHECKPOINT)


@dataclass(slots=True)
class FoundCheckpoints:
    """The content of a directory's checkpoints at opening."""

    recovery_points: Offsets | None = field(default_factory=dict)  # None: lost
    log_starts: Offsets = field(default_factory=dict)
    cleaner: Offsets = field(default_factory=dict)
    # Folders that were moved into the directory.
    taken_over: set[TopicPartition] = field(default_factory=set)

    @property
    def partitions(self) -> set[TopicPartition]:
        """Return the partitions that have an entry."""
        return {*(self.recovery_points or ()), *self.log_starts, *self.cleaner}

    def recovery_point_of(self, partition: TopicPartition) -> int | None:
        """Return the recovery point of a partition; None if unknown."""
        if self.recovery_points is None:
            return None
        absent = None if partition in self.taken_over else 0
        return self.recovery_points.get(partition, absent)

    def kept(self, partition: TopicPartition) -> "KeptOffsets":
        """Return the entries of one partition."""
        return KeptOffsets(
            None if self.recovery_points is None else self.recovery_points.get(partition),
            self.log_starts.get(partition),
            self.cleaner.get(partition),
        )


def read_checkpoints(env: Env, directory: LogDirectory) -> FoundCheckpoints:
    """Read the checkpoints of a directory; add lost files to `directory.notes`.

    A directory without partitions gets the files at once. Raises OSError.
    """
    is_there = any(env.exists(directory.file(name)) for name in FILES)
    if not is_there and not partitions_in(env, directory.path):
        _write_empty(env, directory)
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


def _write_empty(env: Env, directory: LogDirectory) -> None:
    # Without room none is written. A later start then verifies all batches of all partitions,
    # which is slower, but safe.
    with suppress(NoRoomError):
        for name in FILES:
            write_offsets(env, directory.file(name), {})


def _read(env: Env, path: str) -> tuple[Offsets | None, str]:
    """Return an offset checkpoint, or None and its fault; a missing file is no fault."""
    try:
        data = env.read_file(path)
        if not data:
            return None, f"{path}: it is empty"  # one without entries has two lines
        return decode_offsets(data, path), ""
    except FileNotFoundError:
        return None, ""
    except (CorruptCheckpointError, IsADirectoryError) as error:  # such as a link to a device
        return None, str(error)


@dataclass(frozen=True, slots=True)
class KeptOffsets:
    """The checkpoint entries of an offline partition; None without an entry."""

    recovery_point: int | None
    log_start: int | None
    cleaner: int | None

    def add_to(self, files: Mapping[str, Offsets], partition: TopicPartition) -> None:
        """Add the entries to the next checkpoint, by file name."""
        for name, offset in (
            (filenames.RECOVERY_POINT_CHECKPOINT, self.recovery_point),
            (filenames.LOG_START_CHECKPOINT, self.log_start),
            (filenames.CLEANER_CHECKPOINT, self.cleaner),
        ):
            if offset is not None:
                files[name][partition] = offset


@dataclass(slots=True)
class WrittenCheckpoints:
    """The partitions that the checkpoint files of each directory may contain.

    It allows one writer of a directory at a time, because different threads write checkpoints.
    """

    new_lock: Callable[[], AbstractContextManager[object]] = threading.Lock
    locks: dict[str, AbstractContextManager[object]] = field(default_factory=dict)  # by directory
    partitions: dict[str, set[TopicPartition]] = field(default_factory=dict)  # by directory
    numbers: dict[str, int] = field(default_factory=dict)  # of the last capture, by directory
    # Of the last capture, by directory.
    errors: dict[str, list[NoRoomError | LogDirectoryError]] = field(default_factory=dict)

    def lock_of(self, directory: str) -> AbstractContextManager[object]:
        """Return the lock that a writer of the directory holds."""
        return self.locks.setdefault(directory, self.new_lock())


@dataclass(frozen=True, slots=True)
class CheckpointTask:
    """The checkpoints of all online directories, captured; `run` writes them."""

    env: Env
    files: Mapping[LogDirectory, Mapping[str, Offsets]]  # by directory and name
    captured: Mapping[TopicPartition, Log]
    live: Mapping[TopicPartition, Log]
    written: WrittenCheckpoints
    damage: KnownDamage
    logs: Mapping[LogDirectory, Mapping[TopicPartition, Log]]  # by directory, of those captured
    offline: frozenset[TopicPartition]
    number: int  # of the capture; increasing

    def run(self) -> None:
        """Write every file; may run in a thread.

        Partitions deleted since the capture are omitted, because new ones with their names may
        exist. A directory with a later capture is not changed, and its errors are those of that
        capture. Raises LogDirectoryError after trying all directories, NoRoomError if a file was
        not changed.
        """
        errors: list[NoRoomError | LogDirectoryError] = []
        for directory in self.logs:
            with self.written.lock_of(directory.path):
                errors += self._write(directory)
        for error in sorted(errors, key=lambda error: isinstance(error, NoRoomError)):
            raise error

    def _write(self, directory: LogDirectory) -> list[NoRoomError | LogDirectoryError]:
        written, path = self.written, directory.path
        if not directory.is_online:
            return []
        if written.numbers.get(path, 0) > self.number:
            return written.errors[path]
        written.numbers[path] = self.number
        errors: list[NoRoomError | LogDirectoryError | None] = []
        ended = {partition for partition, log in self.captured.items() if self._is_gone(log)}
        named: set[TopicPartition] = set()
        for name, offsets in self.files[directory].items():
            if not directory.is_online:
                break
            remaining = {
                partition: offset for partition, offset in offsets.items() if partition not in ended
            }
            named.update(remaining)
            # Before the write: a partition that is deleted and created again meanwhile is named.
            written.partitions[path] = written.partitions.get(path, set()).union(remaining)
            write = partial(write_offsets, self.env, directory.file(name), remaining)
            error = _try_write(directory, name, write)
            if isinstance(error, NoRoomError):
                # The file may still have its former entries.
                named.update(written.partitions[path])
            errors.append(error)
        if directory.is_online:
            errors.append(self._write_damage(directory))
        written.partitions[path] = named
        written.errors[path] = [error for error in errors if error is not None]
        return written.errors[path]

    def _is_gone(self, log: Log) -> bool:
        """Return whether a partition was deleted. If its replica moved, both folders may be it."""
        if not log.is_deleted:
            return False
        live = self.live.get(log.partition)
        return live is None or live.topic_id != log.topic_id

    def write_damage(self) -> None:
        """Write the damage files. Without room, the damage must be found again."""
        for directory in self.logs:
            if directory.is_online:
                self._write_damage(directory)

    def _write_damage(self, directory: LogDirectory) -> NoRoomError | LogDirectoryError | None:
        current = {
            partition: log
            for partition, log in self.logs[directory].items()
            if self.live.get(partition) is log
        }
        write = partial(self.damage.write, directory, current, self.offline)
        return _try_write(directory, filenames.DAMAGE, write)


def _try_write(
    directory: LogDirectory, name: str, write: Callable[[], None]
) -> NoRoomError | LogDirectoryError | None:
    """Write a file; return the error, after which the directory is offline if its disk failed."""
    try:
        write()
    except NoRoomError as error:
        return error
    except OSError as error:
        if is_out_of_descriptors(error):
            # The file is renamed; the next checkpoint makes that durable.
            return NoRoomError(error, directory.file(name))
        directory.fail(f"{name}: {error}")
        return LogDirectoryError(directory.path, f"{name}: {error}")
    return None


def kept_offsets(log: Log, cleaner: int | None) -> KeptOffsets:
    """Return the entries of a log now. `cleaner` is its first dirty offset."""
    return KeptOffsets(log.recovery_point, durable_start_of(log), cleaner)


def durable_start_of(log: Log) -> int:
    """Return the log start offset for a checkpoint.

    It is never above the flushed offset, so that a damaged checkpoint can be recognised.
    """
    return min(log.log_start_offset, max(log.recovery_point, log.segments.first_base_offset))


def add_entries(files: Mapping[str, Offsets], log: Log, cleaner: int | None) -> None:
    """Add the entries of a log now, by file name. `cleaner` is its first dirty offset."""
    partition, segments = log.partition, log.segments
    files[filenames.RECOVERY_POINT_CHECKPOINT][partition] = log.recovery_point
    # A swap may restore a segment that begins below, which retention deleted meanwhile. So may a
    # crash, until the removal of segments is durable.
    if (
        log.log_start_offset != segments.first_base_offset
        or log.swap.is_running
        or log.flusher.has_unsynced_removals
    ):
        files[filenames.LOG_START_CHECKPOINT][partition] = durable_start_of(log)
    files[filenames.REPLICATION_CHECKPOINT][partition] = log.high_watermark
    if cleaner is not None:
        files[filenames.CLEANER_CHECKPOINT][partition] = cleaner


class OffsetCheckpoints:
    """The checkpoints of all directories: entries to keep, and what the files may contain."""

    def __init__(self, env: Env, damage: KnownDamage) -> None:
        self._env = env
        self._damage = damage
        # By directory: the entries of its partitions that are offline alone, and of those that were
        # moved away, until their folder is removed.
        self._kept: defaultdict[str, dict[TopicPartition, KeptOffsets]] = defaultdict(dict)
        self.written = WrittenCheckpoints()
        self._captures = itertools.count(1)

    def read(self, directory: LogDirectory) -> FoundCheckpoints:
        """Like `read_checkpoints`, at opening."""
        checkpoints = read_checkpoints(self._env, directory)
        self.written.partitions[directory.path] = checkpoints.partitions
        return checkpoints

    def may_name(self, directory: LogDirectory, partitions: Iterable[TopicPartition]) -> bool:
        """Return whether the files of a directory may have entries of these partitions."""
        return not self.written.partitions.get(directory.path, set()).isdisjoint(partitions)

    def keep(self, directory: LogDirectory, partition: TopicPartition, kept: KeptOffsets) -> None:
        """Keep the entries of a partition that is offline, while its directory is online."""
        self._kept[directory.path][partition] = kept

    def release(self, directory: LogDirectory, partition: TopicPartition) -> None:
        """Undo `keep`: the directory has no folder of the partition any more."""
        self._kept[directory.path].pop(partition, None)

    def forget(self, partition: TopicPartition) -> None:
        """Write no more entries of a deleted partition."""
        for kept in tuple(self._kept.values()):  # the event loop may add a directory meanwhile
            kept.pop(partition, None)

    def capture(
        self,
        directories: Iterable[LogDirectory],
        *,
        served: Mapping[TopicPartition, Log],
        copies: Mapping[TopicPartition, Log],
        live: Mapping[TopicPartition, Log],
        offline: Iterable[TopicPartition],
        cleaner_offset_of: Callable[[TopicPartition], int | None],
    ) -> Generator[None, None, CheckpointTask]:
        """Return the task that writes the checkpoints of these directories; yield between logs.

        `served` are the served logs now, `live` those when the task runs, `copies` the logs that
        become replicas. `offline` is read at the end. `cleaner_offset_of` returns the first dirty
        offset of a log.
        """
        number = next(self._captures)
        files: dict[LogDirectory, dict[str, Offsets]] = {
            directory: {name: {} for name in FILES} for directory in directories
        }
        logs: dict[LogDirectory, dict[TopicPartition, Log]] = {each: {} for each in files}
        for count, log in enumerate(itertools.chain(served.values(), copies.values()), 1):
            if log.log_directory in files:
                add_entries(files[log.log_directory], log, cleaner_offset_of(log.partition))
                if count <= len(served):
                    logs[log.log_directory][log.partition] = log
            if count % LOGS_PER_SLICE == 0:
                yield
        for directory, entries in files.items():
            for partition, kept in tuple(self._kept[directory.path].items()):
                kept.add_to(entries, partition)
        return CheckpointTask(
            self._env,
            files,
            served,
            live,
            self.written,
            self._damage,
            logs,
            frozenset(offline),
            number,
        )
