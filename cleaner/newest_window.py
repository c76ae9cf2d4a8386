"""The memory in which windows are cleaned, and what the kernel cannot do itself.

The kernel (kernels/newest.py) stops for: unpacking and packing, more room, a fuller hand, and
whatever is not for one pass. Each stop is answered here and the kernel called again.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from cleaner.context import CleanContext, grown
from cleaner.held import HeldOutput
from cleaner.kernels import fields
from cleaner.kernels.layout import (
    CHUNK_KEYS,
    GROWN_BYTES_PER_RECORD,
    HEADER_BYTES,
    RECORD_BYTES_MIN,
    Code,
)
from cleaner.kernels.memory import SLACK_BYTES, load_be64
from cleaner.kernels.newest import (
    ARENA,
    FLUSH,
    GATHERED,
    HELD_FROM,
    HOLD_FULL,
    MORE_RECORDS,
    MORE_ROOM,
    MORE_SLOTS,
    NEXT,
    PACK,
    POSITION,
    RECORDS_AT,
    RECORDS_END,
    ROW_WORDS,
    TOP,
    WALK_WORDS,
    Window,
    begin_chunk,
    clean_window,
    list_batches,
)
from cleaner.kernels.remains import write_header
from cleaner.windows import WINDOW_BYTES, NoWindowsError
from storage.batch import BatchHeader, unpack_header
from storage.compression import compress, decompress
from storage.env import File
from storage.errors import CorruptBatchError, DecompressionLimitError

# A batch of more records is left to two passes, which need a byte for each and not twenty-five.
RECORDS_MAX: Final = 1 << 18
ARENA_BYTES: Final = 1 << 20


class WindowCleaner:
    """One window after the other, of one group after the other."""

    def __init__(self, context: CleanContext, held: HeldOutput) -> None:
        self._context = context
        self._held = held
        self._levels = dict(context.job.compression_levels)
        self._space = context.space
        self._base_offset = 0  # of the group
        self._path = ""
        self._waiting: bytes | None = None  # unpacked, and no room in the arena yet
        window_bytes = min(WINDOW_BYTES, context.job.read_buffer_bytes)
        self._window = Window(
            buf=np.empty(window_bytes + SLACK_BYTES, dtype=np.uint8),
            rows=np.empty((window_bytes // HEADER_BYTES + 1) * ROW_WORDS, dtype=np.int64),
            walk=np.zeros(WALK_WORDS, dtype=np.int64),
            arena=np.empty(ARENA_BYTES + SLACK_BYTES, dtype=np.uint8),
            kept=np.empty(SLACK_BYTES, dtype=np.uint8),
            scratch=np.empty(window_bytes + SLACK_BYTES, dtype=np.uint8),
            out=np.empty(window_bytes + SLACK_BYTES, dtype=np.uint8),
            hold=held.memory,
        )
        self._size_bytes = 0  # of what is in the window
        self._make_space(CHUNK_KEYS)

    @property
    def held_from(self) -> int:
        """Where in the held memory the group's survivors begin."""
        return int(self._window.walk[HELD_FROM])

    def begin_group(self, base_offset: int) -> None:
        """The next windows belong to another group; nothing of it is held yet."""
        self._base_offset = base_offset
        self._window.walk[HELD_FROM] = len(self._held.memory)

    def read(self, file: File, begin: int, end: int, charge: Callable[[int], None]) -> None:
        """Fill the window with `[begin, end)` of a segment. Raises NoWindowsError, OSError."""
        self._path = file.path
        self._size_bytes = end - begin
        window = self._window
        if len(window.buf) < self._size_bytes + SLACK_BYTES:
            self._window = window._replace(
                buf=grown(window.buf, self._size_bytes),
                scratch=grown(window.scratch, self._size_bytes),
                rows=np.empty((self._size_bytes // HEADER_BYTES + 1) * ROW_WORDS, dtype=np.int64),
            )
        charge(self._size_bytes)
        view = self._window.buf.data[: self._size_bytes]
        if file.pread_into(view, begin) != self._size_bytes:
            raise NoWindowsError(self._path)

    def clean(self) -> int:
        """Decide the window's batches and hold what survives -> the base offset of the first.

        Raises NoWindowsError, CleanAbortedError, OSError.
        """
        code = list_batches(self._window, self._size_bytes, self._context.state)
        if code != Code.DONE:
            raise NoWindowsError(self._path)
        begin_chunk(self._window.walk, len(self._space.ones))
        while True:
            code = clean_window(self._window, self._space)
            if code == Code.DONE:
                return int(load_be64(self._window.buf, 0))
            self._answer(code)

    def _answer(self, code: int) -> None:
        """Do what the kernel stopped for."""
        if code == Code.COMPRESSED:
            self._unpack()
        elif code == PACK:
            self._pack()
        elif code == HOLD_FULL:
            self._spill()
        elif code == MORE_SLOTS:
            self._context.map.reserve(len(self._space.ones) - int(self._window.walk[TOP]))
        elif code == MORE_RECORDS:
            count = self._header(int(self._window.walk[GATHERED]) - 1).record_count
            if count > RECORDS_MAX:
                raise NoWindowsError(self._path)
            self._make_space(count)
        elif code == MORE_ROOM:
            header = self._header(int(self._window.walk[GATHERED]) - 1)
            self._make_room(header.size_bytes, header.record_count)
        else:
            raise NoWindowsError(self._path)

    def _header(self, index: int) -> BatchHeader:
        position = int(self._window.rows[index * ROW_WORDS + POSITION])
        return unpack_header(self._window.buf.data, position)

    def _make_space(self, count: int) -> None:
        """Have chunks of `count` records; the present one is empty."""
        self._space = self._space._replace(
            ones=np.empty(count, dtype=np.uint64),
            twos=np.empty(count, dtype=np.uint64),
            offsets=np.empty(count, dtype=np.int64),
            keep=np.empty(count + 8, dtype=np.uint8),
        )
        self._window.walk[TOP] = count

    def _make_room(self, size_bytes: int, count: int) -> None:
        """Have room for the output of a batch; there is none yet."""
        wanted = size_bytes + count * GROWN_BYTES_PER_RECORD + SLACK_BYTES
        if count * RECORD_BYTES_MIN > self._context.job.decompressed_batch_bytes:
            raise NoWindowsError(self._path)
        self._window = self._window._replace(out=np.empty(wanted, dtype=np.uint8))

    def _unpack(self) -> None:
        """Unpack the batch that is to be gathered next, as soon as the arena has room for it."""
        walk = self._window.walk
        index = int(walk[GATHERED]) - 1
        header = self._header(index)
        data, self._waiting = self._waiting, None
        if data is None:
            data = self._unpacked(index, header)
        at = int(walk[ARENA])
        if at > 0 and at + len(data) + SLACK_BYTES > len(self._window.arena):
            self._waiting = data
            walk[FLUSH] = 1
            return
        grown_bytes = min(header.record_count, len(data) // RECORD_BYTES_MIN)
        restamped_bytes = len(data) + grown_bytes * GROWN_BYTES_PER_RECORD
        window = self._window._replace(
            arena=grown(self._window.arena, len(data)) if at == 0 else self._window.arena,
            kept=grown(self._window.kept, len(data)),
            scratch=grown(self._window.scratch, restamped_bytes),
        )
        window.arena[at : at + len(data)] = np.frombuffer(data, dtype=np.uint8)
        walk[ARENA] = at + len(data) + SLACK_BYTES
        window.rows[index * ROW_WORDS + RECORDS_AT] = at
        window.rows[index * ROW_WORDS + RECORDS_END] = at + len(data)
        self._window = window

    def _unpacked(self, index: int, header: BatchHeader) -> bytes:
        position = int(self._window.rows[index * ROW_WORDS + POSITION])
        packed = self._window.buf.data[position + HEADER_BYTES : position + header.size_bytes]
        try:
            data = decompress(header.codec, packed, self._context.job.decompressed_batch_bytes)
        except (CorruptBatchError, DecompressionLimitError) as error:
            raise NoWindowsError(self._path) from error
        if not data:
            raise NoWindowsError(self._path)
        return data

    def _pack(self) -> None:
        """Compress the survivors of the batch that is written next, and finish it."""
        window, state, walk = self._window, self._context.state, self._window.walk
        header = self._header(int(walk[NEXT]))
        survivors = window.scratch if state[fields.STAMP] else window.kept
        records = survivors.data[: int(state[fields.RECORD_BYTES])]
        packed = compress(header.codec, records, self._levels.get(header.codec))
        size = HEADER_BYTES + len(packed)
        written = int(state[fields.WRITTEN])
        out = grown(window.out, written + size)
        if out is not window.out:
            out[:written] = window.out[:written]
            self._window = window._replace(out=out)
        out[written + HEADER_BYTES : written + size] = np.frombuffer(packed, dtype=np.uint8)
        position = int(window.rows[int(walk[NEXT]) * ROW_WORDS + POSITION])
        write_header(window.buf, position, out, written, size, state)
        state[fields.WRITTEN] = written + size
        state[fields.RECORDS_OUT] += state[fields.KEPT]
        state[fields.BATCHES_REBUILT] += 1
        state[fields.RECORDS_IN] += header.record_count
        walk[NEXT] += 1

    def _spill(self) -> None:
        """Make room for the chunk's output; what does not fit into all of the memory goes too."""
        walk, state = self._window.walk, self._context.state
        charge = self._context.charge_write
        held_from, written = int(walk[HELD_FROM]), int(state[fields.WRITTEN])
        self._held.spill(self._held.memory[held_from:], self._base_offset, charge)
        walk[HELD_FROM] = len(self._held.memory)
        if written > len(self._held.memory):
            self._held.spill(self._window.out[:written], self._base_offset, charge)
            state[fields.WRITTEN] = 0
