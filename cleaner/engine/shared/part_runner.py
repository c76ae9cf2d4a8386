"""Run parts of a shared clean, in a worker.

Rules
- A part reads segments and the scratch files of earlier parts. It writes one scratch file, or the
  `.cleaned` files of its groups. Nothing is handed over before the part is complete.
- The result does not depend on the cut, on the workers, or on the order in which parts of a phase
  run: it is that of one worker with a map for every key, byte for byte.
- This holds only for logs without transactions, because the state of a transaction crosses groups.
  So a part reports that it has seen a transactional batch, and its caller drops all results.
- A worker keeps the map of the latest job: loading it takes as long as rewriting some megabytes.
  Between index parts it keeps an empty map, which has the size that the keys need.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import assert_never

import numpy as np

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Ints
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.key_map.offset_map import OffsetMap
from cleaner.engine.key_rows import ConsumeRows, Listing
from cleaner.engine.outcome import RewriteTotals
from cleaner.engine.segment_scan import scan_segment
from cleaner.engine.shared import parts
from cleaner.engine.spilled.merge import merge_shard
from cleaner.engine.spilled.scratch import (
    AllOffsets,
    LiveOffsets,
    NoScratchSpaceError,
    Scratch,
    SpilledRows,
)
from cleaner.engine.spilled.spilling_map import SpillingMap
from cleaner.engine.two_pass.index_pass import index_segment
from cleaner.engine.two_pass.rewrite_pass import RewritePass
from cleaner.job import (
    CleanAbortedError,
    CleanedGroup,
    CleanJob,
    Damage,
    ForwardingControl,
    JobControl,
    SourceSegment,
)
from storage.env import Env
from storage.errors import DamagedSegmentError

WAIT_STEP_SECONDS = 0.02  # between two looks at the abort flag


class PartRunner:
    """Runs one part after the other, also of different jobs."""

    def __init__(self, env: Env, nap: Callable[[float], object]) -> None:
        self._env = env
        self._nap = nap
        self._loaded: tuple[str, OffsetMap, Ints] | None = None  # job id, map, state
        self._emptied: tuple[str, SpillingMap] | None = None  # job id, map of an index part

    def forget(self) -> None:
        """Free the maps of the latest job."""
        self._loaded = self._emptied = None

    def run(self, job: CleanJob, part: parts.Part, control: JobControl) -> parts.PartResult:
        """Run a part. Raises CleanAbortedError, OSError, StorageError."""
        if self._loaded is not None and self._loaded[0] != job.job_id:
            self._loaded = None
        if not isinstance(part, parts.IndexPart | parts.WaitPart):
            self._emptied = None
        try:
            match part:
                case parts.IndexPart():
                    return self._index(job, part, control)
                case parts.ListPart():
                    return self._list(job, part, control)
                case parts.MergePart():
                    return self._merge(job, part, control)
                case parts.RewritePart():
                    return self._rewrite(job, part, control)
                case parts.WaitPart():
                    return self._wait(part, control)
                case _:
                    assert_never(part)
        except NoScratchSpaceError as error:
            return parts.NoSpace(str(error))

    def _wait(self, part: parts.WaitPart, control: JobControl) -> parts.Waited:
        end = self._env.monotonic() + part.seconds
        while self._env.monotonic() < end:
            if control.aborted():
                raise CleanAbortedError
            self._nap(WAIT_STEP_SECONDS)
        return parts.Waited()

    # Keys

    def _index(self, job: CleanJob, part: parts.IndexPart, control: JobControl) -> parts.RowsResult:
        started = self._env.monotonic()
        with self._new_file(job, part, control) as scratch:
            rows = SpilledRows(scratch, part.shards)
            sources = _segments(job, part.segments)
            keys = self._empty_map(job, rows.add)
            context = CleanContext(self._env, job, control, key_map=keys)
            damaged: list[tuple[int, Damage]] = []
            for source in self._until_transaction(context, sources):
                try:
                    if index_segment(context, source, "map", 0, 1):
                        reason = "a batch has more keys than the buffers allow for"
                        raise NoScratchSpaceError(reason)
                except DamagedSegmentError as error:
                    damaged.append((source.base_offset, Damage.of(error)))
                    context.transactions.forget_open(context.state)
                context.release()
            keys.spill()
            self._emptied = (job.job_id, keys)
            file = parts.RowsFile(part.number, scratch.checksums, rows.pieces)
            return self._rows_result(context, file, damaged, started)

    def _empty_map(self, job: CleanJob, take: ConsumeRows) -> SpillingMap:
        """Return the map of the last index part: it has grown already."""
        emptied, self._emptied = self._emptied, None
        if emptied is not None and emptied[0] == job.job_id:
            emptied[1].reuse(take)
            return emptied[1]
        section = job.end_offset - job.first_dirty_offset
        return SpillingMap(job, job.dedupe_buffer_bytes, section, take)

    def _list(self, job: CleanJob, part: parts.ListPart, control: JobControl) -> parts.RowsResult:
        started = self._env.monotonic()
        with self._new_file(job, part, control) as scratch:
            rows = SpilledRows(scratch, part.shards)
            context = CleanContext(self._env, job, control, key_map=OffsetMap(0, 0, job.hash_key))
            listing = Listing(context, rows.add)
            damaged: list[tuple[int, Damage]] = []
            for source in self._until_transaction(context, _segments(job, part.segments)):
                try:
                    scan_segment(context, source, listing)
                except DamagedSegmentError as error:
                    damaged.append((source.base_offset, Damage.of(error)))
                context.release()
            listing.flush()
            file = parts.RowsFile(part.number, scratch.checksums, rows.pieces)
            return self._rows_result(context, file, damaged, started)

    @staticmethod
    def _until_transaction(
        context: CleanContext, sources: Sequence[SourceSegment]
    ) -> Iterator[SourceSegment]:
        """Yield the segments; end at the first transactional batch, and close the reader."""
        try:
            for source in sources:
                if context.state[fields.TRANSACTIONS_SEEN]:
                    break
                yield source
        finally:
            context.reader.close()

    def _rows_result(
        self,
        context: CleanContext,
        rows: parts.RowsFile,
        damaged: list[tuple[int, Damage]],
        started: float,
    ) -> parts.RowsResult:
        return parts.RowsResult(
            rows=rows,
            damaged=tuple(damaged),
            keyless_seen=bool(context.state[fields.KEYLESS_SEEN]),
            transactions_seen=bool(context.state[fields.TRANSACTIONS_SEEN]),
            bytes_read=context.reader.bytes_read,
            seconds=self._env.monotonic() - started,
        )

    def _merge(
        self, job: CleanJob, part: parts.MergePart, control: JobControl
    ) -> parts.MergePartResult:
        started = self._env.monotonic()
        with self._new_file(job, part, control) as scratch, ExitStack() as files:
            dirty, below = (
                [self._open_rows(files, job, control, file) for file in row_files]
                for row_files in (part.dirty, part.below)
            )
            live_offsets = LiveOffsets(scratch)
            keys, _ = merge_shard(job, 0, dirty, below, live_offsets)
            seconds = self._env.monotonic() - started
            file = parts.OffsetsFile(part.number, scratch.checksums, live_offsets.runs)
            return parts.MergePartResult(file, keys, seconds)

    @contextmanager
    def _new_file(
        self,
        job: CleanJob,
        part: parts.IndexPart | parts.ListPart | parts.MergePart,
        control: JobControl,
    ) -> Iterator[Scratch]:
        """Provide the part's file; remove it if the part fails."""
        scratch = Scratch(self._env, job, control, number=part.number, bytes_max=part.bytes_max)
        try:
            yield scratch
            scratch.keep()
        finally:
            scratch.close()

    def _open_rows(
        self, files: ExitStack, job: CleanJob, control: JobControl, file: parts.RowsFile
    ) -> SpilledRows:
        return SpilledRows(self._open(files, job, control, file), 1, file.pieces)

    def _open(
        self,
        files: ExitStack,
        job: CleanJob,
        control: JobControl,
        file: parts.RowsFile | parts.OffsetsFile,
    ) -> Scratch:
        """Open a file of an earlier part, if it has any content."""
        scratch = Scratch(self._env, job, control, number=file.number, existing=file.checksums)
        if file.pieces if isinstance(file, parts.RowsFile) else file.runs:
            scratch.open()
            files.callback(scratch.keep)
        return scratch

    # Groups

    def _rewrite(
        self, job: CleanJob, part: parts.RewritePart, control: JobControl
    ) -> parts.RewritePartResult:
        started = self._env.monotonic()
        collected = _Collected(control)
        with ExitStack() as files:
            if part.offsets is not None:
                live = [
                    LiveOffsets(self._open(files, job, control, file), file.runs)
                    for file in part.offsets
                ]
                context = CleanContext(
                    self._env,
                    job,
                    collected,
                    key_map=OffsetMap(0, 0, job.hash_key),
                    survivors=AllOffsets(
                        live,
                        end=job.groups[part.groups[-1]][-1].next_base_offset,
                        keyless_seen=part.keyless_seen,
                    ),
                )
            else:
                key_map = self._load(job, part, control)
                if key_map is None:
                    return parts.RewritePartResult(
                        False, 0, (), RewriteTotals(), part.damaged, False, 0, 0.0
                    )
                context = CleanContext(self._env, job, collected, key_map=key_map)
                context.state[fields.KEYLESS_SEEN] = part.keyless_seen
            rewrite = RewritePass(context, dict(part.damaged))
            try:
                rewrite.run([job.groups[place] for place in part.groups])
            finally:
                context.reader.close()
            return parts.RewritePartResult(
                fits=True,
                keys=context.map.entries,
                groups=tuple(collected.groups),
                totals=rewrite.totals,
                damaged=tuple(sorted(rewrite.damaged.items())),
                transactions_seen=bool(context.state[fields.TRANSACTIONS_SEEN]),
                bytes_read=context.reader.bytes_read,
                seconds=self._env.monotonic() - started,
            )

    def _load(
        self, job: CleanJob, part: parts.RewritePart, control: JobControl
    ) -> OffsetMap | None:
        """Return a map of all indexed keys; None if they do not fit."""
        if self._loaded is not None:
            _, key_map, state = self._loaded
            key_map.state[:] = state
            return key_map
        section = job.end_offset - job.first_dirty_offset
        key_map = OffsetMap(job.dedupe_buffer_bytes, section, job.hash_key)
        # The rows of a piece ascend: in a map that grows with them, they would crowd at its start.
        key_map.reserve(sum(file.rows for file in part.rows))
        with ExitStack() as files:
            for file in part.rows:
                rows = self._open_rows(files, job, control, file)
                for piece, count in rows.all():
                    columns = piece.reshape(count, SLOT_WORDS).T.copy()
                    offsets = columns[2].view(np.int64) - 1
                    if key_map.put(columns[0], columns[1], offsets) < count:
                        return None
                rows.free_buffer()
        self._loaded = (job.job_id, key_map, key_map.state.copy())
        return key_map


class _Collected(ForwardingControl):
    """The control of a part: it collects the groups instead of delivering them."""

    def __init__(self, control: JobControl) -> None:
        super().__init__(control)
        self.groups: list[CleanedGroup] = []

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        """Collect the groups."""
        self.groups.extend(groups)


def _segments(job: CleanJob, bases: Sequence[int]) -> list[SourceSegment]:
    requested = set(bases)
    return [source for group in job.groups for source in group if source.base_offset in requested]
