"""What is said about outputs of a clean that were made outside of the broker. Frozen, picklable.

They are checked before they are published (cleaner/engine/verify/verify_job.py, in a worker
process).
"""

from dataclasses import dataclass

from cleaner.job import CleanReport
from storage.errors import StorageError


class InvalidOutputError(StorageError):
    """An output is not what the job allows. Nothing of the job may be published.

    `position` is the first byte of the file that is wrong, -1 where it is not about a byte.
    """

    def __init__(self, path: str, position: int, reason: str) -> None:
        where = f" at byte {position}" if position >= 0 else ""
        super().__init__(f"{path}{where}: {reason}")
        self.path = path
        self.position = position
        self.reason = reason


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Every group is what the job allows, byte for byte, and synced.

    `report` is what the check itself found out about the job (next dirty offset, damage, horizons,
    counts): it is to be believed, not what came with the outputs.
    """

    report: CleanReport
    groups: int
    bytes_compared: int  # of all files of the outputs
    rounds: int  # parts of the keys, one after the other: one where the map held all
    seconds: float
