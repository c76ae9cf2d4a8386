"""Opening all logs: progress, the order to stop, and the leader epochs of the opened logs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import path as paths

from storage.env import Env, write_file
from storage.errors import OpeningStoppedError
from storage.log.log import Log


@dataclass(slots=True)
class OpeningProgress:
    """Counted in partitions. Looked at, and stopped, from any thread."""

    done: int = 0
    total: int = 0
    is_stopped: bool = False
    remaining_logs: dict[str, int] = field(default_factory=dict)  # by data directory
    # Still to be verified, of the partition that is being recovered; by data directory.
    remaining_segments: dict[str, int] = field(default_factory=dict)

    def go_on(self) -> None:
        """Raises OpeningStoppedError when that is what is wanted."""
        if self.is_stopped:
            raise OpeningStoppedError

    def begin(self, logs: Mapping[str, int]) -> None:
        """So many logs are to be opened in each data directory."""
        self.total = sum(logs.values())
        self.remaining_logs = dict(logs)
        self.remaining_segments = dict.fromkeys(logs, 0)

    def opened(self, directory: str) -> None:
        """One log of a data directory is open, or is left offline."""
        self.done += 1
        self.remaining_logs[directory] -= 1
        self.remaining_segments[directory] = 0


def enter_epochs(env: Env, logs: Iterable[Log]) -> None:
    """Note durably where the present epoch of each begins, as `Log.enter_epoch` does.

    After an orderly stop the files say so already, and nothing is written. OSError as it comes, and
    LogDirectoryError.
    """
    files: dict[str, bytes] = {}

    def collect(_env: Env, path: str, data: bytes) -> None:
        if not env.exists(path) or env.read_file(path) != data:
            files[path] = data

    for log in logs:
        log.enter_epoch(collect)
    for path, data in files.items():
        write_file(env, f"{path}.tmp", data)
    env.sync_all([f"{path}.tmp" for path in files], [])
    for path in files:
        env.rename(f"{path}.tmp", path)
    env.sync_all([], [paths.dirname(path) for path in files])
