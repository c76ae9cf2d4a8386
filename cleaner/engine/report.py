"""Build the report of a finished job from the results of its passes."""

from collections.abc import Collection
from typing import NamedTuple

from cleaner.engine.outcome import CleanOutcome
from cleaner.job import CleanJob, CleanReport


class Indexed(NamedTuple):
    """The result of indexing the keys of a job."""

    end: int  # the first offset that is not indexed
    keys: int
    utilization: float  # of the map, 0 to 1
    versionless: int = 0  # records without a valid version


def make_report(
    job: CleanJob, outcome: CleanOutcome, indexed: Indexed, *, bytes_read: int
) -> CleanReport:
    """Return the report of a finished job, from the results of its passes."""
    totals, damaged = outcome.totals, outcome.damaged
    next_dirty_offset = min([indexed.end, *damaged])
    return CleanReport(
        partition=job.partition,
        generation=job.generation,
        job_id=job.job_id,
        next_dirty_offset=next_dirty_offset,
        groups=totals.groups,
        bytes_read=bytes_read,
        bytes_written=totals.bytes_written,
        bytes_replaced=totals.bytes_replaced,
        bytes_before=totals.bytes_before,
        bytes_after=totals.bytes_after,
        records_before=totals.records_before,
        records_after=totals.records_after,
        tombstones_kept=totals.tombstones_kept,
        tombstones_removed=totals.tombstones_removed,
        keys_indexed=indexed.keys,
        map_full=indexed.end < job.end_offset,
        map_seconds=outcome.map_seconds,
        rewrite_seconds=outcome.rewrite_seconds,
        damaged=tuple(damaged[base] for base in sorted(damaged)),
        records_without_key=totals.keyless,
        records_aborted=totals.aborted,
        markers_removed=totals.markers_removed,
        cleaned=_cleaned_beyond(job, indexed.end, next_dirty_offset, damaged),
        horizons=tuple(totals.horizons),
        map_utilization=indexed.utilization,
        passes=outcome.passes,
        deleted_keys=outcome.deleted_keys,
        records_without_version=indexed.versionless,
    )


def _cleaned_beyond(
    job: CleanJob, map_end: int, next_dirty_offset: int, damaged: Collection[int]
) -> tuple[tuple[int, int], ...]:
    """Return the intervals of [next dirty offset, end of the map) without damaged segments."""
    intervals: list[tuple[int, int]] = []
    for group in job.groups:
        for source in group:
            first = max(source.base_offset, next_dirty_offset)
            end = min(source.next_base_offset, map_end)
            if first >= end or source.base_offset in damaged:
                continue
            if intervals and intervals[-1][1] == first:
                first = intervals.pop()[0]
            intervals.append((first, end))
    return tuple(intervals)
