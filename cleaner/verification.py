"""Results of verifying the outputs of a remote clean, and a whole log. Frozen, picklable.

A worker process verifies outputs before publication (cleaner/engine/verify_job.py) and a log
on request (check_log.py).
"""

from dataclasses import dataclass
from enum import Enum

from cleaner.job import CleanReport, Damage, RangeDigest
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


# The whole log --------------------------------------------------------------------------------


class IndexState(Enum):
    """The state of a segment's key index. Only DAMAGED and WRONG are faults."""

    CURRENT = "current"  # it has exactly the rows of the segment
    MISSING = "missing"
    STALE = "stale"  # of an earlier content of the segment, or from before a restart
    DAMAGED = "damaged"  # a checksum does not match
    WRONG = "wrong"  # its rows differ from the records of the segment
    UNUSED = "unused"  # it has records of transactions, and is never used to decide keys


@dataclass(frozen=True, slots=True)
class SegmentCheck:
    """The records of one closed segment. Those without a key and aborted ones are apart."""

    base_offset: int
    next_base_offset: int
    size_bytes: int
    records: int = 0  # committed, with a key
    live: int = 0  # of these, the last one of its key
    tombstones: int = 0  # of the live ones, those without a value
    keyless: int = 0
    aborted: int = 0
    live_bytes: int = 0
    index: IndexState = IndexState.MISSING
    misplaced: int = 0  # entries of the offset index by which a consumer would miss records
    damage: Damage | None = None
    is_gone: bool = False  # retention removed it during the check

    @property
    def dead(self) -> int:
        """Return how many records a later one with their key supersedes."""
        return self.records - self.live


@dataclass(frozen=True, slots=True)
class LogCheckRequest:
    """What a check compares the log with, beside its key indexes."""

    first_dirty_offset: int
    # Digests of the last records below `digest_end`, as a check or a verified clean left them.
    digest_end: int = 0
    digests: tuple[RangeDigest, ...] = ()


@dataclass(frozen=True, slots=True)
class LogCheck:
    """The closed segments of a log, and their differences from the cleaner's state."""

    end_offset: int  # records from here on were not read
    segments: tuple[SegmentCheck, ...]
    keys: int
    # Records below the first dirty offset that a later one below it supersedes; None: not known,
    # because a segment is damaged.
    uncleaned: int | None
    digests: tuple[RangeDigest, ...]  # of the last records below the end, by segment
    # The requested ranges whose records are not those of the digest, as they are now.
    changed: tuple[RangeDigest, ...]
    compared: int  # ranges whose digests were compared
    bytes_read: int
    seconds: float
