"""A cleaner job, its results and its control. Frozen and picklable.

A job names immutable files only: closed segments of one partition, in offset order, in groups of
neighbours that become one new segment each. The worker writes `.cleaned` files beside them, or to
the job's output folder, and never renames or deletes a source. Only the broker publishes
(storage/swap/swap_journal.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, Protocol

from storage.env import Env
from storage.errors import DamagedSegmentError
from storage.format.txn_index import TxnIndexEntry
from storage.model import TopicPartition
from storage.swap.swap_journal import CleanedFile, CleanedSegment

LARGEST_TIMESTAMP_MS: Final = (1 << 63) - 1  # of a record


def new_job_id(env: Env) -> str:
    """Return a unique id for a clean or a compaction; it can be part of a file name."""
    return f"{env.wall_ms():x}-{env.random_bytes(4).hex()}"


@dataclass(frozen=True, slots=True)
class SourceSegment:
    """A closed segment. `next_base_offset` is the base of the segment after it.

    `content_id` changes whenever the content of the segment changes; it is 0 if unknown. It ties a
    key index to the content that it indexes.
    """

    base_offset: int
    next_base_offset: int
    size_bytes: int
    last_modified_ms: int
    largest_timestamp_ms: int
    content_id: int = 0


@dataclass(frozen=True, slots=True)
class ViewOrder:
    """The order of a key's records in a compacted view by timestamp or by version.

    The record with the largest rank is the latest one; among equal ranks, the largest offset
    decides. A rank is the record's timestamp or its version.
    """

    version_header: bytes | None  # 8 bytes, big-endian, signed; None: the timestamp
    # Keys whose latest record is a tombstone that the sources no longer have; in `directory`.
    deleted_keys: CleanedFile | None


@dataclass(frozen=True, slots=True)
class ViewRules:
    """The rules of a compacted view: no tombstone and no marker stays."""

    keep_keyless: bool = False  # records without a key stay
    order: ViewOrder | None = None  # None: the largest offset is the latest


@dataclass(frozen=True, slots=True)
class CleanJob:
    """One clean of one partition: index the keys of [first_dirty, end), rewrite `groups`.

    With `expired_only` nothing is dirty: `groups` are some of the log's segments (those of one
    group are still neighbours), and only tombstones and markers past their delete horizon go.
    """

    partition: TopicPartition
    directory: str  # the partition's folder
    generation: str  # a report of another generation is discarded
    job_id: str  # in the names of the .cleaned files
    groups: tuple[tuple[SourceSegment, ...], ...]  # oldest first; covers [log start, end)
    first_dirty_offset: int
    end_offset: int  # first uncleanable offset: a segment base, exclusive
    log_start_offset: int  # records below it are dropped
    log_end_offset_is_end: bool  # True if nothing follows end_offset: the last batch is kept, empty
    now_ms: int
    delete_retention_ms: int
    # False if the wall clock may have jumped: then no record is removed or stamped by time.
    drop_expired_tombstones: bool
    hash_key: bytes  # 16 bytes, random per data directory
    dedupe_buffer_bytes: int
    read_buffer_bytes: int
    decompressed_batch_bytes: int  # limit per batch; a worker needs up to three times as much
    max_message_bytes: int
    index_interval_bytes: int
    segment_bytes: int
    compression_levels: tuple[tuple[int, int], ...]  # (codec id, level)
    last_records: Sequence[tuple[int, int, int]] = ()  # (producer id, epoch, last offset or -1)
    # Aborted transactions that overlap the groups, in the order of their markers.
    aborted: Sequence[TxnIndexEntry] = ()
    expired_only: bool = False
    view: ViewRules | None = None  # for a compacted view
    # The log is clean below this offset with respect to all older records; None: below the first
    # dirty offset. Between the two are unreadable segments and those cleaned after them.
    clean_below: int | None = None
    output_directory: str | None = None  # of `.cleaned` files; None: `directory`
    # The expected time of publication, None for `now_ms`. Delete horizons count from there, so that
    # a tombstone stays readable for delete.retention.ms.
    published_by_ms: int | None = None
    # Limit of the scratch file for keys that do not fit into the map; 0: the clean ends at the
    # first key that does not fit.
    spill_bytes_max: int = 0

    # Set for a selective clean: rewrite the groups with the most garbage until the rest is at most
    # this share of the live bytes. None: rewrite all groups.
    slack: float | None = None
    # With `slack`: rewrite only the groups that have one of these segments, whatever the garbage.
    victims: tuple[int, ...] = ()
    # Decide the keys by key indexes, and leave groups that need no change unread.
    by_index: bool = False
    # Verify each group against the data before it is delivered.
    verify: bool = False

    @property
    def outputs(self) -> str:
        """Return the folder of the `.cleaned` files."""
        return self.directory if self.output_directory is None else self.output_directory

    @property
    def order(self) -> ViewOrder | None:
        """Return the order of a key's records; None: by offset."""
        return None if self.view is None else self.view.order

    @property
    def delete_horizon_ms(self) -> int:
        """Return the delete horizon of a tombstone or marker that this job is the first to keep."""
        from_ms = self.now_ms if self.published_by_ms is None else self.published_by_ms
        return from_ms + self.delete_retention_ms

    def is_late(self, now_ms: int) -> bool:
        """Return whether it is too late to publish at this wall time.

        A tombstone that the job stamped would be readable for less than half of
        delete.retention.ms.
        """
        if not self.drop_expired_tombstones or self.expired_only or not self.delete_retention_ms:
            return False
        return self.delete_horizon_ms - now_ms < self.delete_retention_ms // 2


NO_HORIZON: Final = -1  # no tombstone or marker in the segment waits for removal
UNKNOWN_HORIZON: Final = -2
UNKNOWN_RECORDS: Final = -1


@dataclass(frozen=True, slots=True)
class SegmentHorizon:
    """The time at which a segment, as the job leaves it, can lose its next tombstone or marker."""

    base_offset: int
    size_bytes: int
    horizon_ms: int  # the earliest one; NO_HORIZON; UNKNOWN_HORIZON after damage
    records: int = UNKNOWN_RECORDS  # that are left in it


class RangeDigest(NamedTuple):
    """A digest of the last records of keys in the offsets [first, end), without tombstones.

    It is the sum of a keyed hash of each record's key, value, headers and offset, so it does not
    depend on order, batches or compression (engine/verify/contents.py).
    """

    first_offset: int
    end_offset: int
    records: int
    digest: str  # 32 hexadecimal digits


class SegmentLiveness(NamedTuple):
    """How much of a segment, as a selective clean leaves it, is alive."""

    base_offset: int
    size_bytes: int
    live_bytes: int
    live_records: int = UNKNOWN_RECORDS


@dataclass(frozen=True, slots=True)
class CleanedGroup:
    """One group's result. `output` is None when no batch survived."""

    source_base_offsets: tuple[int, ...]
    output: CleanedSegment | None
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int


class Damage(NamedTuple):
    """A place where a segment cannot be read or cleaned.

    The error itself is not kept: its traceback refers to the buffers of the reader.
    """

    path: str
    position: int
    reason: str

    @classmethod
    def of(cls, error: DamagedSegmentError) -> "Damage":
        """Return the damage that an error reports."""
        return cls(error.path, error.position, error.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanFigures:
    """The figures of one job, as the worker reports them and as the history keeps them."""

    map_seconds: float = 0.0
    rewrite_seconds: float = 0.0
    bytes_before: int = 0
    bytes_after: int = 0
    records_before: int = 0
    records_after: int = 0
    records_without_key: int = 0  # removed; from before the topic was compacted
    records_aborted: int = 0  # removed with their aborted transactions
    markers_removed: int = 0
    tombstones_kept: int = 0
    tombstones_removed: int = 0
    keys_indexed: int = 0
    map_utilization: float = 0.0  # keys in the map divided by its capacity, 0..1
    map_full: bool = False
    spilled_bytes: int = 0  # of the scratch file for keys that did not fit into the map
    passes: int = 0  # over the dirty section; 1 if the map was certain to hold every key


def figures_of(figures: CleanFigures) -> dict[str, Any]:
    """Return the figures by name."""
    return {field.name: getattr(figures, field.name) for field in fields(CleanFigures)}


@dataclass(frozen=True, slots=True)
class CleanReport(CleanFigures):
    """The result of a whole job. `next_dirty_offset` is the new checkpoint.

    It lies below the job's first dirty offset if there is damage below that: the records after
    the damage must be cleaned together with it once it can be read.

    `cleaned` are ranges [first, end) beyond `next_dirty_offset` that are clean except for damaged
    segments. They are in order and do not touch each other.
    """

    partition: TopicPartition
    generation: str
    job_id: str
    next_dirty_offset: int
    groups: int
    bytes_read: int
    bytes_written: int
    damaged: tuple[Damage, ...] = ()
    cleaned: tuple[tuple[int, int], ...] = ()
    horizons: tuple[SegmentHorizon, ...] = ()  # of every segment read, as the job leaves it
    deleted_keys: CleanedFile | None = None  # with an order: the deleted keys from now on
    records_without_version: int = 0  # in the dirty section; they rank below all others
    bytes_replaced: int = 0  # size before the job of the groups that were rewritten or emptied
    # Set by a selective clean, which leaves the first dirty offset where it is: the end of the part
    # of the log in which all keys were decided, and the bytes of the last records of these keys.
    resolved_end: int | None = None
    live_bytes: int | None = None
    has_tombstones: bool = True  # likewise: below its end, at least one
    liveness: tuple[SegmentLiveness, ...] = ()  # likewise: of every segment that it leaves
    # Set by a verified clean: of the last records below the end of the job, for the whole log.
    digests: tuple[RangeDigest, ...] = ()
    spill_refusal: str = ""  # why the keys that did not fit into the map were not spilled


def job_over_all_records(job: CleanJob) -> CleanJob:
    """Return the job with everything from the log start offset on as its dirty section."""
    return replace(
        job, first_dirty_offset=job.log_start_offset, clean_below=None, slack=None, by_index=False
    )


class CleanAbortedError(Exception):
    """The broker aborted the job. Not a failure; `run_clean` raises it."""


class JobControl(Protocol):
    """The link of a running job to its caller: budget, abort, results.

    `run_clean` removes no file of the groups that it passed to `groups_cleaned`; the caller
    removes unpublished `.cleaned` files.
    """

    def read_bytes(self, count: int) -> None:
        """Charge bytes about to be read; waits for the budget. Raises CleanAbortedError."""

    def write_bytes(self, count: int) -> None:
        """Charge bytes about to be written; waits for the budget. Raises CleanAbortedError."""

    def aborted(self) -> bool:
        """Return whether to stop; checked for every buffer."""
        ...

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        """Deliver finished, synced groups that are to be published together.

        Groups come in the job's order, oldest first.
        """

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Report progress: `stage` is "map" or "rewrite". May be called at any rate."""


class UnlimitedControl(JobControl):
    """The control of a job without a budget, which nobody aborts: it collects the groups."""

    def __init__(self) -> None:
        self.groups: list[CleanedGroup] = []

    def read_bytes(self, count: int) -> None:
        """Do nothing."""

    def write_bytes(self, count: int) -> None:
        """Do nothing."""

    def aborted(self) -> bool:
        """Return False."""
        return False

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        """Collect the groups."""
        self.groups.extend(groups)

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Do nothing."""


class ForwardingControl(JobControl):
    """Passes everything to another control; subclasses do something else with the groups."""

    def __init__(self, control: JobControl) -> None:
        self._control = control

    def read_bytes(self, count: int) -> None:
        """Charge the other control."""
        self._control.read_bytes(count)

    def write_bytes(self, count: int) -> None:
        """Charge the other control."""
        self._control.write_bytes(count)

    def aborted(self) -> bool:
        """Return whether the other control wants to stop."""
        return self._control.aborted()

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        """Pass the groups on."""
        self._control.groups_cleaned(groups)

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Pass the progress on."""
        self._control.progress(stage, done_bytes, total_bytes)
