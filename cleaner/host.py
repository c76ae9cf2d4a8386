"""The cleaner's interface to the broker, which owns the logs.

The cleaner reads facts of logs, runs jobs and returns finished groups for publication. All methods
are called on the event loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from cleaner.job import CleanedGroup, CleanJob, CleanReport
from config.topics.keys import TopicConfig
from storage.format.txn_index import TxnIndexEntry
from storage.model import SegmentFacts, TopicPartition
from storage.segments.damage import DamagedSegment


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """The transaction that determines the last stable offset."""

    producer_id: int
    first_offset: int
    since_ms: int  # wall time of its producer's last append; -1 unknown


class Undecided(Enum):
    """Why records from an offset on cannot be cleaned yet."""

    HIGH_WATERMARK = "high watermark"  # a crash or a truncation may remove them
    OPEN_TRANSACTION = "open transaction"
    VIEW = "compacted view"  # the view has not been compacted past them
    VIEW_UNKNOWN = "compacted view unreadable"  # the contents of the view are unknown


@dataclass(frozen=True, slots=True)
class Foreground:
    """Requests and bytes that the broker has served since its start."""

    requests: int
    bytes: int  # produced and fetched
    bytes_in: int = 0  # of these, produced


@dataclass(frozen=True, slots=True)
class LogFacts:
    """One log at one moment, for the planner.

    `segments` is Log.segment_facts(): in offset order, the active one last; empty if the
    partition is offline. Nothing at or above `undecided_offset` can be cleaned, for the reason in
    `undecided_by`.
    """

    partition: TopicPartition
    directory: str  # the partition's folder
    config: TopicConfig
    segments: Sequence[SegmentFacts]
    log_start_offset: int
    log_end_offset: int
    undecided_offset: int
    checkpoint_offset: int | None  # first dirty offset as last saved; None if never
    generation: str
    offline: str | None = None  # why its log directory has failed
    damaged: tuple[DamagedSegment, ...] = ()  # segments that cannot be read or cleaned
    clock_trusted: bool = True  # False if the wall clock may have jumped
    topic_id: bytes = b""  # 16 bytes; the cleaner state of another id does not apply
    data_directory: str = ""  # the parent of `directory`
    open_transaction: OpenTransaction | None = None
    undecided_by: Undecided = Undecided.HIGH_WATERMARK
    active_closes_ms: int | None = None  # wall time at which the active segment is rolled

    @property
    def usable_checkpoint(self) -> int | None:
        """Return the saved first dirty offset if it lies in the log, else None.

        Below the log start, records were deleted. Beyond the end, the log was truncated or
        replaced, and all of it is dirty again.
        """
        saved = self.checkpoint_offset
        if saved is None or not self.log_start_offset <= saved <= self.log_end_offset:
            return None
        return saved

    @property
    def first_dirty_offset(self) -> int:
        """Return the usable checkpoint, or the log start offset."""
        usable = self.usable_checkpoint
        return self.log_start_offset if usable is None else usable


@dataclass(frozen=True, slots=True)
class JobInputs:
    """What a job needs beyond the facts; read when a partition is chosen."""

    hash_key: bytes  # 16 bytes, of the data directory
    last_records: Sequence[tuple[int, int, int]] = ()  # (producer id, epoch, last offset)
    aborted: Sequence[TxnIndexEntry] = ()  # aborted transactions that overlap the job's segments


class PublishOutcome(Enum):
    """The result of publishing one group."""

    PUBLISHED = "published"
    SOURCES_GONE = "sources gone"  # retention removed all its sources: the group was dropped
    STALE = "stale"  # the log has another generation: the whole job is void
    LATE = "late"  # its tombstones would be removed too early (CleanJob.is_late): the job is void
    NEEDED_BY_VIEW = "needed by view"  # a compacted view needs the records: the whole job is void


# Why the whole job is void, for operators.
VOID_REASONS: Final = {
    PublishOutcome.STALE: "the log was truncated or replaced",
    PublishOutcome.LATE: "it took so long that its tombstones would be removed before "
    "delete.retention.ms has passed",
    PublishOutcome.NEEDED_BY_VIEW: "a compacted view still needs records that the clean would "
    "remove",
}


def void_outcome(outcomes: Iterable[PublishOutcome]) -> PublishOutcome | None:
    """Return the outcome that makes the whole job void, if there is one."""
    return next((outcome for outcome in outcomes if outcome in VOID_REASONS), None)


class NotServedError(Exception):
    """A partition does not exist, or its files cannot be read."""

    def __init__(self, partition: TopicPartition) -> None:
        super().__init__(f"{partition} is not served")
        self.partition = partition


class CleanerHost(Protocol):
    """The broker's side of the cleaner."""

    def facts(self) -> Iterable[LogFacts]:
        """Return the facts of every partition.

        The iteration spans several turns of the loop; partitions may come and go meanwhile.
        """

    def facts_of(self, partition: TopicPartition) -> LogFacts | None:
        """Return the facts of one partition; None if it is not served."""

    def exists(self, partition: TopicPartition) -> bool:
        """Return whether the partition exists, served or not."""

    def data_directories(self) -> Iterable[str]:
        """Return the log directories in use, also those without a served partition."""

    def fail_directory(self, directory: str, error: OSError) -> None:
        """Take a log directory offline that has given an error."""

    def clock_trusted(self) -> bool:
        """Return whether the wall time that was read just before may decide what is removed."""

    def config_of(self, partition: TopicPartition) -> TopicConfig:
        """Return the present settings of a partition that is served."""

    async def load_job_inputs(self, partition: TopicPartition) -> bool:
        """Read into memory what `job_inputs` needs; return False if all of it was there.

        It stays for some seconds. Without this, `job_inputs` reads it on the event loop.
        """

    def job_inputs(self, partition: TopicPartition, first: int, end: int) -> JobInputs:
        """Return the inputs of a job over the offsets [first, end)."""

    def foreground(self) -> Foreground:
        """Return the work done for clients so far."""

    def checkpoint(self, partition: TopicPartition, generation: str, offset: int) -> None:
        """Set the first dirty offset, unless the log has another generation.

        The checkpoint file gets it once the cleaner state on the disk has it (`allow_checkpoints`).
        """

    def allow_checkpoints(self, first_dirty_offsets: Mapping[TopicPartition, int | None]) -> None:
        """Let the checkpoint files have these offsets: the cleaner state on the disk has them."""

    async def publish(
        self, job: CleanJob, groups: tuple[CleanedGroup, ...]
    ) -> tuple[PublishOutcome, ...]:
        """Replace the sources of groups by one journal; return the outcome of each group.

        The pool never cancels this. It removes no unpublished file of the job: the worker may
        still be writing, and the pool removes them at the end. Raises SwapRefusedError if nothing
        was changed, OSError or another StorageError if a journal may be left.
        """

    def finished(self, job: CleanJob, report: CleanReport, *, damage: str) -> None:
        """Log a job that ran to its end. `damage` describes new damage; empty if there is none."""

    def failed(self, partition: TopicPartition, reason: str, retry_at_ms: int) -> None:
        """Log a failed attempt; the next one starts after `retry_at_ms` (wall clock)."""

    def repair_transaction_indexes(self, partition: TopicPartition) -> None:
        """Begin to rebuild the transaction indexes that contradict the log."""
