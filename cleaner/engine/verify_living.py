"""Offsets of the living records of a job, in a scratch file: found share by share of the keys.

Rules
- The file is runs of ascending int64, one behind the other, in any order of their own. Every
  offset stands in one run at most.
- Memory: one piece of a run, whatever their number; 16 bytes are remembered for each run.
- The file is named as one of the run's cleaned files (with the one kind that no cleaned segment
  has), so whatever removes those removes it too. It is never synced.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from cleaner.engine.kernels.compile import Bytes, Ints, Words
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.kernels.verify import set_bits
from storage.env import Env, File

WINDOW_OFFSETS: Final = 1 << 27  # of the bitmap at a time: 16 MiB
_PIECE: Final = 1 << 18  # offsets read, or slots looked at, at a time: 2 MiB
_WORD: Final = 8


class LivingOffsets:
    """A SurvivorSource (context.py). Removed by `close`."""

    def __init__(self, env: Env, path: str, charge: Callable[[int], None]) -> None:
        """`charge` is told of bytes before they are written or read back. Raises OSError."""
        self.keyless_met = False
        self._env = env
        self._charge = charge
        self._file: File = env.open(path, create=True, write=True, truncate=True)
        self._runs: list[tuple[int, int]] = []  # [begin, end), counted in offsets
        self._end = 0
        self._last = -1  # of the last run
        self._piece: Ints = np.empty(_PIECE, dtype=np.int64)

    def add(self, offsets: Ints) -> None:
        """Ascending ones: a run, or more of the last one where that goes on. Raises OSError."""
        if len(offsets) == 0:
            return
        self._charge(len(offsets) * _WORD)
        self._file.pwrite(np.ascontiguousarray(offsets).view(np.uint8).data, self._end * _WORD)
        begin = self._end
        if self._runs and self._last < offsets[0]:
            begin, _ = self._runs.pop()
        self._end += len(offsets)
        self._last = int(offsets[-1])
        self._runs.append((begin, self._end))

    def add_map(self, table: Words, slots: int) -> None:
        """All offsets in the first `slots` slots of a map. Raises OSError."""
        for slot in range(0, slots, _PIECE):
            end = min(slot + _PIECE, slots)
            values = table[slot * SLOT_WORDS + 2 : end * SLOT_WORDS : SLOT_WORDS]
            living = values[values != 0].view(np.int64) - 1
            living.sort()
            self.add(living)

    def window(self, first: int, last: int) -> tuple[int, int]:
        """See SurvivorSource."""
        return first, max(first + WINDOW_OFFSETS, last + 1)

    def mark(self, bits: Bytes, first: int, end: int) -> None:
        """See SurvivorSource. Raises OSError."""
        for begin, stop in self._runs:
            at = self._position(begin, stop, first)
            while at < stop:
                count = min(stop - at, len(self._piece))
                self._read(at, count)
                inside = int(np.searchsorted(self._piece[:count], end))
                set_bits(bits, self._piece, inside, first)
                if inside < count:
                    break
                at += count

    def _position(self, begin: int, stop: int, offset: int) -> int:
        """Where in a run the first offset stands that is not below `offset`."""
        while stop - begin > len(self._piece):
            middle = (begin + stop) // 2
            self._read(middle, 1)
            if self._piece[0] < offset:
                begin = middle
            else:
                stop = middle
        self._read(begin, stop - begin)
        return begin + int(np.searchsorted(self._piece[: stop - begin], offset))

    def _read(self, at: int, count: int) -> None:
        self._charge(count * _WORD)
        view = self._piece[:count].view(np.uint8).data
        got = self._file.pread_into(view, at * _WORD)
        assert got == len(view)

    def close(self) -> None:
        """The file goes. Raises OSError."""
        self._file.close()
        self._env.unlink(self._file.path)
