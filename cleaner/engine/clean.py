"""One clean of one partition, from its job to its report. Runs in a worker process, or in a test.

Rules
- Only closed segments are read, only `.cleaned` files are written, nothing is renamed. Files and
  clocks come through `env`.
- Memory is bounded by the dedupe buffer, the read buffer (and three times that for output), 16 MiB
  of bitmap, and the largest batch. With buffers as they are by default that is the dedupe buffer,
  64 MB, and three times what the largest batch unpacks to where that is more than 4 MiB. It does
  not depend on the number of keys, nor on that of damaged segments.
- Whatever the size of the map, the next dirty offset grows: by one record at least.
- Damage is never made to look sound: a segment with a damaged batch is left as it is and reported.
  The next dirty offset does not pass it, and goes back to it where it is found in what was clean:
  what is indexed may supersede records in there. Should the segment be readable one day, it is
  dirty, and indexed again together with all that follows. The rest of the log is cleaned all the
  same; behind the damage nothing is stamped and no tombstone goes.
- A checksum does not cover a batch's base offset, length, leader epoch and magic. A wrong length or
  magic shows at once; a wrong base offset where offsets do not ascend within the segment's range.
  In a gap of offsets it does not show: the batch keeps its place among the others and its records.
- What was aborted is known from the job alone, so neither a full map nor damage misleads anyone
  about it; that a marker has lost its batches is found in the second pass (kernels/transactions).
- A job over what has expired has no first pass, and nothing goes by the map.
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
    """Clean as `job` says; groups go to `control.groups_cleaned` as they are finished.

    Without `one_pass` two are made even where one would do: what is left is the same. `outputs`:
    what takes the cleaned files, if not `env`. With `every_key` a map that does not hold them all
    is MapFullError, before anything is written. Raises CleanAbortedError when asked to stop,
    OSError; the files of an unfinished group are removed before.
    """
    check_job(job)
    context = CleanContext(env, job, control, outputs)
    outcome = None
    if one_pass and applies(env, job):
        outcome = clean_newest_first(context)
        if outcome is None:
            bytes_read = context.reader.bytes_read
            del context  # its map, before there is another
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
    """First the keys of the whole dirty section, then every group from the oldest on."""
    env = context.env
    started = env.monotonic()
    damaged = index_section(context)
    if every_key and context.map_end < context.job.end_offset:
        raise MapFullError
    ranked = None
    if isinstance(context.map, RankedMap):
        ranked = RankedPass(context, context.map)
        damaged |= ranked.look_below()
    mapped = env.monotonic()
    rewrite = RewritePass(context, damaged)
    rewrite.run(context.job.groups)
    return CleanOutcome(
        totals=rewrite.totals,
        damaged=damaged,
        map_seconds=mapped - started,
        rewrite_seconds=env.monotonic() - mapped,
        deleted_keys=None if ranked is None else ranked.remember(),
    )


def _clean_expired(context: CleanContext) -> CleanOutcome:
    """Only the second pass, over groups that hold something whose horizon has passed."""
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
    """How far the keys of a job are known."""

    end: int  # the first offset of which they are not
    keys: int
    utilization: float  # of the map, 0 to 1
    versionless: int = 0  # records that should have a version, and have none


def report_of(context: CleanContext, outcome: CleanOutcome) -> CleanReport:
    """The report of a job that came to its end."""
    key_map, versionless = context.map, int(context.state[fields.VERSIONLESS])
    indexed = Indexed(context.map_end, key_map.entries, key_map.utilization, versionless)
    return make_report(context.job, outcome, indexed, bytes_read=context.reader.bytes_read)


def make_report(
    job: CleanJob, outcome: CleanOutcome, indexed: Indexed, *, bytes_read: int
) -> CleanReport:
    """The report of a job that came to its end, wherever its passes were made."""
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
    """The stretches of [next dirty offset, end of the map) outside of damaged segments."""
    stretches: list[tuple[int, int]] = []
    for group in job.groups:
        for source in group:
            first = max(source.base_offset, next_dirty_offset)
            end = min(source.next_base_offset, map_end)
            if first >= end or source.base_offset in damaged:
                continue
            if stretches and stretches[-1][1] == first:
                first = stretches.pop()[0]
            stretches.append((first, end))
    return tuple(stretches)


def check_job(job: CleanJob) -> None:
    """Assert what the planner promised."""
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
    # All of the log, or else groups that are no hole inside of themselves.
    for stretch in job.groups if job.expired_only else [sources]:
        for source, following in pairwise(stretch):
            assert source.next_base_offset == following.base_offset
    assert not job.expired_only or job.first_dirty_offset == job.end_offset
