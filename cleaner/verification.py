"""Results of verifying the outputs of a remote clean. Frozen, picklable.

A worker process verifies them before publication (cleaner/engine/verify/verify_job.py).
"""

from dataclasses import dataclass

from cleaner.job import CleanReport
from storage.errors import StorageError


class InvalidOutputError(StorageError):
    """An output differs from what the job must produce. Nothing of the job may be published.

    `position` is the first wrong byte of the file, -1 if the fault has no position.
    """

    def __init__(self, path: str, position: int, reason: str) -> None:
        where = f" at byte {position}" if position >= 0 else ""
        super().__init__(f"{path}{where}: {reason}")
        self.path = path
        self.position = position
        self.reason = reason


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All groups are byte for byte what the job produces, and synced.

    `report` is the verifier's own report of the job. Trust it, not the one that came with the
    outputs.
    """

    report: CleanReport
    groups: int
    bytes_compared: int  # of all files of the outputs
    rounds: int  # over parts of the keys; 1 if the map held all keys
    seconds: float
