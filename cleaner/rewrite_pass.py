"""The second pass: each group of neighbouring segments becomes one, without what is superseded.

Rules
- A group is finished as a whole or leaves nothing behind.
- A damaged segment is left as it is, and its group is cleaned around it: what stands before it, and
  what stands behind it, become groups of their own.
- Behind a damaged segment no tombstone goes and none gets a delete horizon. What it deleted may
  still stand in there.
- A single segment that would come out as it went in is not replaced.
"""

from collections import deque

import numpy as np

from cleaner.context import CleanContext, grown
from cleaner.job import CleanedGroup, SourceSegment
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
        self._damaged = damaged
        self._levels = dict(context.job.compression_levels)
        self._buffers = OutputBuffers(self._output_bytes())
        self._scratch: Bytes = np.empty(len(context.reader.buffer), dtype=np.uint8)
        self._packed_from: Bytes = np.empty(SLACK_BYTES, dtype=np.uint8)
        self._begun = 0
        self._total = 0
        self.totals = RewriteTotals()

    def run(self) -> None:
        """Rewrite all groups. Raises CleanAbortedError, TransactionalBatchError, OSError."""
        context = self._context
        waiting = deque(
            tuple(source for source in group if source.base_offset < context.map_end)
            for group in context.job.groups
        )
        self._total = sum(source.size_bytes for group in waiting for source in group)
        while waiting:
            group = waiting.popleft()
            broken = next((i for i, s in enumerate(group) if s.base_offset in self._damaged), None)
            if broken is not None:
                self._begun += group[broken].size_bytes
                waiting.extendleft((group[broken + 1 :], group[:broken]))
            elif group:
                begun = self._begun
                try:
                    self._rewrite_group(group)
                except _DamagedInError as error:
                    self._damaged[error.base_offset] = error.damage
                    self._begun = begun
                    waiting.appendleft(group)
        context.reader.close()

    def _rewrite_group(self, group: tuple[SourceSegment, ...]) -> None:
        context = self._context
        job, state = context.job, context.state
        state[fields.FIRST_COUNT : fields.END_COUNT] = 0
        sound = not any(base < group[0].base_offset for base in self._damaged)
        state[fields.DROP_EXPIRED] = sound and job.drop_expired_tombstones
        state[fields.HORIZON_MS] = job.now_ms + job.delete_retention_ms if sound else -1
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
                self._count(group, None, group[0].size_bytes)
                return
            cleaned = output.finish(group[-1].last_modified_ms)
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
        context.control.group_cleaned(result)

    def _is_unchanged(self, group: tuple[SourceSegment, ...], output: CleanedOutput) -> bool:
        changed = (
            self._context.state[fields.BATCHES_REBUILT]
            or self._context.state[fields.BATCHES_DROPPED]
        )
        return len(group) == 1 and not changed and output.size_bytes == group[0].size_bytes

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

    def _rewrite_segment(self, source: SourceSegment, output: CleanedOutput) -> None:
        context = self._context
        try:
            self._rewrite_batches(source, output)
        except DamagedSegmentError as error:
            raise _DamagedInError(source.base_offset, error) from error
        self._begun += source.size_bytes
        context.control.progress("rewrite", self._begun, self._total)

    def _rewrite_batches(self, source: SourceSegment, output: CleanedOutput) -> None:
        context = self._context
        reader, state = context.reader, context.state
        state[fields.NEXT_OFFSET] = source.base_offset
        state[fields.SOURCE_END] = source.next_base_offset
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
