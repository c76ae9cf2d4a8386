"""The results of the passes, from which the report is made."""

from dataclasses import dataclass, field, fields

from cleaner.job import Damage, SegmentHorizon
from storage.swap.swap_journal import CleanedFile


@dataclass(slots=True)
class RewriteTotals:
    """Sums over the groups of a job, the unchanged ones included."""

    groups: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    bytes_written: int = 0
    bytes_replaced: int = 0  # size before of the groups that were rewritten or emptied
    records_before: int = 0
    records_after: int = 0
    tombstones_kept: int = 0
    tombstones_removed: int = 0
    keyless: int = 0
    aborted: int = 0
    markers_removed: int = 0
    horizons: list[SegmentHorizon] = field(default_factory=list)

    def add(self, others: "RewriteTotals") -> None:
        """Add the totals of later groups."""
        for dataclass_field in fields(self):
            setattr(
                self,
                dataclass_field.name,
                getattr(self, dataclass_field.name) + getattr(others, dataclass_field.name),
            )


class MapFullError(Exception):
    """The map does not hold every key, although the caller requires it."""


@dataclass(slots=True)
class CleanOutcome:
    """The result of a clean whose groups were all delivered."""

    totals: RewriteTotals
    damaged: dict[int, Damage] = field(default_factory=dict)  # by base offset
    map_seconds: float = 0.0
    rewrite_seconds: float = 0.0
    passes: int = 2
    deleted_keys: CleanedFile | None = None
