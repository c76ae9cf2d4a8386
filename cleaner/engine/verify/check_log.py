"""Check the closed segments of a log: recompute what is alive, and compare.

Rules
- Liveness is decided from the segments alone (live_records.py), not from key indexes or from what
  the cleaner has stored.
- The log is read twice: for its keys, then for the records of each segment. Every byte is charged
  to the budgets of the cleaner.
- Memory is that of a clean, for any number of keys.
- A key index is compared by a checksum of its rows, piece by piece. It may have rows below the log
  start offset, which no clean reads. A wrong or damaged one is removed: a clean by it could remove
  a live record.
- The offset index of a segment leads a consumer to its records, and is compared with the batches.
- The log may lose segments at its front meanwhile. Nothing else may change.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.selective.key_index import (
    IndexRows,
    KeyIndex,
    MissingIndexError,
    StaleIndexError,
    UnusableIndexError,
    read_index,
    remove_index_of,
)
from cleaner.engine.selective.packed_rows import SUM_VALUES, pack_rows, sum_of_rows
from cleaner.engine.spilled.scratch import DamagedScratchError, LiveOffsets, Scratch
from cleaner.engine.verify.contents import RangeDigests, Records, scan_records
from cleaner.engine.verify.live_records import KeySections
from cleaner.engine.verify.offset_index_check import OffsetIndexCheck
from cleaner.job import CleanJob, Damage, JobControl, RangeDigest, SourceSegment
from cleaner.verification import IndexState, LogCheck, LogCheckRequest, SegmentCheck
from storage.env import Env
from storage.errors import DamagedSegmentError
from storage.format import filenames
from storage.format.index import CorruptIndexError, OffsetIndex


def check_log(env: Env, job: CleanJob, request: LogCheckRequest, control: JobControl) -> LogCheck:
    """Check the segments of a job that would clean the whole log.

    Raises NoScratchSpaceError, TransactionIndexError, CleanAbortedError, OSError.
    """
    scratch = Scratch(env, job, control, bytes_max=job.spill_bytes_max)
    try:
        return _LogCheck(env, job, request, control, scratch).run()
    finally:
        scratch.close()


class _LogCheck:
    """One check."""

    def __init__(
        self,
        env: Env,
        job: CleanJob,
        request: LogCheckRequest,
        control: JobControl,
        scratch: Scratch,
    ) -> None:
        self._env = env
        self._job = job
        self._request = request
        self._control = control
        self._sources = [source for group in job.groups for source in group]
        self._begun_bytes = 0
        self._total_bytes = sum(source.size_bytes for source in self._sources)
        ends = (request.first_dirty_offset, request.digest_end)
        self._sections = KeySections(env, job, control, scratch, ends)

    def run(self) -> LogCheck:
        """Run the check."""
        started = self._env.monotonic()
        request, sections, end = self._request, self._sections, self._job.end_offset
        sections.read()
        live, keys = sections.live_below(end)
        stored = self._known_ranges()
        live_then = sections.live_below(request.digest_end)[0] if stored else None
        cleaned_keys = None
        if request.first_dirty_offset in sections.ends and not sections.damaged:
            _, cleaned_keys = sections.live_below(request.first_dirty_offset)
        context = self._context(live)
        earlier = RangeDigests([(first, stop) for first, stop, _, _ in stored])
        start = self._job.log_start_offset
        digests = RangeDigests(
            [(max(s.base_offset, start), s.next_base_offset) for s in self._sources]
        )
        context_then = None if live_then is None else self._context(live_then)
        tally = _Tally(context, context_then, digests, earlier)
        try:
            segments = tuple(self._check(context, tally, source) for source in self._sources)
        finally:
            context.reader.close()
        gone_below = max((s.next_base_offset for s in segments if s.is_gone), default=0)
        compared = [
            (then, now)
            for then, now in zip(stored, earlier.digests(), strict=True)
            if then.first_offset >= gone_below
        ]
        return LogCheck(
            end_offset=end,
            segments=segments,
            keys=keys,
            uncleaned=self._uncleaned(segments, cleaned_keys),
            digests=tuple(d for d in digests.digests() if d.first_offset >= gone_below),
            changed=tuple(now for then, now in compared if now != then),
            compared=len(compared),
            bytes_read=sections.bytes_read + context.reader.bytes_read,
            seconds=self._env.monotonic() - started,
        )

    def _context(self, live: LiveOffsets) -> CleanContext:
        job = replace(self._job, dedupe_buffer_bytes=0)
        return CleanContext(self._env, job, self._control, survivors=live)

    def _known_ranges(self) -> list[RangeDigest]:
        """Return the requested ranges that can be compared: those that are read as a whole."""
        request = self._request
        if request.digest_end not in self._sections.ends:
            return []
        first_offset = max(self._job.log_start_offset, self._sources[0].base_offset)
        damaged = [
            (source.base_offset, source.next_base_offset)
            for source in self._sources
            if source.base_offset in self._sections.damaged
        ]
        return [
            digest
            for digest in request.digests
            if digest.first_offset >= first_offset
            and not any(f < digest.end_offset and digest.first_offset < e for f, e in damaged)
        ]

    def _uncleaned(self, segments: Sequence[SegmentCheck], keys: int | None) -> int | None:
        """Return how many records below the first dirty offset should not be there."""
        if keys is None:
            return None
        first_dirty_offset = self._request.first_dirty_offset
        below = [s for s in segments if s.base_offset < first_dirty_offset]
        if any(segment.is_gone for segment in below):
            return None
        return sum(segment.records for segment in below) - keys

    def _check(self, context: CleanContext, tally: "_Tally", source: SourceSegment) -> SegmentCheck:
        tally.begin(source)
        damage, uncommitted = self._sections.damaged.get(source.base_offset), (0, 0)
        offset_index, misplaced = self._offset_index(source), 0
        try:
            note = None if offset_index is None else offset_index.note
            uncommitted = scan_records(context, source, tally.add, note)
        except DamagedSegmentError as error:
            damage = damage or Damage.of(error)
            context.release()
        else:
            misplaced = 0 if offset_index is None else offset_index.wrong
        is_gone = context.reader.is_gone
        index = IndexState.MISSING
        if not is_gone:
            index = self._check_index(tally, source, is_damaged=damage is not None)
            if index in {IndexState.WRONG, IndexState.DAMAGED}:
                remove_index_of(self._env, self._job, source)
        self._begun_bytes += source.size_bytes
        self._control.progress("compare", self._begun_bytes, self._total_bytes)
        return SegmentCheck(
            base_offset=source.base_offset,
            next_base_offset=source.next_base_offset,
            size_bytes=source.size_bytes,
            records=tally.records,
            live=tally.live,
            tombstones=tally.tombstones,
            keyless=uncommitted[0],
            aborted=uncommitted[1],
            live_bytes=tally.live_bytes_of(source),
            index=index,
            misplaced=0 if is_gone else misplaced,
            damage=damage,
            is_gone=is_gone,
        )

    def _offset_index(self, source: SourceSegment) -> OffsetIndexCheck | None:
        """Return a check of the offset index; None without a readable one, which is rebuilt."""
        name = filenames.file_name(source.base_offset, filenames.INDEX)
        path = f"{self._job.directory}/{name}"
        try:
            raw = self._env.read_file(path)
            self._control.read_bytes(len(raw))
            index = OffsetIndex.from_bytes(raw, path, source.size_bytes)
        except (FileNotFoundError, CorruptIndexError):
            return None
        return OffsetIndexCheck(index, source.base_offset)

    def _check_index(
        self, tally: "_Tally", source: SourceSegment, *, is_damaged: bool
    ) -> IndexState:
        """Compare the key index of a segment with its records."""
        env, job, control = self._env, self._job, self._control
        try:
            index = read_index(env, job, control, source)
        except MissingIndexError:
            return IndexState.MISSING
        except StaleIndexError:
            return IndexState.STALE
        except UnusableIndexError:
            return IndexState.DAMAGED
        if index.has_transactions or is_damaged:
            return IndexState.UNUSED
        try:
            total = self._sum_of(index, source)
        except DamagedScratchError:
            return IndexState.DAMAGED
        except FileNotFoundError:  # retention removed it
            return IndexState.MISSING
        is_right = total == tally.sum_of_rows and index.records == tally.records
        if source.base_offset < self._job.log_start_offset:
            # Which of the records without a row are still in the log is not known.
            is_right = total == tally.sum_of_rows or index.superseded_sum > 0
        return IndexState.CURRENT if is_right else IndexState.WRONG

    def _sum_of(self, index: KeyIndex, source: SourceSegment) -> int:
        """Return the checksum of the records from the log start offset on."""
        first = np.uint64(self._job.log_start_offset + 1)
        rows_of_index = IndexRows(self._env, self._job, self._control, index, shards=1)
        total = index.superseded_sum
        for rows, _ in rows_of_index.of(0):
            by_row = rows.reshape(-1, SLOT_WORDS)
            by_row = by_row[by_row[:, 2] >= first]
            total += sum_of_rows(pack_rows(by_row.reshape(-1), source.base_offset))
        return total % SUM_VALUES


class _Tally:
    """Adds up the records of a segment."""

    def __init__(
        self,
        live_now: CleanContext,
        live_then: CleanContext | None,
        now: RangeDigests,
        earlier: RangeDigests,
    ) -> None:
        """`live_then` says which records are those of the digests `earlier`."""
        self._live_now = live_now
        self._live_then = live_then
        self._now = now
        self._earlier = earlier
        self._base_offset = 0
        self._bytes = self._live_bytes = 0
        self.records = self.live = self.tombstones = self.sum_of_rows = 0

    def begin(self, source: SourceSegment) -> None:
        """Begin a segment."""
        self._base_offset = source.base_offset
        self._bytes = self._live_bytes = 0
        self.records = self.live = self.tombstones = self.sum_of_rows = 0

    def add(self, records: Records) -> None:
        """Add some records of the segment."""
        offsets, have_value = records.offsets, records.have_value
        is_live = self._live_now.survive(offsets)
        self.records += len(offsets)
        self.live += int(is_live.sum())
        self.tombstones += int((is_live & ~have_value).sum())
        self._bytes += int(records.sizes.sum())
        self._live_bytes += int(records.sizes[is_live].sum())
        rows_sum = sum_of_rows(pack_rows(records.rows, self._base_offset))
        self.sum_of_rows = (self.sum_of_rows + rows_sum) % SUM_VALUES
        self._now.add(records, is_live & have_value)
        if self._live_then is not None:
            self._earlier.add(records, self._live_then.survive(offsets) & have_value)

    def live_bytes_of(self, source: SourceSegment) -> int:
        """Return the live records' share of the segment's bytes; they may be compressed."""
        return source.size_bytes * self._live_bytes // self._bytes if self._bytes else 0
