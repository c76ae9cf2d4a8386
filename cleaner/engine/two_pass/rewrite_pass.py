"""The second pass: merge each group of segments into one without superseded records.

Rules
- A group is finished completely or leaves no file.
- A damaged segment is left unchanged; the segments before and after it become groups of their own.
- group_accounting.py has the rules that apply to a whole group.
- When a group is restarted, the set of open transactions is restored.
- An expiry job reads the batch headers of a group first. A group without an expired horizon is left
  unchanged, and its records are not read.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cleaner.engine.batch_blocks import BatchBlocks
from cleaner.engine.context import CleanContext, grown, released
from cleaner.engine.header_scan import HeaderScanner
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.compile import Bytes
from cleaner.engine.kernels.layout import (
    GROWN_BYTES_PER_RECORD,
    HEADER_BYTES,
    Code,
)
from cleaner.engine.kernels.passes.rebuilt_batch import copy_whole, finish_empty, write_header
from cleaner.engine.kernels.passes.rewrite import count_batch, filter_unpacked, rewrite_batches
from cleaner.engine.outcome import RewriteTotals
from cleaner.engine.output import CleanedOutput, OutputBuffers
from cleaner.engine.source import offsets_end
from cleaner.engine.two_pass.group_accounting import GroupAccounting
from cleaner.job import UNKNOWN_HORIZON, CleanedGroup, Damage, SourceSegment
from storage.errors import CorruptBatchError, DamagedSegmentError, DecompressionLimitError
from storage.format.batch import BatchHeader, unpack_header
from storage.format.compression import compress

# Flush the output when it exceeds the read buffer divided by this: writes are large enough, and the
# buffer never fills up within one read.
_FLUSH_SHARE = 2
# A new horizon can make the smallest record grow from 7 to 18 bytes.
_GROWTH = 3


@dataclass(frozen=True, slots=True)
class LiveParts:
    """The parts of a segment that have surviving batches."""

    ranges: tuple[tuple[int, int], ...]  # (begin, end) in bytes of the file, ascending
    skipped_records: int
    skipped_blocks: int  # of one or more batches


class RewritePass:
    """Rewrites the groups of a job, oldest first, and delivers each one when it is done."""

    def __init__(
        self,
        context: CleanContext,
        damaged: dict[int, Damage],
        deliver: Callable[[CleanedGroup], None] | None = None,
        parts_of: Callable[[SourceSegment], LiveParts | None] | None = None,
        blocks: BatchBlocks | None = None,
    ) -> None:
        """`damaged`: damaged segments by base offset; more are added.

        `deliver` gets each finished group instead of the control; `blocks` are those of its output
        then. `parts_of` returns the parts of a segment that have to be read; None: all of it.
        """
        self._context = context
        self._deliver = deliver or (lambda group: context.control.groups_cleaned((group,)))
        self._parts_of = parts_of or (lambda _: None)
        self._blocks = blocks
        self.damaged = damaged
        self._levels = dict(context.job.compression_levels)
        self._buffers = OutputBuffers(self._output_bytes())
        self._scratch: Bytes = np.empty(len(context.reader.buffer), dtype=np.uint8)
        self._packed_from: Bytes = np.empty(SLACK_BYTES, dtype=np.uint8)
        self._begun = 0
        self._total = 0
        self.accounting = GroupAccounting(context, damaged)

    @property
    def totals(self) -> RewriteTotals:
        """Return the totals so far."""
        return self.accounting.totals

    def run(self, groups: Sequence[tuple[SourceSegment, ...]]) -> None:
        """Rewrite groups of the job, in order. Raises CleanAbortedError, OSError."""
        context = self._context
        waiting = deque(
            tuple(source for source in group if source.base_offset < context.map_end)
            for group in groups
        )
        self._total = self._begun + sum(source.size_bytes for group in waiting for source in group)
        while waiting:
            group = waiting.popleft()
            damaged_at = next(
                (i for i, s in enumerate(group) if s.base_offset in self.damaged), None
            )
            if damaged_at == 0:
                self._begun += group[0].size_bytes
                self.accounting.record_horizon(
                    group[0].base_offset, group[0].size_bytes, UNKNOWN_HORIZON
                )
                waiting.appendleft(group[1:])
            elif damaged_at is not None:
                waiting.extendleft((group[damaged_at:], group[:damaged_at]))
            elif group:
                begun = self._begun
                producers = context.space.open_producers.copy()
                producer_count = int(context.state[fields.OPEN_COUNT])
                try:
                    self._rewrite_group(group)
                except _DamagedInError as error:
                    self.damaged[error.base_offset] = error.damage
                    self._begun = begun
                    context.restore_producers(producers, producer_count)
                    waiting.appendleft(group)
        context.reader.close()

    def remove(self, group: tuple[SourceSegment, ...], records: int) -> None:
        """Deliver a group of the job of which nothing survives, without reading it."""
        self._context.check_aborted()
        self.accounting.begin(group)
        self._context.state[fields.RECORDS_IN] = records
        self._begun += sum(source.size_bytes for source in group)
        self._deliver(self.accounting.finish(group, None))

    def _rewrite_group(self, group: tuple[SourceSegment, ...]) -> None:
        context, accounting = self._context, self.accounting
        accounting.begin(group)
        if context.job.expired_only and self._nothing_expired(group):
            return
        output = accounting.open_output(group, self._buffers, blocks=self._blocks)
        try:
            for source in group:
                self._rewrite_segment(source, output)
            if accounting.is_unchanged(group, output.size_bytes):
                output.abandon()
                accounting.leave(group)
                return
            entries = context.transactions.kept_entries()
            cleaned = output.finish(group[-1].last_modified_ms, entries)
        except BaseException:
            output.abandon()
            raise
        self._deliver(accounting.finish(group, cleaned))

    def _nothing_expired(self, group: tuple[SourceSegment, ...]) -> bool:
        """Leave the group unchanged and return True if no batch header has an expired horizon."""
        context, state = self._context, self._context.state
        scanner = HeaderScanner(context.env, context.job.directory, context.charge_read)
        scans = []
        for source in group:
            scan = scanner.scan(source, context.job.now_ms)
            if scan is None:
                break
            scans.append(scan)
        context.reader.bytes_read += scanner.bytes_read
        if len(scans) < len(group):
            return False
        for source, scan in zip(group, scans, strict=True):
            state[fields.EARLIEST_MS] = scan.horizon_ms
            state[fields.RECORDS_IN] += scan.records
            state[fields.RECORDS_OUT] += scan.records
            self.accounting.close_segment()
            self._begun += source.size_bytes
        self.accounting.leave(group)
        context.control.progress("rewrite", self._begun, self._total)
        return True

    def _rewrite_segment(self, source: SourceSegment, output: CleanedOutput) -> None:
        context = self._context
        try:
            self._rewrite_batches(source, output)
        except DamagedSegmentError as error:
            raise _DamagedInError(source.base_offset, Damage.of(error)) from None
        self.accounting.close_segment()
        context.release()
        self._packed_from = released(self._packed_from)
        self._begun += source.size_bytes
        context.control.progress("rewrite", self._begun, self._total)

    def _rewrite_batches(self, source: SourceSegment, output: CleanedOutput) -> None:
        context = self._context
        reader, state = context.reader, context.state
        state[fields.NEXT_OFFSET] = source.base_offset
        state[fields.SOURCE_END] = offsets_end(source)
        state[fields.EARLIEST_MS] = -1
        parts = self._parts_of(source)
        reader.open(source, ranges=None if parts is None else parts.ranges)
        if parts is not None:
            state[fields.RECORDS_IN] += parts.skipped_records
            state[fields.BATCHES_DROPPED] += parts.skipped_blocks
        while not reader.exhausted:
            reader.refill(context.charge_read)
            self._fit_buffers(output)
            code = int(Code.DONE)
            while code != Code.MORE:
                code, reader.at = rewrite_batches(
                    reader.buffer, reader.at, reader.end,
                    self._buffers.batches, self._scratch, context.space,
                )  # fmt: skip
                self._handle_code(code, output)
            if int(state[fields.WRITTEN]) * _FLUSH_SHARE > len(reader.buffer):
                output.flush()
            context.control.progress("rewrite", self._begun + reader.position, self._total)

    def _handle_code(self, code: int, output: CleanedOutput) -> None:
        """Handle the code that the kernel returned."""
        context = self._context
        if code == Code.COMPRESSED:
            self._rewrite_compressed(output)
        elif code == Code.OUTPUT_FULL:
            self._make_room(int(context.state[fields.NEEDED]), output)
        elif code == Code.NEXT_WINDOW:
            header = unpack_header(context.reader.buffer.data, context.reader.at)
            context.open_window(header.base_offset, header.last_offset)
        elif code == Code.PRODUCERS_FULL:
            context.make_room_for_producers()
        elif code != Code.MORE:
            raise context.reader.stopped(code)

    def _output_bytes(self) -> int:
        read_bytes = len(self._context.reader.buffer)
        return read_bytes * _GROWTH + read_bytes // _FLUSH_SHARE

    def _fit_buffers(self, output: CleanedOutput) -> None:
        """Enlarge the buffers with a read buffer that grew for an oversize batch."""
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
        """Rewrite the compressed batch at the reader's position, which may have survivors."""
        context = self._context
        reader, state = context.reader, context.state
        header = unpack_header(reader.buffer.data, reader.at)
        records = self._filter(header)
        retained = int(state[fields.KEPT])
        self._reserve(header.size_bytes, output)
        if retained == 0:
            out = self._buffers.batches
            code = finish_empty(reader.buffer, reader.at, header.size_bytes, out, context.space)
            if code != Code.DONE:
                raise reader.stopped(code)
        elif retained == header.record_count and not state[fields.SET_HORIZON]:
            out = self._buffers.batches
            copy_whole(reader.buffer, reader.at, header.size_bytes, out, state)
        else:
            self._pack(header, records, output)
        count_batch(reader.buffer, reader.at, state)
        reader.at += header.size_bytes

    def _filter(self, header: BatchHeader) -> memoryview:
        """Return the surviving records, uncompressed; sets KEPT and SET_HORIZON in `state`."""
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
        survivors = context.unpacked if state[fields.SET_HORIZON] else self._packed_from
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
    """A group cannot be finished because this segment is damaged."""

    def __init__(self, base_offset: int, damage: Damage) -> None:
        super().__init__(damage.reason)
        self.base_offset = base_offset
        self.damage = damage
