"""Clean in one pass from the newest batch to the oldest, if the map holds every key.

Rules
- Groups with dirty records are processed from the newest to the oldest. Each batch is read,
  verified and unpacked once (passes/newest_first.py). Survivors are buffered until their group is
  done, then written in order (buffered_output.py).
- All groups are delivered at the end, the oldest first: a newer group may lack a tombstone whose
  superseded value is still in an older one. The second of the two passes rewrites groups without
  dirty records; the map is the same as after the first pass.
- This is a fast path for intact logs. At damage, a wrong index, a transactional batch or a batch
  too large for the windows, its outputs are dropped and the two passes start.
- Outputs are written and synced in the background while the next group is cleaned.
- Memory beside the map: the buffered output, two windows, and an unpacked chunk.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from cleaner.engine.background_writes import BackgroundWrites
from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.one_pass.buffered_output import BufferedOutput
from cleaner.engine.one_pass.newest_window import WindowCleaner
from cleaner.engine.one_pass.windows import NoWindowsError, Windows
from cleaner.engine.outcome import CleanOutcome
from cleaner.engine.output import CleanedOutput, OutputBuffers
from cleaner.engine.source import offsets_end
from cleaner.engine.two_pass.group_accounting import GroupAccounting
from cleaner.engine.two_pass.rewrite_pass import RewritePass
from cleaner.job import CleanedGroup, CleanJob, SourceSegment
from storage.env import Env
from storage.format import filenames

# All outputs of the dirty groups are on disk before the first source is freed.
DIRTY_BYTES_MAX: Final = 4 << 30
# Limits of one journal, which a pause has to wait for: it reads all outputs once and names every
# file. A single group may exceed them.
TOGETHER_BYTES_MAX: Final = 256 << 20
TOGETHER_SEGMENTS_MAX: Final = 256

Group = tuple[SourceSegment, ...]


def suits_one_pass(env: Env, job: CleanJob) -> bool:
    """Return whether one pass may suffice, judging by the job and the free space alone."""
    is_special = job.expired_only or job.view is not None or job.aborted
    dirty_bytes = sum(source.size_bytes for group in _dirty(job) for source in group)
    return (
        not is_special
        and 0 < dirty_bytes <= DIRTY_BYTES_MAX
        # For the outputs, and the scratch copy of the largest one.
        and env.free_bytes(job.outputs) > 2 * dirty_bytes
    )


def _dirty(job: CleanJob) -> list[Group]:
    """Return the groups with dirty records: the last ones."""
    return [group for group in job.groups if group[-1].next_base_offset > job.first_dirty_offset]


def clean_newest_first(context: CleanContext) -> CleanOutcome | None:
    """Clean in one pass; return None if two are needed, with a new context.

    Raises CleanAbortedError, OSError, after removing the files of undelivered groups.
    """
    job, env = context.job, context.env
    if job.end_offset - job.first_dirty_offset > context.map.entries_max:
        return None
    started = env.monotonic()
    dirty_groups = _dirty(job)
    clean_groups = job.groups[: len(job.groups) - len(dirty_groups)]
    newest = NewestFirst(context)
    try:
        if not newest.run(dirty_groups):
            return None
        mapped = env.monotonic()
        rewrite = RewritePass(context, {})
        rewrite.run(clean_groups)
        if rewrite.damaged:
            # After damage no tombstone may be removed: clean the dirty groups again.
            newest.drop()
            rewrite.run(dirty_groups)
        else:
            rewrite.totals.add(newest.accounting.totals)
            rewrite.totals.horizons.sort(key=lambda horizon: horizon.base_offset)
            newest.deliver()
    finally:
        newest.drop()
    return CleanOutcome(
        totals=rewrite.totals,
        damaged=rewrite.damaged,
        map_seconds=mapped - started,
        rewrite_seconds=env.monotonic() - mapped,
        passes=1,
    )


def published_together(groups: Sequence[CleanedGroup]) -> Iterator[tuple[CleanedGroup, ...]]:
    """Split `groups` into parts that one journal publishes."""
    together: list[CleanedGroup] = []
    size_bytes = segments = 0
    for group in groups:
        size_bytes += group.bytes_after
        segments += len(group.source_base_offsets)
        if together and (size_bytes > TOGETHER_BYTES_MAX or segments > TOGETHER_SEGMENTS_MAX):
            yield tuple(together)
            together.clear()
            size_bytes, segments = group.bytes_after, len(group.source_base_offsets)
        together.append(group)
    if together:
        yield tuple(together)


class NewestFirst:
    """Cleans the dirty groups of a job."""

    def __init__(self, context: CleanContext) -> None:
        self._context = context
        self.accounting = GroupAccounting(context, ())
        job = context.job
        self._background = BackgroundWrites()
        self._buffered = BufferedOutput(context.env, job.outputs, job.job_id, self._background)
        self._windows = Windows(context.env, job.directory, job.read_buffer_bytes)
        self._cleaner = WindowCleaner(context, self._buffered)
        self._buffers = OutputBuffers(self._buffered.piece_bytes)
        self._outputs: list[CleanedOutput] = []
        self._results: list[CleanedGroup] = []  # the newest first
        self._begun = 0
        self._total = 0
        self._ceiling = 0  # the base offset of the batch after the next window

    def run(self, groups: Sequence[Group]) -> bool:
        """Clean all groups; return False if one pass is impossible.

        Raises CleanAbortedError, OSError.
        """
        self._total = sum(source.size_bytes for group in groups for source in group)
        try:
            for group in reversed(groups):
                self._clean_group(group)
        except NoWindowsError:
            return False
        return True

    def deliver(self) -> None:
        """Sync the outputs and deliver the groups, the oldest first. Raises OSError."""
        self._background.wait(self._context.check_aborted)
        if self._outputs:
            self._context.outputs.sync_dir(self._context.job.outputs)
        self._outputs.clear()
        for groups in published_together(self._results[::-1]):
            self._context.control.groups_cleaned(groups)
        self._results.clear()

    def drop(self) -> None:
        """Remove all undelivered outputs."""
        self._background.close()
        self._buffered.clear()
        while self._outputs:
            self._outputs.pop().abandon()
        self._results.clear()

    def _clean_group(self, group: Group) -> None:
        accounting, buffered = self.accounting, self._buffered
        accounting.begin(group)
        self._cleaner.begin_group()
        for source in reversed(group):
            self._clean_segment(source)
            accounting.close_segment()
        buffered_from = self._cleaner.buffered_from
        if accounting.is_unchanged(group, buffered.size_bytes(buffered_from)):
            buffered.clear()
            accounting.leave(group)
            return
        output = accounting.open_output(group, self._buffers, self._background.write)
        self._outputs.append(output)
        buffered.write_out(buffered_from, output, self._buffers, self._charge_read)
        cleaned = output.complete(())
        self._results.append(accounting.finish(group, cleaned))
        if cleaned is not None:
            self._background.sync(output, group[-1].last_modified_ms)

    def _clean_segment(self, source: SourceSegment) -> None:
        context, state = self._context, self._context.state
        state[fields.EARLIEST_MS] = -1
        self._ceiling = offsets_end(source)
        name = filenames.file_name(source.base_offset, filenames.LOG)
        try:
            file = context.env.open(f"{context.job.directory}/{name}")
        except FileNotFoundError:  # removed by retention, as in SourceReader
            self._begun += source.size_bytes
            return
        try:
            done = 0
            for begin, end in self._windows.of(source, file, self._charge_read):
                state[fields.NEXT_OFFSET] = source.base_offset
                state[fields.SOURCE_END] = self._ceiling
                self._cleaner.read(file, begin, end, self._charge_read)
                self._ceiling = self._cleaner.clean()
                done += end - begin
                context.control.progress("rewrite", self._begun + done, self._total)
        finally:
            file.close()
        self._begun += source.size_bytes

    def _charge_read(self, count: int) -> None:
        self._context.charge_read(count)
        self._context.reader.bytes_read += count
