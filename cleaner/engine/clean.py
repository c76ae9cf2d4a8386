"""Run one cleaner job, in a worker process or in a test.

Rules
- The engine reads closed segments and writes `.cleaned` files. It renames and deletes nothing else,
  except key indexes (selective/key_index.py).
  It uses files and clocks through `env` only.
- Memory does not depend on the number of keys or of damaged segments. With default buffers it is
  the dedupe buffer plus 64 MB; if the largest batch exceeds 4 MiB when unpacked, plus three times
  its unpacked size.
- Keys that do not fit into the map are spilled to a scratch file (spilled/spilled_clean.py), within
  the job's limit and the free space. Otherwise the clean ends at the first key that does not fit.
- Every clean makes progress: for any size of the key map, the first dirty offset grows by at least
  one record.
- The engine reports a segment with a damaged batch and does not change it. It cleans the rest of
  the log, but after the damage it sets no delete horizon and removes no tombstone.
- The first dirty offset does not pass a damaged segment. If the damage is in the clean section, it
  goes back to that segment, because keys that were indexed later may supersede records in it. Once
  the segment can be read again, it and all later segments are dirty.
- A batch's checksum does not cover its base offset, length, leader epoch and magic. A wrong length
  or magic is always detected. A wrong base offset is detected if offsets no longer ascend; inside a
  gap of offsets it is not, and the batch keeps its place and records.
- The job lists the aborted transactions, so neither a full map nor damage hides one. The second
  pass detects that a marker has no batches left (kernels/passes/transactions.py).
- A job that only removes expired tombstones has no first pass and no key map.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

from cleaner.engine.context import CleanContext
from cleaner.engine.key_map.map_size import may_not_fit
from cleaner.engine.key_map.ranked_map import RankedMap
from cleaner.engine.one_pass.newest_first import clean_newest_first, suits_one_pass
from cleaner.engine.outcome import CleanOutcome, MapFullError
from cleaner.engine.output_files import OutputFiles
from cleaner.engine.report import make_report
from cleaner.engine.selective.key_index import remove_indexes
from cleaner.engine.selective.selective_clean import SelectiveClean
from cleaner.engine.spilled.scratch import NoScratchSpaceError, Scratch
from cleaner.engine.spilled.spilled_clean import SpilledClean
from cleaner.engine.two_pass.index_pass import index_section
from cleaner.engine.two_pass.ranked_pass import RankedPass
from cleaner.engine.two_pass.rewrite_pass import RewritePass
from cleaner.engine.verify.verified_clean import clean_verified
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

    Without `one_pass`, the engine makes two passes even if one suffices; the result is the same.
    `outputs` receives the cleaned files instead of `env`. With `every_key`, raises MapFullError
    before any output if the map is too small for all keys. Raises CleanAbortedError, OSError; the
    files of an unfinished group are removed first.
    """
    assert_consistent(job)
    if job.verify:
        assert outputs is None
        clean = partial(run_clean, env, one_pass=one_pass, every_key=every_key)
        return clean_verified(env, job, control, clean)
    bytes_read, refusal = 0, ""
    if (job.slack is not None or job.by_index) and not every_key:
        selective = SelectiveClean(env, job, control, outputs)
        report = selective.run()
        if report is not None:
            return report
        bytes_read, refusal = selective.bytes_read, selective.refusal
    is_whole = job.slack is None and not job.expired_only and job.view is None
    if is_whole and job.output_directory is None:
        remove_indexes(env, job)  # most segments are replaced
    if one_pass and suits_one_pass(env, job):
        context = CleanContext(env, job, control, outputs)
        context.reader.bytes_read = bytes_read
        outcome = clean_newest_first(context)
        if outcome is not None:
            bytes_read = context.reader.bytes_read
            report = make_report(job, outcome, context.indexed, bytes_read=bytes_read)
            return replace(report, spill_refusal=refusal)
        bytes_read = context.reader.bytes_read
        del context  # frees its map before the next one
    if job.spill_bytes_max > 0 and not every_key and may_not_fit(job):
        scratch = Scratch(env, job, control, bytes_max=job.spill_bytes_max)
        spilled = SpilledClean(env, job, control, outputs, scratch=scratch, bytes_read=bytes_read)
        try:
            return spilled.run()
        except NoScratchSpaceError as error:
            refusal, bytes_read = str(error), spilled.bytes_read
        finally:
            scratch.close()
        del spilled
    context = CleanContext(env, job, control, outputs)
    context.reader.bytes_read = bytes_read
    try:
        if job.expired_only:
            outcome = _clean_expired(context)
        else:
            outcome = _clean_in_two_passes(context, every_key=every_key)
    finally:
        context.reader.close()
    bytes_read = context.reader.bytes_read
    report = make_report(job, outcome, context.indexed, bytes_read=bytes_read)
    return replace(report, spill_refusal=refusal)


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


def assert_consistent(job: CleanJob) -> None:
    """Assert that the job is consistent."""
    sources = [source for group in job.groups for source in group]
    assert all(job.groups)
    assert len(job.hash_key) == 16
    assert job.view is None or not job.expired_only
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
