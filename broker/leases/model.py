"""The state of remote compactions and their leases in memory; no files, no network.

A remote compaction has a lease for each of its partitions and is open until all have ended. A lease
ends once: adopted, stale, expired, invalid or abandoned. Then the cleaner resumes and the broker
removes the files of the lease.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from broker.leases.lease_folder import LeaseRecord
from broker.topics.partition import Partition
from cleaner.job import CleanJob
from cleaner.lease_states import LIVE_STATES, LeaseState
from cleaner.remote_compaction import AdoptOutcome, AdoptResult, Purpose
from cleaner.workers.dedicated_worker import JobRunner
from storage.model import TopicPartition

# A task may run more than once, and stages exchange files.
STAGED_FACTOR: Final = 4
STAGED_BYTES_MIN: Final = 256 << 20


class LeaseError(Exception):
    """A refused request. `status` is an HTTP status: see broker/http/api/compaction/leases.py."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


ENDS: Final = {
    AdoptOutcome.ADOPTED: LeaseState.ADOPTED,
    AdoptOutcome.STALE: LeaseState.STALE,
    AdoptOutcome.EXPIRED: LeaseState.EXPIRED,
    AdoptOutcome.INVALID: LeaseState.INVALID,
}


@dataclass(slots=True, eq=False)
class LeasedPartition:
    """The lease of one partition."""

    partition: Partition  # as served when the lease was granted or resumed
    record: LeaseRecord
    folder: str
    generation: str  # of the log for which the lease is valid
    pauses: AsyncExitStack = field(default_factory=AsyncExitStack)  # of the broker's cleaner
    state: LeaseState = LeaseState.OPEN
    reason: str = ""
    result: AdoptResult | None = None
    takes_files: bool = True  # until the manifest is uploaded
    staged_bytes: int = 0  # uploaded, or announced by uploads in progress
    staged_files: int = 0  # uploaded since the broker started
    runner: JobRunner | None = None  # during verification
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the lease file

    @property
    def where(self) -> TopicPartition:
        """Return the name of the partition."""
        return self.record.plan.job.partition

    @property
    def is_alive(self) -> bool:
        """Return whether the lease has not ended."""
        return self.state in LIVE_STATES

    @property
    def directory(self) -> str:
        """Return the folder of the partition's log."""
        return self.partition.log.directory

    @property
    def job(self) -> CleanJob:
        """Return the job that was planned for the partition."""
        return self.record.plan.job

    @property
    def staged_bytes_max(self) -> int:
        """Return the limit of the size of all uploads."""
        return max(STAGED_BYTES_MIN, STAGED_FACTOR * self.record.plan.inputs_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return the API's representation."""
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
    """A remote compaction and its leases. `deadline` is in seconds of the monotonic clock."""

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
        """Return whether any of its leases has not ended."""
        return any(part.is_alive for part in self.parts.values())

    @property
    def state(self) -> str:
        """Return the state of all its leases if they agree, otherwise "open" or "ended"."""
        states = {part.state.value for part in self.parts.values()}
        return states.pop() if len(states) == 1 else "open" if self.is_alive else "ended"

    @property
    def reason(self) -> str:
        """Return why leases ended, in one line."""
        reasons = {part.reason for part in self.parts.values() if part.reason}
        return "; ".join(sorted(reasons))

    def to_json(self) -> dict[str, Any]:
        """Return the API's representation."""
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


def ended_error(compaction: RemoteCompaction) -> LeaseError:
    """Return the refusal of a request to a remote compaction that has ended."""
    is_stale = any(part.state is LeaseState.STALE for part in compaction.parts.values())
    return LeaseError(
        409 if is_stale else 410, f"{compaction.compaction_id} has ended: {compaction.reason}"
    )
