"""Opening all logs: progress, the order to stop, and the leader epochs of the opened logs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import path as paths

from storage.env import Env, write_file
from storage.errors import OpeningStoppedError
from storage.log.log import Log


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


def enter_epochs(env: Env, logs: Iterable[Log]) -> None:
    """Record durably where the current leader epoch of each log begins, like `Log.enter_epoch`.

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
