"""The parts of a clean that several workers share, and their results. Frozen and picklable.

A part names a piece of one job, and the scratch files of earlier parts. Files are numbered: number
n of a job has the name `filenames.scratch_name(n, job_id)` in the folder of its outputs. The order
of the parts is decided in cleaner/planning/shared_clean.py; part_runner.py runs them.
"""

from dataclasses import dataclass
from typing import TypeAlias

from cleaner.engine.key_map.map_size import SLOT_BYTES
from cleaner.engine.outcome import RewriteTotals
from cleaner.engine.spilled.checksums import Checksums
from cleaner.job import CleanedGroup, Damage


@dataclass(frozen=True, slots=True)
class RowsFile:
    """Rows of keys in file `number`, in pieces that are sorted by shard."""

    number: int
    checksums: Checksums
    # Of each piece: its position, the first row of each shard in it, and the number of its rows.
    pieces: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return sum(places[-1] for _, places in self.pieces)

    def of_shard(self, shard: int) -> "RowsFile":
        """Return the rows of one shard, as shard 0 of 1."""
        pieces = tuple(
            (position + places[shard] * SLOT_BYTES, (0, places[shard + 1] - places[shard]))
            for position, places in self.pieces
            if places[shard] < places[shard + 1]
        )
        return RowsFile(self.number, self.checksums, pieces)

    def as_one_shard(self) -> "RowsFile":
        """Return all rows as shard 0 of 1."""
        pieces = tuple((position, (0, places[-1])) for position, places in self.pieces)
        return RowsFile(self.number, self.checksums, pieces)


@dataclass(frozen=True, slots=True)
class OffsetsFile:
    """Ascending runs of surviving offsets in file `number`: (position, count)."""

    number: int
    checksums: Checksums
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class IndexPart:
    """Index the keys of some dirty segments, into rows."""

    number: int
    segments: tuple[int, ...]  # base offsets
    shards: int
    bytes_max: int  # of the file


@dataclass(frozen=True, slots=True)
class ListPart:
    """List the records of some segments below the first dirty offset as rows."""

    number: int
    segments: tuple[int, ...]
    shards: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class MergePart:
    """Find the survivors of one shard. Files are in the order of their segments."""

    number: int
    dirty: tuple[RowsFile, ...]
    below: tuple[RowsFile, ...]
    bytes_max: int


@dataclass(frozen=True, slots=True)
class RewritePart:
    """Rewrite some neighbouring groups, by keys or by surviving offsets."""

    number: int
    groups: tuple[int, ...]  # indexes
    rows: tuple[RowsFile, ...]
    offsets: tuple[OffsetsFile, ...] | None  # None: `rows` decide
    keyless_seen: bool
    damaged: tuple[tuple[int, Damage], ...]  # known damage of the whole job, by base offset


@dataclass(frozen=True, slots=True)
class WaitPart:
    """Wait for parts of other workers."""

    number: int
    seconds: float


Part: TypeAlias = IndexPart | ListPart | MergePart | RewritePart | WaitPart


@dataclass(frozen=True, slots=True)
class RowsResult:
    """The result of an IndexPart or a ListPart."""

    rows: RowsFile
    damaged: tuple[tuple[int, Damage], ...]
    keyless_seen: bool
    transactions_seen: bool
    bytes_read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MergePartResult:
    """The result of a MergePart."""

    offsets: OffsetsFile
    keys: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RewritePartResult:
    """The result of a RewritePart. Without `fits`, its keys exceed the map and nothing was done."""

    fits: bool
    keys: int
    groups: tuple[CleanedGroup, ...]
    totals: RewriteTotals
    damaged: tuple[tuple[int, Damage], ...]  # all, including the known damage
    transactions_seen: bool
    bytes_read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NoSpace:
    """The result of a part whose scratch file found no room, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Waited:
    """The result of a WaitPart."""


PartResult: TypeAlias = RowsResult | MergePartResult | RewritePartResult | NoSpace | Waited
