"""What the cleaner needs to know of a log, and what it asks of the broker that owns the logs.

The pool never touches a log: it reads facts, orders work, and hands finished groups back. Every
method is called on the event loop.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from cleaner.job import CleanedGroup, CleanJob, CleanReport
from config.topic_keys import TopicConfig
from storage.format.txn_index import TxnIndexEntry
from storage.model import TopicPartition
from storage.segments.retention import SegmentFacts
from storage.segments.segment import DamagedSegment


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """The transaction that holds the last stable offset."""

    producer_id: int
    first_offset: int
    since_ms: int  # wall time of its producer's last append; -1 unknown


class Undecided(Enum):
    """Why nothing from an offset on is final."""

    HIGH_WATERMARK = "high watermark"  # it may be lost in a crash, or by a truncation
    OPEN_TRANSACTION = "open transaction"
    VIEW = "compacted view"  # a view of the topic has not taken it yet
    VIEW_UNKNOWN = "compacted view not known"  # it is not known what a view of the topic holds


@dataclass(frozen=True, slots=True)
class Foreground:
    """What the broker has done for its clients since it started; only ever grows."""

    requests: int
    bytes: int  # produced and fetched
    bytes_in: int = 0  # of these, produced


@dataclass(frozen=True, slots=True)
class LogFacts:
    """One log as the planner sees it, at one moment.

    `segments` is Log.segment_facts(): in offset order, the last one is the active one. An offline
    partition has none. `undecided_offset` bounds cleaning: nothing at or above it is final, for
    the reason that `undecided_by` names.
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
    offline: str | None = None  # why its data directory cannot be used
    damaged: tuple[DamagedSegment, ...] = ()  # what cannot be read, or not be cleaned
    clock_trusted: bool = True  # False while wall time is suspected of having jumped
    topic_id: bytes = b""  # 16 bytes; what is remembered of a log is void for another id
    data_directory: str = ""  # the log directory that `directory` lies in
    open_transaction: OpenTransaction | None = None
    undecided_by: Undecided = Undecided.HIGH_WATERMARK
    active_closes_ms: int | None = None  # wall time at which the active segment closes by its age

    @property
    def usable_checkpoint(self) -> int | None:
        """The saved first dirty offset if it lies in the log; None if there is none to use.

        Below the log start records were deleted; beyond the end the log was cut or replaced, and
        then all of it is dirty again.
        """
        saved = self.checkpoint_offset
        if saved is None or not self.log_start_offset <= saved <= self.log_end_offset:
            return None
        return saved

    @property
    def first_dirty_offset(self) -> int:
        """The usable checkpoint, or the log start."""
        usable = self.usable_checkpoint
        return self.log_start_offset if usable is None else usable


@dataclass(frozen=True, slots=True)
class JobInputs:
    """What a job needs beyond the facts; asked for once a partition is chosen."""

    hash_key: bytes  # 16 bytes, of the data directory
    last_records: tuple[tuple[int, int, int], ...] = ()  # (producer id, epoch, last offset)
    aborted: tuple[TxnIndexEntry, ...] = ()  # aborted transactions that overlap the job's segments


class PublishOutcome(Enum):
    """What became of a group that was handed over."""

    PUBLISHED = "published"
    SOURCES_GONE = "sources gone"  # retention took one or all of them: the group was dropped
    STALE = "stale"  # the log's generation is another one now: the whole job is void
    LATE = "late"  # its tombstones would be removed too early (CleanJob.is_late): all of it is void
    NEEDED = "needed"  # by a compacted view of the topic, by now: the whole job is void


class CleanerHost(Protocol):
    """The broker, as the pool sees it."""

    def facts(self) -> Iterable[LogFacts]:
        """Every partition that exists. Iterated over several turns of the loop: it must bear that
        partitions come and go meanwhile.
        """

    def facts_of(self, partition: TopicPartition) -> LogFacts | None:
        """The facts of one partition; None where it does not exist or is not served."""

    def exists(self, partition: TopicPartition) -> bool:
        """Whether there is such a partition, served or not: one that is offline comes back."""

    def data_directories(self) -> Iterable[str]:
        """Those in use, also where none of their partitions is served."""

    def job_inputs(self, partition: TopicPartition, first: int, end: int) -> JobInputs:
        """The rest of what a job over the offsets [first, end) of this partition needs."""

    def foreground(self) -> Foreground:
        """What was done for clients so far: the measure of how busy the broker is with them."""

    def checkpoint(self, partition: TopicPartition, generation: str, offset: int) -> None:
        """Save the first dirty offset, unless `generation` is no longer the log's."""

    async def publish(
        self, job: CleanJob, groups: tuple[CleanedGroup, ...]
    ) -> tuple[PublishOutcome, ...]:
        """Put groups in the place of their sources, by one journal, and in the log.

        What became of each is told; all that are published are so together. Never cancelled by the
        pool.

        It removes no file of the run that it did not publish: the worker may still be writing, and
        the pool does so at the run's end. Raises SwapRefusedError where nothing was changed,
        OSError or another StorageError where a journal may be left; the attempt then has failed.
        """

    def finished(self, job: CleanJob, report: CleanReport, *, damage: str) -> None:
        """A job ran to its end; the place for the one log line and for history.

        `damage` is what it had to leave as it is and nobody knew of; empty where that is nothing.
        """

    def failed(self, partition: TopicPartition, reason: str, retry_at_ms: int) -> None:
        """An attempt failed; the next one is not made before `retry_at_ms` (wall clock)."""
