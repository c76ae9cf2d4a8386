"""The output of a group that comes newest first, held until it can be laid down in order.

Rules
- `memory[held_from:]` is the oldest stretch so far, filled from its end. When there is no room left
  it moves to a scratch file: stretch after stretch, each in order, the newest first.
- The scratch file is named as one of the run's cleaned files (with the one kind that no cleaned
  segment has), so whatever removes those removes it too. It is never synced and never published.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Bytes
from cleaner.engine.output import CleanedOutput, OutputBuffers
from storage import filenames
from storage.env import Env, File

HELD_BYTES: Final = 16 << 20  # the survivors of a few segments, in the common case


class HeldOutput:
    """Memory and scratch file, used by one group after the other."""

    def __init__(self, env: Env, directory: str, run_id: str) -> None:
        self.memory: Bytes = np.empty(HELD_BYTES, dtype=np.uint8)
        self._env = env
        self._directory = directory
        self._run_id = run_id
        self._file: File | None = None
        self._pieces: list[int] = []  # sizes in bytes, the newest first
        self._spilled_bytes = 0

    def size_bytes(self, held_from: int) -> int:
        """All that is held."""
        return self._spilled_bytes + len(self.memory) - held_from

    def spill(self, data: Bytes, base_offset: int, charge: Callable[[int], None]) -> None:
        """Move `data`, which comes before everything that was spilled so far. Raises OSError."""
        if len(data) == 0:
            return
        if self._file is None:
            name = filenames.cleaned_name(base_offset, filenames.SNAPSHOT, self._run_id)
            path = f"{self._directory}/{name}"
            self._file = self._env.open(path, create=True, write=True, truncate=True)
        charge(len(data))
        self._file.pwrite(data.data, self._spilled_bytes)
        self._pieces.append(len(data))
        self._spilled_bytes += len(data)

    def lay_down(
        self,
        held_from: int,
        output: CleanedOutput,
        buffers: OutputBuffers,
        charge: Callable[[int], None],
    ) -> None:
        """Hand everything to `output`, the oldest first; `buffers` are what it writes from.

        `charge` is told of bytes before they are read back. Raises OSError.
        """
        buffers.batches = self.memory[held_from:]
        output.state[fields.WRITTEN] = len(self.memory) - held_from
        output.flush()
        position = self._spilled_bytes
        for size in reversed(self._pieces):
            assert self._file is not None
            position -= size
            piece = self.memory[:size] if size <= len(self.memory) else np.empty(size, np.uint8)
            charge(size)
            got = self._file.pread_into(piece.data, position)
            assert got == size
            buffers.batches = piece
            output.state[fields.WRITTEN] = size
            output.flush()
        self.forget()

    def forget(self) -> None:
        """Hold nothing; the scratch file goes."""
        self._pieces.clear()
        self._spilled_bytes = 0
        file, self._file = self._file, None
        if file is not None:
            file.close()
            self._env.unlink(file.path)
