"""Descriptors of tasks and results: frozen dataclasses, transferred as JSON."""

from dataclasses import dataclass, field
from typing import TypeVar

from cleaner import typed_json
from cleaner.engine.outcome import RewriteTotals
from cleaner.job import CleanedGroup, CleanJob, CleanReport, Damage

T = TypeVar("T")


def encode(descriptor: object) -> bytes:
    """Return the JSON of a descriptor."""
    return typed_json.dumps(descriptor)


def decode(kind: type[T], data: bytes) -> T:
    """Parse a descriptor. Raises MalformedJsonError."""
    return typed_json.loads(kind, data)


@dataclass(frozen=True, slots=True)
class DamageFound:
    """A damaged segment. See cleaner.job.Damage."""

    base_offset: int
    path: str
    position: int
    reason: str
    indexing: bool = False  # found by the first pass, in the dirty section

    @property
    def damage(self) -> Damage:
        """Return the damage in the cleaner's form."""
        return Damage(self.path, self.position, self.reason)


@dataclass(frozen=True, slots=True)
class WholeTask:
    """Clean a partition if its keys fit the job's dedupe buffer."""

    source: dict[str, str]  # transport descriptor
    job: CleanJob


@dataclass(frozen=True, slots=True)
class WholeResult:
    """`report` is None if the keys did not fit; then there are no files."""

    folder: str = ""
    groups: tuple[CleanedGroup, ...] = ()
    report: CleanReport | None = None


@dataclass(frozen=True, slots=True)
class CombineTask:
    """Fingerprint the keys of the job's segments, by shard.

    With `with_counts`, index all records from the log start offset on, with counts, for a table;
    otherwise index as a clean does.
    """

    source: dict[str, str]
    job: CleanJob
    shards: int
    memory_bytes: int
    with_counts: bool = False


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file with one combine task's rows of one shard. See passes/shards.py."""

    name: str
    rows: int
    crc: int  # CRC-32C of the file


@dataclass(frozen=True, slots=True)
class SegmentCounts:
    """Counts of one segment, up to its first damage. Times are -1 without records."""

    base_offset: int
    next_base_offset: int
    size_bytes: int
    batches: int = 0
    records: int = 0  # data records, from the log start offset on
    control: int = 0  # control records, which are not counted in `records`
    aborted: int = 0
    keyless: int = 0
    null_values: int = 0  # all tombstones, last of their keys or not
    key_bytes: int = 0
    value_bytes: int = 0
    first_ms: int = -1
    last_ms: int = -1
    live: int = 0  # last records of their keys with a value
    tombstones: int = 0  # last records of their keys without a value

    @property
    def garbage(self) -> int:
        """Return the number of superseded data records."""
        return self.records - self.live - self.tombstones - self.keyless


@dataclass(frozen=True, slots=True)
class CombineResult:
    """One file for each shard with rows. Rows in `dirty` supersede earlier rows; `clean` do not."""

    folder: str
    dirty: dict[str, RowFile]  # by shard
    clean: dict[str, RowFile]
    damaged: tuple[DamageFound, ...]
    keyless_seen: bool
    transactions_seen: bool
    bytes_read: int
    seconds: float
    counts: tuple[SegmentCounts, ...] = ()  # only with `with_counts`


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The files of one combine task with rows of a shard, if any."""

    folder: str
    dirty: RowFile | None
    clean: RowFile | None


@dataclass(frozen=True, slots=True)
class MergeTask:
    """Find the survivors among the rows of one shard, in as many rounds as memory requires.

    The job names no segments, because none is read.
    """

    source: dict[str, str]
    job: CleanJob
    shard: int
    rows: tuple[ShardFiles, ...]  # in the order of their segments
    ranges: tuple[tuple[tuple[int, int], ...], ...]  # of segments, by reader
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class MergeResult:
    """`files` are names in `folder`, by reader as in `ranges` of the task."""

    folder: str
    files: tuple[tuple[str, ...], ...]
    keys: int
    seconds: float
    live: dict[str, int] = field(default_factory=dict)  # counts by base offset
    tombstones: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SurvivorFiles:
    """Files of survivors in one folder."""

    folder: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RewriteTask:
    """Rewrite the job's groups by survivors; with `check_markers` all groups, in order."""

    source: dict[str, str]
    job: CleanJob
    survivors: tuple[SurvivorFiles, ...]
    damaged: tuple[DamageFound, ...]  # known damage of the whole partition
    keyless_seen: bool
    check_markers: bool  # compare markers with the indexes first


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """`damaged` is the damage first found by this task."""

    folder: str
    groups: tuple[CleanedGroup, ...]
    totals: RewriteTotals
    damaged: tuple[DamageFound, ...]
    bytes_read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class IndexTask:
    """Index a partition in one task, if its keys fit."""

    source: dict[str, str]
    job: CleanJob
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class IndexResult:
    """`fits` is False if the keys did not fit; then there are no files."""

    fits: bool
    survivors: SurvivorFiles = SurvivorFiles("", ())
    counts: tuple[SegmentCounts, ...] = ()
    damaged: tuple[DamageFound, ...] = ()
    keys: int = 0
    seconds: float = 0.0
