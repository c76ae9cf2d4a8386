"""A clean as if the map held every key, whatever its size: the keys in shares, one after the other.

Rules
- A share is a stretch of the upper half of the fingerprints' second words; the table goes by their
  first. A round indexes the dirty section for one share, and then notes the offset of each living
  record with a key of it, also of those below the dirty section.
- A share whose keys do not fit is begun anew as a smaller one.
- After the last round every record with a key has been asked for once, and the rewriting pass goes
  by what was noted. So what is left is what one round with a map for all keys would leave.
- Where the map surely holds all, or turns out to, there is one round, and nothing is noted.
- Cost: a round reads, unpacks and hashes the whole log once, and the rewriting pass does it again.
  Noted are 8 bytes for each living record, in a scratch file beside the sources.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from cleaner.engine.clean import check_job, report_of, run_clean
from cleaner.engine.context import CleanContext
from cleaner.engine.index_pass import index_section
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.layout import HEADER_BYTES, RECORD_BYTES_MIN, SHARES, Code
from cleaner.engine.kernels.verify import gather_living, gather_unpacked
from cleaner.engine.kernels.walk import count_records
from cleaner.engine.offset_map import slots_for
from cleaner.engine.outcome import CleanOutcome, Damage
from cleaner.engine.output_files import OutputFiles
from cleaner.engine.rewrite_pass import RewritePass
from cleaner.engine.source import offsets_end
from cleaner.engine.verify_living import LivingOffsets
from cleaner.job import CleanJob, CleanReport, JobControl, SourceSegment
from cleaner.verification import InvalidOutputError
from storage import filenames
from storage.batch import unpack_header
from storage.env import Env
from storage.errors import CorruptBatchError, DamagedSegmentError, DecompressionLimitError

# A share that did not fit is cut to this part of what would have just fitted.
_CAUTION: Final = 0.9
_WIDER_MAX: Final = 2  # a share is at most so many times as wide as the one before


def clean_in_rounds(
    env: Env, job: CleanJob, control: JobControl, outputs: OutputFiles
) -> tuple[CleanReport, int]:
    """The report of the job, whose outputs go to `outputs`, and how many rounds were begun.

    Raises InvalidOutputError where not even the smallest share of the keys fits, CleanAbortedError,
    OSError, and what `outputs` and `control` raise.
    """
    check_job(job)
    assert job.order is None
    section = job.end_offset - job.first_dirty_offset
    if job.expired_only or section <= slots_for(job.dedupe_buffer_bytes, section) * 9 // 10:
        return run_clean(env, job, control, one_pass=False, outputs=outputs), 1
    name = filenames.cleaned_name(job.groups[0][0].base_offset, filenames.SNAPSHOT, job.run_id)
    living = LivingOffsets(env, f"{job.directory}/{name}", control.write_bytes)
    try:
        rounds = _Rounds(env, job, control, outputs, living=living)
        return rounds.run(), rounds.begun
    finally:
        living.close()


class _Rounds:
    """All rounds of one job, and the rewriting pass."""

    def __init__(
        self,
        env: Env,
        job: CleanJob,
        control: JobControl,
        outputs: OutputFiles,
        *,
        living: LivingOffsets,
    ) -> None:
        self.begun = 0
        self._env = env
        self._job = job
        self._control = control
        self._outputs = outputs
        self._living = living
        self._keys = 0
        self._bytes_read = 0
        self._started = env.monotonic()
        self._below = [
            source
            for group in job.groups
            for source in group
            if source.base_offset < job.first_dirty_offset
        ]

    def run(self) -> CleanReport:
        """See clean_in_rounds."""
        first, width = 0, SHARES
        damaged: dict[int, Damage] = {}
        while first < SHARES:
            end = min(first + width, SHARES)
            context = CleanContext(self._env, self._job, self._control, self._outputs)
            context.state[fields.SHARE_FIRST] = first
            context.state[fields.SHARE_END] = end
            self.begun += 1
            try:
                damaged = index_section(context)
                if context.map_end < self._job.end_offset:
                    width = self._narrower(context, end - first)
                elif end - first == SHARES:
                    return self._rewrite(context, damaged)
                else:
                    self._note(context)
                    first, width = end, _wider(context, end - first)
            finally:
                context.reader.close()
            self._bytes_read += context.reader.bytes_read
            del context  # its map, before there is another
        nothing = replace(self._job, dedupe_buffer_bytes=0)
        context = CleanContext(
            self._env, nothing, self._control, self._outputs, survivors=self._living
        )
        return self._rewrite(context, damaged)

    def _narrower(self, context: CleanContext, width: int) -> int:
        """A share of which as many keys as fitted would have been all."""
        job = self._job
        if width == 1:
            reason = f"{job.dedupe_buffer_bytes} bytes hold too few keys to verify the outputs with"
            raise InvalidOutputError(job.directory, -1, reason)
        done = context.map_end - job.first_dirty_offset
        part = done / (job.end_offset - job.first_dirty_offset)
        return max(1, min(int(width * part * _CAUTION), width - 1))

    def _rewrite(self, context: CleanContext, damaged: dict[int, Damage]) -> CleanReport:
        mapped = self._env.monotonic()
        rewrite = RewritePass(context, damaged)
        try:
            rewrite.run(self._job.groups)
        finally:
            context.reader.close()
        self._keys += context.map.entries
        context.reader.bytes_read += self._bytes_read
        outcome = CleanOutcome(
            totals=rewrite.totals,
            damaged=damaged,
            map_seconds=mapped - self._started,
            rewrite_seconds=self._env.monotonic() - mapped,
            passes=self.begun + 1,
        )
        return replace(report_of(context, outcome), keys_indexed=self._keys)

    def _note(self, context: CleanContext) -> None:
        """Note the living records whose keys are in the map, and those below with keys like it."""
        state = context.state
        self._keys += context.map.entries
        self._living.add_map(context.map.table, int(state[fields.SLOTS]))
        for source in self._below:
            try:
                self._note_below(context, source)
            except DamagedSegmentError:
                continue  # left as it is, and reported, by the rewriting pass
        self._living.keyless_met |= bool(state[fields.KEYLESS_MET])

    def _note_below(self, context: CleanContext, source: SourceSegment) -> None:
        reader, state = context.reader, context.state
        state[fields.NEXT_OFFSET] = source.base_offset
        state[fields.SOURCE_END] = offsets_end(source)
        reader.open(source)
        while not reader.exhausted:
            reader.refill(context.charge_read)
            records = int(count_records(reader.buffer, reader.at, reader.end))
            records = min(records, (reader.end - reader.at) // RECORD_BYTES_MIN)
            living = np.empty(records, dtype=np.int64)
            code = int(Code.COMPRESSED)
            while code == Code.COMPRESSED:
                code, reader.at, found = gather_living(
                    reader.buffer, reader.at, reader.end, living, context.space
                )
                self._living.add(living[:found])
                if code == Code.COMPRESSED:
                    self._note_packed(context)
            if code == Code.DONE:
                return
            if code != Code.MORE:
                raise reader.stopped(code)

    def _note_packed(self, context: CleanContext) -> None:
        """The compressed batch that the reader stands at. Raises DamagedSegmentError."""
        reader = context.reader
        header = unpack_header(reader.buffer.data, reader.at)
        try:
            count = context.unpack(
                header.codec, reader.at + HEADER_BYTES, header.size_bytes - HEADER_BYTES, 0
            )
        except (CorruptBatchError, DecompressionLimitError) as error:
            raise reader.damaged(str(error)) from error
        living = np.empty(min(header.record_count, count // RECORD_BYTES_MIN), dtype=np.int64)
        code, found = gather_unpacked(
            context.unpacked, count, header.base_offset, header.record_count, living, context.space
        )
        if code != Code.DONE:
            raise reader.stopped(code)
        self._living.add(living[:found])
        context.state[fields.NEXT_OFFSET] = header.next_offset
        reader.at += header.size_bytes


def _wider(context: CleanContext, width: int) -> int:
    """The width of the next share, by how full the map got."""
    fill = context.map.entries / context.map.entries_max
    return max(1, int(width * min(_CAUTION / max(fill, _CAUTION / _WIDER_MAX), _WIDER_MAX)))
