"""How far the opening of all logs has come, and whether it is to go on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from storage.errors import OpeningStoppedError


@dataclass(slots=True)
class Opening:
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
