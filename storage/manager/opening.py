"""Opening all logs: what the directories contain, progress, and the epochs of the opened logs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import path as paths

from storage.directory.log_directory import LogDirectory
from storage.directory.partition_folders import scan_partition_folders
from storage.directory.partition_placement import FoundFolder
from storage.env import Env, write_file
from storage.errors import OpeningStoppedError
from storage.log.log import Log
from storage.manager.known_damage import KnownDamage
from storage.manager.offset_checkpoints import FoundCheckpoints, OffsetCheckpoints


@dataclass(slots=True)
class OpeningProgress:
    """The progress of opening, in partitions. Any thread may read it or stop the opening."""

    done: int = 0
    total: int = 0
    is_stopped: bool = False
    remaining_logs: dict[str, int] = field(default_factory=dict)  # by data directory
    # Segments left of the partition in recovery, by log directory.
    remaining_segments: dict[str, int] = field(default_factory=dict)

    def go_on(self) -> None:
        """Raise OpeningStoppedError if the opening has to stop."""
        if self.is_stopped:
            raise OpeningStoppedError

    def begin(self, logs: Mapping[str, int]) -> None:
        """Set the number of logs to open in each log directory."""
        self.total = sum(logs.values())
        self.remaining_logs = dict(logs)
        self.remaining_segments = dict.fromkeys(logs, 0)

    def opened(self, directory: str) -> None:
        """Count a log that is open or offline."""
        self.done += 1
        self.remaining_logs[directory] -= 1
        self.remaining_segments[directory] = 0


@dataclass(frozen=True, slots=True)
class ScannedDirectories:
    """What the log directories contain that could be read."""

    by_id: Mapping[str, LogDirectory]
    checkpoints: Mapping[str, FoundCheckpoints]  # by directory id
    folders: Sequence[FoundFolder]  # of partitions
    deleted: Sequence[tuple[LogDirectory, str]]  # folders to remove
    copies: Sequence[tuple[LogDirectory, str]]  # that a crash left incomplete


def scan_directories(
    env: Env,
    directories: Iterable[LogDirectory],
    checkpoints: OffsetCheckpoints,
    damage: KnownDamage,
) -> ScannedDirectories:
    """Read the checkpoints and the folders of the online directories.

    A directory that cannot be read goes offline, and the others continue.
    """
    by_id: dict[str, LogDirectory] = {}
    existing: dict[str, FoundCheckpoints] = {}
    folders: list[FoundFolder] = []
    deleted: list[tuple[LogDirectory, str]] = []
    copies: list[tuple[LogDirectory, str]] = []
    for directory in directories:
        if not directory.is_online:
            continue
        try:
            read = checkpoints.read(directory)
            damage.read(directory)
            seen = scan_partition_folders(env, directory)
        except OSError as error:
            directory.fail(str(error))
            continue
        by_id[directory.directory_id] = directory
        existing[directory.directory_id] = read
        folders += seen.partitions
        deleted += [(directory, path) for path in seen.deleted]
        copies += [(directory, path) for path in seen.copies]
    return ScannedDirectories(by_id, existing, folders, deleted, copies)


def enter_epochs(env: Env, logs: Iterable[Log]) -> None:
    """Record durably where the current leader epoch of each log begins, like `LogEpochs.enter`.

    After a clean stop the files are current and nothing is written. Raises OSError,
    LogDirectoryError.
    """
    files: dict[str, bytes] = {}

    def collect(_env: Env, path: str, data: bytes) -> None:
        if not env.exists(path) or env.read_file(path) != data:
            files[path] = data

    for log in logs:
        log.epochs.enter(collect)
    for path, data in files.items():
        write_file(env, f"{path}.tmp", data)
    env.sync_all([f"{path}.tmp" for path in files], [])
    for path in files:
        env.rename(f"{path}.tmp", path)
    env.sync_all([], [paths.dirname(path) for path in files])
