"""Buffer the output of a group, which arrives newest first, until it can be written in order.

Rules
- The output consists of pieces, the newest first. A piece is in order, and filled from its end.
  There is memory for PIECES of them; further ones move to a scratch file, the newest first.
- Pieces are written in the background; their memory is reused afterwards.
- The scratch file's name (filenames.py) makes it one of the job's files: it is removed with them.
- A piece that is read back is compared with the checksum of what was written: the checksum of an
  output would cover a wrong byte.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import numpy as np
from crc32c import crc32c

from cleaner.engine.background_writes import BackgroundWrites
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Bytes
from cleaner.engine.output import CleanedOutput, OutputBuffers
from cleaner.engine.spilled.scratch import DamagedScratchError
from storage.env import Env, File
from storage.format import filenames

BUFFERED_BYTES: Final = 24 << 20  # the survivors of a few segments, in the common case
PIECES: Final = 3
_SCRATCH: Final = 0  # the number of the scratch file


class BufferedOutput:
    """The memory and the scratch file, used by one group after the other."""

    def __init__(self, env: Env, directory: str, job_id: str, background: BackgroundWrites) -> None:
        self.piece_bytes = BUFFERED_BYTES // PIECES
        self._free: list[Bytes] = [np.empty(self.piece_bytes, np.uint8) for _ in range(PIECES)]
        self._leaving: deque[tuple[Future[None], Bytes]] = deque()  # being written
        self._closed: deque[tuple[Bytes, int]] = deque()  # (piece, start of the data)
        self._background = background
        self._env = env
        self._directory = directory
        self._job_id = job_id
        self._file: File | None = None
        self._spilled: list[tuple[int, int]] = []  # sizes in bytes, CRCs; newer than `_closed`
        self._spilled_bytes = 0
        self.memory: Bytes = self._free.pop()  # the piece that is being filled

    def size_bytes(self, buffered_from: int) -> int:
        """Return the size of all pieces, including `memory[buffered_from:]`."""
        closed_bytes = sum(len(piece) - begin for piece, begin in self._closed)
        return self._spilled_bytes + closed_bytes + len(self.memory) - buffered_from

    def swap_piece(self, buffered_from: int, charge: Callable[[int], None]) -> None:
        """Start another piece, older than `memory[buffered_from:]`. Raises OSError.

        `charge` is called before bytes are written.
        """
        self._closed.append((self.memory, buffered_from))
        if not self._free and not self._leaving:
            self._spill_newest(charge)
        self.memory = self._next_piece()

    def spill(self, data: Bytes, charge: Callable[[int], None]) -> None:
        """Spill `data`, which is too large for a piece; `memory` is empty. Raises OSError."""
        while self._closed:
            self._spill_newest(charge)
        self._to_scratch(data, charge)

    def write_out(
        self,
        buffered_from: int,
        output: CleanedOutput,
        buffers: OutputBuffers,
        charge: Callable[[int], None],
    ) -> None:
        """Write everything to `output` through `buffers`, the oldest first.

        `charge` is called before bytes are read back. Raises OSError, DamagedScratchError.
        """
        self._release_piece(self.memory, (buffered_from, len(self.memory)), output, buffers)
        while self._closed:
            piece, begin = self._closed.pop()
            self._release_piece(piece, (begin, len(piece)), output, buffers)
        position = self._spilled_bytes
        for size, crc in reversed(self._spilled):
            assert self._file is not None
            position -= size
            is_giant = size > self.piece_bytes
            if is_giant:
                buffers.resize(size)
            piece = np.empty(size, np.uint8) if is_giant else self._next_piece()
            charge(size)
            actual = self._file.pread_into(piece.data[:size], position)
            if actual < size or crc32c(piece.data[:size]) != crc:
                raise DamagedScratchError(self._file.path, position)
            self._release_piece(piece, (0, size), output, buffers)
            if is_giant:  # at most one in memory
                self._leaving.pop()[0].result()
        self.memory = self._next_piece()
        self.clear()

    def clear(self) -> None:
        """Drop all pieces and remove the scratch file."""
        self._free += [piece for piece, _ in self._closed]
        self._closed.clear()
        self._spilled.clear()
        self._spilled_bytes = 0
        file, self._file = self._file, None
        if file is not None:
            file.close()
            self._env.unlink(file.path)

    def _release_piece(
        self, piece: Bytes, part: tuple[int, int], output: CleanedOutput, buffers: OutputBuffers
    ) -> None:
        """Index a piece and write it in the background."""
        begin, end = part
        if begin == end:
            self._free.append(piece)
            return
        buffers.batches = piece[begin:end]
        output.state[fields.WRITTEN] = end - begin
        output.flush()
        self._leaving.append((self._background.latest_write, piece))

    def _next_piece(self) -> Bytes:
        """Return a free piece; wait for a write if there is none. Raises OSError."""
        while self._leaving and (not self._free or self._leaving[0][0].done()):
            write, piece = self._leaving.popleft()
            write.result()
            self._free.append(piece)
        return self._free.pop()

    def _spill_newest(self, charge: Callable[[int], None]) -> None:
        piece, begin = self._closed.popleft()
        self._to_scratch(piece[begin:], charge)
        self._free.append(piece)

    def _to_scratch(self, data: Bytes, charge: Callable[[int], None]) -> None:
        if len(data) == 0:
            return
        if self._file is None:
            name = filenames.scratch_name(_SCRATCH, self._job_id)
            path = f"{self._directory}/{name}"
            self._file = self._env.open(path, create=True, write=True, truncate=True)
        charge(len(data))
        self._file.pwrite(data.data, self._spilled_bytes)
        self._spilled.append((len(data), crc32c(data.data)))
        self._spilled_bytes += len(data)
