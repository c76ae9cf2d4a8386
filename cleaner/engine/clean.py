"""Run one cleaner job, in a worker process or in a test.

Rules
- The engine reads closed segments, writes `.cleaned` files and renames nothing. Files and clocks
  come through `env`.
- Memory is bounded by the dedupe buffer, the read buffer (and three times that for output), 16 MiB
  of bitmap, and the largest batch. With default buffers that is the dedupe buffer, 64 MB, and three
  times the unpacked size of the largest batch if that exceeds 4 MiB. It does not depend on the
  number of keys or of damaged segments.
- For any size of the map, the next dirty offset grows by at least one record.
- A segment with a damaged batch is left unchanged and reported. The next dirty offset does not pass
  it, and returns to it if the damage is in the clean section: indexed keys may supersede records in
  it. If the segment becomes readable, it is dirty, and is indexed again with all that follows. The
  rest of the log is cleaned; behind the damage no horizon is set and no tombstone removed.
- A checksum does not cover a batch's base offset, length, leader epoch and magic. A wrong length or
  magic is detected at once, a wrong base offset if offsets do not ascend within the segment's
  range. In a gap of offsets it is undetected: the batch keeps its place and its records.
- The job alone names the aborted transactions, so neither a full map nor damage affects them. The
  second pass finds out that a marker has lost its batches (kernels/passes/transactions.py).
- A job that only removes expired tombstones has no first pass and does not use the map.
"""

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.one_pass.newest_first import applies, clean_newest_first
from cleaner.engine.outcome import CleanOutcome, MapFullError
from cleaner.engine.output_files import OutputFiles
from cleaner.engine.ranked_map import RankedMap
from cleaner.engine.two_pass.index_pass import index_section
from cleaner.engine.two_pass.ranked_pass import RankedPass
from cleaner.engine.two_pass.rewrite_pass import RewritePass
from cleaner.job import CleanJob, CleanReport, JobControl
from storage.env import Env


def run_clean(
    env: Env,
    job: CleanJob,
    control: JobControl,
    *,
    one_pass: bool = True,
    outputs: OutputFiles | None = None,
    every_key: bool = False,
) -> CleanReport:
    """Run the job; pass finished groups to `control.groups_cleaned`.

    Without `one_pass`, two passes are made even if one would do, with the same result. `outputs`
    takes the cleaned files instead of `env`. With `every_key`, MapFullError is raised before any
    output if the map does not hold all keys. Raises CleanAbortedError, OSError; the files of an
    unfinished group are removed first.
    """
    check_job(job)
    context = CleanContext(env, job, control, outputs)
    outcome = None
    if one_pass and applies(env, job):
        outcome = clean_newest_first(context)
        if outcome is None:
            bytes_read = context.reader.bytes_read
            del context  # frees its map before the next one
            context = CleanContext(env, job, control, outputs)
            context.reader.bytes_read = bytes_read
    if outcome is None:
        try:
            if job.expired_only:
                outcome = _clean_expired(context)
            else:
                outcome = _clean_in_two_passes(context, every_key=every_key)
        finally:
            context.reader.close()
    return report_of(context, outcome)


def _clean_in_two_passes(context: CleanContext, *, every_key: bool) -> CleanOutcome:
    """Index the keys of the dirty section, then rewrite every group from the oldest on."""
    env = context.env
    started = env.monotonic()
    damaged = index_section(context)
    if every_key and context.map_end < context.job.end_offset:
        raise MapFullError
    ranked = None
    if isinstance(context.map, RankedMap):
        ranked = RankedPass(context, context.map)
        damaged |= ranked.index_below()
    mapped = env.monotonic()
    rewrite = RewritePass(context, damaged)
    rewrite.run(context.job.groups)
    return CleanOutcome(
        totals=rewrite.totals,
        damaged=damaged,
        map_seconds=mapped - started,
        rewrite_seconds=env.monotonic() - mapped,
        deleted_keys=None if ranked is None else ranked.write_deleted_keys(),
    )


def _clean_expired(context: CleanContext) -> CleanOutcome:
    """Run only the second pass, over groups with expired tombstones."""
    started = context.env.monotonic()
    rewrite = RewritePass(context, {})
    rewrite.run(context.job.groups)
    return CleanOutcome(
        totals=rewrite.totals,
        damaged=rewrite.damaged,
        rewrite_seconds=context.env.monotonic() - started,
        passes=1,
    )


class Indexed(NamedTuple):
    """The result of indexing the keys of a job."""

    end: int  # the first offset that is not indexed
    keys: int
    utilization: float  # of the map, 0 to 1
    versionless: int = 0  # records without a valid version


def report_of(context: CleanContext, outcome: CleanOutcome) -> CleanReport:
    """Return the report of a finished job."""
    key_map, versionless = context.map, int(context.state[fields.VERSIONLESS])
    indexed = Indexed(context.map_end, key_map.entries, key_map.utilization, versionless)
    return make_report(context.job, outcome, indexed, bytes_read=context.reader.bytes_read)


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


def check_job(job: CleanJob) -> None:
    """Assert that the job is consistent."""
    sources = [source for group in job.groups for source in group]
    assert all(job.groups)
    assert len(job.hash_key) == 16
    assert job.order is None or job.latest_only
    assert job.first_dirty_offset >= 0
    assert job.log_start_offset <= job.first_dirty_offset <= job.end_offset
    assert job.clean_below is None or job.clean_below >= 0
    for source in sources:
        assert 0 <= source.base_offset < source.next_base_offset <= job.end_offset
    for source, following in pairwise(sources):
        assert source.next_base_offset <= following.base_offset
    # Neighbours follow each other: in the whole log, or in each group of an expiry job.
    for run in job.groups if job.expired_only else [sources]:
        for source, following in pairwise(run):
            assert source.next_base_offset == following.base_offset
    assert not job.expired_only or job.first_dirty_offset == job.end_offset
