"""Compare the offset index of a segment with its batches.

A consumer asks for an offset, and the broker begins to look at the position of the last entry up to
that offset. So an entry is right if a batch begins at its position, and all batches before it end
below its offset. Other entries would make a consumer miss records, or fail.
"""

import numpy as np

from cleaner.engine.kernels.compile import Bytes, Ints
from cleaner.engine.kernels.layout import HEADER_BYTES
from cleaner.engine.kernels.passes.blocks import BLOCK_WORDS, add_blocks
from storage.format.index import OffsetIndex


class OffsetIndexCheck:
    """Checks an index against the batches of its segment, which come in order."""

    def __init__(self, index: OffsetIndex, base_offset: int) -> None:
        self._offsets: Ints = np.array(index.offsets, dtype=np.int64) + base_offset
        self._positions: Ints = np.array(index.positions, dtype=np.int64)
        self._checked = 0  # entries
        self._wrong = 0
        self._last_offset = -1  # of the batches so far
        self._batches: Ints = np.empty(0, dtype=np.int64)

    def note(self, buffer: Bytes, begin: int, end: int, position: int) -> None:
        """Take batches; see NoteBatches (segment_scan.py)."""
        if begin == end:
            return
        room = 2 + (end - begin) // HEADER_BYTES
        if len(self._batches) < room * BLOCK_WORDS:
            self._batches = np.empty(room * BLOCK_WORDS, dtype=np.int64)
        count = int(add_blocks(buffer, begin, end, position, self._batches, 0, 1))
        batches = self._batches[: count * BLOCK_WORDS].reshape(count, BLOCK_WORDS)
        starts, lasts = batches[:, 0], batches[:, 2]
        stop = int(np.searchsorted(self._positions, position + end - begin))
        offsets = self._offsets[self._checked : stop]
        positions = self._positions[self._checked : stop]
        places = np.searchsorted(starts, positions, side="right") - 1
        before = np.concatenate(([self._last_offset], lasts))[places]
        is_right = (starts[places] == positions) & (before < offsets)
        self._wrong += int(len(offsets) - is_right.sum())
        self._checked = max(self._checked, stop)
        self._last_offset = int(lasts[-1])

    @property
    def wrong(self) -> int:
        """Return how many entries are wrong, those after the last batch included."""
        return self._wrong + len(self._offsets) - self._checked
