"""Descriptors of tasks and their results: frozen dataclasses, and JSON on the way."""

from dataclasses import dataclass, field
from typing import TypeVar

from cleaner import typed_json
from cleaner.engine.outcome import RewriteTotals
from cleaner.job import CleanedGroup, CleanJob, CleanReport, Damage

T = TypeVar("T")


def encode(descriptor: object) -> bytes:
    """The JSON of a descriptor."""
    return typed_json.dumps(descriptor)


def decode(kind: type[T], data: bytes) -> T:
    """A descriptor from its JSON. Raises MalformedJsonError."""
    return typed_json.loads(kind, data)


@dataclass(frozen=True, slots=True)
class DamageFound:
    """A segment that cannot be read. See outcome.Damage."""

    base_offset: int
    path: str
    position: int
    reason: str
    indexing: bool = False  # met by the first pass, over the dirty section

    @property
    def damage(self) -> Damage:
        """As the engine tells it."""
        return Damage(self.path, self.position, self.reason)


@dataclass(frozen=True, slots=True)
class WholeTask:
    """Clean a partition as its job says, if its keys fit the job's dedupe buffer."""

    source: dict[str, str]  # transport descriptor
    job: CleanJob


@dataclass(frozen=True, slots=True)
class WholeResult:
    """`report` is None where the keys did not fit: nothing was left behind then."""

    folder: str = ""
    groups: tuple[CleanedGroup, ...] = ()
    report: CleanReport | None = None


@dataclass(frozen=True, slots=True)
class CombineTask:
    """Fingerprint the keys of some segments of a partition, by shard; the job names only these.

    `survey`: as a table wants them, all from the log's start on, with counts; else as a clean does.
    """

    source: dict[str, str]
    job: CleanJob
    shards: int
    memory_bytes: int
    survey: bool = False


@dataclass(frozen=True, slots=True)
class RowFile:
    """Rows of one shard, of the keys of one combine task. See passes/shards.py."""

    name: str
    rows: int
    crc: int  # CRC-32C of all of it


@dataclass(frozen=True, slots=True)
class SegmentCounts:
    """What one segment holds, as far as it can be read. Times are -1 where it has no records."""

    base_offset: int
    next_base_offset: int
    size_bytes: int
    batches: int = 0
    records: int = 0  # data records, from the log's start on
    control: int = 0  # control records, which are not counted in `records`
    aborted: int = 0
    keyless: int = 0
    null_values: int = 0  # deletes, be they the last of their keys or not
    key_bytes: int = 0
    value_bytes: int = 0
    first_ms: int = -1
    last_ms: int = -1
    live: int = 0  # last records of their keys that are no deletes
    tombstones: int = 0  # last records that are

    @property
    def garbage(self) -> int:
        """Data records that no reader of the latest state needs."""
        return self.records - self.live - self.tombstones - self.keyless


@dataclass(frozen=True, slots=True)
class CombineResult:
    """`dirty` supersedes, `clean` only may be superseded; one file for each shard with rows."""

    folder: str
    dirty: dict[str, RowFile]  # by shard
    clean: dict[str, RowFile]
    damaged: tuple[DamageFound, ...]
    keyless_met: bool
    transactions_met: bool
    bytes_read: int
    seconds: float
    counts: tuple[SegmentCounts, ...] = ()  # of a survey


@dataclass(frozen=True, slots=True)
class RowSource:
    """The files of one combine task that hold rows of a shard; None: it has none."""

    folder: str
    dirty: RowFile | None
    clean: RowFile | None


@dataclass(frozen=True, slots=True)
class MergeTask:
    """Find the survivors among the rows of one shard, in as many rounds as memory asks for.

    The job names no segments: none is read.
    """

    source: dict[str, str]
    job: CleanJob
    shard: int
    rows: tuple[RowSource, ...]  # in the order of their segments
    ranges: tuple[tuple[tuple[int, int], ...], ...]  # of segments, by whoever reads the survivors
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class MergeResult:
    """`files` by reader, as in `ranges` of the task: names in `folder`."""

    folder: str
    files: tuple[tuple[str, ...], ...]
    keys: int
    seconds: float
    live: dict[str, int] = field(default_factory=dict)  # how many by base offset
    tombstones: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SurvivorFiles:
    """Files of survivors in one folder."""

    folder: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RewriteTask:
    """Rewrite some groups of a partition, which the job names, by survivors.

    With `check_markers` these are all groups, in order.
    """

    source: dict[str, str]
    job: CleanJob
    survivors: tuple[SurvivorFiles, ...]
    damaged: tuple[DamageFound, ...]  # of the whole partition, found before
    keyless_met: bool
    check_markers: bool  # there are transactions: hold them against the indexes first


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """`damaged`: found by this task, and not before."""

    folder: str
    groups: tuple[CleanedGroup, ...]
    totals: RewriteTotals
    damaged: tuple[DamageFound, ...]
    bytes_read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SurveyTask:
    """Index a partition in one task, if its keys fit."""

    source: dict[str, str]
    job: CleanJob
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class SurveyResult:
    """`fits`: the keys did; else nothing was left behind."""

    fits: bool
    survivors: SurvivorFiles = SurvivorFiles("", ())
    counts: tuple[SegmentCounts, ...] = ()
    damaged: tuple[DamageFound, ...] = ()
    keys: int = 0
    seconds: float = 0.0
