"""The state of leased runs, as the event loop has it; no files, no network.

A run is open until each of its partitions has ended. A partition ends once: adopted, stale,
expired, refused or abandoned; then nothing of it is held any more, and its files go.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from broker.leases.lease_folder import LeaseRecord
from broker.topics.partition import Partition
from cleaner.job import CleanJob
from cleaner.remote_compaction import AdoptOutcome, AdoptResult, Purpose
from cleaner.workers.dedicated_worker import JobRunner
from storage.model import TopicPartition

# Attempts may be made more than once, and stages leave files for each other.
STAGED_FACTOR: Final = 4
STAGED_BYTES_MIN: Final = 256 << 20


class LeaseError(Exception):
    """A request that is refused; `status` is HTTP's: see broker/http/api/leases.py."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class LeaseState(StrEnum):
    """Of one partition of a run."""

    OPEN = "open"
    ADOPTING = "adopting"
    ADOPTED = "adopted"
    STALE = "stale"
    EXPIRED = "expired"
    INVALID = "invalid"
    ABANDONED = "abandoned"


ENDS: Final = {
    AdoptOutcome.ADOPTED: LeaseState.ADOPTED,
    AdoptOutcome.STALE: LeaseState.STALE,
    AdoptOutcome.EXPIRED: LeaseState.EXPIRED,
    AdoptOutcome.INVALID: LeaseState.INVALID,
}
_ALIVE: Final = (LeaseState.OPEN, LeaseState.ADOPTING)


@dataclass(slots=True, eq=False)
class LeasedPartition:
    """One partition of a run."""

    partition: Partition  # as it was served when it was leased, or taken up again
    record: LeaseRecord
    folder: str
    generation: str  # of the log now, as long as the lease is good
    pauses: AsyncExitStack = field(default_factory=AsyncExitStack)  # of the pool's cleaner
    state: LeaseState = LeaseState.OPEN
    reason: str = ""
    result: AdoptResult | None = None
    takes_files: bool = True  # until a manifest is there
    staged_bytes: int = 0  # that came by HTTP, or are coming
    staged_files: int = 0  # that were sent since the broker started
    runner: JobRunner | None = None  # while it is compared
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the lease, or its removal

    @property
    def where(self) -> TopicPartition:
        """Its name."""
        return self.record.plan.job.partition

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.state in _ALIVE

    @property
    def directory(self) -> str:
        """The partition's folder."""
        return self.partition.log.directory

    @property
    def job(self) -> CleanJob:
        """The job of the plan, for the log as it is now."""
        return self.record.plan.job

    @property
    def staged_bytes_max(self) -> int:
        """What may come by HTTP."""
        return max(STAGED_BYTES_MIN, STAGED_FACTOR * self.record.plan.inputs_bytes)

    def to_json(self) -> dict[str, Any]:
        """For the API."""
        return {
            "partition": self.where.partition,
            "state": self.state.value,
            "reason": self.reason,
            "end_offset": self.job.end_offset,
            "segments": sum(len(group) for group in self.job.groups),
            "inputs_bytes": self.record.plan.inputs_bytes,
            "staged_bytes": self.staged_bytes,
        }


@dataclass(slots=True, eq=False)
class RemoteCompaction:
    """A run and its partitions. `deadline` is the environment's monotonic clock, seconds."""

    compaction_id: str
    topic: str
    purpose: Purpose
    created_ms: int
    ttl_seconds: int
    token_digest: bytes
    deadline: float
    expires_ms: int
    parts: dict[int, LeasedPartition] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """Whether any of its partitions is."""
        return any(part.is_alive for part in self.parts.values())

    @property
    def state(self) -> str:
        """One word for people: of its partitions, if they are of one state."""
        states = {part.state.value for part in self.parts.values()}
        return states.pop() if len(states) == 1 else "open" if self.is_alive else "ended"

    @property
    def reason(self) -> str:
        """Why it ended, in a line."""
        reasons = {part.reason for part in self.parts.values() if part.reason}
        return "; ".join(sorted(reasons))

    def to_json(self) -> dict[str, Any]:
        """For the API."""
        return {
            "compaction_id": self.compaction_id,
            "topic": self.topic,
            "purpose": self.purpose.value,
            "state": self.state,
            "created_ms": self.created_ms,
            "expires_ms": self.expires_ms,
            "ttl_seconds": self.ttl_seconds,
            "partitions": [part.to_json() for part in self.parts.values()],
        }
