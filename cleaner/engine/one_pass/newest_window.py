"""Clean windows: their memory, and the operations that the kernel cannot do itself.

The kernel (passes/newest_first.py) returns for compression, for more memory, and for batches that
need two passes. This module handles the code and calls the kernel again.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from cleaner.engine.context import CleanContext, grown
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.lz4 import packer_address, unpacker_address
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.layout import (
    ATTR_CODEC,
    CHUNK_KEYS,
    CODEC_POSITION,
    GROWN_BYTES_PER_RECORD,
    HEADER_BYTES,
    RECORD_BYTES_MIN,
    Code,
)
from cleaner.engine.kernels.passes.newest_first import (
    ARENA,
    BOUND,
    BUFFER_FULL,
    BUFFERED_FROM,
    CHUNK_BYTES,
    CHUNK_END,
    FIRST_BASE,
    FLUSH,
    FRAME_BYTES_MAX,
    GATHERED,
    KEPT_AT,
    KEPT_END,
    LISTED,
    LZ4_PACKER,
    LZ4_UNPACKER,
    MORE_RECORDS,
    MORE_ROOM,
    MORE_SLOTS,
    NEXT,
    PACK_CHUNK,
    PACK_PENDING,
    PACKED_AT,
    PACKED_END,
    POSITION,
    RECORDS_AT,
    RECORDS_END,
    ROW_WORDS,
    SIZE,
    TOP,
    UNPACK_LIMIT,
    WALK_WORDS,
    Window,
    clean_window,
)
from cleaner.engine.one_pass.buffered_output import BufferedOutput
from cleaner.engine.one_pass.windows import WINDOW_BYTES, NoWindowsError
from storage.env import File
from storage.errors import CorruptBatchError, DecompressionLimitError
from storage.format.batch import BatchHeader, unpack_header
from storage.format.compression import (
    LZ4,
    LZ4_LEVEL_DEFAULT,
    compress,
    decompress,
    decompress_zstd_frame,
)

# Batches with more records are left to the two passes, which need 1 byte per record instead of 25.
RECORDS_MAX: Final = 1 << 18
ARENA_BYTES: Final = 1 << 20
# A new horizon can make the smallest record grow from 7 to 18 bytes.
_GROWTH: Final = 3


class WindowCleaner:
    """One window after the other, of one group after the other."""

    def __init__(self, context: CleanContext, buffered: BufferedOutput) -> None:
        self._context = context
        self._buffered = buffered
        self._levels = dict(context.job.compression_levels)
        self._space = context.space
        self._path = ""
        # A batch that waits for room in the arena: its row and its unpacked records.
        self._waiting: tuple[int, bytes | memoryview] = (-1, b"")
        window_bytes = min(WINDOW_BYTES, context.job.read_buffer_bytes)
        self._window = Window(
            buf=np.empty(window_bytes + SLACK_BYTES, dtype=np.uint8),
            rows=np.empty((window_bytes // HEADER_BYTES + 1) * ROW_WORDS, dtype=np.int64),
            walk=np.zeros(WALK_WORDS, dtype=np.int64),
            arena=np.empty(ARENA_BYTES + SLACK_BYTES, dtype=np.uint8),
            kept=np.empty(ARENA_BYTES * _GROWTH + SLACK_BYTES, dtype=np.uint8),
            packed=np.empty(ARENA_BYTES, dtype=np.uint8),
            scratch=np.empty(max(window_bytes, ARENA_BYTES) + SLACK_BYTES, dtype=np.uint8),
            out=np.empty(window_bytes + SLACK_BYTES, dtype=np.uint8),
            buffered=buffered.memory,
        )
        self._size_bytes = 0  # of what is in the window
        walk = self._window.walk
        walk[UNPACK_LIMIT] = context.job.decompressed_batch_bytes
        walk[LZ4_UNPACKER] = unpacker_address()
        is_fast = self._levels.get(LZ4, LZ4_LEVEL_DEFAULT) == LZ4_LEVEL_DEFAULT
        walk[LZ4_PACKER] = packer_address() if is_fast else 0
        self._make_space(CHUNK_KEYS)

    @property
    def buffered_from(self) -> int:
        """Return the start of the group's survivors in the buffer."""
        return int(self._window.walk[BUFFERED_FROM])

    def begin_group(self) -> None:
        """Start a group, whose buffer is empty."""
        self._buffer_in_memory()

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
        """Clean the window's batches and buffer the survivors; return its first base offset.

        Raises NoWindowsError, CleanAbortedError, OSError.
        """
        code = clean_window(self._window, self._size_bytes, self._space)
        while code != Code.DONE:
            self._handle_code(code)
            code = clean_window(self._window, 0, self._space)
        return int(self._window.walk[FIRST_BASE])

    def _handle_code(self, code: int) -> None:
        """Handle the code that the kernel returned."""
        if code == Code.COMPRESSED:
            self._unpack()
        elif code == PACK_CHUNK:
            self._pack_chunk()
        elif code == BUFFER_FULL:
            self._swap_piece()
        elif code == MORE_SLOTS:
            self._context.map.reserve(len(self._space.lows) - int(self._window.walk[TOP]))
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
        """Make room for chunks of `count` records; the present one is empty."""
        self._space = self._space._replace(
            lows=np.empty(count, dtype=np.uint64),
            highs=np.empty(count, dtype=np.uint64),
            offsets=np.empty(count, dtype=np.int64),
            keep=np.empty(count + 8, dtype=np.uint8),
        )
        self._window.walk[TOP] = count

    def _make_room(self, size_bytes: int, count: int) -> None:
        """Make room for the output of a batch; there is no output yet."""
        requested = size_bytes + count * GROWN_BYTES_PER_RECORD + SLACK_BYTES
        if count * RECORD_BYTES_MIN > self._context.job.decompressed_batch_bytes:
            raise NoWindowsError(self._path)
        self._window = self._window._replace(out=np.empty(requested, dtype=np.uint8))

    def _unpack(self) -> None:
        """Unpack the next batch, and further ones while the arena has room."""
        walk, cells = self._window.walk, self._window.rows.data
        first = (int(walk[GATHERED]) - 1) * ROW_WORDS
        for row in range(first, (int(walk[LISTED]) - 1) * ROW_WORDS, -ROW_WORDS):
            if cells[row + RECORDS_END] != 0 or cells[row + BOUND] < 0:
                continue
            waiting, data = self._waiting
            if waiting != row:
                data = self._unpacked(row)
            begin = int(walk[ARENA])
            end = begin + len(data)
            if end + SLACK_BYTES > len(self._window.arena):
                if begin > 0:
                    self._waiting = (row, data)
                    walk[FLUSH] = row == first
                    return
                self._make_arena(len(data))
            self._waiting = (-1, b"")
            self._window.arena.data[begin:end] = data
            walk[ARENA] = end + SLACK_BYTES
            cells[row + RECORDS_AT] = begin
            cells[row + RECORDS_END] = end

    def _unpacked(self, row: int) -> bytes | memoryview:
        cells, view = self._window.rows.data, self._window.buf.data
        position = cells[row + POSITION]
        packed = view[position + HEADER_BYTES : position + cells[row + SIZE]]
        bound = cells[row + BOUND]
        data: bytes | memoryview
        try:
            if bound > 0:
                data = decompress_zstd_frame(packed, bound)
            else:
                codec = view[position + CODEC_POSITION] & ATTR_CODEC
                data = decompress(codec, packed, self._context.job.decompressed_batch_bytes)
        except (CorruptBatchError, DecompressionLimitError) as error:
            raise NoWindowsError(self._path) from error
        if not data:
            raise NoWindowsError(self._path)
        return data

    def _make_arena(self, size_bytes: int) -> None:
        """Make room for a batch that unpacks to `size_bytes`; the arena is empty.

        `kept` gets room for a new horizon in each of its smallest records.
        """
        arena = grown(self._window.arena, size_bytes)
        self._window = self._window._replace(
            arena=arena,
            kept=grown(self._window.kept, len(arena) * _GROWTH),
            scratch=grown(self._window.scratch, len(arena)),
        )

    def _pack_chunk(self) -> None:
        """Compress the survivors of the chunk's batches whose codec the kernel does not support.

        Then make room for the output of the whole chunk, of which nothing is written yet.
        """
        window, walk = self._window, self._window.walk
        cells, view, retained = window.rows.data, window.buf.data, window.kept.data
        pieces: list[bytes | memoryview] = []
        end = 0
        rows = range(int(walk[NEXT]) * ROW_WORDS, int(walk[CHUNK_END]) * ROW_WORDS, ROW_WORDS)
        for row in rows:
            if cells[row + PACKED_END] != PACK_PENDING:
                continue
            codec = view[cells[row + POSITION] + CODEC_POSITION] & ATTR_CODEC
            records = retained[cells[row + KEPT_AT] : cells[row + KEPT_END]]
            pieces.append(compress(codec, records, self._levels.get(codec)))
            cells[row + PACKED_AT] = end
            end += len(pieces[-1])
            cells[row + PACKED_END] = end
        packed = grown(window.packed, end)
        packed.data[:end] = b"".join(pieces)
        out = grown(window.out, int(walk[CHUNK_BYTES]) + int(walk[FRAME_BYTES_MAX]) + end)
        self._window = window._replace(packed=packed, out=out)

    def _swap_piece(self) -> None:
        """Make room for the chunk's output; spill it if it exceeds a whole piece."""
        walk, state, buffered = self._window.walk, self._context.state, self._buffered
        charge = self._context.charge_write
        buffered_from, written = int(walk[BUFFERED_FROM]), int(state[fields.WRITTEN])
        if buffered_from < len(buffered.memory):
            buffered.swap_piece(buffered_from, charge)
        if written > len(buffered.memory):
            buffered.spill(self._window.out[:written], charge)
            state[fields.WRITTEN] = 0
        self._buffer_in_memory()

    def _buffer_in_memory(self) -> None:
        """Buffer survivors in the present, empty piece."""
        self._window = self._window._replace(buffered=self._buffered.memory)
        self._window.walk[BUFFERED_FROM] = len(self._buffered.memory)
