"""The second pass: each group of neighbouring segments becomes one, without what is superseded.

Rules
- A group is finished as a whole or leaves nothing behind.
- A damaged segment is left as it is, and its group is cleaned around it: what stands before it, and
  what stands behind it, become groups of their own.
- Behind a damaged segment no tombstone or marker goes and none gets a delete horizon. What it
  deleted, or decided, may still stand in there.
- A single segment that would come out as it went in is not replaced. Where only what has expired
  is looked for, no group is.
- What was met of transactions is taken back when a group has to be begun anew.
"""

from collections import deque

import numpy as np

from cleaner.context import CleanContext, grown
from cleaner.job import CleanedGroup, SegmentHorizon, SourceSegment
from cleaner.kernels import fields
from cleaner.kernels.compile import Bytes
from cleaner.kernels.layout import (
    GROWN_BYTES_PER_RECORD,
    HEADER_BYTES,
    Code,
)
from cleaner.kernels.memory import SLACK_BYTES
from cleaner.kernels.remains import copy_whole, settle_empty, write_header
from cleaner.kernels.rewrite import filter_unpacked, pass_batch, rewrite_batches
from cleaner.outcome import RewriteTotals
from cleaner.output import CleanedOutput, OutputBuffers
from storage.batch import BatchHeader, unpack_header
from storage.compression import compress
from storage.errors import CorruptBatchError, DamagedSegmentError, DecompressionLimitError

# The output is written when it has grown to this share of the read buffer: large enough writes,
# and the buffer never runs full in the midst of one read.
_FLUSH_SHARE = 2
# A batch can grow by a new horizon in each of its smallest records: 18 bytes where 7 were.
_GROWTH = 3


class RewritePass:
    """Rewrites the groups of a job, oldest first, and hands each one over when it is done."""

    def __init__(self, context: CleanContext, damaged: dict[int, DamagedSegmentError]) -> None:
        """`damaged`: segments found damaged so far, by base offset; more are added."""
        self._context = context
        self.damaged = damaged
        self._levels = dict(context.job.compression_levels)
        self._buffers = OutputBuffers(self._output_bytes())
        self._scratch: Bytes = np.empty(len(context.reader.buffer), dtype=np.uint8)
        self._packed_from: Bytes = np.empty(SLACK_BYTES, dtype=np.uint8)
        self._begun = 0
        self._total = 0
        self._horizons: list[int] = []  # of the group's segments, as far as it is
        self.totals = RewriteTotals()

    def run(self) -> None:
        """Rewrite all groups. Raises CleanAbortedError, OSError."""
        context = self._context
        waiting = deque(
            tuple(source for source in group if source.base_offset < context.map_end)
            for group in context.job.groups
        )
        self._total = sum(source.size_bytes for group in waiting for source in group)
        while waiting:
            group = waiting.popleft()
            broken = next((i for i, s in enumerate(group) if s.base_offset in self.damaged), None)
            if broken == 0:
                self._begun += group[0].size_bytes
                self._tell_horizon(group[0].base_offset, group[0].size_bytes, -1)
                waiting.appendleft(group[1:])
            elif broken is not None:
                waiting.extendleft((group[broken:], group[:broken]))
            elif group:
                begun = self._begun
                met = context.space.open_producers.copy()
                met_count = int(context.state[fields.OPEN_COUNT])
                try:
                    self._rewrite_group(group)
                except _DamagedInError as error:
                    self.damaged[error.base_offset] = error.damage
                    self._begun = begun
                    context.restore_producers(met, met_count)
                    waiting.appendleft(group)
        context.reader.close()

    def _rewrite_group(self, group: tuple[SourceSegment, ...]) -> None:
        context = self._context
        job, state = context.job, context.state
        self._set_rules(group)
        output = CleanedOutput(
            context.env,
            job.directory,
            base_offset=group[0].base_offset,
            run_id=job.run_id,
            index_interval_bytes=job.index_interval_bytes,
            buffers=self._buffers,
            state=state,
            charge=context.charge_write,
        )
        try:
            for source in group:
                self._rewrite_segment(source, output)
            if self._is_unchanged(group, output):
                output.abandon()
                self._leave(group)
                return
            entries = context.transactions.kept_entries()
            cleaned = output.finish(group[-1].last_modified_ms, entries)
        except BaseException:
            output.abandon()
            raise
        size_bytes = cleaned.files[0].size_bytes if cleaned else 0
        result = CleanedGroup(
            source_base_offsets=tuple(source.base_offset for source in group),
            output=cleaned,
            bytes_before=sum(source.size_bytes for source in group),
            bytes_after=size_bytes,
            records_before=int(state[fields.RECORDS_IN]),
            records_after=int(state[fields.RECORDS_OUT]),
        )
        self._count(group, result, size_bytes)
        if cleaned is not None:
            earliest_ms = min((one for one in self._horizons if one >= 0), default=-1)
            self._tell_horizon(group[0].base_offset, size_bytes, earliest_ms)
        context.control.group_cleaned(result)

    def _set_rules(self, group: tuple[SourceSegment, ...]) -> None:
        """Say what may go from the group, and forget what was counted in the one before."""
        job, state = self._context.job, self._context.state
        state[fields.FIRST_COUNT : fields.END_COUNT] = 0
        self._context.space.aborted_kept.fill(0)
        self._horizons.clear()
        sound = not any(base < group[0].base_offset for base in self.damaged)
        stamps = sound and not job.expired_only and not job.latest_only
        state[fields.SOUND] = sound
        state[fields.DROP_EXPIRED] = sound and job.drop_expired_tombstones
        state[fields.HORIZON_MS] = job.now_ms + job.delete_retention_ms if stamps else -1

    def _leave(self, group: tuple[SourceSegment, ...]) -> None:
        """Count a group that stays as it is."""
        self._count(group, None, sum(source.size_bytes for source in group))
        for source, horizon_ms in zip(group, self._horizons, strict=True):
            self._tell_horizon(source.base_offset, source.size_bytes, horizon_ms)

    def _tell_horizon(self, base_offset: int, size_bytes: int, horizon_ms: int) -> None:
        self.totals.horizons.append(SegmentHorizon(base_offset, size_bytes, horizon_ms))

    def _is_unchanged(self, group: tuple[SourceSegment, ...], output: CleanedOutput) -> bool:
        changed = (
            self._context.state[fields.BATCHES_REBUILT]
            or self._context.state[fields.BATCHES_DROPPED]
        )
        alone = len(group) == 1 or self._context.job.expired_only
        size_bytes = sum(source.size_bytes for source in group)
        return alone and not changed and output.size_bytes == size_bytes

    def _count(
        self, group: tuple[SourceSegment, ...], result: CleanedGroup | None, bytes_after: int
    ) -> None:
        state, totals = self._context.state, self.totals
        totals.groups += result is not None
        totals.bytes_before += sum(source.size_bytes for source in group)
        totals.bytes_after += bytes_after
        totals.bytes_written += bytes_after if result else 0
        totals.records_before += int(state[fields.RECORDS_IN])
        totals.records_after += int(state[fields.RECORDS_OUT])
        totals.tombstones_kept += int(state[fields.TOMBSTONES_KEPT])
        totals.tombstones_removed += int(state[fields.TOMBSTONES_REMOVED])
        totals.keyless += int(state[fields.KEYLESS])
        totals.aborted += int(state[fields.RECORDS_ABORTED])
        totals.markers_removed += int(state[fields.MARKERS_REMOVED])

    def _rewrite_segment(self, source: SourceSegment, output: CleanedOutput) -> None:
        context = self._context
        try:
            self._rewrite_batches(source, output)
        except DamagedSegmentError as error:
            raise _DamagedInError(source.base_offset, error) from error
        # Behind damage nothing can go, whatever horizons there are.
        sound = context.state[fields.SOUND]
        self._horizons.append(int(context.state[fields.EARLIEST_MS]) if sound else -1)
        self._begun += source.size_bytes
        context.control.progress("rewrite", self._begun, self._total)

    def _rewrite_batches(self, source: SourceSegment, output: CleanedOutput) -> None:
        context = self._context
        reader, state = context.reader, context.state
        state[fields.NEXT_OFFSET] = source.base_offset
        state[fields.SOURCE_END] = source.next_base_offset
        state[fields.EARLIEST_MS] = -1
        reader.open(source)
        while not reader.exhausted:
            reader.refill(context.charge_read)
            self._fit_buffers(output)
            code = int(Code.DONE)
            while code != Code.MORE:
                code, reader.at = rewrite_batches(
                    reader.buffer, reader.at, reader.end,
                    self._buffers.batches, self._scratch, context.space,
                )  # fmt: skip
                self._go_on(code, output)
            if int(state[fields.WRITTEN]) * _FLUSH_SHARE > len(reader.buffer):
                output.flush()
            context.control.progress("rewrite", self._begun + reader.position, self._total)

    def _go_on(self, code: int, output: CleanedOutput) -> None:
        """Do what the kernel stopped for."""
        context = self._context
        if code == Code.COMPRESSED:
            self._rewrite_compressed(output)
        elif code == Code.OUTPUT_FULL:
            self._make_room(int(context.state[fields.NEEDED]), output)
        elif code == Code.NEXT_WINDOW:
            header = unpack_header(context.reader.buffer.data, context.reader.at)
            context.open_window(header.base_offset)
        elif code == Code.PRODUCERS_FULL:
            context.make_room_for_producers()
        elif code != Code.MORE:
            raise context.reader.stopped(code)

    def _output_bytes(self) -> int:
        read_bytes = len(self._context.reader.buffer)
        return read_bytes * _GROWTH + read_bytes // _FLUSH_SHARE

    def _fit_buffers(self, output: CleanedOutput) -> None:
        """Follow a read buffer that grew for an oversize batch."""
        if self._buffers.size_bytes < self._output_bytes():
            output.flush()
            self._buffers.resize(self._output_bytes())
        self._scratch = grown(self._scratch, len(self._context.reader.buffer))
        self._context.make_flags(len(self._context.reader.buffer))

    def _make_room(self, needed: int, output: CleanedOutput) -> None:
        output.flush()
        if self._buffers.size_bytes < needed:
            self._buffers.resize(needed)

    def _rewrite_compressed(self, output: CleanedOutput) -> None:
        """Filter the compressed batch that the reader stands at, which may have survivors."""
        context = self._context
        reader, state = context.reader, context.state
        header = unpack_header(reader.buffer.data, reader.at)
        records = self._filter(header)
        kept = int(state[fields.KEPT])
        self._reserve(header.size_bytes, output)
        if kept == 0:
            out = self._buffers.batches
            code = settle_empty(reader.buffer, reader.at, header.size_bytes, out, context.space)
            if code != Code.DONE:
                raise reader.stopped(code)
        elif kept == header.record_count and not state[fields.STAMP]:
            out = self._buffers.batches
            copy_whole(reader.buffer, reader.at, header.size_bytes, out, state)
        else:
            self._pack(header, records, output)
        pass_batch(reader.buffer, reader.at, state)
        reader.at += header.size_bytes

    def _filter(self, header: BatchHeader) -> memoryview:
        """The surviving records of the batch, unpacked; KEPT and STAMP in `state` tell of them."""
        context = self._context
        reader, state = context.reader, context.state
        try:
            count = context.unpack(
                header.codec,
                reader.at + HEADER_BYTES,
                header.size_bytes - HEADER_BYTES,
                header.record_count * GROWN_BYTES_PER_RECORD,
            )
        except (CorruptBatchError, DecompressionLimitError) as error:
            raise reader.damaged(str(error)) from error
        context.make_flags(count)
        self._packed_from = grown(self._packed_from, count)
        code = filter_unpacked(
            context.unpacked, count, reader.buffer, reader.at, self._packed_from, context.space
        )
        if code != Code.DONE:
            raise reader.stopped(code)
        survivors = context.unpacked if state[fields.STAMP] else self._packed_from
        return survivors.data[: int(state[fields.RECORD_BYTES])]

    def _pack(self, header: BatchHeader, records: memoryview, output: CleanedOutput) -> None:
        reader, state = self._context.reader, self._context.state
        packed = compress(header.codec, records, self._levels.get(header.codec))
        size = HEADER_BYTES + len(packed)
        self._reserve(size, output)
        out = self._buffers.batches
        written = int(state[fields.WRITTEN])
        out[written + HEADER_BYTES : written + size] = np.frombuffer(packed, dtype=np.uint8)
        write_header(reader.buffer, reader.at, out, written, size, state)
        state[fields.WRITTEN] = written + size
        state[fields.RECORDS_OUT] += state[fields.KEPT]
        state[fields.BATCHES_REBUILT] += 1

    def _reserve(self, size: int, output: CleanedOutput) -> None:
        if int(self._context.state[fields.WRITTEN]) + size > self._buffers.size_bytes:
            self._make_room(size, output)


class _DamagedInError(Exception):
    """A group cannot be finished because of this segment."""

    def __init__(self, base_offset: int, damage: DamagedSegmentError) -> None:
        super().__init__(str(damage))
        self.base_offset = base_offset
        self.damage = damage
