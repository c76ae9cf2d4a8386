"""What is known of views and their compactions: for people, the API and metrics."""

import weakref
from dataclasses import dataclass, field
from enum import Enum

from storage.model import TopicPartition
from storage.view_ledger import Ledger


class RunState(Enum):
    """What became of the last compaction of a view."""

    NEVER = "never"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"
    UNUSABLE = "unusable"  # nothing was tried yet, and what is on the disk cannot be believed


@dataclass(slots=True)
class LastRun:
    """The last compaction since the start of the broker; times are wall time."""

    state: RunState = RunState.NEVER
    started_ms: int = -1
    ended_ms: int = -1
    reason: str = ""  # of a failure
    failures: int = 0  # since the last success
    failed: int = 0
    runs: int = 0
    retry_at: float = 0.0  # monotonic; not tried again by itself before
    bytes_read: int = 0
    bytes_written: int = 0
    retired: list[tuple[str, "weakref.ref[Ledger]"]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ViewStatus:
    """A view at one moment."""

    partition: TopicPartition  # of the topic
    horizon: int
    log_start_offset: int
    log_end_offset: int
    ledger_bytes: int
    ledger_records: int
    ledger_segments: int
    backlog_bytes: int  # closed segments behind the horizon
    made_ms: int  # -1: there is no ledger
    missed: tuple[tuple[int, int], ...]
    state: str
    started_ms: int
    ended_ms: int
    error: str
    runs: int  # that were published, since the start of the broker
    failed: int  # and those that failed
    bytes_read: int
    bytes_written: int
    is_usable: bool  # False: what is on the disk cannot be believed, and is not served
