"""The status of views and their compactions, for the API and metrics."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from storage.model import TopicPartition
from storage.view.ledger import Ledger


class ViewState(Enum):
    """The result of the last compaction of a view."""

    NEVER = "never"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"
    UNUSABLE = "unusable"  # no compaction ran yet, and the version on disk is invalid


@dataclass(slots=True)
class LastCompaction:
    """The last compaction since the start of the broker; times are wall time."""

    state: ViewState = ViewState.NEVER
    started_ms: int = -1
    ended_ms: int = -1
    reason: str = ""  # why it failed
    failures: int = 0  # since the last success
    failed: int = 0
    compactions: int = 0
    retry_at: float = 0.0  # monotonic; no automatic attempt before
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_copied: int = 0  # for sources that could not be linked
    without_version: int = 0  # records, in all rounds
    retired: list[tuple[str, "weakref.ref[Ledger]"]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ViewProgress:
    """The progress of a compaction: bytes read and bytes to read in one round."""

    round: int  # from 1 on; 0 while sources are staged
    stage: str  # "stage", or one of a job's
    done_bytes: int
    total_bytes: int


NO_PROGRESS = ViewProgress(0, "", 0, 0)


def progress_of(
    number: int, stages: Mapping[str, int], stage: str, done_bytes: int, total_bytes: int
) -> ViewProgress:
    """Return the progress of a round from its job's progress in one stage.

    `stages`: the bytes of each stage, in order. The job's figure of the current stage counts: with
    a full map it is lower than planned.
    """
    names = list(stages)
    at = names.index(stage)
    before = sum(stages[name] for name in names[:at])
    after = sum(stages[name] for name in names[at + 1 :])
    return ViewProgress(number, stage, before + done_bytes, before + total_bytes + after)


@dataclass(frozen=True, slots=True)
class ViewStatus:
    """The status of one view."""

    partition: TopicPartition  # of the topic
    horizon: int
    log_start_offset: int
    log_end_offset: int
    ledger_bytes: int
    ledger_records: int
    ledger_segments: int
    strategy: str  # of the ledger; of the topic config without a ledger
    version_header: str
    null_key: str
    deleted_keys: int  # in the ledger
    backlog_bytes: int  # closed segments after the horizon
    made_ms: int  # -1 without a ledger
    missed: tuple[tuple[int, int], ...]
    state: str
    place: int  # position in the queue; 0 if not queued
    stage: str  # of the running compaction; "" without one
    round: int
    done_bytes: int
    total_bytes: int
    started_ms: int
    ended_ms: int
    error: str
    compactions: int  # published since the start of the broker
    failed: int  # failed since the start of the broker
    bytes_read: int
    bytes_written: int
    bytes_copied: int
    records_without_version: int
    is_usable: bool  # False: the version on disk is invalid and not served
