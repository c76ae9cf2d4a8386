"""How far the opening of all logs has come, and whether it is to go on."""

from dataclasses import dataclass

from storage.errors import OpeningStoppedError


@dataclass(slots=True)
class Opening:
    """Counted in partitions. Looked at, and stopped, from any thread."""

    done: int = 0
    total: int = 0
    is_stopped: bool = False

    def go_on(self) -> None:
        """Raises OpeningStoppedError when that is what is wanted."""
        if self.is_stopped:
            raise OpeningStoppedError
