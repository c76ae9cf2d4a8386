"""What is known of views and their compactions: for people, the API and metrics."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from storage.model import TopicPartition
from storage.view.ledger import Ledger


class ViewState(Enum):
    """What became of the last compaction of a view."""

    NEVER = "never"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"
    UNUSABLE = "unusable"  # nothing was tried yet, and what is on the disk cannot be believed


@dataclass(slots=True)
class LastCompaction:
    """The last compaction since the start of the broker; times are wall time."""

    state: ViewState = ViewState.NEVER
    started_ms: int = -1
    ended_ms: int = -1
    reason: str = ""  # of a failure
    failures: int = 0  # since the last success
    failed: int = 0
    compactions: int = 0
    retry_at: float = 0.0  # monotonic; not tried again by itself before
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_copied: int = 0  # of sources that could not be linked
    without_version: int = 0  # records, over all runs
    retired: list[tuple[str, "weakref.ref[Ledger]"]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ViewProgress:
    """How far a compaction is: bytes read of those to be read, in one of its rounds."""

    round: int  # from 1 on; 0 while sources are staged
    stage: str  # "stage", or one of a job's
    done_bytes: int
    total_bytes: int


NO_PROGRESS = ViewProgress(0, "", 0, 0)


def progress_of(
    number: int, stages: Mapping[str, int], stage: str, done_bytes: int, total_bytes: int
) -> ViewProgress:
    """Return a round's progress, of what its job says of one stage.

    `stages`: the bytes of each, in order. What the job says of the present one counts: it may be
    less than was planned, where the map is full.
    """
    names = list(stages)
    at = names.index(stage)
    before = sum(stages[name] for name in names[:at])
    after = sum(stages[name] for name in names[at + 1 :])
    return ViewProgress(number, stage, before + done_bytes, before + total_bytes + after)


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
    strategy: str  # of the ledger, as the next two; of the topic's settings where there is none
    version_header: str
    null_key: str
    deleted_keys: int  # that are remembered
    backlog_bytes: int  # closed segments behind the horizon
    made_ms: int  # -1: there is no ledger
    missed: tuple[tuple[int, int], ...]
    state: str
    place: int  # among the compactions that wait: 1 is next; 0: none of this view waits
    stage: str  # of the one that runs; "" if none does
    round: int
    done_bytes: int
    total_bytes: int
    started_ms: int
    ended_ms: int
    error: str
    compactions: int  # that were published, since the start of the broker
    failed: int  # and those that failed
    bytes_read: int
    bytes_written: int
    bytes_copied: int
    records_without_version: int
    is_usable: bool  # False: what is on the disk cannot be believed, and is not served
